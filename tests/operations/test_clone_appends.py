"""Test appends to the same table in a clone and its parent."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.lakes import Lakes
from tests.operations.aging import Aging
from tests.operations.changes import ROWS, append_rows, drop, overwrite_rows
from tests.operations.copies import files, rows
from trinitylake_ops import Lakehouse, TableDef, operations
from trinitylake_ops.errors import CommitConflictError
from trinitylake_ops.iceberg.catalog import catalog_at

NAME = "feature"
INITIAL_ROWS = [1, 2, 3]


@pytest.fixture
def parent(aging: Aging, lakes: Lakes) -> Aging:
    append_rows(aging.lake)
    operations.plan_clone(aging.lake, root_of(lakes), NAME).execute()
    return aging


@pytest.fixture
def clone(parent: Aging, lakes: Lakes) -> Lakehouse:
    return Lakehouse.open(root_of(lakes))


def root_of(lakes: Lakes) -> str:
    return lakes.named_root("clone")  # deleted at the end of the test


def append(lake: Lakehouse, *ids: int) -> None:
    catalog_at(lake).load_table("ns.t").append(pa.table({"id": pa.array(ids, pa.int64())}, ROWS.schema))


def promote(lake: Lakehouse) -> operations.PromotionPlan:
    plan = operations.plan_promotion(lake, NAME)
    plan.execute(plan.digest)
    return plan


def refresh(lake: Lakehouse) -> operations.RefreshPlan:
    plan = operations.plan_refresh(lake, NAME)
    plan.execute(plan.digest)
    return plan


def test_promotion_combines_appends_of_both_sides_once(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append(lake, 10)
    append(clone, 20)
    append(clone, 21)
    plan = promote(lake)
    assert plan.conflicts == ()
    assert [(str(appends.name), len(appends.files), appends.rows) for appends in plan.appended] == [("ns.t", 2, 2)]
    assert plan.files == 2, "the data files of the clone"
    assert "2 files of the clone are appended" in str(plan.table())
    assert rows(lake) == [*INITIAL_ROWS, 10, 20, 21]
    assert len(catalog_at(lake).load_table("ns.t").history()) == 3  # one snapshot for the combined files
    assert promote(lake).is_empty
    # Later promotions combine only new files.
    append(clone, 22)
    append(lake, 11)
    assert [len(item.files) for item in promote(lake).appended] == [1]
    assert rows(lake) == [*INITIAL_ROWS, 10, 11, 20, 21, 22]
    # The refresh takes the parent's table, which contains all rows of the clone.
    assert refresh(lake).appended == ()
    assert rows(clone) == rows(lake)
    assert promote(lake).is_empty
    for side in (lake, clone):
        assert operations.verify(side, deep=True).is_clean
    operations.drop_clone(lake, NAME, delete_files=True)
    parent.clean_up()
    assert rows(lake) == [*INITIAL_ROWS, 10, 11, 20, 21, 22]
    assert operations.verify(lake, deep=True).is_clean


def test_refresh_combines_appends_of_both_sides_once(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append(lake, 10)
    append(clone, 20)
    data_files = {path for path in files(clone) if path.endswith(".parquet")}
    plan = refresh(lake)
    assert [(len(appends.files), appends.rows) for appends in plan.appended] == [(1, 1)]
    assert rows(clone) == [*INITIAL_ROWS, 10, 20]
    assert {path for path in files(clone) if path.endswith(".parquet")} == data_files, "no data file is copied"
    assert rows(lake) == [*INITIAL_ROWS, 10]
    append(clone, 21)
    before = [snapshot.snapshot_id for snapshot in catalog_at(lake).load_table("ns.t").history()]
    promote(lake)
    after = [entry.snapshot_id for entry in catalog_at(lake).load_table("ns.t").history()]
    assert after[: len(before)] == before, "the parent's history is kept"
    assert rows(lake) == [*INITIAL_ROWS, 10, 20, 21]
    append(lake, 11)
    append(clone, 22)
    refresh(lake)
    promote(lake)
    assert rows(lake) == rows(clone) == [*INITIAL_ROWS, 10, 11, 20, 21, 22]
    for side in (lake, clone):
        assert operations.verify(side, deep=True).is_clean


def test_refresh_executes_shown_plan_after_appends_in_parent(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append(lake, 10)
    append(clone, 20)
    plan = operations.plan_refresh(lake, NAME)
    append(lake, 11)
    plan.execute()
    assert rows(clone) == [*INITIAL_ROWS, 10, 20]
    refresh(lake)
    assert rows(clone) == [*INITIAL_ROWS, 10, 11, 20]
    append(clone, 21)
    append(lake, 12)
    promotion = operations.plan_promotion(lake, NAME)
    append(lake, 13)
    with pytest.raises(CommitConflictError):
        promotion.execute()
    promote(lake)
    assert rows(lake) == [*INITIAL_ROWS, 10, 11, 12, 13, 20, 21]
    for side in (lake, clone):
        assert operations.verify(side, deep=True).is_clean


def test_compaction_in_parent_does_not_conflict_with_appends(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append(lake, 10)
    append(clone, 20)
    promote(lake)
    operations.plan_compact_tables(lake, min_input_files=2).execute()
    append(clone, 21)
    promote(lake)
    assert rows(lake) == [*INITIAL_ROWS, 10, 20, 21]
    assert operations.verify(lake, deep=True).is_clean


def set_iceberg_property(lake: Lakehouse) -> None:
    catalog_at(lake).load_table("ns.t").transaction().set_properties({"owner": "me"}).commit_transaction()


def add_column(lake: Lakehouse) -> None:
    with catalog_at(lake).load_table("ns.t").update_schema() as update:
        update.union_by_name(pa.schema([*ROWS.schema, pa.field("more", pa.int64())]))


def recreate(lake: Lakehouse) -> None:
    drop(lake, "ns", "t")
    append_rows(lake)


def roll_back_snapshot(lake: Lakehouse) -> None:
    table = catalog_at(lake).load_table("ns.t")
    table.manage_snapshots().set_current_snapshot(table.history()[0].snapshot_id).commit()


def set_definition_property(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        fields = {name: getattr(txn.table("ns", "t"), name) for name in TableDef.__dataclass_fields__}
        txn.alter_table("ns", "t", TableDef(**{**fields, "properties": {"owner": "me"}}))


CHANGES = {
    "rows removed": lambda lake: catalog_at(lake).load_table("ns.t").delete("id = 1"),
    "overwritten": lambda lake: overwrite_rows(lake, "ns.t"),
    "properties of Iceberg": set_iceberg_property,
    "properties of the definition": set_definition_property,
    "another column": add_column,
    "recreated": recreate,
}
REASONS = {
    "rows removed": "the SIDE changed it other than by appends",
    "overwritten": "the SIDE changed it other than by appends",
    "properties of Iceberg": "their properties differ",
    "properties of the definition": "their properties differ",
    "another column": "their columns differ",
    "recreated": "two tables with the same name",
}


@pytest.mark.parametrize("side", ["parent", "clone"])
@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_conflict_with_appends(parent: Aging, clone: Lakehouse, change: str, side: str) -> None:
    ours, theirs = (parent.lake, clone) if side == "parent" else (clone, parent.lake)
    append(ours, 10)
    CHANGES[change](ours)
    append(theirs, 20)
    for make_plan in (operations.plan_promotion, operations.plan_refresh):
        (conflict,) = make_plan(parent.lake, NAME).conflicts
        assert conflict.name == "ns.t"
        assert REASONS[change].replace("SIDE", side) in conflict.reason


def test_rolled_back_table_conflicts_with_appends(aging: Aging, lakes: Lakes) -> None:
    lake = aging.lake
    append_rows(lake)
    append(lake, 4)
    lakes.storage("clone")
    operations.plan_clone(lake, root_of(lakes), NAME).execute()
    clone = Lakehouse.open(root_of(lakes))
    roll_back_snapshot(lake)
    append(lake, 10)
    append(clone, 20)
    assert [conflict.name for conflict in operations.plan_promotion(lake, NAME).conflicts] == ["ns.t"]


def test_trim_does_not_hide_appends(aging: Aging, lakes: Lakes) -> None:
    """The table was empty when it was cloned, so no common snapshot shows that some appends are missing."""
    lake = aging.lake
    catalog_at(lake).create_namespace_if_not_exists("ns")
    catalog_at(lake).create_table("ns.t", ROWS.schema)
    operations.plan_clone(lake, root_of(lakes), NAME).execute()
    clone = Lakehouse.open(root_of(lakes))
    append(lake, 10)
    append(clone, 20)
    append(clone, 21)
    policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    operations.plan_trim_tables(clone, policy).execute()
    plan = operations.plan_promotion(lake, NAME)
    assert ([conflict.name for conflict in plan.conflicts], list(plan.appended)) == (["ns.t"], [])


def test_chosen_side_replaces_combined_appends(parent: Aging, clone: Lakehouse) -> None:
    append(parent.lake, 10)
    append(clone, 20)
    operations.plan_promotion(parent.lake, NAME, theirs=["ns.t"]).execute()
    assert rows(parent.lake) == [*INITIAL_ROWS, 20]


def test_plan_lists_steps(parent: Aging, clone: Lakehouse) -> None:
    append(parent.lake, 10)
    append(clone, 20)
    append_rows(clone, "new.t")
    before = files(parent.lake), files(clone)
    promotion = [row[0] for row in operations.plan_promotion(parent.lake, NAME).steps().rows]
    assert promotion.count("copy") == 2, "a data file of each table"
    assert promotion.count("rewrite") == 3, "manifest, manifest list and metadata of the new table"
    assert promotion[-4:] == ["append", "added", "added", "changed"]
    steps = [row[0] for row in operations.plan_refresh(parent.lake, NAME).steps().rows]
    assert steps == ["keep", "append", "changed"]
    assert (files(parent.lake), files(clone)) == before


@pytest.mark.parametrize("first", ["refresh", "promotion"])
def test_concurrent_refresh_and_promotion_add_each_row_once(parent: Aging, clone: Lakehouse, first: str) -> None:
    """Both were planned before either committed, and both combine the same appends."""
    lake = parent.lake
    append(lake, 10)
    append(clone, 20)
    plans = [operations.plan_refresh(lake, NAME), operations.plan_promotion(lake, NAME)]
    for plan in plans if first == "refresh" else plans[::-1]:
        plan.execute()
    assert rows(lake) == rows(clone) == [*INITIAL_ROWS, 10, 20]
    append(clone, 21)
    for step in (promote, refresh, promote, refresh):
        step(lake)
        assert rows(lake) == [*INITIAL_ROWS, 10, 20, 21]
    assert rows(clone) == rows(lake)
    for side in (lake, clone):
        assert operations.verify(side, deep=True).is_clean


def test_append_between_refresh_and_promotion_is_a_conflict(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append(lake, 10)
    append(clone, 20)
    promotion = operations.plan_promotion(lake, NAME)
    append(clone, 21)
    refresh_plan = operations.plan_refresh(lake, NAME)
    promotion.execute()
    assert rows(lake) == [*INITIAL_ROWS, 10, 20]
    refresh_plan.execute()
    assert rows(clone) == [*INITIAL_ROWS, 10, 20, 21]
    for plan in (operations.plan_promotion(lake, NAME), operations.plan_refresh(lake, NAME)):
        (conflict,) = plan.conflicts
        assert "refreshed and promoted at the same time" in conflict.reason


@pytest.mark.parametrize("used_name", ["clone", "export"])
def test_refresh_record_gets_unused_name(parent: Aging, clone: Lakehouse, lakes: Lakes, used_name: str) -> None:
    lake = parent.lake
    append(lake, 10)
    name = f"{NAME}@{lake.latest_version() + 2}"
    other = lakes.named_root("other")
    if used_name == "clone":
        operations.plan_clone(lake, other, name).execute()
    else:
        operations.plan_export(lake, name).execute()
    assert name == f"{NAME}@{lake.latest_version()}"
    refresh(lake)
    records = [record.name for record in lake.snapshot().definition.exports]
    assert sorted(records) == sorted({*records}) == [NAME, name, f"{name}.2"]
    operations.drop_clone(lake, NAME, delete_files=True)
    parent.clean_up()
    assert [record.name for record in lake.snapshot().definition.exports] == [name]
    assert rows(Lakehouse.open(other) if used_name == "clone" else lake) == [*INITIAL_ROWS, 10]
    assert operations.verify(lake, deep=True).is_clean
