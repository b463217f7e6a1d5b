"""Code for the Spark tasks of the executor: work on batches, and fenced deletes.

Tasks take and return pickled bytes. Storages with their credentials are inside the pickled work, which is part of a
task's code. Spark does not show that code in plans, in its UI or in event logs.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext

from trinitylake_ops.errors import MaintenanceBlockedError, StorageError, TrinityLakeError
from trinitylake_ops.format.file_names import LEASE_PREFIX, parse_lease_path
from trinitylake_ops.operations.executor import DeletionFence
from trinitylake_ops.storage import MeteredStorage, RequestCounts, Storage
from trinitylake_ops.storage.retry import without_retries

#: For this long after the driver's check, a task need not check for a new version.
FRESH_MS = 5_000
_MAX_CACHED_WORKS = 8

#: Cache of unpickled work, which keeps connections open between tasks.
_work_cache: OrderedDict[bytes, Any] = OrderedDict()


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The outcome of a batch."""

    #: The results of its items.
    results: Sequence[Any]
    #: The error that ends the operation, or None for success.
    error: TrinityLakeError | None
    #: The requests to each storage of the work.
    requests: tuple[RequestCounts, ...]


@dataclass(frozen=True, slots=True)
class DeletesDone:
    """The outcome of deletes."""

    #: The errors, by path.
    failures: dict[str, StorageError]
    #: The files that were not deleted, because the fence is no longer valid or the task is a repeated attempt.
    held_back: tuple[str, ...]
    #: Whether an earlier attempt of the task may have deleted some files, or may still be deleting them.
    is_repeated: bool
    #: The requests to each storage.
    requests: tuple[RequestCounts, ...]


@dataclass(frozen=True, slots=True)
class FencedDeletes:
    """The condition for deletes: they may be sent until ``until_ms``, while the fence holds.

    Times are measured by the clock of the fence's storage, or of ``storage`` if there is no fence.
    """

    #: The storage of the files.
    storage: Storage
    #: The fence, or None.
    fence: DeletionFence | None
    #: When the driver checked the fence.
    checked_ms: int
    #: When the deletes must end.
    until_ms: int

    @property
    def storages(self) -> list[Storage]:
        """The distinct storages that receive requests: those of the files and of the fence."""
        fence = self.fence
        fence_storages = (
            [] if fence is None else [fence.storage, *([fence.guard.storage] if fence.guard is not None else [])]
        )
        return list({id(storage): storage for storage in (self.storage, *fence_storages)}.values())

    def holds(self) -> bool:
        """Whether the next requests may be sent. False if that cannot be determined."""
        fence = self.fence
        try:
            now_ms = (self.storage if fence is None else fence.storage).now_ms()
            if now_ms >= self.until_ms:
                return False
            if fence is None:
                return True
            leases = (parse_lease_path(info.path) or 0 for info in fence.storage.list(LEASE_PREFIX))
            if max(leases, default=0) > fence.lease:
                return False
            if fence.guard is not None:
                fence.guard.check()
            is_fresh = now_ms - self.checked_ms <= FRESH_MS
            return is_fresh or not fence.storage.exists(fence.next_root)
        except (StorageError, MaintenanceBlockedError):  # the driver checks again, and reports the cause
            return False


def run_batches(pickled_work: bytes, batches: Iterator[bytes]) -> Iterator[bytes]:
    """Run work on pickled batches, and yield a pickled BatchDone for each.

    Args:
        pickled_work: The work.
        batches: The batches.
    """
    work = _loaded(pickled_work)
    for batch in batches:
        before = _counts(work.storages)
        results, error = [], None
        try:
            results = list(work(pickle.loads(batch)))
        except TrinityLakeError as raised:
            error = raised
        yield pickle.dumps(BatchDone(results, error, _since(before, work.storages)))


def delete_parts(pickled_deletes: bytes, parts: Iterator[bytes]) -> Iterator[bytes]:
    """Delete files, and yield a pickled DeletesDone for each part.

    Spark repeats a task that was lost or seems slow, although the first attempt may still be running. A repetition
    therefore deletes nothing, and leaves the files to the driver, which deletes them when it is safe.

    Args:
        pickled_deletes: The FencedDeletes.
        parts: Pickled lists of paths.
    """
    context = TaskContext.get()
    is_repeated = context is not None and context.attemptNumber() > 0
    deletes = None if is_repeated else _loaded(pickled_deletes)
    for part in parts:
        paths: list[str] = pickle.loads(part)
        deleted = DeletesDone({}, tuple(paths), is_repeated, ()) if deletes is None else _deleted(deletes, paths)
        yield pickle.dumps(deleted)


def _deleted(deletes: FencedDeletes, paths: list[str]) -> DeletesDone:
    # No retries: a retry is the driver's decision as well, because it first checks the lease and the versions.
    storage = without_retries(deletes.storage)
    storages = [storage if other is deletes.storage else other for other in deletes.storages]
    before = _counts(storages)
    failures: dict[str, StorageError] = {}
    size = storage.concurrency * storage.delete_batch_size
    for start in range(0, len(paths), size):
        if not deletes.holds():
            return DeletesDone(failures, tuple(paths[start:]), False, _since(before, storages))
        failures |= storage.delete_many(paths[start : start + size])
    return DeletesDone(failures, (), False, _since(before, storages))


def _loaded(pickled: bytes) -> Any:
    key = hashlib.sha256(pickled).digest()
    if key not in _work_cache:
        _work_cache[key] = pickle.loads(pickled)
        while len(_work_cache) > _MAX_CACHED_WORKS:
            _work_cache.popitem(last=False)
    _work_cache.move_to_end(key)
    return _work_cache[key]


def _counts(storages: Sequence[Storage]) -> list[RequestCounts]:
    return [storage.snapshot() if isinstance(storage, MeteredStorage) else RequestCounts() for storage in storages]


def _since(before: Sequence[RequestCounts], storages: Sequence[Storage]) -> tuple[RequestCounts, ...]:
    return tuple(now - then for now, then in zip(_counts(storages), before, strict=True))
