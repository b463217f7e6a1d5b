"""Expire, undelete, purge, orphan removal and a commit, interrupted at every storage request.

The process dies at each request, before and after its effect; each request fails; the response to each write is lost.
After each of these the lakehouse is checked, and a repetition of the operation ends like an uninterrupted run. The next
orphan removal deletes leftover files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.clock import AgingStorage
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
from trinitylake_ops.operations.gc import delete as deletion
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://expiry-crashes/"
LEASE_MS = 11 * 60 * 1000
EFFECTS = ("create", "write", "delete")


@dataclass(frozen=True)
class Operation:
    """An operation to interrupt: how to run it, how to tell that it is done, and its initial state."""

    name: str
    run: Callable[[Lakehouse], Any]
    has_nothing_to_do: Callable[[Lakehouse], bool]
    prepare: Callable[[Aging], None] = lambda _aging: None
    done_when: type[Exception] | None = None


def commit(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("new")
        txn.create_table("new", "t", table())
        txn.alter_table("n0", "a", table(changed="now"))


def expired_and_due(aging: Aging) -> None:
    aging.expire()
    aging.later()


OPERATIONS = [
    Operation("commit", commit, lambda lake: lake.snapshot().has_table("new", "t"), done_when=ObjectExistsError),
    Operation(
        "expire",
        lambda lake: operations.plan_expiration(lake, keeping(1)).execute(),
        lambda lake: operations.plan_expiration(lake, keeping(1)).is_empty,
    ),
    Operation(
        "undelete",
        lambda lake: operations.undelete(lake, "1,3"),
        lambda lake: {1, 3} <= set(live_versions(lake)),
        expired_and_due,
        done_when=InvalidInputError,
    ),
    Operation(
        "purge",
        lambda lake: operations.plan_purge(lake).execute(),
        lambda lake: operations.plan_purge(lake).is_empty,
        expired_and_due,
    ),
    Operation(
        "orphans",
        lambda lake: operations.plan_orphan_removal(lake).execute(),
        lambda lake: operations.plan_orphan_removal(lake).is_empty,
    ),
]


@dataclass(frozen=True)
class Prepared:
    """An initial lakehouse, and the files of versions and exports that the operation must not touch."""

    files: dict[str, bytes]
    written_ms: dict[str, int]
    time_ms: int
    kept: dict[str, bytes]

    def restored(self) -> AgingStorage:
        """Return a copy of the storage from before the operation."""
        drop_memory_root(ROOT)
        memory = MemoryStorage(ROOT)
        for path, data in self.files.items():
            memory.create(path, data)
        clock = AgingStorage(memory, self.time_ms)
        clock.written_ms |= self.written_ms
        return clock


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deletion, "_FIRST_PAUSE_SECONDS", 0.0)
    yield
    drop_memory_root(ROOT)


@pytest.fixture(scope="module")
def prepared() -> dict[str, Prepared]:
    return {operation.name: _prepared(operation) for operation in OPERATIONS}


def _prepared(operation: Operation) -> Prepared:
    """A lakehouse of several levels with a table's files, exports, a batch of expired versions, and orphans."""
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
    kept = kept_files(lake, operation)
    memory = aging.clock.inner
    files = {info.path: memory.read(info.path) for info in memory.list()}
    return Prepared(files, dict(aging.clock.written_ms), aging.clock.time_ms, kept)


def kept_files(lake: Lakehouse, operation: Operation) -> dict[str, bytes]:
    """Return the files that must stay unchanged whatever happens to the operation."""
    kept = needed_files(lake, "kept")
    for version in live_versions(lake):
        kept |= needed_files(lake, version)
    return kept if operation.name == "purge" else kept | expired_files(lake)


def reached_by_anything(lake: Lakehouse) -> set[str]:
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
    """Return what an operation may change, without names and times that differ between runs."""
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
class Course:
    """An uninterrupted run: its requests, and the states after it and after the next orphan removal."""

    requests: tuple[Request, ...]
    n_versions: int
    after: dict[str, Any]
    left: Counter[str]


def uninterrupted(operation: Operation, prepared: Prepared) -> Course:
    clock = prepared.restored()
    n_versions = Lakehouse(clock).latest_version() + 1
    counted = FaultyStorage(clock, concurrency=1)
    operation.run(Lakehouse(counted))
    after = state(Lakehouse(clock), n_versions)
    assert operation.has_nothing_to_do(Lakehouse(clock))
    return Course(counted.log, n_versions, after, tidied(clock))


def tidied(clock: AgingStorage) -> Counter[str]:
    """Remove orphans after a long time, assert that no unneeded file is left, and return the remaining files."""
    aging = Aging(Lakehouse(clock), clock)
    aging.later()
    aging.remove_orphans()
    assert listed(clock) - reached_by_anything(aging.lake) == set()
    return kinds(aging.lake)


def assert_converges(
    operation: Operation, prepared: Prepared, course: Course, clock: AgingStorage, where: object, *, tidies: bool
) -> None:
    lake = Lakehouse.open(ROOT, storage=clock)
    assert_kept(prepared, clock, where)
    if tidies:
        report = operations.verify(lake)
        assert report.is_clean, (where, report.findings)
    clock.time_ms += LEASE_MS
    try:
        operation.run(lake)
    except TrinityLakeError as error:
        assert operation.done_when is not None, (where, error)
        assert isinstance(error, operation.done_when), (where, error)
    lake = Lakehouse(clock)
    assert state(lake, course.n_versions) == course.after, where
    assert_kept(prepared, clock, where)
    assert operation.has_nothing_to_do(lake), where
    if tidies:
        assert operations.verify(lake).is_clean, where
        assert tidied(clock) == course.left, where
        assert_kept(prepared, clock, where)


def assert_kept(prepared: Prepared, clock: AgingStorage, where: object) -> None:
    for path, data in prepared.kept.items():
        assert clock.inner.read(path) == data, (where, path)


def run_with(operation: Operation, prepared: Prepared, fault: Fault) -> tuple[AgingStorage, BaseException | None]:
    clock = prepared.restored()
    try:
        operation.run(Lakehouse(FaultyStorage(clock, [fault], concurrency=1)))
    except (DeathError, TrinityLakeError) as error:
        return clock, error
    return clock, None


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_killed_at_every_request(prepared: dict[str, Prepared], operation: Operation) -> None:
    """A death before a request leaves the same state as one after the previous write, where the rest is checked."""
    begin = prepared[operation.name]
    course = uninterrupted(operation, begin)
    assert {"read", "create"} <= {request.kind for request in course.requests}
    deletes = " ".join(request.path for request in course.requests if request.kind == "delete")
    assert ("tables/" in deletes) == (operation.name in ("purge", "orphans"))
    for request in course.requests:
        moment: Moment = "after" if request.kind in EFFECTS else "before"
        death = fail(request.number, DeathError, moment)  # type: ignore[arg-type]
        clock, error = run_with(operation, begin, death)
        assert isinstance(error, DeathError)
        assert_kept(begin, clock, request)
        if moment == "after":
            assert_converges(operation, begin, course, clock, (moment, request), tidies=True)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_killed_before_every_request_with_full_checks(
    prepared: dict[str, Prepared], operation: Operation
) -> None:
    begin = prepared[operation.name]
    course = uninterrupted(operation, begin)
    for request in course.requests:
        death = fail(request.number, DeathError)  # type: ignore[arg-type]
        clock, error = run_with(operation, begin, death)
        assert isinstance(error, DeathError)
        assert_converges(operation, begin, course, clock, request, tidies=True)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_with_lost_responses_to_all_writes(prepared: dict[str, Prepared], operation: Operation) -> None:
    begin = prepared[operation.name]
    course = uninterrupted(operation, begin)
    for request in course.requests:
        if request.kind in EFFECTS:
            clock, error = run_with(operation, begin, lose_response(request.number))
            assert error is None or isinstance(error, StorageError)
            assert_converges(operation, begin, course, clock, request, tidies=False)


def errors_at(operation: Operation, begin: Prepared, every: int) -> None:
    """Fail each request; run all checks after each write and after some of the reads."""
    course = uninterrupted(operation, begin)
    for request in course.requests:
        error = StoragePermissionError if request.number % 2 else TransientError
        clock, raised = run_with(operation, begin, fail(request.number, error))
        assert_kept(begin, clock, request)
        if raised is None and request.path != HINT_PATH:
            lake = Lakehouse(clock)
            assert request.kind in EFFECTS or state(lake, course.n_versions) == course.after, "no read is passed over"
        if request.kind in EFFECTS or request.number % every == 0:
            assert_converges(operation, begin, course, clock, (error, request), tidies=False)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_with_errors_for_every_request(prepared: dict[str, Prepared], operation: Operation) -> None:
    errors_at(operation, prepared[operation.name], every=10)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_expiry_with_errors_for_every_request_and_full_checks(
    prepared: dict[str, Prepared], operation: Operation
) -> None:
    errors_at(operation, prepared[operation.name], every=1)
