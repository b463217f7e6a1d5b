"""Roots in the memory of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage import MemoryStorage, drop_memory_root


def test_storages_with_the_same_root_share_files() -> None:
    first, second = MemoryStorage("memory://same/"), MemoryStorage("memory://same/")
    first.create("a", b"x")
    assert second.read("a") == b"x"
    assert not MemoryStorage("memory://other/").exists("a")
    drop_memory_root("memory://same/")
    assert list(first.list()) == list(second.list()) == []
    second.create("a", b"y")
    assert first.read("a") == b"y"
    drop_memory_root("memory://same/")


def test_nested_roots_share_files() -> None:
    outer, inner = MemoryStorage("memory://nested/"), MemoryStorage("memory://nested/a/b/")
    inner.create("c", b"x")
    outer.create("a/bc", b"y")
    assert outer.read("a/b/c") == b"x"
    assert [file.path for file in inner.list()] == ["c"]
    drop_memory_root("memory://nested/a/b/")
    assert [file.path for file in outer.list()] == ["a/bc"]
    drop_memory_root("memory://nested/")


@pytest.mark.parametrize("root", ["", "memory://", "memory:///", "memory:///a/", "memory://x", "memory://x/../", "x/"])
def test_invalid_roots_are_rejected(root: str) -> None:
    with pytest.raises(InvalidLocationError):
        MemoryStorage(root)


def test_other_process_has_separate_files() -> None:
    MemoryStorage("memory://process/").create("a", b"x")
    code = "from trinitylake_ops.storage import MemoryStorage; print(list(MemoryStorage('memory://process/').list()))"
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "[]\n"
    drop_memory_root("memory://process/")
