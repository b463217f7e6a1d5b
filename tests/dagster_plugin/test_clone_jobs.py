"""Test the clone jobs, the check of overdue clones, and the schedule that drops them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.dagster_plugin.maintenance_jobs import APPROVER, JobOutcome, approved
from tests.lakes import Lakes
from tests.local_clock import HOUR_MS, LocalClock
from tests.operations.changes import append_rows, create, overwrite_rows
from tests.operations.copies import rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin import (
    ApplyLimits,
    StorageSettings,
    TrinityLakeResource,
    build_jobs,
    build_lakehouse_checks,
    build_maintenance_schedules,
)

SCHEDULED_AT = datetime(2026, 11, 22, 2, 30, tzinfo=UTC)

pytestmark = pytest.mark.local_only("the jobs open the lakehouse by its local path")


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as instance:
        yield instance


class CloneJobs:
    """A lakehouse with one table, and its clone jobs."""

    def __init__(self, lake: Lakehouse, folder: Path, instance: dg.DagsterInstance):
        self.lake = lake
        self.target = f"{folder}/clones/feature"
        self.instance = instance
        append_rows(lake)
        self.set_limits(ApplyLimits(max_files=1000, max_bytes=10**9, min_age=timedelta(days=30)))

    def set_limits(self, limits: ApplyLimits) -> None:
        resource = TrinityLakeResource(
            root=self.lake.root,
            storage_options=StorageSettings(fsync="false"),
            allowed_roots=[self.target.removesuffix("/feature")],
        )
        self.checks = build_lakehouse_checks(checks="clones_in_time")
        self.definitions = dg.Definitions(
            jobs=build_jobs(operations="clones", limits=limits),
            schedules=build_maintenance_schedules(crons={"drop_overdue_clones": "30 2 * * *"}),
            resources={"lakehouse": resource},
            executor=dg.in_process_executor,
        )
        self.resource = resource

    @property
    def clone(self) -> Lakehouse:
        return Lakehouse.open(self.target, {"fsync": "false"})

    def run(self, job: str, **config: Any) -> JobOutcome:
        definition = self.definitions.resolve_job_def(job)
        return JobOutcome(
            definition.execute_in_process(run_config=config, instance=self.instance, raise_on_error=False)
        )

    def must_run(self, job: str, **config: Any) -> JobOutcome:
        outcome = self.run(job, **config)
        assert outcome.success, outcome.error
        return outcome

    def must_apply(self, operation: str, **options: Any) -> JobOutcome:
        return self.must_run(operation, **approved(self.must_run(operation, **options).metadata))

    def check(self) -> tuple[bool, str]:
        (check,) = [check for check in self.checks if next(iter(check.check_specs)).name == "clones_in_time"]
        result = (
            dg.Definitions(
                asset_checks=[check],
                jobs=[dg.define_asset_job("checks", selection=dg.AssetSelection.checks(check))],
                resources={"lakehouse": self.resource},
                executor=dg.in_process_executor,
            )
            .resolve_job_def("checks")
            .execute_in_process(instance=self.instance)
        )
        (evaluation,) = result.get_asset_check_evaluations()
        return evaluation.passed, evaluation.description or ""


@pytest.fixture
def jobs(lakes: Lakes, tmp_path: Path, instance: dg.DagsterInstance) -> CloneJobs:
    return CloneJobs(lakes.local(), tmp_path, instance)


def test_clone_jobs_cover_whole_life_cycle(jobs: CloneJobs) -> None:
    outcome = jobs.must_run("clone", name="feature", target=jobs.target, retain_for="1d")
    assert outcome.materializations[0]["operation"] == "clone"
    append_rows(jobs.clone)
    append_rows(jobs.lake)
    create(jobs.lake, "later")
    comparison = jobs.must_run("compare_clone", name="feature")
    assert (comparison.metadata["changed_in_both"], comparison.metadata["changed_in_parent"]) == (1, 1)
    assert "ns.t" in comparison.metadata["objects"]
    outcome = jobs.must_apply("promote", name="feature")
    assert outcome.materializations[0]["operation"] == "promote"
    assert rows(jobs.lake) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    info = next(jobs.lake.history(1))
    assert (info.operation, info.approved_by, info.run_id) == ("promote", APPROVER, outcome.run_id)
    jobs.must_apply("refresh_clone", name="feature")
    assert rows(jobs.clone) == rows(jobs.lake)
    assert jobs.must_run("promote", name="feature").metadata["is_empty"]
    outcome = jobs.must_apply("drop_clone", name="feature", delete_files=True)
    assert outcome.metadata["files"] > 5
    assert not [path for path in Path(jobs.target).rglob("*") if path.is_file()]
    assert operations.list_clones(jobs.lake) == []


def test_promotion_reports_conflicts_and_applies_choices(jobs: CloneJobs) -> None:
    jobs.must_run("clone", name="feature", target=jobs.target)
    overwrite_rows(jobs.clone, "ns.t")
    append_rows(jobs.lake)
    plan = jobs.must_run("promote", name="feature")
    assert plan.metadata["conflicts"] == 1
    assert "ns.t" in plan.metadata["to_choose"]
    before = jobs.lake.latest_version()
    rejected = jobs.run(
        "promote", name="feature", approval={"digest": plan.metadata["digest"], "approved_by": APPROVER}
    )
    assert "1 conflict, nothing was changed: ns.t: the parent altered it, clone feature altered it" in rejected.error
    assert jobs.lake.latest_version() == before
    jobs.must_apply("promote", name="feature", theirs=["ns.t"])
    assert rows(jobs.lake) == rows(jobs.clone)
    assert "clone 'missing' does not exist" in jobs.run("compare_clone", name="missing").error
    assert "clone 'feature' is not a branch" in jobs.run("drop_closed_branch", name="feature").error


def test_overdue_clone_fails_check_and_is_dropped_within_limits(
    jobs: CloneJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LocalClock(monkeypatch)
    assert jobs.check()[0]
    jobs.must_run("clone", name="feature", target=jobs.target, retain_for="1d")
    operations.plan_clone(jobs.lake, f"{jobs.target}-kept", retain_for=100 * HOUR_MS).execute()
    append_rows(jobs.clone)
    assert jobs.check() == (True, "none of 2 clones is overdue")
    clock.forward(25)
    passed, message = jobs.check()
    assert not passed
    assert "clone 'feature' is overdue since" in message
    (request,) = (
        jobs.definitions.resolve_schedule_def("drop_overdue_clones_schedule")
        .evaluate_tick(dg.build_schedule_context(instance=jobs.instance, scheduled_execution_time=SCHEDULED_AT))
        .run_requests
        or []
    )
    assert request.run_config == {}
    jobs.set_limits(ApplyLimits(max_files=3, max_bytes=10**9, min_age=timedelta(0)))
    rejected = jobs.run("drop_overdue_clones")
    assert "exceeds the limits of an unattended run" in rejected.error
    assert rows(jobs.clone) == [1, 1, 2, 2, 3, 3]
    jobs.set_limits(ApplyLimits(max_files=1000, max_bytes=10**9, min_age=timedelta(days=30)))
    outcome = jobs.must_run("drop_overdue_clones")
    assert outcome.metadata["dropped"] == "feature"
    assert outcome.materializations[0]["approved_by"] == "the limits of schedules"
    assert [clone_info.name for clone_info in operations.list_clones(jobs.lake)] == ["feature-kept"]
    assert not [path for path in Path(jobs.target).rglob("*") if path.is_file()]
    assert jobs.must_run("drop_overdue_clones").materializations == []


def test_undroppable_clone_fails_run_but_other_clones_are_dropped(
    jobs: CloneJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LocalClock(monkeypatch)
    jobs.must_run("clone", name="feature", target=jobs.target, retain_for="1d")
    operations.plan_clone(jobs.lake, f"{jobs.target}-exported", retain_for=HOUR_MS).execute()
    exported_clone = Lakehouse.open(f"{jobs.target}-exported", {"fsync": "false"})
    operations.plan_export(exported_clone, "more", target=f"{tmp_path}/more").execute()
    clock.forward(25)
    outcome = jobs.run("drop_overdue_clones")
    assert outcome.error.startswith("1 clones were not dropped, for example feature-exported: ")
    assert [event["operation"] for event in outcome.materializations] == ["drop-clone"]
    assert outcome.metadata["dropped"] == "feature"
    assert [record.name for record in jobs.lake.snapshot().definition.exports] == ["feature-exported"]
