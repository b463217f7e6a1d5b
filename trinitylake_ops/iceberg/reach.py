"""List every file that a version of a table refers to."""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from io import BytesIO
from typing import TypeVar, cast

from pyiceberg.io import FileIO, InputFile, InputStream
from pyiceberg.manifest import (
    DataFileContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    read_manifest_list,
)
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidLocationError,
    StoragePermissionError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.input_file import TableFileUnreadableError
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.metadata import InlineSnapshot, walked_metadata
from trinitylake_ops.iceberg.validation.avro import SNAPSHOT_ID, AvroContent, decompress
from trinitylake_ops.iceberg.validation.bounds import has_faulty_summaries, mark_faulty
from trinitylake_ops.storage.parallel import run_parallel

T = TypeVar("T")
#: Errors that affect a single table: its files are damaged, missing, not owned by it, or not returned by the storage.
DAMAGE = (
    FileMissingError,
    CorruptFileError,
    InvalidLocationError,
    StoragePermissionError,
    TableFileUnreadableError,
)
_ADDED = ManifestEntryStatus.ADDED


class FileKind(StrEnum):
    """The role of a file in its table."""

    METADATA = "metadata"
    METADATA_LOG = "metadata log"
    MANIFEST_LIST = "manifest list"
    MANIFEST = "manifest"
    DATA = "data"
    DELETES = "deletes"
    POSITION_DELETES = "position deletes"
    STATISTICS = "statistics"


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a table."""

    kind: FileKind
    #: Path if the file is under the lakehouse's root, otherwise a URI.
    location: str
    #: Size in bytes, or None if the metadata does not record it.
    size_bytes: int | None = None
    #: False for a file that no snapshot scan opens and that may be missing: a previous metadata file, or a data file
    #: that every remaining snapshot has deleted.
    live: bool = True


def files_of(
    definition: TableDef,
    io: StorageFileIO,
    known: set[str] | None = None,
    *,
    skips_missing: bool = False,
    failures: list[TrinityLakeError] | None = None,
) -> Iterator[TableFile]:
    """Yield every file that an Iceberg table refers to at one version, each once.

    These are its current and previous metadata files and, for all its snapshots, the manifest lists, manifests, data
    files, delete files and statistics files. Manifest lists and manifests are read with as many parallel requests as
    the storage supports. If the iterator raises an error, the walk is incomplete.

    Args:
        definition: Definition of the table.
        io: Reads the lakehouse's files.
        known: Locations of manifest lists and manifests of earlier walks, which are skipped with all files that they
            list. A completed walk adds the ones that it read.
        skips_missing: Whether to skip missing manifest lists and manifests, because files listed only in them cannot be
            read.
        failures: If set, the walk continues after errors caused by damaged, missing or unreadable manifest lists and
            manifests and appends these errors to the list. It then also yields files that the table may not refer to.

    Raises:
        LocationNotAllowedError: The table may not refer to a file at this location.
        CorruptFileError: The metadata, a manifest list or a manifest is corrupt.
        StorageError: A file cannot be read.
    """
    if failures is None:
        io = io.for_table(definition)
    elif not definition.is_managed:
        io = io.strict()
    uri = metadata_uri(definition, io.root)
    metadata = walked_metadata(definition, io)
    yield TableFile(FileKind.METADATA, io.location(uri))
    previous = dict.fromkeys(entry.metadata_file for entry in metadata.metadata_log if entry.metadata_file != uri)
    for location in previous:
        yield TableFile(FileKind.METADATA_LOG, io.location(location), live=False)
    yield from statistics_of(metadata, io)
    known = set() if known is None else known
    snapshots = [
        snapshot
        for snapshot in metadata.snapshots
        if isinstance(snapshot, InlineSnapshot) or (snapshot.manifest_list and snapshot.manifest_list not in known)
    ]
    yield from _snapshot_files(snapshots, io, known, _Tolerance(skips_missing, failures))


def statistics_of(metadata: TableMetadata, io: StorageFileIO) -> list[TableFile]:
    """Return the statistics files in a table's metadata.

    Args:
        metadata: The metadata.
        io: The table's file IO.

    Raises:
        LocationNotAllowedError: The table may not refer to a file at this location.
    """
    sizes_bytes = {file.statistics_path: file.file_size_in_bytes for file in metadata.statistics}
    sizes_bytes.update((file.statistics_path, file.file_size_in_bytes) for file in metadata.partition_statistics)
    _check_own(sizes_bytes, io)
    return [TableFile(FileKind.STATISTICS, io.location(path), size) for path, size in sizes_bytes.items()]


def _snapshot_files(
    snapshots: Sequence[Snapshot], io: StorageFileIO, known: set[str], tolerance: _Tolerance
) -> Iterator[TableFile]:
    concurrency = io.storage.concurrency
    manifests: dict[str, ManifestFile] = {}

    def listed_in(snapshot: Snapshot) -> list[ManifestFile]:
        return tolerance.read(lambda: manifests_in(snapshot, io))

    for batch in _batches(snapshots, concurrency):
        for snapshot, listed in zip(batch, run_parallel(listed_in, batch, concurrency), strict=True):
            if snapshot.manifest_list:
                yield TableFile(FileKind.MANIFEST_LIST, io.location(snapshot.manifest_list))
            for manifest in listed:
                if manifest.manifest_path not in manifests and manifest.manifest_path not in known:
                    manifests[manifest.manifest_path] = manifest
                    yield TableFile(FileKind.MANIFEST, io.location(manifest.manifest_path), manifest.manifest_length)
    yield from _content_files(list(manifests.values()), io, tolerance)
    known.update(manifests, (snapshot.manifest_list for snapshot in snapshots if snapshot.manifest_list))


def manifests_in(snapshot: Snapshot, io: StorageFileIO) -> list[ManifestFile]:
    """Return the entries of a snapshot's manifest list.

    Args:
        snapshot: The snapshot.
        io: The table's file IO.

    Raises:
        CorruptFileError: The list cannot be decoded, or declares another snapshot.
        LocationNotAllowedError: The table may not refer to a manifest at this location.
        StorageError: The list cannot be read.
    """
    if isinstance(snapshot, InlineSnapshot):
        return snapshot.manifests(io)
    with _decoding(snapshot.manifest_list, "manifest list", io):
        file, content = _open(snapshot.manifest_list, io)
        snapshot_id = content.meta_int(SNAPSHOT_ID)
        if snapshot_id not in (None, snapshot.snapshot_id):
            raise _swapped_file_error(
                snapshot.manifest_list, f"it belongs to snapshot {snapshot_id}, not {snapshot.snapshot_id}", io
            )
        # Snapshot.manifests() would return manifests from a process-wide cache, which may differ from the file.
        manifests = list(read_manifest_list(file))
        _check_strings(manifest.manifest_path for manifest in manifests)
        _check_own((manifest.manifest_path for manifest in manifests), io)
        expected = 0 if snapshot.summary is None else int(snapshot.summary["total-data-files"] or 0)
    if expected and not manifests:
        location = io.location(snapshot.manifest_list)
        raise CorruptFileError(
            f"{location!r} is empty, but its snapshot has {expected} files; restore it", path=location
        )
    return manifests


def entries_in(
    manifest: ManifestFile, io: StorageFileIO, admit: Callable[[AvroContent], object] | None = None
) -> list[ManifestEntry]:
    """Return all entries of a manifest, including deleted ones, with valid bounds (``iceberg/validation/bounds.py``).

    Args:
        manifest: The entry of the manifest list.
        io: Reads the files of the table.
        admit: Called with the content before it is decoded. It may raise a TrinityLakeError.

    Raises:
        CorruptFileError: The manifest cannot be decoded, or is not the manifest in the list.
        LocationNotAllowedError: An entry of any status refers to a file at a location that the table may not refer to.
        StorageError: The manifest cannot be read.
    """
    with _decoding(manifest.manifest_path, "manifest", io):
        file, content = _open(manifest.manifest_path, io)
        _check_size(manifest, content, io)
        if admit is not None:
            admit(content)
        entries = manifest.fetch_manifest_entry(cast(FileIO, _SingleFileIO(file)), discard_deleted=False)
        _check_strings(entry.data_file.file_path for entry in entries)
        _check_own((entry.data_file.file_path for entry in entries), io)
        if has_faulty_summaries(manifest, entries):
            for entry in entries:
                mark_faulty(entry.data_file)
    _check_count(manifest, len(entries), io)
    _check_is_listed(manifest, entries, io)
    return entries


def entries_within(
    manifest: ManifestFile, data: bytes, window: range, take: Callable[[int], object]
) -> tuple[list[ManifestEntry], int]:
    """Return a range of a manifest's entries and the total number of entries, decoding only the needed blocks.

    Args:
        manifest: The entry of the manifest list.
        data: Contents of the manifest.
        window: Indices of the entries, including entries of deleted files.
        take: Called with the number of entries to decode before they are decoded. It may raise an error.

    Raises:
        CorruptFileError: The manifest is not Avro, or declares more than it contains.
        Exception: Any exception of the decoder for a corrupt manifest.
    """
    content = decompress(data, manifest.manifest_path, window)
    take(content.n_kept)
    file = _SingleFileIO(_DecompressedFile(manifest.manifest_path, content.data))
    entries = manifest.fetch_manifest_entry(cast(FileIO, file), discard_deleted=False)
    start = max(0, window.start - content.first_record)
    return entries[start : start + len(window)], content.n_records


def _check_strings(locations: Iterable[object]) -> None:
    """Raise ValueError for locations that are bytes: the schema in the file may declare either type."""
    if not all(isinstance(location, str) for location in locations):
        raise ValueError("a location is not a string")


def _check_own(uris: Iterable[str], io: StorageFileIO) -> None:
    """Raise LocationNotAllowedError for a location that the table of ``io`` may not refer to."""
    for uri in uris:
        io.check_may_have(uri)


def _check_size(manifest: ManifestFile, content: AvroContent, io: StorageFileIO) -> None:
    """Raise CorruptFileError, before decoding, for a manifest whose size differs from its list."""
    if content.file_bytes != manifest.manifest_length:
        how = f"it has {content.file_bytes} bytes, but its manifest list declares {manifest.manifest_length}"
        raise _swapped_file_error(manifest.manifest_path, how, io)
    _check_count(manifest, content.n_records, io)


def _check_count(manifest: ManifestFile, n_files: int, io: StorageFileIO) -> None:
    listed = listed_count(manifest)
    if listed is not None and n_files != listed:
        location = io.location(manifest.manifest_path)
        raise CorruptFileError(
            f"{location!r} lists {n_files} files, but its manifest list declares {listed}; restore it", path=location
        )


def listed_count(manifest: ManifestFile) -> int | None:
    """Return the number of entries of a manifest according to its list, or None if the list does not record it."""
    counts = (manifest.added_files_count, manifest.existing_files_count, manifest.deleted_files_count)
    return None if None in counts else sum(count or 0 for count in counts)


def _check_is_listed(manifest: ManifestFile, entries: list[ManifestEntry], io: StorageFileIO) -> None:
    """Raise CorruptFileError if a manifest is not the one that its list refers to."""
    uri, snapshot_id = manifest.manifest_path, manifest.added_snapshot_id
    added = {entry.snapshot_id for entry in entries if entry.status == _ADDED and snapshot_id is not None}
    if others := added - {snapshot_id}:
        raise _swapped_file_error(
            uri, f"it has files of snapshot {others.pop()}, but its manifest list declares {snapshot_id}", io
        )


@dataclass(frozen=True, slots=True)
class _SingleFileIO:
    """A FileIO that returns a single file, which was opened before."""

    file: InputFile

    def new_input(self, location: str) -> InputFile:
        return self.file


def _open(uri: str, io: StorageFileIO) -> tuple[InputFile, AvroContent]:
    """Return a file for PyIceberg's decoder, and its content. Raises CorruptFileError for a file that is not Avro."""
    content = decompress(io.new_input(uri).read_whole(), io.location(uri))
    return _DecompressedFile(uri, content.data), content


class _DecompressedFile(InputFile):
    """An Avro file that was checked and decompressed."""

    def __init__(self, location: str, data: bytes):
        super().__init__(location)
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def exists(self) -> bool:
        return True

    def open(self, seekable: bool = True) -> InputStream:
        return BytesIO(self._data)


def _swapped_file_error(uri: str, how: str, io: StorageFileIO) -> CorruptFileError:
    location = io.location(uri)
    return CorruptFileError(f"{location!r} is not the file that its table refers to: {how}; restore it", path=location)


@contextmanager
def _decoding(uri: str, kind: str, io: StorageFileIO) -> Iterator[None]:
    """Convert the decoder's arbitrary exceptions for corrupt input into CorruptFileErrors that name the file."""
    try:
        yield
    except TrinityLakeError:
        raise
    except Exception as error:
        location = io.location(uri)
        raise CorruptFileError(
            f"{location!r} is not a readable Iceberg {kind}: {type(error).__name__}; restore it", path=location
        ) from error


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """Which read failures do not end a walk."""

    skips_missing: bool
    failures: list[TrinityLakeError] | None

    def read(self, read: Callable[[], list[T]]) -> list[T]:
        """Return the entries of a file, or none if a failure to read it is tolerated."""
        try:
            return read()
        except DAMAGE as error:
            is_skipped = self.skips_missing and isinstance(error, FileMissingError)
            if self.failures is None and not is_skipped:
                raise
            if self.failures is not None and not is_skipped:
                self.failures.append(error)
            return []


def _content_files(manifests: list[ManifestFile], io: StorageFileIO, tolerance: _Tolerance) -> Iterator[TableFile]:
    concurrency = io.storage.concurrency
    yielded: set[str] = set()
    deleted: dict[str, TableFile] = {}

    def existing_entries(manifest: ManifestFile) -> list[ManifestEntry]:
        return tolerance.read(lambda: entries_in(manifest, io))

    for batch in _batches(manifests, concurrency):
        for entries in run_parallel(existing_entries, batch, concurrency):
            for entry in entries:
                path = entry.data_file.file_path
                if entry.status == ManifestEntryStatus.DELETED:
                    deleted.setdefault(path, content_file(entry, io, live=False))
                elif path not in yielded:
                    yielded.add(path)
                    yield content_file(entry, io, live=True)
    yield from (file for path, file in deleted.items() if path not in yielded)


def content_file(entry: ManifestEntry, io: StorageFileIO, *, live: bool) -> TableFile:
    """Return the data or delete file of an entry."""
    data_file = entry.data_file
    kind = _CONTENT_KINDS.get(data_file.content, FileKind.DELETES)
    return TableFile(kind, io.location(data_file.file_path), data_file.file_size_in_bytes, live)


_CONTENT_KINDS = {
    DataFileContent.DATA: FileKind.DATA,
    DataFileContent.POSITION_DELETES: FileKind.POSITION_DELETES,
    DataFileContent.EQUALITY_DELETES: FileKind.DELETES,
}


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


#: Makes the hashes of this process unpredictable, so that no writer can construct a file name with another file's hash.
_KEY = secrets.token_bytes(16)


class ReachedFiles:
    """The set of files that a table refers to at one version: its metadata, and all files of its snapshots.

    Args:
        definition: Definition of the table at that version.
        io: Reads the lakehouse's files.

    Raises:
        StorageError: The metadata, a manifest list or a manifest cannot be read.
    """

    def __init__(self, definition: TableDef, io: StorageFileIO):
        uris = (to_uri(io.root, file.location) for file in files_of(definition, io, skips_missing=True))
        self._hashes = array("Q", sorted(map(_hash, uris)))

    @property
    def size_bytes(self) -> int:
        """Size of the set in memory."""
        return len(self._hashes) * self._hashes.itemsize

    def __contains__(self, uri: object) -> bool:
        """Whether the version refers to the file with this URI."""
        wanted = _hash(str(uri))
        index = bisect_left(self._hashes, wanted)
        return index < len(self._hashes) and self._hashes[index] == wanted


def _hash(uri: str) -> int:
    return int.from_bytes(blake2b(uri.encode(), digest_size=8, key=_KEY).digest(), "big")
