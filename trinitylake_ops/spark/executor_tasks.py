"""The code of an executor's tasks in Spark: work on batches, and deletes behind a fence.

Tasks take and return pickled bytes. Storages, with their credentials, come inside the pickled work, which is part of a
task's code. Neither plans nor the UI nor event logs show it.
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
from trinitylake_ops.operations.executor import Fence
from trinitylake_ops.storage import MeteredStorage, RequestCounts, Storage
from trinitylake_ops.storage.retry import without_retries

#: After the driver looked for a new version, a task need not look again for so long.
FRESH_MS = 5_000
_KEPT_WORKS = 8

#: Work that this worker process unpickled before: its connections stay open from task to task.
_unpickled: OrderedDict[bytes, Any] = OrderedDict()


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The results of a batch, or the error that ends the operation, and the requests of the work to each storage."""

    results: Sequence[Any]
    error: TrinityLakeError | None
    requests: tuple[RequestCounts, ...]


@dataclass(frozen=True, slots=True)
class DeletesDone:
    """The results of deletes.

    ``is_repeated`` says that a task before this one may have deleted some, or may still delete some.
    """

    failures: dict[str, StorageError]
    held_back: tuple[str, ...]
    is_repeated: bool
    requests: tuple[RequestCounts, ...]


@dataclass(frozen=True, slots=True)
class FencedDeletes:
    """The condition for deletes: until ``until_ms``, and as long as the fence holds.

    ``checked_ms`` is when the driver saw that the fence holds. Both are times of the clock of the fence's storage, of
    ``storage`` where there is no fence.
    """

    storage: Storage
    fence: Fence | None
    checked_ms: int
    until_ms: int

    @property
    def storages(self) -> list[Storage]:
        """The storage that deletes, and those that the fence asks, each once."""
        fence = self.fence
        asked = [] if fence is None else [fence.storage, *([fence.guard.storage] if fence.guard is not None else [])]
        return list({id(storage): storage for storage in (self.storage, *asked)}.values())

    def holds(self) -> bool:
        """Whether the next requests may be sent. They may not if that cannot be seen."""
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
        except (StorageError, MaintenanceBlockedError):  # the driver looks again, and says why
            return False


def run_batches(pickled_work: bytes, batches: Iterator[bytes]) -> Iterator[bytes]:
    """Do work on pickled batches. Yields a pickled BatchDone for each."""
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
    """Delete files, given as pickled lists of paths. Yields a pickled DeletesDone for each.

    Spark repeats a task that was lost, or that it thinks slow, but the first one may still run. So the repetition
    deletes nothing, and leaves that to the driver when it is safe.
    """
    context = TaskContext.get()
    is_repeated = context is not None and context.attemptNumber() > 0
    deletes = None if is_repeated else _loaded(pickled_deletes)
    for part in parts:
        paths: list[str] = pickle.loads(part)
        done = DeletesDone({}, tuple(paths), is_repeated, ()) if deletes is None else _deleted(deletes, paths)
        yield pickle.dumps(done)


def _deleted(deletes: FencedDeletes, paths: list[str]) -> DeletesDone:
    # Sending again is the driver's decision, too, as it looks at lease and versions before.
    storage = without_retries(deletes.storage)
    asked = [storage if one is deletes.storage else one for one in deletes.storages]
    before = _counts(asked)
    failures: dict[str, StorageError] = {}
    size = storage.concurrency * storage.delete_batch_size
    for start in range(0, len(paths), size):
        if not deletes.holds():
            return DeletesDone(failures, tuple(paths[start:]), False, _since(before, asked))
        failures |= storage.delete_many(paths[start : start + size])
    return DeletesDone(failures, (), False, _since(before, asked))


def _loaded(pickled: bytes) -> Any:
    key = hashlib.sha256(pickled).digest()
    if key not in _unpickled:
        _unpickled[key] = pickle.loads(pickled)
        while len(_unpickled) > _KEPT_WORKS:
            _unpickled.popitem(last=False)
    _unpickled.move_to_end(key)
    return _unpickled[key]


def _counts(storages: Sequence[Storage]) -> list[RequestCounts]:
    return [storage.snapshot() if isinstance(storage, MeteredStorage) else RequestCounts() for storage in storages]


def _since(before: Sequence[RequestCounts], storages: Sequence[Storage]) -> tuple[RequestCounts, ...]:
    return tuple(now - then for now, then in zip(_counts(storages), before, strict=True))
