"""Test the life cycle of a pull request on the demo: clone, change, compare, promote and clean up a data mart.

``scripts.make_pictures`` takes a screenshot of the comparison page that this test writes.
"""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.dagster_plugin.pipeline import Pipeline
from tests.flights import flights_csv, sample_folder, spark
from tests.lakes import check_lake
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin import (
    LakehouseSettings,
    SparkResource,
    StorageSettings,
    TrinityLakeResource,
    build_publish_asset,
    build_trinitylake_definitions,
)
from trinitylake_ops.dagster_plugin.resources import branch_clone
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import ChangedOn
from trinitylake_ops.reports import comparison_page, write_page

__all__ = ["flights_csv", "sample_folder", "spark"]

BRANCH = "delays-from-30-minutes"
MART = ("marts", "delay_by_carrier_month")
APPROVER = "Ada Lovelace"


@dg.asset(key=[*MART], ins={"flights": dg.AssetIn(["facts", "flights"])}, io_manager_key="lakehouse_io_manager")
def delay_by_carrier_month(flights: DataFrame) -> DataFrame:
    """Build the mart of the branch: flights count as delayed from 30 minutes, and a new column has the worst delay."""
    return flights.groupBy("year", "month", "carrier").agg(
        F.count("*").alias("flights"),
        F.count_if(F.col("dep_delay") > 30).alias("dep_delayed_over_30_min"),
        F.max("dep_delay").alias("worst_dep_delay_min"),
    )


def branch_definitions(lakehouse: TrinityLakeResource) -> dg.Definitions:
    """Return the definitions of the branch."""
    publish = build_publish_asset(
        key=["publish", "mart"], tables={"mart": delay_by_carrier_month}, description="The mart, as one version."
    )
    job = dg.define_asset_job("mart", selection=dg.AssetSelection.assets(delay_by_carrier_month, publish))
    settings = LakehouseSettings(
        name="", lakehouse=lakehouse, tables=["facts.flights"], operations="clones", spark=SparkResource()
    )
    branch_assets = dg.Definitions(
        assets=[delay_by_carrier_month, publish], jobs=[job], executor=dg.in_process_executor
    )
    return dg.Definitions.merge(branch_assets, build_trinitylake_definitions(settings))


def lakehouse_at(folder: Path) -> TrinityLakeResource:
    return TrinityLakeResource.for_branch_deployment(
        str(folder / "lake"), str(folder / "clones"), storage_options=StorageSettings(fsync="false")
    )


def columns(lake: Lakehouse) -> set[str]:
    return {field.name for field in catalog_at(lake).load_table(MART).schema().fields}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_pull_request_is_compared_promoted_and_cleaned_up(
    spark: SparkSession,
    sample_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with dg.instance_for_test() as instance:
        production = Pipeline(lakehouse_at(tmp_path), sample_folder, instance)
        production.initial_load()
        production.monthly_load("2013-01-01")
        lake = production.lake()
        columns_before, version = columns(lake), lake.latest_version()
        rows_before = production.query("delay_by_carrier_month", "SELECT count(*) FROM t")

        monkeypatch.setenv("TRINITYLAKE_BRANCH", BRANCH)
        branch = lakehouse_at(tmp_path)
        monkeypatch.delenv("TRINITYLAKE_BRANCH")
        result = branch_definitions(branch).resolve_job_def("mart").execute_in_process(instance=instance)
        assert result.success
        clone, name = branch.open(), branch_clone(BRANCH)
        assert "worst_dep_delay_min" in columns(clone)
        assert (columns(lake), lake.latest_version()) == (columns_before, version + 2)

        production.initial_load()  # production continues
        parent_version = lake.latest_version()
        comparison = operations.compare(lake, name)
        write_page(tmp_path / "compare.html", comparison_page(comparison, lake.storage.now_ms()))
        (mart,) = comparison.on(ChangedOn.CLONE)
        assert mart.name == ".".join(MART)
        assert mart.clone is not None
        assert any("worst_dep_delay_min" in text for text in mart.clone.schema)
        assert {change.name for change in comparison.on(ChangedOn.PARENT)} == {
            f"reference.{table}" for table in ("airlines", "airports", "planes")
        }

        plan = production.must_run("promote", name=name)
        digest = operations.plan_promotion(lake, name).digest
        assert plan.success
        production.must_run("promote", name=name, approval={"digest": digest, "approved_by": APPROVER})
        promoted_version = lake.latest_version()
        assert promoted_version == parent_version + 1
        assert [
            (change.kind, change.namespace, change.table) for change in lake.diff(parent_version, promoted_version)
        ] == [("changed", *MART)]
        assert columns(lake) == columns(clone)
        assert production.query("delay_by_carrier_month", "SELECT count(*) FROM t") == rows_before

        clone_bytes = sum(info.size_bytes for info in clone.storage.list())
        production.must_run("drop_closed_branch", name=name)
        assert clone_bytes > 10_000
        assert list(clone.storage.list()) == []
        assert lake.snapshot().definition.exports == ()
        assert production.query("airlines", "SELECT count(*) FROM t") == [(16,)]
        check_lake(lake)
        assert operations.verify(lake, deep=True).is_clean
