"""Files of tables to write. They are created in one step when they are closed, and sealed if their format has room."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from types import TracebackType

import google_crc32c
from pyiceberg.io import OutputStream

from trinitylake_ops.format.file_names import is_table_metadata_path
from trinitylake_ops.storage.conditional_create import create_fresh_file
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.tables.claims.file_claims import (
    PARQUET_END_BYTES,
    footer_bytes,
)
from trinitylake_ops.tables.claims.table_seals import SealedKind, sealed_footer, sealed_table_file
from trinitylake_ops.tables.io.file_errors import as_pyiceberg_expects
from trinitylake_ops.tables.io.input_file import StorageInputFile
from trinitylake_ops.tables.io.parquet_model import SealedOutputFile, SealedStream

#: The bytes that a file being written may hold in memory before it moves to a temporary file.
SPOOL_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20


class StorageOutputFile(SealedOutputFile):
    """A table file to write. ``publish`` takes the path and the bytes of one that something else writes later."""

    def __init__(self, location: str, storage: Storage, path: str, publish: Callable[[str, bytes], None] | None = None):
        super().__init__(location)
        self._storage = storage
        self._path = path
        self._publish = publish
        self._stream: StorageOutputStream | None = None

    @property
    def is_added(self) -> bool:
        """Whether something else writes the file later."""
        return self._publish is not None

    def __len__(self) -> int:
        """Size in bytes: that of the stream closed last, otherwise by one request. Raises FileNotFoundError."""
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

        ``close`` raises FileExistsError when the name is occupied, unless ``overwrite``. pyiceberg writes manifests so,
        under fresh names, and these are created all the same. A stream that is left by an exception, discarded or never
        closed leaves no file.
        """
        publish = self._publish or functools.partial(create_fresh_file, self._storage)
        if overwrite and not is_table_metadata_path(self._path):
            publish = self._storage.write
        self._stream = StorageOutputStream(self.location, functools.partial(publish, self._path))
        return self._stream

    @property
    def written_bytes(self) -> int:
        """Bytes written to the stream so far."""
        return 0 if self._stream is None else self._stream.tell()

    def discard(self) -> None:
        """Drop the unpublished bytes of the stream. Later writes to it have no effect."""
        if self._stream is not None:
            self._stream.discard()


class StorageOutputStream(SealedStream):
    """The bytes written to a table file until it is published by ``close``.

    This class is no io.IOBase: that would call ``close``, and so publish, when an abandoned stream is collected.
    """

    def __init__(self, location: str, publish: Callable[[bytes], None]):
        super().__init__(location)
        self._publish = publish
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
        """Do nothing: only ``close`` makes bytes durable."""

    def write(self, b: bytes) -> int:
        """Add bytes at the end. Raises ValueError when the stream is closed."""
        size_bytes = memoryview(b).nbytes
        if not self._discarded:
            self._buffer.write(b)
        self._written_bytes += size_bytes
        return size_bytes

    def close(self) -> None:
        """Publish the file. A second call does nothing. Raises FileExistsError, PermissionError, StorageError."""
        if self._buffer.closed:
            return
        try:
            data = self._sealed()
            self._written_bytes = len(data)
            with as_pyiceberg_expects(self.location):
                self._publish(data)
            self.published = True
        finally:
            self._buffer.close()

    def _sealed(self) -> bytes:
        """Return the written bytes, with their checksums (FORMAT.md, "Files of tables")."""
        if SealedKind.of(self.location) is SealedKind.PARQUET:
            self._seal_footer()
        self._buffer.seek(0)
        data = self._buffer.read()
        if SealedKind.of(self.location) is SealedKind.PARQUET:
            return data
        return sealed_table_file(data, self.location)

    def _seal_footer(self) -> None:
        """Fill in the digits in place: a data file may be large, so it is in memory only once."""
        end_at = max(0, self._written_bytes - PARQUET_END_BYTES)
        self._buffer.seek(end_at)
        footer_at = self._written_bytes - footer_bytes(self._buffer.read())
        if not 0 <= footer_at < end_at:
            return
        crc = 0
        self._buffer.seek(0)
        while piece := self._buffer.read(_PIECE_BYTES):
            crc = google_crc32c.extend(crc, piece)
        self._buffer.seek(footer_at)
        footer = sealed_footer(self._buffer.read(), self.location, crc)
        if footer is not None:
            self._buffer.seek(footer_at)
            self._buffer.write(footer)

    def discard(self) -> None:
        """Drop the written bytes. Later writes are accepted and have no effect, so that a writer can still finish."""
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
