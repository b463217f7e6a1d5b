"""Test deletions in tasks: they stop when their fence becomes invalid, and send each delete request once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.clock import ClockStorage
from tests.lakes import listed, local_storage
from tests.module_time import replace_time_functions
from trinitylake_ops.errors import MaintenanceBlockedError, StorageError, TransientError
from trinitylake_ops.format.file_names import lease_path, root_path
from trinitylake_ops.operations.executor import DeletionFence, Guard
from trinitylake_ops.spark import executor as executor_module
from trinitylake_ops.spark.executor import SparkExecutor, batch_size
from trinitylake_ops.spark.executor_tasks import FRESH_MS, DeletesDone, FencedDeletes, delete_parts
from trinitylake_ops.storage import FileInfo, RetryStorage, Storage, StorageWrapper

NOW_MS = 1_000_000


@pytest.fixture
def clock(tmp_path: Path) -> ClockStorage:
    storage = ClockStorage(local_storage(tmp_path), NOW_MS)
    storage.create(lease_path(3), b"")
    storage.create(root_path(7), b"")
    return storage


def deletion_fence(storage: Storage, guard: Guard | None = None) -> DeletionFence:
    return DeletionFence(storage, lease=3, until_ms=NOW_MS + 60_000, next_root=root_path(8), guard=guard)


def fenced_deletes(storage: Storage) -> FencedDeletes:
    return FencedDeletes(storage, deletion_fence(storage), checked_ms=NOW_MS, until_ms=NOW_MS + 30_000)


def test_fence_is_invalid_after_deadline(clock: ClockStorage) -> None:
    assert fenced_deletes(clock).holds()
    clock.time_ms = NOW_MS + 29_999
    assert fenced_deletes(clock).holds()
    clock.time_ms = NOW_MS + 30_000
    assert not fenced_deletes(clock).holds()


def test_fence_is_invalid_after_newer_lease(clock: ClockStorage) -> None:
    clock.create(lease_path(4), b"")
    assert not fenced_deletes(clock).holds()


def test_fence_is_invalid_after_unchecked_version(clock: ClockStorage) -> None:
    clock.create(root_path(8), b"")
    clock.time_ms = NOW_MS + FRESH_MS
    assert fenced_deletes(clock).holds(), "the driver has just checked the version, so each round makes progress"
    clock.time_ms += 1
    assert not fenced_deletes(clock).holds()


class FailingStorage(StorageWrapper):
    """Fails requests of one kind with a transient error."""

    def __init__(self, inner: Storage, failing_request: str):
        super().__init__(inner)
        self.failing_request = failing_request

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        if self.failing_request == "list":
            raise TransientError("not now")
        return self.inner.list(prefix)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        with open(Path(self.root.removeprefix("file://"), "sent"), "a") as log:
            log.write("x")
        if self.failing_request == "delete":
            raise TransientError("not now")
        return self.inner.delete_batch(paths)


def test_unreadable_fence_is_invalid(clock: ClockStorage) -> None:
    assert not fenced_deletes(FailingStorage(clock, "list")).holds()


@dataclass
class StopFileGuard:
    """Forbids deletes while the file ``stop`` exists."""

    storage: Storage

    def check(self) -> None:
        if self.storage.exists("stop"):
            raise MaintenanceBlockedError("stopped")


def test_deletes_of_external_files_use_clock_and_leases_of_lakehouse(clock: ClockStorage, tmp_path: Path) -> None:
    external = ClockStorage(local_storage(tmp_path / "external"), 5 * NOW_MS)
    external.create(lease_path(9), b"")
    external.create(root_path(8), b"")
    deletes = FencedDeletes(
        external, deletion_fence(clock, StopFileGuard(external)), checked_ms=NOW_MS, until_ms=NOW_MS + 30_000
    )
    assert deletes.holds()
    assert deletes.storages == [external, clock]
    external.create("stop", b"")
    assert not deletes.holds()
    external.delete("stop")
    assert deletes.holds()
    clock.create(lease_path(4), b"")
    assert not deletes.holds()


class SlowDeleteStorage(ClockStorage):
    """A storage on which each delete request takes ten seconds."""

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        self.time_ms += 10_000
        return super().delete_batch(paths)


def delete_in_task(storage: Storage, paths: Sequence[str]) -> DeletesDone:
    (row,) = delete_parts(pickle.dumps(fenced_deletes(storage)), iter([pickle.dumps(list(paths))]))
    done: DeletesDone = pickle.loads(row)
    return done


def test_task_stops_when_fence_becomes_invalid(clock: ClockStorage) -> None:
    storage = SlowDeleteStorage(clock.inner, NOW_MS)
    storage.concurrency, storage.delete_batch_size = 1, 2
    paths = [str(number) for number in range(10)]
    for path in paths:
        storage.create(path, b"")
    done = delete_in_task(storage, paths)
    assert (done.failures, done.held_back, done.is_repeated) == ({}, tuple(paths[6:]), False)
    assert listed(clock) & set(paths) == set(paths[6:])


def test_task_sends_each_request_once(clock: ClockStorage, tmp_path: Path) -> None:
    clock.create("a", b"")
    done = delete_in_task(RetryStorage(FailingStorage(clock, "delete"), base_delay_seconds=0), ["a"])
    assert isinstance(done.failures["a"], TransientError)
    assert (tmp_path / "sent").read_text() == "x"


def test_interrupts_do_not_end_wait_for_lost_task(
    spark: SparkSession, clock: ClockStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletes of the task may still be in progress, so the lease must not be released."""
    now_s, sleeps = 0.0, []

    def interrupt(*_arguments: object) -> list[bytes]:
        raise KeyboardInterrupt("first")

    def sleep(seconds: float) -> None:
        nonlocal now_s
        sleeps.append(seconds)
        if len(sleeps) < 3:
            now_s += 1
            raise KeyboardInterrupt("again")
        now_s += seconds

    monkeypatch.setattr(executor_module, "run_in_tasks", interrupt)
    replace_time_functions(monkeypatch, executor_module, monotonic=lambda: now_s, sleep=sleep)
    with pytest.raises(KeyboardInterrupt):
        SparkExecutor(spark).delete(clock, ["a"], deletion_fence(clock))
    assert sleeps == [40, 39, 38]


@pytest.mark.parametrize(
    ("n_files", "max_size", "slots", "n_tasks", "size"),
    [
        # Two batches for each task. With 512 files per batch, five tasks would get two batches and the others one.
        (10_295, 512, 4, 16, 322),
        (100, 32, 4, 16, 25),
        (17, 512, 4, 16, 5),
        (33, 8, 4, 4, 5),
        (3_000_000, 1_024, 2, 8, 1_022),
        (1, 64, 1, 4, 1),
    ],
)
def test_tasks_have_equal_numbers_of_batches(n_files: int, max_size: int, slots: int, n_tasks: int, size: int) -> None:
    assert batch_size(n_files, max_size, slots, n_tasks) == size
