"""Test random histories of a lakehouse and its clone: no needed file is deleted, and promotions are atomic."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.clock import ManualClock
from tests.conftest import SUMMARY_PROPERTY
from tests.operations.clone_faults import Event, format_counts
from tests.operations.clone_world import MAINTENANCE, SIDES, CloneWorld
from tests.operations.copy_world import Clock
from trinitylake_ops.storage import MemoryStorage, process_clock

pytestmark = pytest.mark.usefixtures("fixed_requests")

_STEPS = 16
ORDERS = list(itertools.permutations([f"{side}'s {operation}" for side in SIDES for operation in MAINTENANCE], 2))


def _run(monkeypatch: pytest.MonkeyPatch, seeds: Iterable[int]) -> Counter[Event]:
    """Run one history per seed, and return the counts of events. A failure reports its seed."""
    clock, counts = Clock(), Counter[Event]()
    monkeypatch.setattr(MemoryStorage, "now_ms", lambda _storage: clock.now_ms)
    for seed in seeds:
        world = CloneWorld(seed, clock, counts)
        try:
            with process_clock.using(ManualClock()):  # skips pauses between attempts
                for _ in range(_STEPS):
                    world.step()
                world.check_all()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {world.journal}") from error
        finally:
            world.close()
    return counts


def _summary(counts: Counter[Event]) -> str:
    missing = [pair for pair in ORDERS if not counts[Event("order", *pair)]]
    n_run = len(ORDERS) - len(missing)
    return f"{format_counts(counts)}\n\n{n_run} of {len(ORDERS)} orders of two maintenance operations were run"


def test_random_histories_lose_no_needed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(monkeypatch, range(2))


def test_refresh_slower_than_orphan_removal_loses_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh must not record a version for the clone after its manifest was removed."""
    _run(monkeypatch, [274])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(3, 1003, 100))
def test_1000_random_histories_lose_no_needed_file(
    monkeypatch: pytest.MonkeyPatch, first: int, record_property: Callable[[str, object], None]
) -> None:
    record_property(SUMMARY_PROPERTY, _summary(_run(monkeypatch, range(first, first + 100))))
