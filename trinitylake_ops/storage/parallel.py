"""Parallel calls on one shared pool of threads, and the rounds they belong to."""

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

#: Threads of the pool that all storages of a process share.
MAX_POOL_THREADS = 64


class RoundTrip:
    """The identity of one ``*_many`` call. Its requests are in flight together, so they cost one wait."""

    __slots__ = ("__weakref__", "requests")

    def __init__(self) -> None:
        #: The kinds of its requests, where somebody tells of them.
        self.requests: list[str] = []


_current_round_trip: ContextVar[RoundTrip | None] = ContextVar("trinitylake_storage_round", default=None)


def current_round_trip() -> RoundTrip | None:
    """The ``*_many`` call that the running request belongs to; None for a single request."""
    return _current_round_trip.get()


def in_one_round_trip(call: Callable[[A], T]) -> Callable[[A], T]:
    """Mark every call of the returned function as belonging to the same, new round."""
    return _within(RoundTrip(), call)


def run_round_trip(call: Callable[[A], T], arguments: Sequence[A], concurrency: int, serial_limit: int = 1) -> list[T]:
    """Do :func:`run_parallel` in one round. A span tells of it, if it asked the storage and the present one is kept.

    A single call that is made within another round is a part of that round.
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
    """Map ``call`` over the arguments with up to ``concurrency`` threads, in order.

    Up to ``serial_limit`` calls are made without threads.

    All calls end before the first failure (in argument order) is raised, and before an interrupt of the calling thread.
    So nothing still runs when the caller goes on. The calling thread takes part in the work and never waits for a
    thread that has not started. So nested calls, a crowded pool and a freshly forked process cannot deadlock.
    """
    if len(arguments) <= serial_limit or concurrency <= 1:
        return [call(argument) for argument in arguments]
    batch = _Batch(call, arguments)
    n_extra_threads = min(concurrency, len(arguments), MAX_POOL_THREADS + 1) - 1
    threads: list[Future[None]] = []

    def start() -> None:
        with contextlib.suppress(RuntimeError):  # an interpreter that ends starts no threads: the caller does all
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
    """Do work of this thread, and return the interrupt that ended it, if one did. Then nothing more is begun."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - by whatever a handler of signals raises; the caller raises it
        stop()
        return error
    return None


class _Batch(Generic[A, T]):
    """Arguments that several threads take one after the other, with the results."""

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
        # An interrupt is raised first: reported as the failure of a storage, it would be retried.
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
        """Begin no more calls."""
        with self._lock:
            self._next_index = len(self._arguments)


class Started(Generic[T]):
    """A call that a thread of the pool makes, while the caller goes on. One thread at a time asks for its result.

    Nobody waits for a thread that has not begun: who asks for the result makes the call. So does a forked child, which
    has none of its parent's threads. Such a call may be made twice.
    """

    def __init__(self, call: Callable[[], T]):
        self._call = call
        self._process = os.getpid()
        self._future: Future[T] | None = None
        with contextlib.suppress(RuntimeError):  # an interpreter that ends starts no threads
            self._future = _shared_pool.submit(call)

    @property
    def is_done(self) -> bool:
        """Whether the call has ended, without waiting for it."""
        return self._future is not None and self._future.done()

    def result(self) -> T:
        """Wait until the call has ended, and return or raise what it did."""
        if self._future is None or self._process != os.getpid() or self._future.cancel():
            self._process = os.getpid()
            self._future = Future()
            try:
                self._future.set_result(self._call())
            except BaseException as error:  # noqa: BLE001 - raised below, each time it is asked for
                self._future.set_exception(error)
        return self._future.result()


class _SharedPool:
    """The process-wide threads, started at first use."""

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
        """Start anew. A forked child has none of its parent's threads, and perhaps a lock that one held."""
        self._executor = None
        self._lock = threading.Lock()


_shared_pool = _SharedPool()
os.register_at_fork(after_in_child=_shared_pool.after_fork_in_child)
