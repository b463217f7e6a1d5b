"""Test the job that runs all due operations by the policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dagster_plugin.maintenance_jobs import APPROVER, Jobs
from tests.local_clock import LocalClock
from tests.operations.changes import append_rows
from tests.operations.neglected import with_policy
from trinitylake_ops import operations
from trinitylake_ops.declarations.maintenance import POLICY_APPROVES

FILES = {"export": None, "small_files": 3}


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """The jobs of a lakehouse with a table of small files, and two exports of which one is not kept."""
    jobs_of_lake = Jobs(tmp_path, LocalClock(monkeypatch))
    for _ in range(3):
        append_rows(jobs_of_lake.lake, "files.a")
    for name in ("nightly-1", "nightly-2"):
        operations.plan_export(jobs_of_lake.lake, name).execute()
    jobs_of_lake.clock.forward()
    return jobs_of_lake


def test_run_reports_decisions_and_its_commits(jobs: Jobs) -> None:
    with_policy(jobs.lake, targets=FILES)
    base = jobs.lake.latest_version()
    plan = jobs.must_run("maintain", dry_run=True)
    assert jobs.lake.latest_version() == base
    assert plan.materializations == []
    assert plan.metadata["headline"].startswith(f"Maintenance of version {base}: would run ")
    outcome = jobs.must_run("maintain")
    latest = jobs.lake.latest_version()
    assert latest > base
    assert (outcome.metadata["version"], outcome.metadata["rewritten_files"]) == (latest, 3)
    assert [event["lakehouse_version"] for event in outcome.materializations] == [latest]
    assert "| compact_tables | files.a | done | 3 |" in outcome.metadata["decisions"]
    commits = [info for info in jobs.lake.history() if info.version > base]
    assert {(info.run_id, info.approved_by) for info in commits} == {(outcome.run_id, POLICY_APPROVES)}
    again = jobs.must_run("maintain")
    assert again.metadata["headline"].endswith("nothing to do")
    assert again.materializations == []


def test_waiting_plan_is_applied_by_its_job(jobs: Jobs) -> None:
    with_policy(jobs.lake, targets=FILES, approval=["compact_tables", "prune_exports"])
    outcome = jobs.must_run("maintain")
    for job in ("prune_exports", "compact_tables"):
        approvals = [entry["approval"] for entry in outcome.metadata["details"] if entry["approval"]]
        assert approvals[0]["job"] == job
        approval = {"digest": approvals[0]["digest"], "approved_by": APPROVER}
        applied = jobs.must_run(job, **approvals[0]["options"], approval=approval)
        assert applied.metadata["approved_by"] == APPROVER
        outcome = jobs.must_run("maintain")
    assert outcome.metadata["headline"].endswith("nothing to do")
    assert [info.name for info in operations.list_exports(jobs.lake)] == ["nightly-2"]


def test_failed_decision_fails_the_run_after_the_others(jobs: Jobs) -> None:
    target = {"every": "1d", "target": "memory://elsewhere/"}
    with_policy(jobs.lake, targets={**FILES, "export": target})
    outcome = jobs.run("maintain")
    assert not outcome.success
    assert "1 decisions failed, the first: export" in outcome.error
    assert next(iter(jobs.lake.history())).operation == "compact-tables"
