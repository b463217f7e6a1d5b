"""Checks the files of managed tables: each named file exists, with its size."""

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
from trinitylake_ops.iceberg.metadata import load_metadata, misplaced
from trinitylake_ops.iceberg.reach import FileKind, TableFile, files_of
from trinitylake_ops.iceberg.validation.avro import is_avro, uncompressed
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
#: The files that only a deep run reads.
CONTENT_KINDS = (FileKind.DATA, FileKind.DELETES, FileKind.POSITION_DELETES, FileKind.STATISTICS)


class TableVerifier:
    """Checks the tables of one version after the other. Each file is checked once, however many tables share it.

    ``listing`` maps each path under the root to its file. With ``is_deep`` data files are read, too. ``files`` counts
    the files seen, ``bytes_hashed`` the bytes that were read of data.
    """

    def __init__(
        self,
        storage: KnownFilesStorage,
        storage_options: StorageOptions,
        listing: Mapping[str, FileInfo],
        findings: Findings,
        *,
        is_deep: bool,
    ):
        self._storage = storage
        #: The files that stand: by paths under the root, by URIs under the table root.
        self.listing = dict(listing)
        self._report = findings.error
        self._findings = findings
        self._is_deep = is_deep
        #: By the names of EXTERNAL tables: why their files may not be read.
        self.not_allowed: dict[str, str] = {}
        self._external: set[str] = set()
        #: Unreadable metadata of tables of others: a message, the location, the oldest version with it.
        self.unreadable_external: list[tuple[str, str, int]] = []
        #: Whether files that name others have seals, where they were read.
        self.has_seals: dict[str, bool] = {}
        self._io = WholeFileIO.reading(storage, storage_options, self.has_seals.__setitem__)
        #: Data files that a snapshot lists more than once.
        self._repeated: set[str] = set()
        #: Whether a file and the files that it names are all right.
        self._is_whole: dict[str, bool] = {}
        #: The table whose metadata file each is: no other one has it.
        self._owner_ids: dict[str, str] = {}
        self._reader = ContentReader(storage, storage_options)
        #: The ids of managed tables.
        self.managed_ids: set[str] = set()
        #: The results for data files elsewhere.
        self.ahead: Mapping[str, ReadContent] = {}

    @property
    def files(self) -> int:
        """Files of managed tables seen."""
        return len(self._is_whole)

    @property
    def has_moved(self) -> bool:
        """Whether a file was met that a table names at a former place of the lakehouse."""
        return self._io.has_moved

    def check(self, name: ObjectName, definition: TableDef, version: int) -> bool:
        """Check the files of a table, at one version. Returns whether all are whole."""
        metadata = definition.format_properties.get(METADATA_LOCATION)
        if not definition.is_iceberg or metadata is None:
            return True
        if not definition.is_managed:
            self._note_external(name, metadata, version)
            return True
        self.managed_ids.add(definition.id)
        try:
            files = TableFiles(definition, self._io)
            owner_id = self._owner_ids.setdefault(files.metadata_location, definition.id)
            if owner_id != definition.id:
                raise misplaced(definition, files.metadata_location, f"it is that of table {owner_id!r}")
            if files.metadata_location not in self._is_whole:
                self._check(name, files, version)
            return self._is_whole[files.metadata_location]
        except TrinityLakeError as error:
            message = f"the files of table {name} cannot be followed: {error.message}"
            path = (error.path or metadata).removeprefix(self._storage.root)
            self._storage.note_error(path, error)
            self._report("table-unreadable", message, path, version)
            return False

    def _note_external(self, name: ObjectName, metadata: str, version: int) -> None:
        """Check the metadata of a table of others, and no other file of it. Note if it may not be read."""
        uri = to_uri(self._storage.root, metadata)
        if uri in self._external:
            return
        self._external.add(uri)
        try:
            load_metadata(self._io.strict(), uri)
        except LocationNotAllowedError as error:
            self.not_allowed[str(name)] = error.message
        except TrinityLakeError as error:
            message = f"the metadata of table {name}, of others, cannot be read: {error.message}"
            self.unreadable_external.append((message, metadata, version))

    def _check(self, name: ObjectName, files: TableFiles, version: int) -> None:
        """Check a table whose metadata was not met before, from its data files up."""
        named = self._in_metadata(files)
        lists = [file.location for file in named if file.kind == FileKind.MANIFEST_LIST]
        fresh_lists = [location for location in lists if location not in self._is_whole]
        manifests = self._in_lists(files, fresh_lists)
        fresh = [
            file for location in fresh_lists for file in manifests[location] if file.location not in self._is_whole
        ]
        contents = self._in_manifests(files, [file.location for file in fresh], fresh_lists)
        self._check_files(name, [file for found in contents.values() for file in found], version)
        self._check_files(name, fresh, version)
        for path, found in contents.items():
            self._is_whole[path] &= all(self._is_whole[file.location] for file in found)
        others = [file for file in named if file.location not in self._is_whole]
        self._check_files(name, [*others, TableFile(FileKind.METADATA, files.metadata_location)], version)
        for path in fresh_lists:
            self._is_whole[path] &= all(self._is_whole[file.location] for file in manifests[path])
        self._is_whole[files.metadata_location] &= all(self._is_whole[file.location] for file in named)
        self._check_properties(name, files, version)
        self._check_repeated(name, [manifests[path] for path in fresh_lists], version)
        for location in sorted(files.faulty_bounds):
            message = f"a manifest of table {name} has bounds that are no values of their columns; other engines fail"
            self._findings.warn(FAULTY_BOUNDS, message, location, version, "compact-tables")

    def _check_repeated(self, name: ObjectName, lists: Iterable[Sequence[TableFile]], version: int) -> None:
        """Report data files that a snapshot lists more than once. ``lists`` are the manifests of each snapshot.

        Consecutive snapshots share most manifests, so each step counts the files of the other manifests only.
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
                            f"a snapshot of table {name} lists a data file {live[location]} times, and each of its rows"
                            " counts as often"
                        )
                        self._findings.warn(REPEATED_FILE, message, location, version, None)
            before = current

    def _data_files(self, manifest: str) -> Counter[str]:
        """Return how often a manifest lists each data file. Its names were read before."""
        names = self._storage.names(manifest) or ()
        return Counter(file.location for file in names if file.kind == FileKind.DATA)

    def _check_properties(self, name: ObjectName, files: TableFiles, version: int) -> None:
        """Report metadata that names code or connections for others to use. A recorded file had none."""
        location = files.metadata_location
        if found := files.connecting:
            names = ", ".join(repr(property_name[:100]) for property_name in found[:3])
            message = (
                f"metadata of table {name} has properties that clients could take for connection settings, {names};"
                " they are left out here"
            )
            self._report("table-names-connection", message, location, version)
            self._is_whole[location] = False
        if found := files.naming_code:
            names = ", ".join(repr(property_name[:100]) for property_name in found[:3])
            message = f"metadata of table {name} names code for engines to run, in {names}; it is passed over here"
            self._report("table-names-code", message, location, version)
            self._is_whole[location] = False

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
        found = {location: self._storage.names(location) for location in locations}
        missing = [location for location, named in found.items() if named is None]
        files.check_own(file for named in found.values() for file in named or ())
        for location, named in zip(missing, files.in_lists(missing), strict=True):
            found[location] = self._storage.add_names(location, named)
        self._count("manifest list", found)
        return {location: named or () for location, named in found.items()}

    def _count(self, kind: str, locations: Iterable[str]) -> None:
        """Count the files of a kind that were read, by whether they have checksums. A deep run reads all."""
        if self._is_deep:
            for path in locations:
                if (has_seals := self.has_seals.get(path)) is not None:
                    self._storage.tally.count(kind, path, has_seals)

    def _in_manifests(
        self, files: TableFiles, locations: Sequence[str], lists: Sequence[str]
    ) -> dict[str, Sequence[TableFile]]:
        found = {location: self._storage.names(location) for location in dict.fromkeys(locations)}
        missing = [location for location, named in found.items() if named is None]
        files.check_own(file for named in found.values() for file in named or ())
        if missing:
            files.know_manifests(lists)
            for location, named in zip(missing, files.in_manifests(missing), strict=True):
                found[location] = self._storage.add_names(location, named)
        self._count("manifest", found)
        return {location: named or () for location, named in found.items()}

    def _check_files(self, name: ObjectName, files: Sequence[TableFile], version: int) -> None:
        fresh = {file.location: file for file in files if file.location not in self._is_whole}
        beyond = [location for location in fresh if location not in self.listing]
        sizes = dict(zip(beyond, run_parallel(self._io.size_bytes, beyond, self._storage.concurrency), strict=True))
        sizes.update((location, self.listing[location].size_bytes) for location in fresh if location in self.listing)
        for location, file in fresh.items():
            self._is_whole[location] = self._has_size(name, file, sizes[location], version)
        if self._is_deep:
            deep = [file for file in fresh.values() if file.kind in CONTENT_KINDS and self._is_whole[file.location]]
            for file in deep:
                if (ahead := self.ahead.get(file.location)) is not None:
                    self._storage.take_content(file.location, ahead.sha256, ahead.error)
            unread = [file for file in deep if file.location not in self.ahead]
            read = dict(zip(unread, run_parallel(self._reader.read, unread, self._storage.concurrency), strict=True))
            for file in deep:
                content = self.ahead.get(file.location) or read[file]
                message = content.message
                if content.has_checksum is not None:
                    kind = "statistics file" if file.kind == FileKind.STATISTICS else "data file"
                    self._storage.tally.count(kind, file.location, content.has_checksum)
                if message is not None:
                    self._is_whole[file.location] = False
                    what = f"{file.kind} file of table {name} cannot be read: {message}"
                    self._report("table-file-corrupt", what, file.location, version)

    def _has_size(self, name: ObjectName, file: TableFile, found_bytes: int | None, version: int) -> bool:
        if found_bytes is None:
            self._report("table-file-missing", f"{file.kind} file of table {name} is missing", file.location, version)
        elif file.size_bytes is not None and file.size_bytes != found_bytes:
            message = f"{file.kind} file of table {name} has {found_bytes} bytes, its table says {file.size_bytes}"
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
        """Yield the files of a table as :func:`reach.files_of` does, without reading again what was checked."""
        metadata = definition.format_properties[METADATA_LOCATION]
        location = io.location(to_uri(io.root, metadata))
        if not self._is_whole.get(location, False):
            yield from files_of(definition, io, known, skips_missing=skips_missing, failures=failures)
            return
        yield TableFile(FileKind.METADATA, location)
        below = list(self._storage.names(location) or ())
        while below:
            yield from below
            fresh = [file.location for file in below if file.kind in (FileKind.MANIFEST_LIST, FileKind.MANIFEST)]
            fresh = [path for path in dict.fromkeys(fresh) if path not in known]
            known.update(fresh)
            below = [file for path in fresh for file in self._storage.names(path) or ()]


@dataclass(frozen=True, slots=True)
class ReadContent:
    """The result of reading a data file: its fault, if any, its checksum, and why it was not returned.

    ``sha256`` is None for a file that could not be read whole, or lies beyond the root. ``has_checksum`` says whether
    the file holds one itself, None if that is not known.
    """

    message: str | None
    sha256: bytes | None
    error: TrinityLakeError | None
    has_checksum: bool | None = None


class ContentReader:
    """Reads data files whole, and checks them by their content: seals, else footers and checksums of pages."""

    def __init__(self, storage: KnownFilesStorage, storage_options: StorageOptions):
        self._storage = storage
        self._storage_options = storage_options

    def read(self, file: TableFile) -> ReadContent:
        """Read a file of data."""
        message, error, has_checksum = None, None, None
        try:
            has_checksum = self._check(file)
        except TrinityLakeError as raised:
            self._storage.note_error(file.location, raised)
            message, error = raised.message, raised
        except (pa.ArrowException, OSError, ValueError) as raised:
            message = f"it is no Parquet file: {str(raised).splitlines()[0]}"
        return ReadContent(message, self._storage.checksums.get(file.location), error, has_checksum)

    def _check(self, file: TableFile) -> bool:
        """Read a file, piece by piece. Returns whether it holds its checksum. Raises CorruptFileError, StorageError."""
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
    """Raise CorruptFileError for deletion vectors or deletes in Avro that cannot be read.

    ``data`` is None for a file too large to be held, which is only read.
    """
    if data is None or file.kind not in (FileKind.POSITION_DELETES, FileKind.DELETES):
        return
    if data.startswith(PUFFIN_MAGIC):
        check_puffin(data, file.location)
    elif is_avro(file.location, data):
        uncompressed(data, file.location)


def _read_pieces(source: StorageInputFile, check: PieceCheck) -> bytes | None:
    """Read a file beyond the root. Returns its bytes, None for a large one. Raises StorageError."""
    piece = b""
    for offset in range(0, len(source), PIECE_BYTES):
        piece = source.read_range(offset, min(PIECE_BYTES, len(source) - offset))
        check.add(piece)
    return piece if len(piece) == len(source) else None
