"""Local folders that are nested, empty or accessed through symbolic links."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    FileMissingError,
    InvalidInputError,
    LakehouseNotFoundError,
    LocationNotAllowedError,
    StorageError,
)
from trinitylake_ops.storage import LocalStorage, background, open_storage
from trinitylake_ops.storage.local.posix_files import check_can_hold, lies_within


def root_uri(folder: Path) -> str:
    return f"file://{folder}/"


@pytest.fixture
def storage_without_links(tmp_path: Path) -> LocalStorage:
    """A storage that does not follow links, with a root behind a link and all kinds of links below it."""
    folder = tmp_path / "disk" / "lake"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_bytes(b"0123")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "file").write_bytes(b"secret")
    (folder / "file-link").symlink_to(tmp_path / "secret")
    (folder / "a" / "folder-link").symlink_to(tmp_path / "secrets")
    (folder / "a" / "inner-link").symlink_to(folder / "a" / "b")
    (tmp_path / "linked").symlink_to(tmp_path / "disk")
    return LocalStorage(root_uri(tmp_path / "linked" / "lake"), follows_links=False)


def test_no_link_below_the_root_is_followed(storage_without_links: LocalStorage) -> None:
    assert storage_without_links.read("a/b/file") == b"0123"
    assert storage_without_links.read("a/b/file", offset=1, length=2) == b"12"
    for path in ("file-link", "a/folder-link/file", "a/inner-link/file"):
        with pytest.raises(LocationNotAllowedError) as caught:
            storage_without_links.read(path)
        assert caught.value.path == path
        assert isinstance(storage_without_links.read_available([path])[0], LocationNotAllowedError)
    for path in ("missing", "missing/file", "a/b/file/below", "a/b"):
        with pytest.raises(FileMissingError):
            storage_without_links.read(path)
    with pytest.raises(FileMissingError):
        storage_without_links.stat("file-link")


def test_links_are_followed_by_default_and_pickles_keep_the_option(storage_without_links: LocalStorage) -> None:
    assert LocalStorage(storage_without_links.root).read("a/folder-link/file") == b"secret"
    assert open_storage(storage_without_links.root, {}).read("file-link") == b"secret"
    for copy in (
        pickle.loads(pickle.dumps(storage_without_links)),
        open_storage(storage_without_links.root, {"file.follow_links": "false"}),
    ):
        with pytest.raises(LocationNotAllowedError):
            copy.read("file-link")


def test_files_behind_links_are_not_deleted_or_written(storage_without_links: LocalStorage, tmp_path: Path) -> None:
    """This includes a folder that became a link after it was listed."""
    contents_before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path in ("a/folder-link/file", "a/inner-link/file"):
        for operation in (
            storage_without_links.delete,
            lambda name: storage_without_links.create(f"{name}x", b""),
            lambda name: storage_without_links.write(name, b""),
        ):
            with pytest.raises(LocationNotAllowedError):
                operation(path)
        assert isinstance(storage_without_links.delete_many([path])[path], LocationNotAllowedError)
    storage_without_links.delete("missing/file")
    storage_without_links.remove_empty_folders(["a/folder-link/file", "a/inner-link/file"])
    assert {path: path.read_bytes() for path in contents_before if path.is_file()} == contents_before
    storage_without_links.delete("file-link")
    assert (tmp_path / "secret").read_bytes() == b"secret"
    storage_without_links.create("a/b/new", b"x")
    (tmp_path / "disk" / "lake" / "_ops" / "tmp").rmdir()
    (tmp_path / "disk" / "lake" / "_ops" / "tmp").symlink_to(tmp_path / "secrets")
    with pytest.raises(LocationNotAllowedError):
        storage_without_links.create("a/b/newer", b"x")
    assert {path.name for path in (tmp_path / "secrets").iterdir()} == {"file"}


def test_no_operation_leaks_a_file_descriptor(storage_without_links: LocalStorage) -> None:
    n_open_before = len(os.listdir("/proc/self/fd"))
    for path in ("a/b/file", "file-link", "a/folder-link/file", "missing/file", "a/b/file/below"):
        try:
            storage_without_links.read(path)
        except StorageError:
            continue
    assert len(os.listdir("/proc/self/fd")) == n_open_before


def test_lies_within_resolves_links(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    (tmp_path / "lake" / "up").symlink_to(tmp_path)
    lake = root_uri(tmp_path / "lake")
    for inside in ("lake", "lake/new", "link", "link/new/er", "lake/up/lake/x"):
        assert lies_within(root_uri(tmp_path / inside), lake)
    for outside in ("lakes", "other/lake", "link/up/other", ""):
        assert not lies_within(root_uri(tmp_path / outside), lake)
    assert lies_within("memory://a/b/", "memory://a/")
    assert not lies_within("s3://a/b/", lake)


def test_check_can_hold_rejects_unwritable_targets(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    for writable in ("", "new", "new/er"):
        check_can_hold(root_uri(tmp_path / writable))
    check_can_hold("file:///")
    for unwritable in ("file", "file/below", "dangling", "dangling/below"):
        with pytest.raises(InvalidInputError):
            check_can_hold(root_uri(tmp_path / unwritable))
    check_can_hold("s3://bucket/")


def test_remove_empty_folders_keeps_other_folders(tmp_path: Path) -> None:
    storage = LocalStorage(root_uri(tmp_path / "lake"), fsync=False)
    paths = ["a/b/c/file", "a/d/file", "e/file", "top"]
    for path in [*paths, "e/other"]:
        storage.create(path, b"x")
    storage.delete_many(paths)
    storage.remove_empty_folders(paths)
    assert {path.name for path in (tmp_path / "lake").rglob("*")} == {"e", "other"}
    storage.create("a/b/again", b"x")
    assert storage.read("a/b/again") == b"x"
    storage.delete_many(["e/other", "a/b/again"])
    storage.remove_empty_folders(["e/other", "a/b/again"])
    assert not (tmp_path / "lake").exists()
    storage.remove_empty_folders(["a"])


@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_root_that_is_not_a_folder_is_reported(tmp_path: Path, kind: str, levels: int) -> None:
    parent = tmp_path / "parent"
    lakehouse = Lakehouse.create(root_uri(parent.joinpath(*"ab"[:levels])))
    background.drain()
    shutil.rmtree(parent)
    if kind == "file":
        parent.write_bytes(b"")
    else:
        parent.symlink_to(tmp_path / "missing")
    for read in (lambda: Lakehouse.open(lakehouse.root).snapshot(), lambda: list(LocalStorage(lakehouse.root).list())):
        with pytest.raises(StorageError, match=str(parent)):
            read()


def test_root_without_a_folder_has_no_lakehouse(tmp_path: Path) -> None:
    with pytest.raises(LakehouseNotFoundError):
        Lakehouse.open(root_uri(tmp_path / "missing" / "lake")).snapshot()
