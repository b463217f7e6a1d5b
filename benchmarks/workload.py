"""One piece of work over and over, for profilers.

Run from the project's root, for some seconds: ``.venv/bin/python -m benchmarks.workload WORK SECONDS``. ``profiles.py``
runs it under py-spy; for a flame graph put ``.venv/bin/py-spy record -o flame.svg --`` before it.
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
    """Look a table up, cold."""
    return lambda: Lakehouse(storage, cache="off").snapshot().table("ns", name(42))


WORKS: Mapping[str, Callable[[Storage], Callable[[], object]]] = {
    "commit": commit,
    "list": list_tables,
    "lookup": lookup,
}


def main() -> None:
    """Do the work until the time is over, and say how often."""
    work_name, limit_seconds = sys.argv[1], float(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        storage = MadeUpDefinitions(LocalStorage(Path(folder).as_uri() + "/lake/", fsync=False))
        loaded(storage, N_TABLES)
        n_done = repeated(WORKS[work_name](storage), limit_seconds)
    print(f"{work_name}: {n_done} times in {limit_seconds:g} s")


def repeated(work: Callable[[], object], limit_seconds: float) -> int:
    """Work until the time is over; returns how often."""
    end = time.monotonic() + limit_seconds
    n_done = 0
    while time.monotonic() < end:
        work()
        n_done += 1
    return n_done


if __name__ == "__main__":
    main()
