"""Requests, sequential rounds and bytes of the engine's basic work, which depend on no machine.

Run from the project's root: ``.venv/bin/python benchmarks/request_counts.py``; it writes
``benchmarks/results/request_counts.md``. *Cold* is a process that has read nothing yet, *warm* one that has
just read the latest version. A round is a request, or several in parallel, that others wait for.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, RequestCounts, Storage, drop_memory_root

TABLE_COUNTS = (100, 1_000, 10_000)
COMMITS = 300
RESULTS = Path(__file__).parent / "results" / "request_counts.md"


def filled(storage: Storage, n_tables: int) -> Lakehouse:
    """Create a lakehouse with default settings and ``n_tables`` tables in one namespace."""
    lake = Lakehouse.create(storage.root, storage=storage)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(n_tables):
            txn.create_table("ns", f"t{number:06}", TableDef())
    return lake


def measured(storage: Storage, work: Callable[[Lakehouse], object], *, warm: bool) -> RequestCounts:
    """Count what a piece of work asks of the storage."""
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter)
    if warm:
        work(lake)
    with meter.measure() as measurement:
        work(lake)
    return measurement.counts


def change_one(lake: Lakehouse, name: str) -> None:
    """Commit a change of one table."""
    with lake.transaction() as txn:
        txn.alter_table("ns", name, TableDef(properties={"stamp": str(random.random())}))


def commits(storage: Storage, n_tables: int) -> str:
    """Change random tables one by one; nodes and bytes per commit, and the most nodes of one."""
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter)
    generator = random.Random(n_tables)
    nodes, written, rounds = [], [], []
    for _ in range(COMMITS):
        with meter.measure() as measurement:
            change_one(lake, f"t{generator.randrange(n_tables):06}")
        counts = measurement.counts
        nodes.append(counts.requests["create"] - 2)  # besides the definition and the root
        written.append(counts.bytes_written)
        rounds.append(counts.rounds)
    figures = (
        statistics.mean(nodes),
        max(nodes),
        statistics.mean(written) / 1000,
        statistics.median(rounds),
    )
    return "{:.2f} | {} | {:.0f} | {:.0f}".format(*figures)


def row(counts: RequestCounts) -> str:
    """Return the cells of a table of results."""
    return f"{counts.total} ({counts.rounds}) | {counts.bytes_read / 1000:.0f}"


def main() -> None:
    """Measure, print and write the results."""
    work: dict[str, tuple[Callable[[Lakehouse], object], bool]] = {
        "begin, cold": (lambda lake: lake.snapshot().definition, False),
        "begin, warm": (lambda lake: lake.snapshot().definition, True),
        "look up a table, cold": (lambda lake: lake.snapshot().table("ns", "t000042"), False),
        "list the tables, cold": (lambda lake: lake.snapshot().tables("ns"), False),
        "list the tables, warm": (lambda lake: lake.snapshot().tables("ns"), True),
        "diff with the version before, cold": (
            lambda lake: lake.diff(lake.latest_version() - 1, lake.latest_version()),
            False,
        ),
    }
    reading, writing = [], []
    for n_tables in TABLE_COUNTS:
        storage = MemoryStorage(f"memory://requests-{n_tables}/")
        filled(storage, n_tables)
        writing.append(f"| {n_tables:,} | {commits(storage, n_tables)} |")
        for name, (call, warm) in work.items():
            reading.append(f"| {n_tables:,} | {name} | {row(measured(storage, call, warm=warm))} |")
        drop_memory_root(storage.root)
    text = "\n".join(
        [
            "# Requests, rounds and bytes",
            "",
            "Made by `benchmarks/request_counts.py`: default settings, storage in memory.",
            "",
            "| tables | work | requests (rounds) | kB read |",
            "|---:|---|---:|---:|",
            *reading,
            "",
            f"{COMMITS} commits that change one random table each; the transaction's begin is counted in.",
            "",
            "| tables | nodes written, mean | most in one commit | kB written, mean | rounds, median |",
            "|---:|---:|---:|---:|---:|",
            *writing,
            "",
        ]
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
