"""Rebase: which concurrent commits are compatible, and which conflict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.lakes import objects, table, unreferenced_paths
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CommitConflictError, NamespaceNotEmptyError
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.snapshot import Snapshot

Change = Callable[[Transaction], Any]


@pytest.fixture
def filled_lake(lake: Lakehouse) -> Lakehouse:
    """A lakehouse with the namespaces ``ns`` (tables t00 to t19), ``empty`` and ``one`` (table ``t``) at version 1."""
    with lake.transaction() as txn:
        for name in ("ns", "empty", "one"):
            txn.create_namespace(name)
        for number in range(20):
            txn.create_table("ns", f"t{number:02d}", table())
        txn.create_table("one", "t", table())
    return lake


def replace_namespace(name: str) -> Change:
    def change(txn: Transaction) -> None:
        txn.drop_namespace(name, cascade=True)
        txn.create_namespace(name)

    return change


def replace_table(txn: Transaction) -> None:
    txn.drop_table("ns", "t00")
    txn.create_table("ns", "t00", table())


COMPATIBLE: dict[str, tuple[Change, Change]] = {
    "different tables created in a namespace": (
        lambda txn: txn.create_table("ns", "x", table()),
        lambda txn: txn.create_table("ns", "y", table()),
    ),
    "different tables altered": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        lambda txn: txn.alter_table("ns", "t01", table(a="b")),
    ),
    "one table altered, another dropped": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        lambda txn: txn.drop_table("ns", "t01"),
    ),
    "different namespaces created": (
        lambda txn: txn.create_namespace("x"),
        lambda txn: txn.create_namespace("y"),
    ),
    "namespace of our table altered": (
        lambda txn: txn.create_table("ns", "x", table()),
        lambda txn: txn.alter_namespace("ns", {"a": "b"}),
    ),
    "table created in a namespace that we alter": (
        lambda txn: txn.alter_namespace("ns", {"a": "b"}),
        lambda txn: txn.create_table("ns", "x", table()),
    ),
    "another namespace dropped": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        lambda txn: txn.drop_namespace("one", cascade=True),
    ),
    "table dropped from another namespace": (
        lambda txn: txn.drop_namespace("empty"),
        lambda txn: txn.drop_table("one", "t"),
    ),
    "table altered that we only read": (
        lambda txn: (txn.table("ns", "t00"), txn.tables("ns"), txn.create_namespace("x")),
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
    ),
    "many tables created": (
        lambda txn: txn.alter_table("one", "t", table(a="b")),
        lambda txn: [txn.create_table("ns", f"new{number}", table()) for number in range(60)],
    ),
}

CONFLICTING: dict[str, tuple[Change, Change, str]] = {
    "both create a namespace": (
        lambda txn: txn.create_namespace("x"),
        lambda txn: txn.create_namespace("x"),
        "namespace x: we wrote it, a concurrent commit created it",
    ),
    "both create a table": (
        lambda txn: txn.create_table("ns", "x", table()),
        lambda txn: txn.create_table("ns", "x", table()),
        "table ns.x: we wrote it, a concurrent commit created it",
    ),
    "both alter a table": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        lambda txn: txn.alter_table("ns", "t00", table(a="c")),
        "table ns.t00: we wrote it, a concurrent commit changed it",
    ),
    "we alter, they drop": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        lambda txn: txn.drop_table("ns", "t00"),
        "table ns.t00: we wrote it, a concurrent commit dropped it",
    ),
    "we drop, they alter": (
        lambda txn: txn.drop_table("ns", "t00"),
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        "table ns.t00: we dropped it, a concurrent commit changed it",
    ),
    "we alter, they replace": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        replace_table,
        "table ns.t00: we wrote it, a concurrent commit changed it",
    ),
    "both drop a table": (
        lambda txn: txn.drop_table("ns", "t00"),
        lambda txn: txn.drop_table("ns", "t00"),
        "table ns.t00: we dropped it, a concurrent commit dropped it",
    ),
    "both change a namespace": (
        lambda txn: txn.alter_namespace("ns", {"a": "b"}),
        lambda txn: txn.alter_namespace("ns", {"a": "c"}),
        "namespace ns: we wrote it, a concurrent commit changed it",
    ),
    "namespace of our new table dropped": (
        lambda txn: txn.create_table("empty", "x", table()),
        lambda txn: txn.drop_namespace("empty"),
        "namespace empty: we changed its tables, a concurrent commit dropped it",
    ),
    "namespace of our new table replaced": (
        lambda txn: txn.create_table("empty", "x", table()),
        replace_namespace("empty"),
        "namespace empty: we changed its tables, a concurrent commit dropped it",
    ),
    "table created in a namespace that we drop": (
        lambda txn: txn.drop_namespace("empty"),
        lambda txn: txn.create_table("empty", "x", table()),
        "table empty.x: a concurrent commit created it, we dropped its namespace",
    ),
    "table created in a filled namespace that we drop": (
        lambda txn: txn.drop_namespace("one", cascade=True),
        lambda txn: txn.create_table("one", "x", table()),
        "table one.x: a concurrent commit created it, we dropped its namespace",
    ),
    "table created in a namespace that we restore as missing": (
        lambda txn: txn.restore_entry(txn.keys.namespace_key("empty"), None),
        lambda txn: txn.create_table("empty", "x", table()),
        "table empty.x: a concurrent commit created it, we dropped its namespace",
    ),
    "table created in a namespace that we replace": (
        replace_namespace("empty"),
        lambda txn: txn.create_table("empty", "x", table()),
        "table empty.x: a concurrent commit created it, we dropped its namespace",
    ),
}

SERIALIZABLE_ONLY: dict[str, tuple[Change, Change, str]] = {
    "write skew": (
        lambda txn: (txn.table("ns", "t00"), txn.alter_table("ns", "t01", table(a="b"))),
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        "table ns.t00: we read it",
    ),
    "phantom table": (
        lambda txn: (txn.tables("ns"), txn.create_namespace("x")),
        lambda txn: txn.create_table("ns", "t99", table()),
        "table ns.t99: we read it or listed it, a concurrent commit created it",
    ),
    "dropped table": (
        lambda txn: (txn.tables("one"), txn.create_namespace("x")),
        lambda txn: txn.drop_table("one", "t"),
        "table one.t: we read it or listed it, a concurrent commit dropped it",
    ),
    "phantom namespace": (
        lambda txn: (txn.namespaces(), txn.create_table("one", "x", table())),
        lambda txn: txn.create_namespace("y"),
        "namespace y: we read it",
    ),
    "missing table": (
        lambda txn: (txn.has_table("ns", "nope"), txn.create_namespace("x")),
        lambda txn: txn.create_table("ns", "nope", table()),
        "table ns.nope: we read it",
    ),
}


def race(lake: Lakehouse, ours: Change, theirs: Change, isolation: str) -> Transaction:
    """Begin our transaction, commit theirs, then commit ours and return it."""
    txn = lake.transaction(isolation=isolation)
    ours(txn)
    with lake.transaction() as other:
        theirs(other)
    assert other.committed_version == 2
    txn.commit()
    return txn


@pytest.mark.parametrize(("ours", "theirs"), COMPATIBLE.values(), ids=COMPATIBLE.keys())
def test_compatible_commits_succeed(filled_lake: Lakehouse, ours: Change, theirs: Change) -> None:
    assert race(filled_lake, ours, theirs, "snapshot").committed_version == 3
    final_objects = objects(filled_lake.snapshot(3)).keys()
    assert final_objects == (objects(filled_lake.snapshot(2)).keys() | final_objects) - _dropped(filled_lake, 2, 3)
    for change in filled_lake.diff(1, 2):
        assert change not in filled_lake.diff(2, 3), "our commit does not undo theirs"
    assert unreferenced_paths(filled_lake) == set(), "the files of the first attempt were deleted"


def _dropped(lake: Lakehouse, before: int, after: int) -> set[tuple[str, ...]]:
    removed = (change for change in lake.diff(before, after) if change.kind == "removed")
    return {(change.namespace, change.table) if change.table else (change.namespace,) for change in removed}


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
@pytest.mark.parametrize(("ours", "theirs", "conflict"), CONFLICTING.values(), ids=CONFLICTING.keys())
def test_conflicts_name_object_and_both_sides(
    filled_lake: Lakehouse, ours: Change, theirs: Change, conflict: str, isolation: str
) -> None:
    with pytest.raises(CommitConflictError) as caught:
        race(filled_lake, ours, theirs, isolation)
    assert any(conflict in text for text in caught.value.conflicts)
    assert conflict in str(caught.value)
    assert (caught.value.base_version, caught.value.latest_version) == (1, 2)
    assert filled_lake.latest_version() == 2
    assert unreferenced_paths(filled_lake) == set()


@pytest.mark.parametrize(("ours", "theirs", "conflict"), SERIALIZABLE_ONLY.values(), ids=SERIALIZABLE_ONLY.keys())
def test_changed_reads_conflict_when_serializable(
    filled_lake: Lakehouse, ours: Change, theirs: Change, conflict: str
) -> None:
    with pytest.raises(CommitConflictError) as caught:
        race(filled_lake, ours, theirs, "serializable")
    assert conflict in str(caught.value)
    assert filled_lake.latest_version() == 2


@pytest.mark.parametrize(("ours", "theirs", "conflict"), SERIALIZABLE_ONLY.values(), ids=SERIALIZABLE_ONLY.keys())
def test_snapshot_isolation_allows_changed_reads(
    filled_lake: Lakehouse, ours: Change, theirs: Change, conflict: str
) -> None:
    assert conflict
    assert race(filled_lake, ours, theirs, "snapshot").committed_version == 3


def test_serializable_transactions_with_disjoint_reads_commit(filled_lake: Lakehouse) -> None:
    def ours(txn: Transaction) -> None:
        txn.tables("one")
        txn.alter_table("one", "t", table(a="b"))

    assert (
        race(filled_lake, ours, lambda txn: txn.create_table("ns", "x", table()), "serializable").committed_version == 3
    )


def test_transaction_is_rebased_until_it_commits(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction()
    txn.create_table("ns", "ours", table())
    txn.require(lambda latest: _commit_conflict(filled_lake, latest))
    assert txn.commit() == 6
    assert {"ours", "theirs-1", "theirs-2", "theirs-3", "theirs-4"} <= set(filled_lake.snapshot().tables("ns"))
    assert unreferenced_paths(filled_lake) == set()


def _commit_conflict(lake: Lakehouse, latest: Snapshot) -> None:
    """Commit a change before each attempt of another transaction, up to version 5."""
    if latest.version < 5:
        with lake.transaction() as other:
            other.create_table("ns", f"theirs-{latest.version}", table())


def test_preconditions_are_checked_on_every_rebase(filled_lake: Lakehouse) -> None:
    def namespace_is_empty(latest: Snapshot) -> None:
        if latest.tables("empty"):
            raise NamespaceNotEmptyError("namespace 'empty' has tables")

    txn = filled_lake.transaction()
    txn.require(namespace_is_empty)
    txn.create_namespace("x")
    with filled_lake.transaction() as other:
        other.create_table("empty", "t", table())
    with pytest.raises(NamespaceNotEmptyError):
        txn.commit()
    assert unreferenced_paths(filled_lake) == set()
    with pytest.raises(NamespaceNotEmptyError):
        filled_lake.transaction().require(namespace_is_empty)


def test_settings_read_conflicts_only_when_serializable(filled_lake: Lakehouse) -> None:
    """A serializable transaction that reads a setting conflicts with a change of that setting."""
    outcomes: list[int | type[CommitConflictError]] = []
    for isolation in ("serializable", "snapshot"):
        txn = filled_lake.transaction(isolation)
        assert txn.definition.properties.get("frozen") != isolation
        txn.create_namespace(f"by-{isolation}")
        other = filled_lake.transaction()
        other.alter_definition(replace(other.definition, properties={"frozen": isolation}))
        other.commit()
        try:
            outcomes.append(txn.commit())
        except CommitConflictError as error:
            assert "settings of the lakehouse: we read them" in str(error)
            outcomes.append(CommitConflictError)
    assert outcomes == [CommitConflictError, filled_lake.latest_version()]


def test_transaction_without_changes_never_conflicts(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction("serializable")
    before = txn.base.version
    txn.namespaces()
    with filled_lake.transaction() as other:
        other.create_namespace("more")
    assert txn.commit() == before
