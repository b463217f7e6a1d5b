"""Use Python's handler of SIGINT in a test, even if the server or Spark session of an earlier test replaced it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def plain_interrupts() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt in the main thread while the block runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
