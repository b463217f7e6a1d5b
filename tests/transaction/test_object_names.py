"""A namespace never has a table and a view with the same name, whichever transaction creates the second object."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lakes import Lakes, table, unreferenced_paths
from tests.operations.test_folding_file_systems import RemoteExecutor
from tests.request_budgets import budget
from tests.transaction.groups import commit_together, creates_table, simulate_high_latency
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ObjectExistsError
from trinitylake_ops.storage.meter import MeteredStorage
from trinitylake_ops.transaction.change_set import VIEW_PREFIX, views_in
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.snapshot import CatalogReader

pytestmark = pytest.mark.usefixtures("fixed_requests")

VIEW = f"{VIEW_PREFIX}v"


def add_view(txn: Transaction) -> None:
    txn.alter_namespace("ns", {**txn.namespace("ns").properties, VIEW: "{}"})


def drop_view(txn: Transaction) -> None:
    properties = txn.namespace("ns").properties
    txn.alter_namespace("ns", {name: value for name, value in properties.items() if name != VIEW})


def add_table(txn: Transaction) -> None:
    txn.create_table("ns", "v", table())


def names(reader: CatalogReader) -> tuple[list[str], list[str]]:
    """Return the names of the tables and views of the namespace."""
    return reader.tables("ns"), views_in(reader.namespace("ns").properties)


def commit_changes(lake: Lakehouse, *changes: Callable[[Transaction], object]) -> int:
    """Commit changes in one transaction, and return its version."""
    with lake.transaction() as txn:
        for change in changes:
            change(txn)
    assert txn.committed_version is not None
    return txn.committed_version


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse whose version 1 has an empty namespace."""
    lake = lakes.memory()
    commit_changes(lake, lambda txn: txn.create_namespace("ns"))
    return lake


@pytest.mark.parametrize(("first", "second"), [(add_view, add_table), (add_table, add_view)])
def test_second_object_with_same_name_is_rejected(
    lake: Lakehouse, first: Callable[[Transaction], None], second: Callable[[Transaction], None]
) -> None:
    commit_changes(lake, first)
    before = names(lake.snapshot())
    with pytest.raises(ObjectExistsError):
        commit_changes(lake, second)
    assert names(lake.snapshot()) == before
    assert unreferenced_paths(lake) == set()


@pytest.mark.parametrize(("first", "second"), [(add_view, add_table), (add_table, add_view)])
def test_table_and_view_of_same_name_in_one_transaction_fail(
    lake: Lakehouse, first: Callable[[Transaction], None], second: Callable[[Transaction], None]
) -> None:
    with pytest.raises(ObjectExistsError):
        commit_changes(lake, first, second)
    assert names(lake.snapshot()) == ([], [])


@pytest.mark.parametrize(("first", "second"), [(add_view, add_table), (add_table, add_view)])
def test_transaction_that_conflicts_with_concurrent_commit_fails(
    lake: Lakehouse, first: Callable[[Transaction], None], second: Callable[[Transaction], None]
) -> None:
    txn = lake.transaction()
    second(txn)
    other = Lakehouse(lake.storage)
    commit_changes(other, first)
    with pytest.raises(ObjectExistsError):
        txn.commit()
    assert names(lake.snapshot()) == names(other.snapshot())
    assert unreferenced_paths(lake) == set()


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("changes", [(add_view, add_table), (add_table, add_view)])
def test_waiting_transactions_commit_in_order(
    lakes: Lakes,
    monkeypatch: pytest.MonkeyPatch,
    changes: tuple[Callable[[Transaction], None], Callable[[Transaction], None]],
    is_slow: bool,
) -> None:
    """Only the transaction whose name is taken fails, even if it wrote its files before it was queued."""
    if is_slow:
        simulate_high_latency(monkeypatch)
    lake = lakes.memory()
    commit_changes(lake, lambda txn: txn.create_namespace("ns"), lambda txn: txn.create_namespace("other"))
    outcomes = commit_together(lake, [*changes, lambda txn: txn.create_table("other", "t", table())])
    assert isinstance(outcomes[1], ObjectExistsError)
    assert [type(outcome) for outcome in (outcomes[0], outcomes[2])] == [int, int]
    assert lake.snapshot().tables("other") == ["t"]
    assert unreferenced_paths(lake) == set()


@pytest.mark.parametrize("is_slow", [False, True])
def test_group_member_with_taken_name_fails_alone(lakes: Lakes, monkeypatch: pytest.MonkeyPatch, is_slow: bool) -> None:
    if is_slow:
        simulate_high_latency(monkeypatch)
    lake = lakes.memory()
    commit_changes(lake, lambda txn: txn.create_namespace("ns", {VIEW: "{}"}))
    outcomes = commit_together(lake, [creates_table("a"), add_table, creates_table("b")])
    assert isinstance(outcomes[1], ObjectExistsError)
    assert names(lake.snapshot()) == (["a", "b"], ["v"])
    assert unreferenced_paths(lake) == set()


def test_name_can_be_reused_after_drop_in_same_transaction(lake: Lakehouse) -> None:
    commit_changes(lake, add_view)
    commit_changes(lake, drop_view, add_table)
    assert names(lake.snapshot()) == (["v"], [])
    commit_changes(lake, lambda txn: txn.drop_table("ns", "v"), add_view)
    assert names(lake.snapshot()) == ([], ["v"])


def test_names_of_restored_entry_are_checked(lake: Lakehouse) -> None:
    """Rollbacks of single tables or namespaces restore entries."""
    with_table = lake.snapshot(commit_changes(lake, add_table))
    commit_changes(lake, lambda txn: txn.drop_table("ns", "v"))
    with_view = lake.snapshot(commit_changes(lake, add_view))
    table_key, namespace_key = lake.snapshot().keys.table_key("ns", "v"), lake.snapshot().keys.namespace_key("ns")
    with pytest.raises(ObjectExistsError):
        commit_changes(lake, lambda txn: txn.restore_entry(table_key, with_table.entry(table_key)))
    commit_changes(lake, drop_view, add_table)
    with pytest.raises(ObjectExistsError):
        commit_changes(lake, lambda txn: txn.restore_entry(namespace_key, with_view.entry(namespace_key)))
    commit_changes(
        lake,
        lambda txn: txn.restore_entry(table_key, None),
        lambda txn: txn.restore_entry(namespace_key, with_view.entry(namespace_key)),
    )
    assert names(lake.snapshot()) == ([], ["v"])


def test_names_of_staged_and_saved_changes_are_checked(lake: Lakehouse) -> None:
    txn = lake.transaction()
    txn.put_staged([lake.stage_definition("ns", "v", table())])
    saved = lake.transaction()
    add_table(saved)
    transaction_id = saved.save()
    commit_changes(lake, add_view)
    with pytest.raises(ObjectExistsError):
        txn.commit()
    with pytest.raises(ObjectExistsError):
        lake.resume_transaction(transaction_id).commit()
    assert names(lake.snapshot()) == ([], ["v"])


def test_existing_shared_names_can_be_altered_and_dropped(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program or an older release may have created a table and a view with the same name."""
    with monkeypatch.context() as older_release:
        older_release.setattr("trinitylake_ops.transaction.change_set.VIEW_PREFIX", "none.")
        commit_changes(lake, add_view, add_table)
    commit_changes(lake, lambda txn: txn.alter_table("ns", "v", table(n="2")))
    commit_changes(lake, lambda txn: txn.alter_namespace("ns", {**txn.namespace("ns").properties, "a": "b"}))
    commit_changes(lake, lambda txn: txn.drop_table("ns", "v"))
    assert names(lake.snapshot()) == ([], ["v"])


@pytest.mark.parametrize("changes", [(add_view, add_table), (add_table, add_view)])
def test_verify_reports_shared_name(
    lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, changes: tuple[Callable[[Transaction], None], ...]
) -> None:
    commit_changes(lake, lambda txn: txn.create_table("ns", "t", table()))
    assert operations.verify(lake).findings == ()
    with monkeypatch.context() as older_release:
        older_release.setattr("trinitylake_ops.transaction.change_set.VIEW_PREFIX", "none.")
        for change in changes:
            commit_changes(lake, change)
    commit_changes(lake, lambda txn: txn.alter_table("ns", "v", table(n="2")))
    for incremental in (False, True, True):
        (finding,) = operations.verify(lake, incremental=incremental).findings
        assert (finding.code, finding.severity, finding.version) == ("name-shared", "warning", 4)
    (finding,) = operations.verify(lake, executor=RemoteExecutor()).findings
    assert (finding.code, finding.version) == ("name-shared", 4)


def test_view_with_invalid_table_name_is_ignored(lake: Lakehouse) -> None:
    commit_changes(lake, lambda txn: txn.alter_namespace("ns", {VIEW_PREFIX: "", f"{VIEW_PREFIX}a b": ""}))
    commit_changes(lake, add_table)
    assert lake.snapshot().tables("ns") == ["v"]


def test_namespace_definition_is_read_once_for_several_new_tables(lake: Lakehouse) -> None:
    metered = MeteredStorage(lake.storage)
    other = Lakehouse(metered)
    reads = []
    for number in range(3):
        txn = other.transaction()
        txn.create_table("ns", f"t{number}", table())
        with metered.measure() as measured:
            txn.commit()
        reads.append(measured.counts.requests.get("read", 0))
    first, second = budget("commit a new table, namespace not cached"), budget("commit a new table")
    assert reads == [row.requests.get("read", 0) for row in (first, second, second)]
