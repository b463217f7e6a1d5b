"""Commits per second of many processes, each with a table of its own.

Run from the project's root: ``.venv/bin/python -m benchmarks.processes``; it writes ``benchmarks/results/processes.md``
and a plot. On a local disk nothing else should run. On S3, a radosgw that it starts, each request takes 20 ms more.
Beside the engine stands the store's own bound: the same processes create numbered files, one after the other, with
nothing in them. A process that lost a number looks for the next free one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Empty

from matplotlib.axes import Axes

from benchmarks.lakes import SlowStorage
from benchmarks.report import by_writers, plot, table, write_result
from benchmarks.s3 import radosgw
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.errors import FileExistsAlreadyError
from trinitylake_ops.storage import LocalStorage, Storage, StorageWrapper, open_storage

N_TABLES = 1_000
SECONDS = 5.0
_NUMBERED = "numbered/{:09}"
_SPAWN = multiprocessing.get_context("spawn")


class WithoutLine(StorageWrapper):
    """A storage whose processes do not wait in line."""

    def commit_lock(self, longest_s: float) -> nullcontext[bool]:
        del longest_s
        return nullcontext(False)


@dataclass(frozen=True)
class Place:
    """Where processes commit: each opens the storage for itself."""

    root: str
    options: Mapping[str, str]
    fsync: bool = False
    has_line: bool = True

    def storage(self, *, is_slow: bool = True) -> Storage:
        if self.root.startswith("file:"):
            local = LocalStorage(self.root, fsync=self.fsync)
            return local if self.has_line else WithoutLine(local)
        remote = open_storage(self.root, self.options)
        return SlowStorage(remote) if is_slow else remote


@dataclass(frozen=True)
class Figures:
    """What processes reached together, and how long single commits took in milliseconds."""

    per_second: float
    median_ms: float
    p99_ms: float
    longest_ms: float
    attempts: float
    fewest: int
    most: int
    bound: float

    @classmethod
    def of(cls, took_s: Sequence[Sequence[float]], attempts: float, n_numbered: int) -> Figures:
        every = sorted(1000 * seconds for own in took_s for seconds in own)
        return cls(
            len(every) / SECONDS,
            statistics.median(every),
            every[int(0.99 * len(every))],
            every[-1],
            attempts,
            min(map(len, took_s)),
            max(map(len, took_s)),
            n_numbered / SECONDS,
        )


def _commit(place: Place, number: int, begin: Barrier, results: Queue[list[float]]) -> None:
    lake = Lakehouse.open(place.root, storage=place.storage())

    def change(stamp: int) -> None:
        with lake.transaction() as txn:
            txn.alter_table("ns", f"t{number}", TableDef(properties={"by": f"{os.getpid()} {stamp}"}))

    change(-1)  # what a process does once is no part of its commits
    begin.wait()
    took_s: list[float] = []
    end_s = time.monotonic() + SECONDS
    while (begun_s := time.monotonic()) < end_s:
        change(len(took_s))
        took_s.append(time.monotonic() - begun_s)
    lake.close()
    results.put(took_s)


def _create_numbered(place: Place, number: int, begin: Barrier, results: Queue[list[float]]) -> None:
    del number
    storage, free = place.storage(), 0
    storage.exists(_NUMBERED.format(free))
    begin.wait()
    took_s: list[float] = []
    end_s = time.monotonic() + SECONDS
    while (begun_s := time.monotonic()) < end_s:
        try:
            storage.create(_NUMBERED.format(free), b"")
            took_s.append(time.monotonic() - begun_s)
        except FileExistsAlreadyError:
            while storage.exists(_NUMBERED.format(free + 1)):
                free += 1
        free += 1
    results.put(took_s)


Work = Callable[[Place, int, Barrier, "Queue[list[float]]"], None]


def _by_processes(work: Work, place: Place, n_processes: int) -> list[list[float]]:
    begin, results = _SPAWN.Barrier(n_processes), _SPAWN.Queue()
    processes = [_SPAWN.Process(target=work, args=(place, n, begin, results)) for n in range(n_processes)]
    for process in processes:
        process.start()
    took_s: list[list[float]] = []
    while len(took_s) < n_processes:
        try:
            took_s.append(results.get(timeout=1))
        except Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("a process failed; its traceback is above") from None
    for process in processes:
        process.join()
    return took_s


def measure(place: Place, n_processes: int) -> Figures:
    """Let processes commit for a while, and then the same number of them create numbered files."""
    storage = place.storage(is_slow=False)
    lake = Lakehouse.create(place.root, storage=storage)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(N_TABLES):
            txn.create_table("ns", f"t{number}", TableDef())
    os.sync()  # what earlier cases left to be written would slow this one down
    took_s = _by_processes(_commit, place, n_processes)
    n_versions = sum(map(len, took_s)) + n_processes
    costs = [info.cost["attempts"] for info in itertools.islice(lake.history(), n_versions) if info.cost]
    numbered_s = _by_processes(_create_numbered, place, n_processes)
    return Figures.of(took_s, statistics.mean(costs), sum(map(len, numbered_s)))


@dataclass(frozen=True)
class Case:
    """A kind of storage, and how many processes commit there."""

    name: str
    n_processes: Sequence[int]
    place: Callable[[Path, S3Server], Place]


def _local(folder: Path, *, fsync: bool, has_line: bool) -> Place:
    return Place(f"{folder.as_uri()}/{uuid.uuid4()}/", {}, fsync, has_line)


def _on_s3(server: S3Server, client: str) -> Place:
    return Place(f"s3://{server.bucket}/processes-{uuid.uuid4()}/", {**server.storage_options, "client": client})


CASES = (
    Case("local disk", (1, 2, 4, 8), lambda folder, _: _local(folder, fsync=False, has_line=True)),
    Case("local disk, no line", (1, 2, 4, 8), lambda folder, _: _local(folder, fsync=False, has_line=False)),
    Case("local disk, synced", (1, 2, 4, 8), lambda folder, _: _local(folder, fsync=True, has_line=True)),
    Case("S3, obstore", (1, 4, 16), lambda _, server: _on_s3(server, "obstore")),
)


def main() -> None:
    """Measure, print and write the results."""
    results: dict[str, dict[int, Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder, radosgw() as server:
        for case in CASES:
            results[case.name] = {}
            for n_processes in case.n_processes:
                found = measure(case.place(Path(folder), server), n_processes)
                results[case.name][n_processes] = found
                print(case.name, n_processes, found, flush=True)
    write_result("processes", report(results))


def report(results: Mapping[str, Mapping[int, Figures]]) -> Sequence[str]:
    """Return the lines of Markdown, with the plot."""
    rows = [
        [
            case,
            n_processes,
            f"{found.per_second:.0f}",
            f"{found.per_second / figures[1].per_second:.2f}",
            f"{found.bound:.0f}",
            f"{found.median_ms:.1f}",
            f"{found.p99_ms:.0f}",
            f"{found.longest_ms:.0f}",
            f"{found.longest_ms / found.median_ms:.0f}",
            f"{found.attempts:.2f}",
            f"{found.fewest} to {found.most}",
        ]
        for case, figures in results.items()
        for n_processes, found in figures.items()
    ]

    def draw(axes: Sequence[Axes]) -> None:
        ratios = {
            case: {n: found.per_second / figures[1].per_second for n, found in figures.items()}
            for case, figures in results.items()
        }
        waits = {
            case: {n: found.longest_ms / found.median_ms for n, found in figures.items()}
            for case, figures in results.items()
        }
        charts = {"commits per second, x one process": ratios, "longest commit, x median": waits}
        by_writers(axes, "processes", charts)
        axes[0].legend()

    return [
        "# Many processes",
        "",
        f"Made by `benchmarks/processes.py`: {SECONDS:.0f} s each, {N_TABLES:,} tables. On S3 each request takes 20 ms"
        " more. The bound is what the same processes reach that create numbered, empty files.",
        "",
        plot("processes", draw, n_axes=2),
        "",
        *table(
            [
                "storage",
                "processes",
                "commits / s",
                "x one process",
                "bound / s",
                "median ms",
                "p99 ms",
                "longest ms",
                "longest, x median",
                "attempts a commit",
                "commits of one process, fewest to most",
            ],
            rows,
        ),
    ]


if __name__ == "__main__":
    main()
