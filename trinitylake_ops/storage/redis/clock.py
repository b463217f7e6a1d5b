"""The clock of the server, between two answers to TIME (S8)."""

from __future__ import annotations

from collections.abc import Callable

from trinitylake_ops.storage.remote.clock import MAX_DRIFT, monotonic_ms

#: The server is asked again after so long. Then a clock that was set, and another server after a failover, are seen.
MAX_AGE_MS = 60_000.0


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
