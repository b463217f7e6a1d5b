"""Test that rows of two versions are compared by content within limits, and shown only if samples are requested."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import DecimalType, LongType, NestedField

from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.operations.diff import rows as row_changes
from trinitylake_ops.operations.diff.rows import ColumnRange, RowChanges, RowCounter
from trinitylake_ops.operations.diff.versions import TableStates


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


def publish(lake: Lakehouse, rows: dict[str, Any], mode: Any = "replace_table", **options: Any) -> int:
    staged = stage_arrow(lake, pa.table(rows), "ns", "t", mode=mode, **options)
    publish_once(lake, [staged], publication_id(staged.metadata_location))
    return lake.latest_version()


def count(lake: Lakehouse, before: int, after: int, **limits: Any) -> RowChanges:
    states = TableStates(lake)
    end_states = [states.of(lake.snapshot(version), "ns", "t") for version in (before, after)]
    return RowCounter(states.io, **limits).count(*end_states)


def counts(changes: RowChanges) -> tuple[int | None, int | None, int | None]:
    return changes.removed, changes.added, changes.changed


def test_rows_are_compared_by_content_and_not_by_file(lake: Lakehouse) -> None:
    first = publish(lake, {"n": [1, 2, 2, 3], "text": ["a", "b", "b", None]})
    second = publish(lake, {"n": [3, 2, 1, 2], "text": [None, "b", "a", "b"]})
    assert counts(count(lake, first, second)) == (0, 0, 0), "the same rows in another file"
    third = publish(lake, {"n": [2, 3, 9], "text": ["b", None, "c"]})
    changes = count(lake, second, third)
    assert counts(changes) == (2, 1, None), "one of two equal rows, and row 1"
    assert changes.ranges == (ColumnRange(column="n", before=("1", "2"), after=("9", "9")),)
    assert changes.samples == ()


def test_rows_with_a_key_are_paired(lake: Lakehouse) -> None:
    decimal_type = DecimalType(9, 2)
    schema = Schema(
        NestedField(1, "id", LongType(), required=True), NestedField(2, "price", decimal_type), identifier_field_ids=[1]
    )
    versions = []
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        table = catalog.create_table("ns.t", schema)
        for rows in ({1: "1.50", 2: "2.00", 3: "3.00"}, {2: "-2.00", 3: "3.00", 4: "4.00"}):
            records = [{"id": key, "price": Decimal(price)} for key, price in rows.items()]
            write = table.overwrite if versions else table.append
            write(pa.Table.from_pylist(records, table.schema().as_arrow()))
            versions.append(lake.latest_version())
    changes = count(lake, *versions)
    assert counts(changes) == (1, 1, 1)
    assert ColumnRange(column="price", before=("1.50", "2.00"), after=("-2.00", "4.00")) in changes.ranges


def test_text_ranges_require_samples(lake: Lakehouse) -> None:
    first = publish(lake, {"name": [f"person {number}" for number in range(30)], "day": [date(2026, 1, 1)] * 30})
    last = publish(lake, {"name": ["person x"], "day": [date(2026, 2, 1)]})
    changes = count(lake, first, last)
    assert [column_range.column for column_range in changes.ranges] == ["day"]
    assert "person" not in str(changes)
    with_samples = count(lake, first, last, samples=10)
    assert ("before", "person 0", "2026-01-01") in with_samples.samples
    assert ("after", "person x", "2026-02-01") in with_samples.samples
    assert len(with_samples.samples) == 6 and with_samples.sample_columns == ("name", "day")
    assert [column_range.column for column_range in with_samples.ranges] == ["name", "day"]


def test_only_differing_files_are_read(lake: Lakehouse) -> None:
    first = publish(lake, {"n": list(range(10_000))})
    last = publish(lake, {"n": [1]}, mode="append")
    assert counts(count(lake, first, last, rows_left=1)) == (0, 1, None)
    assert counts(count(lake, last, first, rows_left=1)) == (1, 0, None)


def test_exceeded_limits_are_reported(lake: Lakehouse) -> None:
    first, last = publish(lake, {"n": [1]}), publish(lake, {"n": [2]})
    for limits in ({"bytes_left": 1}, {"rows_left": 1}, {"ends_s": 0.0}):
        changes = count(lake, first, last, **limits)
        assert counts(changes) == (None, None, None)
        assert changes.note.startswith("not counted: ")
    counter = RowCounter(TableStates(lake).io)
    assert counter.bytes_left == row_changes.MAX_BYTES


def test_added_columns_and_wider_types_do_not_count(lake: Lakehouse) -> None:
    first = publish(lake, {"n": pa.array([1, 2], pa.int32()), "old": ["x", "y"]}, mode="append")
    with catalog_at(lake) as catalog, catalog.load_table("ns.t").update_schema() as update:
        update.add_column("new", LongType())
        update.rename_column("old", "renamed")
        update.update_column("n", LongType())
    last = publish(lake, {"n": [3], "renamed": ["z"], "new": [5]}, mode="append")
    assert counts(count(lake, first, last)) == (0, 1, None)
    assert counts(count(lake, last, first)) == (1, 0, None)
    table = catalog_at(lake).load_table("ns.t")
    table.overwrite(table.scan().to_arrow())
    assert counts(count(lake, first, lake.latest_version())) == (0, 1, None)


def test_unreadable_file_is_reported(lake: Lakehouse) -> None:
    first, last = publish(lake, {"n": [1]}), publish(lake, {"n": [2]})
    for info in lake.storage.list("tables/"):
        if info.path.endswith(".parquet"):
            lake.storage.delete(info.path)
    assert count(lake, first, last).note.startswith("not counted: ")
    assert count(lake, 0, last).note == "not counted: only one version has a readable state of this table"
