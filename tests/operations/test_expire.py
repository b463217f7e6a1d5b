"""Expire, undelete, purge and orphan removal: which files they delete and keep, also with concurrent commits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clock import ManualClock, TickingClock
from tests.faults import FaultyStorage, fail, lose_response
from tests.lakes import Lakes, listed, roots, table
from tests.operations.aging import (
    DAY_MS,
    HOUR_MS,
    LONG_MS,
    Aging,
    keeping,
    live_versions,
    needed_files,
    states,
    with_least_requests,
)
from tests.operations.changes import alter, append_rows, create, drop
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    InvalidInputError,
    MaintenanceBlockedError,
    PlanChangedError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransactionExpiredError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import HINT_PATH, lease_path
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations import Budget, budget
from trinitylake_ops.operations.base import PlannedT
from trinitylake_ops.operations.export_records import manifest_targets
from trinitylake_ops.operations.gc.delete import delete_files
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.storage import MeteredStorage, Storage, StorageWrapper

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def lake(aging: Aging) -> Lakehouse:
    return aging.lake


# Plans


def test_expire_plan_lists_reasons_and_changes_nothing(aging: Aging, lake: Lakehouse) -> None:
    files = listed(lake.storage)
    plan = operations.plan_expiration(lake, keeping(2))
    assert (plan.versions, plan.base_version, plan.exports) == ("0-3", 5, ())
    assert [verdict.expires for verdict in plan.verdicts] == [True] * 4 + [False] * 2
    assert plan.verdicts[5].reason == "it is the latest"
    assert plan.verdicts[4].reason == "among the minimum of 2"
    assert sum(plan.files.values()) == len(plan.freed.sizes_bytes) > 5
    assert operations.plan_expiration(lake, keeping(1)).files.keys() == {"node", "definition"}
    assert plan.bytes == sum(lake.storage.stat(path).size_bytes for path in plan.freed.sizes_bytes)
    kept = {**needed_files(lake), **needed_files(lake, 4)}
    deleted_paths = {path for version in range(4) for path in needed_files(lake, version)}
    assert set(plan.freed.sizes_bytes) == deleted_paths - kept.keys() - roots(lake.storage)
    assert plan.digest == operations.plan_expiration(lake, keeping(2)).digest
    document = json.loads(plan.to_json())
    assert document["digest"] == plan.digest
    assert len(document["verdicts"]) == 6
    assert "superseded 2 d 4 h ago" in str(plan)
    assert listed(lake.storage) == files
    aging.later(1)
    assert operations.plan_expiration(lake, keeping(2)).digest != plan.digest


def test_expire_uses_lakehouse_settings_by_default(aging: Aging, lake: Lakehouse) -> None:
    assert operations.plan_expiration(lake).is_empty, "all versions are younger than 7 days"
    aging.later(6 * DAY_MS)
    assert operations.plan_expiration(lake).versions == "0-2", "at least 3 versions are kept"
    aging.lake.alter_definition(minimum_versions_to_keep=1, maximum_version_age_millis_overrides={1: 90 * DAY_MS})
    aging.later(8 * DAY_MS)
    assert operations.plan_expiration(lake).versions == "0,2-5"


def test_expire_protects_versions_of_running_transactions(aging: Aging, lake: Lakehouse) -> None:
    create(lake, "new")
    aging.later(DAY_MS)
    assert operations.plan_expiration(lake, keeping(1)).versions == "0-4", "version 5 was the latest a day ago"
    aging.later(5 * 60 * 1000 + 1)
    assert operations.plan_expiration(lake, keeping(1)).versions == "0-5"


def test_expire_rejects_digests_of_other_plans(aging: Aging, lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(1))
    aging.later(DAY_MS)
    later_plan = operations.plan_expiration(lake, keeping(1))
    aging.clock.time_ms -= DAY_MS
    digits = plan.digest[-64:]
    for digest, reason in (
        ("x", "is not a digest"),
        (plan.digest[:-1], "is not a digest"),
        (plan.digest[:-1] + ("1" if plan.digest[-1] == "0" else "0"), "review the new plan"),
        (f"4-{plan.now_ms}-{digits}", "review the new plan"),
        (f"77-{plan.now_ms}-{digits}", "can no longer be read"),
        (later_plan.digest, "in the future"),
        (operations.plan_expiration(lake, keeping(3)).digest, "review the new plan"),
    ):
        with pytest.raises(PlanChangedError, match=reason):
            plan.execute(digest)
    assert states(lake) == []
    assert plan.execute(plan.digest).versions == "0-4"


def test_approved_expiration_is_planned_again_at_its_version_and_time(aging: Aging, lake: Lakehouse) -> None:
    approved = operations.plan_expiration(lake, keeping(2)).digest
    create(lake, "since")
    aging.later()
    report = operations.plan_expiration(lake, keeping(2)).execute(approved)
    assert (report.versions, report.spared) == ("0-3", ""), "version 4 could expire now, but it was not approved"
    assert states(lake) == [("EXPIRED", "0-3")]


def test_expire_rejects_the_plan_of_an_expired_base(aging: Aging, lake: Lakehouse) -> None:
    approved = operations.plan_expiration(lake, keeping(1)).digest
    create(lake, "since")
    aging.later()
    aging.expire()
    with pytest.raises(PlanChangedError):
        operations.plan_expiration(lake, keeping(1)).execute(approved)


# Between plan and execution


def test_expire_rejects_a_plan_with_deleted_files(aging: Aging, lake: Lakehouse) -> None:
    """A drop of an export was interrupted. Orphan removal then deletes the copied files first and the export's root
    last.
    """
    create(lake, "many", *(f"t{number}" for number in range(30)))
    operations.plan_export(lake, "copied", "partial").execute()
    aging.later()
    approved = operations.plan_expiration(lake, keeping(1)).digest
    (record,) = lake.snapshot().definition.exports
    copies = manifest_targets(lake.storage, record.manifest_path) - {record.root_location}
    root = lake.storage.read(record.root_location)
    operations.drop_export(lake, "copied")
    lake.storage.create(record.root_location, root)
    for path in copies:
        lake.storage.delete(path)
    with pytest.raises(PlanChangedError):
        operations.plan_expiration(lake, keeping(1)).execute(approved)


def test_expire_spares_versions_needed_by_newer_commits(aging: Aging, lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(1))
    lake.alter_definition(maximum_version_age_millis_overrides={1: 90 * DAY_MS})
    operations.plan_export(lake, "kept", version=3).execute()
    report = plan.execute(plan.digest)
    # An explicit policy takes precedence over the ages in the settings.
    assert (report.versions, report.spared) == ("0-2,4", "3")
    assert report.files == len(json.loads(lake.storage.read(report.plan_path or ""))["files"])


def test_expire_respects_settings_changed_since_the_plan(aging: Aging, lake: Lakehouse) -> None:
    aging.later(8 * DAY_MS)
    plan = operations.plan_expiration(lake)
    assert plan.versions == "0-2"
    lake.alter_definition(maximum_version_age_millis_overrides={1: 90 * DAY_MS}, minimum_versions_to_keep=6)
    report = plan.execute(plan.digest)
    assert (report.versions, report.spared) == ("0", "1-2")


class RacingStorage(StorageWrapper):
    """A storage that runs the next action before each root is created."""

    def __init__(self, inner: Storage, *actions: Callable[[], Any]):
        super().__init__(inner)
        self.actions = iter(actions)

    def create(self, path: str, data: bytes) -> None:
        if path.startswith("_") and path.endswith(".arrow"):
            next(self.actions, lambda: None)()
        super().create(path, data)


def with_conflicts(plan: PlannedT, *actions: Callable[[], Any]) -> PlannedT:
    """Return a plan whose execution conflicts with other commits."""
    return with_storage(plan, RacingStorage(plan.operation.lake.storage, *actions))


def with_storage(plan: PlannedT, storage: Storage) -> PlannedT:
    """Return a plan that uses another storage when it is executed."""
    return replace(plan, operation=replace(plan.operation, lake=Lakehouse(storage)))


def test_export_during_expire_keeps_its_version(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(1))
    report = with_conflicts(plan, lambda: operations.plan_export(lake, "new", version=2).execute()).execute(plan.digest)
    assert (report.versions, report.spared) == ("0-1,3-4", "2")
    assert len([path for path in listed(lake.storage) if path.startswith("_ops/plan-")]) == 1


def test_rollback_during_expire_keeps_its_files(aging: Aging, lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(1))
    report = with_conflicts(plan, lambda: operations.rollback(lake, 2)).execute(plan.digest)
    assert report.version == 7
    needed = needed_files(lake, 6)
    aging.later()
    assert aging.purge().still_needed > 0
    assert needed_files(lake, 6) == needed
    assert operations.verify(lake).is_clean
    assert sorted(lake.snapshot().namespaces()) == ["n0", "n1"]


def test_rollback_and_export_fail_if_their_version_expires_meanwhile(lake: Lakehouse) -> None:
    def expire() -> None:
        operations.plan_expiration(lake, keeping(1)).execute()

    racing_lake = Lakehouse(RacingStorage(lake.storage, expire))
    with pytest.raises((VersionExpiredError, CommitConflictError)):
        operations.plan_rollback(racing_lake, 2).execute(reapply=True)
    operations.undelete(lake, "0-4")
    with pytest.raises((VersionExpiredError, CommitConflictError)):
        operations.plan_export(Lakehouse(RacingStorage(lake.storage, expire)), "late", version=2).execute()
    assert states(lake) == [("EXPIRED", "0-5")] or states(lake) == [("EXPIRED", "0-4")]
    assert operations.list_exports(lake) == []


def test_expire_fails_if_settings_change_at_every_attempt(lake: Lakehouse) -> None:
    plan = operations.plan_expiration(lake, keeping(1))
    changes = [lambda age=age: lake.alter_definition(maximum_version_age_millis=DAY_MS + age) for age in range(40)]
    with pytest.raises(CommitConflictError):
        with_conflicts(plan, *changes).execute()
    assert states(lake) == []
    assert not [path for path in listed(lake.storage) if path.startswith("_ops/plan-")]


# Expired versions and undelete


def test_expired_version_cannot_be_opened(aging: Aging, lake: Lakehouse) -> None:
    report = aging.expire()
    assert (report.version, report.versions) == (6, "0-4")
    assert lake.snapshot().definition.expirations[0].expired_at_version == 6
    assert live_versions(lake) == [5, 6]
    for version in range(5):
        with pytest.raises(VersionExpiredError):
            lake.snapshot(version)
        with pytest.raises(VersionExpiredError):
            operations.rollback(lake, version)
        with pytest.raises(VersionExpiredError):
            operations.plan_export(lake, "x", version=version)
    assert aging.expire().version is None, "a second run commits nothing"
    assert lake.latest_version() == 6


def test_undelete_restores_versions_byte_for_byte_until_the_purge(aging: Aging, lake: Lakehouse) -> None:
    append_rows(lake)
    append_rows(lake)
    before = {version: needed_files(lake, version) for version in range(lake.latest_version())}
    aging.later()
    assert aging.expire().versions == f"0-{max(before)}"
    operations.undelete(lake, "1-2,4")
    assert [version for version in live_versions(lake) if version in before] == [1, 2, 4]
    operations.undelete(lake, 0)
    operations.undelete(lake, [3, *range(5, max(before) + 1)])
    assert states(lake) == []
    assert {version: needed_files(lake, version) for version in before} == before
    aging.expire()
    aging.later()
    operations.undelete(lake, [1, 4])
    aging.purge()
    for version in (1, 4):
        assert needed_files(lake, version) == before[version]
    with pytest.raises(VersionExpiredError):
        operations.undelete(lake, "0-2")
    assert set(before) & set(live_versions(lake)) == {1, 4}
    for version in set(before) - {1, 4}:
        with pytest.raises(VersionExpiredError):
            lake.snapshot(version)
    assert operations.verify(lake).is_clean


@pytest.mark.parametrize("versions", ["", "5", "0-5", "99", "x", []])
def test_undelete_rejects_versions_that_are_not_expired(aging: Aging, lake: Lakehouse, versions: Any) -> None:
    aging.expire()
    with pytest.raises(InvalidInputError):
        operations.undelete(lake, versions)
    assert states(lake) == [("EXPIRED", "0-4")]


def test_concurrent_undelete_and_purge_conflict(aging: Aging, lake: Lakehouse) -> None:
    aging.expire()
    aging.later()
    plan = operations.plan_purge(lake)
    with pytest.raises(PlanChangedError):
        with_conflicts(plan, lambda: operations.undelete(lake, 2)).execute()
    assert live_versions(lake)[0] == 2
    plan = operations.plan_purge(lake)
    with pytest.raises(VersionExpiredError):
        operations.undelete(Lakehouse(RacingStorage(lake.storage, plan.execute)), 1)
    assert states(lake) == [("PURGED", "0-1,3-4")]


# Purge


def test_purge_deletes_unneeded_files_and_seals_roots(aging: Aging, lake: Lakehouse) -> None:
    needed = needed_files(lake)
    files = listed(lake.storage)
    ids = {version: lake.snapshot(version).root.system[COMMIT_ID] for version in range(5)}
    expired = aging.expire()
    assert operations.plan_purge(lake).is_empty
    assert aging.purge().version is None, "the grace period is not over"
    aging.later(DAY_MS + 5 * 60 * 1000)
    plan = operations.plan_purge(lake)
    assert (plan.versions, plan.files, plan.bytes, plan.still_needed) == ("0-4", expired.files, expired.bytes, 0)
    assert expired.files > 10
    report = plan.execute(plan.digest)
    assert (report.version, report.files, report.bytes, report.is_complete) == (8, expired.files, expired.bytes, True)
    assert roots(lake.storage) >= {lake.files.roots.path(version) for version in range(9)}, "no root is deleted"
    for version, commit_id in ids.items():
        root = decode_node(lake.storage.read(lake.files.roots.path(version)), lake.files.roots.path(version))
        assert (root.is_sealed, root.system[COMMIT_ID]) == (True, commit_id)
    remaining = {path for path in listed(lake.storage) & files if path not in roots(lake.storage)}
    assert remaining == needed.keys() - roots(lake.storage) | {HINT_PATH}
    assert states(lake) == [("PURGED", "0-4")]
    assert aging.purge().version is None
    assert lake.latest_version() == 8
    assert [info.operation for info in lake.history(limit=3)] == ["purge", "purge", "expire"]
    assert operations.verify(lake).is_clean


def test_purge_grace_is_at_least_the_transaction_ttl(aging: Aging, lake: Lakehouse) -> None:
    aging.expire()
    assert operations.plan_purge(lake, 0).is_empty
    aging.later(LONG_MS)
    assert operations.plan_purge(lake, 3 * DAY_MS).is_empty
    assert not operations.plan_purge(lake, 0).is_empty
    with pytest.raises(InvalidInputError):
        operations.plan_purge(lake, -1)


def test_purge_deletes_files_shared_by_batches(aging: Aging, lake: Lakehouse) -> None:
    """A file that two batches need is in the plan of the later batch, so no orphan remains."""
    for namespace in ("n0", "n1", "n2"):
        alter(lake, namespace, "a")
        aging.later()
        aging.expire(keeping(2))
    assert len(states(lake)) == 3
    aging.expire()
    aging.later()
    aging.purge()
    assert len(states(lake)) == 1, "the records of purged batches are merged"
    aging.later()
    plan = operations.plan_orphan_removal(lake)
    assert plan.paths == []


def test_purge_keeps_files_needed_since_the_expiration(aging: Aging, lake: Lakehouse) -> None:
    """The older of two batches is partly undeleted, and a rollback uses its files again."""
    aging.later()
    first = aging.expire(keeping(3))
    assert first.versions == "0-2"
    operations.undelete(lake, 1)
    operations.rollback(lake, 1)
    aging.later()
    second = aging.expire(keeping(1))
    assert "1" in second.versions
    needed = {version: needed_files(lake, version) for version in live_versions(lake)}
    aging.later()
    operations.undelete(lake, 3)
    needed[3] = needed_files(lake, 3)
    report = aging.purge()
    assert report.still_needed > 0
    assert {version: needed_files(lake, version) for version in needed} == needed
    assert operations.verify(lake).is_clean


def test_concurrent_purges_are_safe(aging: Aging, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several purges of the same versions run without a lease, concurrently with commits."""
    append_rows(lake)
    append_rows(lake)
    aging.later()
    needed = needed_files(lake)
    aging.expire()
    aging.later()
    plan = operations.plan_purge(lake)
    monkeypatch.setattr("trinitylake_ops.operations.lease.DURATION_MS", 0)  # every lease has expired
    monkeypatch.setattr("trinitylake_ops.operations.lease.Lease.check", lambda _self: None)
    outcomes: list[object] = []
    start = threading.Barrier(4)

    def purge() -> None:
        start.wait()
        try:
            outcomes.append(plan.execute().is_complete)
        except (PlanChangedError, MaintenanceBlockedError) as error:
            outcomes.append(error)

    def commit() -> None:
        start.wait()
        for number in range(3):
            create(lake, f"during{number}")

    threads = [threading.Thread(target=target) for target in (purge, purge, purge, commit)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert True in outcomes
    assert len(outcomes) == 3
    assert [state for state, _ in states(lake)] == ["PURGED"]
    assert needed.items() <= {path: lake.storage.read(path) for path in listed(lake.storage)}.items()
    assert operations.verify(lake).is_clean
    assert {f"during{number}" for number in range(3)} <= set(lake.snapshot().namespaces())


# Exports


def test_expire_drops_only_exports_past_their_retention(aging: Aging, lake: Lakehouse) -> None:
    append_rows(lake)
    exported_version = lake.latest_version()
    operations.plan_export(lake, "short", version=2, retain_for=DAY_MS).execute()
    operations.plan_export(lake, "long", version=3, retain_for=99 * DAY_MS).execute()
    operations.plan_export(lake, "forever", version=exported_version).execute()
    drop(lake, "ns", "t")
    files = {name: needed_files(lake, name) for name in ("short", "long", "forever")}
    export_files = {info.name: {info.location, info.manifest_path} for info in operations.list_exports(lake)}
    aging.later()
    plan = operations.plan_expiration(lake, keeping(1))
    assert plan.exports == ("short",)
    assert "its retention is over" in str(plan)
    report = plan.execute(plan.digest)
    assert report.exports == ("short",)
    assert set(VersionRanges.parse(report.versions)) == set(range(lake.latest_version() - 1)) - {3, exported_version}
    assert {info.name for info in operations.list_exports(lake)} == {"long", "forever"}
    aging.later()
    aging.purge()
    remaining = listed(lake.storage)
    assert not export_files["short"] & remaining
    assert export_files["long"] | export_files["forever"] <= remaining
    needed = files["long"].keys() | files["forever"].keys() | needed_files(lake).keys()
    assert not files["short"].keys() & remaining - needed
    for name in ("long", "forever"):
        assert needed_files(lake, name) == files[name]
    assert operations.verify(lake).is_clean
    aging.later()
    aging.remove_orphans()
    for name in ("long", "forever"):
        assert needed_files(lake, name) == files[name]


def test_expire_drops_an_export_without_expiring_versions(aging: Aging, lake: Lakehouse) -> None:
    aging.expire()
    operations.plan_export(lake, "short", retain_for=HOUR_MS).execute()
    location = lake.snapshot().definition.exported_snapshots["short"]
    aging.later(2 * HOUR_MS)
    report = aging.expire()
    assert (report.versions, report.exports, report.files) == ("", ("short",), 2)
    aging.later()
    aging.purge()
    assert location not in listed(lake.storage)
    assert [state for state, _ in states(lake)] == ["PURGED"]


def test_expire_keeps_an_export_whose_retention_was_extended(aging: Aging, lake: Lakehouse) -> None:
    operations.plan_export(lake, "e", version=2, retain_for=HOUR_MS).execute()
    aging.later()
    plan = operations.plan_expiration(lake, keeping(1))
    assert plan.exports == ("e",)
    operations.drop_export(lake, "e")
    operations.plan_export(lake, "e", version=2, retain_for=99 * DAY_MS).execute()
    report = plan.execute(plan.digest)
    assert (report.exports, report.spared) == ((), "2")
    assert needed_files(lake, "e")


# The lease


def test_lease_allows_one_operation_at_a_time(aging: Aging, lake: Lakehouse) -> None:
    aging.expire()
    aging.later()
    plan = operations.plan_purge(lake)
    with (
        lease(lake.storage, "purge") as lease_guard,
        pytest.raises(MaintenanceBlockedError),
    ):
        plan.execute()
    assert states(lake) == [("EXPIRED", "0-4")]
    assert plan.execute().is_complete
    assert lease_guard.number == 1
    assert lease_path(2) in listed(lake.storage)


def test_lease_of_a_killed_operation_expires(aging: Aging, lake: Lakehouse) -> None:
    storage = FaultyStorage(lake.storage, [fail(1, StoragePermissionError, kind="write", times=9)])
    with lease(storage, "purge"):
        pass  # the lease cannot be released, as if the process had been killed
    for content in (None, b"garbage", b"[]", b'{"expires_at_ms": "x", "operation": 1}'):
        if content is not None:
            newest = max(path for path in listed(lake.storage) if "lease" in path)
            lake.storage.write(newest, content)
        with pytest.raises(MaintenanceBlockedError), lease(lake.storage, "orphans"):
            pass
        aging.later(10 * 60 * 1000)
        with lease(lake.storage, "orphans") as other_lease:
            other_lease.check()


def test_suspended_operation_loses_its_lease(aging: Aging, lake: Lakehouse) -> None:
    with lease(lake.storage, "purge") as lease_guard:
        lease_guard.check()
        aging.later(6 * 60 * 1000)
        lease_guard.check()
        aging.later(6 * 60 * 1000)
        lease_guard.check()  # each check renews the lease
        aging.later(HOUR_MS)
        with (
            lease(lake.storage, "orphans"),
            pytest.raises(MaintenanceBlockedError),
        ):
            lease_guard.check()


def test_suspended_purge_deletes_nothing_after_its_lease_expired(aging: Aging, lake: Lakehouse) -> None:
    aging.expire()
    aging.later()

    class SuspendingStorage(StorageWrapper):
        """A storage that waits at the first seal until another purge completes."""

        was_suspended = False

        def write(self, path: str, data: bytes) -> None:
            if path in roots(self.inner) and not self.was_suspended:
                self.was_suspended = True
                aging.later(HOUR_MS)
                operations.plan_purge(lake).execute()
            super().write(path, data)

        def delete(self, path: str) -> None:
            raise AssertionError(f"{path} was deleted without a lease")

    plan = with_storage(operations.plan_purge(lake), SuspendingStorage(lake.storage))
    with pytest.raises(MaintenanceBlockedError):
        plan.execute()
    assert states(lake) == [("PURGED", "0-4")]
    assert operations.verify(lake).is_clean


# Names of versions


def test_stalled_writer_finds_a_sealed_root(aging: Aging, lake: Lakehouse) -> None:
    """The writer pauses before it creates its root, and continues after a purge of that version."""

    def commit_and_purge() -> None:
        for number in range(3):
            create(lake, f"faster{number}")
        for _ in range(2):
            aging.later()
            aging.expire()
            aging.later()
            aging.purge()

    stalled_lake = Lakehouse(RacingStorage(lake.storage, commit_and_purge))
    txn = stalled_lake.transaction()
    txn.create_namespace("late")
    version = txn.base.version + 1
    with pytest.raises(TransactionExpiredError):
        txn.commit()
    sealed_path = lake.files.roots.path(version)
    assert decode_node(lake.storage.read(sealed_path), sealed_path).is_sealed
    with pytest.raises(VersionExpiredError):
        lake.snapshot(version)
    assert "late" not in lake.snapshot().namespaces()
    assert operations.verify(lake).is_clean


def test_stalled_writer_without_ttl_finds_a_sealed_root(aging: Aging, lake: Lakehouse) -> None:
    """Other programs may have no time to live, so that only create-if-absent rejects their roots."""
    versions = range(lake.latest_version())
    aging.expire()
    aging.later()
    aging.purge()
    for version in versions:
        with pytest.raises(Exception, match="already"):
            lake.storage.create(lake.files.roots.path(version), b"new")


# Budgets, throttling, permissions


def expire_for_purge(aging: Aging) -> int:
    """Expire as many versions as possible, wait, and return the number of files that a purge deletes."""
    append_rows(aging.lake, "ns.t")
    append_rows(aging.lake, "ns.u")
    drop(aging.lake, "ns")
    aging.later()
    report = aging.expire()
    aging.later()
    return report.files


class SingleDeleteStorage(StorageWrapper):
    """A storage that deletes one file per request."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.delete_batch_size = 1


def test_purge_with_a_request_budget_continues_in_the_next_run(aging: Aging, lake: Lakehouse) -> None:
    n_files = expire_for_purge(aging)
    needed = needed_files(lake)
    before = listed(lake.storage)
    lake_with_single_deletes = Lakehouse(SingleDeleteStorage(lake.storage))
    max_requests, report = with_least_requests(
        lambda budget: operations.plan_purge(lake_with_single_deletes).execute(budget=budget)
    )
    runs = 1
    while not report.is_complete:
        assert report.version is None
        assert report.stopped is not None
        assert report.stopped.startswith("the budget of ")
        assert "Purge not finished, run it again" in str(report)
        assert states(lake)[-1][0] == "PURGING"
        with pytest.raises(MaintenanceBlockedError):
            operations.plan_orphan_removal(lake)
        report = operations.plan_purge(lake_with_single_deletes).execute(budget=Budget(max_requests=max_requests + 15))
        runs += 1
    assert len([path for path in before - listed(lake.storage) if "_ops/" not in path]) == n_files
    assert 2 < runs <= n_files + lake.latest_version(), "each run makes progress"
    assert needed.items() <= {path: lake.storage.read(path) for path in listed(lake.storage)}.items()
    assert [state for state, _ in states(lake)] == ["PURGED"]


def test_deletes_use_the_batch_size_of_the_storage(aging: Aging, lake: Lakehouse) -> None:
    n_files = expire_for_purge(aging)

    class BatchStorage(StorageWrapper):
        def __init__(self, inner: Storage):
            super().__init__(inner)
            self.delete_batch_size = 1000

        def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
            return self.inner.delete_many(paths)  # even if its own batches are smaller

    meter = MeteredStorage(BatchStorage(lake.storage))
    plan = operations.plan_purge(Lakehouse(meter))
    before = meter.snapshot().requests
    report = plan.execute()
    assert (report.files, report.is_complete) == (n_files, True)
    after = meter.snapshot().requests
    deletes = {kind: number - before.get(kind, 0) for kind, number in after.items() if "delete" in kind}
    assert sum(deletes.values()) <= 3, "a batch of files, the plan file and the lease"
    assert n_files > 25


class ThrottlingStorage(StorageWrapper):
    """A storage that throttles the first deletes, and rejects deletes below some prefixes."""

    def __init__(
        self, inner: Storage, n_throttled: int = 0, rejected_prefixes: tuple[str, ...] = (), *, concurrency: int = 1
    ):
        super().__init__(inner)
        self.concurrency, self.delete_batch_size = concurrency, 1
        self.n_throttled = n_throttled
        self.rejected_prefixes = rejected_prefixes
        self.deletes: list[str] = []

    def delete(self, path: str) -> None:
        self.deletes.append(path)
        if self.n_throttled:
            self.n_throttled -= 1
            raise ThrottledError("slow down", path=path)
        if path.startswith(self.rejected_prefixes or ("\0",)):
            raise StoragePermissionError("access denied", path=path)
        super().delete(path)


@pytest.mark.usefixtures("manual_clock")
def test_purge_slows_down_after_throttling(aging: Aging, lake: Lakehouse) -> None:
    n_files = expire_for_purge(aging)
    throttling_storage = ThrottlingStorage(lake.storage, n_throttled=3)
    report = operations.plan_purge(Lakehouse(throttling_storage)).execute()
    assert (report.is_complete, report.files, report.throttled, dict(report.failures)) == (True, n_files, 3, {})


def test_permission_error_stops_deletes_under_that_prefix_only(aging: Aging, lake: Lakehouse) -> None:
    expire_for_purge(aging)
    prefixes = sorted({"/".join(info.path.split("/")[:2]) + "/" for info in lake.storage.list("tables/")})
    assert len(prefixes) == 2
    throttling_storage = ThrottlingStorage(lake.storage, rejected_prefixes=(prefixes[0],))
    report = operations.plan_purge(Lakehouse(throttling_storage)).execute()
    assert not report.is_complete
    assert all(path.startswith(prefixes[0]) for path in report.failures)
    assert all(reason.endswith("access denied") for reason in report.failures.values())
    assert len(report.failures) > 2
    assert len([path for path in throttling_storage.deletes if path.startswith(prefixes[0])]) == 1, (
        "no other delete is tried below the prefix"
    )
    assert {info.path.rsplit("/", 1)[1] for info in lake.storage.list(prefixes[1])} == {"_owner.json"}
    assert states(lake)[-1][0] == "PURGING"
    assert operations.plan_purge(lake).execute().is_complete
    assert {info.path.rsplit("/", 1)[1] for info in lake.storage.list(prefixes[0])} == {"_owner.json"}
    aging.later()
    aging.remove_orphans()
    assert not list(lake.storage.list("tables/"))


def files_to_delete(storage: Storage, number: int) -> dict[str, int]:
    for index in range(number):
        storage.create(f"f{index:02}", b"12")
    return {f"f{index:02}": 2 for index in range(number)}


def test_delete_rate_is_limited(lakes: Lakes, manual_clock: ManualClock) -> None:
    storage = FaultyStorage(SingleDeleteStorage(lakes.storage("plain")), concurrency=4)
    result = delete_files(storage, files_to_delete(storage, 12), Budget(requests_per_second=2))
    assert (result.files, result.bytes, result.is_complete) == (12, 24, True)
    assert manual_clock.pauses_s == [0, 1, 1, 1, 1, 1], "two requests per second"


def test_deletes_are_sent_right_after_the_check(lakes: Lakes, manual_clock: ManualClock) -> None:
    """Otherwise, at a low rate, the lease could expire and versions could be committed in between."""
    storage = FaultyStorage(SingleDeleteStorage(lakes.storage("plain")), concurrency=1)
    sizes_bytes = files_to_delete(storage, 3)
    checked_s: list[float] = []

    class TimedStorage(StorageWrapper):
        def delete(self, path: str) -> None:
            assert checked_s[-1] == manual_clock.now_s()
            super().delete(path)

    result = delete_files(
        TimedStorage(storage),
        sizes_bytes,
        Budget(requests_per_second=0.001),
        before_batch=lambda: checked_s.append(manual_clock.now_s()),
    )
    assert (result.files, result.failures, checked_s) == (3, {}, [0, 1000, 2000])


def test_backoff_grows_and_the_budget_applies_while_throttled(lakes: Lakes, manual_clock: ManualClock) -> None:
    storage = ThrottlingStorage(lakes.storage("plain"), n_throttled=10**6, concurrency=8)
    result = delete_files(storage, files_to_delete(storage, 30), Budget(max_requests=20))
    assert len(storage.deletes) == result.requests == 20
    assert (result.files, result.is_complete, result.stopped) == (0, False, "the budget of 20 requests is spent")
    assert len(manual_clock.pauses_s) == 2
    assert all(0 <= pause <= 2**number for number, pause in enumerate(manual_clock.pauses_s))
    storage.n_throttled = 5
    result = delete_files(storage, dict.fromkeys(listed(storage), 2))
    assert (result.files, result.is_complete) == (30, True)
    assert result.throttled >= 1
    storage.n_throttled = 10**6
    result = delete_files(storage, {"missing": 1})
    assert (result.requests, result.stopped, list(result.failures)) == (4, None, ["missing"]), "retries are limited"


def test_time_budget_ends_a_deletion(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FaultyStorage(SingleDeleteStorage(lakes.storage("plain")), concurrency=1)
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=TickingClock(1.0).now_s))
    result = delete_files(storage, files_to_delete(storage, 10), Budget(max_seconds=4))
    assert (result.files, result.stopped) == (4, "the budget of 4 seconds is spent")


@pytest.mark.parametrize("field", ["max_requests", "max_seconds", "requests_per_second"])
def test_budgets_must_be_positive(field: str) -> None:
    for number in (0, float("nan"), float("inf")):
        with pytest.raises(InvalidInputError, match=field):
            Budget(**{field: number})


def test_deletes_with_lost_responses_are_retried(lakes: Lakes, manual_clock: ManualClock) -> None:
    storage = FaultyStorage(
        SingleDeleteStorage(lakes.storage("plain")), [lose_response(3, kind="delete", times=2)], concurrency=1
    )
    result = delete_files(storage, files_to_delete(storage, 5))
    assert (result.files, result.is_complete, len(manual_clock.pauses_s)) == (5, True, 2)


# Faults that block all deletions


def test_missing_roots_block_deletion(aging: Aging, lake: Lakehouse) -> None:
    path = lake.files.roots.path(3)
    data = lake.storage.read(path)
    written_ms = aging.clock.written_ms[path]
    lake.storage.delete(path)
    for make_plan in (
        lambda: operations.plan_expiration(lake, keeping(1)),
        lambda: operations.plan_orphan_removal(lake),
    ):
        with pytest.raises(CorruptFileError):
            make_plan()
    lake.storage.create(path, data)
    assert operations.plan_expiration(lake, keeping(1)).versions == "0-1,3-4", (
        "version 2 may have been in use until now"
    )
    aging.clock.written_ms[path] = written_ms
    assert operations.plan_expiration(lake, keeping(1)).versions == "0-4"


def test_listing_without_roots_blocks_deletion(aging: Aging, lake: Lakehouse) -> None:
    aging.expire()
    aging.later()

    class EmptyListingStorage(StorageWrapper):
        def list(self, prefix: str = "") -> Any:
            return iter(())

    for make_plan in (
        lambda lake: operations.plan_expiration(lake, keeping(1)),
        operations.plan_purge,
        operations.plan_orphan_removal,
    ):
        with pytest.raises(CorruptFileError):
            make_plan(Lakehouse(EmptyListingStorage(lake.storage)))


def test_commits_during_a_listing_are_not_a_gap(aging: Aging, lake: Lakehouse) -> None:
    """A listing may contain only the second of two roots that are created during the listing."""

    class PagedListingStorage(StorageWrapper):
        def list(self, prefix: str = "") -> Any:
            if prefix == "_":
                listed_paths = {info.path for info in super().list(prefix)}
                versions = [create(lake, f"during{len(listed_paths)}"), create(lake, f"also{len(listed_paths)}")]
                hidden_path = lake.files.roots.path(versions[0])
                return (info for info in super().list(prefix) if info.path != hidden_path)
            return super().list(prefix)

    assert operations.plan_expiration(Lakehouse(PagedListingStorage(lake.storage)), keeping(1)).versions == "0-4"


# Orphans


def test_orphans_are_old_unreached_files(aging: Aging, lake: Lakehouse) -> None:
    fault = fail(1, StoragePermissionError, kind="create", path_part="_01100000000000000000000000000000")
    with pytest.raises(StoragePermissionError):
        create(Lakehouse(FaultyStorage(NoDeleteStorage(lake.storage), [fault])), "failed", "t")
    needed = {path for version in range(6) for path in needed_files(lake, version)}
    remaining = listed(lake.storage) - needed - {HINT_PATH}
    assert len(remaining) >= 2
    for path in ("_ops/tmp/123", "_ops/plan-00000000-0000-4000-8000-000000000000.json"):
        lake.storage.create(path, b"orphan")
    assert operations.plan_orphan_removal(lake).is_empty, "the files are too young"
    aging.later(HOUR_MS)
    lake.storage.create("_export_00000000-0000-4000-8000-000000000000.arrow", b"young")
    aging.later(DAY_MS)
    plan = operations.plan_orphan_removal(lake)
    expected = {*remaining, "_ops/tmp/123", "_ops/plan-00000000-0000-4000-8000-000000000000.json"}
    assert set(plan.paths) == expected
    assert operations.plan_orphan_removal(lake, 2 * DAY_MS).is_empty
    report = plan.execute(plan.digest)
    assert (report.files, report.is_complete, report.version) == (len(expected), True, 6)
    assert not expected & (listed(lake.storage) | list_temporary_files(lake.storage))
    aging.later()
    assert set(operations.plan_orphan_removal(lake).paths) == {"_export_00000000-0000-4000-8000-000000000000.arrow"}
    aging.remove_orphans()
    assert operations.plan_orphan_removal(lake).execute().version is None
    assert operations.verify(lake).is_clean


class NoDeleteStorage(StorageWrapper):
    """A storage that deletes nothing, as if the process had been killed before."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.delete_batch_size = 1

    def delete(self, path: str) -> None:
        del path


def list_temporary_files(storage: Storage) -> set[str]:
    return {info.path for info in storage.list("_ops/tmp/")}


def test_files_of_expired_versions_are_not_orphans(aging: Aging, lake: Lakehouse) -> None:
    before = {version: needed_files(lake, version) for version in range(5)}
    aging.expire()
    aging.later()
    assert operations.plan_orphan_removal(lake).is_empty
    operations.undelete(lake, "0-4")
    assert {version: needed_files(lake, version) for version in range(5)} == before


def test_plan_of_an_undeleted_batch_is_an_orphan(aging: Aging, lake: Lakehouse) -> None:
    plan_path = aging.expire().plan_path
    operations.undelete(lake, "0-4")
    aging.later()
    assert operations.plan_orphan_removal(lake).paths == [plan_path]


def test_files_of_a_damaged_plan_become_orphans(aging: Aging, lake: Lakehouse) -> None:
    report = aging.expire()
    needed = needed_files(lake)
    lake.storage.write(report.plan_path or "", b"damaged")
    aging.later()
    plan = operations.plan_purge(lake)
    assert [batch.has_plan for batch in plan.batches] == [False]
    assert (plan.files, plan.is_empty) == (0, False)
    assert plan.execute(plan.digest).is_complete
    aging.later()
    removed = aging.remove_orphans()
    assert removed.files >= report.files
    assert needed.items() <= {path: lake.storage.read(path) for path in listed(lake.storage)}.items()
    assert operations.verify(lake).is_clean
    with pytest.raises(VersionNotFoundError):
        lake.snapshot(99)


def test_altered_plan_file_is_rejected(aging: Aging, lake: Lakehouse) -> None:
    report = aging.expire()
    path = report.plan_path or ""
    content = json.loads(lake.storage.read(path))
    content["files"].append(["anything.txt", 1])
    lake.storage.create("anything.txt", b"x")
    lake.storage.write(path, json.dumps(content).encode())
    aging.later()
    aging.purge()
    assert "anything.txt" in listed(lake.storage)


def test_orphan_removal_keeps_files_published_since_the_plan(aging: Aging, lake: Lakehouse) -> None:
    """A staged definition counts as an orphan until a transaction publishes it. Here this happens before and during the
    removal.
    """
    staged = [lake.stage_definition("n0", f"s{number}", table()) for number in range(3)]
    aging.later()
    plan = operations.plan_orphan_removal(lake)
    assert set(plan.paths) == {definition.location for definition in staged}

    def publish(number: int) -> None:
        # Transactions reject files this old, so reset their age.
        aging.clock.written_ms[staged[number].location] = aging.clock.time_ms
        with lake.transaction() as txn:
            txn.put_staged([staged[number]])

    publish(0)
    report = with_conflicts(plan, lambda: publish(1)).execute(plan.digest)
    assert (report.files, report.still_needed, report.version) == (1, 2, 8)
    assert {"s0", "s1"} <= set(lake.snapshot().tables("n0"))
    assert operations.verify(lake).is_clean
