"""Replay seeds of the simulator, request by request: ``python -m tests.simulator.replay SEED [MUTATION]``."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from tests.simulator.mutations import CONDITIONS, MUTATIONS
from tests.simulator.scenario import simulate
from tests.simulator.upkeep_mutations import RARE_UPKEEP_MUTATIONS, UPKEEP_CONDITIONS, UPKEEP_MUTATIONS

_MUTATIONS = {**MUTATIONS, **UPKEEP_MUTATIONS, **RARE_UPKEEP_MUTATIONS}
_CONDITIONS = {**CONDITIONS, **UPKEEP_CONDITIONS}


def main() -> None:
    """Print every request of a run, and what is wrong with it."""
    seed, *names = sys.argv[1:]
    name = names[0] if names else None
    mutation = nullcontext if name is None else _MUTATIONS[name]
    outcome = simulate(int(seed), mutation, **({} if name is None else _CONDITIONS.get(name, {})))
    for number, (process, kind, path, fault) in enumerate(outcome.log, 1):
        print(f"{number:>6}  {process:<10}  {kind:<12}  {path}{f'  [{fault}]' if fault else ''}")
    print(*outcome.wrong or ["nothing is wrong"], sep="\n")


if __name__ == "__main__":
    main()
