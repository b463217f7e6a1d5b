"""Exports of every level, restores and drops of exports, interrupted at every request to either storage.

After each interruption both lakehouses verify clean through new caches, a repetition ends like an uninterrupted run,
and a second repetition does nothing. Interruptions that leave the same files as an earlier one are not checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from tests.faults import DeathError, Fault, FaultyStorage, Moment, Request, fail, lose_response
from tests.lakes import objects
from tests.operations.changes import append_rows, create, drop, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ExportExistsError, StorageError, StoragePermissionError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.exports import export as export_module
from trinitylake_ops.storage import MemoryStorage, Storage, drop_memory_root
from trinitylake_ops.storage.cache.storage import clear_process_caches
from trinitylake_ops.transaction import lakehouse as lakes

pytestmark = pytest.mark.usefixtures("fixed_requests")

SOURCE, TARGET = "memory://export-crash-source/", "memory://export-crash-target/"
Files = dict[str, dict[str, bytes]]


@dataclass(frozen=True)
class Operation:
    """``prepare`` creates the initial state and ``run`` runs the operation."""

    name: str
    run: Callable[[Lakehouse], object]
    prepare: Callable[[Lakehouse], object] = lambda lake: None
    has_target: bool = False


def exporting(**arguments: Any) -> Callable[[Lakehouse], object]:
    def run(lake: Lakehouse) -> object:
        return operations.plan_export(lake, "new", **arguments).execute()

    return run


def restoring(lake: Lakehouse) -> object:
    return operations.restore_export(lake, "old")


def exported_before(**arguments: Any) -> Callable[[Lakehouse], object]:
    """Return a preparation that exports the lakehouse and then changes everything in the export."""

    def prepare(lake: Lakehouse) -> None:
        operations.plan_export(lake, "old", **arguments).execute()
        append_rows(lake, "ns.t")
        drop(lake, "a")
        create(lake, "later", "t")

    return prepare


FULL_AWAY = {"level": "full", "target": TARGET}
OPERATIONS = [
    Operation("partial", exporting(level="partial")),
    Operation("definitions", exporting(level="partial", definitions=True)),
    Operation("full", exporting(level="full")),
    Operation("namespaces", exporting(level="full", namespaces=["ns"])),
    Operation("minimal-away", exporting(level="minimal", target=TARGET), has_target=True),
    Operation("partial-away", exporting(level="partial", target=TARGET), has_target=True),
    Operation("full-away", exporting(**FULL_AWAY), has_target=True),
    Operation("incremental", exporting(**FULL_AWAY), exported_before(**FULL_AWAY), has_target=True),
    Operation("restore", restoring, exported_before(level="full")),
    Operation("restore-away", restoring, exported_before(**FULL_AWAY), has_target=True),
]


def files_of(root: str) -> dict[str, bytes]:
    storage = MemoryStorage(root)
    return {info.path: storage.read(info.path) for info in storage.list()}


@pytest.fixture(scope="module")
def bases() -> dict[str, Files]:
    """Files of both roots before each operation."""
    found = {}
    for operation in OPERATIONS:
        lake = Lakehouse.create(SOURCE, storage=MemoryStorage(SOURCE), order=3, **small_sizes(3))
        append_rows(lake, "ns.t")
        create(lake, "a", "t", "u", "v")
        operation.prepare(lake)
        found[operation.name] = {root: files_of(root) for root in (SOURCE, TARGET)}
        drop_memory_root(SOURCE)
        drop_memory_root(TARGET)
    return found


@pytest.fixture
def restored(bases: dict[str, Files]) -> Iterator[Callable[[Operation], Lakehouse]]:
    """Provides new copies of both storages from before the operation."""

    def restore(operation: Operation) -> Lakehouse:
        for root, files in bases[operation.name].items():
            drop_memory_root(root)
            storage = MemoryStorage(root)
            for path, data in files.items():
                storage.create(path, data)
        return Lakehouse(MemoryStorage(SOURCE), cache="off")

    yield restore
    drop_memory_root(SOURCE)
    drop_memory_root(TARGET)


#: An operation, and its effects on both storages before a fault ended it.
Course = tuple[str, object, object]


@dataclass(frozen=True)
class Run:
    """The requests to the faulty storage, the error that ended the operation, and its effects."""

    requests: tuple[Request, ...]
    error: BaseException | None
    course: Course


def run_with(operation: Operation, at: str, faults: list[Fault]) -> Run:
    """Run with faults in one of the storages, ``source`` or ``target``."""
    error: BaseException | None = None
    faulty: dict[str, FaultyStorage] = {
        root: FaultyStorage(MemoryStorage(root), faults if name == at else [], concurrency=1)
        for name, root in (("source", SOURCE), ("target", TARGET))
    }

    def opened(root: str, _options: object = None) -> Storage:
        return faulty[root]

    with mock.patch.object(export_module, "open_storage", opened), mock.patch.object(lakes, "open_storage", opened):
        clear_process_caches()
        try:
            operation.run(Lakehouse(faulty[SOURCE], cache="off"))
        except (DeathError, StorageError) as raised:
            error = raised
    course = (operation.name, faulty[SOURCE].effects, faulty[TARGET].effects)
    return Run(faulty[SOURCE if at == "source" else TARGET].log, error, course)


def content(lake: Lakehouse, version: int | str | None = None) -> object:
    snapshot = lake.snapshot(version)
    rows = {}
    for namespace in snapshot.namespaces():
        for name in snapshot.tables(namespace):
            if snapshot.table(namespace, name).format_properties:
                with catalog_at(lake, version) as catalog:
                    rows[name] = sorted(catalog.load_table(f"{namespace}.{name}").scan().to_arrow()["id"].to_pylist())
    return objects(snapshot), rows


def state(lake: Lakehouse) -> object:
    """Return what an operation may change, without names, times and numbers that differ between runs."""
    exports = {info.name: (info.state, info.version, info.level) for info in operations.list_exports(lake)}
    complete = [info.name for info in operations.list_exports(lake) if info.state == "complete"]
    return content(lake), exports, {name: content(lake, name) for name in complete}


@pytest.fixture(scope="module")
def converged() -> set[Course]:
    """Courses after which a failed operation was already shown to converge."""
    return set()


def assert_converges(
    operation: Operation, lake: Lakehouse, expected: object, where: object, run: Run, converged: set[Course]
) -> None:
    if run.error is not None and run.course in converged:
        return
    report = operations.verify(lake)
    assert report.is_clean, (where, report.findings)
    try:
        operation.run(lake)
    except ExportExistsError:
        assert "new" in lake.snapshot().definition.exported_snapshots, where
    assert state(lake) == expected, where
    both = [lake, Lakehouse(MemoryStorage(TARGET))] if operation.has_target else [lake]
    for each in both:
        operations.repair_hint(each)
        assert operations.verify(each).findings == (), where
    if run.error is not None:
        converged.add(run.course)


#: Operations whose steps are included in those of "full", which a normal test run interrupts at each step.
LONG = ("definitions", "namespaces")
SIDES = [(operation, side) for operation in OPERATIONS for side in ("source", "target")[: 1 + operation.has_target]]
each_side = pytest.mark.parametrize(
    ("operation", "side"),
    [
        pytest.param(op, side, id=f"{op.name}-{side}", marks=[pytest.mark.soak] if op.name in LONG else [])
        for op, side in SIDES
    ],
)


@pytest.mark.timeout(600)
# The state before a request equals the state after the previous write, so only the soak checks it.
@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.soak), "after"])
@each_side
def test_export_killed_at_every_request(
    restored: Callable[[Operation], Lakehouse],
    converged: set[Course],
    operation: Operation,
    side: str,
    moment: Moment,
) -> None:
    lake = restored(operation)
    requests, expected = run_with(operation, side, []).requests, state(lake)
    assert len(requests) > 3
    moments = [request for request in requests if moment == "before" or request.kind not in ("read", "stat", "list")]
    for request in moments:
        lake = restored(operation)
        run = run_with(operation, side, [fail(request.number, DeathError, moment)])  # type: ignore[arg-type]
        assert isinstance(run.error, DeathError)
        assert_converges(operation, lake, expected, (moment, request), run, converged)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fault", ["lost", *(pytest.param(f, marks=pytest.mark.soak) for f in ("refused", "reads refused, too"))]
)
@each_side
def test_export_with_lost_responses_and_rejected_requests(
    restored: Callable[[Operation], Lakehouse],
    converged: set[Course],
    operation: Operation,
    side: str,
    fault: str,
) -> None:
    lake = restored(operation)
    requests, expected = run_with(operation, side, []).requests, state(lake)
    has_reads, changes = fault == "reads refused, too", ("create", "write", "delete")
    struck = [request for request in requests if has_reads or request.kind in changes]
    assert struck or operation.name.startswith("restore")
    for request in struck:
        lake = restored(operation)
        planned = lose_response(request.number) if fault == "lost" else fail(request.number, StoragePermissionError)
        run = run_with(operation, side, [planned])
        if isinstance(run.error, StorageError):
            assert run.error.path is not None, "a typed error that names the file is an answer too"
        assert_converges(operation, lake, expected, request, run, converged)
