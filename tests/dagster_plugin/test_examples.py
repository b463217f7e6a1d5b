"""Run the unchanged examples on test lakehouses."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from tests.dagster_plugin.test_code_location import run, write_rows
from tests.lakes import Lakes
from tests.spark_deployments.spark_processes import SPARK_HOME, environment
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once

EXAMPLES = Path(__file__).parents[2] / "examples"
IN_PROCESS = dg.Definitions(executor=dg.in_process_executor)


def load(monkeypatch: pytest.MonkeyPatch, file: str) -> Any:
    """Load a module of an example from its folder."""
    path = EXAMPLES / file
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def publish_orders(lake: Lakehouse) -> None:
    orders = pa.table({"customer": [1, 1, 3], "euros": [20.0, 5.5, 12.0]})
    staged = stage_arrow(lake, orders, "shop", "orders", mode="append")
    publish_once(lake, [staged], publication_id("orders"))


def code_lines(file: Path) -> set[int]:
    """Return the numbers of the lines with code, without blank lines, comments and the module docstring."""
    text = file.read_text()
    docstring = ast.parse(text).body[0]
    assert isinstance(docstring, ast.Expr)
    lines = enumerate(text.splitlines()[docstring.end_lineno :])
    return {number for number, line in lines if line.strip() and not line.strip().startswith("#")}


def test_existing_project_adds_lakehouse_in_under_20_lines(
    lakes: Lakes, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 10 < len(code_lines(EXAMPLES / "existing_project/definitions.py")) < 20
    lake = lakes.local()
    write_rows(lake, "sales.customers", 1)
    monkeypatch.setenv("LAKE_ROOT", lake.root)
    definitions = dg.Definitions.merge(load(monkeypatch, "existing_project/definitions.py").defs, IN_PROCESS)
    asset_job = definitions.resolve_implicit_global_asset_job_def()
    result = asset_job.execute_in_process(instance=instance)
    assert result.success
    published = [info.version for info in lake.history() if info.operation == "publish"]
    assert published == [2, 1], "three tables, one version"
    changes = [(change.kind, change.table) for change in lake.diff(1, 2)]
    assert sorted(changes) == [("added", "orders"), ("added", "revenue"), ("changed", "customers")]
    assert "orders_are_paid" in {event.check_name for event in result.get_asset_check_evaluations()}
    observed = run(definitions, instance, "observe").all_events
    assert {event.asset_key for event in observed if event.is_asset_observation} == {dg.AssetKey("lakehouse")}
    assert run(definitions, instance, "expire").success
    assert run(definitions, instance, "export", name="first").success


def test_asset_reads_one_lakehouse_and_publishes_into_another(
    lakes: Lakes, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sales, marts = lakes.local("sales"), lakes.local("marts")
    publish_orders(sales)
    monkeypatch.setenv("SALES_ROOT", sales.root)
    monkeypatch.setenv("MARTS_ROOT", marts.root)
    definitions = dg.Definitions.merge(load(monkeypatch, "two_lakehouses/definitions.py").defs, IN_PROCESS)
    keys = [dg.AssetKey(["marts", "reports", "revenue"]), dg.AssetKey(["marts", "publish"])]
    job = dg.define_asset_job("reports", selection=dg.AssetSelection.assets(*keys))
    result = run(dg.Definitions.merge(definitions, dg.Definitions(jobs=[job])), instance, "reports")
    materialized = [event.asset_key for event in result.get_asset_materialization_events()]
    assert sorted(materialized) == sorted([*keys, dg.AssetKey(["marts", "lakehouse"])])
    rows = catalog_at(marts).load_table(("reports", "revenue")).scan().to_arrow().to_pylist()
    assert sorted(row["euros_sum"] for row in rows) == [12.0, 25.5]
    for name in ("sales", "marts"):
        assert run(definitions, instance, f"{name}_expire").success
        assert run(definitions, instance, f"{name}_observe").success


def test_yaml_project_defines_lakehouse(
    lakes: Lakes, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lakes.local()
    publish_orders(lake)
    monkeypatch.setenv("SALES_ROOT", lake.root)
    monkeypatch.syspath_prepend(str(EXAMPLES / "yaml_project/src"))
    try:
        load_defs = load(monkeypatch, "yaml_project/src/my_lakes/definitions.py").defs
        definitions = dg.Definitions.merge(load_defs(), IN_PROCESS)
        assert run(definitions, instance, "sales_expire").success
        assert run(definitions, instance, "sales_check").success
        observed = run(definitions, instance, "sales_observe")
        observed_keys = {event.asset_key for event in observed.all_events if event.is_asset_observation}
        assert observed_keys == {dg.AssetKey(["sales", "lakehouse"]), dg.AssetKey(["sales", "shop", "orders"])}
        schedules = {schedule.name: schedule for schedule in definitions.get_repository_def().schedule_defs}
        assert set(schedules) == {f"sales_{name}_schedule" for name in ("check", "expire", "observe")}
        assert schedules["sales_expire_schedule"].cron_schedule == "0 4 * * *"
        assert schedules["sales_expire_schedule"].execution_timezone == "Europe/Berlin"
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "my_lakes"]:
            del sys.modules[name]


STAGING_PROGRAM = """
import sys
import pyarrow as pa
from dagster_pipes import open_dagster_pipes
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import report_staged
from trinitylake_ops.iceberg import stage_arrow

with open_dagster_pipes() as pipes:
    rows = pa.table({"customer": [1, 2], "euros": [20.0, 5.5]})
    report_staged(pipes, stage_arrow(Lakehouse.open(sys.argv[2]), rows, "shop", NAME, mode="replace_table"))
assert "dagster" not in sys.modules
"""


# Dagster's Pipes client emits these warnings.
IGNORE_PIPES_WARNINGS = pytest.mark.filterwarnings(
    "ignore:AssetExecutionContext.run_id is deprecated:DeprecationWarning", "ignore::dagster.PreviewWarning"
)


def run_pipes_project(
    monkeypatch: pytest.MonkeyPatch, lake: Lakehouse, instance: dg.DagsterInstance, command: str
) -> dg.ExecuteInProcessResult:
    monkeypatch.setenv("LAKE_ROOT", lake.root)
    monkeypatch.setenv("SUBMIT", command)
    definitions = dg.Definitions.merge(load(monkeypatch, "pipes_project/definitions.py").defs, IN_PROCESS)
    keys = [dg.AssetKey(["shop", "orders"]), dg.AssetKey(["publish", "shop"])]
    job = dg.define_asset_job("load", selection=dg.AssetSelection.assets(*keys))
    defs = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job]))
    return defs.resolve_job_def("load").execute_in_process(instance=instance, raise_on_error=False)


@IGNORE_PIPES_WARNINGS
def test_tables_staged_by_external_program_are_published_by_run(
    lakes: Lakes, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lake, program = lakes.local(), tmp_path / "stage.py"
    program.write_text(STAGING_PROGRAM.replace("NAME", '"orders"'))
    result = run_pipes_project(monkeypatch, lake, instance, f"{sys.executable} {program}")
    assert result.success
    assert catalog_at(lake).load_table("shop.orders").scan().to_arrow().num_rows == 2
    (event,) = instance.fetch_materializations(dg.AssetKey(["shop", "orders"]), limit=9).records
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["dagster/row_count"].value == 2
    program.write_text(STAGING_PROGRAM.replace("NAME", '"items"'))
    failed = run_pipes_project(monkeypatch, lake, instance, f"{sys.executable} {program}")
    (failure,) = [event for event in failed.all_events if event.is_step_failure]
    assert "'shop.orders'; it reported: shop.items" in str(failure.step_failure_data.error)
    assert lake.latest_version() == 1


@IGNORE_PIPES_WARNINGS
@pytest.mark.soak
def test_spark_submit_reports_staged_tables(
    lakes: Lakes, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lakes.local()
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    submit = SPARK_HOME / "bin" / "spark-submit"
    assert run_pipes_project(monkeypatch, lake, instance, f"{submit} --master local[2]").success
    assert catalog_at(lake).load_table("shop.orders").scan().to_arrow().num_rows == 2
