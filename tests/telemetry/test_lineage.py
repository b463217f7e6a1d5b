"""Test the lineage events of publications: their content, the settings that enable them, and failures to send them."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from openlineage.client.serde import Serde

from tests.lakes import Lakes, lakes
from tests.telemetry.lineage_log import SPEC_VARIABLE, check_by_schema, check_event, events, log_to_file
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.publication import emit_lineage, publish_once
from trinitylake_ops.iceberg.write.replacement import TableRead
from trinitylake_ops.iceberg.write.staging import StagingCatalog
from trinitylake_ops.telemetry.lineage import Origin, PublishedTable, ReadTable, is_wanted, publication_events

__all__ = ["lakes"]

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", "b", "c"]})
NOW = datetime(2030, 1, 31, tzinfo=UTC)


def test_publication_emits_two_events(lakes: Lakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log_to_file(monkeypatch, tmp_path)
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
        emit_lineage(lake, version, staged, lambda: [read, read], integration="SPARK", job="daily", run_id="2030-01-31")
    start, complete, *repeated = events(path)
    assert [start["eventType"], complete["eventType"]] == ["START", "COMPLETE"]
    assert [event["run"]["runId"] for event in repeated] == [start["run"]["runId"], complete["run"]["runId"]]
    namespace = lake.root.rstrip("/")
    assert (complete["job"]["namespace"], complete["job"]["name"]) == (namespace, "daily")
    assert [(table["namespace"], table["name"]) for table in complete["inputs"]] == [(namespace, "raw.orders")]
    assert complete["inputs"][0]["facets"]["version"]["datasetVersion"] == str(read.version)
    (output,) = complete["outputs"]
    assert (output["namespace"], output["name"]) == (namespace, "ns.made")
    assert output["facets"]["version"]["datasetVersion"] == str(version)
    assert [(field["name"], field["type"]) for field in output["facets"]["schema"]["fields"]] == [
        ("id", "long"),
        ("name", "string"),
    ]
    assert output["outputFacets"]["outputStatistics"]["rowCount"] == 3


def test_environment_enables_lineage() -> None:
    assert not is_wanted({})
    assert not is_wanted({"OPENLINEAGE_URL": ""})
    assert is_wanted({"OPENLINEAGE_URL": "http://marquez:5000"})
    assert is_wanted({"OPENLINEAGE__TRANSPORT__TYPE": "console"})
    assert not is_wanted({"OPENLINEAGE_URL": "http://marquez:5000", "OPENLINEAGE_DISABLED": "true"})
    assert Origin("SPARK", "j", "b6f0f2d3-6a1d-4d0f-9b41-0f2c6de3f8a5", NOW, NOW).run_uuid.startswith("b6f0f2d3")


def test_failure_is_logged_as_warning(
    lakes: Lakes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lake = lakes.local()
    with StagingCatalog(lake) as staging:
        staging.create_table("ns.made", ROWS.schema).append(ROWS)
        staged = [staging.staged("ns.made")]

    def failing_reads() -> list[TableRead]:
        raise OSError("the run database is unavailable")

    emit_lineage(lake, 1, staged, failing_reads, integration="DAGSTER", job="j", run_id="r")
    assert caplog.text == ""
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", "/nowhere/at/all")
    emit_lineage(lake, 1, staged, failing_reads, integration="DAGSTER", job="j", run_id="r")
    assert "its reads are unknown" in caplog.text
    emit_lineage(lake, 1, staged, lambda: (), integration="DAGSTER", job="j", run_id="r")
    assert "was not sent: " in caplog.text


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The completion event of a publication that read one table and wrote another."""
    monkeypatch.delenv(SPEC_VARIABLE, raising=False)
    origin = Origin("DAGSTER", "publish", "r", NOW, NOW)
    written, read = PublishedTable("ns.made", (("id", "long"),), 1, 100, 1), ReadTable("s3://other/", "ns.read", 7)
    _, complete = publication_events("s3://lake", 3, origin, [written], [read])
    event: dict[str, Any] = json.loads(Serde.to_json(complete))
    return event


STATISTICS = ("outputs", 0, "outputFacets", "outputStatistics")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("run",), None),
        (("run", "runId"), "r"),
        (("eventType",), "DONE"),
        (("eventTime",), "2030-01-31T00:00:00"),
        (("producer",), "trinitylake"),
        (("schemaURL",), "https://openlineage.io/spec/1-0-0/OpenLineage.json#/$defs/RunEvent"),
        (("job", "owner"), "us"),
        (("job", "facets", "jobType", "processingType"), None),
        (("inputs", 0, "name"), None),
        ((*STATISTICS, "rowCount"), "1"),
        ((*STATISTICS, "rows"), 1),
        ((*STATISTICS, "_schemaURL"), "https://openlineage.io/spec/facets/1-0-0/OurFacet.json#/$defs/OurFacet"),
        ((*STATISTICS, "_producer"), None),
    ],
)
def test_invalid_event_is_detected(event: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    check_event(event)
    invalid = copy.deepcopy(event)
    container = invalid
    for step in path[:-1]:
        container = container[step]
    if value is None:
        del container[path[-1]]
    else:
        container[path[-1]] = value
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check_event(invalid)


def test_facet_of_wrong_kind_is_detected(event: dict[str, Any]) -> None:
    event["run"]["facets"]["jobType"] = event["job"]["facets"]["jobType"]
    with pytest.raises(AssertionError, match="RunFacet"):
        check_event(event)


def test_schemas_of_folder_are_used(event: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder contains minimal schemas with the URLs that the event refers to."""
    (tmp_path / "facets").mkdir()
    names = {"RunEvent": "", "JobTypeJobFacet": "jobType", "ProcessingEngineRunFacet": "processing_engine"}
    names |= {"DatasetVersionDatasetFacet": "version", "SchemaDatasetFacet": "schema"}
    names |= {"OutputStatisticsOutputDatasetFacet": "outputStatistics"}
    text = json.dumps(event)
    for kind, name in names.items():
        end = f"#/$defs/{kind}"
        url = text[: text.index(end)].rpartition('"')[2]
        schema = {"$id": url, "$defs": {kind: {"type": "object"}}, "properties": {name: {"$ref": end}} if name else {}}
        path = tmp_path / ("facets" if name else "") / url.rpartition("/")[2]
        if name == "outputStatistics":
            schema["$defs"] = {kind: {"properties": {"rowCount": {"minimum": 1}}, "required": ["size"]}}
        path.write_text(json.dumps(schema))
    monkeypatch.setenv(SPEC_VARIABLE, str(tmp_path))
    check_event(event)
    statistics = event["outputs"][0]["outputFacets"]
    statistics["outputStatistics"]["rowCount"] = 0
    with pytest.raises(jsonschema.ValidationError, match="less than the minimum"):
        check_event(event)
    statistics["outputStatistics"]["rowCount"] = 1
    statistics["statistics"] = statistics.pop("outputStatistics")
    with pytest.raises(KeyError, match="statistics"):
        check_by_schema(event, tmp_path)
