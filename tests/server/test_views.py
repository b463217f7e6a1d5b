"""Views: created, changed, renamed and dropped by requests, and by pyiceberg's client, at every version."""

from __future__ import annotations

from typing import Any

import pytest
from pyiceberg.exceptions import NamespaceNotEmptyError, NoSuchViewError, TableAlreadyExistsError
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField
from pyiceberg.view.metadata import SQLViewRepresentation, ViewRepresentation, ViewVersion

from tests.server.requests import SCHEMA, TABLES, WIDER, created, new_key
from tests.server.served import Served
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.views import MOST_VIEW_BYTES
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
def views(served: Served) -> Served:
    """A server whose namespace ``ns`` has the table ``t`` and the view ``v``."""
    assert served.ask("POST", "/v1/main/namespaces", {"namespace": ["ns"], "properties": {"p": "1"}}).status == 200
    assert served.ask("POST", TABLES, created()).status == 200
    assert served.ask("POST", VIEWS, view()).status == 200
    return served


def test_a_view_is_created_listed_loaded_and_dropped(views: Served, lake: Lakehouse) -> None:
    assert views.ask("GET", VIEWS).document["identifiers"] == [{"namespace": ["ns"], "name": "v"}]
    loaded = views.ask("GET", VIEW).document
    assert loaded["metadata"]["versions"][0]["representations"] == version()["representations"]
    assert loaded["metadata"]["properties"] == {"a": "1"}
    assert views.ask("HEAD", VIEW).status == 204
    # It is a view alone: no table, and no property of its namespace as clients see it.
    assert views.ask("GET", TABLES).document["identifiers"] == [{"namespace": ["ns"], "name": "t"}]
    assert views.ask("GET", NS).document["properties"] == {"p": "1"}
    before = lake.latest_version()
    assert views.ask("DELETE", VIEW).status == 204
    assert views.ask("GET", VIEW).error == (404, "NoSuchViewException")
    assert views.ask("HEAD", VIEW).status == 404
    assert views.ask("DELETE", VIEW).error == (404, "NoSuchViewException")
    assert views.ask("GET", f"/v1/v{before}/namespaces/ns/views/v").document == loaded
    assert views.ask("DELETE", f"/v1/v{before}/namespaces/ns/views/v").error == (403, "ForbiddenException")


def test_tables_and_views_share_names(views: Served) -> None:
    exists = (409, "AlreadyExistsException")
    assert views.ask("POST", VIEWS, view()).error == exists
    assert views.ask("POST", VIEWS, view("t")).error == exists
    assert views.ask("POST", TABLES, created("v")).error == exists
    move = {"source": {"namespace": ["ns"], "name": "v"}, "destination": {"namespace": ["ns"], "name": "t"}}
    assert views.ask("POST", RENAME, move).error == exists
    back = {"source": move["destination"], "destination": move["source"]}
    assert views.ask("POST", "/v1/main/tables/rename", back).error == exists


def test_a_view_moves_and_keeps_its_namespace(views: Served) -> None:
    assert views.ask("POST", "/v1/main/namespaces", {"namespace": ["other"]}).status == 200
    move = {"source": {"namespace": ["ns"], "name": "v"}, "destination": {"namespace": ["other"], "name": "w"}}
    assert views.ask("POST", RENAME, move).status == 204
    assert views.ask("POST", RENAME, move).error == (404, "NoSuchViewException")
    assert views.ask("DELETE", "/v1/main/namespaces/other").error == (409, "NamespaceNotEmptyException")
    assert views.ask("POST", f"{NS}/properties", {"removals": ["p"], "updates": {"q": "2"}}).status == 200
    assert views.ask("HEAD", "/v1/main/namespaces/other/views/w").status == 204


def test_a_view_is_replaced(views: Served) -> None:
    before = views.ask("GET", VIEW).document["metadata"]
    changes = [
        {"action": "add-schema", "schema": {**WIDER, "schema-id": 5}},
        {"action": "add-view-version", "view-version": version("SELECT * FROM t", **{"schema-id": 5})},
        {"action": "set-current-view-version", "view-version-id": -1},
        {"action": "set-properties", "updates": {"b": "2"}},
        {"action": "remove-properties", "removals": ["a", "never"]},
        {"action": "set-location", "location": "file:///etc"},
    ]
    body = {"requirements": [{"type": "assert-view-uuid", "uuid": before["view-uuid"]}], "updates": changes}
    for _ in range(2):  # the same again adds nothing
        after = views.ask("POST", VIEW, body).document["metadata"]
        assert [one["version-id"] for one in after["versions"]] == [1, 2]
        assert [one["schema-id"] for one in after["schemas"]] == [0, 1]
        assert (after["current-version-id"], after["properties"]) == (2, {"b": "2"})
        assert after["location"] == before["location"]
    other = {**body, "requirements": [{"type": "assert-view-uuid", "uuid": "another"}]}
    assert views.ask("POST", VIEW, other).error == (409, "CommitFailedException")
    assert views.ask("POST", f"{VIEWS}/none", body).error == (404, "NoSuchViewException")


def test_views_that_make_no_sense_change_nothing(views: Served, lake: Lakehouse) -> None:
    before, twice = lake.latest_version(), version()["representations"] * 2
    wrong: list[dict[str, Any]] = [
        {"updates": [{"action": "paint-it-black"}]},
        {"updates": [{"action": "set-current-view-version", "view-version-id": 7}]},
        {"updates": [{"action": "set-current-view-version", "view-version-id": -1}]},
        {"updates": [{"action": "add-view-version", "view-version": version(**{"schema-id": 9})}]},
        {"updates": [{"action": "add-view-version", "view-version": version(representations=twice)}]},
        {"updates": [{"action": "assign-uuid", "uuid": "another"}]},
        {"updates": [{"action": "upgrade-format-version", "format-version": 2}]},
        {"updates": [{"action": "set-properties", "updates": {"x.impl": "evil"}}]},
        {"requirements": [{"type": "assert-nothing"}], "updates": []},
    ]
    for body in wrong:
        assert views.ask("POST", VIEW, body).error == (400, "BadRequestException"), body
    for fields in (
        {"name": "a b"},
        {"name": ""},
        {"view-version": {}},
        {"view-version": version("x" * MOST_VIEW_BYTES)},
        {"view-version": version(representations=[])},
    ):
        assert views.ask("POST", VIEWS, view(**{"name": "u", **fields})).error == (400, "BadRequestException"), fields
    reserved = {"updates": {f"{VIEW_PREFIX}x": "{}"}}
    assert views.ask("POST", f"{NS}/properties", reserved).error == (400, "BadRequestException")
    assert views.ask("POST", f"{NS}/register-view", {}).error == (406, "UnsupportedOperationException")
    assert lake.latest_version() == before


def test_a_key_creates_a_view_once(views: Served, lake: Lakehouse) -> None:
    key = {"Idempotency-Key": new_key()}
    made = views.ask("POST", VIEWS, view("w"), key)
    before = lake.latest_version()
    assert views.ask("POST", VIEWS, view("w"), key).document == made.document
    assert lake.latest_version() == before


def test_metadata_that_somebody_else_wrote_is_not_believed(views: Served, lake: Lakehouse) -> None:
    for text in ("", "{", "[]", '{"view-uuid": 1}', "x" * (MOST_VIEW_BYTES + 1)):
        with lake.transaction() as txn:
            txn.alter_namespace("ns", {**txn.namespace("ns").properties, f"{VIEW_PREFIX}v": text})
        assert views.ask("GET", VIEW).error == (500, "InternalServerError")
    assert views.ask("DELETE", VIEW).status == 204


def test_pyiceberg_has_views(views: Served, lake: Lakehouse) -> None:
    """By its client of a server, and by our catalog without one."""
    shown = SQLViewRepresentation(type="sql", sql="SELECT 1", dialect="spark")
    made = ViewVersion(schema_id=0, representations=[ViewRepresentation(shown)], default_namespace=("ns",))
    schema = Schema(NestedField(1, "id", LongType(), required=False))
    rest, own = views.catalog(), catalog_at(lake)
    for catalog, name in ((rest, "ns.r"), (own, "ns.o")):
        catalog.create_view(name, schema, made)
        with pytest.raises(TableAlreadyExistsError if catalog is own else Exception):
            catalog.create_view(name, schema, made)
    for catalog in (rest, own):
        assert sorted(catalog.list_views("ns")) == [("ns", "o"), ("ns", "r"), ("ns", "v")]
        assert catalog.load_view("ns.r").current_version().representations[0].root.sql == "SELECT 1"
        assert catalog.view_exists("ns.v")
    with pytest.raises(NamespaceNotEmptyError):
        own.drop_namespace("ns")
    with pytest.raises(InvalidDefinitionError):
        own.create_view("ns.x", schema, made, location="file:///etc")
    rest.drop_view("ns.r")
    own.drop_view("ns.o")
    with pytest.raises(NoSuchViewError):
        own.load_view("ns.r")
    assert rest.list_views("ns") == [("ns", "v")]
