"""A failure of one transaction in a group: the others continue, its files are deleted, and its error is correct."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.clock import ManualClock
from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, listed, table, unreferenced_paths
from tests.transaction.groups import (
    LONGEST_WAIT_S,
    Committing,
    Hooked,
    Interrupted,
    commit_elsewhere,
    commit_waiting,
    create_filled,
    create_in_transactions,
    creates,
    interrupt_at,
    simulate_high_latency,
    wait_until,
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

ADDED = "tables/x/metadata/0.json"


@pytest.fixture(autouse=True)
def high_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_high_latency(monkeypatch)


def win_races(storage: Hooked, works: list[Callable[[Transaction], object]]) -> None:
    """Let another process win the race for a number of roots."""

    def before(path: str) -> None:
        if works and parse_root_path(path) is not None:
            commit_elsewhere(storage.inner, works.pop(0))

    storage.before = before


def _ignore(_: object) -> None:
    """Discard a value."""


def old_transaction(lake: Lakehouse, name: str) -> Transaction:
    """Return a transaction that must check whether its files were removed as orphans."""
    (txn,) = create_in_transactions(lake, name)
    txn.backdate(lake.storage.now_ms() - YOUNG_MS - 1_000)
    return txn


def test_later_member_has_its_own_attempts(lakes: Lakes) -> None:
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    hasty, patient = create_in_transactions(lake, "hasty", "patient")
    others, n_sent = list[Committing](), 0

    def before(path: str) -> None:
        nonlocal n_sent
        if parse_root_path(path) is None or n_sent == 2:
            return
        n_sent += 1
        commit_elsewhere(storage.inner, creates(f"other{n_sent}"))
        if n_sent == 1:
            others.append(Committing(patient))
            wait_until(lambda: len(lake._queue._waiting) == 2)

    storage.before = before
    with pytest.raises(CommitAttemptsExhaustedError):
        hasty.commit(max_attempts=2)
    assert others[0].version() == 4
    assert lake.snapshot().tables("ns") == ["other1", "other2", "patient"]
    assert unreferenced_paths(lake) == set()


def test_unreadable_barrier_fails_old_transactions_only(lakes: Lakes) -> None:
    storage = FaultyStorage(lakes.storage(), [fail(1, StoragePermissionError, path_part=ORPHAN_BARRIER_PATH)])
    lake = create_filled(lakes, storage)
    (young,) = create_in_transactions(lake, "young")
    version, refused = commit_waiting(lake, [young, old_transaction(lake, "old")])
    assert version == 2
    assert isinstance(refused, StoragePermissionError)
    assert lake.snapshot().tables("ns") == ["young"]
    assert unreferenced_paths(lake) == set()


def unreadable(path: str) -> None:
    raise TransientError("503: slow down", path=path)


def test_outcome_is_known_when_no_root_was_sent(lakes: Lakes) -> None:
    """The request just before the root fails, and so do all reads."""
    storage, roots = Hooked(lakes.storage()), list[str]()
    lake = create_filled(lakes, storage)
    txn = old_transaction(lake, "old")
    storage.before_read = unreadable
    storage.before = lambda path: roots.append(path) if parse_root_path(path) is not None else None
    with pytest.raises(TransientError):
        txn.commit()
    storage.before_read = lambda _: None
    assert not roots
    assert lake.latest_version() == 1
    assert unreferenced_paths(lake) == set()


class _LateRunner(background.ThreadRunner):
    """Collects background work, so that the test can run it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[background.Work] = []

    def submit(self, work: background.Work) -> None:
        self.kept.append(work)


def test_failed_transaction_leaves_no_slot_request(lakes: Lakes) -> None:
    """It requests a slot in the background, possibly after its own end."""
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    commit_elsewhere(storage.inner, creates("contested"))
    txn = lake.transaction()
    txn.alter_table("ns", "contested", table(ours="1"))
    runner = _LateRunner()
    works = [creates(f"other{number}") for number in range(CONFLICTS_BEFORE_REQUEST - 1)]
    win_races(storage, [*works, lambda other: other.alter_table("ns", "contested", table(theirs="1"))])
    with background.using(runner), pytest.raises(CommitConflictError):
        txn.commit()
    assert runner.kept
    for work in runner.kept:
        work()
    assert not [path for path in listed(storage.inner) if path.startswith(SLOT_REQUEST_PREFIX)]


def test_interrupted_member_blocks_no_other_and_leaves_no_files(lakes: Lakes) -> None:
    """It is interrupted at each line where it starts or finishes writing its files."""
    storage = lakes.storage()
    lake = create_filled(lakes, storage)
    for at_line in range(1, 100):
        (txn,) = create_in_transactions(lake, f"interrupted{at_line}")
        txn.add_file(ADDED, b"x")
        outcome = Committing(txn, interrupt_at(at_line, "_write_ahead", "_note_arrival")).outcome()
        background.drain()
        assert not lake._queue._arriving
        if lake.snapshot().tables("ns"):
            break
        assert isinstance(outcome, Interrupted)
        assert unreferenced_paths(lake) == set()
        assert not storage.exists(ADDED)
    assert at_line > 5, "the lines were met"


class InterruptedEvent(threading.Event):
    """Its wait is interrupted."""

    def wait(self, timeout: float | None = None) -> bool:
        raise Interrupted


def test_interrupted_waiting_transaction_deletes_its_files(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    leader, waiting = create_in_transactions(lake, "leader", "waiting")
    waiting.add_file(ADDED, b"x")
    is_waiting = threading.Event()
    storage.before = lambda path: None if parse_root_path(path) is None else _ignore(is_waiting.wait(LONGEST_WAIT_S))
    first = Committing(leader)
    wait_until(lambda: lake._queue._leader is not None and lake._queue._leader.is_taken)
    member_of = Member.of

    def interrupted(submission: Submission, most: int) -> Member:
        return replace(member_of(submission, most), wakes=InterruptedEvent())

    monkeypatch.setattr(Member, "of", interrupted)
    assert isinstance(Committing(waiting).outcome(), Interrupted)
    is_waiting.set()
    assert first.version() == 2
    background.drain()
    assert unreferenced_paths(lake) == set()
    assert not storage.inner.exists(ADDED)


def test_unreadable_latest_version_after_slot_does_not_fail_commit(lakes: Lakes, manual_clock: ManualClock) -> None:
    """Another process requested a slot and used it, but its version cannot be read."""
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    request = new_slot_request_path(100)
    storage.inner.write(request, b"")
    fairness = lake._queue._fairness
    fairness.poll(storage.inner)
    (txn,) = create_in_transactions(lake, "a")

    def withdraw_request() -> None:
        storage.inner.delete(request)
        storage.before_read = unreadable

    manual_clock.during_pause = withdraw_request
    assert txn.commit() == 2
    storage.before_read = lambda _: None
    assert unreferenced_paths(lake) == set()


def test_versions_of_own_process_do_not_count_as_contention(lakes: Lakes) -> None:
    """Several threads commit. One conflict with another process makes them probe for some versions only."""
    storage = Hooked(lakes.storage())
    lake = create_filled(lakes, storage)
    win_races(storage, [creates("elsewhere")])
    txn = lake.transaction()
    creates("lost-once")(txn)
    txn.commit()
    fairness = lake._queue._fairness
    assert fairness.is_crowded
    for number in range(COMMITS_BETWEEN_POLLS // 2):
        slow, fast = create_in_transactions(lake, f"slow{number}", f"fast{number}")
        looks, is_other_done = iter(range(2)), threading.Event()

        def before_read(path: str, looks: Iterator[int] = looks, done: threading.Event = is_other_done) -> None:
            """Make the probe of the slow transaction find the version of the fast one."""
            if parse_root_path(path) is not None and next(looks, None) is not None:
                done.wait(LONGEST_WAIT_S)

        storage.before_read = before_read
        slow_commit = Committing(slow)
        wait_until(lambda: len(lake._queue._arriving) == 1)
        fast.commit()
        is_other_done.set()
        slow_commit.version()
    assert not fairness.is_crowded


def test_undecodable_latest_version_leaves_no_files(lakes: Lakes) -> None:
    storage = lakes.storage()
    lake = create_filled(lakes, storage)
    (txn,) = create_in_transactions(lake, "a")
    txn.add_file(ADDED, b"x")
    lake.files.roots.keep(KnownRoot(2, root_path(2), b"garbage"))
    with pytest.raises(CorruptFileError):
        txn.commit()
    background.drain()
    assert not storage.exists(ADDED)
    assert not [path for path in listed(storage) if "-table-" in path]
