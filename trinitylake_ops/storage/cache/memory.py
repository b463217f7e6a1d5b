"""The cache options, and a size-bounded LRU map for cached values in memory."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.options import ALLOWED_ROOTS, CACHE_BYTES, CACHE_FOLDER, CACHE_FOLDER_BYTES, CACHE_OPTIONS
from trinitylake_ops.storage.registry import environment_of

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: Memory that an entry uses in addition to its value: its key and its hash table entries.
ENTRY_OVERHEAD_BYTES = 512
#: An entry may take up to ``1 / _LARGEST_SHARE`` of the capacity. A larger entry would evict too many other entries.
_LARGEST_SHARE = 8


class ByteLru(Generic[K, V]):
    """An LRU map that is bounded by the size of its values. A forked child starts with an empty map.

    The size of an entry is the size passed by the caller plus ``ENTRY_OVERHEAD_BYTES``. Values larger than one eighth
    of the capacity are kept separately, so that they evict only other large values.

    Args:
        capacity_bytes: Maximum size of all entries except large values. 0 disables the map.
        large_bytes: Maximum size of all large values. By default, large values are not kept.
    """

    def __init__(self, capacity_bytes: int, large_bytes: int = 0):
        self._capacity_bytes = capacity_bytes
        self._large_bytes = large_bytes
        self._lock = threading.Lock()
        self._entries = self._empty(capacity_bytes)
        self._large = self._empty(large_bytes)
        at_fork(self)

    @property
    def capacity_bytes(self) -> int:
        """Maximum size of all entries except large values, in bytes."""
        return self._capacity_bytes

    @property
    def size_bytes(self) -> int:
        """Current size of all entries in bytes, including overhead."""
        return int(self._entries.currsize + self._large.currsize)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        with self._lock:
            entry = self._entries.get(key) or self._large.get(key)
        return None if entry is None else entry[0]

    def put(self, key: K, value: V, size_bytes: int) -> None:
        """Add a value, unless it is too large.

        Args:
            key: The key of the value. An existing value is replaced.
            value: The value.
            size_bytes: The size of the value.
        """
        full_size_bytes = size_bytes + ENTRY_OVERHEAD_BYTES
        if full_size_bytes * _LARGEST_SHARE <= self._capacity_bytes:
            with self._lock:
                self._entries[key] = (value, full_size_bytes)
        elif full_size_bytes <= self._large_bytes:
            with self._lock:
                self._large[key] = (value, full_size_bytes)

    def drop(self, key: K) -> bool:
        """Remove a key. Return whether it existed."""
        with self._lock:
            dropped = self._entries.pop(key, None), self._large.pop(key, None)
        return any(entry is not None for entry in dropped)

    def grow(self, capacity_bytes: int) -> None:
        """Increase the capacity to at least ``capacity_bytes``. No value is evicted."""
        with self._lock:
            if capacity_bytes > self._capacity_bytes:
                self._capacity_bytes = capacity_bytes
                smaller, self._entries = self._entries, self._empty(capacity_bytes)
                while smaller:
                    key, entry = smaller.popitem()  # the least recently used first
                    self._entries[key] = entry

    def after_fork_in_child(self) -> None:
        """Reset the map: a forked child may inherit a held lock and a partial update from its parent."""
        self._lock = threading.Lock()
        self._entries, self._large = self._empty(self._capacity_bytes), self._empty(self._large_bytes)

    def _empty(self, capacity_bytes: int) -> LRUCache[K, tuple[V, int]]:
        return LRUCache(capacity_bytes, getsizeof=lambda entry: entry[1])


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sizes and location of the cache."""

    #: Maximum size of the cache in memory. 0 disables it.
    cache_bytes: int = CACHE_BYTES.value({})
    #: Absolute path of the folder for the cache on disk, or None if there is no cache on disk.
    folder: str | None = None
    #: Maximum size of the cache on disk. 0 disables it.
    folder_bytes: int = CACHE_FOLDER_BYTES.value({})

    @classmethod
    def of(cls, root: str, options: Mapping[str, str]) -> CacheOptions:
        """Parse the cache options of a root.

        Args:
            root: The URI of the lakehouse root.
            options: Storage options. Options that do not configure the cache are ignored.

        Raises:
            InvalidInputError: A value is invalid, or the cache folder is inside the root.
        """
        folder = CACHE_FOLDER.value(options)
        if folder is not None:
            folder = os.path.abspath(os.path.expanduser(folder))
            if f"file://{folder}/".startswith(root):
                raise InvalidInputError(
                    f"storage option {CACHE_FOLDER.name!r} is {folder!r}, which is inside the lakehouse root {root};"
                    " choose a folder outside the root"
                )
        return cls(CACHE_BYTES.value(options), folder, CACHE_FOLDER_BYTES.value(options))


#: Options that do not affect how a root is accessed.
_ENGINE_OPTIONS = {ALLOWED_ROOTS, *(option.name for option in CACHE_OPTIONS)}


def storage_identity(root: str, options: Mapping[str, str]) -> str:
    """Return a hash of a root and of how it is accessed: options and environment variables, including credentials.

    A file that was read with one set of credentials is therefore not returned for another set, if these values differ.
    Changes to the configuration files of a client library or to the role of the machine are not detected.

    Args:
        root: The URI of the root.
        options: The storage options of the root.
    """
    connection_options = sorted((name, value) for name, value in options.items() if name not in _ENGINE_OPTIONS)
    environment = [os.environ.get(name) for name in environment_of(root)]
    return hashlib.sha256(json.dumps([root, connection_options, environment]).encode()).hexdigest()
