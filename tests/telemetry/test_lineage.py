"""Lineage of publications: what is sent, when nothing is, and that no failure of it fails anything."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from tests.lakes import Lakes, lakes
from tests.telemetry.lineage_log import events, to_file
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.writing.lineage.told import tell_lineage
from trinitylake_ops.tables.writing.publication import publish_once
from trinitylake_ops.tables.writing.reads import TableRead
from trinitylake_ops.tables.writing.staging import StagingCatalog
from trinitylake_ops.telemetry.lineage import Origin, is_wanted

__all__ = ["lakes"]

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", "b", "c"]})
NOW = datetime(2030, 1, 31, tzinfo=UTC)


def test_a_publication_is_two_events(lakes: Lakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = to_file(monkeypatch, tmp_path)
    lake = lakes.local()
    with catalog_at(lake) as catalog:
        catalog.create_namespace("raw")
        catalog.create_table("raw.orders", ROWS.schema).append(ROWS)
    read = TableRead.of(lake.snapshot(), "raw", "orders")
    with StagingCatalog(lake) as staging:
        staging.create_table("ns.made", ROWS.schema).append(ROWS)
        staged = [staging.staged("ns.made")]
    version = publish_once(lake, staged, "11111111-1111-1111-1111-111111111111").version
    for _ in range(2):
        tell_lineage(lake, version, staged, lambda: [read, read], integration="SPARK", job="daily", run_id="2030-01-31")
    start, complete, *again = events(path)
    assert [start["eventType"], complete["eventType"]] == ["START", "COMPLETE"]
    assert [one["run"]["runId"] for one in again] == [start["run"]["runId"], complete["run"]["runId"]]
    namespace = lake.root.rstrip("/")
    assert (complete["job"]["namespace"], complete["job"]["name"]) == (namespace, "daily")
    assert [(one["namespace"], one["name"]) for one in complete["inputs"]] == [(namespace, "raw.orders")]
    assert complete["inputs"][0]["facets"]["version"]["datasetVersion"] == str(read.version)
    (made,) = complete["outputs"]
    assert (made["namespace"], made["name"]) == (namespace, "ns.made")
    assert made["facets"]["version"]["datasetVersion"] == str(version)
    assert [(one["name"], one["type"]) for one in made["facets"]["schema"]["fields"]] == [
        ("id", "int8"),
        ("name", "varchar"),
    ]
    assert made["outputFacets"]["outputStatistics"]["rowCount"] == 3


def test_whether_it_is_wanted() -> None:
    assert not is_wanted({})
    assert not is_wanted({"OPENLINEAGE_URL": ""})
    assert is_wanted({"OPENLINEAGE_URL": "http://marquez:5000"})
    assert is_wanted({"OPENLINEAGE__TRANSPORT__TYPE": "console"})
    assert not is_wanted({"OPENLINEAGE_URL": "http://marquez:5000", "OPENLINEAGE_DISABLED": "true"})
    assert Origin("SPARK", "j", "b6f0f2d3-6a1d-4d0f-9b41-0f2c6de3f8a5", NOW, NOW).run_uuid.startswith("b6f0f2d3")


def test_a_failure_is_a_warning(
    lakes: Lakes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lake = lakes.local()
    with StagingCatalog(lake) as staging:
        staging.create_table("ns.made", ROWS.schema).append(ROWS)
        staged = [staging.staged("ns.made")]

    def unknown() -> list[TableRead]:
        raise OSError("the database of runs is away")

    tell_lineage(lake, 1, staged, unknown, integration="DAGSTER", job="j", run_id="r")
    assert caplog.text == ""
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", "/nowhere/at/all")
    tell_lineage(lake, 1, staged, unknown, integration="DAGSTER", job="j", run_id="r")
    assert "its reads are unknown" in caplog.text
    tell_lineage(lake, 1, staged, lambda: (), integration="DAGSTER", job="j", run_id="r")
    assert "was not sent: " in caplog.text
