"""Failures that are specific to the local file system."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.module_time import replace_time_functions
from tests.storage.file_systems import file_size_limit, mounted_read_only, read_only_modes, small_disk
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidLocationError,
    LocationNotAllowedError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.storage import LocalStorage, background
from trinitylake_ops.storage.contract.suite import run_together
from trinitylake_ops.storage.local import posix_files
from trinitylake_ops.storage.local.errors import storage_error

WRITES: list[Callable[[LocalStorage, str, bytes], None]] = [LocalStorage.create, LocalStorage.write]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can access, unlike ``tmp_path``."""
    path = Path(tempfile.mkdtemp(prefix="trinitylake-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# --- roots ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "root",
    ["", "/tmp/x/", "file:/x/", "file://x/", "file://host/x/", "file:///x", "file:///x//", "file:///a/../b/",
     "file:///./", "file:///nul\0/", "FILE:///x/", "memory://x/"],
)  # fmt: skip
def test_invalid_roots_are_rejected(root: str) -> None:
    with pytest.raises(InvalidLocationError) as caught:
        LocalStorage(root)
    assert any(word in str(caught.value) for word in ("form file://", "file:///FOLDER/", "segments", "NUL"))


def test_root_is_literal_and_created_on_demand(tmp_path: Path) -> None:
    storage = LocalStorage(f"file://{tmp_path}/a%20b/#c/d?e/")
    assert list(storage.list()) == []
    assert not storage.exists("x")
    storage.delete("x")
    assert list(tmp_path.iterdir()) == []
    storage.create("%41", b"x")
    assert (tmp_path / "a%20b" / "#c" / "d?e" / "%41").read_bytes() == b"x"


# --- atomic writes -----------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("failing_call", ["write", "fsync", "link", "replace"])
def test_failed_writes_leave_no_file(
    storage: LocalStorage,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[LocalStorage, str, bytes], None],
    failing_call: str,
) -> None:
    storage.create("warm/up", b"x")
    if failing_call in ("link", "replace"):
        failing_call = "link" if write is LocalStorage.create else "replace"

    def fail(*arguments: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, failing_call, fail)
    with pytest.raises(StorageFullError):
        write(storage, "warm/new", b"y")
    assert tree(folder) == {"warm/up"}


@pytest.mark.parametrize("write", WRITES)
def test_short_writes_are_continued(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, write: Callable[[LocalStorage, str, bytes], None]
) -> None:
    original_write, original_read = os.write, os.pread
    monkeypatch.setattr(os, "write", lambda descriptor, data: original_write(descriptor, data[:3]))
    monkeypatch.setattr(os, "pread", lambda descriptor, n, at: original_read(descriptor, min(n, 3), at))
    write(storage, "name", b"0123456789")
    assert storage.read("name") == b"0123456789"
    assert storage.read("name", offset=2, length=7) == b"2345678"


def test_fsync_of_file_folder_and_new_parents(
    storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    original_fsync = os.fsync

    def record_fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    storage.create("a/b/name", b"x")
    names = [name.removeprefix(str(folder.parent)) for name in synced]
    assert {"", "/lake", "/lake/_ops", "/lake/a", "/lake/a/b"} <= set(names)
    temporary_files = [name for name in names if name.startswith("/lake/_ops/tmp/")]
    assert len(temporary_files) == 1
    assert names[0] == temporary_files[0], "the temporary file is synced first, and the folders after it"
    synced.clear()
    storage.write("a/b/name", b"y")
    assert len(synced) == 2  # the file and its folder
    # A folder that another process created may not be synced yet.
    synced.clear()
    LocalStorage(storage.root).create("a/b/other", b"z")
    assert str(folder / "a") in synced
    synced.clear()
    LocalStorage(storage.root, fsync=False).create("c/d/other", b"z")
    assert synced == []


@pytest.mark.parametrize("write", WRITES)
def test_failed_sync_of_the_folder_is_ambiguous(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, write: Callable[[LocalStorage, str, bytes], None]
) -> None:
    storage.create("a/warm", b"")

    def fail(name: bytes) -> None:
        raise OSError(errno.EIO, "device")

    monkeypatch.setattr("trinitylake_ops.storage.local.storage.sync_folder", fail)
    with pytest.raises(AmbiguousWriteError):
        write(storage, "a/name", b"x")
    assert storage.read("a/name") == b"x"


@pytest.mark.parametrize(("write", "call"), [(LocalStorage.create, "link"), (LocalStorage.write, "replace")])
def test_timeout_of_the_last_step_is_ambiguous(
    storage: LocalStorage,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[LocalStorage, str, bytes], None],
    call: str,
) -> None:
    original_call = getattr(os, call)

    def time_out(source: bytes, target: bytes) -> None:
        original_call(source, target)
        raise OSError(errno.ETIMEDOUT, "timed out")

    monkeypatch.setattr(os, call, time_out)
    with pytest.raises(AmbiguousWriteError) as caught:
        write(storage, "name", b"x")
    assert caught.value.path == "name"
    assert tree(folder) == {"name"}


def test_link_repeated_by_a_network_file_system_succeeds(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_link = os.link

    def link_twice(source: bytes, target: bytes) -> None:
        original_link(source, target)
        original_link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    storage.create("name", b"x")
    assert storage.read("name") == b"x"


# --- file systems without hard links ----------------------------------------------------------


@pytest.mark.parametrize("error_number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_exclusive_rename_replaces_missing_hard_links(
    storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    def fail_to_link(source: bytes, target: bytes) -> None:
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(os, "link", fail_to_link)
    outcomes = run_together([lambda i=i: storage.create("name", str(i).encode()) for i in range(16)])  # type: ignore[misc]
    assert storage.read("name") == str(outcomes.index(None)).encode()
    assert sum(isinstance(outcome, FileExistsAlreadyError) for outcome in outcomes) == 15
    assert tree(folder) == {"name"}


def test_file_system_without_links_and_exclusive_renames_is_rejected(
    storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LibraryWithoutRename:
        def __init__(self, name: None, use_errno: bool):
            assert use_errno

    def fail_to_link(source: bytes, target: bytes) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", fail_to_link)
    monkeypatch.setattr(ctypes, "CDLL", LibraryWithoutRename)
    with pytest.raises(StorageError) as caught:
        storage.create("name", b"x")
    assert caught.value.path == "name"
    assert tree(folder) == set()


# --- folders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITES)
def test_removed_folders_are_recreated(
    storage: LocalStorage, folder: Path, write: Callable[[LocalStorage, str, bytes], None]
) -> None:
    for removed in ("a/b", "a", "_ops/tmp", "_ops", "."):
        storage.write("a/b/old", b"x")
        shutil.rmtree(folder / removed)
        name = f"a/b/without-{removed.replace('/', '-')}"
        write(storage, name, b"x")
        assert storage.read(name) == b"x"


def test_write_fails_if_its_folder_keeps_being_deleted(
    storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_find(source: bytes, target: bytes) -> None:
        raise FileNotFoundError(errno.ENOENT, "missing")

    monkeypatch.setattr(os, "link", fail_to_find)
    with pytest.raises(TransientError):
        storage.create("a/name", b"x")
    assert tree(folder) == set()


@pytest.mark.parametrize("write", WRITES)
def test_conflicts_between_files_and_folders_are_reported(
    storage: LocalStorage, folder: Path, write: Callable[[LocalStorage, str, bytes], None]
) -> None:
    storage.create("file", b"x")
    (folder / "folder" / "sub").mkdir(parents=True)
    with pytest.raises(StorageError):
        write(storage, "file/below", b"x")
    with pytest.raises(StorageError) as caught:
        write(storage, "folder", b"x")
    assert not isinstance(caught.value, FileExistsAlreadyError)
    storage.delete("folder")
    assert (folder / "folder" / "sub").is_dir()
    assert tree(folder) == {"file"}


def test_too_long_name_is_rejected(storage: LocalStorage, folder: Path) -> None:
    operations: list[Callable[[], object]] = [
        lambda: storage.create("x" * 256, b""),
        lambda: storage.write("x" * 256, b""),
        lambda: storage.read("x" * 256),
        lambda: storage.stat("ü" * 128),
        lambda: storage.delete("x" * 256),
    ]
    for operation in operations:
        with pytest.raises(InvalidLocationError):
            operation()
    assert tree(folder) == set()


# --- listing ----------------------------------------------------------------------------------


def test_list_yields_no_links_pipes_or_undecodable_names(storage: LocalStorage, folder: Path, tmp_path: Path) -> None:
    storage.create("real/file", b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"x")
    (folder / "linked").symlink_to(tmp_path / "outside")
    (folder / "real" / "up").symlink_to(folder)
    (folder / "linked-file").symlink_to(folder / "real" / "file")
    (folder / "dangling").symlink_to(folder / "missing")
    os.mkfifo(folder / "pipe")
    with open(os.fsencode(folder) + b"/\xff\xfe", "wb"):
        pass
    assert [file.path for file in storage.list()] == ["real/file"]
    for prefix in ("linked/", "linked/s", "real/up/", "real/up/real/"):
        assert list(storage.list(prefix)) == []
    assert not storage.is_linked("real/file")
    for path in ("linked/secret", "linked-file", "real/up/real/file", "dangling"):
        assert storage.is_linked(path)
    with pytest.raises(FileMissingError):
        storage.read("pipe")
    with pytest.raises(FileMissingError):
        storage.stat("pipe")


def test_root_may_be_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    storage = LocalStorage(f"file://{tmp_path}/link/lake/")
    storage.create("a/b", b"x")
    assert [file.path for file in storage.list()] == ["a/b"]
    assert (tmp_path / "target" / "lake" / "a" / "b").exists()


def test_listing_is_lazy(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        storage.write(f"{number}/name", b"")
    n_scans = 0
    original_scandir = os.scandir

    def counting_scandir(name: bytes) -> object:
        nonlocal n_scans
        n_scans += 1
        return original_scandir(name)

    monkeypatch.setattr(os, "scandir", counting_scandir)
    files = storage.list()
    next(files)
    assert n_scans == 2  # the root and one folder
    assert len(list(files)) == 49


def test_listing_ignores_deleted_files_and_folders(storage: LocalStorage, folder: Path) -> None:
    for number in range(20):
        storage.write(f"flat/{number}", b"")
        storage.write(f"deep/{number}/name", b"")
    flat = storage.list("flat/")
    next(flat)
    shutil.rmtree(folder / "flat")
    assert len(list(flat)) <= 19
    deep = storage.list("deep/")
    next(deep)
    shutil.rmtree(folder / "deep")
    assert list(deep) == []


# --- system errors ---------------------------------------------------------------------


def check_writes_are_rejected(storage: LocalStorage) -> None:
    operations: list[Callable[[], object]] = [
        lambda: storage.create("a/new", b"x"),
        lambda: storage.create("new/folder", b"x"),
        lambda: storage.write("a/old", b"x"),
        lambda: storage.delete("a/old"),
        lambda: LocalStorage(storage.root).create("a/new", b"x"),
    ]
    for operation in operations:
        with pytest.raises(StoragePermissionError) as caught:
            operation()
        assert caught.value.path is not None
        assert "\n" not in str(caught.value)
    with pytest.raises(FileMissingError):
        storage.read("a/new")
    assert storage.read("a/old") == b"old"
    assert [file.path for file in storage.list()] == ["a/old"]


def test_read_only_mount_rejects_writes(open_folder: Path) -> None:
    storage = LocalStorage(f"file://{open_folder}/")
    storage.create("a/old", b"old")
    with mounted_read_only(open_folder):
        check_writes_are_rejected(storage)
    assert tree(open_folder) == {"a/old"}


def test_read_only_folder_rejects_writes(open_folder: Path) -> None:
    storage = LocalStorage(f"file://{open_folder}/")
    storage.create("a/old", b"old")
    with read_only_modes(open_folder):
        check_writes_are_rejected(storage)
    assert tree(open_folder) == {"a/old"}


def test_unreadable_folder_and_file_are_reported(open_folder: Path) -> None:
    storage = LocalStorage(f"file://{open_folder}/")
    storage.create("a/old", b"old")
    storage.create("closed/name", b"old")
    (open_folder / "a" / "old").chmod(0)
    with read_only_modes(open_folder), pytest.raises(StoragePermissionError):
        storage.read("a/old")
    (open_folder / "closed").chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(StoragePermissionError, match="'closed/'"):
            list(storage.list())
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        (open_folder / "closed").chmod(0o755)


def check_full_storage(storage: LocalStorage, folder: Path) -> None:
    storage.write("a/old", b"old")
    for write in WRITES:
        with pytest.raises(StorageFullError):
            write(storage, "a/new", b"x" * (3 << 20))
    with pytest.raises(StorageFullError):
        storage.write("a/old", b"x" * (3 << 20))
    assert tree(folder) == {"a/old"}
    assert storage.read("a/old") == b"old"
    storage.create("a/new", b"small")
    assert storage.read("a/new") == b"small"


def test_full_disk_is_reported(storage: LocalStorage, folder: Path) -> None:
    with small_disk(folder, size_bytes=1 << 20):
        check_full_storage(storage, folder)


def test_exceeded_file_size_limit_is_reported(storage: LocalStorage, folder: Path) -> None:
    with file_size_limit(1 << 20):
        check_full_storage(storage, folder)


@pytest.mark.parametrize(
    ("error_number", "error_type"),
    [
        (errno.ENOENT, FileMissingError),
        (errno.ENOTDIR, FileMissingError),
        (errno.EEXIST, FileExistsAlreadyError),
        (errno.EACCES, StoragePermissionError),
        (errno.EPERM, StoragePermissionError),
        (errno.EROFS, StoragePermissionError),
        (errno.ENOSPC, StorageFullError),
        (errno.EDQUOT, StorageFullError),
        (errno.EFBIG, StorageFullError),
        (errno.EMFILE, TransientError),
        (errno.ENFILE, TransientError),
        (errno.EAGAIN, TransientError),
        (errno.EINTR, TransientError),
        (errno.ENAMETOOLONG, InvalidLocationError),
        (errno.EISDIR, StorageError),
        (errno.ELOOP, LocationNotAllowedError),
        (errno.EIO, StorageError),
        (errno.EXDEV, StorageError),
        (errno.EOPNOTSUPP, StorageError),
    ],
)
def test_errors_have_the_expected_classes(error_number: int, error_type: type[TrinityLakeError]) -> None:
    error = storage_error(OSError(error_number, os.strerror(error_number)), "file:///lake/", "a/b", "read")
    assert type(error) is error_type
    assert error.path == "a/b"
    assert "'a/b'" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("target", ["missing", "/proc/self"])
def test_link_to_an_unwritable_folder_is_a_permanent_error(storage: LocalStorage, target: str) -> None:
    """A retry would only delay the writers that wait for this write."""
    storage.create("tables/x/first", b"x")
    folder = Path(storage.root.removeprefix("file://"))
    (folder / "tables/x/metadata").symlink_to(target)
    for write in (storage.create, storage.write):
        with pytest.raises(StorageError) as raised:
            write("tables/x/metadata/0.json", b"x")
        assert not isinstance(raised.value, TransientError)
        assert raised.value.path == "tables/x/metadata/0.json"
    assert [info.path for info in storage.list()] == ["tables/x/first"]


def test_every_open_file_is_closed(storage: LocalStorage) -> None:
    def n_open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    storage.create("a/name", b"x")
    n_open_before = n_open_files()
    for _ in range(20):
        storage.read("a/name")
        storage.write("a/name", b"y")
        with pytest.raises(FileExistsAlreadyError):
            storage.create("a/name", b"z")
        with pytest.raises(FileMissingError):
            storage.read("a")
        list(storage.list())
    assert n_open_files() == n_open_before


def test_now_ms_agrees_with_modification_times(storage: LocalStorage) -> None:
    storage.create("name", b"x")
    assert abs(storage.now_ms() - storage.stat("name").last_modified_ms) < 5000


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("ahead_s", [10 * 365 * 86_400, -7200])
def test_write_fails_if_machine_and_file_clocks_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, ahead_s: int
) -> None:
    root = f"file://{tmp_path}/"
    lake = Lakehouse.create(root, storage=LocalStorage(root, fsync=fsync))
    background.drain()
    files_before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    replace_time_functions(monkeypatch, posix_files, time_ns=lambda: time.time_ns() + ahead_s * 10**9)
    with pytest.raises(StorageError), lake.transaction() as txn:
        txn.create_namespace("n")
    monkeypatch.undo()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files_before
    with lake.transaction() as txn:
        txn.create_namespace("n")
    assert lake.latest_version() == 1
