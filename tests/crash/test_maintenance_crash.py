"""Operations killed at every storage request, before and after its effect, and writes with lost responses.

After each kill the lakehouse verifies clean through new caches, an export is absent, resumable or complete, and a
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
    """An operation to interrupt, and the error that its repetition may raise if it was already done."""

    name: str
    run: Callable[[Lakehouse], Any]
    done_when: type[Exception] | None = None


def export(lake: Lakehouse, name: str) -> None:
    operations.plan_export(lake, name, version=TARGET).execute()


OPERATIONS = [
    Operation("rollback", lambda lake: operations.rollback(lake, TARGET)),
    Operation("subset", lambda lake: operations.rollback(lake, TARGET, ["a"], ["b.t1"])),
    Operation("drop", lambda lake: operations.rollback(lake, 0, ["a"]) if lake.snapshot().has_namespace("a") else None),
    # If the name is taken, the previous run completed.
    Operation("export", lambda lake: export(lake, "new"), done_when=ConflictError),
    Operation("drop_export", lambda lake: operations.drop_export(lake, "old"), done_when=ExportNotFoundError),
    Operation("repair_hint", operations.repair_hint),
    Operation("compact", operations.compact),
]


@pytest.fixture(scope="module")
def base() -> dict[str, bytes]:
    """A lakehouse of several levels with an export and a stale hint."""
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
def restored(base: dict[str, bytes]) -> Iterator[Callable[[], MemoryStorage]]:
    """Provides a new copy of the storage from before the operation."""

    def restore() -> MemoryStorage:
        drop_memory_root(ROOT)
        storage = MemoryStorage(ROOT)
        for path, data in base.items():
            storage.create(path, data)
        return storage

    yield restore
    drop_memory_root(ROOT)


def state(lake: Lakehouse) -> State:
    """Return what an operation may change, without names and times that differ between runs."""
    latest = lake.snapshot()
    exports = {info.name: (info.state, info.version) for info in operations.list_exports(lake)}
    return {
        "entries": entries(lake),
        "exports": exports,
        "exported": {name: entries(lake, name) for name in latest.definition.exported_snapshots},
        "settings": latest.definition.properties,
        "hint": lake.storage.read(HINT_PATH) == str(lake.latest_version()).encode(),
    }


def uninterrupted(operation: Operation, storage: MemoryStorage) -> tuple[tuple[Request, ...], State]:
    counted = FaultyStorage(storage, concurrency=1)
    operation.run(Lakehouse(counted))
    return counted.log, state(Lakehouse(storage))


def assert_converges(operation: Operation, storage: MemoryStorage, expected: State, where: object) -> None:
    lake = Lakehouse.open(ROOT, storage=storage)
    report = operations.verify(lake)
    assert report.is_clean, (where, report.findings)
    new = {info.name: info.state for info in operations.list_exports(lake)}.get("new")
    assert new in (None, "copying", "complete")
    assert (new == "complete") == ("new" in lake.snapshot().definition.exported_snapshots)
    try:
        operation.run(Lakehouse(storage))
    except Exception as error:  # noqa: BLE001 - which one it may be, each operation says
        assert operation.done_when is not None, (where, error)
        assert isinstance(error, operation.done_when), (where, error)
    operations.repair_hint(lake)
    assert state(Lakehouse(storage)) == {**expected, "hint": True}, where
    assert operations.verify(lake).findings == (), where


@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.soak), "after"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_maintenance_killed_at_every_request(
    restored: Callable[[], MemoryStorage], operation: Operation, moment: Moment
) -> None:
    requests, expected = uninterrupted(operation, restored())
    assert {"read", "write"} <= {request.kind for request in requests}
    # A kill after a read, which has no effect, equals a kill before the next request.
    moments = [request for request in requests if moment == "before" or request.kind not in ("read", "stat", "list")]
    for request in moments:
        storage = restored()
        death = fail(request.number, DeathError, moment)  # type: ignore[arg-type]
        with pytest.raises(DeathError):
            operation.run(Lakehouse(FaultyStorage(storage, [death], concurrency=1)))
        assert_converges(operation, storage, expected, (moment, request))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_maintenance_with_lost_responses_to_all_writes(
    restored: Callable[[], MemoryStorage], operation: Operation
) -> None:
    requests, expected = uninterrupted(operation, restored())
    writes = [request for request in requests if request.kind in ("create", "write", "delete")]
    assert writes
    for request in writes:
        storage = restored()
        try:
            operation.run(Lakehouse(FaultyStorage(storage, [lose_response(request.number)], concurrency=1)))
        except StorageError as error:
            assert error.path is not None, "a typed error that names the file is an answer too"
        assert_converges(operation, storage, expected, request)
