"""Commits do not write oversized metadata, and the server does not parse it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import BadRequestError

from tests.iceberg.hostile import change_metadata
from tests.server.live_server import LiveServer, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, commit_of, create_body, properties
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import MetadataTooLargeError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.validation import metadata_size
from trinitylake_ops.iceberg.validation.metadata_size import ParseGate
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.server import tables, warehouses

TOO_LARGE = (400, "BadRequestException", "metadata-too-large")
LIMIT_BYTES = 64 << 10
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


def error_of(reply: Any) -> tuple[int, str, str]:
    error = reply.document["error"]
    return reply.status, error["type"], error["reason"]


@pytest.fixture
def limited_server(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server with a small limit, whose lakehouse has the tables ``ns.t`` and ``ns.other``."""
    monkeypatch.setattr(metadata_size, "MAX_METADATA_BYTES", LIMIT_BYTES)
    monkeypatch.setattr(warehouses, "MAX_METADATA_BYTES", LIMIT_BYTES)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    for name in ("t", "other"):
        catalog.create_table(f"ns.{name}", ROWS.schema).append(ROWS)
    with serving(settings_for(lake)) as server:
        yield server


def add_oversized_statistics(content: dict[str, Any]) -> None:
    content["statistics"] = [
        {
            "snapshot-id": content["current-snapshot-id"],
            "statistics-path": f"{content['location']}/metadata/a.puffin",
            "file-size-in-bytes": 10,
            "file-footer-size-in-bytes": 5,
            "blob-metadata": [],
            "key-metadata": "x" * LIMIT_BYTES,
        }
    ]


def add_oversized_member(content: dict[str, Any]) -> None:
    content["x"] = "x" * (2 << 20)


def add_many_objects(content: dict[str, Any]) -> None:
    content["x"] = [{}] * 1_000


@pytest.mark.parametrize("kind", ["ref", "doc", "partition"])
def test_commit_that_makes_metadata_too_large_is_rejected(
    limited_server: LiveServer, lake: Lakehouse, kind: str
) -> None:
    """The limit covers all metadata except properties, which have a separate limit."""
    metadata = limited_server.request("GET", TABLE).document["metadata"]
    snapshot, large = metadata["snapshots"][0], "x" * LIMIT_BYTES
    field = {"id": 1, "name": "id", "type": "long", "required": False, "doc": large}
    update = {
        "ref": {
            "action": "set-snapshot-ref",
            "ref-name": large,
            "type": "tag",
            "snapshot-id": snapshot["snapshot-id"],
        },
        "doc": {"action": "add-schema", "schema": {"type": "struct", "schema-id": 1, "fields": [field]}},
        "partition": {
            "action": "add-spec",
            "spec": {
                "spec-id": 1,
                "fields": [{"source-id": 1, "field-id": 1000, "transform": "identity", "name": large}],
            },
        },
    }[kind]
    before, files = lake.latest_version(), {file.path for file in lake.storage.list("tables/")}
    assert error_of(limited_server.request("POST", TABLE, commit_of(update))) == TOO_LARGE
    assert lake.latest_version() == before
    assert {file.path for file in lake.storage.list("tables/")} == files
    assert limited_server.request("POST", TABLE, commit_of(properties(a="1"))).status == 200


def test_append_with_oversized_summary_is_rejected(limited_server: LiveServer, lake: Lakehouse) -> None:
    table = limited_server.catalog().load_table("ns.t")
    with pytest.raises(BadRequestError):
        table.append(ROWS, snapshot_properties={"x": "x" * LIMIT_BYTES})
    with pytest.raises(MetadataTooLargeError):
        catalog_at(lake).load_table("ns.t").append(ROWS, snapshot_properties={"x": "x" * LIMIT_BYTES})
    table.append(ROWS)


def test_table_with_oversized_metadata_is_not_created(limited_server: LiveServer, lake: Lakehouse) -> None:
    field = {"id": 1, "name": "id", "type": "long", "required": False, "doc": "x" * LIMIT_BYTES}
    body = create_body("new", schema={"type": "struct", "schema-id": 0, "fields": [field]})
    assert error_of(limited_server.request("POST", TABLES, body)) == TOO_LARGE
    assert "new" not in [name for _, name in catalog_at(lake).list_tables("ns")]


@pytest.mark.parametrize("change", [add_oversized_statistics, add_oversized_member])
def test_oversized_metadata_is_not_parsed(limited_server: LiveServer, lake: Lakehouse, change: Any) -> None:
    change_metadata(lake, change)
    assert error_of(limited_server.request("GET", TABLE)) == TOO_LARGE
    assert error_of(limited_server.request("POST", f"{TABLE}/plan", {})) == TOO_LARGE
    assert error_of(limited_server.request("POST", TABLE, commit_of(properties(a="1")))) == TOO_LARGE
    two_changes = {"table-changes": [commit_of(properties(a="1"), name=name) for name in ("other", "t")]}
    assert error_of(limited_server.request("POST", "/v1/main/transactions/commit", two_changes)) == TOO_LARGE
    assert limited_server.request("GET", f"{TABLES}/other").status == 200
    assert limited_server.request("HEAD", TABLE).status == 204
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow() == ROWS
    assert limited_server.request("DELETE", TABLE).status == 204


def test_metadata_with_too_many_objects_is_not_parsed(
    limited_server: LiveServer, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_size, "MAX_METADATA_OBJECTS", 500)
    change_metadata(lake, add_many_objects)
    assert error_of(limited_server.request("GET", TABLE)) == TOO_LARGE
    assert limited_server.request("GET", f"{TABLES}/other").status == 200


def test_limit_applies_to_versions_and_exports(limited_server: LiveServer, lake: Lakehouse, tmp_path: Any) -> None:
    version = lake.latest_version()
    operations.plan_export(lake, "kept", target=f"file://{tmp_path}/export").execute()
    change_metadata(lake, add_oversized_statistics)
    assert error_of(limited_server.request("GET", f"/v1/v{version}/namespaces/ns/tables/t")) == TOO_LARGE
    assert error_of(limited_server.request("GET", "/v1/export-kept/namespaces/ns/tables/t")) == TOO_LARGE


def test_oversized_metadata_can_be_reduced(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator can trim the table or remove refs with the Python catalog, but no commit may enlarge it."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", ROWS.schema)
    for _ in range(20):
        table.append(ROWS)
    snapshot_id = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().create_tag(snapshot_id, "t" * 1_000).commit()
    size_bytes = len(table.metadata.model_dump_json())
    monkeypatch.setattr(metadata_size, "MAX_METADATA_BYTES", size_bytes * 3 // 4)
    table = catalog.load_table("ns.t")
    with pytest.raises(MetadataTooLargeError):
        table.append(ROWS)
    table.manage_snapshots().remove_tag("t" * 1_000).commit()
    operations.plan_trim_tables(lake, RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)).execute()
    catalog.load_table("ns.t").append(ROWS)
    assert catalog.load_table("ns.t").scan().to_arrow().num_rows == 21 * ROWS.num_rows


def test_table_with_10_000_snapshots_and_5_000_columns_is_served(lake: Lakehouse) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", pa.schema([(f"column_{number}", pa.int64()) for number in range(5_000)]))
    catalog.create_table("ns.small", ROWS.schema).append(ROWS)
    snapshot = json.loads(catalog.load_table("ns.small").metadata.snapshots[0].model_dump_json())

    def change(content: dict[str, Any]) -> None:
        numbers = range(1, 10_001)
        content["snapshots"] = [{**snapshot, "snapshot-id": number, "sequence-number": number} for number in numbers]
        content["snapshot-log"] = [{"snapshot-id": number, "timestamp-ms": number} for number in numbers]
        content["refs"] = {"main": {"snapshot-id": 10_000, "type": "branch"}}
        content |= {"current-snapshot-id": 10_000, "last-sequence-number": 10_000}

    change_metadata(lake, change)
    with serving(settings_for(lake)) as server:
        assert len(server.request("GET", TABLE).document["metadata"]["snapshots"]) == 10_000
        assert server.request("POST", TABLE, commit_of(properties(a="1"))).status == 200


def test_responses_share_metadata(limited_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that request a large table without reading their responses share one copy of the metadata."""
    responses, make_response = [], tables.table_response

    def recording_response(*arguments: Any) -> Any:
        responses.append(make_response(*arguments))
        return responses[-1]

    monkeypatch.setattr(tables, "table_response", recording_response)
    bodies = {limited_server.request("GET", TABLE).body for _ in range(3)}
    assert len(bodies) == 1
    assert all(response.shared is responses[0].shared for response in responses)
    assert len(responses[0].shared) > len(responses[0].body)


def test_only_one_thread_parses_huge_metadata_at_a_time() -> None:
    gate, has_entered, may_leave = ParseGate(), threading.Semaphore(0), threading.Event()

    def parse(n_bytes: int) -> None:
        with gate.admit(n_bytes):
            has_entered.release()
            assert may_leave.wait(60.0)

    threads = [threading.Thread(target=parse, args=(n_bytes,)) for n_bytes in (2 << 20, 3 << 20, 1 << 19, 1 << 19, 10)]
    for thread in threads[:1]:
        thread.start()
    assert has_entered.acquire(timeout=60.0)
    assert not gc.isenabled()
    for thread in threads[1:]:
        thread.start()
    assert has_entered.acquire(timeout=60.0)  # a thread with medium metadata
    assert has_entered.acquire(timeout=60.0)  # the thread with small metadata
    assert not has_entered.acquire(timeout=0.2)
    may_leave.set()
    for thread in threads:
        thread.join()
    assert gc.isenabled()
