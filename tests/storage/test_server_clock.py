"""The server's clock from the dates of its answers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.scripted_server import http_date
from trinitylake_ops.errors import StorageError, TransientError
from trinitylake_ops.storage.server_clock import MAX_AGE_SECONDS, ServerClock

SERVER_AHEAD_MS = 1_795_247_856_789.25


class World:
    """A local clock and a server whose clock is ahead of it by so much."""

    def __init__(self) -> None:
        self.local_ms = 5_000.0
        self.ahead_ms = SERVER_AHEAD_MS
        self.clock = ServerClock(local_ms=lambda: self.local_ms)
        self.n_asked = 0

    def exchange(self, there_ms: float = 1.0, back_ms: float = 1.0) -> None:
        self.n_asked += 1
        sent_at_ms = self.local_ms
        date = http_date((sent_at_ms + there_ms + self.ahead_ms) // 1000)
        self.local_ms += there_ms + back_ms
        self.clock.observe(date, sent_at_ms, self.local_ms)

    def error_ms(self) -> float:
        return self.clock.now_ms(self.exchange) - (self.local_ms + self.ahead_ms)


@given(st.lists(st.tuples(st.floats(0, 5_000), st.floats(0, 3_000), st.floats(0, 3_000)), min_size=1, max_size=30))
def test_it_never_leads_and_lags_by_a_second_and_a_round_trip_at_most(
    exchanges: list[tuple[float, float, float]],
) -> None:
    world = World()
    errors_ms = []
    for pause_ms, there_ms, back_ms in exchanges:
        world.local_ms += pause_ms
        world.exchange(there_ms, back_ms)
        errors_ms.append(world.error_ms())
        shortest_ms = min(there + back for _, there, back in exchanges[: len(errors_ms)])
        assert -1_001 - shortest_ms <= errors_ms[-1] <= 0.01
    assert all(later >= earlier - 1.01 for earlier, later in pairwise(errors_ms)), "it narrows down, never back"


def test_many_answers_make_it_exact() -> None:
    world = World()
    for _ in range(200):
        world.local_ms += 37.0
        world.exchange()
    assert -40 <= world.error_ms() <= 0


@pytest.mark.parametrize("step_ms", [-3_600_000, -5_000, 5_000, 3_600_000])
def test_a_clock_that_was_set_is_followed_with_the_next_answer(step_ms: float) -> None:
    world = World()
    for _ in range(50):
        world.local_ms += 37.0
        world.exchange()
    world.ahead_ms += step_ms
    world.exchange()
    assert -1_003 <= world.error_ms() <= 0


def test_it_asks_only_when_it_knows_nothing_or_nothing_new() -> None:
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
def test_answers_without_a_date_say_nothing(date: str | None) -> None:
    clock = ServerClock()
    with pytest.raises(StorageError, match="no Date header"):
        clock.now_ms(lambda: clock.observe(date, 0, 1))
    world = World()
    world.exchange()
    world.clock.observe(date, 0, 1)
    assert -1_003 <= world.error_ms() <= 0


def test_a_failure_to_ask_comes_through() -> None:
    def ask() -> None:
        raise TransientError("no answer")

    with pytest.raises(TransientError):
        ServerClock().now_ms(ask)
