"""Data files, manifests and manifest lists of one change of a table, on their way to the storage while it goes on.

None of them has to stand before another: only the commit that reaches them waits, for all of them at once. Until then
this process reads them from memory.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.format.file_names import TABLES_PREFIX
from trinitylake_ops.storage.conditional_create import create_fresh_file
from trinitylake_ops.storage.fork import at_fork
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.parallel import Started, in_one_round
from trinitylake_ops.storage.paths import check_range
from trinitylake_ops.storage.wrappers.base import StorageWrapper
from trinitylake_ops.tables.io.file_errors import as_pyiceberg_expects

logger = logging.getLogger(__name__)

#: The most bytes of all files on their way. A file beyond that is written at once: its bytes take longer than a wait.
MAX_PENDING_BYTES = 32 << 20
_FILE_OF_CHANGE = re.compile(rf"{TABLES_PREFIX}[^/]+/(?:metadata|data)/.+\.(?:avro|parquet)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Pending:
    data: bytes
    write: Started[None]


class PendingFiles(StorageWrapper):
    """A storage for the files of one change. ``create`` and ``write`` return before such a file stands.

    Whoever lets something durable name the files calls ``settle`` before, and ``close`` or ``abandon`` after. Then this
    is a storage like others. Files of other kinds, and large ones, are written at once.
    """

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._pending: dict[str, _Pending] = {}
        self._paths: dict[str, None] = {}
        self._n_bytes = 0
        self._failure: TrinityLakeError | None = None
        self._is_open = True
        self._send: Callable[[Callable[[], None]], None] = in_one_round(lambda request: request())
        self.forget()
        at_fork(self)

    def forget(self) -> None:
        """Make a new lock: a forked child does not have the thread that held it. It writes the files once more."""
        self._lock = threading.RLock()

    def settle(self) -> None:
        """Wait until all files stand. Raises the first failure when all writes have ended, also each later time."""
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
        """Delete all files, best effort, as the change failed for good. ``settle`` raises ``error`` from now on."""
        with self._lock:
            self._end(list(self._pending))
            self._drop(list(self._pending))
            self._failure = self._failure or error
            self._is_open = False
            for path, failure in self.inner.delete_many(list(self._paths)).items():
                logger.warning("could not delete %r of a failed change, which no version names: %s", path, failure)
            self._paths.clear()

    def close(self) -> None:
        """Be a storage like others from now on, as the change has ended."""
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
        self._end([path])
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        if not self._take(path, data, functools.partial(create_fresh_file, self.inner, path, data)):
            self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        if not self._take(path, data, functools.partial(self.inner.write, path, data)):
            self.inner.write(path, data)

    def delete(self, path: str) -> None:
        self._end([path])
        self._drop([path])
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        self._end(paths)
        self._drop(paths)
        return self.inner.delete_batch(paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._end(list(self._pending))
        return self.inner.list(prefix)

    def _take(self, path: str, data: bytes, request: Callable[[], None]) -> bool:
        """Let a thread write a file, if it is one of the change. Returns whether it does."""
        if _FILE_OF_CHANGE.fullmatch(path) is None:
            return False
        with self._lock:
            if not self._is_open:
                return False
            self._paths[path] = None
            self._end([path])
            if self._n_bytes + len(data) > MAX_PENDING_BYTES:
                self._end([path for path, pending in self._pending.items() if pending.write.is_done])
            if self._n_bytes + len(data) > MAX_PENDING_BYTES:
                return False
            self._pending[path] = _Pending(data, Started(functools.partial(self._send, request)))
            self._n_bytes += len(data)
            return True

    def _end(self, paths: Iterable[str]) -> None:
        """Wait until no write of these files is on its way. A failure stays, for ``settle`` to raise it."""
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
