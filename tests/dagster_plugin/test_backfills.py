"""Test backfills by Dagster's own daemon: runs of the publish asset publish tables that several runs staged."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow as pa
import pytest
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.execution.asset_backfill import AssetBackfillData
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.workspace.load_target import ModuleTarget
from dagster._daemon.backfill import execute_backfill_iteration
from dagster._time import get_current_timestamp

from tests.dagster_plugin.backfill_project import DAYS as PROJECT_DAYS
from tests.dagster_plugin.backfill_project import IO, LAKE, defs, orders, share, summary, two_days
from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import TrinityLakeIOManager, TrinityLakeResource, build_publish_asset
from trinitylake_ops.dagster_plugin.runs import backfills
from trinitylake_ops.format.definitions import IsolationLevel
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once

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
    """Backfill assets over three days like the daemon, until the backfill is finished."""
    with create_test_daemon_workspace_context(
        ModuleTarget(
            module_name="tests.dagster_plugin.backfill_project",
            attribute=None,
            working_directory=None,
            location_name="backfills",
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
    rows = catalog_at(lake).load_table(("shop", table)).scan().to_arrow().to_pylist()
    return sorted(tuple(row.values()) for row in rows)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::dagster.BetaWarning")
def test_backfill_with_split_runs_publishes_all_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    monkeypatch.setenv("BACKFILL_LAKE", lake.root)
    with dg.instance_for_test(temp_dir=str(tmp_path), overrides=LAUNCHER) as instance:
        keys = ["shop/orders", "shop/daily_totals", "shop/two_days", "shop/summary", "publish/days"]
        status, runs = backfill(instance, keys)
        assert status == BulkActionStatus.COMPLETED_SUCCESS
        assert rows(lake, "orders") == [(day, amount) for day in DAYS for amount in (1.0, 2.0)]
        assert rows(lake, "daily_totals") == [(day, 3.0) for day in DAYS]
        assert rows(lake, "two_days") == list(zip(DAYS, (2, 4, 4), strict=True))
        runs_without_publish = [run for run in runs if PUBLISH not in (run.asset_selection or ())]
        assert runs_without_publish, "Dagster must split the backfill"
        assert rows(lake, "summary") == [(6,)]


def test_staged_rows_of_backfill_are_not_visible(lakes: Lakes) -> None:
    """Backfill the table for two days, but its publish asset only for the first day."""

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
            entry = instance.get_latest_materialization_event(key)
            return None if entry is None else entry.asset_materialization

        assert not run(DAYS[1], orders.key), "no run of the backfill publishes this day"
        assert event(orders.key) is None
        assert run(DAYS[0], orders.key)
        staged = event(orders.key)
        assert staged is not None and staged.metadata["trinitylake/staged_by_backfill"].value == "two_days"
        assert "lakehouse_version" not in staged.metadata
        assert lake.latest_version() == 0
        assert not run(DAYS[0], report.key), "the report would read unpublished rows"
        assert event(report.key) is None
        assert run(DAYS[0], PUBLISH)
        published = event(orders.key)
        assert published is not None and published.metadata["lakehouse_version"].value == 1
        assert "trinitylake/staged_by_backfill" not in published.metadata
        assert rows(lake, "orders") == [(DAYS[0], 1.0), (DAYS[0], 2.0)]
        assert run(DAYS[0], report.key)


def all_assets_job() -> dg.JobDefinition:
    return defs.resolve_job_def("all_days")


class SplitBackfill:
    """A backfill of three days whose runs the test starts itself, in any order."""

    def __init__(self, instance: dg.DagsterInstance, lake: Lakehouse):
        self.instance, self.lake = instance, lake
        days = PROJECT_DAYS.subset_with_partition_keys(DAYS)
        target = AssetGraphSubset(
            partitions_subsets_by_asset_key=dict.fromkeys((orders.key, two_days.key, share.key, PUBLISH), days),
            non_partitioned_asset_keys={summary.key},
        )
        now = get_current_timestamp()
        self.record = PartitionBackfill(
            backfill_id="split",
            status=BulkActionStatus.REQUESTED,
            from_failure=False,
            tags={},
            backfill_timestamp=now,
            asset_selection=[orders.key, two_days.key, summary.key, share.key, PUBLISH],
            asset_backfill_data=AssetBackfillData.empty(target, now, instance),
        )
        instance.add_backfill(self.record)

    def finish(self) -> None:
        self.instance.update_backfill(self.record.with_status(BulkActionStatus.COMPLETED_FAILED))

    def run(self, day: str | None, *keys: dg.AssetKey) -> dg.DagsterRun:
        return self._execute(self._tags(day), asset_selection=[*keys])

    def re_execute(self, run: dg.DagsterRun, *, is_resumed: bool) -> dg.DagsterRun:
        """Re-execute a run after the end of the backfill. Dagster does not copy the backfill's tag."""
        tags = {name: value for name, value in run.tags.items() if name == "dagster/partition"}
        tags |= {"dagster/parent_run_id": run.run_id, "dagster/root_run_id": run.run_id}
        options = dg.ReexecutionOptions(parent_run_id=run.run_id)
        if is_resumed:
            options = dg.ReexecutionOptions.from_failure(run.run_id, self.instance)
            tags["dagster/is_resume_retry"] = "true"
        return self._execute(tags, reexecution_options=options)

    def create(self, day: str, *keys: dg.AssetKey) -> dg.DagsterRun:
        """Create a run without starting it."""
        return self.instance.create_run_for_job(
            all_assets_job().get_subset(asset_selection=set(keys)),
            run_config=QUIET,
            tags=self._tags(day),
            asset_selection=frozenset(keys),
        )

    def error(self, run: dg.DagsterRun) -> str:
        records = self.instance.get_records_for_run(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE).records
        events = [record.event_log_entry.dagster_event for record in records]
        (failed,) = [event.step_failure_data.user_failure_data for event in events if event is not None]
        assert failed is not None
        return str(failed.description)

    def n_retries(self, run: dg.DagsterRun) -> int:
        retries = dg.DagsterEventType.STEP_UP_FOR_RETRY
        return len(self.instance.get_records_for_run(run.run_id, of_type=retries).records)

    def _tags(self, day: str | None) -> dict[str, str]:
        return {"dagster/backfill": "split"} | ({} if day is None else {"dagster/partition": day})

    def _execute(self, tags: dict[str, str], **options: Any) -> dg.DagsterRun:
        job = dg.build_reconstructable_job("tests.dagster_plugin.test_backfills", "all_assets_job", ())
        with dg.execute_job(job, self.instance, run_config=QUIET, tags=tags, **options) as result:
            run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        return run


@pytest.fixture
def split(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[SplitBackfill]:
    lake = lakes.local()
    monkeypatch.setenv("BACKFILL_LAKE", lake.root)
    with dg.instance_for_test() as instance:
        yield SplitBackfill(instance, lake)


def test_publication_waits_for_its_source_partition(split: SplitBackfill, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(split.run(day, orders.key).is_success for day in DAYS[:2])
    first_day_runs: list[dg.DagsterRun] = []

    def publish_the_first_day(_context: dg.AssetExecutionContext) -> bool:
        first_day_runs.append(split.run(DAYS[0], two_days.key, PUBLISH))
        return False

    monkeypatch.setattr(backfills, "is_stuck", publish_the_first_day)
    second_run = split.run(DAYS[1], two_days.key, PUBLISH)
    assert [run.is_success for run in first_day_runs] == [True]
    assert second_run.is_success
    assert split.n_retries(second_run) == 1
    assert rows(split.lake, "two_days") == [(DAYS[0], 2), (DAYS[1], 4)]


def test_publication_fails_when_it_occupies_the_only_slot(
    split: SplitBackfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publication waits for a run that has not started. Both are re-executed after the end of the backfill."""
    monkeypatch.setattr(backfills, "IDLE_SECONDS", 0)
    assert all(split.run(day, orders.key).is_success for day in DAYS[:2])
    unstarted_run = split.create(DAYS[0], two_days.key, PUBLISH)
    second_run = split.run(DAYS[1], two_days.key, PUBLISH)
    assert not second_run.is_success
    assert unstarted_run.run_id in split.error(second_run)
    split.instance.report_run_canceled(unstarted_run)
    split.finish()
    second_run = split.re_execute(second_run, is_resumed=True)
    assert not second_run.is_success, "its source was canceled"
    assert unstarted_run.run_id in split.error(second_run)
    assert split.lake.latest_version() == 0
    assert split.re_execute(unstarted_run, is_resumed=False).is_success
    assert rows(split.lake, "two_days") == [(DAYS[0], 2)]
    assert split.re_execute(second_run, is_resumed=True).is_success
    assert rows(split.lake, "two_days") == [(DAYS[0], 2), (DAYS[1], 4)]
    assert rows(split.lake, "orders") == [(day, amount) for day in DAYS[:2] for amount in (1.0, 2.0)]


def test_table_derived_from_replaced_rows_is_not_published(split: SplitBackfill) -> None:
    assert all(split.run(day, orders.key).is_success for day in DAYS[:2])
    assert split.run(DAYS[1], two_days.key).is_success
    assert split.run(DAYS[0], orders.key).is_success, "the rows of the first day are replaced"
    assert split.run(DAYS[0], two_days.key, PUBLISH).is_success
    second_run = split.run(DAYS[1], PUBLISH)
    assert not second_run.is_success
    assert rows(split.lake, "two_days") == [(DAYS[0], 2)]


@pytest.mark.parametrize(("changed_day", "is_published"), [(DAYS[0], False), (DAYS[2], True)])
def test_serializable_publication_requires_unchanged_source_partitions(
    split: SplitBackfill, changed_day: str, is_published: bool
) -> None:
    """Another writer replaces a partition after the source was published and before this publication."""
    split.lake.alter_definition(isolation_level=IsolationLevel.SERIALIZABLE)
    assert all(split.run(day, orders.key).is_success for day in DAYS[:2])
    assert split.run(DAYS[1], two_days.key).is_success
    assert split.run(DAYS[0], two_days.key, PUBLISH).is_success
    replaced_rows = pa.table({"day": [changed_day], "amount": [5.0]})
    staged = stage_arrow(
        split.lake, replaced_rows, "shop", "orders", mode="replace_partitions", partition_by=["day"],
        partitions=[{"day": changed_day}],
    )  # fmt: skip
    publish_once(split.lake, [staged], publication_id("another writer"))
    assert split.run(DAYS[1], PUBLISH).is_success == is_published
    assert rows(split.lake, "two_days") == [(DAYS[0], 2), (DAYS[1], 4)][: 1 + is_published]


def test_partition_derived_from_unpartitioned_summary_fails_without_waiting(split: SplitBackfill) -> None:
    assert all(split.run(day, orders.key).is_success for day in DAYS)
    assert split.run(None, summary.key).is_success
    runs = [split.run(day, share.key, PUBLISH) for day in DAYS]
    assert [(run.is_success, split.n_retries(run)) for run in runs] == [(False, 0)] * 3
    assert split.lake.latest_version() == 0


def test_table_derived_from_rejected_partition_is_not_published(
    split: SplitBackfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blocking check fails for the second day, and the table of the third day reads that day."""
    monkeypatch.setenv("BACKFILL_BAD_DAY", DAYS[1])
    assert all(split.run(day, orders.key).is_success for day in DAYS)
    runs = [split.run(day, two_days.key, PUBLISH) for day in DAYS]
    assert [run.is_success for run in runs] == [True, False, False]
    assert runs[1].run_id in split.error(runs[2])
    assert rows(split.lake, "orders") == [(DAYS[0], 1.0), (DAYS[0], 2.0)]
    assert rows(split.lake, "two_days") == [(DAYS[0], 2)]


def test_staged_rows_with_failed_check_are_neither_read_nor_published(
    split: SplitBackfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKFILL_BAD_ORDERS", DAYS[0])
    assert [split.run(day, orders.key).is_success for day in DAYS[:2]] == [False, True]
    assert not split.run(DAYS[1], two_days.key, PUBLISH).is_success
    assert not split.run(DAYS[0], PUBLISH).is_success
    assert split.lake.latest_version() == 0
