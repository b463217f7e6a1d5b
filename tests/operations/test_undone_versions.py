"""Test which versions a later rollback undoes, for the lakehouse and for single tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.foreign import ForeignLake
from tests.lakes import Lakes, seal, table
from tests.operations.changes import alter, append_rows, create, drop
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.operations.diff.table_history import table_history
from trinitylake_ops.storage import MeteredStorage
from trinitylake_ops.versions.undone import Undone, find_undone

pytestmark = pytest.mark.usefixtures("fixed_requests")

A, B = ObjectName("ns", "a"), ObjectName("ns", "b")


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse with the tables ``ns.a`` and ``ns.b`` in version 1."""
    lakehouse = lakes.local()
    create(lakehouse, "ns", "a", "b")
    return lakehouse


def find_all_undone(lake: Lakehouse) -> Undone:
    return find_undone(lake.files, list(lake.history()))


def undone_versions(lake: Lakehouse, *objects: ObjectName) -> dict[int, int]:
    """Return a mapping of each undone version to its rollback. Consider only the chosen objects, if any."""
    undone = find_all_undone(lake)
    rollbacks = {info.version: undone.by(info.version, objects) for info in lake.history()}
    return {version: rollback for version, rollback in sorted(rollbacks.items()) if rollback is not None}


def undone_versions_of_table(lake: Lakehouse, table: str) -> dict[int, int]:
    """Return the undone versions in a table's history."""
    versions = table_history(lake, "ns", table).versions
    return {version.info.version: version.undone_by for version in reversed(versions) if version.undone_by is not None}


def test_versions_after_a_rollback_target_are_undone(lake: Lakehouse) -> None:
    alter(lake, "ns", "a")
    alter(lake, "ns", "b")
    assert undone_versions(lake) == {}
    operations.rollback(lake, 1)
    assert (undone_versions(lake), undone_versions_of_table(lake, "a"), undone_versions_of_table(lake, "b")) == (
        {2: 4, 3: 4},
        {2: 4},
        {3: 4},
    )
    alter(lake, "ns", "a")
    assert (undone_versions(lake), find_all_undone(lake).text(2), find_all_undone(lake).text(5)) == (
        {2: 4, 3: 4},
        "undone by 4",
        "",
    )
    assert find_undone(lake.files, []) == Undone()


def test_undone_rollback_undoes_nothing(lake: Lakehouse) -> None:
    alter(lake, "ns", "a")
    operations.rollback(lake, 1)
    operations.rollback(lake, 2)
    assert (undone_versions(lake), undone_versions_of_table(lake, "a")) == ({3: 4}, {3: 4})
    operations.rollback(lake, 3)
    assert (undone_versions(lake), undone_versions_of_table(lake, "a")) == ({2: 3, 4: 5}, {2: 3, 4: 5})


def test_rollback_of_a_table_undoes_only_this_table(lake: Lakehouse) -> None:
    alter(lake, "ns", "a")
    alter(lake, "ns", "b")
    operations.rollback(lake, 1, tables=["ns.a"])
    assert (undone_versions(lake, A), undone_versions(lake, B), undone_versions(lake)) == (
        {2: 4, 3: 4},
        {},
        {2: 4, 3: 4},
    )
    assert undone_versions(lake, ObjectName("ns")) == {2: 4, 3: 4}, (
        "a rollback of the namespace would restore the table"
    )
    assert (undone_versions_of_table(lake, "a"), undone_versions_of_table(lake, "b")) == ({2: 4}, {})
    assert find_all_undone(lake).text(2) == "ns.a undone by 4"
    operations.rollback(lake, 1)
    assert (find_all_undone(lake).text(3), undone_versions_of_table(lake, "b")) == ("undone by 5", {3: 5})
    alter(lake, "ns", "a")
    operations.rollback(lake, 5, tables=["ns.a"])
    assert (find_all_undone(lake).text(3), find_all_undone(lake).text(6)) == ("undone by 5", "ns.a undone by 7")


def test_version_of_removed_or_restored_table_is_undone(lake: Lakehouse) -> None:
    drop(lake, "ns", "a")
    operations.rollback(lake, 1, tables=["ns.a"])
    assert (undone_versions(lake, A), undone_versions_of_table(lake, "a")) == ({2: 3}, {2: 3})
    with lake.transaction() as txn:
        txn.create_namespace("more")
    create(lake, "new", "t")
    operations.rollback(lake, 4, namespaces=["new"])
    assert undone_versions(lake, ObjectName("new")) == {5: 6}
    assert undone_versions(lake, ObjectName("more")) == {}


def test_restore_from_an_export_undoes_later_versions(lake: Lakehouse, tmp_path: Path) -> None:
    good_version = append_rows(lake, "ns.c")
    operations.plan_export(lake, "away", "full", target=str(tmp_path / "backup")).execute()
    bad_version = append_rows(lake, "ns.c")
    restored_version = operations.plan_restore(lake, "away").execute().version
    assert good_version < bad_version < restored_version
    assert undone_versions(lake, ObjectName("ns", "c"))[bad_version] == restored_version


def commit_forged_rollback(lake: Lakehouse, to: int) -> None:
    with lake.transaction(operation="rollback", properties={"to_version": str(to)}) as txn:
        txn.alter_table("ns", "a", table(forged=str(to)))


def test_forged_rollback_record_undoes_nothing(lake: Lakehouse) -> None:
    alter(lake, "ns", "a")
    commit_forged_rollback(lake, 1)
    commit_forged_rollback(lake, 99_999)
    assert (undone_versions(lake), undone_versions_of_table(lake, "a")) == ({}, {})


@pytest.mark.parametrize("keeps_unknown", [False, True])
def test_target_of_a_foreign_rollback_is_detected_by_content(lakes: Lakes, *, keeps_unknown: bool) -> None:
    lake = lakes.local()
    create(lake, "ns", "a", "b")
    alter(lake, "ns", "a")
    alter(lake, "ns", "b")
    ForeignLake(lake.storage).rollback(2, keeps_unknown=keeps_unknown)
    assert undone_versions(Lakehouse(lake.storage)) == {3: 4}


def test_rollback_record_is_trusted_if_the_target_was_purged(lake: Lakehouse) -> None:
    alter(lake, "ns", "a")
    operations.rollback(lake, 1)
    alter(lake, "ns", "b")
    operations.rollback(lake, 3, tables=["ns.b"])
    seal(lake, 1)
    assert (undone_versions(lake, A), undone_versions_of_table(lake, "a")) == ({2: 3}, {2: 3})
    seal(lake, 3)
    assert undone_versions(lake, A)[2] in (3, 5)
    assert undone_versions(lake, B)[4] == 5


def test_history_without_rollback_needs_no_request(lake: Lakehouse) -> None:
    for _ in range(5):
        alter(lake, "ns", "a")
    metered = MeteredStorage(lake.storage)
    other = Lakehouse(metered)
    infos = list(other.history())
    with metered.measure() as measurement:
        assert find_undone(other.files, infos) == Undone()
    assert sum(measurement.counts.requests.values()) == 0
    operations.rollback(lake, 3)
    infos = list(other.history())
    with metered.measure() as measurement:
        assert find_undone(other.files, infos, max_requests=2).everything == {4: 7, 5: 7, 6: 7}
    assert sum(measurement.counts.requests.values()) == 2, "the roots of the rollback and of its target"


def _alter_random_table(lake: Lakehouse, rng: random.Random) -> None:
    alter(lake, "ns", rng.choice("ab"))


def _roll_back_randomly(lake: Lakehouse, rng: random.Random) -> None:
    tables = rng.choice([None, ["ns.a"], ["ns.b"]])
    operations.rollback(lake, rng.randrange(1, lake.latest_version() + 1), tables=tables)


@pytest.mark.parametrize("seed", range(4))
def test_undone_versions_match_a_model(lakes: Lakes, seed: int) -> None:
    lake, rng = lakes.memory(), random.Random(seed)
    create(lake, "ns", "a", "b")
    actions: list[Callable[[Lakehouse, random.Random], None]] = [
        _alter_random_table,
        _alter_random_table,
        _roll_back_randomly,
    ]
    lineages: list[dict[str, list[int]]] = [{"a": [0], "b": [0]}, {"a": [0, 1], "b": [0, 1]}]
    for _ in range(14):
        rng.choice(actions)(lake, rng)
        info = next(lake.history())
        if info.version < len(lineages):
            continue  # the rollback changed nothing
        lineages.append(_extend_lineages(lake, info, lineages))
    for name in "ab":
        expected = {version for version in range(len(lineages)) if version not in lineages[-1][name]}
        assert set(undone_versions(lake, ObjectName("ns", name))) == expected


def _extend_lineages(lake: Lakehouse, info: Any, lineages: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Return the lineages of the tables at a new version. After a rollback, a lineage continues from its target."""
    target_version = info.properties.get("to_version")
    changed_tables = {change.table for change in lake.diff(info.version - 1, info.version)}
    new_lineages = {}
    for name, lineage in lineages[-1].items():
        is_rollback = target_version is not None and (info.rollback_from is not None or name in changed_tables)
        new_lineages[name] = [*(lineages[int(target_version)][name] if is_rollback else lineage), info.version]
    return new_lineages
