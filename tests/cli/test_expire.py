"""The commands that reclaim space, on a local lakehouse with a manual clock."""

from __future__ import annotations

import json
import logging
import sys
from itertools import count
from typing import Any

import pytest

from tests.cli.test_commands import Cli, Result, assert_error, assert_planned, restore_logging
from tests.lakes import Lakes, lakes, listed
from tests.local_clock import HOUR_MS, LocalClock
from tests.operations.changes import alter, content, create, node_bytes, node_columns, overwrite_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StoragePermissionError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.keys import COMMIT_ID, CREATED_AT_MILLIS, LAKEHOUSE_DEF
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.storage import LocalStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

__all__ = ["lakes", "restore_logging"]

DELETING_COMMANDS = ("expire", "purge", "orphans", "trim")


class Run(Cli):
    """Calls commands on one lakehouse."""

    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, root: str):
        super().__init__(capture, patch)
        self._root = root

    def __call__(self, *arguments: object, root: str | None = None) -> Result:
        result = super().__call__(*arguments, root=root or self._root)
        assert "Traceback" not in result.err
        return result

    def apply(self, *arguments: object) -> Any:
        """Create a plan, approve it by its digest, and return the report."""
        digest = self(*arguments, "--json").json["digest"]
        return self(*arguments, "--apply", digest, "--json").json


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LocalClock:
    return LocalClock(monkeypatch)


@pytest.fixture
def lake(lakes: Lakes, clock: LocalClock) -> Lakehouse:
    """A lakehouse with versions 0 to 4, one hour after the last version. It keeps versions for half an hour."""
    lakehouse = lakes.local(maximum_version_age_millis=HOUR_MS // 2, minimum_versions_to_keep=1, txn_ttl_millis=60_000)
    create(lakehouse, "ns", "t", "u")
    for _ in range(3):
        alter(lakehouse, "ns", "t")
    clock.forward()
    return lakehouse


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lake: Lakehouse) -> Run:
    monkeypatch.setenv("TRINITYLAKE_STORAGE_OPTIONS", "fsync=false")
    return Run(capsys, monkeypatch, lake.root)


def expire_all(run: Run, clock: LocalClock) -> None:
    """Expire all versions except the latest, and advance the clock beyond their grace period."""
    run.apply("expire")
    clock.forward()


def states(run: Run) -> dict[int, str]:
    return {version["version"]: version["state"] for version in run("log", "--json").json}


def test_empty_plans_print_one_line(run: Run) -> None:
    """Expire prints the reason why no version expires, without a row for each version."""
    for command in (("expire", "--max-age", "30d"), ("expire", "--max-age", "30d", "--yes"), ("compact",)):
        result = run(*command)
        assert (result.code, len(result.out.splitlines())) == (0, 1), command
    assert "0 of 5 versions expire" in run("expire", "--max-age", "30d", "--yes").out


def test_expire_undelete_and_purge(run: Run, lake: Lakehouse, clock: LocalClock) -> None:
    before = {version: lake.storage.read(root_path(version)) for version in range(5)}
    plan = assert_planned(run, lake, "expire")
    assert (plan["base_version"], plan["versions"], plan["exports"]) == (4, "0-3", [])
    assert [verdict["expires"] for verdict in plan["verdicts"]] == [True] * 4 + [False]
    text = run("expire").out
    assert "4 of 5 versions expire" in text
    assert "it is the latest" in text
    report = run("expire", "--apply", plan["digest"], "--json").json
    assert (report["version"], report["versions"], report["spared"]) == (5, "0-3", "")
    assert report["files"] == sum(plan["files"].values()) > 0
    assert "0 of 2 versions expire" in run("expire", "--apply", plan["digest"]).out, "the versions have expired"
    assert_error(run("show", "--version", 2), 4, "undelete")

    undeleted = run("undelete", "2-3", "--json")
    assert (undeleted.code, undeleted.json) == (0, {"version": 6, "versions": "2-3"})
    assert run("show", "--version", 2, "--json").json["namespaces"] == ["ns"]
    assert {version: lake.storage.read(root_path(version)) for version in range(5)} == before
    early_purge = run("purge")
    assert (early_purge.code, early_purge.err) == (0, "Nothing to do.\n")
    assert "purge of 0 versions" in early_purge.out

    clock.forward()
    plan = assert_planned(run, lake, "purge")
    assert (plan["versions"], plan["batches"][0]["is_due"]) == ("0-1", True)
    report = run("purge", "--apply", plan["digest"], "--json").json
    assert (report["versions"], report["failures"], report["stopped"]) == ("0-1", {}, None)
    assert (report["files"], report["bytes"]) == (plan["files"], plan["bytes"])
    assert states(run) == {version: "sealed" if version < 2 else "live" for version in range(9)}
    assert run("purge").err == "Nothing to do.\n"
    assert run("purge", "--yes").err == "Nothing to do.\n"
    assert run("verify").code == 0


def test_trim_expire_purge_and_orphans_reclaim_table_files(run: Run, lake: Lakehouse, clock: LocalClock) -> None:
    overwrite_rows(lake, "ns.a", "ns.b")
    rows = catalog_at(lake).load_table("ns.a").scan().to_arrow()
    clock.forward()
    plan = assert_planned(run, lake, "trim", "ns.a")
    assert [(trim["table"], len(trim["dropped"])) for trim in plan["tables"]] == [("a", 4)]
    report = run("trim", "--apply", run("trim", "--json").json["digest"], "--json").json
    assert (report["tables"], report["snapshots_dropped"]) == (["ns.a", "ns.b"], 8)
    second = run("trim")
    assert (second.code, second.err) == (0, "Nothing to do.\n")
    assert run("trim", "--yes").err == "Nothing to do.\n"

    clock.forward()
    report = run.apply("expire")
    table_id = lake.snapshot().table("ns", "a").id
    lake.storage.create(f"tables/{table_id}/data/left-behind.parquet", b"x" * 999)
    lake.storage.create("another-program.txt", b"keep me")
    clock.forward()
    assert run.apply("purge")["bytes"] == report["bytes"]
    clock.forward()
    plan = assert_planned(run, lake, "orphans")
    assert plan["files"]["table file"] == 1
    text = run("orphans").out
    assert f"tables/{table_id}/data/left-behind.parquet" in text
    assert run("orphans", "--apply", plan["digest"], "--json").json["files"] == sum(plan["files"].values())
    assert run("orphans").err == "Nothing to do.\n"
    assert run("orphans", "--yes").err == "Nothing to do.\n"
    paths = listed(lake.storage)
    assert "another-program.txt" in paths
    assert len([path for path in paths if path.endswith(".parquet")]) == 2, "the data of the latest version"
    assert run("verify").code == 0
    assert catalog_at(lake).load_table("ns.a").scan().to_arrow() == rows


def test_digest_of_older_plan_is_rejected(run: Run, lake: Lakehouse, clock: LocalClock) -> None:
    overwrite_rows(lake, "ns.a")
    clock.forward()
    trim, expire = (run(command, "--json").json["digest"] for command in ("trim", "expire"))
    overwrite_rows(lake, "ns.a")
    clock.forward()
    assert_error(run("trim", "--apply", trim), 3, trim, "review the new plan")
    expire_all(run, clock)
    purge = run("purge", "--json").json["digest"]
    assert run.apply("purge")["failures"] == {}
    before = content(lake)
    for command, digest in (("expire", expire), ("purge", purge), ("orphans", purge), ("purge", expire)):
        assert_error(run(command, "--apply", digest), 3, "review the new plan")
        assert_error(run(command, "--apply", digest, "--json"), 3)
    assert content(lake) == before


def test_digest_covers_effects_instead_of_options(run: Run) -> None:
    plan = run("expire", "--json").json
    assert_error(run("expire", "--keep-last", 4, "--apply", plan["digest"]), 3, "out of date")
    report = run("expire", "--max-age", "30m", "--apply", plan["digest"], "--json").json
    assert (report["versions"], report["version"]) == (plan["versions"], 5)


def test_rules_on_command_line_replace_settings_for_one_run(run: Run, lake: Lakehouse) -> None:
    assert run("expire", "--json").json["versions"] == "0-3"
    assert run("expire", "--keep-last", 3, "--json").json["versions"] == "0-1"
    assert run("expire", "--min-versions", 4, "--json").json["versions"] == "0"
    assert run("expire", "--max-age", "2h").err == "Nothing to do.\n"
    for period in ("hourly", "daily", "weekly", "monthly"):
        plan = run("expire", f"--keep-{period}", 1, "--max-age", "1m", "--json").json
        assert plan["versions"] == "0-3", "the newest version of the period is the latest version"
    digest = run("expire", "--keep-last", 2, "--json").json["digest"]
    assert_error(run("expire", "--apply", digest), 3, "review the new plan")
    assert_error(run("expire", "--keep-last", 1, "--apply", digest), 3)
    assert run("expire", "--keep-last", 2, "--apply", digest, "--json").json["versions"] == "0-2"
    assert lake.snapshot().definition.minimum_versions_to_keep == 1, "no setting changed"


def test_empty_policy_is_rejected(run: Run, lake: Lakehouse) -> None:
    overwrite_rows(lake, "ns.a")
    for command in ("expire", "trim"):
        assert_error(run(command, "--max-age", "0d", "--min-versions", 0), 2, "retention policy is empty")
        assert_error(run(command, "--max-age", "0d", "--min-versions", 0, "--yes", "--json"), 2)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["expire", option, "-1"] for option in ("--min-versions", "--keep-last", "--keep-monthly")),
        *(["expire", "--max-age", text] for text in ("", "30", "-1d", "1.5h", "d")),
        ["expire", "--keep-last", "9" * 5000],
        ["expire", "extra"],
        *(["purge", "--grace", text] for text in ("", "7", "-7d", "soon")),
        *(["orphans", "--older-than", text] for text in ("", "7", "-7d", "soon")),
        *(["purge", "--max-requests", text] for text in ("0", "-1", "1.5", "many")),
        *([command, "--max-seconds", text] for command in ("purge", "orphans") for text in ("0", "-1", "nan", "inf")),
        *(["orphans", "--requests-per-second", text] for text in ("0", "-1", "nan", "inf", "1e400")),
        ["trim", "no-table"],
        ["trim", "ns.t"],
        *(["undelete", text] for text in ("", "all", "3-1", "1-", "1;2", "99999999999", "٣")),
        ["undelete"],
        ["reconcile", "--yes"],
    ],
)
def test_invalid_arguments_are_rejected(run: Run, lake: Lakehouse, arguments: list[str]) -> None:
    before = content(lake)
    for options in ([], ["--json"]):
        assert_error(run(*arguments, *options), 2)
    assert content(lake) == before


def test_trim_of_missing_table_fails(run: Run) -> None:
    assert_error(run("trim", "ns.nowhere"), 4, "ns.nowhere")


def test_trim_lists_unreadable_tables(run: Run, lake: Lakehouse, clock: LocalClock) -> None:
    overwrite_rows(lake, "ns.a", "ns.b")
    clock.forward()
    path = lake.snapshot().table("ns", "b").format_properties["metadata_location"].removeprefix(lake.root)
    lake.storage.write(path, b"not JSON")
    assert run("trim", "--json").json["unreadable"] == ["ns.b"]
    result = run("trim", "--yes", "--json")
    assert (result.code, result.json["tables"]) == (0, ["ns.a"])
    assert result.err == "Skipped, because their metadata cannot be read: ns.b; run verify for details\n"


def start_purge(run: Run) -> tuple[int, Result]:
    """Purge with approximately the smallest budget that suffices for the plan. Return the budget and the result."""
    for budget in count(10, 3):
        result = run("purge", "--max-requests", budget, "--yes", "--json")
        if not result.err:
            return budget, result
    raise AssertionError


def test_undelete_rejects_versions_that_cannot_be_restored(
    run: Run, clock: LocalClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_error(run("undelete", "3"), 2, "not expired")
    assert_error(run("undelete", "2-4294967295"), 2, "not expired")
    expire_all(run, clock)
    assert_error(run("undelete", "3-4"), 2, "versions 4 are not expired")
    assert run("undelete", 3).out == "Brought back 3: version 6\n"
    assert_error(run("undelete", "3"), 2, "not expired")
    monkeypatch.setattr(LocalStorage, "delete_batch_size", 1)
    _, started = start_purge(run)
    assert started.code == 1
    assert_error(run("undelete", "1"), 4, "their purge has begun")
    assert run("purge", "--yes").code == 0
    assert_error(run("undelete", "0-2", "--json"), 4, "their purge has begun")


def test_only_one_operation_deletes_at_a_time(run: Run, lake: Lakehouse, clock: LocalClock) -> None:
    expire_all(run, clock)
    with lease(lake.storage, "purge"):
        assert_error(run("purge", "--yes"), 3, "purge is running; wait until it ends")
        assert_error(run("reconcile"), 3, "purge is running")
        assert run("purge", "--json").json["versions"] == "0-3", "planning is allowed"
    assert run("purge", "--yes").code == 0


def test_purge_with_budget_continues_until_complete(
    run: Run, clock: LocalClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "delete_batch_size", 1)
    expire_all(run, clock)
    planned = run("purge", "--json").json["files"]
    assert planned > 1
    assert_error(run("purge", "--max-requests", 1, "--yes"), 1, "the budget of 1 requests is spent while planning")
    assert run("purge", "--json").json["files"] == planned
    budget, result = start_purge(run)
    deleted = 0
    while result.code == 1:
        deleted += result.json["files"]
        assert result.json["version"] is None
        assert "requests is spent" in result.json["stopped"]
        assert_error(run("orphans"), 3, "unfinished")
        result = run("purge", "--max-requests", budget + 3, "--yes", "--json")
    assert (result.code, deleted + result.json["files"], result.json["stopped"]) == (0, planned, None)


def test_files_that_cannot_be_deleted_are_reported(
    run: Run, lake: Lakehouse, clock: LocalClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 1, not 5: the command continues with other files, and its report lists the remaining ones."""
    overwrite_rows(lake, "ns.a")
    clock.forward()
    run.apply("trim")
    clock.forward()
    expire_all(run, clock)
    table_id = lake.snapshot().table("ns", "a").id
    lake.storage.create(f"tables/{table_id}/data/left-behind.parquet", b"x")
    planned = run("purge", "--json").json["files"]
    delete = LocalStorage.delete

    def reject(storage: LocalStorage, path: str) -> None:
        if path.startswith("tables/"):
            raise StoragePermissionError("not allowed", path=path)
        delete(storage, path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", reject)
        result = run("purge", "--yes", "--json")
        assert (result.code, result.json["version"], result.json["stopped"]) == (1, None, None)
        failures = result.json["failures"]
        assert all(path.startswith("tables/") for path in failures)
        assert result.json["files"] == planned - len(failures)
        text = run("purge", "--yes")
        assert (text.code, text.err) == (1, "")
        assert "Purge not finished, run it again" in text.out
        assert f"{next(iter(failures))}: not allowed" in text.out
    assert run.apply("purge")["files"] == len(failures), "the remaining files are deleted once this is allowed"
    clock.forward()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete", reject)
        result = run("orphans", "--yes", "--json")
        assert (result.code, list(result.json["failures"])) == (1, [f"tables/{table_id}/data/left-behind.parquet"])
    assert run("orphans", "--yes").code == 0


def test_error_of_rejected_requests_is_one_line(
    run: Run, lake: Lakehouse, clock: LocalClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire_all(run, clock)

    def reject(storage: LocalStorage, path: str, data: bytes) -> None:
        raise StoragePermissionError("not allowed", path=path)

    before = content(lake)
    monkeypatch.setattr(LocalStorage, "create", reject)
    for arguments in (["purge", "--yes"], ["undelete", "1"], ["reconcile"]):
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        assert_error(run(*arguments), 5, "not allowed")
    assert content(lake) == before


def test_damaged_root_blocks_all_deletions(run: Run, lake: Lakehouse, clock: LocalClock) -> None:
    overwrite_rows(lake, "ns.a")
    expire_all(run, clock)
    path = root_path(lake.latest_version() - 1)
    original = lake.storage.read(path)
    lake.storage.write(path, original[:100])
    before = content(lake)
    for command in DELETING_COMMANDS:
        assert_error(run(command, "--yes"), 5, path)
    assert content(lake) == before
    lake.storage.write(path, original)


def test_reconcile_after_foreign_rollback(run: Run, lake: Lakehouse, clock: LocalClock) -> None:
    expire_all(run, clock)
    older = lake.snapshot()
    operations.plan_export(lake, "kept").execute()
    overwrite_rows(lake, "ns.a")
    latest = lake.snapshot()
    columns = node_columns(lake.storage.read(latest.location))
    changed = {LAKEHOUSE_DEF: older.definition_location, CREATED_AT_MILLIS: str(latest.created_at_ms + 1)}
    rows = [
        (key, changed.get(key or "", value), node)
        for key, value, node in zip(columns["key"], columns["pvalue"], columns["pnode"], strict=True)
        if key != COMMIT_ID
    ]
    foreign = dict(zip(("key", "pvalue", "pnode"), map(list, zip(*rows, strict=True)), strict=True))
    lake.storage.create(root_path(latest.version + 1), node_bytes(foreign))
    clock.forward()
    assert run("exports", "--json").json == []
    for command in DELETING_COMMANDS:
        assert_error(run(command), 3, "trinitylake reconcile")
    report = run("reconcile", "--json").json
    assert (report["steps"], report["restored_exports"]) == ([latest.version + 1], ["kept"])
    assert run("reconcile").out == "Nothing to reconcile\n"
    assert [export["name"] for export in run("exports", "--json").json] == ["kept"]
    assert run("purge", "--yes", "--json").json["versions"] == "0-3"
    assert [run(command).code for command in DELETING_COMMANDS] == [0] * 4


def test_progress_is_shown_on_terminals_only(run: Run, clock: LocalClock, monkeypatch: pytest.MonkeyPatch) -> None:
    expire_all(run, clock)
    assert run("purge", "--json").err.count("\n") == 1
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _stream: True)
    result = run("purge", "--yes", "--json")
    assert "deleted" in result.err
    assert json.loads(result.out)["failures"] == {}


def test_help_lists_steps_of_reclaiming_in_order(run: Run) -> None:
    for command in (*DELETING_COMMANDS, "undelete"):
        out = run(command, "-h").out
        positions = [out.index(f"\n    {step} ") for step in ("trim", "expire", "purge", "orphans")]
        assert positions == sorted(positions)
    assert "never deletes" in " ".join(run("purge", "-h").out.split())
