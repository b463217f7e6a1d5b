"""Staged files, and the number of syncs of a commit."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.interrupts import plain_interrupts
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CommitConflictError, FileExistsAlreadyError, StorageError, TrinityLakeError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.storage import LocalStorage


class SyncRecorder:
    """Records fsync and link calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._lock = threading.Lock()
        original_fsync, original_link = os.fsync, os.link

        def fsync(descriptor: int) -> None:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            with self._lock:
                self.calls.append(name)
            original_fsync(descriptor)

        def link(source: bytes, target: bytes) -> None:
            with self._lock:
                self.calls.append(f"link {os.fsdecode(target)}")
            original_link(source, target)

        self.calls: list[str] = []
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "link", link)


def test_staged_file_is_synced_before_it_is_linked(
    storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.create("first", b"x")
    recorder = SyncRecorder(monkeypatch)
    data = b"staged"
    storage.stage("name", data)
    (temporary_file,) = (folder / "_ops/tmp").iterdir()
    assert recorder.calls == [str(temporary_file)]
    assert not (folder / "name").exists()
    storage.create("name", data)
    assert recorder.calls == [str(temporary_file), f"link {folder}/name", str(folder)]
    assert (folder / "name").read_bytes() == data
    assert list((folder / "_ops/tmp").iterdir()) == []


def test_discarded_staged_file_is_deleted(storage: LocalStorage, folder: Path) -> None:
    data = b"staged"
    storage.stage("name", data)
    storage.discard_staged(data)
    storage.discard_staged(data)
    assert list((folder / "_ops/tmp").iterdir()) == []
    storage.create("name", data)
    assert storage.read("name") == data


def test_staged_create_fails_if_the_path_exists(storage: LocalStorage, folder: Path) -> None:
    data = b"staged"
    storage.stage("name", data)
    storage.create("name", b"another")
    with pytest.raises(FileExistsAlreadyError):
        storage.create("name", data)
    assert storage.read("name") == b"another"
    assert list((folder / "_ops/tmp").iterdir()) == []


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_interrupt_during_staging_leaves_no_file(
    storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    storage.create("first", b"x")
    original_call, data = getattr(os, call), b"staged"

    def interrupted_call(*arguments: Any, **options: Any) -> Any:
        result = original_call(*arguments, **options)
        if call == "open":
            os.close(result)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, call, interrupted_call)
        with pytest.raises(KeyboardInterrupt):
            storage.stage("name", data)
    assert len(list((folder / "_ops/tmp").iterdir())) == 1
    storage.discard_staged(data)
    assert list((folder / "_ops/tmp").iterdir()) == []


def test_interrupted_commit_leaves_no_staged_file(
    storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lakehouse.create(storage.root, storage=storage)
    original_stage = LocalStorage.stage
    caller, caller_id = threading.current_thread(), threading.get_ident()

    def interrupted_stage(self: LocalStorage, path: str, data: bytes) -> None:
        if threading.current_thread() is not caller:
            signal.pthread_kill(caller_id, signal.SIGINT)
            time.sleep(0.05)
        original_stage(self, path, data)
        if threading.current_thread() is caller:
            raise KeyboardInterrupt

    txn = lake.transaction()
    txn.create_namespace("a")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "stage", interrupted_stage)
        with plain_interrupts(), pytest.raises(KeyboardInterrupt):
            txn.commit()
    assert list((folder / "_ops/tmp").iterdir()) == []
    assert lake.latest_version() == 0


def test_without_fsync_nothing_is_staged(folder: Path) -> None:
    storage = LocalStorage(f"file://{folder}/", fsync=False)
    storage.stage("name", b"x")
    assert not folder.exists() or list(folder.iterdir()) == []


def test_commit_syncs_three_times(storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First sync the new files and the next root, then the folders of the files, and finally the folder of the root."""
    lake = Lakehouse.create(storage.root, storage=storage)
    with lake.transaction() as txn:
        txn.create_namespace("a")
    recorder = SyncRecorder(monkeypatch)
    with lake.transaction() as txn:
        txn.create_namespace("b")
    calls = [name.removeprefix(f"{folder}") for name in recorder.calls]
    (link_index,) = [index for index, name in enumerate(calls) if name == f"link {folder}/{root_path(2)}"]
    assert calls[link_index + 1 :][0] == "", "after the root was linked, only its folder is synced"
    staged_files = [name for name in calls[:link_index] if name.startswith("/_ops/tmp/")]
    assert len(staged_files) == 2, "the definition and the root"
    (linked_definition,) = [name for name in calls[:link_index] if name.startswith("link ")]
    definition = Path(linked_definition.removeprefix(f"link {folder}"))
    folders = set(map(str, definition.parents)) - {"/"} | {""}
    assert {name for name in calls[:link_index] if name not in staged_files and name != linked_definition} <= folders
    assert str(definition.parent) in calls[:link_index]


def test_conflicting_commit_leaves_no_temporary_file(storage: LocalStorage, folder: Path) -> None:
    lake = Lakehouse.create(storage.root, storage=storage)
    first, second = lake.transaction(), Lakehouse(storage).transaction()
    for txn in (first, second):
        txn.create_namespace("a")
    first.commit()
    with pytest.raises(CommitConflictError):
        second.commit()
    assert list((folder / "_ops/tmp").iterdir()) == []


def test_commits_continue_after_removal_of_the_temporary_folder(storage: LocalStorage, folder: Path) -> None:
    """The folder is missing after a restore that copies only files, and after empty folders were removed."""
    lake = Lakehouse.create(storage.root, storage=storage)
    for number in range(4):
        with lake.transaction() as txn:
            txn.create_namespace(f"n{number}")
    for number in range(4):
        (folder / "_ops/tmp").rmdir()
        (folder / "_ops").rmdir()
        with lake.transaction() as txn:
            txn.drop_namespace(f"n{number}")
    assert lake.snapshot().namespaces() == []


def test_create_succeeds_after_failed_staging(
    storage: LocalStorage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.create("first", b"x")
    original_open, n_failed = os.open, 0

    def fail_once(name: bytes, *arguments: int, **options: int) -> int:
        nonlocal n_failed
        if b"_ops/tmp/" in name and n_failed == 0:
            n_failed += 1
            raise OSError(errno.EMFILE, "too many open files")
        return original_open(name, *arguments, **options)

    monkeypatch.setattr(os, "open", fail_once)
    data = b"staged"
    storage.stage("name", data)
    assert n_failed == 1
    storage.create("name", data)
    assert storage.read("name") == data
    assert list((folder / "_ops/tmp").iterdir()) == []


# Best-effort writes


def test_best_effort_write_overwrites_and_creates_no_folder(storage: LocalStorage, folder: Path) -> None:
    storage.write_best_effort("hint", b"9")
    assert not folder.exists()
    storage.create("file", b"x")
    for content in (b"9", b"10", b"11", b"8"):
        storage.write_best_effort("hint", content)
        assert storage.read("hint") == content
    assert list((folder / "_ops/tmp").iterdir()) == []
    shutil.rmtree(folder)
    storage.write_best_effort("hint", b"12")
    assert not folder.exists()


def test_best_effort_write_follows_no_link_and_opens_no_pipe(
    storage: LocalStorage, folder: Path, tmp_path: Path
) -> None:
    storage.create("file", b"x")
    (tmp_path / "outside").write_bytes(b"1")
    (folder / "hint").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError):
        storage.write_best_effort("hint", b"2")
    assert (tmp_path / "outside").read_bytes() == b"1"
    (folder / "hint").unlink()
    os.mkfifo(folder / "hint")
    with pytest.raises(TrinityLakeError):
        storage.write_best_effort("hint", b"2")
