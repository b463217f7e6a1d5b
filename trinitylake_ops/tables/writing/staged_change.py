"""The description of a staged change: the totals and partitions that it adds to a table or removes from it."""

from __future__ import annotations

from collections.abc import Iterable

from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import (
    ADDED_DATA_FILES,
    ADDED_FILE_SIZE,
    ADDED_RECORDS,
    DELETED_DATA_FILES,
    DELETED_RECORDS,
    REMOVED_FILE_SIZE,
    TOTAL_FILE_SIZE,
    TOTAL_RECORDS,
    Snapshot,
)

from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.tables.files.changed_files import partition_text
from trinitylake_ops.tables.files.metadata import table_metadata
from trinitylake_ops.tables.files.reach import entries_in, manifests_in
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.versions.snapshot import Snapshot as Version


def describe_change(
    io: StorageFileIO, namespace: str, table: str, base: Version, before: TableDef | None, after: TableDef
) -> StagedTable:
    """Return the change between two definitions of a table. Reads their metadata and the new manifests.

    ``base`` is the latest version, as it was read before anything was staged. Raises StorageError.
    """
    io = io.for_table(after)
    metadata = table_metadata(after, io)
    known: set[int] = set()
    base_location: str | None = None
    if before is not None:
        base_location = before.format_properties.get(METADATA_LOCATION)
        known = {snapshot.snapshot_id for snapshot in table_metadata(before, io).snapshots}
    new = [snapshot for snapshot in metadata.snapshots if snapshot.snapshot_id not in known]
    current = metadata.current_snapshot()
    latest = [current] if current is not None else []
    return StagedTable(
        namespace=namespace,
        table=table,
        table_def=after,
        base_version=base.version,
        begun_at_ms=base.read_at_ms,
        base_metadata_location=base_location,
        snapshot_id=current.snapshot_id if current is not None else None,
        row_count=_sum(latest, TOTAL_RECORDS),
        total_bytes=_sum(latest, TOTAL_FILE_SIZE),
        added_files=_sum(new, ADDED_DATA_FILES),
        added_rows=_sum(new, ADDED_RECORDS),
        added_bytes=_sum(new, ADDED_FILE_SIZE),
        removed_files=_sum(new, DELETED_DATA_FILES),
        removed_rows=_sum(new, DELETED_RECORDS),
        removed_bytes=_sum(new, REMOVED_FILE_SIZE),
        partitions=_touched_partitions(io, metadata, new),
    )


def _sum(snapshots: Iterable[Snapshot], figure: str) -> int:
    return sum(int(snapshot.summary[figure] or 0) for snapshot in snapshots if snapshot.summary is not None)


def _touched_partitions(io: StorageFileIO, metadata: TableMetadata, new: list[Snapshot]) -> tuple[str, ...]:
    if metadata.spec().is_unpartitioned():
        return ()
    specs, schema = metadata.specs(), metadata.schema()
    touched: set[str] = set()
    for snapshot in new:
        for manifest in manifests_in(snapshot, io):
            if manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            spec = specs[manifest.partition_spec_id]
            touched.update(
                partition_text(entry.data_file.partition, spec, schema)
                for entry in entries_in(manifest, io)
                if entry.status != ManifestEntryStatus.EXISTING
            )
    return tuple(sorted(touched))
