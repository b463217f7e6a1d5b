"""What others changed in a table since it was staged, by the rules of Iceberg for what conflicts.

Appended files conflict with nothing. Files that replace partitions, or all, conflict with data and delete files that
others added there, and with data files that others removed there. Files that were written anew with the same rows, as
by a compaction, conflict with nothing. pyiceberg has such checks for its own operations, but none for partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from pyiceberg.manifest import ManifestContent, ManifestEntry, ManifestEntryStatus
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from trinitylake_ops.tables.files.reach import entries_in, manifests_in
from trinitylake_ops.tables.files.trimming import is_first
from trinitylake_ops.tables.io.file_io import StorageFileIO

#: Whether a file is of the partitions in question.
IsReplaced: TypeAlias = Callable[[ManifestEntry], bool]


def snapshots_since(metadata: TableMetadata, base_id: int | None) -> list[Snapshot] | None:
    """Return the snapshots that led from a base, None for an empty table, to the current one, the newest first.

    None if the table does not know: it was set back, or the snapshots between were trimmed.
    """
    by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    found: list[Snapshot] = []
    next_id = metadata.current_snapshot_id
    while next_id != base_id:
        snapshot = by_id.pop(next_id, None) if next_id is not None else None  # nothing is its own ancestor
        if snapshot is None:
            return None
        found.append(snapshot)
        next_id = snapshot.parent_snapshot_id
    return None if next_id is None and found and not is_first(found[-1]) else found


def changed_files(snapshots: list[Snapshot], io: StorageFileIO, is_replaced: IsReplaced) -> Iterator[ManifestEntry]:
    """Yield the files of some partitions that snapshots added or removed, except where only files were written anew."""
    for snapshot in snapshots:
        if snapshot.summary is not None and snapshot.summary.operation == Operation.REPLACE:
            continue
        for manifest in manifests_in(snapshot, io):
            if manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            for entry in entries_in(manifest, io):
                is_change = entry.status != ManifestEntryStatus.EXISTING
                # A delete file without a partition may delete rows of any.
                is_of_all = manifest.content == ManifestContent.DELETES and len(entry.data_file.partition) == 0
                if is_change and (is_of_all or is_replaced(entry)):
                    yield entry


def added_paths(snapshots: Iterable[Snapshot], io: StorageFileIO) -> set[str]:
    """Return the files that snapshots added."""
    return {
        entry.data_file.file_path
        for snapshot in snapshots
        for manifest in manifests_in(snapshot, io)
        if manifest.added_snapshot_id == snapshot.snapshot_id
        for entry in entries_in(manifest, io)
        if entry.status == ManifestEntryStatus.ADDED
    }


def live_paths(snapshot: Snapshot | None, io: StorageFileIO) -> set[str]:
    """Return the files that a snapshot has."""
    manifests = [] if snapshot is None else manifests_in(snapshot, io)
    entries = (entry for manifest in manifests for entry in entries_in(manifest, io))
    return {entry.data_file.file_path for entry in entries if entry.status != ManifestEntryStatus.DELETED}
