"""Test that a run publishes five tables as one version, despite interruptions and restarts."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.dagster_plugin.run_config import QUIET
from tests.dagster_plugin.sales_project import (
    BAD_ORDERS,
    NAMES,
    PUBLISHED,
    definitions,
)
from tests.lakes import check_lake
from tests.processes import fork
from tests.telemetry.lineage_log import events, log_to_file
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.names import ONLY
from trinitylake_ops.iceberg.catalog import catalog_at


def failures(result: dg.ExecuteInProcessResult) -> list[str]:
    """Return the messages of failed steps, followed by the message of the failed run."""
    return [f"{event.message} {event.event_specific_data}" for event in result.all_events if event.is_failure]


class Sales:
    """The project on one lakehouse and one Dagster instance on disk."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance):
        self.lake = Lakehouse.create(str(folder / "lake"), {"fsync": "false"})
        self.instance = instance
        self._folder = folder
        self._fault = folder / "fault"

    def run(self) -> dg.ExecuteInProcessResult:
        job = definitions(str(self._folder)).resolve_job_def("sales")
        return job.execute_in_process(instance=self.instance, run_config=QUIET, raise_on_error=False)

    def must_run(self) -> dg.ExecuteInProcessResult:
        result = self.run()
        assert result.success, failures(result)
        return result

    def inject_fault(self, fault: str) -> None:
        self._fault.write_text(fault)

    def fault_was_injected(self) -> bool:
        return not self._fault.exists()

    def execute(self, job: str, reexecution: dg.ReexecutionOptions | None = None) -> dg.DagsterRun:
        """Execute the job like a run worker. "sales_job" starts a process for each step."""
        reconstructable = dg.build_reconstructable_job("tests.dagster_plugin.sales_project", job, (str(self._folder),))
        with (
            dg.DagsterInstance.from_ref(self.instance.get_ref()) as instance,
            dg.execute_job(reconstructable, instance, run_config=QUIET, reexecution_options=reexecution) as result,
        ):
            run = instance.get_run_by_id(result.run_id)
        assert run is not None
        return run

    def published_versions(self) -> list[int]:
        return [info.version for info in self.lake.history() if info.operation == "publish"]

    def n_rows(self, table: str) -> int:
        n_rows: int = catalog_at(self.lake).load_table(("sales", table)).scan().to_arrow().num_rows
        return n_rows


@pytest.fixture
def sales(tmp_path: Path) -> Iterator[Sales]:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        project = Sales(tmp_path, instance)
        yield project
        check_lake(project.lake)
        assert operations.verify(project.lake).is_clean


def test_five_tables_are_published_as_one_version(
    sales: Sales, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        lineage = log_to_file(patch, tmp_path)
        result = sales.must_run()
    _, complete = events(lineage)
    assert complete["run"]["runId"] == result.run_id
    assert (complete["job"]["name"], complete["job"]["facets"]["jobType"]["integration"]) == (
        "publish/sales",
        "DAGSTER",
    )
    assert {output["name"] for output in complete["outputs"]} == {f"sales.{name}" for name in NAMES}
    assert sales.published_versions() == [1]
    assert {(change.kind, change.table) for change in sales.lake.diff(0, 1)} == {
        ("added", None),
        *(("added", name) for name in NAMES),
    }
    (info,) = sales.lake.history(1)
    assert info.run_id == result.run_id
    assert info.properties["asset"] == "publish/sales"
    versions = json.loads(info.properties["asset_versions"])
    assert set(versions) == {f"sales/{name}" for name in NAMES}
    assert versions["sales/customers"]["code"] == "7"
    event = sales.instance.get_latest_materialization_event(dg.AssetKey(["sales", "orders"]))
    assert event is not None and event.asset_materialization is not None
    tags, metadata = event.asset_materialization.tags or {}, event.asset_materialization.metadata
    assert versions["sales/orders"]["data"] == tags["dagster/data_version"]
    assert (metadata["dagster/row_count"].value, metadata["dagster/table_name"].value) == (2, "sales.orders")
    (lakehouse_metadata,) = [
        event.materialization.metadata
        for event in result.get_asset_materialization_events()
        if event.asset_key == ONLY.lakehouse_key
    ]
    assert lakehouse_metadata["lakehouse_version"].value == 1
    sales.must_run()
    assert sales.published_versions() == [2, 1]
    assert [sales.n_rows(name) for name in ("orders", "customers", "regions")] == [4, 2, 2]


def test_failed_blocking_check_is_reported_and_publishes_nothing(sales: Sales, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BAD_ORDERS, "yes")
    result = sales.run()
    assert not result.success
    step, run = failures(result)
    for message in (step, run):
        assert "1 blocking asset check failed with ERROR severity:\\nsales/orders: positive_items" in message
    assert PUBLISHED not in {event.asset_key for event in result.get_asset_materialization_events()}
    assert sales.lake.latest_version() == 0
    monkeypatch.delenv(BAD_ORDERS)
    sales.must_run()
    assert sales.published_versions() == [1]
    assert sales.n_rows("orders") == 2
    assert {change.table for change in sales.lake.diff(0, 1)} == {None, *NAMES}, "one version contains all five tables"


def test_retried_step_publishes_once(sales: Sales) -> None:
    sales.inject_fault("unknown")
    result = sales.must_run()
    assert sales.fault_was_injected()
    assert any(event.is_step_up_for_retry for event in result.all_events)
    assert sales.published_versions() == [1]
    assert sales.n_rows("orders") == 2


@pytest.mark.soak
def test_step_killed_after_commit_publishes_once(sales: Sales) -> None:
    sales.inject_fault("after")
    run = sales.execute("sales_job")
    assert sales.fault_was_injected()
    assert run.is_success
    assert sales.published_versions() == [1]
    assert sales.n_rows("orders") == 2
    event = sales.instance.get_latest_materialization_event(PUBLISHED)
    assert event is not None and event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    assert (metadata["lakehouse_version"].value, metadata["was_published"].value) == (1, True)


@pytest.mark.parametrize("timing", ["before", "after"])
@pytest.mark.parametrize("steps", [pytest.param("remaining", marks=pytest.mark.soak), "all"])
def test_run_worker_killed_at_commit_publishes_once(sales: Sales, timing: str, steps: str) -> None:
    sales.inject_fault(timing)
    status, _ = fork(lambda _: sales.execute("sales_job_in_process") and None).finish()
    assert status == -signal.SIGKILL
    assert sales.published_versions() == ([1] if timing == "after" else [])
    (killed,) = sales.instance.get_runs()
    sales.instance.report_run_failed(killed)  # like Dagster's run monitoring
    with sales.lake.transaction() as txn:
        txn.create_namespace("others")
    reexecution = dg.ReexecutionOptions(parent_run_id=killed.run_id)
    if steps == "remaining":
        reexecution = dg.ReexecutionOptions.from_failure(killed.run_id, sales.instance)
    run = sales.execute("sales_job_in_process", reexecution)
    assert run.is_success
    n_publications = 2 if (timing, steps) == ("after", "all") else 1
    assert len(sales.published_versions()) == n_publications, "tables that are staged again must be published again"
    assert sales.n_rows("orders") == 2, "rows that are staged again must not be appended twice"
    second_reexecution = sales.execute("sales_job_in_process", dg.ReexecutionOptions(parent_run_id=run.run_id))
    assert second_reexecution.is_success
    assert len(sales.published_versions()) == n_publications + 1
    assert sales.n_rows("orders") == 4
