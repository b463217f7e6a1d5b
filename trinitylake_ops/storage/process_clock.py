"""The monotonic clock of a process, for measuring durations, pausing, and determining the age of cached state.

Times in a lakehouse, for example those of versions and leases, come from the storage's clock (``Storage.now_ms``).
``using`` replaces the clock of the process, for example in tests of waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now_s(self) -> float:
        """Return the seconds since an arbitrary point in time."""

    def sleep(self, seconds: float) -> None:
        """Pause the calling thread."""


class _MachineClock:
    """The clock of the machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


_clock: Clock = _MachineClock()


def now_s() -> float:
    """Return the seconds since an arbitrary point in time."""
    return _clock.now_s()


def sleep(seconds: float) -> None:
    """Pause the calling thread."""
    _clock.sleep(seconds)


@contextmanager
def using(clock: Clock) -> Iterator[None]:
    """Replace the clock of this process while the block runs."""
    global _clock  # noqa: PLW0603 - one per process
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
