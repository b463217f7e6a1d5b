"""Trims, registrations and compactions of tables, interrupted at every request by a kill, an error or a lost response.

Appends are killed at each file that they write. After each interruption, all versions verify clean and contain their
rows. A repetition of the operation ends in the same state as an uninterrupted run.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.clock import ClockStorage
from tests.crash.test_maintenance_crash import DeathError
from tests.faults import Fault, FaultyStorage, Moment, Request, fail, kill, lose_response
from tests.iceberg.threaded import ThreadedStorage
from tests.processes import fork
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ObjectExistsError, StorageError, StorageFullError, TrinityLakeError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.storage import LocalStorage, MemoryStorage, Storage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://table-crash/"
OTHER_ROOT = "memory://table-crash-other/"
#: The external root that the operator allows, for tables that were registered from it.
ALLOWED = {"allowed_roots": OTHER_ROOT}
HOUR_MS = 3_600_000
#: With a larger minimum number of versions, the version of the trim itself would replace a kept version.
POLICY = RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
State = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """An operation to interrupt, and the error of its repetition after it has taken effect."""

    name: str
    run: Callable[[Lakehouse], Any]
    error_when_done: type[Exception] | None = None


def register_other(lake: Lakehouse) -> None:
    operations.register_catalog(lake, catalog_at(Lakehouse(MemoryStorage(OTHER_ROOT))))


def register_table(lake: Lakehouse) -> None:
    table = Lakehouse(MemoryStorage(OTHER_ROOT)).snapshot().table("other", "t")
    operations.register_table(lake, "ns", "ext", OTHER_ROOT + table.format_properties["metadata_location"])


OPERATIONS = [
    Operation("trim", lambda lake: operations.plan_trim_tables(lake, POLICY).execute()),
    Operation("register", register_table, error_when_done=ObjectExistsError),
    Operation("register_catalog", register_other),
    Operation(
        "compact_tables",
        lambda lake: operations.plan_compact_tables(lake, ["ns.small"], min_input_files=2).execute(run_id="r"),
    ),
]


def fill(lake: Lakehouse, namespace: str) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace(namespace)
    for name in ("t", "u"):
        table = catalog.create_table((namespace, name), pa.schema([("id", pa.int64())]))
        table.append(pa.table({"id": [1]}))
        if lake.root == ROOT:
            table.append(pa.table({"id": [2]}))
            table.overwrite(pa.table({"id": [3]}))
    if lake.root == ROOT:
        small = catalog.create_table((namespace, "small"), pa.schema([("id", pa.int64())]))
        for number in range(2):
            small.append(pa.table({"id": [number]}))


@pytest.fixture(scope="module")
def base() -> Iterator[dict[str, bytes]]:
    """The files of a lakehouse with three tables, an export, and several snapshots. A second lakehouse also exists."""
    storage = MemoryStorage(ROOT)
    lake = Lakehouse.create(ROOT, storage=storage)
    fill(lake, "ns")
    operations.plan_export(lake, "kept", version=3).execute()
    fill(Lakehouse.create(OTHER_ROOT, storage=MemoryStorage(OTHER_ROOT)), "other")
    files = {info.path: storage.read(info.path) for info in storage.list()}
    drop_memory_root(ROOT)
    yield files
    drop_memory_root(OTHER_ROOT)


@pytest.fixture
def restore(base: dict[str, bytes]) -> Iterator[Callable[[], Storage]]:
    """A function that restores the storage to the state before the operation, with a clock one hour later."""

    def restore_base() -> Storage:
        drop_memory_root(ROOT)
        storage = MemoryStorage(ROOT)
        for path, data in base.items():
            storage.create(path, data)
        return ClockStorage(storage, storage.now_ms() + HOUR_MS)

    yield restore_base
    drop_memory_root(ROOT)


def state(lake: Lakehouse) -> State:
    """Return the type, rows and number of snapshots of each table, without names that differ between runs."""
    snapshot, catalog = lake.snapshot(), catalog_at(lake)
    tables = {}
    for namespace in snapshot.namespaces():
        for name in snapshot.tables(namespace):
            table = catalog.load_table((namespace, name))
            rows = table.scan().to_arrow()["id"].to_pylist()
            tables[f"{namespace}.{name}"] = (
                snapshot.table(namespace, name).table_type,
                rows,
                len(table.snapshots()),
            )
    return tables


def run_uninterrupted(operation: Operation, storage: Storage) -> tuple[tuple[Request, ...], State]:
    recorder = FaultyStorage(storage, concurrency=1)
    operation.run(Lakehouse(recorder))
    tables = state(Lakehouse(storage, ALLOWED))
    n_snapshots = {name: number for name, (_, _, number) in tables.items()}
    assert operation.name != "trim" or n_snapshots == {"ns.t": 2, "ns.u": 1, "ns.small": 1}
    return recorder.log, tables


def assert_converges(
    operation: Operation, storage: Storage, base: dict[str, bytes], expected: State, context: object
) -> None:
    lake = Lakehouse.open(ROOT, storage=storage)
    assert all(storage.read(path) == data for path, data in base.items() if path.startswith("tables/")), context
    assert operations.verify(lake).is_clean, context
    assert catalog_at(lake, "kept").load_table("ns.t").scan().to_arrow()["id"].to_pylist() == [1]
    try:
        operation.run(Lakehouse(storage))
    except TrinityLakeError as error:
        assert operation.error_when_done is not None, (context, error)
        assert isinstance(error, operation.error_when_done), (context, error)
    assert state(Lakehouse(storage, ALLOWED)) == expected, context
    operations.repair_hint(lake)
    assert operations.verify(lake).findings == (), context
    version = lake.latest_version()
    if operation.error_when_done is None:
        operation.run(Lakehouse(storage))
    assert lake.latest_version() == version, "a second run does nothing"


class Convergence:
    """Asserts that the state after a fault converges, once for all faults after the same effects."""

    def __init__(self, operation: Operation, base: dict[str, bytes], expected: State):
        self._operation = operation
        self._base = base
        self._expected = expected
        self._converged: set[object] = set()

    def check(self, faulty: FaultyStorage, error: BaseException | None, context: object) -> None:
        if error is None or faulty.effects not in self._converged:
            assert_converges(self._operation, faulty.inner, self._base, self._expected, context)
        if error is not None:
            self._converged.add(faulty.effects)


def run_with(operation: Operation, storage: Storage, fault: Fault) -> tuple[FaultyStorage, BaseException | None]:
    faulty = FaultyStorage(storage, [fault], concurrency=1)
    try:
        operation.run(Lakehouse(faulty))
    except (DeathError, StorageError) as error:
        return faulty, error
    return faulty, None


# The state before a request equals the state after the previous write, so only the soak checks it.
@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.soak), "after"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_table_operation_killed_at_every_request(
    base: dict[str, bytes], restore: Callable[[], Storage], operation: Operation, moment: Moment
) -> None:
    requests, expected = run_uninterrupted(operation, restore())
    assert {"read", "create", "write"} <= {request.kind for request in requests}
    convergence = Convergence(operation, base, expected)
    # A kill after a read, which has no effect, equals a kill before the next request.
    for request in requests:
        if moment == "after" and request.kind in ("read", "stat", "list"):
            continue
        fault = fail(request.number, DeathError, moment)  # type: ignore[arg-type]
        faulty, error = run_with(operation, restore(), fault)
        assert isinstance(error, DeathError)
        convergence.check(faulty, error, (moment, request))


@pytest.mark.parametrize("fault", [pytest.param("error", marks=pytest.mark.soak), "lost response"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_table_operation_with_failures_and_lost_responses(
    base: dict[str, bytes], restore: Callable[[], Storage], operation: Operation, fault: str
) -> None:
    requests, expected = run_uninterrupted(operation, restore())
    convergence, n_failures = Convergence(operation, base, expected), 0
    for request in requests:
        if fault == "lost response" and request.kind not in ("create", "write", "delete"):
            continue
        number = request.number
        injected = fail(number, StorageFullError) if fault == "error" else lose_response(number)
        faulty, error = run_with(operation, restore(), injected)
        if isinstance(error, StorageError):
            n_failures += 1
            assert error.path is not None, "a typed error with the path of the file is a valid outcome"
        convergence.check(faulty, error, (fault, request))
    assert n_failures or fault == "lost response"


#: Parts of the paths that an append writes: three files in parallel, then two that refer to them, then the root.
APPENDED_FILES = (".parquet", "-m0.avro", "snap-", ".metadata.json", "-table-", "_101")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lakehouse at version 4, with a table of one row."""
    folder = tmp_path_factory.mktemp("append") / "lake"
    catalog = catalog_at(Lakehouse.create(str(folder), {"fsync": "false"}))
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": [1]}))
    table.transaction().set_properties(a="1").commit_transaction()
    assert Lakehouse.open(str(folder)).latest_version() == 4
    return folder


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("path_part", APPENDED_FILES)
def test_killed_append_is_complete_or_absent(folder: Path, tmp_path: Path, path_part: str, moment: Moment) -> None:
    shutil.copytree(folder, tmp_path / "lake")
    threaded = ThreadedStorage(LocalStorage(f"file://{tmp_path}/lake/"))
    kind = "write" if path_part == ".parquet" else "create"

    def append(report: Callable[[str], None]) -> None:
        storage = FaultyStorage(threaded, [kill(1, moment, kind=kind, path_part=path_part)])
        catalog_at(Lakehouse(storage)).load_table("ns.t").append(pa.table({"id": [2]}))
        report("acknowledged")

    assert fork(append).finish() == (-signal.SIGKILL, [])
    lake = Lakehouse.open(str(tmp_path / "lake"))
    was_committed = (path_part, moment) == ("_101", "after")
    assert lake.latest_version() == 4 + was_committed
    rows = [1, 2] if was_committed else [1]
    assert sorted(catalog_at(lake).load_table("ns.t").scan().to_arrow()["id"].to_pylist()) == rows
    assert operations.verify(lake).is_clean
    catalog_at(lake).load_table("ns.t").append(pa.table({"id": [3]}))
    assert sorted(catalog_at(lake).load_table("ns.t").scan().to_arrow()["id"].to_pylist()) == [*rows, 3]
