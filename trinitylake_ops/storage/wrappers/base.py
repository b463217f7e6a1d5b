"""The base of all wrappers around a storage.

A wrapper overrides the single operations (read, stat, prepare, in_line, create, write, jot, delete, delete_batch, list,
now_ms, expect_clock, is_linked, remove_empty_folders, drop_cached). It leaves ``exists`` and the ``*_many`` methods
alone. These are inherited from Storage and call the single operations of the outermost wrapper. So in
``Retry(Meter(Local))`` as in ``Meter(Retry(Local))`` a ``create_many`` of five files is five creates, and each passes
every wrapper once. In the first stack the meter counts each attempt, in the second each file. Beside the calls,
``parallel.current_round`` tells that they belong to one parallel round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage.interface import FileInfo, Storage


class StorageWrapper(Storage):
    """Hands every operation on to ``inner``. Subclasses override what they change."""

    def __init__(self, inner: Storage):
        self.inner = inner
        self.root = inner.root
        self.concurrency = inner.concurrency
        self.few_reads = inner.few_reads
        self.few_creates = inner.few_creates
        self.prepares = inner.prepares
        self.lists_by_prefix = inner.lists_by_prefix
        self.delete_batch_size = inner.delete_batch_size
        self.whole_file_limit_bytes = inner.whole_file_limit_bytes

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(path, data)

    def prepare(self, path: str, data: bytes) -> None:
        self.inner.prepare(path, data)

    def unprepare(self, data: bytes) -> None:
        self.inner.unprepare(data)

    def in_line(self, longest_s: float) -> AbstractContextManager[bool]:
        return self.inner.in_line(longest_s)

    def write(self, path: str, data: bytes) -> None:
        self.inner.write(path, data)

    def jot(self, path: str, data: bytes) -> None:
        self.write(path, data)  # of a wrapper that knows writes only

    def delete(self, path: str) -> None:
        self.inner.delete(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        return self.inner.delete_batch(paths)

    def is_linked(self, path: str) -> bool:
        return self.inner.is_linked(path)

    def remove_empty_folders(self, paths: Sequence[str]) -> None:
        self.inner.remove_empty_folders(paths)

    def drop_cached(self, path: str) -> bool:
        return self.inner.drop_cached(path)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self.inner.list(prefix)

    def now_ms(self) -> int:
        return self.inner.now_ms()

    def expect_clock(self) -> None:
        self.inner.expect_clock()
