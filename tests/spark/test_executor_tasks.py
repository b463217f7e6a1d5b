"""What tasks are given, and do by themselves: they stop where a fence no longer holds, and send each delete once."""

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


def fence_by(storage: Storage, guard: Guard | None = None) -> DeletionFence:
    return DeletionFence(storage, lease=3, until_ms=NOW_MS + 60_000, next_root=root_path(8), guard=guard)


def fenced(storage: Storage) -> FencedDeletes:
    return FencedDeletes(storage, fence_by(storage), checked_ms=NOW_MS, until_ms=NOW_MS + 30_000)


def test_a_fence_holds_until_its_time_is_over(clock: ClockStorage) -> None:
    assert fenced(clock).holds()
    clock.time_ms = NOW_MS + 29_999
    assert fenced(clock).holds()
    clock.time_ms = NOW_MS + 30_000
    assert not fenced(clock).holds()


def test_a_fence_ends_with_a_larger_lease(clock: ClockStorage) -> None:
    clock.create(lease_path(4), b"")
    assert not fenced(clock).holds()


def test_a_fence_ends_with_a_version_that_nobody_looked_at(clock: ClockStorage) -> None:
    clock.create(root_path(8), b"")
    clock.time_ms = NOW_MS + FRESH_MS
    assert fenced(clock).holds(), "the driver has just looked: each round gets on"
    clock.time_ms += 1
    assert not fenced(clock).holds()


class Fails(StorageWrapper):
    """Fails what it is told to in passing."""

    def __init__(self, inner: Storage, what: str):
        super().__init__(inner)
        self.what = what

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        if self.what == "list":
            raise TransientError("not now")
        return self.inner.list(prefix)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        with open(Path(self.root.removeprefix("file://"), "sent"), "a") as sent:
            sent.write("x")
        if self.what == "delete":
            raise TransientError("not now")
        return self.inner.delete_batch(paths)


def test_a_fence_that_cannot_be_seen_does_not_hold(clock: ClockStorage) -> None:
    assert not fenced(Fails(clock, "list")).holds()


@dataclass
class Forbids:
    """Forbids deletes once there is a file on its storage."""

    storage: Storage

    def check(self) -> None:
        if self.storage.exists("stop"):
            raise MaintenanceBlockedError("stopped")


def test_files_elsewhere_go_by_the_clock_and_the_leases_of_the_lakehouse(clock: ClockStorage, tmp_path: Path) -> None:
    elsewhere = ClockStorage(local_storage(tmp_path / "elsewhere"), 5 * NOW_MS)
    elsewhere.create(lease_path(9), b"")
    elsewhere.create(root_path(8), b"")
    deletes = FencedDeletes(elsewhere, fence_by(clock, Forbids(elsewhere)), checked_ms=NOW_MS, until_ms=NOW_MS + 30_000)
    assert deletes.holds()
    assert deletes.storages == [elsewhere, clock]
    elsewhere.create("stop", b"")
    assert not deletes.holds()
    elsewhere.delete("stop")
    assert deletes.holds()
    clock.create(lease_path(4), b"")
    assert not deletes.holds()


class Late(ClockStorage):
    """Takes ten seconds for each delete."""

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        self.time_ms += 10_000
        return super().delete_batch(paths)


def deleted(storage: Storage, paths: Sequence[str]) -> DeletesDone:
    (row,) = delete_parts(pickle.dumps(fenced(storage)), iter([pickle.dumps(list(paths))]))
    done: DeletesDone = pickle.loads(row)
    return done


def test_a_task_stops_in_the_middle(clock: ClockStorage) -> None:
    storage = Late(clock.inner, NOW_MS)
    storage.concurrency, storage.delete_batch_size = 1, 2
    paths = [f"{number}" for number in range(10)]
    for path in paths:
        storage.create(path, b"")
    done = deleted(storage, paths)
    assert (done.failures, done.held_back, done.is_repeated) == ({}, tuple(paths[6:]), False)
    assert listed(clock) & set(paths) == set(paths[6:])


def test_a_task_sends_each_request_once(clock: ClockStorage, tmp_path: Path) -> None:
    clock.create("a", b"")
    done = deleted(RetryStorage(Fails(clock, "delete"), base_delay_seconds=0), ["a"])
    assert isinstance(done.failures["a"], TransientError)
    assert (tmp_path / "sent").read_text() == "x"


def test_interrupts_do_not_end_the_wait_for_a_lost_task(
    spark: SparkSession, clock: ClockStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deletes may still be under way, so the lease must not be given back."""
    now_s, slept = 0.0, []

    def interrupted(*_arguments: object) -> list[bytes]:
        raise KeyboardInterrupt("first")

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept.append(seconds)
        if len(slept) < 3:
            now_s += 1
            raise KeyboardInterrupt("again")
        now_s += seconds

    monkeypatch.setattr(executor_module, "run_in_tasks", interrupted)
    replace_time_functions(monkeypatch, executor_module, monotonic=lambda: now_s, sleep=sleep)
    with pytest.raises(KeyboardInterrupt):
        SparkExecutor(spark).delete(clock, ["a"], fence_by(clock))
    assert slept == [40, 39, 38]


@pytest.mark.parametrize(
    ("n_things", "most", "slots", "n_tasks", "size"),
    [
        (10_295, 512, 4, 16, 322),  # two for each task, where 512 would be two for five of them, and one for the others
        (100, 32, 4, 16, 25),
        (17, 512, 4, 16, 5),
        (33, 8, 4, 4, 5),
        (3_000_000, 1_024, 2, 8, 1_022),
        (1, 64, 1, 4, 1),
    ],
)
def test_all_tasks_have_as_many_batches(n_things: int, most: int, slots: int, n_tasks: int, size: int) -> None:
    assert batch_size(n_things, most, slots, n_tasks) == size
