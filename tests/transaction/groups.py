"""Queue transactions so that they are committed as one group."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.lakes import Lakes, table
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import FileInfo, MemoryStorage, Storage, StorageWrapper
from trinitylake_ops.transaction import commit_queue, group
from trinitylake_ops.transaction.transaction import Transaction

Work = Callable[[Transaction], object]
LONGEST_WAIT_S = 10
_MODULES = {str(Path(module.__file__)) for module in (commit_queue, group)}


def commit_together(
    lake: Lakehouse, works: Sequence[Work], *, isolation: str | None = None, meanwhile: Callable[[], object] = int
) -> list[int | BaseException]:
    """Begin transactions on one version, queue them in this order, then commit them.

    ``meanwhile`` runs when all of them are queued. Returns the version or the error of each.
    """
    transactions = [lake.transaction(isolation) for _ in works]
    for work, txn in zip(works, transactions, strict=True):
        work(txn)
    return commit_waiting(lake, transactions, meanwhile)


class Hooked(StorageWrapper):
    """Calls ``before`` with the path of each create before it is sent, and ``after`` if it succeeded.

    Calls ``before_read`` with the path of each read.
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
    """Treat memory as high-latency storage, where a transaction writes its files before it is queued."""
    monkeypatch.setattr(MemoryStorage, "concurrency", 16)


def create_filled(lakes: Lakes, storage: Storage) -> Lakehouse:
    """Create a lakehouse whose version 1 has a namespace."""
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    return lake


def create_in_transactions(lake: Lakehouse, *names: str) -> list[Transaction]:
    transactions = [lake.transaction() for _ in names]
    for name, txn in zip(names, transactions, strict=True):
        txn.create_table("ns", name, table())
    return transactions


def creates(name: str) -> Work:
    return lambda txn: txn.create_table("ns", name, table(made="yes"))


def commit_elsewhere(storage: Storage, work: Work) -> None:
    """Commit in another process."""
    with Lakehouse(storage).transaction() as txn:
        work(txn)


class Committing:
    """A thread that commits a transaction."""

    def __init__(self, txn: Transaction, trace: Callable[..., Any] | None = None):
        self._outcomes: list[int | BaseException] = []
        self._trace = trace
        self._thread = threading.Thread(target=self._commit, args=(txn,), daemon=True)
        self._thread.start()

    def _commit(self, txn: Transaction) -> None:
        sys.settrace(self._trace)
        try:
            self._outcomes.append(txn.commit())
        except BaseException as error:  # noqa: BLE001 - the test checks the outcome
            self._outcomes.append(error)
        finally:
            sys.settrace(None)

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> int | BaseException:
        self._thread.join(LONGEST_WAIT_S)
        assert self.is_done, "the commit hangs"
        return self._outcomes[0]

    def version(self) -> int:
        outcome = self.outcome()
        assert isinstance(outcome, int), outcome
        return outcome


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until other threads satisfy a condition."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


class _TestLeader:
    """Leads the queue until the test ends it."""

    has_left = is_done = False
    is_taken = True
    wakes = threading.Event()


def commit_waiting(
    lake: Lakehouse,
    transactions: Sequence[Transaction],
    meanwhile: Callable[[], object] = int,
    *,
    interrupted: int | None = None,
    at_line: int = 0,
) -> list[int | BaseException]:
    """Queue transactions in this order behind another leader, then commit them.

    The thread of transaction number ``interrupted`` is interrupted at its ``at_line``-th line in the queue's modules.
    """
    queue, leader, committing = lake._queue, _TestLeader(), list[Committing]()
    assert queue._leader is None or queue._leader.is_done
    queue._leader = leader  # type: ignore[assignment]
    for number, txn in enumerate(transactions):
        commit = Committing(txn, interrupt_at(at_line) if number == interrupted else None)
        committing.append(commit)
        wait_until(
            lambda commit=commit, txn=txn: (  # type: ignore[misc]
                commit.is_done or txn.id in [waiting.submission.id for waiting in tuple(queue._waiting)]
            )
        )
    meanwhile()
    leader.is_done = True
    queue._leave_queue(leader)  # type: ignore[arg-type]
    return [commit.outcome() for commit in committing]


class Interrupted(BaseException):
    """Ctrl-C."""


def interrupt_at(at_line: int, *functions: str) -> Callable[..., Any]:
    """Return a trace function that raises at the n-th line in the queue's modules, or in some of their functions."""
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
