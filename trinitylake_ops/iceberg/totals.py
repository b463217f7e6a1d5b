"""Totals in the summaries of snapshots, and the partitions that differ between two states of a table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote_plus
from uuid import UUID

from pyiceberg.manifest import DataFile, DataFileContent, ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import (
    ADDED_POSITION_DELETES,
    DELETED_RECORDS,
    REMOVED_POSITION_DELETES,
    TOTAL_DATA_FILES,
    TOTAL_DELETE_FILES,
    TOTAL_EQUALITY_DELETES,
    TOTAL_FILE_SIZE,
    TOTAL_POSITION_DELETES,
    TOTAL_RECORDS,
    Operation,
    Snapshot,
    Summary,
)
from pyiceberg.table.update import AddSnapshotUpdate, TableUpdate
from pyiceberg.typedef import Record

from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.storage.parallel import run_parallel

_TOTALS = (
    TOTAL_DATA_FILES,
    TOTAL_DELETE_FILES,
    TOTAL_RECORDS,
    TOTAL_FILE_SIZE,
    TOTAL_POSITION_DELETES,
    TOTAL_EQUALITY_DELETES,
)
_MAX_NUMBER_CHARS = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTotals:
    """Rows, data files and bytes of a table as recorded by its writer.

    Rows deleted by position are subtracted. Each value is None if the writer did not record it. The number of rows is
    unknown if the table has equality deletes.
    """

    rows: int | None
    files: int | None
    bytes: int | None


NO_TOTALS = TableTotals(rows=0, files=0, bytes=0)


def totals_of(snapshot: Snapshot | None) -> TableTotals:
    """Return the totals of a table at a snapshot. A table without a snapshot has totals of 0."""
    if snapshot is None:
        return NO_TOTALS
    rows, files, size = (count_in(snapshot, name) for name in (TOTAL_RECORDS, TOTAL_DATA_FILES, TOTAL_FILE_SIZE))
    if rows is not None:
        rows = max(0, rows - (count_in(snapshot, TOTAL_POSITION_DELETES) or 0))
    if count_in(snapshot, TOTAL_EQUALITY_DELETES):
        rows = None
    return TableTotals(rows=rows, files=files, bytes=size)


def rows_removed(snapshot: Snapshot) -> int:
    """Return the number of rows that a snapshot removed, including new position deletes, as recorded by its writer.

    Rows that had been deleted by position before their file was removed are not counted again.
    """
    deleted, added, applied = (
        count_in(snapshot, name) or 0 for name in (DELETED_RECORDS, ADDED_POSITION_DELETES, REMOVED_POSITION_DELETES)
    )
    return max(0, deleted + added - applied)


def count_in(snapshot: Snapshot, name: str) -> int | None:
    """Return a number in a snapshot's summary, or None if it is missing or invalid.

    Args:
        snapshot: The snapshot.
        name: Key in the summary.
    """
    text = "" if snapshot.summary is None else str(snapshot.summary.get(name, ""))
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_NUMBER_CHARS
    return int(text) if is_number else None


def lacks_totals(snapshot: Snapshot) -> bool:
    """Whether the summary of a snapshot lacks a total. Some engines cannot add a snapshot on top of it."""
    return any(count_in(snapshot, name) is None for name in _TOTALS)


def with_totals(
    updates: Sequence[TableUpdate],
    current: TableMetadata | None,
    io: StorageFileIO,
    read: Mapping[ManifestFile, list[ManifestEntry]] | None = None,
    empty_ids: Collection[int] = (),
) -> tuple[TableUpdate, ...]:
    """Return the updates of a commit with all totals in the summaries of added snapshots.

    Existing totals are kept. Missing totals are computed from the parent's totals and the files that the snapshot adds
    and deletes. If the parent lacks totals, all manifests of the snapshot are read.

    Args:
        updates: The updates of a commit.
        current: The metadata of the table; None for a new table.
        io: Reads the files of the table.
        read: The entries of all manifests that the snapshots add, if they have already been read.
        empty_ids: Ids of snapshots with an empty manifest list. Their totals are 0.

    Raises:
        CorruptFileError: A manifest list or manifest is corrupt.
        StorageError: A file cannot be read.
    """
    added: dict[int, Snapshot] = {}
    completed: list[TableUpdate] = []
    for update in updates:
        if not isinstance(update, AddSnapshotUpdate):
            completed.append(update)
            continue
        snapshot, parent_id = update.snapshot, update.snapshot.parent_snapshot_id
        if lacks_totals(snapshot) and snapshot.manifest_list:
            io.settle()
            parent = added.get(parent_id or -1)
            if parent is None and current is not None and parent_id is not None:
                parent = current.snapshot_by_id(parent_id)
            if snapshot.snapshot_id in empty_ids:
                snapshot = _with_missing(snapshot, dict.fromkeys(_TOTALS, 0))
            else:
                snapshot = _with_continued_totals(snapshot, parent, io, read)
        added[snapshot.snapshot_id] = snapshot
        completed.append(update.model_copy(update={"snapshot": snapshot}))
    return tuple(completed)


def _with_continued_totals(
    snapshot: Snapshot,
    parent: Snapshot | None,
    io: StorageFileIO,
    read: Mapping[ManifestFile, list[ManifestEntry]] | None,
) -> Snapshot:
    extends_parent = snapshot.parent_snapshot_id is None or (parent is not None and not lacks_totals(parent))
    totals = {name: (count_in(parent, name) or 0) if parent is not None and extends_parent else 0 for name in _TOTALS}
    listed = read if extends_parent and read is not None else manifests_in(snapshot, io)
    counted_manifests = [
        manifest for manifest in listed if not extends_parent or manifest.added_snapshot_id == snapshot.snapshot_id
    ]
    read_entries = read or {}
    unread = [manifest for manifest in counted_manifests if manifest not in read_entries]
    entries = run_parallel(lambda manifest: entries_in(manifest, io), unread, io.storage.concurrency)
    for group in (*entries, *(read_entries[manifest] for manifest in counted_manifests if manifest in read_entries)):
        for entry in group:
            sign = _sign(entry, snapshot.snapshot_id, is_whole=not extends_parent)
            for name, count in _counts_of(entry.data_file) if sign else ():
                totals[name] += sign * count
    return _with_missing(snapshot, totals)


def _with_missing(snapshot: Snapshot, totals: Mapping[str, int]) -> Snapshot:
    before = {} if snapshot.summary is None else snapshot.summary.additional_properties
    missing = {name: str(max(0, count)) for name, count in totals.items() if count_in(snapshot, name) is None}
    operation = Operation.OVERWRITE if snapshot.summary is None else snapshot.summary.operation
    return snapshot.model_copy(update={"summary": Summary(operation, **{**before, **missing})})


def _sign(entry: ManifestEntry, snapshot_id: int, *, is_whole: bool) -> int:
    """Return how an entry counts: 1 for a new file, -1 for a deleted file, 0 otherwise.

    With ``is_whole``, all live files count as new.
    """
    if entry.status == ManifestEntryStatus.DELETED:
        return 0 if is_whole or entry.snapshot_id not in (None, snapshot_id) else -1
    return 1 if is_whole or entry.status == ManifestEntryStatus.ADDED else 0


def _counts_of(file: DataFile) -> Iterable[tuple[str, int]]:
    yield TOTAL_FILE_SIZE, file.file_size_in_bytes
    if file.content == DataFileContent.DATA:
        yield from ((TOTAL_DATA_FILES, 1), (TOTAL_RECORDS, file.record_count))
    else:
        is_position = file.content == DataFileContent.POSITION_DELETES
        deletes = TOTAL_POSITION_DELETES if is_position else TOTAL_EQUALITY_DELETES
        yield from ((TOTAL_DELETE_FILES, 1), (deletes, file.record_count))


def changed_partitions(
    before: TableMetadata | None, after: TableMetadata | None, io: StorageFileIO
) -> dict[tuple[tuple[str, ...], Record], str]:
    """Return the partitions with different data or delete files in two states of a table.

    Manifests that both states share are not read.

    Args:
        before: The earlier metadata, or None if the table did not exist.
        after: The later metadata, or None if the table does not exist.
        io: Reads the manifests.

    Returns:
        The text of each partition, by its column names and values. For an unpartitioned table, the text is empty.

    Raises:
        CorruptFileError: A manifest list or manifest is corrupt.
        StorageError: A file cannot be read.
    """
    old, new = _manifests(before, io), _manifests(after, io)
    files_before = _files([manifest for path, manifest in old.items() if path not in new], io)
    files_after = _files([manifest for path, manifest in new.items() if path not in old], io)
    specs = {**(before.specs() if before else {}), **(after.specs() if after else {})}
    schemas = [state.schema() for state in (after, before) if state is not None]
    changed: dict[tuple[tuple[str, ...], Record], str] = {}
    for path in files_before.keys() ^ files_after.keys():
        file = files_before.get(path) or files_after[path]
        spec = specs[file.spec_id]
        names = tuple(field.name for field in spec.fields)
        changed[names, _comparable(file.partition)] = partition_text(file.partition, spec, schemas[0])
    return changed


def _comparable(partition: Record) -> Record:
    """Return a partition with UUIDs as bytes, because PyIceberg returns UUID objects only from manifests."""
    values = [partition[index] for index in range(len(partition))]
    return Record(*(value.bytes if isinstance(value, UUID) else value for value in values))


def partition_text(partition: Record, spec: PartitionSpec, schema: Schema) -> str:
    """Return a partition in readable form, such as ``year=2013/region is null``.

    Values are URL-escaped, so that a null differs from every string.

    Args:
        partition: The partition values.
        spec: The partition spec of the partition.
        schema: Schema of the table.
    """
    kinds = [field.field_type for field in spec.partition_type(schema).fields]
    parts = []
    for index, field in enumerate(spec.fields):
        name, value = quote_plus(field.name, safe=""), partition[index]
        text = field.transform.to_human_string(kinds[index], value=value)
        parts.append(f"{name} is null" if value is None else f"{name}={quote_plus(text, safe='')}")
    return "/".join(parts)


def _manifests(metadata: TableMetadata | None, io: StorageFileIO) -> dict[str, ManifestFile]:
    snapshot = None if metadata is None else metadata.current_snapshot()
    return {} if snapshot is None else {manifest.manifest_path: manifest for manifest in manifests_in(snapshot, io)}


def _files(manifests: list[ManifestFile], io: StorageFileIO) -> dict[str, DataFile]:
    return {
        entry.data_file.file_path: entry.data_file
        for manifest in manifests
        for entry in entries_in(manifest, io)
        if entry.status != ManifestEntryStatus.DELETED
    }
