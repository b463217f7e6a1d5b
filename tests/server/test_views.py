"""Views that plain requests and pyiceberg's client create, change, rename and drop, at every version."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.exceptions import NamespaceNotEmptyError, NoSuchViewError, TableAlreadyExistsError
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField
from pyiceberg.view.metadata import SQLViewRepresentation, ViewRepresentation, ViewVersion

from tests.server.live_server import LiveServer
from tests.server.request_bodies import SCHEMA, TABLES, WIDER_SCHEMA, create_body, new_key
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.views import MAX_VIEW_BYTES
from trinitylake_ops.transaction.change_set import VIEW_PREFIX

NS = "/v1/main/namespaces/ns"
VIEWS = f"{NS}/views"
VIEW = f"{VIEWS}/v"
RENAME = "/v1/main/views/rename"


def version(sql: str = "SELECT id FROM t", **fields: Any) -> dict[str, Any]:
    return {
        "version-id": 1,
        "schema-id": 0,
        "timestamp-ms": 1_700_000_000_000,
        "summary": {"engine-name": "test"},
        "representations": [{"type": "sql", "sql": sql, "dialect": "spark"}],
        "default-namespace": ["ns"],
        **fields,
    }


def view(name: str = "v", **fields: Any) -> dict[str, Any]:
    return {"name": name, "schema": SCHEMA, "view-version": version(), "properties": {"a": "1"}, **fields}


@pytest.fixture
def view_server(server: LiveServer) -> LiveServer:
    """A server whose namespace ``ns`` has the table ``t`` and the view ``v``."""
    assert server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"], "properties": {"p": "1"}}).status == 200
    assert server.request("POST", TABLES, create_body()).status == 200
    assert server.request("POST", VIEWS, view()).status == 200
    return server


def test_view_is_created_listed_loaded_and_dropped(view_server: LiveServer, lake: Lakehouse) -> None:
    assert view_server.request("GET", VIEWS).document["identifiers"] == [{"namespace": ["ns"], "name": "v"}]
    loaded = view_server.request("GET", VIEW).document
    assert loaded["metadata"]["versions"][0]["representations"] == version()["representations"]
    assert loaded["metadata"]["properties"] == {"a": "1"}
    assert view_server.request("HEAD", VIEW).status == 204
    # The view is not listed as a table, and not visible as a property of its namespace.
    assert view_server.request("GET", TABLES).document["identifiers"] == [{"namespace": ["ns"], "name": "t"}]
    assert view_server.request("GET", NS).document["properties"] == {"p": "1"}
    before = lake.latest_version()
    assert view_server.request("DELETE", VIEW).status == 204
    assert view_server.request("GET", VIEW).error == (404, "NoSuchViewException")
    assert view_server.request("HEAD", VIEW).status == 404
    assert view_server.request("DELETE", VIEW).error == (404, "NoSuchViewException")
    assert view_server.request("GET", f"/v1/v{before}/namespaces/ns/views/v").document == loaded
    assert view_server.request("DELETE", f"/v1/v{before}/namespaces/ns/views/v").error == (403, "ForbiddenException")


def test_table_and_view_cannot_have_same_name(view_server: LiveServer) -> None:
    exists = (409, "AlreadyExistsException")
    assert view_server.request("POST", VIEWS, view()).error == exists
    assert view_server.request("POST", VIEWS, view("t")).error == exists
    assert view_server.request("POST", TABLES, create_body("v")).error == exists
    move = {"source": {"namespace": ["ns"], "name": "v"}, "destination": {"namespace": ["ns"], "name": "t"}}
    assert view_server.request("POST", RENAME, move).error == exists
    move_back = {"source": move["destination"], "destination": move["source"]}
    assert view_server.request("POST", "/v1/main/tables/rename", move_back).error == exists


def test_renamed_view_keeps_default_namespace(view_server: LiveServer) -> None:
    assert view_server.request("POST", "/v1/main/namespaces", {"namespace": ["other"]}).status == 200
    move = {"source": {"namespace": ["ns"], "name": "v"}, "destination": {"namespace": ["other"], "name": "w"}}
    assert view_server.request("POST", RENAME, move).status == 204
    assert view_server.request("POST", RENAME, move).error == (404, "NoSuchViewException")
    assert view_server.request("DELETE", "/v1/main/namespaces/other").error == (409, "NamespaceNotEmptyException")
    assert view_server.request("POST", f"{NS}/properties", {"removals": ["p"], "updates": {"q": "2"}}).status == 200
    assert view_server.request("HEAD", "/v1/main/namespaces/other/views/w").status == 204


def test_view_is_replaced(view_server: LiveServer) -> None:
    before = view_server.request("GET", VIEW).document["metadata"]
    changes = [
        {"action": "add-schema", "schema": {**WIDER_SCHEMA, "schema-id": 5}},
        {"action": "add-view-version", "view-version": version("SELECT * FROM t", **{"schema-id": 5})},
        {"action": "set-current-view-version", "view-version-id": -1},
        {"action": "set-properties", "updates": {"b": "2"}},
        {"action": "remove-properties", "removals": ["a", "never"]},
        {"action": "set-location", "location": "file:///etc"},
    ]
    body = {"requirements": [{"type": "assert-view-uuid", "uuid": before["view-uuid"]}], "updates": changes}
    for _ in range(2):  # an equal version is not added again
        after = view_server.request("POST", VIEW, body).document["metadata"]
        assert [entry["version-id"] for entry in after["versions"]] == [1, 2]
        assert [entry["schema-id"] for entry in after["schemas"]] == [0, 1]
        assert (after["current-version-id"], after["properties"]) == (2, {"b": "2"})
        assert after["location"] == before["location"]
    conflicting = {**body, "requirements": [{"type": "assert-view-uuid", "uuid": "another"}]}
    assert view_server.request("POST", VIEW, conflicting).error == (409, "CommitFailedException")
    assert view_server.request("POST", f"{VIEWS}/none", body).error == (404, "NoSuchViewException")


def test_invalid_views_change_nothing(view_server: LiveServer, lake: Lakehouse) -> None:
    before, duplicate_representations = lake.latest_version(), version()["representations"] * 2
    invalid_updates: list[dict[str, Any]] = [
        {"updates": [{"action": "paint-it-black"}]},
        {"updates": [{"action": "set-current-view-version", "view-version-id": 7}]},
        {"updates": [{"action": "set-current-view-version", "view-version-id": -1}]},
        {"updates": [{"action": "add-view-version", "view-version": version(**{"schema-id": 9})}]},
        {
            "updates": [
                {"action": "add-view-version", "view-version": version(representations=duplicate_representations)}
            ]
        },
        {"updates": [{"action": "assign-uuid", "uuid": "another"}]},
        {"updates": [{"action": "upgrade-format-version", "format-version": 2}]},
        {"updates": [{"action": "set-properties", "updates": {"x.impl": "evil"}}]},
        {"requirements": [{"type": "assert-nothing"}], "updates": []},
    ]
    for body in invalid_updates:
        assert view_server.request("POST", VIEW, body).error == (400, "BadRequestException"), body
    for fields in (
        {"name": "a b"},
        {"name": ""},
        {"view-version": {}},
        {"view-version": version("x" * MAX_VIEW_BYTES)},
        {"view-version": version(representations=[])},
    ):
        assert view_server.request("POST", VIEWS, view(**{"name": "u", **fields})).error == (
            400,
            "BadRequestException",
        ), fields
    reserved = {"updates": {f"{VIEW_PREFIX}x": "{}"}}
    assert view_server.request("POST", f"{NS}/properties", reserved).error == (400, "BadRequestException")
    assert view_server.request("POST", f"{NS}/register-view", {}).error == (406, "UnsupportedOperationException")
    assert lake.latest_version() == before


def test_idempotency_key_creates_view_once(view_server: LiveServer, lake: Lakehouse) -> None:
    key = {"Idempotency-Key": new_key()}
    first_response = view_server.request("POST", VIEWS, view("w"), key)
    before = lake.latest_version()
    assert view_server.request("POST", VIEWS, view("w"), key).document == first_response.document
    assert lake.latest_version() == before


def test_external_view_metadata_is_not_trusted(view_server: LiveServer, lake: Lakehouse) -> None:
    for text in ("", "{", "[]", '{"view-uuid": 1}', "x" * (MAX_VIEW_BYTES + 1)):
        with lake.transaction() as txn:
            txn.alter_namespace("ns", {**txn.namespace("ns").properties, f"{VIEW_PREFIX}v": text})
        assert view_server.request("GET", VIEW).error == (500, "InternalServerError")
    assert view_server.request("DELETE", VIEW).status == 204


def test_pyiceberg_manages_views(view_server: LiveServer, lake: Lakehouse) -> None:
    """This works with pyiceberg's client of the server, and with this package's catalog without a server."""
    representation = SQLViewRepresentation(type="sql", sql="SELECT 1", dialect="spark")
    view_version = ViewVersion(
        schema_id=0, representations=[ViewRepresentation(representation)], default_namespace=("ns",)
    )
    schema = Schema(NestedField(1, "id", LongType(), required=False))
    client, direct_catalog = view_server.catalog(), catalog_at(lake)
    for catalog, name in ((client, "ns.r"), (direct_catalog, "ns.o")):
        catalog.create_view(name, schema, view_version)
        with pytest.raises(TableAlreadyExistsError if catalog is direct_catalog else Exception):
            catalog.create_view(name, schema, view_version)
    for catalog in (client, direct_catalog):
        assert sorted(catalog.list_views("ns")) == [("ns", "o"), ("ns", "r"), ("ns", "v")]
        assert catalog.load_view("ns.r").current_version().representations[0].root.sql == "SELECT 1"
        assert catalog.view_exists("ns.v")
    with pytest.raises(NamespaceNotEmptyError):
        direct_catalog.drop_namespace("ns")
    with pytest.raises(InvalidDefinitionError):
        direct_catalog.create_view("ns.x", schema, view_version, location="file:///etc")
    client.drop_view("ns.r")
    direct_catalog.drop_view("ns.o")
    with pytest.raises(NoSuchViewError):
        direct_catalog.load_view("ns.r")
    assert client.list_views("ns") == [("ns", "v")]
