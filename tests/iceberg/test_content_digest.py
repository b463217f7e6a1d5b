"""Content digests do not depend on row order or encoding, and differ if any value differs."""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids, schema_to_pyarrow
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
)

from tests.iceberg.nested import array, nested_rows, value
from trinitylake_ops.iceberg.content_digest import ContentDigest, hash_texts


def iceberg(schema: pa.Schema) -> Schema:
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(schema))


def digest(rows: pa.Table, schema: Schema, *, table_schema: Schema | None = None, n_rows: int = 100) -> ContentDigest:
    content_digest = ContentDigest(table_schema or schema)
    for batch in rows.to_batches(max_chunksize=n_rows):
        content_digest.add(batch, schema, {})
    return content_digest


@pytest.mark.parametrize("seed", range(6))
def test_digest_depends_on_values_but_not_on_order_or_batches(seed: int) -> None:
    rows, random = nested_rows(seed), Random(seed)
    schema = iceberg(rows.schema)
    base = digest(rows, schema)
    order = random.sample(range(rows.num_rows), rows.num_rows)
    shuffled = pa.Table.from_batches([rows.to_batches()[0].slice(index, 1) for index in order])
    assert base.difference(digest(shuffled, schema, n_rows=3)) is None
    assert base.difference(digest(rows.slice(1), schema)) is not None
    for index, field in enumerate(rows.schema):
        values = rows[field.name].to_pylist()
        row = random.randrange(len(values))
        new_value = value(random, field.type)
        if repr(new_value) == repr(values[row]):
            continue
        changed_rows = rows.set_column(index, field, array([*values[:row], new_value, *values[row + 1 :]], field.type))
        difference = base.difference(digest(changed_rows, schema))
        assert difference is not None
        assert f"'{field.name}" in difference


def test_digest_detects_values_moved_between_rows() -> None:
    rows = pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    schema = iceberg(rows.schema)
    swapped = rows.set_column(1, "b", pa.array(["y", "x", "z"]))
    assert digest(rows, schema).difference(digest(swapped, schema)) == "values moved to other rows"
    doubled = pa.concat_tables([rows.slice(0, 2), rows.slice(0, 1)])
    assert digest(rows, schema).difference(digest(doubled, schema)) is not None


_NANS = [struct.unpack("<d", bits.to_bytes(8, "little"))[0] for bits in (0x7FF8 << 48, (0x7FF8 << 48) | 1)]
_LISTS = pa.list_(pa.struct([("a", pa.int32())]))
_MAPS = pa.map_(pa.string(), pa.struct([("a", pa.int32())]))


@pytest.mark.parametrize(
    ("kind", "first", "other"),
    [
        (pa.float64(), 0.0, -0.0),
        (pa.float64(), math.nan, None),
        (pa.float64(), _NANS[0], _NANS[1]),
        (pa.string(), "", None),
        (pa.binary(), b"a", b"a\0"),
        (pa.binary(), b"a" * 300, b"a" * 299 + b"b"),
        (pa.decimal128(38, 0), Decimal(1), Decimal(1 << 64)),
        (_LISTS, None, []),
        (_LISTS, [], [None]),
        (_LISTS, [None], [{"a": None}]),
        (_MAPS, None, []),
        (_MAPS, [("k", None)], [("k", {"a": None})]),
        (pa.list_(pa.list_(pa.int32())), [[1], [2]], [[1, 2], []]),
        (pa.list_(pa.int32()), [1, 2], [2, 1]),
        (pa.struct([("s", _LISTS)]), {"s": None}, None),
        (pa.struct([("s", _LISTS)]), {"s": None}, {"s": []}),
    ],
)
def test_digest_distinguishes_similar_values(kind: pa.DataType, first: Any, other: Any) -> None:
    schema = iceberg(pa.schema([("c", kind)]))
    first_rows, other_rows = (pa.table({"c": pa.array([value, None], kind)}) for value in (first, other))
    assert digest(first_rows, schema).difference(digest(other_rows, schema)) is not None
    assert digest(first_rows, schema).difference(digest(first_rows.take([1, 0]), schema)) is None


@pytest.mark.parametrize(
    ("before", "after", "stored", "read_type", "values"),
    [
        (IntegerType(), LongType(), pa.int32(), pa.int64(), [1, -1, None]),
        (FloatType(), DoubleType(), pa.float32(), pa.float64(), [0.1, -0.0, math.nan, None]),
        (DecimalType(9, 2), DecimalType(18, 2), pa.decimal128(9, 2), pa.decimal128(18, 2), [Decimal("1.23"), None]),
        (StringType(), StringType(), pa.dictionary(pa.int8(), pa.string()), pa.large_string(), ["a", "b", "a", None]),
    ],
)
def test_digest_is_equal_for_promoted_types_and_encodings(
    before: IcebergType, after: IcebergType, stored: pa.DataType, read_type: pa.DataType, values: list[Any]
) -> None:
    first, second = (Schema(NestedField(1, "c", kind, required=False)) for kind in (before, after))
    old = pa.table({"c": pa.array(values, stored)})
    new = pa.table({"c": pa.array(values, stored).cast(read_type)})
    assert digest(old, first, table_schema=second).difference(digest(new, second)) is None
    nested = [ListType(2, kind, element_required=False) for kind in (before, after)]
    first, second = (Schema(NestedField(1, "c", kind, required=False)) for kind in nested)
    if not pa.types.is_dictionary(stored):
        old = pa.table({"c": pa.array([values, None, []], pa.list_(stored))})
        new = pa.table({"c": old["c"].cast(pa.list_(read_type))})
        assert digest(old, first, table_schema=second).difference(digest(new, second)) is None


def test_digest_follows_schema_evolution() -> None:
    before = Schema(NestedField(1, "s", StructType(_field(2, "a"), _field(3, "b")), required=False), _field(4, "gone"))
    after = Schema(_field(5, "new"), NestedField(1, "t", StructType(_field(6, "c"), _field(2, "d")), required=False))
    old = pa.Table.from_pylist(
        [{"s": None, "gone": 1}, {"s": {"a": 1, "b": 2}, "gone": None}],
        schema_to_pyarrow(before, include_field_ids=False),
    )
    new = pa.Table.from_pylist(
        [{"new": None, "t": None}, {"new": None, "t": {"c": None, "d": 1}}],
        schema_to_pyarrow(after, include_field_ids=False),
    )
    assert digest(old, before, table_schema=after).difference(digest(new, after)) is None
    other = new.set_column(0, "new", pa.array([None, 7], pa.int32()))
    assert digest(old, before, table_schema=after).difference(digest(other, after)) is not None


def _field(number: int, name: str) -> NestedField:
    return NestedField(number, name, IntegerType(), required=False)


def test_digest_of_large_lists_and_strings_is_independent_of_order() -> None:
    lists = [[1] * 70_000, [], list(range(100_000)), None, [3]]
    rows = pa.table({"l": pa.array(lists, pa.list_(pa.int32())), "t": ["a" * 70_000, "", "b" * 255, None, "c" * 256]})
    schema = iceberg(rows.schema)
    assert digest(rows, schema).difference(digest(rows.take([4, 2, 0, 1, 3]), schema, n_rows=2)) is None


def test_string_hash_is_independent_of_batch_and_encoding() -> None:
    random = Random(5)
    texts = [random.randbytes(length) for length in range(300) for _ in range(3)]
    texts += [bytes(length) for length in range(1, 300)]  # zeros, which are also used as padding
    for index in range(0, 64, 8):  # the high bytes of two words
        texts.append(bytes(index + 7) + b"\x80" + bytes(7 - index % 8) + b"\x80" + bytes(70 - index))
    texts = list(dict.fromkeys(texts))
    expected = [hash_texts(pa.array([text]))[0].as_py() for text in texts]
    assert len(set(expected)) == len(texts)
    assert hash_texts(pa.array(texts, pa.large_binary())).to_pylist() == expected
    order = random.sample(range(len(texts)), len(texts))
    assert hash_texts(pa.array(texts).take(order)).to_pylist() == [expected[index] for index in order]
    assert hash_texts(pa.array([b"x", *texts, None]).slice(1, 200)).to_pylist() == expected[:200]
    for width in (8, 16, 20, 256):
        fixed = [text for text in texts if len(text) == width]
        stored = pa.array([fixed[0], *fixed], pa.binary(width)).slice(1)
        assert hash_texts(stored).to_pylist() == hash_texts(pa.array(fixed)).to_pylist()
    many = pa.array([str(number) for number in range(40_000)])
    assert hash_texts(many).slice(39_000, 10).to_pylist() == hash_texts(many.slice(39_000, 10)).to_pylist()
