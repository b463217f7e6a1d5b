"""Chooses few seeds in which every fault meets every kind of request, and every operation does its work.

Run ``python -m tests.simulator.choose_seeds`` from the project's root when the test of all seeds finds a cell empty. A
seed's course changes with the order of requests, so a change of the engine may need other seeds.
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
#: Simulated in any case: seeds that nobody chose.
N_FIRST_SEEDS = 30
_MOST_INSPECTED = 5_000
_AT_A_TIME = 100
_TIMES_MET = 2  # where that many are: a small change of the engine may move one of them
HAPPENINGS = (
    "unknown",
    "resolved as committed",
    "resolved as lost",
    "groups",
    "rolled back",
    "rolled back a choice",
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
    "export elsewhere",
    "clean up elsewhere",
    "restore",
    "restore from elsewhere",
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


def _met(seed: int) -> Counter[Hashable]:
    """Return how often a seed meets what all seeds together have to meet."""
    outcome = simulate(seed)
    cells = {cell: n for cell, n in outcome.injected.items() if cell[0] in REQUESTS and cell[1] in FAULTS}
    return Counter({**cells, **{what: outcome.happened[what] for what in HAPPENINGS if outcome.happened[what]}})


def _seeds_until(wanted: Sequence[Hashable]) -> dict[int, Counter[Hashable]]:
    """Simulate seeds until everything was met."""
    met: dict[int, Counter[Hashable]] = {}
    total: Counter[Hashable] = Counter()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for first in range(0, _MOST_INSPECTED, _AT_A_TIME):
            seeds = range(first, first + _AT_A_TIME)
            met.update(zip(seeds, pool.map(_met, seeds, chunksize=10), strict=True))
            total = sum((met[seed] for seed in seeds), total)
            if not (never := [what for what in wanted if not total[what]]):
                return met
    raise SystemExit(f"not met in {_MOST_INSPECTED} seeds: {never}")


def main() -> None:
    """Choose seeds one by one: each time the one that meets most of what is still missing."""
    wanted: list[Hashable] = [*((request, fault) for request in REQUESTS for fault in FAULTS), *HAPPENINGS]
    met = _seeds_until(wanted)
    total = sum(met.values(), Counter[Hashable]())
    missing = Counter({what: min(_TIMES_MET, total[what]) for what in wanted})
    for seed in range(N_FIRST_SEEDS):
        missing -= met.pop(seed)
    chosen = []
    while missing:
        best = max(met, key=lambda seed: (missing & met[seed]).total())
        missing -= met.pop(best)
        chosen.append(best)
    CHOSEN.write_text("".join(f"{seed}\n" for seed in sorted(chosen)))
    print(f"{len(chosen)} seeds, beside the first {N_FIRST_SEEDS}")


if __name__ == "__main__":
    main()
