"""Budgets of operations: limits on requests and time, which include planning, and their usage."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.storage import FileInfo, MeteredStorage, RequestCounts, Storage, StorageWrapper

_LISTED_BETWEEN_CHECKS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of an operation that deletes files, or of verify. None means no limit.

    An operation that reaches ``max_requests`` or ``max_seconds`` stops early, and continues in the next run. The limits
    cover all of its requests: planning, marking, sealing, deleting and recording. A step that has started is completed,
    so releasing a lease or committing can exceed the limit by a few requests. A listing counts as one request. Raises
    InvalidInputError if a number is not positive.
    """

    max_requests: int | None = None
    max_seconds: float | None = None
    #: The maximum rate of delete requests.
    requests_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_seconds", "requests_per_second"):
            number = getattr(self, name)
            if number is not None and (type(number) not in (int, float) or not 0 < number < math.inf):
                raise InvalidInputError(
                    f"{name} is {number!r}; it must be a finite number above 0, or None for no limit"
                )


NO_LIMITS = Budget()


class BudgetSpentError(BaseException):
    """A limit of a run was reached. Not an Exception, so that no handler mistakes it for a damaged file."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class BudgetSpentBeforeError(TrinityLakeError):
    """A limit was reached during planning, so nothing was deleted."""

    code = "budget-spent"


def _now_s() -> float:
    return time.monotonic()


@dataclass(slots=True)
class Spending:
    """The usage of a budget by a run."""

    budget: Budget = NO_LIMITS
    #: When the run began, by the monotonic clock, in seconds.
    begun_s: float = field(default_factory=_now_s)
    requests: int = 0
    _rejects_requests: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, budget: Budget | Spending) -> Spending:
        """Return the usage so far. For a budget without usage, start counting now."""
        return budget if isinstance(budget, Spending) else cls(budget)

    def exhausted(self) -> str | None:
        """Return which limit was reached, or None."""
        budget = self.budget
        if budget.max_requests is not None and self.requests >= budget.max_requests:
            return f"the budget of {budget.max_requests} requests is spent"
        return self._overdue()

    def _overdue(self) -> str | None:
        max_s = self.budget.max_seconds
        if max_s is not None and time.monotonic() - self.begun_s >= max_s:
            return f"the budget of {max_s:g} seconds is spent"
        return None

    def within(self, most: int) -> int:
        """Return how many of ``most`` requests may be sent at once, at least 1."""
        limit = self.budget.max_requests
        return most if limit is None else max(1, min(most, limit - self.requests))

    def check(self) -> None:
        """Raise BudgetSpentError if a limit was reached."""
        if (spent := self.exhausted()) is not None:
            raise BudgetSpentError(spent)

    def spend(self, requests: int) -> None:
        """Count requests. During planning, raises BudgetSpentError if a limit was reached."""
        with self._lock:
            if self._rejects_requests:
                self.check()
            self.requests += requests

    def check_time(self) -> None:
        """Raise BudgetSpentError if the time limit was reached, for long work within one request."""
        if (spent := self._overdue()) is not None:
            raise BudgetSpentError(spent)

    def listed(self, listing: Iterator[FileInfo], *, always: bool = False) -> Iterator[FileInfo]:
        """Yield a listing, and raise BudgetSpentError once the time limit is reached.

        Args:
            listing: The listed files.
            always: Whether to check the time limit after planning as well.
        """
        for number, info in enumerate(listing, start=1):
            yield info
            if number % _LISTED_BETWEEN_CHECKS == 0 and (always or self._rejects_requests):
                self.check_time()

    @contextmanager
    def planning(self, progress: Callable[[str, int, int], None]) -> Iterator[Callable[[str, int, int], None]]:
        """Enforce the budget while the block plans.

        Args:
            progress: Called with the unit that is counted, the number done, and the total.

        Yields:
            The progress callback to use in the block.

        Raises:
            BudgetSpentBeforeError: A limit was reached.
        """
        reached = ""

        def report_progress(unit: str, done: int, total: int) -> None:
            nonlocal reached
            reached = f" ({unit}: {done} of {total})"
            progress(unit, done, total)
            if done < total:
                self.check_time()

        self._rejects_requests = True
        try:
            yield report_progress
        except BudgetSpentError as spent:
            raise BudgetSpentBeforeError(
                f"{spent.message} while planning{reached}, so nothing was deleted; a new run starts over, so raise the"
                " limit"
            ) from spent
        finally:
            self._rejects_requests = False


class CountingStorage(MeteredStorage):
    """Counts requests, and charges them to a budget."""

    def __init__(self, inner: Storage, spending: Spending):
        self.spending = spending
        super().__init__(inner)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self.spending.listed(super().list(prefix))

    def add(self, counts: RequestCounts) -> None:
        super().add(counts)
        self.spending.spend(counts.total)

    def _count(self, kind: str) -> None:
        self.spending.spend(1)
        super()._count(kind)


def counting_storage(storage: Storage, spending: Spending) -> CountingStorage:
    """Return a storage whose requests are charged to a budget, or the storage itself if it already charges them.

    Args:
        storage: The storage.
        spending: The budget and its usage.
    """
    if isinstance(storage, CountingStorage) and storage.spending is spending:
        return storage
    return CountingStorage(storage, spending)


def counted_with(storage: Storage, other: Storage) -> Storage:
    """Return another storage whose requests are charged to the budget of the first one, if it has one.

    Args:
        storage: The storage that may have a budget.
        other: The other storage.
    """
    return counting_storage(other, storage.spending) if isinstance(storage, CountingStorage) else other


class LimitedStorage(StorageWrapper):
    """Raises BudgetSpentError for requests beyond a budget. ``inner`` counts the requests."""

    def __init__(self, inner: Storage, spending: Spending):
        super().__init__(inner)
        self._spending = spending

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self._spending.check()
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        self._spending.check()
        return self.inner.stat(path)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._spending.check()
        return self._spending.listed(self.inner.list(prefix), always=True)
