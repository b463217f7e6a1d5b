"""A table change takes three round trips: its new files, the files that refer to them, and the root."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyiceberg.table import Table

from tests.clock import AgingStorage
from tests.faults import DeathError, Fault, FaultyStorage, fail, lose_response
from tests.iceberg.threaded import ThreadedStorage
from tests.lakes import check_lake, unreferenced_paths
from tests.processes import fork
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StorageFullError, StoragePermissionError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.io.output_file import MAX_PENDING_BYTES, PendingFiles
from trinitylake_ops.storage import LocalStorage, MemoryStorage, Storage, StorageWrapper

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py

pytestmark = pytest.mark.usefixtures("fixed_requests")

SCHEMA = pa.schema([("id", pa.int64())])
#: Parts of the names of the files that an append writes, in the order in which PyIceberg writes them.
CHANGE_FILES = (".parquet", "-m0.avro", "snap-")
#: Parts of the names of the files that a commit writes before the root.
COMMIT_FILES = (".metadata.json", "-table-")


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def ids_of(lake: Lakehouse) -> list[int]:
    return sorted(catalog_at(lake).load_table("ns.t").scan().to_arrow()["id"].to_pylist())


@pytest.fixture
def lake(lake: Lakehouse) -> Lakehouse:
    """A lakehouse with one table."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    return lake


@pytest.fixture
def storage(lake: Lakehouse) -> Storage:
    return lake.storage


def catalog_on(storage: Storage) -> TrinityLakeCatalog:
    return catalog_at(Lakehouse(storage))


def append_two(table: Table) -> None:
    table.append(rows(2))


class GroupBarrierStorage(StorageWrapper):
    """Forwards the requests of a group once all of them are in flight, and a root only if no request is in flight."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._barriers: dict[str, threading.Barrier] = {}
        self._lock = threading.Lock()
        self._n_sent = 0
        self.grouped_parts: list[str] = []

    def add_group(self, *groups: tuple[str, ...]) -> None:
        for group in groups:
            self._barriers |= dict.fromkeys(group, threading.Barrier(len(group)))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == HINT_PATH:
            self._wait_for_group(path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def create(self, path: str, data: bytes) -> None:
        self._send(path, lambda: super(GroupBarrierStorage, self).create(path, data))

    def write(self, path: str, data: bytes) -> None:
        self._send(path, lambda: super(GroupBarrierStorage, self).write(path, data))

    def write_best_effort(self, path: str, data: bytes) -> None:
        self.inner.write_best_effort(path, data)

    def _send(self, path: str, request: Callable[[], None]) -> None:
        if path.startswith("_") and path.endswith(".arrow"):
            assert self._n_sent == 0, "the root was sent while other requests were in flight"
        with self._lock:
            self._n_sent += 1
        self._wait_for_group(path)
        request()
        with self._lock:
            self._n_sent -= 1

    def _wait_for_group(self, path: str) -> None:
        for part, barrier in self._barriers.items():
            if part in path:
                barrier.wait(timeout=30)
                self.grouped_parts.append(part)


def test_independent_files_are_written_in_parallel(storage: Storage) -> None:
    barrier_storage = GroupBarrierStorage(ThreadedStorage(storage))
    table = catalog_on(barrier_storage).load_table("ns.t")
    append_two(table)
    barrier_storage.add_group((*CHANGE_FILES, HINT_PATH), COMMIT_FILES)
    append_two(table)
    assert sorted(barrier_storage.grouped_parts) == sorted((*CHANGE_FILES, HINT_PATH, *COMMIT_FILES))


def faulty(storage: Storage, *faults: Fault) -> TrinityLakeCatalog:
    return catalog_on(FaultyStorage(ThreadedStorage(storage), faults))


@pytest.mark.parametrize("error", [StorageFullError, StoragePermissionError])
@pytest.mark.parametrize("part", [*CHANGE_FILES, *COMMIT_FILES])
def test_failed_write_fails_change_and_leaves_no_files(
    lake: Lakehouse, storage: Storage, part: str, error: type[StorageFullError]
) -> None:
    before, version = {info.path for info in storage.list()}, lake.latest_version()
    table = faulty(
        storage, fail(1, error, kind="write" if part == ".parquet" else "create", path_part=part)
    ).load_table("ns.t")
    with pytest.raises(error) as caught:
        append_two(table)
    assert caught.value.path is not None and part in caught.value.path
    assert isinstance(caught.value, PermissionError) == (error is StoragePermissionError and part in CHANGE_FILES)
    assert {info.path for info in storage.list()} == before
    assert (lake.latest_version(), ids_of(lake)) == (version, [1])
    append_two(table)
    assert ids_of(lake) == [1, 2]


@pytest.mark.parametrize("part", ["-m0.avro", "-table-"])
def test_failed_change_is_not_committed_on_retry(lake: Lakehouse, storage: Storage, part: str) -> None:
    """The files of the change are deleted. Earlier versions of PyIceberg retried the commit."""
    table = faulty(storage, fail(1, StorageFullError, kind="create", path_part=part)).load_table("ns.t")
    txn = table.transaction()
    txn.append(rows(2))
    updates, requirements = txn._updates, txn._requirements
    with pytest.raises(StorageFullError):
        txn.commit_transaction()
    with pytest.raises(StorageFullError):
        txn._table._do_commit(updates, requirements)
    assert ids_of(lake) == [1]


@pytest.mark.parametrize("part", [*CHANGE_FILES[1:], *COMMIT_FILES, "_1"])
def test_lost_response_is_resolved(lake: Lakehouse, storage: Storage, part: str) -> None:
    append_two(faulty(storage, lose_response(1, kind="create", path_part=part)).load_table("ns.t"))
    assert ids_of(lake) == [1, 2]


@pytest.mark.parametrize("timing", ["before", "after"])
@pytest.mark.parametrize("part", [*CHANGE_FILES, *COMMIT_FILES])
def test_commit_stops_if_a_writer_thread_dies(lake: Lakehouse, storage: Storage, part: str, timing: str) -> None:
    """The process dies during this request. Other requests in flight may still succeed."""
    version = lake.latest_version()
    death = fail(1, DeathError, timing, kind="write" if part == ".parquet" else "create", path_part=part)  # type: ignore[arg-type]
    with pytest.raises(DeathError):
        append_two(faulty(storage, death).load_table("ns.t"))
    assert (lake.latest_version(), ids_of(lake)) == (version, [1])
    assert operations.verify(lake).is_clean
    append_two(catalog_at(lake).load_table("ns.t"))
    assert ids_of(lake) == [1, 2]
    check_lake(lake)


def test_lost_race_is_retried_with_same_data_files(lake: Lakehouse, storage: Storage) -> None:
    class RacingStorage(ThreadedStorage):
        """Appends in another catalog just before the root is created."""

        raced = False

        def create(self, path: str, data: bytes) -> None:
            if not self.raced and path.startswith("_") and path.endswith(".arrow"):
                self.raced = True
                catalog_at(lake).load_table("ns.t").append(rows(7))
            super().create(path, data)

    append_two(catalog_on(RacingStorage(storage)).load_table("ns.t"))
    assert ids_of(lake) == [1, 2, 7]
    assert unreferenced_paths(lake) == set()
    assert operations.verify(lake).findings == ()


def test_change_reads_its_pending_files(lake: Lakehouse, storage: Storage) -> None:
    is_released = threading.Event()

    class DelayedStorage(ThreadedStorage):
        """Delays all files of a change until the test has read them."""

        def create(self, path: str, data: bytes) -> None:
            if path.endswith(".avro"):
                assert is_released.wait(timeout=30)
            super().create(path, data)

        def write(self, path: str, data: bytes) -> None:
            if path.endswith(".parquet"):
                assert is_released.wait(timeout=30)
            super().write(path, data)

    table = catalog_on(DelayedStorage(storage)).load_table("ns.t")
    with table.transaction() as txn:
        txn.append(rows(2))
        assert sorted(txn._scan().to_arrow()["id"].to_pylist()) == [1, 2]
        is_released.set()
    assert ids_of(lake) == [1, 2]
    assert table.metadata_location == catalog_at(lake).load_table("ns.t").metadata_location


def test_age_of_pending_commit_is_that_of_its_oldest_file(lake: Lakehouse, storage: Storage) -> None:
    """The table was loaded long ago, and all files of the commit may be pending when their times are needed."""

    class SlowStorage(ThreadedStorage):
        def create(self, path: str, data: bytes) -> None:
            if path.endswith(".avro"):
                time.sleep(0.1)
            super().create(path, data)

    clock = AgingStorage(storage, storage.now_ms())
    table = catalog_on(SlowStorage(clock)).load_table("ns.t")
    clock.time_ms += lake.snapshot().definition.txn_ttl_millis + 1
    append_two(table)
    assert ids_of(lake) == [1, 2]


def test_table_writes_synchronously_after_its_change(lake: Lakehouse, storage: Storage) -> None:
    """This includes the table that PyIceberg returns from a commit."""
    table = catalog_on(ThreadedStorage(storage)).load_table("ns.t")
    txn = table.transaction()
    txn.append(rows(2))
    committed = txn.commit_transaction()
    for loaded in (table, committed):
        with loaded.io.new_output(f"{table.location()}/data/{id(loaded)}.parquet").create() as stream:
            stream.write(b"bytes")
        assert storage.exists(f"tables/{table.location().rpartition('/')[2]}/data/{id(loaded)}.parquet")
    committed.append(rows(3))
    assert (ids_of(lake), table.metadata) == ([1, 2, 3], committed.metadata)


# PendingFiles


@pytest.fixture
def pending(storage: Storage) -> PendingFiles:
    return PendingFiles(ThreadedStorage(storage))


def path_of(number: int) -> str:
    return f"tables/a/data/{number}.parquet"


def test_large_file_is_written_synchronously(storage: Storage, pending: PendingFiles) -> None:
    pending.create(path_of(0), bytes(MAX_PENDING_BYTES + 1))
    assert storage.exists(path_of(0))


class CountingStorage(ThreadedStorage):
    """Counts the bytes of concurrent creates."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.max_bytes = self._n_bytes = 0
        self._lock = threading.Lock()

    def create(self, path: str, data: bytes) -> None:
        with self._lock:
            self._n_bytes += len(data)
            self.max_bytes = max(self.max_bytes, self._n_bytes)
        super().create(path, data)
        with self._lock:
            self._n_bytes -= len(data)


def test_memory_of_pending_files_is_bounded(storage: Storage) -> None:
    storage, file_bytes = CountingStorage(storage), MAX_PENDING_BYTES // 4
    pending = PendingFiles(storage)
    for number in range(12):
        pending.create(path_of(number), bytes(file_bytes))
    pending.settle()
    assert 0 < storage.max_bytes <= MAX_PENDING_BYTES + file_bytes, "pending files and one synchronous write"
    assert sum(info.size_bytes for info in storage.list("tables/a/")) == 3 * MAX_PENDING_BYTES


def test_deleted_pending_file_does_not_reappear(storage: Storage, pending: PendingFiles) -> None:
    for number in range(50):
        pending.create(path_of(number), b"x")
        pending.delete(path_of(number))
    pending.settle()
    assert list(storage.list("tables/a/")) == []


def test_other_files_are_written_synchronously(storage: Storage, pending: PendingFiles) -> None:
    for path in ("tables/a/_owner.json", "tables/a/metadata/0.metadata.json", "other/a.parquet"):
        pending.create(path, b"x")
        assert storage.exists(path)
        storage.delete(path)


def test_stat_and_list_include_pending_files(pending: PendingFiles) -> None:
    pending.create(path_of(0), b"abc")
    assert pending.read(path_of(0), offset=1, length=1) == b"b"
    assert pending.stat(path_of(0)).size_bytes == 3
    pending.write(path_of(1), b"abcd")
    assert {info.path for info in pending.list("tables/a/")} == {path_of(0), path_of(1)}


def test_pickled_file_io_finds_pending_files(lake: Lakehouse, storage: Storage) -> None:
    table = catalog_on(ThreadedStorage(storage)).load_table("ns.t")
    txn = table.transaction()
    txn.append(rows(2))
    io = txn._table.io
    snapshot = txn.table_metadata.current_snapshot()
    assert snapshot is not None
    unpickled_io = pickle.loads(pickle.dumps(io))
    assert len(snapshot.manifests(unpickled_io)) == 2
    assert storage.exists(snapshot.manifest_list.removeprefix(lake.root))


def test_forked_child_writes_pending_files_of_parent(tmp_path: object) -> None:
    storage = LocalStorage(f"file://{tmp_path}/lake/")
    catalog = catalog_at(Lakehouse.create(storage.root, storage=storage))
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", SCHEMA)
    has_started, is_released = threading.Event(), threading.Event()

    class DelayedStorage(ThreadedStorage):
        """Delays the parent's file until the child has written it."""

        def write(self, path: str, data: bytes) -> None:
            if path.endswith(".parquet"):
                has_started.set()
                assert is_released.wait(timeout=30), "the write was not released"
            super().write(path, data)

    txn = catalog_on(DelayedStorage(storage)).load_table("ns.t").transaction()
    txn.append(rows(2))
    assert has_started.wait(timeout=30)

    def commit(report: Callable[[str], None]) -> None:
        is_released.set()
        txn.commit_transaction()
        report("committed")

    assert fork(commit).finish() == (0, ["committed"])
    is_released.set()
    assert ids_of(Lakehouse(storage)) == [2]


def test_memory_storage_uses_no_threads(lake: Lakehouse) -> None:
    assert not MemoryStorage("memory://any/").is_high_latency
    assert not LocalStorage("file:///any/", fsync=False).is_high_latency
    assert LocalStorage("file:///any/").is_high_latency
