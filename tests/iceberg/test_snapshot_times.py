"""New snapshots with a timestamp far in the future are rejected. A table that already has one remains writable."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest
from pyiceberg.table.update import AddSnapshotUpdate, TableUpdate

from tests.foreign_files import point_to
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
HOUR_MS = 3_600_000


def shift_snapshot_time(update: TableUpdate, by_ms: int) -> TableUpdate:
    if not isinstance(update, AddSnapshotUpdate):
        return update
    snapshot = update.snapshot.model_copy(update={"timestamp_ms": update.snapshot.timestamp_ms + by_ms})
    return update.model_copy(update={"snapshot": snapshot})


@pytest.mark.parametrize(("by_ms", "is_rejected"), [(60_000, False), (HOUR_MS, True), (8 * 10**12, True)])
def test_new_snapshot_far_in_future_is_rejected(catalog: TrinityLakeCatalog, by_ms: int, is_rejected: bool) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    txn = table.transaction()
    txn.append(ROWS)
    updates = tuple(shift_snapshot_time(update, by_ms) for update in txn._updates)
    if is_rejected:
        with pytest.raises(InvalidDefinitionError):
            catalog.commit_table(txn._table, txn._requirements, updates)
    else:
        catalog.commit_table(txn._table, txn._requirements, updates)
    assert len(catalog.load_table("ns.t").snapshots()) == (0 if is_rejected else 1)


def test_snapshots_after_one_in_future_get_later_timestamps(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    future_ms = time.time_ns() // 1_000_000 + 10 * 365 * 24 * HOUR_MS
    future_fields = {
        "snapshot_id": snapshot.snapshot_id + 1,
        "parent_snapshot_id": snapshot.snapshot_id,
        "sequence_number": 2,
        "timestamp_ms": future_ms,
    }
    point_to(lake, "ns.t", snapshot.model_copy(update=future_fields))
    for _ in range(2):
        catalog.load_table("ns.t").append(ROWS)
    metadata = catalog.load_table("ns.t").metadata
    times_ms = [entry.timestamp_ms for entry in metadata.snapshot_log]
    assert times_ms == sorted(times_ms)
    assert metadata.last_updated_ms == times_ms[-1] == future_ms + 2
    assert catalog.load_table("ns.t").scan().to_arrow().num_rows == 9
