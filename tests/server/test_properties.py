"""Properties that clients could use as connection settings are rejected, and omitted from all responses."""

from __future__ import annotations

import ast
import importlib.util
import tracemalloc
from pathlib import Path
from typing import Any

import pyiceberg.catalog.rest
import pyiceberg.io
import pyiceberg.io.fsspec
import pytest

from tests.iceberg.hostile import change_metadata
from tests.iceberg.test_catalog import SCHEMA as ICEBERG_SCHEMA
from tests.iceberg.test_catalog import rows
from tests.lakes import Lakes
from tests.server.live_server import LiveServer, serving, settings_for
from tests.server.request_bodies import COMMIT, TABLE, TABLES, commit_of, create_body, properties
from tests.server.test_views import VIEW, VIEWS, version, view
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.format import limits
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.limits import MAX_PROPERTIES_BYTES
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.properties import check_settable, invalid_properties, is_allowed, names_code
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.transaction.change_set import VIEW_PREFIX

NS = "/v1/main/namespaces/ns"
BAD = (400, "BadRequestException")
#: Connection settings of pyiceberg, other clients and libraries, in several spellings.
CONNECTION_SETTINGS = (
    "s3.proxy-uri", "s3.endpoint", "s3.access-key-id", "s3.role-arn", "s3.connect-timeout", "s3.resolve-region",
    "s3.force-virtual-addressing", "s3.remote-signing-enabled", "gcs.service.host", "gcs.oauth2.token",
    "adls.account-host", "adls.connection-string", "hf.endpoint", "hdfs.host", "token", "uri", "credential",
    "warehouse", "location", "auth.manager", "client.region", "rest.sigv4-enabled", "rest-page-size",
    "header.Authorization", "oauth2-server-uri", "buffer-size", "DEFAULT_SCHEME", "DEFAULT_NETLOC", "fs.s3a.endpoint",
    "hadoop.security.x", "spark.hadoop.fs.x", "hive.metastore.uris", "aws_access_key_id", "google_service_account",
    "endpoint_url", "accessKeyId", "account_key", "storage.endpoint", "root", "ecs.s3.endpoint", "other-store.endpoint",
    "allow_invalid_certificates", "ALLOW_HTTP", "root_certificates", "no_system_certificates", "use_emulator",
    "skip_signature", "sse_customer_key_base64", "virtual_hosted_style_request", "bucket_name", "max_retries",
    "S3.Endpoint", " s3.endpoint", "", " ", "metadata_location", "metadata-location",
    "WRITE.DATA.PATH", " write.data.path", "write.data.path ", "write.data.path\u200b", "\uff57rite.data.path",
    "owner\n",
)  # fmt: skip
#: Properties that Iceberg, engines and users set.
ALLOWED_PROPERTIES = {
    "owner": "me",
    "team": "sales",
    "comment": "rows",
    "my.company.key": "1",
    "cost-center": "7",
    "primary_key": "id",
    "created-at": "2030",
    "engine_version": "Spark 3.5",
    "write.format.default": "parquet",
    "write.metadata.metrics.column.token": "none",
    "commit.retry.num-retries": "3",
    "history.expire.min-snapshots-to-keep": "2",
    "read.split.target-size": "1",
    "user.s3.endpoint": "described in the wiki",
}
STORED_PROPERTIES = {"s3.endpoint": "http://example.org", "token": "x", "owner": "me"}


@pytest.fixture
def table_server(server: LiveServer) -> LiveServer:
    assert server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]}).status == 200
    assert server.request("POST", TABLES, create_body()).status == 200
    assert server.request("POST", VIEWS, view()).status == 200
    return server


def properties_at(server: LiveServer, path: str) -> Any:
    """Return the properties in a response about a table or a view."""
    return server.request("GET", path).document["metadata"]["properties"]


@pytest.mark.parametrize("module", [pyiceberg.io, pyiceberg.io.fsspec, pyiceberg.catalog.rest])
def test_settings_of_pyiceberg_are_not_allowed(module: Any) -> None:
    settings = {
        value
        for name, value in vars(module).items()
        if name.isupper()
        and isinstance(value, str)
        and any(separator in value for separator in (".", "-"))
        and "/" not in value
    } - {pyiceberg.catalog.rest.ACCESS_DELEGATION_DEFAULT, "utf-8"}
    assert {name for name in settings if is_allowed(name)} == set()


def test_settings_of_object_store_are_not_allowed() -> None:
    """Polars passes each property without a dot to ``object_store``, whose settings obstore declares."""
    spec = importlib.util.find_spec("obstore")
    assert spec is not None
    assert spec.origin is not None
    classes = {
        node.name: {
            statement.target.id
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }
        for file in (Path(spec.origin).parent / "_store").glob("*.pyi")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    }
    settings = set().union(*classes.values())
    assert settings >= {"allow_invalid_certificates", "account_name", "bucket", "skip_signature"}
    assert {name for name in settings if is_allowed(name)} == set()


def test_allowed_property_names() -> None:
    assert [name for name in CONNECTION_SETTINGS if is_allowed(name)] == []
    assert [name for name in ALLOWED_PROPERTIES if not is_allowed(name)] == []


@pytest.mark.parametrize(
    "name",
    ["s3.proxy-uri", "token", "gcs.service.host", "header.Authorization", "endpoint_url", "user." + "a." * 50_000],
    ids=lambda name: name[:20],
)
def test_connection_settings_are_rejected_in_all_requests(table_server: LiveServer, lake: Lakehouse, name: str) -> None:
    before, setting = lake.latest_version(), {name: "http://example.org"}
    change = commit_of(properties(**setting))
    requests = [
        (TABLE, change),
        (COMMIT, {"table-changes": [change]}),
        (TABLES, create_body("u", properties=setting)),
        (TABLES, create_body("u", properties=setting, **{"stage-create": True})),
        ("/v1/main/namespaces", {"namespace": ["new"], "properties": setting}),
        (f"{NS}/properties", {"updates": setting}),
        (VIEWS, view("w", properties=setting)),
        (VIEW, {"updates": [properties(**setting)]}),
    ]
    for path, body in requests:
        assert table_server.request("POST", path, body).error == BAD, path
    assert lake.latest_version() == before


def test_huge_property_name_is_rejected_quickly() -> None:
    """Splitting such a name into words would take a gigabyte, and block all other threads for seconds."""
    name = "a." * 4_000_000
    tracemalloc.start()
    try:
        assert not is_allowed(name)
        assert not names_code(f"{name}impl")
        assert invalid_properties({f"write.{name}-bytes": "x"}) == ()
        with pytest.raises(InvalidDefinitionError):
            check_settable([name])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32 << 20


def test_properties_are_bounded(table_server: LiveServer, lake: Lakehouse) -> None:
    """The limit applies to namespaces, tables and lakehouses, whichever API sets the properties."""
    large = {"a": "x" * (MAX_PROPERTIES_BYTES - 10), "b": "y" * 20}
    before = lake.latest_version()
    requests: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/main/namespaces", {"namespace": ["other"], "properties": large}),
        ("/v1/main/namespaces/ns/properties", {"updates": large}),
        (TABLES, create_body("u", properties=large)),
        (TABLE, commit_of(properties(**large))),
    )
    for path, body in requests:
        assert table_server.request("POST", path, body).status == 400, path
    with pytest.raises(InvalidDefinitionError), lake.transaction() as txn:
        txn.create_namespace("other", large)
    with pytest.raises(InvalidDefinitionError), lake.transaction() as txn:
        txn.alter_namespace("ns", large)
    with pytest.raises(InvalidDefinitionError), lake.transaction() as txn:
        txn.create_table("ns", "v", TableDef(properties=large))
    with pytest.raises(InvalidDefinitionError):
        lake.alter_definition(properties=large)
    with pytest.raises(InvalidDefinitionError):
        Lakehouse.create("memory://large-properties/", properties=large)
    assert lake.latest_version() == before


def test_properties_above_bound_can_be_removed(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs may have written such properties."""
    with monkeypatch.context() as patched, lake.transaction() as txn:
        patched.setattr(limits, "MAX_PROPERTIES_BYTES", 2**40)
        txn.create_namespace("ns", {"a": "x" * MAX_PROPERTIES_BYTES, "b": "y" * MAX_PROPERTIES_BYTES})
    with lake.transaction() as txn:
        txn.alter_namespace("ns", {"a": "x" * MAX_PROPERTIES_BYTES})
    with pytest.raises(InvalidDefinitionError), lake.transaction() as txn:
        txn.alter_namespace("ns", {"a": "z" * MAX_PROPERTIES_BYTES})


def test_connection_settings_are_rejected_by_catalog(lake: Lakehouse) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    with pytest.raises(InvalidDefinitionError):
        catalog.create_table("ns.t", ICEBERG_SCHEMA, properties={"s3.endpoint": "x"})
    table = catalog.create_table("ns.t", ICEBERG_SCHEMA)
    with pytest.raises(InvalidDefinitionError), table.transaction() as change:
        change.set_properties({"s3.endpoint": "x"})
    with pytest.raises(InvalidDefinitionError):
        catalog.update_namespace_properties("ns", updates={"s3.endpoint": "x"})
    with pytest.raises(InvalidDefinitionError):
        catalog.create_namespace("other", {"s3.endpoint": "x"})


def test_properties_of_iceberg_and_users_are_kept(table_server: LiveServer) -> None:
    assert table_server.request("POST", TABLE, commit_of(properties(**ALLOWED_PROPERTIES))).status == 200
    assert ALLOWED_PROPERTIES.items() <= properties_at(table_server, TABLE).items()
    user_properties = {name: value for name, value in ALLOWED_PROPERTIES.items() if not name.startswith("write.")}
    assert table_server.request("POST", f"{NS}/properties", {"updates": user_properties}).status == 200
    assert table_server.request("GET", NS).document["properties"] == user_properties
    assert table_server.request("POST", VIEW, {"updates": [properties(**user_properties)]}).status == 200
    assert properties_at(table_server, VIEW) == {"a": "1", **user_properties}


def test_stored_connection_settings_are_omitted_from_responses(
    table_server: LiveServer, lake: Lakehouse, lakes: Lakes
) -> None:
    change_metadata(lake, lambda content: content["properties"].update(STORED_PROPERTIES))
    latest = lake.latest_version()
    with lake.transaction() as txn:
        definition = txn.namespace("ns")
        stored = definition.properties[f"{VIEW_PREFIX}v"].replace(
            '"properties":{"a":"1"}', '"properties":{"token":"x"}'
        )
        txn.alter_namespace("ns", {**STORED_PROPERTIES, f"{VIEW_PREFIX}v": stored})
    with serving(settings_for(lake)) as new_server:
        for path in (TABLE, f"/v1/v{latest}/namespaces/ns/tables/t"):
            document = new_server.request(
                "GET", path, headers={"X-Iceberg-Access-Delegation": "vended-credentials"}
            ).document
            assert document["config"] == {}
            assert "s3.endpoint" not in document["metadata"]["properties"], path
            assert "token" not in document["metadata"]["properties"], path
            assert document["metadata"]["properties"]["owner"] == "me"
        assert new_server.request("GET", NS).document["properties"] == {"owner": "me"}
        assert properties_at(new_server, VIEW) == {}
        committed = new_server.request("POST", TABLE, commit_of(properties(a="1"))).document["metadata"]["properties"]
        assert "token" not in committed
        assert committed["owner"] == "me"
        assert new_server.request(
            "POST", VIEW, {"updates": [{"action": "add-view-version", "view-version": version()}]}
        )
        assert properties_at(new_server, VIEW) == {}


def test_registered_table_brings_no_connection_settings(lakes: Lakes) -> None:
    lake, other = lakes.local(), lakes.local("other")
    catalog_at(lake).create_namespace("ns")
    catalog_at(other).create_namespace("ns")
    catalog_at(other).create_table("ns.t", ICEBERG_SCHEMA).append(rows(1))
    stored_properties = {**STORED_PROPERTIES, "write.data.path": "s3://example/data"}
    path = change_metadata(other, lambda content: content["properties"].update(stored_properties))
    options = StorageOptions({**lake.storage_options, "allowed_roots": other.root})
    with serving(settings_for(Lakehouse.open(lake.root, options))) as server:
        body = {"name": "external", "metadata-location": f"{other.root}{path}"}
        registered = server.request("POST", f"{NS}/register", body)
        assert registered.status == 200, registered.body
        loaded = server.request("GET", f"{TABLES}/external")
        for response in (registered, loaded):
            returned_properties = response.document["metadata"]["properties"]
            assert not {"s3.endpoint", "token", "write.data.path"} & returned_properties.keys()
            assert returned_properties["owner"] == "me"


def test_verify_reports_stored_connection_settings(lake: Lakehouse) -> None:
    catalog_at(lake).create_namespace("ns")
    catalog_at(lake).create_table("ns.t", ICEBERG_SCHEMA)
    path = change_metadata(lake, lambda content: content["properties"].update(STORED_PROPERTIES))
    (finding,) = operations.verify(lake).findings
    assert (finding.code, finding.path, finding.severity) == ("table-names-connection", path, "error")
