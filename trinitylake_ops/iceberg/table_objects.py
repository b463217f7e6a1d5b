"""The files of a table as a graph: each metadata file, manifest list and manifest with the files that it names.

These files never change, so what was read once about a file stays valid. A caller that keeps it reads only new files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from pyiceberg.manifest import DataFileContent, ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.table import TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from trinitylake_ops.errors import CorruptFileError, TrinityLakeError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.input_file import StorageInputFile
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.metadata import InlineSnapshot, walked_metadata
from trinitylake_ops.iceberg.reach import DAMAGE, FileKind, entries_in, manifests_in, statistics_of
from trinitylake_ops.iceberg.snapshot_retention import SnapshotRule
from trinitylake_ops.iceberg.trim import lasting_snapshots
from trinitylake_ops.storage.parallel import run_parallel

#: The largest size of a file that is accepted from the metadata of a table, in bytes.
MAX_FILE_BYTES = 1 << 50
_MAX_NUMBER_CHARS = 15

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TableObject:
    """A file of a table, and the locations of the files that it names."""

    kind: FileKind
    #: A path if the file is under the root of the lakehouse, otherwise a URI.
    location: str
    size_bytes: int
    #: All named files that exist as long as a version needs this file.
    names: tuple[str, ...] = ()
    #: For a metadata file: the manifest lists of the snapshots that a trim keeps at any age, and statistics files.
    kept: tuple[str, ...] = ()
    #: For a metadata file: the manifest list of the current snapshot. Old tables may name manifests instead.
    current: tuple[str, ...] = ()
    #: For a metadata file: the table's target size of data files in bytes; 0 if the table has none.
    target_bytes: int = 0


class _MeasuringFileIO(StorageFileIO):
    """A FileIO that keeps the files that it opens, because their sizes are known once they are read."""

    _opened: dict[str, StorageInputFile]

    @classmethod
    def like(cls, file_io: StorageFileIO) -> Self:
        """Return a FileIO with the access of another one."""
        measuring = cls.__new__(cls)
        measuring.__dict__.update(file_io.__dict__)
        measuring._strict = None
        measuring._opened = {}
        return measuring

    def new_input(self, location: str) -> StorageInputFile:
        """Return a file to read. Raises InvalidLocationError."""
        file = super().new_input(location)
        self._opened[location] = file
        return file

    def read_bytes(self, location: str) -> int:
        """Return the size of a file that was read, without a request."""
        return len(self._opened.pop(location))


def read_table_objects(
    definition: TableDef,
    io: StorageFileIO,
    rule: SnapshotRule,
    is_known: Callable[[str], bool],
    failures: list[TrinityLakeError],
) -> Iterator[TableObject]:
    """Yield the files that a table refers to at one version, except known files. Each file is yielded once.

    Files that only previous metadata files and deleted entries of manifests name are left out, because no scan opens
    them. Manifest lists and manifests are read with as many parallel requests as the storage supports.

    Args:
        definition: The definition of the table.
        io: Reads the files of the lakehouse.
        rule: Which snapshots of branches a trim retains, unless the table's properties decide.
        is_known: Whether a file, by its location, was read before, with all files that it names.
        failures: Errors of damaged, missing or unreadable files are appended, and the walk continues without them.

    Raises:
        StorageError: The storage failed.
    """
    try:
        measuring = _MeasuringFileIO.like(io).for_table(definition)
        uri = metadata_uri(definition, io.root)
        location = measuring.location(uri)
        if is_known(location):
            return
        metadata = walked_metadata(definition, measuring)
        statistics = statistics_of(metadata, measuring)
    except DAMAGE as error:
        failures.append(error)
        return
    kept_ids = lasting_snapshots(metadata, rule)
    named = [file.location for file in statistics]
    yield _metadata_object(metadata, location, measuring.read_bytes(uri), measuring, kept_ids, named)
    for file in statistics:
        yield TableObject(FileKind.STATISTICS, file.location, _checked_size(file.size_bytes, file.location, failures))
    reader = _Reader(measuring, is_known, failures)
    yield from reader.read(metadata.snapshots)


def _metadata_object(
    metadata: TableMetadata,
    location: str,
    size_bytes: int,
    io: StorageFileIO,
    kept_ids: Collection[int],
    statistics: Sequence[str],
) -> TableObject:
    lists = {snapshot.snapshot_id: _named_by(snapshot, io) for snapshot in metadata.snapshots}
    return TableObject(
        FileKind.METADATA,
        location,
        size_bytes,
        names=(*dict.fromkeys(name for names in lists.values() for name in names), *statistics),
        kept=(
            *dict.fromkeys(name for number, names in lists.items() if number in kept_ids for name in names),
            *statistics,
        ),
        current=lists.get(metadata.current_snapshot_id or -1, ()),
        target_bytes=_target_bytes(metadata),
    )


def _named_by(snapshot: Snapshot, io: StorageFileIO) -> tuple[str, ...]:
    """Return the manifest list of a snapshot, or the manifests of a snapshot without one."""
    if isinstance(snapshot, InlineSnapshot):
        return tuple(map(io.location, snapshot.manifest_paths))
    return (io.location(snapshot.manifest_list),) if snapshot.manifest_list else ()


def _target_bytes(metadata: TableMetadata) -> int:
    text = str(metadata.properties.get(TableProperties.WRITE_TARGET_FILE_SIZE_BYTES, ""))
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_NUMBER_CHARS else 0


def _checked_size(size_bytes: int | None, location: str, failures: list[TrinityLakeError]) -> int:
    if size_bytes is None or 0 <= size_bytes <= MAX_FILE_BYTES:
        return size_bytes or 0
    failures.append(CorruptFileError(f"{location!r} has a declared size of {size_bytes} bytes", path=location))
    return 0


class _Reader:
    """Reads manifest lists and manifests that are not known, and yields them with the files that they name."""

    def __init__(self, io: _MeasuringFileIO, is_known: Callable[[str], bool], failures: list[TrinityLakeError]):
        self._io = io
        self._is_known = is_known
        self._failures = failures
        self._yielded: set[str] = set()
        self._manifests: dict[str, ManifestFile] = {}

    def read(self, snapshots: Sequence[Snapshot]) -> Iterator[TableObject]:
        lists = {
            name: snapshot
            for snapshot in snapshots
            for name in _named_by(snapshot, self._io)[:1]
            if isinstance(snapshot, InlineSnapshot) or not self._is_known(name)
        }
        for batch in _batches(list(lists.items()), self._io.storage.concurrency):
            listings = run_parallel(self._manifests_of, [snapshot for _, snapshot in batch], len(batch))
            for (name, snapshot), listing in zip(batch, listings, strict=True):
                if listing is None:
                    continue
                locations = tuple(dict.fromkeys(self._io.location(manifest.manifest_path) for manifest in listing))
                if not isinstance(snapshot, InlineSnapshot):
                    size_bytes = self._io.read_bytes(snapshot.manifest_list)
                    yield TableObject(FileKind.MANIFEST_LIST, name, size_bytes, names=locations)
                for location, manifest in zip(
                    (self._io.location(manifest.manifest_path) for manifest in listing), listing, strict=True
                ):
                    if not self._is_known(location):
                        self._manifests.setdefault(location, manifest)
        for batch_of_manifests in _batches(list(self._manifests.items()), self._io.storage.concurrency):
            manifests = [manifest for _, manifest in batch_of_manifests]
            contents = run_parallel(self._entries_of, manifests, len(manifests))
            for (location, manifest), entries in zip(batch_of_manifests, contents, strict=True):
                if entries is not None:
                    yield from self._manifest_objects(location, manifest, entries)

    def _manifest_objects(
        self, location: str, manifest: ManifestFile, entries: Sequence[ManifestEntry]
    ) -> Iterator[TableObject]:
        files = {
            self._io.location(entry.data_file.file_path): entry.data_file
            for entry in entries
            if entry.status != ManifestEntryStatus.DELETED
        }
        size_bytes = _checked_size(manifest.manifest_length, location, self._failures)
        yield TableObject(FileKind.MANIFEST, location, size_bytes, names=tuple(files))
        for name, file in files.items():
            size_bytes = _checked_size(file.file_size_in_bytes, name, self._failures)
            if name not in self._yielded:
                self._yielded.add(name)
                kind = FileKind.DATA if file.content == DataFileContent.DATA else FileKind.DELETES
                yield TableObject(kind, name, size_bytes)

    def _manifests_of(self, snapshot: Snapshot) -> list[ManifestFile] | None:
        try:
            return manifests_in(snapshot, self._io)
        except DAMAGE as error:
            self._failures.append(error)
            return None

    def _entries_of(self, manifest: ManifestFile) -> list[ManifestEntry] | None:
        try:
            return entries_in(manifest, self._io)
        except DAMAGE as error:
            self._failures.append(error)
            return None


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), max(1, size)):
        yield items[start : start + max(1, size)]
