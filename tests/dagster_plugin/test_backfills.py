"""Backfills by Dagster's own daemon: tables that several runs stage are published by the runs of the publish asset."""

import logging
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.workspace.load_target import ModuleTarget
from dagster._daemon.backfill import execute_backfill_iteration
from dagster._time import get_current_timestamp

from trinitylake_ops import Lakehouse
from trinitylake_ops.tables.catalog import catalog_at

LAUNCHER = {
    "run_launcher": {
        "module": "dagster._core.launcher.sync_in_memory_run_launcher",
        "class": "SyncInMemoryRunLauncher",
    },
    "run_coordinator": {"module": "dagster._core.run_coordinator", "class": "QueuedRunCoordinator"},
}
PUBLISH = dg.AssetKey(["publish", "days"])
DAYS = ["2026-01-01", "2026-01-02", "2026-01-03"]


def backfill(instance: dg.DagsterInstance, keys: list[str]) -> tuple[BulkActionStatus, list[dg.DagsterRun]]:
    """Backfill assets over three days as the daemon does, until it is done."""
    with create_test_daemon_workspace_context(
        ModuleTarget(
            module_name="tests.dagster_plugin.backfill_project",
            attribute=None,
            working_directory=None,
            location_name="here",
        ),
        instance,
    ) as workspace:
        graph = workspace.create_request_context().asset_graph
        instance.add_backfill(
            PartitionBackfill.from_asset_partitions(
                backfill_id="three_days",
                asset_graph=graph,
                partition_names=DAYS,
                asset_selection=[dg.AssetKey(key.split("/")) for key in keys],
                backfill_timestamp=get_current_timestamp(),
                tags={},
                dynamic_partitions_store=instance,
                all_partitions=False,
                title=None,
                description=None,
                run_config=None,
            )
        )
        for _ in range(20):
            list(execute_backfill_iteration(workspace, logging.getLogger("test")))
            for run in reversed(instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]))):
                instance.launch_run(run.run_id, workspace.create_request_context())
            state = instance.get_backfill("three_days")
            assert state is not None
            if state.status != BulkActionStatus.REQUESTED:
                break
    return state.status, list(instance.get_runs())


def rows(lake: Lakehouse, table: str) -> list[tuple[Any, ...]]:
    found = catalog_at(lake).load_table(("shop", table)).scan().to_arrow().to_pylist()
    return sorted(tuple(row.values()) for row in found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::dagster.BetaWarning")
def test_a_backfill_that_dagster_splits_publishes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    monkeypatch.setenv("BACKFILL_LAKE", lake.root)
    with dg.instance_for_test(temp_dir=str(tmp_path), overrides=LAUNCHER) as instance:
        keys = ["shop/orders", "shop/daily_totals", "shop/two_days", "shop/summary", "publish/days"]
        status, runs = backfill(instance, keys)
        assert status == BulkActionStatus.COMPLETED_SUCCESS
        assert rows(lake, "orders") == [(day, amount) for day in DAYS for amount in (1.0, 2.0)]
        assert rows(lake, "daily_totals") == [(day, 3.0) for day in DAYS]
        assert rows(lake, "two_days") == list(zip(DAYS, (2, 4, 4), strict=True))
        without = [run for run in runs if PUBLISH not in (run.asset_selection or ())]
        assert without, "Dagster split the backfill"
        assert rows(lake, "summary") == [(6,)]
