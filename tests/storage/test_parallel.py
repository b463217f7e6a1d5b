"""The shared thread pool: order, failures, nesting and forks."""

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

    def meet(number: int) -> int:
        barrier.wait(timeout=10)  # returns only when four calls run concurrently
        time.sleep(0.001 * (4 - number))
        return number * number

    assert run_parallel(meet, range(4), 4) == [0, 1, 4, 9]


def test_run_parallel_respects_the_concurrency() -> None:
    lock = threading.Lock()
    running, most = 0, 0

    def count(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1

    run_parallel(count, range(30), 3)
    assert most == 3


def test_first_failure_is_raised_after_all_ended() -> None:
    ended: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.005 if number == 2 else 0.001)
        ended.append(number)
        if number in (2, 5):
            raise ValueError(str(number))

    with pytest.raises(ValueError, match="2"):
        run_parallel(work, range(10), 4)
    assert sorted(ended) == list(range(10))


def test_interrupt_stops_calls_that_have_not_started() -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise KeyboardInterrupt
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run_parallel(work, range(100), 4)
    assert len(begun) < 100


def test_interrupted_caller_waits_for_running_calls() -> None:
    """A file that another thread was still writing was left behind."""
    both, caller, caller_id = threading.Barrier(2), threading.current_thread(), threading.get_ident()
    begun: list[int] = []
    ended: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        both.wait(timeout=10)
        if threading.current_thread() is caller:
            return
        signal.pthread_kill(caller_id, signal.SIGINT)
        time.sleep(0.05)
        ended.append(number)

    with plain_interrupts(), pytest.raises(KeyboardInterrupt):
        run_parallel(work, range(2), 2)
    assert len(begun) == 2
    assert len(ended) == 1


def test_nested_calls_end_in_a_full_pool() -> None:
    def outer(number: int) -> int:
        return sum(run_parallel(lambda inner: inner, range(8), 8)) + number

    results = run_parallel(outer, range(2 * MAX_POOL_THREADS), 2 * MAX_POOL_THREADS)
    assert results == [28 + number for number in range(2 * MAX_POOL_THREADS)]


def test_forked_child_starts_its_own_threads() -> None:
    run_parallel(str, range(8), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn about any fork
        child = os.fork()
    if child == 0:
        barrier = threading.Barrier(2)
        done = run_parallel(lambda number: barrier.wait(timeout=5) >= 0, range(2), 2) == [True, True]
        os._exit(0 if done else 1)
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
    """A storage error instead of it would be retried, or taken for the outcome of the work."""
    both_began = threading.Barrier(2)

    def fail_or_interrupt(number: int) -> None:
        both_began.wait(timeout=10)
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


def test_run_parallel_does_not_wait_for_queued_threads() -> None:
    """Neither in a pool where all threads wait, nor for the call itself."""
    go_on = threading.Event()
    crowd = [Started(lambda: go_on.wait(timeout=30)) for _ in range(MAX_POOL_THREADS)]
    last = Started(threading.current_thread)
    assert last.result() is threading.current_thread()
    assert last.is_done
    go_on.set()
    assert all(future.result() for future in crowd)


def test_forked_child_repeats_a_started_call() -> None:
    begun, held = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return held.wait(timeout=30)

    started = Started(call)
    assert begun.wait(timeout=30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Python warn about any fork
        child = os.fork()
    if child == 0:
        signal.alarm(10)
        held.set()
        os._exit(0 if started.result() and started.result() else 1)
    held.set()
    assert os.waitpid(child, 0)[1] == 0
    assert started.result()
