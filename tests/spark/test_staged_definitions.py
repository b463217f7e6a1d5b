"""Test that executors stage definitions, and that one transaction of the driver commits all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pyspark.sql import SparkSession

from tests.lakes import Lakes, lakes, unreferenced_paths
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.transaction.saved import StagedDefinition

__all__ = ["lakes"]

N_TABLES = 40


def test_driver_commits_definitions_staged_by_executors(spark: SparkSession, lakes: Lakes) -> None:
    lake = lakes.local()
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    txn = lake.transaction(message="staged by executors")
    storage = lake.storage

    def stage(numbers: Iterable[int]) -> Iterator[StagedDefinition]:
        executor_lake = Lakehouse(storage)
        for number in numbers:
            yield executor_lake.stage_definition("ns", f"t{number:02}", TableDef(properties={"n": str(number)}))

    staged = spark.sparkContext.parallelize(range(N_TABLES), 4).mapPartitions(stage).collect()
    assert lake.latest_version() == 1
    txn.put_staged(staged)
    assert txn.commit() == 2
    snapshot = lake.snapshot()
    assert [snapshot.table("ns", name).properties["n"] for name in snapshot.tables("ns")] == [
        str(number) for number in range(N_TABLES)
    ]
    assert next(lake.history()).counts == {"set": N_TABLES, "deleted": 0}
    assert unreferenced_paths(lake) == set()
