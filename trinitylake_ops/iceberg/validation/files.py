"""Verify data files, delete files, Parquet pages and deletion vectors before a decoder reads them.

PyArrow and PyIceberg allocate as much memory as a file declares. A column of zeros, a stripe of runs or a bitmap of
complete ranges takes only a few bytes and decodes to gigabytes. The declared sizes are at the end of a file, which
every reader fetches first.

PyIceberg trusts the sizes of compressed blobs and the keys of bitmaps (it fills a list up to the largest key). It
creates one object per position, while a run of 65,536 positions takes only four bytes in the file.

Pages are checked in their stored form. Nothing is decompressed or decoded, so a check reads no more than the file's
size. The offsets of pages are parsed from the footer here, because PyArrow aborts the process on contradictory
statistics.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import zstandard

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.iceberg.validation.inflate import inflated_limit_bytes
from trinitylake_ops.iceberg.validation.orc_tail import OrcTail
from trinitylake_ops.iceberg.validation.thrift import MAX_NAME_CHARS, Thrift, parquet_name_chars, structs

if TYPE_CHECKING:
    import pyarrow.parquet as pq

PARQUET_MAGIC = b"PAR1"
#: Suffixes of columnar files.
_FORMATS = {".parquet": "Parquet", ".orc": "ORC"}
#: A Parquet file ends with the footer length and the magic number, which take this many bytes.
PARQUET_END_BYTES = 8
#: Maximum size of a footer. A decoded footer takes a hundred times as much memory.
MAX_FOOTER_BYTES = 32 << 20
#: Footer size below which the total length of names cannot become large.
_SMALL_FOOTER_BYTES = 32 << 10
_SCHEMA = 2  # a field of Thrift's FileMetaData
#: Maximum number of entries of any list in a footer, such as columns or row groups.
_MAX_LISTED = 200_000
#: Size to which a row group, or the pages of a column, may always decode. Beyond this size, MAX_RATIO times the stored
#: size is allowed.
ALWAYS_ALLOWED_BYTES = 256 << 20
_ALWAYS_ALLOWED_ROWS = 32 << 20
MAX_RATIO = 1000


def footer_bytes(end: bytes) -> int:
    """Return the size of a Parquet file's footer, including length and magic number, from the last eight bytes.

    Return 0 for other files.
    """
    if len(end) < PARQUET_END_BYTES or not end.endswith(PARQUET_MAGIC):
        return 0
    return int.from_bytes(end[-PARQUET_END_BYTES:-4], "little") + PARQUET_END_BYTES


def claims_bytes(end: bytes, size_bytes: int, path: str) -> int:
    """Return the size of a file's footer, from some of the file's last bytes.

    Args:
        end: The last bytes of the file.
        size_bytes: Size of the file.
        path: Path of the file, for errors.

    Returns:
        The size of the footer in bytes, 0 for a file of another format.

    Raises:
        CorruptFileError: The footer would be larger than the file or than the maximum size.
    """
    needed_bytes = footer_bytes(end) or OrcTail.bytes_of(end)
    if needed_bytes > min(size_bytes, MAX_FOOTER_BYTES):
        raise CorruptFileError(
            f"{path!r} declares a footer of {needed_bytes} bytes, but the file has {size_bytes} bytes and the maximum"
            f" is {MAX_FOOTER_BYTES}; restore it",
            path=path,
        )
    return needed_bytes


def end_with_claims(end: bytes, size_bytes: int, read_end: Callable[[int], bytes], path: str) -> bytes:
    """Return the last bytes of a file, including its whole footer.

    Args:
        end: The last bytes of the file that have already been read.
        size_bytes: Size of the file.
        read_end: Returns a given number of the file's last bytes. Called if ``end`` does not contain the whole footer.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: The declared size of the footer is not valid.
    """
    needed_bytes = claims_bytes(end, size_bytes, path)
    return read_end(needed_bytes) if needed_bytes > len(end) else end


def named_format(path: str) -> str | None:
    """Return the columnar format of a file by its suffix, or None."""
    return next((name for ending, name in _FORMATS.items() if path.endswith(ending)), None)


def check_claims(end: bytes, size_bytes: int, path: str) -> None:
    """Check the declared sizes of a Parquet or ORC file.

    A file without a footer is accepted unless it has the suffix of a columnar file, because PyArrow's errors for such a
    file would not contain its name.

    Args:
        end: The last bytes of the file, with its footer.
        size_bytes: Size of the file.
        path: Path of the file.

    Raises:
        CorruptFileError: The file is damaged or declares too much.
    """
    is_parquet, is_orc = bool(footer_bytes(end)), bool(OrcTail.bytes_of(end))
    named = named_format(path)
    if named is not None and not (is_parquet if named == "Parquet" else is_orc):
        raise CorruptFileError(
            f"{path!r} is not a {named} file: it has no footer; it was truncated or replaced, restore it",
            path=path,
        )
    if is_parquet:
        check_parquet_claims(read_footer(end, path), size_bytes, path)
    elif is_orc:
        try:
            tail = OrcTail.parse(end)
        except Exception as error:  # decompressors raise arbitrary exceptions for corrupt input
            raise CorruptFileError(f"{path!r} is not an ORC file: {_reason(error)}; restore it", path=path) from error
        for number, stripe in enumerate(tail.stripes):
            _check_rows(stripe.rows, stripe.stored_bytes, f"stripe {number}", path)


def footer_of(end: bytes) -> bytes:
    """Return the footer in a Parquet file's last bytes, without the length and the magic number."""
    return end[len(end) - footer_bytes(end) : len(end) - PARQUET_END_BYTES]


def _check_names(end: bytes, path: str) -> None:
    """Raise CorruptFileError for a schema whose full names are too long in total."""
    if footer_bytes(end) <= _SMALL_FOOTER_BYTES:
        return
    try:
        n_chars = parquet_name_chars(structs(Thrift(footer_of(end)).struct(last=_SCHEMA).get(_SCHEMA, [])))
    except ValueError as error:
        raise CorruptFileError(f"{path!r} is not a Parquet file: {error}; restore it", path=path) from error
    if n_chars > MAX_NAME_CHARS:
        raise _excessive_size(
            f"{n_chars} characters in the full names of its columns", footer_bytes(end), "its footer", path
        )


def read_footer(end: bytes, path: str) -> pq.FileMetaData:
    """Parse the footer of a Parquet file.

    Args:
        end: The last bytes of the file, with its footer.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: The footer is not valid.
    """
    import pyarrow.parquet as pq  # imported here, because readers and writers of metadata do not need it

    claims_bytes(end, len(end), path)
    _check_names(end, path)
    try:
        with pq.ParquetFile(pa.BufferReader(end), thrift_container_size_limit=_MAX_LISTED) as file:
            return file.metadata
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{path!r} is not a Parquet file: {_reason(error)}; restore it", path=path) from error


def check_parquet_claims(metadata: pq.FileMetaData, size_bytes: int, path: str) -> None:
    """Check that the row groups in a footer do not declare far more than the file's size.

    Columns are not read individually, because PyArrow aborts the process on contradictory statistics.

    Args:
        metadata: The footer.
        size_bytes: Size of the file.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: A row group declares too much.
    """
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        check_size(group.total_byte_size, size_bytes, f"row group {number}", path)
        _check_rows(group.num_rows, size_bytes, f"row group {number}", path)


def check_size(claimed_bytes: int, stored_bytes: int, part: str, path: str) -> None:
    """Check that a part of a file does not declare far more bytes than are stored.

    Args:
        claimed_bytes: Declared size after decoding.
        stored_bytes: Stored size.
        part: The part of the file, for errors.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: The declared size is too large.
    """
    if claimed_bytes > ALWAYS_ALLOWED_BYTES and claimed_bytes > MAX_RATIO * stored_bytes:
        raise _excessive_size(f"{claimed_bytes} bytes", stored_bytes, part, path)


def _check_rows(rows: int, stored_bytes: int, part: str, path: str) -> None:
    if rows > _ALWAYS_ALLOWED_ROWS and rows > MAX_RATIO * stored_bytes:
        raise _excessive_size(f"{rows} rows", stored_bytes, part, path)


def _excessive_size(claim: str, stored_bytes: int, part: str, path: str) -> CorruptFileError:
    return CorruptFileError(
        f"{path!r} declares {claim} in {part} of {stored_bytes} bytes, unlike any table's file; restore it", path=path
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


MAGIC = b"PFA1"
_END_BYTES = 12  # footer length, flags and magic number
_MAX_FOOTER_BYTES = 8 << 20
#: Number of positions that any file may delete. Each takes 40 bytes in PyIceberg. Files with at least one bit per
#: position may delete more.
_ALWAYS_ALLOWED_POSITIONS = 6 << 20
_POSITIONS_PER_BYTE = 8
#: Maximum key of a bitmap. Each key covers four billion rows of a data file.
_MAX_KEY = 1023
_FRAME_BYTES = 8  # length and magic number before the bitmaps of a vector

_WITH_RUNS, _WITHOUT_RUNS = 12347, 12346
_MAX_ARRAY_POSITIONS = 4096
_BITSET_BYTES = 8192
_MIN_CONTAINERS_WITH_OFFSETS = 4  # bitmaps with runs and fewer containers have no offsets


def check_puffin(data: bytes, path: str) -> None:
    """Check that PyIceberg can read the blobs of a Puffin file as deletion vectors within bounds.

    Args:
        data: Contents of the file.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: The file is damaged or deletes too many rows.
    """
    try:
        positions = sum(_positions(blob) for blob in _blobs(data))
    except (ValueError, KeyError, TypeError, IndexError, struct.error, RecursionError, zstandard.ZstdError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise CorruptFileError(f"{path!r} is not a readable Puffin file: {reason}; restore it", path=path) from error
    limit = max(_ALWAYS_ALLOWED_POSITIONS, _POSITIONS_PER_BYTE * len(data))
    if positions > limit:
        raise CorruptFileError(
            f"{path!r} deletes {positions} rows in {len(data)} bytes, more than the maximum of {limit}; rewrite the"
            " table's data files without deletion vectors, with the engine that wrote it",
            path=path,
        )


def _blobs(data: bytes) -> list[bytes]:
    """Return the blobs of a file as PyIceberg decodes them. Raises ValueError, and other errors for wrong types."""
    if len(data) < len(MAGIC) + _END_BYTES or not data.startswith(MAGIC) or not data.endswith(MAGIC):
        raise ValueError("it does not start and end with the Puffin magic")
    footer_bytes = int.from_bytes(data[-_END_BYTES:-8], "little")
    if footer_bytes > min(len(data) - _END_BYTES, _MAX_FOOTER_BYTES):
        raise ValueError(f"its footer would have {footer_bytes} bytes")
    blobs: list[bytes] = []
    stored_bytes = plain_bytes = 0
    for blob in json.loads(data[-footer_bytes - _END_BYTES : -_END_BYTES])["blobs"]:
        offset, length = _number(blob["offset"]), _number(blob["length"])
        stored_bytes += length
        if offset + length > len(data) or stored_bytes > len(data):
            raise ValueError("its blobs overlap or exceed the file")
        raw = data[offset : offset + length]
        plain_bytes += length if blob.get("compression-codec") is None else zstandard.frame_content_size(raw)
        if plain_bytes > inflated_limit_bytes(len(data)):
            raise ValueError("its blobs inflate to more than a file of its size may")
        blobs.append(raw if blob.get("compression-codec") is None else zstandard.ZstdDecompressor().decompress(raw))
    return blobs


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("an offset or length is not a number")
    return value


def _positions(blob: bytes) -> int:
    """Return the maximum number of positions in a deletion vector. Raises ValueError, struct.error."""
    (n_bitmaps,) = struct.unpack_from("<Q", blob, _FRAME_BYTES)
    offset, positions, last = _FRAME_BYTES + 8, 0, -1
    for _ in range(n_bitmaps):
        (key,) = struct.unpack_from("<I", blob, offset)
        if not last < key <= _MAX_KEY:
            raise ValueError(f"a bitmap has the invalid key {key}")
        n_positions, offset = _bitmap(blob, offset + 4)
        positions, last = positions + n_positions, key
    return positions


def _bitmap(data: bytes, start: int) -> tuple[int, int]:
    """Return the number of positions in a roaring bitmap, and its end offset. Raises ValueError, struct.error."""
    (cookie,) = struct.unpack_from("<I", data, start)
    offset = start + 4
    if cookie & 0xFFFF == _WITH_RUNS:
        n_containers = (cookie >> 16) + 1
        flag_bytes = (n_containers + 7) // 8
        flags = int.from_bytes(data[offset : offset + flag_bytes], "little")
        offset += flag_bytes
    elif cookie == _WITHOUT_RUNS:
        (n_containers,) = struct.unpack_from("<I", data, offset)
        flags, offset = 0, offset + 4
    else:
        raise ValueError("a bitmap has an invalid cookie")
    if n_containers > 1 << 16:
        raise ValueError(f"a bitmap declares {n_containers} containers")
    counts = struct.unpack_from(f"<{2 * n_containers}H", data, offset)[1::2]
    offset += 4 * n_containers
    if not flags or n_containers >= _MIN_CONTAINERS_WITH_OFFSETS:
        offset += 4 * n_containers
    positions = 0
    for number, count in enumerate(counts):
        n_positions, size_bytes = _container(data, offset, count + 1, is_run=bool(flags >> number & 1))
        positions, offset = positions + n_positions, offset + size_bytes
    if offset > len(data):
        raise ValueError("a bitmap exceeds its blob")
    return positions, offset


def _container(data: bytes, offset: int, count: int, *, is_run: bool) -> tuple[int, int]:
    """Return the number of positions in a container, and its size in bytes."""
    if not is_run:
        return count, 2 * count if count <= _MAX_ARRAY_POSITIONS else _BITSET_BYTES
    (n_runs,) = struct.unpack_from("<H", data, offset)
    lengths = struct.unpack_from(f"<{2 * n_runs}H", data, offset + 2)[1::2]
    return sum(lengths) + n_runs, 2 + 4 * n_runs


#: Fields of Thrift's PageHeader, FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
_PLAIN_BYTES, _COMPRESSED_BYTES, _CRC = 2, 3, 4
_ROW_GROUPS, _COLUMNS, _COLUMN = 4, 1, 3
_CHUNK_BYTES, _DATA_PAGES, _DICTIONARY_PAGE = 7, 9, 11
_CHUNK_AT_ONCE_BYTES = 256 << 20
#: Decoders read a page size as a 32-bit number, even if the number is larger.
_MAX_PAGE_BYTES = (1 << 31) - 1


def check_pages(end: bytes, read: Callable[[int, int], bytes], path: str) -> None:
    """Check the pages of a Parquet file: the checksums, if any, and the declared size of each column's pages.

    One column of a row group is in memory at a time. Columns of more than 256 MiB are skipped.

    Args:
        end: The last bytes of the file, with its footer.
        read: Returns the bytes at a given offset with a given length.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: A page is damaged or the pages declare too much.
    """
    for part, start, size_bytes in _chunks(end, path):
        if size_bytes <= _CHUNK_AT_ONCE_BYTES:
            _check_chunk(read(start, size_bytes), part, path)


class CheckedPages(io.RawIOBase):
    """A stream of a Parquet file that checks pages as a decoder reads them, one column of a row group at a time.

    Any other read within a column and any read of more than 256 MiB raise ValueError. An invalid column raises
    CorruptFileError.

    Args:
        stream: The file.
        end: The last bytes of the file, with its footer.
        path: Path of the file, for errors.
    """

    def __init__(self, stream: Any, end: bytes, path: str):
        super().__init__()
        self._stream = stream
        self._path = path
        self._chunks = {start: (part, size_bytes) for part, start, size_bytes in _chunks(end, path)}

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
        """Return the next ``size`` bytes. A column can only be read as a whole."""
        start = self.tell()
        data = bytes(self._stream.read(size))
        part, size_bytes = self._chunks.get(start, ("", 0))
        if part and len(data) >= size_bytes:
            if size_bytes > _CHUNK_AT_ONCE_BYTES:
                raise ValueError(f"{part} has {size_bytes} bytes, more than can be read at once")
            _check_chunk(data[:size_bytes], part, self._path)
        elif any(start < at + n_bytes and at < start + len(data) for at, (_, n_bytes) in self._chunks.items()):
            raise ValueError("a column is not at the offset in its footer")
        return data


def _chunks(end: bytes, path: str) -> list[tuple[str, int, int]]:
    try:
        return list(_column_chunks(end))
    except ValueError as error:
        raise CorruptFileError(f"{path!r} is damaged: its footer cannot be read; restore it", path=path) from error


def _column_chunks(end: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the name (for errors), start offset and size in bytes of each column of each row group."""
    footer = Thrift(footer_of(end)).struct()
    for number, group in enumerate(structs(footer.get(_ROW_GROUPS, []))):
        for index, chunk in enumerate(structs(group.get(_COLUMNS, []))):
            (column,) = structs([chunk.get(_COLUMN, {})])
            size_bytes, start = column.get(_CHUNK_BYTES), column.get(_DATA_PAGES)
            first = column.get(_DICTIONARY_PAGE) or start
            if not (isinstance(size_bytes, int) and isinstance(start, int) and isinstance(first, int)):
                raise ValueError("a column without an offset")
            # For a column without rows, Arrow writes 0 as the offset of data pages, but writes a dictionary page.
            start = min(start, first) or first
            if min(start, size_bytes) < 0:
                raise ValueError("a column with a negative offset")
            yield f"column {index} of row group {number}", start, size_bytes


def _check_chunk(data: bytes, part: str, path: str) -> None:
    reader = Thrift(data)
    plain_bytes = 0
    while reader.at < len(data):
        try:
            page_plain_bytes, size_bytes, crc = _page_header(reader)
            plain_bytes += page_plain_bytes
            page = reader.take(size_bytes)
        except ValueError as error:
            raise CorruptFileError(
                f"{path!r} is damaged: a page header of {part} cannot be read; restore it", path=path
            ) from error
        if crc is not None and zlib.crc32(page) != crc & 0xFFFF_FFFF:
            raise CorruptFileError(
                f"{path!r} is damaged: a page of {part} does not match its checksum; restore it", path=path
            )
    check_size(plain_bytes, len(data), part, path)


def _page_header(reader: Thrift) -> tuple[int, int, int | None]:
    """Return the decompressed size of the next page, its stored size and its checksum."""
    header = reader.struct()
    plain_bytes, size_bytes, crc = (header.get(field) for field in (_PLAIN_BYTES, _COMPRESSED_BYTES, _CRC))
    if not isinstance(plain_bytes, int) or not isinstance(size_bytes, int) or not isinstance(crc, int | None):
        raise ValueError("a page without a size")
    if not 0 <= min(plain_bytes, size_bytes) <= max(plain_bytes, size_bytes) <= _MAX_PAGE_BYTES:
        raise ValueError("a page with an invalid size")
    return plain_bytes, size_bytes, crc
