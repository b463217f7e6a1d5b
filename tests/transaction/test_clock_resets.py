"""Version times with wrong clocks: commits continue, and time travel finds the same version as a linear scan."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clock import AgingStorage, ClockStorage
from tests.foreign import ForeignLake
from tests.lakes import Lakes, check_lake, seal
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, MaintenanceBlockedError, VersionNotFoundError
from trinitylake_ops.format.file_names import new_node_path, root_path
from trinitylake_ops.format.keys import CLOCK_RESET, COMMIT_ID, CREATED_AT_MILLIS, MAX_TIME_MS, clock_reset
from trinitylake_ops.format.node_file import NodeFile, encode_node
from trinitylake_ops.operations import RetentionPolicy
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.operations.retention import protected_ms
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, drop_memory_root
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS
from trinitylake_ops.versions.root_files import ProbedRoots
from trinitylake_ops.versions.roots import Roots
from trinitylake_ops.versions.time_travel import bounded_time_ms, find_version_at, find_version_before

pytestmark = pytest.mark.usefixtures("fixed_requests")

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS


def commit(lake: Lakehouse, name: str) -> int:
    with lake.transaction() as txn:
        txn.create_namespace(name)
    assert txn.committed_version is not None
    return txn.committed_version


@pytest.fixture
def clock(lakes: Lakes) -> AgingStorage:
    return AgingStorage(lakes.storage(), START_MS)


@pytest.fixture
def lake(clock: AgingStorage) -> Lakehouse:
    """A lakehouse with three versions, created one hour apart."""
    lake = Lakehouse.create(clock.root, storage=clock)
    for number in range(2):
        clock.time_ms += HOUR_MS
        commit(lake, f"n{number}")
    return lake


def with_fast_clock(lake: Lakehouse, by_ms: int) -> Lakehouse:
    """Return the lakehouse on a storage whose clock is ahead."""
    return Lakehouse(ClockStorage(lake.storage, lake.storage.now_ms() + by_ms))


@pytest.mark.parametrize("time_ms", [START_MS + 10 * YEAR_MS, MAX_TIME_MS - 1, MAX_TIME_MS])
def test_next_commit_resets_clock(lake: Lakehouse, clock: AgingStorage, time_ms: int) -> None:
    ahead = Lakehouse(ClockStorage(clock, time_ms))
    future_version = [commit(ahead, "far"), commit(ahead, "farther")][-1]
    clock.time_ms += HOUR_MS
    reset = commit(lake, "right")
    clock.time_ms += HOUR_MS
    latest = commit(lake, "later")
    times_ms = [lake.snapshot(version).created_at_ms for version in (reset, latest)]
    assert times_ms == [clock.time_ms - HOUR_MS, clock.time_ms]
    assert lake.snapshot(timestamp=clock.time_ms).version == latest
    assert lake.snapshot(timestamp=clock.time_ms - 1).version == reset
    assert lake.snapshot(timestamp=clock.time_ms - HOUR_MS - 1).version == 2
    assert lake.snapshot(timestamp=START_MS).version == 0
    assert lake.snapshot(future_version).created_at_ms > clock.time_ms
    assert next(info.version for info in lake.history() if info.is_clock_reset) == reset


def test_version_time_follows_previous_version_within_margin(lake: Lakehouse, clock: AgingStorage) -> None:
    version = commit(with_fast_clock(lake, CLOCK_MARGIN_MS), "n")
    newest_ms = lake.snapshot(version).created_at_ms
    assert newest_ms == clock.time_ms + CLOCK_MARGIN_MS
    snapshot = lake.snapshot(commit(lake, "next"))
    assert snapshot.created_at_ms == newest_ms + 1
    assert CLOCK_RESET not in snapshot.root.system


@pytest.mark.parametrize("keeps_unknown", [False, True])
def test_clock_reset_works_with_versions_of_other_programs(
    lake: Lakehouse, clock: AgingStorage, keeps_unknown: bool
) -> None:
    commit(with_fast_clock(lake, YEAR_MS), "far")
    reset = commit(lake, "right")
    clock.time_ms += HOUR_MS
    foreign = ForeignLake(clock).commit_table("right", "foreign", keeps_unknown=keeps_unknown)
    assert Lakehouse(clock).snapshot(timestamp=clock.time_ms - HOUR_MS).version == reset
    clock.time_ms += HOUR_MS
    latest = commit(lake, "after")
    assert lake.snapshot(latest).created_at_ms == clock.time_ms
    assert clock_reset(lake.snapshot(latest).root.system, latest) == reset
    assert lake.snapshot(timestamp=clock.time_ms - 1).version == foreign


def test_sealed_roots_keep_clock_reset(lake: Lakehouse, clock: AgingStorage) -> None:
    commit(with_fast_clock(lake, YEAR_MS), "far")
    reset = commit(lake, "right")
    clock.time_ms += HOUR_MS
    latest = commit(lake, "later")
    seal(lake, reset)
    fresh = Lakehouse(clock)
    assert fresh.snapshot(timestamp=clock.time_ms).version == latest
    roots = fresh.files.roots
    assert find_version_at(roots, clock.time_ms - 1, latest, ProbedRoots(roots.storage)) == reset


def test_clock_reset_row_is_ignored_without_confirmation_by_its_version(lake: Lakehouse, clock: AgingStorage) -> None:
    latest = commit(lake, "last")
    root = lake.snapshot(latest).root
    for value in ("1", str(latest + 1), "-1", "x", "9" * 5000, "²"):
        root.system = {**root.system, CLOCK_RESET: value}
        clock.write(root_path(latest), encode_node(root, 128))
        assert Lakehouse(clock).snapshot(timestamp=START_MS).version == 0


def test_clone_of_version_in_future_starts_at_storage_time(lakes: Lakes) -> None:
    lake = lakes.memory()
    commit(lake, "n")
    commit(with_fast_clock(lake, YEAR_MS), "far")
    target = f"{lake.root.rstrip('/')}-clone/"
    operations.plan_clone(lake, target).execute()
    clone = Lakehouse.open(target)
    created_at_ms = clone.snapshot().created_at_ms
    assert created_at_ms <= clone.storage.now_ms() + CLOCK_MARGIN_MS
    assert clone.snapshot(timestamp=created_at_ms).namespaces() == ["far", "n"]
    check_lake(clone)


def test_clock_reset_adds_no_requests(lakes: Lakes) -> None:
    def costs(lake: Lakehouse) -> list[Mapping[str, int]]:
        measured = []
        meter = MeteredStorage(lake.storage)
        metered = Lakehouse(meter)
        metered.snapshot()
        for name in ("x", "y"):
            with meter.measure() as cost:
                commit(metered, name)
            measured.append(cost.counts.requests)
        return measured

    unreset_lake, reset_lake = (Lakehouse.create(f"memory://{name}-clock/") for name in ("unreset", "reset"))
    try:
        for lake in (unreset_lake, reset_lake):
            commit(lake, "n")
        commit(with_fast_clock(reset_lake, YEAR_MS), "far")
        commit(unreset_lake, "far")
        assert costs(reset_lake) == costs(unreset_lake)
    finally:
        drop_memory_root(unreset_lake.root)
        drop_memory_root(reset_lake.root)


@pytest.mark.parametrize("far_ms", [100 * HOUR_MS, MAX_TIME_MS])
def test_versions_in_future_expire_by_their_age(lake: Lakehouse, clock: AgingStorage, far_ms: int) -> None:
    ahead = Lakehouse(ClockStorage(clock, min(clock.time_ms + far_ms, MAX_TIME_MS)))
    future_versions = {commit(ahead, name) for name in ("far", "farther")}
    age_ms = protected_ms(lake.snapshot().definition) + HOUR_MS
    policy = RetentionPolicy(maximum_age_ms=age_ms, minimum_versions=1, protected_ms=0)

    def expiring() -> set[int]:
        return {verdict.version for verdict in operations.plan_expiration(lake, policy).verdicts if verdict.expires}

    clock.time_ms += age_ms // 10
    assert not expiring() & future_versions  # the latest version, and a time in the future
    commit(lake, "right")
    assert not expiring() & future_versions
    clock.time_ms += age_ms
    assert not expiring() & future_versions
    clock.time_ms += 1
    assert expiring() == {0, 1, 2, *future_versions}


def test_slow_clock_expires_no_version_early(lake: Lakehouse, clock: AgingStorage) -> None:
    """A transaction based on the version before the clock reset may still have its full time to live."""
    created_ms = clock.time_ms
    clock.time_ms -= 10 * HOUR_MS
    assert lake.snapshot(commit(lake, "behind")).created_at_ms == clock.time_ms
    policy = RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    clock.time_ms = created_ms + protected_ms(lake.snapshot().definition)

    def verdict() -> bool:
        return next(item.expires for item in operations.plan_expiration(lake, policy).verdicts if item.version == 2)

    assert not verdict()
    clock.time_ms += 1
    assert verdict()


def test_orphan_removal_with_wrong_clock_blocks_no_new_transactions(lake: Lakehouse, clock: AgingStorage) -> None:
    def findings() -> set[str]:
        return {finding.code for finding in operations.verify(lake).findings if finding.severity != "past"}

    correct_ms = clock.time_ms
    clock.write(new_node_path(uuid.UUID(int=1)), b"")
    clock.time_ms += YEAR_MS
    operations.plan_orphan_removal(lake).execute()
    clock.time_ms = correct_ms
    assert findings() == {"time-in-future", "barrier-in-future"}
    commit(lake, "new")
    txn = lake.transaction()
    txn.create_namespace("slow")
    clock.time_ms += 10 * 60_000
    with pytest.raises(CorruptFileError):
        txn.commit()
    clock.write(new_node_path(uuid.UUID(int=1)), b"")
    clock.time_ms += 2 * protected_ms(lake.snapshot().definition)
    operations.plan_orphan_removal(lake).execute()
    assert findings() == set()
    txn = lake.transaction()
    txn.create_namespace("slow")
    clock.time_ms += 10 * 60_000
    txn.commit()


def test_error_of_lease_in_future_names_file_to_delete(lake: Lakehouse, clock: AgingStorage) -> None:
    correct_ms = clock.time_ms
    clock.time_ms += YEAR_MS
    with lease(clock, "purge"):
        clock.time_ms = correct_ms
        with pytest.raises(MaintenanceBlockedError) as caught, lease(clock, "purge"):
            pass
        assert caught.value.path is not None
        clock.delete(caught.value.path)
        with lease(clock, "purge"):
            pass


# Random histories


@dataclass(frozen=True)
class Version:
    """A version of a random history."""

    created_at_ms: int
    #: The version of the latest clock reset.
    reset: int | None
    #: Whether this package wrote the version.
    is_ours: bool
    #: Whether the root contains the clock reset row.
    has_reset_row: bool


_TIMES = st.integers(0, 40).map(lambda minutes: START_MS + minutes * 60_000)
_WRITERS = st.sampled_from(["ours", "ours", "ours", "keeps-row", "drops-row"])


@st.composite
def histories(draw: st.DrawFn) -> list[Version]:
    """Generate versions of this package, whose clocks jump in both directions, and of other programs with any times."""
    versions: list[Version] = []
    newest_ms, reset = -1, None
    for number, (writer, time_ms) in enumerate(draw(st.lists(st.tuples(_WRITERS, _TIMES), min_size=1, max_size=30))):
        if writer != "ours":
            versions.append(Version(time_ms, reset, is_ours=False, has_reset_row=writer == "keeps-row"))
            newest_ms = max(newest_ms, time_ms)
            continue
        created_at_ms = bounded_time_ms(newest_ms, time_ms)
        reset = number if created_at_ms <= newest_ms else reset
        newest_ms = created_at_ms
        versions.append(Version(created_at_ms, reset, is_ours=True, has_reset_row=True))
    return versions


def roots_of(versions: list[Version]) -> Roots:
    storage = MemoryStorage("memory://random-times/")
    for number, version in enumerate(versions):
        system = {CREATED_AT_MILLIS: str(version.created_at_ms)}
        if version.is_ours:
            system[COMMIT_ID] = f"id-{number}"
        if version.reset is not None and version.has_reset_row:
            system[CLOCK_RESET] = str(version.reset)
        storage.write(root_path(number), encode_node(NodeFile(system=system), 3))
    return Roots(storage)


def version_by_scan(versions: list[Version], timestamp_ms: int) -> int | None:
    """Return the version at a time by a scan that starts at the newest reset not after the time."""
    resets = sorted({0, *(version.reset for version in versions if version.reset is not None)})
    first, last = 0, len(versions) - 1
    for first in reversed(resets):
        if timestamp_ms >= versions[first].created_at_ms:
            break
        last = first - 1 if first else last
    result = None
    for number in range(first, last + 1):
        if versions[number].created_at_ms > timestamp_ms:
            break
        result = number
    return result


@given(versions=histories(), timestamp_ms=_TIMES)
def test_time_travel_equals_linear_scan(versions: list[Version], timestamp_ms: int) -> None:
    drop_memory_root("memory://random-times/")
    roots = roots_of(versions)
    probed = ProbedRoots(roots.storage)
    try:
        version: int | None = find_version_at(roots, timestamp_ms, len(versions) - 1, probed)
    except VersionNotFoundError:
        version = None
    assert version == version_by_scan(versions, timestamp_ms)


@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 24) | st.just(0)), min_size=1, max_size=25),
    hours=st.integers(0, 400),
)
def test_commits_after_a_time_are_found_despite_slow_clocks(steps: list[tuple[int, int]], hours: int) -> None:
    """Each step is a commit: the hours since the previous commit, and the hours by which its clock is slow."""
    drop_memory_root("memory://random-times/")
    versions: list[Version] = []
    true_ms: list[int] = []
    now_ms, newest_ms, reset = START_MS, -1, None
    for number, (elapsed_hours, slow_hours) in enumerate(steps):
        now_ms += elapsed_hours * HOUR_MS + 1
        created_at_ms = bounded_time_ms(newest_ms, now_ms - slow_hours * HOUR_MS)
        reset = number if created_at_ms <= newest_ms else reset
        newest_ms = created_at_ms
        versions.append(Version(created_at_ms, reset, is_ours=True, has_reset_row=True))
        true_ms.append(now_ms)
    roots, timestamp_ms = roots_of(versions), START_MS + hours * HOUR_MS
    try:
        before = find_version_before(roots, timestamp_ms, len(versions) - 1, ProbedRoots(roots.storage))
    except VersionNotFoundError:
        before = -1
    later_versions = [
        number
        for number, version in enumerate(versions)
        if true_ms[number] > timestamp_ms and version.created_at_ms >= true_ms[number]
    ]
    assert all(before < number for number in later_versions)
