"""Concurrent creates of one file: one thread or process wins, and the others fail with FileExistsAlreadyError."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping

from tests.processes import fork
from trinitylake_ops.errors import FileExistsAlreadyError, StorageError
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.contract.suite import run_together

N_THREADS = 32
N_PROCESSES = 8
ROUND_TIMEOUT_SECONDS = 60


def body_of(racer: int, size_bytes: int) -> bytes:
    return bytes([racer]) * size_bytes


def outcome_of(create: Callable[[], None]) -> str:
    try:
        create()
    except StorageError as error:
        return type(error).__name__
    return "won"


def check_round(storage: Storage, name: str, outcomes: list[str], size_bytes: int) -> int:
    """Assert that exactly one racer won and that the file has its content. Delete the file, and return the winner."""
    assert sorted(outcomes) == [FileExistsAlreadyError.__name__] * (len(outcomes) - 1) + ["won"]
    winner = outcomes.index("won")
    assert storage.read(name) == body_of(winner, size_bytes)
    assert [(file.path, file.size_bytes) for file in storage.list("race/")] == [(name, size_bytes)]
    storage.delete(name)
    return winner


def race_threads(storage: Storage, name: str, size_bytes: int) -> int:
    """Create one file from several threads, check the round, and return the winner."""
    bodies = [body_of(racer, size_bytes) for racer in range(N_THREADS)]

    def create(data: bytes) -> str:
        return outcome_of(lambda: storage.create(name, data))

    outcomes = run_together([lambda data=data: create(data) for data in bodies])  # type: ignore[misc]
    return check_round(storage, name, [str(outcome) for outcome in outcomes], size_bytes)


def race_processes(storage: Storage, names: Mapping[str, int]) -> None:
    """Create each file from several processes, with contents of its size in bytes, and check each round."""
    barrier = multiprocessing.get_context("fork").Barrier(N_PROCESSES + 1)

    def racer(number: int) -> Callable[[Callable[[str], None]], None]:
        def work(report: Callable[[str], None]) -> None:
            for name, size_bytes in names.items():
                data = body_of(number, size_bytes)
                barrier.wait(ROUND_TIMEOUT_SECONDS)
                report(outcome_of(lambda name=name, data=data: storage.create(name, data)))  # type: ignore[misc]
                barrier.wait(ROUND_TIMEOUT_SECONDS)
                barrier.wait(ROUND_TIMEOUT_SECONDS)  # the parent checks the round and deletes the file

        return work

    storage.exists("race/nothing")  # so that the children inherit a client that has sent a request
    children = [fork(racer(number), time_limit_seconds=1800) for number in range(N_PROCESSES)]
    try:
        for name, size_bytes in names.items():
            barrier.wait(ROUND_TIMEOUT_SECONDS)
            barrier.wait(ROUND_TIMEOUT_SECONDS)
            outcomes = [child.next_report() for child in children]
            check_round(storage, name, outcomes, size_bytes)
            barrier.wait(ROUND_TIMEOUT_SECONDS)
    except BaseException:
        barrier.abort()
        raise
    finally:
        results = [child.finish() for child in children]
    assert [exit_code for exit_code, _ in results] == [0] * N_PROCESSES
