"""Test random histories of a lakehouse and its copies and exports: no needed file is deleted."""

from __future__ import annotations

import pytest

from tests.operations.copy_world import Clock, CopyWorld, Recorder
from trinitylake_ops.storage import MemoryStorage

pytestmark = [
    pytest.mark.filterwarnings("ignore:Delete operation did not match any records"),
    pytest.mark.usefixtures("fixed_requests"),
]

_STEPS = 25
_SEEDS_PER_TEST = 5


def _run(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    clock = Clock()
    monkeypatch.setattr(MemoryStorage, "now_ms", lambda _storage: clock.now_ms)
    recorder = Recorder(monkeypatch)
    for seed in seeds:
        world = CopyWorld(seed, clock, recorder)
        try:
            for _ in range(_STEPS):
                world.step()
            world.check_all()
        finally:
            world.close()


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(first, marks=pytest.mark.soak) for first in range(_SEEDS_PER_TEST, 220, _SEEDS_PER_TEST))],
)
def test_random_histories_lose_no_needed_file(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    _run(monkeypatch, range(first, first + _SEEDS_PER_TEST))
