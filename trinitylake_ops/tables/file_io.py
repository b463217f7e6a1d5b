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

import io
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.typedef import EMPTY_DICT, Properties

from trinitylake_ops.errors import (
    FileExistsAlreadyError,
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
    StorageError,
    StoragePermissionError,
)
from trinitylake_ops.format.locations import as_uri, is_uri, normalize_root_uri, to_location, to_uri
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.open import open_storage
from trinitylake_ops.storage.options import SECRET_OPTIONS, StorageOptions
from trinitylake_ops.storage.write_outcome import create_fresh_file
from trinitylake_ops.transaction.lakehouse import Lakehouse

ROOT = "root"
STORAGE_OPTION_PREFIX = "storage."

#: A file up to this size is read in one request; of a larger one this much of its start is.
WHOLE_FILE_BYTES = 1 << 20
#: The least that a ranged read fetches, so that small forward reads share one request.
READ_AHEAD_BYTES = 256 << 10
#: What a file being written may hold in memory before it moves to a temporary file.
SPOOL_BYTES = 8 << 20


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
    it, any other one through a storage opened for the file's own folder (local) or for its bucket,
    with the same options when the scheme is the same, else with none. Pickles with its storage. Its
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
    ) -> StorageFileIO:
        """Return a FileIO on an open storage; ``storage_options`` are for files beyond its root.

        Those under the root of one of the ``others`` go through that one.
        """
        file_io = cls.__new__(cls)
        FileIO.__init__(file_io, properties)
        file_io._bind(storage, StorageOptions(storage_options), read_only=read_only, others=tuple(others))
        return file_io

    def _bind(
        self, storage: Storage, options: StorageOptions, *, read_only: bool, others: tuple[Storage, ...] = ()
    ) -> None:
        self.properties = public_properties(self.properties, storage.root, options)
        self.storage = storage
        self.storage_options = options
        self.read_only = read_only
        self._others = others
        self._foreign: dict[str, Storage] = {}
        self._foreign_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "properties": self.properties,
            "storage": self.storage,
            "options": self.storage_options,
            "read_only": self.read_only,
            "others": self._others,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.properties = state["properties"]
        self._bind(state["storage"], state["options"], read_only=state["read_only"], others=state["others"])

    @property
    def root(self) -> str:
        """The root URI of the lakehouse, with its final ``/``."""
        return self.storage.root

    def location(self, uri: str) -> str:
        """Return a URI, or an absolute path, as a path when it lies under the root, else as a URI.

        What no name of ours is, with an empty segment for one, stays a URI also under the root. Raises
        InvalidLocationError for what is neither.
        """
        full = as_uri(uri)
        if not is_uri(full):
            raise InvalidLocationError(f"{uri!r} is neither a URI nor an absolute path", path=uri)
        try:
            return to_location(self.root, full)
        except InvalidLocationError:
            return full

    def size_bytes(self, location: str) -> int | None:
        """Return the size of a file, a path under the root or a URI; None when it is missing. Raises StorageError."""
        try:
            return len(self.new_input(to_uri(self.root, location)))
        except FileMissingError:
            return None

    def read_whole(self, location: str) -> bytes:
        """Return the bytes of a file, a path under the root or a URI. Raises FileMissingError, StorageError."""
        storage, path = self._resolve(to_uri(self.root, location))
        return storage.read(path)

    def new_input(self, location: str) -> StorageInputFile:
        """Return a file to read. Raises InvalidLocationError."""
        storage, path = self._resolve(location)
        return StorageInputFile(location, storage, path)

    def new_output(self, location: str) -> StorageOutputFile:
        """Return a file to write. Raises InvalidLocationError, InvalidInputError when read-only."""
        self._check_writable(location)
        storage, path = self._resolve(location)
        return StorageOutputFile(location, storage, path)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file; a missing one is no error. Raises StorageError, InvalidInputError when read-only."""
        text = location if isinstance(location, str) else location.location
        self._check_writable(text)
        storage, path = self._resolve(text)
        with _as_pyiceberg_expects(text):
            storage.delete(path)

    def _check_writable(self, location: str) -> None:
        if self.read_only:
            raise InvalidInputError(
                f"table file {location!r} cannot be changed: this catalog only reads; open one on the latest version",
                path=location,
            )

    def _resolve(self, location: str) -> tuple[Storage, str]:
        uri = as_uri(location)
        for storage in (self.storage, *self._others):
            if uri.startswith(storage.root):
                return storage, uri.removeprefix(storage.root)
        if not is_uri(uri):
            raise InvalidLocationError(f"table file {location!r} is no URI", path=location)
        scheme, _, rest = uri.partition("://")
        folder = rest.rpartition("/")[0] if scheme == "file" else rest.partition("/")[0]
        root = normalize_root_uri(f"{scheme}://{folder}/")
        with self._foreign_lock:
            if root not in self._foreign:
                is_alike = self.root.startswith(f"{scheme}://")
                self._foreign[root] = open_storage(root, self.storage_options if is_alike else None)
            return self._foreign[root], uri.removeprefix(root)


def reading_io(lake: Lakehouse) -> StorageFileIO:
    """Return what reads files of a lakehouse's tables, and writes none."""
    return StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)


class StorageInputFile(InputFile):
    """A table file to read."""

    def __init__(self, location: str, storage: Storage, path: str, size_bytes: int | None = None):
        super().__init__(location)
        self._storage = storage
        self._path = path
        self._size_bytes = size_bytes

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

        A file up to WHOLE_FILE_BYTES takes that one request; a larger one a second for its size and
        then one for each range. Raises FileNotFoundError, PermissionError, StorageError.
        """
        with _as_pyiceberg_expects(self.location):
            head = self._storage.read(self._path, offset=0, length=WHOLE_FILE_BYTES)
        if len(head) < WHOLE_FILE_BYTES:
            self._size_bytes = len(head)
        return RangeReader(self, head)

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
    READ_AHEAD_BYTES. A large read is one request of exactly its size and is not kept.
    """

    def __init__(self, file: StorageInputFile, head: bytes):
        super().__init__()
        self._file = file
        self._size_bytes = len(file)
        self._position = 0
        self._head = (0, head)
        self._tail = (self._size_bytes, b"")
        self._window = (0, b"")

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
        """Return the next ``size`` bytes, fewer only at the end of the file; all the rest without a size."""
        self._check_open()
        rest = max(0, self._size_bytes - self._position)
        length = rest if size is None or size < 0 else min(size, rest)
        data = self._range(self._position, length) if length else b""
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
        tail_start = max(0, self._size_bytes - READ_AHEAD_BYTES)
        if offset >= tail_start:
            self._tail = (tail_start, self._file.read_range(tail_start, self._size_bytes - tail_start))
            return self._range(offset, length)
        if length >= READ_AHEAD_BYTES:
            return self._file.read_range(offset, length)
        self._window = (offset, self._file.read_range(offset, min(READ_AHEAD_BYTES, self._size_bytes - offset)))
        return self._range(offset, length)


class StorageOutputFile(OutputFile):
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
            self._buffer.seek(0)
            data = self._buffer.read()
            with _as_pyiceberg_expects(self._location):
                if self._overwrite:
                    self._storage.write(self._path, data)
                else:
                    create_fresh_file(self._storage, self._path, data)  # names of table files hold a uuid
            self.published = True
        finally:
            self._buffer.close()

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
