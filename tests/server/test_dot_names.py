"""The names ``.`` and ``..``, which clients remove from URL paths: new ones are rejected, existing ones can be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from click.testing import CliRunner

from tests.server.live_server import LiveServer
from tests.server.request_bodies import SCHEMA, TABLES, commit_of, create_body
from tests.server.test_views import view
from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.errors import InvalidNameError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.write.plan import plan_write

DOT_NAMES = (".", "..")
BAD = (400, "BadRequestException")
ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})
NAMESPACES = "/v1/main/namespaces"
#: Names that look like path segments or their encodings, but are valid in every URL.
VALID_NAMES = (
    "...",
    ".a",
    "a.",
    "a..",
    "%2e",
    "%2E%2e",
    "%252e",
    "a/..",
    "../a",
    "a%2Fb",
    "a+b",
    "a\\b",
    "~",
    "null",
    "main",
)


@pytest.fixture
def table(lake: Lakehouse) -> TableDef:
    """The definition of ``ns.t``, which has two rows."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema).append(ROWS)
    return lake.snapshot().table("ns", "t")


def rename_to_dot_name(lake: Lakehouse, name: str) -> None:
    """Rename ``ns.t`` and its namespace to this name, as earlier releases allowed."""
    snapshot = lake.snapshot()
    entries = {
        key: snapshot.entry(key) for key in (snapshot.keys.namespace_key("ns"), snapshot.keys.table_key("ns", "t"))
    }
    with lake.transaction() as txn:
        for key, new_key in zip(entries, (txn.keys.namespace_key(name), txn.keys.table_key(name, name)), strict=True):
            txn.restore_entry(new_key, entries[key])
        txn.drop_namespace("ns", cascade=True)


@pytest.mark.parametrize("name", DOT_NAMES)
def test_engine_rejects_dot_names(lake: Lakehouse, table: TableDef, name: str) -> None:
    catalog, before = catalog_at(lake), lake.latest_version()
    staged = lake.stage_definition("ns", name, TableDef(schema=table.schema, id=""))
    operations: tuple[Callable[[], Any], ...] = (
        lambda: _in_transaction(lake, "create_namespace", name),
        lambda: _in_transaction(lake, "create_table", "ns", name, table),
        lambda: _in_transaction(lake, "put_staged", [staged]),
        lambda: catalog.create_namespace((name,)),
        lambda: catalog.create_table(("ns", name), ROWS.schema),
        lambda: catalog.create_table_transaction(("ns", name), ROWS.schema),
        lambda: catalog.rename_table(("ns", "t"), ("ns", name)),
        lambda: plan_write(lake, "ns", name, ROWS.schema),
        lambda: plan_write(lake, name, "t", ROWS.schema),
    )
    for operation in operations:
        with pytest.raises(InvalidNameError):
            operation()
    failed = CliRunner().invoke(trinitylake, ["--root", lake.root, "create-namespace", name])
    assert isinstance(failed.exception, InvalidNameError)
    assert lake.latest_version() == before


def _in_transaction(lake: Lakehouse, method: str, *arguments: Any) -> None:
    with lake.transaction() as txn:
        getattr(txn, method)(*arguments)


@pytest.mark.parametrize("name", DOT_NAMES)
def test_server_rejects_dot_names(server: LiveServer, lake: Lakehouse, table: TableDef, name: str) -> None:
    assert server.request("POST", f"{NAMESPACES}/ns/views", view()).status == 200
    before = lake.latest_version()
    identifiers = {"source": {"namespace": ["ns"], "name": "t"}, "destination": {"namespace": ["ns"], "name": name}}
    view_identifiers = {**identifiers, "source": {"namespace": ["ns"], "name": "v"}}
    new_table = commit_of(
        {"action": "assign-uuid", "uuid": "0b9e5fd2-7a2c-4a66-a3c6-7ae5f6a1f3c1"},
        {"action": "upgrade-format-version", "format-version": 2},
        {"action": "add-schema", "schema": SCHEMA, "last-column-id": 1},
        {"action": "set-current-schema", "schema-id": -1},
        requirements=({"type": "assert-create"},),
        name=name,
    )
    for path, body in (
        (NAMESPACES, {"namespace": [name]}),
        (TABLES, create_body(name)),
        (TABLES, create_body(name, **{"stage-create": True})),
        (f"{NAMESPACES}/ns/views", view(name)),
        ("/v1/main/tables/rename", identifiers),
        ("/v1/main/views/rename", view_identifiers),
        ("/v1/main/transactions/commit", {"table-changes": [new_table]}),
    ):
        assert server.request("POST", path, body).error == BAD, (path, body)
    assert lake.latest_version() == before


@pytest.mark.parametrize("name", DOT_NAMES)
def test_existing_dot_names_can_be_read_renamed_and_dropped(
    server: LiveServer, lake: Lakehouse, table: TableDef, name: str
) -> None:
    rename_to_dot_name(lake, name)
    catalog, path = catalog_at(lake), f"{NAMESPACES}/{name}/tables/{name}"
    assert catalog.load_table((name, name)).scan().to_arrow().num_rows == 2
    catalog.load_table((name, name)).append(ROWS)
    plan_write(lake, name, name, ROWS.schema)
    loaded = server.request("GET", path)  # this client does not normalize the path
    assert loaded.document["metadata"]["table-uuid"] == table.format_properties["table_uuid"]
    commit = commit_of({"action": "set-properties", "updates": {"a": "1"}})
    assert server.request("POST", path, {**commit, "identifier": {"namespace": [name], "name": name}}).status == 200
    body = {"source": {"namespace": [name], "name": name}, "destination": {"namespace": [name], "name": "t"}}
    assert server.request("POST", "/v1/main/tables/rename", body).status == 204
    assert server.request("DELETE", f"{NAMESPACES}/{name}/tables/t").status == 204
    assert server.request("DELETE", f"{NAMESPACES}/{name}").status == 204
    assert lake.snapshot().namespaces() == []


def test_similar_names_are_accepted(server: LiveServer, lake: Lakehouse) -> None:
    for name in VALID_NAMES:
        namespace = f"{NAMESPACES}/{quote(name, safe='')}"
        table = f"{namespace}/tables/{quote(name, safe='')}"
        assert server.request("POST", NAMESPACES, {"namespace": [name]}).status == 200, name
        assert server.request("POST", f"{namespace}/tables", create_body(name)).status == 200, name
        assert server.request("GET", table).status == 200, name
        assert lake.snapshot().tables(name) == [name]
        assert server.request("DELETE", table).status == 204, name
        assert server.request("DELETE", namespace).status == 204, name


def test_names_that_the_format_forbids_are_rejected(server: LiveServer, lake: Lakehouse) -> None:
    before = lake.latest_version()
    for name in ("", " ", "a b", "a\tb", "\x00", "\x1f", "a\x1fb", "\x7f", "\ud800"):
        assert server.request("POST", NAMESPACES, {"namespace": [name]}).error == BAD, name
    assert lake.latest_version() == before


def test_empty_path_segment_is_rejected(server: LiveServer, lake: Lakehouse, table: TableDef) -> None:
    """A request with an empty name changes nothing, whatever the method."""
    before = lake.latest_version()
    for path in ("//", "/ns//", "/ns//tables", "//tables", "/ns/tables//", "/ns/tables//plan"):
        for method in ("POST", "DELETE"):
            assert 400 <= server.request(method, f"{NAMESPACES}{path}", {}).status < 500, (method, path)
    assert lake.latest_version() == before
