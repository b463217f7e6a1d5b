"""Responses never contain hidden names, and requests for hidden and for missing objects get the same response."""

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
from tests.server.live_server import LiveServer, Response, serving, settings_for
from tests.server.test_access_control import FORBIDDEN, MIXED, OPERATOR, READER, WRITER, entry, request
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.managed import EXTERNAL, table_definition
from trinitylake_ops.server.settings import ONLY, LakehouseSettings
from trinitylake_ops.server.warehouses import Warehouses
from trinitylake_ops.storage import background

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


def without_name(response: Response, name: str) -> tuple[int, bytes]:
    return response.status, response.body.replace(name.encode(), b"")


def test_warehouse_errors_name_no_other_warehouse(two_tables: Lakehouse, tokens: Path, tmp_path: Path) -> None:
    operations.plan_export(two_tables, "acquisition").execute()
    operations.plan_export(two_tables, "far", level="full", target=f"file://{tmp_path}/archive-zz/").execute()
    operations.plan_clone(two_tables, f"file://{tmp_path}/secret-folder/", "project").execute()
    operations.plan_clone(two_tables, f"file://{tmp_path}/deleted-folder/", "gone").execute()
    background.drain()  # pending writes of hints would create files in the folders again
    shutil.rmtree(tmp_path / "deleted-folder")
    shutil.rmtree(tmp_path / "archive-zz")
    missing = ("export-x", "clone-x", "clone-gone", "export-far", "v99", "at-1999-01-01", "nope")
    with serving(settings_for(two_tables, tokens=tokens)) as server:
        for warehouse in missing:
            for path in (f"/v1/config?warehouse={warehouse}", f"/v1/{warehouse}/namespaces"):
                response = request(server, MIXED, "GET", path)
                assert response.status in (404, 503), (warehouse, response.body)
                for secret in ("acquisition", "project", "gone", "far", "secret-folder", "archive-zz", str(tmp_path)):
                    assert secret in warehouse or secret.encode() not in response.body, (warehouse, response.body)
        assert request(server, MIXED, "GET", "/v1/export-acquisition/namespaces").status == 200
        # A token without read access gets the same response, whatever exists.
        for warehouse in (*missing, "main", "export-acquisition", "v1"):
            for path in (f"/v1/config?warehouse={warehouse}", f"/v1/{warehouse}/namespaces"):
                response = request(server, READER, "GET", path)
                assert response.error == FORBIDDEN
                assert warehouse not in response.document["error"]["message"]


def test_hidden_and_missing_lakehouses_get_same_response(lakes: Lakes, tmp_path: Path) -> None:
    north, south = lakes.local("north"), lakes.local("south")
    path = tmp_path / "tokens.yaml"
    entries = [entry(WRITER, "a", scope="write", lakehouses=["north"]), entry(OPERATOR, "b", scope="read")]
    path.write_text(yaml.safe_dump({"tokens": entries}))
    lakehouses = {
        name: LakehouseSettings(lake.root, lake.storage_options) for name, lake in (("north", north), ("south", south))
    }
    with serving(settings_for(north, lakehouses=lakehouses, tokens=path)) as server:
        for path in ("/v1/config?warehouse={}.main", "/v1/{}.main/namespaces", "/v1/{}.v99/namespaces/x"):
            hidden, missing = (request(server, WRITER, "GET", path.format(name)) for name in ("south", "souths"))
            assert hidden.error == missing.error == FORBIDDEN
            assert without_name(hidden, "south") == without_name(missing, "souths")
        assert request(server, OPERATOR, "GET", "/v1/config?warehouse=souths").error == UNKNOWN
        assert request(server, WRITER, "GET", "/metrics").error == FORBIDDEN
        metrics = request(server, OPERATOR, "GET", "/metrics")
        assert (metrics.status, b'lakehouse="south"' in metrics.body) == (200, True)


def test_no_folder_is_created_for_external_table(two_tables: Lakehouse, tokens: Path, tmp_path: Path) -> None:
    """A writer of the lakehouse chooses the location of the table, but the server may have more rights than that."""
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
    with serving(settings_for(two_tables, tokens=tokens)) as server:
        for number in range(3):
            request(server, WRITER, "GET", f"/v1/main/namespaces/mine/tables/e{number}")
        assert {path for path in tmp_path.rglob("*") if path.is_dir()} == before
        assert request(server, WRITER, "GET", "/v1/main/namespaces/mine/tables/t").status == 200


def test_versions_of_clones_parent_are_not_served(lakes: Lakes, two_tables: Lakehouse, tmp_path: Path) -> None:
    """The versions belong to another lakehouse, which the token may not see."""
    timestamp_ms = two_tables.snapshot(1).created_at_ms
    root = f"file://{tmp_path}/clones/x/"
    operations.plan_clone(two_tables, root, "x").execute()
    clone = allowing(Lakehouse.open(root, {"fsync": "false"}), two_tables.root)
    assert clone.snapshot("parent@1").version == clone.snapshot(timestamp=timestamp_ms).version == 1
    with serving(settings_for(clone), Warehouses({ONLY: clone})) as server:
        for warehouse in ("export-parent@1", f"at-{timestamp_ms}"):
            assert server.request("GET", f"/v1/{warehouse}/namespaces").error == UNKNOWN
            assert server.request("GET", f"/v1/config?warehouse={warehouse}").error == UNKNOWN
        assert server.request("GET", "/v1/main/namespaces").status == 200


def test_registering_file_of_hidden_table_reveals_nothing(two_tables: Lakehouse, tokens: Path) -> None:
    hidden_location = catalog_at(two_tables).load_table("hush.t").metadata_location
    missing_location = hidden_location.replace(
        hidden_location.rpartition("/")[2], f"00001-{uuid.uuid4()}.metadata.json"
    )

    def register(server: LiveServer, location: str) -> Response:
        body = {"name": "alias", "metadata-location": location}
        return request(server, MIXED, "POST", "/v1/main/namespaces/mine/register", body)

    with serving(settings_for(two_tables, tokens=tokens)) as server:
        first, second = register(server, hidden_location), register(server, missing_location)
        assert first.error == (400, "BadRequestException")
        assert without_name(first, hidden_location) == without_name(second, missing_location)
