"""Expire snapshots of Iceberg tables: write metadata without some of its snapshots.

The metadata of an Iceberg table lists all its snapshots and therefore refers to the files of all snapshots. Each
lakehouse version refers to a separate metadata file, so snapshots that a new file omits remain readable in earlier
versions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    RemovePartitionStatisticsUpdate,
    RemoveSnapshotsUpdate,
    TableUpdate,
    update_table_metadata,
)

from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.iceberg.io.checked_files import is_managed_location
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import LATEST_WRITTEN_VERSION, metadata_uri
from trinitylake_ops.iceberg.metadata import table_metadata, write_metadata
from trinitylake_ops.iceberg.properties import location_provider

#: Summary keys that Spark's write-audit-publish sets in a staged snapshot and in the snapshot that publishes it.
_AUDIT, _PUBLISHED_AUDIT = "wap.id", "published-wap-id"
_MAX_AGE_PROPERTY, _MAX_AGE_MS = "history.expire.max-snapshot-age-ms", 5 * 24 * 3_600_000


def is_first(snapshot: Snapshot) -> bool:
    """Whether a snapshot is the first of its table.

    A snapshot whose parent was trimmed also has no parent, but has a higher sequence number. Snapshots of Iceberg's
    format version 1 have no sequence numbers, so they count as first snapshots if they have no parent.
    """
    return snapshot.parent_snapshot_id is None and (snapshot.sequence_number or 0) <= 1


@dataclass(frozen=True, slots=True)
class ListedSnapshots:
    """The snapshots in a table's metadata."""

    #: All snapshot ids, oldest first.
    ids: tuple[int, ...]
    #: The current snapshot, the snapshots of branches and tags, and recently staged snapshots that have not been
    #: published.
    referred: frozenset[int]
    #: Whether the table's location is the managed location for its id.
    is_in_place: bool
    #: Whether the format version of the table can be written.
    is_writable: bool

    @property
    def others(self) -> frozenset[int]:
        """The ids of listed snapshots that are not in ``referred``."""
        return frozenset(self.ids) - self.referred


def is_trimmable(definition: TableDef, io: StorageFileIO) -> bool:
    """Whether a table is a MANAGED Iceberg table whose metadata file is in the folder of its id.

    This folder is below the root or the table root.

    Args:
        definition: Definition of the table.
        io: File IO of the lakehouse.

    Raises:
        InvalidLocationError: The location of the metadata file is not valid.
    """
    is_ours = definition.is_managed and definition.is_iceberg and bool(definition.id)
    if not is_ours or not definition.format_properties.get(METADATA_LOCATION):
        return False
    location = io.location(metadata_uri(definition, io.root))
    folder = table_prefix(definition.id)
    return any(location.startswith(f"{root}{folder}") for root in ("", *io.table_roots))


def listed_snapshots(definition: TableDef, io: StorageFileIO) -> ListedSnapshots:
    """Return the snapshots in a table's metadata.

    Args:
        definition: Definition of the table.
        io: File IO of the lakehouse.

    Raises:
        CorruptFileError: The metadata file is corrupt.
        StorageError: The metadata file cannot be read.
    """
    metadata = table_metadata(definition, io)
    ordered = sorted(metadata.snapshots, key=lambda snapshot: (snapshot.sequence_number or 0, snapshot.timestamp_ms))
    ids = tuple(snapshot.snapshot_id for snapshot in ordered)
    is_in_place = is_managed_location(metadata.location, definition, io)
    referred = _referred_snapshots(metadata) | _staged(metadata, io.storage.now_ms())
    return ListedSnapshots(ids, referred, is_in_place, metadata.format_version <= LATEST_WRITTEN_VERSION)


def referred_snapshots(definition: TableDef, io: StorageFileIO) -> frozenset[int]:
    """Return the ids of the snapshots that a table's metadata refers to, none if the metadata file does not exist.

    Args:
        definition: Definition of the table.
        io: File IO of the lakehouse.

    Raises:
        CorruptFileError: The metadata file is corrupt.
        StorageError: The metadata file cannot be read.
    """
    try:
        return listed_snapshots(definition, io).referred
    except FileMissingError:
        return frozenset()


def write_without_snapshots(
    definition: TableDef, io: StorageFileIO, dropped: Collection[int], announce: Callable[[str], None]
) -> TableDef:
    """Write a new metadata file of a table without some of its snapshots.

    Args:
        definition: Definition of the table.
        io: File IO of the lakehouse.
        dropped: Ids of the snapshots to omit.
        announce: Called with the location of the new file before it is written.

    Returns:
        The definition that refers to the new file.

    Raises:
        CorruptFileError: The metadata file is corrupt.
        StorageError: A file cannot be read or written.
    """
    uri = metadata_uri(definition, io.root)
    metadata = table_metadata(definition, io)
    updates: list[TableUpdate] = [
        RemovePartitionStatisticsUpdate.model_validate({"snapshot-id": snapshot_id})
        for snapshot_id in dict.fromkeys(file.snapshot_id for file in metadata.partition_statistics)
        if snapshot_id in dropped
    ]
    updates.append(RemoveSnapshotsUpdate.model_validate({"snapshot-ids": sorted(dropped)}))
    trimmed = update_table_metadata(metadata, tuple(updates), metadata_location=uri)
    locations = location_provider(trimmed)
    version = MetastoreCatalog._parse_metadata_version(uri) + 1
    new_uri = locations.new_table_metadata_file_location(version)
    announce(io.location(new_uri))
    write_metadata(trimmed, io.new_output(new_uri), metadata)
    properties = {**definition.format_properties, METADATA_LOCATION: io.location(new_uri)}
    return replace(definition, format_properties=properties)


def _referred_snapshots(metadata: TableMetadata) -> frozenset[int]:
    referred = {ref.snapshot_id for ref in metadata.refs.values()}
    if metadata.current_snapshot_id is not None:
        referred.add(metadata.current_snapshot_id)
    return frozenset(referred)


def _staged(metadata: TableMetadata, now_ms: int) -> frozenset[int]:
    """Return recently staged snapshots that an engine may still publish (write-audit-publish).

    Such a snapshot has an audit id, is not referred to, and was never current. It is kept for the maximum snapshot age
    of the table, or Iceberg's default.
    """
    max_age_ms = int(metadata.properties.get(_MAX_AGE_PROPERTY, _MAX_AGE_MS))
    was_current = {entry.snapshot_id for entry in metadata.snapshot_log}
    staged_by_snapshot = {
        shot.snapshot_id: shot.summary.additional_properties for shot in metadata.snapshots if shot.summary
    }
    published = {summary.get(_PUBLISHED_AUDIT) for summary in staged_by_snapshot.values()} | {None}
    return frozenset(
        shot.snapshot_id
        for shot in metadata.snapshots
        if staged_by_snapshot.get(shot.snapshot_id, {}).get(_AUDIT) not in published
        and shot.snapshot_id not in was_current
        and now_ms - shot.timestamp_ms <= max_age_ms
    )
