"""The Arrow IPC file that contains the rows of a node: encoding, seals, and a check of the declared size.

The seal is stored in the schema metadata, which an Arrow IPC file contains twice: in its first message and in its
footer.

A small file can declare, and with ZSTD actually contain, gigabytes of the same byte. It can also refer to the same
bytes thousands of times, for example as the bodies of many batches or the buffers of many columns. Because pyarrow
allocates as much memory as is declared, the declared sizes are checked first. They are in the metadata (Arrow's
FlatBuffers tables Footer, Message and RecordBatch) and in the length prefix of each compressed buffer.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import google_crc32c
import pyarrow as pa

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.checksums import SEAL_KEYS, check_seals
from trinitylake_ops.format.file_names import is_immutable_path, version_of_root
from trinitylake_ops.format.keys import built_texts

_U8, _I16, _U16, _I32, _U32, _I64 = (struct.Struct("<" + code) for code in "BhHiIq")
_BLOCK = struct.Struct("<qi4xq")  # offset, metadata size, body size
_BUFFER = struct.Struct("<qq")  # offset in the body, size
_TAIL_BYTES = 10  # footer length and magic number
_CONTINUATION = 0xFFFFFFFF
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
# Until Arrow 1.0, the codec was stored in the free-form metadata of messages with this version number.
_V4 = 3
_OLD_COMPRESSION = b"ARROW:experimental_compression"

# The positions of fields in their FlatBuffers tables.
_FOOTER_BLOCKS = (2, 3)  # the footer's dictionaries and record batches
_MESSAGE_VERSION, _MESSAGE_HEADER_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY_BYTES = 0, 1, 2, 3
_DICTIONARY_DATA = 1
_BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION = 1, 2, 3


#: Maximum decompressed size of a file that is read. Larger nodes are written uncompressed.
MAX_DECOMPRESSED_BYTES = 256 * 1024 * 1024


def check_body(data: bytes) -> None:
    """Raise ValueError if the declared decompressed size of an IPC file exceeds ``MAX_DECOMPRESSED_BYTES``.

    Also raises ValueError if metadata refers to bytes outside the file, or if batches or buffers overlap.
    """
    claimed_bytes = decompressed_bytes(data)
    if claimed_bytes > MAX_DECOMPRESSED_BYTES:
        raise ValueError(
            f"it declares a decompressed size of {claimed_bytes} bytes, more than {MAX_DECOMPRESSED_BYTES}"
        )


def check_stream(data: bytes, limit_bytes: int) -> None:
    """Check the declared decompressed size of an IPC stream.

    Args:
        data: The content of the stream.
        limit_bytes: Maximum decompressed size of all messages.

    Raises:
        ValueError: The messages together exceed the limit, one message exceeds ``MAX_DECOMPRESSED_BYTES``, or a message
            refers to bytes outside the stream.
    """
    claimed_bytes = at = 0
    try:
        while at < len(data):
            if _read(_U32, data, at) != _CONTINUATION:
                raise ValueError("its messages are not contiguous")
            metadata_bytes = _read(_U32, data, at + 4)
            if not metadata_bytes:
                break
            message = _root(data, at + 8)
            body_bytes = _number(_I64, data, message, _MESSAGE_BODY_BYTES)
            if body_bytes < 0 or metadata_bytes + body_bytes > len(data) - at - 8:
                raise ValueError("one of its messages extends beyond its end")
            if _number(_U8, data, message, _MESSAGE_HEADER_TYPE) in (_DICTIONARY_BATCH, _RECORD_BATCH):
                of_this_bytes = _claimed_bytes(data, at, metadata_bytes + 8, body_bytes)
                claimed_bytes += of_this_bytes
                if of_this_bytes > MAX_DECOMPRESSED_BYTES or claimed_bytes > limit_bytes:
                    raise ValueError(f"it declares a decompressed size of {claimed_bytes} bytes")
            at += 8 + metadata_bytes + body_bytes
    except struct.error as error:
        raise ValueError(f"its metadata refers to bytes outside the stream: {error}") from error


def decompressed_bytes(data: bytes) -> int:
    """Return the declared decompressed size of the compressed buffers of an IPC file, 0 if none is compressed.

    The time is proportional to the size of the file, regardless of its metadata. Raises ValueError if metadata refers
    to bytes outside the file, or if batches or buffers overlap.
    """
    try:
        footer_bytes = _read(_I32, data, len(data) - _TAIL_BYTES)
        footer = _root(data, len(data) - _TAIL_BYTES - footer_bytes)
        blocks = [
            _BLOCK.unpack_from(data, position)
            for field in _FOOTER_BLOCKS
            for position in _items(data, _field(data, footer, field), _BLOCK.size, len(data))
        ]
        _check_blocks(blocks, len(data) - _TAIL_BYTES - footer_bytes)
        return sum(_claimed_bytes(data, *block) for block in blocks)
    except struct.error as error:
        raise ValueError(f"its metadata refers to bytes outside the file: {error}") from error


def offsets_in_batch(data: bytes, start: int) -> tuple[int, int]:
    """Return the positions of a record batch's field nodes (row and null counts) and of its buffers.

    Args:
        data: The content of the file.
        start: The position of the record batch message, which must be valid.
    """
    message = _root(data, start + 8)
    batch = _table_position(data, _field(data, message, _MESSAGE_HEADER))
    nodes, buffers = (_table_position(data, _field(data, batch, field)) for field in (_BATCH_NODES, _BATCH_BUFFERS))
    return nodes + 4, buffers + 4


def _check_blocks(blocks: Iterable[tuple[int, int, int]], end: int) -> None:
    """Raise ValueError if blocks overlap each other or the footer."""
    free = 0
    for start, metadata_bytes, body_bytes in sorted(blocks):
        if start < free or metadata_bytes < 0 or body_bytes < 0:
            raise ValueError("its messages overlap")
        free = start + metadata_bytes + body_bytes
    if free > end:
        raise ValueError("its messages overlap its footer")


def _claimed_bytes(data: bytes, start: int, metadata_bytes: int, body_bytes: int) -> int:
    """Return the declared decompressed size of the record batch or dictionary whose message starts at ``start``.

    Raises ValueError if the buffers together exceed the body, because some of them then overlap.
    """
    prefix_bytes = 8 if _read(_U32, data, start) == _CONTINUATION else 4
    message = _root(data, start + prefix_bytes)
    # Arrow allocates the body before it compares the sizes.
    if _number(_I64, data, message, _MESSAGE_BODY_BYTES) != body_bytes:
        raise ValueError("a message and the footer differ in the size of its body")
    body = start + metadata_bytes
    batch = _table_position(data, _field(data, message, _MESSAGE_HEADER))
    if batch and _number(_U8, data, message, _MESSAGE_HEADER_TYPE) == _DICTIONARY_BATCH:
        batch = _table_position(data, _field(data, batch, _DICTIONARY_DATA))
    if not batch:
        return 0
    buffers = [
        _BUFFER.unpack_from(data, position)
        for position in _items(data, _field(data, batch, _BATCH_BUFFERS), _BUFFER.size, metadata_bytes)
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


def _read(code: struct.Struct, data: bytes, position: int) -> int:
    if not 0 <= position <= len(data):
        # otherwise, struct would count from the end or overflow
        raise ValueError(f"its metadata refers to byte {position}")
    number: int = code.unpack_from(data, position)[0]
    return number


def _root(data: bytes, position: int) -> int:
    """Return the position of the root table of a FlatBuffer."""
    return position + _read(_U32, data, position)


def _field(data: bytes, table: int, number: int) -> int:
    """Return the position of a field of a table, 0 if the field is absent."""
    vtable = table - _read(_I32, data, table)
    entry = 4 + 2 * number
    offset = _read(_U16, data, vtable + entry) if entry < _read(_U16, data, vtable) else 0
    return table + offset if offset else 0


def _number(code: struct.Struct, data: bytes, table: int, number: int) -> int:
    """Return the number in a field of a table, 0 if the field is absent."""
    position = _field(data, table, number)
    return _read(code, data, position) if position else 0


def _table_position(data: bytes, position: int) -> int:
    """Return the position of the table that a field refers to, 0 if the field is absent."""
    return position + _read(_U32, data, position) if position else 0


def _items(data: bytes, position: int, item_bytes: int, room_bytes: int) -> Iterator[int]:
    """Yield the positions of the structs in the vector that a field refers to. Raise ValueError if it is too large."""
    if position:
        vector = _table_position(data, position)
        n_items = _read(_U32, data, vector)
        if n_items * item_bytes > room_bytes:
            raise ValueError(f"its metadata declares {n_items} items, which do not fit into {room_bytes} bytes")
        for number in range(n_items):
            yield vector + 4 + number * item_bytes


SCHEMA = pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])

_KEY = SEAL_KEYS[0].encode()
_MAGIC_BYTES = 8
_DIGITS = 8
_NO_DIGITS = b"0" * _DIGITS
_COUNTS = struct.Struct("<" + "qq" * len(SCHEMA))  # for each column: row count, null count
_BITMAPS = struct.Struct("<" + "q40x" * len(SCHEMA))  # for each column: offset of the first of its three buffers

#: One integer for each of the columns key, pvalue and pnode, in which the bits of non-null rows are set.
Present: TypeAlias = tuple[int, int, int]


def write_file(batch: pa.RecordBatch, compression: str, path: str) -> bytes:
    """Encode a file with one batch.

    Args:
        batch: The rows.
        compression: The codec of the body; empty for none.
        path: The path where the file will be written. The seals contain the file name. If empty, the file is not
            sealed.
    """
    name = _name_of(path)
    data = _file_of(batch, compression, len(name))
    return _own_form(len(name)).sealed(data, name) if name else bytes(data)


def surrounding_bytes(path: str) -> int:
    """Return the size of an uncompressed file with one batch, minus the size of the batch."""
    return _surrounding_bytes(len(_name_of(path)))


def read_own_batch(data: bytes, path: str) -> tuple[pa.RecordBatch, Present] | None:
    """Read a file that has exactly our form with one uncompressed batch. Nearly all files have this form.

    This is fast, because neither the schema nor the footer is parsed. Rows are validated, and seals, if any, are
    checked.

    Args:
        data: The content of the file.
        path: The path of the file.

    Returns:
        The rows and a bit mask of the non-null rows, or None for a file of another form.

    Raises:
        CorruptFileError: The file is damaged, or replaced another file.
        ArrowInvalid: The rows are invalid.
    """
    name = _name_of(path)
    form = _own_form(len(name))
    if not form.has(data):
        form = _own_form(0)
        if not form.has(data):
            return None
    else:
        head, tail = form.seals_of(data)
        if head != tail or head[_DIGITS + 1 :] != name or head[:_DIGITS] != b"%08x" % form.crc32c(data):
            _check(data, _text(head), _text(tail), path)
    batch = form.batch(data)
    batch.validate(full=True)
    return batch, form.present(data)


def check_file_seals(data: bytes, schema: pa.Schema, path: str) -> bool:
    """Check an IPC file of any form against its seals.

    Args:
        data: The content of the file.
        schema: The schema in the footer.
        path: The path of the file.

    Returns:
        Whether the file has valid seals.

    Raises:
        CorruptFileError: The file is damaged, or replaced another file.
    """
    return _check(data, _seal_in(_first_schema(data)), _seal_in(schema), path)


def check_not_copied(data: bytes, path: str) -> None:
    """Raise CorruptFileError if an undamaged file is a copy of an older root."""
    # The footer is parsed here, because the fast check of the form ignores some of its bytes.
    seal = _seal_in(footer_schema(data, path, ": its footer is damaged"))
    check_seals(data, (seal, seal), path)


def footer_schema(data: bytes, path: str, reason: str = "") -> pa.Schema:
    """Return the schema in the footer of a file.

    Args:
        data: The content of the file.
        path: The path of the file.
        reason: Appended to the error message.

    Raises:
        CorruptFileError: The footer cannot be read.
    """
    try:
        return pa.ipc.open_file(data).schema
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{path!r} is not a readable Arrow IPC file{reason}", path=path) from error


def _check(data: bytes, first: str | None, second: str | None, path: str) -> bool:
    name = (first or "")[_DIGITS + 1 :]
    return check_seals(data, (first, second), path, may_be_copy=_may_be_copied_to(path, name))


def _may_be_copied_to(path: str, name: str) -> bool:
    """Whether a program that knows only the published format may have copied a root to a path byte for byte.

    Such a program rolls back by copying an old root to a later version, and exports by copying a root to another path.
    """
    copied, version = version_of_root(name), version_of_root(path)
    if copied is None:
        return False
    return copied < version if version is not None else not is_immutable_path(path)


def _first_schema(data: bytes) -> pa.Schema | None:
    """Return the schema at the beginning of a file, None if it cannot be read, as in very old files."""
    try:
        message = pa.ipc.read_message(pa.py_buffer(data)[_MAGIC_BYTES:])
        # Arrow interprets any message as a schema, and crashes the process if the message is of another kind.
        return pa.ipc.read_schema(message) if message.type == "schema" else None
    except (pa.ArrowException, OSError, ValueError, EOFError):
        return None


def _seal_in(schema: pa.Schema | None) -> str | None:
    seal = None if schema is None or schema.metadata is None else schema.metadata.get(_KEY)
    return None if seal is None else _text(seal)


def _text(seal: bytes) -> str:
    return seal.decode("utf-8", errors="surrogateescape")


def _name_of(path: str) -> bytes:
    return path.rpartition("/")[2].encode("utf-8", errors="surrogateescape")


def _file_of(batch: pa.RecordBatch, compression: str, name_bytes: int = 0, character: str = "0") -> memoryview:
    """Return a file with placeholder seals for a name of one repeated character. If the size is 0, it has no seals."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _schema(name_bytes, character), options=_write_options(compression)) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


@functools.lru_cache(maxsize=256)
def _schema(name_bytes: int, character: str) -> pa.Schema:
    """Return our schema with a placeholder seal for a name of this size. Cached, because creating a schema is slow."""
    return SCHEMA.with_metadata({_KEY: f"{character * _DIGITS} {character * name_bytes}"}) if name_bytes else SCHEMA


@functools.cache
def _write_options(compression: str) -> pa.ipc.IpcWriteOptions:
    return pa.ipc.IpcWriteOptions(compression=compression or None, use_threads=False)


@functools.lru_cache(maxsize=256)
def _surrounding_bytes(name_bytes: int) -> int:
    batch = pa.record_batch([built_texts([])] * len(SCHEMA), schema=SCHEMA)
    return len(_file_of(batch, "", name_bytes)) - int(pa.ipc.get_record_batch_size(batch))


@dataclass(frozen=True, slots=True)
class _UncompressedForm:
    """The head and tail of our uncompressed files: all metadata except the seals, row counts and sizes.

    Head and tail are compared as integers. Masks exclude the bits that differ between files.
    """

    #: The position of the record batch message.
    batch_start: int
    #: The position of the columns' row and null counts in this message.
    counts: int
    #: The position of the buffer offsets in this message.
    starts: int
    head_bytes: int
    head_mask: int
    head: int
    tail_bytes: int
    tail_mask: int
    tail: int
    #: The size of one seal; 0 if the file has no seals.
    seal_bytes: int
    #: The position of the first seal; 0 if the file has no seals.
    head_seal: int
    #: The position of the second seal, relative to the end of the file and thus negative; 0 if the file has no seals.
    tail_seal: int

    def has(self, data: bytes) -> bool:
        """Whether a file has this form."""
        head = int.from_bytes(data[: self.head_bytes], "little") & self.head_mask
        tail = int.from_bytes(data[-self.tail_bytes :], "little") & self.tail_mask
        return head == self.head and tail == self.tail

    def seals_of(self, data: bytes) -> tuple[bytes, bytes]:
        """Return both seals of a file of this form."""
        start = len(data) + self.tail_seal
        return data[self.head_seal : self.head_seal + self.seal_bytes], data[start : start + self.seal_bytes]

    def crc32c(self, data: bytes) -> int:
        """Return the checksum of a file of this form, with zeros in place of the seal digits."""
        between = pa.py_buffer(data)[self.head_seal + _DIGITS : self.tail_seal]  # slicing bytes would copy them
        crc = google_crc32c.value(data[: self.head_seal] + _NO_DIGITS)
        crc = google_crc32c.extend(crc, between)
        return int(google_crc32c.extend(crc, _NO_DIGITS + data[self.tail_seal + _DIGITS :]))

    def sealed(self, data: memoryview, name: bytes) -> bytes:
        """Return a file of this form, compressed or not, with another name of the same size in both seals."""
        head, tail = bytes(data[: self.head_seal]), bytes(data[self.tail_seal + self.seal_bytes :])
        body = bytes(data[self.head_seal + self.seal_bytes : self.tail_seal])
        blank = _NO_DIGITS + b" " + name
        crc = google_crc32c.value(head + blank)
        crc = google_crc32c.extend(google_crc32c.extend(crc, body), blank + tail)
        seal = b"%08x %b" % (crc, name)
        return b"".join((head, seal, body, seal, tail))

    def batch(self, data: bytes) -> pa.RecordBatch:
        """Return the rows of a file of this form as views of its bytes."""
        return pa.ipc.read_record_batch(pa.py_buffer(data)[self.batch_start :], SCHEMA)

    def present(self, data: bytes) -> Present:
        """Return the bit masks of the non-null rows of a validated batch. This is faster than using Arrow."""
        counts = _COUNTS.unpack_from(data, self.counts)
        starts = _BITMAPS.unpack_from(data, self.starts)
        every = (1 << counts[0]) - 1
        n_bytes = (counts[0] + 7) // 8
        key, pvalue, pnode = (
            int.from_bytes(data[first : first + n_bytes], "little") & every if n_nulls else every
            for n_nulls, first in zip(counts[1::2], (self.head_bytes + start for start in starts), strict=True)
        )
        return key, pvalue, pnode


@functools.lru_cache(maxsize=256)
def _own_form(name_bytes: int) -> _UncompressedForm:
    """Return the form of files whose names have this size. A size of 0 means files without seals.

    The form consists of the bytes that are identical in two files whose variable parts all differ.
    """
    texts = {"0": ["", None], "1": [str(number) for number in range(20_000)] + [None] * 1_000}
    first_file, second_file = (
        bytes(_file_of(pa.record_batch([built_texts(rows)] * 3, schema=SCHEMA), "", name_bytes, character))
        for character, rows in texts.items()
    )
    batch = 16 + int.from_bytes(first_file[12:16], "little")  # after the magic number and the schema message
    head_bytes = batch + 8 + int.from_bytes(first_file[batch + 4 : batch + 8], "little")
    tail_bytes = int.from_bytes(first_file[-10:-6], "little") + 10
    head_mask = _equal_words(first_file[:head_bytes], second_file[:head_bytes])
    tail_mask = _equal_words(first_file[-tail_bytes:], second_file[-tail_bytes:])
    head, tail = (int.from_bytes(part, "little") for part in (first_file[:head_bytes], first_file[-tail_bytes:]))
    seal = f"{_NO_DIGITS.decode()} {'0' * name_bytes}".encode() if name_bytes else b""
    seal_offsets = (first_file.find(seal), first_file.rfind(seal) - len(first_file)) if seal else (0, 0)
    batch_offsets = (batch, *offsets_in_batch(first_file, batch))
    form = (*batch_offsets, head_bytes, head_mask, head & head_mask, tail_bytes, tail_mask, tail & tail_mask)
    return _UncompressedForm(*form, len(seal), *seal_offsets)


def _equal_words(first: bytes, second: bytes) -> int:
    """Return a mask of the 8-byte words that are the same in both files."""
    starts = range(0, len(first), 8)
    masks = (b"\xff" if first[start : start + 8] == second[start : start + 8] else b"\0" for start in starts)
    return int.from_bytes(b"".join(mask * 8 for mask in masks)[: len(first)], "little")
