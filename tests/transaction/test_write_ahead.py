"""Write-ahead: on high-latency storage, transactions write their files before they are queued."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, table, unreferenced_paths
from tests.request_budgets import StorageKind, budget
from tests.transaction.groups import (
    TIMEOUT_S,
    CommitThread,
    HookedStorage,
    commit_in_other_process,
    commit_queued,
    create_in_transactions,
    create_with_namespace,
    creates_table,
    leader_id,
    simulate_high_latency,
    wait_until,
    waiting_ids,
)
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitConflictError,
    StorageError,
    StoragePermissionError,
    TransientError,
)
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path
from trinitylake_ops.storage import Storage
from trinitylake_ops.transaction.group import Member
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture(autouse=True)
def high_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_high_latency(monkeypatch)


def open_with_namespace(storage: Storage) -> Lakehouse:
    """Open an existing lakehouse with a namespace."""
    lake = Lakehouse(storage)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    return lake


def count_table_definitions(storage: Storage) -> int:
    """Return the number of files with table definitions."""
    return sum("table" in info.path for info in storage.list())


def test_waiting_transaction_has_written_its_files(lakes: Lakes) -> None:
    storage = lakes.storage()
    lake, observed = create_with_namespace(lakes, storage), list[int]()
    transactions = create_in_transactions(lake, "a", "b", "c")
    assert commit_queued(lake, transactions, lambda: observed.append(count_table_definitions(storage))) == [2, 2, 2]
    assert observed == [3]
    assert unreferenced_paths(lake) == set()


@pytest.mark.local_only("tests the local disk")
@pytest.mark.parametrize("fsync", [False, True])
def test_waiting_local_transaction_has_written_its_files(lakes: Lakes, fsync: bool) -> None:
    lake, observed = lakes.local(fsync=fsync), list[int]()
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    assert not lake.storage.is_remote
    assert commit_queued(
        lake, create_in_transactions(lake, "a", "b"), lambda: observed.append(count_table_definitions(lake.storage))
    ) == [2, 2]
    assert observed == [2]


@pytest.mark.local_only("tests the local disk")
@pytest.mark.parametrize("error", [StoragePermissionError, TransientError, AmbiguousWriteError])
def test_local_leader_with_unwritable_files_fails_alone(lakes: Lakes, error: type[StorageError]) -> None:
    """The first transaction leads before it has written its files, and another one joins in the meantime."""
    storage = HookedStorage(lakes.local().storage)
    lake = open_with_namespace(storage)
    failing, other = create_in_transactions(lake, "broken", "other")
    failing.add_file("tables/x/metadata/0.json", b"x")
    threads: list[CommitThread] = []

    def before(path: str) -> None:
        if path == "tables/x/metadata/0.json":
            if not threads:
                threads.append(CommitThread(other))
                wait_until(lambda: other.id in waiting_ids(lake))
            raise error("the file cannot be written", path=path)

    storage.before = before
    outcome = CommitThread(failing).outcome()
    assert type(outcome) is error
    assert threads[0].version() == 2
    assert lake.snapshot().tables("ns") == ["other"]
    assert unreferenced_paths(lake) == set()


def test_member_with_unwritable_files_fails_alone(lakes: Lakes) -> None:
    inner = lakes.storage()
    create_with_namespace(lakes, inner)
    lake = Lakehouse(FaultyStorage(inner, [fail(1, StoragePermissionError, kind="create", path_part="-broken-")]))
    transactions = create_in_transactions(lake, "a", "broken")
    transactions[1].add_file("tables/x/metadata/0.json", b"x")
    first, second = commit_queued(lake, transactions)
    assert first == 2
    assert isinstance(second, StoragePermissionError)
    assert lake.snapshot().tables("ns") == ["a"]
    assert unreferenced_paths(lake) == set()
    assert not inner.exists("tables/x/metadata/0.json")


@pytest.mark.parametrize(("longest_wait_s", "versions"), [(TIMEOUT_S, (2, 2)), (0.0, (2, 3))])
def test_leader_waits_for_members_that_write_files(
    lakes: Lakes, monkeypatch: pytest.MonkeyPatch, longest_wait_s: float, versions: tuple[int, int]
) -> None:
    """The leader waits at most as long as it took to write its own files."""
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    first, second = create_in_transactions(lake, "first", "second")
    write_ahead = Member.write_ahead

    def write_with_duration(self: Member, also: list[Callable[[], None]]) -> None:
        write_ahead(self, also)
        self.ahead_s = longest_wait_s

    monkeypatch.setattr(Member, "write_ahead", write_with_duration)
    is_first_ready = threading.Event()

    def before(path: str) -> None:
        if "-first-" in path:
            wait_until(lambda: len(lake.commit_queue.state().arriving) == 2)
        elif "-second-" in path:
            is_first_ready.wait(TIMEOUT_S)
        elif longest_wait_s == 0:  # a root
            is_first_ready.set()

    storage.before = before
    first_commit, second_commit = CommitThread(first), CommitThread(second)
    if longest_wait_s:
        wait_until(lambda: leader_id(lake) == first.id)
        is_first_ready.set()
    assert (first_commit.version(), second_commit.version()) == versions


def test_new_members_join_after_conflict(lakes: Lakes) -> None:
    """Another process committed version 2, and the next version includes all waiting transactions."""
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    first, second = create_in_transactions(lake, "first", "second")
    threads: list[CommitThread] = []

    def before(path: str) -> None:
        if parse_root_path(path) == 2 and not threads:
            commit_in_other_process(storage.inner, creates_table("elsewhere"))
            threads.append(CommitThread(second))
            wait_until(lambda: waiting_ids(lake) == [second.id])

    storage.before = before
    assert first.commit() == 3
    assert threads[0].version() == 3
    assert lake.snapshot().tables("ns") == ["elsewhere", "first", "second"]
    assert unreferenced_paths(lake) == set()


def test_transaction_joins_group_only_if_its_base_is_not_later(lakes: Lakes) -> None:
    """The group is rebased on version 2 while another transaction begins on version 3. It joins on version 3."""
    storage = lakes.storage()
    lake = create_with_namespace(lakes, storage)
    (old,) = create_in_transactions(lake, "old")
    threads: list[CommitThread] = []

    def begin_young(latest: Snapshot) -> None:
        if latest.version != 2:
            return
        commit_in_other_process(storage, creates_table("version3"))
        (young,) = create_in_transactions(lake, "young")
        assert young.base.version == 3
        threads.append(CommitThread(young, max_attempts=1))
        wait_until(lambda: waiting_ids(lake) == [young.id])

    old.require(begin_young, alone=False)
    commit_in_other_process(storage, creates_table("version2"))
    assert old.commit() == 4
    assert threads[0].version() == 4, "its only attempt succeeded"
    assert unreferenced_paths(lake) == set()


def test_contended_transaction_probes_latest_version_while_writing_files(lakes: Lakes) -> None:
    """No process creates a root that exists, and a process that is far behind catches up through the hint."""
    storage = FaultyStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)

    def commit_others(*names: str) -> None:
        for name in names:
            commit_in_other_process(storage.inner, creates_table(name))

    def created_versions(txn: Transaction) -> list[int]:
        n_before = len(storage.log)
        txn.commit()
        sent = [parse_root_path(request.path) for request in storage.log[n_before:] if request.kind == "create"]
        return [version for version in sent if version is not None]

    (txn,) = create_in_transactions(lake, "a")
    commit_others("b")
    assert created_versions(txn) == [2, 3], "no other writer was known"
    (txn,) = create_in_transactions(lake, "c")
    commit_others("d")
    assert created_versions(txn) == [5]
    (txn,) = create_in_transactions(lake, "e")
    commit_others(*(f"many{number}" for number in range(6)))
    n_before = len(storage.log)
    assert created_versions(txn) == [12]
    requests = Counter(request.kind for request in storage.log[n_before:] if request.path != HINT_PATH)
    assert requests == budget("commit after a repeated conflict", StorageKind.SERVER).requests


def test_group_does_not_include_current_leader(lakes: Lakes) -> None:
    """The leader failed, so another transaction leads while the rest of the group conflicts with another process."""
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    with lake.transaction() as txn:
        txn.create_table("ns", "contested", table())
    leader, member, next_leader = lake.transaction(), *create_in_transactions(lake, "member", "next")
    leader.alter_table("ns", "contested", table(ours="1"))
    threads: list[CommitThread] = []
    has_conflicted, is_decided = threading.Event(), threading.Event()

    def contest(**properties: str) -> None:
        commit_in_other_process(storage.inner, lambda txn: txn.alter_table("ns", "contested", table(**properties)))

    def before(path: str) -> None:
        version = parse_root_path(path)
        if version == 3:
            contest(theirs="1")
        elif version == 4 and not has_conflicted.is_set():
            has_conflicted.set()
            threads.append(CommitThread(next_leader))
            wait_until(lambda: leader_id(lake) == next_leader.id)
            contest(theirs="2")
        elif version == 4:
            is_decided.wait(TIMEOUT_S)

    def after(path: str) -> None:
        if parse_root_path(path) == 5:
            is_decided.set()

    def begin() -> None:
        storage.before, storage.after = before, after

    first, second = commit_queued(lake, [leader, member], begin)
    assert isinstance(first, CommitConflictError)
    assert second == 5
    assert threads[0].version() == 6
    assert lake.snapshot().tables("ns") == ["contested", "member", "next"]
    assert lake.snapshot().table("ns", "next").id == next_leader.table("ns", "next").id
    assert unreferenced_paths(lake) == set()


def test_process_does_not_conflict_with_itself(lakes: Lakes) -> None:
    """One transaction writes its files while another transaction of the process commits."""
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    slow, fast = create_in_transactions(lake, "slow", "fast")
    roots, is_fast_done = list[int | None](), threading.Event()

    def before(path: str) -> None:
        if "-slow-" in path:
            is_fast_done.wait(TIMEOUT_S)
        elif "-fast-" not in path:
            roots.append(parse_root_path(path))

    storage.before = before
    first = CommitThread(slow)
    wait_until(lambda: len(lake.commit_queue.state().arriving) == 1)
    assert fast.commit() == 2
    is_fast_done.set()
    assert first.version() == 3
    assert roots == [2, 3]
    assert not lake.commit_queue.fairness.is_crowded


def test_only_one_of_several_transactions_probes_for_other_commits(lakes: Lakes) -> None:
    storage = FaultyStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    transactions = create_in_transactions(lake, "a", "b", "c")
    commit_in_other_process(storage.inner, creates_table("elsewhere"))
    lake.commit_queue.fairness.note_other_commit()
    have_all_arrived = threading.Barrier(len(transactions))
    write_ahead = Member.write_ahead

    def write_after_barrier(self: Member, also: list[Callable[[], None]]) -> None:
        have_all_arrived.wait(TIMEOUT_S)
        write_ahead(self, also)
        self.ahead_s = TIMEOUT_S  # the leader waits this long for the transaction that probes

    n_before = len(storage.log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Member, "write_ahead", write_after_barrier)
        threads = [CommitThread(txn) for txn in transactions]
        versions = [thread.version() for thread in threads]
    assert min(versions) == 3, "no transaction sends the root that another process has created"
    reads = [request for request in storage.log[n_before:] if request.kind == "read"]
    assert sum(request.path == HINT_PATH for request in reads) == 1 + len(set(versions))


def test_known_naming_does_not_apply_to_replaced_lakehouse(lakes: Lakes) -> None:
    storage = lakes.storage()
    lake = create_with_namespace(lakes, storage)
    for name in ("a", "b", "c"):
        with lake.transaction() as txn:
            txn.create_table("ns", name, table())
    storage.delete_many([info.path for info in storage.list()])
    with create_with_namespace(lakes, storage).transaction() as txn:
        txn.create_table("ns", "first", table())
    with lake.transaction() as txn:
        txn.create_table("ns", "second", table())
    assert lake.latest_version() == 3
    assert lake.snapshot().tables("ns") == ["first", "second"]
    assert unreferenced_paths(lake) == set()
