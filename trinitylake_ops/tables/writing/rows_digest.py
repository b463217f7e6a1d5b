"""A digest of rows that depends neither on their order nor on the tasks that write them.

A stream repeats an epoch after a failure. Its rows then arrive in another order, in other batches and tasks. A sum of
double values may differ in its last bits, because the values were added in another order. So ``double`` values count
with the precision of ``float``. All other values count exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce

import mmh3
import pyarrow as pa
import pyarrow.compute as pc

_BITS = 64
_MASK = (1 << _BITS) - 1
_NULL, _COLUMN = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_MULTIPLIERS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


class RowsDigest:
    """The number of rows, and the sum of a hash of each of them."""

    def __init__(self, n_rows: int = 0, total: int = 0):
        self.n_rows = n_rows
        self.total = total

    def __str__(self) -> str:
        return f"{self.n_rows}:{self.total:016x}"

    def __add__(self, other: RowsDigest) -> RowsDigest:
        return RowsDigest(self.n_rows + other.n_rows, (self.total + other.total) & _MASK)

    def over(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches as they are, and add their rows."""
        for batch in batches:
            self.n_rows += batch.num_rows
            hashes = _combined(batch.columns, batch.num_rows)
            self.total = (self.total + (pc.sum(hashes).as_py() or 0)) & _MASK
            yield batch


def total_of(digests: Iterable[RowsDigest]) -> RowsDigest:
    """Return the digest of the rows of all tasks."""
    return reduce(RowsDigest.__add__, digests, RowsDigest())


def _combined(columns: Iterable[pa.Array], n_rows: int) -> pa.Array:
    """Return a hash for each row of some columns, in their order."""
    rows = pa.repeat(_number(0), n_rows)
    for column in columns:
        rows = _mixed(pc.add(pc.multiply(rows, _number(_COLUMN)), _hashes(column)))
    return rows


def _hashes(column: pa.Array) -> pa.Array:
    """Return a hash for each value, as unsigned integers of 64 bits. Their arithmetic wraps."""
    kind = column.type
    if pa.types.is_struct(kind):
        values = _combined(column.flatten(), len(column))
    elif pa.types.is_nested(kind):
        values = _hashes_of_text(map(repr, column.to_pylist()))
    elif pa.types.is_floating(kind):
        values = _mixed(_bits(column.cast(pa.float32(), safe=False), pa.int32()))
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        values = _mixed(column.cast(pa.int64(), safe=False).cast(pa.uint64(), safe=False))
    elif pa.types.is_temporal(kind) and kind.bit_width in (32, _BITS):
        values = _mixed(_bits(column, pa.int32() if kind.bit_width < _BITS else pa.int64()))
    elif pa.types.is_null(kind):
        return pa.repeat(_number(_NULL), len(column))
    else:
        distinct = column.dictionary_encode()
        found = distinct.dictionary.to_pylist()
        is_text = pa.types.is_string(kind) or pa.types.is_binary(kind)
        values = _hashes_of_text(found if is_text else map(repr, found)).take(distinct.indices)
    return pc.if_else(column.is_null(), _number(_NULL), values)


def _bits(column: pa.Array, integer: pa.DataType) -> pa.Array:
    return column.view(integer).cast(pa.int64()).cast(pa.uint64(), safe=False)


def _mixed(values: pa.Array) -> pa.Array:
    """Spread each bit over all bits, as Murmur3 does at its end."""
    shift = pa.scalar(33, pa.uint64())
    for multiplier in _MULTIPLIERS:
        values = pc.multiply(pc.bit_wise_xor(values, pc.shift_right(values, shift)), _number(multiplier))
    return pc.bit_wise_xor(values, pc.shift_right(values, shift))


def _number(value: int) -> pa.Scalar:
    return pa.scalar(value, pa.uint64())


def _hashes_of_text(values: Iterable[str | bytes]) -> pa.Array:
    return pa.array([mmh3.hash64(value, signed=False)[0] for value in values], pa.uint64())
