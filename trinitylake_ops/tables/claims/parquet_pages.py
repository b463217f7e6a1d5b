"""Checksums of the pages of a Parquet file, as whoever wrote it may have put them into their headers.

Pages are checked as they are stored: nothing is decompressed or decoded, so a file costs no more than its size. Where
they are is read from the footer here: on statistics that contradict themselves PyArrow ends the process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.tables.claims.file_claims import PARQUET_END_BYTES, check_size, footer_bytes

#: Fields of Thrift's PageHeader, FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
_PLAIN_BYTES, _COMPRESSED_BYTES, _CRC = 2, 3, 4
_ROW_GROUPS, _COLUMNS, _COLUMN = 4, 1, 3
_CHUNK_BYTES, _DATA_PAGES, _DICTIONARY_PAGE = 7, 9, 11
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_DEEPEST = 8
_CHUNK_AT_ONCE_BYTES = 256 << 20


def check_pages(end: bytes, read: Callable[[int, int], bytes], path: str) -> None:
    """Check each page that has a checksum, and what those of a column claim to decompress to, together.

    ``end`` are the last bytes of the file, with all of its footer; ``read`` gives the bytes at an offset, of a length.
    A column of a row group is held at a time; one of more than 256 MiB is passed over. Raises CorruptFileError, and
    what ``read`` raises.
    """
    try:
        chunks = list(_column_chunks(end))
    except ValueError as error:
        raise CorruptFileError(f"{path!r} is damaged: its footer cannot be read", path=path) from error
    for what, start, size_bytes in chunks:
        if size_bytes <= _CHUNK_AT_ONCE_BYTES:
            _check_chunk(read(start, size_bytes), what, path)


def _column_chunks(end: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield what a column of a row group is called in messages, where its pages begin, and their bytes."""
    footer = _Thrift(end[len(end) - footer_bytes(end) : len(end) - PARQUET_END_BYTES]).struct(0)
    for number, group in enumerate(_structs(footer.get(_ROW_GROUPS, []))):
        for at, chunk in enumerate(_structs(group.get(_COLUMNS, []))):
            (column,) = _structs([chunk.get(_COLUMN, {})])
            size_bytes, start = column.get(_CHUNK_BYTES), column.get(_DATA_PAGES)
            first = column.get(_DICTIONARY_PAGE) or start
            if not (isinstance(size_bytes, int) and isinstance(start, int) and isinstance(first, int)):
                raise ValueError("a column without its place")
            start = min(start, first)
            if min(start, size_bytes) < 0:
                raise ValueError("a column before the file")
            yield f"column {at} of row group {number}", start, size_bytes


def _structs(values: object) -> list[dict[int, _Value]]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError("another type than Parquet has there")
    return values


def _check_chunk(data: bytes, what: str, path: str) -> None:
    reader = _Thrift(data)
    plain_bytes = 0
    while reader.at < len(data):
        try:
            page_plain_bytes, size_bytes, crc = reader.page_header()
            plain_bytes += page_plain_bytes
            page = reader.take(size_bytes)
        except ValueError as error:
            raise CorruptFileError(f"{path!r} is damaged: a page header of {what} cannot be read", path=path) from error
        if crc is not None and zlib.crc32(page) != crc & 0xFFFF_FFFF:
            raise CorruptFileError(f"{path!r} is damaged: a page of {what} is not that of its checksum", path=path)
    check_size(plain_bytes, len(data), what, path)


_Value: TypeAlias = "int | bytes | list[_Value] | dict[int, _Value] | None"


@dataclass
class _Thrift:
    """Reads what page headers and footers need of Thrift's compact protocol; raises ValueError for what is none."""

    data: bytes
    at: int = 0

    def page_header(self) -> tuple[int, int, int | None]:
        """Return the size of the page that follows, without compression and as it is stored, and its checksum."""
        found = self.struct(0)
        plain_bytes, size_bytes, crc = (found.get(field) for field in (_PLAIN_BYTES, _COMPRESSED_BYTES, _CRC))
        if not isinstance(plain_bytes, int) or not isinstance(size_bytes, int) or not isinstance(crc, int | None):
            raise ValueError("a page without a size")
        return plain_bytes, size_bytes, crc

    def struct(self, depth: int) -> dict[int, _Value]:
        """Return the fields of a struct by their numbers; numbers that are no integers are None."""
        if depth > _DEEPEST:
            raise ValueError("too deep")
        found: dict[int, _Value] = {}
        field = 0
        while (head := self.take(1)[0]) & 0x0F != _STOP:
            field = field + (head >> 4) if head >> 4 else self._number()
            found[field] = None if head & 0x0F in (_TRUE, _FALSE) else self._value(head & 0x0F, depth)
        return found

    def take(self, length: int) -> bytes:
        """Return so many bytes."""
        if not 0 <= length <= len(self.data) - self.at:
            raise ValueError("beyond the end")
        self.at += length
        return self.data[self.at - length : self.at]

    def _varint(self) -> int:
        value = 0
        for n in range(10):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * n)
            if byte < 0x80:
                return value
        raise ValueError("a number that is too long")

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _value(self, kind: int, depth: int) -> _Value:
        if kind in (_I16, _I32, _I64):
            return self._number()
        if kind == _BINARY:
            return self.take(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind in _FIXED_BYTES:
            self.take(_FIXED_BYTES[kind])
            return None
        raise ValueError("what no footer has")

    def _list(self, depth: int) -> list[_Value]:
        head = self.take(1)[0]
        n_items = self._varint() if head >> 4 == _LONG_LIST else head >> 4
        if n_items > len(self.data) - self.at:
            raise ValueError("more items than bytes")
        return [self._value(head & 0x0F, depth) for _ in range(n_items)]


#: In lists, truth values take a byte each.
_FIXED_BYTES = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}
_LONG_LIST = 15
