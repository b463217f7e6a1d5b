"""Background work of a process, and what a forked child must forget.

Nothing durable depends on it. What is asked for again before its turn is done once. It is done before the process ends
and before it forks. A process that is killed, or ends by ``os._exit``, leaves it undone.
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

#: The thread rests so long after each work, so that what many commits ask for is done once.
REST_S = 0.02
#: So long the end of a process, or a fork, waits for work that is left.
LONGEST_WAIT_S = 10.0


class _BackgroundThread:
    """The thread, started at first use, and what it has to do, in the order in which it was first asked for."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Start anew, in a forked child: the thread is not there."""
        self._changed = threading.Condition()  # its lock may be taken again by a signal handler that forks
        self._waiting: dict[Work, int] = {}
        self._n_put = 0
        self._working_on: int | None = None
        self._released: int | None = None
        self._n_flushing = 0
        self._is_idle = False  # the thread waits for work, and does not rest
        self._thread: threading.Thread | None = None

    def put(self, work: Work) -> None:
        with self._changed:
            if work not in self._waiting:
                self._n_put += 1
                self._waiting[work] = self._n_put
            try:
                self._start()
            except RuntimeError:  # an interpreter that ends, or a limit on threads
                del self._waiting[work]
            else:
                if self._is_idle:  # to wake one that rests would cost each commit of many a change of threads
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
                    rest_s = deadline_s - time.monotonic()
                    if self._is_hanging():
                        return False
                    if rest_s <= 0 or not self._changed.wait(rest_s):
                        if longest_s >= LONGEST_WAIT_S:
                            self._released = self._working_on
                        return False
            finally:
                self._n_flushing -= 1
        return True

    def _is_undone(self, last: int) -> bool:
        """Whether work that was asked for up to some moment waits, or is being done."""
        is_working = self._working_on is not None and self._working_on <= last
        return is_working or any(number <= last for number in self._waiting.values())

    def _is_hanging(self) -> bool:
        """Whether somebody waited in vain before for the work that is being done."""
        return self._working_on is not None and self._working_on == self._released

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, name="trinitylake-beside", daemon=True)
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
    """Do work. What it raises is logged."""
    try:
        work()
    except Exception:  # nobody waits for it, so nobody else can tell
        logger.warning("work beside a commit failed; the commit stands", exc_info=True)


def put(work: Work) -> None:
    """Let work be done beside. Equal work that still waits is done once."""
    _background.put(work)


def flush(longest_s: float = LONGEST_WAIT_S) -> bool:
    """Wait until all work is done, and return whether it is."""
    return _background.flush(longest_s)


_background = _BackgroundThread()
atexit.register(flush)
os.register_at_fork(before=flush, after_in_child=_background.after_fork_in_child)


class ForkAware(Protocol):
    """Something that can start anew."""

    def after_fork_in_child(self) -> None: ...


def at_fork(fork_aware: ForkAware) -> None:
    """Let something start anew in every child that is forked while it lives."""
    _fork_aware.add(fork_aware)


def leak(thing: object) -> None:
    """Let nothing, not even the end of the interpreter, destroy an object: in a child, one of its parent's.

    A destroyed connection takes its socket off the list of those that its event loop waits for. A forked child shares
    that list with its parent, which would then wait for an answer in vain.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _run_after_fork() -> None:
    for fork_aware in list(_fork_aware):
        fork_aware.after_fork_in_child()


_fork_aware: WeakSet[ForkAware] = WeakSet()
os.register_at_fork(after_in_child=_run_after_fork)
