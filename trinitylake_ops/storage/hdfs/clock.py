"""The clock of the NameNode, as the times of new files show it (S8)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from trinitylake_ops.storage.fork import at_fork
from trinitylake_ops.storage.remote.clock import MAX_DRIFT, monotonic_ms

#: An estimate older than this is not used without a new file.
MAX_AGE_MS = 120_000.0


class _Reading(NamedTuple):
    """The server's clock showed at least ``server_ms`` at a local time."""

    server_ms: float
    local_ms: float
    answered_at_ms: float

    def least_at(self, local_ms: float) -> float:
        return self.server_ms + (local_ms - self.local_ms) * (1 - MAX_DRIFT)


class NameNodeClock:
    """Tells the time of the NameNode's clock, by the local monotonic one since a file was stamped.

    The stamp was made between the send of a request and the arrival of its answer. So the result is never ahead of the
    server's clock, and lags by the time of that request at most, plus 24 ms of drift. It does not go back unless that
    clock was set. Thread-safe; a forked child keeps what is known.
    """

    def __init__(self, *, local_ms: Callable[[], float] = monotonic_ms):
        self._local_ms = local_ms
        self._known: _Reading | None = None
        self.forget()
        at_fork(self)

    def forget(self) -> None:
        """Make a new lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()

    def now_ms(self, stamp: Callable[[], int]) -> int:
        """Return milliseconds since the epoch. ``stamp`` makes the server stamp a file, and returns that time.

        It is called where the last was more than two minutes ago. Raises what it raises.
        """
        known = self._known
        if known is None or self._local_ms() - known.answered_at_ms > MAX_AGE_MS:
            sent_at_ms = self._local_ms()
            stamped_ms = stamp()
            known = self._observe(stamped_ms, sent_at_ms, self._local_ms())
        return int(known.least_at(self._local_ms()))

    def _observe(self, stamped_ms: float, sent_at_ms: float, received_at_ms: float) -> _Reading:
        told = _Reading(stamped_ms, received_at_ms, received_at_ms)
        most_ms = stamped_ms + 1 + (received_at_ms - sent_at_ms) * (1 + MAX_DRIFT)
        with self._lock:
            if self._known is not None and stamped_ms < self._known.least_at(received_at_ms) <= most_ms:
                told = self._known._replace(answered_at_ms=received_at_ms)  # the tighter bound of the two
            self._known = told
            return told
