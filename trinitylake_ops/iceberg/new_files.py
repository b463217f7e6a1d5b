"""List the files of snapshots that a commit adds to a table, determine their age and reject duplicates.

New manifests with invalid bounds are rewritten with valid bounds, because engines read manifests directly. The names of
the rewritten files are derived from those of the originals, so a retry writes the same files.
"""

from __future__ import annotations

import functools
import posixpath
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyiceberg.manifest import DataFileContent, ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import ADDED_DATA_FILES, TOTAL_DATA_FILES, Snapshot

from trinitylake_ops.errors import FileMissingError, InvalidDefinitionError, TransactionExpiredError
from trinitylake_ops.format.file_names import OWNER_NAME, derived_uuid
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.iceberg.copy import avro_with
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import entries_in, listed_count, manifests_in
from trinitylake_ops.iceberg.totals import count_in
from trinitylake_ops.iceberg.validation.avro import AvroContent, AvroHeader
from trinitylake_ops.iceberg.validation.bounds import column_types, repair_record
from trinitylake_ops.storage.parallel import run_parallel

#: Engines write manifests of 8 MiB with up to about 80,000 files. Decoding one entry takes at least 30 microseconds.
MAX_MANIFEST_ENTRIES = 100_000
MAX_COMMIT_ENTRIES = 200_000
MAX_COMMIT_BYTES = 128 << 20
LARGE_ENTRIES = 5_000
_LARGE_BYTES = 1 << 20
_ADDED = ManifestEntryStatus.ADDED
_MAX_NAME_CHARS = 150


def oldest_file_ms(metadata: TableMetadata, snapshot_ids: Collection[int], io: StorageFileIO) -> int:
    """Return the modification time of the oldest file that snapshots add.

    Args:
        metadata: Metadata with the snapshots.
        snapshot_ids: Ids of the added snapshots.
        io: The table's file IO.

    Returns:
        Milliseconds since the epoch.

    Raises:
        TransactionExpiredError: A file was deleted.
        StorageError: A manifest cannot be read, or the storage does not respond.
    """
    snapshots = [shot for shot in metadata.snapshots if shot.snapshot_id in snapshot_ids]
    return oldest_of(lambda: new_files(snapshots, metadata, io).added, io)


def oldest_of(written: Callable[[], Iterable[str]], io: StorageFileIO) -> int:
    """Return the modification time of the oldest of some files.

    Pending writes are awaited first. Files outside the root are ignored.

    Args:
        written: Returns the URIs of the files.
        io: The table's file IO.

    Returns:
        Milliseconds since the epoch. The current time if there are no files.

    Raises:
        TransactionExpiredError: A file was deleted as an orphan.
        StorageError: The storage does not respond.
    """
    try:
        paths = [path for uri in sorted(written()) if not is_uri(path := io.location(uri))]
        io.settle()  # pending files are not in the storage yet
        infos = run_parallel(io.storage.stat, paths, io.storage.concurrency)
    except FileMissingError as error:
        raise TransactionExpiredError(
            "commit failed: one of its files was deleted as an orphan before the commit; write the files again",
            path=error.path,
        ) from error
    return min((info.last_modified_ms for info in infos), default=io.storage.now_ms())


@dataclass(frozen=True, slots=True)
class NewFiles:
    """The files of snapshots that are added to a table, by the URIs in the table's metadata."""

    #: All files that the snapshots refer to, except files in manifests that their parents also list.
    named: frozenset[str]
    #: The named files that the snapshots declare as added.
    added: frozenset[str]
    #: The entries of the manifests that were read.
    entries: Mapping[ManifestFile, list[ManifestEntry]]
    #: The manifests of each snapshot, by snapshot id.
    listed: Mapping[int, list[ManifestFile]]


class ManifestBudget:
    """Limits how much of one commit's new manifests a process decodes.

    Args:
        begin_large: Called once before large manifests are decoded. It may wait, so that the process decodes large
            manifests of only one commit at a time.
    """

    def __init__(self, begin_large: Callable[[], object]):
        self._begin_large = begin_large
        self._left_entries, self._left_bytes = MAX_COMMIT_ENTRIES, MAX_COMMIT_BYTES

    def begin(self, manifests: Iterable[ManifestFile]) -> bool:
        """Return whether manifests are large, according to the sizes in their lists, which are verified later."""
        sizes = [(listed_count(manifest), manifest.manifest_length) for manifest in manifests]
        is_large = (
            any(count is None for count, _ in sizes)
            or sum(count or 0 for count, _ in sizes) > LARGE_ENTRIES
            or sum(size for _, size in sizes) > _LARGE_BYTES
        )
        if is_large:
            self._begin_large()
        return is_large

    def admit(self, content: AvroContent) -> None:
        """Count a manifest before it is decoded. Raises InvalidDefinitionError if the budget is exceeded."""
        self._left_entries -= content.n_records
        self._left_bytes -= len(content.data)
        if content.n_records > MAX_MANIFEST_ENTRIES or self._left_entries < 0 or self._left_bytes < 0:
            raise InvalidDefinitionError(
                f"the new manifests are too large: a manifest may have {MAX_MANIFEST_ENTRIES} files, and those of a"
                f" commit {MAX_COMMIT_ENTRIES} files and {MAX_COMMIT_BYTES >> 20} MiB uncompressed; split the files"
                " into several manifests and commits"
            )


def new_files(
    added: Iterable[Snapshot], base: TableMetadata | None, io: StorageFileIO, budget: ManifestBudget | None = None
) -> NewFiles:
    """Return the files of snapshots that are added to a table.

    A manifest list declares which snapshot added a manifest, and a manifest which of its files are new. These
    declarations are untrusted, so every manifest that is not in the parent's list is read, and all its entries are
    taken into account.

    Args:
        added: The new snapshots.
        base: The metadata with the parents of the new snapshots; None for a new table.
        io: Reads the files of the table, and rejects files that it may not refer to.
        budget: Limits the new manifests; None for a commit that this process itself creates.

    Raises:
        InvalidDefinitionError: The new manifests exceed the budget.
        CorruptFileError: A manifest list or manifest is corrupt.
        LocationNotAllowedError: A snapshot refers to a file at a location that is not allowed.
        StorageError: A file cannot be read.
    """
    snapshots = [snapshot for snapshot in added if snapshot.manifest_list]
    snapshot_ids = {snapshot.snapshot_id for snapshot in snapshots}
    parent_ids = {snapshot.parent_snapshot_id for snapshot in snapshots} - snapshot_ids
    parents = [snapshot for snapshot in ([] if base is None else base.snapshots) if snapshot.snapshot_id in parent_ids]
    listed = run_parallel(lambda snapshot: manifests_in(snapshot, io), [*snapshots, *parents], io.storage.concurrency)
    before = {manifest.manifest_path for group in listed[len(snapshots) :] for manifest in group}
    manifests = {manifest.manifest_path: manifest for group in listed[: len(snapshots)] for manifest in group}
    new_manifests = [manifest for path, manifest in manifests.items() if path not in before]
    # Decoding is CPU-bound, so more threads would not speed it up and would slow down other requests.
    concurrency = 1 if budget is not None and budget.begin(new_manifests) else io.storage.concurrency
    admit = None if budget is None else budget.admit
    entries = run_parallel(lambda manifest: entries_in(manifest, io, admit), new_manifests, concurrency)
    lists = {snapshot.manifest_list for snapshot in snapshots}
    named, declared = lists | manifests.keys(), set(lists)
    for manifest, group in zip(new_manifests, entries, strict=True):
        named.update(entry.data_file.file_path for entry in group)
        if manifest.added_snapshot_id in snapshot_ids:
            declared.add(manifest.manifest_path)
            declared.update(entry.data_file.file_path for entry in group if entry.status == _ADDED)
    return NewFiles(
        frozenset(named),
        frozenset(declared),
        dict(zip(new_manifests, entries, strict=True)),
        {snapshot.snapshot_id: group for snapshot, group in zip(snapshots, listed, strict=False)},
    )


def check_new_lists(new: NewFiles, added: Iterable[Snapshot], spec_ids: Container[int]) -> None:
    """Check new manifest lists for faults that would make readers fail or return wrong rows.

    Args:
        new: The files of the new snapshots.
        added: The new snapshots.
        spec_ids: The ids of the partition specs of the table.

    Raises:
        InvalidDefinitionError: A list contains a manifest twice, so that its rows count twice; a new manifest uses a
            partition spec that the table does not have; or a list is empty, but its summary counts files.
    """
    for snapshot in added:
        manifests = new.listed.get(snapshot.snapshot_id)
        if manifests is None:
            continue
        n_files = {name: count_in(snapshot, name) or 0 for name in (ADDED_DATA_FILES, TOTAL_DATA_FILES)}
        if not manifests and any(n_files.values()):
            raise InvalidDefinitionError(
                f"the manifest list {snapshot.manifest_list[:200]!r} is empty, but the summary of its snapshot counts"
                " files; write the list again"
            )
        repeated = [
            path for path, count in Counter(manifest.manifest_path for manifest in manifests).items() if count > 1
        ]
        if repeated:
            raise InvalidDefinitionError(
                f"the snapshot lists the manifest {repeated[0][:200]!r} more than once, so its rows would count more"
                " than once; list it once"
            )
    for manifest in new.entries:
        if manifest.partition_spec_id not in spec_ids:
            raise InvalidDefinitionError(
                f"the manifest {manifest.manifest_path[:200]!r} has the partition spec {manifest.partition_spec_id},"
                " which the table does not have; write the manifest with a spec of the table"
            )


def check_new_entries(
    entries: Mapping[ManifestFile, list[ManifestEntry]], added: Iterable[Snapshot], io: StorageFileIO
) -> None:
    """Check entries of new manifests for faults that would make readers return wrong rows.

    Args:
        entries: The entries of the manifests that the table does not have yet.
        added: The new snapshots.
        io: Resolves the URIs of files, because one file may have several URIs.

    Raises:
        InvalidDefinitionError: A snapshot lists a data file twice, so that its rows count twice; the sequence number of
            a file is greater than those of the snapshots, so that deletes in the file would apply to rows of later
            commits; or a file is the owner file of the folder, which a later compaction would delete.
    """
    last = max((snapshot.sequence_number or 0 for snapshot in added), default=0)
    live: Counter[tuple[int | None, str]] = Counter()
    for manifest, manifest_entries in entries.items():
        for entry in manifest_entries:
            if entry.status == ManifestEntryStatus.DELETED:
                continue
            path = entry.data_file.file_path
            if (entry.sequence_number or 0) > last:
                raise InvalidDefinitionError(
                    f"the file {path[:200]!r} has the sequence number {entry.sequence_number}, greater than {last} of"
                    " its snapshot; write its manifest again"
                )
            if posixpath.basename(io.location(path)) == OWNER_NAME:
                raise InvalidDefinitionError(
                    f"the file {path[:200]!r} is not a data file but the owner file of the table's folder; leave it out"
                )
            if entry.data_file.content == DataFileContent.DATA:
                live[manifest.added_snapshot_id, io.location(path)] += 1
    repeated = next((path for (_, path), count in live.items() if count > 1), None)
    if repeated is not None:
        raise InvalidDefinitionError(
            f"the snapshot lists the data file {repeated[:200]!r} more than once, so its rows would count more than"
            " once; add it once"
        )


def repaired_uri(uri: str) -> str:
    """Return the URI of the rewritten form of a manifest or manifest list."""
    folder, _, name = uri.rpartition("/")
    return f"{folder}/{derived_uuid(uuid.NAMESPACE_URL, uri)}-{name[-_MAX_NAME_CHARS:]}"


def with_valid_bounds(snapshot: Snapshot, faulty: Iterable[ManifestFile], io: StorageFileIO) -> Snapshot:
    """Rewrite a snapshot's manifest list and its manifests with invalid bounds, under other names.

    Args:
        snapshot: The snapshot, which is not in any version of the table yet.
        faulty: Manifests that the snapshot adds, whose entries have invalid bounds.
        io: Reads and writes the files of the table.

    Returns:
        The snapshot with the new manifest list.

    Raises:
        CorruptFileError: A file cannot be decoded.
        StorageError: A file cannot be read or written.
    """
    sizes_bytes: dict[str, int] = {}
    summaries: dict[str, list[tuple[bytes, bytes] | None]] = {}
    for manifest in faulty:
        uri = manifest.manifest_path
        data = io.new_input(uri).read_whole()
        header = AvroHeader.of(data)
        types = column_types(header.metadata.get("schema") if header is not None else None)
        repaired = avro_with(uri, data, functools.partial(repair_record, types=types))
        sizes_bytes[uri] = _write(repaired_uri(uri), repaired, io)
        summaries[uri] = _string_ranges(entries_in(manifest, io))

    def update_record(record: dict[str, Any]) -> None:
        uri = record["manifest_path"]
        if uri in sizes_bytes:
            record["manifest_path"], record["manifest_length"] = repaired_uri(uri), sizes_bytes[uri]
            for summary, string_range in zip(record.get("partitions") or (), summaries[uri], strict=False):
                if string_range is not None:
                    summary["lower_bound"], summary["upper_bound"] = string_range

    listed = io.new_input(snapshot.manifest_list).read_whole()
    _write(repaired_uri(snapshot.manifest_list), avro_with(snapshot.manifest_list, listed, update_record), io)
    return snapshot.model_copy(update={"manifest_list": repaired_uri(snapshot.manifest_list)})


def _write(uri: str, data: bytes, io: StorageFileIO) -> int:
    output = io.new_output(uri)
    with output.create() as stream:
        stream.write(data)
    return len(output)


def _string_ranges(entries: Iterable[ManifestEntry]) -> list[tuple[bytes, bytes] | None]:
    """Return the smallest and the greatest value of each string partition field, and None for other fields."""
    partitions = [entry.data_file.partition for entry in entries]
    ranges: list[tuple[bytes, bytes] | None] = []
    for index in range(len(partitions[0]) if partitions else 0):
        strings = [partition[index].encode() for partition in partitions if isinstance(partition[index], str)]
        ranges.append((min(strings), max(strings)) if strings else None)
    return ranges
