"""After a commit, the snapshot summary has all totals, and they match the files of the table."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFileContent, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate

from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.metadata import write_metadata
from trinitylake_ops.iceberg.reach import entries_in, manifests_in

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


def totals_in(table: Table) -> dict[str, str]:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    return {name: value for name, value in snapshot.summary.additional_properties.items() if name.startswith("total-")}


def live_totals(table: Table) -> dict[str, str]:
    """Count the live files of a table, and return the totals in the format of a snapshot summary."""
    snapshot, io = table.current_snapshot(), table.io
    assert snapshot is not None
    assert isinstance(io, StorageFileIO)
    entries = [entry for manifest in manifests_in(snapshot, io) for entry in entries_in(manifest, io)]
    files = [entry.data_file for entry in entries if entry.status != ManifestEntryStatus.DELETED]
    data = [file for file in files if file.content == DataFileContent.DATA]
    counts = {
        "total-data-files": len(data),
        "total-delete-files": len(files) - len(data),
        "total-records": sum(file.record_count for file in data),
        "total-files-size": sum(file.file_size_in_bytes for file in files),
        "total-position-deletes": sum(file.record_count for file in files if file not in data),
        "total-equality-deletes": 0,
    }
    return {name: str(count) for name, count in counts.items()}


def without_totals(snapshot: Snapshot, *, kept: str = "-") -> Snapshot:
    """Return a snapshot without totals, except the one named ``kept``, as some engines write it."""
    assert snapshot.summary is not None
    summary = {
        name: value
        for name, value in snapshot.summary.additional_properties.items()
        if not name.startswith("total-") or name == kept
    }
    return snapshot.model_copy(update={"summary": Summary(snapshot.summary.operation, **summary)})


@pytest.mark.parametrize("kept", ["-", "total-records"])
def test_missing_totals_are_added(catalog: TrinityLakeCatalog, kept: str) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    for change in ("append", "append", "delete"):
        txn = table.transaction()
        if change == "append":
            txn.append(ROWS)
        else:
            txn.delete("id = 2")
        updates = tuple(
            update.model_copy(update={"snapshot": without_totals(update.snapshot, kept=kept)})
            if isinstance(update, AddSnapshotUpdate)
            else update
            for update in txn._updates
        )
        assert any(isinstance(update, SetSnapshotRefUpdate) for update in updates)
        catalog.commit_table(txn._table, txn._requirements, updates)
        table = catalog.load_table("ns.t")
        assert totals_in(table) == live_totals(table)


def test_totals_are_counted_if_parent_lacks_them(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    table.append(ROWS)
    metadata = table.metadata.model_copy(
        update={"snapshots": [without_totals(snapshot) for snapshot in table.metadata.snapshots]}
    )
    lake.storage.delete(table.metadata_location.removeprefix(lake.root))
    write_metadata(metadata, table.io.new_output(table.metadata_location))
    assert totals_in(catalog.load_table("ns.t")) == {}
    catalog.load_table("ns.t").append(ROWS)
    after = catalog.load_table("ns.t")
    assert totals_in(after) == live_totals(after)
