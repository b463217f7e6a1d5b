"""Letting transactions wait for each other, so that they are committed together."""

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

from trinitylake_ops import Lakehouse
from trinitylake_ops.transaction import groups
from trinitylake_ops.transaction.transaction import Transaction

Work = Callable[[Transaction], object]
_LONGEST_WAIT_SECONDS = 10
_MODULES = Path(groups.__file__).parent


def commit_together(
    lake: Lakehouse, works: Sequence[Work], *, isolation: str | None = None, meanwhile: Callable[[], object] = int
) -> list[int | BaseException]:
    """Begin transactions on one version, let them wait in the order given, then commit them.

    ``meanwhile`` runs when all wait. Returns what became of each.
    """
    transactions = [lake.transaction(isolation) for _ in works]
    for work, txn in zip(works, transactions, strict=True):
        work(txn)
    return commit_waiting(lake, transactions, meanwhile)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads bring about."""
    deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


class _Somebody:
    """Leads the queue, and never ends by itself."""

    has_left = is_done = False
    wakes = threading.Event()


def commit_waiting(
    lake: Lakehouse,
    transactions: Sequence[Transaction],
    meanwhile: Callable[[], object] = int,
    *,
    interrupted: int | None = None,
    at_line: int = 0,
) -> list[int | BaseException]:
    """Let transactions wait in the order given, as if somebody else committed, then commit them.

    The thread of the transaction ``interrupted`` is interrupted at its ``at_line``-th line in the modules of groups.
    """
    queue, outcomes = lake._queue, dict[int, int | BaseException]()

    def commit(number: int) -> None:
        if number == interrupted:
            sys.settrace(_interrupting(at_line))
        try:
            outcomes[number] = transactions[number].commit()
        except BaseException as error:  # noqa: BLE001 - what became of it is for the test to judge
            outcomes[number] = error
        finally:
            sys.settrace(None)

    threads = [threading.Thread(target=commit, args=(number,), daemon=True) for number in range(len(transactions))]
    somebody = _Somebody()
    assert queue._leader is None or queue._leader.is_done
    queue._leader = somebody  # type: ignore[assignment]
    for thread, txn in zip(threads, transactions, strict=True):
        thread.start()
        until(
            lambda thread=thread, txn=txn: (  # type: ignore[misc]
                not thread.is_alive() or txn.id in [waiting.submission.id for waiting in tuple(queue._waiting)]
            )
        )
    meanwhile()
    somebody.is_done = True
    queue._leave(somebody)  # type: ignore[arg-type]
    for thread in threads:
        thread.join(_LONGEST_WAIT_SECONDS)
        assert not thread.is_alive(), "somebody waits for ever"
    return [outcomes[number] for number in range(len(transactions))]


class Interrupted(BaseException):
    """Ctrl-C."""


def _interrupting(at_line: int) -> Callable[..., Any]:
    """Return a trace function that raises at the n-th line of the modules of groups."""
    remaining = itertools.count(at_line - 1, -1)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if Path(frame.f_code.co_filename).parent != _MODULES:
            return None
        # At the line of a with statement the lock would stay locked: Python cannot be interrupted there safely.
        is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not is_with and next(remaining) == 0:
            raise Interrupted
        return trace

    return trace
