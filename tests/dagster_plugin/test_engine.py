"""Operations of Dagster whose bulk Spark carries out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.dagster_plugin.maintenance_jobs import Jobs
from tests.local_clock import LocalClock
from trinitylake_ops.spark import executor as executor_module
from trinitylake_ops.spark.executor import SparkExecutor


def test_the_resource_says_which_engine_carries_out_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    worked: list[str] = []
    run = SparkExecutor._run

    def counted(self: SparkExecutor, what: str, *arguments: Any) -> list[bytes]:
        worked.append(what)
        return run(self, what, *arguments)

    monkeypatch.setattr(SparkExecutor, "_run", counted)
    monkeypatch.setattr(executor_module, "FEW", 0)
    jobs = Jobs(tmp_path, LocalClock(monkeypatch), engine="spark")
    assert jobs.must_run("verify").metadata["versions"] == jobs.lake.latest_version() + 1
    assert "DefinitionCheck" in worked
    worked.clear()
    plan = jobs.plan("expire")
    assert "RootWalk" in worked
    ran = jobs.apply(plan, "expire")
    assert ran.success, ran.error
    worked.clear()
    jobs.must_run("repair_hint")
    assert not worked
    assert spark.sparkContext._jsc is not None, "a session that was there goes on"
