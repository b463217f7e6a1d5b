"""A cache for immutable files: in the memory of the process, and optionally in a folder that processes share.

The caller decides which files are immutable; all other files bypass the cache. Each process has one memory cache with
one size limit. Storages with the same identity (same root and options) share its files. A private view does not share
files.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from trinitylake_ops.errors import CorruptFileError, StorageError
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.cache.folder import CacheFolder
from trinitylake_ops.storage.cache.memory import ByteLru, CacheOptions, storage_identity
from trinitylake_ops.storage.interface import Storage, StorageWrapper
from trinitylake_ops.storage.paths import check_range
from trinitylake_ops.telemetry import hub
from trinitylake_ops.telemetry.hub import CACHE_READS

T = TypeVar("T")

#: Identity of the storage, and path below its root.
_Key: TypeAlias = tuple[str, str]


class FileCache:
    """An LRU cache of whole files in memory. Threads that miss the same file concurrently share one read."""

    def __init__(self, capacity_bytes: int):
        self._files: ByteLru[_Key, bytes] = ByteLru(capacity_bytes)
        self.after_fork_in_child()
        at_fork(self)

    @property
    def size_bytes(self) -> int:
        """Current size of the cache in bytes."""
        return self._files.size_bytes

    @property
    def capacity_bytes(self) -> int:
        """Maximum size of the cache in bytes."""
        return self._files.capacity_bytes

    @property
    def n_dropped(self) -> int:
        """Number of drops so far. Bytes that were read before a drop must not be cached after the drop."""
        return self._n_dropped

    def grow(self, capacity_bytes: int) -> None:
        """Increase the capacity to at least ``capacity_bytes``."""
        self._files.grow(capacity_bytes)

    def get(self, identity: str, path: str) -> bytes | None:
        """Return a cached file, or None.

        Args:
            identity: The identity of the storage that contains the file.
            path: The path of the file in that storage.
        """
        return self._files.get((identity, path))

    def put(self, identity: str, path: str, data: bytes, n_dropped: int) -> None:
        """Cache a file, unless any file was dropped since it was read.

        Args:
            identity: The identity of the storage that contains the file.
            path: The path of the file in that storage.
            data: The content of the file.
            n_dropped: The value of :attr:`n_dropped` before the file was read.
        """
        with self._lock:
            if n_dropped == self._n_dropped:
                self._files.put((identity, path), data, len(data) + len(path))

    def drop(self, identity: str, path: str) -> bool:
        """Remove a file, and discard the results of reads in progress.

        Args:
            identity: The identity of the storage that contains the file.
            path: The path of the file in that storage.

        Returns:
            Whether the file was cached.
        """
        with self._lock:
            self._n_dropped += 1
            self._reads.pop((identity, path), None)
            return self._files.drop((identity, path))

    def get_or_read(self, identity: str, path: str, read: Callable[[], bytes]) -> bytes:
        """Return a cached file, or read and cache it. Threads that miss the same file concurrently share one read.

        If the shared read fails, each waiting thread reads the file itself. Errors of ``read`` are raised unchanged.

        Args:
            identity: The identity of the storage that contains the file.
            path: The path of the file in that storage.
            read: Reads the file from the storage.
        """
        data = self.get(identity, path)
        if data is not None:
            return data
        new_read = _Read()
        with self._lock:
            running = self._reads.setdefault((identity, path), new_read)
            n_dropped = self._n_dropped
        if running is not new_read:
            running.has_ended.wait()
            return read() if running.data is None else running.data
        try:
            new_read.data = self.get(identity, path)  # another thread may have cached it since the first check
            if new_read.data is None:
                new_read.data = read()
                self.put(identity, path, new_read.data, n_dropped)
            return new_read.data
        finally:
            with self._lock:
                if self._reads.get((identity, path)) is new_read:
                    del self._reads[identity, path]
            new_read.has_ended.set()

    def after_fork_in_child(self) -> None:
        """Reset all state in a forked child."""
        self._lock = threading.Lock()
        self._reads: dict[_Key, _Read] = {}
        self._n_dropped = 0
        self._files.after_fork_in_child()


class _Read:
    """A read in progress. ``data`` is None until the read succeeds."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.data: bytes | None = None


class CacheStorage(StorageWrapper):
    """Caches immutable files that are read or created through it.

    Other files, ``stat``, ``exists`` and listings always go to the storage. Overwriting or deleting a file through this
    storage drops its copy. A file that another process deletes remains readable here: the cached content of an
    immutable file is never wrong, but it does not prove that the file still exists.

    Args:
        inner: The storage to read from.
        is_immutable: Returns whether the file at a path never changes.
        cache: The cache in memory.
        identity: Distinguishes this storage from other storages that use the same cache.
        folder: The cache on disk, if any.
    """

    def __init__(
        self,
        inner: Storage,
        is_immutable: Callable[[str], bool],
        cache: FileCache,
        identity: str,
        folder: CacheFolder | None = None,
    ):
        super().__init__(inner)
        self._is_immutable = is_immutable
        self.cache = cache
        self._identity = identity
        self._folder = folder

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if not self._is_immutable(path):
            return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        if hub.is_heard():
            hub.add(CACHE_READS, source="memory" if self.cache.get(self._identity, path) is not None else "elsewhere")
        if offset == 0 and length is None:
            data = self.cache.get_or_read(self._identity, path, lambda: self._read_whole(path, limit_bytes))
            self._check_size(path, len(data), length, limit_bytes)
            return data
        check_range(path, offset, length)
        cached, n_dropped = self.cache.get(self._identity, path), self.cache.n_dropped
        if cached is None:
            data = self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
            if offset == 0 and length is not None and len(data) < length:  # the range covers the whole file
                self.cache.put(self._identity, path, data, n_dropped)
            return data
        self._check_size(path, len(cached) - offset, length, limit_bytes)
        return cached[offset : None if length is None else offset + length]

    def create(self, path: str, data: bytes) -> None:
        """Create a file, and cache it for the next reader after the create has succeeded."""
        if not self._is_immutable(path):
            self.inner.create(path, data)
            return
        body, n_dropped = bytes(data), self.cache.n_dropped
        self.inner.create(path, body)
        self.cache.put(self._identity, path, body, n_dropped)
        self._put_in_folder(path, body, n_dropped)

    def keep(self, path: str, data: bytes) -> None:
        """Cache in memory an immutable file that was created through another storage object and is known to exist.

        Args:
            path: The path of the file.
            data: The content of the file.
        """
        self.cache.put(self._identity, path, data, self.cache.n_dropped)

    def write(self, path: str, data: bytes) -> None:
        try:
            self.inner.write(path, data)
        finally:
            self.drop_cached(path)

    def delete(self, path: str) -> None:
        try:
            self.inner.delete(path)
        finally:
            self.drop_cached(path)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        try:
            return self.inner.delete_batch(paths)
        finally:
            for path in paths:
                self.drop_cached(path)

    def drop_cached(self, path: str) -> bool:
        was_below = self.inner.drop_cached(path)
        if not self._is_immutable(path):
            return was_below
        was_in_memory = self.cache.drop(self._identity, path)
        was_in_folder = self._folder is not None and self._folder.drop(self._identity, path)
        return was_in_memory or was_in_folder or was_below

    def on(self, inner: Storage) -> CacheStorage:
        """Return a storage with the same cache on top of ``inner``, for example a metered wrapper of this storage."""
        return CacheStorage(inner, self._is_immutable, self.cache, self._identity, self._folder)

    def __reduce__(self) -> tuple[object, ...]:
        folder = None if self._folder is None else (self._folder.folder, self._folder.limit_bytes)
        return (_cache_storage, (self.inner, self._is_immutable, self.cache.capacity_bytes, self._identity, folder))

    def _read_whole(self, path: str, limit_bytes: int | None) -> bytes:
        if self._folder is None:
            return self.inner.read(path, limit_bytes=limit_bytes)
        data = self._folder.get(self._identity, path)
        if data is None:
            n_dropped = self.cache.n_dropped
            data = self.inner.read(path, limit_bytes=limit_bytes)
            self._put_in_folder(path, data, n_dropped)
        return data

    def _put_in_folder(self, path: str, data: bytes, n_dropped: int) -> None:
        if self._folder is not None and n_dropped == self.cache.n_dropped:
            self._folder.put(self._identity, path, data)


def decoded(storage: Storage, path: str, data: bytes, decode: Callable[[bytes, str], T]) -> T:
    """Decode the bytes of an immutable file. If cached bytes do not decode, read the file once more.

    The file in the storage may be intact even if the cached bytes were damaged in transit.

    Args:
        storage: The storage that the bytes were read from.
        path: The path of the file.
        data: The bytes that were read.
        decode: Decodes bytes; the second argument is the path, for error messages.

    Raises:
        CorruptFileError: The file in the storage is damaged.
        StorageError: The second read failed.
    """
    try:
        return decode(data, path)
    except CorruptFileError:
        if not storage.drop_cached(path):
            raise
    try:
        return decode(storage.read(path), path)
    except CorruptFileError:
        storage.drop_cached(path)
        raise


def shared_cache_view(
    storage: Storage, is_immutable: Callable[[str], bool], options: Mapping[str, str] | None = None
) -> Storage:
    """Return a view of a storage that shares cached files with all views of the same root and options.

    Args:
        storage: The storage to read from.
        is_immutable: Returns whether the file at a path never changes.
        options: Storage options, including cache options.

    Raises:
        InvalidInputError: A cache option is invalid.
    """
    options = options or {}
    chosen = CacheOptions.of(storage.root, options)
    return _view(storage, is_immutable, chosen, storage_identity(storage.root, options))


def private_cache_view(
    storage: Storage, is_immutable: Callable[[str], bool], options: Mapping[str, str] | None = None
) -> Storage:
    """Return a view of a storage that uses the memory cache of the process without sharing files, and no folder.

    Args:
        storage: The storage to read from.
        is_immutable: Returns whether the file at a path never changes.
        options: Storage options, including cache options.

    Raises:
        InvalidInputError: A cache option is invalid.
    """
    chosen = replace(CacheOptions.of(storage.root, options or {}), folder=None)
    return _view(storage, is_immutable, chosen, uuid.uuid4().hex)


def clear_process_caches() -> None:
    """Release all files that the process caches in memory, and reset the size of the cache. Folders are kept.

    Use this in a process that continues after it has finished with its lakehouses. A lakehouse that is still in use
    keeps working, but lakehouses that are opened later do not share its cache or its size limit.
    """
    global _process_cache  # noqa: PLW0603 - the process has a single cache
    _process_cache.after_fork_in_child()
    _process_cache = FileCache(0)
    _folders.clear()


def _view(storage: Storage, is_immutable: Callable[[str], bool], chosen: CacheOptions, identity: str) -> Storage:
    folder = None
    if chosen.folder is not None and chosen.folder_bytes > 0:
        folder = (chosen.folder, chosen.folder_bytes)
    if chosen.cache_bytes == 0 and folder is None:
        return storage
    return _cache_storage(storage, is_immutable, chosen.cache_bytes, identity, folder)


def _cache_storage(
    storage: Storage,
    is_immutable: Callable[[str], bool],
    capacity_bytes: int,
    identity: str,
    folder: tuple[str, int] | None,
) -> CacheStorage:
    """Build a view of this process's caches. Also used to unpickle a storage from another process.

    The memory cache has the largest capacity that any of its views requested. With a capacity of 0, the view does not
    use the memory cache of the process.
    """
    cache = _process_cache if capacity_bytes > 0 else FileCache(0)
    cache.grow(capacity_bytes)
    on_disk = None if folder is None else _folders.setdefault(folder, CacheFolder(*folder))
    return CacheStorage(storage, is_immutable, cache, identity, on_disk)


_process_cache = FileCache(0)
_folders: dict[tuple[str, int], CacheFolder] = {}
