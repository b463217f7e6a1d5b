"""Test what verify reports about purges, leases, plans, transactions, exports and orphans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.clock import AgingStorage
from tests.faults import DeathError, FaultyStorage, fail
from tests.lakes import Lakes
from tests.operations.aging import LONG_MS, Aging, grow, keeping
from tests.operations.changes import append_rows, create, drop
from tests.operations.test_export import interrupt_export
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.definitions import ExpirationState
from trinitylake_ops.format.file_names import lease_path, new_plan_path, root_path
from trinitylake_ops.format.keys import COMMIT_ID, LAKEHOUSE_DEF
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.operations import Finding, VerifyReport
from trinitylake_ops.operations.lease import DURATION_MS, lease
from trinitylake_ops.storage import Storage, StorageWrapper
from trinitylake_ops.versions.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("fixed_requests")

#: A killed process does not release its lease.
NO_RELEASE = fail(1, DeathError, kind="write", path_part="_ops/lease", times=99)  # type: ignore[arg-type]


@pytest.fixture
def damaged_aging(lakes: Lakes) -> Aging:
    """The same lakehouse as ``aging``, but not checked after the test."""
    aging = Aging.on(lakes.storage())
    grow(aging, 5)
    aging.later()
    return aging


def verify(storage: Storage) -> VerifyReport:
    return operations.verify(Lakehouse(storage))


def findings_by_code(report: VerifyReport) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.findings}


def test_cleaned_lakehouse_has_no_findings(aging: Aging) -> None:
    append_rows(aging.lake)
    drop(aging.lake, "ns")
    aging.clean_up()
    aging.later()
    report = verify(aging.clock)
    assert report.findings == ()
    assert (report.orphan_files, report.orphan_bytes) == (0, 0)
    assert report.unchecked == ()


def test_live_root_of_purged_version_is_reported(aging: Aging) -> None:
    roots = {version: aging.clock.read(root_path(version)) for version in range(5)}
    aging.clean_up()
    aging.clock.write(root_path(3), roots[3])
    report = verify(aging.clock)
    finding = findings_by_code(report)["zombie-root"]
    assert (finding.severity, finding.path, finding.version) == ("error", root_path(3), 3)
    assert {finding.code for finding in report.findings} == {"zombie-root"}, (
        "the deleted files of the version are not reported"
    )
    assert not report.is_clean


@pytest.mark.parametrize("path_part", ["_ops/lease", root_path(2), "0/", "_lakehouse_def"])
def test_interrupted_purge_is_a_warning(aging: Aging, path_part: str) -> None:
    """The purge is interrupted after one of its writes or deletes. It starts with the first commit."""
    aging.expire()
    aging.later()
    kind = {"_ops/lease": "create", root_path(2): "write", "0/": "delete", "_lakehouse_def": "create"}[path_part]
    fault = fail(1, DeathError, "after", kind=kind, path_part=path_part)  # type: ignore[arg-type]
    with pytest.raises(DeathError):
        operations.plan_purge(Lakehouse(FaultyStorage(aging.clock, [fault, NO_RELEASE], concurrency=1))).execute()
    running_findings = findings_by_code(verify(aging.clock))
    assert "purge-unfinished" not in running_findings
    assert "lease-stale" not in running_findings
    aging.later(DURATION_MS + 1)
    report = verify(aging.clock)
    assert report.is_clean, report
    findings = findings_by_code(report)
    has_started = any(batch.state == ExpirationState.PURGING for batch in aging.lake.snapshot().definition.expirations)
    assert has_started == (kind in ("write", "delete"))
    assert ("purge-unfinished" in findings) == has_started
    assert (findings["lease-stale"].fix, findings["lease-stale"].path) == ("purge", lease_path(1))
    if has_started:
        assert findings["purge-unfinished"].fix == "purge"
        assert any("purge" in path_part for path_part in report.unchecked), (
            "orphans are unknown until the purge is complete"
        )
    aging.purge()
    aging.later()
    aging.remove_orphans()
    assert verify(aging.clock).findings == ()


def test_interrupted_orphan_removal_is_a_warning(aging: Aging) -> None:
    aging.lake.stage_definition("n0", "unused", aging.lake.snapshot().table("n0", "a"))
    aging.later()
    findings = findings_by_code(verify(aging.clock))
    assert (findings["orphans"].severity, findings["orphans"].fix) == ("warning", "orphans")
    report = verify(aging.clock)
    plan = operations.plan_orphan_removal(aging.lake)
    assert (report.orphan_files, report.orphan_bytes) == (len(plan.paths), plan.bytes)
    fault = fail(1, DeathError, kind="delete")  # type: ignore[arg-type]
    with pytest.raises(DeathError):
        operations.plan_orphan_removal(Lakehouse(FaultyStorage(aging.clock, [fault, NO_RELEASE]))).execute()
    aging.later(DURATION_MS + 1)
    assert findings_by_code(verify(aging.clock))["lease-stale"].fix == "orphans"
    assert verify(aging.clock).orphan_files == len(plan.paths)
    aging.remove_orphans()
    assert verify(aging.clock).findings == ()


def test_leases_are_checked(aging: Aging) -> None:
    with lease(aging.clock, "purge"):
        assert verify(aging.clock).findings == (), "the operation is running"
    assert verify(aging.clock).findings == (), "the lease was released"
    aging.clock.write(lease_path(2), b"not JSON")
    (finding,) = verify(aging.clock).findings
    assert (finding.code, finding.path, finding.fix) == ("lease-stale", lease_path(2), None)


class LeaseTakeoverStorage(StorageWrapper):
    """A storage that lets another operation acquire the lease just before it is read."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == lease_path(1):
            with lease(self.inner, "orphans"):
                pass
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_lease_taken_over_during_verify_is_not_reported(aging: Aging) -> None:
    with lease(aging.clock, "purge"):
        pass
    assert verify(LeaseTakeoverStorage(aging.clock)).findings == ()


def test_leftover_files_of_operations_are_warnings(aging: Aging) -> None:
    aging.clock.create(new_plan_path(), b"{}")
    txn = aging.lake.transaction()
    txn.create_namespace("new")
    transaction_id = txn.save()
    interrupt_export(aging.lake, "incomplete")
    record = aging.lake.snapshot().definition.exports[0]
    assert verify(aging.clock).findings == (), "new files can be in use"
    aging.later()
    findings = findings_by_code(verify(aging.clock))
    assert findings.keys() == {"plan-left", "transaction-left", "orphans"}
    assert {finding.fix for finding in findings.values()} == {"orphans"}
    assert findings["transaction-left"].path == f"_ops/txn-{transaction_id}.binpb"
    aging.lake.alter_definition(exports=())
    findings = findings_by_code(verify(aging.clock))
    assert findings["export-left"].path in (record.manifest_path, record.root_location)
    aging.remove_orphans()
    assert verify(aging.clock).findings == ()


def test_plans_of_expired_versions_are_not_leftovers(aging: Aging) -> None:
    aging.expire()
    aging.later()
    assert verify(aging.clock).findings == ()


def test_export_of_purged_version_is_reported(aging: Aging) -> None:
    operations.plan_export(aging.lake, "kept", version=2).execute()
    definition = aging.lake.snapshot().definition
    aging.lake.alter_definition(exports=(), exported_snapshots={})
    aging.clean_up()
    aging.lake.alter_definition(exports=definition.exports)
    findings = findings_by_code(verify(aging.clock))
    assert (findings["export-unpinned"].severity, findings["export-unpinned"].fix) == ("error", "drop-export")
    assert findings["export-unpinned"].version == 2


def foreign_rollback(lake: Lakehouse, to: int) -> None:
    """Commit the content and settings of an earlier version, as a program that only follows the format does."""
    latest, target = lake.snapshot(), lake.snapshot(to)
    system = {**target.root.system, "previous_root": latest.location, "rollback_from_root": latest.location}
    system["created_at_millis"] = str(latest.created_at_ms + 1)
    system.pop(COMMIT_ID, None)
    root = replace(target.root, system=system)
    lake.storage.create(root_path(latest.version + 1), encode_node(root, latest.definition.order))


def test_settings_replaced_by_another_program_are_a_warning(aging: Aging) -> None:
    operations.plan_export(aging.lake, "lost").execute()
    foreign_rollback(aging.lake, 2)
    version = aging.lake.latest_version()
    finding = findings_by_code(verify(aging.clock))["reconcile-needed"]
    assert (finding.severity, finding.version, finding.path, finding.fix) == (
        "warning",
        version,
        root_path(version),
        "reconcile",
    )
    operations.reconcile(aging.lake)
    assert "reconcile-needed" not in findings_by_code(verify(aging.clock))


def test_unowned_files_are_not_orphans(aging: Aging) -> None:
    aging.clock.create("tables/unowned/data.parquet", b"rows")
    aging.clock.create("other/file.txt", b"text")
    aging.later()
    assert verify(aging.clock).findings == ()


class ConcurrentPurgeStorage(AgingStorage):
    """A storage that purges all old versions at the first read of a file of one kind."""

    def __init__(self, aging: Aging, kind: str = "node"):
        super().__init__(aging.clock.inner, aging.clock.time_ms)
        self.written_ms = aging.clock.written_ms
        self._aging = aging
        self._kind = kind
        self._has_purged = False

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if f"-{self._kind}-" in path and not self._has_purged:
            self._has_purged = True
            assert self._aging.purge().files
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_versions_purged_during_verify_are_not_damaged(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    grow(aging, 5)
    aging.later()
    operations.plan_expiration(aging.lake, keeping(2)).execute()
    aging.later()
    report = verify(ConcurrentPurgeStorage(aging))
    assert (report.is_clean, report.damaged_versions, report.damaged_objects) == (True, "", ())
    assert verify(aging.clock).is_clean


def test_definitions_purged_during_verify_are_not_damaged(lakes: Lakes) -> None:
    """Later versions that share the definitions are not damaged either."""
    aging = Aging.on(lakes.storage())
    create(aging.lake, "n", "t")
    create(aging.lake, "m")
    drop(aging.lake, "n", "t")
    create(aging.lake, "o")
    aging.later()
    operations.plan_expiration(aging.lake, keeping(1)).execute()
    aging.later()
    report = verify(ConcurrentPurgeStorage(aging, "table"))
    assert (report.is_clean, report.damaged_versions) == (True, "")


class ConcurrentDropStorage(AgingStorage):
    """A storage that drops the export and removes its files before the ``at``-th read. It can then export again."""

    def __init__(self, aging: Aging, at: int, *, exports_again: bool):
        super().__init__(aging.clock.inner, aging.clock.time_ms)
        self.written_ms = aging.clock.written_ms
        self._aging = aging
        self._at = at
        self._exports_again = exports_again
        self.n_reads = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.n_reads += 1
        if self.n_reads == self._at:
            operations.drop_export(self._aging.lake, "full")
            self._aging.later()
            self._aging.remove_orphans()
            self.time_ms = self._aging.clock.time_ms
            if self._exports_again:
                operations.plan_export(self._aging.lake, "full", level="full").execute()
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


@pytest.mark.parametrize("exports_again", [False, True])
def test_exports_dropped_during_verify_are_not_damaged(lakes: Lakes, exports_again: bool) -> None:
    read_number = 1
    while True:
        aging = Aging.on(lakes.storage(f"{read_number}"))
        grow(aging, 3)
        append_rows(aging.lake)
        operations.plan_export(aging.lake, "full", level="full").execute()
        storage = ConcurrentDropStorage(aging, read_number, exports_again=exports_again)
        report = verify(storage)
        assert report.is_clean, report
        if storage.n_reads < read_number:
            break
        read_number += 3
    assert read_number > 60


def test_orphans_are_unknown_with_damage(damaged_aging: Aging) -> None:
    latest = damaged_aging.lake.snapshot()
    damaged_aging.clock.delete(latest.root.children[0])
    report = verify(damaged_aging.clock)
    assert findings_by_code(report)["node-missing"].fix == "repair --to-last-good"
    assert report.orphan_files is None
    assert any(item.startswith("orphans") for item in report.unchecked)
    assert "orphans" in str(report).splitlines()[0].partition("; not checked: ")[2]


def test_damage_of_older_versions_has_no_repair_command(damaged_aging: Aging) -> None:
    older_nodes = set(damaged_aging.lake.snapshot(2).root.children) - set(damaged_aging.lake.snapshot().root.children)
    path = min(older_nodes)
    damaged_aging.clock.delete(path)
    report = verify(damaged_aging.clock)
    assert findings_by_code(report)["node-missing"].fix is None
    assert str(damaged_aging.lake.latest_version()) not in report.damaged_versions.split("-")
    assert report.damaged_objects == ()


def test_damaged_versions_and_objects_are_reported(damaged_aging: Aging) -> None:
    lake = damaged_aging.lake
    version = create(lake, "damaged", "t")
    snapshot = lake.snapshot()
    location = snapshot.entry(snapshot.keys.table_key("damaged", "t"))
    assert location is not None
    damaged_aging.clock.delete(location)
    create(lake, "other")
    report = verify(damaged_aging.clock)
    assert report.damaged_versions == f"{version}-{version + 1}"
    assert [str(name) for name in report.damaged_objects] == ["damaged.t"]
    drop(lake, "damaged", "t")
    report = verify(damaged_aging.clock)
    assert report.damaged_versions == f"{version}-{version + 1}"
    assert report.damaged_objects == ()
    assert json.loads(report.to_json())["damaged_versions"] == f"{version}-{version + 1}"


def test_lease_time_in_the_future_is_accepted(aging: Aging) -> None:
    content = {"holder": "x", "operation": "purge", "expires_at_ms": aging.clock.time_ms + LONG_MS}
    aging.clock.write(lease_path(1), json.dumps(content).encode())
    assert verify(aging.clock).findings == ()


def test_root_without_lakehouse_definition_is_reported(damaged_aging: Aging) -> None:
    """A root without a lakehouse definition does not fail verify."""
    path = root_path(2)
    root = decode_node(damaged_aging.clock.read(path), path)
    system = {name: value for name, value in root.system.items() if name != LAKEHOUSE_DEF}
    damaged_aging.clock.write(path, encode_node(replace(root, system=system), 4))
    report = verify(damaged_aging.clock)
    assert {finding.path for finding in report.findings if finding.severity == "error"} == {path}
    assert any(item.startswith("orphans") for item in report.unchecked)
    assert Snapshot.of(damaged_aging.lake.files, 2).root.system.get(LAKEHOUSE_DEF) is None


def test_export_dropped_during_verify_is_not_reported(lakes: Lakes) -> None:
    lake = lakes.memory()
    create(lake, "n")
    report = operations.plan_export(lake, "e").execute()
    storage = FaultyStorage(lake.storage)
    read = storage.read

    def read_and_drop(
        path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
    ) -> bytes:
        if path == report.manifest_path:
            operations.drop_export(Lakehouse(lake.storage), "e")
        return read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    storage.read = read_and_drop  # type: ignore[method-assign]
    assert operations.verify(Lakehouse(storage)).findings == ()
