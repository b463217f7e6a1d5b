"""Check the files of managed tables: each file must exist and have its recorded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from trinitylake_ops.errors import LocationNotAllowedError, TrinityLakeError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.format.locations import is_uri, to_uri
from trinitylake_ops.iceberg.io.checked_files import check_parquet_pages
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.input_file import StorageInputFile
from trinitylake_ops.iceberg.metadata import load_metadata, misplaced_error
from trinitylake_ops.iceberg.reach import FileKind, TableFile, files_of
from trinitylake_ops.iceberg.validation.avro import decompress, is_avro
from trinitylake_ops.iceberg.validation.checksums import PieceCheck
from trinitylake_ops.iceberg.validation.files import MAGIC as PUFFIN_MAGIC
from trinitylake_ops.iceberg.validation.files import check_puffin
from trinitylake_ops.iceberg.whole_files import TableFiles, WholeFileIO
from trinitylake_ops.operations.verification.report import FAULTY_BOUNDS, REPEATED_FILE, Findings
from trinitylake_ops.operations.verification.storage import PIECE_BYTES, KnownFilesStorage
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel

_PARQUET = ".parquet"
#: The kinds of files that only a deep run reads.
CONTENT_KINDS = (FileKind.DATA, FileKind.DELETES, FileKind.POSITION_DELETES, FileKind.STATISTICS)


class TableVerifier:
    """Check the tables of one version after another. Each file is checked once, even if many tables share it."""

    def __init__(
        self,
        storage: KnownFilesStorage,
        storage_options: StorageOptions,
        listing: Mapping[str, FileInfo],
        findings: Findings,
        *,
        is_deep: bool,
    ):
        """Prepare to check tables.

        Args:
            storage: Reads the files.
            storage_options: The options of the storage.
            listing: The listed files by path.
            findings: Receives the findings.
            is_deep: Whether to read data files.
        """
        self._storage = storage
        #: The existing files, by path under the root and by URI under the table root.
        self.listing = dict(listing)
        self._report = findings.error
        self._findings = findings
        self._is_deep = is_deep
        #: Why files of EXTERNAL tables must not be read, by table name.
        self.not_allowed: dict[str, str] = {}
        self._external: set[str] = set()
        #: Unreadable metadata of external tables: a message, the location, and the oldest version with this metadata.
        self.unreadable_external: list[tuple[str, str, int]] = []
        #: Whether table files that refer to other files have checksums, for files that were read.
        self.has_seals: dict[str, bool] = {}
        self._io = WholeFileIO.reading(storage, storage_options, self.has_seals.__setitem__)
        #: Data files that a snapshot lists more than once.
        self._repeated: set[str] = set()
        #: Whether a file and the files that it refers to are intact.
        self._is_intact: dict[str, bool] = {}
        #: The id of the only table that may have a metadata file, by its location.
        self._owner_ids: dict[str, str] = {}
        self._reader = ContentReader(storage, storage_options)
        #: The ids of managed tables.
        self.managed_ids: set[str] = set()
        #: The results for data files that were read ahead.
        self.prefetched: Mapping[str, ReadContent] = {}

    @property
    def files(self) -> int:
        """The number of files of managed tables seen."""
        return len(self._is_intact)

    @property
    def has_moved(self) -> bool:
        """Whether a table refers to a file at a former location of the lakehouse."""
        return self._io.has_moved

    def check(self, name: ObjectName, definition: TableDef, version: int) -> bool:
        """Check the files of a table at one version. Return whether all files are intact.

        Args:
            name: The name of the table.
            definition: The definition of the table.
            version: The version.
        """
        metadata = definition.format_properties.get(METADATA_LOCATION)
        if not definition.is_iceberg or metadata is None:
            return True
        if not definition.is_managed:
            self._check_external(name, metadata, version)
            return True
        self.managed_ids.add(definition.id)
        try:
            files = TableFiles(definition, self._io)
            owner_id = self._owner_ids.setdefault(files.metadata_location, definition.id)
            if owner_id != definition.id:
                raise misplaced_error(definition, files.metadata_location, f"it is that of table {owner_id!r}")
            if files.metadata_location not in self._is_intact:
                self._check(name, files, version)
            return self._is_intact[files.metadata_location]
        except TrinityLakeError as error:
            message = f"not all files of table {name} can be found: {error.message}"
            path = (error.path or metadata).removeprefix(self._storage.root)
            self._storage.note_error(path, error)
            self._report("table-unreadable", message, path, version)
            return False

    def _check_external(self, name: ObjectName, metadata: str, version: int) -> None:
        """Check the metadata file of an external table, but none of its other files."""
        uri = to_uri(self._storage.root, metadata)
        if uri in self._external:
            return
        self._external.add(uri)
        try:
            load_metadata(self._io.strict(), uri)
        except LocationNotAllowedError as error:
            self.not_allowed[str(name)] = error.message
        except TrinityLakeError as error:
            message = f"the metadata of external table {name} cannot be read: {error.message}"
            self.unreadable_external.append((message, metadata, version))

    def _check(self, name: ObjectName, files: TableFiles, version: int) -> None:
        """Check a table whose metadata file is new, starting with its data files."""
        named = self._in_metadata(files)
        lists = [file.location for file in named if file.kind == FileKind.MANIFEST_LIST]
        new_lists = [location for location in lists if location not in self._is_intact]
        manifests = self._in_lists(files, new_lists)
        new = [file for location in new_lists for file in manifests[location] if file.location not in self._is_intact]
        contents = self._in_manifests(files, [file.location for file in new], new_lists)
        self._check_files(name, [file for content in contents.values() for file in content], version)
        self._check_files(name, new, version)
        for path, content in contents.items():
            self._is_intact[path] &= all(self._is_intact[file.location] for file in content)
        unchecked = [file for file in named if file.location not in self._is_intact]
        self._check_files(name, [*unchecked, TableFile(FileKind.METADATA, files.metadata_location)], version)
        for path in new_lists:
            self._is_intact[path] &= all(self._is_intact[file.location] for file in manifests[path])
        self._is_intact[files.metadata_location] &= all(self._is_intact[file.location] for file in named)
        self._check_properties(name, files, version)
        self._check_repeated(name, [manifests[path] for path in new_lists], version)
        for location in sorted(files.faulty_bounds):
            message = f"a manifest of table {name} has bounds of the wrong type, which makes other engines fail"
            self._findings.warn(FAULTY_BOUNDS, message, location, version, "compact-tables")

    def _check_repeated(self, name: ObjectName, lists: Iterable[Sequence[TableFile]], version: int) -> None:
        """Report data files that a snapshot lists more than once. ``lists`` are the manifests of each snapshot.

        Consecutive snapshots share most manifests, so each step only counts the files of added and removed manifests.
        """
        live: Counter[str] = Counter()
        before: Counter[str] = Counter()
        for manifests in lists:
            current = Counter(file.location for file in manifests)
            for path, count in (before - current).items():
                live.subtract({location: count * n for location, n in self._data_files(path).items()})
            for path, count in (current - before).items():
                live.update({location: count * n for location, n in self._data_files(path).items()})
            for path in current - before:
                for location in self._data_files(path):
                    if live[location] > 1 and location not in self._repeated:
                        self._repeated.add(location)
                        message = (
                            f"a snapshot of table {name} lists a data file {live[location]} times, so its rows are"
                            " counted repeatedly"
                        )
                        self._findings.warn(REPEATED_FILE, message, location, version, None)
            before = current

    def _data_files(self, manifest: str) -> Counter[str]:
        """Return how often a manifest whose file names have already been read lists each data file."""
        names = self._storage.names(manifest) or ()
        return Counter(file.location for file in names if file.kind == FileKind.DATA)

    def _check_properties(self, name: ObjectName, files: TableFiles, version: int) -> None:
        """Report metadata with properties that refer to code or connections. Recorded files have no such properties."""
        location = files.metadata_location
        if properties := files.connecting:
            names = ", ".join(repr(property_name[:100]) for property_name in properties[:3])
            message = (
                f"metadata of table {name} has properties that clients could use as connection settings, {names};"
                " readers of this library ignore them"
            )
            self._report("table-names-connection", message, location, version)
            self._is_intact[location] = False
        if properties := files.naming_code:
            names = ", ".join(repr(property_name[:100]) for property_name in properties[:3])
            message = f"metadata of table {name} names code that engines would run, in {names}; it is ignored"
            self._report("table-names-code", message, location, version)
            self._is_intact[location] = False

    def _in_metadata(self, files: TableFiles) -> Sequence[TableFile]:
        location = files.metadata_location
        named = self._storage.names(location)
        if named is None:
            named = self._storage.add_names(location, files.in_metadata())
        else:
            files.check_own(named)
        self._count("metadata file", [location])
        return named

    def _in_lists(self, files: TableFiles, locations: Sequence[str]) -> dict[str, Sequence[TableFile]]:
        names = {location: self._storage.names(location) for location in locations}
        missing = [location for location, named in names.items() if named is None]
        files.check_own(file for named in names.values() for file in named or ())
        for location, named in zip(missing, files.in_lists(missing), strict=True):
            names[location] = self._storage.add_names(location, named)
        self._count("manifest list", names)
        return {location: named or () for location, named in names.items()}

    def _count(self, kind: str, locations: Iterable[str]) -> None:
        """Count the files of a kind that a deep run read, with and without checksums."""
        if self._is_deep:
            for path in locations:
                if (has_seals := self.has_seals.get(path)) is not None:
                    self._storage.tally.count(kind, path, has_seals)

    def _in_manifests(
        self, files: TableFiles, locations: Sequence[str], lists: Sequence[str]
    ) -> dict[str, Sequence[TableFile]]:
        names = {location: self._storage.names(location) for location in dict.fromkeys(locations)}
        missing = [location for location, named in names.items() if named is None]
        files.check_own(file for named in names.values() for file in named or ())
        if missing:
            files.know_manifests(lists)
            for location, named in zip(missing, files.in_manifests(missing), strict=True):
                names[location] = self._storage.add_names(location, named)
        self._count("manifest", names)
        return {location: named or () for location, named in names.items()}

    def _check_files(self, name: ObjectName, files: Sequence[TableFile], version: int) -> None:
        new = {file.location: file for file in files if file.location not in self._is_intact}
        unlisted = [location for location in new if location not in self.listing]
        sizes = dict(zip(unlisted, run_parallel(self._io.size_bytes, unlisted, self._storage.concurrency), strict=True))
        sizes.update((location, self.listing[location].size_bytes) for location in new if location in self.listing)
        for location, file in new.items():
            self._is_intact[location] = self._has_size(name, file, sizes[location], version)
        if self._is_deep:
            deep = [file for file in new.values() if file.kind in CONTENT_KINDS and self._is_intact[file.location]]
            for file in deep:
                if (prefetched := self.prefetched.get(file.location)) is not None:
                    self._storage.take_content(file.location, prefetched.sha256, prefetched.error)
            unread = [file for file in deep if file.location not in self.prefetched]
            contents = run_parallel(self._reader.read, unread, self._storage.concurrency)
            read = dict(zip(unread, contents, strict=True))
            for file in deep:
                content = self.prefetched.get(file.location) or read[file]
                if content.has_checksum is not None:
                    kind = "statistics file" if file.kind == FileKind.STATISTICS else "data file"
                    self._storage.tally.count(kind, file.location, content.has_checksum)
                if content.message is not None:
                    self._is_intact[file.location] = False
                    message = f"{file.kind} file of table {name} cannot be read: {content.message}"
                    self._report("table-file-corrupt", message, file.location, version)

    def _has_size(self, name: ObjectName, file: TableFile, size_bytes: int | None, version: int) -> bool:
        if size_bytes is None:
            self._report("table-file-missing", f"{file.kind} file of table {name} is missing", file.location, version)
        elif file.size_bytes is not None and file.size_bytes != size_bytes:
            message = (
                f"{file.kind} file of table {name} has {size_bytes} bytes, but {file.size_bytes} according to the table"
            )
            self._report("table-file-size", message, file.location, version)
        else:
            return True
        return False

    def walk(
        self,
        definition: TableDef,
        io: StorageFileIO,
        known: set[str],
        *,
        skips_missing: bool,
        failures: list[TrinityLakeError],
    ) -> Iterator[TableFile]:
        """Yield the files of a table, like :func:`reach.files_of`, without reading checked files again.

        Args:
            definition: The definition of the table.
            io: Reads the table files.
            known: The locations of manifest lists and manifests to skip; new locations are added.
            skips_missing: See :func:`reach.files_of`.
            failures: See :func:`reach.files_of`.
        """
        metadata = definition.format_properties[METADATA_LOCATION]
        location = io.location(to_uri(io.root, metadata))
        if not self._is_intact.get(location, False):
            yield from files_of(definition, io, known, skips_missing=skips_missing, failures=failures)
            return
        yield TableFile(FileKind.METADATA, location)
        below = list(self._storage.names(location) or ())
        while below:
            yield from below
            new_paths = [file.location for file in below if file.kind in (FileKind.MANIFEST_LIST, FileKind.MANIFEST)]
            new_paths = [path for path in dict.fromkeys(new_paths) if path not in known]
            known.update(new_paths)
            below = [file for path in new_paths for file in self._storage.names(path) or ()]


@dataclass(frozen=True, slots=True)
class ReadContent:
    """The result of reading a data file."""

    #: The fault of the file, if any.
    message: str | None
    #: Its SHA-256; None if the file could not be read in full or is outside the root.
    sha256: bytes | None
    #: The error, if the file could not be read.
    error: TrinityLakeError | None
    #: Whether the file has a checksum; None if unknown.
    has_checksum: bool | None = None


class ContentReader:
    """Read data files in full, and check their checksums or, if they have none, their footers and page checksums."""

    def __init__(self, storage: KnownFilesStorage, storage_options: StorageOptions):
        self._storage = storage
        self._storage_options = storage_options

    def read(self, file: TableFile) -> ReadContent:
        """Read a data file."""
        message, error, has_checksum = None, None, None
        try:
            has_checksum = self._check(file)
        except TrinityLakeError as raised:
            self._storage.note_error(file.location, raised)
            message, error = raised.message, raised
        except (pa.ArrowException, OSError, ValueError) as raised:
            message = f"it is not a Parquet file: {str(raised).splitlines()[0]}"
        return ReadContent(message, self._storage.checksums.get(file.location), error, has_checksum)

    def _check(self, file: TableFile) -> bool:
        """Read a file in pieces. Return whether it has a checksum. Raises CorruptFileError or StorageError."""
        io = StorageFileIO.on(self._storage, self._storage_options, read_only=True)
        source = io.new_input(to_uri(io.root, file.location))
        check = PieceCheck(file.location)
        if is_uri(file.location):
            data = _read_pieces(source, check)
        else:
            data = self._storage.read_data(file.location, check.add)
        has_checksum = check.finish(lambda n_bytes: source.read_range(len(source) - n_bytes, n_bytes))
        if has_checksum or file.kind == FileKind.STATISTICS:
            return has_checksum
        if not file.location.endswith(_PARQUET):
            _check_deletes(file, data)
            return False
        if data is not None:
            check_parquet_pages(len(data), lambda at, length: data[at : at + length], file.location)
        else:
            check_parquet_pages(len(source), source.read_range, file.location)
        return False


def _check_deletes(file: TableFile, data: bytes | None) -> None:
    """Raise CorruptFileError for deletion vectors or Avro deletes that cannot be decoded.

    ``data`` is None for a file that is too large for memory, whose content is not decoded.
    """
    if data is None or file.kind not in (FileKind.POSITION_DELETES, FileKind.DELETES):
        return
    if data.startswith(PUFFIN_MAGIC):
        check_puffin(data, file.location)
    elif is_avro(file.location, data):
        decompress(data, file.location)


def _read_pieces(source: StorageInputFile, check: PieceCheck) -> bytes | None:
    """Read a file outside the root. Return its bytes, or None for a large file. Raises StorageError."""
    piece = b""
    for offset in range(0, len(source), PIECE_BYTES):
        piece = source.read_range(offset, min(PIECE_BYTES, len(source) - offset))
        check.add(piece)
    return piece if len(piece) == len(source) else None
