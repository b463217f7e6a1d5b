"""On high-latency storage, transactions write their files before they are queued. A version includes all of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, table, unreferenced_paths
from tests.request_budgets import StorageKind, budget
from tests.transaction.groups import (
    LONGEST_WAIT_S,
    Committing,
    Hooked,
    commit_elsewhere,
    commit_waiting,
    create_filled,
    create_in_transactions,
    creates,
    simulate_high_latency,
    wait_until,
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
from trinitylake_ops.transaction.group import Group, Member
from trinitylake_ops.transaction.pacing import Pacing
from trinitylake_ops.transaction.transaction import Transaction

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


def definitions(storage: Storage) -> int:
    return sum("table" in info.path for info in storage.list())


def test_waiting_transaction_has_written_its_files(lakes: Lakes) -> None:
    storage = lakes.storage()
    lake, observed = create_filled(lakes, storage), list[int]()
    transactions = create_in_transactions(lake, "a", "b", "c")
    assert commit_waiting(lake, transactions, lambda: observed.append(definitions(storage))) == [2, 2, 2]
    assert observed == [3]
    assert unreferenced_paths(lake) == set()


@pytest.mark.local_only("a disk")
@pytest.mark.parametrize("fsync", [False, True])
def test_waiting_local_transaction_has_written_its_files(lakes: Lakes, fsync: bool) -> None:
    lake, observed = lakes.local(fsync=fsync), list[int]()
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    assert not lake.storage.is_remote
    assert commit_waiting(
        lake, create_in_transactions(lake, "a", "b"), lambda: observed.append(definitions(lake.storage))
    ) == [2, 2]
    assert observed == [2]


@pytest.mark.local_only("a disk")
@pytest.mark.parametrize("error", [StoragePermissionError, TransientError, AmbiguousWriteError])
def test_local_leader_with_unwritable_files_fails_alone(lakes: Lakes, error: type[StorageError]) -> None:
    """The first one leads before it has written its files, and another one joins during that time."""
    hooked = Hooked(lakes.local().storage)
    lake = open_with_namespace(hooked)
    broken, other = create_in_transactions(lake, "broken", "other")
    broken.add_file("tables/x/metadata/0.json", b"x")
    joined: list[Committing] = []

    def before(path: str) -> None:
        if path == "tables/x/metadata/0.json":
            if not joined:
                joined.append(Committing(other))
                wait_until(lambda: other.id in [waiting.submission.id for waiting in tuple(lake._queue._waiting)])
            raise error("the folder of this table is broken", path=path)

    hooked.before = before
    outcome = Committing(broken).outcome()
    assert type(outcome) is error
    assert joined[0].version() == 2
    assert lake.snapshot().tables("ns") == ["other"]
    assert unreferenced_paths(lake) == set()


def test_member_with_unwritable_files_fails_alone(lakes: Lakes) -> None:
    inner = lakes.storage()
    create_filled(lakes, inner)
    lake = Lakehouse(FaultyStorage(inner, [fail(1, StoragePermissionError, kind="create", path_part="-broken-")]))
    transactions = create_in_transactions(lake, "a", "broken")
    transactions[1].add_file("tables/x/metadata/0.json", b"x")
    first, second = commit_waiting(lake, transactions)
    assert first == 2
    assert isinstance(second, StoragePermissionError)
    assert lake.snapshot().tables("ns") == ["a"]
    assert unreferenced_paths(lake) == set()
    assert not inner.exists("tables/x/metadata/0.json")


@pytest.mark.parametrize(("patience_s", "versions"), [(LONGEST_WAIT_S, (2, 2)), (0.0, (2, 3))])
def test_leader_waits_for_members_that_write_files(
    lakes: Lakes, monkeypatch: pytest.MonkeyPatch, patience_s: float, versions: tuple[int, int]
) -> None:
    """It waits as long as it took to write its own files."""
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    first, second = create_in_transactions(lake, "first", "second")
    write_ahead = Member.write_ahead

    def timed(self: Member, also: list[Callable[[], None]]) -> None:
        write_ahead(self, also)
        self.ahead_s = patience_s

    monkeypatch.setattr(Member, "write_ahead", timed)
    is_first_ready = threading.Event()

    def before(path: str) -> None:
        if "-first-" in path:
            wait_until(lambda: len(lake._queue._arriving) == 2)
        elif "-second-" in path:
            is_first_ready.wait(LONGEST_WAIT_S)
        elif patience_s == 0:  # a root
            is_first_ready.set()

    storage.before = before
    one, other = Committing(first), Committing(second)
    if patience_s:
        wait_until(lambda: len(lake._queue._waiting) == 1)
        is_first_ready.set()
    assert (one.version(), other.version()) == versions


def test_new_members_join_after_conflict(lakes: Lakes) -> None:
    """Another process committed version 2. The next version includes all waiting transactions."""
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    first, second = create_in_transactions(lake, "first", "second")
    others: list[Committing] = []

    def before(path: str) -> None:
        if parse_root_path(path) == 2 and not others:
            commit_elsewhere(storage.inner, creates("elsewhere"))
            others.append(Committing(second))
            wait_until(lambda: len(lake._queue._waiting) == 2)

    storage.before = before
    assert first.commit() == 3
    assert others[0].version() == 3
    assert lake.snapshot().tables("ns") == ["elsewhere", "first", "second"]
    assert unreferenced_paths(lake) == set()


def test_transaction_with_later_base_waits_for_next_group(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = create_filled(lakes, lakes.storage())
    (old,) = create_in_transactions(lake, "old")
    with lake.transaction() as txn:
        txn.create_table("ns", "between", table())
    (young,) = create_in_transactions(lake, "young")
    queue, members = lake._queue, list[Member]()
    monkeypatch.setattr(queue, "commit", lambda submission, most: members.append(Member.of(submission, most)) or 0)
    for txn in (old, young):
        txn.commit()
    group = Group(members[0], Pacing())
    queue._waiting.extend(members)
    queue._gather(group, old.base.version)
    assert members[1] not in group
    queue._gather(group, young.base.version)
    assert members[1] in group
    queue._waiting.clear()


def test_contended_transaction_probes_latest_version_while_writing_files(lakes: Lakes) -> None:
    """No process creates a root that exists, and a process that is far behind catches up by the hint."""
    storage = FaultyStorage(lakes.storage())
    lake = create_filled(lakes, storage)

    def others(*names: str) -> None:
        for name in names:
            commit_elsewhere(storage.inner, creates(name))

    def roots(txn: Transaction) -> list[int]:
        n_before = len(storage.log)
        txn.commit()
        sent = [parse_root_path(request.path) for request in storage.log[n_before:] if request.kind == "create"]
        return [version for version in sent if version is not None]

    (txn,) = create_in_transactions(lake, "a")
    others("b")
    assert roots(txn) == [2, 3], "nobody else was known to commit"
    (txn,) = create_in_transactions(lake, "c")
    others("d")
    assert roots(txn) == [5]
    (txn,) = create_in_transactions(lake, "e")
    others(*(f"many{number}" for number in range(6)))
    n_before = len(storage.log)
    assert roots(txn) == [12]
    requests = Counter(request.kind for request in storage.log[n_before:] if request.path != HINT_PATH)
    assert requests == budget("commit after a repeated conflict", StorageKind.SERVER).requests


def test_group_skips_current_leader(lakes: Lakes) -> None:
    """The leader failed, so another one leads while the rest of the group conflicts with another process."""
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    with lake.transaction() as txn:
        txn.create_table("ns", "contested", table())
    leader, member, next_leader = lake.transaction(), *create_in_transactions(lake, "member", "next")
    leader.alter_table("ns", "contested", table(ours="1"))
    others: list[Committing] = []
    is_met, is_decided = threading.Event(), threading.Event()

    def contest(**properties: str) -> None:
        commit_elsewhere(storage.inner, lambda txn: txn.alter_table("ns", "contested", table(**properties)))

    def before(path: str) -> None:
        version = parse_root_path(path)
        if version == 3:
            contest(theirs="1")
        elif version == 4 and not is_met.is_set():
            is_met.set()
            others.append(Committing(next_leader))
            wait_until(lambda: getattr(lake._queue._leader, "submission", leader).id == next_leader.id)
            contest(theirs="2")
        elif version == 4:
            is_decided.wait(LONGEST_WAIT_S)

    def after(path: str) -> None:
        if parse_root_path(path) == 5:
            is_decided.set()

    def begin() -> None:
        storage.before, storage.after = before, after

    first, second = commit_waiting(lake, [leader, member], begin)
    assert isinstance(first, CommitConflictError)
    assert second == 5
    assert others[0].version() == 6
    assert lake.snapshot().tables("ns") == ["contested", "member", "next"]
    assert lake.snapshot().table("ns", "next").id == next_leader.table("ns", "next").id
    assert unreferenced_paths(lake) == set()


def test_process_does_not_conflict_with_itself(lakes: Lakes) -> None:
    """One transaction writes its files while another one of its process begins, commits and ends."""
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    slow, fast = create_in_transactions(lake, "slow", "fast")
    roots, is_other_done = list[int | None](), threading.Event()

    def before(path: str) -> None:
        if "-slow-" in path:
            is_other_done.wait(LONGEST_WAIT_S)
        elif "-fast-" not in path:
            roots.append(parse_root_path(path))

    storage.before = before
    first = Committing(slow)
    wait_until(lambda: len(lake._queue._arriving) == 1)
    assert fast.commit() == 2
    is_other_done.set()
    assert first.version() == 3
    assert roots == [2, 3]
    assert not lake._queue._fairness.is_crowded


def test_one_of_several_concurrent_transactions_probes_other_commits(lakes: Lakes) -> None:
    storage = FaultyStorage(lakes.storage())
    lake = create_filled(lakes, storage)
    transactions = create_in_transactions(lake, "a", "b", "c")
    commit_elsewhere(storage.inner, creates("elsewhere"))
    lake._queue._fairness.note_other_commit()
    are_all_coming = threading.Barrier(len(transactions))
    write_ahead = Member.write_ahead

    def commit_all(self: Member, also: list[Callable[[], None]]) -> None:
        are_all_coming.wait(LONGEST_WAIT_S)
        write_ahead(self, also)
        self.ahead_s = LONGEST_WAIT_S  # the first one waits this long for the one that probes

    n_before = len(storage.log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Member, "write_ahead", commit_all)
        committing = [Committing(txn) for txn in transactions]
        versions = [one.version() for one in committing]
    assert sorted(set(versions))[0] == 3, "nobody sends the root that another process has"
    beside_files = [request for request in storage.log[n_before:] if request.kind == "read"]
    assert sum(request.path == HINT_PATH for request in beside_files) == 1 + len(set(versions))


def test_known_naming_does_not_apply_to_replaced_lakehouse(lakes: Lakes) -> None:
    storage = lakes.storage()
    lake = create_filled(lakes, storage)
    for name in ("a", "b", "c"):
        with lake.transaction() as txn:
            txn.create_table("ns", name, table())
    storage.delete_many([info.path for info in storage.list()])
    with create_filled(lakes, storage).transaction() as txn:
        txn.create_table("ns", "first", table())
    with lake.transaction() as txn:
        txn.create_table("ns", "second", table())
    assert lake.latest_version() == 3
    assert lake.snapshot().tables("ns") == ["first", "second"]
    assert unreferenced_paths(lake) == set()
