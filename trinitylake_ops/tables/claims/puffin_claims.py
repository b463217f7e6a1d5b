"""Puffin files with deletion vectors, checked before pyiceberg makes lists of their positions.

The library pyiceberg believes the sizes before compressed blobs, and the keys of bitmaps, up to which it fills a list.
It makes one object for each position: a run of 65,536 of them takes four bytes in the file.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import zstandard

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.tables.claims.inflate import inflated_limit_bytes

MAGIC = b"PFA1"
_END_BYTES = 12  # the length of the footer, flags and the magic
_MAX_FOOTER_BYTES = 8 << 20
#: Positions that any file may delete. Each takes 40 bytes in pyiceberg. A file with a bit for each position may have
#: more.
_ALWAYS_ALLOWED_POSITIONS = 6 << 20
_POSITIONS_PER_BYTE = 8
#: Each key stands for four billion rows of one data file.
_MAX_KEY = 1023
_FRAME_BYTES = 8  # the length and the magic before the bitmaps of a vector

_WITH_RUNS, _WITHOUT_RUNS = 12347, 12346
_LARGEST_ARRAY = 4096
_BITSET_BYTES = 8192
_FEW_CONTAINERS = 4  # fewer bitmaps with runs have no offsets


def check_puffin(data: bytes, path: str) -> None:
    """Raise CorruptFileError for a Puffin file if pyiceberg could not read its blobs as deletion vectors in bounds."""
    try:
        positions = sum(_positions(blob) for blob in _blobs(data))
    except (ValueError, KeyError, TypeError, IndexError, struct.error, RecursionError, zstandard.ZstdError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise CorruptFileError(f"{path!r} is no readable Puffin file: {reason}; restore it", path=path) from error
    limit = max(_ALWAYS_ALLOWED_POSITIONS, _POSITIONS_PER_BYTE * len(data))
    if positions > limit:
        raise CorruptFileError(
            f"{path!r} deletes {positions} rows in {len(data)} bytes, more than the {limit} that can be read; let the"
            " program that wrote it rewrite the table's data files without deletion vectors",
            path=path,
        )


def _blobs(data: bytes) -> list[bytes]:
    """Return the blobs of a file as pyiceberg sees them. Raises ValueError and the errors for a wrong type."""
    if len(data) < len(MAGIC) + _END_BYTES or not data.startswith(MAGIC) or not data.endswith(MAGIC):
        raise ValueError("it does not begin and end as one")
    footer_bytes = int.from_bytes(data[-_END_BYTES:-8], "little")
    if footer_bytes > min(len(data) - _END_BYTES, _MAX_FOOTER_BYTES):
        raise ValueError(f"its footer would have {footer_bytes} bytes")
    found: list[bytes] = []
    stored_bytes = plain_bytes = 0
    for blob in json.loads(data[-footer_bytes - _END_BYTES : -_END_BYTES])["blobs"]:
        offset, length = _number(blob["offset"]), _number(blob["length"])
        stored_bytes += length
        if offset + length > len(data) or stored_bytes > len(data):
            raise ValueError("its blobs overlap, or lead out of it")
        raw = data[offset : offset + length]
        plain_bytes += length if blob.get("compression-codec") is None else zstandard.frame_content_size(raw)
        if plain_bytes > inflated_limit_bytes(len(data)):
            raise ValueError("its blobs hold more than its file may")
        found.append(raw if blob.get("compression-codec") is None else zstandard.ZstdDecompressor().decompress(raw))
    return found


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("an offset or length is no number")
    return value


def _positions(blob: bytes) -> int:
    """Return how many positions a deletion vector holds at most. Raises ValueError, struct.error."""
    (n_bitmaps,) = struct.unpack_from("<Q", blob, _FRAME_BYTES)
    at, positions, last = _FRAME_BYTES + 8, 0, -1
    for _ in range(n_bitmaps):
        (key,) = struct.unpack_from("<I", blob, at)
        if not last < key <= _MAX_KEY:
            raise ValueError(f"a bitmap of it has the key {key}")
        held, at = _bitmap(blob, at + 4)
        positions, last = positions + held, key
    return positions


def _bitmap(data: bytes, start: int) -> tuple[int, int]:
    """Return how many positions a roaring bitmap holds, and where it ends. Raises ValueError, struct.error."""
    (cookie,) = struct.unpack_from("<I", data, start)
    at = start + 4
    if cookie & 0xFFFF == _WITH_RUNS:
        n_containers = (cookie >> 16) + 1
        flag_bytes = (n_containers + 7) // 8
        flags = int.from_bytes(data[at : at + flag_bytes], "little")
        at += flag_bytes
    elif cookie == _WITHOUT_RUNS:
        (n_containers,) = struct.unpack_from("<I", data, at)
        flags, at = 0, at + 4
    else:
        raise ValueError("a bitmap of it does not begin as one")
    if n_containers > 1 << 16:
        raise ValueError(f"a bitmap of it would have {n_containers} containers")
    counts = struct.unpack_from(f"<{2 * n_containers}H", data, at)[1::2]
    at += 4 * n_containers
    if not flags or n_containers >= _FEW_CONTAINERS:
        at += 4 * n_containers
    positions = 0
    for number, count in enumerate(counts):
        held, size_bytes = _container(data, at, count + 1, is_run=bool(flags >> number & 1))
        positions, at = positions + held, at + size_bytes
    if at > len(data):
        raise ValueError("a bitmap of it leads out of it")
    return positions, at


def _container(data: bytes, at: int, count: int, *, is_run: bool) -> tuple[int, int]:
    """Return how many positions a container holds, and its size in bytes."""
    if not is_run:
        return count, 2 * count if count <= _LARGEST_ARRAY else _BITSET_BYTES
    (n_runs,) = struct.unpack_from("<H", data, at)
    lengths = struct.unpack_from(f"<{2 * n_runs}H", data, at + 2)[1::2]
    return sum(lengths) + n_runs, 2 + 4 * n_runs
