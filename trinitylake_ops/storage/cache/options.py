"""The options of a root that say how its immutable files are cached."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.options import ALLOWED_ROOTS, quoted
from trinitylake_ops.storage.schemes import environment_of

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
