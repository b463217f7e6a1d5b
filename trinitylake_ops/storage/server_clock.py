"""The clock of a server, as the ``Date`` of its answers shows it (S8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime

from trinitylake_ops.errors import StorageError

#: An estimate older than this is not used without a new answer.
MAX_AGE_SECONDS = 120.0
MAX_DRIFT = 200e-6

_SECOND_MS = 1000.0


def monotonic_ms() -> float:
    """Milliseconds on the local clock that nobody sets."""
    return time.monotonic_ns() / 1_000_000


class ServerClock:
    """Narrows down how far the server's clock is ahead of the local monotonic one.

    A ``Date`` has whole seconds and was taken somewhere between the send of the request and the
    arrival of its answer, so each answer leaves an interval of possible offsets. The intersection
    of all of them narrows with every answer. When it is empty, a clock was set or several hosts
    answer, and the newest answer alone counts.

    ``now_ms`` takes the lower end: like the times of files, which S3 cuts to whole seconds, it is
    never ahead of the server, and never goes back unless the server's clock does. It lags by less than a
    second and one round trip after the first answer, and by a few milliseconds after many.
    Thread-safe.
    """

    def __init__(self, *, local_ms: Callable[[], float] = monotonic_ms):
        self._local_ms = local_ms
        self._lock = threading.Lock()
        self._offsets_ms: tuple[float, float] | None = None
        self._observed_at_ms = 0.0

    def observe(self, date: str | None, sent_at_ms: float, received_at_ms: float) -> None:
        """Take in the ``Date`` header of an answer; the times are local monotonic milliseconds.

        An answer without a readable date says nothing.
        """
        date_ms = _date_ms(date)
        if date_ms is None:
            return
        earliest_ms, latest_ms = date_ms - received_at_ms, date_ms + _SECOND_MS - sent_at_ms
        with self._lock:
            known = self._offsets_ms
            if known is not None and max(known[0], earliest_ms) < min(known[1], latest_ms):
                earliest_ms, latest_ms = max(known[0], earliest_ms), min(known[1], latest_ms)
            self._offsets_ms = (earliest_ms, latest_ms)
            self._observed_at_ms = max(self._observed_at_ms, received_at_ms)

    def now_ms(self, ask: Callable[[], object]) -> int:
        """Milliseconds since the epoch on the server's clock.

        ``ask`` sends a request whose answer goes to :meth:`observe`; it is called only when there
        was no answer in the last ``MAX_AGE_SECONDS``. Raises StorageError when answers carry no date,
        and what ``ask`` raises.
        """
        if not self._is_fresh():
            ask()
        with self._lock:
            offsets_ms = self._offsets_ms
        if offsets_ms is None:
            raise StorageError(
                "the server's clock is unknown: its answers carry no Date header; use a server or proxy that sends it"
            )
        return int(self._local_ms() + offsets_ms[0])

    def _is_fresh(self) -> bool:
        with self._lock:
            age_ms = self._local_ms() - self._observed_at_ms
            return self._offsets_ms is not None and age_ms <= MAX_AGE_SECONDS * _SECOND_MS


def _date_ms(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        moment = parsedate_to_datetime(date)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * _SECOND_MS
