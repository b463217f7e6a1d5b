"""Replay seeds of the simulator, request by request: ``python -m tests.simulator.replay SEED [MUTATION]``."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from tests.simulator.mutations import MUTATIONS
from tests.simulator.scenario import simulate


def main() -> None:
    """Print every request of a run, and what is wrong with it."""
    seed, *names = sys.argv[1:]
    outcome = simulate(int(seed), MUTATIONS[names[0]] if names else nullcontext)
    for number, (process, kind, path, fault) in enumerate(outcome.log, 1):
        print(f"{number:>6}  {process:<10}  {kind:<12}  {path}{f'  [{fault}]' if fault else ''}")
    print(*outcome.wrong or ["nothing is wrong"], sep="\n")


if __name__ == "__main__":
    main()
