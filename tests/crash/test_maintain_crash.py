"""Maintenance of a neglected lakehouse, killed after each change of a file, and before each other request.

After each kill, the lakehouse verifies clean through new caches, and its tables have the same rows. The next runs
reach the same state as an uninterrupted run, and leave no unneeded file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.clock import AgingStorage, ManualClock
from tests.faults import EFFECTS, DeathError, FaultyStorage, Request, fail, lose_response
from tests.operations.aging import DAY_MS
from tests.operations.changes import create
from tests.operations.neglected import neglect, new_lake, states
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StorageError, StoragePermissionError, TransientError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import maintain
from trinitylake_ops.operations.maintenance.decisions import DecisionState
from trinitylake_ops.operations.policy.document import Step
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://maintain-crash/"
CLONE_ROOT = "memory://maintain-crash-clone/"
LEASE_MS = 11 * 60 * 1000


@dataclass(frozen=True)
class Base:
    """The lakehouse before maintenance."""

    files: dict[str, bytes]
    clone_files: dict[str, bytes]
    written_ms: dict[str, int]
    time_ms: int

    def restore(self) -> AgingStorage:
        """Restore the storage to the state before maintenance, and return it."""
        memory = filled(ROOT, self.files)
        filled(CLONE_ROOT, self.clone_files)
        clock = AgingStorage(memory, self.time_ms)
        clock.written_ms |= self.written_ms
        return clock


def filled(root: str, files: dict[str, bytes]) -> MemoryStorage:
    drop_memory_root(root)
    memory = MemoryStorage(root)
    for path, data in files.items():
        memory.create(path, data)
    return memory


def files_at(root: str) -> dict[str, bytes]:
    memory = MemoryStorage(root)
    return {info.path: memory.read(info.path) for info in memory.list()}


@pytest.fixture(scope="module")
def base() -> Iterator[Base]:
    drop_memory_root(ROOT)
    drop_memory_root(CLONE_ROOT)
    aging = new_lake(MemoryStorage(ROOT), targets={"small_files": 2, "export": None})
    create(aging.lake, "ns")
    neglect(aging, CLONE_ROOT, n_appends=2, n_dropped=3)
    yield Base(files_at(ROOT), files_at(CLONE_ROOT), dict(aging.clock.written_ms), aging.clock.time_ms)
    drop_memory_root(ROOT)
    drop_memory_root(CLONE_ROOT)


@pytest.fixture(autouse=True)
def _pauses(manual_clock: ManualClock) -> None:
    """Skip pauses between attempts."""


def state(lake: Lakehouse) -> dict[str, Any]:
    """Return the state that maintenance may change, without names, versions and times that differ between runs."""
    tables = {name: catalog_at(lake).load_table(f"ns.{name}") for name in lake.snapshot().tables("ns")}
    return {
        "rows": {name: sorted(table.scan().to_arrow()["id"].to_pylist()) for name, table in tables.items()},
        "data_files": {name: len(list(table.scan().plan_files())) for name, table in tables.items()},
        "snapshots": {name: len(table.snapshots()) for name, table in tables.items()},
        "exports": {info.name: info.state for info in operations.list_exports(lake)},
        "clones": [clone.name for clone in operations.list_clones(lake)],
        "clone_files": len(files_at(CLONE_ROOT)),
        "expirations": {batch.state.name for batch in lake.snapshot().definition.expirations},
        "hint": operations.inspect_hint(lake).state,
    }


def finish(clock: AgingStorage) -> dict[str, Any]:
    """Run maintenance until it has nothing left to do, and return the state."""
    for _ in range(4):
        clock.time_ms += LEASE_MS
        report = maintain(Lakehouse(clock))
        assert not report.failed, str(report)
        if all(of_step == {DecisionState.NOTHING} for of_step in states(report).values()):
            return state(Lakehouse(clock))
    raise AssertionError(str(report))


def assert_converges(
    clock: AgingStorage, uninterrupted: dict[str, Any], context: object, *, checks_files: bool
) -> None:
    """Assert that later runs reach the state after an uninterrupted run.

    Args:
        clock: The storage after an interrupted run.
        uninterrupted: The state after an uninterrupted run.
        context: What to name in messages.
        checks_files: Whether to read all files, and to assert that no unneeded file remains.
    """
    lake = Lakehouse(clock)
    findings = [finding for finding in operations.verify(lake).findings if finding.severity == "error"]
    assert findings == [], context
    assert state(lake)["rows"] == uninterrupted["rows"], context
    assert finish(clock) == uninterrupted, context
    if not checks_files:
        return
    assert operations.verify(Lakehouse(clock), deep=True).is_clean, context
    clock.time_ms += 20 * DAY_MS
    maintain(Lakehouse(clock))
    clock.time_ms += 2 * DAY_MS
    maintain(Lakehouse(clock))
    assert operations.plan_orphan_removal(Lakehouse(clock)).is_empty, context


def run_uninterrupted(base: Base) -> tuple[tuple[Request, ...], dict[str, Any]]:
    clock = base.restore()
    recorder = FaultyStorage(clock, concurrency=1)
    report = maintain(Lakehouse(recorder))
    assert {step for step, of_step in states(report).items() if DecisionState.DONE in of_step} >= {
        *(Step.REPAIR_HINT, Step.FINISH_INTERRUPTED, Step.PRUNE_EXPORTS, Step.TRIM, Step.COMPACT_TABLES, Step.EXPIRE),
        *(Step.PURGE, Step.ORPHANS, Step.DROP_OVERDUE_CLONES, Step.VERIFY),
    }, str(report)
    return recorder.log, finish(clock)


def run_killed(base: Base, request: Request) -> AgingStorage:
    clock = base.restore()
    fault = fail(request.number, DeathError, "after" if request.kind in EFFECTS else "before")  # type: ignore[arg-type]
    with pytest.raises(DeathError):
        maintain(Lakehouse(FaultyStorage(clock, [fault], concurrency=1)))
    return clock


def test_maintenance_killed_after_each_change_of_a_file(base: Base) -> None:
    log, uninterrupted = run_uninterrupted(base)
    requests = [request for request in log if request.kind in EFFECTS]
    assert len(requests) > 80
    for number, request in enumerate(requests):
        assert_converges(run_killed(base, request), uninterrupted, request, checks_files=number % 8 == 0)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_maintenance_killed_at_each_request(base: Base) -> None:
    log, uninterrupted = run_uninterrupted(base)
    for request in log:
        assert_converges(run_killed(base, request), uninterrupted, request, checks_files=True)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_maintenance_with_lost_responses_to_all_writes(base: Base) -> None:
    log, uninterrupted = run_uninterrupted(base)
    for request in log:
        if request.kind in EFFECTS:
            clock = base.restore()
            maintain(Lakehouse(FaultyStorage(clock, [lose_response(request.number)], concurrency=1)))
            assert_converges(clock, uninterrupted, request, checks_files=True)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_error_of_each_request_fails_at_most_one_step(base: Base) -> None:
    log, uninterrupted = run_uninterrupted(base)
    for request in log:
        error = StoragePermissionError if request.number % 2 else TransientError
        clock = base.restore()
        try:
            report = maintain(Lakehouse(FaultyStorage(clock, [fail(request.number, error)], concurrency=1)))
        except StorageError:
            assert request.number < 60 or request.number > len(log) - 20, "only the first and last requests may fail it"
        else:
            assert len({decision.step for decision in report.failed}) <= 1, (request, str(report))
        assert_converges(clock, uninterrupted, request, checks_files=False)
