"""The client of HDFS, the threads that make its calls, and the clock of its server.

hdfs-native waits without a limit for the response of a silent server. Such a call continues in its thread, which ends
with the connection or with the process.
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

#: How many threads may hang in abandoned calls.
MAX_HANGING = 64


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
                future.set_exception(error.with_traceback(None))  # its frames would keep the arguments of the call
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
        """Start with no threads: a forked child has none of its parent's."""
        if self._is_used:
            # Its parent's garbage may contain an abandoned client. To destroy it would wait for its threads.
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

    def release_worker(self, worker: _Worker) -> None:
        with self._lock:
            self._hanging.discard(worker)
            self._idle.append(worker)


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.after_fork_in_child)


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Make a call in another thread, and return its result or raise its error.

    Raises OverdueError if it does not end in time, and ForkedError in a child of a process that made such calls.
    """
    return _pool.call(call, seconds)


class HdfsClient:
    """Makes calls to HDFS, each with a limit of time. Thread-safe."""

    def __init__(self, location: HdfsLocation, settings: HdfsSettings):
        self._location = location
        self._settings = settings
        self._client: Client | None = None
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Make a new lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()
        if self._client is not None:
            # A client that is destroyed waits for its threads, which a child does not have.
            leak(self._client)

    def send(self, request: Request, work: Callable[[Client], T], n_bytes: int = 0) -> T:
        """Make a call that transfers so many bytes. Raises the typed error of its failure."""
        limit_seconds = self._limit_seconds(n_bytes)
        try:
            return self.call(work, n_bytes)
        except FAILURES as error:
            failure = typed_error(request, error, limit_seconds)
        # This is raised outside the handler: the client's error holds the server's stack trace.
        raise failure

    def call(self, work: Callable[[Client], T], n_bytes: int = 0, most_seconds: float = math.inf) -> T:
        """Make a call that transfers so many bytes. Raises one of ``FAILURES``."""
        client = self._current()
        try:
            most_seconds = min(self._limit_seconds(n_bytes), most_seconds)
            return call_within(most_seconds, lambda: work(client))  # noqa: F821 - it is deleted after the call
        except FAILURES as error:
            if is_connection_lost(error):
                self._drop(client)
            raise
        finally:
            del client  # a traceback keeps this frame: with it, a forked child would destroy the client, and wait

    def typed(self, request: Request, error: BaseException) -> Exception:
        """Return the typed error for one of ``FAILURES`` that ``call`` raised."""
        return typed_error(request, error, self._settings.read_timeout_seconds)

    def _limit_seconds(self, n_bytes: int) -> float:
        return self._settings.read_timeout_seconds + n_bytes / MIN_BYTES_PER_SECOND

    def _current(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = Client(self._location.url, dict(self._settings.configuration(self._location)))
            return self._client

    def _drop(self, client: Client) -> None:
        """Let the next call make a new connection: this one may never answer, or tell of its end to each call."""
        with self._lock:
            if self._client is client:
                self._client = None


#: An estimate older than this is not used without a new file.
MAX_AGE_MS = 120_000.0


class _Reading(NamedTuple):
    """The server's clock showed at least ``server_ms`` at a local time."""

    server_ms: float
    local_ms: float
    responded_at_ms: float

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
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Make a new lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()

    def now_ms(self, stamp: Callable[[], int]) -> int:
        """Return milliseconds since the epoch. ``stamp`` makes the server stamp a file, and returns that time.

        It is called where the last was more than two minutes ago. Raises what it raises.
        """
        known = self._known
        if known is None or self._local_ms() - known.responded_at_ms > MAX_AGE_MS:
            sent_at_ms = self._local_ms()
            stamped_ms = stamp()
            known = self._observe(stamped_ms, sent_at_ms, self._local_ms())
        return int(known.least_at(self._local_ms()))

    def _observe(self, stamped_ms: float, sent_at_ms: float, received_at_ms: float) -> _Reading:
        reading = _Reading(stamped_ms, received_at_ms, received_at_ms)
        most_ms = stamped_ms + 1 + (received_at_ms - sent_at_ms) * (1 + MAX_DRIFT)
        with self._lock:
            if self._known is not None and stamped_ms < self._known.least_at(received_at_ms) <= most_ms:
                reading = self._known._replace(responded_at_ms=received_at_ms)  # the tighter bound of the two
            self._known = reading
            return reading
