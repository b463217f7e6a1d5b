"""Test the job that merges small data files of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from tests.dagster_plugin.maintenance_jobs import JobOutcome, approved
from tests.lakes import Lakes
from tests.operations.changes import append_rows
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.iceberg.catalog import catalog_at


@pytest.mark.local_only("the job opens the lakehouse by its local path")
def test_compact_tables_job_merges_small_files(spark: SparkSession, lakes: Lakes, tmp_path: Path) -> None:
    assert spark.sparkContext is not None, "the session must be running before the job starts"
    lake = lakes.local()
    for _ in range(5):
        append_rows(lake)
    version = lake.latest_version()
    resource = TrinityLakeResource(root=lake.root, storage_options=StorageSettings(fsync="false"))
    definitions = dg.Definitions(
        jobs=build_jobs(operations="tables"), resources={"lakehouse": resource}, executor=dg.in_process_executor
    )

    def run(job: str, **config: Any) -> JobOutcome:
        definition = definitions.resolve_job_def(job)
        outcome = JobOutcome(definition.execute_in_process(run_config=config, raise_on_error=False))
        assert outcome.success, outcome.error
        return outcome

    plan_run = run("compact_tables")
    assert (plan_run.metadata["files"], plan_run.metadata["tables"], plan_run.materializations) == (5, 1, [])
    assert "ns.t" in plan_run.metadata["plan"]
    assert run("compact_tables", tables=["ns.t"], min_input_files=6).metadata["is_empty"]
    assert lake.latest_version() == version

    outcome = run("compact_tables", **approved(plan_run.metadata))
    assert (outcome.metadata["files_before"], outcome.metadata["files_after"]) == (5, 1)
    assert outcome.materializations[0]["operation"] == "compact-tables"
    info = next(iter(lake.history(limit=1)))
    assert (info.version, info.operation, info.run_id) == (version + 1, "compact-tables", outcome.run_id)
    table = catalog_at(lake).load_table("ns.t")
    assert (len(list(table.scan().plan_files())), table.scan().to_arrow().num_rows) == (1, 15)
    second_run = run("compact_tables", unattended=True)
    assert (second_run.metadata["is_empty"], second_run.materializations, lake.latest_version()) == (
        True,
        [],
        version + 1,
    )
