"""Test when ``read_table`` uses Spark's Parquet reader instead of ours. Both readers must return the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFileContent
from pyiceberg.table import Table
from pyiceberg.types import LongType
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType, _parse_datatype_string

from tests.lakes import check_lake
from tests.spark.test_table_reader import ALL_TYPES, EMPTY, FULL, NULLS, with_deletes
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.write.staging import publish
from trinitylake_ops.spark.tables import native_parquet
from trinitylake_ops.spark.tables.reader import OpenIcebergTable, read_files, read_table
from trinitylake_ops.spark.tables.writer import stage_dataframe

pytestmark = pytest.mark.local_only("Spark reads object storages only with our reader")

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int32()), "text": ["a", "b", None]})


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lakehouse]:
    lake = Lakehouse.create(f"file://{tmp_path}/a [strange] {{place}}*? #1%20/", {"fsync": "false"})
    yield lake
    check_lake(lake)


@pytest.fixture
def catalog(lake: Lakehouse) -> Iterator[TrinityLakeCatalog]:
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        yield catalog


def is_native(frame: DataFrame) -> bool:
    plan = frame._jdf.queryExecution().analyzed().toString()
    return "trinitylake" not in plan


def check(spark: SparkSession, lake: Lakehouse, *, native: bool, name: str = "ns.t") -> list[str]:
    """Assert that both readers and PyIceberg return the same rows, and return these rows."""
    with catalog_at(lake) as catalog:
        table = catalog.load_table(name)
        n_rows = table.scan().to_arrow().num_rows
    frame, our_frame = read_table(spark, lake, name), read_files(spark, lake, table)
    assert is_native(frame) == native
    assert not is_native(our_frame)
    assert [(field.name, field.dataType) for field in frame.schema] == [
        (field.name, field.dataType) for field in our_frame.schema
    ]
    rows = sorted(map(repr, frame.collect()))
    assert rows == sorted(map(repr, our_frame.collect()))
    assert len(rows) == n_rows
    return rows


def test_plain_tables_are_read_natively(spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    assert check(spark, lake, native=True) == []
    table.append(ROWS)
    table.append(ROWS)
    assert len(check(spark, lake, native=True)) == 6
    assert read_table(spark, lake, "ns.t", columns=["text"]).columns == ["text"]
    version = lake.latest_version()
    table.append(ROWS)
    assert read_table(spark, lake, "ns.t", version).count() == 6
    assert not is_native(read_table(spark, lake, "ns.t", row_filter="id = 1"))


def test_partitioned_tables_are_read_natively(spark: SparkSession, lake: Lakehouse) -> None:
    frame = spark.createDataFrame([(1, "a/b=c"), (1, "[x]*"), (2, "100%"), (2, None)], "number int, `odd name` string")
    staged = stage_dataframe(lake, frame, "ns", "t", partition_by=("odd name",), mode="append")
    with lake.transaction() as txn:
        publish(txn, [staged])
    assert len(check(spark, lake, native=True)) == 4


def test_all_types_but_time_are_read_natively(spark: SparkSession, lake: Lakehouse) -> None:
    schema = _parse_datatype_string(ALL_TYPES)
    assert isinstance(schema, StructType)
    frame = spark.createDataFrame([FULL, NULLS, EMPTY], schema).coalesce(1)
    for name, typed_frame in (("t", frame), ("untimed", frame.drop("time"))):
        staged = stage_dataframe(lake, typed_frame, "ns", name, mode="append")
        with lake.transaction() as txn:
            publish(txn, [staged])
    check(spark, lake, native=False)
    check(spark, lake, native=True, name="ns.untimed")


@pytest.mark.parametrize("change", ["renamed", "added", "dropped", "promoted", "added again"])
def test_tables_with_changed_columns_are_not_native(
    spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog, change: str
) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    with table.update_schema(allow_incompatible_changes=True) as update:
        if change == "renamed":
            update.rename_column("text", "words")
        elif change == "added":
            update.add_column("more", LongType())
        elif change == "promoted":
            update.update_column("id", LongType())
        else:
            update.delete_column("text")
    if change == "added again":
        with table.update_schema() as update:
            update.add_column("text", table.schemas()[0].find_type("text"))
    rows = check(spark, lake, native=False)
    assert len(rows) == 3
    assert change != "added again" or all("text=None" in row for row in rows)


def test_table_with_delete_files_is_not_native(
    spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog
) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    (task,) = table.scan().plan_files()
    positions = pa.table({"file_path": [task.file.file_path], "pos": pa.array([0], pa.int64())})
    deleted = with_deletes(lake, table, DataFileContent.POSITION_DELETES, positions)
    assert native_frame(spark, lake, deleted) is None
    frame = native_frame(spark, lake, table)
    assert frame is not None
    assert frame.count() == 3


def native_frame(spark: SparkSession, lake: Lakehouse, table: Table) -> DataFrame | None:
    opened_table = OpenIcebergTable(StorageFileIO.on(lake.storage), table.metadata)
    return opened_table.native_frame(spark, opened_table.tasks())


def test_files_of_other_writers_are_not_native(
    spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog
) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    path = Path(table.location().removeprefix("file://")) / "data" / "theirs.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(ROWS, path)  # without field ids
    table.add_files([f"file://{path}"])
    assert len(check(spark, lake, native=False)) == 3


@pytest.mark.parametrize("name", ["_hidden.parquet", ".hidden.parquet", "with:colon.parquet", "back\\slash.parquet"])
def test_file_names_that_spark_ignores_are_not_native(
    spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog, name: str
) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    (task,) = table.scan().plan_files()
    path = Path(task.file.file_path.removeprefix("file://")).with_name(name)
    path.write_bytes(Path(task.file.file_path.removeprefix("file://")).read_bytes())
    task.file[1] = f"file://{path}"
    assert task.file.file_path.endswith(name)
    assert native_parquet.frame_of(spark, table.schema(), [task], reading_io(lake)) is None


def test_duplicate_data_file_is_not_native(spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    (task,) = table.scan().plan_files()
    table.add_files([task.file.file_path], check_duplicate_files=False)
    assert len(check(spark, lake, native=False)) == 6


def test_missing_file_is_not_native(spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    (task,) = table.scan().plan_files()
    Path(task.file.file_path.removeprefix("file://")).unlink()
    assert not is_native(read_table(spark, lake, "ns.t"))


@pytest.mark.parametrize("footer_bytes", [0, 100, 1 << 20, (1 << 32) - 1])
def test_invalid_footer_is_not_native(
    spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog, footer_bytes: int
) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    (task,) = table.scan().plan_files()
    path = Path(task.file.file_path.removeprefix("file://"))
    path.write_bytes(path.read_bytes()[:-8] + footer_bytes.to_bytes(4, "little") + b"PAR1")
    assert not is_native(read_table(spark, lake, "ns.t"))


def test_columns_that_differ_only_by_case_are_not_native(
    spark: SparkSession, lake: Lakehouse, catalog: TrinityLakeCatalog
) -> None:
    rows = pa.table({"a": pa.array([1], pa.int32()), "A": ["x"]})
    table = catalog.create_table("ns.t", rows.schema, properties={"trinitylake.case-sensitive-columns": "true"})
    table.append(rows)
    assert native_frame(spark, lake, table) is None
