"""Test dropping exports by retention rules."""

from __future__ import annotations

import pytest

from tests.lakes import Lakes
from tests.operations.aging import DAY_MS, HOUR_MS, Aging
from tests.operations.reads import ReadPaths
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ExportNotFoundError, InvalidInputError, PlanChangedError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.operations import RetentionPolicy


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    """A lakehouse with three exports a day over ten days."""
    aging = Aging.on(lakes.storage())
    aging.later(DAY_MS - aging.clock.time_ms % DAY_MS)  # start at midnight
    for day in range(10):
        for hour in range(3):
            operations.plan_export(aging.lake, f"nightly-{day}-{hour}").execute()
            aging.later(HOUR_MS)
        aging.later(DAY_MS - 3 * HOUR_MS)
    return aging


def export_names(lake: Lakehouse) -> list[str]:
    return [info.name for info in operations.list_exports(lake)]


def keep(**numbers: int) -> RetentionPolicy:
    return RetentionPolicy(**{"maximum_age_ms": 0, "minimum_versions": 0, "protected_ms": 0, **numbers})


@pytest.mark.parametrize(
    ("policy", "n_kept"),
    [
        (keep(keep_last=4), 4),
        (keep(keep_daily=5), 5),
        (keep(keep_daily=5, keep_last=2), 6),
        (keep(maximum_age_ms=3 * DAY_MS), 9),
        (keep(keep_monthly=100), None),
    ],
    ids=["last", "daily", "both", "age", "monthly"],
)
def test_each_rule_keeps_exports_independently(aging: Aging, policy: RetentionPolicy, n_kept: int | None) -> None:
    before = export_names(aging.lake)
    plan = operations.plan_prune_exports(aging.lake, "nightly-*", policy)
    assert export_names(aging.lake) == before
    version = plan.execute(plan.digest).version
    assert set(export_names(aging.lake)) == set(before) - set(plan.names)
    assert "nightly-9-2" in export_names(aging.lake)
    assert version == aging.lake.latest_version()
    assert n_kept is None or len(export_names(aging.lake)) == n_kept
    assert operations.verify(aging.lake).is_clean


def test_incomplete_and_foreign_exports_are_kept(aging: Aging) -> None:
    lake = aging.lake
    operations.plan_export(lake, "manual").execute()
    lake.alter_definition(
        exported_snapshots={**lake.snapshot().definition.exported_snapshots, "nightly-x": root_path(1)}
    )
    aging.later()
    operations.plan_prune_exports(lake, "nightly-*", keep(keep_last=1)).execute()
    assert export_names(lake) == ["manual", "nightly-9-2", "nightly-x"]
    repeated = operations.plan_prune_exports(lake, "nightly-*", keep(keep_last=1))
    assert (repeated.names, repeated.execute().version) == ((), lake.latest_version())


def test_invalid_policies_are_rejected(aging: Aging) -> None:
    lake = aging.lake
    with pytest.raises(InvalidInputError):
        operations.plan_prune_exports(lake, "*", keep())
    plan = operations.plan_prune_exports(lake, "*", keep(keep_last=1))
    operations.drop_export(lake, "nightly-0-0")
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    with pytest.raises(ExportNotFoundError):
        plan.execute()
    assert len(export_names(lake)) == 29


def test_execution_does_not_read_files_of_the_plan_again(lakes: Lakes) -> None:
    reads = ReadPaths(lakes.storage())
    lake = Lakehouse.create(reads.root, storage=reads)
    for name in ("a", "b", "c"):
        operations.plan_export(lake, name).execute()
    plan = operations.plan_prune_exports(Lakehouse.open(reads.root, storage=reads), "*", keep(keep_last=1))
    assert len(plan.names) == 2
    reads.check_nothing_is_read_again(plan)
