"""Order, failures, nesting and forks of calls in the shared thread pool."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings

import pytest

from tests.interrupts import plain_interrupts
from trinitylake_ops.errors import TransientError
from trinitylake_ops.storage import run_parallel
from trinitylake_ops.storage.parallel import MAX_POOL_THREADS, Started, current_round_trip, in_one_round_trip


def test_run_parallel_returns_results_in_order() -> None:
    barrier = threading.Barrier(4)

    def square_together(number: int) -> int:
        barrier.wait(timeout=10)  # returns only when four calls run concurrently
        time.sleep(0.001 * (4 - number))
        return number * number

    assert run_parallel(square_together, range(4), 4) == [0, 1, 4, 9]


def test_run_parallel_respects_the_concurrency() -> None:
    lock = threading.Lock()
    n_running, max_running = 0, 0

    def count(number: int) -> None:
        nonlocal n_running, max_running
        with lock:
            n_running += 1
            max_running = max(max_running, n_running)
        time.sleep(0.002)
        with lock:
            n_running -= 1

    run_parallel(count, range(30), 3)
    assert max_running == 3


def test_first_failure_is_raised_after_all_calls_have_finished() -> None:
    finished: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.005 if number == 2 else 0.001)
        finished.append(number)
        if number in (2, 5):
            raise ValueError(str(number))

    with pytest.raises(ValueError, match="2"):
        run_parallel(work, range(10), 4)
    assert sorted(finished) == list(range(10))


def test_interrupt_stops_calls_that_have_not_started() -> None:
    started: list[int] = []

    def work(number: int) -> None:
        started.append(number)
        if number == 0:
            raise KeyboardInterrupt
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run_parallel(work, range(100), 4)
    assert len(started) < 100


def test_interrupted_caller_waits_for_running_calls() -> None:
    """Otherwise a file that another thread is still writing would remain."""
    barrier, caller, caller_id = threading.Barrier(2), threading.current_thread(), threading.get_ident()
    started: list[int] = []
    finished: list[int] = []

    def work(number: int) -> None:
        started.append(number)
        barrier.wait(timeout=10)
        if threading.current_thread() is caller:
            return
        signal.pthread_kill(caller_id, signal.SIGINT)
        time.sleep(0.05)
        finished.append(number)

    with plain_interrupts(), pytest.raises(KeyboardInterrupt):
        run_parallel(work, range(2), 2)
    assert len(started) == 2
    assert len(finished) == 1


def test_nested_calls_finish_in_a_full_pool() -> None:
    def outer(number: int) -> int:
        return sum(run_parallel(lambda inner: inner, range(8), 8)) + number

    results = run_parallel(outer, range(2 * MAX_POOL_THREADS), 2 * MAX_POOL_THREADS)
    assert results == [28 + number for number in range(2 * MAX_POOL_THREADS)]


def test_forked_child_starts_new_threads() -> None:
    run_parallel(str, range(8), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn about any fork
        child = os.fork()
    if child == 0:
        barrier = threading.Barrier(2)
        ran_in_parallel = run_parallel(lambda number: barrier.wait(timeout=5) >= 0, range(2), 2) == [True, True]
        os._exit(0 if ran_in_parallel else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_parallel_calls_share_a_round_trip() -> None:
    assert current_round_trip() is None
    first = run_parallel(in_one_round_trip(lambda number: current_round_trip()), range(6), 3)
    second = run_parallel(in_one_round_trip(lambda number: current_round_trip()), range(6), 3)
    assert None not in first
    assert len(set(first)) == len(set(second)) == 1
    assert set(first) != set(second)
    assert current_round_trip() is None


def test_interrupt_takes_precedence_over_failures() -> None:
    """Otherwise the storage error would be retried, or be reported as the outcome of the call."""
    barrier = threading.Barrier(2)

    def fail_or_interrupt(number: int) -> None:
        barrier.wait(timeout=10)
        raise (TransientError("injected") if number == 0 else KeyboardInterrupt)

    with pytest.raises(KeyboardInterrupt):
        run_parallel(fail_or_interrupt, [0, 1], 2)


def test_started_call_runs_once_and_keeps_its_result() -> None:
    calls: list[int] = []

    def call() -> int:
        calls.append(1)
        return 7

    started = Started(call)
    assert [started.result(), started.result()] == [7, 7]
    assert started.is_done
    failing = Started(lambda: int("no number"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no number"):
            failing.result()
    assert calls == [1]


def test_result_does_not_wait_for_a_free_thread() -> None:
    """If all threads of the pool are busy, the caller runs the call itself."""
    may_finish = threading.Event()
    blocking_calls = [Started(lambda: may_finish.wait(timeout=30)) for _ in range(MAX_POOL_THREADS)]
    queued_call = Started(threading.current_thread)
    assert queued_call.result() is threading.current_thread()
    assert queued_call.is_done
    may_finish.set()
    assert all(blocking_call.result() for blocking_call in blocking_calls)


def test_forked_child_repeats_a_started_call() -> None:
    has_begun, may_finish = threading.Event(), threading.Event()

    def call() -> bool:
        has_begun.set()
        return may_finish.wait(timeout=30)

    started = Started(call)
    assert has_begun.wait(timeout=30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn about any fork
        child = os.fork()
    if child == 0:
        signal.alarm(10)
        may_finish.set()
        os._exit(0 if started.result() and started.result() else 1)
    may_finish.set()
    assert os.waitpid(child, 0)[1] == 0
    assert started.result()
