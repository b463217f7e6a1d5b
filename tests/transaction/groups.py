"""Letting transactions wait for each other, so that they are committed together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from trinitylake_ops import Lakehouse
from trinitylake_ops.transaction.transaction import Transaction

Work = Callable[[Transaction], object]
_LONGEST_WAIT_SECONDS = 30


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


def commit_waiting(
    lake: Lakehouse, transactions: Sequence[Transaction], meanwhile: Callable[[], object] = int
) -> list[int | BaseException]:
    """Let transactions wait in the order given, as if somebody else committed, then commit them."""
    queue, outcomes = lake._queue, dict[int, int | BaseException]()

    def commit(number: int) -> None:
        try:
            outcomes[number] = transactions[number].commit()
        except BaseException as error:  # noqa: BLE001 - what became of it is for the test to judge
            outcomes[number] = error

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(len(transactions))]
    assert not queue._is_led
    queue._is_led = True
    for number, thread in enumerate(threads):
        thread.start()
        deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
        while len(queue._waiting) <= number:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    meanwhile()
    queue._hand_over()
    for thread in threads:
        thread.join(_LONGEST_WAIT_SECONDS)
    return [outcomes[number] for number in range(len(transactions))]
