"""The claims of data and delete files of tables, doubted before a decoder of columns sees them.

PyArrow and pyiceberg allocate as much as a file claims. A column of zeros, a stripe of runs or a bitmap of whole ranges
takes a few bytes and decodes to gigabytes. The claims are at the end of a file, which every reader fetches first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.tables.claims.names import MAX_NAME_CHARS, parquet_name_chars
from trinitylake_ops.tables.claims.orc_tail import OrcTail
from trinitylake_ops.tables.claims.thrift import Thrift, structs

if TYPE_CHECKING:
    import pyarrow.parquet as pq

PARQUET_MAGIC = b"PAR1"
#: The formats of columnar files, by how their names end.
_FORMATS = {".parquet": "Parquet", ".orc": "ORC"}
#: A Parquet file ends with the length of its footer and the magic.
PARQUET_END_BYTES = 8
#: More bytes are no footer of a table's file: a decoder takes a hundred times as much.
MAX_FOOTER_BYTES = 32 << 20
#: Names in a smaller footer cannot become large.
_SMALL_FOOTER_BYTES = 32 << 10
_SCHEMA = 2  # a field of Thrift's FileMetaData
#: The most entries of any list in a footer, such as columns or row groups.
_MAX_LISTED = 200_000
#: The bytes that a row group, or the pages of a column, may always decode to. More are allowed up to a thousand times
#: the stored size.
ALWAYS_ALLOWED_BYTES = 256 << 20
_ALWAYS_ALLOWED_ROWS = 32 << 20
MAX_RATIO = 1000


def footer_bytes(end: bytes) -> int:
    """Return the size of a Parquet file's footer, its length and magic included, by its last eight bytes.

    Returns 0 for a file that is no Parquet.
    """
    if len(end) < PARQUET_END_BYTES or not end.endswith(PARQUET_MAGIC):
        return 0
    return int.from_bytes(end[-PARQUET_END_BYTES:-4], "little") + PARQUET_END_BYTES


def claims_bytes(end: bytes, size_bytes: int, path: str) -> int:
    """Return how many of a file's last bytes hold its claims, judging by some of them. 0 for a file of another format.

    Raises CorruptFileError for more bytes than the file has, or than a decoder should see.
    """
    needed_bytes = footer_bytes(end) or OrcTail.bytes_of(end)
    if needed_bytes > min(size_bytes, MAX_FOOTER_BYTES):
        raise CorruptFileError(
            f"{path!r} says that its footer has {needed_bytes} bytes, where the file has {size_bytes} and no table's"
            f" more than {MAX_FOOTER_BYTES}; restore it",
            path=path,
        )
    return needed_bytes


def end_with_claims(end: bytes, size_bytes: int, read_end: Callable[[int], bytes], path: str) -> bytes:
    """Return the last bytes of a file: the given ones, or more if they do not hold its claims.

    ``read_end`` returns a number of its last bytes. Raises as :func:`claims_bytes`, and what ``read_end`` raises.
    """
    needed_bytes = claims_bytes(end, size_bytes, path)
    return read_end(needed_bytes) if needed_bytes > len(end) else end


def named_format(path: str) -> str | None:
    """Return the columnar format that a file has by its name, None for another or an unknown format."""
    return next((name for ending, name in _FORMATS.items() if path.endswith(ending)), None)


def check_claims(end: bytes, size_bytes: int, path: str) -> None:
    """Check the claims of a Parquet or ORC file by its last bytes, which hold its footer.

    A file without a footer passes if its name promises none, as PyArrow's errors for such files name no file. Raises
    CorruptFileError.
    """
    is_parquet, is_orc = bool(footer_bytes(end)), bool(OrcTail.bytes_of(end))
    promised = named_format(path)
    if promised is not None and not (is_parquet if promised == "Parquet" else is_orc):
        raise CorruptFileError(
            f"{path!r} is no {promised} file: it does not end in a footer; it was cut or replaced, restore it",
            path=path,
        )
    if is_parquet:
        check_parquet_claims(read_footer(end, path), size_bytes, path)
    elif is_orc:
        try:
            tail = OrcTail.parse(end)
        except Exception as error:  # for broken bytes decompressors raise any exception
            raise CorruptFileError(f"{path!r} is no ORC file: {_reason(error)}; restore it", path=path) from error
        for number, stripe in enumerate(tail.stripes):
            _check_rows(stripe.rows, stripe.stored_bytes, f"stripe {number}", path)


def footer_of(end: bytes) -> bytes:
    """Return the footer among a Parquet file's last bytes, without its length and the magic."""
    return end[len(end) - footer_bytes(end) : len(end) - PARQUET_END_BYTES]


def _check_names(end: bytes, path: str) -> None:
    """Raise CorruptFileError for a schema whose full names are too long together."""
    if footer_bytes(end) <= _SMALL_FOOTER_BYTES:
        return
    try:
        n_chars = parquet_name_chars(structs(Thrift(footer_of(end)).struct(last=_SCHEMA).get(_SCHEMA, [])))
    except ValueError as error:
        raise CorruptFileError(f"{path!r} is no Parquet file: {error}; restore it", path=path) from error
    if n_chars > MAX_NAME_CHARS:
        raise _absurd(f"{n_chars} characters in the full names of its columns", footer_bytes(end), "its footer", path)


def read_footer(end: bytes, path: str) -> pq.FileMetaData:
    """Return the footer of a Parquet file by its last bytes, at least all of the footer. Raises CorruptFileError."""
    import pyarrow.parquet as pq  # readers and writers of metadata need not load it

    claims_bytes(end, len(end), path)
    _check_names(end, path)
    try:
        with pq.ParquetFile(pa.BufferReader(end), thrift_container_size_limit=_MAX_LISTED) as file:
            return file.metadata
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{path!r} is no Parquet file: {_reason(error)}; restore it", path=path) from error


def check_parquet_claims(metadata: pq.FileMetaData, size_bytes: int, path: str) -> None:
    """Raise CorruptFileError for a footer whose row groups claim absurdly much for the file's size.

    Columns are not read one by one, as PyArrow ends the process on statistics that contradict themselves.
    """
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        check_size(group.total_byte_size, size_bytes, f"row group {number}", path)
        _check_rows(group.num_rows, size_bytes, f"row group {number}", path)


def check_size(claimed_bytes: int, stored_bytes: int, what: str, path: str) -> None:
    """Raise CorruptFileError if ``what`` of a file claims to decode to absurdly more than is stored of it."""
    if claimed_bytes > ALWAYS_ALLOWED_BYTES and claimed_bytes > MAX_RATIO * stored_bytes:
        raise _absurd(f"{claimed_bytes} bytes", stored_bytes, what, path)


def _check_rows(rows: int, stored_bytes: int, what: str, path: str) -> None:
    if rows > _ALWAYS_ALLOWED_ROWS and rows > MAX_RATIO * stored_bytes:
        raise _absurd(f"{rows} rows", stored_bytes, what, path)


def _absurd(claim: str, stored_bytes: int, what: str, path: str) -> CorruptFileError:
    return CorruptFileError(
        f"{path!r} claims {claim} in {what}, of {stored_bytes} bytes: no table's file does; restore it", path=path
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
