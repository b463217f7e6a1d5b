"""The commit lock of a folder: it orders processes, and never blocks one permanently."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import MeteredStorage, RetryStorage, Storage, StorageWrapper
from trinitylake_ops.storage.local import commit_lock as line_module
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


def _hold(folder: Path, held: Connection) -> None:
    with storage(folder).commit_lock(LONG_S) as has_waited:
        held.send(has_waited)
        held.recv()


class Holder:
    """A process that holds the lock until it is signaled or killed."""

    def __init__(self, folder: Path):
        self._own, other = _FORK.Pipe()
        self.process = _FORK.Process(target=_hold, args=(folder, other))
        self.process.start()
        self.has_waited = self._own.recv()

    def go(self) -> None:
        self._own.send(None)
        self.process.join()


def test_single_process_does_not_wait(folder: Path) -> None:
    for _ in range(2):
        with storage(folder).commit_lock(LONG_S) as has_waited:
            assert not has_waited


def test_second_process_waits_for_the_commit_lock(folder: Path) -> None:
    holder = Holder(folder)
    waited: list[bool] = []

    def wait() -> None:
        with storage(folder).commit_lock(LONG_S) as has_waited:
            waited.append(has_waited)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not waited
    holder.go()
    thread.join(LONG_S)
    assert waited == [True]


def test_killed_process_releases_the_commit_lock(folder: Path) -> None:
    holder = Holder(folder)
    holder.process.kill()
    holder.process.join()
    with storage(folder).commit_lock(LONG_S) as has_waited:
        assert not has_waited


def test_stopped_process_does_not_block_commits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(folder)
    assert holder.process.pid is not None
    os.kill(holder.process.pid, signal.SIGSTOP)
    own = storage(folder)
    waits: list[line_module._Wait] = []
    ends_within = line_module._Wait.ends_within

    def tell(wait: line_module._Wait, max_s: float) -> bool:
        waits.append(wait)
        return ends_within(wait, max_s)

    monkeypatch.setattr(line_module._Wait, "ends_within", tell)
    with own.commit_lock(0.05) as has_waited:
        assert has_waited
    with own.commit_lock(LONG_S) as has_waited:  # the abandoned wait is still blocked, so no process waits again
        assert has_waited
    (in_vain,) = waits
    assert in_vain.is_waiting
    os.kill(holder.process.pid, signal.SIGCONT)
    holder.go()
    assert in_vain._is_over.wait(LONG_S)
    with own.commit_lock(LONG_S) as has_waited:  # the lock was acquired after the wait was abandoned, and released
        assert not has_waited


def test_interrupted_wait_passes_the_commit_lock_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt before or after the lock is acquired."""
    for comes_first in (False, True):
        holder = Holder(folder)
        waits: list[line_module._Wait] = []

        class Interrupted(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                if comes_first:  # noqa: B023 - called in this turn of the loop
                    holder.go()  # noqa: B023
                    super().wait(timeout)
                raise KeyboardInterrupt

        class Wait(line_module._Wait):
            def __init__(self, descriptor: int):
                super().__init__(descriptor)
                self._is_over = Interrupted()
                waits.append(self)  # noqa: B023

        monkeypatch.setattr(line_module, "_Wait", Wait)
        with pytest.raises(KeyboardInterrupt), storage(folder).commit_lock(LONG_S):
            raise AssertionError("nobody may get here")
        if not comes_first:
            holder.go()
        assert threading.Event.wait(waits[0]._is_over, LONG_S)
        with storage(folder).commit_lock(LONG_S) as has_waited:
            assert not has_waited


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
    with storage(tmp_path / "nowhere").commit_lock(LONG_S) as has_waited:
        assert not has_waited

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
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
    holder.go()


class Passing(StorageWrapper):
    """Another program, which does not use the lock."""

    def commit_lock(self, max_s: float) -> nullcontext[bool]:
        return nullcontext(False)


@pytest.fixture
def has_waiter(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a process finds the lock held."""
    event, wait = threading.Event(), line_module.CommitLock._wait

    def tell(line: line_module.CommitLock, descriptor: int, max_s: float) -> bool:
        event.set()
        return wait(line, descriptor, max_s)

    monkeypatch.setattr(line_module.CommitLock, "_wait", tell)
    return event


def test_commit_after_waiting_starts_on_the_new_version(folder: Path, has_waiter: threading.Event) -> None:
    """Commits of earlier lock holders use up no attempt."""
    ours: Storage = storage(folder)
    lake = Lakehouse.create(ours.root, storage=ours)
    others = Lakehouse.open(ours.root, storage=Passing(storage(folder)))
    own = lake.transaction()
    own.create_namespace("own")
    thread = threading.Thread(target=own.commit)
    with storage(folder).commit_lock(LONG_S):
        thread.start()
        assert has_waiter.wait(LONG_S)
        with others.transaction() as txn:
            txn.create_namespace("more")
    thread.join(LONG_S)
    latest = next(iter(lake.history(1)))
    assert lake.snapshot().namespaces() == ["more", "own"]
    assert latest.cost["attempts"] == 1


def test_conflict_after_waiting_for_the_lock_fails(folder: Path, has_waiter: threading.Event) -> None:
    ours: Storage = storage(folder)
    lake = Lakehouse.create(ours.root, storage=ours)
    others = Lakehouse.open(ours.root, storage=Passing(storage(folder)))
    own = lake.transaction()
    own.create_namespace("same", properties={"of": "us"})
    errors: list[Exception] = []

    def commit() -> None:
        try:
            own.commit()
        except Exception as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=commit)
    with storage(folder).commit_lock(LONG_S):
        thread.start()
        assert has_waiter.wait(LONG_S)
        with others.transaction() as txn:
            txn.create_namespace("same", properties={"of": "others"})
    thread.join(LONG_S)
    assert [type(error).__name__ for error in errors] == ["CommitConflictError"]
    with storage(folder).commit_lock(LONG_S) as has_waited:
        assert not has_waited
