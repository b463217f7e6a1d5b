"""The files of snapshots that a commit adds to a table: which they are, how old, and whether each counts once.

Manifests among them whose bounds are faulty are written again with valid ones, because engines read manifests
themselves. The new files have names that follow from those of the originals, so that an attempt that is repeated writes
the same files again.
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

#: Engines write manifests of 8 MiB, which have up to about 80,000 files. Each takes a decoder 30 microseconds or more.
MAX_MANIFEST_ENTRIES = 100_000
MAX_COMMIT_ENTRIES = 200_000
MAX_COMMIT_BYTES = 128 << 20
_LARGE_ENTRIES = 5_000
_LARGE_BYTES = 1 << 20
_ADDED = ManifestEntryStatus.ADDED
_LONGEST_NAME_CHARS = 150


def oldest_file_ms(metadata: TableMetadata, snapshot_ids: Collection[int], io: StorageFileIO) -> int:
    """Return when the oldest file that these snapshots add was last modified, as :func:`oldest_of` does."""
    snapshots = [shot for shot in metadata.snapshots if shot.snapshot_id in snapshot_ids]
    return oldest_of(lambda: new_files(snapshots, metadata, io).added, io)


def oldest_of(written: Callable[[], Iterable[str]], io: StorageFileIO) -> int:
    """Return when the oldest of some files was last modified, in milliseconds since the epoch.

    ``written`` gives their URIs. Files beyond the root do not count. Files on their way are waited for. Raises
    TransactionExpiredError where a file is gone, removed as an orphan, and StorageError.
    """
    try:
        paths = [path for uri in sorted(written()) if not is_uri(path := io.location(uri))]
        io.settle()  # of those on their way the storage knows nothing
        infos = run_parallel(io.storage.stat, paths, io.storage.concurrency)
    except FileMissingError as error:
        raise TransactionExpiredError(
            "a file that was written for this commit is gone, removed as an orphan; write it again", path=error.path
        ) from error
    return min((info.last_modified_ms for info in infos), default=io.storage.now_ms())


@dataclass(frozen=True, slots=True)
class NewFiles:
    """The files of snapshots that are added to a table, by the URIs that they have there.

    ``named`` are all files that the snapshots name, unless the snapshots before them list the same manifests. ``added``
    are those of them that the snapshots declare to add. ``entries`` are those of the manifests that were read.
    ``listed`` are the manifest lists of the snapshots, by snapshot id.
    """

    named: frozenset[str]
    added: frozenset[str]
    entries: Mapping[ManifestFile, list[ManifestEntry]]
    listed: Mapping[int, list[ManifestFile]]


class ManifestBudget:
    """Bounds what the new manifests of one commit of one table make a process decode.

    Args:
        begin_large: Called once before manifests are decoded that are more than a few. It may wait, so that the process
            decodes the large manifests of one commit at a time.
    """

    def __init__(self, begin_large: Callable[[], object]):
        self._begin_large = begin_large
        self._left_entries, self._left_bytes = MAX_COMMIT_ENTRIES, MAX_COMMIT_BYTES

    def begin(self, manifests: Iterable[ManifestFile]) -> bool:
        """Return whether manifests are large, by what their lists say. Manifests that differ from it are rejected."""
        sizes = [(listed_count(manifest), manifest.manifest_length) for manifest in manifests]
        is_large = (
            any(count is None for count, _ in sizes)
            or sum(count or 0 for count, _ in sizes) > _LARGE_ENTRIES
            or sum(size for _, size in sizes) > _LARGE_BYTES
        )
        if is_large:
            self._begin_large()
        return is_large

    def admit(self, content: AvroContent) -> None:
        """Count a manifest that is about to be decoded. Raises InvalidDefinitionError for one that is too large."""
        self._left_entries -= content.n_records
        self._left_bytes -= len(content.data)
        if content.n_records > MAX_MANIFEST_ENTRIES or self._left_entries < 0 or self._left_bytes < 0:
            raise InvalidDefinitionError(
                f"the new manifests are too large: one may have {MAX_MANIFEST_ENTRIES} files, and all of a commit"
                f" {MAX_COMMIT_ENTRIES} files and {MAX_COMMIT_BYTES >> 20} MiB without compression; commit the files"
                " in several manifests and commits"
            )


def new_files(
    added: Iterable[Snapshot], base: TableMetadata | None, io: StorageFileIO, budget: ManifestBudget | None = None
) -> NewFiles:
    """Return the files of snapshots that are added to a table.

    A manifest list declares which snapshot added a manifest, and a manifest which of its files are new. So every
    manifest is read that the list of the parent snapshot does not have, and every entry counts.

    Args:
        added: The new snapshots.
        base: The metadata that has the parents of the new snapshots, None for a new table.
        io: Reads the files of the table, and rejects those that it cannot have.
        budget: Bounds the new manifests, None for a commit of this process itself.

    Raises:
        InvalidDefinitionError: The new manifests are larger than the budget.
        CorruptFileError: A manifest list or manifest cannot be read.
        LocationNotAllowedError: A snapshot names a file that the table cannot have.
        StorageError: Another failure of the storage.
    """
    snapshots = [shot for shot in added if shot.manifest_list]
    snapshot_ids = {shot.snapshot_id for shot in snapshots}
    parent_ids = {shot.parent_snapshot_id for shot in snapshots} - snapshot_ids
    parents = [shot for shot in ([] if base is None else base.snapshots) if shot.snapshot_id in parent_ids]
    listed = run_parallel(lambda shot: manifests_in(shot, io), [*snapshots, *parents], io.storage.concurrency)
    before = {one.manifest_path for several in listed[len(snapshots) :] for one in several}
    manifests = {one.manifest_path: one for several in listed[: len(snapshots)] for one in several}
    fresh = [manifest for path, manifest in manifests.items() if path not in before]
    # Threads that decode compete with those of other requests, and do not decode faster together.
    concurrency = 1 if budget is not None and budget.begin(fresh) else io.storage.concurrency
    admit = None if budget is None else budget.admit
    entries = run_parallel(lambda manifest: entries_in(manifest, io, admit), fresh, concurrency)
    lists = {shot.manifest_list for shot in snapshots}
    named, declared = lists | manifests.keys(), set(lists)
    for manifest, several in zip(fresh, entries, strict=True):
        named.update(entry.data_file.file_path for entry in several)
        if manifest.added_snapshot_id in snapshot_ids:
            declared.add(manifest.manifest_path)
            declared.update(entry.data_file.file_path for entry in several if entry.status == _ADDED)
    return NewFiles(
        frozenset(named),
        frozenset(declared),
        dict(zip(fresh, entries, strict=True)),
        {shot.snapshot_id: several for shot, several in zip(snapshots, listed, strict=False)},
    )


def check_new_lists(new: NewFiles, added: Iterable[Snapshot], spec_ids: Container[int]) -> None:
    """Raise InvalidDefinitionError for manifest lists of which readers would return wrong rows, or fail.

    Args:
        new: The files of the new snapshots.
        added: The new snapshots.
        spec_ids: The ids of the partition specs of the table.

    Raises:
        InvalidDefinitionError: A list has a manifest twice, so that each of its rows counts twice. Or a new manifest
            has a partition spec that the table does not have. Or a list is empty, and its summary counts files.
    """
    for snapshot in added:
        manifests = new.listed.get(snapshot.snapshot_id)
        if manifests is None:
            continue
        n_files = {name: count_in(snapshot, name) or 0 for name in (ADDED_DATA_FILES, TOTAL_DATA_FILES)}
        if not manifests and any(n_files.values()):
            raise InvalidDefinitionError(
                f"the manifest list {snapshot.manifest_list[:200]!r} is empty, and the summary of its snapshot counts"
                " files; write the list again"
            )
        repeated = [path for path, count in Counter(one.manifest_path for one in manifests).items() if count > 1]
        if repeated:
            raise InvalidDefinitionError(
                f"the snapshot lists the manifest {repeated[0][:200]!r} more than once, and each of its rows would"
                " count as often; list it once"
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
    """Raise InvalidDefinitionError for entries of new manifests that would make readers return wrong rows.

    Args:
        entries: The entries of the manifests that the table does not have yet.
        added: The new snapshots.
        io: Resolves the URIs of files, because one file may have several.

    Raises:
        InvalidDefinitionError: A snapshot lists a data file twice, so that each of its rows counts twice. Or a file
            has a sequence number after those of the snapshots, so that deletes of it apply to rows of later commits.
            Or a file is the one that names the owner of the folder, which a later compaction would delete.
    """
    last = max((snapshot.sequence_number or 0 for snapshot in added), default=0)
    live: Counter[tuple[int | None, str]] = Counter()
    for manifest, several in entries.items():
        for entry in several:
            if entry.status == ManifestEntryStatus.DELETED:
                continue
            path = entry.data_file.file_path
            if (entry.sequence_number or 0) > last:
                raise InvalidDefinitionError(
                    f"the file {path[:200]!r} has the sequence number {entry.sequence_number}, and the snapshot that"
                    f" adds it {last}; write its manifest again"
                )
            if posixpath.basename(io.location(path)) == OWNER_NAME:
                raise InvalidDefinitionError(
                    f"the file {path[:200]!r} is no data file: it names the owner of the table's folder; leave it out"
                )
            if entry.data_file.content == DataFileContent.DATA:
                live[manifest.added_snapshot_id, io.location(path)] += 1
    repeated = next((path for (_, path), count in live.items() if count > 1), None)
    if repeated is not None:
        raise InvalidDefinitionError(
            f"the snapshot lists the data file {repeated[:200]!r} more than once, and each of its rows would"
            " count as often; add it once"
        )


def repaired_uri(uri: str) -> str:
    """Return the URI of the repaired form of a manifest or manifest list."""
    folder, _, name = uri.rpartition("/")
    return f"{folder}/{derived_uuid(uuid.NAMESPACE_URL, uri)}-{name[-_LONGEST_NAME_CHARS:]}"


def with_valid_bounds(snapshot: Snapshot, faulty: Iterable[ManifestFile], io: StorageFileIO) -> Snapshot:
    """Write the manifest list of a snapshot and its faulty manifests with valid bounds, under other names.

    Args:
        snapshot: The snapshot, which no version of the table has.
        faulty: Manifests that the snapshot adds, whose entries have faulty bounds.
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
        summaries[uri] = _text_ranges(entries_in(manifest, io))

    def place(record: dict[str, Any]) -> None:
        uri = record["manifest_path"]
        if uri in sizes_bytes:
            record["manifest_path"], record["manifest_length"] = repaired_uri(uri), sizes_bytes[uri]
            for summary, texts in zip(record.get("partitions") or (), summaries[uri], strict=False):
                if texts is not None:
                    summary["lower_bound"], summary["upper_bound"] = texts

    listed = io.new_input(snapshot.manifest_list).read_whole()
    _write(repaired_uri(snapshot.manifest_list), avro_with(snapshot.manifest_list, listed, place), io)
    return snapshot.model_copy(update={"manifest_list": repaired_uri(snapshot.manifest_list)})


def _write(uri: str, data: bytes, io: StorageFileIO) -> int:
    output = io.new_output(uri)
    with output.create() as stream:
        stream.write(data)
    return len(output)


def _text_ranges(entries: Iterable[ManifestEntry]) -> list[tuple[bytes, bytes] | None]:
    """Return the least and the greatest value of each partition field that has texts, None for other fields."""
    partitions = [entry.data_file.partition for entry in entries]
    ranges: list[tuple[bytes, bytes] | None] = []
    for at in range(len(partitions[0]) if partitions else 0):
        texts = [partition[at].encode() for partition in partitions if isinstance(partition[at], str)]
        ranges.append((min(texts), max(texts)) if texts else None)
    return ranges
