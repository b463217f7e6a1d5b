"""Manifest entries that a commit adds: no duplicates, and plausible sequence numbers."""

from __future__ import annotations

import copy

import pyarrow as pa
import pytest
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table.update import AddSnapshotUpdate, TableUpdate

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.loaded_table import MAX_SEQUENCE_STEP
from trinitylake_ops.iceberg.new_files import check_new_entries, new_files

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


def test_duplicate_or_future_entries_are_rejected(catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    snapshot, io = table.current_snapshot(), table.io
    assert snapshot is not None
    assert isinstance(io, StorageFileIO)
    ((manifest, (entry,)),) = new_files([snapshot], None, io).entries.items()
    check_new_entries({manifest: [entry]}, [snapshot], io)
    with pytest.raises(InvalidDefinitionError):
        check_new_entries({manifest: [entry, entry]}, [snapshot], io)
    deleted, future_entry = copy.deepcopy(entry), copy.deepcopy(entry)
    deleted.status = ManifestEntryStatus.DELETED
    check_new_entries({manifest: [deleted, entry]}, [snapshot], io)
    future_entry.sequence_number = 2**62
    with pytest.raises(InvalidDefinitionError):
        check_new_entries({manifest: [future_entry]}, [snapshot], io)


@pytest.mark.parametrize(
    ("sequence_number", "is_rejected"),
    [(2, False), (MAX_SEQUENCE_STEP + 1, False), (MAX_SEQUENCE_STEP + 2, True), (2**63 - 1, True)],
)
def test_commit_increases_sequence_number_by_bounded_step(
    catalog: TrinityLakeCatalog, sequence_number: int, is_rejected: bool
) -> None:
    """A writer that exhausted the sequence numbers would block all other writers of the table."""
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    txn = table.transaction()
    txn.append(ROWS)

    def with_sequence_number(update: TableUpdate) -> TableUpdate:
        if not isinstance(update, AddSnapshotUpdate):
            return update
        snapshot = update.snapshot.model_copy(update={"sequence_number": sequence_number})
        return update.model_copy(update={"snapshot": snapshot})

    updates = tuple(map(with_sequence_number, txn._updates))
    if is_rejected:
        with pytest.raises(InvalidDefinitionError):
            catalog.commit_table(txn._table, txn._requirements, updates)
    else:
        catalog.commit_table(txn._table, txn._requirements, updates)
    assert catalog.load_table("ns.t").metadata.last_sequence_number == (1 if is_rejected else sequence_number)
    catalog.load_table("ns.t").append(ROWS)
