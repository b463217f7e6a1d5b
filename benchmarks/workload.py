"""Repeat one kind of work, for profilers.

Run from the project's root: ``.venv/bin/python -m benchmarks.workload WORK SECONDS``. ``profiles.py`` runs it under
py-spy. For a flame graph, put ``.venv/bin/py-spy record -o flame.svg --`` in front of the command.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.lakes import MadeUpDefinitions, change_tables, loaded, name
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


WORKS: Mapping[str, Callable[[Storage], Callable[[], object]]] = {
    "commit": commit,
    "list": list_tables,
    "lookup": lookup,
}


def main() -> None:
    """Repeat the work until the time is up, and print the number of repetitions."""
    work_name, limit_seconds = sys.argv[1], float(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        storage = MadeUpDefinitions(LocalStorage(Path(folder).as_uri() + "/lake/", fsync=False))
        loaded(storage, N_TABLES)
        n_done = repeated(WORKS[work_name](storage), limit_seconds)
    print(f"{work_name}: {n_done} times in {limit_seconds:g} s")


def repeated(work: Callable[[], object], limit_seconds: float) -> int:
    """Repeat a call until the time is up. Return the number of calls."""
    end = time.monotonic() + limit_seconds
    n_done = 0
    while time.monotonic() < end:
        work()
        n_done += 1
    return n_done


if __name__ == "__main__":
    main()
