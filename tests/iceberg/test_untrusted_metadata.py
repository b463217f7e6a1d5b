"""Class names in metadata never load code, and a metadata file is accepted only for the table that it belongs to."""

from __future__ import annotations

import builtins
import importlib
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table.locations import load_location_provider

from tests.iceberg.hostile import avro_records, change_metadata, manifest_list_path, metadata_path, unsealed
from tests.iceberg.test_catalog import SCHEMA, ids_of, rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.metadata import read_table_metadata, table_metadata
from trinitylake_ops.iceberg.properties import names_code
from trinitylake_ops.iceberg.reach import entries_in, files_of, manifests_in
from trinitylake_ops.iceberg.write.plan import plan_write
from trinitylake_ops.iceberg.write.staging import stage_data_files
from trinitylake_ops.operations.compaction.tables import plan_compact_tables

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py

CODE_PROPERTIES = {
    "write.py-location-provider.impl": "this.Provider",
    "write.location-provider.impl": "org.example.Provider",
    "py-io-impl": "this.FileIO",
    "io-impl": "org.example.FileIO",
    "py-catalog-impl": "this.Catalog",
    "catalog-impl": "org.example.Catalog",
    "encryption.kms-impl": "org.example.Kms",
    "metrics-reporter-impl": "org.example.Reporter",
    "s3.retry-strategy-impl": "this.Retry",
    "s3.client-factory-impl": "org.example.Factory",
    "client.factory": "org.example.Factory",
    "auth.impl": "this.Auth",
    "lock-impl": "org.example.Lock",
    "s3.signer": "Signer",
    "s3.signer.uri": "http://example.org/",
    "parquet.crypto.factory.class": "org.example.Crypto",
    "parquet.encryption.kms.client.class": "org.example.Kms",
    " Write.Py-Location-Provider.IMPL ": "this.Provider",
}
HARMLESS_PROPERTIES = (
    "owner",
    "write.format.default",
    "write.object-storage.enabled",
    "data.class",
    "comment",
    "simpl",
    "type",
)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of modules that were imported because a file names them."""
    modules: list[str] = []
    import_module = importlib.import_module

    def recording_import(name: str, package: str | None = None) -> Any:
        if name == "this":
            modules.append(name)
        return import_module(name if name != "this" else "json", package)

    monkeypatch.setattr(importlib, "import_module", recording_import)
    return modules


def add_code_properties(content: dict[str, Any]) -> None:
    content["properties"] |= CODE_PROPERTIES


def append(lake: Lakehouse) -> object:
    return catalog_at(lake).load_table("ns.t").append(rows(7))


def overwrite(lake: Lakehouse) -> object:
    return catalog_at(lake).load_table("ns.t").overwrite(rows(8))


def delete(lake: Lakehouse) -> object:
    return catalog_at(lake).load_table("ns.t").delete("id == 1")


def upsert(lake: Lakehouse) -> object:
    return catalog_at(lake).load_table("ns.t").upsert(rows(1, 9), join_cols=["id"])


def alter(lake: Lakehouse) -> object:
    with catalog_at(lake).load_table("ns.t").transaction() as change:
        return change.set_properties(owner="me")


def stage(lake: Lakehouse) -> object:
    write = plan_write(lake, "ns", "t")
    return stage_data_files(lake, write, write.write(rows(5).to_batches()))


def compact(lake: Lakehouse) -> object:
    return plan_compact_tables(lake).execute()


def trim(lake: Lakehouse) -> object:
    return operations.plan_trim_tables(lake).execute()


@pytest.mark.parametrize("write", [append, overwrite, delete, upsert, alter, stage, compact, trim])
def test_writers_never_import_classes_named_in_metadata(
    lake: Lakehouse, catalog: TrinityLakeCatalog, imported: list[str], write: Callable[[Lakehouse], object]
) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    for number in range(1, 7):
        table.append(rows(number))
    change_metadata(lake, add_code_properties)
    with pytest.raises(AttributeError, match="Provider"):  # PyIceberg's own behavior
        load_location_provider("file:///t", {"write.py-location-provider.impl": "this.Provider"})
    assert imported == ["this"]
    imported.clear()
    write(lake)
    assert imported == []
    assert ids_of(catalog_at(lake).load_table("ns.t"))
    properties = json.loads(lake.storage.read(metadata_path(lake)))["properties"]
    if write in (append, overwrite, delete, upsert, alter):
        assert not set(CODE_PROPERTIES) & set(properties), (
            "class properties are dropped, because other engines would load them"
        )


def test_names_code_recognizes_class_properties() -> None:
    assert all(names_code(name) for name in CODE_PROPERTIES)
    assert not any(names_code(name) for name in HARMLESS_PROPERTIES)


@pytest.mark.parametrize("name", CODE_PROPERTIES)
def test_class_property_cannot_be_set(lake: Lakehouse, catalog: TrinityLakeCatalog, name: str) -> None:
    with pytest.raises(InvalidDefinitionError):
        catalog.create_table("ns.t", SCHEMA, properties={name: "x.Y"})
    table = catalog.create_table("ns.t", SCHEMA)
    with pytest.raises(InvalidDefinitionError), table.transaction() as change:
        change.set_properties({name: "x.Y"})
    assert name not in catalog.load_table("ns.t").properties


def test_path_properties_of_managed_table_are_ignored(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    path_properties = dict.fromkeys(("write.data.path", "write.metadata.path"), f"{lake.root}tables/other")
    change_metadata(lake, lambda content: content["properties"].update(path_properties))
    catalog_at(lake).load_table("ns.t").append(rows(2))
    assert not list(lake.storage.list("tables/other"))
    assert ids_of(catalog_at(lake).load_table("ns.t")) == [1, 2]


def test_connection_settings_in_table_properties_are_ignored(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    settings = {"s3.endpoint": "http://example.org/", "storage.endpoint": "http://example.org/", "root": "file:///etc"}
    change_metadata(lake, lambda content: content["properties"].update(settings))
    fresh_catalog = catalog_at(lake)
    table = fresh_catalog.load_table("ns.t")
    table.append(rows(2))
    assert table.io.storage is fresh_catalog.io.storage
    assert table.io.properties == StorageFileIO.on(lake.storage, lake.storage_options).properties


def test_name_mapping_is_not_evaluated(
    lake: Lakehouse, catalog: TrinityLakeCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_on_call(*args: object) -> None:
        raise AssertionError("content was evaluated")

    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    monkeypatch.setattr(builtins, "eval", fail_on_call)
    monkeypatch.setattr(builtins, "exec", fail_on_call)
    text = "__import__('os').system('true')"
    change_metadata(lake, lambda content: content["properties"].update({"schema.name-mapping.default": text}))
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow().num_rows == 1


def test_verify_reports_class_properties_in_metadata(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    path = change_metadata(lake, add_code_properties)
    (finding,) = operations.verify(lake).findings
    assert (finding.code, finding.path, finding.severity) == ("table-names-code", path, "error")


def test_swapped_metadata_files_are_rejected(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    for number, name in enumerate(("t", "u")):
        catalog.create_table(f"ns.{name}", SCHEMA).append(rows(number))
    paths = [metadata_path(lake, table=name) for name in ("t", "u")]
    first, second = (unsealed(lake.storage.read(path)) for path in paths)  # checksums would detect it as well
    lake.storage.write(paths[0], second)
    lake.storage.write(paths[1], first)
    for name, path in zip(("t", "u"), paths, strict=True):
        with pytest.raises(CorruptFileError) as caught:
            catalog_at(lake).load_table(f"ns.{name}")
        assert str(caught.value.path).endswith(path)
        with pytest.raises(CorruptFileError):
            list(files_of(lake.snapshot().table("ns", name), StorageFileIO.on(lake.storage)))
    findings = {(finding.code, finding.path) for finding in operations.verify(lake).findings}
    assert {("table-unreadable", path) for path in paths} <= findings


def test_metadata_with_other_uuid_is_rejected(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    definition = lake.snapshot().table("ns", "t")
    file_io = StorageFileIO.on(lake.storage)
    assert definition.format_properties["table_uuid"] == str(table_metadata(definition, file_io).table_uuid)
    other_uuid = "11111111-1111-4111-8111-111111111111"
    change_metadata(lake, lambda content: content.update({"table-uuid": other_uuid}))
    with pytest.raises(CorruptFileError, match=f"its table-uuid is {other_uuid}"):
        table_metadata(definition, file_io)
    properties_without_uuid = {
        name: value for name, value in definition.format_properties.items() if name != "table_uuid"
    }
    assert table_metadata(replace(definition, format_properties=properties_without_uuid), file_io), (
        "earlier releases did not store the UUID"
    )


@pytest.mark.parametrize("location", ["__import__('os')", "", "memory://other/tables/x", "{root}tables/", "{root}"])
def test_managed_table_with_other_location_is_rejected(
    lake: Lakehouse, catalog: TrinityLakeCatalog, location: str
) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    table_id = lake.snapshot().table("ns", "t").id
    path = change_metadata(lake, lambda content: content.update(location=location.format(root=lake.root)))
    with pytest.raises(CorruptFileError, match=f"is not the metadata of table '{table_id}': its location is") as caught:
        catalog_at(lake).load_table("ns.t")
    assert str(caught.value.path).endswith(path)


def test_swapped_manifest_lists_and_manifests_are_rejected(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    first_list = manifest_list_path(lake)
    table.append(rows(2))
    second_list = manifest_list_path(lake)
    file_io = StorageFileIO.on(lake.storage)
    metadata = read_table_metadata(file_io, lake.root + metadata_path(lake))
    latest = metadata.current_snapshot()
    assert latest is not None
    newest, oldest = manifests_in(latest, file_io)
    second_data = lake.storage.read(second_list)
    lake.storage.write(second_list, unsealed(lake.storage.read(first_list)))
    with pytest.raises(CorruptFileError):
        manifests_in(latest, file_io)
    assert not operations.verify(lake).is_clean
    lake.storage.write(second_list, second_data)
    assert len(avro_records(second_data)[1]) == 2
    path, other = (manifest.manifest_path.removeprefix(lake.root) for manifest in (newest, oldest))
    lake.storage.write(path, unsealed(lake.storage.read(other)))
    with pytest.raises(CorruptFileError):
        entries_in(newest, file_io)
    report = operations.verify(lake)
    assert path in {finding.path for finding in report.findings if finding.severity == "error"}


class _RecordsUnpickling:
    """Records when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return _unpickled.append, (1,)


_unpickled: list[int] = []


def test_extension_types_in_data_files_are_not_unpickled(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    (task,) = table.scan().plan_files()
    path = task.file.file_path.removeprefix(lake.root)
    original_rows = pq.read_table(pa.BufferReader(lake.storage.read(path)))
    extension = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(_RecordsUnpickling()),
    }
    fields = [field.with_metadata({**(field.metadata or {}), **extension}) for field in original_rows.schema]
    hostile = pa.table(original_rows.columns, schema=pa.schema(fields, metadata={"pandas": "__import__('os')"}))
    out = io.BytesIO()
    pq.write_table(hostile, out)
    lake.storage.write(path, out.getvalue())
    assert ids_of(catalog_at(lake).load_table("ns.t")) == [1]
    operations.verify(lake, deep=True)
    assert _unpickled == []


def test_settings_in_definition_properties_are_ignored(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    settings = {**CODE_PROPERTIES, "storage.endpoint": "http://example.org/", "root": "file:///etc"}
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    with lake.transaction() as txn:
        txn.alter_namespace("ns", settings)
        definition = txn.table("ns", "t")
        hostile = {**settings, **definition.format_properties}
        txn.alter_table("ns", "t", replace(definition, properties=settings, format_properties=hostile))
    fresh_catalog = catalog_at(lake)
    fresh_catalog.load_table("ns.t").append(rows(2))
    assert ids_of(fresh_catalog.load_table("ns.t")) == [1, 2]
    assert not set(settings) & set(fresh_catalog.load_table("ns.t").properties)
    fresh_catalog.create_table("ns.u", SCHEMA).append(rows(3))
    assert not set(settings) & set(fresh_catalog.load_table("ns.u").properties)
