"""Checksums of the pages of a Parquet file. The file's writer may have put them into the page headers.

Pages are checked as they are stored. Nothing is decompressed or decoded, so a check reads no more than the file's size.
Their places are read from the footer here, as PyArrow ends the process on statistics that contradict themselves.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.tables.claims.file_claims import check_size, footer_of
from trinitylake_ops.tables.claims.thrift import Thrift, structs

#: Fields of Thrift's PageHeader, FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
_PLAIN_BYTES, _COMPRESSED_BYTES, _CRC = 2, 3, 4
_ROW_GROUPS, _COLUMNS, _COLUMN = 4, 1, 3
_CHUNK_BYTES, _DATA_PAGES, _DICTIONARY_PAGE = 7, 9, 11
_CHUNK_AT_ONCE_BYTES = 256 << 20
#: Decoders take a page's size for a number of 32 bits, even if it is larger.
_MAX_PAGE_BYTES = (1 << 31) - 1


def check_pages(end: bytes, read: Callable[[int, int], bytes], path: str) -> None:
    """Check each page that has a checksum, and the sum that the pages of each column claim to decompress to.

    ``end`` are the last bytes of the file, with all of its footer. ``read`` returns the bytes at an offset, of a
    length. One column of a row group is held at a time. A column of more than 256 MiB is passed over. Raises
    CorruptFileError, and what ``read`` raises.
    """
    for what, start, size_bytes in _chunks(end, path):
        if size_bytes <= _CHUNK_AT_ONCE_BYTES:
            _check_chunk(read(start, size_bytes), what, path)


class CheckedPages(io.RawIOBase):
    """A Parquet file whose pages are checked as a decoder reads them, one column of a row group at a time.

    ``stream`` is the file, ``end`` its last bytes with all of its footer. Any other read within a column raises
    ValueError, and so does a read of more than 256 MiB. A column that cannot be one of a file raises CorruptFileError.
    """

    def __init__(self, stream: Any, end: bytes, path: str):
        super().__init__()
        self._stream = stream
        self._path = path
        self._chunks = {start: (what, size_bytes) for what, start, size_bytes in _chunks(end, path)}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._stream.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset in bytes."""
        return int(self._stream.seek(offset, whence))

    def read(self, size: int | None = -1) -> bytes:
        """Return the next ``size`` bytes. Bytes of a column can only be read as a whole."""
        start = self.tell()
        data = bytes(self._stream.read(size))
        what, size_bytes = self._chunks.get(start, ("", 0))
        if what and len(data) >= size_bytes:
            if size_bytes > _CHUNK_AT_ONCE_BYTES:
                raise ValueError(f"{what} has {size_bytes} bytes, more than are read at once")
            _check_chunk(data[:size_bytes], what, self._path)
        elif any(start < at + n_bytes and at < start + len(data) for at, (_, n_bytes) in self._chunks.items()):
            raise ValueError("a column of it is not where its footer says")
        return data


def _chunks(end: bytes, path: str) -> list[tuple[str, int, int]]:
    try:
        return list(_column_chunks(end))
    except ValueError as error:
        raise CorruptFileError(f"{path!r} is damaged: its footer cannot be read", path=path) from error


def _column_chunks(end: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield for each column of a row group its name in messages, where its pages begin, and their bytes."""
    footer = Thrift(footer_of(end)).struct()
    for number, group in enumerate(structs(footer.get(_ROW_GROUPS, []))):
        for at, chunk in enumerate(structs(group.get(_COLUMNS, []))):
            (column,) = structs([chunk.get(_COLUMN, {})])
            size_bytes, start = column.get(_CHUNK_BYTES), column.get(_DATA_PAGES)
            first = column.get(_DICTIONARY_PAGE) or start
            if not (isinstance(size_bytes, int) and isinstance(start, int) and isinstance(first, int)):
                raise ValueError("a column without its place")
            # Arrow writes 0 for the data pages of a column without rows, whose dictionary page exists.
            start = min(start, first) or first
            if min(start, size_bytes) < 0:
                raise ValueError("a column before the file")
            yield f"column {at} of row group {number}", start, size_bytes


def _check_chunk(data: bytes, what: str, path: str) -> None:
    reader = Thrift(data)
    plain_bytes = 0
    while reader.at < len(data):
        try:
            page_plain_bytes, size_bytes, crc = _page_header(reader)
            plain_bytes += page_plain_bytes
            page = reader.take(size_bytes)
        except ValueError as error:
            raise CorruptFileError(f"{path!r} is damaged: a page header of {what} cannot be read", path=path) from error
        if crc is not None and zlib.crc32(page) != crc & 0xFFFF_FFFF:
            raise CorruptFileError(f"{path!r} is damaged: a page of {what} is not that of its checksum", path=path)
    check_size(plain_bytes, len(data), what, path)


def _page_header(reader: Thrift) -> tuple[int, int, int | None]:
    """Return the size of the next page, without compression and as it is stored, and its checksum."""
    found = reader.struct()
    plain_bytes, size_bytes, crc = (found.get(field) for field in (_PLAIN_BYTES, _COMPRESSED_BYTES, _CRC))
    if not isinstance(plain_bytes, int) or not isinstance(size_bytes, int) or not isinstance(crc, int | None):
        raise ValueError("a page without a size")
    if not 0 <= min(plain_bytes, size_bytes) <= max(plain_bytes, size_bytes) <= _MAX_PAGE_BYTES:
        raise ValueError("a page of another size than pages have")
    return plain_bytes, size_bytes, crc
