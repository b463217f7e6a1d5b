"""Files of tables, read and written by pyiceberg through the lakehouse's Storage.

Every request for a metadata, manifest, data or delete file passes the same wrappers (retries,
meters, fault injection) as the lakehouse's own files. All of pyiceberg's readers and writers use
this FileIO: ``scan().to_arrow()``, ``to_arrow_batch_reader()``, ``to_duckdb()``, ``to_polars()``,
``append``, ``overwrite``, ``delete``. What does *not* pass is ``Table.to_polars()`` and
``polars.scan_iceberg(table)``: Polars' own reader opens the data files by their URIs, which works
for ``file://`` roots only and is not metered. ``polars.scan_iceberg(table,
reader_override="pyiceberg")`` and ``polars.from_arrow(table.scan().to_arrow())`` pass.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import google_crc32c
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.typedef import EMPTY_DICT, Properties

from trinitylake_ops.errors import (
    CorruptFileError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
    LakehouseNotFoundError,
    LocationNotAllowedError,
    StorageError,
    StoragePermissionError,
)
from trinitylake_ops.format.definitions import LakehouseDef, TableDef
from trinitylake_ops.format.file_names import TABLES_PREFIX, table_prefix
from trinitylake_ops.format.locations import as_uri, is_uri, normalize_root_uri, to_location, to_uri
from trinitylake_ops.format.places import NamedRoots, Places, cut
from trinitylake_ops.storage.conditional_create import create_fresh_file
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.open import open_storage
from trinitylake_ops.storage.options import ALLOWED_ROOTS, SECRET_OPTIONS, StorageOptions
from trinitylake_ops.tables.claims.avro_decoder import read_bounded_avro
from trinitylake_ops.tables.claims.avro_files import check_no_avro, is_avro, uncompressed
from trinitylake_ops.tables.claims.file_claims import (
    PARQUET_END_BYTES,
    check_claims,
    claims_bytes,
    footer_bytes,
    named_format,
)
from trinitylake_ops.tables.claims.inflate import MAX_INFLATED_BYTES, too_large
from trinitylake_ops.tables.claims.puffin_claims import MAGIC as PUFFIN_MAGIC
from trinitylake_ops.tables.claims.puffin_claims import check_puffin
from trinitylake_ops.tables.claims.table_seals import SealedKind, check_table_file, sealed_footer, sealed_table_file
from trinitylake_ops.tables.files.parquet_model import SealedOutputFile, write_sealed_parquet
from trinitylake_ops.tables.ownership import OWNER_NAME, claim_folder
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.nodes.elsewhere import Elsewhere

write_sealed_parquet()
read_bounded_avro()

ROOT = "root"
STORAGE_OPTION_PREFIX = "storage."

#: A file up to this size is read in one request; of a larger one this much of its start is.
WHOLE_FILE_BYTES = 1 << 20
#: The least that a ranged read fetches, so that small forward reads share one request.
READ_AHEAD_BYTES = 256 << 10
#: What a file being written may hold in memory before it moves to a temporary file.
SPOOL_BYTES = 8 << 20

logger = logging.getLogger(__name__)
_TABLE_FILE = re.compile(rf"{TABLES_PREFIX}([^/]+)/.+", re.DOTALL)


class TableFileMissingError(FileMissingError, FileNotFoundError):
    """A FileMissingError that pyiceberg recognises."""


class TableFileExistsError(FileExistsAlreadyError, FileExistsError):
    """A FileExistsAlreadyError that pyiceberg recognises."""


class TableFilePermissionError(StoragePermissionError, PermissionError):
    """A StoragePermissionError that pyiceberg recognises."""


@contextmanager
def _as_pyiceberg_expects(location: str) -> Iterator[None]:
    """Raise the storage's errors also as the built-in ones that pyiceberg's FileIO contract names."""
    try:
        yield
    except FileMissingError as error:
        raise TableFileMissingError(f"table file {location!r} is missing", path=location) from error
    except FileExistsAlreadyError as error:
        raise TableFileExistsError(f"table file {location!r} exists already", path=location) from error
    except StoragePermissionError as error:
        # The message says why, and names the path below its storage's root.
        message = error.message.replace(repr(error.path), repr(location)) if error.path else error.message
        raise TableFilePermissionError(message, path=location) from error


def storage_options_of(properties: Mapping[str, str]) -> StorageOptions:
    """Return the storage options among the properties of a catalog or FileIO: those named ``storage.*``."""
    return StorageOptions(
        {
            name.removeprefix(STORAGE_OPTION_PREFIX): value
            for name, value in properties.items()
            if name.startswith(STORAGE_OPTION_PREFIX)
        }
    )


def public_properties(properties: Mapping[str, str], root: str, options: StorageOptions) -> dict[str, str]:
    """Return the properties of a catalog or FileIO that is open: with its root and options, without credentials.

    Anybody may print properties; what opens further storages keeps its StorageOptions beside them.
    """
    kept = {name: value for name, value in properties.items() if not name.startswith(STORAGE_OPTION_PREFIX)}
    shown = {f"{STORAGE_OPTION_PREFIX}{name}": options[name] for name in options if name not in SECRET_OPTIONS}
    return {**kept, **shown, ROOT: root}


class StorageFileIO(FileIO):
    """pyiceberg's FileIO on a Storage.

    Made by pyiceberg from properties (``py-io-impl``; ``root`` and ``storage.*`` say where) or by
    :meth:`on` from an open Storage. Locations are URIs; those under the storage's root go through
    it, any other one where ``format/places.py`` allows it, through a storage of its own, with the same
    options when the scheme is the same, else with none. Pickles with its storage. Its
    ``properties`` hold no credentials. ``read_only`` refuses writes and deletes with
    InvalidInputError. Raises InvalidInputError when ``root`` is missing.
    """

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
        """Return a FileIO on an open storage; ``storage_options`` are for files beyond its root.

        Those under the root of one of the ``others`` go through that one. ``names`` are the roots that the
        lakehouse's definitions name; without them its latest definition is read when a file needs it.
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
    ) -> None:
        self.properties = public_properties(self.properties, storage.root, options)
        self.storage = storage
        self.storage_options = options
        self.read_only = read_only
        self._others = others
        self._strict: Self | None = None
        #: Whether any file was met that content names at the place where the lakehouse stood before.
        self.has_moved = False
        self._elsewhere = Elsewhere(
            storage.root,
            options,
            names,
            others,
            look_up=self._latest_definition,
            follows_moves=follows_moves,
            own=storage,
        )

    def _latest_definition(self) -> LakehouseDef | None:
        try:
            return Lakehouse(self.storage, self.storage_options, cache="off").snapshot().definition
        except LakehouseNotFoundError:  # a folder of files, as in a program that only copies them
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "properties": self.properties,
            "storage": self.storage,
            "options": self.storage_options,
            "read_only": self.read_only,
            "others": self._others,
            "names": self._elsewhere.names,
            "follows_moves": self.places.follows_moves,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("read_only", "others", "names", "follows_moves")
        self.properties = state["properties"]
        self._bind(state["storage"], state["options"], **{name: state[name] for name in names})

    @property
    def table_roots(self) -> tuple[str, ...]:
        """The table roots of the lakehouse, with their final ``/``."""
        return self._elsewhere.table_roots()

    @property
    def places(self) -> Places:
        """What may be read beyond the root, as far as it is known."""
        return self._elsewhere.places

    def strict(self) -> Self:
        """Return what takes no file of a table elsewhere for the one of the same path here: for tables of others."""
        if not self.places.follows_moves:
            return self
        if self._strict is None:
            self._strict = copy.copy(self)
            self._strict.__setstate__({**self.__getstate__(), "follows_moves": False})
        return self._strict

    @property
    def root(self) -> str:
        """The root URI of the lakehouse, with its final ``/``."""
        return self.storage.root

    def location(self, uri: str) -> str:
        """Return a URI, or an absolute path, as a path when it lies under the root, else as a URI.

        The file of a table of a lakehouse that was moved is told by the place where it is read: by its path here, or
        by its URI in a source of this copy. What no name of ours is, with an empty segment for one, stays a URI also
        under the root. Raises InvalidLocationError for what is
        neither, StorageError.
        """
        full = as_uri(uri)
        if not is_uri(full):
            raise InvalidLocationError(f"{uri!r} is neither a URI nor an absolute path", path=uri)
        if not full.startswith(self.root):
            try:
                place = self._elsewhere.find(full)
            except (InvalidLocationError, LocationNotAllowedError):  # who reads it is told
                return full
            self.has_moved |= place.is_moved
            full = place.root + place.path
        try:
            return to_location(self.root, full)
        except InvalidLocationError:
            return full

    def note_place_of(self, location: str) -> bool:
        """Note where a table was when metadata of ours was written, a URI; whether it is a place that was left.

        Raises StorageError.
        """
        try:
            is_moved = self._elsewhere.place_named(f"{location}/metadata/any").is_moved
        except (InvalidLocationError, LocationNotAllowedError):
            return False
        self.has_moved |= is_moved
        return is_moved

    def real_uri(self, uri: str) -> str:
        """Return the URI at which a file is read. Raises InvalidLocationError, LocationNotAllowedError."""
        storage, path = self._resolve(uri)
        return storage.root + path

    def size_bytes(self, location: str) -> int | None:
        """Return the size of a file, a path under the root or a URI; None when it is missing. Raises StorageError."""
        try:
            return len(self.new_input(to_uri(self.root, location)))
        except FileMissingError:
            return None

    def read_whole(self, location: str, size_bytes: int = 0) -> bytes:
        """Return the bytes of a file, a path under the root or a URI; ``size_bytes`` is what its table says it has.

        Raises FileMissingError, StorageError, CorruptFileError for one larger than that and than any read whole.
        """
        storage, path = self._resolve(to_uri(self.root, location))
        return storage.read(path, limit_bytes=size_bytes if size_bytes > storage.whole_file_limit_bytes else None)

    def new_input(self, location: str) -> StorageInputFile:
        """Return a file to read. Raises InvalidLocationError."""
        storage, path = self._resolve(location)
        return StorageInputFile(location, storage, path, shown=self._shown(location, storage, path))

    def _shown(self, location: str, storage: Storage, path: str) -> str:
        """Return how errors name a file: by its path under the root, else by its URI."""
        return path if storage is self.storage else location

    def new_output(self, location: str) -> StorageOutputFile:
        """Return a file to write.

        Raises InvalidLocationError, InvalidInputError when read-only, LocationNotAllowedError for a place that is
        neither under the root nor under its table root, nor allowed by the operator.
        """
        self._check_writable(location)
        storage, path = self._resolve(location, is_written=True)
        self._check_owner(storage, path)
        if self.has_moved:
            _say_once(self.root)
        return StorageOutputFile(location, storage, path)

    def claim_folder_of(self, path: str) -> None:
        """Write the owner file of a table's folder, once, in a copy: the file to write may be the first one there.

        In other lakehouses whoever makes a table does. Raises FileExistsAlreadyError, StorageError.
        """
        if self._elsewhere.names.is_copy:
            self._claim(self.storage, path)

    def _check_owner(self, storage: Storage, path: str) -> None:
        """Make sure that the folder of a file to write or delete is of this lakehouse, where content names its root."""
        if storage is self.storage:
            self.claim_folder_of(path)
        elif storage.root in self._elsewhere.names.table_roots and storage.root not in self.places.allowed:
            self._claim(storage, path)

    def _claim(self, storage: Storage, path: str) -> None:
        names = self._elsewhere.names
        match = _TABLE_FILE.fullmatch(path)
        if match is None or match[1] in names.claimed:
            return
        try:
            claim_folder(storage, match[1], names.lakehouse_id)
        except FileExistsAlreadyError as error:
            folder = f"{storage.root}{table_prefix(match[1])}"
            raise LocationNotAllowedError(
                f"{cut(folder)!r} belongs to another lakehouse, whose {OWNER_NAME} stands there: nothing is written"
                f" or deleted there; if it is yours, allow it by --allow-root or the option {ALLOWED_ROOTS!r}",
                path=cut(folder),
            ) from error
        names.note_claimed(match[1])

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file; a missing one is no error. Raises StorageError, InvalidInputError when read-only."""
        text = location if isinstance(location, str) else location.location
        self._check_writable(text)
        storage, path = self._resolve(text, is_written=True)
        self._check_owner(storage, path)
        with _as_pyiceberg_expects(text):
            storage.delete(path)

    def _check_writable(self, location: str) -> None:
        if self.read_only:
            raise InvalidInputError(
                f"table file {location!r} cannot be changed: this catalog only reads; open one on the latest version",
                path=location,
            )

    def _resolve(self, location: str, *, is_written: bool = False) -> tuple[Storage, str]:
        if not isinstance(location, str):  # whoever writes a manifest says of what type its fields are
            raise InvalidLocationError(f"{cut(repr(location))} is no text, and so no location")
        uri = as_uri(location)
        if uri.startswith(self.root):
            return self.storage, uri.removeprefix(self.root)
        place = self._elsewhere.find(uri)
        if is_written and (place.is_moved or not place.is_writable):
            raise LocationNotAllowedError(
                f"{cut(uri)!r} is not under {self.root}, and a lakehouse writes and deletes below its"
                " own root only; load the table again, which gives it its place there",
                path=cut(uri),
            )
        self.has_moved |= place.is_moved
        return self.storage if place.is_moved else self._elsewhere.storage_of(place), place.path


_said: set[str] = set()


def _say_once(root: str) -> None:
    """Say, once in a process, that a lakehouse which is written to was moved."""
    if root not in _said:
        _said.add(root)
        logger.warning(
            "the lakehouse at %s was copied or moved: its tables' files name the place where it stood before, and are"
            " read here; 'trinitylake relocate' writes their metadata for this place",
            root,
        )


def reading_io(lake: Lakehouse, others: Sequence[Storage] = ()) -> StorageFileIO:
    """Return what reads files of a lakehouse's tables, and writes none; ``others`` as in :meth:`StorageFileIO.on`."""
    names = lake.elsewhere.names
    return StorageFileIO.on(lake.storage, lake.storage_options, read_only=True, others=others, names=names)


def writing_io(lake: Lakehouse) -> StorageFileIO:
    """Return what reads and writes files of a lakehouse's tables."""
    return StorageFileIO.on(lake.storage, lake.storage_options, names=lake.elsewhere.names)


def io_for(definition: TableDef, io: StorageFileIO) -> StorageFileIO:
    """Return what reads the files of a table: only those of our own are taken to have moved with their lakehouse."""
    return io if definition.is_managed else io.strict()


class StorageInputFile(InputFile):
    """A table file to read."""

    def __init__(
        self, location: str, storage: Storage, path: str, size_bytes: int | None = None, shown: str | None = None
    ):
        super().__init__(location)
        self._storage = storage
        self._path = path
        self._size_bytes = size_bytes
        #: How errors name it.
        self.shown = location if shown is None else shown

    def __len__(self) -> int:
        """Size in bytes; one request unless it is known. Raises FileNotFoundError."""
        if self._size_bytes is None:
            with _as_pyiceberg_expects(self.location):
                self._size_bytes = self._storage.stat(self._path).size_bytes
        return self._size_bytes

    def exists(self) -> bool:
        """Whether the file is there. Raises PermissionError, StorageError."""
        with _as_pyiceberg_expects(self.location):
            return self._storage.exists(self._path)

    def open(self, seekable: bool = True) -> InputStream:
        """Return a seekable stream; the first request is sent at once.

        A file up to WHOLE_FILE_BYTES takes that one request; a larger one a second for its size, then one for its
        end, where its name is that of Parquet or ORC, and one for each range. An Avro file is read whole and comes
        without compression, so that no decoder inflates it without bounds. Raises FileNotFoundError, PermissionError,
        StorageError, CorruptFileError for an Avro, Parquet or ORC file that holds or claims too much, for one named
        ``.parquet`` or ``.orc`` that does not end as such, and for metadata that is read whole and is not the file of
        its checksum. Of a file with another name, larger than WHOLE_FILE_BYTES, its stream raises it at the end.
        """
        head = self._read_head()
        if named_format(self.location) is None and is_avro(self.location, head):
            return self._opened(self._with_rest(head))
        return RangeReader(self, head)

    def read_whole(self) -> bytes:
        """Return the bytes of the file as it is stored, in as many requests as ``open`` and one range at most.

        Raises FileNotFoundError, PermissionError, StorageError, CorruptFileError for more than MAX_INFLATED_BYTES.
        """
        return self._with_rest(self._read_head())

    def _read_head(self) -> bytes:
        with _as_pyiceberg_expects(self.location):
            head = self._storage.read(self._path, offset=0, length=WHOLE_FILE_BYTES)
        if len(head) < WHOLE_FILE_BYTES:
            self._size_bytes = len(head)
            self._check_seals(head)
        return head

    def _check_seals(self, data: bytes) -> None:
        """Raise CorruptFileError for metadata that is not the file of its checksum; of data, scans read parts."""
        if SealedKind.of(self.location) is not SealedKind.PARQUET:
            check_table_file(data, self.shown)

    def _with_rest(self, head: bytes) -> bytes:
        if len(head) < WHOLE_FILE_BYTES:
            return head
        if len(self) > MAX_INFLATED_BYTES:
            raise too_large(self.shown, len(self))
        data = head + self.read_range(len(head), len(self) - len(head)) if len(self) > len(head) else head
        self._check_seals(data)
        return data

    def _opened(self, data: bytes) -> InputStream:
        """Return the stream of a file that was read whole."""
        if not is_avro(self.location, data):
            return io.BytesIO(data)
        return io.BytesIO(uncompressed(data, self.shown).data)

    def read_range(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on, in one request. Raises FileNotFoundError, StorageError."""
        with _as_pyiceberg_expects(self.location):
            data = self._storage.read(self._path, offset=offset, length=length)
        if len(data) != length:
            raise StorageError(
                f"table file {self.location!r} gave {len(data)} bytes at {offset} instead of {length}",
                path=self.location,
            )
        return data


class RangeReader(io.RawIOBase):
    """A seekable stream over ranged reads: keeps the file's start, its end and the last small range.

    Parquet readers begin with the footer, so the first read near the end fetches all of the last
    READ_AHEAD_BYTES, or all of the footer. What it claims is checked then, and what a Puffin file does when it is read
    whole: CorruptFileError. A large read is one request of exactly its size and is not kept.
    """

    def __init__(self, file: StorageInputFile, head: bytes):
        super().__init__()
        self._file = file
        self._size_bytes = len(file)
        self._position = 0
        self._head = (0, head)
        self._tail = (self._size_bytes, b"")
        self._window = (0, b"")
        if self._size_bytes <= len(head):
            self._check_end(head)
        elif named_format(file.location) is not None:  # at once: what a stream raises, Arrow's ORC reader wraps
            self._read_tail()

    def _read_tail(self) -> None:
        tail_start = max(0, self._size_bytes - READ_AHEAD_BYTES)
        tail = self._check_end(self._file.read_range(tail_start, self._size_bytes - tail_start))
        self._tail = (self._size_bytes - len(tail), tail)

    def _check_end(self, end: bytes) -> bytes:
        """Return the last bytes of the file, or more of them, after what they claim was checked."""
        needed_bytes = claims_bytes(end, self._size_bytes, self._file.shown)
        if needed_bytes > len(end):
            end = self._file.read_range(self._size_bytes - needed_bytes, needed_bytes)
        check_claims(end, self._size_bytes, self._file.shown)
        return end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset in bytes. Raises ValueError before the start."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"cannot seek to {origin + offset} in {self._file.location!r}")
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next ``size`` bytes, fewer only at the end of the file; all the rest without a size.

        Raises CorruptFileError for a rest that no file has which is read whole.
        """
        self._check_open()
        rest = max(0, self._size_bytes - self._position)
        length = rest if size is None or size < 0 else min(size, rest)
        if (size is None or size < 0) and length > MAX_INFLATED_BYTES:
            raise CorruptFileError(
                f"{self._file.shown!r} has {self._size_bytes} bytes, and no file of its kind more than"
                f" {MAX_INFLATED_BYTES}; restore it",
                path=self._file.shown,
            )
        data = self._range(self._position, length) if length else b""
        if size is None or size < 0:  # as pyiceberg reads Avro, and nobody Parquet
            check_no_avro(self._file.shown, data)
            if data.startswith(PUFFIN_MAGIC):
                check_puffin(data, self._file.shown)
        self._position += length
        return data

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self._file.location!r} is closed")

    def _range(self, offset: int, length: int) -> bytes:
        for start, data in (self._head, self._tail, self._window):
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        if offset >= self._size_bytes - READ_AHEAD_BYTES:
            self._read_tail()
            return self._range(offset, length)
        if length >= READ_AHEAD_BYTES:
            return self._file.read_range(offset, length)
        self._window = (offset, self._file.read_range(offset, min(READ_AHEAD_BYTES, self._size_bytes - offset)))
        return self._range(offset, length)


class StorageOutputFile(SealedOutputFile):
    """A table file to write."""

    def __init__(self, location: str, storage: Storage, path: str):
        super().__init__(location)
        self._storage = storage
        self._path = path
        self._stream: StorageOutputStream | None = None

    def __len__(self) -> int:
        """Size in bytes: of the stream closed last, else one request. Raises FileNotFoundError."""
        if self._stream is not None and self._stream.published:
            return self._stream.tell()
        return len(self.to_input_file())

    def exists(self) -> bool:
        """Whether the file is there. Raises PermissionError, StorageError."""
        return self.to_input_file().exists()

    def to_input_file(self) -> StorageInputFile:
        return StorageInputFile(self.location, self._storage, self._path)

    def create(self, overwrite: bool = False) -> OutputStream:
        """Return a stream whose ``close`` makes the file appear, whole, in one request.

        ``close`` raises FileExistsError when the name is occupied, unless ``overwrite``. A stream
        that is left by an exception, discarded or never closed leaves no file.
        """
        self._stream = StorageOutputStream(self.location, self._storage, self._path, overwrite=overwrite)
        return self._stream

    @property
    def written_bytes(self) -> int:
        """Bytes written to the stream so far."""
        return 0 if self._stream is None else self._stream.tell()

    def discard(self) -> None:
        """Drop what was written to the stream and is not published; later writes to it go nowhere."""
        if self._stream is not None:
            self._stream.discard()


class StorageOutputStream:
    """What is written to a table file until it is published by ``close``.

    No io.IOBase: that would call ``close``, and so publish, when an abandoned stream is collected.
    """

    def __init__(self, location: str, storage: Storage, path: str, *, overwrite: bool):
        self._location = location
        self._storage = storage
        self._path = path
        self._overwrite = overwrite
        self._buffer = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - closed by close and discard
        self._written_bytes = 0
        self._discarded = False
        self.published = False

    @property
    def closed(self) -> bool:
        return self._buffer.closed and not self._discarded

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._written_bytes

    def flush(self) -> None:
        """Nothing to do: only ``close`` makes bytes durable."""

    def write(self, b: bytes) -> int:
        """Add bytes at the end. Raises ValueError when the stream is closed."""
        size_bytes = memoryview(b).nbytes
        if not self._discarded:
            self._buffer.write(b)
        self._written_bytes += size_bytes
        return size_bytes

    def close(self) -> None:
        """Publish the file; a second call does nothing. Raises FileExistsError, PermissionError, StorageError."""
        if self._buffer.closed:
            return
        try:
            data = self._sealed()
            self._written_bytes = len(data)
            with _as_pyiceberg_expects(self._location):
                if self._overwrite:
                    self._storage.write(self._path, data)
                else:
                    create_fresh_file(self._storage, self._path, data)  # names of table files hold a uuid
            self.published = True
        finally:
            self._buffer.close()

    def _sealed(self) -> bytes:
        """Return what was written, with its checksums (FORMAT.md, "Files of tables")."""
        if SealedKind.of(self._location) is SealedKind.PARQUET:
            self._seal_footer()
        self._buffer.seek(0)
        data = self._buffer.read()
        if SealedKind.of(self._location) is SealedKind.PARQUET:
            return data
        return sealed_table_file(data, self._location)

    def _seal_footer(self) -> None:
        """Fill in the digits where they stand: a data file may be large, so it is in memory once only."""
        end_at = max(0, self._written_bytes - PARQUET_END_BYTES)
        self._buffer.seek(end_at)
        footer_at = self._written_bytes - footer_bytes(self._buffer.read())
        if not 0 <= footer_at < end_at:
            return
        crc = 0
        self._buffer.seek(0)
        while piece := self._buffer.read(WHOLE_FILE_BYTES):
            crc = google_crc32c.extend(crc, piece)
        self._buffer.seek(footer_at)
        footer = sealed_footer(self._buffer.read(), self._location, crc)
        if footer is not None:
            self._buffer.seek(footer_at)
            self._buffer.write(footer)

    def discard(self) -> None:
        """Drop what was written; later writes are accepted and go nowhere, so that a writer can still finish."""
        if not self._buffer.closed:
            self._discarded = True
            self._buffer.close()

    def __enter__(self) -> StorageOutputStream:
        return self

    def __exit__(
        self, exctype: type[BaseException] | None, excinst: BaseException | None, exctb: TracebackType | None
    ) -> None:
        if exctype is None:
            self.close()
        else:
            self.discard()
