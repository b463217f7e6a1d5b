"""The command policy, which shows, checks and sets the maintenance policy."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.test_commands import Cli, assert_error, cli, lake, restore_logging
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.declarations.policy_yaml import MAX_YAML_BYTES

__all__ = ["cli", "lake", "restore_logging"]

DOCUMENT = """\
retention: {versions: {max_age: 30d}}
limits: {max_requests: 500}
blackouts: [{start: 22:00, end: 06:00}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(DOCUMENT)
    return path


def test_show_prints_yaml_that_can_be_set(cli: Cli, lake: Lakehouse, tmp_path: Path) -> None:
    current = cli("policy")
    assert (current.code, current.err) == (0, "")
    assert current == cli("policy", "show")
    first, second, *_ = current.out.splitlines()
    assert first == "# The maintenance policy of version 2 (the default, because none is set)"
    assert second == "retention:"
    document = yaml.safe_load(current.out)
    assert document["retention"]["versions"]["max_age"] == "7d"
    result = cli("policy", "show", "--json").json
    assert (result["version"], result["is_default"], result["policy"]) == (2, True, document)
    path = tmp_path / "current.yaml"
    path.write_text(current.out)
    assert cli("policy", "set", path, "--json").json == {"version": 3, "policy": document}
    assert cli("policy").out == current.out.replace("version 2 (the default, because none is set)", "version 3 (set)")
    repeated = cli("policy", "set", path)
    assert (repeated.code, repeated.out, repeated.err) == (0, "", "Nothing to do.\n")


def test_check_prints_meaning_and_changes(cli: Cli, lake: Lakehouse, file: Path) -> None:
    result = cli("policy", "check", file)
    assert result.code == 0
    assert "A run stops after 500 storage requests.\n" in result.out
    assert "Maintenance does not run every day from 22:00 to 06:00 UTC.\n" in result.out
    assert [line.split() for line in result.out.splitlines() if line.startswith(("retention.", "limits."))] == [
        ["retention.versions.max_age", "7d", "30d"],
        ["limits.max_requests", "500"],
    ]
    output = cli("policy", "check", file, "--json").json
    assert {change["field"] for change in output["changes"]} == {
        "retention.versions.max_age",
        "limits.max_requests",
        "blackouts",
    }
    assert output["policy"]["retention"]["versions"]["min_versions"] == 3
    assert lake.latest_version() == 2
    cli("policy", "set", file)
    assert "No changes to version 3\n" in cli("policy", "check", file).out


def test_set_reads_file_or_standard_input(
    cli: Cli, lake: Lakehouse, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("policy", "set", file).out == "Set the maintenance policy: version 3\n"
    assert operations.read_policy(lake).policy.limits.max_requests == 500
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbflimits: {max_requests: 6}")))
    assert cli("policy", "set", "-").out == "Set the maintenance policy: version 4\n"
    assert operations.read_policy(lake).policy.limits.max_requests == 6
    assert operations.read_policy(lake).policy.retention.versions.max_age_ms == 30 * 86_400_000, (
        "other settings are kept"
    )
    earlier = cli("policy", "show", "--version", 3, "--json").json
    assert earlier["policy"]["limits"]["max_requests"] == 500
    assert "set-policy" in cli("log", "--limit", 1).out


def test_invalid_files_and_arguments_are_rejected(cli: Cli, lake: Lakehouse, file: Path, tmp_path: Path) -> None:
    assert_error(cli("policy", "set"), 2, "set needs a FILE, or - for standard input")
    assert_error(cli("policy", "show", file), 2, "show takes no FILE")
    assert_error(cli("policy", "check", file, "--version", 1), 2, "--version is only for show")
    assert_error(cli("policy", "drop"), 2, "drop")
    assert_error(cli("policy", "set", tmp_path / "none.yaml"), 2, "cannot read", "none.yaml")
    assert_error(cli("policy", "set", tmp_path), 2, "cannot read")
    assert_error(cli("policy", "show", "--version", 99), 4, "99")
    file.write_bytes(b"\xff")
    assert_error(cli("policy", "set", file), 2, "is not UTF-8")
    file.write_text("limits: {min_age: soon}")
    for action in ("check", "set"):
        assert_error(cli("policy", action, file), 2, "invalid policy: limits.min_age: use a duration")
        assert_error(cli("policy", action, file, "--json"), 2, '"code": "invalid-input"')
    file.write_text("#" * (2 * MAX_YAML_BYTES))
    assert_error(cli("policy", "check", file), 2, "larger than")
    assert lake.latest_version() == 2


def test_unreadable_policy_is_reported_and_can_be_replaced(cli: Cli, lake: Lakehouse, file: Path) -> None:
    lake.alter_definition(maintenance_policy='{"written_by_a_newer_release":1}')
    assert_error(cli("policy"), 1, "the maintenance policy cannot be read", "trinitylake policy set")
    assert_error(cli("policy", "--json"), 1, '"code": "unreadable-policy"')
    assert cli("policy", "show", "--version", 2).code == 0
    checked = cli("policy", "check", file)
    assert (checked.code, checked.err.startswith("The current policy cannot be read")) == (0, True)
    assert cli("policy", "set", file).code == 0
    assert cli("policy").code == 0
