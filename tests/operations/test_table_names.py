"""Test that each table has one name: no operation and no transaction adds a second name for its id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest

from tests.lakes import Lakes, table
from tests.operations.changes import append_rows, create
from tests.operations.test_promotion import root_of
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, TableHasAnotherNameError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.transaction.catalog_editor import IdOf
from trinitylake_ops.versions.table_names import TableNames


def create_and_rename(lake: Lakehouse, source: str = "ns.t", target: str = "hidden.t") -> int:
    """Create a table, rename it, and return the version before the rename."""
    append_rows(lake)
    catalog_at(lake).create_namespace("hidden")
    version = lake.latest_version()
    catalog_at(lake).rename_table(source, target)
    return version


def names_of(lake: Lakehouse, table_id: str) -> list[str]:
    return [str(name) for name in TableNames().names_of(lake.snapshot(), table_id)]


def table_id_of(lake: Lakehouse, name: str = "hidden.t") -> str:
    namespace, _, table_name = name.partition(".")
    return lake.snapshot().table(namespace, table_name).id


def add_second_name(lake: Lakehouse) -> None:
    """Add the second name ``ns.t`` to ``hidden.t``, as an older program could."""
    snapshot = lake.snapshot()
    keys = snapshot.keys
    with lake.transaction() as txn:
        txn.restore_entry(keys.table_key("ns", "t"), snapshot.entry(keys.table_key("hidden", "t")), mirrors=True)


def test_rollback_of_renamed_table_by_one_name_fails(lake: Lakehouse) -> None:
    version = create_and_rename(lake)
    before = lake.latest_version()
    with pytest.raises(TableHasAnotherNameError, match=r"hidden\.t"):
        operations.plan_rollback(lake, version, tables=["ns.t"])
    with pytest.raises(TableHasAnotherNameError):
        operations.plan_rollback(lake, version, namespaces=["ns"])
    assert lake.latest_version() == before
    operations.plan_rollback(lake, version, tables=["ns.t", "hidden.t"]).execute()
    assert names_of(lake, table_id_of(lake, "ns.t")) == ["ns.t"]


def test_rollback_fails_after_concurrent_registration_under_another_name(lake: Lakehouse) -> None:
    """The plan was valid, but the table was registered under another name before its commit."""
    append_rows(lake)
    version, table_id = lake.latest_version(), table_id_of(lake, "ns.t")
    location = lake.snapshot().table("ns", "t").format_properties["metadata_location"]
    catalog_at(lake).drop_table("ns.t")
    plan = operations.plan_rollback(lake, version, tables=["ns.t"])
    operations.register_table(lake, "ns", "restored", location)
    with pytest.raises(TableHasAnotherNameError):
        plan.execute(reapply=True)
    assert names_of(lake, table_id) == ["ns.restored"]


def test_whole_rollback_creates_no_second_name(lake: Lakehouse) -> None:
    create_and_rename(lake)
    add_second_name(lake)
    version = lake.latest_version()
    catalog_at(lake).drop_table("ns.t")
    with pytest.raises(TableHasAnotherNameError):
        operations.plan_rollback(lake, version)


def create_second_name(lake: Lakehouse, version: int) -> None:
    with lake.transaction() as txn:
        txn.create_table("ns", "second", lake.snapshot().table("hidden", "t"))


def restore_old_entry(lake: Lakehouse, version: int) -> None:
    old_snapshot = lake.snapshot(version)
    key = old_snapshot.keys.table_key("ns", "t")
    with lake.transaction() as txn:
        txn.restore_entry(key, old_snapshot.entry(key))


def create_in_resumed_transaction(lake: Lakehouse, version: int) -> None:
    txn = lake.transaction()
    txn.create_table("ns", "second", lake.snapshot().table("hidden", "t"))
    lake.resume_transaction(txn.save()).commit()


def create_twice(lake: Lakehouse, version: int) -> None:
    with lake.transaction() as txn:
        for name in ("a", "b"):
            txn.create_table("ns", name, replace(table(), id="0" * 8), id_of=IdOf.STAGED_TABLE)


def register(lake: Lakehouse, version: int) -> None:
    operations.register_table(
        lake, "ns", "second", lake.snapshot().table("hidden", "t").format_properties["metadata_location"]
    )


@pytest.mark.parametrize(
    "change", [create_second_name, restore_old_entry, create_in_resumed_transaction, create_twice, register]
)
def test_no_transaction_creates_a_second_name(lake: Lakehouse, change: Callable[[Lakehouse, int], None]) -> None:
    version = create_and_rename(lake)
    table_id, before = table_id_of(lake), lake.latest_version()
    with pytest.raises(TableHasAnotherNameError):
        change(lake, version)
    assert lake.latest_version() == before
    assert names_of(lake, table_id) == ["hidden.t"]


def test_concurrent_transactions_create_one_name_per_table_id(lake: Lakehouse) -> None:
    create(lake, "ns", "t")
    first, other = lake.transaction(), lake.transaction()
    for txn, name in ((first, "a"), (other, "b")):
        txn.create_table("ns", name, replace(table(), id="0" * 8), id_of=IdOf.STAGED_TABLE)
    first.commit()
    with pytest.raises(CommitConflictError):
        other.commit()
    assert names_of(lake, "0" * 8) == ["ns.a"]


def test_renames_and_moves_create_no_second_name(lake: Lakehouse) -> None:
    create_and_rename(lake)
    table_id = table_id_of(lake)
    catalog_at(lake).rename_table("hidden.t", "ns.t")
    catalog_at(lake).rename_table("ns.t", "ns.u")
    with lake.transaction() as txn:
        definition = txn.table("ns", "u")
        txn.drop_table("ns", "u")
        txn.create_table("hidden", "v", definition)
    assert names_of(lake, table_id) == ["hidden.v"]


def test_promotion_creates_no_second_name(lake: Lakehouse, lakes: Lakes) -> None:
    append_rows(lake)
    catalog_at(lake).create_namespace("hidden")
    operations.plan_clone(lake, root_of(lakes), "x").execute()
    clone = Lakehouse.open(root_of(lakes))
    catalog_at(clone).rename_table("ns.t", "hidden.t")
    with pytest.raises(TableHasAnotherNameError):
        operations.plan_promotion(lake, "x", tables=["hidden.t"])
    operations.plan_promotion(lake, "x").execute()
    assert names_of(lake, table_id_of(lake)) == ["hidden.t"]


def roll_back_table(lake: Lakehouse, version: int) -> None:
    operations.plan_rollback(lake, version, tables=["ns.t"]).execute()


def create_from_definition(lake: Lakehouse, version: int) -> None:
    with lake.transaction() as txn:
        txn.create_table("ns", "restored", lake.snapshot(version).table("ns", "t"))


RESTORES_TABLE = pytest.mark.parametrize("restore_table", [roll_back_table, create_from_definition])


def create_clone(lake: Lakehouse, lakes: Lakes) -> tuple[Lakehouse, str, int]:
    """Clone a lakehouse with ``ns.t``. Return the clone, the table's id, and the parent's version."""
    append_rows(lake)
    catalog_at(lake).create_namespace("hidden")
    version = lake.latest_version()
    operations.plan_clone(lake, root_of(lakes), "x").execute()
    return Lakehouse.open(root_of(lakes)), table_id_of(lake, "ns.t"), version


@RESTORES_TABLE
def test_promotion_fails_after_concurrent_restore_of_the_table(
    lake: Lakehouse, lakes: Lakes, restore_table: Callable[[Lakehouse, int], None]
) -> None:
    """The clone renamed a table that the parent dropped, and the parent restores the table after the plan."""
    clone, table_id, version = create_clone(lake, lakes)
    catalog_at(clone).rename_table("ns.t", "hidden.t")
    catalog_at(lake).drop_table("ns.t")
    plan = operations.plan_promotion(lake, "x")
    restore_table(lake, version)
    names, before = names_of(lake, table_id), lake.latest_version()
    assert len(names) == 1
    with pytest.raises(TableHasAnotherNameError):
        plan.execute()
    assert (names_of(lake, table_id), lake.latest_version()) == (names, before)
    catalog_at(lake).drop_table(names[0])
    operations.plan_promotion(lake, "x").execute()
    assert names_of(lake, table_id) == ["hidden.t"]


@RESTORES_TABLE
def test_refresh_fails_after_concurrent_restore_of_the_table(
    lake: Lakehouse, lakes: Lakes, restore_table: Callable[[Lakehouse, int], None]
) -> None:
    """The parent renamed a table that the clone dropped, and the clone restores the table after the plan."""
    clone, table_id, _ = create_clone(lake, lakes)
    catalog_at(lake).rename_table("ns.t", "hidden.t")
    catalog_at(clone).drop_table("ns.t")
    plan = operations.plan_refresh(lake, "x")
    restore_table(clone, 0)
    names, before = names_of(clone, table_id), clone.latest_version()
    assert len(names) == 1
    with pytest.raises(TableHasAnotherNameError):
        plan.execute()
    assert (names_of(clone, table_id), clone.latest_version()) == (names, before)
    catalog_at(clone).drop_table(names[0])
    operations.plan_refresh(lake, "x").execute()
    assert names_of(clone, table_id) == ["hidden.t"]


def test_refresh_creates_no_second_name(lake: Lakehouse, lakes: Lakes) -> None:
    clone, table_id, _ = create_clone(lake, lakes)
    catalog_at(clone).load_table("ns.t").append(pa.table({"id": pa.array([9], pa.int64())}))
    catalog_at(lake).rename_table("ns.t", "hidden.t")
    with pytest.raises(TableHasAnotherNameError):
        operations.plan_refresh(lake, "x", ours=["ns.t"])
    operations.plan_refresh(lake, "x", theirs=["ns.t"]).execute()
    assert names_of(clone, table_id) == ["hidden.t"]


def test_verify_reports_two_names(lake: Lakehouse) -> None:
    create_and_rename(lake)
    assert operations.verify(lake).findings == ()
    add_second_name(lake)
    (finding,) = operations.verify(lake).findings
    assert (finding.code, finding.severity) == ("table-has-two-names", "warning")


def test_table_names_index_reads_versions_in_any_order(lake: Lakehouse) -> None:
    version = create_and_rename(lake)
    names, table_id, old_snapshot = TableNames(), table_id_of(lake), lake.snapshot(version)
    for _ in range(2):
        assert [str(name) for name in names.names_of(lake.snapshot(), table_id)] == ["hidden.t"]
        assert [str(name) for name in names.names_of(old_snapshot, table_id)] == ["ns.t"]
