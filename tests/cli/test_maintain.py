"""The command maintain, which runs all due operations by the policy."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.test_commands import Cli, assert_error, cli, lake, restore_logging
from tests.operations.changes import append_rows
from tests.operations.neglected import with_policy
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.operations import MaintenancePolicy

__all__ = ["cli", "lake", "restore_logging"]


@pytest.fixture
def small_files(lake: Lakehouse) -> Lakehouse:
    """A lakehouse with a wrong hint, two tables of small files and an export that no rule keeps."""
    with_policy(lake, targets={"export": None, "small_files": 3})
    for _ in range(3):
        append_rows(lake, "files.a")
        append_rows(lake, "files.b")
    for name in ("nightly-1", "nightly-2"):
        operations.plan_export(lake, name).execute()
    lake.close()
    lake.storage.write(HINT_PATH, b"1")
    return lake


def test_decisions_are_printed_as_table(cli: Cli, small_files: Lakehouse) -> None:
    base = small_files.latest_version()
    steps = "repair_hint, prune_exports, compact_tables"
    plan = cli("maintain", "--dry-run")
    assert (plan.code, plan.err) == (0, "")
    assert plan.out.startswith(f"Maintenance of version {base}: would run {steps}; would rewrite 6 files of ")
    assert small_files.latest_version() == base
    result = cli("maintain")
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert rows[1] == ["step", "what", "decision", "files", "bytes", "why"]
    assert ["compact_tables", "files.a", "done", "3"] in [row[:4] for row in rows]
    assert ["prune_exports", "nightly-*", "done"] in [row[:3] for row in rows]
    assert cli("maintain").out.startswith(f"Maintenance of version {base + 3}: nothing to do\n")


def test_commands_in_report_apply_waiting_plans_one_after_the_other(cli: Cli, small_files: Lakehouse) -> None:
    with_policy(
        small_files,
        targets={"export": None, "small_files": 3},
        approval=["compact_tables", "prune_exports"],
    )
    result = cli("maintain")
    assert result.code == 0
    notices = result.err.splitlines()
    assert [notice.partition(":")[0] for notice in notices] == [
        "To approve prune_exports nightly-*",
        "To approve compact_tables files.a, files.b",
    ]
    output = cli("maintain", "--json").json
    assert [decision["step"] for decision in output["decisions"] if decision["state"] == "waits"] == [
        "prune_exports",
        "compact_tables",
    ]
    assert output["headline"].endswith("nothing to do; 2 waiting for approval")
    assert [notice.partition(": trinitylake ")[2] for notice in notices] == output["waiting"]
    for n_left in (1, 0):
        applied = cli(*shlex.split(output["waiting"][0]))
        assert applied.code == 0, applied
        if output["waiting"][1:]:
            assert_error(cli(*shlex.split(output["waiting"][1])), 3, "out of date")
        output = cli("maintain", "--json").json
        assert len(output["waiting"]) == n_left
    assert [info.name for info in operations.list_exports(small_files)] == ["nightly-2"]


def test_failed_decision_fails_the_command(cli: Cli, small_files: Lakehouse) -> None:
    target = {"every": "1d", "target": "memory://elsewhere/"}
    with_policy(small_files, targets={"export": target, "small_files": 3})
    result = cli("maintain")
    assert result.code == 1
    assert "memory://elsewhere/, which is not an allowed root" in result.out
    assert cli("maintain", "--json").json["headline"].endswith("1 failed")


def test_closed_window_is_a_success(cli: Cli, lake: Lakehouse) -> None:
    blackouts = [{"start": "00:00", "end": "12:00"}, {"start": "12:00", "end": "00:00"}]
    operations.set_policy(lake, MaintenancePolicy.of_document({"blackouts": blackouts}))
    result = cli("maintain")
    assert (result.code, result.out.splitlines()[0][:25]) == (0, "Maintenance did nothing: ")
    assert cli("maintain", "--json").json["closed"] is not None


def test_invalid_policy_and_missing_lakehouse_are_errors(cli: Cli, lake: Lakehouse) -> None:
    lake.alter_definition(maintenance_policy='{"future": 1}')
    assert_error(cli("maintain"), 1, "the maintenance policy cannot be read")
    assert cli("ls").code == 0, "only maintenance and the policy command need the policy"
    assert_error(cli("maintain", root="memory://nowhere/"), 4, "no lakehouse")
