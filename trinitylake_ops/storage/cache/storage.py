"""A cache over files that never change: in memory for the process, and in a folder for all of them.

The caller says which files never change. All other files pass by. There is one memory cache in a process, bounded in
total. Storages that are reached in the same way (same root, same options) share its files. A private storage shares
with nobody.
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
    """Whole files in memory.

    The least recently used ones are evicted, and threads that miss a file together share one read.
    """

    def __init__(self, capacity_bytes: int):
        self._files: ByteLru[_Key, bytes] = ByteLru(capacity_bytes)
        self.after_fork_in_child()
        at_fork(self)

    @property
    def size_bytes(self) -> int:
        """The bytes that are kept now."""
        return self._files.size_bytes

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that are kept."""
        return self._files.capacity_bytes

    @property
    def n_dropped(self) -> int:
        """How often a file was dropped. A thread with bytes from before a drop must not put them."""
        return self._n_dropped

    def grow(self, capacity_bytes: int) -> None:
        """Make the capacity at least that large."""
        self._files.grow(capacity_bytes)

    def get(self, identity: str, path: str) -> bytes | None:
        """Return a file, or None."""
        return self._files.get((identity, path))

    def put(self, identity: str, path: str, data: bytes, n_dropped: int) -> None:
        """Keep a file, unless a file, perhaps this one, was dropped since ``n_dropped`` was looked up."""
        with self._lock:
            if n_dropped == self._n_dropped:
                self._files.put((identity, path), data, len(data) + len(path))

    def drop(self, identity: str, path: str) -> bool:
        """Forget a file, and the results of reads on their way. Returns whether it was kept."""
        with self._lock:
            self._n_dropped += 1
            self._reads.pop((identity, path), None)
            return self._files.drop((identity, path))

    def get_or_read(self, identity: str, path: str, read: Callable[[], bytes]) -> bytes:
        """Return a file, by ``read`` if it is not kept. Threads that miss it together wait for one read.

        When that read fails, each thread that waited reads by itself. Raises what ``read`` raises.
        """
        data = self.get(identity, path)
        if data is not None:
            return data
        own = _Read()
        with self._lock:
            running = self._reads.setdefault((identity, path), own)
            n_dropped = self._n_dropped
        if running is not own:
            running.has_ended.wait()
            return read() if running.data is None else running.data
        try:
            own.data = self.get(identity, path)  # another thread may have put it between the two looks
            if own.data is None:
                own.data = read()
                self.put(identity, path, own.data, n_dropped)
            return own.data
        finally:
            with self._lock:
                if self._reads.get((identity, path)) is own:
                    del self._reads[identity, path]
            own.has_ended.set()

    def after_fork_in_child(self) -> None:
        """Forget everything."""
        self._lock = threading.Lock()
        self._reads: dict[_Key, _Read] = {}
        self._n_dropped = 0
        self._files.after_fork_in_child()


class _Read:
    """A read on its way, and its result: None while it runs, and when it failed."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.data: bytes | None = None


class CacheStorage(StorageWrapper):
    """Serves whole files for which ``is_immutable(path)`` holds from a cache, and keeps those it reads or creates.

    ``identity`` distinguishes the storage from others in the same cache. Everything else passes: other files, ``stat``,
    ``exists`` and lists, which show the storage itself. Overwriting or deleting a file here drops its copy. A file that
    another process deletes stays readable here. A copy of an immutable file is never wrong, but it does not prove that
    the file is there.
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
        self._cache = cache
        self._identity = identity
        self._folder = folder

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if not self._is_immutable(path):
            return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        if hub.is_heard():
            hub.add(CACHE_READS, source="memory" if self._cache.get(self._identity, path) is not None else "elsewhere")
        if offset == 0 and length is None:
            data = self._cache.get_or_read(self._identity, path, lambda: self._read_whole(path, limit_bytes))
            self._check_size(path, len(data), length, limit_bytes)
            return data
        check_range(path, offset, length)
        kept, n_dropped = self._cache.get(self._identity, path), self._cache.n_dropped
        if kept is None:
            data = self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
            if offset == 0 and length is not None and len(data) < length:  # it is the whole file
                self._cache.put(self._identity, path, data, n_dropped)
            return data
        self._check_size(path, len(kept) - offset, length, limit_bytes)
        return kept[offset : None if length is None else offset + length]

    def create(self, path: str, data: bytes) -> None:
        """Create a file. Once it certainly exists it is kept too, for the next reader."""
        if not self._is_immutable(path):
            self.inner.create(path, data)
            return
        body, n_dropped = bytes(data), self._cache.n_dropped
        self.inner.create(path, body)
        self._cache.put(self._identity, path, body, n_dropped)
        self._put_in_folder(path, body, n_dropped)

    def keep(self, path: str, data: bytes) -> None:
        """Keep an immutable file in memory that certainly exists, as it was created past this storage."""
        self._cache.put(self._identity, path, data, self._cache.n_dropped)

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
        was_in_memory = self._cache.drop(self._identity, path)
        was_in_folder = self._folder is not None and self._folder.drop(self._identity, path)
        return was_in_memory or was_in_folder or was_below

    def on(self, inner: Storage) -> CacheStorage:
        """Return a storage with the same cache on one that wraps this one's, such as one that counts."""
        return CacheStorage(inner, self._is_immutable, self._cache, self._identity, self._folder)

    def __reduce__(self) -> tuple[object, ...]:
        folder = None if self._folder is None else (self._folder.folder, self._folder.limit_bytes)
        return (_cache_storage, (self.inner, self._is_immutable, self._cache.capacity_bytes, self._identity, folder))

    def _read_whole(self, path: str, limit_bytes: int | None) -> bytes:
        if self._folder is None:
            return self.inner.read(path, limit_bytes=limit_bytes)
        data = self._folder.get(self._identity, path)
        if data is None:
            n_dropped = self._cache.n_dropped
            data = self.inner.read(path, limit_bytes=limit_bytes)
            self._put_in_folder(path, data, n_dropped)
        return data

    def _put_in_folder(self, path: str, data: bytes, n_dropped: int) -> None:
        if self._folder is not None and n_dropped == self._cache.n_dropped:
            self._folder.put(self._identity, path, data)


def decoded(storage: Storage, path: str, data: bytes, decode: Callable[[bytes, str], T]) -> T:
    """Decode the bytes of an immutable file. Bytes from a cache that do not decode are read once more.

    Bytes that were damaged on their way here may be whole in the storage. Raises CorruptFileError, StorageError.
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
    """Return a storage with the cache of all that open the same root with the same options.

    Raises InvalidInputError for options of the cache that make no sense.
    """
    options = options or {}
    chosen = CacheOptions.of(storage.root, options)
    return _view(storage, is_immutable, chosen, storage_identity(storage.root, options))


def private_cache_view(
    storage: Storage, is_immutable: Callable[[str], bool], options: Mapping[str, str] | None = None
) -> Storage:
    """Return a storage with a part of the process's cache for itself, and no folder.

    Raises InvalidInputError for options of the cache that make no sense.
    """
    chosen = replace(CacheOptions.of(storage.root, options or {}), folder=None)
    return _view(storage, is_immutable, chosen, uuid.uuid4().hex)


def clear_process_caches() -> None:
    """Free the files that the process keeps in memory, and forget the cache's size. Folders stay.

    This is for a process that goes on after it is done with its lakehouses. A lakehouse that is still in use works on.
    Its cache is no longer shared or counted with those opened later.
    """
    global _process_cache  # noqa: PLW0603 - the one cache of the process
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
    """Build a view on the caches of this process, also for a storage that another one pickled.

    The memory cache has the largest capacity that any of its views asked for. A capacity of 0 is a cache apart.
    """
    cache = _process_cache if capacity_bytes > 0 else FileCache(0)
    cache.grow(capacity_bytes)
    on_disk = None if folder is None else _folders.setdefault(folder, CacheFolder(*folder))
    return CacheStorage(storage, is_immutable, cache, identity, on_disk)


_process_cache = FileCache(0)
_folders: dict[tuple[str, int], CacheFolder] = {}
