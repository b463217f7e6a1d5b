"""Test the command `space`: its table, JSON document and HTML report."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from tests.lakes import Lakes, lakes
from tests.operations.changes import append_rows, overwrite_rows
from tests.operations.html_pages import parse_page
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake

__all__ = ["lakes"]


def run(lake: Lakehouse, *arguments: str) -> Result:
    return CliRunner().invoke(trinitylake, ["--root", lake.root, "space", *arguments])


def test_table_lists_largest_tables_and_sums(lakes: Lakes) -> None:
    lake = lakes.local()
    append_rows(lake, "ns.u")
    overwrite_rows(lake, "ns.t")
    result = run(lake, "--top", "1")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith(f"Version {lake.latest_version()}: ")
    assert [line.split("  ")[0] for line in lines[1:]] == ["table", "ns.t", "(1 other tables)", "(catalog)", "(total)"]


def test_json_document_has_stable_fields(lakes: Lakes, tmp_path: Path) -> None:
    lake = lakes.local()
    append_rows(lake, "ns.u")
    page = tmp_path / "space.html"
    result = run(lake, "--json", "--last", "2", "--find-unreached", "--html", str(page))
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document.keys() == {
        *("headline", "next", "root", "version", "now", "use", "catalog", "operations", "unreached", "reclaimable"),
        *("data", "small", "deletes", "namespaces", "tables", "n_tables", "uncounted_tables", "damaged", "growth"),
        *("unreadable_definitions", "from_version", "tables_read", "is_stored", "cost"),
    }
    assert document["use"].keys() == {"current", "older", "exports", "clones", "expirable", "expired"}
    assert document["tables"][0].keys() == {
        *("namespace", "table", "is_dropped", "use", "data", "small", "deletes", "trimmable", "damage", "advice"),
    }
    assert document["unreached"]["orphans"] == {"files": 0, "bytes": 0}
    assert len(document["growth"]) == 2
    assert parse_page(page.read_text()).headline == document["headline"]


def test_read_only_run_leaves_no_files(lakes: Lakes) -> None:
    lake = lakes.local()
    append_rows(lake, "ns.u")
    before = {info.path for info in lake.storage.list()}
    assert run(lake, "--read-only").exit_code == 0
    assert {info.path for info in lake.storage.list()} == before


def test_two_sources_of_orphans_are_rejected(lakes: Lakes) -> None:
    result = run(lakes.local(), "--find-unreached", "--inventory", "s3://bucket/manifest.json")
    assert result.exit_code == 2
    assert "--find-unreached" in result.output
