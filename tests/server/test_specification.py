"""Requests to every endpoint: statuses, error types and bodies follow Iceberg's specification."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tests.server.live_server import LiveServer
from tests.server.request_bodies import COMMIT, TABLE, TABLES, WIDER_SCHEMA, commit_of, create_body, properties
from trinitylake_ops import Lakehouse
from trinitylake_ops.server.routes import ROUTES

NAMESPACES = "/v1/main/namespaces"
NS = f"{NAMESPACES}/ns"
NO_NAMESPACE, NO_TABLE = "NoSuchNamespaceException", "NoSuchTableException"
BAD = (400, "BadRequestException")


@pytest.fixture
def table_server(server: LiveServer) -> LiveServer:
    """A server whose namespace ``ns`` has the table ``t``."""
    assert server.request("POST", NAMESPACES, {"namespace": ["ns"], "properties": {"a": "1"}}).status == 200
    assert server.request("POST", TABLES, create_body()).status == 200
    return server


def test_configuration_lists_implemented_endpoints(server: LiveServer) -> None:
    config = server.request("GET", "/v1/config").document
    assert config["overrides"] == {"prefix": "main"}
    assert config["idempotency-key-lifetime"] == "PT30M"
    advertised = {tuple(endpoint.split()) for endpoint in config["endpoints"]}
    assert advertised == {(route.method, route.template) for route in ROUTES if route.is_documented}
    assert ("POST", "/v1/{prefix}/transactions/commit") in advertised
    assert not any("register-view" in path for _, path in advertised)


def test_namespace_requests(server: LiveServer) -> None:
    create_response = server.request("POST", NAMESPACES, {"namespace": ["ns"], "properties": {"a": "1", "b": "2"}})
    assert create_response.document == {"namespace": ["ns"], "properties": {"a": "1", "b": "2"}}
    assert server.request("POST", NAMESPACES, {"namespace": ["ns"]}).error == (409, "AlreadyExistsException")
    assert server.request("GET", NAMESPACES).document["namespaces"] == [["ns"]]
    assert server.request("GET", f"{NAMESPACES}?parent=ns").document["namespaces"] == []
    assert server.request("GET", NS).document == create_response.document
    exists = server.request("HEAD", NS)
    assert (exists.status, exists.body) == (204, b"")
    changed = server.request("POST", f"{NS}/properties", {"removals": ["a", "x"], "updates": {"c": "3"}})
    assert changed.document == {"removed": ["a"], "updated": ["c"], "missing": ["x"]}
    assert server.request("GET", NS).document["properties"] == {"b": "2", "c": "3"}
    conflicting = server.request("POST", f"{NS}/properties", {"removals": ["b"], "updates": {"b": "3"}})
    assert conflicting.error == (422, "UnprocessableEntityException")
    server.request("POST", TABLES, create_body())
    assert server.request("DELETE", NS).error == (409, "NamespaceNotEmptyException")
    assert server.request("DELETE", TABLE).status == 204
    assert server.request("DELETE", NS).status == 204
    assert server.request("HEAD", NS).status == 404


def test_missing_namespace_gets_404(server: LiveServer) -> None:
    missing_namespace = f"{NAMESPACES}/none"
    for method, path, body in (
        ("GET", missing_namespace, None),
        ("DELETE", missing_namespace, None),
        ("GET", f"{NAMESPACES}?parent=none", None),
        ("POST", f"{missing_namespace}/properties", {"updates": {"a": "1"}}),
        ("GET", f"{missing_namespace}/tables", None),
        ("POST", f"{missing_namespace}/tables", create_body()),
        ("POST", f"{missing_namespace}/tables", create_body(**{"stage-create": True})),
        ("GET", f"{missing_namespace}/views", None),
    ):
        assert server.request(method, path, body).error == (404, NO_NAMESPACE), (method, path)


def test_nested_namespaces_are_rejected(server: LiveServer) -> None:
    assert server.request("GET", f"{NAMESPACES}/a%1Fb").error == (404, NO_NAMESPACE)
    assert server.request("GET", f"{NAMESPACES}?parent=a%1Fb").error == (404, NO_NAMESPACE)
    response = server.request("POST", NAMESPACES, {"namespace": ["a", "b"]})
    assert response.error == BAD
    assert "one level" in response.document["error"]["message"]


def test_metadata_table_name_is_reported_as_missing_table(table_server: LiveServer) -> None:
    """Java clients request ``ns.t.snapshots`` first, and would stop if the error reported a missing namespace."""
    for method in ("GET", "HEAD", "POST"):
        body = commit_of(properties(a="1")) if method == "POST" else None
        response = table_server.request(method, f"{NAMESPACES}/ns%1Ft/tables/snapshots", body)
        assert response.status == 404
        assert method == "HEAD" or response.error == (404, "NoSuchTableException")


def test_lists_are_paginated(server: LiveServer, lake: Lakehouse) -> None:
    names = sorted(f"n{number}" for number in range(7))
    with lake.transaction() as txn:
        for name in names:
            txn.create_namespace(name)
    listed_names, token, n_pages = [], "", 0
    while token is not None:
        page = server.request("GET", f"{NAMESPACES}?pageSize=3&pageToken={token}").document
        listed_names += [name for (name,) in page["namespaces"]]
        token, n_pages = page.get("next-page-token"), n_pages + 1
    assert (listed_names, n_pages) == (names, 3)
    assert len(server.request("GET", f"{NAMESPACES}?pageSize=3").document["namespaces"]) == 7  # no token was sent
    for invalid_query in ("pageToken=%00", "pageToken=!", "pageToken=&pageSize=0", "pageToken=&pageSize=x"):
        assert server.request("GET", f"{NAMESPACES}?{invalid_query}").error == BAD


def test_table_is_created_loaded_and_dropped(table_server: LiveServer, lake: Lakehouse) -> None:
    assert table_server.request("POST", TABLES, create_body()).error == (409, "AlreadyExistsException")
    assert table_server.request("GET", TABLES).document["identifiers"] == [{"namespace": ["ns"], "name": "t"}]
    loaded = table_server.request("GET", TABLE)
    assert loaded.document["metadata-location"].startswith(loaded.document["metadata"]["location"])
    assert loaded.document["metadata"]["properties"]["gc.enabled"] == "false"
    assert table_server.request("HEAD", TABLE).status == 204
    assert table_server.request("DELETE", f"{TABLE}?purgeRequested=perhaps").error == BAD
    assert table_server.request("DELETE", f"{TABLE}?purgeRequested=true").status == 204
    assert table_server.request("HEAD", TABLE).status == 404
    assert table_server.request("DELETE", TABLE).error == (404, NO_TABLE)
    assert table_server.request("GET", TABLE).error == (404, NO_TABLE)
    assert table_server.request("POST", TABLE, commit_of(properties(a="1"))).error == (404, NO_TABLE)
    assert lake.snapshot(lake.latest_version() - 1).has_table("ns", "t")


def test_matching_etag_gets_304(table_server: LiveServer) -> None:
    loaded = table_server.request("GET", TABLE)
    etag = loaded.headers["etag"]
    assert table_server.request("GET", TABLE, headers={"If-None-Match": etag}).status == 304
    assert table_server.request("GET", TABLE, headers={"If-None-Match": f'"other", W/{etag}'}).body == b""
    refs = table_server.request("GET", f"{TABLE}?snapshots=refs", headers={"If-None-Match": etag})
    assert (refs.status, refs.headers["etag"] != etag) == (200, True)
    committed = table_server.request("POST", TABLE, commit_of(properties(a="1")))
    assert committed.headers["etag"] != etag
    repeated = table_server.request("GET", TABLE, headers={"If-None-Match": etag})
    assert (repeated.status, repeated.headers["etag"]) == (200, committed.headers["etag"])
    assert table_server.request("GET", f"{TABLE}?snapshots=some").error == BAD


def test_tables_are_renamed(table_server: LiveServer) -> None:
    def rename(source: str, target: str, namespace: str = "ns") -> Any:
        body = {
            "source": {"namespace": ["ns"], "name": source},
            "destination": {"namespace": [namespace], "name": target},
        }
        return table_server.request("POST", "/v1/main/tables/rename", body)

    assert rename("t", "u").status == 204
    assert rename("t", "u").error == (404, NO_TABLE)
    table_server.request("POST", TABLES, create_body())
    assert rename("t", "u").error == (409, "AlreadyExistsException")
    assert rename("t", "v", "none").error == (404, NO_NAMESPACE)
    assert table_server.request("POST", "/v1/main/tables/rename", {"source": {}}).error == BAD


def test_names_may_contain_special_characters(server: LiveServer) -> None:
    name = "a/b%2F.ü?\"'#"
    assert server.request("POST", NAMESPACES, {"namespace": [name]}).status == 200
    path = f"{NAMESPACES}/{quote(name, safe='')}"
    assert server.request("GET", path).document["namespace"] == [name]
    assert server.request("POST", f"{path}/tables", create_body(name)).status == 200
    assert server.request("HEAD", f"{path}/tables/{quote(name, safe='')}").status == 204
    assert server.request("GET", f"{NAMESPACES}/%ff").error == BAD
    assert server.request("GET", f"{NAMESPACES}/{'x' * 10_001}").error == BAD


def test_missing_metadata_file_is_not_registered(table_server: LiveServer, lake: Lakehouse) -> None:
    lake.storage.create("no.metadata.json", b"{")
    before = lake.latest_version()
    for location in ("x", f"{lake.root}no.metadata.json", f"{lake.root}none.metadata.json"):
        body = {"name": "r", "metadata-location": location}
        assert table_server.request("POST", f"{NS}/register", body).error == BAD, location
    assert lake.latest_version() == before


def test_client_reports_are_accepted(table_server: LiveServer) -> None:
    assert table_server.request("POST", f"{TABLE}/metrics", {"report-type": "scan-report"}).status == 204
    assert table_server.request("POST", f"{TABLES}/none/metrics", {"report-type": "scan-report"}).error == (
        404,
        NO_TABLE,
    )
    assert table_server.request("POST", f"{TABLE}/metrics", b"[]").error == BAD


INVALID_COMMITS: list[Any] = [
    b"",
    b"{",
    b"[1]",
    b'"text"',
    b"\xff",
    b"[" * 10_000,
    {"updates": [{"action": "set-snapshot-ref", "ref-name": "m", "type": "tag", "snapshot-id": 2**63}]},
    b'{"updates": [], "requirements": [], "x": NaN}',
    {"requirements": [{"type": "assert-nothing"}], "updates": []},
    {"updates": [{"action": "paint-it-black"}]},
    {"updates": [{"action": "set-current-schema", "schema-id": 7}]},
    {"updates": [{"action": "set-current-schema", "schema-id": -1}]},
    {"updates": [{"action": "add-schema", "schema": {"type": "struct", "fields": [{"id": 1}]}}]},
    {"updates": [{"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": 5}]},
    {"updates": [{"action": "remove-snapshots", "snapshot-ids": [5]}]},
    {"updates": [{"action": "upgrade-format-version", "format-version": 3}]},
    {"updates": [{"action": "upgrade-format-version", "format-version": 1}]},
    {"updates": [{"action": "assign-uuid", "uuid": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"}]},
    {"updates": [properties(**{"write.data.path": "file:///etc/"})]},
    {"updates": [properties(**{"write.py-location-provider.impl": "os.system"})]},
    {"identifier": {"namespace": ["ns"], "name": "another"}, "updates": []},
]


def test_invalid_commits_change_nothing(table_server: LiveServer, lake: Lakehouse) -> None:
    before = lake.latest_version()
    for body in INVALID_COMMITS:
        assert table_server.request("POST", TABLE, body).error == BAD, body
    assert lake.latest_version() == before


INVALID_TABLES: list[dict[str, Any]] = [
    {"schema": {"type": "struct", "fields": [{"id": 1, "name": "a", "type": "fixed[-1]", "required": True}]}},
    {"schema": {"type": "struct", "fields": [{"id": 1, "name": "a", "type": "no", "required": True}]}},
    {
        "schema": {
            "type": "struct",
            "fields": [{"id": 1, "name": "a", "type": "decimal(9, 99999999)", "required": True}],
        }
    },
    {"properties": {"format-version": "3"}},
    {"properties": {"format-version": "x"}},
    {"properties": {"write.metadata.path": "file:///etc/"}},
    {"properties": {"encryption.kms-impl": "evil"}},
    {"name": ""},
    {"name": "x" * 10_000},
    {"partition-spec": {"fields": [{"source-id": 9, "field-id": 1000, "transform": "identity", "name": "p"}]}},
]
_TRANSFORMS = ("", "paint", "day", "hour", "bucket[0]", "truncate[0]", "bucket[2147483648]", "x" * 100_000)
INVALID_PARTITION_FIELDS = [
    {"source-id": 1, "field-id": 1000, "transform": transform, "name": "p"} for transform in _TRANSFORMS
]
INVALID_PARTITION_FIELDS.append({"source-id": 1, "field-id": 1000, "transform": "identity", "name": ""})


def test_unwritable_partition_specs_and_sort_orders_are_rejected(table_server: LiveServer, lake: Lakehouse) -> None:
    before = lake.latest_version()
    for field in INVALID_PARTITION_FIELDS:
        spec = {"spec-id": 0, "fields": [field]}
        assert table_server.request("POST", TABLES, create_body("u", **{"partition-spec": spec})).error == BAD, field
        assert table_server.request("POST", TABLE, commit_of({"action": "add-spec", "spec": spec})).error == BAD, field
        if field["name"]:
            order = {"order-id": 1, "fields": [{**field, "direction": "asc", "null-order": "nulls-first"}]}
            assert table_server.request("POST", TABLES, create_body("u", **{"write-order": order})).error == BAD, field
            added = {"action": "add-sort-order", "sort-order": order}
            assert table_server.request("POST", TABLE, commit_of(added)).error == BAD, field
    assert lake.latest_version() == before
    fields = [
        {"source-id": 1, "field-id": 1000 + index, "transform": transform, "name": f"p{index}"}
        for index, transform in enumerate(("void", "identity", "bucket[2147483647]", "truncate[3]"))
    ]
    for field in fields:
        spec = {"spec-id": 0, "fields": [field]}
        assert table_server.request("POST", TABLE, commit_of({"action": "add-spec", "spec": spec})).status == 200, field


def test_invalid_tables_are_not_created(table_server: LiveServer, lake: Lakehouse) -> None:
    before = lake.latest_version()
    for fields in INVALID_TABLES:
        assert table_server.request("POST", TABLES, create_body(**{"name": "u", **fields})).error == BAD, fields
    assert lake.latest_version() == before


def test_ids_are_assigned_as_in_iceberg_reference_server(table_server: LiveServer) -> None:
    """Existing schemas and orders are reused, and new ones get the next id, whatever ids a client sends."""
    added = [
        {"action": "add-schema", "schema": {**WIDER_SCHEMA, "schema-id": 7}},
        {"action": "set-current-schema", "schema-id": -1},
    ]
    order = {
        "order-id": 9,
        "fields": [{"transform": "identity", "source-id": 1, "direction": "asc", "null-order": "nulls-first"}],
    }
    ordered = [
        {"action": "add-sort-order", "sort-order": order},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    ]
    for _ in range(2):
        metadata = table_server.request("POST", TABLE, commit_of(*added, *ordered)).document["metadata"]
        assert [schema["schema-id"] for schema in metadata["schemas"]] == [0, 1]
        assert [order["order-id"] for order in metadata["sort-orders"]] == [0, 1]
        assert (metadata["current-schema-id"], metadata["default-sort-order-id"]) == (1, 1)
    switch_back = commit_of(
        {"action": "set-current-schema", "schema-id": 0}, {"action": "add-schema", "schema": WIDER_SCHEMA}
    )
    assert table_server.request("POST", TABLE, switch_back).document["metadata"]["current-schema-id"] == 0


def test_managed_properties_and_location_are_not_changed(table_server: LiveServer) -> None:
    before = table_server.request("GET", TABLE).document["metadata"]
    set_location = {"action": "set-location", "location": "file:///other"}
    remove_properties = {"action": "remove-properties", "removals": ["gc.enabled", "missing"]}
    body = commit_of(set_location, remove_properties, properties(**{"gc.enabled": "true", "a": "1"}))
    after = table_server.request("POST", TABLE, body).document["metadata"]
    assert after["location"] == before["location"]
    assert after["properties"] == {**before["properties"], "a": "1"}


def test_location_of_new_table_is_chosen_by_lakehouse(table_server: LiveServer, lake: Lakehouse) -> None:
    """Sail sends a location for each new table, even a relative one."""
    for name, location in (("u", "file:///other/t"), ("v", "spark-warehouse/v")):
        create_response = table_server.request("POST", TABLES, create_body(name, location=location)).document[
            "metadata"
        ]
        assert create_response["location"].startswith(f"{lake.root}tables/")


def test_unknown_paths_and_methods_are_rejected(server: LiveServer) -> None:
    assert server.request("GET", "/v2").error[0] == 404
    response = server.request("GET", "/v1/v1/config")
    assert response.error[0] == 404
    assert "remove /v1" in response.document["error"]["message"]
    assert server.request("GET", "/v1/main/namespaces/ns/tables/t/play").error[0] == 404
    response = server.request("PUT", NAMESPACES, {})
    assert (response.error[0], response.headers["allow"]) == (405, "GET, POST")
    assert server.request("POST", COMMIT, {"table-changes": []}).error == BAD
