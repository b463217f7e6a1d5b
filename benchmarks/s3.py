"""Measure the engine on S3: requests, round trips, times compared with local disk, and overhead over the bare client.

Run from the project's root: ``.venv/bin/python -m benchmarks.s3``. It starts a radosgw (packages in
``deploy/debian-packages.txt``) and writes ``benchmarks/results/s3.md``. Requests and round trips do not depend on the
machine. Of the times, only the ratios within one run are meaningful.

For the overhead, every operation runs in three ways, in turns: in the engine; as the same requests, with the same
bytes and in the same round trips, sent through the bare client library; and as these requests followed by decoding the
node files with pyarrow alone, which every reader must do.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from benchmarks.bare.objects import BareObstore, BareS3fs
from benchmarks.lakes import deferred_background_work, filled, name
from benchmarks.replay import BareClient, Recorder, Replay, decode_node_file
from benchmarks.report import Spread, seconds, table, write_result
from benchmarks.servers import running_server
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.storage import MeteredStorage, RequestCounts, Storage, background, open_storage

N_TABLES = 10_000
N_TURNS = 60

Operation = Callable[[Lakehouse], object]


@contextmanager
def radosgw() -> Iterator[S3Server]:
    """Start a radosgw, yield it, and stop it."""
    with running_server("radosgw") as server:
        yield server


def change_one(lake: Lakehouse) -> None:
    """Commit a change of one random table."""
    with lake.transaction() as txn:
        table = name(random.randrange(N_TABLES))
        txn.alter_table("ns", table, TableDef(properties={"stamp": str(random.random())}))


#: The operations, and whether each starts with empty caches.
OPERATIONS: Mapping[str, tuple[Operation, bool]] = {
    "begin, warm": (lambda lake: lake.snapshot().definition, False),
    "begin, change a table and commit, warm": (change_one, False),
    "look up a table, cold": (lambda lake: lake.snapshot().table("ns", name(42)), True),
    "list 10,000 tables, cold": (lambda lake: lake.snapshot().tables("ns"), True),
}


@dataclass(frozen=True)
class Metrics:
    """Requests and seconds of one operation on one storage. Without a bare client, only those of the engine."""

    counts: RequestCounts
    engine: Spread
    bare: Spread | None = None
    decoding: Spread | None = None


def measure(storage: Storage, operation: Operation, *, is_cold: bool, bare: BareClient | None) -> Metrics:
    """Run an operation in turns in the engine and through the bare client, without background work.

    Args:
        storage: The storage.
        operation: The operation.
        is_cold: Whether the operation starts with empty caches each time.
        bare: The bare client of the storage, or None to measure the engine alone.
    """
    meter = MeteredStorage(storage)
    metered_lake = Lakehouse(meter)
    if not is_cold:
        operation(metered_lake)
    background.drain()
    with deferred_background_work(), meter.measure() as measurement:
        operation(metered_lake)
    recorder = Recorder(storage)
    warm = Lakehouse(recorder)
    warm.snapshot().tables("ns")
    engine, replayed, decoding = [], [], []
    with nullcontext() if bare is None else Replay(bare, storage) as replay:
        for turn in range(N_TURNS):
            recorder.requests = []
            lake = Lakehouse(recorder) if is_cold else warm
            with deferred_background_work():
                engine.append(seconds(lambda lake=lake: operation(lake)))  # type: ignore[misc]
                rounds = recorder.rounds()
            if replay is not None:
                replayed.append(seconds(functools.partial(replay.send, rounds, f"{turn}-alone")))
                decoding.append(seconds(functools.partial(replay.send, rounds, f"{turn}-decoded", decode_node_file)))
    return Metrics(measurement.counts, *(Spread.of(times) for times in (engine, replayed, decoding) if times))


def main() -> None:
    """Measure, print and write the results."""
    results: dict[str, dict[str, Metrics]] = {}
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder, radosgw() as server:
        for name, options in (
            ("local", {}),
            ("s3fs", server.storage_options),
            ("obstore", {**server.storage_options, "client": "obstore"}),
        ):
            root = f"file://{folder}/lake/" if name == "local" else server.fresh_root()
            storage = open_storage(root, options)
            filled(storage, N_TABLES)
            bare: BareClient | None = None
            if name != "local":
                bare = BareS3fs(server, root) if name == "s3fs" else BareObstore(server, root)
            results[name] = {
                operation: measure(storage, call, is_cold=is_cold, bare=bare)
                for operation, (call, is_cold) in OPERATIONS.items()
            }
            print(name, "done", flush=True)
    write_result("s3", report(results))


def report(results: Mapping[str, Mapping[str, Metrics]]) -> list[str]:
    """Return the lines of the result."""
    names = list(results)
    request_rows, overhead_rows = [], []
    for operation in OPERATIONS:
        counts = [metrics[operation].counts for metrics in results.values()]
        medians = [f"{1000 * metrics[operation].engine.median:.1f}" for metrics in results.values()]
        request_rows.append([operation, *(f"{count.total} ({count.rounds})" for count in counts), *medians])
        for storage, metrics in results.items():
            engine, bare, decoding = metrics[operation].engine, metrics[operation].bare, metrics[operation].decoding
            if bare is not None and decoding is not None:
                cells = [cell for spread in (engine, bare, decoding) for cell in spread.cells(1000, 1)]
                ratios = (spread.median / bare.median for spread in (engine, decoding))
                overhead_rows.append([operation, storage, *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    return [
        "# The engine on S3",
        "",
        f"Generated by `benchmarks/s3.py`: {N_TABLES:,} tables, default settings, {N_TURNS} turns; S3 is a radosgw on"
        " loopback, which shares the processors with its client; local disk syncs.",
        "",
        *table(
            ["operation", *(f"{name}: requests (round trips)" for name in names), *(f"{name}: ms" for name in names)],
            request_rows,
        ),
        "",
        "The engine compared with the same requests sent through the bare client library, and with these requests"
        " followed by decoding the node files with pyarrow alone; milliseconds, in turns. Ratios are of medians.",
        "",
        *table(
            [
                "operation",
                "client",
                *("engine: median", "mean", "p99"),
                *("bare client: median", "mean", "p99"),
                *("and pyarrow: median", "mean", "p99"),
                "engine / bare",
                "and pyarrow / bare",
            ],
            overhead_rows,
        ),
    ]


if __name__ == "__main__":
    main()
