"""The meter counts requests exactly, at every position in a stack of wrappers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import FaultyStorage, fail, lose_response
from tests.processes import fork
from trinitylake_ops.errors import AmbiguousWriteError, FileExistsAlreadyError, TransientError
from trinitylake_ops.storage import (
    MemoryStorage,
    MeteredStorage,
    RequestCounts,
    RetryStorage,
    Storage,
    StorageWrapper,
    drop_memory_root,
)
from trinitylake_ops.storage.contract.suite import run_together

ROOT = "memory://meter/"


@pytest.fixture
def memory() -> Iterator[MemoryStorage]:
    drop_memory_root(ROOT)
    yield MemoryStorage(ROOT)
    drop_memory_root(ROOT)


class ParallelStorage(StorageWrapper):
    """A storage that sends requests in parallel threads."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.concurrency = 8


def test_each_method_counts_its_requests(memory: MemoryStorage) -> None:
    meter = MeteredStorage(memory)
    meter.create("a", b"12345")
    meter.write("a", b"123")
    assert meter.read("a") == b"123"
    assert meter.read("a", offset=1, length=1) == b"2"
    meter.stat("a")
    meter.exists("b")
    list(meter.list())
    meter.delete("a")
    meter.delete("a")
    meter.now_ms()
    expected = {"create": 1, "write": 1, "read": 2, "stat": 2, "list": 1, "delete": 2}
    assert meter.snapshot() == RequestCounts(expected, rounds=9, bytes_read=4, bytes_written=8)
    assert meter.snapshot().total == 9


def test_failed_requests_count_but_write_no_bytes(memory: MemoryStorage) -> None:
    meter = MeteredStorage(FaultyStorage(memory, [lose_response(2)]))
    meter.create("a", b"12345")
    with pytest.raises(AmbiguousWriteError):
        meter.create("b", b"123")
    with pytest.raises(FileExistsAlreadyError):
        meter.create("a", b"12")
    assert meter.snapshot() == RequestCounts({"create": 3}, rounds=3, bytes_read=0, bytes_written=5)


@pytest.mark.parametrize("n_files", [1, 2, 30])
@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("order", ["meter outside", "meter inside", "two meters"])
def test_many_methods_are_one_round_trip_in_any_stacking_order(
    memory: MemoryStorage, n_files: int, is_parallel: bool, order: str
) -> None:
    base = ParallelStorage(memory) if is_parallel else memory
    meter = MeteredStorage(base)
    storage: Storage = RetryStorage(meter)
    meters = [meter]
    if order == "meter outside":
        storage = meter = MeteredStorage(RetryStorage(base))
        meters = [meter]
    elif order == "two meters":
        storage = outer = MeteredStorage(storage)
        meters.append(outer)
    files = {str(number): b"123" for number in range(n_files)}
    storage.create_many(files)
    storage.read_many(list(files))
    storage.read_available(list(files))
    storage.delete_many(list(files))
    expected = {"create": n_files, "read": 2 * n_files, "delete": n_files}
    for each_meter in meters:
        assert each_meter.snapshot() == RequestCounts(expected, 4, bytes_read=6 * n_files, bytes_written=3 * n_files)


def test_many_methods_without_files_send_nothing(memory: MemoryStorage) -> None:
    meter = MeteredStorage(memory)
    meter.read_many([])
    meter.create_many({})
    meter.delete_many([])
    assert meter.snapshot() == RequestCounts()


def test_meter_counts_attempts_inside_a_retry_and_files_outside(memory: MemoryStorage) -> None:
    def faulty() -> FaultyStorage:
        return FaultyStorage(memory, [fail(1, TransientError, times=2)])

    inside = MeteredStorage(faulty())
    RetryStorage(inside, sleep=lambda seconds: None).write("a", b"123")
    assert inside.snapshot() == RequestCounts({"write": 3}, rounds=3, bytes_read=0, bytes_written=3)
    outside = MeteredStorage(RetryStorage(faulty(), sleep=lambda seconds: None))
    outside.write("a", b"123")
    assert outside.snapshot() == RequestCounts({"write": 1}, rounds=1, bytes_read=0, bytes_written=3)


def test_each_operation_reaches_each_wrapper_once(memory: MemoryStorage) -> None:
    inner = FaultyStorage(memory)
    outer = FaultyStorage(MeteredStorage(RetryStorage(inner)))
    outer.create_many({"a": b"x", "b": b"x"})
    outer.exists("a")
    list(outer.list())
    outer.delete_many(["a", "b"])
    assert inner.log == outer.log
    assert [request.kind for request in inner.log] == ["create", "create", "stat", "list", "delete", "delete"]


def test_counts_can_be_measured_subtracted_and_reset(memory: MemoryStorage) -> None:
    meter = MeteredStorage(memory)
    meter.create("a", b"12")
    with meter.measure() as measured:
        meter.read("a")
        assert measured.counts.total == 1
        meter.stat("a")
    meter.read("a")
    assert measured.counts == RequestCounts({"read": 1, "stat": 1}, rounds=2, bytes_read=2, bytes_written=0)
    with pytest.raises(FileExistsAlreadyError), meter.measure() as failed_measurement:
        meter.create("a", b"")
    assert failed_measurement.counts == RequestCounts({"create": 1}, rounds=1)
    counts_before = meter.snapshot()
    meter.delete("a")
    assert meter.snapshot() - counts_before == RequestCounts({"delete": 1}, rounds=1)
    meter.reset()
    assert meter.snapshot() == RequestCounts()


@pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning"
)  # from Python 3.12 on, about forks of multi-threaded processes
def test_forked_child_starts_with_a_free_lock(memory: MemoryStorage) -> None:
    meter = MeteredStorage(memory)
    memory.write("a", b"12")
    with meter._lock:
        child = fork(lambda report: report(meter.read("a").decode()), time_limit_seconds=20)
        assert child.finish() == (0, ["12"])


def test_many_threads_lose_no_count(memory: MemoryStorage) -> None:
    meter = MeteredStorage(ParallelStorage(memory))
    memory.write("a", b"12")

    def work() -> None:
        for _ in range(50):
            meter.read("a")
            meter.read_many(["a", "a", "a"])

    assert run_together([work] * 8) == [None] * 8
    assert meter.snapshot() == RequestCounts({"read": 1600}, rounds=800, bytes_read=3200, bytes_written=0)
