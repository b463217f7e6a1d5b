"""Exports of every level and restores, interrupted at every request to either storage.

After each interruption both lakehouses verify clean through new caches, and a repetition ends in the same state as an
uninterrupted run. Interruptions that leave the same files as an earlier one are not checked again.
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
from trinitylake_ops.transaction import lakehouse as lakehouse_module

pytestmark = pytest.mark.usefixtures("fixed_requests")

SOURCE, TARGET = "memory://export-crash-source/", "memory://export-crash-target/"
Files = dict[str, dict[str, bytes]]


@dataclass(frozen=True)
class Operation:
    """An operation to interrupt. ``prepare`` creates its initial state."""

    name: str
    run: Callable[[Lakehouse], object]
    prepare: Callable[[Lakehouse], object] = lambda lake: None
    has_target: bool = False


def run_export(**arguments: Any) -> Callable[[Lakehouse], object]:
    def run(lake: Lakehouse) -> object:
        return operations.plan_export(lake, "new", **arguments).execute()

    return run


def run_restore(lake: Lakehouse) -> object:
    return operations.restore_export(lake, "old")


def prepare_export(**arguments: Any) -> Callable[[Lakehouse], object]:
    """Return a function that exports the lakehouse and then changes all exported objects."""

    def prepare(lake: Lakehouse) -> None:
        operations.plan_export(lake, "old", **arguments).execute()
        append_rows(lake, "ns.t")
        drop(lake, "a")
        create(lake, "later", "t")

    return prepare


FULL_TO_TARGET = {"level": "full", "target": TARGET}
OPERATIONS = [
    Operation("partial", run_export(level="partial")),
    Operation("definitions", run_export(level="partial", definitions=True)),
    Operation("full", run_export(level="full")),
    Operation("namespaces", run_export(level="full", namespaces=["ns"])),
    Operation("minimal-to-target", run_export(level="minimal", target=TARGET), has_target=True),
    Operation("partial-to-target", run_export(level="partial", target=TARGET), has_target=True),
    Operation("full-to-target", run_export(**FULL_TO_TARGET), has_target=True),
    Operation("incremental", run_export(**FULL_TO_TARGET), prepare_export(**FULL_TO_TARGET), has_target=True),
    Operation("restore", run_restore, prepare_export(level="full")),
    Operation("restore-from-target", run_restore, prepare_export(**FULL_TO_TARGET), has_target=True),
]


def files_of(root: str) -> dict[str, bytes]:
    storage = MemoryStorage(root)
    return {info.path: storage.read(info.path) for info in storage.list()}


@pytest.fixture(scope="module")
def bases() -> dict[str, Files]:
    """The files of both roots before each operation."""
    bases = {}
    for operation in OPERATIONS:
        lake = Lakehouse.create(SOURCE, storage=MemoryStorage(SOURCE), order=3, **small_sizes(3))
        append_rows(lake, "ns.t")
        create(lake, "a", "t", "u", "v")
        operation.prepare(lake)
        bases[operation.name] = {root: files_of(root) for root in (SOURCE, TARGET)}
        drop_memory_root(SOURCE)
        drop_memory_root(TARGET)
    return bases


@pytest.fixture
def restore(bases: dict[str, Files]) -> Iterator[Callable[[Operation], Lakehouse]]:
    """A function that restores both storages to the state before an operation."""

    def restore_base(operation: Operation) -> Lakehouse:
        for root, files in bases[operation.name].items():
            drop_memory_root(root)
            storage = MemoryStorage(root)
            for path, data in files.items():
                storage.create(path, data)
        return Lakehouse(MemoryStorage(SOURCE), cache="off")

    yield restore_base
    drop_memory_root(SOURCE)
    drop_memory_root(TARGET)


#: The name of an operation, and its effects on both storages until a fault ended it.
Effects = tuple[str, object, object]


@dataclass(frozen=True)
class Run:
    """A run: the requests to the storage with faults, the error that ended the operation, and its effects."""

    requests: tuple[Request, ...]
    error: BaseException | None
    effects: Effects


def run_with(operation: Operation, side: str, faults: list[Fault]) -> Run:
    """Run an operation with faults in one of the storages, ``source`` or ``target``."""
    error: BaseException | None = None
    storages: dict[str, FaultyStorage] = {
        root: FaultyStorage(MemoryStorage(root), faults if name == side else [], concurrency=1)
        for name, root in (("source", SOURCE), ("target", TARGET))
    }

    def open_faulty_storage(root: str, _options: object = None) -> Storage:
        return storages[root]

    with (
        mock.patch.object(export_module, "open_storage", open_faulty_storage),
        mock.patch.object(lakehouse_module, "open_storage", open_faulty_storage),
    ):
        clear_process_caches()
        try:
            operation.run(Lakehouse(storages[SOURCE], cache="off"))
        except (DeathError, StorageError) as raised:
            error = raised
    effects = (operation.name, storages[SOURCE].effects, storages[TARGET].effects)
    return Run(storages[SOURCE if side == "source" else TARGET].log, error, effects)


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
    """Return the state that an operation may change, without names, times and numbers that differ between runs."""
    exports = {info.name: (info.state, info.version, info.level) for info in operations.list_exports(lake)}
    complete = [info.name for info in operations.list_exports(lake) if info.state == "complete"]
    return content(lake), exports, {name: content(lake, name) for name in complete}


@pytest.fixture(scope="module")
def converged() -> set[Effects]:
    """Effects of failed operations for which convergence has been checked."""
    return set()


def assert_converges(
    operation: Operation, lake: Lakehouse, expected: object, context: object, run: Run, converged: set[Effects]
) -> None:
    if run.error is not None and run.effects in converged:
        return
    report = operations.verify(lake)
    assert report.is_clean, (context, report.findings)
    try:
        operation.run(lake)
    except ExportExistsError:
        assert "new" in lake.snapshot().definition.exported_snapshots, context
    assert state(lake) == expected, context
    for checked in [lake, Lakehouse(MemoryStorage(TARGET))] if operation.has_target else [lake]:
        operations.repair_hint(checked)
        assert operations.verify(checked).findings == (), context
    if run.error is not None:
        converged.add(run.effects)


#: Operations whose steps are a subset of those of "full", which a normal test run interrupts at each step.
SOAK_OPERATIONS = ("definitions", "namespaces")
SIDES = [(operation, side) for operation in OPERATIONS for side in ("source", "target")[: 1 + operation.has_target]]
each_side = pytest.mark.parametrize(
    ("operation", "side"),
    [
        pytest.param(
            operation,
            side,
            id=f"{operation.name}-{side}",
            marks=[pytest.mark.soak] if operation.name in SOAK_OPERATIONS else [],
        )
        for operation, side in SIDES
    ],
)


@pytest.mark.timeout(600)
# The state before a request equals the state after the previous write, so only the soak checks it.
@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.soak), "after"])
@each_side
def test_export_killed_at_every_request(
    restore: Callable[[Operation], Lakehouse],
    converged: set[Effects],
    operation: Operation,
    side: str,
    moment: Moment,
) -> None:
    lake = restore(operation)
    requests, expected = run_with(operation, side, []).requests, state(lake)
    assert len(requests) > 3
    interrupted = [
        request for request in requests if moment == "before" or request.kind not in ("read", "stat", "list")
    ]
    for request in interrupted:
        lake = restore(operation)
        run = run_with(operation, side, [fail(request.number, DeathError, moment)])  # type: ignore[arg-type]
        assert isinstance(run.error, DeathError)
        assert_converges(operation, lake, expected, (moment, request), run, converged)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fault", ["responses lost", *(pytest.param(f, marks=pytest.mark.soak) for f in ("writes rejected", "all rejected"))]
)
@each_side
def test_export_with_lost_responses_and_rejected_requests(
    restore: Callable[[Operation], Lakehouse],
    converged: set[Effects],
    operation: Operation,
    side: str,
    fault: str,
) -> None:
    lake = restore(operation)
    requests, expected = run_with(operation, side, []).requests, state(lake)
    has_reads, changes = fault == "all rejected", ("create", "write", "delete")
    faulted = [request for request in requests if has_reads or request.kind in changes]
    assert faulted or operation.name.startswith("restore")
    for request in faulted:
        lake = restore(operation)
        planned = (
            lose_response(request.number) if fault == "responses lost" else fail(request.number, StoragePermissionError)
        )
        run = run_with(operation, side, [planned])
        if isinstance(run.error, StorageError):
            assert run.error.path is not None, "a typed error with the path of the file is a valid outcome"
        assert_converges(operation, lake, expected, request, run, converged)
