"""Files of tables, read and written by pyiceberg through the lakehouse's Storage.

Every request for a metadata, manifest, data or delete file passes the same wrappers as the lakehouse's own files:
retries, meters, fault injection. All of pyiceberg's readers and writers use this FileIO: ``scan().to_arrow()``,
``to_arrow_batch_reader()``, ``to_duckdb()``, ``to_polars()``, ``append``, ``overwrite``, ``delete``.
``Table.to_polars()`` and ``polars.scan_iceberg(table)`` do *not* pass. Polars' own reader opens the data files by their
URIs. This works for ``file://`` roots only and is not metered. ``polars.scan_iceberg(table,
reader_override="pyiceberg")`` and ``polars.from_arrow(table.scan().to_arrow())`` pass.
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
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.registry import open_storage, with_environment
from trinitylake_ops.transaction.lakehouse import Lakehouse

write_sealed_parquet()
keep_nested_nulls()
read_bounded_avro()
read_valid_bounds()

logger = logging.getLogger(__name__)

_FILE = "file://"


@dataclass(frozen=True, slots=True)
class _Table:
    """The table whose files a FileIO opens. ``id`` names its folder, empty for a table without one."""

    id: str
    is_managed: bool


class StorageFileIO(FileIO):
    """pyiceberg's FileIO on a Storage.

    A caller makes it by :meth:`on` from an open Storage, or pyiceberg makes it from properties (``py-io-impl``;
    ``root`` and ``storage.*`` say where). Locations are URIs. Locations under the storage's root go through it. Any
    other goes where ``access/allowed_roots.py`` allows it, through a separate storage. That has the same options when
    the scheme is the same, else none. The object pickles with its storage. Its ``properties`` hold no credentials.
    ``read_only`` refuses writes and deletes with InvalidInputError. Raises InvalidInputError when ``root`` is missing.
    """

    #: The largest metadata of a table that is parsed, None for all that is read. A server has a limit.
    metadata_limit_bytes: int | None = None

    def __init__(self, properties: Properties = EMPTY_DICT):
        super().__init__(properties)
        root = properties.get(ROOT)
        if not root:
            raise InvalidInputError(f"StorageFileIO needs the property {ROOT!r}: the lakehouse's root URI")
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
        """Return a FileIO on an open storage. ``storage_options`` are for files beyond its root.

        Files under the root of one of the ``others`` go through that storage. ``names`` are the roots that the
        lakehouse's definitions name. Without them its latest definition is read when a file needs it.
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
        #: Finds the owners of the folders of tables that files are written to.
        self.folders = FolderOwners(storage, options, self._external_storages)

    def _latest_definition(self) -> LakehouseDef | None:
        return latest_definition_at(self.storage, self.storage_options)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()  # a copy reads them, perhaps in another process
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
        """The table root of the lakehouse, with its final ``/``, if it has one."""
        return self._external_storages.table_roots()

    def home_of(self, table_id: str) -> str:
        """Return the root under which the folder of a MANAGED table is: the own one or the table root.

        Raises StorageError.
        """
        return self._external_storages.home_of(table_id)

    @property
    def has_moved(self) -> bool:
        """Whether any file was read that content names at a former place of the lakehouse."""
        return self._external_storages.has_moved

    @property
    def allowed_roots(self) -> AllowedRoots:
        """The places that may be read beyond the root, as far as it is known."""
        return self._external_storages.allowed_roots

    def storage_at(self, root: str) -> Storage:
        """Return the storage of the own root or of the table root."""
        return self._external_storages.storage_of(FileAddress(root, ""))

    def strict(self) -> Self:
        """Return a FileIO for tables of others.

        It takes no file of a table elsewhere for the one of the same path here.
        """
        if not self.allowed_roots.follows_moves:
            return self
        if self._strict is None:
            self._strict = copy.copy(self)
            self._strict.__setstate__({**self.__getstate__(), "follows_moves": False})
        return self._strict

    def for_table(self, definition: TableDef) -> Self:
        """Return a FileIO that opens only files which the table of a definition may have.

        A manifest can name any file, so every file that is opened for a table is checked by its place. Only our own
        tables are taken to have moved with their lakehouse. Raises InvalidLocationError for a definition whose metadata
        is at no location.
        """
        if definition.is_managed:
            return self.for_managed(definition.id)
        metadata = to_uri(self.root, definition.format_properties.get(METADATA_LOCATION) or "none")
        return self.strict()._confined(_Table(self.allowed_roots.folder_id(metadata) or "", is_managed=False))

    def for_managed(self, table_id: str) -> Self:
        """Return a FileIO that opens only files which the MANAGED table with an id may have."""
        return self._confined(_Table(table_id, is_managed=True))

    def _confined(self, table: _Table) -> Self:
        if self._table == table:
            return self
        confined = type(self).__new__(type(self))
        confined.__dict__.update(self.__dict__)
        confined._table = table
        confined._strict = None
        return confined

    def check_may_have(self, uri: str) -> None:
        """Check that the table of this FileIO may have a file, which need not exist. No other FileIO checks anything.

        Raises LocationNotAllowedError, InvalidLocationError, StorageError.
        """
        table = self._table
        if table is None:
            return
        if "/.." not in uri and uri.startswith(f"{self.root}{TABLES_PREFIX}{table.id}/"):
            self._check_links(FileAddress(self.root, uri.removeprefix(self.root)))
            return
        try:
            place = self._external_storages.locate(as_uri(uri))
        except (InvalidLocationError, LocationNotAllowedError):
            if not table.is_managed:
                return  # it may be read by other programs only
            raise
        self._check_place(place)
        self._check_links(place)

    def _check_place(self, place: FileAddress) -> None:
        table = self._table
        if table is None or self.allowed_roots.is_file_of(place, table.id, is_managed=table.is_managed):
            return
        shown = cut(place.root + place.path)
        raise LocationNotAllowedError(
            f"a file of table {table.id!r} is rejected: {shown!r} does not lie in the table's place, and is not below a"
            " root that the operator allowed; leave it out, or roll back the snapshot that names it",
            path=shown,
        )

    def _check_links(self, place: FileAddress) -> None:
        """Check that no symbolic link below a root leads from a place on this machine to a file elsewhere.

        A client with rights on its own folder could otherwise link to a file, or to a folder for new files, that only
        the operator may use. The owner of an allowed root could do so as well. Raises LocationNotAllowedError.
        """
        if not place.root.startswith(_FILE):
            return
        folder, path, home = place.root, place.path, place.root
        if path.startswith(TABLES_PREFIX):
            folder, path = f"{place.root}{TABLES_PREFIX}", path.removeprefix(TABLES_PREFIX)
            home = f"{_FILE}{os.path.realpath(folder.removeprefix(_FILE))}/{path.partition('/')[0]}/"
        target = link_target(folder.removeprefix(_FILE), path)
        if target is None or self._may_be_linked(f"{_FILE}{target}", home, is_table=folder != place.root):
            return
        shown = cut(place.root + place.path)
        raise LocationNotAllowedError(
            f"a file of a table is rejected: {shown!r} lies behind a symbolic link that leads elsewhere; replace the"
            " link by what it leads to, or allow the root of its target",
            path=shown,
        )

    def _may_be_linked(self, target: str, home: str, *, is_table: bool) -> bool:
        """Whether a link may lead to a file, a URI without links: within its home, or below an allowed root."""
        if is_table and target.startswith(home):
            return True
        names = self.allowed_roots.names
        roots = (self.root, *names.table_roots, *names.sources, *names.targets)
        if any(lies_within(target, f"{root}{TABLES_PREFIX}") for root in roots):
            return False  # the folder of another table
        return any(lies_within(target, root) for root in (*(() if is_table else (home,)), *self.allowed_roots.allowed))

    def writes_pending(self, location: str) -> bool:
        """Whether files of a change of a table go to the lakehouse's own storage, and threads gain time there."""
        return not self.read_only and location.startswith(self.root) and self.storage.is_high_latency

    def for_change(self) -> Self:
        """Return a FileIO for one change of a table, whose new files are on their way while the change goes on.

        Its owner calls ``settle`` before the change is committed, and ``close_change`` or ``abandon`` after.
        """
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._pending = PendingFiles(self.storage)
        return made

    def settle(self) -> None:
        """Wait until all files of the change stand. Raises StorageError when none is on its way any more."""
        if self._pending is not None:
            self._pending.settle()

    def abandon(self, error: TrinityLakeError) -> None:
        """Delete the files of the change, best effort. A commit that still names them raises ``error``."""
        if self._pending is not None:
            self._pending.abandon(error)

    def close_change(self) -> None:
        """Write files at once from now on, as the change has ended."""
        if self._pending is not None:
            self._pending.close()

    def keep(self, path: str, data: bytes) -> None:
        """Keep a metadata file that was created past this FileIO, if this one keeps any."""
        if isinstance(self.storage, CacheStorage):
            self.storage.keep(path, data)

    def _through(self, storage: Storage) -> Storage:
        return self._pending if self._pending is not None and storage is self.storage else storage

    @property
    def root(self) -> str:
        """The root URI of the lakehouse, with its final ``/``."""
        return self.storage.root

    def location(self, uri: str) -> str:
        """Return a URI, or an absolute path, as a path when it lies under the root, else as a URI.

        A file of a moved lakehouse's table is identified by the place where it is read. That is its path here, or its
        URI in a source of this copy. A name that is none of ours, for example with an empty segment, stays a URI also
        under the root. Raises InvalidLocationError for another text, StorageError.
        """
        full = as_uri(uri)
        if not is_uri(full):
            raise InvalidLocationError(f"{uri!r} is neither a URI nor an absolute path", path=uri)
        if not full.startswith(self.root):
            try:
                place = self._external_storages.find(full)
            except (InvalidLocationError, LocationNotAllowedError):  # the reader gets the error
                return full
            self._external_storages.has_moved |= place.is_moved
            full = place.root + place.path
        try:
            return to_location(self.root, full)
        except InvalidLocationError:
            return full

    def note_former_location(self, location: str) -> bool:
        """Note where a table was, as a URI, when metadata of ours was written. Returns whether that is a former place.

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
        """Return the size of a file, given as a path under the root or a URI.

        None when it is missing. Raises StorageError.
        """
        try:
            return len(self.new_input(to_uri(self.root, location)))
        except FileMissingError:
            return None

    def read_whole(self, location: str, size_bytes: int = 0) -> bytes:
        """Return the bytes of a file, given as a path under the root or a URI. ``size_bytes`` is its size by its table.

        Raises FileMissingError, StorageError, CorruptFileError for a file larger than that and than any file read
        whole.
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
        """Return the name of a file in errors: its path under the root, else its URI."""
        return path if storage is self.storage else location

    def new_output(self, location: str, add_file: Callable[[str, bytes], None] | None = None) -> StorageOutputFile:
        """Return a file to write. ``add_file`` takes its path and bytes instead, if it is under the root.

        Raises InvalidLocationError, InvalidInputError when read-only. Raises LocationNotAllowedError for a place that
        is neither under the root nor under its table root, nor allowed by the operator.
        """
        self._check_writable(location)
        storage, path = self.resolve(location, is_written=True)
        self.folders.check(storage, path)
        if self.has_moved:
            _log_once(self.root)
        return StorageOutputFile(location, self._through(storage), path, add_file if storage is self.storage else None)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file. A missing file is no error. Raises StorageError, InvalidInputError when read-only."""
        text = location if isinstance(location, str) else location.location
        self._check_writable(text)
        storage, path = self.resolve(text, is_written=True)
        self.folders.check(storage, path)
        with as_pyiceberg_expects(text):
            self._through(storage).delete(path)

    def _check_writable(self, location: str) -> None:
        if self.read_only:
            raise InvalidInputError(
                f"table file {location!r} cannot be changed: this catalog only reads; open one on the latest version",
                path=location,
            )

    def resolve(self, location: str, *, is_written: bool = False) -> tuple[Storage, str]:
        """Return the storage of a file, and its path there. Raises InvalidLocationError, LocationNotAllowedError."""
        if not isinstance(location, str):  # the writer of a manifest says which types its fields have
            raise InvalidLocationError(f"{cut(repr(location))} is no text, and so no location")
        uri = as_uri(location)
        if uri.startswith(self.root):
            path = uri.removeprefix(self.root)
            place = FileAddress(self.root, path)
            self._check_place(place)
            self._check_links(place)
            return self.storage, path
        place = self._external_storages.find(uri)
        self._check_place(place)
        self._check_links(place)
        if is_written and (place.is_moved or not place.is_writable):
            raise LocationNotAllowedError(
                f"{cut(uri)!r} is not under {self.root}, and a lakehouse writes and deletes below its"
                " own root only; load the table again, which gives it its place there",
                path=cut(uri),
            )
        self._external_storages.has_moved |= place.is_moved
        return self._external_storages.storage_of(place), place.path


_said: set[str] = set()


def _log_once(root: str) -> None:
    """Log, once in a process, that a lakehouse that is written to was moved."""
    if root not in _said:
        _said.add(root)
        logger.warning(
            "the lakehouse at %s was copied or moved: its tables' files name its former place, and are"
            " read here; 'trinitylake relocate' writes their metadata for this place",
            root,
        )


def reading_io(lake: Lakehouse, others: Sequence[Storage] = ()) -> StorageFileIO:
    """Return a FileIO that reads files of a lakehouse's tables and writes none.

    ``others`` are as in :meth:`StorageFileIO.on`.
    """
    names = lake.external_storages.names
    return StorageFileIO.on(lake.storage, lake.storage_options, read_only=True, others=others, names=names)


def writing_io(lake: Lakehouse) -> StorageFileIO:
    """Return a FileIO that reads and writes files of a lakehouse's tables."""
    return StorageFileIO.on(lake.storage, lake.storage_options, names=lake.external_storages.names)
