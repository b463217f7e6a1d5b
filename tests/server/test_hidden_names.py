"""Test that responses never contain hidden names, and that requests for hidden and for missing objects look alike."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from pyiceberg.table.metadata import TableMetadataUtil

from tests.lakes import Lakes, allowing
from tests.server.live_server import LiveServer, Reply, serving, settings_for
from tests.server.test_access_control import FORBIDDEN, MIXED, OPERATOR, READER, WRITER, entry, request
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.managed import EXTERNAL, table_definition
from trinitylake_ops.server.settings import ONLY, LakehouseSettings
from trinitylake_ops.server.warehouses import Warehouses

ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})
UNKNOWN = (404, "NoSuchWarehouseException")
#: Tokens that may read one namespace, and nothing at all.
ENTRIES = [
    entry(MIXED, "mixed", scope="none", namespaces={"mine": "operate"}),
    entry(READER, "none", scope="none", namespaces={"hush": "none"}),
    entry(WRITER, "writer", scope="write"),
    entry(OPERATOR, "operator", scope="operate"),
]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": ENTRIES}))
    return path


@pytest.fixture
def two_tables(lake: Lakehouse) -> Lakehouse:
    """A lakehouse with the tables ``mine.t`` and ``hush.t``."""
    catalog = catalog_at(lake)
    for name in ("mine.t", "hush.t"):
        catalog.create_namespace(name.partition(".")[0])
        catalog.create_table(name, ROWS.schema).append(ROWS)
    return lake


def renamed(reply: Reply, name: str, other: str) -> tuple[int, bytes]:
    return reply.status, reply.body.replace(name.encode(), other.encode())


def test_warehouse_errors_name_no_other_warehouse(two_tables: Lakehouse, tokens: Path, tmp_path: Path) -> None:
    operations.plan_export(two_tables, "acquisition").execute()
    operations.plan_export(two_tables, "far", level="full", target=f"file://{tmp_path}/archive-zz/").execute()
    operations.plan_clone(two_tables, f"file://{tmp_path}/secret-place/", "project").execute()
    operations.plan_clone(two_tables, f"file://{tmp_path}/gone-place/", "gone").execute()
    shutil.rmtree(tmp_path / "gone-place")
    shutil.rmtree(tmp_path / "archive-zz")
    missing = ("export-x", "clone-x", "clone-gone", "export-far", "v99", "at-1999-01-01", "nope")
    with serving(settings_for(two_tables, tokens=tokens)) as served:
        for warehouse in missing:
            for path in (f"/v1/config?warehouse={warehouse}", f"/v1/{warehouse}/namespaces"):
                reply = request(served, MIXED, "GET", path)
                assert reply.status in (404, 503), (warehouse, reply.body)
                for secret in ("acquisition", "project", "gone", "far", "secret-place", "archive-zz", str(tmp_path)):
                    assert secret in warehouse or secret.encode() not in reply.body, (warehouse, reply.body)
        assert request(served, MIXED, "GET", "/v1/export-acquisition/namespaces").status == 200
        # A token without read access gets the same response, whatever exists.
        for warehouse in (*missing, "main", "export-acquisition", "v1"):
            for path in (f"/v1/config?warehouse={warehouse}", f"/v1/{warehouse}/namespaces"):
                reply = request(served, READER, "GET", path)
                assert reply.error == FORBIDDEN
                assert warehouse not in reply.document["error"]["message"]


def test_hidden_lakehouse_looks_like_missing_one(lakes: Lakes, tmp_path: Path) -> None:
    north, south = lakes.local("north"), lakes.local("south")
    path = tmp_path / "tokens.yaml"
    entries = [entry(WRITER, "a", scope="write", lakehouses=["north"]), entry(OPERATOR, "b", scope="read")]
    path.write_text(yaml.safe_dump({"tokens": entries}))
    lakehouses = {
        name: LakehouseSettings(lake.root, lake.storage_options) for name, lake in (("north", north), ("south", south))
    }
    with serving(settings_for(north, lakehouses=lakehouses, tokens=path)) as served:
        for path in ("/v1/config?warehouse={}.main", "/v1/{}.main/namespaces", "/v1/{}.v99/namespaces/x"):
            hidden, absent = (request(served, WRITER, "GET", path.format(name)) for name in ("south", "souths"))
            assert hidden.error == absent.error == FORBIDDEN
            assert renamed(hidden, "south", "") == renamed(absent, "souths", "")
        assert request(served, OPERATOR, "GET", "/v1/config?warehouse=souths").error == UNKNOWN
        assert request(served, WRITER, "GET", "/metrics").error == FORBIDDEN
        metrics = request(served, OPERATOR, "GET", "/metrics")
        assert (metrics.status, b'lakehouse="south"' in metrics.body) == (200, True)


def test_no_folder_is_created_for_external_table(two_tables: Lakehouse, tokens: Path, tmp_path: Path) -> None:
    """A writer of the lakehouse's files chooses that location, but the server may have more rights than the writer."""
    managed = catalog_at(two_tables).load_table("mine.t")
    content = json.loads(Path(managed.metadata_location.removeprefix("file://")).read_text())
    content.pop("trinitylake", None)
    for number, location in enumerate(
        (f"{two_tables.root}../escaped", f"{two_tables.root}tables/../../escaped", f"{two_tables.root}other")
    ):
        content |= {"location": location, "table-uuid": str(uuid.uuid4())}
        file = Path(two_tables.root.removeprefix("file://")) / "ext" / "metadata" / f"{number}.metadata.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
        metadata = TableMetadataUtil.parse_obj(content)
        with two_tables.transaction() as txn:
            definition = table_definition(metadata, f"file://{file}", two_tables.root, table_type=EXTERNAL)
            txn.create_table("mine", f"e{number}", definition)
    before = {path for path in tmp_path.rglob("*") if path.is_dir()}
    with serving(settings_for(two_tables, tokens=tokens)) as served:
        for number in range(3):
            request(served, WRITER, "GET", f"/v1/main/namespaces/mine/tables/e{number}")
        assert {path for path in tmp_path.rglob("*") if path.is_dir()} == before
        assert request(served, WRITER, "GET", "/v1/main/namespaces/mine/tables/t").status == 200


def test_versions_of_clones_parent_are_not_served(lakes: Lakes, two_tables: Lakehouse, tmp_path: Path) -> None:
    """They belong to another lakehouse, which the token may not see."""
    moment = two_tables.snapshot(1).created_at_ms
    root = f"file://{tmp_path}/clones/x/"
    operations.plan_clone(two_tables, root, "x").execute()
    clone = allowing(Lakehouse.open(root, {"fsync": "false"}), two_tables.root)
    assert clone.snapshot("parent@1").version == clone.snapshot(timestamp=moment).version == 1
    with serving(settings_for(clone), Warehouses({ONLY: clone})) as served:
        for warehouse in ("export-parent@1", f"at-{moment}"):
            assert served.request("GET", f"/v1/{warehouse}/namespaces").error == UNKNOWN
            assert served.request("GET", f"/v1/config?warehouse={warehouse}").error == UNKNOWN
        assert served.request("GET", "/v1/main/namespaces").status == 200


def test_registering_file_of_hidden_table_reveals_nothing(two_tables: Lakehouse, tokens: Path) -> None:
    hidden = catalog_at(two_tables).load_table("hush.t").metadata_location
    absent = hidden.replace(hidden.rpartition("/")[2], f"00001-{uuid.uuid4()}.metadata.json")

    def register(served: LiveServer, location: str) -> Reply:
        body = {"name": "alias", "metadata-location": location}
        return request(served, MIXED, "POST", "/v1/main/namespaces/mine/register", body)

    with serving(settings_for(two_tables, tokens=tokens)) as served:
        first, second = register(served, hidden), register(served, absent)
        assert first.error == (400, "BadRequestException")
        assert renamed(first, hidden, "") == renamed(second, absent, "")
