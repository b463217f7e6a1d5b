"""Calls into a library that may block for ever, each with a limit of time.

hdfs-native waits without a limit for the answer of a server that is silent. Such a call goes on in a thread of its own,
which ends with the connection or with the process.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

#: So many threads may hang in calls that were given up.
MAX_HANGING = 64


class OverdueError(Exception):
    """A call did not end in time, or was not begun because too many others hang."""

    def __init__(self, reason: str, *, begun: bool):
        super().__init__(reason)
        self.begun = begun


class ForkedError(Exception):
    """The process was forked after the library was used, which has threads and sockets that a child must not use."""


class _Worker:
    """A thread that makes one call after the other."""

    def __init__(self, pool: _Pool):
        self._pool = pool
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="trinitylake-hdfs", daemon=True).start()

    def make(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((call, future))
        return future

    def _run(self) -> None:
        while True:
            call, future = self._work.get()
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error.with_traceback(None))  # its frames would keep what the call was made with
                del error
            else:
                future.set_result(result)
                del result
            del call, future
            self._pool.give_back(self)


class _Pool:
    def __init__(self) -> None:
        self.was_forked = False
        self._is_used = False
        self.forget()

    def forget(self) -> None:
        """Start anew, in a forked child: the threads are not there."""
        if self._is_used:
            # Among its parent's garbage may be a client that was given up. To destroy it would wait for its threads.
            gc.freeze()
        self.was_forked = self.was_forked or self._is_used
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._hanging: set[_Worker] = set()

    def call(self, call: Callable[[], T], seconds: float) -> T:
        if self.was_forked:
            raise ForkedError
        with self._lock:
            self._is_used = True
            if len(self._hanging) >= MAX_HANGING:
                raise OverdueError(f"{MAX_HANGING} earlier requests still wait for an answer", begun=False)
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self)
        future = worker.make(call)
        try:
            return future.result(seconds)
        except TimeoutError:
            with self._lock:
                if not future.done():
                    self._hanging.add(worker)
                    raise OverdueError("time-out", begun=True) from None
            return future.result()

    def give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._hanging.discard(worker)
            self._idle.append(worker)


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.forget)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Make a call in another thread and return or raise what it does.

    Raises OverdueError after so many seconds, and ForkedError in a child of a process that made such calls.
    """
    return _pool.call(call, seconds)
