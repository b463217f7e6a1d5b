"""What a token may not see is in no response, and a request for it is answered as one for what does not exist."""

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
from tests.server.served import Reply, Served, serving, settings_for
from tests.server.test_safety import FORBIDDEN, MIXED, OPERATOR, READER, WRITER, ask, entry
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.managed import EXTERNAL, table_definition
from trinitylake_ops.server.settings import ONLY, LakehouseSettings
from trinitylake_ops.server.warehouses import Warehouses

ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})
UNKNOWN = (404, "NoSuchWarehouseException")
#: May read one namespace, and nothing at all.
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
def two(lake: Lakehouse) -> Lakehouse:
    """A lakehouse with ``mine.t`` and ``hush.t``."""
    catalog = catalog_at(lake)
    for name in ("mine.t", "hush.t"):
        catalog.create_namespace(name.partition(".")[0])
        catalog.create_table(name, ROWS.schema).append(ROWS)
    return lake


def renamed(reply: Reply, one: str, other: str) -> tuple[int, bytes]:
    return reply.status, reply.body.replace(one.encode(), other.encode())


def test_errors_about_warehouses_name_no_other(two: Lakehouse, tokens: Path, tmp_path: Path) -> None:
    operations.plan_export(two, "acquisition").execute()
    operations.plan_export(two, "far", level="full", target=f"file://{tmp_path}/archive-zz/").execute()
    operations.plan_clone(two, f"file://{tmp_path}/secret-place/", "project").execute()
    operations.plan_clone(two, f"file://{tmp_path}/gone-place/", "gone").execute()
    shutil.rmtree(tmp_path / "gone-place")
    shutil.rmtree(tmp_path / "archive-zz")
    missing = ("export-x", "clone-x", "clone-gone", "export-far", "v99", "at-1999-01-01", "nope")
    with serving(settings_for(two, tokens=tokens)) as served:
        for warehouse in missing:
            for path in (f"/v1/config?warehouse={warehouse}", f"/v1/{warehouse}/namespaces"):
                reply = ask(served, MIXED, "GET", path)
                assert reply.status in (404, 503), (warehouse, reply.body)
                for secret in ("acquisition", "project", "gone", "far", "secret-place", "archive-zz", str(tmp_path)):
                    assert secret in warehouse or secret.encode() not in reply.body, (warehouse, reply.body)
        assert ask(served, MIXED, "GET", "/v1/export-acquisition/namespaces").status == 200
        # A token that reads nothing gets one response, whatever exists.
        for warehouse in (*missing, "main", "export-acquisition", "v1"):
            for path in (f"/v1/config?warehouse={warehouse}", f"/v1/{warehouse}/namespaces"):
                reply = ask(served, READER, "GET", path)
                assert reply.error == FORBIDDEN
                assert warehouse not in reply.document["error"]["message"]


def test_a_hidden_lakehouse_is_like_one_that_does_not_exist(lakes: Lakes, tmp_path: Path) -> None:
    north, south = lakes.local("north"), lakes.local("south")
    path = tmp_path / "tokens.yaml"
    entries = [entry(WRITER, "a", scope="write", lakehouses=["north"]), entry(OPERATOR, "b", scope="read")]
    path.write_text(yaml.safe_dump({"tokens": entries}))
    lakehouses = {
        name: LakehouseSettings(lake.root, lake.storage_options) for name, lake in (("north", north), ("south", south))
    }
    with serving(settings_for(north, lakehouses=lakehouses, tokens=path)) as served:
        for path in ("/v1/config?warehouse={}.main", "/v1/{}.main/namespaces", "/v1/{}.v99/namespaces/x"):
            hidden, absent = (ask(served, WRITER, "GET", path.format(name)) for name in ("south", "souths"))
            assert hidden.error == absent.error == FORBIDDEN
            assert renamed(hidden, "south", "") == renamed(absent, "souths", "")
        assert ask(served, OPERATOR, "GET", "/v1/config?warehouse=souths").error == UNKNOWN
        assert ask(served, WRITER, "GET", "/metrics").error == FORBIDDEN
        metrics = ask(served, OPERATOR, "GET", "/metrics")
        assert (metrics.status, b'lakehouse="south"' in metrics.body) == (200, True)


def test_no_folder_is_made_at_the_location_of_an_external_table(two: Lakehouse, tokens: Path, tmp_path: Path) -> None:
    """A writer of the lakehouse's files chooses that location, and the server has rights that the writer may not."""
    managed = catalog_at(two).load_table("mine.t")
    content = json.loads(Path(managed.metadata_location.removeprefix("file://")).read_text())
    content.pop("trinitylake", None)
    for number, location in enumerate((f"{two.root}../escaped", f"{two.root}tables/../../escaped", f"{two.root}other")):
        content |= {"location": location, "table-uuid": str(uuid.uuid4())}
        file = Path(two.root.removeprefix("file://")) / "ext" / "metadata" / f"{number}.metadata.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
        metadata = TableMetadataUtil.parse_obj(content)
        with two.transaction() as txn:
            definition = table_definition(metadata, f"file://{file}", two.root, table_type=EXTERNAL)
            txn.create_table("mine", f"e{number}", definition)
    before = {path for path in tmp_path.rglob("*") if path.is_dir()}
    with serving(settings_for(two, tokens=tokens)) as served:
        for number in range(3):
            ask(served, WRITER, "GET", f"/v1/main/namespaces/mine/tables/e{number}")
        assert {path for path in tmp_path.rglob("*") if path.is_dir()} == before
        assert ask(served, WRITER, "GET", "/v1/main/namespaces/mine/tables/t").status == 200


def test_the_versions_of_a_clones_parent_are_not_served(lakes: Lakes, two: Lakehouse, tmp_path: Path) -> None:
    """They belong to another lakehouse, which a token may not see."""
    moment = two.snapshot(1).created_at_ms
    root = f"file://{tmp_path}/clones/x/"
    operations.plan_clone(two, root, "x").execute()
    clone = allowing(Lakehouse.open(root, {"fsync": "false"}), two.root)
    assert clone.snapshot("parent@1").version == clone.snapshot(timestamp=moment).version == 1
    with serving(settings_for(clone), Warehouses({ONLY: clone})) as served:
        for warehouse in ("export-parent@1", f"at-{moment}"):
            assert served.ask("GET", f"/v1/{warehouse}/namespaces").error == UNKNOWN
            assert served.ask("GET", f"/v1/config?warehouse={warehouse}").error == UNKNOWN
        assert served.ask("GET", "/v1/main/namespaces").status == 200


def test_registering_a_file_of_a_hidden_table_reveals_nothing(two: Lakehouse, tokens: Path) -> None:
    hidden = catalog_at(two).load_table("hush.t").metadata_location
    absent = hidden.replace(hidden.rpartition("/")[2], f"00001-{uuid.uuid4()}.metadata.json")

    def register(served: Served, location: str) -> Reply:
        body = {"name": "alias", "metadata-location": location}
        return ask(served, MIXED, "POST", "/v1/main/namespaces/mine/register", body)

    with serving(settings_for(two, tokens=tokens)) as served:
        first, second = register(served, hidden), register(served, absent)
        assert first.error == (400, "BadRequestException")
        assert renamed(first, hidden, "") == renamed(second, absent, "")
