"""Warehouses: the latest version, earlier versions by number, time or export, and several lakehouses per server."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest
from pyiceberg.exceptions import ForbiddenError, NoSuchNamespaceError

from tests.clock import ClockStorage
from tests.lakes import Lakes, allowing
from tests.operations.aging import LONG_MS
from tests.server.live_server import LiveServer, attach, duckdb_with_iceberg, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, commit_of, create_body, properties
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.server.settings import ONLY, read_lakehouses
from trinitylake_ops.server.warehouses import Warehouses
from trinitylake_ops.storage import Storage, StorageWrapper

ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})
UNKNOWN = (404, "NoSuchWarehouseException")


@pytest.fixture
def versioned_lake(lake: Lakehouse) -> Lakehouse:
    """A lakehouse whose table ``ns.t`` has 0, 2 and 4 rows in versions 2, 3 and 4. An export keeps version 3."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    operations.plan_export(lake, "before", "minimal", version=3).execute()
    table.append(ROWS)
    return lake


def n_rows(server: LiveServer, warehouse: str) -> int:
    return int(server.catalog(warehouse).load_table("ns.t").scan().to_arrow().num_rows)


def test_every_version_is_a_warehouse(versioned_lake: Lakehouse, server: LiveServer) -> None:
    timestamp = versioned_lake.snapshot(3).created_at
    counts = {"main": 4, "v2": 0, "v3": 2, f"at-{timestamp.isoformat()}": 2, "export-before": 2}
    assert {name: n_rows(server, name) for name in counts} == counts
    millis = int(timestamp.timestamp() * 1_000)
    for time in (millis, quote(timestamp.isoformat())):
        prefix = server.request("GET", f"/v1/config?warehouse=at-{time}").document["overrides"]["prefix"]
        assert prefix == "v3"  # so that the client uses the same version while it is connected
    with pytest.raises(NoSuchNamespaceError):
        server.catalog("v0").list_tables("ns")


def test_unknown_warehouses_get_404(versioned_lake: Lakehouse, server: LiveServer) -> None:
    for name in ("v99", "v-1", "w3", "export-none", "export-3", "%20", "Main", "%2e%2e"):
        assert server.request("GET", f"/v1/{name}/namespaces").error == UNKNOWN, name
    too_early = server.request("GET", "/v1/at-2001-02-03T04:05:06Z/namespaces")
    assert too_early.error == UNKNOWN
    assert "(2001-02-03 04:05:06 UTC); version 0 was created at" in too_early.document["error"]["message"]
    for name in ("at-", "at-yesterday"):
        assert server.request("GET", f"/v1/{name}/namespaces").error == (400, "BadRequestException")


def test_old_version_cannot_be_written(versioned_lake: Lakehouse, server: LiveServer) -> None:
    before = versioned_lake.latest_version()
    with pytest.raises(ForbiddenError, match="connect to warehouse main to write"):
        server.catalog("v3").load_table("ns.t").append(ROWS)
    requests = (
        ("POST", TABLES, create_body("u")),
        ("POST", TABLES, create_body("u", **{"stage-create": True})),
        ("POST", TABLE, commit_of(properties(a="1"))),
        ("DELETE", TABLE, None),
        ("POST", "/v1/main/namespaces", {"namespace": ["new"]}),
        ("DELETE", "/v1/main/namespaces/ns", None),
        ("POST", "/v1/main/transactions/commit", {"table-changes": [commit_of(properties(a="1"))]}),
        ("POST", "/v1/main/tables/rename", {}),
    )
    for warehouse in (
        "v3",
        "export-before",
        f"at-{int(versioned_lake.snapshot().created_at.timestamp() * 1_000) + 60_000}",
    ):
        for method, path, body in requests:
            response = server.request(method, path.replace("main", warehouse), body)
            assert response.error == (403, "ForbiddenException"), (warehouse, method, path)
    assert versioned_lake.latest_version() == before


def test_expired_version_gets_404(versioned_lake: Lakehouse, server: LiveServer) -> None:
    assert n_rows(server, "v2") == 0
    storage = ClockStorage(versioned_lake.storage, versioned_lake.storage.now_ms() + LONG_MS)
    later_lake = Lakehouse(storage, versioned_lake.storage_options)
    operations.plan_expiration(
        later_lake, RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    ).execute()
    response = server.request("GET", "/v1/v2/namespaces")
    assert response.error == UNKNOWN
    assert n_rows(server, "export-before") == 2


@pytest.mark.parametrize("level", ["minimal", "full"])
def test_external_export_is_read_at_its_root(
    versioned_lake: Lakehouse, server: LiveServer, tmp_path: Path, level: str
) -> None:
    root = f"file://{tmp_path}/other/"
    operations.plan_export(versioned_lake, "far", level, target=root).execute()
    for _ in range(2):  # responses are cached
        exported, latest = (server.catalog(name).load_table("ns.t") for name in ("export-far", "main"))
        assert exported.location().startswith(root)
        assert exported.metadata_location.startswith(root if level == "full" else versioned_lake.root)
        assert latest.location().startswith(versioned_lake.root)
        assert latest.metadata_location.startswith(versioned_lake.root)
        assert (n_rows(server, "export-far"), n_rows(server, "main")) == (4, 4)
    if level == "full":
        shutil.rmtree(versioned_lake.root.removeprefix("file://") + "tables")
        assert n_rows(server, "export-far") == 4


def test_several_lakehouses_in_one_server(lakes: Lakes, tmp_path: Path) -> None:
    north, south = lakes.local("north"), lakes.local("south")
    for lake, name in ((north, "n"), (south, "s")):
        with lake.transaction() as txn:
            txn.create_namespace(name)
    path = tmp_path / "lakehouses.yaml"
    path.write_text(
        f"lakehouses:\n  north: {{root: '{north.root}'}}\n"
        f"  south:\n    root: {south.root}\n    storage_options: {{fsync: 'false'}}\n    allowed_roots: ['file:///data/']\n"
    )
    lakehouses = read_lakehouses(path)
    assert lakehouses["south"].storage_options == {"fsync": "false", "allowed_roots": "file:///data/"}
    with serving(settings_for(north, lakehouses=lakehouses)) as server:
        assert server.catalog("north").list_namespaces() == [("n",)]
        assert server.catalog("north.main").list_namespaces() == [("n",)]
        assert server.catalog("south").list_namespaces() == [("s",)]
        assert server.catalog("south.v0").list_namespaces() == []
        server.catalog("south").create_namespace("new")
        assert server.request("GET", "/v1/config").error == UNKNOWN
        assert server.request("GET", "/v1/config?warehouse=west.main").error == UNKNOWN
        assert server.request("GET", "/v1/main/namespaces").error == UNKNOWN
        assert server.request("POST", "/v1/south.v0/namespaces", {"namespace": ["x"]}).error[0] == 403
    assert south.snapshot().namespaces() == ["new", "s"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "lakehouses: {}",
        "lakehouses: [a]",
        "others: {}",
        "lakehouses: {A: {root: /data}}",
        "lakehouses: {a.b: {root: /data}}",
        "lakehouses: {1: {root: /data}}",
        "lakehouses: {a: /data}",
        "lakehouses: {a: {}}",
        "lakehouses: {a: {root: 5}}",
        "lakehouses: {a: {root: /data, secret: x}}",
        "lakehouses: {a: {root: /data, storage_options: {fsync: false}}}",
        "lakehouses: {a: {root: /data, allowed_roots: /other}}",
        "lakehouses: {a: {root: !!python/object/apply:os.system [echo]}}",
        "lakehouses: {a",
        "lakehouses: " + "[" * 1_000,
    ],
    ids=range(17),
)
def test_invalid_lakehouse_files_are_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lakehouses.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError):
        read_lakehouses(path)


def test_missing_lakehouse_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        read_lakehouses(tmp_path / "none.yaml")
    (tmp_path / "large.yaml").write_text("#" * 2_000_000)
    with pytest.raises(InvalidInputError):
        read_lakehouses(tmp_path / "large.yaml")


class S3NamedStorage(StorageWrapper):
    """A storage whose root is an S3 URI."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.root = "s3://bucket/lake/"


def test_clients_receive_s3_location(lakes: Lakes) -> None:
    """The responses contain no credentials."""
    secret = {"access_key_id": "verysecret42", "secret_access_key": "verysecret43"}
    options = {"endpoint": "https://s3.example", "region": "eu-central-1", "addressing_style": "path", **secret}
    storage = S3NamedStorage(lakes.storage("s3"))
    lake = Lakehouse.create(storage.root, options, storage=storage)
    with serving(settings_for(lake), Warehouses({ONLY: lake})) as server:
        assert server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]}).status == 200
        responses = [
            server.request("POST", TABLES, create_body()),
            server.request("POST", TABLES, create_body("u", **{"stage-create": True})),
            server.request("GET", TABLE),
        ]
    configurations = {
        "s3.endpoint": "https://s3.example/",
        "client.region": "eu-central-1",
        "s3.region": "eu-central-1",
        "s3.path-style-access": "true",
    }
    for response in responses:
        assert response.document["config"] == configurations
        assert response.document["metadata"]["location"].startswith("s3://bucket/lake/tables/")
        assert b"verysecret" not in response.body


def test_clone_is_a_warehouse(lakes: Lakes, lake: Lakehouse, tmp_path: Path) -> None:
    """The latest version of the clone is served read-only, and only while parent and clone refer to each other."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema).append(ROWS)
    root = f"file://{tmp_path}/clones/x/"
    operations.plan_clone(lake, root, "x").execute()
    clone = Lakehouse.open(root, {"fsync": "false"})
    allowed = allowing(lake, root)
    with serving(settings_for(lake), Warehouses({ONLY: allowed})) as server:
        assert n_rows(server, "clone-x") == 2
        catalog_at(clone).load_table("ns.t").append(ROWS)
        assert (n_rows(server, "clone-x"), n_rows(server, "main")) == (4, 2)
        with duckdb_with_iceberg() as connection:  # files of the parent and of the clone
            attach(connection, server, "clone-x", "x")
            assert connection.execute("SELECT count(*), sum(id) FROM x.ns.t").fetchall() == [(4, 6)]
        response = server.request("POST", TABLES.replace("/main/", "/clone-x/"), create_body("u"))
        assert response.error == (403, "ForbiddenException")
        assert "serve the clone's own root" in response.document["error"]["message"]
        assert server.request("GET", "/v1/clone-none/namespaces").error == UNKNOWN
        operations.plan_drop_clone(allowed, "x").execute()
        assert server.request("GET", "/v1/clone-x/namespaces").error == UNKNOWN
