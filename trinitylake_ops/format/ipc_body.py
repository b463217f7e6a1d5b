"""What the bodies of an Arrow IPC file decompress to by their own word, before anything is decompressed.

A small file can claim, and with ZSTD truly hold, gigabytes of the same byte. pyarrow allocates what is
claimed, so this is read first, from the metadata (FlatBuffers, as in Arrow's Footer, Message and
RecordBatch) and from the length that stands before each compressed buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_U8, _I16, _U16, _I32, _U32, _I64 = (struct.Struct("<" + code) for code in "BhHiIq")
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of metadata, bytes of body
_BUFFER = struct.Struct("<qq")  # offset in the body, bytes
_TAIL_BYTES = 10  # the length of the footer, and the magic
_CONTINUATION = 0xFFFFFFFF
_DICTIONARY_BATCH = 2
# Until Arrow 1.0 the codec stood in the free-form metadata of messages, whose version number was this.
_V4 = 3
_OLD_COMPRESSION = b"ARROW:experimental_compression"

# The positions of fields in their FlatBuffers tables.
_FOOTER_BLOCKS = (2, 3)  # of dictionaries, of record batches
_MESSAGE_VERSION, _MESSAGE_HEADER_TYPE, _MESSAGE_HEADER = 0, 1, 2
_DICTIONARY_DATA = 1
_BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 3


#: More is not decompressed, whatever a file claims; larger nodes are written as they are.
MAX_DECOMPRESSED_BYTES = 256 * 1024 * 1024


def check_decompressed_size(data: bytes) -> None:
    """Raise ValueError for an IPC file that claims to decompress to more than ``MAX_DECOMPRESSED_BYTES``.

    Raises it for metadata that leads out of the file, too.
    """
    claimed_bytes = decompressed_bytes(data)
    if claimed_bytes > MAX_DECOMPRESSED_BYTES:
        raise ValueError(f"it claims to decompress to {claimed_bytes} bytes, more than {MAX_DECOMPRESSED_BYTES}")


def decompressed_bytes(data: bytes) -> int:
    """Return what the compressed buffers of an IPC file claim to hold, in bytes; 0 where none is compressed.

    Raises ValueError for metadata that leads out of the file or overlaps: it is read in time
    proportional to the file, whatever it says.
    """
    try:
        footer_bytes = _read(_I32, data, len(data) - _TAIL_BYTES)
        footer = _root(data, len(data) - _TAIL_BYTES - footer_bytes)
        blocks = [
            _BLOCK.unpack_from(data, place)
            for field in _FOOTER_BLOCKS
            for place in _items(data, _field(data, footer, field), _BLOCK.size, len(data))
        ]
        if sum(abs(metadata_bytes) for _, metadata_bytes, _ in blocks) > len(data):
            raise ValueError("its messages overlap")
        return sum(_claimed_bytes(data, start, metadata_bytes) for start, metadata_bytes, _ in blocks)
    except struct.error as error:
        raise ValueError(f"its metadata leads out of the file: {error}") from error


def _claimed_bytes(data: bytes, start: int, metadata_bytes: int) -> int:
    """Return the claim of one record batch or dictionary, whose message starts at ``start``."""
    prefix_bytes = 8 if _read(_U32, data, start) == _CONTINUATION else 4
    message = _root(data, start + prefix_bytes)
    body = start + metadata_bytes
    batch = _linked(data, _field(data, message, _MESSAGE_HEADER))
    if batch and _number(_U8, data, message, _MESSAGE_HEADER_TYPE) == _DICTIONARY_BATCH:
        batch = _linked(data, _field(data, batch, _DICTIONARY_DATA))
    if not batch:
        return 0
    is_old = _number(_I16, data, message, _MESSAGE_VERSION) == _V4 and data.find(_OLD_COMPRESSION, start, body) >= 0
    if not is_old and not _field(data, batch, _BATCH_COMPRESSION):
        return 0
    total_bytes = 0
    for place in _items(data, _field(data, batch, _BATCH_BUFFERS), _BUFFER.size, metadata_bytes):
        offset, stored_bytes = _BUFFER.unpack_from(data, place)
        if stored_bytes >= _I64.size:
            total_bytes += max(0, _read(_I64, data, body + offset))  # -1 stands before a buffer stored as it is
    return total_bytes


def _read(code: struct.Struct, data: bytes, place: int) -> int:
    if place < 0:
        raise ValueError(f"its metadata leads to byte {place}")  # struct would count from the end
    number: int = code.unpack_from(data, place)[0]
    return number


def _root(data: bytes, place: int) -> int:
    """Return where the root table of a FlatBuffer lies."""
    return place + _read(_U32, data, place)


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a table lies; 0 for one that is absent."""
    vtable = table - _read(_I32, data, table)
    entry = 4 + 2 * number
    offset = _read(_U16, data, vtable + entry) if entry < _read(_U16, data, vtable) else 0
    return table + offset if offset else 0


def _number(code: struct.Struct, data: bytes, table: int, number: int) -> int:
    """Return the number that a field of a table holds; 0 for one that is absent."""
    place = _field(data, table, number)
    return _read(code, data, place) if place else 0


def _linked(data: bytes, place: int) -> int:
    """Return where the table lies that a field refers to; 0 for an absent field."""
    return place + _read(_U32, data, place) if place else 0


def _items(data: bytes, place: int, item_bytes: int, room_bytes: int) -> Iterator[int]:
    """Yield where the structs of a vector lie that a field refers to and that fits so many bytes."""
    if place:
        vector = _linked(data, place)
        n_items = _read(_U32, data, vector)
        if n_items * item_bytes > room_bytes:
            raise ValueError(f"its metadata says that {n_items} buffers fit {room_bytes} bytes")
        for number in range(n_items):
            yield vector + 4 + number * item_bytes
