"""Test that the history of a table lists the versions that changed it."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyiceberg.types import LongType, StringType

from tests.lakes import Lakes
from tests.operations.changes import expire, truncate
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.diff.table_history import table_history
from trinitylake_ops.operations.diff.versions import column_changes

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int32())})


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """Versions 2, 3, 5 and 6 create the table, append rows twice, and add a column."""
    lakehouse = lakes.local()
    catalog = catalog_at(lakehouse)
    catalog.create_namespace("sales")
    orders = catalog.create_table("sales.orders", ROWS.schema)
    orders.append(ROWS)
    catalog.create_table("sales.other", ROWS.schema)
    orders.append(ROWS.slice(0, 1))
    with orders.update_schema() as update:
        update.add_column("name", StringType())
        update.update_column("id", LongType())
    return lakehouse


def test_history_lists_versions_that_changed_the_table(lake: Lakehouse) -> None:
    history = table_history(lake, "sales", "orders")
    entries = [(entry.info.version, entry.since, entry.change.kind, entry.rows_changed) for entry in history.versions]
    assert entries == [(6, 5, "changed", 0), (5, 4, "changed", 1), (3, 2, "changed", 3), (2, 1, "added", 0)]
    assert [entry.change.after.rows for entry in history.versions if entry.change.after is not None] == [4, 4, 3, 0]
    assert history.versions[0].columns == ("added name string", "id was int, is long")
    assert history.looked_back_to == 0
    assert table_history(lake, "sales", "other").versions[0].info.version == 4


def test_history_is_bounded(lake: Lakehouse) -> None:
    assert [entry.info.version for entry in table_history(lake, "sales", "orders", most=2).versions] == [6, 5]
    history = table_history(lake, "sales", "orders", look_back=2)
    assert ([entry.info.version for entry in history.versions], history.looked_back_to) == ([6, 5], 4)
    assert table_history(lake, "sales", "nothing").versions == ()


def test_history_contains_drop_and_rollback(lake: Lakehouse) -> None:
    catalog_at(lake).drop_table("sales.orders")
    assert operations.plan_rollback(lake, 3, tables=["sales.orders"]).execute().version == 8
    newest, dropped, *_ = table_history(lake, "sales", "orders").versions
    assert (newest.change.kind, newest.rows_changed, newest.info.operation) == ("added", 3, "rollback")
    assert (dropped.change.kind, dropped.rows_changed) == ("removed", -4)


def test_changes_of_expired_versions_count_for_the_next_version(lake: Lakehouse) -> None:
    expire(lake, "4-5")
    history = table_history(lake, "sales", "orders").versions
    assert [(entry.info.version, entry.since, entry.rows_changed) for entry in history] == [
        (6, 3, 1),
        (3, 2, 3),
        (2, 1, 0),
    ]


def test_damaged_old_version_does_not_hide_newer_versions(lake: Lakehouse) -> None:
    path = lake.snapshot(5).table("sales", "orders").format_properties[METADATA_LOCATION]
    truncate(lake.storage, path)
    newest, damaged, *_ = table_history(Lakehouse(lake.storage), "sales", "orders").versions
    assert (newest.rows_changed, damaged.rows_changed) == (None, None)
    assert newest.change.after is not None and newest.change.after.rows == 4
    assert damaged.change.after is not None and damaged.change.after.rows is None


def test_column_changes_are_matched_by_id(lake: Lakehouse) -> None:
    table = catalog_at(lake).load_table("sales.orders")
    before = lake.snapshot().table("sales", "orders").schema
    with table.update_schema() as update:
        update.rename_column("name", "customer")
        update.delete_column("id")
    after = lake.snapshot().table("sales", "orders").schema
    assert column_changes(before, after) == ("dropped id", "renamed name to customer")
    assert column_changes(after, after) == ()
