"""Trim next to writers that keep changing tables, and by the rules of table properties, branches, tags and policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.lakes import Lakes
from tests.operations.test_trim import (
    RacingStorage,
    advance_clock,
    keeping,
    lake,
    load,
    metadata_files,
    overwrite,
    read_ids,
    rows,
    snapshot_ids,
)
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import UnreadablePolicyError
from trinitylake_ops.iceberg.snapshot_retention import property_number
from trinitylake_ops.operations import MaintenancePolicy
from trinitylake_ops.operations.definition_commits import MAX_ATTEMPTS
from trinitylake_ops.operations.gc.trim import TrimPlan, TrimReport

__all__ = ["lake"]

DAY_MS = 86_400_000


def raced(lake: Lakehouse, plan: TrimPlan, *actions: Callable[[], object]) -> TrimReport:
    """Execute a plan while other writers commit before each of its commits."""
    racing = Lakehouse(RacingStorage(lake.storage, *actions))  # type: ignore[arg-type]
    return replace(plan, operation=replace(plan.operation, lake=racing)).execute()


def set_property(lake: Lakehouse, name: str, value: object) -> None:
    with load(lake, "t").transaction() as txn:
        txn.set_properties({name: str(value)})
    advance_clock(lake)


def test_table_that_changes_each_time_is_left_and_others_are_trimmed(lake: Lakehouse) -> None:
    for name in ("t", "u", "v"):
        overwrite(lake, name, 3)
    plan = operations.plan_trim_tables(lake, keeping(1))
    append = lambda: load(lake, "t").append(rows(7))  # noqa: E731 - a writer
    nothing = lambda: None  # noqa: E731 - during the commit of the other tables
    report = raced(lake, plan, append, append, nothing, *[append] * 20)
    assert (report.tables, report.left) == (("ns.u", "ns.v"), ("ns.t",))
    assert report.attempts == 2 + 1 + (MAX_ATTEMPTS - 2)
    assert [len(snapshot_ids(lake, name)) for name in ("u", "v")] == [1, 1]
    assert operations.verify(lake).findings == ()
    written = [path for path in metadata_files(lake) if lake.snapshot().table("ns", "t").id in path]
    assert len(written) == 1 + 3 + read_ids(lake, "t").count(7), "files of failed attempts are deleted"


def test_table_that_changed_twice_is_trimmed_by_itself(lake: Lakehouse) -> None:
    for name in ("t", "u"):
        overwrite(lake, name, 3)
    plan = operations.plan_trim_tables(lake, keeping(1))
    planned = {trim.table: set(trim.dropped) for trim in plan.tables}
    change = lambda: overwrite(lake, "t", 1, first=50)  # noqa: E731 - a writer
    report = raced(lake, plan, change, change)
    assert (report.tables, report.left, report.attempts) == (("ns.t", "ns.u"), (), 4)
    assert planned["t"].isdisjoint(snapshot_ids(lake, "t"))
    assert report.snapshots_dropped == sum(map(len, planned.values()))
    assert report.version == lake.latest_version()


def test_table_dropped_after_two_conflicts_is_left(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    plan = operations.plan_trim_tables(lake, keeping(1))

    def drop() -> None:
        with lake.transaction() as txn:
            txn.drop_table("ns", "t")

    report = raced(lake, plan, lambda: overwrite(lake, "t", 1, first=50), drop)
    assert (report.tables, report.left) == ((), ("ns.t",))


@pytest.mark.parametrize("source", ["property", "policy", "namespace policy"])
def test_newest_snapshots_are_kept_by_number(lake: Lakehouse, source: str) -> None:
    overwrite(lake, "t", 4)
    if source == "property":
        set_property(lake, "history.expire.min-snapshots-to-keep", 3)
    else:
        rule = {"pattern": "ns.t" if source == "policy" else "n*", "min_snapshots": 3}
        operations.set_policy(lake, MaintenancePolicy.of_document({"retention": {"tables": [rule]}}))
    (trim,) = operations.plan_trim_tables(lake, keeping(1)).tables
    ordered = [snapshot.snapshot_id for snapshot in load(lake, "t").snapshots()]
    assert list(trim.kept) == ordered[-3:]


@pytest.mark.parametrize("source", ["property", "policy"])
def test_young_snapshots_are_kept_by_age(lake: Lakehouse, source: str) -> None:
    overwrite(lake, "t", 3)
    if source == "property":
        set_property(lake, "history.expire.max-snapshot-age-ms", DAY_MS)
    else:
        rule = {"pattern": "ns.*", "max_snapshot_age": "1d"}
        operations.set_policy(lake, MaintenancePolicy.of_document({"retention": {"tables": [rule]}}))
    assert operations.plan_trim_tables(lake, keeping(1)).is_empty
    lake.storage.time_ms += DAY_MS  # type: ignore[attr-defined]
    (trim,) = operations.plan_trim_tables(lake, keeping(1)).tables
    assert len(trim.kept) == 1


def test_property_takes_precedence_over_policy(lake: Lakehouse) -> None:
    overwrite(lake, "t", 4)
    rule = {"pattern": "ns.*", "min_snapshots": 5, "max_snapshot_age": "30d"}
    operations.set_policy(lake, MaintenancePolicy.of_document({"retention": {"tables": [rule]}}))
    assert operations.plan_trim_tables(lake, keeping(1)).is_empty
    set_property(lake, "history.expire.max-snapshot-age-ms", 0)
    (trim,) = operations.plan_trim_tables(lake, keeping(1)).tables
    assert len(trim.kept) == 5, "the property has an age, and the policy a number"
    set_property(lake, "history.expire.min-snapshots-to-keep", 1)
    (trim,) = operations.plan_trim_tables(lake, keeping(1)).tables
    assert len(trim.kept) == 1


def refs(lake: Lakehouse) -> set[str]:
    return set(load(lake, "t").metadata.refs)


def test_branches_and_tags_are_kept_until_their_maximum_age(lake: Lakehouse) -> None:
    overwrite(lake, "t", 4)
    first, second, third = (load(lake, "t").snapshots()[index].snapshot_id for index in (0, 2, 4))
    with load(lake, "t").manage_snapshots() as update:
        update.create_tag(first, "kept").create_tag(second, "aged", max_ref_age_ms=2 * DAY_MS)
        update.create_branch(third, "branch", max_ref_age_ms=3 * DAY_MS, min_snapshots_to_keep=2)
    advance_clock(lake)
    assert load(lake, "t").metadata.refs["branch"].min_snapshots_to_keep == 2
    (trim,) = operations.plan_trim_tables(lake, keeping(1)).tables
    parent = load(lake, "t").snapshot_by_id(third).parent_snapshot_id  # type: ignore[union-attr]
    assert {first, second, third, parent} <= set(trim.kept)
    assert trim.dropped_refs == ()
    operations.plan_trim_tables(lake, keeping(1)).execute()
    assert refs(lake) == {"main", "kept", "aged", "branch"}
    lake.storage.time_ms += 2 * DAY_MS  # type: ignore[attr-defined]
    plan = operations.plan_trim_tables(lake, keeping(1))
    assert [trim.dropped_refs for trim in plan.tables] == [("aged",)]
    assert "aged" in str(plan)
    plan.execute(plan.digest)
    assert refs(lake) == {"main", "kept", "branch"}
    assert second not in snapshot_ids(lake, "t")
    lake.storage.time_ms += DAY_MS  # type: ignore[attr-defined]
    operations.plan_trim_tables(lake, keeping(1)).execute()
    assert refs(lake) == {"main", "kept"}
    assert snapshot_ids(lake, "t") == {first, load(lake, "t").metadata.current_snapshot_id}
    set_property(lake, "history.expire.max-ref-age-ms", 1)
    operations.plan_trim_tables(lake, keeping(1)).execute()
    assert refs(lake) == {"main"}
    assert operations.verify(lake, deep=True).findings == ()


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1" * 5_000, "\u0661"])
def test_invalid_numbers_in_properties_are_ignored(text: str) -> None:
    assert property_number({"n": text}, "n") is None
    assert property_number({"n": "9" * 18}, "n") == int("9" * 18)


def test_unreadable_policy_fails_trim(lake: Lakehouse, lakes: Lakes) -> None:
    """It may contain a rule that keeps snapshots."""
    overwrite(lake, "t", 3)
    lake.alter_definition(maintenance_policy='{"future":1}')
    with pytest.raises(UnreadablePolicyError):
        operations.plan_trim_tables(lake, keeping(1))


def test_hostile_parents_of_snapshots_end(lake: Lakehouse) -> None:
    """A cycle of parents, as hostile metadata may contain, does not hang."""
    from trinitylake_ops.iceberg.snapshot_retention import HEADS_ONLY, SnapshotRule, retained_snapshots

    overwrite(lake, "t", 2)
    metadata = load(lake, "t").metadata
    head = metadata.current_snapshot_id
    snapshots: Any = [shot.model_copy(update={"parent_snapshot_id": head}) for shot in metadata.snapshots]
    cyclic = metadata.model_copy(update={"snapshots": snapshots})
    assert retained_snapshots(cyclic, SnapshotRule(DAY_MS, 1_000), 0) == {head}
    assert retained_snapshots(cyclic, HEADS_ONLY, 0) == {head}, "without a rule, snapshots in the future are trimmed"
