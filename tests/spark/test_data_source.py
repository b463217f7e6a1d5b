"""Test the data source in Spark: rows at each version, filter pushdown to files, and one-line errors."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.lakes import check_lake
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    FileMissingError,
    InvalidInputError,
    TableNotFoundError,
    TrinityLakeError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.plan import plan_write
from trinitylake_ops.iceberg.write.staging import publish, stage_data_files
from trinitylake_ops.spark.metadata.columns import METADATA_TABLES
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.spark.source.data_source import read_metadata
from trinitylake_ops.spark.sql import create_views, register_table_functions
from trinitylake_ops.spark.tables.reader import read_table

pytestmark = pytest.mark.local_only("the Spark tasks of these tests read a folder")

COLUMNS = {
    "month": pa.int32(), "day": pa.int32(), "text": pa.string(), "share": pa.float64(),
    "at": pa.timestamp("us", "UTC"), "wall": pa.timestamp("us"), "money": pa.decimal128(10, 2),
}  # fmt: skip


def month(number: int) -> list[tuple[Any, ...]]:
    """Return three rows of a month. The share of the last row is NaN."""
    return [
        (
            number, day, f"{number}-{day}" if day != 2 else None, float("nan") if day == 3 else number + day / 10,
            dt.datetime(2013, number, day, 12, tzinfo=dt.UTC), dt.datetime(2013, number, day, 6),  # noqa: DTZ001
            Decimal(f"{number}.50"),
        )
        for day in (1, 2, 3)
    ]  # fmt: skip


def publish_months(lake: Lakehouse, *numbers: int) -> None:
    columns = zip(*(row for number in numbers for row in month(number)), strict=True)
    rows = pa.table(list(columns), schema=pa.schema(COLUMNS))
    write = plan_write(lake, "facts", "days", rows.schema, partition_by=("month",))
    staged = stage_data_files(lake, write, write.write(rows.to_batches()))
    with lake.transaction(message=str(numbers), operation="publish", run_id=f"run-{numbers[0]}") as txn:
        publish(txn, [staged])


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    """A lakehouse with an export and a table, to which version 1 added months 1 and 2 and version 2 added month 3."""
    folder = tmp_path_factory.mktemp("lake [of] one%20month")
    lake = Lakehouse.create(f"file://{folder}/", {"fsync": "false"})
    publish_months(lake, 1, 2)
    publish_months(lake, 3)
    with catalog_at(lake) as catalog:
        table = catalog.create_table("facts.small", pa.schema([("id", pa.int64())]))
        table.append(pa.table({"id": [1, 2, 3]}))
    operations.plan_export(lake, "first", "minimal", version=1).execute()
    yield lake
    check_lake(lake)


def load(spark: SparkSession, lake: Lakehouse, table: str, **options: object) -> DataFrame:
    return spark.read.format("trinitylake").option("root", lake.root).options(**options).load(table)  # type: ignore[arg-type]


def days(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((row["month"], row["day"]) for row in frame.collect())


def test_metadata_tables_equal_api(spark: SparkSession, lake: Lakehouse) -> None:
    log = {info.version: info for info in lake.history()}
    versions = load(spark, lake, "versions", **{"storage.fsync": "false"}).withColumn("at", F.unix_micros("created_at"))
    assert {row["version"]: (row["run_id"], row["commit_id"], row["at"] // 1000) for row in versions.collect()} == {
        version: (info.run_id, info.commit_id, lake.snapshot(version).created_at_ms) for version, info in log.items()
    }
    objects = load(spark, lake, "objects", version=1)
    assert {(row["kind"], row["namespace"], row["table"]) for row in objects.collect()} == {
        ("namespace", "facts", None), ("table", "facts", "days"),
    }  # fmt: skip
    changes = load(spark, lake, "changes", **{"from": 2, "to": 2})
    assert [(row["version"], row["kind"], row["table"]) for row in changes.collect()] == [(2, "changed", "days")]
    files = load(spark, lake, "files", export="first", row_filter="kind = 'data'")
    assert files.agg(F.sum("size_bytes")).first()[0] == sum(  # type: ignore[index]
        info.size_bytes for info in lake.storage.list("tables/") if "/month=1/" in info.path or "/month=2/" in info.path
    )
    exports = load(spark, lake, "exports")
    assert [row["name"] for row in exports.collect()] == ["first"]
    frames = {
        "versions": versions.drop("at"),
        "objects": objects,
        "changes": changes,
        "files": files,
        "exports": exports,
    }
    for table, columns in METADATA_TABLES.items():
        assert {field.name: field.dataType for field in frames[table].schema} == columns


def test_data_at_versions_times_and_exports(spark: SparkSession, lake: Lakehouse) -> None:
    first = [(number, day) for number in (1, 2) for day in (1, 2, 3)]
    created_at_ms = lake.snapshot(1).created_at_ms
    created_at = lake.snapshot(1).created_at.isoformat()
    for options in ({"version": 1}, {"timestamp": created_at_ms}, {"timestamp": created_at}, {"export": "first"}):
        assert days(load(spark, lake, "facts.days", **options)) == first
    latest = load(spark, lake, "facts.days")
    assert latest.schema == read_table(spark, lake, "facts.days", row_filter="day > 0").schema
    for row_filter in (None, "day > 0"):
        table_frame = read_table(spark, lake, "facts.days", row_filter=row_filter)
        assert sorted(map(repr, table_frame.collect())) == sorted(map(repr, latest.collect()))


def test_rows_equal_those_of_duckdb(spark: SparkSession, lake: Lakehouse) -> None:
    for version in (1, 2):
        frame = load(spark, lake, "facts.days", version=version)
        with catalog_at(lake, version) as catalog:
            arrow = catalog.load_table("facts.days").scan().to_arrow()
        query = "SELECT month, count(*), count(text), sum(money), max(wall) FROM {} GROUP BY month ORDER BY month"
        frame.createOrReplaceTempView("days_now")
        expected = duckdb.connect().register("arrow", arrow).sql(query.format("arrow")).fetchall()
        assert [tuple(row) for row in spark.sql(query.format("days_now")).collect()] == expected


#: The days that match each filter, and how many of the three files (one per month) are opened.
FILTERS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "month between 2 and 3 and day < 3": ([(2, 1), (2, 2), (3, 1), (3, 2)], 2),
    "month not in (1, 2)": ([(3, 1), (3, 2), (3, 3)], 1),
    "text is null": ([(1, 2), (2, 2), (3, 2)], 3),
    "text like '2-%'": ([(2, 1), (2, 3)], 1),
    "share <= 1.1": ([(1, 1)], 1),
    "at >= '2013-02-01T12:00:00+00:00' and day = 1": ([(2, 1), (3, 1)], 2),
    "wall < '2013-01-02T06:00:00'": ([(1, 1)], 1),
    "month = 1 and day = 1 or text = '3-1'": ([(1, 1), (3, 1)], 2),
    "month = 9": ([], 0),
    "month = 1 and text not in ('1-1', 'x')": ([(1, 2), (1, 3)], 1),
    "share > 3": ([(3, 1), (3, 2)], 1),
}


def test_filters_open_only_matching_files(spark: SparkSession, lake: Lakehouse) -> None:
    for row_filter, (expected, n_files) in FILTERS.items():
        frame = load(spark, lake, "facts.days", parallelism=3, row_filter=row_filter)
        assert days(frame) == expected, row_filter
        assert max(frame.rdd.getNumPartitions(), 1) == max(n_files, 1), row_filter


def test_other_files_are_never_opened(spark: SparkSession, lake: Lakehouse) -> None:
    (path,) = Path(lake.root.removeprefix("file://")).glob("tables/*/data/month=2/*.parquet")
    with moved_away(path):
        assert days(load(spark, lake, "facts.days", row_filter="month <> 2 and day = 1")) == [(1, 1), (3, 1)]
        with pytest.raises(FileMissingError, match=path.name), spark_failures("read"):
            load(spark, lake, "facts.days").collect()


def test_one_frame_with_several_filters(spark: SparkSession, lake: Lakehouse) -> None:
    """With this setting, Spark would reuse the files that are left after the filters of one query for other queries."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame, objects = load(spark, lake, "facts.days"), load(spark, lake, "objects")
        assert days(frame.where("month = 2")) == [(2, 1), (2, 2), (2, 3)]
        assert frame.count() == 9
        assert days(frame.where("month = 1 OR text = '3-1'")) == [(1, 1), (1, 2), (1, 3), (3, 1)]
        assert days(frame.where("share > 3")) == [(1, 3), (2, 3), (3, 1), (3, 2), (3, 3)], "NaN is the greatest value"
        january, march = frame.where("month = 1").alias("one"), frame.where("month = 3").alias("other")
        assert january.join(march, "day").count() == 3
        assert objects.where("`table` = 'days'").count() == 1
        assert objects.count() == 3
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@contextmanager
def moved_away(path: Path) -> Iterator[None]:
    """Rename a file while the block runs."""
    renamed = path.with_suffix(".aside")
    path.rename(renamed)
    try:
        yield
    finally:
        renamed.rename(path)


def test_filters_on_names_read_no_other_definitions(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    with lake.transaction() as txn:
        txn.create_namespace("facts")
        for name in ("days", "small"):
            txn.create_table("facts", name, TableDef(table_type="EXTERNAL", table_format="LANCE"))
    entry = lake.snapshot().entry(lake.snapshot().keys.table_key("facts", "small"))
    assert entry is not None
    with moved_away(tmp_path / "lake" / entry):
        frame = load(spark, lake, "objects", row_filter="namespace = 'facts' and table in ('days', 'weeks')")
        assert [(row["table"], row["type"]) for row in frame.collect()] == [("days", "EXTERNAL")]
        assert load(spark, lake, "objects", columns="kind,table").where("kind = 'table'").count() == 2
        with pytest.raises(FileMissingError), spark_failures("read"):
            load(spark, lake, "objects").collect()


def test_columns_and_parallelism(spark: SparkSession, lake: Lakehouse) -> None:
    frame = load(spark, lake, "facts.days", columns="text, month")
    assert frame.columns == ["text", "month"]
    assert frame.where("month = 3").count() == 3
    assert load(spark, lake, "versions", columns='["state", "version"]').columns == ["state", "version"]
    for parallelism in (1, 3):
        rdd = load(spark, lake, "facts.days", parallelism=parallelism).rdd
        assert rdd.getNumPartitions() == parallelism


def test_frame_keeps_its_version(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    publish_months(lake, 1)
    frames = [load(spark, lake, name) for name in ("facts.days", "objects", "versions", "files")]
    before = [frame.count() for frame in frames]
    publish_months(lake, 2)
    assert [frame.count() for frame in frames] == before
    assert load(spark, lake, "facts.days").count() == 6


def test_tables_of_export_at_another_root(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    publish_months(lake, 1)
    operations.plan_export(lake, "whole", "full", target=f"file://{tmp_path}/other/").execute()
    publish_months(lake, 2)
    os.rename(tmp_path / "lake" / "tables", tmp_path / "hidden")
    assert days(load(spark, lake, "facts.days", export="whole")) == [(1, 1), (1, 2), (1, 3)]
    assert days(read_table(spark, lake, "facts.days", "whole")) == [(1, 1), (1, 2), (1, 3)]
    assert load(spark, lake, "objects", export="whole").count() == 2
    os.rename(tmp_path / "hidden", tmp_path / "lake" / "tables")


#: One error of each kind. test_source_options and test_metadata_tables cover the others.
ERRORS: dict[str, tuple[dict[str, str], str, type[TrinityLakeError], str]] = {
    "table": ({}, "facts.weeks", TableNotFoundError, "there is no table facts.weeks"),
    "version": ({"version": "99"}, "facts.days", VersionNotFoundError, "version 99 does not exist"),
    "filter": ({"row_filter": "year = 1"}, "facts.days", InvalidInputError, "year = 1"),
    "credential": (
        {"storage.secret_access_key": "hush"},
        "objects",
        InvalidInputError,
        "'storage.secret_access_key'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line(spark: SparkSession, lake: Lakehouse, name: str) -> None:
    options, table, error, message = ERRORS[name]
    with pytest.raises(error) as raised, spark_failures("read"):
        load(spark, lake, table, **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "hush" not in str(raised.value)


def test_schema_of_caller_is_rejected(spark: SparkSession, lake: Lakehouse) -> None:
    frame = spark.read.format("trinitylake").option("root", lake.root).schema("month int").load("facts.days")
    with pytest.raises(InvalidInputError), spark_failures("read"):
        frame.collect()


def test_read_metadata_of_open_lakehouse(spark: SparkSession, lake: Lakehouse) -> None:
    frame = read_metadata(spark, lake, "objects", 1, columns=["table"])
    assert sorted(row["table"] or "" for row in frame.collect()) == ["", "days"]
    assert read_metadata(spark, lake, "files", "first", row_filter="kind = 'data'").count() == 2
    assert read_metadata(spark, lake, "changes", first_version=2, last_version=2).count() == 1


def test_views_are_created(spark: SparkSession, lake: Lakehouse) -> None:
    views = create_views(spark, lake, 1)
    assert views == {
        "facts_days": "facts.days",
        **{f"trinitylake_{table}": table for table in METADATA_TABLES},
    }
    assert spark.sql("SELECT count(*) FROM facts_days").first()[0] == 6  # type: ignore[index]
    joined = spark.sql(
        "SELECT o.`table`, count(*) AS versions FROM trinitylake_objects o JOIN trinitylake_changes c USING (`table`)"
        " WHERE c.version >= 1 GROUP BY 1"
    )
    assert [tuple(row) for row in joined.collect()] == [("days", 2)]
    assert set(create_views(spark, lake, "first", tables=["facts.days"], prefix="first_")) == {
        "first_facts_days", *(f"first_trinitylake_{table}" for table in METADATA_TABLES),
    }  # fmt: skip
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW by_sql USING trinitylake"
        f" OPTIONS (root '{lake.root}', path 'facts.days', version '1', row_filter 'day < 3')"
    )
    assert days(spark.sql("SELECT * FROM by_sql WHERE month = 2")) == [(2, 1), (2, 2)]
    assert days(spark.sql("SELECT * FROM by_sql")) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_view_names_that_spark_cannot_distinguish_are_rejected(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        for name in ("days", "DAYS"):
            catalog.create_table(f"ns.{name}", pa.schema([("id", pa.int64())]))
    with pytest.raises(InvalidInputError, match="'ns_days'"):
        create_views(spark, lake)


def test_table_functions_equal_data_frames(spark: SparkSession, lake: Lakehouse) -> None:
    register_table_functions(spark)
    root = lake.root
    log = spark.sql(f"SELECT * FROM trinitylake_versions('{root}', 1) ORDER BY version")
    expected = load(spark, lake, "versions", version=1).orderBy("version")
    assert log.schema == expected.schema
    assert log.collect() == expected.collect()
    for argument, options in {
        "1": {"version": 1},
        "row_filter => 'month = 2'": {"row_filter": "month = 2"},
    }.items():
        frame = spark.sql(f"SELECT * FROM trinitylake_table('{root}', 'facts.days', {argument})")
        expected = load(spark, lake, "facts.days", **options)
        assert frame.schema == expected.schema
        assert sorted(map(repr, frame.collect())) == sorted(map(repr, expected.collect()))
    with pytest.raises(TableNotFoundError, match=r"facts\.weeks"), spark_failures("read"):
        spark.sql(f"SELECT * FROM trinitylake_table('{root}', 'facts.weeks')").collect()
    with (
        pytest.raises(InvalidInputError, match="'version'"),
        spark_failures("x"),
    ):
        spark.sql(f"SELECT * FROM range(2), LATERAL trinitylake_table('{root}', 'objects', id)").collect()
