"""The options of the cache, and its files in memory."""

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

#: The bytes of an entry beside its content: the key, and its places in the tables.
ENTRY_OVERHEAD_BYTES = 512
#: An entry may take up to this part of a cache. A larger one would evict too many others.
_LARGEST_SHARE = 8


class ByteLru(Generic[K, V]):
    """Values by key, up to ``capacity_bytes`` in total; a capacity of 0 keeps nothing.

    An entry counts with the size it was put with and ``ENTRY_OVERHEAD_BYTES``. A value that takes more than an eighth
    of the capacity is kept among other large values, up to ``large_bytes`` in total, so that it evicts only these.
    By default it is not kept. A forked child starts with an empty cache.
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
        """The most bytes that are kept."""
        return self._capacity_bytes

    @property
    def size_bytes(self) -> int:
        """The bytes that are kept now, overhead included."""
        return int(self._entries.currsize + self._large.currsize)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        with self._lock:
            entry = self._entries.get(key) or self._large.get(key)
        return None if entry is None else entry[0]

    def put(self, key: K, value: V, size_bytes: int) -> None:
        """Keep a value of that size, if it is not too large."""
        full_size_bytes = size_bytes + ENTRY_OVERHEAD_BYTES
        if full_size_bytes * _LARGEST_SHARE <= self._capacity_bytes:
            with self._lock:
                self._entries[key] = (value, full_size_bytes)
        elif full_size_bytes <= self._large_bytes:
            with self._lock:
                self._large[key] = (value, full_size_bytes)

    def drop(self, key: K) -> bool:
        """Forget a key. Returns whether it was there."""
        with self._lock:
            dropped = self._entries.pop(key, None), self._large.pop(key, None)
        return any(entry is not None for entry in dropped)

    def grow(self, capacity_bytes: int) -> None:
        """Make the capacity at least that large. All kept values stay."""
        with self._lock:
            if capacity_bytes > self._capacity_bytes:
                self._capacity_bytes = capacity_bytes
                smaller, self._entries = self._entries, self._empty(capacity_bytes)
                while smaller:
                    key, entry = smaller.popitem()  # the least recently used first
                    self._entries[key] = entry

    def after_fork_in_child(self) -> None:
        """Start anew. A forked child may have a lock that a thread of its parent held, and half a change."""
        self._lock = threading.Lock()
        self._entries, self._large = self._empty(self._capacity_bytes), self._empty(self._large_bytes)

    def _empty(self, capacity_bytes: int) -> LRUCache[K, tuple[V, int]]:
        return LRUCache(capacity_bytes, getsizeof=lambda entry: entry[1])


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How much is kept in memory, and in which folder on disk (None: in none). A size of 0 bytes turns either off."""

    cache_bytes: int = CACHE_BYTES.value({})
    folder: str | None = None
    folder_bytes: int = CACHE_FOLDER_BYTES.value({})

    @classmethod
    def of(cls, root: str, options: Mapping[str, str]) -> CacheOptions:
        """Return the cache options of a root; other options are ignored.

        Raises InvalidInputError for a value that its option does not accept, and for a folder within the root.
        """
        folder = CACHE_FOLDER.value(options)
        if folder is not None:
            folder = os.path.abspath(os.path.expanduser(folder))
            if f"file://{folder}/".startswith(root):
                raise InvalidInputError(
                    f"storage option {CACHE_FOLDER.name!r} names {folder!r}, which lies within {root}; move it out"
                )
        return cls(CACHE_BYTES.value(options), folder, CACHE_FOLDER_BYTES.value(options))


#: Options that do not decide how a root is reached.
_NOT_OF_THE_STORAGE = {ALLOWED_ROOTS, *(option.name for option in CACHE_OPTIONS)}


def storage_identity(root: str, options: Mapping[str, str]) -> str:
    """Return a hash of a root and of the way to reach it: options and environment, credentials included.

    A file that was read with some credentials is thus not handed out for others, as far as these values differ. A
    change of a client's own files or of the machine's role is not seen.
    """
    reaching = sorted((name, value) for name, value in options.items() if name not in _NOT_OF_THE_STORAGE)
    environment = [os.environ.get(name) for name in environment_of(root)]
    return hashlib.sha256(json.dumps([root, reaching, environment]).encode()).hexdigest()
