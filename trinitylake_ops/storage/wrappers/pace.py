"""Keeping requests at a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from trinitylake_ops.errors import InvalidInputError, StorageError
from trinitylake_ops.storage.fork import at_fork
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.wrappers.base import StorageWrapper


class PacedStorage(StorageWrapper):
    """Sends at most so many requests a second, evenly spread. A request that comes too early waits.

    A listing counts once, however many pages it has, and ``now_ms`` not at all. Under a RetryStorage each attempt
    counts. A pickled copy keeps a rate of its own. Raises InvalidInputError for a rate that is not above 0.
    """

    def __init__(self, inner: Storage, requests_per_second: float):
        if not requests_per_second > 0:
            raise InvalidInputError(f"the rate is {requests_per_second!r} requests a second, it must be above 0")
        super().__init__(inner)
        self.requests_per_second = requests_per_second
        self._next_s = 0.0
        self.forget()
        at_fork(self)

    def forget(self) -> None:
        """Make a new lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self._wait()
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        self._wait()
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        self._wait()
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self._wait()
        self.inner.write(path, data)

    def jot(self, path: str, data: bytes) -> None:
        self._wait()
        self.inner.jot(path, data)

    def delete(self, path: str) -> None:
        self._wait()
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        self._wait()
        return self.inner.delete_batch(paths)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._wait()
        return self.inner.list(prefix)

    def __reduce__(self) -> tuple[type[PacedStorage], tuple[Storage, float]]:
        return (PacedStorage, (self.inner, self.requests_per_second))

    def _wait(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            due_s = max(self._next_s, now_s)
            self._next_s = due_s + 1 / self.requests_per_second
        if due_s > now_s:
            time.sleep(due_s - now_s)
