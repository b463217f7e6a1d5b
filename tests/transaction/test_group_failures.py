"""Failures of one transaction in a group: the others continue, its files are deleted, and its error is correct."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.clock import ManualClock
from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, listed, table, unreferenced_paths
from tests.transaction.groups import (
    TIMEOUT_S,
    CommitThread,
    HookedStorage,
    Interrupted,
    commit_in_other_process,
    commit_queued,
    create_in_transactions,
    create_with_namespace,
    creates_table,
    interrupt_at,
    simulate_high_latency,
    wait_until,
    waiting_ids,
)
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    CommitAttemptsExhaustedError,
    CommitConflictError,
    CorruptFileError,
    StoragePermissionError,
    TransientError,
)
from trinitylake_ops.format.file_names import (
    ORPHAN_BARRIER_PATH,
    SLOT_REQUEST_PREFIX,
    new_slot_request_path,
    parse_root_path,
    root_path,
)
from trinitylake_ops.storage import background
from trinitylake_ops.transaction.group import Member
from trinitylake_ops.transaction.pacing import COMMITS_BETWEEN_POLLS, CONFLICTS_BEFORE_REQUEST
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.transaction.time_to_live import YOUNG_MS
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.root_files import KnownRoot

pytestmark = pytest.mark.usefixtures("fixed_requests")

ADDED_PATH = "tables/x/metadata/0.json"


@pytest.fixture(autouse=True)
def high_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_high_latency(monkeypatch)


def win_races(storage: HookedStorage, changes: list[Callable[[Transaction], object]]) -> None:
    """Commit each change as another process, just before the next root is created."""

    def before(path: str) -> None:
        if changes and parse_root_path(path) is not None:
            commit_in_other_process(storage.inner, changes.pop(0))

    storage.before = before


def old_transaction(lake: Lakehouse, name: str) -> Transaction:
    """Return a transaction that must check whether its files were removed as orphans."""
    (txn,) = create_in_transactions(lake, name)
    txn.backdate(lake.storage.now_ms() - YOUNG_MS - 1_000)
    return txn


def test_later_member_has_its_own_attempts(lakes: Lakes) -> None:
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    hasty, patient = create_in_transactions(lake, "hasty", "patient")
    threads, n_roots = list[CommitThread](), 0

    def before(path: str) -> None:
        nonlocal n_roots
        if parse_root_path(path) is None or n_roots == 2:
            return
        n_roots += 1
        commit_in_other_process(storage.inner, creates_table(f"other{n_roots}"))
        if n_roots == 1:
            threads.append(CommitThread(patient))
            wait_until(lambda: waiting_ids(lake) == [patient.id])

    storage.before = before
    with pytest.raises(CommitAttemptsExhaustedError):
        hasty.commit(max_attempts=2)
    assert threads[0].version() == 4
    assert lake.snapshot().tables("ns") == ["other1", "other2", "patient"]
    assert unreferenced_paths(lake) == set()


def test_unreadable_barrier_fails_old_transactions_only(lakes: Lakes) -> None:
    storage = FaultyStorage(lakes.storage(), [fail(1, StoragePermissionError, path_part=ORPHAN_BARRIER_PATH)])
    lake = create_with_namespace(lakes, storage)
    (young,) = create_in_transactions(lake, "young")
    version, error = commit_queued(lake, [young, old_transaction(lake, "old")])
    assert version == 2
    assert isinstance(error, StoragePermissionError)
    assert lake.snapshot().tables("ns") == ["young"]
    assert unreferenced_paths(lake) == set()


def fail_read(path: str) -> None:
    raise TransientError("503: slow down", path=path)


def test_outcome_is_known_if_no_root_was_sent(lakes: Lakes) -> None:
    """The request just before the root fails, like all other reads."""
    storage, roots = HookedStorage(lakes.storage()), list[str]()
    lake = create_with_namespace(lakes, storage)
    txn = old_transaction(lake, "old")
    storage.before_read = fail_read
    storage.before = lambda path: roots.append(path) if parse_root_path(path) is not None else None
    with pytest.raises(TransientError):
        txn.commit()
    storage.before_read = lambda _: None
    assert not roots
    assert lake.latest_version() == 1
    assert unreferenced_paths(lake) == set()


class _CollectingRunner(background.ThreadRunner):
    """Collects background work, so that the test can run it later."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[background.Work] = []

    def submit(self, work: background.Work) -> None:
        self.collected.append(work)


def test_failed_transaction_leaves_no_slot_request(lakes: Lakes) -> None:
    """The slot is requested in the background, possibly after the transaction has ended."""
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    commit_in_other_process(storage.inner, creates_table("contested"))
    txn = lake.transaction()
    txn.alter_table("ns", "contested", table(ours="1"))
    runner = _CollectingRunner()
    changes = [creates_table(f"other{number}") for number in range(CONFLICTS_BEFORE_REQUEST - 1)]
    win_races(storage, [*changes, lambda other: other.alter_table("ns", "contested", table(theirs="1"))])
    with background.using(runner), pytest.raises(CommitConflictError):
        txn.commit()
    assert runner.collected
    for task in runner.collected:
        task()
    assert not [path for path in listed(storage.inner) if path.startswith(SLOT_REQUEST_PREFIX)]


def test_interrupted_member_leaves_no_files_and_does_not_block_others(lakes: Lakes) -> None:
    """The member is interrupted at each line that starts or ends the writing of its files."""
    storage = lakes.storage()
    lake = create_with_namespace(lakes, storage)
    for at_line in range(1, 100):
        (txn,) = create_in_transactions(lake, f"interrupted{at_line}")
        txn.add_file(ADDED_PATH, b"x")
        outcome = CommitThread(txn, trace=interrupt_at(at_line, "_write_ahead", "_note_arrival")).outcome()
        background.drain()
        assert not lake.commit_queue.state().arriving
        if lake.snapshot().tables("ns"):
            break
        assert isinstance(outcome, Interrupted)
        assert unreferenced_paths(lake) == set()
        assert not storage.exists(ADDED_PATH)
    assert at_line > 5, "the transaction was interrupted"


class InterruptedEvent(threading.Event):
    """An event whose wait is interrupted."""

    def wait(self, timeout: float | None = None) -> bool:
        raise Interrupted


def test_interrupted_waiting_transaction_deletes_its_files(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    leader, waiting = create_in_transactions(lake, "leader", "waiting")
    waiting.add_file(ADDED_PATH, b"x")
    is_root_pending, second_was_interrupted = threading.Event(), threading.Event()

    def before(path: str) -> None:
        if parse_root_path(path) is not None:
            is_root_pending.set()
            second_was_interrupted.wait(TIMEOUT_S)

    storage.before = before
    first = CommitThread(leader)
    assert is_root_pending.wait(TIMEOUT_S)
    member_of = Member.of

    def interrupted_member(submission: Submission, most: int) -> Member:
        return replace(member_of(submission, most), wakes=InterruptedEvent())

    monkeypatch.setattr(Member, "of", interrupted_member)
    assert isinstance(CommitThread(waiting).outcome(), Interrupted)
    second_was_interrupted.set()
    assert first.version() == 2
    background.drain()
    assert unreferenced_paths(lake) == set()
    assert not storage.inner.exists(ADDED_PATH)


def test_unreadable_latest_version_after_slot_does_not_fail_commit(lakes: Lakes, manual_clock: ManualClock) -> None:
    """Another process requested a slot and used it, but its version cannot be read."""
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    request = new_slot_request_path(100)
    storage.inner.write(request, b"")
    lake.commit_queue.fairness.poll(storage.inner)
    (txn,) = create_in_transactions(lake, "a")

    def withdraw_request() -> None:
        storage.inner.delete(request)
        storage.before_read = fail_read

    manual_clock.during_pause = withdraw_request
    assert txn.commit() == 2
    storage.before_read = lambda _: None
    assert unreferenced_paths(lake) == set()


def test_versions_of_same_process_do_not_count_as_contention(lakes: Lakes) -> None:
    """After a conflict with another process, the threads of a process probe for a limited number of versions."""
    storage = HookedStorage(lakes.storage())
    lake = create_with_namespace(lakes, storage)
    win_races(storage, [creates_table("elsewhere")])
    txn = lake.transaction()
    creates_table("after-conflict")(txn)
    txn.commit()
    fairness = lake.commit_queue.fairness
    assert fairness.is_crowded
    for number in range(COMMITS_BETWEEN_POLLS // 2):
        slow, fast = create_in_transactions(lake, f"slow{number}", f"fast{number}")
        probes, is_fast_done = iter(range(2)), threading.Event()

        def before_read(path: str, probes: Iterator[int] = probes, done: threading.Event = is_fast_done) -> None:
            """Make the probe of the slow transaction wait until the version of the fast transaction exists."""
            if parse_root_path(path) is not None and next(probes, None) is not None:
                done.wait(TIMEOUT_S)

        storage.before_read = before_read
        slow_commit = CommitThread(slow)
        wait_until(lambda: len(lake.commit_queue.state().arriving) == 1)
        fast.commit()
        is_fast_done.set()
        slow_commit.version()
    assert not fairness.is_crowded


def test_undecodable_latest_version_leaves_no_files(lakes: Lakes) -> None:
    storage = lakes.storage()
    lake = create_with_namespace(lakes, storage)
    (txn,) = create_in_transactions(lake, "a")
    txn.add_file(ADDED_PATH, b"x")
    lake.files.roots.keep(KnownRoot(2, root_path(2), b"garbage"))
    with pytest.raises(CorruptFileError):
        txn.commit()
    background.drain()
    assert not storage.exists(ADDED_PATH)
    assert not [path for path in listed(storage) if "-table-" in path]
