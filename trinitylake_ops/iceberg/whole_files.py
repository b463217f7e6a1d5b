"""Reads the names in single files of an Iceberg table, each file whole and in one request.

So a wrapper in between sees all bytes of a file at once, and can tell whether the file changed.
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
    """A FileIO whose files are read whole, and checked by their seals.

    ``on_checked`` gets the location of each file, and whether it has seals.
    """

    on_checked: Callable[[str, bool], None] | None = None

    @classmethod
    def reading(
        cls, storage: Storage, storage_options: StorageOptions, on_checked: Callable[[str, bool], None]
    ) -> WholeFileIO:
        """Return a FileIO that writes nothing."""
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
        """Return the file in memory, an Avro file without compression. Raises StorageError, CorruptFileError."""
        return self._opened(self.read_whole())

    def read_whole(self, limit_bytes: int | None = None) -> bytes:
        """Return the bytes of the file as it is stored, in one request.

        Args:
            limit_bytes: Not used, because maintenance reads metadata of any size that the storage returns.

        Raises:
            CorruptFileError: If the file does not match its checksum.
            StorageError: If it cannot be read.
        """
        data = self._storage.read(self._path)
        location = self._io.location(self.location)
        has_seals = check_table_file(data, location)
        if self._io.on_checked is not None:
            self._io.on_checked(location, has_seals)
        return data


class TableFiles:
    """The files of an Iceberg table at one version. The names in each file are read when a caller asks for them.

    Locations are paths if they lie under the lakehouse's root, else URIs. All methods raise CorruptFileError,
    LocationNotAllowedError for a file that the table cannot have, and other StorageErrors.
    """

    def __init__(self, definition: TableDef, io: StorageFileIO):
        self._io = io.for_table(definition)
        self._definition = definition
        self._uri = metadata_uri(definition, io.root)
        self._manifests: dict[str, ManifestFile] = {}
        self._read_lists: set[str] = set()
        #: The manifests that were read and have bounds that are no values of their columns.
        self.faulty_bounds: set[str] = set()

    @property
    def metadata_location(self) -> str:
        """The location of the current metadata file."""
        return self._io.location(self._uri)

    @property
    def naming_code(self) -> tuple[str, ...]:
        """The names of properties that name code in the metadata file, none if it was not read."""
        return self._loaded.naming_code if "_loaded" in self.__dict__ else ()

    @property
    def connecting(self) -> tuple[str, ...]:
        """The names of properties in the metadata file that clients could take for connection settings.

        None if the file was not read.
        """
        return self._loaded.connecting if "_loaded" in self.__dict__ else ()

    @cached_attribute
    def _loaded(self) -> LoadedMetadata:
        return load_table_metadata(self._definition, self._io)

    @property
    def _metadata(self) -> TableMetadata:
        return self._loaded.metadata

    def in_metadata(self) -> list[TableFile]:
        """Return the statistics files and manifest lists that the metadata names."""
        lists = [TableFile(FileKind.MANIFEST_LIST, location) for location in self._snapshots]
        return [*statistics_of(self._metadata, self._io), *lists]

    @cached_attribute
    def _snapshots(self) -> dict[str, Snapshot]:
        if any(isinstance(snapshot, InlineSnapshot) for snapshot in self._metadata.snapshots):
            raise CorruptFileError(
                f"{self.metadata_location!r} has snapshots without manifest lists, which no writer of managed tables"
                " leaves; restore it",
                path=self.metadata_location,
            )
        listed = [snapshot for snapshot in self._metadata.snapshots if snapshot.manifest_list]
        for snapshot in listed:
            self._io.check_may_have(snapshot.manifest_list)
        return {self._io.location(snapshot.manifest_list): snapshot for snapshot in listed}

    def check_own(self, files: Iterable[TableFile]) -> None:
        """Check that the table may have files, which an earlier run recorded as named by a file of it."""
        for file in files:
            self._io.check_may_have(to_uri(self._io.root, file.location))

    def in_lists(self, locations: Sequence[str]) -> list[list[TableFile]]:
        """Return the manifests that manifest lists name, list by list, read in parallel."""
        if locations:
            _ = self._snapshots  # read once, before the threads ask for it
        return run_parallel(self._in_list, locations, self._io.storage.concurrency)

    def _in_list(self, location: str) -> list[TableFile]:
        found = manifests_in(self._snapshots[location], self._io)
        named = [(self._io.location(manifest.manifest_path), manifest) for manifest in found]
        self._manifests.update(named)
        self._read_lists.add(location)
        return [TableFile(FileKind.MANIFEST, path, manifest.manifest_length) for path, manifest in named]

    def know_manifests(self, lists: Sequence[str]) -> None:
        """Read manifest lists again whose manifests will be read, if that was not done yet."""
        self.in_lists([location for location in lists if location not in self._read_lists])

    def in_manifests(self, locations: Sequence[str]) -> list[list[TableFile]]:
        """Return the data and delete files that manifests name, without deleted ones. Their lists were read before.

        A data file is returned as often as its manifest lists it. One file may hold the deletes of several data files.
        """
        return run_parallel(self._in_manifest, locations, self._io.storage.concurrency)

    def _in_manifest(self, location: str) -> list[TableFile]:
        entries = entries_in(self._manifests[location], self._io)
        if has_faulty_bounds(entries):
            self.faulty_bounds.add(location)
        live = [entry for entry in entries if entry.status != ManifestEntryStatus.DELETED]
        files = [content_file(entry, self._io, live=True) for entry in live]
        others = dict.fromkeys(file for file in files if file.kind != FileKind.DATA)
        return [*(file for file in files if file.kind == FileKind.DATA), *others]
