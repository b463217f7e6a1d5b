"""Repairs interrupted at every storage request, by a kill, by errors, or by lost responses to writes.

After each interruption a new repair ends in the same state as an uninterrupted one. Existing files stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.clock import AgingStorage
from tests.faults import EFFECTS, DeathError, Fault, FaultyStorage, Moment, Request, fail, lose_response
from tests.lakes import objects, table
from tests.operations.aging import Aging, grow, needed_files
from tests.operations.changes import alter
from tests.operations.test_verify_state import foreign_rollback
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StoragePermissionError, TransientError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://repair-crashes/"
LEASE_MS = 11 * 60 * 1000
KINDS = ("objects", "tree")


class DamagedBase:
    """A lakehouse with every kind of damage that repair fixes, for example an export without a root, a wrong hint."""

    def __init__(self, kind: str):
        drop_memory_root(ROOT)
        aging = Aging.on(MemoryStorage(ROOT))
        lake = aging.lake
        grow(aging, 2)
        operations.plan_export(lake, "forgotten", version=1).execute()
        foreign_rollback(lake, 2)
        lake = Lakehouse(aging.clock)
        operations.plan_export(lake, "lost", version=1).execute()
        aging.clock.delete(lake.snapshot().definition.exported_snapshots["lost"])
        old = {path for version in range(lake.latest_version() + 1) for path in needed_files(lake, version)}
        if kind == "objects":
            alter(lake, "n0", "a")
            snapshot = lake.snapshot()
            path = snapshot.entry(snapshot.keys.table_key("n0", "a"))
            assert path is not None
        else:
            with lake.transaction(message="m" * 3_400) as txn:
                txn.create_namespace("big")
                for number in range(12):
                    txn.create_table("big", f"t{number}", table())
            path = next(child for child in lake.snapshot().root.children if child not in old)
        aging.clock.delete(path)
        aging.clock.write(HINT_PATH, b"1")
        memory = aging.clock.inner
        self.files = {info.path: memory.read(info.path) for info in memory.list()}
        self.written_ms = dict(aging.clock.written_ms)
        self.time_ms = aging.clock.time_ms
        self.converged: set[object] = set()

    def restore(self) -> AgingStorage:
        """Restore the storage to the state before the repair, and return it."""
        drop_memory_root(ROOT)
        memory = MemoryStorage(ROOT)
        for path, data in self.files.items():
            memory.create(path, data)
        clock = AgingStorage(memory, self.time_ms)
        clock.written_ms |= self.written_ms
        return clock


@pytest.fixture(scope="module", params=[KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.soak)])
def base(request: pytest.FixtureRequest) -> Iterator[DamagedBase]:
    yield DamagedBase(request.param)
    drop_memory_root(ROOT)


def repair(lake: Lakehouse) -> operations.RepairReport:
    return operations.repair(lake, to_last_good=True)


def state(clock: AgingStorage) -> dict[str, Any]:
    """Return the state that a repair may change, without names and times that differ between runs."""
    lake = Lakehouse(clock)
    latest = lake.snapshot()
    report = operations.verify(lake)
    return {
        "version": latest.version,
        "objects": objects(latest),
        "exports": sorted(info.name for info in operations.list_exports(lake)),
        "hint": clock.read(HINT_PATH),
        # A lease that was not released is a warning until another operation acquires it.
        "findings": sorted((f.code, f.path, f.version) for f in report.findings if f.code != "lease-stale"),
        "damaged": report.damaged_versions,
    }


def run_uninterrupted(base: DamagedBase) -> tuple[tuple[Request, ...], dict[str, Any]]:
    clock = base.restore()
    recorder = FaultyStorage(clock, concurrency=1)
    report = repair(Lakehouse(recorder))
    assert [step.action for step in report.steps] == ["reconcile", "drop-export", "rollback", "hint"]
    expected = state(clock)
    assert str(expected["version"]) not in expected["damaged"]
    assert expected["exports"] == ["forgotten"]
    return recorder.log, expected


@dataclass(frozen=True)
class InterruptedRepair:
    """The storage after a fault, the error that ended the repair, and the effects of the repair."""

    clock: AgingStorage
    error: BaseException | None
    effects: object


def run_with(base: DamagedBase, fault: Fault) -> InterruptedRepair:
    clock = base.restore()
    faulty = FaultyStorage(clock, [fault], concurrency=1)
    try:
        repair(Lakehouse(faulty))
    except (DeathError, TrinityLakeError) as error:
        return InterruptedRepair(clock, error, faulty.effects)
    return InterruptedRepair(clock, None, faulty.effects)


def assert_converges(
    base: DamagedBase, interrupted: InterruptedRepair, expected: dict[str, Any], context: object
) -> None:
    """Check that a new repair ends in the expected state, once for all failed repairs with the same effects."""
    if interrupted.error is not None and interrupted.effects in base.converged:
        return
    clock = interrupted.clock
    clock.time_ms += LEASE_MS
    repair(Lakehouse(clock))
    new_state = state(clock)
    assert new_state.pop("version") >= expected["version"]
    assert new_state.pop("damaged") == expected["damaged"], context
    assert new_state.pop("hint") == str(Lakehouse(clock).latest_version()).encode(), context
    assert new_state == {name: expected[name] for name in new_state}, context
    assert operations.plan_repair(Lakehouse(clock), to_last_good=True).is_empty, context
    for path, data in base.files.items():
        if path != HINT_PATH and not path.startswith("_ops/lease"):
            assert clock.inner.read(path) == data, (context, path)
    if interrupted.error is not None:
        base.converged.add(interrupted.effects)


def test_repair_killed_at_every_request(base: DamagedBase) -> None:
    """A death before a request leaves the same state as a death after the previous write."""
    requests, expected = run_uninterrupted(base)
    assert {"read", "create", "write"} <= {request.kind for request in requests}
    for request in requests:
        moment: Moment = "after" if request.kind in EFFECTS else "before"
        interrupted = run_with(base, fail(request.number, DeathError, moment))  # type: ignore[arg-type]
        assert isinstance(interrupted.error, DeathError)
        if moment == "after":
            assert_converges(base, interrupted, expected, (moment, request))


def test_repair_with_lost_responses_to_all_writes(base: DamagedBase) -> None:
    requests, expected = run_uninterrupted(base)
    for request in requests:
        if request.kind in EFFECTS:
            interrupted = run_with(base, lose_response(request.number))
            assert interrupted.error is None or isinstance(interrupted.error, TrinityLakeError)
            assert_converges(base, interrupted, expected, request)


@pytest.mark.soak
def test_repair_with_errors_for_every_request(base: DamagedBase) -> None:
    requests, expected = run_uninterrupted(base)
    for request in requests:
        error = StoragePermissionError if request.number % 2 else TransientError
        interrupted = run_with(base, fail(request.number, error))
        if request.kind in EFFECTS or request.number % 5 == 0:
            assert_converges(base, interrupted, expected, (error, request))
