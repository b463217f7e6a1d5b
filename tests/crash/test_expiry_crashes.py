"""Expire, undelete, purge, orphan removal and a commit, interrupted at every storage request.

The process dies at each request, before or after its effect, or each request fails, or the response to each write is
lost. After each fault the lakehouse is checked, and a repetition of the operation ends in the same state as an
uninterrupted run. The next orphan removal deletes unneeded files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.clock import AgingStorage, ManualClock
from tests.faults import DeathError, Fault, FaultyStorage, Moment, Request, fail, lose_response
from tests.lakes import listed, roots, table
from tests.operations.aging import (
    HOUR_MS,
    Aging,
    expired_files,
    grow,
    keeping,
    live_versions,
    needed_files,
    states,
)
from tests.operations.changes import append_rows, drop
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    InvalidInputError,
    ObjectExistsError,
    StorageError,
    StoragePermissionError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.format.file_names import HINT_PATH, ORPHAN_BARRIER_PATH, owner_path
from trinitylake_ops.iceberg.managed import owner_file
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://expiry-crashes/"
LEASE_MS = 11 * 60 * 1000
EFFECTS = ("create", "write", "delete")


@dataclass(frozen=True)
class Operation:
    """An operation to interrupt."""

    name: str
    run: Callable[[Lakehouse], Any]
    #: Whether the operation has taken effect.
    is_done: Callable[[Lakehouse], bool]
    #: Creates the initial state.
    prepare: Callable[[Aging], None] = lambda _aging: None
    #: The error of a repetition after the operation has taken effect.
    error_when_done: type[Exception] | None = None


def commit(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("new")
        txn.create_table("new", "t", table())
        txn.alter_table("n0", "a", table(changed="now"))


def prepare_due_purge(aging: Aging) -> None:
    aging.expire()
    aging.later()


OPERATIONS = [
    Operation("commit", commit, lambda lake: lake.snapshot().has_table("new", "t"), error_when_done=ObjectExistsError),
    Operation(
        "expire",
        lambda lake: operations.plan_expiration(lake, keeping(1)).execute(),
        lambda lake: operations.plan_expiration(lake, keeping(1)).is_empty,
    ),
    Operation(
        "undelete",
        lambda lake: operations.undelete(lake, "1,3"),
        lambda lake: {1, 3} <= set(live_versions(lake)),
        prepare_due_purge,
        error_when_done=InvalidInputError,
    ),
    Operation(
        "purge",
        lambda lake: operations.plan_purge(lake).execute(),
        lambda lake: operations.plan_purge(lake).is_empty,
        prepare_due_purge,
    ),
    Operation(
        "orphans",
        lambda lake: operations.plan_orphan_removal(lake).execute(),
        lambda lake: operations.plan_orphan_removal(lake).is_empty,
    ),
]


@dataclass(frozen=True)
class Base:
    """The lakehouse before an operation."""

    files: dict[str, bytes]
    written_ms: dict[str, int]
    time_ms: int
    #: The files that the operation must not change.
    protected_files: dict[str, bytes]

    def restore(self) -> AgingStorage:
        """Restore the storage to the state before the operation, and return it."""
        drop_memory_root(ROOT)
        memory = MemoryStorage(ROOT)
        for path, data in self.files.items():
            memory.create(path, data)
        clock = AgingStorage(memory, self.time_ms)
        clock.written_ms |= self.written_ms
        return clock


@pytest.fixture(autouse=True)
def _drop_root(manual_clock: ManualClock) -> Iterator[None]:
    """Delete all files after the test. The manual clock skips pauses between attempts."""
    yield
    drop_memory_root(ROOT)


@pytest.fixture(scope="module")
def bases() -> dict[str, Base]:
    return {operation.name: _make_base(operation) for operation in OPERATIONS}


def _make_base(operation: Operation) -> Base:
    """Create a lakehouse with a tree of several levels, files of tables, exports, expired versions and orphans."""
    drop_memory_root(ROOT)
    aging = Aging.on(MemoryStorage(ROOT))
    lake = aging.lake
    grow(aging, 2)
    append_rows(lake)
    drop(lake, "ns")
    operations.plan_export(lake, "kept", version=2).execute()
    if operation.name in ("expire", "purge"):
        operations.plan_export(lake, "short", version=5, retain_for=HOUR_MS).execute()
    aging.later()
    operations.plan_expiration(lake, keeping(lake.latest_version())).execute()  # one version
    lake.stage_definition("n0", "left", table())
    aging.clock.create("tables/aborted/_owner.json", owner_file(lake.snapshot().definition))
    aging.clock.create("tables/aborted/data/1.parquet", b"rows")
    aging.later()
    operation.prepare(aging)
    protected = protected_files(lake, operation)
    memory = aging.clock.inner
    files = {info.path: memory.read(info.path) for info in memory.list()}
    return Base(files, dict(aging.clock.written_ms), aging.clock.time_ms, protected)


def protected_files(lake: Lakehouse, operation: Operation) -> dict[str, bytes]:
    """Return the files that the operation must not change, even if it is interrupted."""
    files = needed_files(lake, "kept")
    for version in live_versions(lake):
        files |= needed_files(lake, version)
    return files if operation.name == "purge" else files | expired_files(lake)


def all_needed_files(lake: Lakehouse) -> set[str]:
    """Return the files that live or expired versions, exports and operation records need."""
    definition = lake.snapshot().definition
    needed = {HINT_PATH, ORPHAN_BARRIER_PATH, *roots(lake.storage), *expired_files(lake)}
    needed |= {batch.plan_path for batch in definition.expirations}
    needed |= {path for record in definition.exports for path in (record.root_location, record.manifest_path)}
    needed |= {path for path in listed(lake.storage) if path.startswith("_ops/lease-")}
    for version in [*definition.exported_snapshots, *live_versions(lake)]:
        needed |= needed_files(lake, version).keys()
    tables = {table_id for path in needed if (table_id := table_id_in(path)) is not None}
    return needed | {owner_path(table_id) for table_id in tables}


def state(lake: Lakehouse, n_versions: int) -> dict[str, Any]:
    """Return the state that an operation may change, without names and times that differ between runs."""
    latest = lake.snapshot()
    return {
        "tables": {name: latest.tables(name) for name in latest.namespaces()},
        "changed": latest.table("n0", "a").properties,
        "live": [version for version in live_versions(lake) if version < n_versions],
        "sealed": [info.version for info in lake.history() if info.state == "sealed"],
        "states": states(lake),
        "exports": sorted(info.name for info in operations.list_exports(lake)),
    }


def kinds(lake: Lakehouse) -> Counter[str]:
    """Return the number of files by kind, without the files that each commit writes."""
    return Counter(
        path.split("/")[0] if path.startswith(("tables/", "_ops/plan", "_ops/export")) else path.split("-")[1]
        for path in listed(lake.storage)
        if not path.startswith("_") or path.startswith("_ops/")
        if not path.startswith("_ops/lease") and path != ORPHAN_BARRIER_PATH
    )


@dataclass(frozen=True)
class UninterruptedRun:
    """An uninterrupted run."""

    requests: tuple[Request, ...]
    n_versions: int
    #: The state after the run.
    state: dict[str, Any]
    #: The number of files by kind after the run and the next orphan removal.
    n_files: Counter[str]


def run_uninterrupted(operation: Operation, base: Base) -> UninterruptedRun:
    clock = base.restore()
    n_versions = Lakehouse(clock).latest_version() + 1
    recorder = FaultyStorage(clock, concurrency=1)
    operation.run(Lakehouse(recorder))
    state_after = state(Lakehouse(clock), n_versions)
    assert operation.is_done(Lakehouse(clock))
    return UninterruptedRun(recorder.log, n_versions, state_after, remove_orphans(clock))


def remove_orphans(clock: AgingStorage) -> Counter[str]:
    """Remove orphans after a long time, assert that no unneeded file remains, and return the number by kind."""
    aging = Aging(Lakehouse(clock), clock)
    aging.later()
    aging.remove_orphans()
    assert listed(clock) - all_needed_files(aging.lake) == set()
    return kinds(aging.lake)


def assert_converges(
    operation: Operation,
    base: Base,
    uninterrupted: UninterruptedRun,
    clock: AgingStorage,
    context: object,
    *,
    with_full_checks: bool,
) -> None:
    lake = Lakehouse.open(ROOT, storage=clock)
    assert_protected_files(base, clock, context)
    if with_full_checks:
        report = operations.verify(lake)
        assert report.is_clean, (context, report.findings)
    clock.time_ms += LEASE_MS
    try:
        operation.run(lake)
    except TrinityLakeError as error:
        assert operation.error_when_done is not None, (context, error)
        assert isinstance(error, operation.error_when_done), (context, error)
    lake = Lakehouse(clock)
    assert state(lake, uninterrupted.n_versions) == uninterrupted.state, context
    assert_protected_files(base, clock, context)
    assert operation.is_done(lake), context
    if with_full_checks:
        assert operations.verify(lake).is_clean, context
        assert remove_orphans(clock) == uninterrupted.n_files, context
        assert_protected_files(base, clock, context)


def assert_protected_files(base: Base, clock: AgingStorage, context: object) -> None:
    for path, data in base.protected_files.items():
        assert clock.inner.read(path) == data, (context, path)


def run_with(operation: Operation, base: Base, fault: Fault) -> tuple[AgingStorage, BaseException | None]:
    clock = base.restore()
    try:
        operation.run(Lakehouse(FaultyStorage(clock, [fault], concurrency=1)))
    except (DeathError, TrinityLakeError) as error:
        return clock, error
    return clock, None


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_killed_at_every_request(bases: dict[str, Base], operation: Operation) -> None:
    """A death before a request leaves the same state as a death after the previous write, which has more checks."""
    base = bases[operation.name]
    uninterrupted = run_uninterrupted(operation, base)
    assert {"read", "create"} <= {request.kind for request in uninterrupted.requests}
    deletes = " ".join(request.path for request in uninterrupted.requests if request.kind == "delete")
    assert ("tables/" in deletes) == (operation.name in ("purge", "orphans"))
    for request in uninterrupted.requests:
        moment: Moment = "after" if request.kind in EFFECTS else "before"
        fault = fail(request.number, DeathError, moment)  # type: ignore[arg-type]
        clock, error = run_with(operation, base, fault)
        assert isinstance(error, DeathError)
        assert_protected_files(base, clock, request)
        if moment == "after":
            assert_converges(operation, base, uninterrupted, clock, (moment, request), with_full_checks=True)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_killed_before_every_request_with_full_checks(bases: dict[str, Base], operation: Operation) -> None:
    base = bases[operation.name]
    uninterrupted = run_uninterrupted(operation, base)
    for request in uninterrupted.requests:
        fault = fail(request.number, DeathError)  # type: ignore[arg-type]
        clock, error = run_with(operation, base, fault)
        assert isinstance(error, DeathError)
        assert_converges(operation, base, uninterrupted, clock, request, with_full_checks=True)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_with_lost_responses_to_all_writes(bases: dict[str, Base], operation: Operation) -> None:
    base = bases[operation.name]
    uninterrupted = run_uninterrupted(operation, base)
    for request in uninterrupted.requests:
        if request.kind in EFFECTS:
            clock, error = run_with(operation, base, lose_response(request.number))
            assert error is None or isinstance(error, StorageError)
            assert_converges(operation, base, uninterrupted, clock, request, with_full_checks=False)


def check_errors(operation: Operation, base: Base, every: int) -> None:
    """Fail each request. Run all checks after each write and after every ``every``-th read."""
    uninterrupted = run_uninterrupted(operation, base)
    for request in uninterrupted.requests:
        error = StoragePermissionError if request.number % 2 else TransientError
        clock, raised = run_with(operation, base, fail(request.number, error))
        assert_protected_files(base, clock, request)
        if raised is None and request.path != HINT_PATH:
            lake = Lakehouse(clock)
            is_unchanged = state(lake, uninterrupted.n_versions) == uninterrupted.state
            assert request.kind in EFFECTS or is_unchanged, "no failed read is ignored"
        if request.kind in EFFECTS or request.number % every == 0:
            assert_converges(operation, base, uninterrupted, clock, (error, request), with_full_checks=False)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_with_errors_for_every_request(bases: dict[str, Base], operation: Operation) -> None:
    check_errors(operation, bases[operation.name], every=10)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_with_errors_for_every_request_and_full_checks(bases: dict[str, Base], operation: Operation) -> None:
    check_errors(operation, bases[operation.name], every=1)
