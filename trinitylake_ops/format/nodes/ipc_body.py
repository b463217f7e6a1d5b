"""The memory that an Arrow IPC file claims to need, before anything of it is decoded.

A small file can claim, and with ZSTD truly hold, gigabytes of the same byte. It can also name the same bytes thousands
of times, as the bodies of many batches or the buffers of many columns. Since pyarrow allocates as much as is claimed,
the claims are read first. They are in the metadata (FlatBuffers, as in Arrow's Footer, Message and RecordBatch) and in
the length before each compressed buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

_U8, _I16, _U16, _I32, _U32, _I64 = (struct.Struct("<" + code) for code in "BhHiIq")
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of metadata, bytes of body
_BUFFER = struct.Struct("<qq")  # offset in the body, bytes
_TAIL_BYTES = 10  # the length of the footer, and the magic
_CONTINUATION = 0xFFFFFFFF
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
# Until Arrow 1.0 the codec was in the free-form metadata of messages, whose version number was this.
_V4 = 3
_OLD_COMPRESSION = b"ARROW:experimental_compression"

# The positions of fields in their FlatBuffers tables.
_FOOTER_BLOCKS = (2, 3)  # the footer's dictionaries and record batches
_MESSAGE_VERSION, _MESSAGE_HEADER_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY_BYTES = 0, 1, 2, 3
_DICTIONARY_DATA = 1
_BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION = 1, 2, 3


#: More bytes are not decompressed, whatever a file claims. Larger nodes are written as they are.
MAX_DECOMPRESSED_BYTES = 256 * 1024 * 1024


def check_body(data: bytes) -> None:
    """Raise ValueError for an IPC file that claims to decompress to more than ``MAX_DECOMPRESSED_BYTES``.

    Also raises ValueError for metadata that leads out of the file, and for batches or buffers that share bytes.
    """
    claimed_bytes = decompressed_bytes(data)
    if claimed_bytes > MAX_DECOMPRESSED_BYTES:
        raise ValueError(f"it claims to decompress to {claimed_bytes} bytes, more than {MAX_DECOMPRESSED_BYTES}")


def check_stream(data: bytes, limit_bytes: int) -> None:
    """Raise ValueError for an IPC stream whose messages together claim to decompress to more than a limit.

    Also raises ValueError for one message that claims more than ``MAX_DECOMPRESSED_BYTES``, and for messages that lead
    out of the stream.
    """
    claimed_bytes = at = 0
    try:
        while at < len(data):
            if _read(_U32, data, at) != _CONTINUATION:
                raise ValueError("its messages do not follow each other")
            metadata_bytes = _read(_U32, data, at + 4)
            if not metadata_bytes:
                break
            message = _root(data, at + 8)
            body_bytes = _number(_I64, data, message, _MESSAGE_BODY_BYTES)
            if body_bytes < 0 or metadata_bytes + body_bytes > len(data) - at - 8:
                raise ValueError("a message of it leads out of it")
            if _number(_U8, data, message, _MESSAGE_HEADER_TYPE) in (_DICTIONARY_BATCH, _RECORD_BATCH):
                of_this_bytes = _claimed_bytes(data, at, metadata_bytes + 8, body_bytes)
                claimed_bytes += of_this_bytes
                if of_this_bytes > MAX_DECOMPRESSED_BYTES or claimed_bytes > limit_bytes:
                    raise ValueError(f"it claims to decompress to {claimed_bytes} bytes")
            at += 8 + metadata_bytes + body_bytes
    except struct.error as error:
        raise ValueError(f"its metadata leads out of the stream: {error}") from error


def decompressed_bytes(data: bytes) -> int:
    """Return the bytes that the compressed buffers of an IPC file claim to hold, 0 where none is compressed.

    Raises ValueError for metadata that leads out of the file or overlaps. The time is proportional to the file,
    whatever the metadata says.
    """
    try:
        footer_bytes = _read(_I32, data, len(data) - _TAIL_BYTES)
        footer = _root(data, len(data) - _TAIL_BYTES - footer_bytes)
        blocks = [
            _BLOCK.unpack_from(data, place)
            for field in _FOOTER_BLOCKS
            for place in _items(data, _field(data, footer, field), _BLOCK.size, len(data))
        ]
        _check_blocks(blocks, len(data) - _TAIL_BYTES - footer_bytes)
        return sum(_claimed_bytes(data, *block) for block in blocks)
    except struct.error as error:
        raise ValueError(f"its metadata leads out of the file: {error}") from error


def places_in_batch(data: bytes, start: int) -> tuple[int, int]:
    """Return where the numbers of rows and nulls begin that a record batch has for its columns, and where its buffers.

    ``start`` is that of its message, which is sound.
    """
    message = _root(data, start + 8)
    batch = _linked(data, _field(data, message, _MESSAGE_HEADER))
    nodes, buffers = (_linked(data, _field(data, batch, field)) for field in (_BATCH_NODES, _BATCH_BUFFERS))
    return nodes + 4, buffers + 4


def _check_blocks(blocks: Iterable[tuple[int, int, int]], end: int) -> None:
    """Raise ValueError unless blocks lie one after the other between the magic and the footer."""
    free = 0
    for start, metadata_bytes, body_bytes in sorted(blocks):
        if start < free or metadata_bytes < 0 or body_bytes < 0:
            raise ValueError("its messages overlap")
        free = start + metadata_bytes + body_bytes
    if free > end:
        raise ValueError("its messages reach into its footer")


def _claimed_bytes(data: bytes, start: int, metadata_bytes: int, body_bytes: int) -> int:
    """Return the claim of one record batch or dictionary, whose message starts at ``start``.

    Raises ValueError for buffers that together take more than the body, as some of them then overlap.
    """
    prefix_bytes = 8 if _read(_U32, data, start) == _CONTINUATION else 4
    message = _root(data, start + prefix_bytes)
    # Arrow allocates a body before it compares the sizes
    if _number(_I64, data, message, _MESSAGE_BODY_BYTES) != body_bytes:
        raise ValueError("a message and the footer differ in the size of its body")
    body = start + metadata_bytes
    batch = _linked(data, _field(data, message, _MESSAGE_HEADER))
    if batch and _number(_U8, data, message, _MESSAGE_HEADER_TYPE) == _DICTIONARY_BATCH:
        batch = _linked(data, _field(data, batch, _DICTIONARY_DATA))
    if not batch:
        return 0
    buffers = [
        _BUFFER.unpack_from(data, place)
        for place in _items(data, _field(data, batch, _BATCH_BUFFERS), _BUFFER.size, metadata_bytes)
    ]
    if sum(abs(stored_bytes) for _, stored_bytes in buffers) > body_bytes:
        raise ValueError("its buffers overlap")
    is_old = _number(_I16, data, message, _MESSAGE_VERSION) == _V4 and data.find(_OLD_COMPRESSION, start, body) >= 0
    if not is_old and not _field(data, batch, _BATCH_COMPRESSION):
        return 0
    total_bytes = 0
    for offset, stored_bytes in buffers:
        if stored_bytes >= _I64.size:
            total_bytes += max(0, _read(_I64, data, body + offset))  # -1 precedes a buffer that is not compressed
    return total_bytes


def _read(code: struct.Struct, data: bytes, place: int) -> int:
    if not 0 <= place <= len(data):
        # otherwise struct would count from the end, or overflow
        raise ValueError(f"its metadata leads to byte {place}")
    number: int = code.unpack_from(data, place)[0]
    return number


def _root(data: bytes, place: int) -> int:
    """Return where the root table of a FlatBuffer lies."""
    return place + _read(_U32, data, place)


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a table lies, 0 if it is absent."""
    vtable = table - _read(_I32, data, table)
    entry = 4 + 2 * number
    offset = _read(_U16, data, vtable + entry) if entry < _read(_U16, data, vtable) else 0
    return table + offset if offset else 0


def _number(code: struct.Struct, data: bytes, table: int, number: int) -> int:
    """Return the number that a field of a table holds, 0 if it is absent."""
    place = _field(data, table, number)
    return _read(code, data, place) if place else 0


def _linked(data: bytes, place: int) -> int:
    """Return where the table lies that a field refers to, 0 if it is absent."""
    return place + _read(_U32, data, place) if place else 0


def _items(data: bytes, place: int, item_bytes: int, room_bytes: int) -> Iterator[int]:
    """Yield where the structs of a vector lie. A field refers to the vector, which fits so many bytes."""
    if place:
        vector = _linked(data, place)
        n_items = _read(_U32, data, vector)
        if n_items * item_bytes > room_bytes:
            raise ValueError(f"its metadata says that {n_items} buffers fit {room_bytes} bytes")
        for number in range(n_items):
            yield vector + 4 + number * item_bytes
