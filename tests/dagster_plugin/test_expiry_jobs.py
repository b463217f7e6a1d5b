"""Test the jobs that reclaim space: create a plan, then apply it by its digest."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import dagster as dg
import pytest

from tests.dagster_plugin.maintenance_jobs import APPROVER, Jobs
from tests.lakes import check_lake
from tests.local_clock import LocalClock
from tests.operations.aging import with_least_requests
from tests.operations.changes import append_rows, content, overwrite_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StoragePermissionError, VersionExpiredError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.storage import LocalStorage


def chart_text(markdown: str) -> str:
    """Return the text of a chart in metadata."""
    encoded = re.fullmatch(r"!\[[\w ]+\]\(data:image/svg\+xml;base64,([\w+/=]+)\)", markdown, re.ASCII)
    assert encoded is not None
    return "".join(ET.fromstring(base64.b64decode(encoded[1])).itertext())


def test_verify_job_has_timeline_chart(jobs: Jobs) -> None:
    outcome = jobs.must_run("verify")
    assert "4 versions; the latest is 3; no findings" in chart_text(outcome.metadata["timeline"])
    jobs.lake.storage.write(root_path(1), b"garbage")
    outcome = jobs.run("verify")
    assert not outcome.success
    assert "1 error; 4 versions, of which 1 unreadable" in chart_text(outcome.metadata["timeline"])


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(tmp_path, LocalClock(monkeypatch))


def test_planning_run_logs_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster's command line displays only the log of a run."""
    with dg.instance_for_test() as instance:
        jobs = Jobs(tmp_path, LocalClock(monkeypatch), instance)

        def run_log(job: str, **config: Any) -> str:
            outcome = jobs.must_run(job, **config)
            return "\n".join(entry.user_message for entry in instance.all_logs(outcome.run_id))

        log_text = run_log("expire")
        assert "versions: 0-2\nversions_expired: 3\n" in log_text
        assert re.search(
            r"^version +verdict +why *\n0 +expires +superseded .* ago, the maximum age is 30 min",
            log_text,
            re.MULTILINE,
        )
        (config,) = re.findall(r"^configuration: (.*)$", log_text, flags=re.MULTILINE)
        assert set(json.loads(config)["approval"]) == {"digest", "approved_by"}
        assert log_text.rindex("to apply it, run expire") > log_text.index("configuration")
        assert re.search(r"^3 .*\n2 .* alter-table +", run_log("log"), re.MULTILINE)
        log_text = run_log("expire", max_age="30d")
        assert re.search(
            r"0 of 4 versions expire, with 0 files of 0 bytes: the oldest one, version 0, is kept: superseded .* ago,"
            r" within the maximum age of 30 d; there is nothing to do",
            log_text,
        )


def test_space_is_reclaimed_by_approved_plans(jobs: Jobs) -> None:
    overwrite_rows(jobs.lake, "ns.a")
    jobs.clock.forward()
    plan = jobs.plan("trim", tables=["ns.a"])
    assert (plan["tables"], plan["snapshots_dropped"], plan["is_empty"]) == (1, 4, False)
    assert "| ns.a | 4 | 1 |" in plan["plan"]
    outcome = jobs.apply(plan, "trim")
    latest = jobs.lake.latest_version()
    assert (outcome.metadata["snapshots_dropped"], outcome.metadata["version"]) == (4, latest)
    assert [(event["lakehouse_version"], event["operation"]) for event in outcome.materializations] == [
        (latest, "trim")
    ]
    assert jobs.plan("trim")["is_empty"] is True

    jobs.clock.forward()
    plan = jobs.plan("expire")
    assert (plan["versions"], plan["versions_expired"], plan["versions_kept"]) == (f"0-{latest - 1}", latest, 1)
    assert plan["bytes"] > 0
    assert re.search(r"\| 0 \| expires \| superseded 2 h .*ago, the maximum age is 30 min \|", plan["plan"])
    assert "it is the latest" in plan["plan"]
    assert f"{latest} would expire and reclaim" in chart_text(plan["timeline"])
    outcome = jobs.apply_digest("expire", plan["digest"])
    assert (outcome.metadata["files"], outcome.metadata["bytes"]) == (plan["files"], plan["bytes"])
    assert (outcome.materializations[0]["operation"], outcome.materializations[0]["approved_by"]) == (
        "expire",
        APPROVER,
    )
    assert outcome.metadata["approved_by"] == APPROVER
    expiry = next(iter(jobs.lake.history(1)))
    assert (expiry.run_id, expiry.approved_by) == (outcome.run_id, APPROVER)
    second_run = jobs.apply_digest("expire", plan["digest"])
    assert (second_run.metadata["version"], second_run.materializations) == ("none", [])

    assert jobs.plan("purge")["is_empty"] is True
    jobs.clock.forward()
    purge = jobs.plan("purge")
    assert (purge["files"], purge["bytes"]) == (plan["files"], plan["bytes"])
    assert f"| 0-{latest - 1} | expired | now |" in purge["plan"]
    outcome = jobs.apply(purge, "purge")
    assert (outcome.success, outcome.metadata["bytes"], outcome.metadata["failed_files"]) == (True, plan["bytes"], 0)
    assert outcome.materializations[0]["lakehouse_version"] == outcome.metadata["version"] == jobs.lake.latest_version()

    table_id = jobs.lake.snapshot().table("ns", "a").id
    orphan = f"tables/{table_id}/data/orphan.parquet"
    jobs.lake.storage.create(orphan, b"x" * 99)
    jobs.clock.forward()
    plan = jobs.plan("orphans")
    assert f"| {orphan} |" in plan["plan"]
    assert "| table file | 1 |" in plan["files_by_kind"]
    outcome = jobs.apply(plan, "orphans")
    assert (outcome.success, outcome.metadata["files"], outcome.metadata["bytes"]) == (
        True,
        plan["files"],
        plan["bytes"],
    )
    assert not jobs.lake.storage.exists(orphan)
    assert jobs.plan("orphans")["is_empty"] is True
    assert jobs.must_run("verify").success
    check_lake(jobs.lake)
    assert jobs.lake.snapshot().tables("ns") == ["a", "t"]


def test_relocate_job_rewrites_moved_lakehouse(jobs: Jobs, tmp_path: Path) -> None:
    overwrite_rows(jobs.lake, "ns.a")
    old_root = jobs.lake.root
    shutil.move(old_root.removeprefix("file://"), tmp_path / "after")
    moved = jobs.at(str(tmp_path / "after"))
    plan = moved.plan("relocate")
    assert (plan["tables"], plan["is_empty"], plan["refused"]) == (1, False, "")
    assert "| ns.a | relocated |" in plan["plan"]
    outcome = moved.apply(plan, "relocate")
    latest = moved.lake.latest_version()
    assert (outcome.metadata["tables"], outcome.metadata["version"], outcome.metadata["files"]) == (
        1,
        latest,
        plan["files"],
    )
    assert [(event["lakehouse_version"], event["operation"]) for event in outcome.materializations] == [
        (latest, "relocate")
    ]
    assert moved.plan("relocate")["is_empty"] is True
    assert old_root not in catalog_at(moved.lake).load_table("ns.a").metadata.model_dump_json()


def test_relocate_job_accepts_moved_table_root(jobs: Jobs, tmp_path: Path) -> None:
    old_folder, new_folder = tmp_path / "tables", tmp_path / "moved-tables"
    Lakehouse.create(
        str(tmp_path / "lake-with-table-root"), jobs.lake.storage_options, table_root=f"file://{old_folder}/"
    )
    separate_lake = jobs.at(str(tmp_path / "lake-with-table-root"))
    append_rows(separate_lake.lake, "ns.a")
    expected = catalog_at(separate_lake.lake).load_table("ns.a").scan().to_arrow()
    shutil.move(old_folder, new_folder)
    plan = separate_lake.plan("relocate", table_root=f"file://{new_folder}/")
    assert (plan["tables"], plan["table_root"], plan["is_empty"]) == (1, f"file://{new_folder}/", False)
    outcome = separate_lake.apply(plan, "relocate")
    assert outcome.success, outcome.error
    assert [event["operation"] for event in outcome.materializations] == ["relocate"]
    assert separate_lake.lake.snapshot().definition.table_root == f"file://{new_folder}/"
    assert catalog_at(separate_lake.lake).load_table("ns.a").scan().to_arrow() == expected
    assert separate_lake.plan("relocate", table_root=f"file://{new_folder}/")["is_empty"] is True
    with pytest.raises(dg.DagsterInvalidConfigError, match="table_root is not a valid root") as raised:
        separate_lake.run("relocate", table_root="s3://key:secret@bucket/tables")
    assert "secret" not in str(raised.value)


def test_stale_digest_is_rejected(jobs: Jobs) -> None:
    overwrite_rows(jobs.lake, "ns.a")
    jobs.clock.forward()
    trim, expire = (jobs.plan(name)["digest"] for name in ("trim", "expire"))
    overwrite_rows(jobs.lake, "ns.a")
    jobs.clock.forward()
    jobs.expire_all()
    purge = jobs.plan("purge")["digest"]
    operations.plan_purge(jobs.lake).execute()
    before = content(jobs.lake)
    for name, digest in (("trim", trim), ("expire", expire), ("purge", purge), ("orphans", expire)):
        outcome = jobs.apply_digest(name, digest)
        assert not outcome.success
        assert outcome.error.endswith("review the new plan")
        assert "\n" not in outcome.error
        assert (outcome.metadata["error_code"], outcome.materializations) == ("plan-changed", [])
    assert content(jobs.lake) == before


def test_digest_requires_options_of_plan(jobs: Jobs) -> None:
    assert jobs.plan("expire", max_age="1d")["is_empty"] is True
    assert jobs.plan("expire", keep_last=3)["versions"] == "0"
    plan = jobs.plan("expire", min_versions=2)
    assert plan["versions"] == "0-1"
    outcome = jobs.apply_digest("expire", plan["digest"])
    assert "review the new plan" in outcome.error, "the options of the plan are missing"
    assert jobs.apply(plan, "expire").metadata["versions"] == "0-1"
    outcome = jobs.run("expire", max_age="0d", min_versions=0)
    assert outcome.error.startswith("the retention policy is empty")


@pytest.mark.parametrize(
    ("job", "config", "message"),
    [
        ("undelete", {"versions": "3"}, "versions 3 are not expired"),
        ("trim", {"tables": ["ns.missing"]}, "ns.missing"),
        ("rollback", {"to": {"version": 999}}, "version 999 does not exist"),
        ("rollback", {"to": {"export": "missing"}}, "missing"),
        ("drop_export", {"name": "missing"}, "export 'missing' does not exist"),
    ],
)
def test_operation_on_missing_object_fails_and_changes_nothing(
    jobs: Jobs, job: str, config: dict[str, Any], message: str
) -> None:
    before = content(jobs.lake)
    outcome = jobs.run(job, **config)
    assert not outcome.success
    assert message in outcome.error
    assert content(jobs.lake) == before


def test_undelete_fails_once_purge_has_begun(jobs: Jobs) -> None:
    jobs.expire_all()
    outcome = jobs.must_run("undelete", versions="2")
    (event,) = outcome.materializations
    assert (event["lakehouse_version"], event["operation"], outcome.metadata["versions"]) == (5, "undelete", "2")
    assert event["last_versions"].startswith("- **[5](/runs/")
    assert jobs.lake.snapshot(2).tables("ns") == ["t"]
    operations.plan_purge(jobs.lake).execute()
    assert "their purge has begun" in jobs.run("undelete", versions="1").error
    with pytest.raises(VersionExpiredError):
        jobs.lake.snapshot(1)


def test_exhausted_budget_is_reported_as_success(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStorage, "delete_batch_size", 1)
    jobs.expire_all()
    plan = jobs.plan("purge")
    n_files = plan["files"]
    assert n_files > 1
    small_budget = jobs.apply_digest("purge", plan["digest"], max_requests=3)
    assert "the budget of 3 requests is spent while planning" in small_budget.error
    needed, _ = with_least_requests(lambda budget: operations.plan_purge(jobs.lake, budget=budget))
    budget = 2 * needed
    while (outcome := jobs.apply_digest("purge", jobs.plan("purge")["digest"], max_requests=budget)).error:
        assert f"the budget of {budget} requests is spent while planning" in outcome.error
        budget += 3
    deleted = outcome.metadata["files"]
    assert "requests is spent" in outcome.metadata["stopped"]
    assert len(outcome.materializations) == 1, "one version records that the purge has begun"
    assert "unfinished" in jobs.run("orphans").error
    outcome = jobs.must_apply("purge")
    assert (outcome.metadata["stopped"], outcome.metadata["files"]) == ("none", n_files - deleted)


def test_undeletable_files_fail_run_with_report(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.expire_all()
    plan = jobs.plan("purge")

    def deny(storage: LocalStorage, path: str) -> None:
        raise StoragePermissionError("not allowed", path=path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", deny)
        outcome = jobs.apply(plan, "purge")
    assert not outcome.success
    assert outcome.error.startswith(f"{plan['files']} files were not deleted")
    assert "not allowed" in outcome.error
    assert [event["operation"] for event in outcome.materializations] == ["purge"], (
        "the start of the purge is committed"
    )
    assert (outcome.metadata["failed_files"], outcome.metadata["files"], outcome.metadata["version"]) == (
        plan["files"],
        0,
        "none",
    )
    assert outcome.metadata["failures"].count("not allowed") == plan["files"]
    assert jobs.must_apply("purge").metadata["files"] == plan["files"]


def test_concurrent_operations_are_rejected(jobs: Jobs) -> None:
    jobs.expire_all()
    with lease(jobs.lake.storage, "orphans"):
        plan = jobs.plan("purge")
        assert jobs.apply(plan, "purge").error.startswith("orphans is running; wait until it ends")
        assert jobs.run("reconcile", unattended=True).error.startswith("orphans is running")
    assert jobs.apply(plan, "purge").success
    outcome = jobs.must_run("reconcile", unattended=True)
    assert (outcome.metadata["version"], outcome.materializations) == ("none", [])
