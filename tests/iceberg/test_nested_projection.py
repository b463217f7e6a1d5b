"""All readers return the same nulls, fields and values for nested columns."""

from __future__ import annotations

import datetime as dt
import io
import subprocess
import sys
import uuid
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.io.pyarrow as iceberg_arrow
import pytest
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, ListType, LongType, MapType, NestedField, StringType, StructType

from tests.iceberg.nested import nested_rows
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import plan_write, publish, stage_data_files
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.delete_files import RemainingRows
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.pyiceberg_patches import keep_nested_nulls
from trinitylake_ops.iceberg.read import file_batches

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py


def sorted_rows(*tables: pa.Table) -> list[str]:
    """Return rows by id, each as a string, so that NaN equals itself and -0.0 differs from 0.0."""
    rows = [row for table in tables for row in table.to_pylist()]
    return [repr(_normalized(row)) for row in sorted(rows, key=lambda row: row["id"])]


def _normalized(value: Any) -> Any:
    """Normalize UUIDs and names of the UTC time zone, which DuckDB returns in a different form."""
    if isinstance(value, dict):
        return {name: _normalized(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_normalized(item) for item in value)
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC)
    return str(value) if isinstance(value, uuid.UUID) else value


def stored_rows(table: Table) -> list[str]:
    """Return the rows as Arrow itself reads them from the files."""
    files = [table.io.new_input(task.file.file_path).open().read() for task in table.scan().plan_files()]
    return sorted_rows(*(pq.read_table(io.BytesIO(data)) for data in files))


def rows_by_reader(table: Table) -> dict[str, list[str]]:
    assert isinstance(table.io, StorageFileIO)
    rows = RemainingRows(iceberg_arrow.ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()))
    batches = [batch for task in table.scan().plan_files() for batch in file_batches(rows, task, table.io)]
    connection = table.scan().to_duckdb("t")
    read = {
        "arrow": sorted_rows(table.scan().to_arrow()),
        "batches": sorted_rows(table.scan().to_arrow_batch_reader().read_all()),
        "file_batches": sorted_rows(*(pa.Table.from_batches([batch]) for batch in batches)),
        "duckdb": sorted_rows(connection.execute("select * from t").to_arrow_table()),
    }
    connection.close()
    return read


@pytest.mark.parametrize("seed", range(4))
def test_all_readers_return_written_nested_rows(lake: Lakehouse, catalog: TrinityLakeCatalog, seed: int) -> None:
    rows = nested_rows(seed)
    table = catalog.create_table("ns.t", rows.schema)
    table.append(rows.slice(0, 10))
    write = plan_write(lake, "ns", "t")
    files = write.write(rows.slice(10).to_batches(max_chunksize=4))
    with lake.transaction(message="write") as transaction:
        publish(transaction, [stage_data_files(lake, write, files)])
    table = catalog_at(lake).load_table("ns.t")
    expected = sorted_rows(rows)
    assert stored_rows(table) == expected
    for reader, read in rows_by_reader(table).items():
        assert read == expected, reader
    nulls = table.scan().to_duckdb("t").execute("select id from t where n0 is null order by id").fetchall()
    assert [index for (index,) in nulls] == [
        row["id"] for row in rows.select(["id", "n0"]).to_pylist() if row["n0"] is None
    ]


def test_upsert_preserves_other_nested_rows(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    rows = nested_rows(7)
    table = catalog.create_table("ns.t", rows.schema)
    table.append(rows)
    table.upsert(rows.slice(3, 2).set_column(1, rows.schema.field(1), pa.array([None, True])), join_cols=["id"])
    after = catalog_at(lake).load_table("ns.t")
    changed_ids = {3, 4}
    assert [row for index, row in enumerate(stored_rows(after)) if index not in changed_ids] == [
        row for index, row in enumerate(sorted_rows(rows)) if index not in changed_ids
    ]


_ELEMENT = pa.struct([("a", pa.int32()), ("b", pa.string()), ("c", pa.int32())])
_EVOLVED = pa.schema(
    [
        ("id", pa.int64()),
        ("list", pa.list_(_ELEMENT)),
        ("map", pa.map_(_ELEMENT, _ELEMENT)),
        ("lists", pa.list_(pa.list_(_ELEMENT))),
        ("maps", pa.map_(pa.string(), pa.list_(_ELEMENT))),
        ("struct", pa.struct([("inner", pa.list_(pa.struct([("map", pa.map_(pa.string(), _ELEMENT))])))])),
        ("numbers", pa.list_(pa.list_(pa.int32()))),
    ]
)
#: The structs whose fields change. Iceberg does not allow changes of map keys.
_STRUCTS = (
    "list.element",
    "map.value",
    "lists.element.element",
    "maps.value.element",
    "struct.inner.element.map.value",
)


def _struct(number: int, is_renamed: bool) -> dict[str, Any]:
    if is_renamed:
        return {"a": number, "d": f"text {number}", "e": None}
    return {"a": number, "b": f"text {number}", "c": -number}


def _row(number: int, is_renamed: bool = False) -> dict[str, Any]:
    struct = _struct(number, is_renamed)
    return {
        "id": number,
        "list": None if number % 2 else [struct, None],
        "map": None
        if number % 3 == 1
        else [(_struct(number, False), struct), (_struct(number + 1, False), None)][: number % 3],
        "lists": [None, [], [struct, None]] if number % 2 else None,
        "maps": [("none", None), ("one", [struct]), ("empty", [])] if number % 2 else None,
        "struct": {"inner": [None, {"map": None}, {"map": [("k", struct), ("l", None)]}]} if number % 3 else None,
        "numbers": [None, [number, None]] if number % 2 else None,
    }


def test_nested_fields_evolve(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", _EVOLVED)
    table.append(pa.Table.from_pylist([_row(index) for index in range(12)], _EVOLVED))
    with table.update_schema(allow_incompatible_changes=True) as update:
        for path in _STRUCTS:
            update.rename_column(f"{path}.b", "d")
            update.delete_column(f"{path}.c")
            update.add_column((*path.split("."), "e"), StringType())
            update.update_column(f"{path}.a", LongType())
        update.update_column("numbers.element.element", LongType())
    table = catalog_at(lake).load_table("ns.t")
    expected = [repr(_row(index, is_renamed=True)) for index in range(12)]
    for reader, read in rows_by_reader(table).items():
        assert read == expected, reader
    table.append(pa.Table.from_pylist([_row(12, is_renamed=True)], table.schema().as_arrow()))
    assert sorted_rows(catalog_at(lake).load_table("ns.t").scan().to_arrow()) == [
        *expected,
        repr(_row(12, is_renamed=True)),
    ]


@pytest.mark.parametrize(
    "list_type", [pa.list_, pa.large_list, lambda schema: pa.list_(schema, 2)], ids=["list", "large", "fixed"]
)
def test_projection_handles_sliced_lists_and_maps(list_type: Any) -> None:
    element = StructType(NestedField(3, "a", IntegerType(), required=False))
    list_schema = Schema(NestedField(1, "l", ListType(2, element, element_required=False), required=False))
    lists = [[{"a": 1}, None], None, [{"a": None}, {"a": 2}], None]
    list_array = pa.array(lists, list_type(pa.struct([("a", pa.int32())])))
    map_schema = Schema(NestedField(1, "l", MapType(4, StringType(), 2, element, value_required=False), required=False))
    entries = [[("a", {"a": 1})], None, [("b", None), ("c", {"a": 2})], None]
    map_array = pa.array(entries, pa.map_(pa.string(), pa.struct([("a", pa.int32())])))
    for start in range(5):
        for end in range(start, 5):
            for schema, array, values in ((list_schema, list_array, lists), (map_schema, map_array, entries)):
                batch = pa.RecordBatch.from_arrays([array.slice(start, end - start)], ["l"])
                projected = iceberg_arrow._to_requested_schema(schema, schema, batch)
                projected.validate(full=True)
                assert projected["l"].to_pylist() == values[start:end]


@pytest.mark.parametrize(
    "program",
    [
        "import pyiceberg.io.pyarrow as p; import trinitylake_ops.iceberg.catalog",
        "import pickle, sys\n"
        "pickle.loads(b'ctrinitylake_ops.iceberg.io.file_io\\nStorageFileIO\\n.')\n"
        "assert 'pyiceberg.io.pyarrow' not in sys.modules\n"
        "import pyiceberg.io.pyarrow as p",
    ],
    ids=["pyiceberg first", "trinitylake_ops first, in a worker"],
)
def test_projection_fix_is_independent_of_import_order(program: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(p.ArrowProjectionVisitor.list.__module__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.strip() == iceberg_arrow.ArrowProjectionVisitor.list.__module__


def test_fixed_pyiceberg_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    original = iceberg_arrow.ArrowProjectionVisitor.list

    def fixed_projection(*arguments: Any) -> Any:
        return original(*arguments)

    monkeypatch.setattr(iceberg_arrow.ArrowProjectionVisitor, "list", fixed_projection)
    keep_nested_nulls()
    assert iceberg_arrow.ArrowProjectionVisitor.list is fixed_projection
