"""Test rollback, restore and drop jobs: plans, links, the versions page, and the verification of applied changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dagster as dg
import pyarrow as pa
import pytest
import yaml

from tests.dagster_plugin.incident_project import BLOCKING, LOAD, NAMES, ORDERS, ROOT, SOURCE, location
from tests.dagster_plugin.maintenance_jobs import APPROVER, Jobs, approved
from tests.dagster_plugin.metadata_values import plain
from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes, check_lake, objects
from tests.local_clock import LocalClock
from tests.operations.changes import append_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin import publish_step
from trinitylake_ops.dagster_plugin._dagster_internals import execute_as_launched
from trinitylake_ops.dagster_plugin.links import MAX_CONFIG_CHARS, Links, config_yaml
from trinitylake_ops.dagster_plugin.names import ONLY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.version_page import VersionsPage
from trinitylake_ops.declarations.rendering import Link
from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.iceberg.write.staged_table import StagedTable


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(tmp_path, LocalClock(monkeypatch))


# Plan and apply


def test_rollback_plan_lists_changed_and_lost_rows(jobs: Jobs) -> None:
    first = append_rows(jobs.lake, "ns.real")
    last = append_rows(jobs.lake, "ns.real")
    append_rows(jobs.lake, "ns.other")
    plan = jobs.plan("rollback", to={"version": first}, tables=["ns.real"])
    assert (plan["to_version"], plan["tables"], plan["rows_coming_back"], plan["rows_going_away"]) == (first, 1, 0, 3)
    assert re.search(r"\| changed \| ns\.real \| 6 -> 3 \| 2 -> 1 \|", plan["plan"])
    assert "| ns.real | 3 | 0 |  | no primary key |" in plan["rows"]
    assert not [name for name in plan if name.startswith("rows of ")], "rows may be personal data"
    sampled = jobs.plan("rollback", to={"version": first}, tables=["ns.real"], sample_rows=10)
    assert "| before | 1 |" in sampled["rows of ns.real"]
    assert plan["commits_lost"] == 1
    assert re.search(rf"\| {last} \| .* \| ns\.real \| \+3 -0 \|", plan["lost"])
    assert plan["details"]["objects"][0]["before"]["rows"] == 6
    outcome = jobs.apply(plan, "rollback")
    assert outcome.success, outcome.error
    assert (outcome.metadata["rolled_back_to"], outcome.metadata["rows_before"], outcome.metadata["rows_after"]) == (
        str(first), 6, 3,
    )  # fmt: skip
    assert "| ns.real | 6 | 3 | +0 -3 |" in outcome.metadata["proof"]
    assert (outcome.materializations[0]["operation"], outcome.materializations[0]["approved_by"]) == (
        "rollback",
        APPROVER,
    )
    assert jobs.plan("rollback", to={"version": first}, tables=["ns.real"])["is_empty"] is True
    check_lake(jobs.lake)


def test_rollback_to_timestamp_applies_to_planned_version(jobs: Jobs) -> None:
    append_rows(jobs.lake, "ns.real")
    timestamp = jobs.lake.snapshot(1).created_at.isoformat()
    plan = jobs.plan("rollback", to={"timestamp": timestamp})
    assert plan["configuration"]["to"] == {"version": 1}
    jobs.must_run("export", name="later", level="minimal")
    stale = jobs.apply(plan, "rollback")
    assert not stale.success
    assert stale.metadata["error_code"] == "plan-changed"
    assert f"on version {plan['base_version']}, and" in stale.error
    assert stale.error.endswith(f"on version {jobs.lake.latest_version()}; review the new plan")
    assert jobs.must_apply("rollback", to={"timestamp": timestamp}).metadata["rolled_back_to"] == "1"
    assert objects(jobs.lake.snapshot()) == objects(jobs.lake.snapshot(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'Missing required config entry "to"'),
        ({"to": {"version": 1, "last_passed": True}}, "You can only specify a single field"),
        ({"to": {"timestamp": "soon"}}, "timestamp: 'soon' is not a time"),
        ({"to": {"last_passed": False}}, "last_passed must be true, or left out"),
    ],
    ids=["none", "two", "time", "false"],
)
def test_rollback_requires_exactly_one_target(jobs: Jobs, options: dict[str, Any], message: str) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError, match=re.escape(message)):
        jobs.run("rollback", **options)


def test_rollback_to_last_passed_fails_without_checks(jobs: Jobs) -> None:
    outcome = jobs.run("rollback", to={"last_passed": True})
    assert not outcome.success
    assert "is known to have passed checks" in outcome.error


def test_exports_are_restored_and_dropped_with_plan(jobs: Jobs, tmp_path: Path) -> None:
    first = append_rows(jobs.lake, "ns.real")
    jobs.must_run("export", name="internal", level="minimal", version=first)
    jobs.must_run("export", name="external", target=str(tmp_path / "backup"))
    append_rows(jobs.lake, "ns.real")
    plan = jobs.plan("restore", name="internal", tables=["ns.real"])
    assert (plan["rows_going_away"], plan["objects"]) == (3, 1)
    assert jobs.apply(plan, "restore").metadata["rows_after"] == 3
    append_rows(jobs.lake, "ns.real")
    plan = jobs.plan("restore", name="external")
    assert plan["files"] >= 1
    outcome = jobs.apply(plan, "restore")
    assert (outcome.success, outcome.metadata["restored_from"], outcome.metadata["rows_after"]) == (
        True,
        "external",
        3,
    ), outcome.error

    plan = jobs.plan("drop_export", name="external")
    assert (plan["export"], plan["level"]) == ("external", "full")
    assert "can expire" in plan["what_follows"]
    assert [info.name for info in operations.list_exports(jobs.lake)] == ["external", "internal"]
    assert jobs.apply(plan, "drop_export").metadata["dropped"] == "external"
    assert [info.name for info in operations.list_exports(jobs.lake)] == ["internal"]
    assert "export 'external' does not exist" in jobs.apply(plan, "drop_export").error
    check_lake(jobs.lake)


def test_compact_and_reconcile_jobs_apply_plans(jobs: Jobs) -> None:
    plan = jobs.plan("compact")
    assert (plan["is_empty"], plan["nodes_before"]) == (True, 1)
    assert not {"digest", "configuration"} & set(plan), "there is nothing to approve"
    assert jobs.must_run("compact", unattended=True).materializations == []
    plan = jobs.plan("reconcile")
    assert (plan["is_empty"], plan["steps"]) == (True, "")
    assert jobs.must_run("reconcile", unattended=True).materializations == []
    with pytest.raises(InvalidInputError):
        operations.plan_reconcile(jobs.lake, acknowledge="1")


def test_log_history_and_diff_jobs_report_versions(jobs: Jobs) -> None:
    first = append_rows(jobs.lake, "ns.real")
    last = append_rows(jobs.lake, "ns.real")
    append_rows(jobs.lake, "ns.other")
    log_metadata = jobs.must_run("log", limit=3).metadata
    assert log_metadata["n_versions"] == 3
    assert re.search(rf"\| {last} \| .* \| ns\.real \| \+3 -0 \| \+1 -0 \|", log_metadata["versions"])
    table_history = jobs.must_run("history", table="ns.real").metadata
    assert (table_history["n_versions"], table_history["looked_back_to"]) == (3, 0), (
        "one version created the table and two appended to it"
    )
    assert re.search(rf"\| {last} \| .* \| changed \| \+3 -0 \| \+1 -0 \|", table_history["versions"])
    diff = jobs.must_run("diff", before={"version": first}, after={"version": last}).metadata
    assert (diff["objects"], diff["rows_added"], diff["rows_removed"]) == (1, 3, 0)
    assert "| changed | ns.real | +3 -0 | 6 |" in diff["changes"]


# Concurrent operators


def test_only_one_of_two_concurrent_rollbacks_applies(jobs: Jobs) -> None:
    first = append_rows(jobs.lake, "ns.real")
    append_rows(jobs.lake, "ns.real")
    plan = jobs.plan("rollback", to={"version": first})
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: jobs.apply(plan, "rollback"), range(2)))
    (succeeded,), (rejected,) = [
        [outcome for outcome in outcomes if outcome.success is has_succeeded] for has_succeeded in (True, False)
    ]
    assert (succeeded.metadata["rows_before"], succeeded.metadata["rows_after"]) == (6, 3)
    assert "is out of date" in rejected.error, rejected.error
    assert sum(info.operation == "rollback" for info in jobs.lake.history()) == 1
    assert objects(jobs.lake.snapshot()) == objects(jobs.lake.snapshot(first))


def test_publication_fails_when_base_was_rolled_back_after_staging(lakes: Lakes) -> None:
    """The staged table is based on an undone version. Its publication fails, so that undone rows stay undone."""
    lake = lakes.local()

    def stage(day: str, number: int) -> StagedTable:
        rows = pa.table({"day": [day], "n": [number]})
        return stage_arrow(lake, rows, "sales", "orders", mode="replace_partitions", partition_by=["day"])

    def days() -> list[tuple[str, int]]:
        table_rows = catalog_at(lake).load_table("sales.orders").scan().to_arrow().to_pylist()
        return sorted((row["day"], row["n"]) for row in table_rows)

    for day in ("mon", "tue"):
        publish_once(lake, [stage(day, 1)], publication_id(day))
    staged = stage("wed", 2)
    operations.plan_rollback(lake, 1).execute()
    with pytest.raises(CommitConflictError, match=r"sales\.orders"):
        publish_once(lake, [staged], publication_id("wed"))
    assert days() == [("mon", 1)]
    publish_once(lake, [stage("wed", 2)], publication_id("wed"))
    assert days() == [("mon", 1), ("wed", 2)]
    check_lake(lake)


# Links


def test_link_opens_launchpad_with_configuration() -> None:
    links = Links(ONLY, "__repository__@a b.py", frozenset({"rollback"}), "https://dagster.example.com/p")
    config = {"to": "a (b) | c", "tables": ["ns.\u2028t"], "approved_by": None}
    link = links.launchpad("rollback", config, "roll | back")
    assert link is not None
    assert link.url.startswith("https://dagster.example.com/p/locations/__repository__@a%20b.py/jobs/rollback/")
    assert not set("()| <>\"'[]") & set(link.url)
    (text,) = parse_qs(urlsplit(link.url).query, keep_blank_values=True)["config"]
    assert yaml.safe_load(text) == config
    assert link.markdown == f"[roll \\| back]({link.url})"
    assert links.launchpad("purge", {}) is None, "this code location has no such job"
    assert links.launchpad("rollback", {"to": "x" * MAX_CONFIG_CHARS}) is None
    assert Links(ONLY).launchpad("rollback", {}) is None
    assert config_yaml({"to": {"version": 21, "x": None}}) == "to:\n  version: 21\n  x: \n"


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "https://me:secret@host", "https://host/?q=1", "host", "http://h/)x"]
)
def test_invalid_webserver_url_is_rejected(url: str) -> None:
    with pytest.raises(InvalidInputError, match="webserver_url"):
        TrinityLakeResource(root="/lake", webserver_url=url)


# The incident


class Shop:
    """The code location on one lakehouse and one Dagster instance."""

    def __init__(self, lake: Lakehouse, source: Path, instance: dg.DagsterInstance):
        self.lake = lake
        self.instance = instance
        self.source = source
        self.reload()

    def reload(self) -> None:
        """Load the code location with the current environment variables."""
        self.definitions = location()
        self.repository = self.definitions.get_repository_def()

    def execute(self, reexecution: dg.ReexecutionOptions | None = None) -> dg.DagsterRun:
        """Run the load job like a run worker, or re-execute one of its runs."""
        load_job = dg.build_reconstructable_job("tests.dagster_plugin.incident_project", "load_job")
        with dg.execute_job(
            load_job, self.instance, run_config=QUIET, reexecution_options=reexecution, raise_on_error=False
        ) as result:
            run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        return run

    def run(self, job: str, config: Mapping[str, Any] = QUIET) -> tuple[bool, dict[str, Any]]:
        """Run a job that the code location launches, and return whether it succeeded and its metadata."""
        result = execute_as_launched(
            self.definitions, job, self.instance, file="shop.py", location_name="shop", run_config=config
        )
        metadata: dict[str, Any] = {}
        for event in result.all_events:
            if event.is_successful_output:
                metadata = dict(event.step_output_data.metadata)
            elif event.is_step_failure and event.step_failure_data.user_failure_data is not None:
                metadata = dict(event.step_failure_data.user_failure_data.metadata)
        return result.success, plain(metadata)

    def load(self, *amounts: int) -> int:
        self.source.write_text("\n".join(map(str, amounts)))
        assert self.run(LOAD)[0]
        return self.lake.latest_version()

    def page(self) -> str:
        links = Links.at(self.repository, "__repository__@shop", NAMES, "")
        page = VersionsPage(self.instance, self.repository, NAMES, links)
        return "\n".join(part.value for part in page.lists(self.lake, self.lake.snapshot()).values())


@pytest.fixture
def shop(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    lake = lakes.local()
    root = lake.storage.root.removeprefix("file://").rstrip("/")
    monkeypatch.setenv(ROOT, root)
    with dg.instance_for_test() as instance:
        yield Shop(lake, Path(root).with_name(SOURCE), instance)


def row(page: str, version: int) -> str:
    """Return the row of a version, whose number may be a link to its run."""
    return next(
        line for line in page.splitlines() if re.match(rf"(\| |- \*\*)\[?{version}(\]\(\S+\))?( \||\*\*)", line)
    )


def test_incident_is_detected_rolled_back_and_verified(shop: Shop) -> None:
    good_version = shop.load(1, 2, 3)
    bad_version = shop.load(4, -5)
    page = shop.page()
    assert "; no_negative_amounts failed" in row(page, bad_version)
    assert f"; 1 passed [roll back to {good_version}](/locations/__repository__@shop/jobs/shop_rollback/" in row(
        page, good_version
    )
    assert "; sales.orders +2 -3;" in row(page, bad_version)
    event = shop.instance.get_latest_materialization_event(NAMES.lakehouse_key)
    assert event is not None and event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    # A check may end after the publication of its run, so the metadata contains only results that existed at that time.
    assert "; 1 passed" in row(str(metadata["last_versions"].value), good_version)
    assert not {"objects", "publish_tables", "tables"} & metadata.keys(), "metrics are a separate observation"
    (observation_record, *_) = shop.instance.fetch_observations(NAMES.lakehouse_key, limit=1).records
    assert observation_record.asset_observation is not None
    metrics = plain(observation_record.asset_observation.metadata)
    assert (metrics["objects"], metrics["tables"], metrics["publish_tables"]) == (2, 1, 1)
    assert (metrics["hours_since_export"], metrics["publish_rows_added"]) == ("none", 2)
    assert [*metadata][:4] == ["lakehouse_version", "health", "go_back", "last_versions"]

    _, plan = shop.run("shop_rollback", {"to": {"last_passed": True}})
    assert (plan["to_version"], plan["rows_coming_back"], plan["rows_going_away"]) == (good_version, 3, 2)
    assert "| no_negative_amounts failed |" in row(plan["lost"], bad_version)
    assert "sales.orders | +2 -3 |" in row(plan["lost"], bad_version), "the latest version is counted as well"
    assert plan["configuration"]["to"] == {"version": good_version}
    succeeded, proof = shop.run("shop_rollback", approved(plan))
    assert (succeeded, proof["rows_before"], proof["rows_after"]) == (True, 2, 3)
    assert (proof["checks_passed"], proof["checks_failed"]) == (1, 0)
    page, latest = shop.page(), shop.lake.latest_version()
    assert "; latest; 1 passed" in row(page, latest)
    assert "no_negative_amounts failed" in row(page, bad_version), (
        "the check result must still be attributed to the bad version"
    )

    _, plan = shop.run("shop_rollback", {"to": {"version": bad_version}})
    succeeded, proof = shop.run("shop_rollback", approved(plan))
    assert (succeeded, proof["checks_failed"]) == (False, 1), "the checks must fail again on the bad version"
    assert shop.lake.latest_version() == latest + 1
    orders = shop.instance.get_latest_materialization_event(ORDERS)
    assert orders is not None and orders.asset_materialization is not None
    assert orders.asset_materialization.metadata["lakehouse_version"].value == latest + 1


def test_blocking_check_is_not_attributed_to_published_version(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLOCKING, "1")
    shop.reload()
    good_version = shop.load(1, 2, 3)
    shop.source.write_text("4\n-5")
    assert not shop.run(LOAD)[0]
    assert shop.lake.latest_version() == good_version
    assert "; latest; 1 passed" in row(shop.page(), good_version), "an unpublished table has no version"
    bad_version = shop.load(4, 500)
    _, plan = shop.run("shop_rollback", {"to": {"last_passed": True}})
    assert (plan["to_version"], plan["base_version"]) == (good_version, bad_version)


def test_check_is_attributed_to_version_of_re_execution(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise dg.Failure("not now")

    good_version = shop.load(1, 2, 3)
    shop.source.write_text("4\n-5")
    with monkeypatch.context() as patch:
        patch.setattr(publish_step, "publish_once", fail)
        failed = shop.execute()
    assert failed.is_failure
    assert "; latest; 1 passed" in row(shop.page(), good_version)
    reexecution = shop.execute(dg.ReexecutionOptions.from_failure(failed.run_id, shop.instance))
    assert reexecution.is_success
    page = shop.page()
    assert "; latest; no_negative_amounts failed" in row(page, good_version + 1)
    assert "; 1 passed" in row(page, good_version)


def test_last_passed_version_excludes_undone_versions(shop: Shop) -> None:
    good_version, bad_version = shop.load(1, 2, 3), shop.load(4, 500)
    assert "1 passed" in row(shop.page(), bad_version), "the check does not detect these bad rows"
    operations.rollback(shop.lake, good_version)
    latest = shop.lake.latest_version()
    page = shop.page()
    assert f"; undone by {latest}; 1 passed" in row(page, bad_version)
    assert f"[roll back to {bad_version} (undone by {latest})](" in row(page, bad_version)
    assert f"[roll back to {good_version}](" in row(page, good_version)
    _, plan = shop.run("shop_rollback", {"to": {"last_passed": True}})
    assert (plan["to_version"], plan["is_empty"]) == (good_version, True), "the latest version already has this content"
    _, plan = shop.run("shop_rollback", {"to": {"version": bad_version}})
    assert plan["warning"] == f"version {latest} already undid version {bad_version}, which would be restored"
    shop.load(7)
    _, plan = shop.run("shop_rollback", {"to": {"last_passed": True}, "tables": ["sales.orders"]})
    assert plan["to_version"] == good_version


def test_last_passed_version_is_chosen_by_table(shop: Shop) -> None:
    good_version = shop.load(1, 2, 3)
    bad_version = shop.load(4, 500)
    append_rows(shop.lake, "sales.other")
    operations.rollback(shop.lake, good_version, tables=["sales.orders"])
    _, plan = shop.run("shop_rollback", {"to": {"last_passed": True}, "tables": ["sales.other"]})
    assert plan["to_version"] == bad_version, "the rollback did not change the other table"
    _, plan = shop.run("shop_rollback", {"to": {"last_passed": True}})
    assert plan["to_version"] == good_version
    history = shop.run("shop_history", {"table": "sales.orders"})[1]["versions"]
    assert "undone by" in row(history, bad_version) and "undone by" not in row(history, good_version)


def test_links_are_markdown_and_texts_are_escaped() -> None:
    assert Link("a]b", "/runs/1").markdown == r"[a\]b](/runs/1)"
