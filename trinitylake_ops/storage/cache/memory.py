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
from trinitylake_ops.storage.options import ALLOWED_ROOTS, quoted
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


CACHE_BYTES = "cache_bytes"
CACHE_FOLDER = "cache_folder"
CACHE_FOLDER_BYTES = "cache_folder_bytes"

#: Options that every root takes, and that no storage looks at.
CACHE_OPTIONS = frozenset({CACHE_BYTES, CACHE_FOLDER, CACHE_FOLDER_BYTES})

DEFAULT_CACHE_BYTES = 256 * 1024 * 1024
DEFAULT_CACHE_FOLDER_BYTES = 1024 * 1024 * 1024

_LONGEST_NUMBER_CHARS = 18


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How much is kept in memory, and in which folder on disk (None: in none). A size of 0 bytes turns either off."""

    cache_bytes: int = DEFAULT_CACHE_BYTES
    folder: str | None = None
    folder_bytes: int = DEFAULT_CACHE_FOLDER_BYTES

    @classmethod
    def of(cls, root: str, options: Mapping[str, str]) -> CacheOptions:
        """Return the cache options of a root; other options are ignored.

        Raises InvalidInputError for a size that is no whole number of bytes. Raises it also for a folder that is empty,
        holds a NUL, or lies within the root.
        """
        return cls(
            _size_bytes(options, CACHE_BYTES, DEFAULT_CACHE_BYTES),
            _folder(root, options),
            _size_bytes(options, CACHE_FOLDER_BYTES, DEFAULT_CACHE_FOLDER_BYTES),
        )


def storage_identity(root: str, options: Mapping[str, str]) -> str:
    """Return a hash of a root and of the way to reach it: options and environment, credentials included.

    A file that was read with some credentials is thus not handed out for others, as far as these values differ. A
    change of a client's own files or of the machine's role is not seen.
    """
    reaching = sorted(
        (name, value) for name, value in options.items() if name not in CACHE_OPTIONS and name != ALLOWED_ROOTS
    )
    environment = [os.environ.get(name) for name in environment_of(root)]
    return hashlib.sha256(json.dumps([root, reaching, environment]).encode()).hexdigest()


def _size_bytes(options: Mapping[str, str], name: str, default: int) -> int:
    value = options.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal() and len(value) <= _LONGEST_NUMBER_CHARS):
        raise InvalidInputError(
            f"storage option {name!r} must be a whole number of bytes, 0 or more, not {quoted(value)}"
        )
    return int(value)


def _folder(root: str, options: Mapping[str, str]) -> str | None:
    value = options.get(CACHE_FOLDER)
    if value is None:
        return None
    if not value or "\0" in value:
        raise InvalidInputError(f"storage option {CACHE_FOLDER!r} must name a folder, not {value!r}")
    folder = os.path.abspath(os.path.expanduser(value))
    if f"file://{folder}/".startswith(root):
        raise InvalidInputError(
            f"storage option {CACHE_FOLDER!r} names {folder!r}, which lies within {root}; move it out"
        )
    return folder
