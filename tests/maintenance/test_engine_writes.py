"""What other engines write, and what each operation does with it (docs/engine-writes.md)."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyiceberg.table.snapshots import Operation

from tests.engine_tables import EngineTable, make_table, rows
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse, maintenance


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


@pytest.fixture
def positions(lake: Lakehouse) -> EngineTable:
    """Two files of three rows, of each of which one is deleted by one file, and of the second one more by its own."""
    table = make_table(lake, "positions")
    first, second = table.append(rows(1, 2, 3)), table.append(rows(4, 5, 6))
    table.delete_positions({first: [0], second: [1]})
    table.delete_positions({second: [2]})
    return table


@pytest.fixture
def equality(lake: Lakehouse) -> EngineTable:
    """Rows that were deleted by their values, nulls among them, and written again."""
    table = make_table(lake, "equality")
    table.append(rows(1, 2, 3, None))
    table.append(rows(1, 9, place="b"))
    table.delete_equal(pa.table({"id": pa.array([1, None], pa.int64()), "place": ["a", "a"]}))
    table.append(rows(1))
    return table


def test_compaction_applies_position_deletes(lake: Lakehouse, positions: EngineTable) -> None:
    assert positions.ids() == [2, 3, 4]
    before = lake.latest_version()
    report = maintenance.plan_compact_tables(lake).execute()
    assert [table.table for table in report.tables] == ["ns.positions"]
    assert positions.ids() == [2, 3, 4] == positions.ids(before)
    summary = positions.loaded.current_snapshot().summary
    assert summary.operation == Operation.REPLACE
    totals = ("total-records", "total-data-files", "total-delete-files", "total-position-deletes")
    assert [summary[name] for name in totals] == ["3", "1", "0", "0"]
    assert maintenance.plan_compact_tables(lake).is_empty
    assert maintenance.verify(lake, deep=True).findings == ()


def test_compaction_applies_equality_deletes(lake: Lakehouse, equality: EngineTable) -> None:
    maintenance.plan_compact_tables(lake).execute()
    found = equality.loaded.scan().to_arrow().to_pylist()
    assert sorted((row["id"], row["place"]) for row in found) == [(1, "a"), (1, "b"), (2, "a"), (3, "a"), (9, "b")]
    summary = equality.loaded.current_snapshot().summary
    assert [summary[f"total-{name}"] for name in ("records", "equality-deletes", "delete-files")] == ["5", "0", "0"]


def test_a_full_export_has_position_deletes_of_its_own_paths(
    lakes: Lakes, lake: Lakehouse, positions: EngineTable
) -> None:
    root = lakes.root("copy")
    maintenance.plan_export(lake, "x", "full", target=root).execute()
    copy = EngineTable(Lakehouse.open(root), "positions")
    assert copy.ids() == [2, 3, 4]
    assert maintenance.verify(copy.lake, deep=True).findings == ()
    with lake.transaction() as txn:
        txn.drop_table("ns", "positions")
    maintenance.plan_restore(lake, "x").execute()
    assert positions.ids() == [2, 3, 4]
