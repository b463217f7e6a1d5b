"""Background work that no caller waits for, for example updating the hint after a commit, and fork handling.

One daemon thread per process runs submitted work in order. Work that is submitted again before it has started runs
once. Pending work is completed at interpreter exit and before a fork; a process that is killed or calls ``os._exit``
drops it. Nothing durable may depend on background work.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

Work = Callable[[], None]

logger = logging.getLogger(__name__)

#: Pause after each unit of work, so that a burst of commits triggers one hint update instead of many.
REST_S = 0.02
#: Maximum time that interpreter exit or a fork waits for pending work.
LONGEST_WAIT_S = 10.0


class _BackgroundThread:
    """A daemon thread, started on first use, and its queue in the order of first submission."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Reset all state: the thread does not exist in a forked child."""
        self._changed = threading.Condition()  # with a reentrant lock, because a signal handler may fork
        self._waiting: dict[Work, int] = {}
        self._n_put = 0
        self._working_on: int | None = None
        self._released: int | None = None
        self._n_flushing = 0
        self._is_idle = False  # the thread waits for work, not for the end of its pause
        self._thread: threading.Thread | None = None

    def put(self, work: Work) -> None:
        with self._changed:
            if work not in self._waiting:
                self._n_put += 1
                self._waiting[work] = self._n_put
            try:
                self._start()
            except RuntimeError:  # interpreter shutdown, or a limit on threads
                del self._waiting[work]
            else:
                if self._is_idle:  # waking a pausing thread would cost every commit of a burst a context switch
                    self._changed.notify_all()
                return
        do(work)

    def flush(self, longest_s: float) -> bool:
        deadline_s = time.monotonic() + longest_s
        with self._changed:
            last = self._n_put
            self._n_flushing += 1
            self._changed.notify_all()
            try:
                while self._is_undone(last):
                    remaining_s = deadline_s - time.monotonic()
                    if self._is_hanging():
                        return False
                    if remaining_s <= 0 or not self._changed.wait(remaining_s):
                        if longest_s >= LONGEST_WAIT_S:
                            self._released = self._working_on
                        return False
            finally:
                self._n_flushing -= 1
        return True

    def _is_undone(self, last: int) -> bool:
        """Whether work with a number up to ``last`` is queued or running."""
        is_working = self._working_on is not None and self._working_on <= last
        return is_working or any(number <= last for number in self._waiting.values())

    def _is_hanging(self) -> bool:
        """Whether an earlier flush already timed out on the running work."""
        return self._working_on is not None and self._working_on == self._released

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, name="trinitylake-background", daemon=True)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.wait_for(lambda: bool(self._waiting))
                self._is_idle = False
                work = next(iter(self._waiting))
                self._working_on = self._waiting.pop(work)
            try:
                do(work)
            finally:
                with self._changed:
                    self._working_on = None
                    self._changed.notify_all()
            with self._changed:
                self._changed.wait_for(lambda: self._n_flushing > 0, REST_S)


def do(work: Work) -> None:
    """Run work and log any error, because no caller waits for it."""
    try:
        work()
    except Exception:
        logger.warning("background work failed; completed commits are not affected", exc_info=True)


def put(work: Work) -> None:
    """Run work in the background. Equal work that is still queued runs once."""
    _background.put(work)


def flush(longest_s: float = LONGEST_WAIT_S) -> bool:
    """Wait until all submitted work is done. Return False on timeout."""
    return _background.flush(longest_s)


_background = _BackgroundThread()
atexit.register(flush)
os.register_at_fork(before=flush, after_in_child=_background.after_fork_in_child)


class ForkAware(Protocol):
    """An object with state that must be reset in a forked child."""

    def after_fork_in_child(self) -> None: ...


def at_fork(fork_aware: ForkAware) -> None:
    """Reset an object in every child that is forked during the object's lifetime."""
    _fork_aware.add(fork_aware)


def leak(thing: object) -> None:
    """Prevent an object from ever being destroyed, even at interpreter exit.

    A forked child does this with the connections of its parent. A connection that is destroyed removes its socket from
    the poller of its event loop. The child shares that poller with the parent, which would then wait for a response
    indefinitely.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _run_after_fork() -> None:
    for fork_aware in list(_fork_aware):
        fork_aware.after_fork_in_child()


_fork_aware: WeakSet[ForkAware] = WeakSet()
os.register_at_fork(after_in_child=_run_after_fork)
