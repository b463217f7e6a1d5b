"""The commit lock of a folder orders the commits of processes, and never blocks a process indefinitely."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import MeteredStorage, RetryStorage, Storage, StorageWrapper
from trinitylake_ops.storage.local.storage import LocalStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

LONG_S = 60.0
_FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lake").mkdir()
    return tmp_path / "lake"


def storage(folder: Path) -> LocalStorage:
    return LocalStorage(f"{folder.as_uri()}/")


def _hold_lock(folder: Path, connection: Connection) -> None:
    with storage(folder).commit_lock(LONG_S) as has_waited:
        connection.send(has_waited)
        connection.recv()


class Holder:
    """A process that holds the lock until it is signaled or killed."""

    def __init__(self, folder: Path):
        self._connection, child_connection = _FORK.Pipe()
        self.process = _FORK.Process(target=_hold_lock, args=(folder, child_connection))
        self.process.start()
        self.has_waited = self._connection.recv()

    def release(self) -> None:
        self._connection.send(None)
        self.process.join()


def test_single_process_does_not_wait(folder: Path) -> None:
    for _ in range(2):
        with storage(folder).commit_lock(LONG_S) as has_waited:
            assert not has_waited


def test_second_process_waits_for_the_commit_lock(folder: Path) -> None:
    holder = Holder(folder)
    results: list[bool] = []

    def wait() -> None:
        with storage(folder).commit_lock(LONG_S) as has_waited:
            results.append(has_waited)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not results
    holder.release()
    thread.join(LONG_S)
    assert results == [True]


def test_killed_process_releases_the_commit_lock(folder: Path) -> None:
    holder = Holder(folder)
    holder.process.kill()
    holder.process.join()
    with storage(folder).commit_lock(LONG_S) as has_waited:
        assert not has_waited


def wait_until_free(local_storage: LocalStorage) -> None:
    """Wait until the commit lock is acquired without a wait."""
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        with local_storage.commit_lock(1.0) as has_waited:
            if not has_waited:
                return
        time.sleep(0.01)
    raise AssertionError("the commit lock is still held")


def test_stopped_process_does_not_block_commits(folder: Path) -> None:
    holder = Holder(folder)
    assert holder.process.pid is not None
    os.kill(holder.process.pid, signal.SIGSTOP)
    local_storage = storage(folder)
    with local_storage.commit_lock(0.05) as has_waited:
        assert has_waited
    # The abandoned wait is still blocked, so no thread waits again.
    begun_s = time.monotonic()
    with local_storage.commit_lock(LONG_S) as has_waited:
        assert has_waited
    assert time.monotonic() - begun_s < LONG_S / 2
    os.kill(holder.process.pid, signal.SIGCONT)
    holder.release()
    # The abandoned wait acquires the lock and releases it.
    wait_until_free(local_storage)


def test_interrupted_wait_releases_the_commit_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the wait before and after the lock is acquired."""
    original_wait = threading.Event.wait
    for is_acquired_first in (False, True):
        holder = Holder(folder)

        def interrupted_wait(event: threading.Event, timeout: float | None = None) -> bool:
            if timeout != LONG_S:  # not the wait for the lock
                return original_wait(event, timeout)
            if is_acquired_first:  # noqa: B023 - called in the same iteration
                holder.release()  # noqa: B023
                original_wait(event, timeout)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", interrupted_wait)
            with pytest.raises(KeyboardInterrupt), storage(folder).commit_lock(LONG_S):
                raise AssertionError("the lock must not be acquired")
        if not is_acquired_first:
            holder.release()
        wait_until_free(storage(folder))


def test_forked_child_does_not_hold_the_commit_lock(folder: Path) -> None:
    reader, writer = os.pipe()
    with storage(folder).commit_lock(LONG_S):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    with storage(folder).commit_lock(LONG_S) as has_waited:
        assert not has_waited
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)


def test_commit_lock_is_optional(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with storage(tmp_path / "missing").commit_lock(LONG_S) as has_waited:
        assert not has_waited

    def fail_to_lock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail_to_lock)
    with storage(folder).commit_lock(LONG_S) as has_waited:
        assert not has_waited


def test_interrupt_releases_the_commit_lock(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), storage(folder).commit_lock(LONG_S):
        raise KeyboardInterrupt
    with storage(folder).commit_lock(LONG_S) as has_waited:
        assert not has_waited


def test_wrappers_use_the_commit_lock_of_their_storage(folder: Path) -> None:
    holder = Holder(folder)
    for wrapped in (MeteredStorage(storage(folder)), RetryStorage(storage(folder))):
        with wrapped.commit_lock(0) as has_waited:
            assert has_waited
    holder.release()


class WithoutCommitLock(StorageWrapper):
    """A storage of a process that does not use the commit lock."""

    def commit_lock(self, max_s: float) -> nullcontext[bool]:
        return nullcontext(False)


@pytest.fixture
def wait_started(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when a commit waits for the lock."""
    event, original_flock = threading.Event(), fcntl.flock

    def record_blocking_call(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            event.set()
        original_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", record_blocking_call)
    return event


def test_commit_after_waiting_starts_on_the_new_version(folder: Path, wait_started: threading.Event) -> None:
    """Commits of earlier lock holders do not use up an attempt."""
    local_storage: Storage = storage(folder)
    lake = Lakehouse.create(local_storage.root, storage=local_storage)
    other_lake = Lakehouse.open(local_storage.root, storage=WithoutCommitLock(storage(folder)))
    waiting_txn = lake.transaction()
    waiting_txn.create_namespace("waiting")
    thread = threading.Thread(target=waiting_txn.commit)
    with storage(folder).commit_lock(LONG_S):
        thread.start()
        assert wait_started.wait(LONG_S)
        with other_lake.transaction() as txn:
            txn.create_namespace("more")
    thread.join(LONG_S)
    latest = next(iter(lake.history(1)))
    assert lake.snapshot().namespaces() == ["more", "waiting"]
    assert latest.cost["attempts"] == 1


def test_conflict_after_waiting_for_the_lock_fails(folder: Path, wait_started: threading.Event) -> None:
    local_storage: Storage = storage(folder)
    lake = Lakehouse.create(local_storage.root, storage=local_storage)
    other_lake = Lakehouse.open(local_storage.root, storage=WithoutCommitLock(storage(folder)))
    waiting_txn = lake.transaction()
    waiting_txn.create_namespace("same", properties={"writer": "waiting"})
    errors: list[Exception] = []

    def commit() -> None:
        try:
            waiting_txn.commit()
        except Exception as error:  # noqa: BLE001 - checked below
            errors.append(error)

    thread = threading.Thread(target=commit)
    with storage(folder).commit_lock(LONG_S):
        thread.start()
        assert wait_started.wait(LONG_S)
        with other_lake.transaction() as txn:
            txn.create_namespace("same", properties={"writer": "other"})
    thread.join(LONG_S)
    assert [type(error).__name__ for error in errors] == ["CommitConflictError"]
    with storage(folder).commit_lock(LONG_S) as has_waited:
        assert not has_waited
