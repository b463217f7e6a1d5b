"""Group commit: transactions of one process that wait at the same time are committed as one version."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.clock import ClockStorage
from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, table, unreferenced_paths
from tests.request_budgets import budget
from tests.transaction.groups import (
    HookedStorage,
    Interrupted,
    commit_in_other_process,
    commit_queued,
    commit_together,
    creates_table,
    simulate_high_latency,
)
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitAttemptsExhaustedError,
    CommitConflictError,
    CommitOutcomeUnknownError,
    StoragePermissionError,
    TransactionExpiredError,
)
from trinitylake_ops.format.file_names import parse_root_path
from trinitylake_ops.storage import MeteredStorage, Storage, StorageWrapper
from trinitylake_ops.transaction import group
from trinitylake_ops.transaction.commit_queue import QueueState
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.commit_info import acting_for_run

pytestmark = pytest.mark.usefixtures("fixed_requests")


def alter(name: str, **properties: str) -> Any:
    return lambda txn: txn.alter_table("ns", name, table(**properties))


@pytest.fixture(params=[False, True], ids=["files with root", "files ahead"], autouse=True)
def writes_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether transactions write their files before they are queued, as on high-latency storage."""
    if request.param:
        simulate_high_latency(monkeypatch)
    return bool(request.param)


@pytest.fixture
def filled_lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse whose version 1 has a namespace with three tables."""
    lake = lakes.memory(order=4)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for name in ("a", "b", "c"):
            txn.create_table("ns", name, table())
    return lake


def test_waiting_transactions_share_one_version(filled_lake: Lakehouse) -> None:
    changes = [creates_table("d"), alter("a", x="1"), lambda txn: txn.drop_table("ns", "b")]
    assert commit_together(filled_lake, changes) == [2, 2, 2]
    assert filled_lake.snapshot().tables("ns") == ["a", "c", "d"]
    assert filled_lake.snapshot().table("ns", "a").properties == {"x": "1"}
    info = next(filled_lake.history())
    assert (info.operation, info.message) == ("group", "3 transactions")
    assert info.counts == {"set": 2, "deleted": 1}
    assert [(member.operation, member.message) for member in info.transactions] == [
        ("create-table", "ns.d"), ("alter-table", "ns.a"), ("drop-table", "ns.b"),
    ]  # fmt: skip
    assert [member.id for member in info.transactions] == list(info.members)
    assert unreferenced_paths(filled_lake) == set()


def test_commit_info_of_each_member_is_kept(filled_lake: Lakehouse) -> None:
    with acting_for_run("run-a", "Ada"):
        first = filled_lake.transaction(message="first", properties={"k": "v"})
    second = filled_lake.transaction(operation="publish", run_id="run-b")
    creates_table("d")(first)
    creates_table("e")(second)
    with acting_for_run("run-c", "Grace"):  # the run of the thread that commits the group does not matter
        assert commit_queued(filled_lake, [first, second]) == [2, 2]
    group_info = next(filled_lake.history())
    assert (group_info.run_id, group_info.approved_by) == (None, None)
    first_info, second_info = group_info.transactions
    assert (first_info.id, first_info.message, first_info.properties) == (first.id, "first", {"k": "v"})
    assert (first_info.run_id, first_info.approved_by) == ("run-a", "Ada")
    assert (second_info.id, second_info.operation, second_info.run_id, second_info.approved_by, second_info.counts) == (
        second.id, "publish", "run-b", None, {"set": 1, "deleted": 0},
    )  # fmt: skip


def test_conflicting_group_member_fails_alone(filled_lake: Lakehouse) -> None:
    """All members begin on version 1, and another process commits version 2 first."""

    def commit_conflict() -> None:
        commit_in_other_process(filled_lake.storage, alter("a", other="yes"))

    changes = [alter("b", x="1"), alter("a", x="1"), creates_table("d")]
    first, second, third = commit_together(filled_lake, changes, while_queued=commit_conflict)
    assert (first, third) == (3, 3)
    assert isinstance(second, CommitConflictError)
    assert (second.base_version, second.latest_version) == (1, 2)
    assert "table ns.a: we wrote it, a concurrent commit changed it" in second.conflicts
    assert filled_lake.snapshot().table("ns", "a").properties == {"other": "yes"}
    assert unreferenced_paths(filled_lake) == set()


@pytest.mark.parametrize(
    ("change", "conflicting_change"),
    [
        (creates_table("d"), creates_table("d")),
        (alter("a", x="1"), alter("a", x="2")),
        (lambda txn: txn.drop_table("ns", "a"), alter("a", x="2")),
        (creates_table("d"), lambda txn: txn.drop_namespace("ns", cascade=True)),
        (lambda txn: txn.drop_namespace("ns", cascade=True), creates_table("d")),
    ],
)
def test_first_of_two_conflicting_members_succeeds(
    filled_lake: Lakehouse, change: Any, conflicting_change: Any
) -> None:
    first, second = commit_together(filled_lake, [change, conflicting_change])
    assert first == 2
    assert isinstance(second, CommitConflictError)
    assert (second.base_version, second.latest_version) == (1, 2)
    assert filled_lake.latest_version() == 2
    assert unreferenced_paths(filled_lake) == set()


def test_serializable_members_with_write_skew_do_not_share_version(filled_lake: Lakehouse) -> None:
    """Each member reads the table that the other member writes."""

    def read_and_write(read: str, written: str, value: str) -> Any:
        def change(txn: Transaction) -> None:
            txn.table("ns", read)
            alter(written, x=value)(txn)

        return change

    changes = [read_and_write("a", "b", "1"), read_and_write("b", "a", "1")]
    first, second = commit_together(filled_lake, changes, isolation="serializable")
    assert first == 2
    assert isinstance(second, CommitConflictError)
    changes = [read_and_write("a", "b", "2"), read_and_write("b", "a", "2")]
    assert commit_together(filled_lake, changes, isolation="snapshot") == [3, 3]


def test_exclusive_transactions_bypass_queue(filled_lake: Lakehouse) -> None:
    def alter_settings(txn: Transaction) -> None:
        txn.alter_definition(replace(txn.definition, properties={"x": "1"}))

    def create_with_precondition(txn: Transaction) -> None:
        txn.require(lambda base: None)
        creates_table("e")(txn)

    changes = [creates_table("d"), alter_settings, create_with_precondition, creates_table("f")]
    assert commit_together(filled_lake, changes) == [4, 2, 3, 4]
    assert filled_lake.snapshot().definition.properties == {"x": "1"}


def test_transactions_with_shared_preconditions_share_version(filled_lake: Lakehouse) -> None:
    def create_with_precondition(name: str) -> Any:
        def change(txn: Transaction) -> None:
            txn.require(lambda base: None, alone=False)
            creates_table(name)(txn)

        return change

    changes = [create_with_precondition("d"), creates_table("e"), create_with_precondition("f")]
    assert commit_together(filled_lake, changes) == [2, 2, 2]


def test_retried_transaction_waits_for_its_first_submission(filled_lake: Lakehouse) -> None:
    transactions = [filled_lake.transaction(transaction_id="0f6f8e1a-5d0e-4b66-9d0f-0d6a4e2f4a11") for _ in range(2)]
    for name, txn in zip("de", transactions, strict=True):
        creates_table(name)(txn)
    assert commit_queued(filled_lake, transactions) == [2, 3]


def test_exclusive_transactions_commit_one_after_another(lakes: Lakes) -> None:
    """Each transaction has at most one conflict, with the transaction that committed after it began."""
    lake = lakes.memory(order=4)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    transactions = [lake.transaction() for _ in range(6)]
    for number, txn in enumerate(transactions):
        txn.require(lambda base: time.sleep(0.01))
        creates_table(f"t{number}")(txn)
    with ThreadPoolExecutor(len(transactions)) as threads:
        assert sorted(threads.map(Transaction.commit, transactions)) == [2, 3, 4, 5, 6, 7]
    assert max(info.cost["attempts"] for info in lake.history() if info.cost) <= 2


def test_member_without_changes_commits_on_its_base(filled_lake: Lakehouse) -> None:
    assert commit_together(filled_lake, [creates_table("d"), lambda txn: None, creates_table("e")]) == [2, 1, 2]
    assert len(next(filled_lake.history()).members) == 2
    assert commit_together(filled_lake, [lambda txn: None, lambda txn: None]) == [2, 2]


def test_group_members_fit_into_commit_info_of_root(filled_lake: Lakehouse) -> None:
    transactions = [filled_lake.transaction(message="m" * 1_000) for _ in range(8)]
    for number, txn in enumerate(transactions):
        creates_table(f"t{number}")(txn)
    versions = commit_queued(filled_lake, transactions)
    assert sorted(set(versions)) == list(range(2, filled_lake.latest_version() + 1))  # type: ignore[type-var]
    assert 2 < len(set(versions)) < 8
    assert [txn.committed_version for txn in transactions] == versions


def test_large_transactions_bypass_queue(filled_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_GROUP_CHANGES", 2)

    def create_many(txn: Transaction) -> None:
        for number in range(3):
            creates_table(f"many{number}")(txn)

    changes = [creates_table("d"), create_many, creates_table("e"), creates_table("f")]
    assert commit_together(filled_lake, changes) == [3, 2, 3, 4]


def test_expired_group_member_fails_alone(lakes: Lakes) -> None:
    storage = ClockStorage(lakes.storage(), 1_000)
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage, txn_ttl_millis=100))
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    old = lake.transaction()
    storage.time_ms += 80
    young, younger = lake.transaction(), lake.transaction()
    for name, txn in (("a", young), ("b", old), ("c", younger)):
        creates_table(name)(txn)

    def advance_clock() -> None:
        storage.time_ms += 80

    first, second, third = commit_queued(lake, [young, old, younger], advance_clock)
    assert (first, third) == (2, 2)
    assert isinstance(second, TransactionExpiredError)
    assert "began 160 ms ago" in str(second)
    assert lake.snapshot().tables("ns") == ["a", "c"]
    assert unreferenced_paths(lake) == set()


def test_all_expired_group_members_fail(lakes: Lakes) -> None:
    storage = ClockStorage(lakes.storage(), 1_000)
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage, txn_ttl_millis=100))

    def advance_clock() -> None:
        storage.time_ms += 101

    older = lake.transaction()
    storage.time_ms += 10
    younger = lake.transaction()
    older.create_namespace("a")
    younger.create_namespace("b")
    outcomes = commit_queued(lake, [older, younger], advance_clock)
    assert [type(outcome) for outcome in outcomes] == [TransactionExpiredError] * 2
    assert ["began 111 ms ago" in str(outcomes[0]), "began 101 ms ago" in str(outcomes[1])] == [True, True]
    assert lake.latest_version() == 0
    assert unreferenced_paths(lake) == set()


def test_unknown_outcome_is_reported_to_all_group_members(lakes: Lakes) -> None:
    inner = lakes.storage()
    lakes.watch(Lakehouse.create(inner.root, storage=inner))
    faults = [
        fail(1, AmbiguousWriteError, "after", kind="create", path_part="_1000"),
        fail(3, StoragePermissionError, kind="read", path_part="_1000"),
    ]
    lake = Lakehouse(FaultyStorage(inner, faults))
    changes = [lambda txn: txn.create_namespace("a"), lambda txn: txn.create_namespace("b")]
    first, second = commit_together(lake, changes)
    assert isinstance(first, CommitOutcomeUnknownError)
    assert isinstance(second, CommitOutcomeUnknownError)
    assert first is not second
    assert (first.version, first.commit_id) == (second.version, second.commit_id) == (1, first.commit_id)
    for error in (first, second):
        assert lake.resolve_commit(1, error.commit_id) == "committed"
    assert lake.snapshot().namespaces() == ["a", "b"]


def test_attempts_are_counted_per_member(lakes: Lakes) -> None:
    """Another process wins every race for the next version."""
    numbers = iter(range(100))
    storage = HookedStorage(lakes.storage())
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    with lake.transaction() as txn:
        txn.create_namespace("ns")

    def win_race(path: str) -> None:
        if parse_root_path(path) is not None:
            commit_in_other_process(storage.inner, creates_table(f"other{next(numbers)}"))

    storage.before = win_race
    patient, hasty = lake.transaction(), lake.transaction()
    creates_table("d")(patient)
    creates_table("e")(hasty)
    first, second = commit_queued(lake, [patient, hasty], max_attempts={patient: 5, hasty: 2})
    assert [type(outcome) for outcome in (first, second)] == [CommitAttemptsExhaustedError] * 2
    assert "after 5 conflicts" in str(first)
    assert "after 2 conflicts" in str(second)


@pytest.mark.local_only("interrupts threads at lines that are the same on every storage")
@pytest.mark.parametrize(
    ("interrupted", "step"),
    [
        pytest.param(0, 2, id="leader"),  # a normal run tests every second line
        pytest.param(0, 1, id="leader, all", marks=pytest.mark.soak),
        pytest.param(1, 1, id="follower"),
    ],
)
def test_interrupt_at_any_line_leaves_no_member_waiting(lakes: Lakes, interrupted: int, step: int) -> None:
    """Wherever a member is interrupted, the others get the correct outcome, and the queue continues."""
    lake = lakes.memory(order=4)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    for at_line in itertools.count(1, step):
        transactions = [lake.transaction() for _ in range(3)]
        for number, txn in enumerate(transactions):
            creates_table(f"t{at_line}-{number}")(txn)
        outcomes = commit_queued(lake, transactions, interrupted=interrupted, at_line=at_line)
        newest = lake.history(limit=len(transactions))
        members = {member: info.version for info in newest for member in info.members}
        for number, (txn, outcome) in enumerate(zip(transactions, outcomes, strict=True)):
            if isinstance(outcome, int):
                assert members[txn.id] == outcome
            elif isinstance(outcome, CommitOutcomeUnknownError):
                assert outcome.version is not None
                committed = lake.resolve_commit(outcome.version, outcome.commit_id) == "committed"
                assert committed == (txn.id in members)
            else:
                assert (type(outcome), number) == (Interrupted, interrupted)
        assert lake.commit_queue.state() == QueueState(None, (), frozenset())
        if not any(isinstance(outcome, Interrupted) for outcome in outcomes):
            break
    assert at_line > 10, "transactions were interrupted"


class _InterruptedDiscard(StorageWrapper):
    """While ``rejects_nodes`` is set, rejects the creates of nodes, and then interrupts the delete of a table file.

    That delete is recorded, so that the test can send it later.
    """

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.interrupted_deletes: list[str] = []
        self.rejects_nodes = False

    def create(self, path: str, data: bytes) -> None:
        if self.rejects_nodes and "-node-" in path:
            raise StoragePermissionError("not now", path=path)
        self.inner.create(path, data)

    def delete(self, path: str) -> None:
        if self.rejects_nodes and "table-t1" in path:
            self.rejects_nodes = False
            self.interrupted_deletes.append(path)
            raise Interrupted
        self.inner.delete(path)


def _begin_two_with_interrupted_discard(lakes: Lakes) -> tuple[_InterruptedDiscard, Lakehouse, list[Transaction]]:
    storage = _InterruptedDiscard(lakes.storage())
    storage.concurrency = storage.delete_batch_size = 1
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage, order=4))
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "a", table())
        txn.create_table("ns", "b", table())
    transactions = [lake.transaction() for _ in range(2)]
    for number, txn in enumerate(transactions):
        creates_table(f"t{number}")(txn)
    return storage, lake, transactions


def test_discarded_files_are_not_reused(lakes: Lakes) -> None:
    """The leader is interrupted while it discards files. The delete that it sent may take effect later."""
    storage, lake, transactions = _begin_two_with_interrupted_discard(lakes)

    def reject_nodes() -> None:
        storage.rejects_nodes = True

    leader, follower = commit_queued(lake, transactions, reject_nodes)
    assert (type(leader), follower) == (Interrupted, 2)
    assert storage.interrupted_deletes
    for path in storage.interrupted_deletes:
        storage.inner.delete(path)
    assert Lakehouse(storage.inner).snapshot().table("ns", "t1").id == transactions[1].table("ns", "t1").id


def test_untyped_error_fails_only_its_member(filled_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions = [filled_lake.transaction() for _ in range(3)]
    for number, txn in enumerate(transactions):
        creates_table(f"t{number}")(txn)
    writes_on = Submission.writes_on
    monkeypatch.setattr(
        Submission, "writes_on", lambda self, base: 1 / 0 if self.id == transactions[1].id else writes_on(self, base)
    )
    first, second, third = commit_queued(filled_lake, transactions)
    assert (first, third) == (2, 2)
    assert isinstance(second, ZeroDivisionError)


def test_transaction_does_not_overtake_conflicting_transaction(filled_lake: Lakehouse) -> None:
    """The second transaction waits for the first. So does the third, because it overlaps with the second."""
    alter_both = lambda txn: (alter("a", x="2")(txn), alter("b", x="2")(txn))  # noqa: E731
    first, second, third = commit_together(filled_lake, [alter("a", x="1"), alter_both, alter("b", x="3")])
    assert first == 2
    assert isinstance(second, CommitConflictError)
    assert third == 3


def test_precondition_can_commit_another_transaction(filled_lake: Lakehouse) -> None:
    """The precondition runs while its transaction is being committed."""

    def commit_another(base: Any) -> None:
        if base.version > 1 and not filled_lake.snapshot().has_table("ns", "nested"):
            with filled_lake.transaction() as other:
                other.create_table("ns", "nested", table())

    txn = filled_lake.transaction()
    txn.require(commit_another)
    creates_table("d")(txn)
    with Lakehouse(filled_lake.storage).transaction() as other:
        other.create_table("ns", "e", table())
    assert txn.commit() == 4
    assert filled_lake.snapshot().tables("ns") == ["a", "b", "c", "d", "e", "nested"]


@pytest.mark.local_only("opens a folder")
def test_lakehouses_with_same_root_and_options_share_queue(lakes: Lakes) -> None:
    root = lakes.local().root
    lake, other = Lakehouse.open(root), Lakehouse.open(root)
    assert lake.commit_queue is other.commit_queue
    assert Lakehouse(lake.storage).commit_queue is not lake.commit_queue


def test_transaction_with_discarded_added_file_fails(lakes: Lakes) -> None:
    """A transaction that chose the name of a file fails, because the file cannot be renamed."""
    storage, lake, transactions = _begin_two_with_interrupted_discard(lakes)
    for number, txn in enumerate(transactions):
        txn.add_file(f"tables/t{number}/metadata/0.json", b"x")

    def reject_nodes() -> None:
        storage.rejects_nodes = True

    leader, follower = commit_queued(lake, transactions, reject_nodes)
    assert (type(leader), type(follower)) == (Interrupted, CommitConflictError)
    assert "interrupted" in str(follower)
    assert lake.latest_version() == 1
    assert not storage.exists("tables/t1/metadata/0.json")


def test_group_files_are_written_once(lakes: Lakes) -> None:
    meter = MeteredStorage(lakes.storage())
    lake = lakes.watch(Lakehouse.create(meter.root, storage=meter))
    with lake.transaction() as txn:
        txn.create_namespace("ns")

    def create_with_file(number: int) -> Any:
        def change(txn: Transaction) -> None:
            creates_table(f"t{number}")(txn)
            txn.add_file(f"tables/t{number}/metadata/0.json", b"%d" % number)

        return change

    with meter.measure() as measured:
        assert commit_together(lake, [create_with_file(number) for number in range(3)]) == [2, 2, 2]
    assert measured.counts.requests["create"] == budget("group commit of 3 with a file each").requests["create"]
    assert [meter.read(f"tables/t{number}/metadata/0.json") for number in range(3)] == [b"0", b"1", b"2"]
