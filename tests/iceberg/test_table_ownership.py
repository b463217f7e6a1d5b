"""The owner file of a managed table is written no later than the first of the table's other files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.faults import DeathError, FaultyStorage, fail
from tests.iceberg.test_catalog import SCHEMA, ids_of, rows
from tests.iceberg.test_data_files import FLIGHTS, flights
from tests.lakes import Lakes, allowing
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, FileExistsAlreadyError, InvalidInputError, LocationNotAllowedError
from trinitylake_ops.format.definitions import METADATA_LOCATION, LakehouseDef
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at, catalog_for
from trinitylake_ops.iceberg.managed import claim_location, metadata_uri, owner_file, read_owner
from trinitylake_ops.iceberg.write.plan import plan_write
from trinitylake_ops.iceberg.write.staging import StagingCatalog, stage_data_files
from trinitylake_ops.storage import MeteredStorage, open_storage

pytestmark = pytest.mark.usefixtures("fixed_requests")


def owned_table_ids(lake: Lakehouse) -> set[str]:
    """Return the ids of all tables with files, and check that each has an owner file of this lakehouse."""
    ids = {info.path.split("/")[1] for info in lake.storage.list("tables/")}
    for table_id in ids:
        path = owner_path(table_id)
        assert read_owner(lake.storage.read(path), path) == lake.snapshot().definition.id
    return ids


def test_owner_file_is_decoded_and_invalid_ones_are_rejected() -> None:
    path = owner_path("t")
    assert path == "tables/t/_owner.json"
    assert read_owner(owner_file(LakehouseDef(id="lake-1")), path) == "lake-1"
    assert json.loads(owner_file(LakehouseDef(id="lake-1")))["lakehouse_id"] == "lake-1"
    for data in (b"", b"\xff", b"[]", b'"lake"', b"{}", b'{"lakehouse_id": 1}', b'{"lakehouse_id": ""}'):
        with pytest.raises(CorruptFileError) as caught:
            read_owner(data, path)
        assert caught.value.path == path


def test_every_way_to_create_a_table_writes_an_owner_file(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.created", SCHEMA)
    with catalog.create_table_transaction("ns.filled", SCHEMA) as change:
        assert len(owned_table_ids(lake)) == 2
        change.append(rows(1))
    with lake.transaction() as txn:
        catalog_for(txn).create_table("ns.together", SCHEMA)
    staging = StagingCatalog(lake)
    staging.create_table("ns.staged", SCHEMA).append(rows(2))
    write = plan_write(lake, "flights", "daily", FLIGHTS, partition_by=("year",))
    assert len(owned_table_ids(lake)) == 5
    stage_data_files(lake, write, write.write([flights(1)]))
    assert len(owned_table_ids(lake)) == 5
    assert {lake.snapshot().table("ns", name).id for name in ("created", "filled", "together")} < owned_table_ids(lake)
    assert ids_of(catalog.load_table("ns.filled")) == [1]
    assert operations.verify(lake).findings == ()


def test_write_to_existing_table_writes_no_owner_file(
    lake: Lakehouse, catalog: TrinityLakeCatalog, meter: MeteredStorage
) -> None:
    catalog.create_table("ns.t", FLIGHTS)
    with meter.measure() as measured:
        plan_write(lake, "ns", "t", FLIGHTS)
    assert set(measured.counts.requests) <= {"read"}


def test_owner_file_takes_no_extra_round_trip(
    lake: Lakehouse, catalog: TrinityLakeCatalog, meter: MeteredStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meter.measure() as with_owner:
        catalog.create_table("ns.t", SCHEMA)
    monkeypatch.setattr("trinitylake_ops.iceberg.table_change.managed_table_id", lambda *_: None)
    monkeypatch.setattr("trinitylake_ops.iceberg.table_change.claim_location", lambda *_: None)
    with meter.measure() as without_owner:
        catalog.create_table("ns.u", SCHEMA)
    assert with_owner.counts.requests["create"] == without_owner.counts.requests["create"] + 1
    assert with_owner.counts.rounds == without_owner.counts.rounds


def test_owner_file_is_written_under_table_root(lakes: Lakes) -> None:
    table_root = lakes.root("external")
    lake = lakes.local(table_root=table_root)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    plan_write(lake, "ns", "u", SCHEMA)
    assert list(lake.storage.list("tables/")) == []
    table_storage = open_storage(table_root, lake.storage_options)
    paths = [info.path for info in table_storage.list() if info.path.endswith("_owner.json")]
    owners = {table_storage.root + path: read_owner(table_storage.read(path), path) for path in paths}
    assert set(owners.values()) == {lake.snapshot().definition.id}
    assert f"{table.location()}/_owner.json" in owners


def test_table_of_another_lakehouse_is_not_written_through_table_root(lakes: Lakes) -> None:
    """A writer can set any root as the table root of its lakehouse, and refer to any table there by id."""
    victim, lake = lakes.local("victim"), lakes.local()
    victim_catalog = catalog_at(victim)
    victim_catalog.create_namespace("ns")
    victim_catalog.create_table("ns.t", SCHEMA).append(rows(1))
    stolen = victim.snapshot().table("ns", "t")
    properties = {**stolen.format_properties, METADATA_LOCATION: metadata_uri(stolen, victim.root)}
    with lake.transaction() as transaction:
        transaction.create_namespace("ns")
        transaction.alter_definition(replace(transaction.definition, table_root=victim.root))
        transaction.create_table("ns", "t", replace(stolen, format_properties=properties))
    before = {info.path for info in victim.storage.list()}
    catalog = catalog_at(lake)
    with pytest.raises(LocationNotAllowedError):
        catalog.load_table("ns.t").append(rows(1))
    data_file = f"{victim.root}tables/{stolen.id}/data/any.parquet"
    with pytest.raises(LocationNotAllowedError):
        catalog.io.delete(data_file)
    assert {info.path for info in victim.storage.list()} == before
    allowed = catalog_at(allowing(lake, victim.root))
    allowed.load_table("ns.t").append(rows(1))


def test_folder_of_another_lakehouse_cannot_be_claimed(lake: Lakehouse) -> None:
    definition = lake.snapshot().definition
    location = f"{lake.root}tables/t"
    assert claim_location(lake.storage, location, definition) == owner_path("t")
    assert claim_location(lake.storage, location, definition) == owner_path("t"), (
        "the same lakehouse can claim it again"
    )
    with pytest.raises(FileExistsAlreadyError):
        claim_location(lake.storage, location, LakehouseDef(id="other"))
    for other_location in (f"{lake.root}t", f"{lake.root}x/tables/t", "file:///x/tables/t", f"{lake.root}tables/t/u"):
        assert claim_location(lake.storage, other_location, definition) is None


def test_earlier_version_cannot_create_table(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    earlier_catalog = catalog_at(lake, lake.latest_version())
    with pytest.raises(InvalidInputError):
        earlier_catalog.create_table_transaction("ns.t", SCHEMA)
    assert owned_table_ids(lake) == set()


def test_lost_race_leaves_no_files_of_new_table(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    class Racing(FaultyStorage):
        """Creates the table in another catalog just before the root is created."""

        raced = False

        def create(self, path: str, data: bytes) -> None:
            if not self.raced and path.startswith("_") and path.endswith(".arrow"):
                self.raced = True
                catalog.create_table("ns.t", SCHEMA)
            super().create(path, data)

    racing = catalog_at(Lakehouse(Racing(lake.storage, concurrency=1), lake.storage_options))
    with pytest.raises(Exception, match="already exists"):
        racing.create_table("ns.t", SCHEMA)
    assert owned_table_ids(lake) == {lake.snapshot().table("ns", "t").id}


@pytest.mark.parametrize("kind", ["create", "append", "fill"])
def test_killed_write_leaves_only_files_of_its_table(lake: Lakehouse, catalog: TrinityLakeCatalog, kind: str) -> None:
    """The process dies at each write before the commit. It leaves files only where orphan removal finds them."""
    table = catalog.create_table("ns.old", SCHEMA)
    table.append(rows(1))
    old_prefix = f"tables/{lake.snapshot().table('ns', 'old').id}/"
    counted = FaultyStorage(lake.storage, concurrency=1)
    write(kind, Lakehouse(counted), "first")
    before_root = [request for request in counted.log if request.kind == "create"]
    roots = [
        index for index, request in enumerate(before_root) if request.path.startswith("_") and "def" not in request.path
    ]
    assert roots, "the write was committed"
    for index in range(1, roots[0] + 2):
        version, files = lake.latest_version(), {info.path for info in lake.storage.list()}
        storage = FaultyStorage(lake.storage, [fail(index, DeathError, kind="create")], concurrency=1)  # type: ignore[arg-type]
        with pytest.raises(DeathError):
            write(kind, Lakehouse(storage), f"killed-{index}")
        assert lake.latest_version() == version
        remaining = {info.path for info in lake.storage.list()} - files
        table_paths = {path for path in remaining if path.startswith("tables/")}
        assert all("-table-" in path or "-node-" in path for path in remaining - table_paths)
        if kind == "append":
            assert all(path.startswith(old_prefix) for path in table_paths)
        owned_table_ids(lake)
    assert ids_of(catalog.load_table("ns.old")) == ([1, 2] if kind == "append" else [1])


def write(kind: str, lake: Lakehouse, name: str) -> None:
    catalog = catalog_at(lake)
    if kind == "append":
        catalog.load_table("ns.old").append(rows(2))
    elif kind == "create":
        catalog.create_table(("ns", name), SCHEMA)
    else:
        with catalog.create_table_transaction(("ns", name), SCHEMA) as change:
            change.append(rows(3))
