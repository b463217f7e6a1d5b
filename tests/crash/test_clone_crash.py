"""Clones, their promotion, refresh and drop, interrupted at every request to either storage.

After each interruption both lakehouses verify clean, and a repetition ends in the same state as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import pytest

from tests.faults import DeathError, Fault, FaultyStorage, Moment, Request, fail, lose_response
from tests.lakes import objects
from tests.operations.changes import alter, append_rows, create, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    ExportExistsError,
    ExportNotFoundError,
    LakehouseNotFoundError,
    StorageError,
    StoragePermissionError,
)
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.clones import clone as clone_module
from trinitylake_ops.operations.clones import clone_records
from trinitylake_ops.storage import MemoryStorage, Storage, drop_memory_root
from trinitylake_ops.storage.cache.storage import clear_process_caches

pytestmark = pytest.mark.usefixtures("fixed_requests", "manual_clock")

PARENT, CLONE = "memory://clone-crash-parent/", "memory://clone-crash-clone/"
ROOTS = {"parent": PARENT, "clone": CLONE}
Files = dict[str, dict[str, bytes]]
#: The name of an operation, and its effects on both storages until a fault ended it.
Effects = tuple[str, object, object]


@dataclass(frozen=True)
class Operation:
    """An operation to interrupt. ``prepare`` creates its initial state."""

    name: str
    run: Callable[[Lakehouse], object]
    prepare: Callable[[Lakehouse], object] = lambda lake: None


def create_clone(lake: Lakehouse) -> object:
    return operations.plan_clone(lake, CLONE, "feature").execute()


def clone_namespace(lake: Lakehouse) -> object:
    return operations.plan_clone(lake, CLONE, "feature", namespaces=["ns"]).execute()


def prepare_changed_clone(lake: Lakehouse) -> None:
    create_clone(lake)
    clone = Lakehouse(MemoryStorage(CLONE))
    append_rows(clone, "ns.t")
    append_rows(clone, "new.t")


def drop_clone(lake: Lakehouse) -> object:
    report = operations.drop_clone(lake, "feature", delete_files=True)
    for path, reason in report.failures.items():
        assert report.version is None
        raise StorageError(reason, path=path)
    return report


def prepare_both_changed(lake: Lakehouse) -> None:
    prepare_changed_clone(lake)
    append_rows(lake, "ns.u")
    alter(lake, "a", "u")


def promote_clone(lake: Lakehouse) -> object:
    return operations.plan_promotion(lake, "feature").execute()


def refresh_clone(lake: Lakehouse) -> object:
    return operations.plan_refresh(lake, "feature").execute()


OPERATIONS = [
    Operation("clone", create_clone),
    Operation("clone-namespace", clone_namespace),
    Operation("promote", promote_clone, prepare_both_changed),
    Operation("refresh", refresh_clone, prepare_both_changed),
    Operation("drop", drop_clone, prepare_changed_clone),
]
each_side = pytest.mark.parametrize("side", ["parent", "clone"])
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def files_of(root: str) -> dict[str, bytes]:
    storage = MemoryStorage(root)
    return {info.path: storage.read(info.path) for info in storage.list()}


@pytest.fixture(scope="module")
def bases() -> dict[str, Files]:
    """The files of both roots before each operation."""
    bases = {}
    for operation in OPERATIONS:
        lake = Lakehouse.create(PARENT, storage=MemoryStorage(PARENT), order=3, **small_sizes(3))
        append_rows(lake, "ns.t")
        create(lake, "a", "t", "u", "v")
        operation.prepare(lake)
        bases[operation.name] = {root: files_of(root) for root in ROOTS.values()}
        for root in ROOTS.values():
            drop_memory_root(root)
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
        return Lakehouse(MemoryStorage(PARENT), cache="off")

    yield restore_base
    for root in ROOTS.values():
        drop_memory_root(root)


@dataclass(frozen=True)
class Run:
    """A run: the requests to the storage with faults, the error that ended the operation, and its effects."""

    requests: tuple[Request, ...]
    error: BaseException | None
    effects: Effects


def run_with(operation: Operation, side: str, faults: list[Fault]) -> Run:
    error: BaseException | None = None
    storages = {
        root: FaultyStorage(MemoryStorage(root), faults if name == side else [], concurrency=1)
        for name, root in ROOTS.items()
    }

    def open_faulty_storage(root: str, _options: object = None) -> Storage:
        return storages[root]

    with ExitStack() as stack:
        for module in (clone_module, clone_records):
            stack.enter_context(mock.patch.object(module, "open_storage", open_faulty_storage))
        clear_process_caches()
        try:
            operation.run(Lakehouse(storages[PARENT], cache="off"))
        except (DeathError, StorageError) as raised:
            error = raised
    return Run(storages[ROOTS[side]].log, error, (operation.name, storages[PARENT].effects, storages[CLONE].effects))


def content(lake: Lakehouse) -> object:
    snapshot = lake.snapshot()
    rows = {}
    for namespace in snapshot.namespaces():
        for name in snapshot.tables(namespace):
            if snapshot.table(namespace, name).format_properties:
                table = catalog_at(lake).load_table(f"{namespace}.{name}")
                rows[namespace, name] = sorted(table.scan().to_arrow()["id"].to_pylist())
    return objects(snapshot), rows


def state() -> object:
    """Return the content of both sides, without names, times and numbers that differ between runs."""
    parent, clone = (Lakehouse(MemoryStorage(root)) for root in ROOTS.values())
    clones = [(info.name, info.state, info.cloned_version) for info in operations.list_clones(parent)]
    try:
        return content(parent), clones, content(clone)
    except LakehouseNotFoundError:
        return content(parent), clones, None


def assert_converges(operation: Operation, lake: Lakehouse, expected: object, context: object, run: Run) -> None:
    report = operations.verify(lake)
    assert report.is_clean, (context, report.findings)
    try:
        operation.run(lake)
    except (ExportExistsError, ExportNotFoundError):  # the operation had taken effect before the fault
        assert run.error is not None, context
    assert state() == expected, context
    for root in ROOTS.values():
        lake = Lakehouse(MemoryStorage(root))
        try:
            operations.repair_hint(lake)
        except LakehouseNotFoundError:
            continue
        findings = operations.verify(lake).findings
        assert [finding for finding in findings if finding.code != "orphans"] == [], context


def check_all_requests(
    restore: Callable[[Operation], Lakehouse],
    operation: Operation,
    side: str,
    fault_at: Callable[[Request], Fault | None],
) -> None:
    lake = restore(operation)
    requests, expected = run_with(operation, side, []).requests, state()
    assert len(requests) > 3
    converged: set[Effects] = set()
    for request in requests:
        fault = fault_at(request)
        if fault is None:
            continue
        lake = restore(operation)
        run = run_with(operation, side, [fault])
        if run.error is not None and run.effects in converged:
            continue
        if run.error is None:
            assert state() == expected, request
            continue
        if isinstance(run.error, StorageError):
            assert run.error.path is not None, "a typed error with the path of the file is a valid outcome"
        assert_converges(operation, lake, expected, request, run)
        converged.add(run.effects)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.soak), "after"])
@each_side
@each_operation
def test_clone_killed_at_every_request(
    restore: Callable[[Operation], Lakehouse], operation: Operation, side: str, moment: Moment
) -> None:
    def fault_at(request: Request) -> Fault | None:
        if moment == "after" and request.kind in ("read", "stat", "list"):
            return None
        return fail(request.number, DeathError, moment)  # type: ignore[arg-type]

    check_all_requests(restore, operation, side, fault_at)


@pytest.mark.timeout(600)
@each_side
@each_operation
def test_clone_with_lost_responses(restore: Callable[[Operation], Lakehouse], operation: Operation, side: str) -> None:
    def fault_at(request: Request) -> Fault | None:
        return None if request.kind in ("read", "stat", "list") else lose_response(request.number)

    check_all_requests(restore, operation, side, fault_at)


#: Operations with many requests.
LONG_OPERATIONS = ("clone-namespace", "promote", "refresh")


@pytest.mark.soak
@pytest.mark.timeout(600)
@each_side
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(
            operation_case,
            id=operation_case.name,
            marks=[pytest.mark.soak] if operation_case.name in LONG_OPERATIONS else [],
        )
        for operation_case in OPERATIONS
    ],
)
def test_clone_with_rejected_requests(
    restore: Callable[[Operation], Lakehouse], operation: Operation, side: str
) -> None:
    check_all_requests(restore, operation, side, lambda request: fail(request.number, StoragePermissionError))
