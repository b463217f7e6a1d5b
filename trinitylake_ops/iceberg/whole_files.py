"""List the files to which an Iceberg table's metadata files refer. Each file is read completely in one request.

A storage wrapper therefore sees complete files, and can detect whether a file has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pyiceberg.io import InputStream
from pyiceberg.manifest import ManifestEntryStatus, ManifestFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.input_file import StorageInputFile
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.metadata import InlineSnapshot, LoadedMetadata, load_table_metadata
from trinitylake_ops.iceberg.reach import FileKind, TableFile, content_file, entries_in, manifests_in, statistics_of
from trinitylake_ops.iceberg.validation.bounds import has_faulty_bounds
from trinitylake_ops.iceberg.validation.checksums import check_table_file
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel


class WholeFileIO(StorageFileIO):
    """A FileIO that reads files completely and verifies them against their checksums."""

    #: Called with the location of each file, and whether it has checksums.
    on_checked: Callable[[str, bool], None] | None = None

    @classmethod
    def reading(
        cls, storage: Storage, storage_options: StorageOptions, on_checked: Callable[[str, bool], None]
    ) -> WholeFileIO:
        """Return a read-only FileIO.

        Args:
            storage: Storage of the lakehouse's root.
            storage_options: Options for storage outside the root.
            on_checked: Called with the location of each file, and whether it has checksums.
        """
        whole = cls.on(storage, storage_options, read_only=True)
        assert isinstance(whole, WholeFileIO)
        whole.on_checked = on_checked
        return whole

    def new_input(self, location: str) -> StorageInputFile:
        """Return a file to read. Raises InvalidLocationError."""
        storage, path = self.resolve(location)
        return _WholeFile(location, storage, path, self)


class _WholeFile(StorageInputFile):
    def __init__(self, location: str, storage: Storage, path: str, file_io: WholeFileIO):
        super().__init__(location, storage, path)
        self._io = file_io

    def open(self, seekable: bool = True) -> InputStream:
        """Open the file in memory, decompressed if it is Avro. Raises StorageError, CorruptFileError."""
        return self._opened(self.read_whole())

    def read_whole(self, limit_bytes: int | None = None) -> bytes:
        """Return the stored contents of the file, in one request.

        Args:
            limit_bytes: Ignored, because maintenance reads metadata of any size that the storage returns.

        Raises:
            CorruptFileError: The file does not match its checksum.
            StorageError: The file cannot be read.
        """
        data = self._storage.read(self._path)
        location = self._io.location(self.location)
        has_seals = check_table_file(data, location)
        if self._io.on_checked is not None:
            self._io.on_checked(location, has_seals)
        return data


class TableFiles:
    """The files of an Iceberg table at one version, read on demand.

    Locations are paths for files under the lakehouse's root, otherwise URIs. Methods raise CorruptFileError,
    LocationNotAllowedError for a file that the table may not refer to, and other StorageErrors.
    """

    def __init__(self, definition: TableDef, io: StorageFileIO):
        self._io = io.for_table(definition)
        self._definition = definition
        self._uri = metadata_uri(definition, io.root)
        self._manifests: dict[str, ManifestFile] = {}
        self._read_lists: set[str] = set()
        #: Manifests that have been read and contain bounds that are not valid values of their columns.
        self.faulty_bounds: set[str] = set()

    @property
    def metadata_location(self) -> str:
        """The location of the current metadata file."""
        return self._io.location(self._uri)

    @property
    def naming_code(self) -> tuple[str, ...]:
        """Names of dropped metadata properties that name classes. Empty if the metadata file was not read."""
        return self._loaded.naming_code if "_loaded" in self.__dict__ else ()

    @property
    def connecting(self) -> tuple[str, ...]:
        """Names of dropped metadata properties that clients could interpret as connection settings.

        Empty if the metadata file was not read.
        """
        return self._loaded.connecting if "_loaded" in self.__dict__ else ()

    @cached_attribute
    def _loaded(self) -> LoadedMetadata:
        return load_table_metadata(self._definition, self._io)

    @property
    def _metadata(self) -> TableMetadata:
        return self._loaded.metadata

    def in_metadata(self) -> list[TableFile]:
        """Return the statistics files and manifest lists in the metadata."""
        lists = [TableFile(FileKind.MANIFEST_LIST, location) for location in self._snapshots]
        return [*statistics_of(self._metadata, self._io), *lists]

    @cached_attribute
    def _snapshots(self) -> dict[str, Snapshot]:
        if any(isinstance(snapshot, InlineSnapshot) for snapshot in self._metadata.snapshots):
            raise CorruptFileError(
                f"{self.metadata_location!r} has snapshots without manifest lists, which managed tables never have;"
                " restore it",
                path=self.metadata_location,
            )
        listed = [snapshot for snapshot in self._metadata.snapshots if snapshot.manifest_list]
        for snapshot in listed:
            self._io.check_may_have(snapshot.manifest_list)
        return {self._io.location(snapshot.manifest_list): snapshot for snapshot in listed}

    def check_own(self, files: Iterable[TableFile]) -> None:
        """Check that the table may refer to the files that an earlier run recorded."""
        for file in files:
            self._io.check_may_have(to_uri(self._io.root, file.location))

    def in_lists(self, locations: Sequence[str]) -> list[list[TableFile]]:
        """Return the manifests in each of several manifest lists, read in parallel."""
        if locations:
            _ = self._snapshots  # compute this once, before threads access it
        return run_parallel(self._in_list, locations, self._io.storage.concurrency)

    def _in_list(self, location: str) -> list[TableFile]:
        manifests = manifests_in(self._snapshots[location], self._io)
        named = [(self._io.location(manifest.manifest_path), manifest) for manifest in manifests]
        self._manifests.update(named)
        self._read_lists.add(location)
        return [TableFile(FileKind.MANIFEST, path, manifest.manifest_length) for path, manifest in named]

    def know_manifests(self, lists: Sequence[str]) -> None:
        """Read manifest lists whose manifests will be read, unless they were read before."""
        self.in_lists([location for location in lists if location not in self._read_lists])

    def in_manifests(self, locations: Sequence[str]) -> list[list[TableFile]]:
        """Return the live data and delete files in each of several manifests, whose lists must have been read before.

        A data file is returned as often as it is listed in its manifest. One delete file may contain deletes for
        several data files.
        """
        return run_parallel(self._in_manifest, locations, self._io.storage.concurrency)

    def _in_manifest(self, location: str) -> list[TableFile]:
        entries = entries_in(self._manifests[location], self._io)
        if has_faulty_bounds(entries):
            self.faulty_bounds.add(location)
        live = [entry for entry in entries if entry.status != ManifestEntryStatus.DELETED]
        files = [content_file(entry, self._io, live=True) for entry in live]
        other_files = dict.fromkeys(file for file in files if file.kind != FileKind.DATA)
        return [*(file for file in files if file.kind == FileKind.DATA), *other_files]
