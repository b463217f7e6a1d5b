"""Race processes to create files in a container.

Run as ``python -m tests.storage.azure_racers``, with a plan as JSON on standard input: ``root``, ``options``,
``n_processes`` and ``rounds``, each with a name, a size in bytes and the number of threads per process. The main
process imports all modules and forks the racers before it opens a storage. All racers start each round together. The
output is JSON: for each round the outcome of every create, which is ``won`` or the name of its error.
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
from trinitylake_ops.storage.azure import blob_storage  # noqa: F401 - imported before forking
from trinitylake_ops.storage.contract.suite import run_together, sealed_body

_ROUND_TIMEOUT_S = 120


def race(plan: dict[str, Any], number: int, barrier: Barrier, results: SimpleQueue[list[list[str]]]) -> None:
    """Create the file of each round in several threads."""
    storage = open_storage(plan["root"], plan["options"])
    storage.exists("warm")
    outcomes: list[list[str]] = []
    for index, (name, size_bytes, n_threads) in enumerate(plan["rounds"]):
        bodies = [
            sealed_body(1000 * index + 10 * number + thread, size_bytes) if size_bytes else b""
            for thread in range(n_threads)
        ]
        barrier.wait(_ROUND_TIMEOUT_S)
        round_outcomes = run_together([partial(storage.create, name, data) for data in bodies])
        outcomes.append(["won" if outcome is None else _error_text(outcome) for outcome in round_outcomes])
    results.put(outcomes)


def _error_text(outcome: object) -> str:
    """Return the class of an error, and its message unless another process won the race."""
    name = type(outcome).__name__
    return name if isinstance(outcome, FileExistsAlreadyError) else f"{name}: {outcome}"


def main() -> None:
    plan = json.load(sys.stdin)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(plan["n_processes"]), context.SimpleQueue()
    racers = [
        context.Process(target=race, args=(plan, number, barrier, results), daemon=True)
        for number in range(plan["n_processes"])
    ]
    for racer in racers:
        racer.start()
    outcomes_by_process = [results.get() for _ in racers]
    for racer in racers:
        racer.join()
    rounds = zip(*outcomes_by_process, strict=True)
    print(
        json.dumps([[outcome for process_outcomes in outcomes for outcome in process_outcomes] for outcomes in rounds])
    )


if __name__ == "__main__":
    main()
