"""Parse the end of an ORC file with the declared sizes of its stripes.

Only the required parts of protobuf and of ORC's compression are implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import zstandard

from trinitylake_ops.iceberg.validation.inflate import InflatedTooLargeError, inflate_deflate

_MAGIC = b"ORC"
#: Maximum block size, because the lengths of ORC's chunks have 23 bits.
_MAX_BLOCK_BYTES = 8 << 20
_MAX_INFLATED_BYTES = 64 << 20
# Fields of PostScript, Footer and StripeInformation.
_FOOTER_BYTES, _COMPRESSION, _BLOCK_BYTES, _METADATA_BYTES = 1, 2, 3, 5
_STRIPES = 3
_STORED_FIELDS, _ROWS = (2, 3, 4), 5


@dataclass(frozen=True, slots=True)
class OrcStripe:
    """The declared size of a stripe."""

    rows: int
    #: Size in the file.
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class OrcTail:
    """The contents of the end of an ORC file."""

    stripes: tuple[OrcStripe, ...]

    @staticmethod
    def bytes_of(end: bytes) -> int:
        """Return the size in bytes of an ORC file's postscript and footer, or 0 for another file."""
        script_bytes = end[-1] if end else 0
        if not script_bytes or end[-1 - len(_MAGIC) : -1] != _MAGIC:
            return 0
        try:
            script = _numbers(end[-1 - script_bytes : -1])
        except ValueError:
            return 0
        return 1 + script_bytes + script.get(_FOOTER_BYTES, 0) + script.get(_METADATA_BYTES, 0)

    @classmethod
    def parse(cls, end: bytes) -> Self:
        """Parse the last bytes of a file, which must include at least the bytes that ``bytes_of`` counts.

        Raises ValueError and the errors of decompressors, including for a footer of more than 64 MiB.
        """
        script_bytes = end[-1]
        script = _numbers(end[-1 - script_bytes : -1])
        block_bytes = script.get(_BLOCK_BYTES, 0)
        if block_bytes > _MAX_BLOCK_BYTES:
            raise ValueError(f"its blocks have {block_bytes} bytes, more than the maximum of {_MAX_BLOCK_BYTES}")
        last = len(end) - 1 - script_bytes
        footer = end[last - script.get(_FOOTER_BYTES, 0) : last]
        plain = _decompress(footer, script.get(_COMPRESSION, 0), block_bytes)
        messages = (value for number, value in _fields(plain) if number == _STRIPES and isinstance(value, bytes))
        return cls(tuple(map(_stripe, messages)))


def _stripe(message: bytes) -> OrcStripe:
    numbers = _numbers(message)
    return OrcStripe(numbers.get(_ROWS, 0), sum(numbers.get(field, 0) for field in _STORED_FIELDS))


def _decompress(data: bytes, codec: int, block_bytes: int) -> bytes:
    """Decompress a section of a file, which consists of chunks of at most one block each."""
    if not codec:
        return data
    pieces: list[bytes] = []
    held_bytes = at = 0
    while at < len(data):
        head = int.from_bytes(data[at : at + 3], "little")
        at += 3
        chunk = data[at : at + (head >> 1)]
        at += head >> 1
        if not head & 1:
            chunk = _CODECS[codec](chunk, block_bytes)
        held_bytes += len(chunk)
        if held_bytes > _MAX_INFLATED_BYTES:
            raise InflatedTooLargeError("its footer is larger than any file's")
        pieces.append(chunk)
    return b"".join(pieces)


def _inflate_snappy(data: bytes, limit_bytes: int) -> bytes:
    claimed_bytes, _ = _varint(data, 0)
    if claimed_bytes > limit_bytes:
        raise InflatedTooLargeError("a block is larger than declared")
    return bytes(pa.Codec("snappy").decompress(data, claimed_bytes, asbytes=True))


def _inflate_zstandard(data: bytes, limit_bytes: int) -> bytes:
    if zstandard.frame_content_size(data) > limit_bytes:
        raise InflatedTooLargeError("a block is larger than declared")
    return zstandard.ZstdDecompressor(max_window_size=_MAX_BLOCK_BYTES).decompress(data, limit_bytes)


def _inflate_lz4(data: bytes, limit_bytes: int) -> bytes:
    # The length is not stored. The rest of the buffer contains zeros, which do not start a field.
    return bytes(pa.Codec("lz4_raw").decompress(data, limit_bytes, asbytes=True))


def _numbers(message: bytes) -> dict[int, int]:
    return {number: value for number, value in _fields(message) if isinstance(value, int)}


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message: numbers, and strings or messages as bytes. Raises ValueError."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if not tag:
            return
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size_bytes, at = _varint(message, at)
        elif kind in _FIXED_BYTES:
            size_bytes = _FIXED_BYTES[kind]
        else:
            raise ValueError("its footer has a field of an unknown type")
        if size_bytes > len(message) - at:
            raise ValueError("a length in its footer exceeds the footer")
        yield tag >> 3, message[at : at + size_bytes]
        at += size_bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for index, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise ValueError("a number in its footer is not terminated")


_FIXED_BYTES = {1: 8, 5: 4}
_CODECS: Mapping[int, Callable[[bytes, int], Any]] = {
    1: inflate_deflate,
    2: _inflate_snappy,
    4: _inflate_lz4,
    5: _inflate_zstandard,
}
