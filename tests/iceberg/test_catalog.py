"""The PyIceberg catalog: each change commits one version of the lakehouse."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchIcebergTableError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.io import load_file_io
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.table.update import SetPropertiesUpdate
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType, StructType

from tests.faults import Fault, FaultyStorage, fail
from tests.lakes import Lakes, allowing, unreferenced_paths
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    FileMissingError,
    InvalidDefinitionError,
    InvalidInputError,
    LakehouseNotFoundError,
    LocationNotAllowedError,
    ObjectExistsError,
    StorageFullError,
    TransientError,
    UnsupportedTypeError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import Column, DataType, TableDef
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at, catalog_for
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.table_change import registering_io
from trinitylake_ops.storage import MemoryStorage, MeteredStorage
from trinitylake_ops.transaction.change_set import VIEW_PREFIX

pytestmark = pytest.mark.usefixtures("fixed_requests")

IMPLEMENTATION = "trinitylake_ops.iceberg.catalog.TrinityLakeCatalog"
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "name": [f"n{number}" for number in ids]})


def ids_of(table: object) -> list[int]:
    return sorted(table.scan().to_arrow()["id"].to_pylist())  # type: ignore[attr-defined]


def load(lake: Lakehouse, **properties: str) -> TrinityLakeCatalog:
    options = {f"storage.{name}": value for name, value in lake.storage_options.items()}
    loaded = load_catalog("lake", **{"py-catalog-impl": IMPLEMENTATION, "root": lake.root, **options, **properties})
    assert isinstance(loaded, TrinityLakeCatalog)
    return loaded


def test_loaded_catalog_writes_and_reads(lake: Lakehouse) -> None:
    catalog = load(lake)
    catalog.create_namespace("ns", {"owner": "me"})
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1, 2, 3))
    table.append(rows(4))
    table.overwrite(rows(10, 20), overwrite_filter="id <= 2")
    table.delete("id == 3")
    assert ids_of(load(lake).load_table("ns.t")) == [4, 10, 20]
    assert lake.latest_version() == 6
    messages = [version.message for version in lake.history(limit=6)]
    assert messages == [
        "delete ns.t",
        "overwrite and append ns.t",
        "append ns.t",
        "append ns.t",
        "create table ns.t",
        "create namespace ns",
    ]


def test_schema_change_updates_definition(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "where", StructType(NestedField(3, "city", StringType()))),
        identifier_field_ids=[1],
    )
    order = SortOrder(SortField(source_id=1, transform=IdentityTransform()))
    spec = PartitionSpec(PartitionField(source_id=1, field_id=1000, transform=IdentityTransform(), name="id"))
    table = catalog.create_table("ns.t", schema, partition_spec=spec, sort_order=order)
    definition = lake.snapshot().table("ns", "t")
    assert (definition.primary_keys, definition.sort_keys, definition.distribution_keys) == ((1,), (1,), (1,))
    with lake.transaction() as txn:
        txn.alter_table("ns", "t", TableDef(**{**fields_of(definition), "properties": {"owner": "me"}}))
    table.refresh()
    with table.update_schema() as update:
        update.add_column("delay", LongType(), doc="minutes")
        update.rename_column("where", "place")
    with table.update_schema() as update:
        update.add_column(("place", "state"), StringType())
    definition = lake.snapshot().table("ns", "t")
    assert definition.properties == {"owner": "me"}
    assert definition.schema.columns == (
        Column(id=1, name="id", type=DataType.INT8, nullable=False),
        Column(
            id=2,
            name="place",
            type=DataType.STRUCT,
            struct_fields=(
                Column(id=3, name="city", type=DataType.VARCHAR),
                Column(id=5, name="state", type=DataType.VARCHAR),
            ),
        ),
        Column(id=4, name="delay", type=DataType.INT8, properties={"doc": "minutes"}),
    )
    before = catalog_at(lake, lake.latest_version() - 2).load_table("ns.t")
    assert sorted(before.schema().column_names) == ["id", "where", "where.city"]


def fields_of(definition: TableDef) -> dict[str, object]:
    return {name: getattr(definition, name) for name in TableDef.__dataclass_fields__}


def test_managed_table_is_stored_under_its_id(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    definition = lake.snapshot().table("ns", "t")
    assert table.location() == f"{lake.root}tables/{definition.id}"
    location = definition.format_properties["metadata_location"]
    assert location.startswith(f"tables/{definition.id}/metadata/")
    assert table.metadata_location == lake.root + location
    assert all(info.path.startswith(f"tables/{definition.id}/") for info in lake.storage.list("tables/"))
    assert (definition.table_type, definition.table_format) == ("MANAGED", "ICEBERG")


def test_managed_table_is_stored_under_table_root(lakes: Lakes) -> None:
    table_root = lakes.root("external-tables")
    lake = lakes.local(table_root=table_root)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", SCHEMA).append(rows(1, 2))
    definition = lake.snapshot().table("ns", "t")
    prefix = f"{table_root}tables/{definition.id}/"
    assert definition.format_properties["metadata_location"].startswith(prefix)
    assert ids_of(catalog_at(lake).load_table("ns.t")) == [1, 2]
    assert list(lake.storage.list("tables/")) == []


def test_properties_that_delete_or_move_files_are_rejected(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA, properties={"write.metadata.previous-versions-max": "1"})
    assert table.properties["gc.enabled"] == "false"
    for number in range(4):
        table.append(rows(number))
    n_metadata_files = sum(info.path.endswith(".metadata.json") for info in lake.storage.list("tables/"))
    assert n_metadata_files == 5
    for name, value in [
        ("write.metadata.delete-after-commit.enabled", "true"),
        ("gc.enabled", "true"),
        ("write.data.path", "file:///other"),
    ]:
        with pytest.raises(InvalidDefinitionError, match=name):
            catalog.create_table("ns.u", SCHEMA, properties={name: value})
        with pytest.raises(InvalidDefinitionError, match=name):
            table.transaction().set_properties({name: value}).commit_transaction()
    with pytest.raises(InvalidDefinitionError, match=r"gc\.enabled"):
        table.transaction().remove_properties("gc.enabled").commit_transaction()
    with pytest.raises(InvalidDefinitionError):
        catalog.create_table("ns.u", SCHEMA, location=f"{lake.root}tables/mine")
    table.refresh()
    with table.transaction() as txn:
        txn.set_properties({"comment": "flights"})
    assert ids_of(catalog.load_table("ns.t")) == [0, 1, 2, 3]


def test_catalog_reads_version_or_timestamp(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1, 2))
    version, timestamp = lake.latest_version(), lake.snapshot().created_at
    catalog.load_table("ns.t").append(rows(3))
    for earlier_catalog in (
        load(lake, version=str(version)),
        load(lake, timestamp=timestamp.isoformat()),
        load(lake, timestamp=str(lake.snapshot(version).created_at_ms)),
        catalog_at(lake, version),
    ):
        assert ids_of(earlier_catalog.load_table("ns.t")) == [1, 2]
    assert ids_of(load(lake).load_table("ns.t")) == [1, 2, 3]
    assert load(lake, version="0").list_namespaces() == []
    with pytest.raises(VersionNotFoundError):
        load(lake, version="99")
    with pytest.raises(InvalidInputError):
        load(lake, version="1", timestamp="1")
    with pytest.raises(InvalidInputError, match="8601"):
        load(lake, timestamp="yesterday")


def test_catalog_on_earlier_version_is_read_only(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    earlier_catalog = load(lake, version=str(lake.latest_version()))
    files = {info.path for info in lake.storage.list()}
    table = earlier_catalog.load_table("ns.t")
    for change in (
        lambda: table.append(rows(2)),
        lambda: table.transaction().set_properties({"a": "b"}).commit_transaction(),
        lambda: earlier_catalog.create_table("ns.u", SCHEMA),
        lambda: earlier_catalog.create_namespace("other"),
        lambda: earlier_catalog.drop_table("ns.t"),
        lambda: earlier_catalog.purge_table("ns.t"),
        lambda: earlier_catalog.rename_table("ns.t", "ns.u"),
        lambda: earlier_catalog.update_namespace_properties("ns", updates={"a": "b"}),
        lambda: earlier_catalog.register_table("ns.u", table.metadata_location),
    ):
        with pytest.raises(InvalidInputError):
            change()
    assert {info.path for info in lake.storage.list()} == files


def test_missing_lakehouse_or_root_raises_error(lakes: Lakes, tmp_path: Path) -> None:
    with pytest.raises(LakehouseNotFoundError):
        load_catalog("lake", **{"py-catalog-impl": IMPLEMENTATION, "root": str(tmp_path / "nothing")})
    with pytest.raises(InvalidInputError, match="'root'"):
        load_catalog("lake", **{"py-catalog-impl": IMPLEMENTATION})


def test_namespace_operations(catalog: TrinityLakeCatalog) -> None:
    catalog.create_namespace(("other",), {"a": "1", "b": "2"})
    assert catalog.list_namespaces() == [("ns",), ("other",)]
    assert catalog.list_namespaces("other") == []
    assert catalog.namespace_exists("other")
    assert not catalog.namespace_exists("nothing")
    catalog.create_namespace_if_not_exists("other")
    with pytest.raises(NamespaceAlreadyExistsError):
        catalog.create_namespace("other")
    summary = catalog.update_namespace_properties("other", removals={"a", "z"}, updates={"c": "3"})
    assert (summary.removed, summary.updated, summary.missing) == (["a"], ["c"], ["z"])
    assert catalog.load_namespace_properties("other") == {"b": "2", "c": "3"}
    catalog.create_table("other.t", SCHEMA)
    with pytest.raises(NamespaceNotEmptyError):
        catalog.drop_namespace("other")
    catalog.drop_table("other.t")
    catalog.drop_namespace("other")
    for operation in (
        lambda: catalog.load_namespace_properties("other"),
        lambda: catalog.drop_namespace("other"),
        lambda: catalog.update_namespace_properties("other", updates={"a": "b"}),
        lambda: catalog.list_tables("other"),
        lambda: catalog.create_table("other.t", SCHEMA),
        lambda: catalog.list_namespaces("a.b"),
    ):
        with pytest.raises(NoSuchNamespaceError):
            operation()


def test_table_create_rename_and_purge(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table("ns.t", SCHEMA)
    assert catalog.create_table_if_not_exists("ns.t", SCHEMA).metadata.table_uuid == table.metadata.table_uuid
    catalog.create_namespace("other")
    version = lake.latest_version()
    renamed = catalog.rename_table("ns.t", "other.u")
    assert lake.latest_version() == version + 1
    renamed.append(rows(2))
    assert ids_of(catalog.load_table(("other", "u"))) == [1, 2]
    assert (catalog.list_tables("ns"), catalog.list_tables("other")) == ([], [("other", "u")])
    assert lake.snapshot().table("other", "u").id == lake.snapshot(version).table("ns", "t").id
    catalog.create_table("ns.t", SCHEMA)
    with pytest.raises(TableAlreadyExistsError):
        catalog.rename_table("ns.t", "other.u")
    with pytest.raises(NoSuchNamespaceError):
        catalog.rename_table("ns.t", "nothing.t")
    assert catalog.table_exists("ns.t")
    catalog.purge_table("other.u")
    assert not catalog.table_exists("other.u")
    for operation in (
        lambda: catalog.load_table("other.u"),
        lambda: catalog.drop_table("other.u"),
        lambda: catalog.rename_table("other.u", "ns.v"),
        lambda: catalog.load_table("a.b.c"),
    ):
        with pytest.raises(NoSuchTableError):
            operation()
    assert ids_of(catalog_at(lake, version).load_table("ns.t")) == [1]


def test_names_with_dots_are_passed_as_tuples(catalog: TrinityLakeCatalog) -> None:
    catalog.create_namespace(("a.b",))
    catalog.create_table(("a.b", "t.1"), SCHEMA).append(rows(7))
    assert catalog.list_tables(("a.b",)) == [("a.b", "t.1")]
    assert ids_of(catalog.load_table(("a.b", "t.1"))) == [7]


def test_create_transaction_commits_one_version(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    version = lake.latest_version()
    with catalog.create_table_transaction("ns.t", SCHEMA) as change:
        change.append(rows(1, 2))
    assert lake.latest_version() == version + 1
    assert ids_of(catalog.load_table("ns.t")) == [1, 2]
    assert lake.snapshot().table("ns", "t").id in catalog.load_table("ns.t").location()
    create_transaction = catalog.create_table_transaction("ns.t", SCHEMA)
    with pytest.raises(CommitFailedException):
        create_transaction.commit_transaction()


def test_register_view_is_not_implemented(catalog: TrinityLakeCatalog) -> None:
    """Other view operations are tested in tests/server/test_views.py."""
    with pytest.raises(NotImplementedError, match="cannot be registered"):
        catalog.register_view("ns.v", "x")


def test_table_cannot_have_name_of_view(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    """Creating, renaming or registering such a table fails, and leaves no files of the table."""
    metadata_location = catalog.create_table("ns.t", SCHEMA).metadata_location
    with lake.transaction() as txn:
        txn.alter_namespace("ns", {f"{VIEW_PREFIX}v": "{}"})
    create_transaction = catalog.create_table_transaction("ns.v", SCHEMA)
    with pytest.raises(TableAlreadyExistsError):
        create_transaction.commit_transaction()
    before = unreferenced_paths(lake)
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table("ns.v", SCHEMA)
    with pytest.raises(TableAlreadyExistsError):
        catalog.rename_table("ns.t", "ns.v")
    assert unreferenced_paths(lake) == before
    with pytest.raises(ObjectExistsError):
        operations.register_table(lake, "ns", "v", metadata_location)
    with pytest.raises(ObjectExistsError), lake.transaction() as txn:
        catalog_for(txn).create_table("ns.v", SCHEMA)
    assert lake.snapshot().tables("ns") == ["t"]


def test_create_table_with_unsupported_type_leaves_no_files(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    version = lake.latest_version()
    with pytest.raises(UnsupportedTypeError, match="'wait'"):
        catalog.create_table("ns.t", pa.schema([("id", pa.int64()), ("wait", pa.duration("us"))]))
    assert lake.latest_version() == version
    assert list(lake.storage.list("tables/")) == []


def test_other_formats_and_broken_tables_raise_typed_errors(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    with lake.transaction() as txn:
        txn.create_table("ns", "lance", TableDef(table_format="LANCE"))
        txn.create_table("ns", "bare", TableDef(format_properties={}))
        txn.create_table("ns", "gone", TableDef(format_properties={"metadata_location": "tables/x/metadata/1.json"}))
        txn.create_table("ns", "bad", TableDef(format_properties={"metadata_location": "tables/y/metadata/1.json"}))
    lake.storage.create("tables/y/metadata/1.json", b'{"format-version": 2')
    assert len(catalog.list_tables("ns")) == 4
    with pytest.raises(NoSuchIcebergTableError, match="LANCE"):
        catalog.load_table("ns.lance")
    assert not catalog.table_exists("ns.lance")
    with pytest.raises(InvalidDefinitionError, match="metadata_location"):
        catalog.load_table("ns.bare")
    with pytest.raises(FileMissingError):
        catalog.load_table("ns.gone")
    with pytest.raises(CorruptFileError) as caught:
        catalog.load_table("ns.bad")
    assert "\n" not in str(caught.value)
    assert "Invalid JSON" in str(caught.value)


def test_registered_table_is_external_and_read_only(lake: Lakehouse, catalog: TrinityLakeCatalog, lakes: Lakes) -> None:
    other_lake = lakes.local("other")
    other_catalog = catalog_at(other_lake)
    other_catalog.create_namespace("ns")
    foreign_table = other_catalog.create_table("ns.t", SCHEMA)
    foreign_table.append(rows(1, 2))
    catalog = catalog_at(allowing(lake, other_lake.root))
    registered = catalog.register_table("ns.ext", foreign_table.metadata_location)
    assert lake.snapshot().table("ns", "ext").table_type == "EXTERNAL"
    assert lake.snapshot().table("ns", "ext").format_properties["metadata_location"] == foreign_table.metadata_location
    assert ids_of(catalog.load_table("ns.ext")) == [1, 2]
    files, version = {info.path for info in other_lake.storage.list()}, lake.latest_version()
    for loaded in (registered, catalog.load_table("ns.ext")):
        with pytest.raises(InvalidDefinitionError, match=r"ns\.ext"):
            loaded.append(rows(3))
    with pytest.raises(InvalidDefinitionError, match=r"ns\.ext"):
        catalog.commit_table(registered, (), (SetPropertiesUpdate(updates={"a": "b"}),))
    assert ({info.path for info in other_lake.storage.list()}, lake.latest_version()) == (files, version)
    managed_table = catalog.create_table("ns.t", SCHEMA)
    managed_table.append(rows(9))
    catalog.drop_table("ns.t")
    with pytest.raises(InvalidInputError):
        catalog.register_table("ns.back", managed_table.metadata_location)
    with pytest.raises(TableAlreadyExistsError):
        catalog.register_table("ns.ext", foreign_table.metadata_location)
    foreign_table.append(rows(7))
    catalog.register_table("ns.ext", foreign_table.metadata_location, overwrite=True)
    assert ids_of(catalog.load_table("ns.ext")) == [1, 2, 7]
    with pytest.raises(NoSuchNamespaceError):
        catalog.register_table("nothing.t", foreign_table.metadata_location)


def test_registering_io_derives_lakehouse_root_for_flat_storages() -> None:
    """The root is derived from the path, without requests."""
    io = StorageFileIO.on(MemoryStorage("memory://registering/"))
    folder = f"tables/{uuid.UUID(int=1)}/metadata"
    files = [
        f"dynamodb://lakes/lake/{folder}/0.metadata.json",
        f"dynamodb://lakes/tables/x/lake/{folder}/1.metadata.json",
    ]
    assert registering_io(io, [*files, "s3://bucket/any/2.metadata.json"]).allowed_roots.passed_roots == (
        "dynamodb://lakes/lake/",
        "dynamodb://lakes/tables/x/lake/",
        "s3://bucket/any/",
    )
    with pytest.raises(LocationNotAllowedError):
        registering_io(io, ["dynamodb://lakes/any/2.metadata.json"])


def test_concurrent_appends_of_two_catalogs_are_all_committed(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    retries = {"commit.retry.num-retries": "30", "commit.retry.min-wait-ms": "5", "commit.retry.max-wait-ms": "50"}
    catalog.create_table("ns.t", SCHEMA, properties=retries)
    version = lake.latest_version()
    failures: list[Exception] = []

    def append(first: int) -> None:
        try:
            table = load(lake).load_table("ns.t")
            for number in range(first, first + 6):
                table.append(rows(number))
        except Exception as error:  # noqa: BLE001 - reported by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=append, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert ids_of(load(lake).load_table("ns.t")) == [*range(6), *range(100, 106)]
    assert lake.latest_version() == version + 12


def test_stale_commit_raises_commit_failed(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA, properties={"commit.retry.num-retries": "0"})
    first, second = load(lake).load_table("ns.t"), load(lake).load_table("ns.t")
    first.append(rows(1))
    with pytest.raises(CommitFailedException):
        second.append(rows(2))
    second.refresh().append(rows(3))
    assert ids_of(load(lake).load_table("ns.t")) == [1, 3]


def faulty(lake: Lakehouse, *faults: Fault) -> tuple[TrinityLakeCatalog, FaultyStorage]:
    storage = FaultyStorage(lake.storage, faults, concurrency=1)
    return catalog_at(Lakehouse(storage, lake.storage_options)), storage


def test_failed_request_during_append_changes_nothing(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    logged_catalog, faulty_storage = faulty(lake)
    logged_catalog.load_table("ns.t").append(rows(2))
    writes = [request for request in faulty_storage.log if request.kind in ("create", "write")]
    assert len(writes) >= 6  # data, manifest, manifest list, metadata, definition, nodes, root, hint
    for index, request in enumerate(writes, start=1):
        if request.path == "_latest_hint.txt":
            continue
        version, before = lake.latest_version(), ids_of(catalog.load_table("ns.t"))
        kinds = [write.kind for write in writes[:index]]
        faulty_catalog, _ = faulty(lake, fail(kinds.count(request.kind), StorageFullError, kind=request.kind))
        table = faulty_catalog.load_table("ns.t")
        with pytest.raises(StorageFullError):
            table.append(rows(99))
        assert (lake.latest_version(), ids_of(catalog.load_table("ns.t"))) == (version, before)


def test_unknown_commit_outcome_raises_commit_state_unknown(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA)
    root = f"_{f'{lake.latest_version() + 1:032b}'[::-1]}.arrow"
    faulty_catalog, _ = faulty(
        lake,
        fail(1, AmbiguousWriteError, "after", kind="create", path_part=root),
        fail(2, TransientError, kind="read", path_part=root, times=100),
    )
    table = catalog.load_table("ns.t")
    table.catalog = faulty_catalog
    with pytest.raises(CommitStateUnknownException):
        table.append(rows(1))
    assert ids_of(catalog.load_table("ns.t")) == [1]


def test_lost_race_leaves_no_metadata_file(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA, properties={"commit.retry.num-retries": "0"})

    def metadata_files() -> int:
        return sum(info.path.endswith(".metadata.json") for info in lake.storage.list("tables/"))

    class RacingStorage(FaultyStorage):
        """Commits to the same table in another catalog just before the root is created."""

        raced = False

        def create(self, path: str, data: bytes) -> None:
            if not self.raced and path.startswith("_") and path.endswith(".arrow"):
                self.raced = True
                catalog.load_table("ns.t").append(rows(1))
            super().create(path, data)

    racing = catalog_at(Lakehouse(RacingStorage(lake.storage, concurrency=1), lake.storage_options))
    before = metadata_files()
    with pytest.raises(CommitFailedException, match="ns\\.t"):
        racing.load_table("ns.t").append(rows(2))
    assert metadata_files() == before + 1
    assert ids_of(table.refresh()) == [1]


def test_all_table_files_use_metered_storage(
    lake: Lakehouse, catalog: TrinityLakeCatalog, meter: MeteredStorage
) -> None:
    with meter.measure() as measured:
        table = catalog.create_table("ns.t", SCHEMA)
        table.append(rows(1, 2, 3))
    n_table_files = len(list(lake.storage.list("tables/")))
    assert n_table_files == 6  # owner, 2 metadata, manifest list, manifest, data
    stored_bytes = sum(info.size_bytes for info in lake.storage.list("tables/"))
    assert measured.counts.bytes_written > stored_bytes
    assert sum(measured.counts.requests.get(kind, 0) for kind in ("create", "write")) >= n_table_files + 4
    with meter.measure() as measured:
        assert table.scan().to_arrow().num_rows == 3
    assert measured.counts.requests == budget("scan after an append").requests
    fresh_table = catalog_at(lake).load_table("ns.t")
    with meter.measure() as measured:
        assert fresh_table.scan().to_arrow().num_rows == 3
    assert measured.counts.requests == budget("scan, first time").requests
    with meter.measure() as measured:
        assert fresh_table.scan().to_arrow().num_rows == 3
    assert measured.counts.requests == budget("scan again").requests
    assert type(load_file_io(catalog.properties)) is StorageFileIO
