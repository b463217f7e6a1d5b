"""Test the maintenance schedules: their ticks, blackouts and limits, and that two deletions never run concurrently."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.dagster_plugin.maintenance_jobs import JobOutcome, old_lake
from tests.lakes import check_lake
from tests.local_clock import LocalClock
from tests.operations.changes import content, overwrite_rows
from trinitylake_ops import operations
from trinitylake_ops.dagster_plugin.checks import build_checks_job, build_lakehouse_checks
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.schedules import CRONS, BlackoutWindow, build_maintenance_schedules
from trinitylake_ops.declarations.options import ApplyLimits
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.gc import purge
from trinitylake_ops.operations.lease import lease

LARGE_LIMITS = ApplyLimits(max_files=10_000, max_bytes=10**9, min_age=timedelta(0))
SUNDAY = datetime(2026, 11, 22, tzinfo=UTC)
NIGHT = BlackoutWindow(start=time(22), end=time(6), reason="the nightly load")


# Two runs overlap in threads of this process. Dagster's capture of their output would wait for a minute.
NO_OUTPUT_CAPTURE = {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    overrides = {"concurrency": {"pools": {"default_limit": 1}}, "compute_logs": NO_OUTPUT_CAPTURE}
    with dg.instance_for_test(overrides=overrides) as instance:
        yield instance


class ScheduledLake:
    """A local lakehouse with scheduled maintenance, one hour after its last commit."""

    def __init__(self, folder: Path, clock: LocalClock, instance: dg.DagsterInstance):
        self.clock = clock
        self.instance = instance
        self.lake = old_lake(folder, clock)
        self.configure()

    def configure(self, limits: ApplyLimits = LARGE_LIMITS, **options: Any) -> None:
        resource = TrinityLakeResource(root=self.lake.root, storage_options=StorageSettings(fsync="false"))
        checks = build_lakehouse_checks()
        self.definitions = dg.Definitions(
            asset_checks=checks,
            jobs=[*build_jobs(operations="all", limits=limits), build_checks_job(checks)],
            schedules=build_maintenance_schedules(**options),
            resources={"lakehouse": resource},
            executor=dg.in_process_executor,
        )

    def tick(self, name: str, at: datetime = SUNDAY) -> dg.ScheduleExecutionData:
        schedule = self.definitions.resolve_schedule_def(f"{name}_schedule")
        context = dg.build_schedule_context(instance=self.instance, scheduled_execution_time=at)
        return schedule.evaluate_tick(context)

    def run(self, name: str, instance: dg.DagsterInstance | None = None) -> JobOutcome:
        """Execute the run that a tick requests."""
        (request,) = self.tick(name).run_requests or []
        job = self.definitions.resolve_schedule_def(f"{name}_schedule").job_name
        return JobOutcome(
            self.definitions.resolve_job_def(job).execute_in_process(
                instance=instance or self.instance,
                run_config=request.run_config,
                tags=dict(request.tags),
                raise_on_error=False,
            )
        )

    def must_run(self, name: str) -> JobOutcome:
        outcome = self.run(name)
        assert outcome.success, outcome.error
        return outcome

    def expire_all(self) -> None:
        operations.plan_expiration(self.lake).execute()
        self.clock.forward()


@pytest.fixture
def scheduled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance) -> ScheduledLake:
    return ScheduledLake(tmp_path, LocalClock(monkeypatch), instance)


def test_each_schedule_launches_its_operation(scheduled: ScheduledLake) -> None:
    lake = scheduled.lake
    overwrite_rows(lake, "ns.a")
    scheduled.clock.forward()
    lake.close()
    lake.storage.write("_latest_hint.txt", b"garbage")
    assert scheduled.must_run("repair_hint").metadata["state"] == "garbage"
    outcome = scheduled.must_run("trim")
    assert (outcome.metadata["snapshots_dropped"], outcome.materializations[0]["operation"]) == (4, "trim")
    scheduled.clock.forward()
    latest = lake.latest_version()
    outcome = scheduled.must_run("expire")
    assert outcome.metadata["versions"] == f"0-{latest - 1}"
    assert outcome.materializations[0]["approved_by"] == "the limits of schedules"
    assert next(iter(lake.history(1))).approved_by == "the limits of schedules"
    scheduled.clock.forward()
    planned = operations.plan_purge(lake)
    outcome = scheduled.must_run("purge")
    assert (outcome.metadata["files"], outcome.metadata["bytes"]) == (planned.files, planned.bytes)
    assert outcome.metadata["digest"].startswith(f"{planned.base_version}-")
    table_id = lake.snapshot().table("ns", "a").id
    orphan = f"tables/{table_id}/data/orphan.parquet"
    lake.storage.create(orphan, b"x" * 99)
    scheduled.clock.forward()
    scheduled.must_run("orphans")
    assert not lake.storage.exists(orphan)
    scheduled.must_run("verify")
    scheduled.must_run("export")
    (export,) = operations.list_exports(lake)
    assert (export.name, export.level, export.state) == ("weekly-2026-11-22", "full", "complete")
    assert export.created_at is not None
    assert export.retain_until == export.created_at + timedelta(days=35)
    check_lake(lake)


def test_scheduled_run_with_nothing_to_do_succeeds_without_commit(scheduled: ScheduledLake) -> None:
    scheduled.configure(ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(days=1)))
    before = content(scheduled.lake)
    for name in ("trim", "expire", "purge", "orphans", "drop_overdue_clones"):
        assert scheduled.must_run(name).materializations == []
    assert content(scheduled.lake) == before


def test_scheduled_run_above_limits_fails_and_deletes_nothing(scheduled: ScheduledLake) -> None:
    lake = scheduled.lake
    files = sum(operations.plan_expiration(lake).files.values())
    for limits in (
        ApplyLimits(max_files=files - 1, max_bytes=10**9, min_age=timedelta(0)),
        ApplyLimits(max_files=files, max_bytes=9, min_age=timedelta(0)),
    ):
        scheduled.configure(limits)
        before = content(lake)
        outcome = scheduled.run("expire")
        assert not outcome.success
        assert outcome.error.startswith(f"this expire releases {files} files with ")
        assert "nothing was done; run expire to make a plan, then approve it" in outcome.error
        assert (outcome.metadata["files"], outcome.metadata["versions"], outcome.materializations) == (files, "0-2", [])
        assert content(lake) == before
    scheduled.expire_all()
    lake.storage.create("nodes-orphan", b"x")
    before = content(lake)
    outcome = scheduled.run("purge")
    assert "this purge deletes" in outcome.error
    assert "| 0-2 | expired | now |" in outcome.metadata["plan"]
    assert content(lake) == before
    scheduled.configure(ApplyLimits(max_files=files, max_bytes=10**9, min_age=timedelta(0)))
    assert scheduled.must_run("purge").metadata["files"] == files


def test_scheduled_plan_excludes_files_younger_than_minimum_age(scheduled: ScheduledLake) -> None:
    limits = ApplyLimits(max_files=10_000, max_bytes=10**9, min_age=timedelta(hours=3))
    scheduled.configure(limits)
    scheduled.lake.alter_definition(maximum_version_age_millis_overrides={1: 1})
    scheduled.clock.forward()
    assert scheduled.must_run("expire").metadata["versions"] == ""
    scheduled.clock.forward(2)
    assert scheduled.must_run("expire").metadata["versions"] == "0-2"
    scheduled.clock.forward(2)
    assert scheduled.must_run("purge").metadata["files"] == 0
    scheduled.clock.forward(2)
    assert scheduled.must_run("purge").metadata["files"] > 0


@pytest.mark.parametrize(
    ("hour", "name", "is_skipped"),
    [(21, "purge", False), (22, "purge", True), (5, "purge", True), (6, "purge", False), (23, "repair_hint", True)],
)
def test_tick_within_blackout_is_skipped_with_reason(
    scheduled: ScheduledLake, hour: int, name: str, is_skipped: bool
) -> None:
    scheduled.configure(blackouts=[NIGHT], timezone="Europe/Berlin")
    tick = scheduled.tick(name, datetime(2026, 11, 22, hour - 1, 30, tzinfo=UTC))
    assert bool(tick.run_requests) is not is_skipped
    message = f"Sunday {hour:02}:30 is within the blackout 22:00 to 06:00: the nightly load"
    assert tick.skip_message == (message if is_skipped else None)


def test_blackouts_apply_to_selected_and_whole_days() -> None:
    weekend = BlackoutWindow(start=time(0), end=time(0), reason="no operator is available", days=("saturday", "sunday"))
    assert [weekend.covers(SUNDAY + timedelta(days=day, hours=23)) for day in range(-2, 2)] == [
        False,
        True,
        True,
        False,
    ]
    late_sunday = BlackoutWindow(start=time(23), end=time(2), reason="load", days=("sunday",))
    assert late_sunday.covers(SUNDAY + timedelta(days=1, hours=1))
    assert not late_sunday.covers(SUNDAY + timedelta(hours=1))
    with pytest.raises(InvalidInputError, match="'funday'"):
        BlackoutWindow(start=time(1), end=time(2), reason="x", days=("funday",))
    with pytest.raises(InvalidInputError):
        BlackoutWindow(start=time(1, tzinfo=UTC), end=time(2), reason="x")


@pytest.mark.parametrize("days", [-1, 2_000_000])
def test_export_schedule_rejects_invalid_retention(days: int) -> None:
    with pytest.raises(InvalidInputError, match="export_retain"):
        build_maintenance_schedules(export_retain=timedelta(days=days))


def test_schedule_times_can_be_configured() -> None:
    (schedule,) = build_maintenance_schedules(LakehouseNames("eu"), crons={"purge": "0 4 1 * *"}, timezone="Asia/Tokyo")
    assert (schedule.name, schedule.job_name) == ("eu_purge_schedule", "eu_purge")
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("0 4 1 * *", "Asia/Tokyo")
    assert [schedule.job_name for schedule in build_maintenance_schedules()] == list(CRONS)
    with pytest.raises(InvalidInputError, match="repair_hint"):
        build_maintenance_schedules(crons={"vacuum": "0 4 1 * *"})
    with pytest.raises(InvalidInputError, match="'Mars/Olympus'"):
        build_maintenance_schedules(timezone="Mars/Olympus")


@pytest.mark.parametrize(
    "invalid_limits",
    [{"max_files": -1}, {"max_bytes": True}, {"min_age": timedelta(seconds=-1)}],
    ids=["files", "bytes", "age"],
)
def test_invalid_limits_are_rejected(invalid_limits: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(invalid_limits))):
        ApplyLimits(**{"max_files": 1, "max_bytes": 1, "min_age": timedelta(0), **invalid_limits})


class ConcurrentPurges:
    """Runs purges in threads. A purge pauses before it deletes files until the test lets it continue."""

    def __init__(self, scheduled: ScheduledLake, patch: pytest.MonkeyPatch):
        self.scheduled = scheduled
        self.has_paused, self.may_continue = threading.Event(), threading.Event()
        self.n_running, self.max_running = 0, 0
        self.outcomes: dict[str, JobOutcome] = {}
        delete_unreached = purge.delete_unreached

        def pause_before_deletion(*args: Any) -> Any:
            self.n_running += 1
            self.max_running = max(self.max_running, self.n_running)
            self.has_paused.set()
            assert self.may_continue.wait(60)
            self.n_running -= 1
            return delete_unreached(*args)

        patch.setattr(purge, "delete_unreached", pause_before_deletion)

    def start(self, name: str, instance: dg.DagsterInstance) -> threading.Thread:
        def run() -> None:
            self.outcomes[name] = self.scheduled.run("purge", instance)

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def test_second_purge_waits_in_pool(scheduled: ScheduledLake, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled.expire_all()
    purges = ConcurrentPurges(scheduled, monkeypatch)
    first = purges.start("first", scheduled.instance)
    assert purges.has_paused.wait(60)
    second = purges.start("second", scheduled.instance)
    second.join(3)
    assert second.is_alive(), "the second purge waits for the pool"
    purges.may_continue.set()
    first.join(60)
    second.join(60)
    assert [purges.outcomes[name].error for name in ("first", "second")] == ["", ""]
    assert purges.outcomes["first"].metadata["files"] > 0
    assert (purges.outcomes["second"].metadata["files"], purges.max_running) == (0, 1)
    check_lake(scheduled.lake)


def test_concurrent_purge_fails_and_warns_when_pool_has_no_limit(scheduled: ScheduledLake) -> None:
    scheduled.expire_all()
    with dg.instance_for_test() as instance_without_limits:
        with lease(scheduled.lake.storage, "purge"):
            outcome = scheduled.run("purge", instance_without_limits)
        assert outcome.error.startswith("purge is running; wait until it ends")
        (run,) = instance_without_limits.get_runs()
        messages = [entry.user_message for entry in instance_without_limits.all_logs(run.run_id)]
    assert any(f"dagster instance concurrency set {ONLY.pool} 1" in message for message in messages)
