"""Metadata that exceeds the limits is rejected before it is converted to objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyiceberg.table.metadata import TableMetadataUtil

from tests.iceberg.hostile import change_metadata, metadata_path
from tests.iceberg.test_catalog import SCHEMA, rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.metadata import MAX_ITEMS, MAX_SCHEMA_PARTS, table_metadata
from trinitylake_ops.iceberg.validation.thrift import MAX_NAME_CHARS

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py


@pytest.fixture
def table_lake(lake: Lakehouse) -> Lakehouse:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    return lake


def repeat_snapshots(content: dict[str, Any]) -> None:
    content["snapshots"] *= 2


def add_too_many_snapshots(content: dict[str, Any]) -> None:
    (snapshot,) = content["snapshots"]
    content["snapshots"] += ({**snapshot, "snapshot-id": number} for number in range(MAX_ITEMS))


def add_too_many_properties(content: dict[str, Any]) -> None:
    content["properties"] = {str(number): "" for number in range(MAX_ITEMS + 1)}


def add_too_many_summary_entries(content: dict[str, Any]) -> None:
    content["snapshots"][0]["summary"] |= {str(number): "" for number in range(MAX_ITEMS)}


def add_too_many_fields(content: dict[str, Any]) -> None:
    (schema,) = content["schemas"]
    fields = [{**schema["fields"][0], "id": number, "name": str(number)} for number in range(MAX_ITEMS)]
    content["schemas"] += ({**schema, "schema-id": number, "fields": fields} for number in (1, 2))


def add_too_many_unknown_items(content: dict[str, Any]) -> None:
    content["x"] = [[0] * (MAX_ITEMS + 1)]


def add_long_name_with_many_fields(content: dict[str, Any]) -> None:
    (schema,) = content["schemas"]
    inner_fields = [
        {"id": 200 + number, "name": f"f{number}", "required": False, "type": "int"} for number in range(3000)
    ]
    outer_field = {
        "id": 100,
        "name": "A" * 20_000,
        "required": False,
        "type": {"type": "struct", "fields": inner_fields},
    }
    schema["fields"].append(outer_field)
    content["last-column-id"] = 10_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_long_name_with_many_fields, f"more than {MAX_NAME_CHARS} characters"),
        (repeat_snapshots, "more than once"),
        (add_too_many_snapshots, f"more than {MAX_ITEMS} items"),
        (add_too_many_properties, f"more than {MAX_ITEMS} items"),
        (add_too_many_summary_entries, f"more than {MAX_ITEMS} items"),
        (add_too_many_fields, f"more than {MAX_SCHEMA_PARTS} fields"),
        (add_too_many_unknown_items, f"more than {MAX_ITEMS} items"),
    ],
)
def test_oversized_metadata_is_rejected_before_parsing(
    change: Any, message: str, table_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = change_metadata(table_lake, change)
    definition, io = table_lake.snapshot().table("ns", "t"), catalog_at(table_lake).io
    with monkeypatch.context() as patched, pytest.raises(CorruptFileError, match=message) as caught:
        patched.setattr(TableMetadataUtil, "parse_obj", lambda _: pytest.fail("metadata was parsed"))
        table_metadata(definition, io)
    assert caught.value.path == table_lake.root + path
    findings = [finding for finding in operations.verify(table_lake).findings if finding.path == path]
    assert [finding.code for finding in findings] == ["table-unreadable"]
    assert message in findings[0].message


def test_metadata_at_item_limit_is_read(table_lake: Lakehouse) -> None:
    def change(content: dict[str, Any]) -> None:
        add_too_many_properties(content)
        del content["properties"]["0"]

    change_metadata(table_lake, change)
    assert len(catalog_at(table_lake).load_table("ns.t").properties) >= MAX_ITEMS
    assert not [finding for finding in operations.verify(table_lake).findings if finding.severity == "error"]


@pytest.mark.parametrize("text", [b"", b"\0" * 1000, b'{"a":', b"[]", b"1", b'{"snapshots":[{"snapshot-id":[]}]}'])
def test_invalid_metadata_is_corrupt(text: bytes, table_lake: Lakehouse) -> None:
    table_lake.storage.write(metadata_path(table_lake), text)
    with pytest.raises(CorruptFileError):
        catalog_at(table_lake).load_table("ns.t")
    assert json.dumps([finding.message for finding in operations.verify(table_lake).findings])


def add_huge_fixed(content: dict[str, Any]) -> None:
    content["schemas"][0]["fields"].append({"id": 9, "name": "q", "required": False, "type": f"fixed[{'9' * 20}]"})


def add_huge_scale(content: dict[str, Any]) -> None:
    content["schemas"][0]["fields"].append({"id": 9, "name": "q", "required": False, "type": "decimal(38, 1000000000)"})


def add_huge_scale_to_older_schema(content: dict[str, Any]) -> None:
    older = {**content["schemas"][0], "schema-id": 99}
    older["fields"] = [{"id": 1, "name": "id", "required": False, "type": "decimal(38, 1000000000)"}]
    content["schemas"].insert(0, older)


def set_zero_buckets(content: dict[str, Any]) -> None:
    field = {"source-id": 1, "field-id": 1000, "name": "p", "transform": "bucket[0]"}
    content["partition-specs"] = [{"spec-id": 0, "fields": [field]}]


def set_sort_order_of_unknown_column(content: dict[str, Any]) -> None:
    field = {"source-id": 99, "transform": "identity", "direction": "asc", "null-order": "nulls-first"}
    content["sort-orders"] = [{"order-id": 1, "fields": [field]}]
    content["default-sort-order-id"] = 1


@pytest.mark.parametrize(
    "change",
    [
        add_huge_fixed,
        add_huge_scale,
        add_huge_scale_to_older_schema,
        set_zero_buckets,
        set_sort_order_of_unknown_column,
    ],
)
def test_loading_meaningless_metadata_raises_error_with_path(change: Any, table_lake: Lakehouse) -> None:
    """PyIceberg parses such metadata, and fails with an untyped error only when rows are read or written."""
    path = change_metadata(table_lake, change)
    with pytest.raises(CorruptFileError) as caught:
        catalog_at(table_lake).load_table("ns.t")
    assert path in str(caught.value)
    report = operations.verify(table_lake)
    assert [finding.code for finding in report.findings if finding.severity == "error"] == ["table-unreadable"]
