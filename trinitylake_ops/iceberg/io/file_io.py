"""A PyIceberg FileIO that reads and writes table files through the lakehouse's Storage.

Requests for metadata, manifests, data and delete files use the same wrappers as the lakehouse's own files, for example
for retries, metering and fault injection. All of PyIceberg's readers and writers use this FileIO:
``scan().to_arrow()``, ``to_arrow_batch_reader()``, ``to_duckdb()``, ``to_polars()``, ``append``, ``overwrite``,
``delete``. ``Table.to_polars()`` and ``polars.scan_iceberg(table)`` do *not* use it: Polars opens the data files by
their URIs, which works only for ``file://`` roots and is not metered. ``polars.scan_iceberg(table,
reader_override="pyiceberg")`` and ``polars.from_arrow(table.scan().to_arrow())`` use it.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.typedef import EMPTY_DICT, Properties

from trinitylake_ops.access.allowed_roots import AllowedRoots, FileAddress, NamedRoots, cut
from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.errors import (
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
    LocationNotAllowedError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION, LakehouseDef, TableDef
from trinitylake_ops.format.file_names import TABLES_PREFIX
from trinitylake_ops.format.locations import as_uri, is_uri, normalize_root_uri, to_location, to_uri
from trinitylake_ops.iceberg.io.folder_owners import (
    ROOT,
    FolderOwners,
    latest_definition_at,
    public_properties,
    storage_options_of,
)
from trinitylake_ops.iceberg.io.input_file import StorageInputFile, as_pyiceberg_expects, reading_table_file
from trinitylake_ops.iceberg.io.output_file import PendingFiles, StorageOutputFile
from trinitylake_ops.iceberg.io.pyiceberg_patches import keep_nested_nulls, write_sealed_parquet
from trinitylake_ops.iceberg.validation.avro import read_bounded_avro
from trinitylake_ops.iceberg.validation.bounds import read_valid_bounds
from trinitylake_ops.storage.cache.storage import CacheStorage
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.local.posix_files import lies_within, link_target
from trinitylake_ops.storage.opening import open_storage, with_environment
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.transaction.lakehouse import Lakehouse

write_sealed_parquet()
keep_nested_nulls()
read_bounded_avro()
read_valid_bounds()

logger = logging.getLogger(__name__)

_FILE = "file://"


@dataclass(frozen=True, slots=True)
class _Table:
    """The table whose files a FileIO may open."""

    #: Name of the table's folder; empty for a table without a folder.
    id: str
    is_managed: bool


class StorageFileIO(FileIO):
    """PyIceberg's FileIO over a Storage.

    Create it with :meth:`on` from an open Storage, or let PyIceberg create it from the properties ``py-io-impl``,
    ``root`` and ``storage.*``. Locations are URIs. Locations under the storage's root use the storage. Other locations
    are accessed only if ``access/allowed_roots.py`` allows it, through a separate storage, which has the same options
    if its scheme is the same. A FileIO can be pickled with its storage. Its ``properties`` contain no credentials.

    The constructor raises InvalidInputError if ``root`` is missing.
    """

    #: Maximum size of metadata that is parsed; None for no limit. Servers set a limit.
    metadata_limit_bytes: int | None = None

    def __init__(self, properties: Properties = EMPTY_DICT):
        super().__init__(properties)
        root = properties.get(ROOT)
        if not root:
            raise InvalidInputError(f"StorageFileIO property {ROOT!r} is missing: set it to the lakehouse's root URI")
        options = storage_options_of(properties)
        self._bind(open_storage(normalize_root_uri(root), options), options, read_only=False)

    @classmethod
    def on(
        cls,
        storage: Storage,
        storage_options: Mapping[str, str] | None = None,
        properties: Properties = EMPTY_DICT,
        *,
        read_only: bool = False,
        others: Sequence[Storage] = (),
        names: NamedRoots | None = None,
    ) -> Self:
        """Return a FileIO on an open storage.

        Args:
            storage: Storage of the lakehouse's root.
            storage_options: Options for storage outside the root.
            properties: PyIceberg's properties.
            read_only: Raise InvalidInputError for writes and deletes.
            others: Storages to use for files under their roots.
            names: Roots in the lakehouse's definitions. By default, the latest definition is read when it is needed.
        """
        file_io = cls.__new__(cls)
        FileIO.__init__(file_io, properties)
        options = StorageOptions(storage_options)
        file_io._bind(storage, options, read_only=read_only, others=tuple(others), names=names)
        return file_io

    def _bind(
        self,
        storage: Storage,
        options: StorageOptions,
        *,
        read_only: bool,
        others: tuple[Storage, ...] = (),
        names: NamedRoots | None = None,
        follows_moves: bool = True,
        table: _Table | None = None,
    ) -> None:
        self.properties = public_properties(self.properties, storage.root, options)
        self.storage = storage
        self.storage_options = options
        self.read_only = read_only
        self._others = others
        self._strict: Self | None = None
        self._pending: PendingFiles | None = None
        self._table = table
        self._external_storages = ExternalStorages(
            storage.root,
            options,
            names,
            others,
            load_definition=self._latest_definition,
            follows_moves=follows_moves,
            own=storage,
        )
        #: Checks the owners of table folders before files are written.
        self.folders = FolderOwners(storage, options, self._external_storages)

    def _latest_definition(self) -> LakehouseDef | None:
        return latest_definition_at(self.storage, self.storage_options)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()  # because an unpickled copy, perhaps in another process, reads the files
        return {
            "properties": self.properties,
            "storage": self.storage,
            "options": with_environment(self.root, self.storage_options),
            "read_only": self.read_only,
            "others": self._others,
            "names": self._external_storages.names,
            "follows_moves": self.allowed_roots.follows_moves,
            "table": self._table,
            "metadata_limit_bytes": self.metadata_limit_bytes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("read_only", "others", "names", "follows_moves", "table")
        self.properties = state["properties"]
        self.metadata_limit_bytes = state["metadata_limit_bytes"]
        self._bind(state["storage"], state["options"], **{name: state[name] for name in names})

    @property
    def table_roots(self) -> tuple[str, ...]:
        """The table root of the lakehouse, with a trailing ``/``, if it has one."""
        return self._external_storages.table_roots()

    def home_of(self, table_id: str) -> str:
        """Return the root under which the folder of a MANAGED table is: the lakehouse's root or its table root.

        Raises StorageError.
        """
        return self._external_storages.home_of(table_id)

    @property
    def has_moved(self) -> bool:
        """Whether a file was read that lakehouse content refers to by a previous location of the lakehouse."""
        return self._external_storages.has_moved

    @property
    def allowed_roots(self) -> AllowedRoots:
        """The roots that may be read, as far as they are known."""
        return self._external_storages.allowed_roots

    def storage_at(self, root: str) -> Storage:
        """Return the storage of the lakehouse's root or table root."""
        return self._external_storages.storage_of(FileAddress(root, ""))

    def strict(self) -> Self:
        """Return a FileIO for tables of other owners, without mapping external locations to files of this lakehouse."""
        if not self.allowed_roots.follows_moves:
            return self
        if self._strict is None:
            self._strict = copy.copy(self)
            self._strict.__setstate__({**self.__getstate__(), "follows_moves": False})
        return self._strict

    def for_table(self, definition: TableDef) -> Self:
        """Return a FileIO that opens only files to which the table of a definition may refer.

        A manifest can name any file, so the location of every file of a table is checked. Only MANAGED tables may have
        moved with their lakehouse. Raises InvalidLocationError for a definition with an invalid metadata location.
        """
        if definition.is_managed:
            return self.for_managed(definition.id)
        metadata = to_uri(self.root, definition.format_properties.get(METADATA_LOCATION) or "none")
        return self.strict()._restricted_to(_Table(self.allowed_roots.folder_id(metadata) or "", is_managed=False))

    def for_managed(self, table_id: str) -> Self:
        """Return a FileIO that opens only files to which the MANAGED table with this id may refer."""
        return self._restricted_to(_Table(table_id, is_managed=True))

    def _restricted_to(self, table: _Table) -> Self:
        if self._table == table:
            return self
        restricted = type(self).__new__(type(self))
        restricted.__dict__.update(self.__dict__)
        restricted._table = table
        restricted._strict = None
        return restricted

    def check_may_have(self, uri: str) -> None:
        """Check that the table of this FileIO may refer to a file, which need not exist.

        Without a table, all files are allowed.

        Raises LocationNotAllowedError, InvalidLocationError, StorageError.
        """
        table = self._table
        if table is None:
            return
        if "/.." not in uri and uri.startswith(f"{self.root}{TABLES_PREFIX}{table.id}/"):
            self._check_links(FileAddress(self.root, uri.removeprefix(self.root)))
            return
        try:
            address = self._external_storages.locate(as_uri(uri))
        except (InvalidLocationError, LocationNotAllowedError):
            if not table.is_managed:
                return  # only other programs may read the file
            raise
        self._check_place(address)
        self._check_links(address)

    def _check_place(self, address: FileAddress) -> None:
        table = self._table
        if table is None or self.allowed_roots.is_file_of(address, table.id, is_managed=table.is_managed):
            return
        display_path = cut(address.root + address.path)
        raise LocationNotAllowedError(
            f"table {table.id!r} may not refer to {display_path!r}: it is neither below the table's location nor below"
            " a root that the operator allowed; leave the file out, or roll back the snapshot that refers to it",
            path=display_path,
        )

    def _check_links(self, address: FileAddress) -> None:
        """Check that no symbolic link below a local root points to a file outside it.

        Otherwise, a client with write access only to its own folder could create a link to a file, or to a folder for
        new files, that only the operator may access. The owner of an allowed root could do the same. Raises
        LocationNotAllowedError.
        """
        if not address.root.startswith(_FILE):
            return
        folder, path, home = address.root, address.path, address.root
        if path.startswith(TABLES_PREFIX):
            folder, path = f"{address.root}{TABLES_PREFIX}", path.removeprefix(TABLES_PREFIX)
            home = f"{_FILE}{os.path.realpath(folder.removeprefix(_FILE))}/{path.partition('/')[0]}/"
        target = link_target(folder.removeprefix(_FILE), path)
        if target is None or self._may_be_linked(f"{_FILE}{target}", home, is_table=folder != address.root):
            return
        display_path = cut(address.root + address.path)
        raise LocationNotAllowedError(
            f"{display_path!r} is not allowed: a symbolic link on its path points outside the root; replace the link by"
            " its target, or allow the root of the target",
            path=display_path,
        )

    def _may_be_linked(self, target: str, home: str, *, is_table: bool) -> bool:
        """Whether a link may point to a target URI without links, which is within its home or below an allowed root."""
        if is_table and target.startswith(home):
            return True
        names = self.allowed_roots.names
        roots = (self.root, *names.table_roots, *names.sources, *names.targets)
        if any(lies_within(target, f"{root}{TABLES_PREFIX}") for root in roots):
            return False  # the folder of another table
        return any(lies_within(target, root) for root in (*(() if is_table else (home,)), *self.allowed_roots.allowed))

    def writes_pending(self, location: str) -> bool:
        """Whether files of a change are written in the background, which requires a high-latency storage."""
        return not self.read_only and location.startswith(self.root) and self.storage.is_high_latency

    def for_change(self) -> Self:
        """Return a FileIO for one change of a table, which writes new files in the background.

        Call ``settle`` before the commit, and ``close_change`` or ``abandon`` afterwards.
        """
        change_io = type(self).__new__(type(self))
        change_io.__dict__.update(self.__dict__)
        change_io._pending = PendingFiles(self.storage)
        return change_io

    def settle(self) -> None:
        """Wait until all files of the change are written. After all writes have ended, raise the first StorageError."""
        if self._pending is not None:
            self._pending.settle()

    def abandon(self, error: TrinityLakeError) -> None:
        """Delete the files of the change, best-effort. A commit that still refers to them raises ``error``."""
        if self._pending is not None:
            self._pending.abandon(error)

    def close_change(self) -> None:
        """End the change. Later files are written synchronously."""
        if self._pending is not None:
            self._pending.close()

    def keep(self, path: str, data: bytes) -> None:
        """Add a metadata file that was created without this FileIO to its cache, if it has one.

        Args:
            path: Path of the file.
            data: Its contents.
        """
        if isinstance(self.storage, CacheStorage):
            self.storage.keep(path, data)

    def _through(self, storage: Storage) -> Storage:
        return self._pending if self._pending is not None and storage is self.storage else storage

    @property
    def root(self) -> str:
        """The root URI of the lakehouse, with a trailing ``/``."""
        return self.storage.root

    def location(self, uri: str) -> str:
        """Convert a URI or an absolute path to a path if the file is under the root, otherwise to a URI.

        A file of a moved lakehouse's table is identified by the location at which it is read: a path in this lakehouse,
        or a URI in a source of this copy. An invalid path, for example with an empty segment, remains a URI. Raises
        InvalidLocationError for other strings, StorageError.
        """
        full_uri = as_uri(uri)
        if not is_uri(full_uri):
            raise InvalidLocationError(f"{uri!r} is neither a URI nor an absolute path", path=uri)
        if not full_uri.startswith(self.root):
            try:
                address = self._external_storages.find(full_uri)
            except (InvalidLocationError, LocationNotAllowedError):  # raised again when the file is read
                return full_uri
            self._external_storages.has_moved |= address.is_moved
            full_uri = address.root + address.path
        try:
            return to_location(self.root, full_uri)
        except InvalidLocationError:
            return full_uri

    def note_former_location(self, location: str) -> bool:
        """Record the URI of a table in its metadata, and return whether it is a previous location of the lakehouse.

        Raises StorageError.
        """
        try:
            is_moved = self._external_storages.locate(f"{location}/metadata/any").is_moved
        except (InvalidLocationError, LocationNotAllowedError):
            return False
        self._external_storages.has_moved |= is_moved
        return is_moved

    def real_uri(self, uri: str) -> str:
        """Return the URI at which a file is read. Raises InvalidLocationError, LocationNotAllowedError."""
        storage, path = self.resolve(uri)
        return storage.root + path

    def size_bytes(self, location: str) -> int | None:
        """Return the size of a file, or None if it does not exist.

        The location is a path under the root or a URI. Raises StorageError.
        """
        try:
            return len(self.new_input(to_uri(self.root, location)))
        except FileMissingError:
            return None

    def read_whole(self, location: str, size_bytes: int = 0) -> bytes:
        """Return the contents of a file.

        Args:
            location: A path under the root or a URI.
            size_bytes: The size recorded in the table's metadata.

        Raises:
            FileMissingError: The file does not exist.
            CorruptFileError: The file is larger than both ``size_bytes`` and the storage's limit for whole files.
            StorageError: The file cannot be read.
        """
        storage, path = self.resolve(to_uri(self.root, location))
        limit_bytes = size_bytes if size_bytes > storage.whole_file_limit_bytes else None
        with reading_table_file():
            return self._through(storage).read(path, limit_bytes=limit_bytes)

    def new_input(self, location: str) -> StorageInputFile:
        """Return a file to read. Raises InvalidLocationError."""
        storage, path = self.resolve(location)
        shown = self._shown(location, storage, path)
        return StorageInputFile(location, self._through(storage), path, shown=shown)

    def _shown(self, location: str, storage: Storage, path: str) -> str:
        """Return the name of a file for errors: its path under the root, or its URI."""
        return path if storage is self.storage else location

    def new_output(self, location: str, add_file: Callable[[str, bytes], None] | None = None) -> StorageOutputFile:
        """Return a file to write.

        Args:
            location: URI of the file.
            add_file: If the file is under the root, receives its path and contents instead of the storage.

        Raises:
            InvalidLocationError: The URI is not valid.
            InvalidInputError: The FileIO is read-only.
            LocationNotAllowedError: The location is not under the root, its table root or an allowed root.
        """
        self._check_writable(location)
        storage, path = self.resolve(location, is_written=True)
        self.folders.check(storage, path)
        if self.has_moved:
            _warn_once(self.root)
        return StorageOutputFile(location, self._through(storage), path, add_file if storage is self.storage else None)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file, if it exists. Raises StorageError, InvalidInputError if the FileIO is read-only."""
        text = location if isinstance(location, str) else location.location
        self._check_writable(text)
        storage, path = self.resolve(text, is_written=True)
        self.folders.check(storage, path)
        with as_pyiceberg_expects(text):
            self._through(storage).delete(path)

    def _check_writable(self, location: str) -> None:
        if self.read_only:
            raise InvalidInputError(
                f"table file {location!r} cannot be changed: this catalog is read-only; open one on the latest version",
                path=location,
            )

    def resolve(self, location: str, *, is_written: bool = False) -> tuple[Storage, str]:
        """Return the storage of a file, and its path in it.

        Args:
            location: URI of the file.
            is_written: Whether the file will be written or deleted.

        Raises:
            InvalidLocationError: The URI is not valid.
            LocationNotAllowedError: The file may not be accessed.
        """
        if not isinstance(location, str):  # the schema in a manifest may declare another type
            raise InvalidLocationError(f"location {cut(repr(location))} is not a string")
        uri = as_uri(location)
        if uri.startswith(self.root):
            path = uri.removeprefix(self.root)
            address = FileAddress(self.root, path)
            self._check_place(address)
            self._check_links(address)
            return self.storage, path
        address = self._external_storages.find(uri)
        self._check_place(address)
        self._check_links(address)
        if is_written and (address.is_moved or not address.is_writable):
            raise LocationNotAllowedError(
                f"{cut(uri)!r} cannot be written: it is not under {self.root}, the only root that this lakehouse"
                " writes to; load the table again to get its location there",
                path=cut(uri),
            )
        self._external_storages.has_moved |= address.is_moved
        return self._external_storages.storage_of(address), address.path


_warned_roots: set[str] = set()


def _warn_once(root: str) -> None:
    """Log a warning, once per process, that the lakehouse being written to was moved."""
    if root not in _warned_roots:
        _warned_roots.add(root)
        logger.warning(
            "the lakehouse at %s was copied or moved: its tables' files contain its previous location; run"
            " 'trinitylake relocate' to rewrite their metadata",
            root,
        )


def reading_io(lake: Lakehouse, others: Sequence[Storage] = ()) -> StorageFileIO:
    """Return a read-only FileIO for files of a lakehouse's tables.

    Args:
        lake: The lakehouse.
        others: Storages to use for files under their roots.
    """
    names = lake.external_storages.names
    return StorageFileIO.on(lake.storage, lake.storage_options, read_only=True, others=others, names=names)


def writing_io(lake: Lakehouse) -> StorageFileIO:
    """Return a FileIO that reads and writes files of a lakehouse's tables."""
    return StorageFileIO.on(lake.storage, lake.storage_options, names=lake.external_storages.names)
