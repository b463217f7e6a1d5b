"""Test operation jobs that execute their bulk work on Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.dagster_plugin.maintenance_jobs import Jobs
from tests.local_clock import LocalClock
from trinitylake_ops.spark import executor as executor_module


def test_resource_selects_engine_of_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    spark_jobs: list[str] = []
    run_in_tasks = executor_module.run_in_tasks

    def record_and_run(session: SparkSession, description: str, *arguments: Any) -> list[bytes]:
        spark_jobs.append(description)
        return run_in_tasks(session, description, *arguments)

    monkeypatch.setattr(executor_module, "run_in_tasks", record_and_run)
    monkeypatch.setattr(executor_module, "FEW", 0)
    jobs = Jobs(tmp_path, LocalClock(monkeypatch), engine="spark")
    assert jobs.must_run("verify").metadata["versions"] == jobs.lake.latest_version() + 1
    assert any("DefinitionReader" in job for job in spark_jobs)
    spark_jobs.clear()
    plan = jobs.plan("expire")
    assert any("RootWalk" in job for job in spark_jobs)
    outcome = jobs.apply(plan, "expire")
    assert outcome.success, outcome.error
    spark_jobs.clear()
    jobs.must_run("repair_hint")
    assert not spark_jobs
    assert spark.sparkContext._jsc is not None, "an existing session must not be stopped"
