"""The clock of the server, between two answers to TIME (S8)."""

from __future__ import annotations

import time
from collections.abc import Callable

#: The server is asked again after so long. Then a clock that was set, and another server after a failover, are seen.
MAX_AGE_MS = 60_000.0
#: How fast the two clocks may drift apart. Ordinary clocks drift by less than 100 millionths.
MAX_DRIFT = 200e-6


def monotonic_ms() -> float:
    """Return milliseconds on the local clock that nobody sets. It runs on while the machine sleeps, if there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) / 1_000_000


class ServerClock:
    """Counts on from the server's last answer by the local monotonic clock, so that a commit asks at most once.

    When an answer arrives, the server's clock shows what it says at least. From there it is counted on a little slower
    than the local clock. So the result never leads the server's clock, and lags by the way of the answer and 12 ms.
    It goes back only where the server's clock was set back, or a server with another clock took its place.
    """

    def __init__(self, local_ms: Callable[[], float] = monotonic_ms):
        self._local_ms = local_ms
        self._known: tuple[float, float] | None = None

    def now_ms(self, ask: Callable[[], float]) -> int:
        """Return milliseconds since the epoch on the server's clock. ``ask`` returns what the server says now."""
        known = self._known
        if known is None or not 0 <= self._local_ms() - known[1] <= MAX_AGE_MS:
            told_ms = ask()
            self._known = known = (told_ms, self._local_ms())
        told_ms, at_ms = known
        return int(told_ms + (self._local_ms() - at_ms) * (1 - MAX_DRIFT))
