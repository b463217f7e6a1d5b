"""Backfills by Dagster's own daemon: tables that several runs stage are published by the runs of the publish asset."""

import logging
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pytest
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.execution.asset_backfill import AssetBackfillData
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.workspace.load_target import ModuleTarget
from dagster._daemon.backfill import execute_backfill_iteration
from dagster._time import get_current_timestamp

from tests.dagster_plugin.backfill_project import DAYS as PROJECT_DAYS
from tests.dagster_plugin.backfill_project import IO, LAKE, orders
from tests.dagster_plugin.quiet import QUIET
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import TrinityLakeIOManager, TrinityLakeResource, build_publish_asset
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


def test_what_a_run_of_a_backfill_stages_is_not_visible_and_says_so(lakes: Lakes) -> None:
    """A backfill that makes the table for two days, and its publish asset for the first of them only."""

    @dg.asset(ins={"orders": dg.AssetIn(orders.key, input_manager_key=IO)}, partitions_def=PROJECT_DAYS)
    def report(orders: pd.DataFrame) -> None:
        assert len(orders) > 0

    lake = lakes.local()
    lakehouse = TrinityLakeResource(root=lake.root)
    publisher = build_publish_asset(
        key=PUBLISH.path, tables={"orders": orders}, partitions_def=PROJECT_DAYS, names=LAKE, description="Orders."
    )
    job = dg.Definitions(
        assets=[orders, publisher, report],
        resources={LAKE.resource_key: lakehouse, IO: TrinityLakeIOManager(lakehouse=lakehouse)},
        executor=dg.in_process_executor,
    ).resolve_implicit_global_asset_job_def()
    with dg.instance_for_test() as instance:

        def subset(count: int) -> Any:
            return PROJECT_DAYS.subset_with_partition_keys(DAYS[:count])

        target = AssetGraphSubset(
            partitions_subsets_by_asset_key={orders.key: subset(2), report.key: subset(2), PUBLISH: subset(1)}
        )
        now = get_current_timestamp()
        instance.add_backfill(
            PartitionBackfill(
                backfill_id="two_days",
                status=BulkActionStatus.REQUESTED,
                from_failure=False,
                tags={},
                backfill_timestamp=now,
                asset_selection=[orders.key, report.key, PUBLISH],
                asset_backfill_data=AssetBackfillData.empty(target, now, instance),
            )
        )

        def run(day: str, *keys: dg.AssetKey) -> bool:
            return job.execute_in_process(
                instance=instance,
                run_config=QUIET,
                raise_on_error=False,
                partition_key=day,
                asset_selection=[*keys],
                tags={"dagster/backfill": "two_days"},
            ).success

        def event(key: dg.AssetKey) -> dg.AssetMaterialization | None:
            found = instance.get_latest_materialization_event(key)
            return None if found is None else found.asset_materialization

        assert not run(DAYS[1], orders.key), "nothing would publish it"
        assert event(orders.key) is None
        assert run(DAYS[0], orders.key)
        staged = event(orders.key)
        assert staged is not None and staged.metadata["trinitylake/staged_by_backfill"].value == "two_days"
        assert "lakehouse_version" not in staged.metadata
        assert lake.latest_version() == 0
        assert not run(DAYS[0], report.key), "it would be made of rows that are not visible"
        assert event(report.key) is None
        assert run(DAYS[0], PUBLISH)
        published = event(orders.key)
        assert published is not None and published.metadata["lakehouse_version"].value == 1
        assert "trinitylake/staged_by_backfill" not in published.metadata
        assert rows(lake, "orders") == [(DAYS[0], 1.0), (DAYS[0], 2.0)]
        assert run(DAYS[0], report.key)
