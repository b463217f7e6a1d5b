"""Rows are cast to a table's columns without changing values, or rejected with a one-line error."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.table_settings import arrow_of, arrow_of_polars
from trinitylake_ops.errors import InvalidInputError, UnsupportedTypeError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.iceberg.write.upsert import stage_upsert
from trinitylake_ops.storage import background

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py

NAME = ("ns", "t")
TIMESTAMP = dt.datetime(2030, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001 - a local time


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


def publish_column(lake: Lakehouse, rows: Any, method: str = "append") -> list[Any]:
    """Publish a column ``c`` and return its values in the table."""
    if method == "upsert":
        staged = stage_upsert(lake, rows.append_column("k", pa.array(range(len(rows)))), *NAME, keys=["k"])
    elif method == "reader":
        staged = stage_arrow(lake, rows.to_reader(), *NAME, mode="append")
    else:
        staged = stage_arrow(lake, rows, *NAME, mode="append")
    publish_once(lake, [staged], publication_id(staged.metadata_location))
    values: list[Any] = catalog_at(lake).load_table(NAME).scan().to_arrow()["c"].to_pylist()
    return values


PRESERVED_VALUES = [
    (pa.array([TIMESTAMP], pa.timestamp("ns")), TIMESTAMP),
    (pa.array([TIMESTAMP.replace(microsecond=0)], pa.timestamp("s")), TIMESTAMP.replace(microsecond=0)),
    (pa.array([TIMESTAMP], pa.timestamp("ns", "Asia/Tokyo")), TIMESTAMP.replace(tzinfo=dt.UTC)),
    (pa.array([dt.time(1, 2, 3)], pa.time32("s")), dt.time(1, 2, 3)),
    (pa.array([TIMESTAMP.time()], pa.time64("ns")), TIMESTAMP.time()),
    (pa.array([TIMESTAMP.date()], pa.date64()), TIMESTAMP.date()),
    (pa.array([1.5], pa.float16()), 1.5),
    (pa.array([decimal.Decimal("1.50")], pa.decimal256(38, 2)), decimal.Decimal("1.50")),
    (pa.array(["a"], pa.string_view()), "a"),
    (pa.array([b"a"], pa.binary_view()), b"a"),
    (pa.array([TIMESTAMP], pa.timestamp("ns")).dictionary_encode(), TIMESTAMP),
    (pa.array([[TIMESTAMP]], pa.list_(pa.timestamp("ns"))), [TIMESTAMP]),
    (pa.array([{"v": TIMESTAMP.time()}], pa.struct([("v", pa.time64("ns"))])), {"v": TIMESTAMP.time()}),
]


@pytest.mark.parametrize("method", ["append", "reader", "upsert"])
def test_equivalent_types_are_stored_unchanged(lake: Lakehouse, method: str) -> None:
    for index, (values, expected) in enumerate(PRESERVED_VALUES):
        separate_lake = Lakehouse.create(f"{lake.root}-{index}")
        for _ in range(2):  # into a new table, then into the existing column
            stored = publish_column(separate_lake, pa.table({"c": values}), method)
        assert stored == [expected] * (1 if method == "upsert" else 2), values.type


LOSSY_VALUES = [
    pa.array([1], pa.timestamp("ns")),
    pa.array([1], pa.time64("ns")),
    pa.array([[1]], pa.list_(pa.timestamp("ns"))),
    pa.array([1], pa.timestamp("ns")).dictionary_encode(),
    pa.Array.from_buffers(pa.date64(), 1, [None, pa.py_buffer((1).to_bytes(8, "little"))]),
]


@pytest.mark.parametrize("method", ["append", "reader", "upsert"])
def test_values_that_would_lose_precision_are_rejected(lake: Lakehouse, method: str) -> None:
    for values in LOSSY_VALUES:
        with pytest.raises(InvalidInputError, match=r"ns\.t") as caught:
            publish_column(lake, pa.table({"c": values}), method)
        assert "\n" not in str(caught.value)
        assert values.type == pa.date64() or "truncate" in str(caught.value)


INVALID_TEXT = pa.StringArray.from_buffers(1, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff"))
FAR_FUTURE = pa.array([6_600_000], pa.date32())
UNREADABLE_VALUES = [
    FAR_FUTURE,
    pa.array([-(10**9)], pa.date32()),
    pa.array([-719_163], pa.date32()),
    pa.array([2_932_897], pa.date32()),
    pa.array([570_000_000_000], pa.timestamp("s")),
    pa.array([-62_135_596_801], pa.timestamp("s", "UTC")),
    pa.StructArray.from_arrays([FAR_FUTURE], ["v"]),
    pa.ListArray.from_arrays([0, 1], FAR_FUTURE),
    pa.MapArray.from_arrays([0, 1], pa.array(["m"]), FAR_FUTURE),
    pa.Array.from_buffers(pa.time64("us"), 1, [None, pa.py_buffer((10**15).to_bytes(8, "little"))]),
    INVALID_TEXT,
    pa.ListArray.from_arrays([0, 1], INVALID_TEXT),
]


@pytest.mark.parametrize("method", ["append", "reader", "upsert", "partition"])
def test_unreadable_values_are_rejected(lake: Lakehouse, method: str) -> None:
    for index, values in enumerate(UNREADABLE_VALUES):
        rows, version = pa.table({"c": values}), lake.latest_version()
        with pytest.raises(InvalidInputError, match=r"ns\.t") as caught:
            if method == "partition" and not pa.types.is_nested(values.type):
                stage_arrow(lake, rows, *NAME, mode="append", partition_by=["c"])
            else:
                publish_column(lake, rows, "append" if method == "partition" else method)
        assert "\n" not in str(caught.value), index
        assert lake.latest_version() == version
    assert not [file.path for file in lake.storage.list() if file.path.endswith(".parquet")]
    limits = [dt.date.min, dt.date.max]
    assert publish_column(lake, pa.table({"c": pa.array([*limits, None])})) == [*limits, None]
    separate_lake = Lakehouse.create(f"{lake.root}-times")
    times = [dt.datetime.min, dt.datetime.max]  # noqa: DTZ901 - local times
    assert publish_column(separate_lake, pa.table({"c": pa.array(times, pa.timestamp("us"))})) == times


def test_rows_without_required_columns_are_rejected(lake: Lakehouse) -> None:
    empty, rows = pa.table({}), pa.table({"c": [1], "p": ["a"]})
    background.drain()
    before = list(lake.storage.list(""))
    for mode in ("append", "replace_table"):
        with pytest.raises(InvalidInputError):
            stage_arrow(lake, empty, *NAME, mode=mode, replaces_columns=True)
    assert list(lake.storage.list("")) == before
    staged = stage_arrow(lake, rows, *NAME, mode="append", partition_by=["p"])
    publish_once(lake, [staged], publication_id("rows"))
    background.drain()
    before = list(lake.storage.list(""))
    for replaces_columns in (True, False):
        with pytest.raises(InvalidInputError):
            stage_arrow(lake, empty, *NAME, mode="replace_table", replaces_columns=replaces_columns)
    for incomplete in (empty, rows.select(["c"]), rows.select(["c"]).to_reader()):
        with pytest.raises(InvalidInputError, match="'p'"):
            stage_arrow(lake, incomplete, *NAME, mode="replace_partitions", partition_by=["p"])
    assert list(lake.storage.list("")) == before
    publish_once(lake, [stage_arrow(lake, empty, *NAME, mode="append")], publication_id("nothing"))
    assert catalog_at(lake).load_table(NAME).scan().to_arrow().num_rows == 1


UNSUPPORTED_VALUES = [
    pa.array([1], pa.duration("s")),
    pa.nulls(1),
    pa.array([1], pa.uint64()),
    pc.run_end_encode(pa.array(["a"])),
    pa.array([[1]], pa.list_view(pa.int64())),
    pa.array([{}], pa.struct([])),
    pa.array([1], pa.int8()).cast(pa.bool8()),
    pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]),
    pa.array([decimal.Decimal(1)], pa.decimal256(40, 0)),
    pa.ExtensionArray.from_storage(pa.opaque(pa.int64(), "t", "v"), pa.array([1])),
]


@pytest.mark.parametrize("method", ["append", "reader", "upsert"])
def test_unsupported_type_has_one_line_error(lake: Lakehouse, method: str) -> None:
    for values in UNSUPPORTED_VALUES:
        with pytest.raises(UnsupportedTypeError, match="'c'") as caught:
            publish_column(lake, pa.table({"c": values}), method)
        assert "\n" not in str(caught.value)


def test_list_view_of_existing_column_is_rejected(lake: Lakehouse) -> None:
    """Arrow's cast of list views returns empty lists."""
    publish_column(lake, pa.table({"c": [[1]]}))
    with pytest.raises(InvalidInputError, match="'c'"):
        publish_column(lake, pa.table({"c": pa.array([[1]], pa.list_view(pa.int64()))}))


@pytest.mark.parametrize(
    ("existing", "new"),
    [
        (pa.array([dt.date(2030, 1, 1)]), pa.array([TIMESTAMP])),
        (pa.array([True]), pa.array([2])),
        (pa.array([[True]]), pa.array([[2]])),
        (pa.array([{"v": dt.date(2030, 1, 1)}]), pa.array([{"v": TIMESTAMP}])),
        (pa.array([[TIMESTAMP]]), pa.array([[TIMESTAMP]], pa.list_(pa.timestamp("us", "UTC")))),
        (pa.array([[1]]), pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))),
        (pa.array([{"v": 1}]), pa.array([1])),
    ],
    ids=["date", "boolean", "list", "struct", "zone", "map", "number"],
)
def test_lossy_casts_that_arrow_allows_are_rejected(lake: Lakehouse, existing: pa.Array, new: pa.Array) -> None:
    publish_column(lake, pa.table({"c": existing}))
    for method in ("append", "reader"):
        with pytest.raises(InvalidInputError, match="'c'"):
            publish_column(lake, pa.table({"c": new}), method)


def test_float_column_is_widened_for_doubles(lake: Lakehouse) -> None:
    publish_column(lake, pa.table({"c": pa.array([0.5], pa.float32())}))
    with pytest.raises(InvalidInputError, match="'c'"):
        publish_column(lake, pa.table({"c": [0.1]}), "reader")
    assert sorted(map(repr, publish_column(lake, pa.table({"c": [1.5, float("nan")]})))) == ["0.5", "1.5", "nan"]
    assert str(catalog_at(lake).load_table(NAME).schema().find_type("c")) == "float"
    assert 0.1 in publish_column(lake, pa.table({"c": [0.1]}))
    assert str(catalog_at(lake).load_table(NAME).schema().find_type("c")) == "double"


def test_null_columns_fit_any_column(lake: Lakehouse) -> None:
    publish_column(lake, pa.table({"c": [True], "d": [[TIMESTAMP.date()]]}))
    assert publish_column(lake, pa.table({"c": pa.nulls(1), "d": pa.array([[None]])}), "reader")[::-1] == [True, None]


class _Money:
    pass


def _frame_with_objects() -> pl.DataFrame:
    return pl.DataFrame({"n": [1], "c": pl.Series([_Money()], dtype=pl.Object)})


@pytest.mark.parametrize(
    "make_frame",
    [
        _frame_with_objects,
        lambda: _frame_with_objects().lazy(),
        lambda: pl.DataFrame({"c": pl.Series([1], dtype=pl.Int128)}),
        lambda: pl.DataFrame(schema={"c": pl.List(pl.Struct({"v": pl.Object}))}),
        lambda: pl.DataFrame(schema={"c": pl.Array(pl.Object, 2)}),
    ],
    ids=["eager", "lazy", "int128", "nested", "array"],
)
def test_unsupported_polars_frame_is_rejected(make_frame: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        arrow_of_polars(make_frame())
    assert "\n" not in str(caught.value)


def test_polars_frame_is_stored(lake: Lakehouse) -> None:
    frame = pl.DataFrame(
        {
            "c": [TIMESTAMP.time()],
            "day": [TIMESTAMP.date()],
            "kind": pl.Series(["a"], dtype=pl.Categorical),
            "at": [TIMESTAMP],
        },
        schema_overrides={"at": pl.Datetime("ns")},
    )
    assert publish_column(lake, arrow_of_polars(frame.lazy())) == [TIMESTAMP.time()]


@pytest.mark.parametrize(
    "values",
    [[1, "a"], [2**70], [_Money()], [1j], ["\ud800"], pd.arrays.SparseArray([1, 0])],
    ids=["mixed", "large", "objects", "complex", "surrogate", "sparse"],
)
def test_unsupported_pandas_frame_is_rejected(values: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        arrow_of(pd.DataFrame({"c": pd.Series(values, dtype=None if hasattr(values, "dtype") else object)}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (pd.Series([None, None], dtype=object), 'astype("string") in pandas'),
        (pd.Series(pd.period_range("2020", periods=2, freq="D")), "extension"),
        (pd.Series(pd.to_timedelta([1, 2])), "int64 of microseconds"),
    ],
    ids=["nulls", "periods", "durations"],
)
def test_unsupported_pandas_type_error_suggests_fix(lake: Lakehouse, values: Any, advice: str) -> None:
    with pytest.raises(UnsupportedTypeError, match="'c'") as caught:
        publish_column(lake, arrow_of(pd.DataFrame({"c": values})))
    assert advice in str(caught.value)


def test_pandas_nanoseconds_are_stored_only_without_loss(lake: Lakehouse) -> None:
    timestamps = pd.Series(pd.to_datetime(["2026-01-01 10:00"]).as_unit("ns"))
    assert publish_column(lake, arrow_of(pd.DataFrame({"c": timestamps}))) == [timestamps[0].to_pydatetime()]
    with pytest.raises(InvalidInputError):
        publish_column(lake, arrow_of(pd.DataFrame({"c": timestamps + pd.Timedelta(1, "ns")})))
    assert (
        len(publish_column(lake, arrow_of(pd.DataFrame({"c": (timestamps + pd.Timedelta(1, "ns")).dt.floor("us")}))))
        == 2
    )
