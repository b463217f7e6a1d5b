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
from collections.abc import Iterator, Mapping
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
from trinitylake_ops.format.locations import is_uri, normalize_root_uri, to_location, to_uri
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.open import open_storage

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
        raise TableFilePermissionError(error.message, path=location) from error


def storage_options_of(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the storage options among the properties of a catalog or FileIO: those named ``storage.*``."""
    return {
        name.removeprefix(STORAGE_OPTION_PREFIX): value
        for name, value in properties.items()
        if name.startswith(STORAGE_OPTION_PREFIX)
    }


class StorageFileIO(FileIO):
    """pyiceberg's FileIO on a Storage.

    Made by pyiceberg from properties (``py-io-impl``; ``root`` and ``storage.*`` say where) or by
    :meth:`on` from an open Storage. Locations are URIs; those under the storage's root go through
    it, any other one through a storage opened for the file's own folder (local) or for its bucket,
    with the same options. Pickles with its storage. ``read_only`` refuses writes and deletes with
    InvalidInputError. Raises InvalidInputError when ``root`` is missing.
    """

    def __init__(self, properties: Properties = EMPTY_DICT):
        super().__init__(properties)
        root = properties.get(ROOT)
        if not root:
            raise InvalidInputError(f"StorageFileIO needs the property {ROOT!r}: the lakehouse's root URI")
        self._bind(open_storage(normalize_root_uri(root), storage_options_of(properties)), read_only=False)

    @classmethod
    def on(
        cls,
        storage: Storage,
        storage_options: Mapping[str, str] | None = None,
        properties: Properties = EMPTY_DICT,
        *,
        read_only: bool = False,
    ) -> StorageFileIO:
        """Return a FileIO on an open storage; ``storage_options`` are for files beyond its root."""
        file_io = cls.__new__(cls)
        options = {f"{STORAGE_OPTION_PREFIX}{name}": value for name, value in (storage_options or {}).items()}
        FileIO.__init__(file_io, {**properties, **options, ROOT: storage.root})
        file_io._bind(storage, read_only=read_only)
        return file_io

    def _bind(self, storage: Storage, *, read_only: bool) -> None:
        self.storage = storage
        self.read_only = read_only
        self._foreign: dict[str, Storage] = {}
        self._foreign_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"properties": self.properties, "storage": self.storage, "read_only": self.read_only}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.properties = state["properties"]
        self._bind(state["storage"], read_only=state["read_only"])

    @property
    def root(self) -> str:
        """The root URI of the lakehouse, with its final ``/``."""
        return self.storage.root

    def uri(self, location: str) -> str:
        """Return the full URI of a location: a path under the root, or a URI. Raises InvalidLocationError."""
        return to_uri(self.root, location)

    def location(self, uri: str) -> str:
        """Return a URI as a path when it lies under the root, else unchanged. Raises InvalidLocationError."""
        return to_location(self.root, uri)

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
        if location.startswith(self.root):
            return self.storage, location.removeprefix(self.root)
        uri = f"file://{location}" if location.startswith("/") else location
        if not is_uri(uri):
            raise InvalidLocationError(f"table file {location!r} is no URI", path=location)
        scheme, _, rest = uri.partition("://")
        folder = rest.rpartition("/")[0] if scheme == "file" else rest.partition("/")[0]
        root = normalize_root_uri(f"{scheme}://{folder}/")
        with self._foreign_lock:
            if root not in self._foreign:
                self._foreign[root] = open_storage(root, storage_options_of(self.properties))
            return self._foreign[root], uri.removeprefix(root)


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
        return io.BufferedReader(RangeReader(self, head), buffer_size=1)

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
