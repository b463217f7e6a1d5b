"""Test the verify and repair jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dagster_plugin.maintenance_jobs import Jobs
from tests.foreign import ForeignLake
from tests.local_clock import LocalClock
from tests.operations.changes import alter, create
from trinitylake_ops.format.file_names import HINT_PATH, VERIFIED_PREFIX


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(tmp_path, LocalClock(monkeypatch))


def test_verify_job_uses_verification_record_and_limits(jobs: Jobs) -> None:
    first = jobs.must_run("verify", incremental=True, deep=True).metadata
    assert first["known_files"] == 0
    assert len(list(jobs.lake.storage.list(VERIFIED_PREFIX))) == 1
    assert jobs.must_run("verify", incremental=True).metadata["known_files"] > 0
    stopped = jobs.must_run("verify", max_requests=1).metadata
    assert stopped["stopped"] == "the budget of 1 requests is spent"
    assert "orphans" in stopped["not_checked"]
    assert jobs.must_run("verify", max_seconds=1000.0).metadata["stopped"] == "none"
    assert jobs.must_run("verify").metadata["not_checked"] == ""


def test_deep_verify_reports_files_without_checksum(jobs: Jobs) -> None:
    ForeignLake(jobs.lake.storage).commit_table("ns", "other")
    metadata = jobs.must_run("verify", deep=True).metadata
    assert (
        metadata["checksums"]
        == f"{metadata['checked_files']} files compared with their checksums, 1 definition, 1 node without a checksum"
    )
    assert jobs.must_run("verify").metadata["checksums"] == ""


def test_repair_job_applies_plan(jobs: Jobs) -> None:
    assert jobs.plan("repair")["is_empty"] is True
    create(jobs.lake, "more", "t")
    alter(jobs.lake, "more", "t")
    snapshot = jobs.lake.snapshot()
    damaged_path = snapshot.entry(snapshot.keys.table_key("more", "t"))
    assert damaged_path is not None
    jobs.lake.storage.delete(damaged_path)
    jobs.lake.close()
    jobs.lake.storage.write(HINT_PATH, b"0")
    failed = jobs.run("verify")
    assert not failed.success
    assert "1 error, the first: the definition of table more.t cannot be read" in failed.error  # not the stale hint
    plan = jobs.plan("repair")
    assert "| hint |" in plan["steps"]
    assert f"| definition-unreadable | {damaged_path} |" in plan["left"]
    assert jobs.apply(plan, "repair").success
    outcome = jobs.run("repair")
    assert not outcome.success, "errors that repair cannot fix must fail the run"
    assert "1 error remains that repair cannot fix; the remaining findings say what you can do" in outcome.error
    plan = jobs.plan("repair", to_last_good=True)
    assert "| rollback | more.t |" in plan["steps"]
    outcome = jobs.apply(plan, "repair")
    assert outcome.success, outcome.error
    latest = jobs.lake.latest_version()
    assert [(event["lakehouse_version"], event["operation"]) for event in outcome.materializations] == [
        (latest, "repair")
    ]
    outcome = jobs.run("repair", to_last_good=True)
    assert not outcome.success, "version 5 must stay damaged"
    assert outcome.metadata["is_empty"] is True
    assert jobs.lake.snapshot().table("more", "t").properties == {}
    rejected = jobs.apply_digest("repair", plan["digest"], to_last_good=True)
    assert not rejected.success
    assert "review the new plan" in rejected.error
