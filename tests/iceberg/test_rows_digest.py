"""The digest of an epoch's rows does not depend on their order, and differs if any row differs."""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from trinitylake_ops.iceberg.rows_digest import RowsDigest, total_of

COLUMNS: dict[str, tuple[pa.DataType, Any, Any]] = {
    "boolean": (pa.bool_(), True, False),
    "int": (pa.int32(), -1, 2**31 - 1),
    "long": (pa.int64(), -(2**63), 0),
    "float": (pa.float32(), 0.5, math.inf),
    "double": (pa.float64(), 1.0, 1.000001),
    "nan": (pa.float64(), math.nan, 0.0),
    "decimal": (pa.decimal128(38, 2), Decimal("1.25"), Decimal("1.26")),
    "text": (pa.string(), "a", ""),
    "bytes": (pa.binary(), b"a", b"\xff"),
    "date": (pa.date32(), dt.date(2020, 1, 1), dt.date(1400, 1, 1)),
    "time": (pa.time64("us"), dt.time(1), dt.time(2)),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        dt.datetime(2020, 1, 2, tzinfo=dt.UTC),
    ),
    "list": (pa.list_(pa.int64()), [1, 2], [2, 1]),
    "map": (pa.map_(pa.string(), pa.int64()), [("a", 1)], [("a", 2)]),
    "struct": (pa.struct({"x": pa.int64(), "y": pa.string()}), {"x": 1, "y": None}, {"x": None, "y": "1"}),
}


def digest(rows: pa.Table, batch_rows: int = 100) -> str:
    counted = RowsDigest()
    batches = rows.to_batches(max_chunksize=batch_rows)
    assert list(counted.over(batches)) == batches
    return str(counted)


@pytest.mark.parametrize("name", COLUMNS)
def test_digest_depends_on_every_value(name: str) -> None:
    kind, first, other = COLUMNS[name]
    tables = [
        pa.table({"c": pa.array(values, kind)}) for values in ([first], [other], [None], [first, first], [first, other])
    ]
    assert len({digest(table) for table in tables}) == len(tables)
    assert digest(tables[4]) == digest(pa.table({"c": pa.array([other, first], kind)}))
    sliced = pa.table({"c": pa.array([None, first, other, None], kind)}).slice(1, 2)
    assert digest(sliced) == digest(tables[4])


def test_digest_depends_on_column_and_row_of_values() -> None:
    def digest_of(a: list[int], b: list[int]) -> str:
        return digest(pa.table({"a": a, "b": b}))

    assert len({digest_of([1, 2], [3, 4]), digest_of([1, 2], [4, 3]), digest_of([3, 4], [1, 2])}) == 3


def test_digest_is_independent_of_order_batches_and_tasks() -> None:
    rows = [{"k": number, "s": f"{number % 7}"} for number in range(1000)]
    expected = digest(pa.Table.from_pylist(rows))
    random.Random(1).shuffle(rows)
    tasks = [RowsDigest() for _ in range(3)]
    for number, task in enumerate(tasks):
        list(task.over(pa.Table.from_pylist(rows[number::3]).to_batches(max_chunksize=17)))
    assert str(total_of(tasks)) == expected
    assert str(total_of([])) == str(RowsDigest())


def test_digest_ignores_rounding_errors_of_doubles() -> None:
    sums = [sum([0.1, 0.2, 0.3]), sum([0.3, 0.2, 0.1])]
    assert sums[0] != sums[1]
    assert len({digest(pa.table({"c": [value]})) for value in sums}) == 1
