"""Operations killed at every storage request, before and after its effect, and writes with lost responses.

After each kill, the lakehouse verifies clean through new caches, and the export is absent, resumable or complete. A
repetition of the operation ends in the same state as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults import DeathError, FaultyStorage, Moment, Request, fail, lose_response
from tests.lakes import entries, table
from tests.operations.changes import create, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ConflictError, ExportNotFoundError, StorageError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://maintenance-crash/"
TARGET = 1
State = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """An operation to interrupt, and the error of its repetition after it has taken effect."""

    name: str
    run: Callable[[Lakehouse], Any]
    error_when_done: type[Exception] | None = None


def export(lake: Lakehouse, name: str) -> None:
    operations.plan_export(lake, name, version=TARGET).execute()


OPERATIONS = [
    Operation("rollback", lambda lake: operations.rollback(lake, TARGET)),
    Operation("subset", lambda lake: operations.rollback(lake, TARGET, ["a"], ["b.t1"])),
    Operation("drop", lambda lake: operations.rollback(lake, 0, ["a"]) if lake.snapshot().has_namespace("a") else None),
    # If the name exists, the previous run was complete.
    Operation("export", lambda lake: export(lake, "new"), error_when_done=ConflictError),
    Operation("drop_export", lambda lake: operations.drop_export(lake, "old"), error_when_done=ExportNotFoundError),
    Operation("repair_hint", operations.repair_hint),
    Operation("compact", operations.compact),
]


@pytest.fixture(scope="module")
def base() -> dict[str, bytes]:
    """The files of a lakehouse with a tree of several levels, an export and a stale hint."""
    storage = MemoryStorage(ROOT)
    lake = Lakehouse.create(ROOT, storage=storage, order=3, **small_sizes(3))
    with lake.transaction(message="m" * 3_400) as txn:
        for namespace in ("a", "b"):
            txn.create_namespace(namespace)
            for number in range(4):
                txn.create_table(namespace, f"t{number}", table())
    with lake.transaction(message="m" * 3_400) as txn:
        for number in range(4):
            txn.alter_table("a", f"t{number}", table(changed="yes"))
            txn.alter_table("b", f"t{number}", table(changed="yes"))
    operations.plan_export(lake, "old").execute()
    create(lake, "c", "t")
    storage.write(HINT_PATH, b"1")
    files = {info.path: storage.read(info.path) for info in storage.list()}
    drop_memory_root(ROOT)
    return files


@pytest.fixture
def restore(base: dict[str, bytes]) -> Iterator[Callable[[], MemoryStorage]]:
    """A function that restores the storage to the state before the operation."""

    def restore_base() -> MemoryStorage:
        drop_memory_root(ROOT)
        storage = MemoryStorage(ROOT)
        for path, data in base.items():
            storage.create(path, data)
        return storage

    yield restore_base
    drop_memory_root(ROOT)


def state(lake: Lakehouse) -> State:
    """Return the state that an operation may change, without names and times that differ between runs."""
    latest = lake.snapshot()
    exports = {info.name: (info.state, info.version) for info in operations.list_exports(lake)}
    return {
        "entries": entries(lake),
        "exports": exports,
        "exported": {name: entries(lake, name) for name in latest.definition.exported_snapshots},
        "settings": latest.definition.properties,
        "hint": lake.storage.read(HINT_PATH) == str(lake.latest_version()).encode(),
    }


def run_uninterrupted(operation: Operation, storage: MemoryStorage) -> tuple[tuple[Request, ...], State]:
    recorder = FaultyStorage(storage, concurrency=1)
    operation.run(Lakehouse(recorder))
    return recorder.log, state(Lakehouse(storage))


def assert_converges(operation: Operation, storage: MemoryStorage, expected: State, context: object) -> None:
    lake = Lakehouse.open(ROOT, storage=storage)
    report = operations.verify(lake)
    assert report.is_clean, (context, report.findings)
    new = {info.name: info.state for info in operations.list_exports(lake)}.get("new")
    assert new in (None, "copying", "complete")
    assert (new == "complete") == ("new" in lake.snapshot().definition.exported_snapshots)
    try:
        operation.run(Lakehouse(storage))
    except Exception as error:  # noqa: BLE001 - each operation states the error that may occur
        assert operation.error_when_done is not None, (context, error)
        assert isinstance(error, operation.error_when_done), (context, error)
    operations.repair_hint(lake)
    assert state(Lakehouse(storage)) == {**expected, "hint": True}, context
    assert operations.verify(lake).findings == (), context


@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.soak), "after"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_maintenance_killed_at_every_request(
    restore: Callable[[], MemoryStorage], operation: Operation, moment: Moment
) -> None:
    requests, expected = run_uninterrupted(operation, restore())
    assert {"read", "write"} <= {request.kind for request in requests}
    # A kill after a read, which has no effect, equals a kill before the next request.
    interrupted = [
        request for request in requests if moment == "before" or request.kind not in ("read", "stat", "list")
    ]
    for request in interrupted:
        storage = restore()
        fault = fail(request.number, DeathError, moment)  # type: ignore[arg-type]
        with pytest.raises(DeathError):
            operation.run(Lakehouse(FaultyStorage(storage, [fault], concurrency=1)))
        assert_converges(operation, storage, expected, (moment, request))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_maintenance_with_lost_responses_to_all_writes(
    restore: Callable[[], MemoryStorage], operation: Operation
) -> None:
    requests, expected = run_uninterrupted(operation, restore())
    writes = [request for request in requests if request.kind in ("create", "write", "delete")]
    assert writes
    for request in writes:
        storage = restore()
        try:
            operation.run(Lakehouse(FaultyStorage(storage, [lose_response(request.number)], concurrency=1)))
        except StorageError as error:
            assert error.path is not None, "a typed error with the path of the file is a valid outcome"
        assert_converges(operation, storage, expected, request)
