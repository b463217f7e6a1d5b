"""The clock of a server, as the ``Date`` of its answers shows it (S8)."""

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

#: An estimate older than this is not used without a new answer.
MAX_AGE_SECONDS = 120.0
#: How fast the two clocks may drift apart. Ordinary clocks drift by less than 100 millionths.
MAX_DRIFT = 200e-6
#: S3 refuses requests whose clock differs by more than 15 minutes. A date much further off is no server's clock.
MAX_DIFFERENCE_SECONDS = 3600.0

_SECOND_MS = 1000.0


def monotonic_ms() -> float:
    """Return milliseconds on the local clock that nobody sets.

    It runs on while the machine sleeps, if there is such a clock.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) / 1_000_000
    return time.monotonic_ns() / 1_000_000


def wall_ms() -> float:
    """Return milliseconds since the epoch on this machine's clock."""
    return time.time_ns() / 1_000_000


class _Reading(NamedTuple):
    """The time that the server's clock shows at a local time, at least or at most."""

    server_ms: float
    local_ms: float

    def least_at(self, local_ms: float) -> float:
        """Return the least time that a clock shows later, if it showed at least this."""
        return self.server_ms + (local_ms - self.local_ms) * (1 - MAX_DRIFT)

    def most_at(self, local_ms: float) -> float:
        """Return the greatest time that a clock shows later, if it showed at most this."""
        return self.server_ms + (local_ms - self.local_ms) * (1 + MAX_DRIFT)


class _Known(NamedTuple):
    """The bounds of the server's clock, and when the last answer came."""

    least: _Reading
    most: _Reading
    responded_at_ms: float


class ServerClock:
    """Narrows down the time of the server's clock, by the local monotonic one.

    A ``Date`` has whole seconds. It was taken between the send of the request and the arrival of its answer. When the
    answer arrives, the server's clock shows that second at least. When the request was sent, it showed less than the
    next second. From there the bounds drift apart, by ``MAX_DRIFT`` each, and the tightest of all answers count. If
    they contradict each other, a clock was set or several hosts answer. Then only the newest answer counts.

    ``now_ms`` takes the lower bound. Assume that one clock answers and drifts by less than ``MAX_DRIFT``. Then the
    result is never ahead of that clock and never goes back. It lags by less than the round trip of the newest answer
    and 1.05 s. Where answers are frequent, it lags by tens of milliseconds. Otherwise the result follows the newest
    answer, and may go back by the difference of the clocks and that lag. The class is thread-safe, and a forked child
    keeps the bounds.
    """

    def __init__(self, *, local_ms: Callable[[], float] = monotonic_ms, wall_ms: Callable[[], float] = wall_ms):
        self._local_ms = local_ms
        self._wall_ms = wall_ms
        self._known: _Known | None = None
        self._expected: Started[object] | None = None
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Make a new lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()

    def observe(self, date: str | None, sent_at_ms: float, received_at_ms: float) -> None:
        """Take in the ``Date`` header of an answer. The times are local monotonic milliseconds.

        An answer without a readable date says nothing.
        """
        date_ms = _date_ms(date)
        if date_ms is None:
            return
        reading = _Known(
            _Reading(date_ms, received_at_ms),
            _Reading(date_ms + _SECOND_MS, sent_at_ms),
            responded_at_ms=received_at_ms,
        )
        with self._lock:
            self._known = reading if self._known is None else _both(self._known, reading)

    def expect(self, fetch_time: Callable[[], object]) -> None:
        """Let another thread ask where ``now_ms``, which is called soon, would ask."""
        if not self._is_fresh() and self._expected is None:
            self._expected = Started(fetch_time)

    def now_ms(self, fetch_time: Callable[[], object]) -> int:
        """Return milliseconds since the epoch on the server's clock.

        ``fetch_time`` sends a request whose answer goes to :meth:`observe`. It is called only without an answer in
        the last ``MAX_AGE_SECONDS``. Raises StorageError when answers carry no date or one that is hours off, and what
        ``fetch_time`` raises.
        """
        expected, self._expected = self._expected, None
        if expected is not None:
            expected.result()
        if not self._is_fresh():
            fetch_time()
        known = self._known
        if known is None:
            raise StorageError(
                "the server's clock is unknown: its answers carry no Date header; use a server or proxy that sends it"
            )
        server_ms = known.least.least_at(self._local_ms())
        difference_seconds = (server_ms - self._wall_ms()) / _SECOND_MS
        if abs(difference_seconds) > MAX_DIFFERENCE_SECONDS:
            raise StorageError(
                f"the date of the server's answers and the clock of this machine differ by {difference_seconds:.0f} s;"
                " set right the one that is wrong, or check the proxies between them"
            )
        return int(server_ms)

    def _is_fresh(self) -> bool:
        known = self._known
        return known is not None and self._local_ms() - known.responded_at_ms <= MAX_AGE_SECONDS * _SECOND_MS


def _both(known: _Known, newer: _Known) -> _Known:
    at_ms = max(known.responded_at_ms, newer.responded_at_ms)
    least = max(known.least, newer.least, key=lambda reading: reading.least_at(at_ms))
    most = min(known.most, newer.most, key=lambda reading: reading.most_at(at_ms))
    return _Known(least, most, at_ms) if least.least_at(at_ms) < most.most_at(at_ms) else newer


def _date_ms(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        moment = parsedate_to_datetime(date)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * _SECOND_MS
