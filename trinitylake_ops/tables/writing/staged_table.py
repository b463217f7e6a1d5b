"""A table that was written and not published, as it travels between processes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

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

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.tables.files.changed_files import partition_text
from trinitylake_ops.tables.files.metadata import table_metadata
from trinitylake_ops.tables.files.reach import entries_in, manifests_in
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.writing.partition_key import EncodedPartition
from trinitylake_ops.versions.snapshot import Snapshot as Version


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTable:
    """The data for publishing a table, and for an audit of it.

    ``base_metadata_location`` is the location in the lakehouse when it was staged, None for a new table.
    ``base_version`` is the version then. ``begun_at_ms`` is when staging began, in milliseconds since the epoch by the
    storage's clock. No file that was written for it is older. Rows and bytes are totals of the table with the staged
    change. ``added_*`` and ``removed_*`` count data files, their rows and their bytes. Rewritten files count on both
    sides. ``partitions`` are those with added or removed files, such as ``year=2013/month=1``. They are empty for an
    unpartitioned table. ``replaces`` says what the new files replace: ``nothing``, ``partitions``, ``all``, or
    ``files``: those that were removed, in partitions that must not change. It is None for a change of another kind,
    which conflicts with any other. ``replaced_partitions`` are the values of these partitions, whether or not they have
    files (:func:`partition_key.encode_partitions`).
    """

    namespace: str
    table: str
    table_def: TableDef
    base_version: int
    begun_at_ms: int
    base_metadata_location: str | None
    snapshot_id: int | None
    row_count: int
    total_bytes: int
    added_files: int
    added_rows: int
    added_bytes: int
    removed_files: int
    removed_rows: int
    removed_bytes: int
    partitions: tuple[str, ...]
    replaces: str | None = None
    replaced_partitions: tuple[EncodedPartition, ...] = ()

    @property
    def metadata_location(self) -> str:
        """Location of the staged metadata file: a path under the root, or a URI."""
        return self.table_def.format_properties[METADATA_LOCATION]

    def to_json(self) -> str:
        """Return one JSON object. The definition is in it as base64 of its protobuf file."""
        state = {name: value for name, value in asdict(self).items() if name != "table_def"}
        state["table_def"] = base64.b64encode(self.table_def.to_bytes()).decode("ascii")
        return json.dumps(state, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote. Raises InvalidInputError."""
        try:
            state: dict[str, Any] = json.loads(text)
            data = base64.b64decode(state.pop("table_def"), validate=True)
            table_def = TableDef.from_bytes(data, "staged table definition")
            state["partitions"] = tuple(state["partitions"])
            state["replaced_partitions"] = tuple(tuple(values) for values in state.get("replaced_partitions", ()))
            return cls(table_def=table_def, **state)
        except (ValueError, KeyError, TypeError, AttributeError, TrinityLakeError) as error:
            raise InvalidInputError(f"this is no staged table: {error}") from error


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
