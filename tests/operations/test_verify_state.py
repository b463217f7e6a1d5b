"""Verify and what operations record and leave: purges, leases, plans, transactions, exports, orphans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.clock import AgingStorage
from tests.faults import DeathError, FaultyStorage, fail
from tests.lakes import Lakes
from tests.operations.aging import LONG_MS, Aging, grow, keeping
from tests.operations.changes import append_rows, create, drop
from tests.operations.test_export import cut_off
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
    """A lakehouse as that of ``aging``, which is not checked when the test ends."""
    made = Aging.on(lakes.storage())
    grow(made, 5)
    made.later()
    return made


def verified(storage: Storage) -> VerifyReport:
    return operations.verify(Lakehouse(storage))


def codes(report: VerifyReport) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.findings}


def test_a_lakehouse_that_was_tidied_has_no_findings(aging: Aging) -> None:
    append_rows(aging.lake)
    drop(aging.lake, "ns")
    aging.clean_up()
    aging.later()
    report = verified(aging.clock)
    assert report.findings == ()
    assert (report.orphan_files, report.orphan_bytes) == (0, 0)
    assert report.unchecked == ()


def test_a_live_root_where_a_version_was_purged(aging: Aging) -> None:
    roots = {version: aging.clock.read(root_path(version)) for version in range(5)}
    aging.clean_up()
    aging.clock.write(root_path(3), roots[3])
    report = verified(aging.clock)
    found = codes(report)["zombie-root"]
    assert (found.severity, found.path, found.version) == ("error", root_path(3), 3)
    assert {finding.code for finding in report.findings} == {"zombie-root"}, "its files are gone, as they should be"
    assert not report.is_clean


@pytest.mark.parametrize("part", ["_ops/lease", root_path(2), "0/", "_lakehouse_def"])
def test_a_purge_that_was_cut_off(aging: Aging, part: str) -> None:
    """Cut off before one of its writes or deletes: from the first commit on it has begun."""
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
    found = codes(report)
    has_begun = any(batch.state == ExpirationState.PURGING for batch in aging.lake.snapshot().definition.expirations)
    assert has_begun == (kind in ("write", "delete"))
    assert ("purge-unfinished" in found) == has_begun
    assert (found["lease-stale"].mend, found["lease-stale"].path) == ("purge", lease_path(1))
    if has_begun:
        assert found["purge-unfinished"].mend == "purge"
        assert any("purge" in what for what in report.unchecked), "nobody can tell the orphans before"
    aging.purge()
    aging.later()
    aging.remove_orphans()
    assert verified(aging.clock).findings == ()


def test_a_removal_of_orphans_that_was_cut_off(aging: Aging) -> None:
    aging.lake.stage_definition("n0", "left", aging.lake.snapshot().table("n0", "a"))
    aging.later()
    found = codes(verified(aging.clock))
    assert (found["orphans"].severity, found["orphans"].mend) == ("warning", "orphans")
    report = verified(aging.clock)
    plan = operations.plan_orphan_removal(aging.lake)
    assert (report.orphan_files, report.orphan_bytes) == (len(plan.paths), plan.bytes)
    fault = fail(1, DeathError, kind="delete")  # type: ignore[arg-type]
    with pytest.raises(DeathError):
        operations.plan_orphan_removal(Lakehouse(FaultyStorage(aging.clock, [fault, NO_RELEASE]))).execute()
    aging.later(DURATION_MS + 1)
    assert codes(verified(aging.clock))["lease-stale"].mend == "orphans"
    assert verified(aging.clock).orphan_files == len(plan.paths)
    aging.remove_orphans()
    assert verified(aging.clock).findings == ()


def test_leases(aging: Aging) -> None:
    with lease(aging.clock, "purge"):
        assert verified(aging.clock).findings == (), "it runs"
    assert verified(aging.clock).findings == (), "it was given back"
    aging.clock.write(lease_path(2), b"neither JSON nor anything else")
    (finding,) = verified(aging.clock).findings
    assert (finding.code, finding.path, finding.mend) == ("lease-stale", lease_path(2), None)


class TakenOver(StorageWrapper):
    """Lets another operation take the lease while it is about to be read."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == lease_path(1):
            with lease(self.inner, "orphans"):
                pass
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_a_lease_that_is_taken_over_meanwhile(aging: Aging) -> None:
    with lease(aging.clock, "purge"):
        pass
    assert verified(TakenOver(aging.clock)).findings == ()


def test_files_that_operations_left(aging: Aging) -> None:
    aging.clock.create(new_plan_path(), b"{}")
    txn = aging.lake.transaction()
    txn.create_namespace("never")
    saved = txn.save()
    cut_off(aging.lake, "half")
    record = aging.lake.snapshot().definition.exports[0]
    assert verified(aging.clock).findings == (), "all of them may be in use"
    aging.later()
    found = codes(verified(aging.clock))
    assert found.keys() == {"plan-left", "transaction-left", "orphans"}
    assert {finding.mend for finding in found.values()} == {"orphans"}
    assert found["transaction-left"].path == f"_ops/txn-{saved}.binpb"
    aging.lake.alter_definition(exports=())
    found = codes(verified(aging.clock))
    assert found["export-left"].path in (record.manifest_path, record.root_location)
    aging.remove_orphans()
    assert verified(aging.clock).findings == ()


def test_plans_of_expired_versions_are_no_leftovers(aging: Aging) -> None:
    aging.expire()
    aging.later()
    assert verified(aging.clock).findings == ()


def test_an_export_of_a_purged_version(aging: Aging) -> None:
    operations.plan_export(aging.lake, "kept", version=2).execute()
    definition = aging.lake.snapshot().definition
    aging.lake.alter_definition(exports=(), exported_snapshots={})
    aging.clean_up()
    aging.lake.alter_definition(exports=definition.exports)
    found = codes(verified(aging.clock))
    assert (found["export-unpinned"].severity, found["export-unpinned"].mend) == ("error", "drop-export")
    assert found["export-unpinned"].version == 2


def foreign_rollback(lake: Lakehouse, to: int) -> None:
    """Commit an earlier version's content and settings as a program does that knows the texts alone."""
    latest, target = lake.snapshot(), lake.snapshot(to)
    system = {**target.root.system, "previous_root": latest.location, "rollback_from_root": latest.location}
    system["created_at_millis"] = str(latest.created_at_ms + 1)
    system.pop(COMMIT_ID, None)
    root = replace(target.root, system=system)
    lake.storage.create(root_path(latest.version + 1), encode_node(root, latest.definition.order))


def test_settings_that_another_program_went_back_to(aging: Aging) -> None:
    operations.plan_export(aging.lake, "forgotten").execute()
    foreign_rollback(aging.lake, 2)
    version = aging.lake.latest_version()
    found = codes(verified(aging.clock))["reconcile-needed"]
    assert (found.severity, found.version, found.path, found.mend) == (
        "warning",
        version,
        root_path(version),
        "reconcile",
    )
    operations.reconcile(aging.lake)
    assert "reconcile-needed" not in codes(verified(aging.clock))


def test_unowned_files_are_none_of_ours(aging: Aging) -> None:
    aging.clock.create("tables/somebody/data.parquet", b"rows")
    aging.clock.create("else/where.txt", b"text")
    aging.later()
    assert verified(aging.clock).findings == ()


class PurgedMeanwhile(AgingStorage):
    """Lets all old versions be purged at the first read of a file of a kind."""

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


def test_versions_that_are_purged_meanwhile_are_no_damage(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    grow(aging, 5)
    aging.later()
    operations.plan_expiration(aging.lake, keeping(2)).execute()
    aging.later()
    report = verified(PurgedMeanwhile(aging))
    assert (report.is_clean, report.damaged_versions, report.damaged_objects) == (True, "", ())
    assert verified(aging.clock).is_clean


def test_definitions_that_are_purged_meanwhile_damage_no_version(lakes: Lakes) -> None:
    """Nor those after the one that is looked at, which share them."""
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
    """Lets the export be dropped, all of its files be removed and, with ``again``, made anew, before a read."""

    def __init__(self, aging: Aging, at: int, *, again: bool):
        super().__init__(aging.clock.inner, aging.clock.time_ms)
        self.written_ms = aging.clock.written_ms
        self._aging = aging
        self._at = at
        self._again = again
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


@pytest.mark.parametrize("again", [False, True])
def test_an_export_that_is_dropped_meanwhile_is_no_damage(lakes: Lakes, again: bool) -> None:
    at = 1
    while True:
        aging = Aging.on(lakes.storage(f"{at}"))
        grow(aging, 3)
        append_rows(aging.lake)
        operations.plan_export(aging.lake, "full", level="full").execute()
        storage = DroppedMeanwhile(aging, at, again=again)
        report = verified(storage)
        assert report.is_clean, report
        if storage.n_reads < at:
            break
        at += 3
    assert at > 60


def test_damage_where_orphans_cannot_be_told(damaged: Aging) -> None:
    latest = damaged.lake.snapshot()
    damaged.clock.delete(latest.root.children[0])
    report = verified(damaged.clock)
    assert codes(report)["node-missing"].mend == "repair --to-last-good"
    assert report.orphan_files is None
    assert any(what.startswith("orphans") for what in report.unchecked)
    assert "orphans" in str(report).splitlines()[0].partition("; not looked at: ")[2]


def test_damage_of_older_versions_alone_is_not_mended_by_going_back(damaged: Aging) -> None:
    old = set(damaged.lake.snapshot(2).root.children) - set(damaged.lake.snapshot().root.children)
    path = min(old)
    damaged.clock.delete(path)
    report = verified(damaged.clock)
    assert codes(report)["node-missing"].mend is None
    assert str(damaged.lake.latest_version()) not in report.damaged_versions.split("-")
    assert report.damaged_objects == ()


def test_which_versions_and_objects_are_damaged(damaged: Aging) -> None:
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


def test_time_in_the_future_of_a_lease_does_not_matter(aging: Aging) -> None:
    content = {"holder": "x", "operation": "purge", "expires_at_ms": aging.clock.time_ms + LONG_MS}
    aging.clock.write(lease_path(1), json.dumps(content).encode())
    assert verified(aging.clock).findings == ()


def test_roots_are_what_they_say(damaged: Aging) -> None:
    """A root that names no lakehouse definition is an error of its own, and nothing fails."""
    path = root_path(2)
    root = decode_node(damaged.clock.read(path), path)
    system = {name: value for name, value in root.system.items() if name != LAKEHOUSE_DEF}
    damaged.clock.write(path, encode_node(replace(root, system=system), 4))
    report = verified(damaged.clock)
    assert {finding.path for finding in report.findings if finding.severity == "error"} == {path}
    assert any(what.startswith("orphans") for what in report.unchecked)
    assert Snapshot.of(damaged.lake.files, 2).root.system.get(LAKEHOUSE_DEF) is None
