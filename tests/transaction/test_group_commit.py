"""Transactions of one process that wait at the same time share one root."""

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
    Hooked,
    Interrupted,
    commit_elsewhere,
    commit_together,
    commit_waiting,
    creates,
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
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.commit_info import acting_for_run

pytestmark = pytest.mark.usefixtures("fixed_requests")


def alter(name: str, **properties: str) -> Any:
    return lambda txn: txn.alter_table("ns", name, table(**properties))


@pytest.fixture(params=[False, True], ids=["together", "ahead"], autouse=True)
def writes_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether queued transactions have written their files, as on high-latency storage."""
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
    works = [creates("d"), alter("a", x="1"), lambda txn: txn.drop_table("ns", "b")]
    assert commit_together(filled_lake, works) == [2, 2, 2]
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
    creates("d")(first)
    creates("e")(second)
    with acting_for_run("run-c", "Grace"):  # the committing thread is not the author of the others
        assert commit_waiting(filled_lake, [first, second]) == [2, 2]
    batch = next(filled_lake.history())
    assert (batch.run_id, batch.approved_by) == (None, None)
    first_info, second_info = batch.transactions
    assert (first_info.id, first_info.message, first_info.properties) == (first.id, "first", {"k": "v"})
    assert (first_info.run_id, first_info.approved_by) == ("run-a", "Ada")
    assert (second_info.id, second_info.operation, second_info.run_id, second_info.approved_by, second_info.counts) == (
        second.id, "publish", "run-b", None, {"set": 1, "deleted": 0},
    )  # fmt: skip


def test_conflicting_group_member_fails_alone(filled_lake: Lakehouse) -> None:
    """All members begin on version 1, and another process commits version 2 first."""

    def commit_elsewhere_first() -> None:
        with Lakehouse(filled_lake.storage).transaction() as other:
            other.alter_table("ns", "a", table(other="yes"))

    works = [alter("b", x="1"), alter("a", x="1"), creates("d")]
    first, second, third = commit_together(filled_lake, works, meanwhile=commit_elsewhere_first)
    assert (first, third) == (3, 3)
    assert isinstance(second, CommitConflictError)
    assert (second.base_version, second.latest_version) == (1, 2)
    assert "table ns.a: we wrote it, a concurrent commit changed it" in second.conflicts
    assert filled_lake.snapshot().table("ns", "a").properties == {"other": "yes"}
    assert unreferenced_paths(filled_lake) == set()


@pytest.mark.parametrize(
    ("work", "conflicting_work"),
    [
        (creates("d"), creates("d")),
        (alter("a", x="1"), alter("a", x="2")),
        (lambda txn: txn.drop_table("ns", "a"), alter("a", x="2")),
        (creates("d"), lambda txn: txn.drop_namespace("ns", cascade=True)),
        (lambda txn: txn.drop_namespace("ns", cascade=True), creates("d")),
    ],
)
def test_first_of_two_conflicting_members_succeeds(filled_lake: Lakehouse, work: Any, conflicting_work: Any) -> None:
    first, second = commit_together(filled_lake, [work, conflicting_work])
    assert first == 2
    assert isinstance(second, CommitConflictError)
    assert (second.base_version, second.latest_version) == (1, 2)
    assert filled_lake.latest_version() == 2
    assert unreferenced_paths(filled_lake) == set()


def test_serializable_member_shares_no_version_with_its_reads(filled_lake: Lakehouse) -> None:
    """Write skew: each member reads the table that the other one writes."""

    def read_and_write(read: str, written: str, value: str) -> Any:
        def work(txn: Transaction) -> None:
            txn.table("ns", read)
            alter(written, x=value)(txn)

        return work

    works = [read_and_write("a", "b", "1"), read_and_write("b", "a", "1")]
    first, second = commit_together(filled_lake, works, isolation="serializable")
    assert first == 2
    assert isinstance(second, CommitConflictError)
    works = [read_and_write("a", "b", "2"), read_and_write("b", "a", "2")]
    assert commit_together(filled_lake, works, isolation="snapshot") == [3, 3]


def test_exclusive_transactions_bypass_queue(filled_lake: Lakehouse) -> None:
    def settings(txn: Transaction) -> None:
        txn.alter_definition(replace(txn.definition, properties={"x": "1"}))

    def checked(txn: Transaction) -> None:
        txn.require(lambda base: None)
        creates("e")(txn)

    assert commit_together(filled_lake, [creates("d"), settings, checked, creates("f")]) == [4, 2, 3, 4]
    assert filled_lake.snapshot().definition.properties == {"x": "1"}


def test_transactions_with_shared_preconditions_share_version(filled_lake: Lakehouse) -> None:
    def checked(name: str) -> Any:
        def work(txn: Transaction) -> None:
            txn.require(lambda base: None, alone=False)
            creates(name)(txn)

        return work

    assert commit_together(filled_lake, [checked("d"), creates("e"), checked("f")]) == [2, 2, 2]


def test_retried_transaction_waits_for_first_submission(filled_lake: Lakehouse) -> None:
    twice = [filled_lake.transaction(transaction_id="0f6f8e1a-5d0e-4b66-9d0f-0d6a4e2f4a11") for _ in range(2)]
    for name, txn in zip("de", twice, strict=True):
        creates(name)(txn)
    assert commit_waiting(filled_lake, twice) == [2, 3]


def test_exclusive_transactions_commit_one_after_another(lakes: Lakes) -> None:
    """Each one has at most one conflict, with a transaction that committed after it began."""
    lake = lakes.memory(order=4)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    transactions = [lake.transaction() for _ in range(6)]
    for number, txn in enumerate(transactions):
        txn.require(lambda base: time.sleep(0.01))
        creates(f"t{number}")(txn)
    with ThreadPoolExecutor(len(transactions)) as threads:
        assert sorted(threads.map(Transaction.commit, transactions)) == [2, 3, 4, 5, 6, 7]
    assert max(info.cost["attempts"] for info in lake.history() if info.cost) <= 2


def test_member_without_changes_is_settled_at_once(filled_lake: Lakehouse) -> None:
    assert commit_together(filled_lake, [creates("d"), lambda txn: None, creates("e")]) == [2, 1, 2]
    assert len(next(filled_lake.history()).members) == 2
    assert commit_together(filled_lake, [lambda txn: None, lambda txn: None]) == [2, 2]


def test_group_members_fit_into_commit_info_of_root(filled_lake: Lakehouse) -> None:
    transactions = [filled_lake.transaction(message="m" * 1_000) for _ in range(8)]
    for number, txn in enumerate(transactions):
        creates(f"t{number}")(txn)
    versions = commit_waiting(filled_lake, transactions)
    assert sorted(set(versions)) == list(range(2, filled_lake.latest_version() + 1))  # type: ignore[type-var]
    assert 2 < len(set(versions)) < 8
    assert [txn.committed_version for txn in transactions] == versions


def test_large_transactions_bypass_queue(filled_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_GROUP_CHANGES", 2)

    def many(txn: Transaction) -> None:
        for number in range(3):
            creates(f"many{number}")(txn)

    assert commit_together(filled_lake, [creates("d"), many, creates("e"), creates("f")]) == [3, 2, 3, 4]


def test_expired_group_member_fails_alone(lakes: Lakes) -> None:
    storage = ClockStorage(lakes.storage(), 1_000)
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage, txn_ttl_millis=100))
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    old = lake.transaction()
    storage.time_ms += 80
    young, younger = lake.transaction(), lake.transaction()
    for name, txn in (("a", young), ("b", old), ("c", younger)):
        creates(name)(txn)

    def pass_time() -> None:
        storage.time_ms += 80

    first, second, third = commit_waiting(lake, [young, old, younger], pass_time)
    assert (first, third) == (2, 2)
    assert isinstance(second, TransactionExpiredError)
    assert "began 160 ms ago" in str(second)
    assert lake.snapshot().tables("ns") == ["a", "c"]
    assert unreferenced_paths(lake) == set()


def test_all_expired_group_members_fail(lakes: Lakes) -> None:
    storage = ClockStorage(lakes.storage(), 1_000)
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage, txn_ttl_millis=100))

    def pass_time() -> None:
        storage.time_ms += 101

    older = lake.transaction()
    storage.time_ms += 10
    younger = lake.transaction()
    older.create_namespace("a")
    younger.create_namespace("b")
    outcomes = commit_waiting(lake, [older, younger], pass_time)
    assert [type(outcome) for outcome in outcomes] == [TransactionExpiredError] * 2
    assert ["began 111 ms ago" in str(outcomes[0]), "began 101 ms ago" in str(outcomes[1])] == [True, True]
    assert lake.latest_version() == 0
    assert unreferenced_paths(lake) == set()


def test_all_group_members_get_unknown_outcome(lakes: Lakes) -> None:
    inner = lakes.storage()
    lakes.watch(Lakehouse.create(inner.root, storage=inner))
    faults = [
        fail(1, AmbiguousWriteError, "after", kind="create", path_part="_1000"),
        fail(3, StoragePermissionError, kind="read", path_part="_1000"),
    ]
    lake = Lakehouse(FaultyStorage(inner, faults))
    works = [lambda txn: txn.create_namespace("a"), lambda txn: txn.create_namespace("b")]
    first, second = commit_together(lake, works)
    assert isinstance(first, CommitOutcomeUnknownError)
    assert isinstance(second, CommitOutcomeUnknownError)
    assert first is not second
    assert (first.version, first.commit_id) == (second.version, second.commit_id) == (1, first.commit_id)
    for error in (first, second):
        assert lake.resolve_commit(1, error.commit_id) == "committed"
    assert lake.snapshot().namespaces() == ["a", "b"]


def test_attempts_are_counted_per_member(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process wins every race for the next version."""
    numbers = iter(range(100))
    storage = Hooked(lakes.storage())
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    with lake.transaction() as txn:
        txn.create_namespace("ns")

    def before(path: str) -> None:
        if parse_root_path(path) is not None:
            commit_elsewhere(storage.inner, creates(f"other{next(numbers)}"))

    storage.before = before
    patient, hasty = lake.transaction(), lake.transaction()
    creates("d")(patient)
    creates("e")(hasty)
    commits = {patient: 5, hasty: 2}
    for txn, attempts in commits.items():
        monkeypatch.setattr(txn, "commit", lambda txn=txn, attempts=attempts: Transaction.commit(txn, attempts))
    first, second = commit_waiting(lake, [patient, hasty])
    assert [type(outcome) for outcome in (first, second)] == [CommitAttemptsExhaustedError] * 2
    assert str(first).startswith("5 attempts")
    assert str(second).startswith("2 attempts")


@pytest.mark.local_only("interrupts threads at lines that are the same on every storage")
@pytest.mark.parametrize(
    ("interrupted", "every"),
    [
        pytest.param(0, 2, id="leader"),  # a normal run tests every second line
        pytest.param(0, 1, id="leader, all", marks=pytest.mark.soak),
        pytest.param(1, 1, id="follower"),
    ],
)
def test_interrupts_at_every_line_leave_no_member_waiting(lakes: Lakes, interrupted: int, every: int) -> None:
    """Wherever a member is interrupted, the others get the true outcome, and the queue continues."""
    lake = lakes.memory(order=4)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    for at_line in itertools.count(1, every):
        transactions = [lake.transaction() for _ in range(3)]
        for number, txn in enumerate(transactions):
            creates(f"t{at_line}-{number}")(txn)
        outcomes = commit_waiting(lake, transactions, interrupted=interrupted, at_line=at_line)
        newest = lake.history(limit=len(transactions))
        members = {batch: info.version for info in newest for batch in info.members}
        for number, (txn, outcome) in enumerate(zip(transactions, outcomes, strict=True)):
            if isinstance(outcome, int):
                assert members[txn.id] == outcome
            elif isinstance(outcome, CommitOutcomeUnknownError):
                assert outcome.version is not None
                committed = lake.resolve_commit(outcome.version, outcome.commit_id) == "committed"
                assert committed == (txn.id in members)
            else:
                assert (type(outcome), number) == (Interrupted, interrupted)
        assert lake._queue._leader is None or lake._queue._leader.is_done
        assert all(waiting.is_done for waiting in lake._queue._waiting)
        assert not lake._queue._arriving
        if not any(isinstance(outcome, Interrupted) for outcome in outcomes):
            break
    assert at_line > 10, "the lines were met"


class _StoppedDiscard(StorageWrapper):
    """Rejects the first creates of nodes. The following delete is interrupted, and takes effect at the end."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.late: list[str] = []
        self.is_refusing = False

    def create(self, path: str, data: bytes) -> None:
        if self.is_refusing and "-node-" in path:
            raise StoragePermissionError("not now", path=path)
        self.inner.create(path, data)

    def delete(self, path: str) -> None:
        if self.is_refusing and "table-t1" in path:
            self.is_refusing = False
            self.late.append(path)
            raise Interrupted
        self.inner.delete(path)


def _begin_two_with_stopped_discard(lakes: Lakes) -> tuple[_StoppedDiscard, Lakehouse, list[Transaction]]:
    storage = _StoppedDiscard(lakes.storage())
    storage.concurrency = storage.delete_batch_size = 1
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage, order=4))
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "a", table())
        txn.create_table("ns", "b", table())
    transactions = [lake.transaction() for _ in range(2)]
    for number, txn in enumerate(transactions):
        creates(f"t{number}")(txn)
    return storage, lake, transactions


def test_discarded_files_are_not_reused(lakes: Lakes) -> None:
    """The leader is interrupted while it discards files. The delete that it sent may take effect at any time."""
    storage, lake, transactions = _begin_two_with_stopped_discard(lakes)

    def reject() -> None:
        storage.is_refusing = True

    leader, follower = commit_waiting(lake, transactions, reject)
    assert (type(leader), follower) == (Interrupted, 2)
    assert storage.late
    for path in storage.late:
        storage.inner.delete(path)
    assert Lakehouse(storage.inner).snapshot().table("ns", "t1").id == transactions[1].table("ns", "t1").id


def test_untyped_error_fails_only_its_member(filled_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions = [filled_lake.transaction() for _ in range(3)]
    for number, txn in enumerate(transactions):
        creates(f"t{number}")(txn)
    writes_on = Submission.writes_on
    monkeypatch.setattr(
        Submission, "writes_on", lambda self, base: 1 / 0 if self.id == transactions[1].id else writes_on(self, base)
    )
    first, second, third = commit_waiting(filled_lake, transactions)
    assert (first, third) == (2, 2)
    assert isinstance(second, ZeroDivisionError)


def test_transaction_does_not_overtake_conflicting_one(filled_lake: Lakehouse) -> None:
    """The second waits for the first one, and so does the third one, which overlaps with the second."""
    both = lambda txn: (alter("a", x="2")(txn), alter("b", x="2")(txn))  # noqa: E731
    first, second, third = commit_together(filled_lake, [alter("a", x="1"), both, alter("b", x="3")])
    assert first == 2
    assert isinstance(second, CommitConflictError)
    assert third == 3


def test_precondition_may_commit(filled_lake: Lakehouse) -> None:
    """The precondition runs while its own transaction is being committed."""

    def commit_another(base: Any) -> None:
        if base.version > 1 and not filled_lake.snapshot().has_table("ns", "nested"):
            with filled_lake.transaction() as other:
                other.create_table("ns", "nested", table())

    txn = filled_lake.transaction()
    txn.require(commit_another)
    creates("d")(txn)
    with Lakehouse(filled_lake.storage).transaction() as other:
        other.create_table("ns", "e", table())
    assert txn.commit() == 4
    assert filled_lake.snapshot().tables("ns") == ["a", "b", "c", "d", "e", "nested"]


@pytest.mark.local_only("opens a folder")
def test_lakehouses_with_same_root_and_options_share_queue(lakes: Lakes) -> None:
    root = lakes.local().root
    lake, other = Lakehouse.open(root), Lakehouse.open(root)
    assert lake._queue is other._queue
    assert Lakehouse(lake.storage)._queue is not lake._queue


def test_discarded_files_get_new_names_after_failed_attempt(lakes: Lakes) -> None:
    """A transaction cannot be committed with another name for a file that it named."""
    storage, lake, transactions = _begin_two_with_stopped_discard(lakes)
    for number, txn in enumerate(transactions):
        txn.add_file(f"tables/t{number}/metadata/0.json", b"x")

    def reject() -> None:
        storage.is_refusing = True

    leader, follower = commit_waiting(lake, transactions, reject)
    assert (type(leader), type(follower)) == (Interrupted, CommitConflictError)
    assert "interrupted" in str(follower)
    assert lake.latest_version() == 1
    assert not storage.exists("tables/t1/metadata/0.json")


def test_group_files_are_written_once(lakes: Lakes) -> None:
    meter = MeteredStorage(lakes.storage())
    lake = lakes.watch(Lakehouse.create(meter.root, storage=meter))
    with lake.transaction() as txn:
        txn.create_namespace("ns")

    def work(number: int) -> Any:
        def change(txn: Transaction) -> None:
            creates(f"t{number}")(txn)
            txn.add_file(f"tables/t{number}/metadata/0.json", b"%d" % number)

        return change

    with meter.measure() as measured:
        assert commit_together(lake, [work(number) for number in range(3)]) == [2, 2, 2]
    assert measured.counts.requests["create"] == budget("group commit of 3 with a file each").requests["create"]
    assert [meter.read(f"tables/t{number}/metadata/0.json") for number in range(3)] == [b"0", b"1", b"2"]
