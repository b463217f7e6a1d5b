"""Decompress parts of table files within bounds, so that a small file never becomes a large one in memory.

A file inflates to at most :func:`inflated_limit_bytes`. Decompression stops at this limit, regardless of the declared
size.
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

#: Maximum size to which any file may inflate.
MAX_INFLATED_BYTES = 256 << 20
#: Size to which every file may inflate. The data is in memory three times: in pieces, joined, and in the decoder.
ALWAYS_ALLOWED_BYTES = 64 << 20
#: Maximum ratio of inflated size to file size for larger files.
MAX_RATIO = 32

_STEP_BYTES = 1 << 20
_GZIP_WINDOW = zlib.MAX_WBITS | 16
_RAW_WINDOW = -zlib.MAX_WBITS


class InflatedTooLargeError(ValueError):
    """Compressed data inflates beyond the limit for the size of its file."""


def inflated_limit_bytes(file_bytes: int) -> int:
    """Return the size in bytes to which a file of a given size may inflate."""
    return min(MAX_INFLATED_BYTES, max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * file_bytes))


def too_large(location: str, file_bytes: int, limit_bytes: int | None = None) -> CorruptFileError:
    """Return the error for a file that inflates beyond its limit.

    Args:
        location: Location of the file.
        file_bytes: Size of the file.
        limit_bytes: The limit; by default the result of :func:`inflated_limit_bytes`.
    """
    limit_bytes = inflated_limit_bytes(file_bytes) if limit_bytes is None else limit_bytes
    return CorruptFileError(
        f"{location!r} has {file_bytes} bytes and inflates to more than {limit_bytes}, unlike any table's file;"
        " restore it",
        path=location,
    )


def inflate_gzip(data: bytes, limit_bytes: int) -> bytes:
    """Return the contents of all gzip members of a file. Raises InflatedTooLargeError, zlib.error, EOFError."""
    pieces: list[bytes] = []
    held_bytes = 0
    rest = data
    while rest:
        member = zlib.decompressobj(_GZIP_WINDOW)
        piece, rest = _inflate_zlib(member, rest, limit_bytes - held_bytes)
        held_bytes += len(piece)
        pieces.append(piece)
        rest = rest.lstrip(b"\0")  # the format allows padding
    return b"".join(pieces)


def _inflate_zlib(stream: zlib._Decompress, data: bytes, limit_bytes: int) -> tuple[bytes, bytes]:
    """Return the contents of a stream, and the bytes after it."""
    # Decompress one byte more than allowed to detect whether there is more data.
    content = stream.decompress(data, limit_bytes + 1)
    if len(content) > limit_bytes:
        raise InflatedTooLargeError("it inflates to more than a file of its size may")
    if not stream.eof:
        raise EOFError("its compressed data is truncated")
    return content, stream.unused_data


def inflate_deflate(data: bytes, limit_bytes: int) -> bytes:
    """Return the contents of a raw deflate stream. Raises InflatedTooLargeError, zlib.error, EOFError."""
    # PyIceberg's writer leaves checksum bytes after the stream.
    content, _ = _inflate_zlib(zlib.decompressobj(_RAW_WINDOW), data, limit_bytes)
    return content


def _inflate_bzip2(data: bytes, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    held_bytes = 0
    while data:
        stream = bz2.BZ2Decompressor()
        piece = stream.decompress(data, limit_bytes - held_bytes + 1)
        held_bytes += len(piece)
        if held_bytes > limit_bytes:
            raise InflatedTooLargeError("it inflates to more than a file of its size may")
        if not stream.eof:
            raise EOFError("its compressed data is truncated")
        pieces.append(piece)
        data = stream.unused_data
    return b"".join(pieces)


def _inflate_zstandard(data: bytes, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    held_bytes = 0
    # The window size is declared by the frame and must be limited.
    unpacker = zstandard.ZstdDecompressor(max_window_size=ALWAYS_ALLOWED_BYTES)
    with unpacker.stream_reader(io.BytesIO(data), read_across_frames=True) as reader:
        while piece := reader.read(_STEP_BYTES):
            held_bytes += len(piece)
            if held_bytes > limit_bytes:
                raise InflatedTooLargeError("it inflates to more than a file of its size may")
            pieces.append(piece)
    return b"".join(pieces)


def _inflate_snappy(data: bytes, limit_bytes: int) -> bytes:
    """Return the contents of a snappy block of an Avro file, which starts with its length and ends with a CRC-32."""
    block, checksum = data[:-4], data[-4:]
    claimed_bytes = shift = 0
    for byte in block[:5]:
        claimed_bytes |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if claimed_bytes > limit_bytes:
        raise InflatedTooLargeError("it inflates to more than a file of its size may")
    content: bytes = pa.Codec("snappy").decompress(block, claimed_bytes, asbytes=True)
    if binascii.crc32(content).to_bytes(4, "big") != checksum:
        raise ValueError("its checksum does not match")
    return content


def _copy_uncompressed(data: bytes, limit_bytes: int) -> bytes:
    if len(data) > limit_bytes:
        raise InflatedTooLargeError("it inflates to more than a file of its size may")
    return data


#: Avro codecs that Iceberg's writers use, by name.
AVRO_CODECS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "null": _copy_uncompressed,
    "deflate": inflate_deflate,
    "bzip2": _inflate_bzip2,
    "zstandard": _inflate_zstandard,
    "snappy": _inflate_snappy,
}
