"""Test comparisons, promotions and refreshes of clones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults import FaultyStorage, fail, lose_response
from tests.lakes import Lakes, objects
from tests.operations.aging import Aging, keeping
from tests.operations.changes import alter, append_rows, create, drop, expire, overwrite_rows
from tests.operations.conflicts import CONFLICTS, both_altered, namespace_dropped_under_a_new_table
from tests.operations.copies import files, rows
from trinitylake_ops import Column, DataType, Lakehouse, Schema, TableDef, operations
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitConflictError,
    ConflictError,
    CorruptFileError,
    ExportNotFoundError,
    InvalidInputError,
    NamespaceNotFoundError,
    ObjectExistsError,
    PlanChangedError,
    TableNotFoundError,
    UnreachableError,
)
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import ChangedOn, Comparison
from trinitylake_ops.reports import comparison_page
from trinitylake_ops.transaction.change_set import VIEW_PREFIX, views_in

pytestmark = pytest.mark.usefixtures("fixed_requests")

NAME = "feature"


@pytest.fixture
def parent(aging: Aging, lakes: Lakes) -> Aging:
    append_rows(aging.lake)
    append_rows(aging.lake, "ns.u")
    operations.plan_clone(aging.lake, root_of(lakes), NAME).execute()
    return aging


@pytest.fixture
def clone(parent: Aging, lakes: Lakes) -> Lakehouse:
    return Lakehouse.open(root_of(lakes))


def root_of(lakes: Lakes) -> str:
    return lakes.named_root("clone")  # deleted at the end of the test


def compare_sides(lake: Lakehouse) -> dict[str, tuple[str, str | None, str | None]]:
    objects = operations.compare(lake, NAME).objects
    return {item.name: (item.changed_on.value, item.in_clone, item.in_parent) for item in objects}


def change_names(plan: operations.PromotionPlan | operations.RefreshPlan) -> set[tuple[str, str]]:
    return {(change.kind, ".".join(filter(None, (change.namespace, change.table)))) for change in plan.changes}


def count_rows(lake: Lakehouse, name: str) -> int:
    return int(catalog_at(lake).load_table(name).scan().to_arrow().num_rows)


def test_compare_reports_changes_of_each_side(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    assert compare_sides(lake) == {}
    append_rows(clone)
    append_rows(clone, "ns.u")
    append_rows(clone, "new.t")
    drop(clone, "n0", "a")
    append_rows(lake, "ns.u")
    alter(lake, "n1", "a")
    create(lake, "later")
    assert compare_sides(lake) == {
        "ns.t": ("clone", "changed", None),
        "ns.u": ("both", "changed", "changed"),
        "new": ("clone", "added", None),
        "new.t": ("clone", "added", None),
        "n0.a": ("clone", "removed", None),
        "n1.a": ("parent", None, "changed"),
        "later": ("parent", None, "added"),
    }
    items = {item.name: item for item in operations.compare(lake, NAME).objects}
    changed, new = items["ns.u"], items["new.t"]
    assert changed.clone is not None and changed.parent is not None and new.clone is not None
    assert (changed.clone.rows_added, changed.clone.rows_removed, changed.clone.files_added) == (3, 0, 1)
    assert (changed.parent.rows_added, new.clone.rows_added, new.clone.files_removed) == (3, 3, 0)
    assert (changed.clone.bytes_added or 0) > 100


def test_compare_reads_no_shared_subtree_and_no_data(parent: Aging, clone: Lakehouse) -> None:
    alter(clone, "n1", "a")
    n_requests = operations.compare(parent.lake, NAME).cost.total_requests
    create(parent.lake, "many", *(f"t{number:03}" for number in range(60)))
    logged_storage = FaultyStorage(parent.lake.storage, [])
    append_rows(clone)
    operations.compare(Lakehouse(logged_storage), NAME)
    assert not [item for item in logged_storage.log if "/data/" in item.path or item.path.endswith(".avro")]
    assert n_requests < 30


def test_compare_reports_column_changes(parent: Aging, clone: Lakehouse) -> None:
    def schema(*columns: tuple[int, str, DataType]) -> TableDef:
        return TableDef(
            schema=Schema(columns=tuple(Column(id=id_, name=name, type=data_type) for id_, name, data_type in columns))
        )

    old = schema((1, "a", DataType.INT4), (2, "b", DataType.INT4), (3, "c", DataType.INT4))
    new = schema((1, "a", DataType.INT8), (3, "d", DataType.INT4), (4, "e", DataType.VARCHAR))
    with clone.transaction() as txn:
        txn.create_table("n1", "wide", old)
    operations.plan_promotion(parent.lake, NAME).execute()
    operations.plan_refresh(parent.lake, NAME).execute()
    with clone.transaction() as txn:
        txn.alter_table("n1", "wide", new)
    (item,) = operations.compare(parent.lake, NAME).objects
    assert item.clone is not None
    assert set(item.clone.schema) == {"dropped b", "a was int, is long", "renamed c to d", "added e string"}


def test_comparison_page_escapes_names_and_shows_changes(parent: Aging, clone: Lakehouse) -> None:
    append_rows(clone)
    append_rows(parent.lake)
    create(clone, "<b>bold")
    page = comparison_page(operations.compare(parent.lake, NAME), parent.lake.storage.now_ms())
    assert "&lt;b&gt;bold" in page
    assert "<b>bold" not in page
    assert "--ours or --theirs" in page
    assert "+3 rows" in page
    empty = Comparison(
        name="x", root="memory://x/", shared_version=1, version=1, clone_version=0, objects=(),
        cost=operations.compare(parent.lake, NAME).cost,
    )  # fmt: skip
    assert "No differences." in comparison_page(empty, 5)


def test_promotion_merges_changes_of_the_clone(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    append_rows(clone, "new.t")
    drop(clone, "n0")
    alter(clone, "n1", "a")
    create(lake, "later", "t")
    alter(lake, "n2", "a")
    before_files = {path: lake.storage.read(path) for path in files(lake) if path.startswith("tables/")}
    before = lake.latest_version()
    plan = operations.plan_promotion(lake, NAME)
    report = plan.execute(plan.digest)
    assert report.version == before + 1 == lake.latest_version()
    assert rows(lake) == [1, 1, 2, 2, 3, 3]
    assert count_rows(lake, "new.t") == 3
    assert objects(lake.snapshot()) == {
        **objects(clone.snapshot()),
        **{name: value for name, value in objects(lake.snapshot()).items() if name[0] == "later"},
    }
    info = next(lake.history(1))
    assert (info.operation, info.properties["promoted-from"]) == ("promote", NAME)
    assert info.properties["clone_version"] == str(clone.latest_version())
    # Only new files of the clone were copied.
    new_paths = {path for path in files(lake) if path.startswith("tables/")} - before_files.keys()
    assert len([path for path in new_paths if path.endswith(".parquet")]) == 2
    assert {path: lake.storage.read(path) for path in before_files} == before_files
    assert operations.verify(lake, deep=True).is_clean
    # The table keeps its Iceberg history.
    assert len(catalog_at(lake).load_table("ns.t").history()) == 2


def test_repeated_promotion_does_nothing_until_new_changes(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    operations.plan_promotion(lake, NAME).execute()
    assert operations.plan_promotion(lake, NAME).is_empty
    assert compare_sides(lake) == {"ns.t": ("same", "changed", "changed")}
    append_rows(clone)
    plan = operations.plan_promotion(lake, NAME)
    assert (change_names(plan), plan.conflicts) == ({("changed", "ns.t")}, ())
    n_data = len([path for path in files(lake) if path.endswith(".parquet")])
    plan.execute()
    assert len([path for path in files(lake) if path.endswith(".parquet")]) == n_data + 1
    assert rows(lake) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert operations.verify(lake, deep=True).is_clean
    # If the promoted version of the clone has expired, the table is promoted again, which is harmless.
    expire(clone, f"1-{clone.latest_version() - 1}")
    append_rows(clone)
    operations.plan_promotion(lake, NAME).execute()
    assert rows(lake) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    drop(clone, "ns", "t")
    operations.plan_promotion(lake, NAME).execute()
    assert not lake.snapshot().has_table("ns", "t")


def test_drop_is_promoted_after_promoted_version_expired(parent: Aging, clone: Lakehouse) -> None:
    """An expired version of the clone must not be mistaken for a version without the table."""
    append_rows(clone)
    append_rows(clone, "n0.new")
    operations.plan_promotion(parent.lake, NAME).execute()
    drop(clone, "n0", "new")
    drop(clone, "ns", "t")
    expire(clone, f"0-{clone.latest_version() - 1}")
    plan = operations.plan_promotion(parent.lake, NAME)
    assert change_names(plan) == {("removed", "n0.new"), ("removed", "ns.t")}
    plan.execute()
    assert objects(parent.lake.snapshot()) == objects(clone.snapshot())


def test_parent_needs_no_files_of_the_clone_after_promotion(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    append_rows(clone, "new.t")
    overwrite_rows(clone, "ns.u")
    operations.plan_promotion(lake, NAME).execute()
    operations.drop_clone(lake, NAME, delete_files=True)
    assert files(clone) == set()
    parent.clean_up()
    assert (rows(lake), count_rows(lake, "new.t"), count_rows(lake, "ns.u")) == ([1, 1, 2, 2, 3, 3], 3, 3)
    append_rows(lake)
    operations.plan_trim_tables(lake, keeping(1)).execute()
    operations.plan_compact_tables(lake, min_input_files=2).execute()
    parent.clean_up()
    assert rows(lake) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert operations.verify(lake, deep=True).findings == ()


def test_only_selected_objects_are_promoted(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    append_rows(clone, "ns.u")
    append_rows(clone, "new.t")
    plan = operations.plan_promotion(lake, NAME, tables=["new.t"])
    assert change_names(plan) == {
        ("added", "new"),
        ("added", "new.t"),
    }  # the namespace of the table is promoted as well
    plan.execute()
    operations.plan_promotion(lake, NAME, namespaces=["ns"], tables=["n0.a"]).execute()
    assert operations.plan_promotion(lake, NAME).is_empty
    with pytest.raises(NamespaceNotFoundError):
        operations.plan_promotion(lake, NAME, namespaces=["missing"])
    with pytest.raises(TableNotFoundError):
        operations.plan_promotion(lake, NAME, tables=["ns.nothing"])


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.__name__)
@pytest.mark.parametrize("direction", ["promote", pytest.param("refresh", marks=pytest.mark.soak)])
def test_conflicts_are_reported_and_change_nothing(
    parent: Aging, clone: Lakehouse, conflict: object, direction: str
) -> None:
    lake = parent.lake
    ours, theirs = (lake, clone) if direction == "promote" else (clone, lake)
    name = conflict(ours, theirs)  # type: ignore[operator]
    make_plan = operations.plan_promotion if direction == "promote" else operations.plan_refresh
    plan = make_plan(lake, NAME)
    assert [item.name for item in plan.conflicts] == [name]
    before = files(lake), files(clone)
    with pytest.raises(CommitConflictError, match="--theirs") as raised:
        plan.execute()
    if direction == "promote":
        assert raised.value.conflicts == (f"{name}: {CONFLICTS[conflict]}",)  # type: ignore[index]
    assert (files(lake), files(clone)) == before
    before_objects = objects(ours.snapshot())
    make_plan(lake, NAME, ours=[name]).execute()
    assert objects(ours.snapshot()).get(tuple(name.split("."))) == before_objects.get(tuple(name.split(".")))
    assert operations.verify(ours).is_clean


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.__name__)
@pytest.mark.parametrize("direction", ["promote", pytest.param("refresh", marks=pytest.mark.soak)])
def test_their_side_can_be_chosen(parent: Aging, clone: Lakehouse, conflict: object, direction: str) -> None:
    lake = parent.lake
    ours, theirs = (lake, clone) if direction == "promote" else (clone, lake)
    name = conflict(ours, theirs)  # type: ignore[operator]
    make_plan = operations.plan_promotion if direction == "promote" else operations.plan_refresh
    make_plan(lake, NAME, theirs=[name]).execute()
    expected = objects(theirs.snapshot())
    if conflict is namespace_dropped_under_a_new_table:  # other tables of the namespace stay dropped
        expected = {name: value for name, value in expected.items() if name not in (("n1", "a"), ("n1", "b"))}
    assert objects(ours.snapshot()) == expected
    assert operations.verify(ours).is_clean


def test_invalid_choices_are_rejected(parent: Aging, clone: Lakehouse) -> None:
    append_rows(clone)
    with pytest.raises(InvalidInputError):
        operations.plan_promotion(parent.lake, NAME, theirs=["ns.t"])
    append_rows(parent.lake)
    with pytest.raises(InvalidInputError):
        operations.plan_promotion(parent.lake, NAME, theirs=["ns.t"], ours=["ns.t"])
    assert not operations.plan_promotion(parent.lake, NAME, theirs=["ns"]).conflicts


@pytest.mark.parametrize("choices", [{"theirs": ["ns.t"]}, {"ours": ["ns.t"]}], ids=str)
def test_choices_can_be_repeated(parent: Aging, clone: Lakehouse, choices: dict[str, list[str]]) -> None:
    """A client that did not receive the response repeats the same command."""
    both_altered(parent.lake, clone)
    append_rows(clone, "ns.u")
    for make_plan in (operations.plan_promotion, operations.plan_refresh):
        make_plan(parent.lake, NAME, **choices).execute()
        repeated = make_plan(parent.lake, NAME, **choices)
        assert repeated.is_empty
        repeated.execute()


def test_choices_of_a_refresh_are_recorded(parent: Aging, clone: Lakehouse) -> None:
    """A choice is recorded even if no change is merged."""
    both_altered(parent.lake, clone)
    expected = objects(clone.snapshot())
    plan = operations.plan_refresh(parent.lake, NAME, ours=["ns.t"])
    assert (plan.changes, plan.kept, plan.is_empty) == ((), ("ns.t",), False)
    assert "the clone's side was chosen" in str(plan)
    assert ("leave", "ns.t", "", "the clone") in plan.steps().rows
    plan.execute(plan.digest)
    assert operations.plan_refresh(parent.lake, NAME).is_empty
    assert operations.plan_promotion(parent.lake, NAME).conflicts == ()
    operations.plan_promotion(parent.lake, NAME).execute()
    assert rows(parent.lake) == rows(clone)
    assert objects(clone.snapshot()) == expected


def test_intermediate_commits_conflict_only_with_merged_objects(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    plan = operations.plan_promotion(lake, NAME)
    create(lake, "other")
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    plan.execute()  # does not conflict, because the other commit changed other objects
    assert lake.snapshot().has_namespace("other")
    append_rows(clone)
    plan = operations.plan_promotion(lake, NAME)
    append_rows(lake)
    before = {path for path in files(lake) if path.startswith("tables/")}
    with pytest.raises(CommitConflictError):
        plan.execute()
    assert {path for path in files(lake) if path.startswith("tables/")} == before
    plan = operations.plan_promotion(lake, NAME, theirs=["ns.t"])
    operations.drop_clone(lake, NAME)
    with pytest.raises(ExportNotFoundError):
        plan.execute()


def test_refresh_merges_changes_of_the_parent(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    append_rows(lake, "ns.u")
    create(lake, "later", "t")
    drop(lake, "n0")
    version = lake.latest_version()
    clone_files = files(clone)
    plan = operations.plan_refresh(lake, NAME)
    report = plan.execute(plan.digest)
    assert report.version == clone.latest_version()
    assert (rows(clone), count_rows(clone, "ns.u")) == ([1, 1, 2, 2, 3, 3], 6)
    assert not [path for path in files(clone) - clone_files if path.startswith("tables/")]
    assert operations.plan_refresh(lake, NAME).is_empty
    assert compare_sides(lake) == {"ns.t": ("clone", "changed", None)}
    # Both shared versions are kept, including the clone's history.
    overwrite_rows(lake, "ns.t", "ns.u")
    drop(lake, "later")
    parent.clean_up()
    clone = Lakehouse.open(clone.root)
    assert (rows(clone), count_rows(clone, "ns.u")) == ([1, 1, 2, 2, 3, 3], 6)
    assert clone.snapshot(0).has_namespace("n0")
    assert operations.verify(clone).is_clean
    assert lake.snapshot(version).version == version
    (info,) = operations.list_clones(lake)
    assert (info.version, info.cloned_version < version) == (version, True)
    operations.drop_clone(lake, NAME)
    assert not lake.snapshot().definition.exports


def test_promoted_objects_are_equal_after_refresh(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    operations.plan_promotion(lake, NAME).execute()
    append_rows(lake)
    assert [change.table for change in operations.plan_refresh(lake, NAME).changes] == ["t"]
    operations.plan_refresh(lake, NAME).execute()
    assert rows(clone) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    append_rows(clone)
    operations.plan_promotion(lake, NAME).execute()
    assert rows(lake) == rows(clone) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert operations.verify(clone, deep=True).is_clean
    assert operations.verify(lake, deep=True).is_clean


def test_partial_clone_is_compared_within_its_namespaces(parent: Aging, lakes: Lakes) -> None:
    lake = parent.lake
    root = lakes.named_root("part")
    operations.plan_clone(lake, root, "part", namespaces=["ns"]).execute()
    partial_clone = Lakehouse.open(root)
    assert operations.compare(lake, "part").objects == ()
    append_rows(partial_clone)
    append_rows(partial_clone, "new.t")
    alter(lake, "n1", "a")
    comparison = operations.compare(lake, "part")
    assert (
        {item.name for item in comparison.on(ChangedOn.CLONE)}
        == {"ns.t", "new", "new.t"}
        == {item.name for item in comparison.objects}
    )
    operations.plan_promotion(lake, "part").execute()
    assert lake.snapshot().has_namespace("n1")
    assert rows(lake) == rows(partial_clone)


def undo_all(lake: Lakehouse, before: int) -> None:
    operations.plan_rollback(lake, before).execute()


def undo_table(lake: Lakehouse, before: int) -> None:
    operations.plan_rollback(lake, before, tables=["ns.t"]).execute()


def undo_by_overwriting(lake: Lakehouse, before: int) -> None:
    overwrite_rows(lake, "ns.t")


def undo_after_another_append(lake: Lakehouse, before: int) -> None:
    append_rows(lake)
    undo_table(lake, before)


def promote_and_undo(
    lake: Lakehouse, clone: Lakehouse, undo: Callable[[Lakehouse, int], None], is_combined: bool
) -> list[int]:
    """Promote rows of a clone, undo the promotion, and return the parent's rows."""
    append_rows(clone)
    if is_combined:
        append_rows(lake)
    before = lake.latest_version()
    operations.plan_promotion(lake, NAME).execute()
    undo(lake, before)
    return rows(lake)


UNDO_FUNCTIONS = (undo_all, undo_table, undo_by_overwriting, undo_after_another_append)


@pytest.mark.parametrize("undo", UNDO_FUNCTIONS)
@pytest.mark.parametrize("is_combined", [False, True])
def test_undone_promotion_stays_undone(
    parent: Aging, clone: Lakehouse, undo: Callable[[Lakehouse, int], None], is_combined: bool
) -> None:
    """The next promotion selects another table. A refresh merges the parent's state into the clone."""
    lake = parent.lake
    rows_after_undo = promote_and_undo(lake, clone, undo, is_combined)
    append_rows(clone, "ns.u")
    plan = operations.plan_promotion(lake, NAME)
    assert (change_names(plan), plan.conflicts) == ({("changed", "ns.u")}, ())
    plan.execute()
    assert (rows(lake), count_rows(lake, "ns.u")) == (rows_after_undo, 6)
    assert compare_sides(lake)["ns.t"] == ("parent", None, "changed")
    operations.plan_refresh(lake, NAME).execute()
    assert rows(clone) == rows_after_undo
    append_rows(clone)
    operations.plan_promotion(lake, NAME).execute()
    assert rows(lake) == sorted([*rows_after_undo, 1, 2, 3])
    for side in (lake, clone):
        assert operations.verify(side, deep=True).is_clean


@pytest.mark.parametrize("undo", UNDO_FUNCTIONS)
@pytest.mark.parametrize("is_combined", [False, True])
def test_change_after_undone_promotion_is_a_conflict(
    parent: Aging, clone: Lakehouse, undo: Callable[[Lakehouse, int], None], is_combined: bool
) -> None:
    lake = parent.lake
    rows_after_undo = promote_and_undo(lake, clone, undo, is_combined)
    append_rows(clone)
    for make_plan in (operations.plan_promotion, operations.plan_refresh):
        assert [conflict.name for conflict in make_plan(lake, NAME).conflicts] == ["ns.t"]
    operations.plan_promotion(lake, NAME, ours=["ns.t"]).execute()
    append_rows(clone, "ns.u")
    plan = operations.plan_promotion(lake, NAME, ours=["ns.t"])
    plan.execute()
    assert rows(lake) == rows_after_undo
    # A choice for one promotion does not apply to later promotions.
    assert [conflict.name for conflict in operations.plan_promotion(lake, NAME).conflicts] == ["ns.t"]
    assert [conflict.name for conflict in operations.plan_refresh(lake, NAME).conflicts] == ["ns.t"]
    operations.plan_promotion(lake, NAME, theirs=["ns.t"]).execute()
    assert rows(lake) == rows(clone)
    assert operations.plan_promotion(lake, NAME).is_empty
    assert operations.verify(lake, deep=True).is_clean


def test_new_changes_conflict_after_rollback_of_a_later_promotion(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    operations.plan_promotion(lake, NAME).execute()
    first = lake.latest_version()
    append_rows(clone)
    operations.plan_promotion(lake, NAME).execute()
    undo_table(lake, first)
    assert operations.plan_promotion(lake, NAME).is_empty
    append_rows(clone)
    assert [conflict.name for conflict in operations.plan_promotion(lake, NAME).conflicts] == ["ns.t"]


def test_rolled_back_objects_stay_rolled_back(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone, "new.t")
    drop(clone, "n0", "a")
    before = lake.latest_version()
    operations.plan_promotion(lake, NAME).execute()
    undo_all(lake, before)
    assert operations.plan_promotion(lake, NAME).is_empty
    operations.plan_refresh(lake, NAME).execute()
    assert objects(clone.snapshot()) == objects(lake.snapshot())


def test_undone_promotion_of_expired_version_is_a_conflict(parent: Aging, clone: Lakehouse) -> None:
    """It is unknown whether the clone had the same rows when it was promoted."""
    lake = parent.lake
    append_rows(clone)
    before = lake.latest_version()
    operations.plan_promotion(lake, NAME).execute()
    undo_all(lake, before)
    append_rows(clone, "ns.u")
    expire(clone, f"0-{clone.latest_version() - 1}")
    conflicts = operations.plan_promotion(lake, NAME).conflicts
    assert "ns.t" in [conflict.name for conflict in conflicts]
    operations.plan_promotion(lake, NAME, ours=["ns.t"], theirs=["ns.u"]).execute()
    assert (rows(lake), count_rows(lake, "ns.u")) == ([1, 2, 3], 6)


def test_promotion_of_one_table_does_not_affect_other_objects(parent: Aging, clone: Lakehouse) -> None:
    lake = parent.lake
    append_rows(clone)
    append_rows(clone, "ns.u")
    append_rows(clone, "new.t")
    operations.plan_promotion(lake, NAME, tables=["new.t"]).execute()
    plan = operations.plan_promotion(lake, NAME)
    assert (change_names(plan), plan.conflicts) == ({("changed", "ns.t"), ("changed", "ns.u")}, ())
    operations.plan_promotion(lake, NAME, tables=["ns.t"]).execute()
    plan = operations.plan_promotion(lake, NAME)
    assert (change_names(plan), plan.conflicts) == ({("changed", "ns.u")}, ())


@pytest.mark.parametrize("table_side", ["parent", "clone"])
def test_view_and_table_with_same_name_conflict(parent: Aging, clone: Lakehouse, table_side: str) -> None:
    lake_with_table, lake_with_view = (parent.lake, clone) if table_side == "parent" else (clone, parent.lake)
    append_rows(lake_with_table, "n1.v")
    with lake_with_view.transaction() as txn:
        txn.alter_namespace("n1", {f"{VIEW_PREFIX}v": "{}"})
    before = files(parent.lake), files(clone)
    for make_plan in (operations.plan_promotion, operations.plan_refresh):
        with pytest.raises(ObjectExistsError):
            make_plan(parent.lake, NAME)
    assert (files(parent.lake), files(clone)) == before
    drop(lake_with_table, "n1", "v")
    operations.plan_promotion(parent.lake, NAME).execute()
    operations.plan_refresh(parent.lake, NAME).execute()
    assert all(views_in(lake.snapshot().namespace("n1").properties) == ["v"] for lake in (parent.lake, clone))


def test_view_created_during_promotion_is_a_conflict(parent: Aging, clone: Lakehouse) -> None:
    append_rows(clone, "n1.v")
    plan = operations.plan_promotion(parent.lake, NAME)
    with parent.lake.transaction() as txn:
        txn.alter_namespace("n1", {f"{VIEW_PREFIX}v": "{}"})
    with pytest.raises(ConflictError):
        plan.execute()
    assert not parent.lake.snapshot().has_table("n1", "v")


def test_property_changes_are_promoted_without_copying_files(parent: Aging, clone: Lakehouse) -> None:
    with clone.transaction() as txn:
        definition = txn.table("ns", "t")
        txn.alter_table("ns", "t", TableDef(**{**fields_of(definition), "properties": {"owner": "me"}}))
        txn.alter_namespace("ns", {"owner": "me"})
    plan = operations.plan_promotion(parent.lake, NAME)
    assert plan.files == 2  # the definitions
    plan.execute()
    assert parent.lake.snapshot().table("ns", "t").properties == {"owner": "me"}
    assert parent.lake.snapshot().namespace("ns").properties == {"owner": "me"}
    assert rows(parent.lake) == [1, 2, 3]
    assert operations.verify(parent.lake).is_clean


def fields_of(definition: TableDef) -> dict[str, object]:
    return {name: getattr(definition, name) for name in TableDef.__dataclass_fields__}


def test_promotion_rejects_parent_files_not_kept_for_the_clone(parent: Aging, clone: Lakehouse) -> None:
    """A forged pointer in the clone must not restore files that the parent does not keep for it."""
    append_rows(parent.lake)
    location = parent.lake.snapshot().entry(parent.lake.snapshot().keys.table_key("ns", "t"))
    with clone.transaction() as txn:
        txn.drop_table("ns", "t")  # because a table must not have two names
        txn.restore_entry(txn.keys.table_key("n1", "a"), f"{parent.lake.root}{location}")
    with pytest.raises(InvalidInputError):
        operations.plan_promotion(parent.lake, NAME)
    parent_record = clone.snapshot().definition.parent
    assert parent_record is not None
    fields = {name: getattr(parent_record, name) for name in type(parent_record).__dataclass_fields__}
    clone.alter_definition(parent=type(parent_record)(**{**fields, "version": 1}))
    with pytest.raises(CorruptFileError):
        operations.plan_promotion(parent.lake, NAME)


def test_failed_promotion_deletes_copy_with_unknown_outcome(parent: Aging, clone: Lakehouse) -> None:
    append_rows(clone)
    before = files(parent.lake)
    create_fault = lose_response(1, kind="create", path_part="/promote-")
    read_fault = fail(1, UnreachableError, kind="read", path_part="/promote-", times=100)
    faulty_storage = FaultyStorage(parent.lake.storage, [create_fault, read_fault])
    with pytest.raises(AmbiguousWriteError):
        operations.plan_promotion(Lakehouse(faulty_storage), NAME).execute()
    assert any(kind == "create" and "/promote-" in path for kind, path in faulty_storage.effects)
    assert files(parent.lake) == before
