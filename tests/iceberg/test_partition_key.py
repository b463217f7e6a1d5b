"""Partition values are converted exactly to their column's type."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.totals import partition_text
from trinitylake_ops.iceberg.write.partition_key import decode_partitions, encode_partitions, typed_value

KINDS: list[tuple[PrimitiveType, st.SearchStrategy[Any]]] = [
    (BooleanType(), st.booleans()),
    (IntegerType(), st.integers(-(2**31), 2**31 - 1)),
    (LongType(), st.integers(-(2**63), 2**63 - 1)),
    (StringType(), st.text()),
    (BinaryType(), st.binary()),
    (DateType(), st.integers(-700_000, 2_900_000)),
    (TimestampType(), st.integers(-(2**60), 2**60)),
    (TimestamptzType(), st.integers(-(2**60), 2**60)),
    (DecimalType(9, 2), st.integers(-(10**9) + 1, 10**9 - 1).map(lambda number: decimal.Decimal(number).scaleb(-2))),
]
SCHEMA = Schema(
    *(NestedField(index, f"c{index}", kind) for index, (kind, _) in enumerate(KINDS, start=1)),
    NestedField(100, "nested", StructType()),
)
SPEC = PartitionSpec(
    *(PartitionField(index, 1000 + index, IdentityTransform(), f"c{index}") for index in range(1, 1 + len(KINDS)))
)
PARTITIONS = st.tuples(*(st.none() | values for _, values in KINDS)).map(lambda values: Record(*values))


@given(st.lists(PARTITIONS, max_size=3))
def test_encoded_partitions_are_decoded(partitions: list[Record]) -> None:
    encoded = encode_partitions(partitions, SPEC, SCHEMA)
    assert decode_partitions(encoded, SPEC, SCHEMA) == frozenset(partitions)
    assert encode_partitions(reversed(partitions), SPEC, SCHEMA) == encoded
    assert len(encoded) == len(set(partitions))


@given(st.none() | st.text(), st.none() | st.text())
def test_partition_text_is_unambiguous(first: str | None, other: str | None) -> None:
    spec = PartitionSpec(PartitionField(4, 1000, IdentityTransform(), "region"))
    texts = [partition_text(Record(value), spec, SCHEMA) for value in (first, other)]
    assert (texts[0] == texts[1]) == (first == other)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("c2", "1.0"),
        ("c2", "1.9"),
        ("c2", " 1"),
        ("c2", "1_0"),
        ("c2", "1e1"),
        ("c2", "\u0661"),
        ("c2", "99999999999"),
        ("c2", -(2**40)),
        ("c2", decimal.Decimal("1.5")),
        ("c3", "9" * 30),
        ("c6", "2026-13-01"),
        ("c6", dt.datetime(2026, 1, 1, 5, tzinfo=dt.UTC)),
        ("c7", "today"),
        ("c1", "yes"),
        ("c9", "abc"),
        ("c9", "1.505"),
        ("c9", "1e1"),
        ("c9", "NaN"),
        ("c9", "12345678"),
        ("missing", "1"),
        ("nested", "1"),
    ],
)
def test_inexact_partition_value_is_rejected(column: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        typed_value(SCHEMA, column, value)
    assert "\n" not in str(caught.value)


def test_string_is_parsed_as_column_type() -> None:
    literals = {
        column: typed_value(SCHEMA, column, text)
        for column, text in [
            ("c1", "True"),
            ("c2", "+01"),
            ("c3", "-5"),
            ("c4", "null"),
            ("c6", "1970-01-02"),
            ("c9", "-1.5"),
        ]
    }
    assert {column: literal.value if literal else None for column, literal in literals.items()} == {
        "c1": True,
        "c2": 1,
        "c3": -5,
        "c4": "null",
        "c6": 1,
        "c9": decimal.Decimal("-1.50"),
    }
    assert typed_value(SCHEMA, "c4", None) is None
