"""Table files to write, and the pending files of a change.

The files of a change do not depend on each other, so they are written in parallel in the background. The commit waits
for all writes. Until a file is written, this process reads it from memory.
"""

from __future__ import annotations

import functools
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import google_crc32c
from pyiceberg.io import OutputStream

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.format.file_names import TABLES_PREFIX, is_table_metadata_path
from trinitylake_ops.iceberg.io.input_file import StorageInputFile, as_pyiceberg_expects
from trinitylake_ops.iceberg.io.pyiceberg_patches import SealedOutputFile, SealedStream
from trinitylake_ops.iceberg.validation.checksums import SealedKind, sealed_footer, sealed_table_file
from trinitylake_ops.iceberg.validation.files import PARQUET_END_BYTES, footer_bytes
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.conditional_create import create_fresh_file
from trinitylake_ops.storage.interface import FileInfo, Storage, StorageWrapper
from trinitylake_ops.storage.parallel import Started, in_one_round_trip
from trinitylake_ops.storage.paths import check_range

#: Maximum size of a file being written that is kept in memory. Larger files are moved to a temporary file.
SPOOL_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20


class StorageOutputFile(SealedOutputFile):
    """A table file to write.

    Args:
        location: URI of the file.
        storage: Its storage.
        path: Its path in the storage.
        publish: Receives the path and contents of the file instead of the storage.
    """

    def __init__(self, location: str, storage: Storage, path: str, publish: Callable[[str, bytes], None] | None = None):
        super().__init__(location)
        self._storage = storage
        self._path = path
        self._publish = publish
        self._stream: StorageOutputStream | None = None

    @property
    def is_added(self) -> bool:
        """Whether ``publish`` receives the file."""
        return self._publish is not None

    def __len__(self) -> int:
        """Size in bytes, from the last closed stream or else by one request. Raises FileNotFoundError."""
        if self._stream is not None and self._stream.published:
            return self._stream.tell()
        return len(self.to_input_file())

    def exists(self) -> bool:
        """Whether the file exists. Raises PermissionError, StorageError."""
        return self.to_input_file().exists()

    def to_input_file(self) -> StorageInputFile:
        return StorageInputFile(self.location, self._storage, self._path)

    def create(self, overwrite: bool = False) -> OutputStream:
        """Return a stream whose ``close`` writes the whole file in one request.

        ``close`` raises FileExistsError if the file exists, unless ``overwrite`` is set. PyIceberg writes manifests
        with ``overwrite`` under new names, and metadata files are never overwritten. A stream that is exited by an
        exception, discarded or never closed writes nothing.
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
    """The bytes written to a table file, which ``close`` publishes.

    This class is not an io.IOBase, which would call ``close`` and thereby publish the file when an abandoned stream is
    garbage-collected.
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
        """Do nothing, because only ``close`` makes bytes durable."""

    def write(self, b: bytes) -> int:
        """Append bytes. Raises ValueError if the stream is closed."""
        size_bytes = memoryview(b).nbytes
        if not self._discarded:
            self._buffer.write(b)
        self._written_bytes += size_bytes
        return size_bytes

    def close(self) -> None:
        """Publish the file. Later calls do nothing. Raises FileExistsError, PermissionError, StorageError."""
        if self._buffer.closed:
            return
        try:
            data = self._seal()
            self._written_bytes = len(data)
            with as_pyiceberg_expects(self.location):
                self._publish(data)
            self.published = True
        finally:
            self._buffer.close()

    def _seal(self) -> bytes:
        """Return the written bytes with their checksums (FORMAT.md, "Files of tables")."""
        if SealedKind.of(self.location) is SealedKind.PARQUET:
            self._seal_footer()
        self._buffer.seek(0)
        data = self._buffer.read()
        if SealedKind.of(self.location) is SealedKind.PARQUET:
            return data
        return sealed_table_file(data, self.location)

    def _seal_footer(self) -> None:
        """Fill in the digits of the checksums in place, because a second copy of a data file may not fit in memory."""
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
        """Drop the written bytes. Later writes are accepted without effect, so that a writer can still finish."""
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


logger = logging.getLogger(__name__)

#: Maximum size of all pending files. Beyond this size, files are written synchronously, because their transfer time
#: dominates.
MAX_PENDING_BYTES = 32 << 20
_PENDING_FILE = re.compile(rf"{TABLES_PREFIX}[^/]+/(?:metadata|data)/.+\.(?:avro|parquet)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    data: bytes
    write: Started[None]


class PendingFiles(StorageWrapper):
    """A storage wrapper for the files of one change, whose ``create`` and ``write`` return before the file is written.

    Call ``settle`` before anything durable refers to the files, and ``close`` or ``abandon`` afterwards. From then on,
    all requests are synchronous. Requests for large files and files of other kinds are always synchronous.
    """

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._pending: dict[str, _PendingWrite] = {}
        self._paths: dict[str, None] = {}
        self._n_bytes = 0
        self._failure: TrinityLakeError | None = None
        self._is_open = True
        self._send: Callable[[Callable[[], None]], None] = in_one_round_trip(lambda request: request())
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock, whose owner does not exist in a forked child. The child writes pending files again."""
        self._lock = threading.RLock()

    def settle(self) -> None:
        """Wait until all writes have ended, and raise the first failure. Later calls raise the same failure."""
        with self._lock:
            for path, pending in self._pending.items():
                try:
                    with as_pyiceberg_expects(self.root + path):
                        pending.write.result()
                except TrinityLakeError as error:
                    self._failure = self._failure or error
            self._drop(list(self._pending))
            if self._failure is not None:
                raise self._failure

    def abandon(self, error: TrinityLakeError) -> None:
        """Delete all files, best-effort, after the change failed. ``settle`` raises ``error`` from now on."""
        with self._lock:
            self._await_writes(list(self._pending))
            self._drop(list(self._pending))
            self._failure = self._failure or error
            self._is_open = False
            for path, failure in self.inner.delete_many(list(self._paths)).items():
                logger.warning("could not delete unreferenced file %r of a failed change: %s", path, failure)
            self._paths.clear()

    def close(self) -> None:
        """End the change. Later requests are synchronous."""
        with self._lock:
            self._is_open = False
            self._paths.clear()

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        pending = self._pending.get(path)
        if pending is None:
            return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        check_range(path, offset, length)
        return pending.data[offset : None if length is None else offset + length]

    def stat(self, path: str) -> FileInfo:
        self._await_writes([path])
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        if not self._write_in_background(path, data, functools.partial(create_fresh_file, self.inner, path, data)):
            self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        if not self._write_in_background(path, data, functools.partial(self.inner.write, path, data)):
            self.inner.write(path, data)

    def delete(self, path: str) -> None:
        self._await_writes([path])
        self._drop([path])
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        self._await_writes(paths)
        self._drop(paths)
        return self.inner.delete_batch(paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._await_writes(list(self._pending))
        return self.inner.list(prefix)

    def _write_in_background(self, path: str, data: bytes, request: Callable[[], None]) -> bool:
        """Write a file of the change in the background. Return False if the caller must write it."""
        if _PENDING_FILE.fullmatch(path) is None:
            return False
        with self._lock:
            if not self._is_open:
                return False
            self._paths[path] = None
            self._await_writes([path])
            if self._n_bytes + len(data) > MAX_PENDING_BYTES:
                self._await_writes([path for path, pending in self._pending.items() if pending.write.is_done])
            if self._n_bytes + len(data) > MAX_PENDING_BYTES:
                return False
            self._pending[path] = _PendingWrite(data, Started(functools.partial(self._send, request)))
            self._n_bytes += len(data)
            return True

    def _await_writes(self, paths: Iterable[str]) -> None:
        """Wait until no write of these files is in flight. Failures are kept, so that ``settle`` raises them."""
        with self._lock:
            for path in paths:
                pending = self._pending.get(path)
                if pending is None:
                    continue
                try:
                    pending.write.result()
                except TrinityLakeError as error:
                    logger.debug("%r was not written: %s", path, error)
                else:
                    self._drop([path])

    def _drop(self, paths: Iterable[str]) -> None:
        with self._lock:
            for path in paths:
                pending = self._pending.pop(path, None)
                self._n_bytes -= 0 if pending is None else len(pending.data)
