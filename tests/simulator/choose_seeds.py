"""Choose a small set of seeds that covers every fault for every kind of request, and every operation.

Run ``python -m tests.simulator.choose_seeds`` from the project's root when the test of all seeds reports an empty cell.
Changing the engine so that it reorders requests changes what a seed does, so other seeds may be needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.simulator.scenario import simulate
from tests.simulator.world import FAULTS, REQUESTS

CHOSEN = Path(__file__).with_name("chosen_seeds.txt")
#: The number of first seeds, which are always simulated.
N_FIRST_SEEDS = 30
_MAX_SEEDS = 5_000
_BATCH_SIZE = 100
_MIN_OCCURRENCES = 2  # if possible, because a small change to the engine can remove one of them
REQUIRED_EVENTS = (
    "unknown",
    "resolved as committed",
    "resolved as lost",
    "groups",
    "rolled back",
    "rolled back a selection",
    "conflicted",
    "resumed",
    "read as of a time",
    "groups rebased",
    "interrupted",
    "expire",
    "undelete",
    "purge",
    "purge: budget spent",
    "orphans",
    "export",
    "drop export",
    "export to target",
    "clean up target",
    "restore",
    "restore from target",
    "verify",
    "repair",
    "append",
    "trim",
    "register",
    "reconcile",
    "foreign commit",
    "foreign rollback",
)


def seeds() -> list[int]:
    """Return the seeds that `make test` simulates."""
    return [*range(N_FIRST_SEEDS), *map(int, CHOSEN.read_text().split())]


def _cells_of(seed: int) -> Counter[Hashable]:
    """Return how often a seed covers each of the cells and events that all seeds together must cover."""
    outcome = simulate(seed)
    cells = {cell: n for cell, n in outcome.injected.items() if cell[0] in REQUESTS and cell[1] in FAULTS}
    events = {event: outcome.events[event] for event in REQUIRED_EVENTS if outcome.events[event]}
    return Counter({**cells, **events})


def _seeds_until(required: Sequence[Hashable]) -> dict[int, Counter[Hashable]]:
    """Simulate seeds until all requirements are covered, and return the counts of each seed."""
    cells_by_seed: dict[int, Counter[Hashable]] = {}
    total: Counter[Hashable] = Counter()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for first in range(0, _MAX_SEEDS, _BATCH_SIZE):
            seeds = range(first, first + _BATCH_SIZE)
            cells_by_seed.update(zip(seeds, pool.map(_cells_of, seeds, chunksize=10), strict=True))
            total = sum((cells_by_seed[seed] for seed in seeds), total)
            if not (uncovered := [requirement for requirement in required if not total[requirement]]):
                return cells_by_seed
    raise SystemExit(f"not covered by {_MAX_SEEDS} seeds: {uncovered}")


def main() -> None:
    """Choose seeds greedily: each time the seed that covers most of the missing requirements."""
    required: list[Hashable] = [*((request, fault) for request in REQUESTS for fault in FAULTS), *REQUIRED_EVENTS]
    cells_by_seed = _seeds_until(required)
    total = sum(cells_by_seed.values(), Counter[Hashable]())
    missing = Counter({requirement: min(_MIN_OCCURRENCES, total[requirement]) for requirement in required})
    for seed in range(N_FIRST_SEEDS):
        missing -= cells_by_seed.pop(seed)
    chosen = []
    while missing:
        best = max(cells_by_seed, key=lambda seed: (missing & cells_by_seed[seed]).total())
        missing -= cells_by_seed.pop(best)
        chosen.append(best)
    CHOSEN.write_text("".join(f"{seed}\n" for seed in sorted(chosen)))
    print(f"{len(chosen)} seeds in addition to the first {N_FIRST_SEEDS}")


if __name__ == "__main__":
    main()
