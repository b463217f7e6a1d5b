"""Deletes files of a lakehouse: many in batches, within budgets, at a bounded rate, and only while it is allowed.

It is the only module of the operations that deletes existing files. A failed operation discards the files that it wrote
itself (``transaction.commit.discard``).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.format.file_names import OPERATIONS_PREFIX, TABLES_PREFIX
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, ReportT, TimedOperation, TimedT, uncached
from trinitylake_ops.operations.budget import NO_LIMITS, Budget, Spending, counting
from trinitylake_ops.operations.executor import LOCAL, DeletionFence, Executor
from trinitylake_ops.operations.gc.survey import Progress, no_progress, on_latest
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.operations.rendering import Document
from trinitylake_ops.storage import Storage
from trinitylake_ops.telemetry import hub
from trinitylake_ops.telemetry.hub import FREED_BYTES, FREED_FILES

logger = logging.getLogger(__name__)

_PASSING = (ThrottledError, TransientError, AmbiguousWriteError)
_TRIES = 4
_MOST_IDLE_ROUNDS = 4
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(slots=True)
class Deletion:
    """The result of a deletion: number and bytes of files, failures by path, and why it ended early, if it did.

    ``throttled`` counts the times when the storage asked for a slower pace, ``spared`` the files that stay.
    """

    files: int = 0
    bytes: int = 0
    spared: int = 0
    requests: int = 0
    throttled: int = 0
    failures: dict[str, StorageError] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all files are gone."""
        return self.stopped is None and not self.failures

    def add(self, other: Deletion, root: str = "") -> None:
        """Add what was done after it. ``root`` is that of the other files, where it is another one."""
        for name in ("files", "bytes", "spared", "requests", "throttled"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures |= {f"{root}{path}": error for path, error in other.failures.items()}
        self.stopped = other.stopped


@dataclass(frozen=True, kw_only=True)
class DeletionReport(Document):
    """Base of the reports of operations that delete. ``files`` and ``bytes`` are those that were deleted.

    ``version`` recorded the operation, if any. ``still_needed`` files of the plan were reached by then and stay.
    ``throttled`` counts the times when the storage asked for a slower pace. ``stopped`` says why it ended early,
    ``failures`` which files could not be deleted, with the reason. ``damaged`` are tables whose files cannot all be
    read, by their metadata files, with the reason: all files in their folders stay.
    """

    version: int | None
    files: int
    bytes: int
    still_needed: int
    throttled: int
    failures: Mapping[str, str]
    stopped: str | None
    cost: Cost
    damaged: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, deletion: Deletion, *, version: int | None, still_needed: int, cost: Cost, **own: Any) -> Self:
        """Return the report of a deletion. ``own`` are the fields of the kind of report."""
        return cls(
            version=version,
            files=deletion.files,
            bytes=deletion.bytes,
            still_needed=still_needed,
            throttled=deletion.throttled,
            failures={path: error.message for path, error in deletion.failures.items()},
            stopped=deletion.stopped,
            cost=cost,
            **own,
        )

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.stopped is None and not self.failures

    def failure_rows(self, n_columns: int) -> list[Sequence[object]]:
        """Return a row for each failure, in the last of so many columns."""
        blanks = [""] * (n_columns - 1)
        return [(*blanks, f"{path}: {reason}") for path, reason in sorted(self.failures.items())]


def delete_files(
    storage: Storage,
    sizes_bytes: Mapping[str, int],
    budget: Budget | Spending = NO_LIMITS,
    *,
    before_batch: Callable[[], DeletionFence | None] = lambda: None,
    spared: Container[str] = (),
    progress: Progress = no_progress,
    executor: Executor = LOCAL,
) -> Deletion:
    """Delete files, given with their sizes, and return the result.

    ``before_batch`` runs before each send of a batch. It may raise to stop, or add to ``spared``, which stay. Executors
    elsewhere look at the fence that it returns before each of their requests. If the storage repeatedly fails this in
    passing, the deletion stops there. If a storage throttles or fails in passing, the rest of the batch is sent again
    more slowly, a few times. After the first refusal under a prefix nothing more is tried there.
    """
    done = _Deleting(storage, sizes_bytes, budget, before_batch, spared, progress, executor).run()
    hub.add(FREED_FILES, done.files)
    hub.add(FREED_BYTES, done.bytes)
    return done


def delete_operation_files(storage: Storage, paths: Sequence[str]) -> None:
    """Delete files of operations, such as plans and manifests, that no definition names any more.

    A file that cannot be deleted stays, and a removal of orphans deletes it.

    Args:
        storage: The storage of the lakehouse.
        paths: The paths of the files.

    Raises:
        StorageError: If the request fails as a whole.
    """
    for path, error in storage.delete_many(paths).items():
        logger.warning("file %r, which no definition names any more, could not be deleted: %s", path, error)


class _Deleting:
    def __init__(
        self,
        storage: Storage,
        sizes_bytes: Mapping[str, int],
        budget: Budget | Spending,
        before_batch: Callable[[], DeletionFence | None],
        spared: Container[str],
        progress: Progress,
        executor: Executor,
    ):
        self._spending = Spending.of(budget)
        self._storage = counting(storage, self._spending)
        self._sizes_bytes = sizes_bytes
        self._budget = self._spending.budget
        self._before_batch = before_batch
        self._spared = spared
        self._progress = progress
        self._executor = executor
        self._held_back: frozenset[str] = frozenset()
        self._idle_rounds = 0
        # The pace is that of deletes: time for planning is no credit for a burst.
        self._begun_s = 0.0 if self._budget.requests_per_second is None else time.monotonic()
        self._refused: dict[str, StorageError] = {}
        self._unseen: StorageError | None = None
        self._done = Deletion()

    def run(self) -> Deletion:
        left = deque(sorted(self._sizes_bytes))
        while left and self._done.stopped is None:
            batch = [left.popleft() for _ in range(min(self._batch_files(), len(left)))]
            self._delete(self._allowed(batch))
            self._put_back(left, batch)
            self._progress("deleted", len(self._sizes_bytes) - len(left), len(self._sizes_bytes))
            if left and self._done.stopped is None:
                self._done.stopped = self._spending.exhausted()
        return self._done

    def _batch_files(self) -> int:
        """Return how many files are sent together: a round of parallel requests, fewer when the budget ends."""
        requests = self._spending.within(self._executor.batches_between_checks(self._storage))
        if self._budget.requests_per_second is not None:
            requests = min(requests, max(1, int(self._budget.requests_per_second)))
        return max(1, requests) * self._storage.delete_batch_size

    def _put_back(self, left: deque[str], batch: Collection[str]) -> None:
        """Put back files that executors held back. Ends the deletion if they repeatedly made no progress."""
        left.extendleft(sorted(self._held_back, reverse=True))
        self._idle_rounds = self._idle_rounds + 1 if len(self._held_back) == len(batch) else 0
        if self._idle_rounds == _MOST_IDLE_ROUNDS:
            self._done.stopped = f"executors deleted nothing in {_MOST_IDLE_ROUNDS} rounds: they were lost or late"

    def _allowed(self, batch: Iterable[str]) -> list[str]:
        """Return the files of a batch under prefixes where deleting was not refused; the others have failed, too."""
        allowed = []
        for path in batch:
            refusal = self._refused.get(_prefix_of(path))
            if refusal is None:
                allowed.append(path)
            else:
                self._done.failures[path] = StoragePermissionError(
                    f"not tried, as the storage refused to delete another file of {_prefix_of(path) or 'the catalog'}:"
                    f" {refusal.message}",
                    path=path,
                )
        return allowed

    def _delete(self, paths: list[str]) -> None:
        """Delete files of one batch. Files that failed in passing are sent again after a pause."""
        remaining = paths
        self._held_back = frozenset()

        def attempt() -> None:
            nonlocal remaining
            self._keep_pace()  # before the check: the batch that it allows is sent at once
            fence = self._check_fence()
            for path in [path for path in remaining if path in self._spared]:
                remaining.remove(path)
                self._done.failures.pop(path, None)
                self._done.spared += 1
            if not remaining:
                return
            sent, unsent = remaining[: self._batch_files()], remaining[self._batch_files() :]
            outcome = self._executor.delete(self._storage, sent, fence)
            failed, held_back = outcome.failures, outcome.held_back
            self._held_back |= held_back
            sent = [path for path in sent if path not in held_back]
            self._done.requests += -(-len(sent) // self._storage.delete_batch_size)
            for path in sent:
                if path not in failed:
                    self._done.failures.pop(path, None)
                    self._done.files += 1
                    self._done.bytes += self._sizes_bytes[path]
            self._done.failures.update(failed)
            for path, error in failed.items():
                if isinstance(error, StoragePermissionError):
                    self._refused.setdefault(_prefix_of(path), error)
            self._done.throttled += any(isinstance(error, ThrottledError) for error in failed.values())
            remaining = [path for path, error in failed.items() if isinstance(error, _PASSING)] + unsent
            if remaining and self._spending.exhausted() is None:
                raise self._done.failures[remaining[0]]

        if not paths:
            return
        again = Retrying(
            retry=retry_if_exception_type(_PASSING),
            stop=stop_after_attempt(_TRIES),
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE_SECONDS, max=_LONGEST_PAUSE_SECONDS),
            sleep=time.sleep,
            retry_error_callback=lambda _: None,  # final failures are in the report
        )
        again(attempt)
        if self._unseen is not None:
            self._done.stopped = f"it could not be seen whether more may be deleted: {self._unseen.message}"

    def _check_fence(self) -> DeletionFence | None:
        """Check that the batch may be sent. Remembers a passing failure, and raises it to be tried again."""
        try:
            fence = self._before_batch()
        except _PASSING as error:
            self._unseen = error
            raise
        self._unseen = None
        return fence

    def _keep_pace(self) -> None:
        """Wait until the next batch may be sent, by the limit of requests per second over the whole run."""
        if self._budget.requests_per_second is not None:
            due_s = self._begun_s + self._done.requests / self._budget.requests_per_second
            time.sleep(max(0.0, due_s - time.monotonic()))


def _prefix_of(path: str) -> str:
    """Return the prefix to which permissions apply: a table's, that of operations, or the catalog's files."""
    table_id = table_id_in(path)
    if table_id is not None:
        return f"{TABLES_PREFIX}{table_id}/"
    return OPERATIONS_PREFIX if path.startswith(OPERATIONS_PREFIX) else ""


@dataclass(frozen=True, kw_only=True)
class DeletingOperation(TimedOperation[TimedT, ReportT]):
    """Base of operations that delete files: with an executor, and with the spending and the progress of the run."""

    executor: Executor
    spending: Spending = field(default_factory=Spending)
    progress: Progress = no_progress

    def plan(self) -> TimedT:
        """Plan on the latest version. Raises BudgetSpentBeforeError, and the errors of ``plan_`` of its kind."""
        lake = MeteredLakehouse(self.lake, self.spending).lake
        with self.spending.planning(self.progress) as progress:
            here = replace(self, lake=lake, progress=progress)
            made = on_latest(lake, lambda base: here.plan_at(base, lake.storage.now_ms()))
        operation = cast(Self, made.operation)
        own = replace(operation, lake=uncached(self.lake), spending=Spending(), progress=no_progress)
        return replace(made, operation=own)

    def prepared(self, plan: TimedT, approved_digest: str | None) -> tuple[Self, MeteredLakehouse, TimedT]:
        """Return this operation on a metered lakehouse, that lakehouse, and the plan that was approved.

        Args:
            plan: The plan to execute.
            approved_digest: The digest of the approved plan, None if ``plan`` was not approved.

        Raises:
            PlanChangedError: If the approved plan cannot be made again.
            BudgetSpentBeforeError: If the budget was used up.
            StorageError: If a file cannot be read.
        """
        metered = MeteredLakehouse(self.lake, self.spending)
        here = replace(self, lake=metered.lake)
        with self.spending.planning(self.progress) as progress:
            return here, metered, replace(here, progress=progress).as_approved(plan, approved_digest)
