"""Random histories of a lakehouse and its clone: nothing that either needs is ever gone, and no promotion is half."""

from __future__ import annotations

import pytest

from tests.maintenance.clone_world import CloneWorld
from tests.maintenance.copy_world import Clock
from trinitylake_ops.maintenance.gc import sweep
from trinitylake_ops.storage import MemoryStorage

_STEPS = 16


def _run(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    clock = Clock()
    monkeypatch.setattr(MemoryStorage, "now_ms", lambda _storage: clock.now_ms)
    monkeypatch.setattr(sweep, "_FIRST_PAUSE_SECONDS", 0.0)
    for seed in seeds:
        world = CloneWorld(seed, clock)
        try:
            for _ in range(_STEPS):
                world.step()
            world.check_all()
        finally:
            world.close()


def test_nothing_that_is_needed_is_ever_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(monkeypatch, range(3))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(3, 1003, 50))
def test_nothing_that_is_needed_is_ever_gone_in_1000_more(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    _run(monkeypatch, range(first, first + 50))
