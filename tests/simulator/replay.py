"""Replay seeds of the simulator, request by request: ``python -m tests.simulator.replay SEED [MUTATION]``."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from tests.simulator.maintenance_mutations import (
    MAINTENANCE_CONDITIONS,
    MAINTENANCE_MUTATIONS,
    RARE_MAINTENANCE_MUTATIONS,
)
from tests.simulator.mutations import CONDITIONS, MUTATIONS
from tests.simulator.scenario import simulate

_MUTATIONS = {**MUTATIONS, **MAINTENANCE_MUTATIONS, **RARE_MAINTENANCE_MUTATIONS}
_CONDITIONS = {**CONDITIONS, **MAINTENANCE_CONDITIONS}


def main() -> None:
    """Print every request of a run, and its violations."""
    seed, *names = sys.argv[1:]
    name = names[0] if names else None
    mutation = nullcontext if name is None else _MUTATIONS[name]
    outcome = simulate(int(seed), mutation, **({} if name is None else _CONDITIONS.get(name, {})))
    for number, (process, kind, path, fault) in enumerate(outcome.log, 1):
        print(f"{number:>6}  {process:<10}  {kind:<12}  {path}{f'  [{fault}]' if fault else ''}")
    print(*outcome.violations or ["no violations"], sep="\n")


if __name__ == "__main__":
    main()
