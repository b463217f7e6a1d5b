"""Test the compaction of tables in Spark tasks: the written files, and the state after failures."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.engine_tables import EQUALITY, POSITIONS, with_equality, with_positions
from tests.lakes import Lakes, check_lake, lakes
from tests.operations.changes import append_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.staging import publish
from trinitylake_ops.spark.tables.reader import read_table
from trinitylake_ops.spark.tables.writer import write_groups_on

__all__ = ["lakes"]


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lakehouse]:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    yield lake
    check_lake(lake)


def append(lake: Lakehouse, *starts: int) -> None:
    """Commit 30 rows for each start id, in three partitions, of which the third is null."""
    for start in starts:
        ids = range(start, start + 30)
        parts = [None if number % 3 == 2 else number % 3 for number in ids]
        texts = [None if number % 4 == 0 else f"text {number}" for number in ids]
        rows = pa.table({"id": ids, "part": pa.array(parts, pa.int64()), "text": texts})
        staged = stage_arrow(lake, rows, "facts", "numbers", partition_by=("part",), mode="append")
        with lake.transaction() as txn:
            publish(txn, [staged])


def rows_of(lake: Lakehouse, version: int | None = None) -> set[tuple[object, ...]]:
    rows = catalog_at(lake, version).load_table("facts.numbers").scan().to_arrow()
    return {tuple(row.values()) for row in rows.to_pylist()}


def test_compacted_rows_are_equal_in_spark_and_duckdb(spark: SparkSession, lake: Lakehouse) -> None:
    append(lake, 0, 30, 60)
    version = lake.latest_version()
    before = rows_of(lake)
    plan = operations.plan_compact_tables(lake, min_input_files=2)
    report = plan.execute(write_groups_on(spark), run_id="r")
    assert (report.version, report.tables[0].files_before, report.tables[0].files_after) == (version + 1, 9, 3)
    assert {tuple(row) for row in read_table(spark, lake, "facts.numbers").collect()} == before
    assert rows_of(lake, version) == before
    database = duckdb.connect()
    catalog_at(lake).load_table("facts.numbers").scan().to_duckdb("numbers", connection=database)
    assert set(database.sql("select id, part, text from numbers").fetchall()) == before
    assert plan.execute(write_groups_on(spark), run_id="r").was_done


def test_failing_task_commits_nothing(spark: SparkSession, lake: Lakehouse) -> None:
    append(lake, 0, 30)
    version = lake.latest_version()
    plan = operations.plan_compact_tables(lake, min_input_files=2)
    path = plan.tables[0].file_groups[1].files[0].file_path.removeprefix(lake.root)
    original = lake.storage.read(path)
    lake.storage.write(path, original[:40])
    with pytest.raises(CorruptFileError, match=f"'{path}' is not a Parquet file"):
        plan.execute(write_groups_on(spark))
    other = plan.tables[0].file_groups[0].files[0].file_path.removeprefix(lake.root)
    lake.storage.write(path, original)
    lake.storage.write(other, append_one_row(lake.storage.read(other)))
    with pytest.raises(CorruptFileError, match=f"data file '{other}' has .* its manifest declares"):
        plan.execute(write_groups_on(spark))
    assert lake.latest_version() == version


def append_one_row(parquet: bytes) -> bytes:
    rows = pq.read_table(io.BytesIO(parquet))
    body = io.BytesIO()
    pq.write_table(pa.concat_tables([rows, rows.slice(0, 1)]), body)
    return body.getvalue()


def test_tasks_apply_delete_files(spark: SparkSession, lake: Lakehouse) -> None:
    positions, equality = with_positions(lake), with_equality(lake)
    operations.plan_compact_tables(lake).execute(write_groups_on(spark))
    assert operations.plan_compact_tables(lake).is_empty
    for table, expected in ((positions, POSITIONS), (equality, EQUALITY)):
        rows = table.loaded.scan().to_arrow().to_pylist()
        assert sorted((row["id"], row["place"]) for row in rows) == expected


def test_memory_lakehouse_is_rejected(spark: SparkSession, lakes: Lakes) -> None:
    lake = lakes.memory()
    for _ in range(2):
        append_rows(lake)
    plan = operations.plan_compact_tables(lake, min_input_files=2)
    with pytest.raises(InvalidInputError):
        plan.execute(write_groups_on(spark))
