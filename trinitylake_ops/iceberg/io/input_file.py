"""Table files to read, which are verified before they are decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyiceberg.io import InputFile, InputStream

from trinitylake_ops.errors import (
    CorruptFileError,
    FileExistsAlreadyError,
    FileMissingError,
    LocationNotAllowedError,
    StorageError,
    StoragePermissionError,
)
from trinitylake_ops.iceberg.validation.avro import check_header_size, check_no_avro, decompress, is_avro
from trinitylake_ops.iceberg.validation.checksums import SealedKind, check_table_file
from trinitylake_ops.iceberg.validation.files import MAGIC as PUFFIN_MAGIC
from trinitylake_ops.iceberg.validation.files import check_claims, check_puffin, end_with_claims, named_format
from trinitylake_ops.iceberg.validation.inflate import MAX_INFLATED_BYTES, too_large
from trinitylake_ops.iceberg.validation.metadata_size import metadata_too_large
from trinitylake_ops.storage.interface import Storage


class TableFileMissingError(FileMissingError, FileNotFoundError):
    """A FileMissingError that PyIceberg recognizes."""


class TableFileExistsError(FileExistsAlreadyError, FileExistsError):
    """A FileExistsAlreadyError that PyIceberg recognizes."""


class TableFilePermissionError(StoragePermissionError, PermissionError):
    """A StoragePermissionError that PyIceberg recognizes."""


class TableFileUnreadableError(StorageError):
    """The storage does not return a table file, for example an archived object or a circular symbolic link."""


@contextmanager
def reading_table_file() -> Iterator[None]:
    """Convert StorageErrors without a more specific class to TableFileUnreadableError: they affect only this file."""
    try:
        yield
    except StorageError as error:
        if type(error) is not StorageError:
            raise
        raise TableFileUnreadableError(error.message, path=error.path) from error


@contextmanager
def as_pyiceberg_expects(location: str) -> Iterator[None]:
    """Convert the storage's errors to subclasses of the built-in errors that PyIceberg's FileIO contract names."""
    try:
        yield
    except FileMissingError as error:
        raise TableFileMissingError(f"table file {location!r} does not exist", path=location) from error
    except FileExistsAlreadyError as error:
        raise TableFileExistsError(f"table file {location!r} already exists", path=location) from error
    except StoragePermissionError as error:
        # The message contains the cause and the path in the storage; replace the path with the location.
        message = error.message.replace(repr(error.path), repr(location)) if error.path else error.message
        if isinstance(error, LocationNotAllowedError):  # already a PermissionError
            raise LocationNotAllowedError(message, path=location) from error
        raise TableFilePermissionError(message, path=location) from error


#: Files up to this size are read in one request. The first request for a larger file reads this many bytes.
WHOLE_FILE_BYTES = 1 << 20
#: Minimum size of a ranged read, so that small forward reads share one request.
READ_AHEAD_BYTES = 256 << 10


class StorageInputFile(InputFile):
    """A table file to read.

    Args:
        location: URI of the file.
        storage: The storage that contains the file.
        path: The path in the storage.
        size_bytes: The size, if it is known.
        shown: The name of the file in errors; by default the location.
    """

    def __init__(
        self, location: str, storage: Storage, path: str, size_bytes: int | None = None, shown: str | None = None
    ):
        super().__init__(location)
        self._storage = storage
        self._path = path
        self._size_bytes = size_bytes
        #: The file's name in errors.
        self.shown = location if shown is None else shown

    def __len__(self) -> int:
        """Size in bytes. Sends one request unless the size is known. Raises FileNotFoundError."""
        if self._size_bytes is None:
            with as_pyiceberg_expects(self.location), reading_table_file():
                self._size_bytes = self._storage.stat(self._path).size_bytes
        return self._size_bytes

    def exists(self) -> bool:
        """Whether the file exists. Raises PermissionError, StorageError."""
        with as_pyiceberg_expects(self.location):
            return self._storage.exists(self._path)

    def open(self, seekable: bool = True) -> InputStream:
        """Return a seekable stream. The first request is sent immediately.

        A file up to WHOLE_FILE_BYTES takes one request. A larger file takes a second request for its size, another
        request for its end if it has the name of a Parquet or ORC file, and one request for each range. An Avro file is
        read completely and returned decompressed, so that decoders do not inflate it without bounds.

        Raises FileNotFoundError, PermissionError, StorageError. Raises CorruptFileError for an Avro, Parquet or ORC
        file that contains or declares too much, for a name with the suffix ``.parquet`` or ``.orc`` without such a
        footer, and for metadata that does not match its checksum. For larger files with other names, the stream raises
        this error when its end is read.
        """
        head = self._read_head()
        if named_format(self.location) is None and is_avro(self.location, head):
            return self._opened(self._with_rest(head))
        return RangeReader(self, head)

    def read_whole(self, limit_bytes: int | None = None) -> bytes:
        """Return the stored contents of the file, in at most one request more than ``open``.

        Args:
            limit_bytes: Maximum size of metadata that the caller parses; None for no limit.

        Raises:
            FileNotFoundError: The file does not exist.
            PermissionError: The file may not be read.
            CorruptFileError: The file has more than MAX_INFLATED_BYTES.
            MetadataTooLargeError: The file has more than ``limit_bytes``. The rest is not read.
            StorageError: The file cannot be read.
        """
        head = self._read_head()
        if limit_bytes is not None and len(head) == WHOLE_FILE_BYTES and len(self) > limit_bytes:
            raise metadata_too_large(self.shown, len(self), limit_bytes)
        return self._with_rest(head)

    def _read_head(self) -> bytes:
        with as_pyiceberg_expects(self.location), reading_table_file():
            head = self._storage.read(self._path, offset=0, length=WHOLE_FILE_BYTES)
        if len(head) < WHOLE_FILE_BYTES:
            self._size_bytes = len(head)
            self._check_seals(head)
        return head

    def _check_seals(self, data: bytes) -> None:
        """Raise CorruptFileError for metadata that does not match its checksum. Data files are only read in part."""
        if SealedKind.of(self.location) is not SealedKind.PARQUET:
            check_table_file(data, self.shown)

    def _with_rest(self, head: bytes) -> bytes:
        if len(head) < WHOLE_FILE_BYTES:
            return head
        if len(self) > MAX_INFLATED_BYTES:
            raise too_large(self.shown, len(self))
        if is_avro(self.location, head):
            check_header_size(head, self.shown)
        data = head + self.read_range(len(head), len(self) - len(head)) if len(self) > len(head) else head
        self._check_seals(data)
        return data

    def _opened(self, data: bytes) -> InputStream:
        """Return the stream of a file that was read whole."""
        if not is_avro(self.location, data):
            return io.BytesIO(data)
        return io.BytesIO(decompress(data, self.shown).data)

    def read_range(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``, in one request. Raises FileNotFoundError, StorageError."""
        with as_pyiceberg_expects(self.location), reading_table_file():
            data = self._storage.read(self._path, offset=offset, length=length)
        if len(data) != length:
            raise StorageError(
                f"table file {self.location!r} returned {len(data)} bytes at {offset} instead of {length}; it may have"
                " been replaced, restore it",
                path=self.location,
            )
        return data


class RangeReader(io.RawIOBase):
    """A seekable stream over ranged reads that caches the file's start, its end and the last small range.

    Parquet readers start with the footer, so the first read near the end fetches the last READ_AHEAD_BYTES or the whole
    footer. The sizes that the footer declares are checked at this point, and those of a Puffin file when it is read
    completely; both checks raise CorruptFileError. A large read is one request of exactly its size and is not cached.
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
        # Check the end immediately, because Arrow's ORC reader wraps the errors of a stream.
        elif named_format(file.location) is not None:
            self._read_tail()

    def _read_tail(self) -> None:
        tail = self._check_end(self._read_end(min(READ_AHEAD_BYTES, self._size_bytes)))
        self._tail = (self._size_bytes - len(tail), tail)

    def _read_end(self, n_bytes: int) -> bytes:
        return self._file.read_range(self._size_bytes - n_bytes, n_bytes)

    def _check_end(self, end: bytes) -> bytes:
        """Check the declared sizes at the end of the file, and return its last bytes, including its whole footer."""
        end = end_with_claims(end, self._size_bytes, self._read_end, self._file.shown)
        check_claims(end, self._size_bytes, self._file.shown)
        return end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset in bytes. Raises ValueError for a position before the start."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"cannot seek to {origin + offset} in {self._file.location!r}")
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next ``size`` bytes, or fewer at the end of the file. Without a size, return the rest.

        Raises CorruptFileError if the rest exceeds the maximum size of a file that is read completely.
        """
        self._check_open()
        rest = max(0, self._size_bytes - self._position)
        length = rest if size is None or size < 0 else min(size, rest)
        if (size is None or size < 0) and length > MAX_INFLATED_BYTES:
            raise CorruptFileError(
                f"{self._file.shown!r} has {self._size_bytes} bytes, more than the maximum of {MAX_INFLATED_BYTES} for"
                " files of its kind; restore it",
                path=self._file.shown,
            )
        data = self._range(self._position, length) if length else b""
        if size is None or size < 0:  # PyIceberg reads Avro files this way; Parquet readers never do
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
