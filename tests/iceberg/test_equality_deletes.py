"""Equality deletes match rows whose key values are all equal. Nulls equal each other, and so do NaNs."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinitylake_ops.iceberg.delete_files import _DeletedKeys

_KEYS = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2**40]), st.sampled_from([None, "", "a", "b"])), max_size=12)


@settings(max_examples=150, deadline=None)
@given(deleted=_KEYS.filter(bool), matches=_KEYS)
def test_multi_column_keys_match_as_pairs(
    deleted: list[tuple[int | None, str | None]], matches: list[tuple[int | None, str | None]]
) -> None:
    data_types = (pa.int64(), pa.string())
    keys = _DeletedKeys(pa.table(_columns(deleted, data_types), names=["a", "b"]))
    assert keys.matches(_columns(matches, data_types)).to_pylist() == [row in set(deleted) for row in matches]


def _columns(rows: list[Any], data_types: tuple[pa.DataType, ...]) -> list[pa.Array]:
    return [pa.array([row[index] for row in rows], kind) for index, kind in enumerate(data_types)]


@pytest.mark.parametrize(
    ("kind", "deleted", "other"),
    [
        (pa.float64(), float("nan"), 1.0),
        (pa.float32(), 0.5, float("nan")),
        (pa.decimal128(9, 2), Decimal("1.10"), Decimal("1.11")),
        (pa.binary(3), b"abc", b"abd"),
        (pa.large_string(), "a", "A"),
        (pa.date32(), dt.date(2026, 1, 1), dt.date(2026, 1, 2)),
        (pa.timestamp("us", "UTC"), dt.datetime(2026, 1, 1, tzinfo=dt.UTC), None),
        (pa.bool_(), True, None),
    ],
)
def test_keys_of_each_type_match(kind: pa.DataType, deleted: Any, other: Any) -> None:
    keys = _DeletedKeys(pa.table({"a": pa.array([deleted, deleted], kind), "b": pa.array([1, 2], pa.int32())}))
    values = pa.array([deleted, deleted, other], kind)
    assert keys.matches([values, pa.array([1, 3, 1], pa.int32())]).to_pylist() == [True, False, False]
    single_key = _DeletedKeys(pa.table({"a": pa.array([deleted], kind)}))
    assert single_key.matches([values]).to_pylist() == [True, True, False]
    nulls = _DeletedKeys(pa.table({"a": pa.array([None], kind)}))
    assert nulls.matches([pa.array([deleted, None], kind)]).to_pylist() == [False, True]


def test_string_keys_match_in_any_encoding() -> None:
    keys = _DeletedKeys(pa.table({"a": pa.array(["x"], pa.large_string())}))
    assert keys.matches([pa.array(["x", "y"])]).to_pylist() == [True, False]
    assert keys.matches([pa.array(["y", "x"]).dictionary_encode()]).to_pylist() == [False, True]
