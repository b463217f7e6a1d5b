"""The engine in a simulated world: a serial history explains every seed, and every mutation is detected."""

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

from tests.conftest import SUMMARY_PROPERTY
from tests.simulator.choose_seeds import REQUIRED_EVENTS, seeds
from tests.simulator.maintenance import OPERATIONS
from tests.simulator.maintenance_mutations import (
    MAINTENANCE_CONDITIONS,
    MAINTENANCE_MUTATIONS,
    RARE_MAINTENANCE_MUTATIONS,
)
from tests.simulator.mutations import CONDITIONS, MUTATIONS
from tests.simulator.scenario import N_FOREIGN_STEPS, digest, simulate
from tests.simulator.world import empty_cells, matrix
from trinitylake_ops.transaction import pacing
from trinitylake_ops.transaction.pacing import Pacing

N_PARTS = 4
#: First seed of `make soak`.
FIRST_SOAK_SEED = 1_000
N_SOAK_SEEDS = 20_000
N_SEEDS_PER_PAIR = 100
N_SEEDS_WITHOUT_PACING = 6
_MAX_SEEDS_PER_MUTATION = 400
REPLAY = "replay it with: python -m tests.simulator.replay"


def _run(seeds: Sequence[int]) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Simulate seeds and check that none has violations. Return counts of injected faults and of events."""
    injected: Counter[tuple[str, str]] = Counter()
    events: Counter[str] = Counter()
    violations: dict[int, list[str]] = {}
    for seed in seeds:
        outcome = simulate(seed)
        if outcome.violations:
            violations[seed] = outcome.violations
        injected += outcome.injected
        events += outcome.events
    assert violations == {}, f"{REPLAY} {min(violations)}"
    return injected, events


def _summary(injected: Counter[tuple[str, str]], events: Counter[str]) -> str:
    return matrix(injected) + "\n\n" + "\n".join(f"{count:>9,}  {event}" for event, count in events.most_common())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(N_PARTS))
def test_every_seed_is_explained_by_the_order_of_commits(
    part: int, run_folder: Path, record_property: Callable[[str, object], None]
) -> None:
    """Simulate the seeds in parallel parts. The part that ends last checks the coverage of all parts."""
    seeds_of_part = seeds()[part::N_PARTS]
    injected, events = _run(seeds_of_part)
    assert events["committed"] > 15 * len(seeds_of_part)
    result_file = run_folder / f"simulated-{part}.part"
    result_file.write_bytes(pickle.dumps((injected, events)))
    result_file.rename(run_folder / f"simulated-{part}")
    result_files = [run_folder / f"simulated-{number}" for number in range(N_PARTS)]
    if all(file.exists() for file in result_files):
        _check_coverage([pickle.loads(file.read_bytes()) for file in result_files], record_property)


def _check_coverage(
    parts: Sequence[tuple[Counter[tuple[str, str]], Counter[str]]], record_property: Callable[[str, object], None]
) -> None:
    """Check that every fault occurred with every kind of request, and that every operation took effect."""
    injected, events = Counter[tuple[str, str]](), Counter[str]()
    for injected_in_part, events_in_part in parts:
        injected += injected_in_part
        events += events_in_part
    record_property(SUMMARY_PROPERTY, _summary(injected, events))
    assert empty_cells(injected) == [], "choose other seeds: python -m tests.simulator.choose_seeds"
    for event in REQUIRED_EVENTS:
        assert events[event], event


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("first", range(FIRST_SOAK_SEED, FIRST_SOAK_SEED + N_SOAK_SEEDS, N_SOAK_SEEDS // 10))
def test_soak_seeds_are_explained(record_property: Callable[[str, object], None], first: int) -> None:
    injected, events = _run(range(first, first + N_SOAK_SEEDS // 10))
    record_property(SUMMARY_PROPERTY, _summary(injected, events))  # a single part need not cover everything


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pair", list(itertools.combinations(OPERATIONS, 2)), ids="-".join)
def test_pairs_of_operations_are_explained(
    record_property: Callable[[str, object], None], pair: tuple[str, str]
) -> None:
    """Run only two operations next to commits, so that they conflict more often."""
    events: Counter[str] = Counter()
    violations: dict[int, list[str]] = {}
    for seed in range(N_SEEDS_PER_PAIR):
        has_table, has_foreign_writer = {"trim", "register"} & set(pair), "reconcile" in pair
        outcome = simulate(
            seed,
            maintenance_operations=pair,
            with_table=True if has_table else None,
            n_foreign_steps=N_FOREIGN_STEPS if has_foreign_writer else None,
        )
        if outcome.violations:
            violations[seed] = outcome.violations
        events += outcome.events
    assert violations == {}
    record_property(SUMMARY_PROPERTY, "\n".join(f"{count:>9,}  {event}" for event, count in events.most_common()))


ALL_MUTATIONS = {**MUTATIONS, **MAINTENANCE_MUTATIONS, **RARE_MAINTENANCE_MUTATIONS}
ALL_CONDITIONS = {**CONDITIONS, **MAINTENANCE_CONDITIONS}
#: Seeds that are known to detect a mutation, and are tried first.
_DETECTING_SEEDS = {
    "commit transactions whose files were removed as orphans": 9,
    "delete all planned files, even referenced ones": 5,
    "delete the files of a commit with an unknown outcome": 22,
    "delete the roots of purged versions": 1,
    "expire versions that were exported in the meantime": 120,
    "export to a target despite concurrent exports": 1,
    "export with copies of any age during a cleanup of the target": 197,
    "fail an expired transaction whose root was sent": 0,
    "group transactions that conflict": 8,
    "ignore changes by other programs": 2,
    "ignore exports": 1,
    "keep no files of expired versions": 6,
    "keep stale pointers in a rebase": 1,
    "mark no lakehouse and namespace definitions": 5,
    "mark no messages": 14,
    "mark no nodes": 6,
    "mark only once": 1_934,
    "overwrite roots instead of creating them": 1,
    "overwrite settings changed by other transactions": 3,
    "purge undeleted versions": 8,
    "reconcile: ignore purges that have begun": 11,
    "reconcile: ignore the exports of the replaced definition": 1,
    "reconcile: restore dropped exports to a target": 28,
    "remove orphans of any age": 236,
    "repair: drop existing exports": 87,
    "report an undecided commit as lost": 100,
    "report conflicts that do not exist": 2,
    "requeue an interrupted group whose root was sent": 19,
    "resend after the time to live": 12,
    "restore despite concurrent commits": 8,
    "return the latest version for any time": 3,
    "roll back a selection despite concurrent changes": 251,
    "roll back to the lakehouse definition of the target": 1,
    "skip the check of new tables in a dropped namespace": 20,
    "skip the check of ranges": 16,
    "skip the check of read keys and ranges": 2,
    "skip the check of read settings": 8,
    "skip the check of single keys": 2,
    "skip the check of written keys": 1,
    "skip the check that the namespace exists": 1,
    "skip the read-back: a lost response counts as committed": 3,
    "skip the read-back: a lost response counts as lost": 3,
    "skip the search for a resumed transaction": 8,
    "skip the time to live": 6,
    "treat any existing root as ours": 1,
    "trust the hint": 4,
    "undelete versions that are being purged": 28,
    "use the clock's time even if it jumped back": 4,
}
#: Mutations test the simulator, not the engine, so that a normal test run has only a quarter of them.
_REGULAR_MUTATIONS = sorted([*MUTATIONS, *MAINTENANCE_MUTATIONS])[::4]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        name if name in _REGULAR_MUTATIONS else pytest.param(name, marks=pytest.mark.soak)
        for name in (*MUTATIONS, *MAINTENANCE_MUTATIONS, *RARE_MAINTENANCE_MUTATIONS)
    ],
)
def test_mutation_is_detected(name: str) -> None:
    conditions = ALL_CONDITIONS.get(name, {})
    seeds = (_DETECTING_SEEDS.get(name, 0), *range(_MAX_SEEDS_PER_MUTATION))
    assert any(simulate(seed, ALL_MUTATIONS[name], **conditions).violations for seed in seeds)


def test_mutations_patch_existing_code() -> None:
    """Most mutations run only in ``make soak``, but a renamed attribute of the engine must be noticed earlier."""
    assert _DETECTING_SEEDS.keys() <= ALL_MUTATIONS.keys()
    for mutation in ALL_MUTATIONS.values():
        with mutation():
            pass


def test_commits_are_correct_without_pacing() -> None:
    """Fairness, the commit lock, early reads and staged roots affect only the speed of commits."""
    events = Counter[str]()
    for seed in range(N_SEEDS_WITHOUT_PACING):
        outcome = simulate(seed, lambda: mock.patch.object(pacing, "WriterPacing", return_value=Pacing()))
        assert outcome.violations == [], seed
        events += outcome.events
    assert events["committed"] > 15 * N_SEEDS_WITHOUT_PACING


def test_seed_replays_exactly() -> None:
    """Replay a seed in another process, in which sets of strings have a different order."""
    expected = digest(simulate(7))
    assert expected == digest(simulate(7))
    program = "from tests.simulator.scenario import digest, simulate; print(digest(simulate(7)))"
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.strip() == expected
