"""Bounds for files that are read whole, by their kinds, whoever wrote them (docs/threat-model.md).

Nodes, roots and all files without a bound here have the storage's bound: 256 MiB unless its options say more.
"""

from __future__ import annotations

from trinitylake_ops.errors import CorruptFileError

#: A lease, an owner file, the orphan barrier: a few texts and numbers.
MAX_NOTE_BYTES = 1 << 20
#: A definition: decoded, each of its parts takes a hundred times as much memory.
MAX_DEFINITION_BYTES = 64 << 20
#: A plan, the manifest of an export or a record of verified files: a line for each of millions of files.
MAX_FILE_LIST_BYTES = 1 << 30

#: Values that any JSON file of an operation may hold, and bytes for each one more.
_ALWAYS_ALLOWED_VALUES = 1_000_000
_BYTES_PER_VALUE = 16


def check_definition_size(size_bytes: int, path: str) -> None:
    """Raise CorruptFileError for a definition that is too large to be one."""
    if size_bytes > MAX_DEFINITION_BYTES:
        raise CorruptFileError(
            f"{path!r} has {size_bytes} bytes, and no definition more than {MAX_DEFINITION_BYTES}; restore it",
            path=path,
        )


def check_json_values(data: bytes, path: str) -> None:
    """Raise CorruptFileError for JSON with more values than a file of its size has. Each value takes tens of bytes."""
    # A count of the separators of values, also of those in strings, costs next to nothing.
    n_values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    limit = _ALWAYS_ALLOWED_VALUES + len(data) // _BYTES_PER_VALUE
    if n_values > limit:
        raise CorruptFileError(
            f"{path!r} holds {n_values} values, and no file of {len(data)} bytes more than {limit}; restore it",
            path=path,
        )
