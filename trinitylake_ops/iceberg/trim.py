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
    RemoveSnapshotRefUpdate,
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
from trinitylake_ops.iceberg.snapshot_retention import (
    HEADS_ONLY,
    MAX_AGE_PROPERTY,
    SnapshotRule,
    expired_refs,
    property_number,
    retained_snapshots,
)

#: Summary keys that Spark's write-audit-publish sets in a staged snapshot and in the snapshot that publishes it.
_AUDIT, _PUBLISHED_AUDIT = "wap.id", "published-wap-id"
#: Iceberg's default of ``history.expire.max-snapshot-age-ms``.
_MAX_AGE_MS = 5 * 24 * 3_600_000
#: A time at which every snapshot is older than any maximum age.
_LATEST_MS = 1 << 70


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
    #: Snapshots of branches that properties of the table or the policy keep.
    retained: frozenset[int]
    #: Branches and tags that are older than their maximum age.
    expired_refs: tuple[str, ...]
    #: Whether the table's location is the managed location of its id.
    is_in_place: bool
    #: Whether the format version of the table can be written.
    is_writable: bool

    @property
    def others(self) -> frozenset[int]:
        """The ids that the metadata neither refers to nor has to keep."""
        return frozenset(self.ids) - self.referred - self.retained


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


def listed_snapshots(definition: TableDef, io: StorageFileIO, rule: SnapshotRule = HEADS_ONLY) -> ListedSnapshots:
    """Return the snapshots in a table's metadata.

    Args:
        definition: Definition of the table.
        io: File IO of the lakehouse.
        rule: Which snapshots of branches are retained, unless the table's properties decide.

    Raises:
        CorruptFileError: The metadata file is corrupt.
        StorageError: The metadata file cannot be read.
    """
    metadata = table_metadata(definition, io)
    ordered = sorted(metadata.snapshots, key=lambda snapshot: (snapshot.sequence_number or 0, snapshot.timestamp_ms))
    ids = tuple(snapshot.snapshot_id for snapshot in ordered)
    now_ms = io.storage.now_ms()
    expired = expired_refs(metadata, now_ms)
    return ListedSnapshots(
        ids=ids,
        referred=_referred_snapshots(metadata, expired) | _staged(metadata, now_ms),
        retained=retained_snapshots(_without_refs(metadata, expired), rule, now_ms),
        expired_refs=expired,
        is_in_place=is_managed_location(metadata.location, definition, io),
        is_writable=metadata.format_version <= LATEST_WRITTEN_VERSION,
    )


def lasting_snapshots(metadata: TableMetadata, rule: SnapshotRule) -> frozenset[int]:
    """Return the ids of snapshots that a trim keeps at any age: those of branches and tags, and a minimum of others.

    Args:
        metadata: The metadata of the table.
        rule: Which snapshots of branches are retained, unless the table's properties decide.
    """
    return _referred_snapshots(metadata) | retained_snapshots(metadata, rule, _LATEST_MS)


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
        metadata = table_metadata(definition, io)
    except FileMissingError:
        return frozenset()
    return _referred_snapshots(metadata) | _staged(metadata, io.storage.now_ms())


def write_without_snapshots(
    definition: TableDef,
    io: StorageFileIO,
    dropped: Collection[int],
    announce: Callable[[str], None],
    dropped_refs: Collection[str] = (),
) -> TableDef:
    """Write a new metadata file of a table without some of its snapshots.

    Args:
        definition: Definition of the table.
        io: File IO of the lakehouse.
        dropped: Ids of the snapshots to omit.
        dropped_refs: Names of branches and tags to omit.
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
        RemoveSnapshotRefUpdate.model_validate({"ref-name": name}) for name in sorted(dropped_refs)
    ]
    updates += [
        RemovePartitionStatisticsUpdate.model_validate({"snapshot-id": snapshot_id})
        for snapshot_id in dict.fromkeys(file.snapshot_id for file in metadata.partition_statistics)
        if snapshot_id in dropped
    ]
    if dropped:
        updates.append(RemoveSnapshotsUpdate.model_validate({"snapshot-ids": sorted(dropped)}))
    trimmed = update_table_metadata(metadata, tuple(updates), metadata_location=uri)
    locations = location_provider(trimmed)
    version = MetastoreCatalog._parse_metadata_version(uri) + 1
    new_uri = locations.new_table_metadata_file_location(version)
    announce(io.location(new_uri))
    write_metadata(trimmed, io.new_output(new_uri), metadata)
    properties = {**definition.format_properties, METADATA_LOCATION: io.location(new_uri)}
    return replace(definition, format_properties=properties)


def _without_refs(metadata: TableMetadata, names: Collection[str]) -> TableMetadata:
    if not names:
        return metadata
    return metadata.model_copy(update={"refs": {name: ref for name, ref in metadata.refs.items() if name not in names}})


def _referred_snapshots(metadata: TableMetadata, without: Collection[str] = ()) -> frozenset[int]:
    referred = {ref.snapshot_id for name, ref in metadata.refs.items() if name not in without}
    if metadata.current_snapshot_id is not None:
        referred.add(metadata.current_snapshot_id)
    return frozenset(referred)


def _staged(metadata: TableMetadata, now_ms: int) -> frozenset[int]:
    """Return recently staged snapshots that an engine may still publish (write-audit-publish).

    Such a snapshot has an audit id, is not referred to, and was never current. It is kept for the maximum snapshot age
    of the table, or Iceberg's default.
    """
    own_age_ms = property_number(metadata.properties, MAX_AGE_PROPERTY)
    max_age_ms = _MAX_AGE_MS if own_age_ms is None else own_age_ms
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
