"""The command status: text on one screen, colors, JSON, HTML and metrics."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.cli import test_commands
from tests.cli.test_commands import Cli, assert_error, cli, lake, restore_logging
from tests.cli.test_rows import simulate_terminal
from tests.lakes import lakes
from tests.operations.changes import create
from tests.operations.html_pages import parse_page
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.file_names import HINT_PATH

__all__ = ["cli", "lake", "lakes", "restore_logging"]


def test_status_fits_on_one_screen(cli: Cli, lake: Lakehouse) -> None:
    lake.close()
    lake.storage.write(HINT_PATH, b"0")
    result = cli("status")
    assert result.code == 0
    first, *lines = result.out.splitlines()
    assert first.startswith("Version 2, ")
    assert first.endswith(": 1 finding")
    screen = "\n".join(lines)
    for word in (
        "kept",
        "conflicts",
        "reclaimable",
        "Due",
        "expiry",
        "purge",
        "orphans",
        "verify",
        "clones",
        "requests",
    ):
        assert word in screen
    assert f"  trinitylake --root {test_commands.ROOT} repair-hint" in lines
    assert "\x1b" not in result.out


def test_status_shows_undone_versions(cli: Cli, lake: Lakehouse) -> None:
    create(lake, "bad")
    operations.rollback(lake, 2)
    output = cli("status").out.splitlines()
    assert [line.split() for line in output if line.startswith("undone")] == [["undone", "3", "by", "version", "4"]]
    assert cli("status", "--json").json["undone"] == [{"versions": "3", "by": 4}]


def test_status_prints_json_and_writes_html(cli: Cli, lake: Lakehouse, tmp_path: Path) -> None:
    path = tmp_path / "status.html"
    result = cli("status", "--json", "--html", path, "--last", 1, "--export-every", "1d", "--plan-seconds", 60)
    assert (result.json["version"], result.json["commits"]["versions"]) == (2, 1)
    assert result.json["space"]["note"] == "from new plans"
    assert f"Page: {path}\n" in result.err
    page = parse_page(path.read_text())
    assert page.headline.startswith("Version 2, ")
    assert "refresh" not in path.read_text()
    assert_error(cli("status", "--watch", 0), 2, "--watch")
    assert_error(cli("status", "--html", tmp_path), 5, "not a file")


def test_status_watches_until_interrupted(
    cli: Cli, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pauses_s: list[float] = []
    original_sleep, main_thread = time.sleep, threading.get_ident()

    def sleep(seconds: float) -> None:
        if threading.get_ident() != main_thread:
            original_sleep(seconds)
            return
        pauses_s.append(seconds)
        create(lake, f"n{len(pauses_s)}")
        if len(pauses_s) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    path = tmp_path / "status.html"
    result = cli("status", "--watch", 3, "--html", path)
    assert (result.code, pauses_s) == (130, [3, 3])
    assert [line.partition(",")[0] for line in result.out.splitlines() if line.startswith("Version")] == [
        "Version 2",
        "Version 3",
    ]
    assert '<meta http-equiv="refresh" content="3">' in path.read_text()


def test_status_on_terminal_is_colored_and_escaped(cli: Cli, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    create(lake, "evil\u202e")
    simulate_terminal(monkeypatch, 100)
    output = cli("status").out
    assert "\x1b[" in output
    assert "\u202e" not in output


def test_status_emits_metrics_and_json_lines(cli: Cli, lake: Lakehouse, tmp_path: Path) -> None:
    path = tmp_path / "m.prom"
    result = cli("--metrics-file", path, "--log-json", "status", "--json")
    assert result.json["version"] == 2
    metrics = path.read_text()
    assert f'trinitylake_lakehouse_version{{lakehouse="{test_commands.ROOT}"}} 2.0' in metrics
    assert f'trinitylake_age_seconds{{lakehouse="{test_commands.ROOT}",of="verify"}} +Inf' in metrics
    result = cli("--log-json", "rollback", 1, "--yes")
    (line,) = [json.loads(line) for line in result.err.splitlines()]
    assert (line["operation"], line["command"], line["outcome"]) == ("rollback", "rollback", "done")
    assert len(line["run_id"]) == 36
    pushed = cli("--metrics-push", "nowhere", "status")
    assert (pushed.code, "metrics are pushed to a URL" in pushed.err) == (0, True)
