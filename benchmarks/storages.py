"""The engine on every storage: what begin, commit, lookup and list ask for and take, and its overhead over the client.

Run from the project's root: ``.venv/bin/python -m benchmarks.storages``; it starts all servers of its own (the packages
of ``deploy/debian-packages.txt``), and writes ``benchmarks/results/storages.md`` and a plot in some minutes. Requests
and rounds depend on no machine; times are only worth as ratios within the run. Each work runs once in the engine and
once as the same requests, with the same bytes and in the same rounds, sent through the client library alone; the two
take turns. A third turn sends these requests and decodes with pyarrow alone the node files that were read. Then both do
it again with 5 ms more for each request, as a service takes that is not on this machine.
``--quick`` shows within a minute or two that all works.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.bare.objects import BareAzure, BareGcsfs, BareObstore, BareS3fs
from benchmarks.bare.others import BareDynamoDB, BareFiles, BareHdfs, BareRedis
from benchmarks.lakes import SlowStorage, changed, deferred_background_work, filled, name
from benchmarks.replay import BareClient, Recorder, Replay, SlowClient, decoded
from benchmarks.report import RESULTS, plot, table, write_result
from benchmarks.servers import running
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import MeteredStorage, RequestCounts, Storage, open_storage

N_TABLES, N_TURNS, N_FIRST_TURNS = 1_000, 60, 3
QUICK_TABLES, QUICK_TURNS = 100, 3
#: Added latency of a request, to simulate a remote service.
AWAY_SECONDS = 0.005
#: Target overhead of the default client.
MOST_OVERHEAD = 1.3


@dataclass(frozen=True)
class Case:
    """A storage with one of its clients. ``kind`` is the kind of its server, or None for a local disk."""

    name: str
    kind: str | None
    bare: Callable[[Any, str], BareClient]
    options: Mapping[str, str] = field(default_factory=dict)


CASES = (
    Case("local disk", None, lambda _, root: BareFiles(root)),
    Case("S3, s3fs", "radosgw", BareS3fs, {"client": "s3fs"}),
    Case("S3, obstore", "radosgw", BareObstore, {"client": "obstore"}),
    Case("Azure, azure-storage-blob", "azurite", BareAzure),
    Case("Google, gcsfs", "fake_gcs", BareGcsfs),
    Case("DynamoDB, botocore", "dynalite", BareDynamoDB),
    Case("Redis, redis-py", "redis_server", BareRedis),
    Case("Valkey, redis-py", "valkey_server", BareRedis),
    Case("HDFS, hdfs-native", "hdfs", BareHdfs),
)


@dataclass(frozen=True)
class Work:
    """A measured operation: ``prepared`` returns the call. Cold operations start with empty caches each time."""

    name: str
    is_cold: bool
    prepared: Callable[[Lakehouse], Callable[[], object]]


def _commit(lake: Lakehouse) -> Callable[[], object]:
    txn = lake.transaction()
    txn.alter_table("ns", random.choice(txn.tables("ns")), changed())
    return txn.commit


def _read(lake: Lakehouse) -> Callable[[], object]:
    path = lake.snapshot().definition_location
    return lambda: lake.storage.read(path)


WORKS = (
    Work("one read, by the storage alone", False, _read),
    Work("begin, warm", False, lambda lake: lambda: lake.snapshot().definition),
    Work("commit of one table, warm", False, _commit),
    Work("look a table up, cold", True, lambda lake: lambda: lake.snapshot().table("ns", name(42))),
    Work("list all tables, cold", True, lambda lake: lambda: lake.snapshot().tables("ns")),
)


@dataclass
class Times:
    """Seconds of each turn: wall-clock time, and CPU time of all threads."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, call: Callable[[], object]) -> None:
        """Make a call and record its duration."""
        begun_cpu, begun = time.process_time(), time.perf_counter()
        call()
        self.wall.append(time.perf_counter() - begun)
        self.cpu.append(time.process_time() - begun_cpu)

    def drop_first(self, n: int) -> None:
        """Discard the first turns, which establish connections."""
        del self.wall[:n], self.cpu[:n]

    @property
    def wall_ms(self) -> float:
        """Median of the wall-clock time."""
        return 1000 * statistics.median(self.wall)

    @property
    def cpu_ms(self) -> float:
        """Median of the CPU time."""
        return 1000 * statistics.median(self.cpu)


@dataclass(frozen=True)
class Figures:
    """Requests of one operation on one storage, and durations with the engine and with the bare client."""

    counts: RequestCounts
    engine: Times = field(default_factory=Times)
    bare: Times = field(default_factory=Times)
    decoding: Times = field(default_factory=Times)

    @property
    def overhead(self) -> float:
        """Duration with the engine as a multiple of the bare client's."""
        return self.engine.wall_ms / self.bare.wall_ms


def counted(storage: Storage, work: Work) -> RequestCounts:
    """Count the requests of an operation."""
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter)
    if not work.is_cold:
        lake.snapshot().tables("ns")
    with deferred_background_work():
        call = work.prepared(lake)
        with meter.measure() as measurement:
            call()
    return measurement.counts


def measure(storage: Storage, work: Work, bare: BareClient, n_turns: int) -> Figures:
    """Run an operation alternately with the engine and the bare client, without background work."""
    found = Figures(counted(storage, work))
    recorder = Recorder(storage)
    warm = Lakehouse(recorder)
    warm.snapshot().tables("ns")
    with Replay(bare, storage) as replay:
        for turn in range(N_FIRST_TURNS + n_turns):
            with deferred_background_work():
                call = work.prepared(Lakehouse(recorder) if work.is_cold else warm)
                recorder.requests = []
                found.engine.add(call)
                rounds = recorder.rounds()
            found.bare.add(functools.partial(replay.send, rounds, f"{turn}-alone"))
            found.decoding.add(functools.partial(replay.send, rounds, f"{turn}-decoded", decoded))
    for times in (found.engine, found.bare, found.decoding):
        times.drop_first(N_FIRST_TURNS)
    return found


@contextmanager
def place(kind: str | None) -> Iterator[tuple[Any, Callable[[], str], Mapping[str, str]]]:
    """Start a server, and yield a function that returns new roots, and their options."""
    if kind is None:
        with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
            yield None, lambda: f"file://{folder}/lake/", {}
    else:
        with running(kind) as server:
            yield server, server.fresh_root, server.storage_options


#: Results by storage and operation: without and with added latency.
Results = Mapping[str, Mapping[str, tuple[Figures, Figures]]]


def measure_all(cases: Sequence[Case], n_tables: int, n_turns: int) -> Results:
    """Measure every operation on every storage."""
    results: dict[str, dict[str, tuple[Figures, Figures]]] = {}
    for kind, same in itertools.groupby(cases, key=lambda case: case.kind):
        with place(kind) as (server, fresh_root, options):
            for case in same:
                begun = time.perf_counter()
                root = fresh_root()
                storage = open_storage(root, {**options, **case.options})
                filled(storage, n_tables)
                with closing(case.bare(server, root)) as bare:
                    away, bare_away = SlowStorage(storage, AWAY_SECONDS), SlowClient(bare, AWAY_SECONDS)
                    results[case.name] = {
                        work.name: (measure(storage, work, bare, n_turns), measure(away, work, bare_away, n_turns))
                        for work in WORKS
                    }
                print(f"{case.name} done in {time.perf_counter() - begun:.0f} s", flush=True)
    return results


def draw(axes: Sequence[Axes], results: Results) -> None:
    """Plot milliseconds and the overhead over the bare client, by storage."""
    times_axes, overhead_axes = axes
    for work in WORKS:
        figures = [found[work.name][0] for found in results.values()]
        times_axes.plot(list(results), [found.engine.wall_ms for found in figures], "o", label=work.name)
        overhead_axes.plot(list(results), [found.overhead for found in figures], "o", label=work.name)
    times_axes.set_yscale("log")
    times_axes.set_title("milliseconds (median)")
    times_axes.legend()
    overhead_axes.axhline(MOST_OVERHEAD, color="black", linestyle=":")
    overhead_axes.set_ylim(bottom=0)
    overhead_axes.set_title(f"time of the engine, x the client alone; goal {MOST_OVERHEAD}")
    for each in axes:
        each.tick_params(axis="x", rotation=60)


def report(results: Results, n_tables: int, n_turns: int, folder: Path) -> list[str]:
    """Return the lines of Markdown, with the plot."""
    asked = [
        [
            storage,
            *(f"{found[work.name][0].counts.total} ({found[work.name][0].counts.rounds})" for work in WORKS),
            *(f"{found[work.name][0].engine.wall_ms:.1f}" for work in WORKS),
        ]
        for storage, found in results.items()
    ]
    return [
        "# Every storage",
        "",
        f"Made by `benchmarks/storages.py`: {n_tables:,} tables, default settings, {n_turns} turns, servers on"
        " loopback, which share the processors with their client. Local disk, Redis, Valkey and HDFS sync.",
        "A request is one call of the storage's interface; on HDFS it is several calls of NameNode and DataNodes."
        " What is done beside a commit, the write of the hint, is left out.",
        "",
        plot("storages", lambda axes: draw(axes, results), n_axes=2, width=6.5, height=5, folder=folder),
        "",
        *table(
            [
                "storage and client",
                *(f"{work.name}: requests (rounds)" for work in WORKS),
                *(f"{work.name}: ms" for work in WORKS),
            ],
            asked,
        ),
        "",
        "The engine beside the same requests sent through the client library alone, in one run, by turns: medians, in"
        " milliseconds, on the clock and of CPU time in all threads. And beside these requests with node files decoded"
        f" by pyarrow alone, as any reader has to. The last column has both with {AWAY_SECONDS * 1000:.0f} ms more for"
        " each request, as of a service that is not on this machine.",
        "",
        *table(
            [
                *("storage and client", "work", "engine: ms", "client: ms", "engine / client"),
                *("client and pyarrow / client", "engine: CPU ms", "client: CPU ms", "CPU: engine / client"),
                f"{AWAY_SECONDS * 1000:.0f} ms away: engine / client",
            ],
            (_overhead(storage, work, *found[work.name]) for storage, found in results.items() for work in WORKS),
        ),
    ]


def _overhead(storage: str, work: Work, found: Figures, away: Figures) -> list[str]:
    return [
        storage,
        work.name,
        f"{found.engine.wall_ms:.2f}",
        f"{found.bare.wall_ms:.2f}",
        f"{found.overhead:.2f}",
        f"{found.decoding.wall_ms / found.bare.wall_ms:.2f}",
        f"{found.engine.cpu_ms:.2f}",
        f"{found.bare.cpu_ms:.2f}",
        f"{found.engine.cpu_ms / found.bare.cpu_ms:.2f}",
        f"{away.overhead:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storages", description="The engine on every storage.")
    parser.add_argument("--quick", action="store_true", help="few tables and turns: nothing but a trial")
    parser.add_argument("--turns", type=int, help=f"turns of each work, by default {N_TURNS}")
    parser.add_argument(
        "--only", action="append", default=[], metavar="STORAGE", help="measure those whose name begins so"
    )
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    n_tables = QUICK_TABLES if given.quick else N_TABLES
    n_turns = given.turns or (QUICK_TURNS if given.quick else N_TURNS)
    cases = [case for case in CASES if not given.only or case.name.startswith(tuple(given.only))]
    results = measure_all(cases, n_tables, n_turns)
    write_result("storages", report(results, n_tables, n_turns, given.to), given.to)


if __name__ == "__main__":
    main()
