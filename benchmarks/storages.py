"""The engine on every storage: requests and times of begin, commit, lookup and list, and the overhead over the client.

Run from the project's root: ``.venv/bin/python -m benchmarks.storages``. It starts all servers itself (packages in
``deploy/debian-packages.txt``), and writes ``benchmarks/results/storages.md`` and a plot within some minutes. Requests
and rounds do not depend on the machine; of the times, only the ratios within one run are meaningful. Each operation
runs in the engine and then as the same requests, with the same bytes in the same rounds, sent through the client
library alone, by turns. A third run sends these requests and also decodes the node files with pyarrow alone.
Everything is repeated with 5 ms more for each request, to simulate a remote service. ``--quick`` is a smoke test of a
minute or two.
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
from benchmarks.lakes import SlowStorage, deferred_background_work, filled, name, new_definition
from benchmarks.replay import BareClient, Recorder, Replay, SlowClient, decode_node_file
from benchmarks.report import RESULTS, plot, table, write_result
from benchmarks.servers import running_server
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import MeteredStorage, RequestCounts, Storage, open_storage

N_TABLES, N_TURNS, N_WARM_UP_TURNS = 1_000, 60, 3
QUICK_TABLES, QUICK_TURNS = 100, 3
#: Added latency of a request, to simulate a remote service.
LATENCY_SECONDS = 0.005
#: Target overhead of the default client.
MAX_OVERHEAD = 1.3


@dataclass(frozen=True)
class Case:
    """A storage with one of its clients.

    Attributes:
        name: The label in the results.
        kind: The kind of its server, or None for a local disk.
        bare: Creates the bare client from the server and the root.
        options: Storage options.
    """

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
class Operation:
    """A measured operation: ``prepare`` returns the call. Cold operations start with empty caches each time."""

    name: str
    is_cold: bool
    prepare: Callable[[Lakehouse], Callable[[], object]]


def _commit(lake: Lakehouse) -> Callable[[], object]:
    txn = lake.transaction()
    txn.alter_table("ns", random.choice(txn.tables("ns")), new_definition())
    return txn.commit


def _read(lake: Lakehouse) -> Callable[[], object]:
    path = lake.snapshot().definition_location
    return lambda: lake.storage.read(path)


OPERATIONS = (
    Operation("one read, by the storage alone", False, _read),
    Operation("begin, warm", False, lambda lake: lambda: lake.snapshot().definition),
    Operation("commit of one table, warm", False, _commit),
    Operation("look a table up, cold", True, lambda lake: lambda: lake.snapshot().table("ns", name(42))),
    Operation("list all tables, cold", True, lambda lake: lambda: lake.snapshot().tables("ns")),
)


@dataclass
class Times:
    """Seconds of each turn: wall-clock time, and CPU time of all threads."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, call: Callable[[], object]) -> None:
        """Make a call and record its duration."""
        cpu_start, start = time.process_time(), time.perf_counter()
        call()
        self.wall.append(time.perf_counter() - start)
        self.cpu.append(time.process_time() - cpu_start)

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
class Metrics:
    """Requests of one operation on one storage, and durations with the engine and with the bare client."""

    counts: RequestCounts
    engine: Times = field(default_factory=Times)
    bare: Times = field(default_factory=Times)
    decoding: Times = field(default_factory=Times)

    @property
    def overhead(self) -> float:
        """Duration with the engine as a multiple of the bare client's."""
        return self.engine.wall_ms / self.bare.wall_ms


def count_requests(storage: Storage, operation: Operation) -> RequestCounts:
    """Count the requests of an operation."""
    meter = MeteredStorage(storage)
    lake = Lakehouse(meter)
    if not operation.is_cold:
        lake.snapshot().tables("ns")
    with deferred_background_work():
        call = operation.prepare(lake)
        with meter.measure() as measurement:
            call()
    return measurement.counts


def measure(storage: Storage, operation: Operation, bare: BareClient, n_turns: int) -> Metrics:
    """Run an operation alternately with the engine and the bare client, without background operation."""
    metrics = Metrics(count_requests(storage, operation))
    recorder = Recorder(storage)
    warm = Lakehouse(recorder)
    warm.snapshot().tables("ns")
    with Replay(bare, storage) as replay:
        for turn in range(N_WARM_UP_TURNS + n_turns):
            with deferred_background_work():
                call = operation.prepare(Lakehouse(recorder) if operation.is_cold else warm)
                recorder.requests = []
                metrics.engine.add(call)
                rounds = recorder.rounds()
            metrics.bare.add(functools.partial(replay.send, rounds, f"{turn}-alone"))
            metrics.decoding.add(functools.partial(replay.send, rounds, f"{turn}-decoded", decode_node_file))
    for times in (metrics.engine, metrics.bare, metrics.decoding):
        times.drop_first(N_WARM_UP_TURNS)
    return metrics


@contextmanager
def running_storage(kind: str | None) -> Iterator[tuple[Any, Callable[[], str], Mapping[str, str]]]:
    """Start a server. Yield it with a function that returns new roots, and the storage options."""
    if kind is None:
        with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
            yield None, lambda: f"file://{folder}/lake/", {}
    else:
        with running_server(kind) as server:
            yield server, server.fresh_root, server.storage_options


#: Results by storage and operation: without and with added latency.
Results = Mapping[str, Mapping[str, tuple[Metrics, Metrics]]]


def measure_all(cases: Sequence[Case], n_tables: int, n_turns: int) -> Results:
    """Measure every operation on every storage."""
    results: dict[str, dict[str, tuple[Metrics, Metrics]]] = {}
    for kind, cases_of_kind in itertools.groupby(cases, key=lambda case: case.kind):
        with running_storage(kind) as (server, fresh_root, options):
            for case in cases_of_kind:
                start = time.perf_counter()
                root = fresh_root()
                storage = open_storage(root, {**options, **case.options})
                filled(storage, n_tables)
                with closing(case.bare(server, root)) as bare:
                    remote, remote_bare = SlowStorage(storage, LATENCY_SECONDS), SlowClient(bare, LATENCY_SECONDS)
                    results[case.name] = {
                        operation.name: (
                            measure(storage, operation, bare, n_turns),
                            measure(remote, operation, remote_bare, n_turns),
                        )
                        for operation in OPERATIONS
                    }
                print(f"{case.name} done in {time.perf_counter() - start:.0f} s", flush=True)
    return results


def draw(axes: Sequence[Axes], results: Results) -> None:
    """Plot milliseconds and the overhead over the bare client, by storage."""
    times_axes, overhead_axes = axes
    for operation in OPERATIONS:
        by_storage = [by_operation[operation.name][0] for by_operation in results.values()]
        times_axes.plot(list(results), [metrics.engine.wall_ms for metrics in by_storage], "o", label=operation.name)
        overhead_axes.plot(list(results), [metrics.overhead for metrics in by_storage], "o", label=operation.name)
    times_axes.set_yscale("log")
    times_axes.set_title("milliseconds (median)")
    times_axes.legend()
    overhead_axes.axhline(MAX_OVERHEAD, color="black", linestyle=":")
    overhead_axes.set_ylim(bottom=0)
    overhead_axes.set_title(f"time of the engine as a multiple of the client's; goal {MAX_OVERHEAD}")
    for chart in axes:
        chart.tick_params(axis="x", rotation=60)


def report(results: Results, n_tables: int, n_turns: int, folder: Path) -> list[str]:
    """Draw the plot and return the report as lines of Markdown."""
    rows = []
    for storage, by_operation in results.items():
        without_latency = [by_operation[operation.name][0] for operation in OPERATIONS]
        rows.append(
            [
                storage,
                *(f"{metrics.counts.total} ({metrics.counts.rounds})" for metrics in without_latency),
                *(f"{metrics.engine.wall_ms:.1f}" for metrics in without_latency),
            ]
        )
    return [
        "# Every storage",
        "",
        f"Generated by `benchmarks/storages.py`: {n_tables:,} tables, default settings, {n_turns} turns, servers on"
        " loopback, which share the processors with their client. Local disk, Redis, Valkey and HDFS sync.",
        "A request is one call of the storage's interface; on HDFS it is several calls of NameNode and DataNodes."
        " The hint, which is written in the background of a commit, is not included.",
        "",
        plot("storages", lambda axes: draw(axes, results), n_axes=2, width=6.5, height=5, folder=folder),
        "",
        *table(
            [
                "storage and client",
                *(f"{operation.name}: requests (rounds)" for operation in OPERATIONS),
                *(f"{operation.name}: ms" for operation in OPERATIONS),
            ],
            rows,
        ),
        "",
        "The engine compared with the same requests sent through the client library alone, by turns in one run: medians"
        " in milliseconds of wall-clock time, and of CPU time of all threads. The sixth column is for these requests"
        " including the decoding of node files by pyarrow alone, which any reader needs. In the last column, each"
        f" request takes {LATENCY_SECONDS * 1000:.0f} ms more, as with a remote service.",
        "",
        *table(
            [
                *("storage and client", "operation", "engine: ms", "client: ms", "engine / client"),
                *("client and pyarrow / client", "engine: CPU ms", "client: CPU ms", "CPU: engine / client"),
                f"{LATENCY_SECONDS * 1000:.0f} ms latency: engine / client",
            ],
            (
                _overhead_row(storage, operation, *by_operation[operation.name])
                for storage, by_operation in results.items()
                for operation in OPERATIONS
            ),
        ),
    ]


def _overhead_row(storage: str, operation: Operation, metrics: Metrics, remote_metrics: Metrics) -> list[str]:
    return [
        storage,
        operation.name,
        f"{metrics.engine.wall_ms:.2f}",
        f"{metrics.bare.wall_ms:.2f}",
        f"{metrics.overhead:.2f}",
        f"{metrics.decoding.wall_ms / metrics.bare.wall_ms:.2f}",
        f"{metrics.engine.cpu_ms:.2f}",
        f"{metrics.bare.cpu_ms:.2f}",
        f"{metrics.engine.cpu_ms / metrics.bare.cpu_ms:.2f}",
        f"{remote_metrics.overhead:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storages", description="The engine on every storage.")
    parser.add_argument("--quick", action="store_true", help="few tables and turns, as a smoke test")
    parser.add_argument("--turns", type=int, help=f"turns of each operation (default: {N_TURNS})")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PREFIX", help="measure only storages with this name prefix"
    )
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(arguments)
    n_tables = QUICK_TABLES if args.quick else N_TABLES
    n_turns = args.turns or (QUICK_TURNS if args.quick else N_TURNS)
    cases = [case for case in CASES if not args.only or case.name.startswith(tuple(args.only))]
    results = measure_all(cases, n_tables, n_turns)
    write_result("storages", report(results, n_tables, n_turns, args.to), args.to)


if __name__ == "__main__":
    main()
