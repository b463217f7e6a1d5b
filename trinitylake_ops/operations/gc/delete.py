"""Deletes lakehouse files in batches, within a budget, at a bounded rate, and only while a fence allows it.

This is the only module in ``operations`` that deletes existing files. Files written by a failed operation are discarded
by ``transaction.commit.discard``.
"""

from __future__ import annotations

import logging
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
from trinitylake_ops.operations.budget import NO_LIMITS, Budget, Spending, counting_storage
from trinitylake_ops.operations.executor import LOCAL, DeletionFence, Executor
from trinitylake_ops.operations.gc.survey import Progress, no_progress, on_latest
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.operations.rendering import Document
from trinitylake_ops.storage import Storage, process_clock
from trinitylake_ops.telemetry import hub
from trinitylake_ops.telemetry.hub import FREED_BYTES, FREED_FILES

logger = logging.getLogger(__name__)

_TRANSIENT = (ThrottledError, TransientError, AmbiguousWriteError)
_MAX_ATTEMPTS = 4
_MAX_IDLE_ROUNDS = 4
_FIRST_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 30.0


@dataclass(slots=True)
class Deletion:
    """The result of a deletion."""

    files: int = 0
    bytes: int = 0
    #: The number of files that were kept.
    spared: int = 0
    requests: int = 0
    #: How often the storage requested a lower rate.
    throttled: int = 0
    #: Failures by path.
    failures: dict[str, StorageError] = field(default_factory=dict)
    #: Why the deletion ended early; None if it did not.
    stopped: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all files were deleted or kept."""
        return self.stopped is None and not self.failures

    def add(self, other: Deletion, root: str = "") -> None:
        """Add the result of a later deletion.

        Args:
            other: The later result.
            root: The root of the deleted files, if it differs.
        """
        for name in ("files", "bytes", "spared", "requests", "throttled"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures |= {f"{root}{path}": error for path, error in other.failures.items()}
        self.stopped = other.stopped


@dataclass(frozen=True, kw_only=True)
class DeletionReport(Document):
    """Base of the reports of operations that delete files."""

    #: The version that recorded the operation, if any.
    version: int | None
    #: The number of deleted files.
    files: int
    #: The size of the deleted files.
    bytes: int
    #: The number of planned files that were kept because they are needed again.
    still_needed: int
    #: How often the storage requested a lower rate.
    throttled: int
    #: The files that could not be deleted, with the reason.
    failures: Mapping[str, str]
    #: Why the operation ended early; None if it did not.
    stopped: str | None
    cost: Cost
    #: Why table files cannot be read, by the location of the metadata file. The folders of these tables are kept.
    damaged: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, deletion: Deletion, *, version: int | None, still_needed: int, cost: Cost, **fields: Any) -> Self:
        """Build the report of a deletion.

        Args:
            deletion: The result.
            version: The version that recorded the operation, if any.
            still_needed: The number of planned files that were kept.
            cost: The cost of the operation.
            **fields: The other fields of the subclass.
        """
        return cls(
            version=version,
            files=deletion.files,
            bytes=deletion.bytes,
            still_needed=still_needed,
            throttled=deletion.throttled,
            failures={path: error.message for path, error in deletion.failures.items()},
            stopped=deletion.stopped,
            cost=cost,
            **fields,
        )

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.stopped is None and not self.failures

    def failure_rows(self, n_columns: int) -> list[Sequence[object]]:
        """Return one row for each failure, with the failure in the last of ``n_columns`` columns."""
        empty_cells = [""] * (n_columns - 1)
        return [(*empty_cells, f"{path}: {reason}") for path, reason in sorted(self.failures.items())]


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
    """Delete files.

    After transient failures and throttling, the rest of a batch is retried a few times, more slowly. After the first
    permission error under a prefix, the other files under it are not tried.

    Args:
        storage: The storage of the files.
        sizes_bytes: The files with their sizes.
        budget: The budget of the run.
        before_batch: Called before each batch. It may raise an error to stop, add to ``spared``, or return the fence
            that other processes check before each request. After repeated transient failures, the deletion ends early.
        spared: Files to keep.
        progress: Called with the unit that is counted, the number done, and the total.
        executor: Deletes the files.
    """
    done = _Run(storage, sizes_bytes, budget, before_batch, spared, progress, executor).run()
    hub.add(FREED_FILES, done.files)
    hub.add(FREED_BYTES, done.bytes)
    return done


def delete_operation_files(storage: Storage, paths: Sequence[str]) -> None:
    """Delete operation files, such as plans and manifests, that no definition refers to any more.

    A file that cannot be deleted remains until the next orphan removal.

    Args:
        storage: The storage of the lakehouse.
        paths: The paths of the files.

    Raises:
        StorageError: The whole request failed.
    """
    for path, error in storage.delete_many(paths).items():
        logger.warning("could not delete %r, which no definition names any more: %s", path, error)


class _Run:
    """One run of a deletion."""

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
        self._storage = counting_storage(storage, self._spending)
        self._sizes_bytes = sizes_bytes
        self._budget = self._spending.budget
        self._before_batch = before_batch
        self._spared = spared
        self._progress = progress
        self._executor = executor
        self._held_back: frozenset[str] = frozenset()
        self._idle_rounds = 0
        # The rate limit starts now, so that the time for planning does not allow a burst.
        self._begun_s = 0.0 if self._budget.requests_per_second is None else process_clock.now_s()
        self._refused: dict[str, StorageError] = {}
        self._check_failure: StorageError | None = None
        self._done = Deletion()

    def run(self) -> Deletion:
        left = deque(sorted(self._sizes_bytes))
        while left and self._done.stopped is None:
            batch = [left.popleft() for _ in range(min(self._batch_files(), len(left)))]
            self._delete(self._files_to_try(batch))
            self._put_back(left, batch)
            self._progress("deleted", len(self._sizes_bytes) - len(left), len(self._sizes_bytes))
            if left and self._done.stopped is None:
                self._done.stopped = self._spending.exhausted()
        return self._done

    def _batch_files(self) -> int:
        """Return the batch size: one round of parallel requests, or fewer when the budget is nearly used up."""
        requests = self._spending.within(self._executor.batches_between_checks(self._storage))
        if self._budget.requests_per_second is not None:
            requests = min(requests, max(1, int(self._budget.requests_per_second)))
        return max(1, requests) * self._storage.delete_batch_size

    def _put_back(self, left: deque[str], batch: Collection[str]) -> None:
        """Put back files that executors held back, and end the deletion if executors repeatedly make no progress."""
        left.extendleft(sorted(self._held_back, reverse=True))
        self._idle_rounds = self._idle_rounds + 1 if len(self._held_back) == len(batch) else 0
        if self._idle_rounds == _MAX_IDLE_ROUNDS:
            self._done.stopped = (
                f"executors deleted nothing in {_MAX_IDLE_ROUNDS} rounds, because they were lost or late"
            )

    def _files_to_try(self, batch: Iterable[str]) -> list[str]:
        """Return the files of a batch to try. Files under a prefix with a permission error fail without a request."""
        allowed = []
        for path in batch:
            refusal = self._refused.get(_prefix_of(path))
            if refusal is None:
                allowed.append(path)
            else:
                self._done.failures[path] = StoragePermissionError(
                    f"not tried, because the storage refused to delete another file of"
                    f" {_prefix_of(path) or 'the catalog'}: {refusal.message}",
                    path=path,
                )
        return allowed

    def _delete(self, paths: list[str]) -> None:
        """Delete the files of one batch. Files that failed transiently are retried after a pause."""
        remaining = paths
        self._held_back = frozenset()

        def attempt() -> None:
            nonlocal remaining
            self._keep_pace()  # before the check, because the batch must be sent right after it
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
            remaining = [path for path, error in failed.items() if isinstance(error, _TRANSIENT)] + unsent
            if remaining and self._spending.exhausted() is None:
                raise self._done.failures[remaining[0]]

        if not paths:
            return
        retrying = Retrying(
            retry=retry_if_exception_type(_TRANSIENT),
            stop=stop_after_attempt(_MAX_ATTEMPTS),
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE_SECONDS, max=_MAX_PAUSE_SECONDS),
            sleep=process_clock.sleep,
            retry_error_callback=lambda _: None,  # final failures are in the report
        )
        retrying(attempt)
        if self._check_failure is not None:
            self._done.stopped = f"it could not be checked whether more may be deleted: {self._check_failure.message}"

    def _check_fence(self) -> DeletionFence | None:
        """Check that the batch may be sent. Record a transient failure and raise it, so that it is retried."""
        try:
            fence = self._before_batch()
        except _TRANSIENT as error:
            self._check_failure = error
            raise
        self._check_failure = None
        return fence

    def _keep_pace(self) -> None:
        """Wait until the rate limit, over the whole run, allows the next batch."""
        if self._budget.requests_per_second is not None:
            due_s = self._begun_s + self._done.requests / self._budget.requests_per_second
            process_clock.sleep(max(0.0, due_s - process_clock.now_s()))


def _prefix_of(path: str) -> str:
    """Return the prefix that permissions apply to: a table folder, the operations folder, or empty for the catalog."""
    table_id = table_id_in(path)
    if table_id is not None:
        return f"{TABLES_PREFIX}{table_id}/"
    return OPERATIONS_PREFIX if path.startswith(OPERATIONS_PREFIX) else ""


@dataclass(frozen=True, kw_only=True)
class DeletingOperation(TimedOperation[TimedT, ReportT]):
    """Base of operations that delete files."""

    executor: Executor
    spending: Spending = field(default_factory=Spending)
    progress: Progress = no_progress

    def plan(self) -> TimedT:
        """Make a plan based on the latest version. Raises BudgetSpentBeforeError, and the errors of :meth:`plan_at`."""
        lake = MeteredLakehouse(self.lake, self.spending).lake
        with self.spending.planning(self.progress) as progress:
            planning = replace(self, lake=lake, progress=progress)
            plan = on_latest(lake, lambda base: planning.plan_at(base, lake.storage.now_ms()))
        operation = cast(Self, plan.operation)
        fresh = replace(operation, lake=uncached(self.lake), spending=Spending(), progress=no_progress)
        return replace(plan, operation=fresh)

    def prepared(self, plan: TimedT, approved_digest: str | None) -> tuple[Self, MeteredLakehouse, TimedT]:
        """Return this operation bound to a metered lakehouse, the metered lakehouse, and the approved plan.

        Args:
            plan: The plan to execute.
            approved_digest: The digest of the approved plan, if any.

        Raises:
            PlanChangedError: The approved plan cannot be made again.
            BudgetSpentBeforeError: The budget was used up.
            StorageError: A file cannot be read.
        """
        metered = MeteredLakehouse(self.lake, self.spending)
        operation = replace(self, lake=metered.lake)
        with self.spending.planning(self.progress) as progress:
            return operation, metered, replace(operation, progress=progress).as_approved(plan, approved_digest)
