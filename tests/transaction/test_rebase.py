"""Concurrent commits that are compatible, and those that conflict."""

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

Work = Callable[[Transaction], Any]


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


def replace_namespace(name: str) -> Work:
    def work(txn: Transaction) -> None:
        txn.drop_namespace(name, cascade=True)
        txn.create_namespace(name)

    return work


def replace_table(txn: Transaction) -> None:
    txn.drop_table("ns", "t00")
    txn.create_table("ns", "t00", table())


COMPATIBLE: dict[str, tuple[Work, Work]] = {
    "tables of one namespace": (
        lambda txn: txn.create_table("ns", "x", table()),
        lambda txn: txn.create_table("ns", "y", table()),
    ),
    "different tables altered": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        lambda txn: txn.alter_table("ns", "t01", table(a="b")),
    ),
    "one altered, another dropped": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        lambda txn: txn.drop_table("ns", "t01"),
    ),
    "different namespaces": (
        lambda txn: txn.create_namespace("x"),
        lambda txn: txn.create_namespace("y"),
    ),
    "properties of the namespace of our table": (
        lambda txn: txn.create_table("ns", "x", table()),
        lambda txn: txn.alter_namespace("ns", {"a": "b"}),
    ),
    "table in the namespace whose properties we change": (
        lambda txn: txn.alter_namespace("ns", {"a": "b"}),
        lambda txn: txn.create_table("ns", "x", table()),
    ),
    "drop of another namespace": (
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
        lambda txn: txn.drop_namespace("one", cascade=True),
    ),
    "a table dropped from the namespace that we drop": (
        lambda txn: txn.drop_namespace("empty"),
        lambda txn: txn.drop_table("one", "t"),
    ),
    "what we only read": (
        lambda txn: (txn.table("ns", "t00"), txn.tables("ns"), txn.create_namespace("x")),
        lambda txn: txn.alter_table("ns", "t00", table(a="b")),
    ),
    "tree rebuilt": (
        lambda txn: txn.alter_table("one", "t", table(a="b")),
        lambda txn: [txn.create_table("ns", f"new{number}", table()) for number in range(60)],
    ),
}

CONFLICTING: dict[str, tuple[Work, Work, str]] = {
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
    "table in a dropped namespace": (
        lambda txn: txn.create_table("empty", "x", table()),
        lambda txn: txn.drop_namespace("empty"),
        "namespace empty: we changed its tables, a concurrent commit dropped it",
    ),
    "table in a replaced namespace": (
        lambda txn: txn.create_table("empty", "x", table()),
        replace_namespace("empty"),
        "namespace empty: we changed its tables, a concurrent commit dropped it",
    ),
    "dropped namespace gained a table": (
        lambda txn: txn.drop_namespace("empty"),
        lambda txn: txn.create_table("empty", "x", table()),
        "table empty.x: a concurrent commit created it, we dropped its namespace",
    ),
    "dropped namespace with tables gained one more": (
        lambda txn: txn.drop_namespace("one", cascade=True),
        lambda txn: txn.create_table("one", "x", table()),
        "table one.x: a concurrent commit created it, we dropped its namespace",
    ),
    "namespace restored to nothing gained a table": (
        lambda txn: txn.restore_entry(txn.keys.namespace_key("empty"), None),
        lambda txn: txn.create_table("empty", "x", table()),
        "table empty.x: a concurrent commit created it, we dropped its namespace",
    ),
    "replaced namespace gained a table": (
        replace_namespace("empty"),
        lambda txn: txn.create_table("empty", "x", table()),
        "table empty.x: a concurrent commit created it, we dropped its namespace",
    ),
}

SERIALIZABLE_ONLY: dict[str, tuple[Work, Work, str]] = {
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
    "vanished table": (
        lambda txn: (txn.tables("one"), txn.create_namespace("x")),
        lambda txn: txn.drop_table("one", "t"),
        "table one.t: we read it or listed it, a concurrent commit dropped it",
    ),
    "phantom namespace": (
        lambda txn: (txn.namespaces(), txn.create_table("one", "x", table())),
        lambda txn: txn.create_namespace("y"),
        "namespace y: we read it",
    ),
    "absence": (
        lambda txn: (txn.has_table("ns", "nope"), txn.create_namespace("x")),
        lambda txn: txn.create_table("ns", "nope", table()),
        "table ns.nope: we read it",
    ),
}


def race(lake: Lakehouse, ours: Work, theirs: Work, isolation: str) -> Transaction:
    """Begin our transaction, commit theirs, then commit ours."""
    txn = lake.transaction(isolation=isolation)
    ours(txn)
    with lake.transaction() as other:
        theirs(other)
    assert other.committed_version == 2
    txn.commit()
    return txn


@pytest.mark.parametrize(("ours", "theirs"), COMPATIBLE.values(), ids=COMPATIBLE.keys())
def test_compatible_commits_are_serialized(filled_lake: Lakehouse, ours: Work, theirs: Work) -> None:
    assert race(filled_lake, ours, theirs, "snapshot").committed_version == 3
    final_objects = objects(filled_lake.snapshot(3)).keys()
    assert final_objects == (objects(filled_lake.snapshot(2)).keys() | final_objects) - _dropped(filled_lake, 2, 3)
    for change in filled_lake.diff(1, 2):
        assert change not in filled_lake.diff(2, 3), "our commit leaves theirs alone"
    assert unreferenced_paths(filled_lake) == set(), "the files of the first attempt are gone"


def _dropped(lake: Lakehouse, before: int, after: int) -> set[tuple[str, ...]]:
    removed = (change for change in lake.diff(before, after) if change.kind == "removed")
    return {(change.namespace, change.table) if change.table else (change.namespace,) for change in removed}


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
@pytest.mark.parametrize(("ours", "theirs", "line"), CONFLICTING.values(), ids=CONFLICTING.keys())
def test_conflicts_name_object_and_both_sides(
    filled_lake: Lakehouse, ours: Work, theirs: Work, line: str, isolation: str
) -> None:
    with pytest.raises(CommitConflictError) as caught:
        race(filled_lake, ours, theirs, isolation)
    assert any(line in conflict for conflict in caught.value.conflicts)
    assert line in str(caught.value)
    assert (caught.value.base_version, caught.value.latest_version) == (1, 2)
    assert filled_lake.latest_version() == 2
    assert unreferenced_paths(filled_lake) == set()


@pytest.mark.parametrize(("ours", "theirs", "line"), SERIALIZABLE_ONLY.values(), ids=SERIALIZABLE_ONLY.keys())
def test_changed_reads_conflict_only_when_serializable(
    filled_lake: Lakehouse, ours: Work, theirs: Work, line: str
) -> None:
    with pytest.raises(CommitConflictError) as caught:
        race(filled_lake, ours, theirs, "serializable")
    assert line in str(caught.value)
    assert filled_lake.latest_version() == 2


@pytest.mark.parametrize(("ours", "theirs", "line"), SERIALIZABLE_ONLY.values(), ids=SERIALIZABLE_ONLY.keys())
def test_snapshot_isolation_allows_changed_reads(filled_lake: Lakehouse, ours: Work, theirs: Work, line: str) -> None:
    assert line
    assert race(filled_lake, ours, theirs, "snapshot").committed_version == 3


def test_serializable_transactions_with_disjoint_reads_commit(filled_lake: Lakehouse) -> None:
    def ours(txn: Transaction) -> None:
        txn.tables("one")
        txn.alter_table("one", "t", table(a="b"))

    assert (
        race(filled_lake, ours, lambda txn: txn.create_table("ns", "x", table()), "serializable").committed_version == 3
    )


def test_transaction_is_rebased_until_it_commits(filled_lake: Lakehouse) -> None:
    mine = filled_lake.transaction()
    mine.create_table("ns", "mine", table())
    mine.require(lambda latest: _intrude(filled_lake, latest))
    assert mine.commit() == 6
    assert {"mine", "theirs-1", "theirs-2", "theirs-3", "theirs-4"} <= set(filled_lake.snapshot().tables("ns"))
    assert unreferenced_paths(filled_lake) == set()


def _intrude(lake: Lakehouse, latest: Snapshot) -> None:
    """Commit a change at each attempt of another transaction, until version 5."""
    if latest.version < 5:
        with lake.transaction() as other:
            other.create_table("ns", f"theirs-{latest.version}", table())


def test_preconditions_are_checked_on_every_rebase(filled_lake: Lakehouse) -> None:
    def namespace_is_empty(latest: Snapshot) -> None:
        if latest.tables("empty"):
            raise NamespaceNotEmptyError("it is not empty any more")

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


def test_read_settings_conflict_when_serializable(filled_lake: Lakehouse) -> None:
    """A transaction that depends on a setting conflicts with a change of it."""
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
