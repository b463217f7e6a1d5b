"""Decompresses parts of table files in bounded steps, so that a small file never becomes a large one in memory.

A file inflates to at most :func:`inflated_limit_bytes`. Decompression stops there, whatever the file claims.
"""

from __future__ import annotations

import binascii
import bz2
import io
import zlib
from collections.abc import Callable, Mapping

import pyarrow as pa
import zstandard

from trinitylake_ops.errors import CorruptFileError

#: The most that any file inflates to.
MAX_INFLATED_BYTES = 256 << 20
#: The bytes that every file may inflate to. They are held three times: in pieces, joined, and by the decoder.
ALWAYS_ALLOWED_BYTES = 64 << 20
#: How many times its size a larger file may inflate to.
MAX_RATIO = 32

_STEP_BYTES = 1 << 20
_GZIP_WINDOW = zlib.MAX_WBITS | 16
_RAW_WINDOW = -zlib.MAX_WBITS


class InflatedTooLargeError(ValueError):
    """Compressed data holds more than its file may."""


def inflated_limit_bytes(file_bytes: int) -> int:
    """Return how many bytes a file of a size may inflate to."""
    return min(MAX_INFLATED_BYTES, max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * file_bytes))


def too_large(location: str, file_bytes: int, limit_bytes: int | None = None) -> CorruptFileError:
    """Return the error for a file that holds more than ``limit_bytes``, or than any file may inflate to."""
    limit_bytes = inflated_limit_bytes(file_bytes) if limit_bytes is None else limit_bytes
    return CorruptFileError(
        f"{location!r} has {file_bytes} bytes and inflates to more than {limit_bytes}: no table's file does;"
        " restore it",
        path=location,
    )


def inflate_gzip(data: bytes, limit_bytes: int) -> bytes:
    """Return the content of all gzip members of a file. Raises InflatedTooLargeError, zlib.error, EOFError."""
    pieces: list[bytes] = []
    held_bytes = 0
    rest = data
    while rest:
        member = zlib.decompressobj(_GZIP_WINDOW)
        found, rest = _inflate_zlib(member, rest, limit_bytes - held_bytes)
        held_bytes += len(found)
        pieces.append(found)
        rest = rest.lstrip(b"\0")  # padding, which the format allows
    return b"".join(pieces)


def _inflate_zlib(stream: zlib._Decompress, data: bytes, limit_bytes: int) -> tuple[bytes, bytes]:
    """Return the content of a stream, and the bytes after it."""
    # One byte more than allowed shows whether there is more.
    found = stream.decompress(data, limit_bytes + 1)
    if len(found) > limit_bytes:
        raise InflatedTooLargeError("it holds more than its file may")
    if not stream.eof:
        raise EOFError("its compressed data ends in the middle")
    return found, stream.unused_data


def inflate_deflate(data: bytes, limit_bytes: int) -> bytes:
    """Return the content of a stream of plain deflate. Raises InflatedTooLargeError, zlib.error, EOFError."""
    # The writer of pyiceberg leaves bytes of a checksum behind the stream.
    found, _ = _inflate_zlib(zlib.decompressobj(_RAW_WINDOW), data, limit_bytes)
    return found


def _inflate_bzip2(data: bytes, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    held_bytes = 0
    while data:
        stream = bz2.BZ2Decompressor()
        found = stream.decompress(data, limit_bytes - held_bytes + 1)
        held_bytes += len(found)
        if held_bytes > limit_bytes:
            raise InflatedTooLargeError("it holds more than its file may")
        if not stream.eof:
            raise EOFError("its compressed data ends in the middle")
        pieces.append(found)
        data = stream.unused_data
    return b"".join(pieces)


def _inflate_zstandard(data: bytes, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    held_bytes = 0
    # A frame may ask for a window as large as it likes.
    unpacker = zstandard.ZstdDecompressor(max_window_size=ALWAYS_ALLOWED_BYTES)
    with unpacker.stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
        while piece := reader.read(_STEP_BYTES):
            held_bytes += len(piece)
            if held_bytes > limit_bytes:
                raise InflatedTooLargeError("it holds more than its file may")
            pieces.append(piece)
    return b"".join(pieces)


def _inflate_snappy(data: bytes, limit_bytes: int) -> bytes:
    """Return the content of a snappy block of an Avro file. Its length precedes it, and a CRC-32 follows."""
    block, checksum = data[:-4], data[-4:]
    claimed_bytes = shift = 0
    for byte in block[:5]:
        claimed_bytes |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if claimed_bytes > limit_bytes:
        raise InflatedTooLargeError("it holds more than its file may")
    found: bytes = pa.Codec("snappy").decompress(block, claimed_bytes, asbytes=True)
    if binascii.crc32(found).to_bytes(4, "big") != checksum:
        raise ValueError("its checksum is another one")
    return found


def _inflate_nothing(data: bytes, limit_bytes: int) -> bytes:
    if len(data) > limit_bytes:
        raise InflatedTooLargeError("it holds more than its file may")
    return data


#: The codecs of Avro that Iceberg's writers use, by the names in the files.
AVRO_CODECS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "null": _inflate_nothing,
    "deflate": inflate_deflate,
    "bzip2": _inflate_bzip2,
    "zstandard": _inflate_zstandard,
    "snappy": _inflate_snappy,
}
