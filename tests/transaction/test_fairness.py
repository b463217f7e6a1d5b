"""Slot requests of writers that conflict repeatedly, and how other writers respond (docs/internals/protocol.md, C)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.clock import AgingStorage, ClockStorage, ManualClock, TickingClock
from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, listed, table, unreferenced_paths
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import StoragePermissionError
from trinitylake_ops.format.file_names import SLOT_REQUEST_PREFIX, new_slot_request_path, parse_slot_request_path
from trinitylake_ops.storage import Storage, background, process_clock
from trinitylake_ops.transaction import commit, pacing
from trinitylake_ops.transaction.pacing import (
    COMMITS_BETWEEN_POLLS,
    CONFLICTS_BEFORE_REQUEST,
    LAPSE_MS,
    LONG_ATTEMPT_S,
    MAX_WAIT_FOR_LONG_ATTEMPTS_S,
    MAX_WAIT_S,
    Fairness,
    Pacing,
    SlotRequest,
)
from trinitylake_ops.transaction.publish import Created, Lost
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.roots import Roots

pytestmark = pytest.mark.usefixtures("fixed_requests")


class StoppedClock(ManualClock):
    """A clock that does not advance during pauses."""

    def advance(self, seconds: float) -> None:
        del seconds


@pytest.fixture
def pauses() -> Iterator[list[float]]:
    """The pauses of waiting writers in seconds, which are skipped."""
    clock = StoppedClock()
    with process_clock.using(clock):
        yield clock.pauses_s


def _lake(lakes: Lakes) -> Lakehouse:
    lake = lakes.memory()
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", table())
    return lake


def _change(lake: Lakehouse, times: int = 1) -> None:
    for number in range(times):
        with lake.transaction() as txn:
            txn.alter_table("ns", "t", table(n=f"{lake.root} {txn.id} {number}"))


def _slot_requests(storage: Storage) -> set[str]:
    return {path for path in listed(storage) if path.startswith(SLOT_REQUEST_PREFIX)}


def _make_next_commit_conflict(
    times: int, monkeypatch: pytest.MonkeyPatch, before_success: Callable[[], None] = lambda: None
) -> None:
    """Make the next commit lose the race a number of times, and call ``before_success`` before its last attempt."""
    publish, conflicts = commit.publish_root, iter(range(times))

    def publish_root(root: KnownRoot, roots: Roots, *arguments: Any) -> Created | Lost:
        if next(conflicts, None) is None:
            before_success()
            return publish(root, roots, *arguments)
        with monkeypatch.context() as context:
            context.setattr(commit, "publish_root", publish)
            with Lakehouse(roots.storage).transaction() as txn:
                txn.create_namespace(f"other-{root.version}")
        return publish(root, roots, *arguments)

    monkeypatch.setattr(commit, "publish_root", publish_root)


def test_writer_requests_slot_after_repeated_conflicts(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = _lake(lakes)
    slot_requests: list[set[str]] = []
    _make_next_commit_conflict(
        CONFLICTS_BEFORE_REQUEST, monkeypatch, lambda: slot_requests.append(_slot_requests(lake.storage))
    )
    _change(lake)
    ((path,),) = slot_requests
    assert parse_slot_request_path(path) is not None
    assert _slot_requests(lake.storage) == set()
    assert unreferenced_paths(lake) == set()


def test_writer_requests_no_slot_after_few_conflicts(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = _lake(lakes)
    slot_requests: list[set[str]] = []
    _make_next_commit_conflict(
        CONFLICTS_BEFORE_REQUEST - 1, monkeypatch, lambda: slot_requests.append(_slot_requests(lake.storage))
    )
    _change(lake)
    assert slot_requests == [set()]


def test_writer_without_permission_for_slot_requests_commits(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [
        fail(1, StoragePermissionError, kind=kind, path_part=SLOT_REQUEST_PREFIX, times=1_000)
        for kind in ("write", "delete", "list")
    ]
    storage = FaultyStorage(_lake(lakes).storage, plan)
    lake = Lakehouse(storage)
    version = lake.latest_version()
    _make_next_commit_conflict(CONFLICTS_BEFORE_REQUEST + 3, monkeypatch)
    _change(lake, 2 * COMMITS_BETWEEN_POLLS)
    assert lake.latest_version() == version + CONFLICTS_BEFORE_REQUEST + 3 + 2 * COMMITS_BETWEEN_POLLS
    assert sum(request.path.startswith(SLOT_REQUEST_PREFIX) for request in storage.log) > 4


def test_other_writers_wait_while_slot_is_requested(lakes: Lakes, pauses: list[float]) -> None:
    """Each wait is longer than the last, because all of many writers must wait at the same time."""
    lake = Lakehouse(_lake(lakes).storage)
    clock = AgingStorage(lake.storage, lake.storage.now_ms())
    lake = Lakehouse(clock)
    path = new_slot_request_path(1_000)
    lake.storage.write(path, b"")
    _change(lake, COMMITS_BETWEEN_POLLS)
    assert pauses == []
    counts = []
    for _ in range(5):
        pauses.clear()
        _change(lake)
        counts.append(len(pauses))
        assert all(0.5 <= pause <= 1 for pause in pauses), "the writer checks about every second"
    assert counts == [8, 16, 32, 64, 64]
    lake.storage.delete(path)
    pauses.clear()
    _change(lake, 2 * COMMITS_BETWEEN_POLLS)
    assert pauses == [], "the writer checks before it waits"


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_waiting_transaction_starts_on_latest_version(
    lakes: Lakes, manual_clock: ManualClock, is_exclusive: bool
) -> None:
    clock = AgingStorage(_lake(lakes).storage, 1_700_000_000_000)
    lake = Lakehouse(clock)
    lake.storage.write(new_slot_request_path(5_000), b"")
    _change(lake, COMMITS_BETWEEN_POLLS)

    def commit_other() -> None:
        with Lakehouse(lake.storage).transaction() as other:
            other.create_namespace(f"other-{other.base.version}")

    manual_clock.during_pause = commit_other
    txn = lake.transaction()
    txn.alter_table("ns", "t", table(n="1"))
    if is_exclusive:
        txn.alter_definition(replace(txn.definition, properties={"a": "b"}))
    version = txn.commit(max_attempts=1)
    assert version > txn.base.version + 1
    assert version == lake.latest_version()


def test_waiting_transaction_returns_version_that_made_its_changes(lakes: Lakes, manual_clock: ManualClock) -> None:
    """Another process made the same change during the wait."""
    lake = Lakehouse(AgingStorage(_lake(lakes).storage, 1_700_000_000_000))
    slot_request = new_slot_request_path(5_000)
    lake.storage.write(slot_request, b"")
    _change(lake, COMMITS_BETWEEN_POLLS)

    def commit_same_change() -> None:
        Lakehouse(lake.storage).alter_definition(properties={"a": "b"})
        lake.storage.delete(slot_request)

    manual_clock.during_pause = commit_same_change
    txn = lake.transaction()
    txn.alter_definition(replace(txn.definition, properties={"a": "b"}))
    version = txn.commit()
    assert version > txn.base.version
    assert lake.snapshot(version).definition.properties == {"a": "b"}


def test_wait_for_slot_leaves_time_for_transaction(lakes: Lakes, pauses: list[float]) -> None:
    lake = lakes.memory(txn_ttl_millis=2_000)
    storage = AgingStorage(lake.storage, lake.storage.now_ms())
    storage.write(new_slot_request_path(4_000), b"")
    fairness = Fairness()
    fairness.poll(storage)
    assert fairness.yield_to_others(storage, max_s=0.5)
    assert all(pause <= 0.5 for pause in pauses)
    pauses.clear()
    assert not fairness.yield_to_others(storage, max_s=-1)
    assert pauses == []


def test_waiting_ends_when_slot_request_is_withdrawn(lakes: Lakes, manual_clock: ManualClock) -> None:
    storage = AgingStorage(_lake(lakes).storage, 1_700_000_000_000)
    path = new_slot_request_path(400)
    storage.write(path, b"")
    pauses = manual_clock.pauses_s

    def withdraw_after_two() -> None:
        if len(pauses) == 2:
            storage.delete(path)

    manual_clock.during_pause = withdraw_after_two
    fairness = Fairness()
    fairness.poll(storage)
    fairness.yield_to_others(storage, 1_000)
    assert len(pauses) == 2


@pytest.mark.parametrize("age_ms", [LAPSE_MS + 1, 86_400_000, -LAPSE_MS - 1, -86_400_000])
def test_lapsed_slot_requests_are_ignored_and_deleted(lakes: Lakes, pauses: list[float], age_ms: int) -> None:
    lake = _lake(lakes)
    path = new_slot_request_path(400)
    lake.storage.write(path, b"")
    (written_ms,) = (info.last_modified_ms for info in lake.storage.list(path))
    storage = ClockStorage(lake.storage, written_ms + age_ms)
    fairness = Fairness()
    fairness.poll(storage)
    fairness.yield_to_others(storage, 1_000)
    assert pauses == []
    assert path not in listed(lake.storage)


def test_files_with_other_names_under_slot_request_prefix_are_kept(lakes: Lakes, pauses: list[float]) -> None:
    storage = _lake(lakes).storage
    names = [
        f"{SLOT_REQUEST_PREFIX}{name}"
        for name in ("", "x", "12", "0-" + "0" * 36, new_slot_request_path(5) + ".bak", "9" * 40)
    ]
    for name in names[1:]:
        storage.write(name, b"kept")
    storage.write(new_slot_request_path(1), b"")
    (turn_ms,) = (info.last_modified_ms for info in storage.list(f"{SLOT_REQUEST_PREFIX}1-"))
    late = ClockStorage(storage, turn_ms + 10**9)
    fairness = Fairness()
    fairness.poll(late)
    fairness.yield_to_others(late, 1_000)
    assert pauses == []
    assert _slot_requests(storage) == set(names[1:])


@pytest.mark.parametrize(
    ("attempt_ms", "first_s", "max_s"),
    [(1_000, 4, MAX_WAIT_S), (15_000, 30, 30), (600_000, 120, MAX_WAIT_FOR_LONG_ATTEMPTS_S)],
)
def test_longest_wait_for_slot_is_bounded(
    lakes: Lakes, manual_clock: ManualClock, attempt_ms: int, first_s: float, max_s: float
) -> None:
    storage = AgingStorage(_lake(lakes).storage, 1_700_000_000_000)
    storage.write(new_slot_request_path(attempt_ms), b"")
    fairness = Fairness()
    fairness.poll(storage)
    waited = []
    for _ in range(4):
        begin_s = manual_clock.now_s()
        assert fairness.yield_to_others(storage, 1_000)
        waited.append(manual_clock.now_s() - begin_s)
    assert waited[0] == pytest.approx(max(first_s, min(waited[0], 2 * first_s)))
    assert waited[-1] == pytest.approx(max_s)


def test_polling_slot_requests_takes_one_list_every_eight_commits(lakes: Lakes) -> None:
    storage = FaultyStorage(_lake(lakes).storage)
    lake = Lakehouse(storage)
    _change(lake, 3 * COMMITS_BETWEEN_POLLS)
    assert sum(request.path.startswith(SLOT_REQUEST_PREFIX) for request in storage.log) == 3


class SharedClock(ManualClock):
    """The shared clock of a waiting writer and the storage."""

    def __init__(self, storage: Storage):
        super().__init__()
        self.storage = AgingStorage(storage, 1_700_000_000_000)
        self.each_second: Callable[[], None] = lambda: None

    def advance(self, seconds: float) -> None:
        before_s = self.now_s()
        super().advance(seconds)
        self.storage.time_ms += round(1000 * seconds)
        if int(before_s) < int(self.now_s()):
            self.each_second()

    def measure_wait_s(self, fairness: Fairness) -> float:
        """Return how long a commit waits for other writers."""
        begin_s = self.now_s()
        with process_clock.using(self):
            fairness.yield_to_others(self.storage, 1_000)
        return self.now_s() - begin_s


@pytest.mark.parametrize("attempt_ms", [100, 60_000, 600_000])
def test_killed_writer_delays_others_by_less_than_five_seconds_in_total(lakes: Lakes, attempt_ms: int) -> None:
    clock = SharedClock(_lake(lakes).storage)
    clock.storage.write(new_slot_request_path(attempt_ms), b"")
    fairness, waits_s = Fairness(), []
    fairness.poll(clock.storage)
    for _ in range(100):
        waits_s.append(clock.measure_wait_s(fairness))
        clock.advance(0.01)
    assert sum(waits_s) < 5
    assert _slot_requests(clock.storage) == set()


def test_wait_for_active_writer_grows_up_to_limit(lakes: Lakes) -> None:
    """The wait grows so that all conflicting writers wait at the same time, up to a limit for each commit."""
    clock = SharedClock(_lake(lakes).storage)
    path = new_slot_request_path(2_000)
    clock.storage.write(path, b"")
    clock.each_second = lambda: clock.storage.write(path, b"")
    fairness = Fairness()
    fairness.poll(clock.storage)
    waits_s = [clock.measure_wait_s(fairness) for _ in range(4)]
    assert waits_s == pytest.approx(sorted(waits_s))
    assert waits_s[0] >= 4
    assert waits_s[-1] == pytest.approx(MAX_WAIT_S)


def test_writer_with_long_attempts_requests_slot_after_first_conflict(lakes: Lakes) -> None:
    storage = lakes.memory().storage
    for attempt_s in (LONG_ATTEMPT_S / 2, LONG_ATTEMPT_S):
        slot_request = SlotRequest(storage)
        slot_request.note_conflicts(1, attempt_s)
        assert bool(_slot_requests(storage)) == (attempt_s == LONG_ATTEMPT_S)
        slot_request.withdraw()


class _NoThreads(background.InlineRunner):
    """Collects the background work instead of starting threads, so that the test can run it."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[background.Work] = []

    def start_thread(self, work: background.Work, name: str) -> None:
        self.collected.append(work)


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[background.Work]]:
    """The renewals of slot requests, without pauses. The test runs them."""
    runner = _NoThreads()
    monkeypatch.setattr(pacing, "RENEWAL_S", 0)
    with background.using(runner):
        yield runner.collected


def test_slot_request_is_renewed_for_limited_time(lakes: Lakes, renewals: list[background.Work]) -> None:
    """Other writers do not wait for a writer that hangs."""
    storage = FaultyStorage(_lake(lakes).storage)
    with process_clock.using(TickingClock(1.0)):
        SlotRequest(storage).note_conflicts(CONFLICTS_BEFORE_REQUEST, 10)
        renewals[0]()
    assert [request.kind for request in storage.log] == ["write"] * 40
    assert len({request.path for request in storage.log}) == 1


def test_withdrawn_slot_request_is_not_renewed(lakes: Lakes, renewals: list[background.Work]) -> None:
    lake = _lake(lakes)
    slot_request = SlotRequest(lake.storage)
    slot_request.note_conflicts(CONFLICTS_BEFORE_REQUEST, 10)
    slot_request.withdraw()
    renewals[0]()
    assert _slot_requests(lake.storage) == set()


def test_interrupted_writer_stops_renewal(
    lakes: Lakes, monkeypatch: pytest.MonkeyPatch, renewals: list[background.Work]
) -> None:
    """The process may continue for hours, but its slot request must lapse."""
    lake = _lake(lakes)

    def interrupt() -> None:
        raise KeyboardInterrupt

    _make_next_commit_conflict(CONFLICTS_BEFORE_REQUEST, monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        _change(lake)
    (path,) = _slot_requests(lake.storage)
    lake.storage.delete(path)
    renewals[0]()
    assert _slot_requests(lake.storage) == set()


def test_failed_renewal_keeps_slot_request(lakes: Lakes, renewals: list[background.Work]) -> None:
    plan = [fail(number, StoragePermissionError, kind="write", path_part=SLOT_REQUEST_PREFIX) for number in (2, 3)]
    storage = FaultyStorage(_lake(lakes).storage, plan)
    with process_clock.using(TickingClock(1.0)):
        SlotRequest(storage).note_conflicts(CONFLICTS_BEFORE_REQUEST, 1)
        renewals[0]()
    assert len(_slot_requests(storage)) == 1


def test_slot_request_is_renewed_and_replaced_when_attempts_get_longer(lakes: Lakes) -> None:
    lake = _lake(lakes)
    storage = FaultyStorage(lake.storage)
    slot_request = SlotRequest(storage)
    slot_request.note_conflicts(CONFLICTS_BEFORE_REQUEST - 1, 0.1)
    assert storage.log == ()
    for seconds in (0.1, 0.15, 0.05):
        slot_request.note_conflicts(CONFLICTS_BEFORE_REQUEST, seconds)
        assert [parse_slot_request_path(path) for path in _slot_requests(lake.storage)] == [100]
    slot_request.note_conflicts(CONFLICTS_BEFORE_REQUEST, 0.3)
    assert [parse_slot_request_path(path) for path in _slot_requests(lake.storage)] == [300]
    assert [request.kind for request in storage.log] == ["write"] * 3 + ["delete", "write"]
    slot_request.withdraw()
    slot_request.withdraw()
    assert _slot_requests(lake.storage) == set()
    assert len(storage.log) == 6


def test_commits_succeed_without_pacing(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that conflict constantly still commit each change exactly once."""
    monkeypatch.setattr(pacing, "WriterPacing", lambda *_: Pacing())
    storage = FaultyStorage(_lake(lakes).storage)
    first_version, writers = Lakehouse(storage).latest_version() + 1, [Lakehouse(storage) for _ in range(3)]
    n_changes = 10

    def commit_all(writer: int) -> list[int]:
        versions = []
        for number in range(n_changes):
            with writers[writer].transaction() as txn:
                txn.create_namespace(f"w{writer}-{number}")
            versions.append(txn.committed_version or 0)
        return versions

    with ThreadPoolExecutor(len(writers)) as pool:
        versions = [version for committed in pool.map(commit_all, range(len(writers))) for version in committed]
    assert sorted(versions) == list(range(first_version, first_version + len(writers) * n_changes))
    assert len(writers[0].snapshot().namespaces()) == 1 + len(versions)
    assert not [request for request in storage.log if request.path.startswith(SLOT_REQUEST_PREFIX)]
    assert unreferenced_paths(writers[0]) == set()


def test_failed_background_work_does_not_fail_commit(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started, for example during interpreter shutdown."""

    def fail_to_start(*arguments: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    lake = Lakehouse(_lake(lakes).storage)
    monkeypatch.setattr(Fairness, "poll", fail_to_start)
    version = lake.latest_version()
    _change(lake, COMMITS_BETWEEN_POLLS)
    assert lake.latest_version() == version + COMMITS_BETWEEN_POLLS
