"""Test findings about purges, leases, plans, transactions, exports and orphans."""

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

#: A process that died does not give its lease back.
NO_RELEASE = fail(1, DeathError, kind="write", path_part="_ops/lease", times=99)  # type: ignore[arg-type]


@pytest.fixture
def damaged(lakes: Lakes) -> Aging:
    """A lakehouse like that of ``aging``, which is not checked at the end of the test."""
    aging = Aging.on(lakes.storage())
    grow(aging, 5)
    aging.later()
    return aging


def verified(storage: Storage) -> VerifyReport:
    return operations.verify(Lakehouse(storage))


def codes(report: VerifyReport) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.findings}


def test_cleaned_lakehouse_has_no_findings(aging: Aging) -> None:
    append_rows(aging.lake)
    drop(aging.lake, "ns")
    aging.clean_up()
    aging.later()
    report = verified(aging.clock)
    assert report.findings == ()
    assert (report.orphan_files, report.orphan_bytes) == (0, 0)
    assert report.unchecked == ()


def test_live_root_of_purged_version_is_found(aging: Aging) -> None:
    roots = {version: aging.clock.read(root_path(version)) for version in range(5)}
    aging.clean_up()
    aging.clock.write(root_path(3), roots[3])
    report = verified(aging.clock)
    result = codes(report)["zombie-root"]
    assert (result.severity, result.path, result.version) == ("error", root_path(3), 3)
    assert {finding.code for finding in report.findings} == {"zombie-root"}, "its files were deleted, as expected"
    assert not report.is_clean


@pytest.mark.parametrize("part", ["_ops/lease", root_path(2), "0/", "_lakehouse_def"])
def test_interrupted_purge_is_a_warning(aging: Aging, part: str) -> None:
    """The purge is interrupted before one of its writes or deletes; it begins with the first commit."""
    aging.expire()
    aging.later()
    kind = {"_ops/lease": "create", root_path(2): "write", "0/": "delete", "_lakehouse_def": "create"}[part]
    fault = fail(1, DeathError, "after", kind=kind, path_part=part)  # type: ignore[arg-type]
    with pytest.raises(DeathError):
        operations.plan_purge(Lakehouse(FaultyStorage(aging.clock, [fault, NO_RELEASE], concurrency=1))).execute()
    while_it_runs = codes(verified(aging.clock))
    assert "purge-unfinished" not in while_it_runs
    assert "lease-stale" not in while_it_runs
    aging.later(DURATION_MS + 1)
    report = verified(aging.clock)
    assert report.is_clean, report
    result = codes(report)
    has_begun = any(batch.state == ExpirationState.PURGING for batch in aging.lake.snapshot().definition.expirations)
    assert has_begun == (kind in ("write", "delete"))
    assert ("purge-unfinished" in result) == has_begun
    assert (result["lease-stale"].fix, result["lease-stale"].path) == ("purge", lease_path(1))
    if has_begun:
        assert result["purge-unfinished"].fix == "purge"
        assert any("purge" in part for part in report.unchecked), "orphans are unknown before"
    aging.purge()
    aging.later()
    aging.remove_orphans()
    assert verified(aging.clock).findings == ()


def test_interrupted_orphan_removal_is_a_warning(aging: Aging) -> None:
    aging.lake.stage_definition("n0", "left", aging.lake.snapshot().table("n0", "a"))
    aging.later()
    result = codes(verified(aging.clock))
    assert (result["orphans"].severity, result["orphans"].fix) == ("warning", "orphans")
    report = verified(aging.clock)
    plan = operations.plan_orphan_removal(aging.lake)
    assert (report.orphan_files, report.orphan_bytes) == (len(plan.paths), plan.bytes)
    fault = fail(1, DeathError, kind="delete")  # type: ignore[arg-type]
    with pytest.raises(DeathError):
        operations.plan_orphan_removal(Lakehouse(FaultyStorage(aging.clock, [fault, NO_RELEASE]))).execute()
    aging.later(DURATION_MS + 1)
    assert codes(verified(aging.clock))["lease-stale"].fix == "orphans"
    assert verified(aging.clock).orphan_files == len(plan.paths)
    aging.remove_orphans()
    assert verified(aging.clock).findings == ()


def test_leases_are_checked(aging: Aging) -> None:
    with lease(aging.clock, "purge"):
        assert verified(aging.clock).findings == (), "the operation is running"
    assert verified(aging.clock).findings == (), "the lease was released"
    aging.clock.write(lease_path(2), b"neither JSON nor anything else")
    (finding,) = verified(aging.clock).findings
    assert (finding.code, finding.path, finding.fix) == ("lease-stale", lease_path(2), None)


class TakenOver(StorageWrapper):
    """Let another operation take the lease just before it is read."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == lease_path(1):
            with lease(self.inner, "orphans"):
                pass
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_lease_taken_over_during_verify(aging: Aging) -> None:
    with lease(aging.clock, "purge"):
        pass
    assert verified(TakenOver(aging.clock)).findings == ()


def test_leftover_files_of_operations_are_warnings(aging: Aging) -> None:
    aging.clock.create(new_plan_path(), b"{}")
    txn = aging.lake.transaction()
    txn.create_namespace("never")
    saved = txn.save()
    interrupt_export(aging.lake, "half")
    record = aging.lake.snapshot().definition.exports[0]
    assert verified(aging.clock).findings == (), "all of them can be in use"
    aging.later()
    result = codes(verified(aging.clock))
    assert result.keys() == {"plan-left", "transaction-left", "orphans"}
    assert {finding.fix for finding in result.values()} == {"orphans"}
    assert result["transaction-left"].path == f"_ops/txn-{saved}.binpb"
    aging.lake.alter_definition(exports=())
    result = codes(verified(aging.clock))
    assert result["export-left"].path in (record.manifest_path, record.root_location)
    aging.remove_orphans()
    assert verified(aging.clock).findings == ()


def test_plans_of_expired_versions_are_not_leftovers(aging: Aging) -> None:
    aging.expire()
    aging.later()
    assert verified(aging.clock).findings == ()


def test_export_of_purged_version_is_found(aging: Aging) -> None:
    operations.plan_export(aging.lake, "kept", version=2).execute()
    definition = aging.lake.snapshot().definition
    aging.lake.alter_definition(exports=(), exported_snapshots={})
    aging.clean_up()
    aging.lake.alter_definition(exports=definition.exports)
    result = codes(verified(aging.clock))
    assert (result["export-unpinned"].severity, result["export-unpinned"].fix) == ("error", "drop-export")
    assert result["export-unpinned"].version == 2


def foreign_rollback(lake: Lakehouse, to: int) -> None:
    """Commit an earlier version's content and settings like a program without support for operations."""
    latest, target = lake.snapshot(), lake.snapshot(to)
    system = {**target.root.system, "previous_root": latest.location, "rollback_from_root": latest.location}
    system["created_at_millis"] = str(latest.created_at_ms + 1)
    system.pop(COMMIT_ID, None)
    root = replace(target.root, system=system)
    lake.storage.create(root_path(latest.version + 1), encode_node(root, latest.definition.order))


def test_settings_replaced_by_another_program_are_a_warning(aging: Aging) -> None:
    operations.plan_export(aging.lake, "forgotten").execute()
    foreign_rollback(aging.lake, 2)
    version = aging.lake.latest_version()
    result = codes(verified(aging.clock))["reconcile-needed"]
    assert (result.severity, result.version, result.path, result.fix) == (
        "warning",
        version,
        root_path(version),
        "reconcile",
    )
    operations.reconcile(aging.lake)
    assert "reconcile-needed" not in codes(verified(aging.clock))


def test_unowned_files_are_not_orphans(aging: Aging) -> None:
    aging.clock.create("tables/unowned/data.parquet", b"rows")
    aging.clock.create("else/where.txt", b"text")
    aging.later()
    assert verified(aging.clock).findings == ()


class PurgedMeanwhile(AgingStorage):
    """Purge all old versions at the first read of a file of one kind."""

    def __init__(self, aging: Aging, kind: str = "node"):
        super().__init__(aging.clock.inner, aging.clock.time_ms)
        self.written_ms = aging.clock.written_ms
        self._aging = aging
        self._kind = kind
        self._has_begun = False

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if f"-{self._kind}-" in path and not self._has_begun:
            self._has_begun = True
            assert self._aging.purge().files
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_versions_purged_during_verify_are_not_damaged(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    grow(aging, 5)
    aging.later()
    operations.plan_expiration(aging.lake, keeping(2)).execute()
    aging.later()
    report = verified(PurgedMeanwhile(aging))
    assert (report.is_clean, report.damaged_versions, report.damaged_objects) == (True, "", ())
    assert verified(aging.clock).is_clean


def test_definitions_purged_during_verify_are_not_damaged(lakes: Lakes) -> None:
    """Later versions that share them are not damaged either."""
    aging = Aging.on(lakes.storage())
    create(aging.lake, "n", "t")
    create(aging.lake, "m")
    drop(aging.lake, "n", "t")
    create(aging.lake, "o")
    aging.later()
    operations.plan_expiration(aging.lake, keeping(1)).execute()
    aging.later()
    report = verified(PurgedMeanwhile(aging, "table"))
    assert (report.is_clean, report.damaged_versions) == (True, "")


class DroppedMeanwhile(AgingStorage):
    """Drop the export, remove its files and, with ``is_exported_again``, export again, before a read."""

    def __init__(self, aging: Aging, at: int, *, is_exported_again: bool):
        super().__init__(aging.clock.inner, aging.clock.time_ms)
        self.written_ms = aging.clock.written_ms
        self._aging = aging
        self._at = at
        self._again = is_exported_again
        self.n_reads = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.n_reads += 1
        if self.n_reads == self._at:
            operations.drop_export(self._aging.lake, "full")
            self._aging.later()
            self._aging.remove_orphans()
            self.time_ms = self._aging.clock.time_ms
            if self._again:
                operations.plan_export(self._aging.lake, "full", level="full").execute()
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


@pytest.mark.parametrize("is_exported_again", [False, True])
def test_exports_dropped_during_verify_are_not_damaged(lakes: Lakes, is_exported_again: bool) -> None:
    at = 1
    while True:
        aging = Aging.on(lakes.storage(f"{at}"))
        grow(aging, 3)
        append_rows(aging.lake)
        operations.plan_export(aging.lake, "full", level="full").execute()
        storage = DroppedMeanwhile(aging, at, is_exported_again=is_exported_again)
        report = verified(storage)
        assert report.is_clean, report
        if storage.n_reads < at:
            break
        at += 3
    assert at > 60


def test_orphans_are_unknown_with_damage(damaged: Aging) -> None:
    latest = damaged.lake.snapshot()
    damaged.clock.delete(latest.root.children[0])
    report = verified(damaged.clock)
    assert codes(report)["node-missing"].fix == "repair --to-last-good"
    assert report.orphan_files is None
    assert any(part.startswith("orphans") for part in report.unchecked)
    assert "orphans" in str(report).splitlines()[0].partition("; not checked: ")[2]


def test_damage_of_older_versions_has_no_repair_command(damaged: Aging) -> None:
    old = set(damaged.lake.snapshot(2).root.children) - set(damaged.lake.snapshot().root.children)
    path = min(old)
    damaged.clock.delete(path)
    report = verified(damaged.clock)
    assert codes(report)["node-missing"].fix is None
    assert str(damaged.lake.latest_version()) not in report.damaged_versions.split("-")
    assert report.damaged_objects == ()


def test_damaged_versions_and_objects_are_reported(damaged: Aging) -> None:
    lake = damaged.lake
    first = create(lake, "damaged", "t")
    snapshot = lake.snapshot()
    location = snapshot.entry(snapshot.keys.table_key("damaged", "t"))
    assert location is not None
    damaged.clock.delete(location)
    create(lake, "other")
    report = verified(damaged.clock)
    assert report.damaged_versions == f"{first}-{first + 1}"
    assert [str(name) for name in report.damaged_objects] == ["damaged.t"]
    drop(lake, "damaged", "t")
    report = verified(damaged.clock)
    assert report.damaged_versions == f"{first}-{first + 1}"
    assert report.damaged_objects == ()
    assert json.loads(report.to_json())["damaged_versions"] == f"{first}-{first + 1}"


def test_lease_time_in_the_future_is_accepted(aging: Aging) -> None:
    content = {"holder": "x", "operation": "purge", "expires_at_ms": aging.clock.time_ms + LONG_MS}
    aging.clock.write(lease_path(1), json.dumps(content).encode())
    assert verified(aging.clock).findings == ()


def test_report_records_roots(damaged: Aging) -> None:
    """A root without a lakehouse definition is a separate error and does not fail verify."""
    path = root_path(2)
    root = decode_node(damaged.clock.read(path), path)
    system = {name: value for name, value in root.system.items() if name != LAKEHOUSE_DEF}
    damaged.clock.write(path, encode_node(replace(root, system=system), 4))
    report = verified(damaged.clock)
    assert {finding.path for finding in report.findings if finding.severity == "error"} == {path}
    assert any(part.startswith("orphans") for part in report.unchecked)
    assert Snapshot.of(damaged.lake.files, 2).root.system.get(LAKEHOUSE_DEF) is None


def test_export_dropped_during_verify_is_not_reported(lakes: Lakes) -> None:
    lake = lakes.memory()
    create(lake, "n")
    report = operations.plan_export(lake, "e").execute()
    faulty = FaultyStorage(lake.storage)
    read = faulty.read

    def read_and_drop(
        path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
    ) -> bytes:
        if path == report.manifest_path:
            operations.drop_export(Lakehouse(lake.storage), "e")
        return read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    faulty.read = read_and_drop  # type: ignore[method-assign]
    assert operations.verify(Lakehouse(faulty)).findings == ()
