"""What an operation may ask of the storage, and what it has used of that: all that it does counts, planning too."""

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
    """How much an operation that deletes, or verify, may ask of the storage; None is no limit.

    ``max_requests`` and ``max_seconds`` end it early: what is left is done by running it again. They count all that it
    does: planning, marking, sealing, deleting and recording. What has begun ends tidily, so that a lease that is given
    back and a commit may go a few requests beyond. A listing is one request. ``requests_per_second`` limits the
    deletes it sends. Raises InvalidInputError for what is no positive number.
    """

    max_requests: int | None = None
    max_seconds: float | None = None
    requests_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_seconds", "requests_per_second"):
            number = getattr(self, name)
            if number is not None and (type(number) not in (int, float) or not 0 < number < math.inf):
                raise InvalidInputError(
                    f"{name} is {number!r}, it must be a finite number above 0; leave it out for no limit"
                )


NO_LIMITS = Budget()


class BudgetSpentError(BaseException):
    """The limits of a run are reached. As with an interrupt, nobody on the way takes it for a damaged file."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class BudgetSpentBeforeError(TrinityLakeError):
    """The limits of an operation were reached before it knew what to do, so it deleted nothing."""

    code = "budget-spent"


def _now_s() -> float:
    return time.monotonic()


@dataclass(slots=True)
class Spending:
    """What a run has used of its budget: the time since it began, by the monotonic clock in seconds, and requests."""

    budget: Budget = NO_LIMITS
    begun_s: float = field(default_factory=_now_s)
    requests: int = 0
    _refuses: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, budget: Budget | Spending) -> Spending:
        """Return what is spent so far; a budget alone begins now."""
        return budget if isinstance(budget, Spending) else cls(budget)

    def exhausted(self) -> str | None:
        """Return which limit is reached, None where none is."""
        budget = self.budget
        if budget.max_requests is not None and self.requests >= budget.max_requests:
            return f"the budget of {budget.max_requests} requests is spent"
        return self._overdue()

    def _overdue(self) -> str | None:
        longest_s = self.budget.max_seconds
        if longest_s is not None and time.monotonic() - self.begun_s >= longest_s:
            return f"the budget of {longest_s:g} seconds is spent"
        return None

    def within(self, most: int) -> int:
        """Return how many requests of so many may be sent at once: 1 where the budget is spent."""
        limit = self.budget.max_requests
        return most if limit is None else max(1, min(most, limit - self.requests))

    def check(self) -> None:
        """Raise BudgetSpentError where a limit is reached."""
        if (spent := self.exhausted()) is not None:
            raise BudgetSpentError(spent)

    def spend(self, requests: int) -> None:
        """Count requests. While something is planned they are refused beyond the limits, by BudgetSpentError."""
        with self._lock:
            if self._refuses:
                self.check()
            self.requests += requests

    def check_time(self) -> None:
        """Raise BudgetSpentError where the time is over, for what goes on long within one request."""
        if (spent := self._overdue()) is not None:
            raise BudgetSpentError(spent)

    def listed(self, listing: Iterator[FileInfo], *, always: bool = False) -> Iterator[FileInfo]:
        """Yield a listing, which ends when the time is over: while something is planned, or ``always``."""
        for number, info in enumerate(listing, start=1):
            yield info
            if number % _LISTED_BETWEEN_CHECKS == 0 and (always or self._refuses):
                self.check_time()

    @contextmanager
    def planning(self, progress: Callable[[str, int, int], None]) -> Iterator[Callable[[str, int, int], None]]:
        """End what is planned in the block when the budget is spent; gives the progress to use in it.

        Raises BudgetSpentBeforeError, which says how far it came.
        """
        came = ""

        def report_progress(what: str, done: int, total: int) -> None:
            nonlocal came
            came = f" ({what}: {done} of {total})"
            progress(what, done, total)
            if done < total:
                self.check_time()

        self._refuses = True
        try:
            yield report_progress
        except BudgetSpentError as spent:
            raise BudgetSpentBeforeError(
                f"{spent.message} while planning{came}; nothing was deleted by this run, and running it again begins"
                " anew: give it more"
            ) from spent
        finally:
            self._refuses = False


class CountingStorage(MeteredStorage):
    """Counts requests as a MeteredStorage, and takes them from a budget."""

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


def counting(storage: Storage, spending: Spending) -> CountingStorage:
    """Return a storage whose requests are taken from a budget: itself where they are already."""
    if isinstance(storage, CountingStorage) and storage.spending is spending:
        return storage
    return CountingStorage(storage, spending)


def counted_with(storage: Storage, other: Storage) -> Storage:
    """Return another storage, whose requests are taken from the budget of the first, if it has one."""
    return counting(other, storage.spending) if isinstance(storage, CountingStorage) else other


class LimitedStorage(StorageWrapper):
    """Refuses requests beyond a budget with BudgetSpentError; ``inner`` counts them."""

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
