"""Spark as the executor of operations: the same work as the local one's, in tasks (docs/engines.md).

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
from trinitylake_ops.operations.executor import DeleteOutcome, Fence, Listing, Weight, Work
from trinitylake_ops.spark.executor_tasks import BatchDone, DeletesDone, FencedDeletes, delete_parts, run_batches
from trinitylake_ops.spark.runtime.addresses import DEFAULT_MASTER
from trinitylake_ops.spark.runtime.connect import Slots
from trinitylake_ops.spark.runtime.task_jobs import run_in_tasks
from trinitylake_ops.spark.session import session_scope
from trinitylake_ops.storage import FileInfo, MeteredStorage, RequestCounts, Storage, StorageWrapper
from trinitylake_ops.storage.meter import PacedStorage

logger = logging.getLogger(__name__)

#: Tasks send no delete later than this after the driver looked, by the storage's clock.
ROUND_MS = 30_000
#: After this time a request that a lost task sent in time has taken effect, or never will.
SETTLE_MS = 10_000

#: Up to so many things are done on the driver, as a job takes longer than a round or two of requests.
FEW = 16
#: How many things go in a batch at most, by weight: a second's work or two, which a lost task repeats.
_MOST_PER_BATCH = MappingProxyType(
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
    """Runs work in the tasks of a Spark session, of this process or of Spark Connect.

    ``requests_per_second`` bounds the requests of all tasks together, attempts counted. Each task gets its share, and
    never more run at a time. A listing counts once. Raises InvalidInputError for a rate that is no number above 0. Work
    raises it for a lakehouse in this process's memory, and JobFailedError when Spark gives up.
    """

    #: A job for all is shorter than several, and reads what several things name once.
    window = sys.maxsize

    def __init__(self, spark: SparkSession, *, requests_per_second: float | None = None):
        if requests_per_second is not None and not 0 < requests_per_second < math.inf:
            raise InvalidInputError(
                f"requests_per_second is {requests_per_second!r}, it must be a finite number above 0"
            )
        self._spark = spark
        self._slots = Slots(spark)
        self._rate = requests_per_second

    @property
    def slots(self) -> int:
        """How many tasks run at a time."""
        return self._slots.count()

    def map(self, work: Work[A, T], things: Sequence[A]) -> Iterator[T]:
        """Yield the result of each thing, in order. Raises the errors of the work, JobFailedError."""
        if not things:
            return
        if len(things) <= FEW and self._rate is None:
            yield from work(things)
            return
        slots = self.slots
        # With a rate, only tasks with a share of it may run, even if more slots come.
        n_tasks = slots * _TASKS_PER_SLOT if self._rate is None else slots
        size = batch_size(len(things), _MOST_PER_BATCH[work.weight], slots, n_tasks)
        batches = [things[start : start + size] for start in range(0, len(things), size)]
        pickled = self._pickled(work, work.storages, None if self._rate is None else self._rate / slots)
        for start in range(0, len(batches), slots * _BATCHES_PER_SLOT):
            wave = [pickle.dumps(list(things)) for things in batches[start : start + slots * _BATCHES_PER_SLOT]]
            for row in self._run(type(work).__name__, run_batches, pickled, wave, n_tasks):
                done: BatchDone = pickle.loads(row)
                _count(work.storages, done.requests)
                if done.error is not None:
                    raise done.error
                yield from done.results

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        """Yield the listed files, part by part. Raises the errors of the listing, JobFailedError."""
        work, parts = listing.parts()
        for infos in self.map(work, parts):
            yield from infos

    def prefetch(self, read: Callable[[], None]) -> None:
        """Read at once: many tasks read sooner than the driver does later."""
        read()

    def limited(self, storage: Storage, spending: Spending) -> Storage:
        """Return the storage as it is, for tasks. Raises InvalidInputError for a budget, as all is read ahead."""
        if spending.budget != NO_LIMITS:
            raise InvalidInputError(
                "limits of requests or seconds are for the local engine, whose runs go on by records"
            )
        return storage

    def batches_between_checks(self, storage: Storage) -> int:
        """Return the requests of a few rounds for each task. A task looks at the fence before each round."""
        requests = storage.concurrency * self.slots * _DELETE_ROUNDS_PER_SLOT
        return requests if self._rate is None else max(1, min(requests, int(self._rate)))

    def delete(self, storage: Storage, paths: Sequence[str], fence: Fence | None) -> DeleteOutcome:
        """Delete files in tasks. Each task checks before each of its rounds that the fence holds.

        If a task was lost, this waits until it can send nothing more, despite interrupts. Only then may the lease be
        given back. Raises JobFailedError, after the same wait.
        """
        checked_ms = (storage if fence is None else fence.storage).now_ms()
        until_ms = checked_ms + ROUND_MS if fence is None else min(checked_ms + ROUND_MS, fence.until_ms - SETTLE_MS)
        begun_s = time.monotonic()
        over_s = begun_s + (until_ms + SETTLE_MS - checked_ms) / 1000
        slots = self.slots
        deletes = FencedDeletes(storage, fence, checked_ms, until_ms)
        # otherwise there could be a wait between the look and the send
        pickled = self._pickled(deletes, deletes.storages, None)
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
        for done in rows:
            _count(deletes.storages, done.requests)
            failures |= done.failures
        return DeleteOutcome(failures, frozenset(path for row in rows for path in row.held_back))

    def _run(
        self,
        what: str,
        task: Callable[[bytes, Iterator[bytes]], Iterator[bytes]],
        pickled: bytes,
        elements: Sequence[bytes],
        n_tasks: int,
    ) -> list[bytes]:
        """Run one job over elements. Returns the result of each, in order."""
        return run_in_tasks(self._spark, f"run {what} in Spark", partial(task, pickled), elements, n_tasks)

    def _pickled(self, work: object, storages: Sequence[Storage], rate: float | None) -> bytes:
        for storage in storages:
            if storage.root.startswith("memory://"):
                raise InvalidInputError(
                    f"Spark's tasks are other processes and cannot see {storage.root};"
                    " use a root on a storage that they reach"
                )
        buffer = io.BytesIO()
        _WorkPickler(buffer, rate).dump(work)
        return buffer.getvalue()


def _wait_out(over_s: float) -> None:
    """Wait for a point in monotonic time, through all interrupts. Raises the last one then."""
    interrupt: BaseException | None = None
    while (left_s := over_s - time.monotonic()) > 0:
        logger.warning("a task that deletes was lost: waiting %.0f s until it can send nothing more", left_s)
        try:
            time.sleep(left_s)
        except BaseException as error:  # noqa: BLE001 - by whatever a handler of signals raises
            interrupt = error
    if interrupt is not None:
        raise interrupt


def batch_size(n_things: int, most: int, slots: int, n_tasks: int) -> int:
    """Return how many things go in a batch, at most ``most``, so that all tasks have as many batches.

    If there are fewer batches than tasks, each slot gets as many. A batch has at least one thing.
    """
    n_batches = -(-n_things // most)
    even = n_tasks if n_batches > n_tasks else slots
    return -(-n_things // (-(-n_batches // even) * even))


class _WorkPickler(pickle.Pickler):
    """Pickles work with its storages.

    With a rate, a storage unpickles as one that keeps the rate, below all retries.
    """

    def __init__(self, file: io.BytesIO, requests_per_second: float | None):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._rate = requests_per_second

    def reducer_override(self, obj: Any) -> Any:
        if self._rate is None or not isinstance(obj, Storage) or isinstance(obj, StorageWrapper):
            return NotImplemented
        reduced: Any = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return (_paced, (self._rate, *reduced[:3]))


def _paced(rate: float, rebuild: Callable[..., Storage], arguments: tuple[Any, ...], state: Any = None) -> Storage:
    storage = rebuild(*arguments)
    if state is not None:
        storage.__dict__.update(state)
    return PacedStorage(storage, rate)


def _count(storages: Sequence[Storage], requests: Sequence[RequestCounts]) -> None:
    """Add the requests of tasks to the requests counted here. Repeated deletes have nothing to add."""
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
    """Provide an executor for a block, on an existing session or on one that stops with the block.

    Arguments and errors as in :func:`~trinitylake_ops.spark.session.build_session`.
    """
    with session_scope("trinitylake-ops", master, remote=remote, **conf) as spark:
        yield SparkExecutor(spark, requests_per_second=requests_per_second)
