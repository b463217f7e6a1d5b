"""Schemas that some engines cannot read or alter are rejected, unless the table already has or allows them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.schema import Schema
from pyiceberg.table.update import AddSchemaUpdate, SetCurrentSchemaUpdate
from pyiceberg.types import FixedType, IcebergType, ListType, LongType, NestedField, StringType, StructType

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.metadata import write_metadata
from trinitylake_ops.iceberg.metadata_rules import CASE_SENSITIVE, FIRST_RESERVED_ID, MAX_FIXED_BYTES
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.plan import plan_write

LONG = LongType()
ID_COLUMNS = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "ID", LongType(), required=False))
ALLOWED = {CASE_SENSITIVE: "true"}


def test_columns_that_differ_only_by_case_are_rejected(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    nested = StructType(
        NestedField(3, "a", LongType(), required=False), NestedField(4, "A", LongType(), required=False)
    )
    for schema in (ID_COLUMNS, Schema(NestedField(1, "part", nested, required=False))):
        with pytest.raises(InvalidDefinitionError):
            catalog.create_table("ns.t", schema)
        with pytest.raises(InvalidDefinitionError):
            catalog.create_table_transaction("ns.t", schema)
    with pytest.raises(InvalidDefinitionError):
        stage_arrow(lake, pa.table({"id": [1], "ID": [2]}), "ns", "t", mode="append")
    with pytest.raises(InvalidDefinitionError):
        plan_write(lake, "ns", "t", ID_COLUMNS)
    assert catalog.list_tables("ns") == []

    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64()), ("city", pa.string())]))
    with pytest.raises(InvalidDefinitionError), table.update_schema() as update:
        update.add_column("ID", LongType())
    with pytest.raises(InvalidDefinitionError), table.update_schema() as update:
        update.rename_column("city", "Id")
    with pytest.raises(InvalidDefinitionError):
        stage_arrow(lake, pa.table({"iD": [1]}), "ns", "t", mode="append")
    with table.update_schema() as update:
        update.rename_column("id", "Id")
    assert catalog.load_table("ns.t").schema().column_names == ["Id", "city"]


def test_property_allows_columns_that_differ_only_by_case(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", ID_COLUMNS, properties=ALLOWED)
    table.append(pa.table({"id": [1], "ID": [2]}))
    assert plan_write(lake, "ns", "u", ID_COLUMNS, properties=ALLOWED).metadata.schema().column_names == ["id", "ID"]
    with table.transaction() as txn:
        txn.remove_properties(CASE_SENSITIVE)
    with table.update_schema() as update:
        update.add_column("other", StringType())
    assert catalog.load_table("ns.t").schema().column_names == ["id", "ID", "other"], "existing columns are kept"
    with pytest.raises(InvalidDefinitionError), table.update_schema() as update:
        update.add_column("iD", LongType())
    with table.transaction() as txn:
        txn.set_properties(ALLOWED)
        with txn.update_schema() as update:
            update.add_column("iD", LongType())
    assert len(catalog.load_table("ns.t").schema().fields) == 4


def test_registration_respects_case_property(lake: Lakehouse, catalog: TrinityLakeCatalog, tmp_path: Path) -> None:
    other_catalog = InMemoryCatalog("others", warehouse=f"file://{tmp_path}/others")
    other_catalog.create_namespace("ns")
    plain = other_catalog.create_table("ns.plain", ID_COLUMNS)
    with pytest.raises(InvalidDefinitionError):
        catalog.register_table("ns.t", plain.metadata_location)
    allowed = other_catalog.create_table("ns.allowed", ID_COLUMNS, properties=ALLOWED)
    assert catalog.register_table("ns.t", allowed.metadata_location).schema().column_names == ["id", "ID"]


def test_default_value_is_rejected_before_format_version_3(catalog: TrinityLakeCatalog) -> None:
    with_default = NestedField(2, "n", LongType(), required=False, initial_default=1, write_default=1)
    with pytest.raises(InvalidDefinitionError):
        catalog.create_table("ns.t", Schema(NestedField(1, "id", LongType(), required=False), with_default))
    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64())]))
    with pytest.raises(InvalidDefinitionError), table.update_schema() as update:
        update.add_column("n", LongType(), default_value=1)
    assert catalog.load_table("ns.t").schema().column_names == ["id"]


def test_table_with_default_values_can_be_altered(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    """PyIceberg wrote such tables before this package rejected them."""
    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64())]))
    original_schema = table.metadata.schema()
    with_default = Schema(
        *(field.model_copy(update={"write_default": 1}) for field in original_schema.fields), schema_id=0
    )
    metadata = table.metadata.model_copy(update={"schemas": [with_default]})
    lake.storage.delete(table.metadata_location.removeprefix(lake.root))
    write_metadata(metadata, table.io.new_output(table.metadata_location))
    with catalog.load_table("ns.t").update_schema() as update:
        update.add_column("n", LongType())
    assert catalog.load_table("ns.t").schema().column_names == ["id", "n"]


def column(field_id: int, name: str = "c", kind: IcebergType = LONG) -> NestedField:
    return NestedField(field_id, name, kind, required=False)


UNREADABLE_COLUMNS = {
    "duplicate id": (column(2), column(2, "d")),
    "duplicate id at two levels": (column(2, "c", StructType(column(3, "e"))), column(3, "d")),
    "id of list element": (column(2, "c", ListType(3, LONG, element_required=False)), column(3, "d")),
    "reserved id": (column(FIRST_RESERVED_ID),),
    "oversized fixed": (column(2, "c", FixedType(MAX_FIXED_BYTES + 1)),),
    "oversized fixed in list": (column(2, "c", ListType(3, FixedType(2**31 - 1), element_required=False)),),
}


@pytest.mark.parametrize("columns", UNREADABLE_COLUMNS.values(), ids=UNREADABLE_COLUMNS)
def test_unreadable_column_is_rejected(catalog: TrinityLakeCatalog, columns: tuple[NestedField, ...]) -> None:
    if columns[0].field_id < FIRST_RESERVED_ID:  # a new table gets new ids
        with pytest.raises(InvalidDefinitionError):
            catalog.create_table("ns.t", Schema(column(1, "id"), *columns))
    table = catalog.create_table("ns.t", Schema(column(1, "id"), column(2, "size", FixedType(MAX_FIXED_BYTES))))
    update = AddSchemaUpdate(schema_=Schema(*table.schema().fields, *columns, schema_id=1))
    for updates in ((update,), (update, SetCurrentSchemaUpdate(schema_id=-1))):
        with pytest.raises(InvalidDefinitionError):
            catalog.commit_table(table, (), updates)
    assert len(catalog.load_table("ns.t").schemas()) == 1


def test_table_with_unreadable_columns_can_be_altered(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64())]))
    large = column(3, "large", FixedType(MAX_FIXED_BYTES + 1))
    old_schema = Schema(*table.schema().fields, *UNREADABLE_COLUMNS["duplicate id"], large, schema_id=1)
    metadata = table.metadata.model_copy(update={"schemas": [table.schema(), old_schema], "last_column_id": 3})
    lake.storage.delete(table.metadata_location.removeprefix(lake.root))
    write_metadata(metadata, table.io.new_output(table.metadata_location))
    with catalog.load_table("ns.t").update_schema() as update:
        update.add_column("n", LongType())
    assert catalog.load_table("ns.t").schema().column_names == ["id", "n"]


@pytest.mark.parametrize("name", ["format-version", "uuid", "current-snapshot-id"])
def test_reserved_property_is_rejected(catalog: TrinityLakeCatalog, name: str) -> None:
    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64())]), properties={"format-version": "2"})
    assert name not in table.properties
    with pytest.raises(InvalidDefinitionError), table.transaction() as txn:
        txn.set_properties({name: "2"})
    assert name not in catalog.load_table("ns.t").properties
