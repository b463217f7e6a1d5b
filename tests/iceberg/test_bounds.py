"""Readers tolerate invalid column bounds in manifests, and compaction and copies repair them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.expressions import EqualTo, parser
from pyiceberg.expressions.visitors import manifest_evaluator
from pyiceberg.manifest import DataFile, ManifestFile, PartitionFieldSummary
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import NestedField, StringType

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.delete_files import planned_tasks
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.iceberg.validation.bounds import FaultyBounds, column_types, valid_bounds
from trinitylake_ops.iceberg.write.data_files import write_data_files

TEXT = "A" * 15 + "\u2022 bullet"
LOWER = TEXT.encode()[:16]  # ends in the middle of a character
ROWS = pa.table({"k": ["k1", "k2"], "text": [TEXT, "zzzz"]})
SCHEMA = {"type": "struct", "fields": [
    {"id": 1, "name": "text", "type": "string", "required": False},
    {"id": 2, "name": "n", "type": "long", "required": False},
    {"id": 3, "name": "part", "required": False, "type": {"type": "struct", "fields": [
        {"id": 4, "name": "inner", "type": "string", "required": False},
        {"id": 5, "name": "list", "required": False, "type": {
            "type": "list", "element-id": 6, "element": "string", "element-required": False}},
    ]}},
    {"id": 7, "name": "i", "type": "int", "required": False},
    {"id": 8, "name": "u", "type": "uuid", "required": False},
    {"id": 9, "name": "d", "type": "decimal(20, 2)", "required": False},
    {"id": 10, "name": "f", "type": "fixed[3]", "required": False},
    {"id": 11, "name": "b", "type": "binary", "required": False},
]}  # fmt: skip
TYPES = column_types(json.dumps(SCHEMA))


def create_table_with_invalid_bounds(catalog: TrinityLakeCatalog) -> None:
    """Create a table whose manifest has the lower bound that DuckDB writes."""
    table = catalog.create_table("ns.t", ROWS.schema)
    assert isinstance(table.io, StorageFileIO)
    (file,) = write_data_files(table.io, table.metadata, ROWS.to_batches())
    file.lower_bounds[2] = LOWER
    with table.transaction() as txn, txn.update_snapshot().fast_append() as append:
        append.append_data_file(file)


def live_files(catalog: TrinityLakeCatalog) -> list[DataFile]:
    table = catalog.load_table("ns.t")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert isinstance(table.io, StorageFileIO)
    io = table.io
    return [entry.data_file for manifest in manifests_in(snapshot, io) for entry in entries_in(manifest, io)]


def int_bytes(value: int) -> bytes:
    return struct.pack("<i", value)


def long_bytes(value: int) -> bytes:
    return struct.pack("<q", value)


@pytest.mark.parametrize(
    ("column", "lower", "upper"),
    [
        (1, b"abc", b"abd"),
        (1, b"", "\u2022".encode()),
        (2, long_bytes(-1), long_bytes(1)),
        (2, int_bytes(-1), int_bytes(1)),
        (4, b"a", b"b"),
        (7, int_bytes(1), int_bytes(1)),
        (8, bytes(16), bytes(16)),
        (9, b"\x04\xe2", b"\x04\xe2"),
        (10, b"abc", b"abd"),
        (11, b"\xff\xfe", b"\xff"),
        (99, LOWER, b""),
    ],
)
def test_valid_bounds_are_unchanged(column: int, lower: bytes, upper: bytes) -> None:
    assert valid_bounds({column: lower}, {column: upper}, TYPES) is None


@pytest.mark.parametrize(
    ("column", "lower", "upper", "expected"),
    [
        (1, LOWER, b"B", ({1: b"A" * 15}, {1: b"B"})),
        (4, LOWER, b"B", ({4: b"A" * 15}, {4: b"B"})),
        (6, LOWER, b"B", ({6: b"A" * 15}, {6: b"B"})),
        (1, b"\xe2\x80", b"\xe2\x80\xa3", ({1: b""}, {1: b"\xe2\x80\xa3"})),
        (1, b"a", b"b\xe2\x80", ({1: b"a"}, {})),
        (1, b"b", b"a", ({}, {})),
        (2, b"\0\0\0", long_bytes(1), ({}, {2: long_bytes(1)})),
        (7, long_bytes(1), int_bytes(1), ({}, {7: int_bytes(1)})),
        (8, bytes(16), bytes(15), ({8: bytes(16)}, {})),
        (9, b"", b"\x01", ({}, {9: b"\x01"})),
        (10, b"ab", b"abc", ({}, {10: b"abc"})),
    ],
)
def test_invalid_bounds_are_repaired_or_dropped(
    column: int, lower: bytes, upper: bytes, expected: tuple[dict[int, bytes], dict[int, bytes]]
) -> None:
    assert valid_bounds({column: lower}, {column: upper}, TYPES) == expected


@given(st.text(max_size=12), st.integers(0, 48))
def test_truncated_lower_bound_remains_a_lower_bound(text: str, n_bytes: int) -> None:
    truncated = text.encode(errors="replace")[:n_bytes]
    repaired = valid_bounds({1: truncated}, {}, TYPES)
    lower = truncated if repaired is None else repaired[0][1]
    assert text.startswith(lower.decode())


@pytest.mark.parametrize("schema", [None, "", "{", "[" * 100_000, "17", '{"id": "x", "type": 3}', b"\xff"])
def test_invalid_schema_has_no_column_types(schema: str | bytes | None) -> None:
    assert column_types(schema) == {}


def test_readers_repair_invalid_bounds(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    create_table_with_invalid_bounds(catalog)
    table = catalog.load_table("ns.t")
    for value, expected in (("zzzz", 1), (TEXT, 1), ("A", 0)):
        row_filter = EqualTo("text", value)
        assert table.scan(row_filter).to_arrow().num_rows == expected
        assert isinstance(table.io, StorageFileIO)
        assert len(planned_tasks(table.metadata, table.io, row_filter)) == (1 if value != "A" else 0)
    table.upsert(pa.table({"k": ["k3"], "text": ["zzzz"]}), ["text"])
    assert sorted(catalog.load_table("ns.t").scan().to_arrow()["k"].to_pylist()) == ["k1", "k3"]
    assert not any(isinstance(file, FaultyBounds) for file in live_files(catalog)), (
        "the new manifest has repaired bounds"
    )


def test_verify_reports_invalid_bounds_and_compaction_repairs_them(
    lake: Lakehouse, catalog: TrinityLakeCatalog
) -> None:
    create_table_with_invalid_bounds(catalog)
    for _ in range(2):
        report = operations.verify(lake, incremental=True)
        assert [(finding.code, finding.severity) for finding in report.findings] == [("table-bounds", "warning")]
        assert report.damaged_versions == ""
    assert [type(file) for file in live_files(catalog)] == [FaultyBounds]
    (compacted,) = operations.plan_compact_tables(lake).execute().tables
    assert (compacted.files_before, compacted.files_after) == (1, 1)
    assert {type(file) for file in live_files(catalog)} == {DataFile}
    assert operations.plan_compact_tables(lake).is_empty


def test_copy_has_valid_bounds(lake: Lakehouse, catalog: TrinityLakeCatalog, tmp_path: Path) -> None:
    create_table_with_invalid_bounds(catalog)
    operations.plan_export(lake, "full", "full", target=f"file://{tmp_path}/copy").execute()
    copy = catalog_at(Lakehouse.open(f"file://{tmp_path}/copy"))
    assert [(type(file), file.lower_bounds[2]) for file in live_files(copy)] == [(DataFile, b"A" * 15)]


def test_invalid_partition_summary_excludes_no_manifest() -> None:
    schema = Schema(NestedField(1, "text", StringType(), required=False))
    spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "text"))
    evaluate = manifest_evaluator(spec, schema, parser.parse("text = 'zzzz'"), case_sensitive=True)
    summary = PartitionFieldSummary(False, False, LOWER, b"A" * 14 + b"B")
    manifest = ManifestFile.from_args(
        manifest_path="m.avro", manifest_length=1, partition_spec_id=0, partitions=[summary]
    )
    assert evaluate(manifest)
