"""Order-independent digests of rows, which prove that a rewrite changed no row.

A digest consists of the number of rows and a checksum of whole rows. For each column and each nested field it has the
number of values, the number of nulls, and a checksum of the values. Checksums are sums of 64-bit hashes. Columns are
read by the field ids of a table's schema and hashed according to its types, so rows in files with an older schema have
the same digest as the rows that the table shows. PyIceberg's projection and casts are not involved.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IcebergType,
    ListType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampNanoType,
    TimestamptzNanoType,
    UUIDType,
)

from trinitylake_ops.errors import ContentChangedError

_U64 = pa.uint64()
#: Odd multipliers mod 2**64. _INVERSE is the inverse of _BASE.
_FIRST, _SECOND, _BASE = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_HALF = 32
_NULL = 0x5851F42D4C957F2D
#: Number of rows hashed at once, which bounds the memory of intermediate results.
_ROWS_AT_ONCE = 1 << 15
#: Number of list elements hashed at once.
_ELEMENTS_AT_ONCE = 1 << 16
#: Maximum length in bytes (a multiple of 8) of strings that are padded to the longest string of the batch.
_SHORT = 32
#: Strings longer than this number of bytes are hashed one by one.
_LONG = 256
#: Odd multipliers for the words of a string, by position.
_WORD_MULTIPLIERS = [pow(_BASE, at + 1, 1 << 64) for at in range(_LONG // 8)]


class ContentDigest:
    """The digest of rows under a schema."""

    def __init__(self, schema: Schema):
        self._schema = schema
        self._n_rows = 0
        self._rows = 0
        self._columns: dict[str, list[int]] = {}  # path -> number of values, nulls, checksum

    def add(self, batch: pa.RecordBatch, file_schema: Schema, constants: Mapping[int, Any]) -> None:
        """Add the rows of a file.

        Args:
            batch: Rows as read from the file by Arrow. They may contain columns that the schema lacks.
            file_schema: The columns of the file, with their field ids.
            constants: Values of columns that the file lacks, by field id. Other missing columns have their initial
                default or null.
        """
        for _ in self.hashed(batch, file_schema, constants):
            pass

    def hashed(
        self, batch: pa.RecordBatch, file_schema: Schema, constants: Mapping[int, Any]
    ) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Add the rows of a file, and yield them in parts with a 64-bit hash of each row. See :meth:`add`."""
        for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
            part = batch.slice(first, _ROWS_AT_ONCE)
            yield part, self._add(part, file_schema, constants)

    def _add(self, batch: pa.RecordBatch, file_schema: Schema, constants: Mapping[int, Any]) -> pa.Array:
        fields = {field.field_id: field for field in file_schema.fields}
        rows = _constant(0, batch.num_rows)
        for field in self._schema.fields:
            stored = fields.get(field.field_id)
            column = None if stored is None else batch.column(stored.name)
            kind = None if stored is None else stored.field_type
            default = constants.get(field.field_id, field.initial_default)
            rows = _fold(rows, self._hash(field, column, kind, batch.num_rows, field.name, default))
        mixed = _mix(rows)
        self._n_rows += batch.num_rows
        self._rows += _sum(mixed)
        return mixed

    def differing_columns(self, other: ContentDigest) -> list[str]:
        """Return the names of top-level columns whose values differ from those of another digest of the same schema."""
        return [field.name for field in self._schema.fields if self._column(field.name) != other._column(field.name)]

    def difference(self, other: ContentDigest) -> str | None:
        """Describe the first difference from another digest: a row count or a column. Return None if they are equal."""
        if self._n_rows != other._n_rows:
            return f"{self._n_rows} rows became {other._n_rows}"
        for path in (*self._columns, *other._columns):
            (values, nulls, checksum), other_counts = self._column(path), other._column(path)
            if [values, nulls] != other_counts[:2]:
                counts = f"{other_counts[0]} ({other_counts[1]} null)"
                return f"column {path!r} had {values} values ({nulls} null), and has {counts}"
            if checksum != other_counts[2]:
                return f"column {path!r} has different values"
        return None if (self._rows - other._rows) % (1 << 64) == 0 else "values moved to other rows"

    def check_same(self, other: ContentDigest, table: str, path: str) -> None:
        """Check that rewritten rows equal the rows that they replace.

        Args:
            other: Digest of the rewritten rows, with the same schema.
            table: Name of the table.
            path: Location of the table.

        Raises:
            ContentChangedError: The rows differ.
        """
        if difference := self.difference(other):
            raise ContentChangedError(
                f"rewrite of table {table!r} changed rows: {difference}; nothing was committed, keep the old files and"
                " report this",
                path=path,
            )

    def _column(self, path: str) -> list[int]:
        values, nulls, checksum = self._columns.get(path, [0, 0, 0])
        return [values, nulls, checksum % (1 << 64)]

    def _hash(
        self, field: NestedField, array: pa.Array | None, kind: IcebergType | None, n: int, path: str, default: Any
    ) -> pa.Array:
        """Return the hash of each value, and count the values. Without an array, all values are the default."""
        counts = self._columns.setdefault(path, [0, 0, 0])  # the entry must precede those of nested fields
        if array is None or kind is None:
            array, kind = _default(field.field_type, default, n), field.field_type
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if isinstance(field.field_type, StructType):
            hashes = self._struct(field.field_type, array, kind, path)
        elif isinstance(field.field_type, ListType):
            assert isinstance(kind, ListType)
            hashes = self._list(field.field_type, array, kind, path)
        elif isinstance(field.field_type, MapType):
            assert isinstance(kind, MapType)
            hashes = self._map(field.field_type, array, kind, path)
        else:
            hashes = _primitive(array, field.field_type)
        if array.null_count and hashes.null_count == array.null_count:
            hashes = pc.fill_null(hashes, _u64(_NULL))
        elif array.null_count:
            hashes = pc.if_else(array.is_valid(), hashes, _u64(_NULL))
        counts[0] += n
        counts[1] += array.null_count
        counts[2] += _sum(hashes)
        return hashes

    def _struct(self, struct: StructType, array: pa.Array, kind: IcebergType, path: str) -> pa.Array:
        assert isinstance(kind, StructType)
        names = {field.field_id: field for field in kind.fields}
        children = dict(zip((field.name for field in array.type), array.flatten(), strict=True))
        hashes = _constant(0, len(array))
        for field in struct.fields:
            stored = names.get(field.field_id)
            child = None if stored is None else children[stored.name]
            if child is None and field.initial_default is not None and array.null_count:
                default = _default(field.field_type, field.initial_default, len(array))
                child, stored = pc.if_else(array.is_valid(), default, None), field
            child_type = None if stored is None else stored.field_type
            hashes = _fold(
                hashes,
                self._hash(field, child, child_type, len(array), f"{path}.{field.name}", field.initial_default),
            )
        return _mix(hashes)

    def _list(self, kind: ListType, array: pa.Array, stored: ListType, path: str) -> pa.Array:
        if not isinstance(array, pa.ListArray | pa.LargeListArray):
            array = array.cast(pa.list_(array.type.value_field))
        elements, lengths = _elements(array)
        hashes = self._hash(kind.element_field, elements, stored.element_type, len(elements), f"{path}.element", None)
        return _sequences(hashes, lengths)

    def _map(self, kind: MapType, array: pa.Array, stored: MapType, path: str) -> pa.Array:
        child = pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
        lists = pa.Array.from_buffers(
            pa.list_(child.type), len(array), array.buffers()[:2], offset=array.offset, children=[child]
        )
        entries, lengths = _elements(lists)
        keys, values = entries.flatten()
        n = len(entries)
        hashes = _fold(
            self._hash(kind.key_field, keys, stored.key_type, n, f"{path}.key", None),
            self._hash(kind.value_field, values, stored.value_type, n, f"{path}.value", None),
        )
        return _sequences(_mix(hashes), lengths)


def _elements(lists: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the elements of lists, and the length of each list. Null lists have length 0."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).cast(pa.int64())
    first, last = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
    if last - first == pc.sum(lengths, min_count=0).as_py():
        return lists.values.slice(first, last - first), lengths
    return lists.flatten(), lengths  # elements below null lists are skipped; Arrow cannot flatten lists of UUIDs


def _primitive(array: pa.Array, kind: IcebergType) -> pa.Array:
    """Return the hash of each value according to the table's type. Hashes of nulls are undefined."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if isinstance(kind, DecimalType):
        array = array.cast(pa.decimal128(kind.precision, kind.scale)).view(pa.binary(16))
    if isinstance(kind, StringType | BinaryType | FixedType | UUIDType | DecimalType):
        return hash_texts(array)
    if pa.types.is_null(array.type):
        return _constant(0, len(array))
    if isinstance(kind, FloatType | DoubleType):
        numbers = array.cast(pa.float64())
    elif pa.types.is_timestamp(array.type):
        # Readers of format versions 1 and 2 truncate nanoseconds.
        unit = "ns" if isinstance(kind, TimestampNanoType | TimestamptzNanoType) else "us"
        numbers = array if array.type.unit == unit else array.cast(pa.timestamp(unit, array.type.tz), safe=False)
    elif pa.types.is_time(array.type):
        numbers = array.cast(pa.time64("us")).view(pa.int64())
    elif isinstance(kind, DateType):
        numbers = array.cast(pa.date32()).view(pa.int32()).cast(pa.int64())
    else:
        numbers = (array.cast(pa.uint8()) if pa.types.is_boolean(array.type) else array).cast(pa.int64())
    return _finalize(pc.multiply(numbers.view(_U64), _u64(_FIRST)))


def hash_texts(array: pa.Array) -> pa.Array:
    """Return a hash of each string or binary value, from its length and its 8-byte words."""
    n = len(array)
    if n > _ROWS_AT_ONCE:  # elements of lists
        parts = range(0, n, _ROWS_AT_ONCE)
        return pa.concat_arrays([hash_texts(array.slice(first, _ROWS_AT_ONCE)) for first in parts])
    if pa.types.is_fixed_size_binary(array.type) and array.type.byte_width in range(8, _LONG + 1, 8):
        width, data = array.type.byte_width, array.buffers()[1]
        if data is not None:
            return _of_words(data.slice(array.offset * width), _constant(width, n), width)
    texts = array.cast(pa.large_binary())
    if texts.null_count:
        texts = pc.fill_null(texts, b"")
    lengths = pc.binary_length(texts).cast(_U64)
    longest = pc.max(lengths).as_py() or 0
    shorter, width = 0, _SHORT
    if longest <= width:
        return _hash_padded(texts, lengths, longest)
    hashes = _constant(0, n)
    while shorter < longest and shorter < _LONG:  # group by similar length to limit the memory of padding
        of_width = pc.less_equal(lengths, pa.scalar(width, _U64))
        if shorter:
            of_width = pc.and_(of_width, pc.greater(lengths, pa.scalar(shorter, _U64)))
        hashed = _hash_padded(texts.filter(of_width), lengths.filter(of_width), width)
        hashes = hashed if len(hashed) == n else pc.replace_with_mask(hashes, of_width, hashed)
        shorter, width = width, 2 * width
    if longest > _LONG:
        is_long = pc.greater(lengths, pa.scalar(_LONG, _U64))
        hashes = pc.replace_with_mask(hashes, is_long, _long_texts(texts.filter(is_long)))
    return hashes


def _hash_padded(texts: pa.Array, lengths: pa.Array, longest: int) -> pa.Array:
    """Return hashes of values up to a given length, padded with zeros to the same number of words."""
    width = -(-longest // 8) * 8
    if not len(texts) or not width:
        return _finalize(pc.multiply(lengths, _u64(_SECOND)))
    _, offsets, data = texts.buffers()
    # The kernel pads bytes and does not decode characters.
    chars = pa.Array.from_buffers(pa.large_string(), len(texts), [None, offsets, data], offset=texts.offset)
    return _of_words(pc.ascii_rpad(chars, width, padding="\0").buffers()[2], lengths, width)


def _of_words(data: pa.Buffer, lengths: pa.Array, width: int) -> pa.Array:
    """Return hashes of values that all have the same number of words. Trailing zero words do not count."""
    n, n_words = len(lengths), width // 8
    words = pa.Array.from_buffers(_U64, n * n_words, [None, data])
    words = pc.bit_wise_xor(words, pc.shift_right(words, _u64(_HALF)))
    hashes = pc.multiply(lengths, _u64(_SECOND))
    for at in range(n_words):
        column = words if n_words == 1 else pc.take(words, _word_indices(n_words, at).slice(0, n), boundscheck=False)
        hashes = pc.add(hashes, pc.multiply(column, _u64(_WORD_MULTIPLIERS[at])))
    return _finalize(hashes)


@functools.cache
def _u64(value: int) -> pa.Scalar:
    """Return a constant as a scalar, created on first use because a process's first scalar loads pandas."""
    return pa.scalar(value, _U64)


@functools.cache
def _word_indices(n_words: int, at: int) -> pa.Array:
    """Return the indices of the words at position ``at`` of values with ``n_words`` each."""
    return pa.array(range(at, at + n_words * _ROWS_AT_ONCE, n_words), pa.int32())


def _long_texts(texts: pa.Array) -> pa.Array:
    digests = (hashlib.blake2b(text.as_buffer(), digest_size=8).digest() for text in texts)
    return pa.array((int.from_bytes(digest) for digest in digests), _U64)


def _sequences(hashes: pa.Array, lengths: pa.Array) -> pa.Array:
    """Return a hash of each sequence of values: a polynomial of the values, and the length."""
    n = len(lengths)
    if len(hashes) > _ELEMENTS_AT_ONCE and n > 1:
        half = pc.sum(lengths.slice(0, n // 2)).as_py()
        return pa.concat_arrays(
            [
                _sequences(hashes.slice(0, half), lengths.slice(0, n // 2)),
                _sequences(hashes.slice(half), lengths.slice(n // 2)),
            ]
        )
    if not len(hashes):
        return _mix(_constant(_FIRST, n))
    powers, inverses = _powers(_BASE, len(hashes)), _powers(_INVERSE, len(hashes) + 1)
    sums = pa.concat_arrays([_constant(0, 1), pc.cumulative_sum(pc.multiply(hashes, powers.slice(0, len(hashes))))])
    ends = pc.cumulative_sum(lengths.cast(pa.int64()))
    starts = pc.subtract(ends, lengths)
    totals = pc.multiply(pc.subtract(sums.take(ends), sums.take(starts)), inverses.take(starts))
    return _mix(pc.add(totals, pc.multiply(pc.add(lengths.cast(_U64), pa.scalar(1, _U64)), _u64(_FIRST))))


def _powers(base: int, n: int) -> pa.Array:
    """Return at least ``n`` powers of a number, starting with 1."""
    return _cached_powers(base) if n <= _ELEMENTS_AT_ONCE + 1 else _compute_powers(base, n)


@functools.cache
def _cached_powers(base: int) -> pa.Array:
    return _compute_powers(base, _ELEMENTS_AT_ONCE + 1)


def _compute_powers(base: int, n: int) -> pa.Array:
    return pc.cumulative_prod(pa.concat_arrays([_constant(1, 1), _constant(base, n - 1)]))


def _mix(values: pa.Array) -> pa.Array:
    """Return hashes of numbers in which each bit depends on all bits of the number."""
    values = pc.multiply(pc.add(values, _u64(_BASE)), _u64(_FIRST))
    values = pc.multiply(pc.bit_wise_xor(values, pc.shift_right(values, _u64(_HALF))), _u64(_SECOND))
    return pc.bit_wise_xor(values, pc.shift_right(values, _u64(_HALF)))


def _finalize(hashes: pa.Array) -> pa.Array:
    """Fold the high bits of products into all bits of the hash."""
    return pc.multiply(pc.bit_wise_xor(hashes, pc.shift_right(hashes, _u64(_HALF))), _u64(_SECOND))


def _fold(hashes: pa.Array, added: pa.Array) -> pa.Array:
    return pc.add(pc.multiply(hashes, _u64(_BASE)), added)


def _constant(value: int, n: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, _U64), n)


def _default(kind: IcebergType, value: Any, n: int) -> pa.Array:
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # importing it loads pandas

    arrow = schema_to_pyarrow(kind, include_field_ids=False)
    return pa.nulls(n, arrow) if value is None else pa.repeat(pa.scalar(value, arrow), n)


def _sum(hashes: pa.Array) -> int:
    return int(pc.sum(hashes, min_count=0).as_py())
