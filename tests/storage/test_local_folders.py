"""Local folders behind links, nested and empty."""

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


def root(folder: Path) -> str:
    return f"file://{folder}/"


@pytest.fixture
def strict(tmp_path: Path) -> LocalStorage:
    """A storage whose root is behind a link, with links of all kinds below it, which are not followed."""
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
    return LocalStorage(root(tmp_path / "linked" / "lake"), follows_links=False)


def test_no_link_below_the_root_is_followed(strict: LocalStorage) -> None:
    assert strict.read("a/b/file") == b"0123"
    assert strict.read("a/b/file", offset=1, length=2) == b"12"
    for path in ("file-link", "a/folder-link/file", "a/inner-link/file"):
        with pytest.raises(LocationNotAllowedError) as caught:
            strict.read(path)
        assert caught.value.path == path
        assert isinstance(strict.read_available([path])[0], LocationNotAllowedError)
    for path in ("missing", "missing/file", "a/b/file/below", "a/b"):
        with pytest.raises(FileMissingError):
            strict.read(path)
    with pytest.raises(FileMissingError):
        strict.stat("file-link")


def test_links_are_followed_by_default_and_pickles_keep_the_option(strict: LocalStorage) -> None:
    assert LocalStorage(strict.root).read("a/folder-link/file") == b"secret"
    assert open_storage(strict.root, {}).read("file-link") == b"secret"
    for other in (pickle.loads(pickle.dumps(strict)), open_storage(strict.root, {"file.follow_links": "false"})):
        with pytest.raises(LocationNotAllowedError):
            other.read("file-link")


def test_files_behind_links_are_not_deleted_or_written(strict: LocalStorage, tmp_path: Path) -> None:
    """This includes a folder that became a link after it was listed."""
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path in ("a/folder-link/file", "a/inner-link/file"):
        for refused in (
            strict.delete,
            lambda name: strict.create(f"{name}x", b""),
            lambda name: strict.write(name, b""),
        ):
            with pytest.raises(LocationNotAllowedError):
                refused(path)
        assert isinstance(strict.delete_many([path])[path], LocationNotAllowedError)
    strict.delete("missing/file")
    strict.remove_empty_folders(["a/folder-link/file", "a/inner-link/file"])
    assert {path: path.read_bytes() for path in before if path.is_file()} == before
    strict.delete("file-link")
    assert (tmp_path / "secret").read_bytes() == b"secret"
    strict.create("a/b/new", b"x")
    (tmp_path / "disk" / "lake" / "_ops" / "tmp").rmdir()
    (tmp_path / "disk" / "lake" / "_ops" / "tmp").symlink_to(tmp_path / "secrets")
    with pytest.raises(LocationNotAllowedError):
        strict.create("a/b/newer", b"x")
    assert {path.name for path in (tmp_path / "secrets").iterdir()} == {"file"}


def test_no_operation_leaks_a_file_descriptor(strict: LocalStorage) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("a/b/file", "file-link", "a/folder-link/file", "missing/file", "a/b/file/below"):
        try:
            strict.read(path)
        except StorageError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


def test_nested_roots_see_their_own_files(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    (tmp_path / "lake" / "up").symlink_to(tmp_path)
    lake = root(tmp_path / "lake")
    for inside in ("lake", "lake/new", "link", "link/new/er", "lake/up/lake/x"):
        assert lies_within(root(tmp_path / inside), lake)
    for outside in ("lakes", "other/lake", "link/up/beside", ""):
        assert not lies_within(root(tmp_path / outside), lake)
    assert lies_within("memory://a/b/", "memory://a/")
    assert not lies_within("s3://a/b/", lake)


def test_check_can_hold_rejects_unwritable_targets(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for fine in ("", "new", "new/er"):
        check_can_hold(root(tmp_path / fine))
    check_can_hold("file:///")
    for taken in ("file", "file/below", "nowhere", "nowhere/below"):
        with pytest.raises(InvalidInputError):
            check_can_hold(root(tmp_path / taken))
    check_can_hold("s3://anything/")


def test_remove_empty_folders_keeps_other_folders(tmp_path: Path) -> None:
    storage = LocalStorage(root(tmp_path / "lake"), fsync=False)
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
    parent = tmp_path / "place"
    lakehouse = Lakehouse.create(root(parent.joinpath(*"ab"[:levels])))
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
        Lakehouse.open(root(tmp_path / "missing" / "lake")).snapshot()
