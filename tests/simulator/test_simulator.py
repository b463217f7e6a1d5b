"""The engine in a simulated world: many seeds, and every mutation of the engine caught."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import SHOWN
from tests.simulator.choose_seeds import HAPPENINGS, seeds
from tests.simulator.mutations import CONDITIONS, MUTATIONS
from tests.simulator.scenario import N_FOREIGN_STEPS, digest, simulate
from tests.simulator.upkeep import OPERATIONS
from tests.simulator.upkeep_mutations import RARE_UPKEEP_MUTATIONS, UPKEEP_CONDITIONS, UPKEEP_MUTATIONS
from tests.simulator.world import empty_cells, matrix
from trinitylake_ops.transaction import pacing
from trinitylake_ops.transaction.pacing import Pacing

N_PARTS = 4
#: Where `make soak` goes on.
FIRST_SOAK_SEED = 1_000
N_SOAK_SEEDS = 20_000
N_SEEDS_OF_A_PAIR = 100
N_SEEDS_WITHOUT_PACING = 6
_MOST_SEEDS_TO_CATCH = 400
REPLAY = "replay it with: python -m tests.simulator.replay"


def _run(seeds: Sequence[int]) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Simulate seeds, which must all be explained; returns what was injected and what happened."""
    injected: Counter[tuple[str, str]] = Counter()
    happened: Counter[str] = Counter()
    wrong: dict[int, list[str]] = {}
    for seed in seeds:
        outcome = simulate(seed)
        if outcome.wrong:
            wrong[seed] = outcome.wrong
        injected += outcome.injected
        happened += outcome.happened
    assert wrong == {}, f"{REPLAY} {min(wrong)}"
    return injected, happened


def _summary(injected: Counter[tuple[str, str]], happened: Counter[str]) -> str:
    return matrix(injected) + "\n\n" + "\n".join(f"{count:>9,}  {what}" for what, count in happened.most_common())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(N_PARTS))
def test_every_seed_is_explained_by_the_order_of_commits(
    part: int, run_folder: Path, record_property: Callable[[str, object], None]
) -> None:
    """Seeds in parts that run beside each other. The part that ends last looks at what all have met."""
    own = seeds()[part::N_PARTS]
    injected, happened = _run(own)
    assert happened["committed"] > 15 * len(own)
    written = run_folder / f"simulated-{part}.part"
    written.write_bytes(pickle.dumps((injected, happened)))
    written.rename(run_folder / f"simulated-{part}")
    ended = [run_folder / f"simulated-{number}" for number in range(N_PARTS)]
    if all(file.exists() for file in ended):
        _check_reached_situations([pickle.loads(file.read_bytes()) for file in ended], record_property)


def _check_reached_situations(
    parts: Sequence[tuple[Counter[tuple[str, str]], Counter[str]]], record_property: Callable[[str, object], None]
) -> None:
    """Check that every fault met every kind of request, and that every operation did its work."""
    injected, happened = Counter[tuple[str, str]](), Counter[str]()
    for injected_in_part, happened_in_part in parts:
        injected += injected_in_part
        happened += happened_in_part
    record_property(SHOWN, _summary(injected, happened))
    assert empty_cells(injected) == [], "choose other seeds: python -m tests.simulator.choose_seeds"
    for what in HAPPENINGS:
        assert happened[what], what


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("first", range(FIRST_SOAK_SEED, FIRST_SOAK_SEED + N_SOAK_SEEDS, N_SOAK_SEEDS // 10))
def test_many_more_seeds_are_explained(record_property: Callable[[str, object], None], first: int) -> None:
    injected, happened = _run(range(first, first + N_SOAK_SEEDS // 10))
    record_property(SHOWN, _summary(injected, happened))  # what a part seldom meets, the first seeds do


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pair", list(itertools.combinations(OPERATIONS, 2)), ids="-".join)
def test_pairs_of_operations_are_explained(
    record_property: Callable[[str, object], None], pair: tuple[str, str]
) -> None:
    """Two operations against each other and against commits, so that they meet more often."""
    happened: Counter[str] = Counter()
    wrong: dict[int, list[str]] = {}
    for seed in range(N_SEEDS_OF_A_PAIR):
        has_table, has_foreigner = {"trim", "register"} & set(pair), "reconcile" in pair
        outcome = simulate(
            seed,
            upkeep=pair,
            with_table=True if has_table else None,
            n_foreign_steps=N_FOREIGN_STEPS if has_foreigner else None,
        )
        if outcome.wrong:
            wrong[seed] = outcome.wrong
        happened += outcome.happened
    assert wrong == {}
    record_property(SHOWN, "\n".join(f"{count:>9,}  {what}" for what, count in happened.most_common()))


ALL_MUTATIONS = {**MUTATIONS, **UPKEEP_MUTATIONS, **RARE_UPKEEP_MUTATIONS}
ALL_CONDITIONS = {**CONDITIONS, **UPKEEP_CONDITIONS}
#: Seeds that caught mutations before, and are tried first.
_CAUGHT_AT = {
    "carry stale pointers in a rebase": 1,
    "delete the files of a commit with an unknown outcome": 22,
    "delete what the plan names, reached or not": 5,
    "expire what was exported meanwhile": 120,
    "export elsewhere beside other exports": 1,
    "export into what others clean up, with copies of any age": 197,
    "forget exports": 1,
    "free the names of purged versions": 1,
    "give an interrupted group to the next leader, though its root was sent": 19,
    "give up an old transaction whose root was sent": 0,
    "keep nothing that can be undeleted": 6,
    "let transactions commit whose files went as orphans": 9,
    "look nowhere for a resumed transaction": 8,
    "make up conflicts": 2,
    "mark no definitions of the lakehouse and of namespaces": 5,
    "mark no messages": 14,
    "mark no nodes": 6,
    "mark only once": 1_934,
    "overwrite roots instead of creating them": 1,
    "overwrite the settings that others changed": 3,
    "purge what was undeleted": 8,
    "put transactions together that touch each other": 8,
    "reconcile: bring back exports elsewhere that were dropped": 28,
    "reconcile: forget the exports of the other side": 1,
    "reconcile: forget what purges began with": 11,
    "remove orphans of any age": 236,
    "repair: forget exports that stand": 87,
    "restore beside other commits": 8,
    "roll back a choice, whatever else of it changed": 251,
    "roll back to the definition of that time": 1,
    "see no change by other programs": 2,
    "send again after the time to live": 12,
    "skip the check of new tables in a dropped namespace": 20,
    "skip the check of ranges": 16,
    "skip the check of read keys and ranges": 2,
    "skip the check of read settings": 8,
    "skip the check of single keys": 2,
    "skip the check of written keys": 1,
    "skip the check that the namespace is there": 1,
    "skip the read-back: a lost answer counts as committed": 3,
    "skip the read-back: a lost answer counts as lost": 3,
    "skip the time to live": 6,
    "take an undecided commit for lost": 100,
    "take the clock's time, also when it jumped back": 4,
    "take whatever root stands there for ours": 1,
    "travel to the latest version, whatever the time": 3,
    "trust the hint": 4,
    "undelete what is being purged": 28,
}
#: Mutations try the simulator, not the engine: a test run has a fourth of them.
_FEW = sorted([*MUTATIONS, *UPKEEP_MUTATIONS])[::4]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        name if name in _FEW else pytest.param(name, marks=pytest.mark.soak)
        for name in (*MUTATIONS, *UPKEEP_MUTATIONS, *RARE_UPKEEP_MUTATIONS)
    ],
)
def test_mutations_are_caught(name: str) -> None:
    conditions = ALL_CONDITIONS.get(name, {})
    seeds = (_CAUGHT_AT.get(name, 0), *range(_MOST_SEEDS_TO_CATCH))
    assert any(simulate(seed, ALL_MUTATIONS[name], **conditions).wrong for seed in seeds)


def test_each_mutation_changes_something_that_exists() -> None:
    """Most mutations run in ``make soak`` only: a renamed attribute of the engine must fail before."""
    assert _CAUGHT_AT.keys() <= ALL_MUTATIONS.keys()
    for mutation in ALL_MUTATIONS.values():
        with mutation():
            pass


def test_commits_are_correct_without_pacing() -> None:
    """Fairness, the commit lock, early reads and staged roots decide how fast commits are, and nothing else."""
    happened = Counter[str]()
    for seed in range(N_SEEDS_WITHOUT_PACING):
        outcome = simulate(seed, lambda: mock.patch.object(pacing, "WriterPacing", return_value=Pacing()))
        assert outcome.wrong == [], seed
        happened += outcome.happened
    assert happened["committed"] > 15 * N_SEEDS_WITHOUT_PACING


def test_a_seed_replays_exactly() -> None:
    """A seed does the same in another process, where sets of text have another order."""
    here = digest(simulate(7))
    assert here == digest(simulate(7))
    program = "from tests.simulator.scenario import digest, simulate; print(digest(simulate(7)))"
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == here
