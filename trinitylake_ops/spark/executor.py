"""An executor that runs operations on Spark: the same work as the local executor, in tasks (docs/spark/cluster.md).

The driver decides and commits. Tasks read, copy, check and delete, each with the threads of its storage.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from trinitylake_ops.errors import InvalidInputError, StorageError
from trinitylake_ops.operations.budget import NO_LIMITS, Spending
from trinitylake_ops.operations.executor import DeleteOutcome, DeletionFence, Listing, Weight, Work
from trinitylake_ops.spark.executor_tasks import BatchDone, DeletesDone, FencedDeletes, delete_parts, run_batches
from trinitylake_ops.spark.runtime.addresses import DEFAULT_MASTER
from trinitylake_ops.spark.runtime.connect import Slots
from trinitylake_ops.spark.runtime.task_jobs import run_in_tasks
from trinitylake_ops.spark.session import session_scope
from trinitylake_ops.storage import FileInfo, MeteredStorage, RequestCounts, Storage, StorageWrapper
from trinitylake_ops.storage.meter import PacedStorage

logger = logging.getLogger(__name__)

#: Tasks send no delete requests later than this after the driver has checked the fence, by the storage's clock.
ROUND_MS = 30_000
#: After this time, a request that a lost task sent has either taken effect or never will.
SETTLE_MS = 10_000

#: The driver itself processes up to this number of items, because a job takes longer than one or two round trips.
FEW = 16
#: The maximum number of items in a batch, by weight: one or two seconds of work, which is repeated if a task is lost.
_MAX_PER_BATCH = MappingProxyType(
    {
        Weight.ANSWER: 512,
        Weight.DEFINITION: 256,
        Weight.ROOT: 64,
        Weight.NODE: 32,
        Weight.TABLE: 16,
        Weight.FILE: 64,
        Weight.FOLDER: 16,
        Weight.INVENTORY: 1,
    }
)
_BATCHES_PER_SLOT = 16
_TASKS_PER_SLOT = 4
_DELETE_ROUNDS_PER_SLOT = 4

A = TypeVar("A")
T = TypeVar("T")


class SparkExecutor:
    """Runs work in the tasks of a local Spark session or of Spark Connect.

    Work raises InvalidInputError for an in-memory lakehouse of this process, and JobFailedError if Spark fails.

    Args:
        spark: The session.
        requests_per_second: The maximum request rate of all tasks together, including retries; None for no limit. Each
            task gets an equal share of the rate, and the number of concurrent tasks is limited accordingly. A listing
            counts as one request.

    Raises:
        InvalidInputError: If the rate is not a finite number above 0.
    """

    #: The window is unlimited: one job for all items is faster than several, and reads shared files only once.
    window = sys.maxsize

    def __init__(self, spark: SparkSession, *, requests_per_second: float | None = None):
        if requests_per_second is not None and not 0 < requests_per_second < math.inf:
            raise InvalidInputError(f"requests_per_second={requests_per_second!r} is not a finite number above 0")
        self._spark = spark
        self._slots = Slots(spark)
        self._rate = requests_per_second

    @property
    def slots(self) -> int:
        """The number of tasks that can run at a time."""
        return self._slots.count()

    def map(self, work: Work[A, T], items: Sequence[A]) -> Iterator[T]:
        """Yield the result of each item, in order.

        Args:
            work: The work.
            items: The items.

        Raises:
            JobFailedError: If Spark fails. Errors of the work are raised as well.
        """
        if not items:
            return
        if len(items) <= FEW and self._rate is None:
            yield from work(items)
            return
        slots = self.slots
        # With a rate limit, no more tasks may run than the rate has shares, even if slots are added.
        n_tasks = slots * _TASKS_PER_SLOT if self._rate is None else slots
        size = batch_size(len(items), _MAX_PER_BATCH[work.weight], slots, n_tasks)
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        pickled = self._pickle_work(work, work.storages, None if self._rate is None else self._rate / slots)
        for start in range(0, len(batches), slots * _BATCHES_PER_SLOT):
            wave = [pickle.dumps(list(batch)) for batch in batches[start : start + slots * _BATCHES_PER_SLOT]]
            for row in self._run(type(work).__name__, run_batches, pickled, wave, n_tasks):
                result: BatchDone = pickle.loads(row)
                _count(work.storages, result.requests)
                if result.error is not None:
                    raise result.error
                yield from result.results

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        """Yield the listed files, part by part. Raises JobFailedError, and the errors of the listing."""
        work, parts = listing.parts()
        for infos in self.map(work, parts):
            yield from infos

    def prefetch(self, read: Callable[[], None]) -> None:
        """Read immediately, because reading in many tasks is faster than reading in the driver later."""
        read()

    def limited(self, storage: Storage, spending: Spending) -> Storage:
        """Return the storage for tasks, unchanged.

        Args:
            storage: The storage.
            spending: The budget of the operation.

        Raises:
            InvalidInputError: If there is a budget, because tasks read everything ahead.
        """
        if spending.budget != NO_LIMITS:
            raise InvalidInputError(
                "limits of requests or seconds are supported by the local engine only, which can resume a run"
            )
        return storage

    def batches_between_checks(self, storage: Storage) -> int:
        """Return the number of requests that tasks send in a few rounds. Tasks check the fence before each round."""
        requests = storage.concurrency * self.slots * _DELETE_ROUNDS_PER_SLOT
        return requests if self._rate is None else max(1, min(requests, int(self._rate)))

    def delete(self, storage: Storage, paths: Sequence[str], fence: DeletionFence | None) -> DeleteOutcome:
        """Delete files in tasks. Each task checks the fence before each of its rounds.

        If a task is lost, this method waits, despite interrupts, until the task can send no more requests. The lease
        must not be released earlier.

        Args:
            storage: The storage of the files.
            paths: The files.
            fence: The fence, or None.

        Raises:
            JobFailedError: If Spark fails, after the same wait.
        """
        checked_ms = (storage if fence is None else fence.storage).now_ms()
        until_ms = checked_ms + ROUND_MS if fence is None else min(checked_ms + ROUND_MS, fence.until_ms - SETTLE_MS)
        begun_s = time.monotonic()
        over_s = begun_s + (until_ms + SETTLE_MS - checked_ms) / 1000
        slots = self.slots
        deletes = FencedDeletes(storage, fence, checked_ms, until_ms)
        # no rate limit in the storage, because it could delay a request after the check of the fence
        pickled = self._pickle_work(deletes, deletes.storages, None)
        n_parts = max(1, min(slots, -(-len(paths) // storage.delete_batch_size)))
        size = -(-len(paths) // n_parts)
        parts = [pickle.dumps(list(paths[start : start + size])) for start in range(0, len(paths), size)]
        is_over = False
        try:
            rows: list[DeletesDone] = [
                pickle.loads(row) for row in self._run("deletes", delete_parts, pickled, parts, slots)
            ]
            is_over = not any(row.is_repeated for row in rows)
        finally:
            if not is_over:
                _wait_out(over_s)
        if self._rate is not None:
            time.sleep(max(0.0, begun_s + -(-len(paths) // storage.delete_batch_size) / self._rate - time.monotonic()))
        failures: dict[str, StorageError] = {}
        for result in rows:
            _count(deletes.storages, result.requests)
            failures |= result.failures
        return DeleteOutcome(failures, frozenset(path for row in rows for path in row.held_back))

    def _run(
        self,
        description: str,
        task: Callable[[bytes, Iterator[bytes]], Iterator[bytes]],
        pickled: bytes,
        elements: Sequence[bytes],
        n_tasks: int,
    ) -> list[bytes]:
        """Run one job over elements, and return their results in order."""
        return run_in_tasks(self._spark, f"run {description} in Spark", partial(task, pickled), elements, n_tasks)

    def _pickle_work(self, work: object, storages: Sequence[Storage], rate: float | None) -> bytes:
        for storage in storages:
            if storage.root.startswith("memory://"):
                raise InvalidInputError(
                    f"Spark's tasks cannot access {storage.root}, because they are other processes; use a root on"
                    " shared storage"
                )
        buffer = io.BytesIO()
        _WorkPickler(buffer, rate).dump(work)
        return buffer.getvalue()


def _wait_out(over_s: float) -> None:
    """Wait until a point in monotonic time, deferring interrupts. Raises the last interrupt afterwards."""
    interrupt: BaseException | None = None
    while (left_s := over_s - time.monotonic()) > 0:
        logger.warning("a deleting task was lost; waiting %.0f s until it can send no more requests", left_s)
        try:
            time.sleep(left_s)
        except BaseException as error:  # noqa: BLE001 - signal handlers can raise any exception
            interrupt = error
    if interrupt is not None:
        raise interrupt


def batch_size(n_items: int, most: int, slots: int, n_tasks: int) -> int:
    """Return the number of items in a batch, so that all tasks get the same number of batches.

    If there are fewer batches than tasks, all slots get the same number. A batch has at least one item.

    Args:
        n_items: The number of items.
        most: The maximum number of items in a batch.
        slots: The number of tasks that can run at a time.
        n_tasks: The number of tasks.
    """
    n_batches = -(-n_items // most)
    even = n_tasks if n_batches > n_tasks else slots
    return -(-n_items // (-(-n_batches // even) * even))


class _WorkPickler(pickle.Pickler):
    """Pickles work with its storages. With a rate limit, unpickled storages limit all requests, including retries."""

    def __init__(self, file: io.BytesIO, requests_per_second: float | None):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._rate = requests_per_second

    def reducer_override(self, obj: Any) -> Any:
        if self._rate is None or not isinstance(obj, Storage) or isinstance(obj, StorageWrapper):
            return NotImplemented
        reduced: Any = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return (_rebuild_paced, (self._rate, *reduced[:3]))


def _rebuild_paced(
    rate: float, rebuild: Callable[..., Storage], arguments: tuple[Any, ...], state: Any = None
) -> Storage:
    storage = rebuild(*arguments)
    if state is not None:
        storage.__dict__.update(state)
    return PacedStorage(storage, rate)


def _count(storages: Sequence[Storage], requests: Sequence[RequestCounts]) -> None:
    """Add the requests of tasks to the counts of this process. A repeated delete task reports no counts."""
    for storage, counts in zip(storages, requests, strict=False):
        if isinstance(storage, MeteredStorage):
            storage.add(counts)


@contextmanager
def spark_executor(
    master: str | None = DEFAULT_MASTER,
    *,
    remote: str | None = None,
    requests_per_second: float | None = None,
    **conf: str | float | bool,
) -> Iterator[SparkExecutor]:
    """Provide an executor for a block, on the existing session or on a new one that stops with the block.

    Arguments and errors as in :func:`~trinitylake_ops.spark.session.build_session`, and ``requests_per_second`` as in
    :class:`SparkExecutor`.

    Args:
        master: The Spark master.
        remote: ``sc://host:port`` of a Spark Connect server.
        requests_per_second: The maximum request rate of all tasks together.
        **conf: Spark settings by name.
    """
    with session_scope("trinitylake-ops", master, remote=remote, **conf) as spark:
        yield SparkExecutor(spark, requests_per_second=requests_per_second)
