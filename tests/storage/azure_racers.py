"""Processes that race to create files in a container: ``python -m tests.storage.azure_racers``, plan on stdin.

The plan is JSON: ``root``, ``options``, ``n_processes`` and ``rounds``: a name, a size in bytes, threads of a process.
One process imports everything and forks the others before it opens a storage. All processes start each round together.
The output is JSON: for each round the outcome of every create, ``won`` or the name of its error.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from functools import partial
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import Any

from trinitylake_ops.errors import FileExistsAlreadyError
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.azure import blob_storage  # noqa: F401 - the forked processes have it then
from trinitylake_ops.storage.contract.suite import run_together, sealed_body

_LONGEST_ROUND_SECONDS = 120


def race(plan: dict[str, Any], number: int, barrier: Barrier, answers: SimpleQueue[list[list[str]]]) -> None:
    """Take part in each round with several threads."""
    storage = open_storage(plan["root"], plan["options"])
    storage.exists("warm")
    outcomes: list[list[str]] = []
    for at, (name, size_bytes, n_threads) in enumerate(plan["rounds"]):
        bodies = [
            sealed_body(1000 * at + 10 * number + thread, size_bytes) if size_bytes else b""
            for thread in range(n_threads)
        ]
        barrier.wait(_LONGEST_ROUND_SECONDS)
        round_outcomes = run_together([partial(storage.create, name, data) for data in bodies])
        outcomes.append(["won" if outcome is None else _named(outcome) for outcome in round_outcomes])
    answers.put(outcomes)


def _named(outcome: object) -> str:
    """Return the class of an error, and its message unless another process won the race."""
    name = type(outcome).__name__
    return name if isinstance(outcome, FileExistsAlreadyError) else f"{name}: {outcome}"


def main() -> None:
    plan = json.load(sys.stdin)
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(plan["n_processes"]), context.SimpleQueue()
    racers = [
        context.Process(target=race, args=(plan, number, barrier, answers), daemon=True)
        for number in range(plan["n_processes"])
    ]
    for racer in racers:
        racer.start()
    of_processes = [answers.get() for _ in racers]
    for racer in racers:
        racer.join()
    rounds = range(len(plan["rounds"]))
    print(json.dumps([[outcome for of_one in of_processes for outcome in of_one[at]] for at in rounds]))


if __name__ == "__main__":
    main()
