"""Test the registration of existing tables and catalogs."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog

from tests.lakes import Lakes, allowing, listed, table
from tests.operations.changes import ROWS, append_rows, create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    InvalidLocationError,
    InvalidNameError,
    NamespaceNotFoundError,
    ObjectExistsError,
    StorageError,
    TableHasAnotherNameError,
    UnsupportedTypeError,
)
from trinitylake_ops.format.definitions import DataType, TableDef
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.catalog import catalog_at


@pytest.fixture
def lake(lakes: Lakes, tmp_path_factory: pytest.TempPathFactory) -> Lakehouse:
    """A lakehouse whose operator allows access to the folders of all tests."""
    return allowing(lakes.memory(), tmp_path_factory.getbasetemp())


def make_catalog(folder: Path) -> SqlCatalog:
    """Return a catalog of two tables in ``sales``, one in ``sales.eu`` and one in ``hr``, all with rows."""
    catalog = SqlCatalog("source", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    for namespace in (("sales",), ("sales", "eu"), ("hr",)):
        catalog.create_namespace(namespace)
    for name in (("sales", "orders"), ("sales", "items"), ("sales", "eu", "orders"), ("hr", "staff")):
        catalog.create_table(name, ROWS.schema).append(ROWS)
    return catalog


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlCatalog]:
    """A shared catalog that tests must not change."""
    catalog = make_catalog(tmp_path_factory.mktemp("source"))
    yield catalog
    catalog.close()


@pytest.fixture
def changing_source(tmp_path: Path) -> Iterator[SqlCatalog]:
    catalog = make_catalog(tmp_path)
    yield catalog
    catalog.close()


def location_of(source: Catalog, *identifier: str) -> str:
    return source.load_table(identifier).metadata_location


def read_ids(lake: Lakehouse, namespace: str, name: str, version: int | None = None) -> list[int]:
    return sorted(catalog_at(lake, version).load_table((namespace, name)).scan().to_arrow()["id"].to_pylist())


def test_table_is_registered_by_its_metadata_file(lake: Lakehouse, changing_source: SqlCatalog, tmp_path: Path) -> None:
    create(lake, "ns")
    files = {path: path.read_bytes() for path in (tmp_path / "warehouse").rglob("*") if path.is_file()}
    location = location_of(changing_source, "sales", "orders")
    version = operations.register_table(lake, "ns", "t", location)
    definition = lake.snapshot(version).table("ns", "t")
    assert (definition.table_type, definition.table_format) == ("EXTERNAL", "ICEBERG")
    table_uuid = str(changing_source.load_table("sales.orders").metadata.table_uuid)
    assert definition.format_properties == {"metadata_location": location, "table_uuid": table_uuid}
    assert [(column.name, column.type) for column in definition.schema.columns] == [("id", DataType.INT8)]
    assert definition.id
    assert read_ids(lake, "ns", "t") == [1, 2, 3]
    assert version == lake.latest_version()
    info = next(lake.history(limit=1))
    assert (info.operation, info.message) == ("register-table", "ns.t")
    assert {path: path.read_bytes() for path in files} == files
    assert operations.verify(lake).findings == ()
    changing_source.load_table("sales.orders").append(ROWS)
    assert read_ids(lake, "ns", "t") == [1, 2, 3], "later commits become visible when the table is registered again"
    catalog_at(lake).register_table("ns.t", location_of(changing_source, "sales", "orders"), overwrite=True)
    assert read_ids(lake, "ns", "t") == [1, 1, 2, 2, 3, 3]


def test_locations_are_normalized_and_table_type_is_set(lake: Lakehouse, source: SqlCatalog) -> None:
    create(lake, "ns")
    location = location_of(source, "sales", "orders")
    data = Path(location.removeprefix("file://")).read_bytes()
    lake.storage.create("external/metadata/1.metadata.json", data)
    operations.register_table(lake, "ns", "a", location.removeprefix("file://"))
    operations.register_table(lake, "ns", "b", "external/metadata/1.metadata.json", table_type="FEDERATED")
    operations.register_table(lake, "ns", "c", f"{lake.root}external/metadata/1.metadata.json")
    definitions = {name: lake.snapshot().table("ns", name) for name in ("a", "b", "c")}
    assert {name: definition.table_type for name, definition in definitions.items()} == {
        "a": "EXTERNAL",
        "b": "FEDERATED",
        "c": "EXTERNAL",
    }
    assert [definition.format_properties["metadata_location"] for definition in definitions.values()] == [
        location,
        "external/metadata/1.metadata.json",
        "external/metadata/1.metadata.json",
    ]
    assert read_ids(lake, "ns", "b") == [1, 2, 3]


def test_unregistrable_tables_raise_typed_errors(lake: Lakehouse, source: SqlCatalog, tmp_path: Path) -> None:
    create(lake, "ns", "taken")
    location = location_of(source, "sales", "orders")
    (tmp_path / "text.json").write_text('{"not": "iceberg"}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    nanoseconds = json.loads(Path(location.removeprefix("file://")).read_text())
    nanoseconds["schemas"][0]["fields"][0]["type"] = "timestamp_ns"
    (tmp_path / "ns.json").write_text(json.dumps(nanoseconds))
    version, files = lake.latest_version(), listed(lake.storage)
    for arguments, error, message in (
        (("ns", "t", f"{tmp_path}/text.json"), CorruptFileError, "not valid Iceberg table metadata"),
        (("ns", "t", f"{tmp_path}/binary.json"), CorruptFileError, "not valid Iceberg table metadata"),
        (("ns", "t", f"{tmp_path}/ns.json"), UnsupportedTypeError, "timestamp"),
        (("ns", "t", f"{tmp_path}/nothing.json"), FileMissingError, "nothing.json"),
        (("ns", "t", "nothing/1.metadata.json"), FileMissingError, "nothing/1"),
        (("ns", "t", "../1.metadata.json"), InvalidLocationError, "'..'"),
        (("missing", "t", location), NamespaceNotFoundError, "missing"),
        (("ns", "taken", location), ObjectExistsError, "ns.taken already exists"),
        (("ns", "a b", location), InvalidNameError, "a b"),
    ):
        with pytest.raises(error, match=message):
            operations.register_table(lake, *arguments)
    with pytest.raises(InvalidInputError, match="'MANAGED'"):
        operations.register_table(lake, "ns", "t", location, table_type="MANAGED")
    assert (lake.latest_version(), listed(lake.storage)) == (version, files)


def test_dropped_managed_table_becomes_managed_again(lake: Lakehouse, lakes: Lakes) -> None:
    append_rows(lake)
    before = lake.snapshot().table("ns", "t")
    with lake.transaction() as txn:
        txn.drop_table("ns", "t")
    location = before.format_properties["metadata_location"]
    operations.register_table(lake, "ns", "restored", location)
    definition = lake.snapshot().table("ns", "restored")
    assert (definition.table_type, definition.id) == ("MANAGED", before.id)
    with pytest.raises(TableHasAnotherNameError):
        operations.register_table(lake, "ns", "second", lake.root + location)
    # The folder of a former lakehouse at this root belongs to another lakehouse.
    lake.storage.write(owner_path(before.id), b'{"lakehouse_id": "another"}')
    operations.register_table(lake, "ns", "foreign", location)
    lake.storage.delete(owner_path(before.id))
    operations.register_table(lake, "ns", "unowned", lake.root + location)
    for name in ("foreign", "unowned"):
        assert lake.snapshot().table("ns", name).table_type == "EXTERNAL"
    other = lakes.local("other")
    append_rows(other)
    other_location = other.snapshot().table("ns", "t").format_properties["metadata_location"]
    operations.register_table(lake, "ns", "theirs", other.root + other_location)
    assert lake.snapshot().table("ns", "theirs").table_type == "EXTERNAL"


def test_uncommitted_metadata_file_is_rejected(lake: Lakehouse) -> None:
    """The writer of a failed commit may still delete the file and all files that it refers to."""
    append_rows(lake)
    location = lake.snapshot().table("ns", "t").format_properties["metadata_location"]
    staged_location = f"{location.rpartition('/')[0]}/00009-{uuid.uuid4()}.metadata.json"
    lake.storage.create(staged_location, lake.storage.read(location))
    before = lake.latest_version()
    with pytest.raises(InvalidInputError):
        operations.register_table(lake, "ns", "second", staged_location)
    assert lake.latest_version() == before
    with lake.transaction() as txn:
        txn.create_table("ns", "z", table())  # the search includes tables of the latest version
    with pytest.raises(TableHasAnotherNameError):
        operations.register_table(lake, "ns", "second", lake.root + location)
    with lake.transaction() as txn:
        txn.drop_table("ns", "t")
    operations.register_table(lake, "ns", "second", lake.root + location)


def test_catalog_is_registered_in_one_commit(lake: Lakehouse, source: SqlCatalog) -> None:
    create(lake, "hr", "ours")
    version = lake.latest_version()
    report = operations.register_catalog(lake, source)
    assert (report.base_version, report.version) == (version, version + 1)
    assert lake.latest_version() == version + 1
    assert report.namespaces == ("sales", "sales.eu")
    assert sorted(report.tables) == ["hr.staff", "sales.eu.orders", "sales.items", "sales.orders"]
    assert (report.known, report.not_iceberg) == ((), ())
    assert lake.snapshot().tables("sales") == ["items", "orders"]
    assert read_ids(lake, "sales.eu", "orders") == read_ids(lake, "hr", "staff") == [1, 2, 3]
    assert {definition(lake, "sales", name).table_type for name in ("items", "orders")} == {"EXTERNAL"}
    info = next(lake.history(limit=1))
    assert (info.operation, info.message) == ("register-table", "catalog source")
    assert "4 tables registered" in str(report)
    assert json.loads(report.to_json())["version"] == version + 1
    assert operations.verify(lake).findings == ()


def definition(lake: Lakehouse, namespace: str, name: str) -> TableDef:
    return lake.snapshot().table(namespace, name)


def test_registered_tables_with_same_metadata_are_skipped(lake: Lakehouse, source: SqlCatalog) -> None:
    operations.register_catalog(lake, source, namespaces=["hr"])
    assert lake.snapshot().namespaces() == ["hr"]
    registered_staff = definition(lake, "hr", "staff")
    report = operations.register_catalog(lake, source, namespaces=["sales.eu", "hr", "sales.eu"])
    assert (report.tables, report.known) == (("sales.eu.orders",), ("hr.staff",))
    assert definition(lake, "hr", "staff") == registered_staff
    first_report = operations.register_catalog(lake, source)
    repeated = operations.register_catalog(lake, source)
    assert (repeated.version, repeated.tables, len(repeated.known)) == (first_report.version, (), 4)
    assert lake.latest_version() == first_report.version
    with pytest.raises(InvalidInputError, match="'sale'"):
        operations.register_catalog(lake, source, namespaces=["sale"])


def test_conflicts_are_reported_before_any_write(lake: Lakehouse, changing_source: SqlCatalog) -> None:
    operations.register_catalog(lake, changing_source, namespaces=["hr"])
    changing_source.load_table("hr.staff").append(ROWS)
    create(lake, "sales", "orders")
    version, files = lake.latest_version(), listed(lake.storage)
    with pytest.raises(ObjectExistsError, match=r"sales\.orders"):
        operations.register_catalog(lake, changing_source)
    assert (lake.latest_version(), listed(lake.storage)) == (version, files)


def test_colliding_and_invalid_names_are_rejected(lake: Lakehouse, lakes: Lakes, changing_source: SqlCatalog) -> None:
    other = catalog_at(lakes.memory("other"))
    other.create_namespace(("a.b",))
    other.create_table(("a.b", "t"), ROWS.schema)
    assert operations.register_catalog(lake, ProxyCatalog(other)).namespaces == ("a.b",)

    with pytest.raises(ObjectExistsError, match=r"a\.b\.t"):
        operations.register_catalog(lakes.memory("fresh"), CollidingCatalog(other))
    changing_source.create_namespace("with space")
    changing_source.create_table(("with space", "t"), ROWS.schema)
    with pytest.raises(InvalidNameError):
        operations.register_catalog(lake, changing_source)
    assert not lake.snapshot().has_namespace("sales")


class ProxyCatalog(SqlCatalog):
    """A catalog with a table of another catalog."""

    def __init__(self, catalog: Catalog):
        self.name, self.properties, self.catalog = "proxy", {}, catalog

    def list_namespaces(self, namespace: object = ()) -> list[tuple[str, ...]]:
        return [] if namespace else [("a.b",)]

    def list_tables(self, namespace: object) -> list[tuple[str, ...]]:
        return [("a.b", "t")]

    def load_table(self, identifier: object) -> object:  # type: ignore[override]
        return self.catalog.load_table(("a.b", "t"))


class CollidingCatalog(ProxyCatalog):
    """A catalog that lists a table in two namespaces whose names collide."""

    def list_namespaces(self, namespace: object = ()) -> list[tuple[str, ...]]:
        return {(): [("a",), ("a.b",)], ("a",): [("a", "b")]}.get(namespace, [])  # type: ignore[call-overload]

    def list_tables(self, namespace: object) -> list[tuple[str, ...]]:
        return [] if namespace == ("a",) else [("a.b", "t")]


def test_another_lakehouse_is_registered_as_catalog(lake: Lakehouse, lakes: Lakes) -> None:
    other = lakes.local("other")
    lake = allowing(lake, other.root)
    append_rows(other)
    with other.transaction() as txn:
        txn.create_table("ns", "lance", TableDef(table_format="LANCE"))
    properties = {"py-catalog-impl": "trinitylake_ops.iceberg.catalog.TrinityLakeCatalog", "root": other.root}
    options = {f"storage.{name}": value for name, value in other.storage_options.items()}
    report = operations.register_catalog(lake, "other", {**properties, **options})
    assert (report.tables, report.not_iceberg) == (("ns.t",), ("ns.lance",))
    assert read_ids(lake, "ns", "t") == [1, 2, 3]
    assert lake.snapshot().table("ns", "t").table_type == "EXTERNAL"


def test_catalog_errors_contain_no_properties(lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError) as raised:
        operations.register_catalog(lake, "nothing", {"token": "a-secret-token"})
    assert "secret" not in str(raised.value)
    source = load_catalog("source", type="sql", uri=f"sqlite:///{tmp_path}/c.db", token="a-secret-token")

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("a-secret-token was rejected\nsecond line")

    monkeypatch.setattr(type(source), "list_namespaces", fail)
    with pytest.raises(StorageError, match="'source'"):
        operations.register_catalog(lake, source)
    monkeypatch.undo()
    source.create_namespace("ns")
    table = source.create_table("ns.t", pa.schema([("id", pa.int64())]), location=f"file://{tmp_path}/t")
    Path(table.metadata_location.removeprefix("file://")).write_text("damaged")
    with pytest.raises(StorageError, match=r"ns\.t"):
        operations.register_catalog(lake, source)
    source.close()
    assert lake.latest_version() == 0


def test_file_readable_only_by_the_catalog_is_rejected(lake: Lakehouse, source: SqlCatalog, tmp_path: Path) -> None:
    class UnreadableCatalog(ProxyCatalog):
        def load_table(self, identifier: object) -> object:  # type: ignore[override]
            hidden_table = source.load_table("hr.staff")
            hidden_table.metadata_location = f"file://{tmp_path}/hidden.metadata.json"
            return hidden_table

    with pytest.raises(FileMissingError, match=r"a\.b\.t"):
        operations.register_catalog(lake, UnreadableCatalog(source))
    assert lake.latest_version() == 0
