"""Measure the commits per second of many writers in one process, with and without group commit.

Run from the project's root: ``.venv/bin/python -m benchmarks.writers``. It writes ``benchmarks/results/writers.md``
and a plot. Writers are threads, and every request to the in-memory storage takes 20 ms. With group commit, all writers
share one ``Lakehouse``. Without it, they share only its caches, and each has a separate commit queue.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from benchmarks.lakes import SlowStorage
from benchmarks.report import by_writers, plot, table, write_result
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.errors import CommitAttemptsExhaustedError, CommitConflictError
from trinitylake_ops.storage import MemoryStorage, Storage, drop_memory_root

WRITERS = (1, 2, 4, 8, 16, 32)
N_SHARED_TABLES = 4
SECONDS = 5.0
_WARM_UP_SECONDS = 1.0
ROOT = "memory://writers/"


@dataclass(frozen=True)
class Throughput:
    """Commits, aborts and versions per second, and the minimum and maximum number of commits of a writer."""

    commits: float
    aborts: float
    fewest: int
    most: int
    versions: float

    @property
    def aborted(self) -> float:
        """The share of finished transactions that were aborted."""
        return self.aborts / max(1e-9, self.commits + self.aborts)


def measure(n_writers: int, *, is_contended: bool, in_groups: bool) -> Throughput:
    """Run writers that commit for ``SECONDS``.

    Args:
        n_writers: The number of threads.
        is_contended: Whether the writers change the same few tables.
        in_groups: Whether they share one commit queue.
    """
    storage = MemoryStorage(ROOT)
    try:
        lake = Lakehouse.create(ROOT, storage=storage)
        with lake.transaction() as txn:
            txn.create_namespace("ns")
            for number in range(max(n_writers, N_SHARED_TABLES)):
                txn.create_table("ns", f"t{number}", TableDef())
        return _measure(SlowStorage(storage), n_writers, is_contended, in_groups)
    finally:
        drop_memory_root(ROOT)


def _measure(storage: Storage, n_writers: int, is_contended: bool, in_groups: bool) -> Throughput:
    shared = Lakehouse(storage)
    begin = time.monotonic() + _WARM_UP_SECONDS
    end = begin + SECONDS
    commits, aborts = [0] * n_writers, [0] * n_writers
    versions: set[int] = set()

    def work(writer: int) -> None:
        generator = random.Random(writer)
        lake = shared
        if not in_groups:
            lake = Lakehouse(storage)
            lake.files = shared.files
        for number in itertools.count():
            name = f"t{generator.randrange(N_SHARED_TABLES) if is_contended else writer}"
            txn = lake.transaction()
            txn.alter_table("ns", name, TableDef(properties={"by": f"{writer} {number}"}))
            try:
                version, is_committed = txn.commit(), True
            except (CommitConflictError, CommitAttemptsExhaustedError):
                version, is_committed = 0, False
            now = time.monotonic()
            if now > end:
                return
            if now > begin:
                commits[writer] += is_committed
                aborts[writer] += not is_committed
                versions.add(version)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(n_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Throughput(
        sum(commits) / SECONDS, sum(aborts) / SECONDS, min(commits), max(commits), len(versions - {0}) / SECONDS
    )


CASES: Mapping[str, Callable[[int], Throughput]] = {
    "disjoint, in groups": partial(measure, is_contended=False, in_groups=True),
    "disjoint, separate queues": partial(measure, is_contended=False, in_groups=False),
    "contended, in groups": partial(measure, is_contended=True, in_groups=True),
    "contended, separate queues": partial(measure, is_contended=True, in_groups=False),
}


def main() -> None:
    """Measure, print and write the results."""
    results: dict[str, dict[int, Throughput]] = {}
    for case, run in CASES.items():
        results[case] = {n_writers: run(n_writers) for n_writers in WRITERS}
        print(case, "done", flush=True)
    write_result("writers", report(results))


def report(results: Mapping[str, Mapping[int, Throughput]]) -> Sequence[str]:
    """Return the lines of Markdown, with the plot."""
    single = results["disjoint, in groups"][1].commits
    rows = [
        [
            case,
            n_writers,
            f"{throughput.commits:.1f}",
            f"{throughput.commits / single:.1f}",
            f"{throughput.aborted:.0%}",
            f"{throughput.versions:.1f}",
            f"{throughput.fewest} to {throughput.most}",
        ]
        for case, by_number in results.items()
        for n_writers, throughput in by_number.items()
    ]

    def draw(axes: Sequence[Axes]) -> None:
        commits = {
            case: {n: throughput.commits for n, throughput in by_number.items()} for case, by_number in results.items()
        }
        aborted = {
            case: {n: throughput.aborted for n, throughput in by_number.items()} for case, by_number in results.items()
        }
        by_writers(axes, "writers", {"commits per second": commits, "aborted transactions": aborted})
        axes[0].axhline(8 * single, color="black", linestyle=":", label="8 x one writer")
        axes[0].legend()

    return [
        "# Many writers in one process",
        "",
        f"Generated by `benchmarks/writers.py`: threads for {SECONDS:.0f} s each, 20 ms per request. Disjoint: each"
        f" changes a separate table; contended: each changes one of {N_SHARED_TABLES} tables. A transaction that"
        " conflicts is aborted, and the writer begins the next one.",
        "",
        plot("writers", draw, n_axes=2),
        "",
        *table(
            [
                "case",
                "writers",
                "commits / s",
                "x one writer",
                "aborted",
                "versions / s",
                "commits of one writer, min to max",
            ],
            rows,
        ),
    ]


if __name__ == "__main__":
    main()
