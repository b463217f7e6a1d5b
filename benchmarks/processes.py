"""Measure the commits per second of many processes, each of which changes a separate table.

Run from the project's root: ``.venv/bin/python -m benchmarks.processes``. It writes ``benchmarks/results/processes.md``
and a plot. Run nothing else during the cases on local disk. For S3, it starts a radosgw and delays each request by
20 ms. To measure the upper bound of the storage, the same processes create empty, numbered files. If a number is
already taken, a process searches for the next free number.
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


class WithoutCommitLock(StorageWrapper):
    """A storage without the commit lock between processes."""

    def commit_lock(self, max_s: float) -> nullcontext[bool]:
        del max_s
        return nullcontext(False)


@dataclass(frozen=True)
class Target:
    """The location to which processes commit. Each process opens the storage itself."""

    root: str
    options: Mapping[str, str]
    fsync: bool = False
    has_commit_lock: bool = True

    def storage(self, *, is_slow: bool = True) -> Storage:
        if self.root.startswith("file:"):
            local = LocalStorage(self.root, fsync=self.fsync)
            return local if self.has_commit_lock else WithoutCommitLock(local)
        remote = open_storage(self.root, self.options)
        return SlowStorage(remote) if is_slow else remote


@dataclass(frozen=True)
class Throughput:
    """Throughput of all processes, and durations of single commits in milliseconds."""

    per_second: float
    median_ms: float
    p99_ms: float
    longest_ms: float
    attempts: float
    fewest: int
    most: int
    bound: float

    @classmethod
    def of(cls, durations_s: Sequence[Sequence[float]], attempts: float, n_numbered: int) -> Throughput:
        all_ms = sorted(1000 * seconds for process_s in durations_s for seconds in process_s)
        return cls(
            len(all_ms) / SECONDS,
            statistics.median(all_ms),
            all_ms[int(0.99 * len(all_ms))],
            all_ms[-1],
            attempts,
            min(map(len, durations_s)),
            max(map(len, durations_s)),
            n_numbered / SECONDS,
        )


def _commit(target: Target, number: int, begin: Barrier, results: Queue[list[float]]) -> None:
    lake = Lakehouse.open(target.root, storage=target.storage())

    def change(stamp: int) -> None:
        with lake.transaction() as txn:
            txn.alter_table("ns", f"t{number}", TableDef(properties={"by": f"{os.getpid()} {stamp}"}))

    change(-1)  # so that one-time work of the process is not measured
    begin.wait()
    durations_s: list[float] = []
    end_s = time.monotonic() + SECONDS
    while (started_s := time.monotonic()) < end_s:
        change(len(durations_s))
        durations_s.append(time.monotonic() - started_s)
    lake.close()
    results.put(durations_s)


def _create_numbered(target: Target, number: int, begin: Barrier, results: Queue[list[float]]) -> None:
    del number
    storage, free = target.storage(), 0
    storage.exists(_NUMBERED.format(free))
    begin.wait()
    durations_s: list[float] = []
    end_s = time.monotonic() + SECONDS
    while (started_s := time.monotonic()) < end_s:
        try:
            storage.create(_NUMBERED.format(free), b"")
            durations_s.append(time.monotonic() - started_s)
        except FileExistsAlreadyError:
            while storage.exists(_NUMBERED.format(free + 1)):
                free += 1
        free += 1
    results.put(durations_s)


Work = Callable[[Target, int, Barrier, "Queue[list[float]]"], None]


def _in_processes(work: Work, target: Target, n_processes: int) -> list[list[float]]:
    begin, results = _SPAWN.Barrier(n_processes), _SPAWN.Queue()
    processes = [_SPAWN.Process(target=work, args=(target, n, begin, results)) for n in range(n_processes)]
    for process in processes:
        process.start()
    durations_s: list[list[float]] = []
    while len(durations_s) < n_processes:
        try:
            durations_s.append(results.get(timeout=1))
        except Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("a process failed; see its traceback above") from None
    for process in processes:
        process.join()
    return durations_s


def measure(target: Target, n_processes: int) -> Throughput:
    """Measure processes that commit, and then the same number of processes that create numbered files."""
    storage = target.storage(is_slow=False)
    lake = Lakehouse.create(target.root, storage=storage)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(N_TABLES):
            txn.create_table("ns", f"t{number}", TableDef())
    os.sync()  # pending writes of earlier cases would slow this one down
    durations_s = _in_processes(_commit, target, n_processes)
    n_versions = sum(map(len, durations_s)) + n_processes
    costs = [info.cost["attempts"] for info in itertools.islice(lake.history(), n_versions) if info.cost]
    numbered_s = _in_processes(_create_numbered, target, n_processes)
    return Throughput.of(durations_s, statistics.mean(costs), sum(map(len, numbered_s)))


@dataclass(frozen=True)
class Case:
    """A kind of storage, and the numbers of processes to measure."""

    name: str
    n_processes: Sequence[int]
    target: Callable[[Path, S3Server], Target]


def _local(folder: Path, *, fsync: bool, has_commit_lock: bool) -> Target:
    return Target(f"{folder.as_uri()}/{uuid.uuid4()}/", {}, fsync, has_commit_lock)


def _on_s3(server: S3Server, client: str) -> Target:
    return Target(f"s3://{server.bucket}/processes-{uuid.uuid4()}/", {**server.storage_options, "client": client})


CASES = (
    Case("local disk", (1, 2, 4, 8), lambda folder, _: _local(folder, fsync=False, has_commit_lock=True)),
    Case(
        "local disk, no commit lock", (1, 2, 4, 8), lambda folder, _: _local(folder, fsync=False, has_commit_lock=False)
    ),
    Case("local disk, synced", (1, 2, 4, 8), lambda folder, _: _local(folder, fsync=True, has_commit_lock=True)),
    Case("S3, obstore", (1, 4, 16), lambda _, server: _on_s3(server, "obstore")),
)


def main() -> None:
    """Measure, print and write the results."""
    results: dict[str, dict[int, Throughput]] = {}
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder, radosgw() as server:
        for case in CASES:
            results[case.name] = {}
            for n_processes in case.n_processes:
                throughput = measure(case.target(Path(folder), server), n_processes)
                results[case.name][n_processes] = throughput
                print(case.name, n_processes, throughput, flush=True)
    write_result("processes", report(results))


def report(results: Mapping[str, Mapping[int, Throughput]]) -> Sequence[str]:
    """Return the lines of Markdown, with the plot."""
    rows = [
        [
            case,
            n_processes,
            f"{throughput.per_second:.0f}",
            f"{throughput.per_second / by_number[1].per_second:.2f}",
            f"{throughput.bound:.0f}",
            f"{throughput.median_ms:.1f}",
            f"{throughput.p99_ms:.0f}",
            f"{throughput.longest_ms:.0f}",
            f"{throughput.longest_ms / throughput.median_ms:.0f}",
            f"{throughput.attempts:.2f}",
            f"{throughput.fewest} to {throughput.most}",
        ]
        for case, by_number in results.items()
        for n_processes, throughput in by_number.items()
    ]

    def draw(axes: Sequence[Axes]) -> None:
        ratios = {
            case: {n: throughput.per_second / by_number[1].per_second for n, throughput in by_number.items()}
            for case, by_number in results.items()
        }
        waits = {
            case: {n: throughput.longest_ms / throughput.median_ms for n, throughput in by_number.items()}
            for case, by_number in results.items()
        }
        charts = {"commits per second, x one process": ratios, "longest commit, x median": waits}
        by_writers(axes, "processes", charts)
        axes[0].legend()

    return [
        "# Many processes",
        "",
        f"Generated by `benchmarks/processes.py`: {SECONDS:.0f} s each, {N_TABLES:,} tables. On S3, each request is"
        " delayed by 20 ms. The bound is the rate at which the same processes create numbered, empty files.",
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
                "attempts per commit",
                "commits of one process, min to max",
            ],
            rows,
        ),
    ]


if __name__ == "__main__":
    main()
