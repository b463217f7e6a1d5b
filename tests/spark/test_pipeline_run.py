"""Test pipeline runs: a run reads one version and commits all tables at once, even if it is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.table import Transaction
from pyiceberg.types import LongType
from pyspark.sql import SparkSession

from tests.lakes import check_lake
from tests.telemetry.lineage_log import events, log_to_file
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.plan import Evolution, plan_write
from trinitylake_ops.iceberg.write.publication import Publication
from trinitylake_ops.iceberg.write.staging import Replace, StagingCatalog, publish, stage_data_files
from trinitylake_ops.spark.tables.pipeline_run import PipelineRun


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lakehouse]:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    commit(lake, "raw", "orders", pa.table({"id": [1, 2, 3], "day": ["a", "b", "b"]}))
    yield lake
    check_lake(lake)


def commit(lake: Lakehouse, namespace: str, table: str, rows: pa.Table) -> None:
    with lake.transaction() as txn:
        publish(txn, [stage_arrow(lake, rows, namespace, table, mode="append")])


def rows_of(lake: Lakehouse, name: str, version: int | None = None) -> list[tuple[object, ...]]:
    rows_table = catalog_at(lake, version).load_table(name).scan().to_arrow()
    return sorted(map(tuple, (row.values() for row in rows_table.to_pylist())), key=repr)


def stage_counts(run: PipelineRun, lake: Lakehouse) -> None:
    """Stage two tables, one with Spark and one with PyIceberg."""
    run.write(run.read("raw.orders").groupBy("day").count(), "facts", "days", mode="replace_table")
    catalog = StagingCatalog(lake)
    row_counts = pa.table({"rows": [run.read("raw.orders").count()]})
    catalog.create_table("facts.seen", row_counts.schema).append(row_counts)
    run.add(catalog.staged("facts.seen"))


def test_run_reads_one_version_and_commits_once(
    spark: SparkSession, lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = log_to_file(monkeypatch, tmp_path)
    first = PipelineRun(spark, lake, "2013-01")
    stage_counts(first, lake)  # this attempt never publishes
    commit(lake, "raw", "orders", pa.table({"id": [4], "day": ["c"]}))
    second = PipelineRun(spark, lake, "2013-01")
    assert (second.version, second.is_published, lake.latest_version()) == (1, False, 2)
    stage_counts(second, lake)
    published = second.publish(message="January", isolation="snapshot")
    assert (published.version, published.was_published, lake.latest_version()) == (3, False, 3)
    info = next(iter(lake.history(limit=1)))
    assert (info.operation, info.message, info.run_id) == ("publish", "January", "2013-01")
    assert {(change.kind, change.table) for change in lake.diff(2, 3) if change.table} == {
        ("added", "days"),
        ("added", "seen"),
    }
    assert (rows_of(lake, "facts.days"), rows_of(lake, "facts.seen")) == ([("a", 1), ("b", 2)], [(3,)])

    assert first.publish().was_published, "the first attempt does not commit again"
    third = PipelineRun(spark, lake, "2013-01")
    assert third.is_published and third.publish().version == 3
    assert PipelineRun(spark, lake, "2013-02").version == lake.latest_version() == 3
    _, complete = events(lineage)
    assert [table["name"] for table in complete["inputs"]] == ["raw.orders"]
    assert {table["name"]: table["facets"]["version"]["datasetVersion"] for table in complete["outputs"]} == {
        "facts.days": "3",
        "facts.seen": "3",
    }
    assert complete["job"]["facets"]["jobType"]["integration"] == "SPARK"


def test_concurrent_changes_conflict(spark: SparkSession, lake: Lakehouse) -> None:
    run = PipelineRun(spark, lake, "r")
    run.read("raw.orders")
    run.add(stage_arrow(lake, pa.table({"n": [1]}), "facts", "t", mode="append"))
    with pytest.raises(InvalidInputError, match=r"facts\.t"):
        run.write(spark.range(1), "facts", "t", mode="append")
    commit(lake, "raw", "orders", pa.table({"id": [4], "day": ["c"]}))
    with pytest.raises(CommitConflictError, match=r"raw\.orders"):
        run.publish(isolation="serializable")
    assert run.publish(isolation="snapshot").version == 3
    old = PipelineRun(spark, lake, "old", version=1)
    with pytest.raises(CommitConflictError, match=r"raw\.orders"):
        old.write(spark.range(1), "raw", "orders", mode="replace_table")
    with pytest.raises(InvalidInputError, match="run_id"):
        PipelineRun(spark, lake, "")


def test_slower_worker_of_committed_run_gets_conflict(spark: SparkSession, lake: Lakehouse) -> None:
    runs = [PipelineRun(spark, lake, "r") for _ in range(2)]
    runs[0].add(stage_arrow(lake, pa.table({"n": [1]}), "facts", "t", mode="append"))
    version = runs[0].publish().version
    with pytest.raises(CommitConflictError, match=f"run r was already committed as version {version}"):
        runs[1].write(spark.range(1), "facts", "t", mode="append")
    assert PipelineRun(spark, lake, "r").publish() == Publication(version, was_published=True)


def partition_by_day(change: Transaction) -> None:
    with change.update_schema() as schema:
        schema.rename_column("id", "number")
    with change.update_spec() as spec:
        spec.add_identity("day")


def test_write_evolves_schema_and_partitions(spark: SparkSession, lake: Lakehouse) -> None:
    run = PipelineRun(spark, lake, "r")
    more = run.read("raw.orders").selectExpr("id + 10 as number", "nullif(day, 'a') as day", "'x' as note")
    run.write(more, "raw", "orders", mode="append", evolve=partition_by_day)
    assert rows_of(lake, "raw.orders") == [(1, "a"), (2, "b"), (3, "b")]
    version = run.publish().version
    table = catalog_at(lake).load_table("raw.orders")
    assert [field.name for field in table.schema().fields] == ["number", "day", "note"]
    partitions = {
        tuple(task.file.partition[index] for index in range(len(task.file.partition)))
        for task in table.scan().plan_files()
    }
    assert partitions == {(), (None,), ("b",)}
    before = [(1, "a", None), (11, None, "x"), (12, "b", "x"), (13, "b", "x"), (2, "b", None), (3, "b", None)]
    assert rows_of(lake, "raw.orders") == before
    operations.plan_compact_tables(lake, repartition=True).execute()
    assert rows_of(lake, "raw.orders") == before
    assert rows_of(lake, "raw.orders", version - 1) == [(1, "a"), (2, "b"), (3, "b")]
    replaced = PipelineRun(spark, lake, "again")
    replaced.write(
        spark.sql("select 5L as number, 'b' as day, 'y' as note"),
        "raw",
        "orders",
        mode="replace_partitions",
        partitions=[{"day": "b"}],
    )
    replaced.publish()
    assert rows_of(lake, "raw.orders") == [(1, "a", None), (11, None, "x"), (5, "b", "y")]


def widen(change: Transaction) -> None:
    with change.update_schema() as schema:
        schema.update_column("small", LongType())
        schema.delete_column("gone")


@pytest.mark.parametrize("mode", ["all", "nothing"])
def test_columns_are_widened_and_dropped(lake: Lakehouse, mode: str) -> None:
    evolve: Evolution = widen
    commit(lake, "facts", "w", pa.table({"small": pa.array([1], pa.int32()), "gone": ["x"]}))
    plan = plan_write(lake, "facts", "w", evolve=evolve)
    files = plan.write(pa.table({"small": [2**40]}).to_batches())
    staged = stage_data_files(lake, plan, files, replacing=Replace(mode))
    with lake.transaction() as txn:
        publish(txn, [staged])
    assert rows_of(lake, "facts.w") == ([(2**40,)] if mode == "all" else [(1,), (2**40,)])
    assert rows_of(lake, "facts.w", 2) == [(1, "x")]


def test_replace_all_with_new_partitioning(lake: Lakehouse) -> None:
    plan = plan_write(lake, "raw", "orders", evolve=partition_by_day)
    files = plan.write(pa.table({"number": [9], "day": ["z"]}).to_batches())
    with lake.transaction() as txn:
        publish(txn, [stage_data_files(lake, plan, files, replacing=Replace.ALL)])
    assert rows_of(lake, "raw.orders") == [(9, "z")]
