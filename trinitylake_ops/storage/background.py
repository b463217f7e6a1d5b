"""Background work that no caller waits for, for example updating the hint after a commit, and fork handling.

One daemon thread per process runs submitted work in order. Work that is submitted again before it has started runs
once. Pending work is completed at interpreter exit and before a fork; a process that is killed or calls ``os._exit``
drops it. Nothing durable may depend on background work.

The runner belongs to the process and not to a ``Lakehouse``: exit and fork handling need one per process, and command-
line tools, servers and catalogs open lakehouses themselves. ``using`` replaces it, for example in tests that count
requests.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol
from weakref import WeakSet

Work = Callable[[], None]

logger = logging.getLogger(__name__)

#: Pause after each unit of work, so that a burst of commits triggers one hint update instead of many.
BATCH_WINDOW_S = 0.02
#: Maximum time that interpreter exit or a fork waits for pending work.
DRAIN_TIMEOUT_S = 10.0


class Runner(Protocol):
    """Runs background work."""

    def submit(self, work: Work) -> None:
        """Run work soon, without blocking the caller. If equal work is already pending, it runs only once."""

    def drain(self, timeout_s: float) -> bool:
        """Wait for all work submitted so far. Return False on timeout."""

    def start_thread(self, work: Work, name: str) -> None:
        """Run long work in a separate thread.

        Args:
            work: The work.
            name: The name of the thread.

        Raises:
            RuntimeError: No thread can be started, for example at interpreter exit.
        """


class ThreadRunner:
    """Runs work in the order of first submission, on one daemon thread that starts on first use.

    Attributes:
        n_draining: Number of threads that wait in ``drain``.
    """

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Reset all state: the thread does not exist in a forked child."""
        self._changed = threading.Condition()  # has a reentrant lock, because a signal handler may fork
        self._pending: dict[Work, int] = {}
        self._n_submitted = 0
        self._running: int | None = None
        self._given_up: int | None = None
        self.n_draining = 0
        self._is_idle = False  # the thread waits for work, not for the end of its pause
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Queue work, or run it in the caller's thread if no thread can be started."""
        with self._changed:
            if work not in self._pending:
                self._n_submitted += 1
                self._pending[work] = self._n_submitted
            try:
                self._start()
            except RuntimeError:  # interpreter exit, or a limit on threads
                del self._pending[work]
            else:
                if self._is_idle:  # waking a pausing thread would cost every commit of a burst a context switch
                    self._changed.notify_all()
                return
        run_logged(work)

    def drain(self, timeout_s: float) -> bool:
        """Wait for all work submitted so far. Return False on timeout."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            last = self._n_submitted
            self.n_draining += 1
            self._changed.notify_all()
            try:
                while self._is_unfinished(last):
                    remaining_s = deadline_s - time.monotonic()
                    if self._is_stuck():
                        return False
                    if remaining_s <= 0 or not self._changed.wait(remaining_s):
                        if timeout_s >= DRAIN_TIMEOUT_S:
                            self._given_up = self._running
                        return False
            finally:
                self.n_draining -= 1
        return True

    def start_thread(self, work: Work, name: str) -> None:
        """Start a daemon thread."""
        threading.Thread(target=work, name=name, daemon=True).start()

    def _is_unfinished(self, last: int) -> bool:
        """Whether work with a number up to ``last`` is queued or running."""
        is_running = self._running is not None and self._running <= last
        return is_running or any(number <= last for number in self._pending.values())

    def _is_stuck(self) -> bool:
        """Whether an earlier drain already timed out on the running work."""
        return self._running is not None and self._running == self._given_up

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="trinitylake-background", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.wait_for(lambda: bool(self._pending))
                self._is_idle = False
                work = next(iter(self._pending))
                self._running = self._pending.pop(work)
            try:
                run_logged(work)
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()
            with self._changed:
                self._changed.wait_for(lambda: self.n_draining > 0, BATCH_WINDOW_S)


class InlineRunner(ThreadRunner):
    """Runs work in the thread that submits it, so that requests are sent in a fixed order."""

    def submit(self, work: Work) -> None:
        """Run work immediately."""
        run_logged(work)


def run_logged(work: Work) -> None:
    """Run work and log any error, because no caller waits for it."""
    try:
        work()
    except Exception:
        logger.warning("background work failed; completed commits are not affected", exc_info=True)


_process_runner = ThreadRunner()
_runner: Runner = _process_runner


def submit(work: Work) -> None:
    """Run work in the background. If equal work is already pending, it runs only once."""
    _runner.submit(work)


def drain(timeout_s: float = DRAIN_TIMEOUT_S) -> bool:
    """Wait for all background work submitted so far. Return False on timeout."""
    return _runner.drain(timeout_s)


def start_thread(work: Work, name: str) -> None:
    """Run long work in a separate thread.

    Args:
        work: The work.
        name: The name of the thread.

    Raises:
        RuntimeError: No thread can be started, for example at interpreter exit.
    """
    _runner.start_thread(work, name)


@contextmanager
def using(runner: Runner) -> Iterator[None]:
    """Replace the runner of this process while the block runs. Work submitted before is completed first."""
    global _runner  # noqa: PLW0603 - one per process
    drain()
    before, _runner = _runner, runner
    try:
        yield
    finally:
        _runner = before


def inline() -> AbstractContextManager[None]:
    """Run background work in the thread that submits it while the block runs."""
    return using(InlineRunner())


atexit.register(drain)
os.register_at_fork(before=drain, after_in_child=_process_runner.after_fork_in_child)


class ForkAware(Protocol):
    """An object with state that must be reset in a forked child."""

    def after_fork_in_child(self) -> None: ...


def at_fork(fork_aware: ForkAware) -> None:
    """Reset an object in every child that is forked during the object's lifetime."""
    _fork_aware.add(fork_aware)


def leak(value: object) -> None:
    """Prevent an object from ever being destroyed, even at interpreter exit.

    A forked child does this with the connections of its parent. A connection that is destroyed removes its socket from
    the poller of its event loop. The child shares that poller with the parent, which would then wait for a response
    indefinitely.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _run_after_fork() -> None:
    for fork_aware in list(_fork_aware):
        fork_aware.after_fork_in_child()


_fork_aware: WeakSet[ForkAware] = WeakSet()
os.register_at_fork(after_in_child=_run_after_fork)
