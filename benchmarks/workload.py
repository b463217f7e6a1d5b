"""Repeat one operation, for profilers.

Run from the project's root: ``.venv/bin/python -m benchmarks.workload OPERATION SECONDS``. ``profiles.py`` runs it
under py-spy. For a flame graph, put ``.venv/bin/py-spy record -o flame.svg --`` in front of the command.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.lakes import GeneratedDefinitions, change_tables, create_loaded_lake, name
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import LocalStorage, Storage

N_TABLES = 50_000


def commit(storage: Storage) -> Callable[[], object]:
    """Begin, change a random table and commit, warm."""
    lake = Lakehouse(storage, cache="private")
    return lambda: change_tables(lake, [random.randrange(N_TABLES)])


def list_tables(storage: Storage) -> Callable[[], object]:
    """List all tables, cold."""
    return lambda: Lakehouse(storage, cache="off").snapshot().tables("ns")


def lookup(storage: Storage) -> Callable[[], object]:
    """Look up a table, cold."""
    return lambda: Lakehouse(storage, cache="off").snapshot().table("ns", name(42))


OPERATIONS: Mapping[str, Callable[[Storage], Callable[[], object]]] = {
    "commit": commit,
    "list": list_tables,
    "lookup": lookup,
}


def main() -> None:
    """Repeat the operation until the time limit, and print the number of calls."""
    operation, limit_seconds = sys.argv[1], float(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        storage = GeneratedDefinitions(LocalStorage(Path(folder).as_uri() + "/lake/", fsync=False))
        create_loaded_lake(storage, N_TABLES)
        n_done = repeat(OPERATIONS[operation](storage), limit_seconds)
    print(f"{operation}: {n_done} times in {limit_seconds:g} s")


def repeat(operation: Callable[[], object], limit_seconds: float) -> int:
    """Repeat a call until the time limit, and return the number of calls."""
    end = time.monotonic() + limit_seconds
    n_done = 0
    while time.monotonic() < end:
        operation()
        n_done += 1
    return n_done


if __name__ == "__main__":
    main()
