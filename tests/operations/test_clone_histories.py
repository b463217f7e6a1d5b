"""Random histories of a lakehouse and its clone: nothing that either needs is ever gone, and no promotion is half."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.conftest import SHOWN
from tests.operations.clone_faults import Met, table_of
from tests.operations.clone_world import SIDES, UPKEEP, CloneWorld
from tests.operations.copy_world import Clock
from trinitylake_ops.operations.gc import delete
from trinitylake_ops.storage import MemoryStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

_STEPS = 16
ORDERS = list(itertools.permutations([f"{side}'s {what}" for side in SIDES for what in UPKEEP], 2))


def _run(monkeypatch: pytest.MonkeyPatch, seeds: Iterable[int]) -> Counter[Met]:
    """Play seeds, and return what was met. What is wrong with a seed names it."""
    clock, met = Clock(), Counter[Met]()
    monkeypatch.setattr(MemoryStorage, "now_ms", lambda _storage: clock.now_ms)
    monkeypatch.setattr(delete, "_FIRST_PAUSE_SECONDS", 0.0)
    for seed in seeds:
        world = CloneWorld(seed, clock, met)
        try:
            for _ in range(_STEPS):
                world.step()
            world.check_all()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {world.journal}") from error
        finally:
            world.close()
    return met


def _summary(met: Counter[Met]) -> str:
    lacking = [pair for pair in ORDERS if not met[Met("order", *pair)]]
    return f"{table_of(met)}\n\n{len(ORDERS) - len(lacking)} of {len(ORDERS)} orders of two steps of upkeep were met"


def test_nothing_that_is_needed_is_ever_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(monkeypatch, range(2))


def test_a_refresh_that_takes_longer_than_orphans_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """It recorded a version that is kept for the clone after its manifest was removed."""
    _run(monkeypatch, [274])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(3, 1003, 100))
def test_nothing_that_is_needed_is_ever_gone_in_1000_more(
    monkeypatch: pytest.MonkeyPatch, first: int, record_property: Callable[[str, object], None]
) -> None:
    record_property(SHOWN, _summary(_run(monkeypatch, range(first, first + 100))))
