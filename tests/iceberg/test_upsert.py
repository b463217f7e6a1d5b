"""Upserts update rows with existing keys and insert the rest. Invalid upserts fail before any file is written."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io import pyarrow as iceberg_arrow
from pyiceberg.types import StringType

from tests.lakes import Lakes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CommitConflictError,
    ContentChangedError,
    CorruptFileError,
    InvalidDefinitionError,
    InvalidInputError,
)
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write import data_files
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.upsert import stage_upsert

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py

TABLE = ("shop", "prices")


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


def publish(lake: Lakehouse, staged: StagedTable) -> StagedTable:
    publish_once(lake, [staged], publication_id(staged.metadata_location))
    return staged


def upsert(lake: Lakehouse, rows: pa.Table, *keys: str, **options: Any) -> StagedTable:
    return publish(lake, stage_upsert(lake, rows, *TABLE, keys=keys or ("sku",), **options))


def append(lake: Lakehouse, rows: pa.Table, **options: Any) -> StagedTable:
    return publish(lake, stage_arrow(lake, rows, *TABLE, mode="append", **options))


def rows(lake: Lakehouse) -> list[dict[str, Any]]:
    table_rows: list[dict[str, Any]] = catalog_at(lake).load_table(TABLE).scan().to_arrow().to_pylist()
    return sorted(table_rows, key=repr)


def prices(**by_sku: int | None) -> pa.Table:
    return pa.table({"sku": list(by_sku), "n": pa.array(by_sku.values(), pa.int64())})


def as_dict(lake: Lakehouse) -> dict[str, int | None]:
    table_rows = rows(lake)
    assert len({row["sku"] for row in table_rows}) == len(table_rows), "duplicate key"
    return {row["sku"]: row["n"] for row in table_rows}


def test_upsert_replaces_rows_with_same_keys(lake: Lakehouse) -> None:
    upsert(lake, prices(a=1, b=None))
    assert upsert(lake, prices(a=None, c=3)).removed_files == 1
    assert as_dict(lake) == {"a": None, "b": None, "c": 3}
    location = upsert(lake, prices(a=None)).metadata_location
    assert upsert(lake, prices(c=3).slice(1)).metadata_location == location, "no row changes"
    files = upsert(lake, prices(d=4))
    assert (files.added_files, files.removed_files, files.added_rows) == (1, 0, 1)
    upsert(lake, prices(d=4, e=5))
    assert as_dict(lake) == {"a": None, "b": None, "c": 3, "d": 4, "e": 5}


def test_null_key_is_rejected_before_files_are_written(lake: Lakehouse) -> None:
    nulls = pa.table({"sku": pa.array(["a", None]), "n": [1, 2]})
    null_in_second_key = pa.table({"sku": ["a", "b"], "n": pa.array([1, None])})
    null_in_dictionary = pa.table(
        {"sku": pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None])), "n": [1, 2]}
    )
    before = list(lake.storage.list(""))
    for new_rows, keys in ((nulls, ["sku"]), (null_in_second_key, ["sku", "n"])):
        with pytest.raises(InvalidInputError):
            upsert(lake, new_rows, *keys)
    assert list(lake.storage.list("")) == before
    upsert(lake, prices(a=1))
    version = lake.latest_version()
    with pytest.raises(InvalidInputError):
        upsert(lake, null_in_dictionary)
    append(lake, nulls.slice(1))
    upsert(lake, prices(a=5))
    assert [row["n"] for row in rows(lake)] == [5, 2]
    assert lake.latest_version() == version + 2


@pytest.mark.parametrize(
    ("new_rows", "keys"),
    [
        (prices(a=1), ["code"]),
        (pa.table({"sku": ["a", "a"], "n": [1, 2]}), ["sku"]),
        (pa.table({"sku": ["a", "b"], "n": [1.5, 1.5]}), ["n"]),
        (pa.table({"sku": [["a"]], "n": [1]}), ["sku"]),
        (pa.table([["a"], ["b"]], names=["sku", "sku"]), ["sku"]),
    ],
    ids=["missing", "duplicate", "float", "nested", "columns"],
)
def test_invalid_key_column_is_rejected(lake: Lakehouse, new_rows: pa.Table, keys: list[str]) -> None:
    for _ in range(2):
        version = lake.latest_version()
        with pytest.raises(InvalidInputError) as caught:
            upsert(lake, new_rows, *keys)
        assert "\n" not in str(caught.value)
        assert lake.latest_version() == version
        upsert(lake, prices(z=1))


def test_keys_equal_after_cast_are_rejected(lake: Lakehouse) -> None:
    upsert(lake, pa.table({"sku": [1, 2], "n": [1, 2]}))
    with pytest.raises(InvalidInputError):
        upsert(lake, pa.table({"sku": ["1", "01"], "n": [3, 4]}))
    upsert(lake, pa.table({"sku": ["01"], "n": [3]}))
    assert as_dict(lake) == {1: 3, 2: 2}


def test_upsert_adds_and_widens_columns(lake: Lakehouse) -> None:
    upsert(lake, pa.table({"sku": ["a", "b"], "n": pa.array([1, 2], pa.int32())}))
    upsert(lake, pa.table({"n": [1 << 40, 3], "note": ["x", "y"], "sku": ["a", "c"]}))
    assert rows(lake) == [
        {"sku": "a", "n": 1 << 40, "note": "x"},
        {"sku": "b", "n": 2, "note": None},
        {"sku": "c", "n": 3, "note": "y"},
    ]
    with catalog_at(lake).load_table(TABLE).update_schema() as change:
        change.rename_column("note", "remark")
        change.add_column("unit", StringType())
    upsert(lake, pa.table({"remark": ["z"], "sku": ["b"], "n": [2]}))
    assert rows(lake)[1] == {"sku": "b", "n": 2, "remark": "z", "unit": None}
    with pytest.raises(InvalidInputError, match="'remark'"):
        upsert(lake, prices(b=3))
    upsert(lake, prices(d=4))
    assert rows(lake)[3] == {"sku": "d", "n": 4, "remark": None, "unit": None}
    with pytest.raises(InvalidInputError, match=r"shop\.prices"):
        upsert(lake, pa.table({"sku": ["a"], "n": ["many"]}))


def test_upsert_compares_nested_values(lake: Lakehouse) -> None:
    first = pa.table({"sku": ["a", "b"], "tags": [["x"], None], "s": [{"u": 1}, {"u": None}]})
    upsert(lake, first)
    location = upsert(lake, first).metadata_location
    staged = upsert(lake, pa.table({"sku": ["a"], "tags": [["x"]], "s": [{"u": None}]}))
    assert staged.metadata_location != location
    assert [row["s"] for row in rows(lake)] == [{"u": None}, {"u": None}]


@pytest.mark.parametrize("nesting", ["struct", "deep", "list", "map"])
def test_upsert_that_would_drop_nested_values_is_rejected(lake: Lakehouse, nesting: str) -> None:
    def nested(**fields: int | None) -> pa.Table:
        struct: Any = fields
        kind: pa.DataType = pa.struct([(name, pa.int64()) for name in fields])
        if nesting == "deep":
            struct, kind = {"in": struct}, pa.struct([("in", kind)])
        elif nesting == "list":
            struct, kind = [struct], pa.list_(kind)
        elif nesting == "map":
            struct, kind = [("m", struct)], pa.map_(pa.string(), kind)
        return pa.table({"sku": ["a"], "x": pa.array([struct], kind)})

    upsert(lake, nested(a=1, b=2))
    before, version = rows(lake), lake.latest_version()
    files = {file.path for file in lake.storage.list() if file.path.endswith(".parquet")}
    with pytest.raises(InvalidInputError):
        upsert(lake, nested(a=9))
    assert (rows(lake), lake.latest_version()) == (before, version)
    assert {file.path for file in lake.storage.list() if file.path.endswith(".parquet")} == files
    upsert(lake, nested(a=9).set_column(0, "sku", [["z"]]))
    upsert(lake, nested(a=1, b=None))
    upsert(lake, nested(a=9))
    assert rows(lake)[0]["x"] == nested(a=9, b=None)["x"][0].as_py()


def test_upsert_is_limited_to_partitions(lake: Lakehouse) -> None:
    by_region = {"partition_by": ["region"]}
    all_regions = pa.table({"sku": ["a", "a", "b"], "region": ["eu", "us", "us"], "n": [1, 2, 3]})
    upsert(lake, all_regions, **by_region, partitions=[{"region": "eu"}, {"region": "us"}])
    assert [field.name for field in catalog_at(lake).load_table(TABLE).spec().fields] == ["region"]
    eu_options = {"partitions": [{"region": "eu"}], **by_region}
    upsert(lake, pa.table({"sku": ["a", "c"], "region": ["eu"] * 2, "n": [10, 4]}), **eu_options)
    assert [row["n"] for row in rows(lake)] == [10, 2, 3, 4]
    version = lake.latest_version()
    with pytest.raises(InvalidInputError):
        upsert(lake, all_regions, **eu_options)
    with pytest.raises(InvalidDefinitionError):
        upsert(lake, all_regions.slice(1), partition_by=["sku"])
    assert lake.latest_version() == version
    upsert(lake, pa.table({"sku": ["b"], "region": ["eu"], "n": [30]}), **by_region)
    assert [(row["region"], row["n"]) for row in rows(lake) if row["sku"] == "b"] == [("eu", 30)], (
        "the row moved to another partition"
    )


def test_concurrent_change_of_table_conflicts(lake: Lakehouse) -> None:
    upsert(lake, prices(a=1))
    staged = stage_upsert(lake, prices(b=2), *TABLE, keys=["sku"])
    upsert(lake, prices(b=3))
    with pytest.raises(CommitConflictError):
        publish(lake, staged)
    assert as_dict(lake) == {"a": 1, "b": 3}


@pytest.mark.parametrize("step", ["read", "write"])
def test_library_bug_that_changes_kept_rows_is_detected(
    lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """If a bug in PyIceberg changes rows with other keys while reading or writing, nothing is staged."""
    kind = pa.list_(pa.struct([("k", pa.int32())]))
    upsert(lake, pa.table({"sku": ["a", "b"], "l": pa.array([None, None], kind)}))
    project, conform = iceberg_arrow._to_requested_schema, data_files.conform
    files = {file.path for file in lake.storage.list() if file.path.endswith(".parquet")}

    def with_empty_lists(batch: pa.RecordBatch) -> pa.RecordBatch:
        column = batch.column("l")
        empty = pa.array([[] if value is None else value for value in column.to_pylist()], column.type)
        return batch.set_column(1, batch.schema.field("l"), empty)

    def faulty_project(*args: Any, **options: Any) -> pa.RecordBatch:
        return with_empty_lists(project(*args, **options))

    def faulty_conform(*args: Any) -> pa.RecordBatch:
        return with_empty_lists(conform(*args))

    with monkeypatch.context() as patched:
        if step == "read":
            patched.setattr(iceberg_arrow, "_to_requested_schema", faulty_project)
        else:
            patched.setattr(data_files, "conform", faulty_conform)
        with pytest.raises(ContentChangedError):
            stage_upsert(lake, pa.table({"sku": ["a"], "l": pa.array([[{"k": 1}]], kind)}), *TABLE, keys=["sku"])
    assert {file.path for file in lake.storage.list() if file.path.endswith(".parquet")} == files
    upsert(lake, pa.table({"sku": ["a"], "l": pa.array([[{"k": 1}]], kind)}))
    assert rows(lake) == [{"sku": "a", "l": [{"k": 1}]}, {"sku": "b", "l": None}]


def test_damaged_file_is_not_rewritten(lake: Lakehouse) -> None:
    upsert(lake, prices(**{f"k{number}": number for number in range(100)}))
    (task,) = catalog_at(lake).load_table(TABLE).scan().plan_files()
    path = Path(task.file.file_path.removeprefix("file://"))
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError):
        upsert(lake, prices(k1=7))


def regions(region: str, **by_sku: int) -> pa.Table:
    return pa.table({"region": [region] * len(by_sku), "sku": list(by_sku), "n": list(by_sku.values())})


def stage_region(lake: Lakehouse, rows: pa.Table) -> StagedTable:
    partitions = [{"region": rows["region"][0].as_py()}]
    return stage_upsert(lake, rows, *TABLE, keys=["sku"], partition_by=["region"], partitions=partitions)


def by_region(lake: Lakehouse) -> dict[tuple[str, str], int]:
    table_rows = rows(lake)
    by_key = {(row["region"], row["sku"]): row["n"] for row in table_rows}
    assert len(by_key) == len(table_rows), "duplicate key"
    return by_key


@pytest.mark.parametrize("is_new", [True, False])
def test_upserts_of_different_partitions_do_not_conflict(lake: Lakehouse, is_new: bool) -> None:
    if not is_new:
        for region in ("eu", "us"):
            publish(lake, stage_region(lake, regions(region, a=1, b=1)))
    staged = stage_region(lake, regions("eu", a=2, c=2))
    publish(lake, stage_region(lake, regions("us", a=3, d=3)))
    publish(lake, staged)
    existing = {} if is_new else {("eu", "b"): 1, ("us", "b"): 1}
    assert by_region(lake) == {
        **existing,
        ("eu", "a"): 2,
        ("eu", "c"): 2,
        ("us", "a"): 3,
        ("us", "d"): 3,
    }


def test_concurrent_change_of_same_partition_conflicts(lake: Lakehouse) -> None:
    publish(lake, stage_region(lake, regions("eu", a=1, b=1)))
    staged = stage_region(lake, regions("eu", c=2))
    publish(lake, stage_region(lake, regions("eu", c=3)))
    with pytest.raises(CommitConflictError):
        publish(lake, staged)
    with pytest.raises(CommitConflictError):  # the upsert was computed from the rows of its base version
        publish_once(lake, [staged], publication_id("again"), replaces_latest=[staged])
    assert by_region(lake) == {("eu", "a"): 1, ("eu", "b"): 1, ("eu", "c"): 3}


def test_compaction_of_replaced_files_conflicts(lake: Lakehouse) -> None:
    for sku in ("a", "b"):
        publish(lake, stage_region(lake, regions("eu", **{sku: 1})))
    staged, other = stage_region(lake, regions("eu", a=2)), stage_region(lake, regions("us", a=3))
    assert operations.plan_compact_tables(lake, [".".join(TABLE)], min_input_files=2).execute().tables
    with pytest.raises(CommitConflictError):
        publish(lake, staged)
    publish(lake, other)
    assert by_region(lake) == {("eu", "a"): 1, ("eu", "b"): 1, ("us", "a"): 3}


def test_upsert_replaces_duplicate_keys_by_one_row(lake: Lakehouse) -> None:
    append(lake, prices(a=1, b=1))
    append(lake, prices(a=2, c=1))
    append(lake, prices(a=2))
    upsert(lake, prices(a=2))
    assert as_dict(lake) == {"a": 2, "b": 1, "c": 1}


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.string(), pa.binary(), pa.decimal128(10, 2), pa.timestamp("us", "UTC")]
)
def test_upserts_behave_like_dictionary_updates(lake: Lakehouse, kind: pa.DataType) -> None:
    """There are enough keys that files are selected by their bounds."""
    rng = random.Random(7)
    expected: dict[Any, int] = {}
    for number in range(4):
        numbers = rng.sample(range(1000), 300 if number % 2 else 150)
        is_time = pa.types.is_timestamp(kind)
        keys = pa.array(numbers, kind) if is_time else pa.array(numbers).cast(pa.string()).cast(kind)
        upsert(lake, pa.table({"sku": keys, "two": ["x"] * len(numbers), "n": [number] * len(numbers)}), "sku", "two")
        expected |= dict.fromkeys(keys.to_pylist(), number)
        assert as_dict(lake) == expected
