"""Test that a reconcile after commits of another program, which only follows the format, loses no needed file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.foreign import ForeignLake, Row
from tests.lakes import listed
from tests.operations.aging import (
    HOUR_MS,
    Aging,
    keeping,
    live_versions,
    needed_files,
    states,
    with_least_requests,
)
from tests.operations.changes import alter, create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import MaintenanceBlockedError, PlanChangedError, VersionExpiredError
from trinitylake_ops.operations.export_records import begin
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.storage import Storage, StorageWrapper

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def lake(aging: Aging) -> Lakehouse:
    return aging.lake


class TickingForeignLake(ForeignLake):
    """Another program whose commits advance the clock by one second."""

    def __init__(self, aging: Aging):
        super().__init__(aging.clock)
        self.aging = aging

    def commit(self, latest: int, rows: list[Row], *, keeps_unknown: bool = False) -> int:
        self.aging.later(1000)
        return super().commit(latest, rows, keeps_unknown=keeps_unknown)


@pytest.fixture
def foreign(aging: Aging) -> ForeignLake:
    return TickingForeignLake(aging)


def assert_same_tables(lake: Lakehouse, foreign: ForeignLake) -> None:
    """Check that the other program reads the same tables."""
    latest = lake.snapshot()
    assert foreign.latest() == latest.version
    assert foreign.tables() == {f"{name}.{table}" for name in latest.namespaces() for table in latest.tables(name)}


def assert_blocked(lake: Lakehouse) -> None:
    plan_functions: list[Callable[[], Any]] = [
        lambda: operations.plan_expiration(lake, keeping(1)),
        lambda: operations.plan_orphan_removal(lake),
    ]
    if states(lake):
        plan_functions.append(lambda: operations.plan_purge(lake))
    else:
        assert operations.plan_purge(lake).is_empty, "the definition records no expired versions"
    for make_plan in plan_functions:
        with pytest.raises(MaintenanceBlockedError):
            make_plan()


def object_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the nodes and the definitions of namespaces and tables."""
    return {path: data for path, data in files.items() if not path.startswith("_")}


def test_foreign_program_names_roots_in_text_order(foreign: ForeignLake) -> None:
    assert foreign.root(100) == "_00100110000000000000000000000000.arrow"


def test_foreign_program_coexists_with_this_package(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    """The other program commits and rolls back between operations, and keeps the lakehouse definition."""
    assert_same_tables(lake, foreign)
    first = foreign.commit_table("n0", "foreign1")
    aging.later(HOUR_MS)
    second = foreign.commit_table("n1", "foreign2")
    alter(lake, "n0", "b")
    needed = needed_files(lake)
    aging.later()
    assert aging.expire().versions == f"0-{second}"
    foreign.commit_table("n2", "foreign3")
    assert_same_tables(lake, foreign)
    aging.later()
    assert aging.purge().is_complete
    version = foreign.commit_table("n3", "foreign4")
    foreign.rollback(version - 1, keeps_unknown=False)
    assert_same_tables(lake, foreign)
    assert "n3.foreign4" not in foreign.tables()
    aging.clean_up()
    assert_same_tables(lake, foreign)
    assert {path for path in needed if "foreign" in path} <= listed(lake.storage)
    assert not [path for path in listed(lake.storage) if "foreign4" in path], (
        "files of the other program expire like ours"
    )
    assert first < second < lake.latest_version()
    assert operations.verify(lake).is_clean


@pytest.mark.parametrize("keeps_unknown", [False, True])
def test_reconcile_restores_records_after_foreign_rollback(
    aging: Aging, lake: Lakehouse, foreign: ForeignLake, keeps_unknown: bool
) -> None:
    """The restored definition lacks the second export and the expiration."""
    operations.plan_export(lake, "early", version=1).execute()
    target = lake.latest_version()
    operations.plan_export(lake, "late", version=3).execute()
    aging.later(HOUR_MS)
    expired = aging.expire()
    assert expired.versions == "0,2,4"
    with pytest.raises(VersionExpiredError):
        lake.snapshot(0)
    files = {name: needed_files(lake, name) for name in ("early", "late")}
    step = foreign.rollback(target, keeps_unknown=keeps_unknown)
    assert_same_tables(lake, foreign)
    assert [info.name for info in operations.list_exports(lake)] == ["early"]
    aging.later()
    assert_blocked(lake)
    create(lake, "after")
    operations.plan_export(lake, "latest", version=2).execute()
    files["latest"] = needed_files(lake, "latest")
    assert_blocked(lake)

    plan = operations.plan_reconcile(lake)
    assert (plan.steps, plan.restored_exports, plan.live_again) == ((step,), ("late",), "0,2,4")
    assert "late" in str(plan)
    create(lake, "between")
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    assert_blocked(lake)
    plan = operations.plan_reconcile(lake)
    report = plan.execute(plan.digest)
    assert report.version == lake.latest_version()
    assert (report.steps, report.restored_exports, report.dropped_exports) == ((step,), ("late",), ())
    assert report.live_again == "0,2,4", "versions stay expired only if both definitions record them as expired"
    assert f"other programs' versions {step}" in str(report)
    assert {info.name for info in operations.list_exports(lake)} == {"early", "late", "latest"}
    repeated = operations.reconcile(lake)
    assert (repeated.version, str(repeated)) == (None, "Nothing to reconcile")
    assert lake.latest_version() == report.version

    aging.clean_up()
    assert {name: needed_files(lake, name) for name in files} == files
    assert {1, 2, 3} <= set(live_versions(lake)), "exports keep their versions"
    assert_same_tables(lake, foreign)
    assert operations.verify(lake).is_clean
    assert operations.reconcile(lake).version is None


def test_reconcile_keeps_undeleted_versions(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    """The restored definition records versions as expired that were undeleted later."""
    aging.expire()
    target = lake.latest_version()
    operations.undelete(lake, "1,3")
    before = {version: needed_files(lake, version) for version in (1, 3)}
    foreign.rollback(target, keeps_unknown=False)
    with pytest.raises(VersionExpiredError):
        lake.snapshot(1)
    aging.later()
    assert_blocked(lake)
    report = operations.reconcile(lake)
    assert (report.live_again, states(lake)) == ("1,3", [("EXPIRED", "0,2,4")])
    aging.purge()
    assert {version: needed_files(lake, version) for version in (1, 3)} == before
    assert operations.verify(lake).is_clean


def test_reconcile_resumes_an_interrupted_purge(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    """According to the restored definition the versions can be undeleted, but their roots are sealed."""
    aging.expire()
    target = lake.latest_version()
    needed = object_files(needed_files(lake))
    aging.later()

    class SingleDeleteStorage(StorageWrapper):
        def __init__(self, inner: Storage):
            super().__init__(inner)
            self.delete_batch_size = 1

    lake_with_single_deletes = Lakehouse(SingleDeleteStorage(lake.storage))
    with_least_requests(lambda budget: operations.plan_purge(lake_with_single_deletes).execute(budget=budget))
    assert states(lake) == [("PURGING", "0-4")]
    foreign.rollback(target, keeps_unknown=True)
    assert states(lake) == [("EXPIRED", "0-4")]
    assert_blocked(lake)
    operations.reconcile(lake)
    assert states(lake) == [("PURGING", "0-4")]
    with pytest.raises(VersionExpiredError):
        operations.undelete(lake, 1)
    assert aging.purge().is_complete
    assert states(lake) == [("PURGED", "0-4")]
    aging.clean_up()
    assert needed.items() <= {path: lake.storage.read(path) for path in listed(lake.storage)}.items()
    assert operations.verify(lake).is_clean
    assert_same_tables(lake, foreign)


def test_reconcile_does_not_undelete_sealed_versions(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    """Before the reconcile, the restored definition records the purged versions as expired."""
    aging.expire()
    target = lake.latest_version()
    aging.later()
    aging.purge()
    foreign.rollback(target, keeps_unknown=False)
    with pytest.raises(MaintenanceBlockedError):
        operations.undelete(lake, "0-4")
    assert states(lake) == [("EXPIRED", "0-4")]
    operations.reconcile(lake)
    with pytest.raises(VersionExpiredError):
        operations.undelete(lake, "0-4")


@pytest.mark.parametrize("is_after_expiry", [False, True])
def test_reconcile_keeps_a_finished_purge(
    aging: Aging, lake: Lakehouse, foreign: ForeignLake, is_after_expiry: bool
) -> None:
    """The restored definition was written before the purge or before the expiration."""
    create(lake, "kept")
    aging.later()
    aging.expire(keeping(2))
    target = lake.latest_version() if is_after_expiry else lake.latest_version() - 1
    aging.later()
    aging.purge()
    foreign.rollback(target, keeps_unknown=False)
    assert_same_tables(lake, foreign)
    for version in range(5):
        with pytest.raises(VersionExpiredError):
            lake.snapshot(version)
    assert_blocked(lake)
    operations.reconcile(lake)
    assert 0 not in live_versions(lake)
    aging.clean_up()
    for version in range(5):
        with pytest.raises(VersionExpiredError):
            lake.snapshot(version)
    assert_same_tables(lake, foreign)
    assert operations.verify(lake).is_clean
    assert operations.plan_purge(lake).is_empty


def test_reconcile_keeps_two_exports_with_the_same_name(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    target = lake.latest_version()
    operations.plan_export(lake, "name", version=1).execute()
    needed_by_first = needed_files(lake, "name")
    foreign.rollback(target, keeps_unknown=False)
    operations.plan_export(lake, "name", version=3).execute()
    needed_by_second = needed_files(lake, "name")
    assert operations.reconcile(lake).restored_exports == ("name-2",)
    aging.clean_up()
    assert (needed_files(lake, "name-2"), needed_files(lake, "name")) == (needed_by_first, needed_by_second)


def test_reconcile_does_not_restore_a_dropped_export(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    operations.plan_export(lake, "dropped", version=1).execute()
    target = lake.latest_version()
    operations.drop_export(lake, "dropped")
    foreign.rollback(target, keeps_unknown=False)
    report = operations.reconcile(lake)
    assert (report.dropped_exports, operations.list_exports(lake)) == (("dropped",), [])
    aging.clean_up()
    assert operations.verify(lake).is_clean


def test_export_can_be_resumed_after_reconcile(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    target = lake.latest_version()

    class InterruptingStorage(StorageWrapper):
        def create(self, path: str, data: bytes) -> None:
            if path.startswith("_export_"):
                raise KeyboardInterrupt
            super().create(path, data)

    with pytest.raises(KeyboardInterrupt):
        operations.plan_export(Lakehouse(InterruptingStorage(lake.storage)), "slow", version=1).execute()
    foreign.rollback(target, keeps_unknown=False)
    operations.reconcile(lake)
    aging.clean_up()
    operations.plan_export(lake, "slow", version=1).execute()
    assert lake.snapshot("slow").namespaces() == ["n0"]


def test_reconcile_drops_an_export_that_cannot_be_resumed(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    """The export was dropped before it was complete, and its version was purged later."""
    plan = operations.plan_export(lake, "incomplete", version=1)
    begin(lake, plan.record, lambda _base: None)
    begun_version = lake.latest_version()
    operations.drop_export(lake, "incomplete")
    alter(lake, "n0", "a")
    aging.later()
    aging.expire(keeping(3))
    aging.later()
    aging.purge()
    with pytest.raises(VersionExpiredError):
        lake.snapshot(1)
    foreign.rollback(begun_version, keeps_unknown=False)
    assert [info.state for info in operations.list_exports(lake)] == ["copying"]
    assert operations.reconcile(lake).dropped_exports == ("incomplete",)
    assert operations.list_exports(lake) == []
    assert operations.verify(lake).is_clean


@pytest.mark.parametrize("is_dropped", [True, False])
def test_reconcile_does_not_restore_a_dropped_external_export(
    lake: Lakehouse, foreign: ForeignLake, tmp_path: Path, is_dropped: bool
) -> None:
    """A drop deletes the manifest of the export but keeps its root. A missing manifest alone does not mean that the
    export was dropped.
    """
    operations.plan_export(lake, "backup", target=(tmp_path / "backup").as_uri()).execute()
    (manifest,) = [info.path for info in lake.storage.list("_ops/export-")]
    exported_version = lake.latest_version()
    operations.drop_export(lake, "backup") if is_dropped else lake.storage.delete(manifest)
    alter(lake, "n0", "a")
    foreign.rollback(exported_version, keeps_unknown=False)
    assert [info.name for info in operations.list_exports(lake)] == ["backup"]
    assert operations.reconcile(lake).dropped_exports == (("backup",) if is_dropped else ())
    assert [info.name for info in operations.list_exports(lake)] == ([] if is_dropped else ["backup"])


def test_reconcile_keeps_the_longer_age_overrides(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    lake.alter_definition(maximum_version_age_millis_overrides={1: 5, 2: 90})
    target = lake.latest_version()
    lake.alter_definition(maximum_version_age_millis_overrides={1: 50, 3: 7})
    foreign.rollback(target, keeps_unknown=False)
    operations.reconcile(lake)
    assert lake.snapshot().definition.maximum_version_age_millis_overrides == {1: 50, 2: 90, 3: 7}


def test_foreign_commits_stay_reconciled_after_the_reconcile_is_purged(
    aging: Aging, lake: Lakehouse, foreign: ForeignLake
) -> None:
    """The versions before and after the foreign commit are kept, and the version of the reconcile is purged."""
    target = lake.latest_version()
    operations.plan_export(lake, "before").execute()
    before = lake.latest_version()
    step = foreign.rollback(target, keeps_unknown=False)
    reconciled_version = operations.reconcile(lake).version
    assert (before + 1, step + 1) == (step, reconciled_version)
    aging.later(HOUR_MS)
    operations.plan_export(lake, "a", version=before).execute()
    operations.plan_export(lake, "b", version=step).execute()
    create(lake, "more")
    aging.clean_up()
    assert reconciled_version not in live_versions(lake)
    assert {before, step} <= set(live_versions(lake))
    create(lake, "last")
    assert operations.reconcile(lake).version is None
    aging.clean_up()
    operations.drop_export(lake, "before")
    foreign.rollback(lake.latest_version() - 1, keeps_unknown=False)
    with pytest.raises(MaintenanceBlockedError):
        aging.clean_up()
    assert operations.reconcile(lake).dropped_exports == ("before",)


def test_reconcile_covers_two_foreign_rollbacks(aging: Aging, lake: Lakehouse, foreign: ForeignLake) -> None:
    old = lake.latest_version()
    operations.plan_export(lake, "first", version=1).execute()
    first = foreign.rollback(old, keeps_unknown=False)
    operations.plan_export(lake, "second", version=2).execute()
    second = foreign.rollback(first, keeps_unknown=True)
    report = operations.reconcile(lake)
    assert (report.steps, report.restored_exports) == ((first, second), ("first", "second"))


def test_reconcile_waits_for_a_purge(lake: Lakehouse) -> None:
    with lease(lake.storage, "purge"), pytest.raises(MaintenanceBlockedError):
        operations.reconcile(lake)


# Concurrent rollbacks


class ActionStorage(StorageWrapper):
    """A storage that runs an action once, just before the first request that ``selects`` accepts."""

    def __init__(self, inner: Storage, selects: Callable[[str, str], bool], action: Callable[[], Any]):
        super().__init__(inner)
        self.concurrency = 1
        self.selects = selects
        self.actions = [action]

    def _run_action(self, kind: str, path: str) -> None:
        if self.actions and self.selects(kind, path):
            self.actions.pop()()

    def create(self, path: str, data: bytes) -> None:
        self._run_action("create", path)
        super().create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self._run_action("write", path)
        super().write(path, data)


def is_root(path: str) -> bool:
    return path.startswith("_") and path.endswith(".arrow")


@pytest.mark.parametrize("kind", ["create", "write"])
@pytest.mark.parametrize("operation", ["expire", "purge", "orphans"])
def test_foreign_rollback_during_an_operation_stops_it(
    aging: Aging, lake: Lakehouse, foreign: ForeignLake, operation: str, kind: str
) -> None:
    """The rollback happens just before the operation creates its root, or just before it seals the first root."""
    target = lake.latest_version()
    operations.plan_export(lake, "late", version=2).execute()
    lake.storage.create("_ops/plan-00000000-0000-4000-8000-000000000000.json", b"orphan")
    aging.later()
    if operation == "purge":
        aging.expire()
        aging.later()
    plan: Any = {
        "expire": lambda: operations.plan_expiration(lake, keeping(1)),
        "purge": lambda: operations.plan_purge(lake),
        "orphans": lambda: operations.plan_orphan_removal(lake),
    }[operation]()
    assert not plan.is_empty
    exported = needed_files(lake, "late")
    storage = ActionStorage(
        lake.storage,
        lambda request_kind, path: request_kind == kind and is_root(path),
        lambda: foreign.rollback(target, keeps_unknown=False),
    )
    if operation == "purge" or kind == "create":
        with pytest.raises(MaintenanceBlockedError):
            replace(plan, operation=replace(plan.operation, lake=Lakehouse(storage))).execute()
    else:
        replace(
            plan, operation=replace(plan.operation, lake=Lakehouse(storage))
        ).execute()  # the operation seals no root
        assert storage.actions
        foreign.rollback(target, keeps_unknown=False)
    operations.reconcile(lake)
    assert needed_files(lake, "late") == exported
    aging.clean_up()
    assert needed_files(lake, "late") == exported
    assert_same_tables(lake, foreign)
    assert operations.verify(lake).is_clean


@pytest.mark.parametrize("kind", ["create", "write"])
def test_foreign_rollback_to_a_version_during_its_purge_keeps_needed_files(
    aging: Aging, lake: Lakehouse, foreign: ForeignLake, kind: str
) -> None:
    """The other program ignores expirations, so it can restore any version until the version's root is sealed."""
    aging.expire()
    aging.later()

    def roll_back() -> None:
        current = ("lakehouse_def", lake.snapshot().definition_location, None)
        rows = foreign.rows(foreign.root(2))
        foreign.commit(foreign.latest(), [current, *(row for row in rows if row[0] != current[0])])

    storage = ActionStorage(lake.storage, lambda request_kind, path: request_kind == kind and is_root(path), roll_back)
    report = operations.plan_purge(Lakehouse(storage)).execute()
    assert report.is_complete
    assert report.still_needed > 0
    assert foreign.tables() == {"n0.a", "n0.b", "n1.a", "n1.b", "n1.c"}
    assert_same_tables(lake, foreign)
    aging.clean_up()
    assert_same_tables(lake, foreign)
    assert operations.verify(lake).is_clean
