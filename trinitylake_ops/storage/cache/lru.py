"""A least-recently-used cache bounded by bytes, safe for threads and across forks."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from cachetools import LRUCache

from trinitylake_ops.storage.fork import at_fork

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

    def forget(self) -> None:
        """Start anew. A forked child may have a lock that a thread of its parent held, and half a change."""
        self._lock = threading.Lock()
        self._entries, self._large = self._empty(self._capacity_bytes), self._empty(self._large_bytes)

    def _empty(self, capacity_bytes: int) -> LRUCache[K, tuple[V, int]]:
        return LRUCache(capacity_bytes, getsizeof=lambda entry: entry[1])
