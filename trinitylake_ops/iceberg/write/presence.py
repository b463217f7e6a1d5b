"""Describe the changes of a staged table, determine whether a version contains the table, and find later changes.

A publication that conflicts with a newer table commits a rebased snapshot (``write.rebase``). That snapshot records the
location of the staged metadata, which identifies it as the staged table.

Appended files never conflict. Files that replace partitions, or the whole table, conflict with data and delete files
that other writers added there, and with data files that other writers removed there. Files that were rewritten with the
same rows, for example by a compaction, never conflict. PyIceberg has such checks for its own operations, but not for
the replacement of partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import TypeAlias

from pyiceberg.manifest import ManifestContent, ManifestEntry, ManifestEntryStatus
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
    Operation,
)
from pyiceberg.table.snapshots import (
    Snapshot as IcebergSnapshot,
)
from pyiceberg.table.snapshots import Snapshot as TableSnapshot

from trinitylake_ops.errors import FileMissingError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.metadata import table_metadata
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.iceberg.table_change import SnapshotTarget
from trinitylake_ops.iceberg.totals import partition_text
from trinitylake_ops.iceberg.trim import is_first
from trinitylake_ops.iceberg.write.partition_key import decode_partitions
from trinitylake_ops.iceberg.write.staged_table import EncodedPartition, StagedTable
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.snapshot import Snapshot as Version

#: Whether a file belongs to the partitions of interest.
IsReplaced: TypeAlias = Callable[[ManifestEntry], bool]


def snapshots_since(metadata: TableMetadata, base_id: int | None) -> list[IcebergSnapshot] | None:
    """Return the snapshots after a base up to the current one, newest first.

    Args:
        metadata: Metadata of the table.
        base_id: Id of the base snapshot; None for an empty table.

    Returns:
        The snapshots, or None if the history is incomplete because the table was rolled back or snapshots in between
        were trimmed.
    """
    by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    snapshots: list[IcebergSnapshot] = []
    next_id = metadata.current_snapshot_id
    while next_id != base_id:
        snapshot = by_id.pop(next_id, None) if next_id is not None else None  # pop, to end at cycles
        if snapshot is None:
            return None
        snapshots.append(snapshot)
        next_id = snapshot.parent_snapshot_id
    return None if next_id is None and snapshots and not is_first(snapshots[-1]) else snapshots


def changed_files(
    snapshots: list[IcebergSnapshot], io: StorageFileIO, is_replaced: IsReplaced
) -> Iterator[ManifestEntry]:
    """Yield the files of some partitions that snapshots added or removed. Skips snapshots that only rewrote files.

    Args:
        snapshots: The snapshots.
        io: Reads the manifests of the snapshots.
        is_replaced: Whether a file belongs to the partitions.
    """
    for snapshot in snapshots:
        if snapshot.summary is not None and snapshot.summary.operation == Operation.REPLACE:
            continue
        for manifest in manifests_in(snapshot, io):
            if manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            for entry in entries_in(manifest, io):
                is_change = entry.status != ManifestEntryStatus.EXISTING
                # A delete file without a partition may delete rows of any partition.
                is_of_all = manifest.content == ManifestContent.DELETES and len(entry.data_file.partition) == 0
                if is_change and (is_of_all or is_replaced(entry)):
                    yield entry


def added_paths(snapshots: Iterable[IcebergSnapshot], io: StorageFileIO) -> set[str]:
    """Return the paths of the files that snapshots added."""
    return {
        entry.data_file.file_path
        for snapshot in snapshots
        for manifest in manifests_in(snapshot, io)
        if manifest.added_snapshot_id == snapshot.snapshot_id
        for entry in entries_in(manifest, io)
        if entry.status == ManifestEntryStatus.ADDED
    }


def live_paths(snapshot: IcebergSnapshot | None, io: StorageFileIO) -> set[str]:
    """Return the paths of the live files of a snapshot."""
    manifests = [] if snapshot is None else manifests_in(snapshot, io)
    entries = (entry for manifest in manifests for entry in entries_in(manifest, io))
    return {entry.data_file.file_path for entry in entries if entry.status != ManifestEntryStatus.DELETED}


#: Property of a rebased snapshot that contains the location of the staged metadata.
STAGED_AS = "trinitylake.staged-as"


class Presence(Enum):
    """The relation of a version's table to a staged table."""

    #: The table has exactly the staged rows.
    AS_STAGED = "as staged"
    #: The table contains the staged change on top of other writers' changes.
    ON_NEWER = "on a newer table"
    #: The table was in one of the two states above, and was changed later.
    EARLIER = "earlier"
    #: Unknown, because the relevant snapshots were trimmed.
    TRIMMED = "trimmed"
    #: The table was never published, or a later version undid the publication.
    ABSENT = "absent"


def presence(lake: Lakehouse, version: Snapshot, staged: StagedTable) -> Presence:
    """Return whether and how a version contains a staged table.

    Args:
        lake: The lakehouse.
        version: The version to examine.
        staged: The staged table. If staging changed no files, any existing table counts as containing it.

    Raises:
        StorageError: A file of the table cannot be read.
    """
    definition = _definition(version, staged.namespace, staged.table)
    if definition is None:
        return Presence.ABSENT
    location = definition.format_properties.get(METADATA_LOCATION)
    if location == staged.metadata_location and definition.id == staged.table_def.id:
        return Presence.AS_STAGED
    if not (staged.added_files or staged.removed_files):
        return Presence.EARLIER
    if location == staged.base_metadata_location:
        return Presence.ABSENT
    metadata = _metadata(lake, version, definition)
    by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    oldest: TableSnapshot | None = None
    next_id = metadata.current_snapshot_id
    while next_id is not None:
        snapshot = by_id.pop(next_id, None)  # pop, because damaged metadata may have cycles
        if snapshot is None:
            return _presence_before(lake, version, staged, oldest)
        is_rebased = is_rebase_of(snapshot, staged)
        if is_rebased or snapshot.snapshot_id == staged.snapshot_id:
            if oldest is not None:
                return Presence.EARLIER
            return Presence.ON_NEWER if is_rebased else Presence.AS_STAGED
        oldest, next_id = snapshot, snapshot.parent_snapshot_id
    if oldest is None or is_first(oldest):
        return Presence.ABSENT
    return _presence_before(lake, version, staged, oldest)


def is_latest_change(lake: Lakehouse, version: Snapshot, staged: StagedTable) -> bool:
    """Whether the latest change of a table is the staged change, either as it was staged or rebased onto a newer table.

    Args:
        lake: The lakehouse.
        version: The version to examine.
        staged: The staged table.

    Raises:
        StorageError: A file of the table cannot be read.
    """
    return presence(lake, version, staged) in (Presence.AS_STAGED, Presence.ON_NEWER)


def is_rebase_of(snapshot: TableSnapshot, staged: StagedTable) -> bool:
    """Whether a snapshot is the staged change rebased onto a newer table."""
    summary = snapshot.summary
    return summary is not None and summary.additional_properties.get(STAGED_AS) == staged.metadata_location


def changed_only_by(
    lake: Lakehouse, version: Snapshot, read_location: str | None, name: tuple[str, str], own: Sequence[StagedTable]
) -> bool:
    """Whether all changes of a table since it was read were staged by the reader.

    Args:
        lake: The lakehouse.
        version: The version to examine.
        read_location: Location of the table's definition when the table was read; None if the table did not exist.
        name: Namespace and name of the table.
        own: Tables that the reader staged, including tables with other names.

    Raises:
        StorageError: A file of the table cannot be read.
    """
    ours = [staged for staged in own if (staged.namespace, staged.table) == name]
    definition = _definition(version, *name)
    if definition is None or not ours:
        return False
    try:
        before = None if read_location is None else version.table_at(read_location)
    except FileMissingError:  # the version was purged
        return False
    location = definition.format_properties.get(METADATA_LOCATION)
    before_location = None if before is None else before.format_properties.get(METADATA_LOCATION)
    for staged in ours:
        if (staged.metadata_location, staged.base_metadata_location) == (location, before_location):
            return True
    if before is None:
        is_own = any(staged.base_metadata_location is None and staged.table_def.id == definition.id for staged in ours)
    else:
        is_own = before.is_iceberg and before.id == definition.id
    if not is_own:
        return False
    try:
        read_id = None if before is None else _metadata(lake, version, before).current_snapshot_id
    except FileMissingError:
        return False
    since = snapshots_since(_metadata(lake, version, definition), read_id)
    own_ids = {staged.snapshot_id for staged in ours}
    return bool(since) and all(
        snapshot.snapshot_id in own_ids or any(is_rebase_of(snapshot, staged) for staged in ours)
        for snapshot in since or ()
    )


def is_changed_since(
    lake: Lakehouse,
    version: Snapshot,
    staged: StagedTable,
    partitions: Iterable[EncodedPartition] | None,
    *,
    includes_base: bool,
) -> bool:
    """Whether other commits than the published staged change changed rows since they were read as staged.

    Files that were rewritten with the same rows, as by a compaction, do not count.

    Args:
        lake: The lakehouse.
        version: The version to examine.
        staged: The staged table.
        partitions: The partitions that were read; None for all rows.
        includes_base: Whether rows of the version on which the table was staged were also read.

    Returns:
        Whether rows were changed. Also True if the relevant snapshots were trimmed.

    Raises:
        StorageError: A file of the table cannot be read.
        InvalidInputError: ``partitions`` are not valid for the staged table.
    """
    definition = _definition(version, staged.namespace, staged.table)
    if definition is None:
        return True
    io = TrinityLakeCatalog.on(SnapshotTarget(version, lake.storage_options)).io
    metadata = table_metadata(definition, io)
    try:
        at_staging = table_metadata(staged.table_def, io)
    except FileMissingError:
        return True
    own_snapshot = at_staging.snapshot_by_id(staged.snapshot_id) if staged.snapshot_id is not None else None
    published: TableSnapshot | None = None
    if staged.added_files or staged.removed_files:
        published = next(
            (
                snapshot
                for snapshot in metadata.snapshots
                if snapshot.snapshot_id == staged.snapshot_id or is_rebase_of(snapshot, staged)
            ),
            None,
        )
        if published is None or own_snapshot is None:
            return True
        base_id = own_snapshot.parent_snapshot_id if includes_base else published.snapshot_id
    else:
        base_id = staged.snapshot_id
    since = snapshots_since(metadata, base_id)
    if since is None:
        return True
    spec_id = at_staging.default_spec_id
    read = None if partitions is None else decode_partitions(partitions, at_staging.spec(), at_staging.schema())

    def is_read(entry: ManifestEntry) -> bool:
        file = entry.data_file
        return read is None or file.spec_id != spec_id or file.partition in read

    other_snapshots = [snapshot for snapshot in since if snapshot is not published]
    return next(changed_files(other_snapshots, io.for_table(definition), is_read), None) is not None


def undone_by(lake: Lakehouse, version: int, tables: Sequence[StagedTable]) -> int | None:
    """Return the version that undid the publication of tables by a rollback or drop.

    Args:
        lake: The lakehouse.
        version: The version that published the tables.
        tables: The staged tables.

    Returns:
        The version, or None if the history of the latest version contains all tables. If the version is no longer
        readable, the next readable version.

    Raises:
        StorageError: A file of a table cannot be read.
    """

    def is_undone(snapshot: Snapshot) -> bool:
        return any(presence(lake, snapshot, staged) is Presence.ABSENT for staged in tables)

    latest = lake.snapshot()
    if not is_undone(latest):
        return None
    last_present, first_absent = version, latest.version
    while first_absent - last_present > 1:
        middle = (last_present + first_absent) // 2
        try:
            undone = is_undone(lake.snapshot(middle))
        except (VersionExpiredError, VersionNotFoundError, FileMissingError):
            undone = False
        last_present, first_absent = (last_present, middle) if undone else (middle, first_absent)
    return first_absent


def _presence_before(lake: Lakehouse, version: Snapshot, staged: StagedTable, oldest: TableSnapshot | None) -> Presence:
    """Return whether a staged table may be among the trimmed snapshots before the oldest known one."""
    if oldest is None or not oldest.sequence_number:
        return Presence.TRIMMED
    try:
        snapshot = _metadata(lake, version, staged.table_def).current_snapshot()
    except FileMissingError:
        return Presence.TRIMMED
    number = 0 if snapshot is None else snapshot.sequence_number or 0
    return Presence.ABSENT if oldest.sequence_number <= number else Presence.TRIMMED


def _definition(version: Snapshot, namespace: str, table: str) -> TableDef | None:
    if not (version.has_namespace(namespace) and version.has_table(namespace, table)):
        return None
    definition = version.table(namespace, table)
    return definition if definition.is_iceberg else None


def _metadata(lake: Lakehouse, version: Snapshot, definition: TableDef) -> TableMetadata:
    io = TrinityLakeCatalog.on(SnapshotTarget(version, lake.storage_options)).io
    return table_metadata(definition, io)


def describe_change(
    io: StorageFileIO, namespace: str, table: str, base: Version, before: TableDef | None, after: TableDef
) -> StagedTable:
    """Return the change between two definitions of a table. Reads their metadata and the new manifests.

    Args:
        io: The lakehouse's file IO.
        namespace: Namespace of the table.
        table: Name of the table.
        base: The latest version, as it was read before staging.
        before: Definition in ``base``; None for a new table.
        after: The staged definition.

    Raises:
        StorageError: A file cannot be read.
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


def _sum(snapshots: Iterable[IcebergSnapshot], key: str) -> int:
    return sum(int(snapshot.summary[key] or 0) for snapshot in snapshots if snapshot.summary is not None)


def _touched_partitions(io: StorageFileIO, metadata: TableMetadata, new: list[IcebergSnapshot]) -> tuple[str, ...]:
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
