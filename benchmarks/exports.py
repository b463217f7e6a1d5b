"""Measure the storage requests of rollbacks of large lakehouses and of full exports.

Run from the project's root: ``.venv/bin/python -m benchmarks.exports``. It starts a radosgw (packages in
``deploy/debian-packages.txt``) and writes ``benchmarks/results/exports.md``. The number of requests does not depend on
the machine.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

import pyarrow as pa
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField

from benchmarks.lakes import GeneratedDefinitions, change_tables, create_loaded_lake
from benchmarks.report import table, write_result
from benchmarks.s3 import radosgw
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.exports import export as export_module
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, Storage, StorageWrapper, open_storage

N_TABLES = 1_000_000
N_DATA_FILES = 10_000
N_EXPORTED_TABLES = 10

T = TypeVar("T")


class ConcurrencyMeter(StorageWrapper):
    """Measures how many requests are in flight at the same time, and for how long."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.concurrency = inner.concurrency
        #: The seconds in which a number of requests was in flight, by number.
        self.seconds: Counter[int] = Counter()
        #: The number of requests by kind.
        self.sent: Counter[str] = Counter()
        self._n_in_flight = 0
        self._since = time.perf_counter()
        self._lock = threading.Lock()

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        return self._counted(
            "read", lambda: self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        )

    def create(self, path: str, data: bytes) -> None:
        self._counted("create", lambda: self.inner.create(path, data))

    def share_with_at_least(self, n_requests: int) -> float:
        """Return the share of the busy time in which at least a number of requests was in flight."""
        busy = {number: seconds for number, seconds in self.seconds.items() if number}
        return sum(seconds for number, seconds in busy.items() if number >= n_requests) / sum(busy.values())

    @property
    def mean(self) -> float:
        """The average number of requests in flight during the busy time."""
        busy = {number: seconds for number, seconds in self.seconds.items() if number}
        return sum(number * seconds for number, seconds in busy.items()) / sum(busy.values())

    def _counted(self, kind: str, request: Callable[[], T]) -> T:
        self._change(1)
        self.sent[kind] += 1
        try:
            return request()
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            now = time.perf_counter()
            self.seconds[self._n_in_flight] += now - self._since
            self._since, self._n_in_flight = now, self._n_in_flight + by


def measure_rollback() -> list[str]:
    """Count the requests of rolling back one commit in a lakehouse with a million tables."""
    storage = GeneratedDefinitions(MemoryStorage("memory://rollback-benchmark/"))
    lake = create_loaded_lake(storage, N_TABLES)
    height = lake.snapshot().tree_shape().height
    change_tables(lake, [N_TABLES // 2])
    meter = MeteredStorage(storage)
    operations.rollback(Lakehouse(meter), lake.latest_version() - 1)
    counts = meter.snapshot()
    return [
        f"## Rollback of {N_TABLES:,} tables by a commit that changed one",
        "",
        *table(
            ["metric", "value"],
            [
                ("levels of the tree below its root", height),
                ("requests", counts.total),
                ("2 x levels + 10", 2 * height + 10),
                ("round trips", counts.rounds),
                ("kB written", f"{counts.bytes_written / 1e3:.1f}"),
            ],
        ),
    ]


def _create_tables(lake: Lakehouse) -> None:
    """Create partitioned tables, and append to each, so that each row has a separate data file."""
    schema = Schema(NestedField(1, "id", LongType(), required=False))
    by_id = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "id"))
    rows = pa.table({"id": pa.array(range(N_DATA_FILES // N_EXPORTED_TABLES), pa.int64())})
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        for number in range(N_EXPORTED_TABLES):
            catalog.create_table(f"ns.t{number}", schema, partition_spec=by_id).append(rows)


def measure_exports(folder: Path, server: S3Server) -> list[str]:
    """Measure a full export to S3, and a second export after an append to a single table."""
    lake = Lakehouse.create(str(folder / "lake"), {"fsync": "false"})
    _create_tables(lake)
    root = server.fresh_root("exports")
    rows = []
    for name in ("first", "second"):
        meter = ConcurrencyMeter(open_storage(root, server.storage_options))
        with mock.patch.object(export_module, "open_storage", return_value=meter):
            started = time.perf_counter()
            report = operations.plan_export(lake, name, "full", target=root).execute()
            seconds = time.perf_counter() - started
        rows.append((name, report, meter, seconds))
        with catalog_at(lake) as catalog:
            catalog.load_table("ns.t0").append(pa.table({"id": pa.array([-1], pa.int64())}))
    server.delete_all(root)
    header = ["metric", *(name for name, *_ in rows)]
    lines = [
        ("files copied", *(f"{report.copied_files:,}" for _, report, _, _ in rows)),
        ("MB copied", *(f"{report.copied_bytes / 1e6:.2f}" for _, report, _, _ in rows)),
        ("files created at the target", *(f"{meter.sent['create']:,}" for _, _, meter, _ in rows)),
        ("average requests in flight", *(f"{meter.mean:.1f}" for _, _, meter, _ in rows)),
        ("share of the time with 16 or more", *(f"{meter.share_with_at_least(16):.0%}" for _, _, meter, _ in rows)),
        ("seconds", *(f"{seconds:.1f}" for *_, seconds in rows)),
    ]
    return [
        f"## Full export of {N_EXPORTED_TABLES} tables with {N_DATA_FILES:,} data files to S3, and a second export",
        "",
        "From local disk to a radosgw on the same machine. Between the two exports, one table gained one file.",
        "",
        *table(header, lines),
    ]


def main() -> None:
    """Measure and write the results."""
    lines = ["# Rollbacks and exports", "", *measure_rollback(), ""]
    with tempfile.TemporaryDirectory() as folder, radosgw() as server:
        lines += measure_exports(Path(folder), server)
    write_result("exports", lines)


if __name__ == "__main__":
    main()
