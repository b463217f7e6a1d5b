"""Run calls in parallel on one shared thread pool, and track the round trips that they belong to."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Generic, TypeVar

from trinitylake_ops.telemetry import spans

T = TypeVar("T")
A = TypeVar("A")

#: Maximum number of threads in the pool that all storages of a process share.
MAX_POOL_THREADS = 64


class RoundTrip:
    """Identifies one ``*_many`` call. Its requests are in flight at the same time, so they take one round trip."""

    __slots__ = ("__weakref__", "requests")

    def __init__(self) -> None:
        #: The kinds of its requests, recorded by ``ObservedStorage``.
        self.requests: list[str] = []


_current_round_trip: ContextVar[RoundTrip | None] = ContextVar("trinitylake_storage_round", default=None)


def current_round_trip() -> RoundTrip | None:
    """Return the ``*_many`` call that the current request belongs to, or None for a single request."""
    return _current_round_trip.get()


def in_one_round_trip(call: Callable[[A], T]) -> Callable[[A], T]:
    """Wrap a function so that all its calls belong to the same new round trip."""
    return _within(RoundTrip(), call)


def run_round_trip(call: Callable[[A], T], arguments: Sequence[A], concurrency: int, serial_limit: int = 1) -> list[T]:
    """Run :func:`run_parallel` as one round trip, and emit a span for it if it sent requests and tracing is active.

    A single call that is made within another round trip belongs to that round trip.

    Args:
        call: The function to call.
        arguments: One argument for each call.
        concurrency: Maximum number of threads.
        serial_limit: Up to this number of calls run without threads.

    Returns:
        The results in the order of the arguments.
    """
    if not arguments:
        return []
    if len(arguments) == 1 and current_round_trip() is not None:
        return [call(arguments[0])]
    own_round_trip = RoundTrip()
    if not spans.is_recorded():
        return run_parallel(_within(own_round_trip, call), arguments, concurrency, serial_limit)
    begun_ns = time.time_ns()
    try:
        return run_parallel(_within(own_round_trip, call), arguments, concurrency, serial_limit)
    finally:
        if own_round_trip.requests:
            kinds = ", ".join(sorted(set(own_round_trip.requests)))
            attributes: dict[str, str | int | float | bool] = {
                "trinitylake.requests": len(own_round_trip.requests),
                "trinitylake.kinds": kinds,
            }
            spans.note("storage round", begun_ns, attributes)


def _within(own_round_trip: RoundTrip, call: Callable[[A], T]) -> Callable[[A], T]:
    def call_in_round_trip(argument: A) -> T:
        token = _current_round_trip.set(own_round_trip)
        try:
            return call(argument)
        finally:
            _current_round_trip.reset(token)

    return call_in_round_trip


def run_parallel(call: Callable[[A], T], arguments: Sequence[A], concurrency: int, serial_limit: int = 1) -> list[T]:
    """Map ``call`` over the arguments in parallel.

    Raises the first failure in argument order, or an interrupt of the calling thread, only after all running calls
    have ended, so that no call is still running when the caller continues. The calling thread takes part in the work
    and never waits for a thread that has not started, so nested calls, a full pool and a forked child cannot deadlock.

    Args:
        call: The function to call.
        arguments: One argument for each call.
        concurrency: Maximum number of threads, including the calling thread.
        serial_limit: Up to this number of calls run without threads.

    Returns:
        The results in the order of the arguments.
    """
    if len(arguments) <= serial_limit or concurrency <= 1:
        return [call(argument) for argument in arguments]
    batch = _Batch(call, arguments)
    n_extra_threads = min(concurrency, len(arguments), MAX_POOL_THREADS + 1) - 1
    threads: list[Future[None]] = []

    def start() -> None:
        # During interpreter shutdown no thread can be started, so the caller does all the work.
        with contextlib.suppress(RuntimeError):
            threads.extend(_shared_pool.submit(batch.work) for _ in range(n_extra_threads))

    interrupt = _uninterrupted(start, batch.stop) or _uninterrupted(batch.work, batch.stop)
    for thread in threads:
        while not thread.cancel() and not thread.done():
            interrupt = _uninterrupted(thread.exception, batch.stop) or interrupt
    if interrupt is not None:
        raise interrupt
    for thread in threads:
        if not thread.cancelled():
            thread.result()
    return batch.finished_results()


def _uninterrupted(work: Callable[[], object], stop: Callable[[], None]) -> BaseException | None:
    """Run ``work`` in this thread. If an interrupt ends it, start no further calls and return the interrupt."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - a signal handler can raise anything; the caller raises it again
        stop()
        return error
    return None


class _Batch(Generic[A, T]):
    """A queue of arguments that several threads process, with the results."""

    def __init__(self, call: Callable[[A], T], arguments: Sequence[A]):
        self._call = call
        self._arguments = arguments
        self._outcomes: dict[int, T] = {}
        self._failures: dict[int, BaseException] = {}
        self._next_index = 0
        self._lock = threading.Lock()

    def work(self) -> None:
        while (index := self._take()) is not None:
            try:
                self._outcomes[index] = self._call(self._arguments[index])
            except BaseException as error:  # noqa: BLE001 - raised by finished_results, in the caller's thread
                self._failures[index] = error
                if not isinstance(error, Exception):
                    self.stop()

    def finished_results(self) -> list[T]:
        # Raise an interrupt first: if a storage failure were raised instead, the caller might retry.
        for index in sorted(self._failures, key=lambda index: (isinstance(self._failures[index], Exception), index)):
            raise self._failures[index]
        return [self._outcomes[index] for index in range(len(self._arguments))]

    def _take(self) -> int | None:
        with self._lock:
            index = self._next_index
            if index >= len(self._arguments):
                return None
            self._next_index += 1
            return index

    def stop(self) -> None:
        """Start no further calls."""
        with self._lock:
            self._next_index = len(self._arguments)


class Started(Generic[T]):
    """A call that runs on a thread of the pool while the caller continues.

    :meth:`result` must not be called by several threads at the same time. If the pool thread has not started the call
    yet, :meth:`result` makes the call itself. A forked child, which does not have the threads of its parent, also makes
    the call itself, so the call may run twice.
    """

    def __init__(self, call: Callable[[], T]):
        self._call = call
        self._process = os.getpid()
        self._future: Future[T] | None = None
        with contextlib.suppress(RuntimeError):  # no thread can be started during interpreter shutdown
            self._future = _shared_pool.submit(call)

    @property
    def is_done(self) -> bool:
        """Whether the call has ended. Does not wait."""
        return self._future is not None and self._future.done()

    def result(self) -> T:
        """Wait for the call, then return its result or raise its error."""
        if self._future is None or self._process != os.getpid() or self._future.cancel():
            self._process = os.getpid()
            self._future = Future()
            try:
                self._future.set_result(self._call())
            except BaseException as error:  # noqa: BLE001 - raised below, by every call of this method
                self._future.set_exception(error)
        return self._future.result()


class _SharedPool:
    """The thread pool of the process, started on first use."""

    _executor: ThreadPoolExecutor | None
    _lock: threading.Lock

    def __init__(self) -> None:
        self.after_fork_in_child()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(MAX_POOL_THREADS, thread_name_prefix="trinitylake-storage")
            return self._executor.submit(work)

    def after_fork_in_child(self) -> None:
        """Reset the pool: a forked child has no threads of its parent, but may inherit a lock that one of them held."""
        self._executor = None
        self._lock = threading.Lock()


_shared_pool = _SharedPool()
os.register_at_fork(after_in_child=_shared_pool.after_fork_in_child)
