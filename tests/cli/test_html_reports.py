"""HTML reports of commands: they are written in addition to the output, completely or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.test_commands import ROOT, Cli, assert_error, cli, lake, restore_logging
from tests.local_clock import LocalClock
from tests.operations.changes import alter, create
from tests.operations.html_pages import parse_page
from trinitylake_ops import Lakehouse
from trinitylake_ops.format.file_names import HINT_PATH

__all__ = ["cli", "lake", "restore_logging"]

COMMANDS = ("log", "expire", "verify")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "json"])
def test_html_report_is_written_in_addition_to_output(
    cli: Cli, lake: Lakehouse, tmp_path: Path, command: str, options: tuple[str, ...]
) -> None:
    path = tmp_path / "page.html"
    plain = cli(command, *options)
    result = cli(command, *options, "--html", path)
    assert result.code == plain.code == 0
    if options:
        first, second = (json.loads(printed.out) for printed in (plain, result))
        assert (type(first), len(first)) == (type(second), len(second))
    assert f"Page: {path}\n" in result.err
    assert parse_page(path.read_text()).headline.startswith("3 versions; ")
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_html_report_is_written_with_exit_code_1(cli: Cli, lake: Lakehouse, tmp_path: Path) -> None:
    lake.close()
    lake.storage.write(HINT_PATH, b"1")
    lake.storage.write(lake.files.roots.path(1), b"garbage")
    path = tmp_path / "page.html"
    assert cli("verify", "--html", path).code == 1
    page = parse_page(path.read_text())
    assert page.headline == "1 error and 1 warning; 3 versions, of which 1 unreadable; the latest is 2"


def test_html_report_of_limited_log(cli: Cli, lake: Lakehouse, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert cli("log", "--limit", 2, "--stat", "--html", path).code == 0
    assert parse_page(path.read_text()).headline == "The newest 2 versions; the latest is 2"


def test_html_report_of_executed_expiration(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LocalClock(monkeypatch)
    root = str(tmp_path / "lake")
    lakehouse = Lakehouse.create(root, {"fsync": "false"}, minimum_versions_to_keep=1)
    create(lakehouse, "ns", "t")
    alter(lakehouse, "ns", "t")
    clock.forward(24 * 9)
    path = tmp_path / "page.html"
    assert cli("expire", "--html", path, root=root).code == 0
    page = parse_page(path.read_text())
    assert page.headline.startswith("3 versions; 2 would expire and reclaim ")
    assert "expire --apply 2-" in page.text
    result = cli("expire", "--yes", "--html", path, root=root)
    assert (result.code, "Expired in version 3" in result.out) == (0, True)
    assert "; 2 expired just now, by version 3; a purge reclaims " in parse_page(path.read_text()).headline


def test_result_is_printed_if_html_report_cannot_be_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LocalClock(monkeypatch)
    root = str(tmp_path / "lake")
    create(Lakehouse.create(root, {"fsync": "false"}, minimum_versions_to_keep=1), "ns", "t")
    clock.forward(24 * 9)

    def fail_with_full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with_full_disk)
        result = cli("--storage-option", "fsync=false", "expire", "--yes", "--html", tmp_path / "page.html", root=root)
    assert result.code == 5
    assert "Expired in version 2" in result.out
    assert "page.html'" in result.err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_unwritable_html_path_fails_before_command_runs(
    cli: Cli, lake: Lakehouse, tmp_path: Path, command: str
) -> None:
    missing = tmp_path / "none" / "page.html"
    assert_error(cli(command, "--html", missing), 5, "does not exist", str(missing.parent))
    assert_error(cli(command, "--html", tmp_path), 5, "not a file", str(tmp_path))
    assert_error(cli(command, "--html"), 2, "--html")
    assert list(tmp_path.iterdir()) == []


def test_html_report_requires_lakehouse(cli: Cli, tmp_path: Path) -> None:
    for command in COMMANDS:
        assert_error(cli(command, "--html", tmp_path / "page.html", root=f"{ROOT}none/"), 4, "no lakehouse")
    assert list(tmp_path.iterdir()) == []
