"""The estimate of a server's clock from the dates of its responses."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.scripted_server import http_date
from trinitylake_ops.errors import StorageError, TransientError
from trinitylake_ops.storage.http.clock import MAX_AGE_SECONDS, MAX_DRIFT, ServerClock, monotonic_ms

SERVER_OFFSET_MS = 1_795_247_856_789.25
YEAR_MS = 365 * 86_400_000.0


class SimulatedClocks:
    """A local clock, and a server whose clock is ahead by an offset and a drift."""

    def __init__(self, drift: float = 0.0) -> None:
        self.local_ms = 5_000.0
        self.server_offset_ms = SERVER_OFFSET_MS
        self.drift = drift
        self.wall_offset_ms = 0.0
        self.estimate = ServerClock(
            local_ms=lambda: self.local_ms, wall_ms=lambda: self.local_ms + SERVER_OFFSET_MS + self.wall_offset_ms
        )
        self.n_requests = 0

    def exchange(self, request_ms: float = 1.0, response_ms: float = 1.0) -> None:
        self.n_requests += 1
        sent_at_ms = self.local_ms
        self.local_ms += request_ms
        date = http_date(self.server_ms() // 1000)
        self.local_ms += response_ms
        self.estimate.observe(date, sent_at_ms, self.local_ms)

    def server_ms(self) -> float:
        return self.local_ms * (1 + self.drift) + self.server_offset_ms

    def now_ms(self) -> int:
        return self.estimate.now_ms(self.exchange)

    def error_ms(self) -> float:
        return self.now_ms() - self.server_ms()


@given(
    st.lists(st.tuples(st.floats(0, 60_000), st.floats(0, 3_000), st.floats(0, 3_000)), min_size=1, max_size=30),
    st.floats(-MAX_DRIFT, MAX_DRIFT),
)
def test_clock_is_never_ahead_never_decreases_and_lags_little(
    exchanges: list[tuple[float, float, float]], drift: float
) -> None:
    clocks = SimulatedClocks(drift)
    previous_ms = 0
    for pause_ms, request_ms, response_ms in exchanges:
        clocks.exchange(request_ms, response_ms)
        assert clocks.now_ms() >= previous_ms
        assert -1_005 - request_ms - response_ms <= clocks.error_ms() <= 0.01
        clocks.local_ms += pause_ms
        assert -1_030 - request_ms - response_ms <= clocks.error_ms() <= 0.01
        previous_ms = clocks.now_ms()


@pytest.mark.parametrize("drift", [-50e-6, 50e-6, -MAX_DRIFT, MAX_DRIFT])
@pytest.mark.parametrize("pause_ms", [737.0, 110_007.0])
def test_clock_follows_a_drifting_server_without_steps(drift: float, pause_ms: float) -> None:
    clocks = SimulatedClocks(drift)
    clocks.exchange()
    previous_ms, errors_ms = clocks.now_ms(), []
    while clocks.local_ms < 4 * 3_600_000:
        clocks.local_ms += pause_ms
        clocks.exchange()
        errors_ms.append(clocks.error_ms())
        assert clocks.now_ms() >= previous_ms
        previous_ms = clocks.now_ms()
    assert min(errors_ms) >= -1_005
    assert max(errors_ms) <= 0.01


@given(st.permutations(range(6)))
def test_clock_accepts_responses_in_any_order(order: list[int]) -> None:
    """Threads may record responses late and in another order than that of their arrival."""
    clocks = SimulatedClocks(drift=MAX_DRIFT)
    responses = []
    for _ in order:
        sent_at_ms, date = clocks.local_ms, http_date(clocks.server_ms() // 1000)
        clocks.local_ms += 10_300.0
        responses.append((date, sent_at_ms, sent_at_ms + 2.0))
    for number in order:
        clocks.estimate.observe(*responses[number])
        assert -1_100 <= clocks.error_ms() <= 0.01


def test_many_responses_tighten_the_estimate() -> None:
    clocks = SimulatedClocks()
    for _ in range(200):
        clocks.local_ms += 37.0
        clocks.exchange()
    assert -40 <= clocks.error_ms() <= 0


@pytest.mark.parametrize("step_ms", [-3_000_000, -5_000, 5_000, 3_600_000])
def test_clock_follows_a_changed_server_clock_after_one_response(step_ms: float) -> None:
    clocks = SimulatedClocks()
    for _ in range(50):
        clocks.local_ms += 37.0
        clocks.exchange()
    clocks.server_offset_ms += step_ms
    clocks.exchange()
    assert -1_003 <= clocks.error_ms() <= 0


def test_clock_sends_requests_only_without_a_recent_response() -> None:
    clocks = SimulatedClocks()
    clocks.error_ms()
    clocks.error_ms()
    assert clocks.n_requests == 1
    clocks.local_ms += MAX_AGE_SECONDS * 1000 - 1
    clocks.error_ms()
    assert clocks.n_requests == 1
    clocks.local_ms += 2
    clocks.error_ms()
    assert clocks.n_requests == 2


@pytest.mark.parametrize("date", [None, "", "yesterday", "Sat, 99 Nov 2026 07:00:05 GMT"])
def test_responses_without_a_date_are_ignored(date: str | None) -> None:
    clock = ServerClock()
    with pytest.raises(StorageError):
        clock.now_ms(lambda: clock.observe(date, 0, 1))
    clocks = SimulatedClocks()
    clocks.exchange()
    clocks.estimate.observe(date, 0, 1)
    assert -1_003 <= clocks.error_ms() <= 0


def test_local_clock_advances_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks_ns = {time.CLOCK_BOOTTIME: 7_000_000_000}
    monkeypatch.setattr(time, "clock_gettime_ns", clocks_ns.__getitem__)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 2_000_000_000)
    assert monotonic_ms() == 7_000
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert monotonic_ms() == 2_000, "the system has no such clock"


def test_failed_time_request_raises_its_error() -> None:
    def request_time() -> None:
        raise TransientError("no response")

    with pytest.raises(TransientError):
        ServerClock().now_ms(request_time)


@pytest.mark.parametrize("wall_offset_ms", [-3_602_000.0, 3_602_000.0, -80 * YEAR_MS, 80 * YEAR_MS])
def test_date_that_is_wrong_by_hours_is_rejected(wall_offset_ms: float) -> None:
    """A version with such a time would force all later versions to have later times."""
    clocks = SimulatedClocks()
    clocks.wall_offset_ms = wall_offset_ms
    with pytest.raises(StorageError):
        clocks.now_ms()
    clocks.wall_offset_ms = wall_offset_ms / abs(wall_offset_ms) * 3_590_000
    assert abs(clocks.error_ms()) < 1_005


def test_expected_time_is_requested_once_in_parallel() -> None:
    clocks = SimulatedClocks()
    clocks.estimate.expect(clocks.exchange)
    clocks.estimate.expect(clocks.exchange)
    assert -1_005 <= clocks.error_ms() <= 0.01
    clocks.estimate.expect(clocks.exchange)
    assert clocks.now_ms() > 0
    assert clocks.n_requests == 1


def test_old_expected_time_is_requested_again() -> None:
    clocks, is_requested = SimulatedClocks(), threading.Event()

    def request_time() -> None:
        clocks.exchange()
        is_requested.set()

    clocks.estimate.expect(request_time)
    assert is_requested.wait(60)
    clocks.local_ms += 3_600_000
    assert -1_005 <= clocks.error_ms() <= 0.01
    assert clocks.n_requests == 2


def test_failed_expected_time_raises_and_can_be_retried() -> None:
    clocks = SimulatedClocks()

    def fail() -> None:
        raise TransientError("no response")

    clocks.estimate.expect(fail)
    with pytest.raises(TransientError):
        clocks.now_ms()
    assert -1_005 <= clocks.error_ms() <= 0.01
