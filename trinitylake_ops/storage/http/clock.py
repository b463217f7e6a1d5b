"""Estimate a server's clock from the ``Date`` headers of its responses (S8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.parallel import Started

#: If the last response is older than this, a new request is sent.
MAX_AGE_SECONDS = 120.0
#: Maximum relative drift of the two clocks. Ordinary clocks drift by less than 100 ppm.
MAX_DRIFT = 200e-6
#: S3 rejects requests whose clock differs by more than 15 minutes, so a much larger difference is not a server's clock.
MAX_DIFFERENCE_SECONDS = 3600.0

_SECOND_MS = 1000.0


def monotonic_ms() -> float:
    """Return the local monotonic time in milliseconds, including suspended time if the system supports it."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) / 1_000_000
    return time.monotonic_ns() / 1_000_000


def wall_ms() -> float:
    """Return the time of this machine's clock, in milliseconds since the epoch."""
    return time.time_ns() / 1_000_000


class _Reading(NamedTuple):
    """A lower or an upper bound of the server's clock at a local monotonic time."""

    server_ms: float
    local_ms: float

    def lower_bound_at(self, local_ms: float) -> float:
        """Return the lower bound at a later local time."""
        return self.server_ms + (local_ms - self.local_ms) * (1 - MAX_DRIFT)

    def upper_bound_at(self, local_ms: float) -> float:
        """Return the upper bound at a later local time."""
        return self.server_ms + (local_ms - self.local_ms) * (1 + MAX_DRIFT)


class _Estimate(NamedTuple):
    """Bounds of the server's clock."""

    lower: _Reading
    upper: _Reading
    #: Local monotonic time of the last response.
    responded_at_ms: float


class ServerClock:
    """Estimates the server's clock with the local monotonic clock. Thread-safe; a forked child keeps the estimate.

    A ``Date`` has whole seconds and was taken between the send of the request and the arrival of the response. The
    server's clock therefore shows at least that second when the response arrives, and showed less than the next second
    when the request was sent. From then on the bounds drift apart by ``MAX_DRIFT``. The tightest bounds of all
    responses are used. If they contradict each other, because a clock was set or several hosts respond, the newest
    response replaces them.

    ``now_ms`` returns the lower bound. If one clock responds that drifts by less than ``MAX_DRIFT``, the result is
    never ahead of that clock and never decreases. It lags by less than 1.05 s plus the round trip of the newest
    response, and by tens of milliseconds if responses are frequent. Otherwise the result follows the newest response,
    and may decrease by the difference of the clocks plus that lag.

    Args:
        local_ms: Returns the local monotonic time in milliseconds.
        wall_ms: Returns the local time in milliseconds since the epoch.
    """

    def __init__(self, *, local_ms: Callable[[], float] = monotonic_ms, wall_ms: Callable[[], float] = wall_ms):
        self._local_ms = local_ms
        self._wall_ms = wall_ms
        self._estimate: _Estimate | None = None
        self._expected: Started[object] | None = None
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()

    def observe(self, date: str | None, sent_at_ms: float, received_at_ms: float) -> None:
        """Update the estimate with a response.

        Args:
            date: Value of the ``Date`` header. If the header is missing or invalid, the response is ignored.
            sent_at_ms: Local monotonic time when the request was sent.
            received_at_ms: Local monotonic time when the response arrived.
        """
        date_ms = _date_ms(date)
        if date_ms is None:
            return
        estimate = _Estimate(
            _Reading(date_ms, received_at_ms),
            _Reading(date_ms + _SECOND_MS, sent_at_ms),
            responded_at_ms=received_at_ms,
        )
        with self._lock:
            self._estimate = estimate if self._estimate is None else _narrower(self._estimate, estimate)

    def expect(self, fetch_time: Callable[[], object]) -> None:
        """Start the request that the next call of ``now_ms`` would send, if any."""
        if not self._is_fresh() and self._expected is None:
            self._expected = Started(fetch_time)

    def now_ms(self, fetch_time: Callable[[], object]) -> int:
        """Return the time of the server's clock, in milliseconds since the epoch.

        Args:
            fetch_time: Sends a request whose response is passed to :meth:`observe`. It is called only if there was no
                response in the last ``MAX_AGE_SECONDS``. Its errors are raised.

        Raises:
            StorageError: Responses have no date, or the date is wrong by hours.
        """
        expected, self._expected = self._expected, None
        if expected is not None:
            expected.result()
        if not self._is_fresh():
            fetch_time()
        estimate = self._estimate
        if estimate is None:
            raise StorageError(
                "the server's clock is unknown: its responses have no Date header; use a server or proxy that sends it"
            )
        server_ms = estimate.lower.lower_bound_at(self._local_ms())
        difference_seconds = (server_ms - self._wall_ms()) / _SECOND_MS
        if abs(difference_seconds) > MAX_DIFFERENCE_SECONDS:
            raise StorageError(
                f"the clocks of the server and of this machine differ by {difference_seconds:.0f} s; correct the wrong"
                " one, or check the proxies between them"
            )
        return int(server_ms)

    def _is_fresh(self) -> bool:
        estimate = self._estimate
        return estimate is not None and self._local_ms() - estimate.responded_at_ms <= MAX_AGE_SECONDS * _SECOND_MS


def _narrower(earlier: _Estimate, newer: _Estimate) -> _Estimate:
    """Return the tightest bounds of two estimates, or the newer estimate if they contradict each other."""
    at_ms = max(earlier.responded_at_ms, newer.responded_at_ms)
    lower = max(earlier.lower, newer.lower, key=lambda reading: reading.lower_bound_at(at_ms))
    upper = min(earlier.upper, newer.upper, key=lambda reading: reading.upper_bound_at(at_ms))
    is_consistent = lower.lower_bound_at(at_ms) < upper.upper_bound_at(at_ms)
    return _Estimate(lower, upper, at_ms) if is_consistent else newer


def _date_ms(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        time_utc = parsedate_to_datetime(date)
    except ValueError:
        return None
    return (time_utc if time_utc.tzinfo else time_utc.replace(tzinfo=UTC)).timestamp() * _SECOND_MS
