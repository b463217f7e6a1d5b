"""The HDFS client, the threads that make its calls, and an estimate of the server's clock.

hdfs-native has no timeout for the response of a silent server. A call that times out continues in its thread until the
connection or the process ends.
"""

from __future__ import annotations

import gc
import math
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from hdfs_native import Client

from trinitylake_ops.storage.background import at_fork, leak
from trinitylake_ops.storage.hdfs.errors import (
    FAILURES,
    ForkedError,
    OverdueError,
    Request,
    is_connection_lost,
    typed_error,
)
from trinitylake_ops.storage.hdfs.settings import HdfsLocation, HdfsSettings
from trinitylake_ops.storage.http.clock import MAX_DRIFT, monotonic_ms
from trinitylake_ops.storage.http.settings import MIN_BYTES_PER_SECOND

T = TypeVar("T")

#: Maximum number of threads with calls that timed out.
MAX_HANGING = 64


class _Worker:
    """A thread that makes calls serially."""

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
            except BaseException as error:  # noqa: BLE001 - raised by ``Future.result``
                future.set_exception(error.with_traceback(None))  # its frames would keep the arguments alive
                del error
            else:
                future.set_result(result)
                del result
            del call, future
            self._pool.release_worker(self)


class _Pool:
    def __init__(self) -> None:
        self.was_forked = False
        self._is_used = False
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Reset the pool: its threads do not exist in a forked child."""
        if self._is_used:
            # The parent's garbage may contain a client. Its destructor would wait for threads that do not exist.
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
                raise OverdueError(f"{MAX_HANGING} earlier requests are still waiting for a response", begun=False)
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self)
        future = worker.make(call)
        try:
            return future.result(seconds)
        except TimeoutError:
            with self._lock:
                if not future.done():
                    self._hanging.add(worker)
                    raise OverdueError("timeout", begun=True) from None
            return future.result()

    def release_worker(self, worker: _Worker) -> None:
        with self._lock:
            self._hanging.discard(worker)
            self._idle.append(worker)


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.after_fork_in_child)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Make a call in another thread, and return its result or raise its error.

    Args:
        seconds: Time limit of the call.
        call: The call.

    Raises:
        OverdueError: The call timed out, or too many calls hang.
        ForkedError: This process was forked from a process that made such calls.
    """
    return _pool.call(call, seconds)


class HdfsClient:
    """Makes calls to HDFS with a time limit. Thread-safe."""

    def __init__(self, location: HdfsLocation, settings: HdfsSettings):
        self._location = location
        self._settings = settings
        self._client: Client | None = None
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock, and leak the client: its destructor would wait for threads that do not exist."""
        self._lock = threading.Lock()
        if self._client is not None:
            leak(self._client)

    def send(self, request: Request, work: Callable[[Client], T], n_bytes: int = 0) -> T:
        """Make a call. Raise a typed error if it fails.

        Args:
            request: The request, for error messages.
            work: The call.
            n_bytes: Number of bytes that the call transfers, which extends its time limit.
        """
        limit_seconds = self._limit_seconds(n_bytes)
        try:
            return self.call(work, n_bytes)
        except FAILURES as error:
            failure = typed_error(request, error, limit_seconds)
        # Raised outside the handler, because the client's error contains the server's stack trace.
        raise failure

    def call(self, work: Callable[[Client], T], n_bytes: int = 0, max_seconds: float = math.inf) -> T:
        """Make a call. Raise one of ``FAILURES`` if it fails.

        Args:
            work: The call.
            n_bytes: Number of bytes that the call transfers, which extends its time limit.
            max_seconds: Upper bound of the time limit.
        """
        client = self._current()
        try:
            limit_seconds = min(self._limit_seconds(n_bytes), max_seconds)
            return call_within(limit_seconds, lambda: work(client))  # noqa: F821 - it is deleted after the call
        except FAILURES as error:
            if is_connection_lost(error):
                self._drop(client)
            raise
        finally:
            del client  # a traceback keeps this frame alive, and the client with it

    def typed(self, request: Request, error: BaseException) -> Exception:
        """Return the typed error for an exception of ``call``."""
        return typed_error(request, error, self._settings.read_timeout_seconds)

    def _limit_seconds(self, n_bytes: int) -> float:
        return self._settings.read_timeout_seconds + n_bytes / MIN_BYTES_PER_SECOND

    def _current(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = Client(self._location.url, dict(self._settings.configuration(self._location)))
            return self._client

    def _drop(self, client: Client) -> None:
        """Discard the client, so that the next call creates a new connection."""
        with self._lock:
            if self._client is client:
                self._client = None


#: If the last observation is older than this, a new file is created to read the server's clock.
MAX_AGE_MS = 120_000.0


class _Reading(NamedTuple):
    """A lower bound of the server's clock at a local monotonic time."""

    server_ms: float
    local_ms: float
    #: Local monotonic time of the last response.
    responded_at_ms: float

    def lower_bound_at(self, local_ms: float) -> float:
        return self.server_ms + (local_ms - self.local_ms) * (1 - MAX_DRIFT)


class NameNodeClock:
    """Estimates the NameNode's clock from the modification time of a new file and the local monotonic clock.

    The modification time was set between the send of a request and the arrival of its response. The result is therefore
    never ahead of the server's clock, and lags by at most the duration of that request plus 24 ms. It never decreases
    unless the server's clock was set back. Thread-safe; a forked child keeps the estimate.

    Args:
        local_ms: Returns the local monotonic time in milliseconds.
    """

    def __init__(self, *, local_ms: Callable[[], float] = monotonic_ms):
        self._local_ms = local_ms
        self._last: _Reading | None = None
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()

    def now_ms(self, stamp: Callable[[], int]) -> int:
        """Return the time of the server's clock, in milliseconds since the epoch.

        Args:
            stamp: Creates a file, and returns its modification time. It is called if the last call was more than two
                minutes ago. Its errors are raised.
        """
        last = self._last
        if last is None or self._local_ms() - last.responded_at_ms > MAX_AGE_MS:
            sent_at_ms = self._local_ms()
            stamped_ms = stamp()
            last = self._observe(stamped_ms, sent_at_ms, self._local_ms())
        return int(last.lower_bound_at(self._local_ms()))

    def _observe(self, stamped_ms: float, sent_at_ms: float, received_at_ms: float) -> _Reading:
        reading = _Reading(stamped_ms, received_at_ms, received_at_ms)
        max_ms = stamped_ms + 1 + (received_at_ms - sent_at_ms) * (1 + MAX_DRIFT)
        with self._lock:
            if self._last is not None and stamped_ms < self._last.lower_bound_at(received_at_ms) <= max_ms:
                reading = self._last._replace(responded_at_ms=received_at_ms)  # the tighter of the two bounds
            self._last = reading
            return reading
