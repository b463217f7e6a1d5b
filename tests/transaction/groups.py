"""Queue transactions so that they are committed as one group."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.lakes import Lakes, table
from trinitylake_ops import Lakehouse
from trinitylake_ops.format.definitions import IsolationLevel
from trinitylake_ops.storage import FileInfo, MemoryStorage, Storage, StorageWrapper
from trinitylake_ops.transaction import commit_queue, group
from trinitylake_ops.transaction.change_set import ChangeSet
from trinitylake_ops.transaction.commit import DEFAULT_MAX_ATTEMPTS
from trinitylake_ops.transaction.commit_queue import CommitQueue
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.snapshot import Snapshot

Change = Callable[[Transaction], object]
TIMEOUT_S = 10
_MODULES = {str(Path(module.__file__)) for module in (commit_queue, group)}


def commit_together(
    lake: Lakehouse,
    changes: Sequence[Change],
    *,
    isolation: str | None = None,
    while_queued: Callable[[], object] = int,
) -> list[int | BaseException]:
    """Begin a transaction for each change on the same version, queue them in this order, then commit them.

    ``while_queued`` is called when all transactions are queued. Returns the version or the error of each transaction.
    """
    transactions = [lake.transaction(isolation) for _ in changes]
    for change, txn in zip(changes, transactions, strict=True):
        change(txn)
    return commit_queued(lake, transactions, while_queued)


class HookedStorage(StorageWrapper):
    """Calls ``before`` with the path before each create, ``after`` after each successful one.

    Calls ``before_read`` with the path before each read.
    """

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[str], None] = lambda _: None
        self.before_read: Callable[[str], None] = lambda _: None

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.before_read(path)
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        self.before_read(path)
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        self.before(path)
        self.inner.create(path, data)
        self.after(path)


def simulate_high_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make memory storage look like high-latency storage, where a transaction writes its files before it is queued."""
    monkeypatch.setattr(MemoryStorage, "concurrency", 16)


def create_with_namespace(lakes: Lakes, storage: Storage) -> Lakehouse:
    """Create a lakehouse whose version 1 has the namespace ``ns``."""
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    return lake


def create_in_transactions(lake: Lakehouse, *names: str) -> list[Transaction]:
    transactions = [lake.transaction() for _ in names]
    for name, txn in zip(names, transactions, strict=True):
        txn.create_table("ns", name, table())
    return transactions


def creates_table(name: str) -> Change:
    return lambda txn: txn.create_table("ns", name, table(made="yes"))


def commit_in_other_process(storage: Storage, change: Change) -> None:
    """Commit a change as another process would."""
    with Lakehouse(storage).transaction() as txn:
        change(txn)


class CommitThread:
    """A thread that commits a transaction."""

    def __init__(
        self,
        txn: Transaction,
        *,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        trace: Callable[..., Any] | None = None,
    ):
        self._outcomes: list[int | BaseException] = []
        self._max_attempts = max_attempts
        self._trace = trace
        self._thread = threading.Thread(target=self._commit, args=(txn,), daemon=True)
        self._thread.start()

    def _commit(self, txn: Transaction) -> None:
        sys.settrace(self._trace)
        try:
            self._outcomes.append(txn.commit(self._max_attempts))
        except BaseException as error:  # noqa: BLE001 - the test checks the outcome
            self._outcomes.append(error)
        finally:
            sys.settrace(None)

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> int | BaseException:
        self._thread.join(TIMEOUT_S)
        assert self.is_done, "the commit did not finish in time"
        return self._outcomes[0]

    def version(self) -> int:
        outcome = self.outcome()
        assert isinstance(outcome, int), outcome
        return outcome


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until other threads satisfy a condition."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was not satisfied in time"
        time.sleep(0.0005)


class Interrupted(BaseException):
    """Simulates Ctrl-C."""


class _QueueBlocker(Submission):
    """A submission without changes that leads a commit queue until it is released. It then fails."""

    def __init__(self, base: Snapshot):
        self.is_leading, self.is_released = threading.Event(), threading.Event()
        super().__init__(str(uuid.uuid4()), base, ChangeSet(), IsolationLevel.SNAPSHOT, CommitInfo(""), begun_at_ms=0)

    @property  # type: ignore[override]
    def begun_at_ms(self) -> int:
        """The leader reads this before it gathers a group."""
        self.is_leading.set()
        self.is_released.wait()
        raise Interrupted

    @begun_at_ms.setter
    def begun_at_ms(self, value: int) -> None:
        pass

    def commit(self, queue: CommitQueue) -> None:
        with contextlib.suppress(Interrupted):
            queue.commit(self, max_attempts=1)


@contextmanager
def _blocked_queue(queue: CommitQueue, base: Snapshot) -> Iterator[None]:
    """Keep all transactions of a queue waiting until the block ends."""
    assert queue.state().leader is None
    blocker = _QueueBlocker(base)
    thread = threading.Thread(target=blocker.commit, args=(queue,), daemon=True)
    thread.start()
    assert blocker.is_leading.wait(TIMEOUT_S)
    try:
        yield
    finally:
        blocker.is_released.set()
        thread.join(TIMEOUT_S)


def waiting_ids(lake: Lakehouse) -> list[str]:
    """Return the ids of the transactions that wait in the commit queue."""
    return [member.submission.id for member in lake.commit_queue.state().waiting]


def leader_id(lake: Lakehouse) -> str | None:
    """Return the id of the transaction that leads the commit queue."""
    leader = lake.commit_queue.state().leader
    return None if leader is None else leader.submission.id


def commit_queued(
    lake: Lakehouse,
    transactions: Sequence[Transaction],
    while_queued: Callable[[], object] = int,
    *,
    max_attempts: Mapping[Transaction, int] | None = None,
    interrupted: int | None = None,
    at_line: int = 0,
) -> list[int | BaseException]:
    """Queue transactions in this order behind another leader, then commit them.

    Args:
        lake: The lakehouse.
        transactions: The transactions.
        while_queued: Called when all transactions are queued.
        max_attempts: The number of attempts by transaction, instead of the default.
        interrupted: The index of a transaction whose thread is interrupted.
        at_line: The number of lines that this thread runs in the queue's modules before it is interrupted.

    Returns:
        The version or the error of each transaction.
    """
    threads: list[CommitThread] = []
    with _blocked_queue(lake.commit_queue, transactions[0].base):
        for number, txn in enumerate(transactions):
            attempts = (max_attempts or {}).get(txn, DEFAULT_MAX_ATTEMPTS)
            trace = interrupt_at(at_line) if number == interrupted else None
            thread = CommitThread(txn, max_attempts=attempts, trace=trace)
            threads.append(thread)
            wait_until(lambda thread=thread, txn=txn: thread.is_done or txn.id in waiting_ids(lake))  # type: ignore[misc]
        while_queued()
    return [thread.outcome() for thread in threads]


def interrupt_at(at_line: int, *functions: str) -> Callable[..., Any]:
    """Return a trace function that raises Interrupted at the ``at_line``-th line in the queue's modules.

    With ``functions``, only lines in functions with these names count.
    """
    remaining = itertools.count(at_line - 1, -1)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in _MODULES:
            return None
        if functions and frame.f_code.co_name not in functions:
            return trace
        # Python cannot be interrupted safely at a with statement: the lock would stay locked.
        is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not is_with and next(remaining) == 0:
            raise Interrupted
        return trace

    return trace
