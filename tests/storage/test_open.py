"""Opening by URI and options."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage import LocalStorage, MemoryStorage, RetryStorage, open_storage


@pytest.mark.parametrize(
    ("options", "fsync"), [(None, True), ({}, True), ({"fsync": "true"}, True), ({"fsync": "false"}, False)]
)
def test_local(tmp_path: Path, options: dict[str, str] | None, fsync: bool) -> None:
    storage = open_storage(f"file://{tmp_path}/lake/", options)
    assert isinstance(storage, RetryStorage)
    assert isinstance(storage.inner, LocalStorage)
    assert storage.inner.fsync is fsync
    assert storage.root == f"file://{tmp_path}/lake/"
    assert list(tmp_path.iterdir()) == []


def test_memory() -> None:
    storage = open_storage("memory://opened/")
    assert isinstance(storage, RetryStorage)
    assert isinstance(storage.inner, MemoryStorage)


@pytest.mark.parametrize("root", ["", "/tmp/x/", "ftp://user:secret@host/x/", "FILE:///x/", "file", "s4://bucket/"])
def test_unknown_schemes(root: str) -> None:
    with pytest.raises(InvalidLocationError, match=r"roots start with file:// and memory://") as caught:
        open_storage(root)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("root", ["file:///x", "file://host/x/", "file:///a/../", "memory:///", "memory://x"])
def test_roots_that_are_not_normalised(root: str) -> None:
    with pytest.raises(InvalidLocationError):
        open_storage(root)


@pytest.mark.parametrize(
    ("root", "options", "message"),
    [
        ("file:///x/", {"sync": "true"}, r"unknown storage option 'sync': file:// supports fsync"),
        ("memory://x/", {"fsync": "true"}, r"unknown storage option 'fsync': memory:// supports none"),
        ("file:///x/", {"fsync": "yes"}, r"'fsync' must be 'true' or 'false', not 'yes'"),
        ("file:///x/", {"fsync": ""}, r"'fsync' must be 'true' or 'false', not ''"),
    ],
)
def test_bad_options(root: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_storage(root, options)
