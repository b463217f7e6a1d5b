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

SERVER_AHEAD_MS = 1_795_247_856_789.25
YEAR_MS = 365 * 86_400_000.0


class World:
    """A local clock, and a server whose clock is ahead by an offset and a drift."""

    def __init__(self, drift: float = 0.0) -> None:
        self.local_ms = 5_000.0
        self.ahead_ms = SERVER_AHEAD_MS
        self.drift = drift
        self.wall_ahead_ms = 0.0
        self.clock = ServerClock(
            local_ms=lambda: self.local_ms, wall_ms=lambda: self.local_ms + SERVER_AHEAD_MS + self.wall_ahead_ms
        )
        self.n_asked = 0

    def exchange(self, there_ms: float = 1.0, back_ms: float = 1.0) -> None:
        self.n_asked += 1
        sent_at_ms = self.local_ms
        self.local_ms += there_ms
        date = http_date(self.server_ms() // 1000)
        self.local_ms += back_ms
        self.clock.observe(date, sent_at_ms, self.local_ms)

    def server_ms(self) -> float:
        return self.local_ms * (1 + self.drift) + self.ahead_ms

    def now_ms(self) -> int:
        return self.clock.now_ms(self.exchange)

    def error_ms(self) -> float:
        return self.now_ms() - self.server_ms()


@given(
    st.lists(st.tuples(st.floats(0, 60_000), st.floats(0, 3_000), st.floats(0, 3_000)), min_size=1, max_size=30),
    st.floats(-MAX_DRIFT, MAX_DRIFT),
)
def test_clock_is_never_ahead_never_decreases_and_lags_little(
    exchanges: list[tuple[float, float, float]], drift: float
) -> None:
    world = World(drift)
    before_ms = 0
    for pause_ms, there_ms, back_ms in exchanges:
        world.exchange(there_ms, back_ms)
        assert world.now_ms() >= before_ms
        assert -1_005 - there_ms - back_ms <= world.error_ms() <= 0.01
        world.local_ms += pause_ms
        assert -1_030 - there_ms - back_ms <= world.error_ms() <= 0.01
        before_ms = world.now_ms()


@pytest.mark.parametrize("drift", [-50e-6, 50e-6, -MAX_DRIFT, MAX_DRIFT])
@pytest.mark.parametrize("pause_ms", [737.0, 110_007.0])
def test_clock_follows_a_drifting_server_without_steps(drift: float, pause_ms: float) -> None:
    world = World(drift)
    world.exchange()
    before_ms, errors_ms = world.now_ms(), []
    while world.local_ms < 4 * 3_600_000:
        world.local_ms += pause_ms
        world.exchange()
        errors_ms.append(world.error_ms())
        assert world.now_ms() >= before_ms
        before_ms = world.now_ms()
    assert min(errors_ms) >= -1_005
    assert max(errors_ms) <= 0.01


@given(st.permutations(range(6)))
def test_clock_accepts_responses_in_any_order(order: list[int]) -> None:
    """Threads record their responses later than they arrived, and in another order."""
    world = World(drift=MAX_DRIFT)
    answers = []
    for _ in order:
        sent_at_ms, date = world.local_ms, http_date(world.server_ms() // 1000)
        world.local_ms += 10_300.0
        answers.append((date, sent_at_ms, sent_at_ms + 2.0))
    for number in order:
        world.clock.observe(*answers[number])
        assert -1_100 <= world.error_ms() <= 0.01


def test_many_responses_tighten_the_estimate() -> None:
    world = World()
    for _ in range(200):
        world.local_ms += 37.0
        world.exchange()
    assert -40 <= world.error_ms() <= 0


@pytest.mark.parametrize("step_ms", [-3_000_000, -5_000, 5_000, 3_600_000])
def test_clock_follows_a_changed_server_clock_after_one_response(step_ms: float) -> None:
    world = World()
    for _ in range(50):
        world.local_ms += 37.0
        world.exchange()
    world.ahead_ms += step_ms
    world.exchange()
    assert -1_003 <= world.error_ms() <= 0


def test_clock_sends_requests_only_without_a_recent_response() -> None:
    world = World()
    world.error_ms()
    world.error_ms()
    assert world.n_asked == 1
    world.local_ms += MAX_AGE_SECONDS * 1000 - 1
    world.error_ms()
    assert world.n_asked == 1
    world.local_ms += 2
    world.error_ms()
    assert world.n_asked == 2


@pytest.mark.parametrize("date", [None, "", "yesterday", "Sat, 99 Nov 2026 07:00:05 GMT"])
def test_responses_without_a_date_are_ignored(date: str | None) -> None:
    clock = ServerClock()
    with pytest.raises(StorageError):
        clock.now_ms(lambda: clock.observe(date, 0, 1))
    world = World()
    world.exchange()
    world.clock.observe(date, 0, 1)
    assert -1_003 <= world.error_ms() <= 0


def test_local_clock_advances_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sleep_ns = {time.CLOCK_BOOTTIME: 7_000_000_000}
    monkeypatch.setattr(time, "clock_gettime_ns", with_sleep_ns.__getitem__)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 2_000_000_000)
    assert monotonic_ms() == 7_000
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert monotonic_ms() == 2_000, "where the system has no such clock"


def test_failed_time_request_raises_its_error() -> None:
    def ask() -> None:
        raise TransientError("no answer")

    with pytest.raises(TransientError):
        ServerClock().now_ms(ask)


@pytest.mark.parametrize("ahead_ms", [-3_602_000.0, 3_602_000.0, -80 * YEAR_MS, 80 * YEAR_MS])
def test_date_that_is_wrong_by_hours_is_rejected(ahead_ms: float) -> None:
    """A version with such a time would force later versions to have later times."""
    world = World()
    world.wall_ahead_ms = ahead_ms
    with pytest.raises(StorageError):
        world.now_ms()
    world.wall_ahead_ms = ahead_ms / abs(ahead_ms) * 3_590_000
    assert abs(world.error_ms()) < 1_005


def test_expected_time_is_requested_once_in_parallel() -> None:
    world = World()
    world.clock.expect(world.exchange)
    world.clock.expect(world.exchange)
    assert -1_005 <= world.error_ms() <= 0.01
    world.clock.expect(world.exchange)
    assert world.now_ms() > 0
    assert world.n_asked == 1


def test_old_expected_time_is_requested_again() -> None:
    world, asked = World(), threading.Event()

    def ask() -> None:
        world.exchange()
        asked.set()

    world.clock.expect(ask)
    assert asked.wait(60)
    world.local_ms += 3_600_000
    assert -1_005 <= world.error_ms() <= 0.01
    assert world.n_asked == 2


def test_failed_expected_time_raises_and_can_be_retried() -> None:
    world = World()

    def fails() -> None:
        raise TransientError("no answer")

    world.clock.expect(fails)
    with pytest.raises(TransientError):
        world.now_ms()
    assert -1_005 <= world.error_ms() <= 0.01
