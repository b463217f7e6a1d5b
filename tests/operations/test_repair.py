"""Test that repair fixes findings of verify."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.faults import FaultyStorage, fail
from tests.lakes import objects, table
from tests.operations.aging import Aging, grow, needed_files
from tests.operations.changes import alter, append_rows, content, create, drop, small_sizes, truncate
from tests.operations.test_export import interrupt_export
from tests.operations.test_verify_state import foreign_rollback
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    InvalidInputError,
    PlanChangedError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.file_names import HINT_PATH, root_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import FileKind, files_of
from trinitylake_ops.operations import Budget, RepairReport
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://repair/"


@pytest.fixture
def lake() -> Iterator[Lakehouse]:
    """A lakehouse with a deep tree, a managed table and an export, for tests to damage."""
    storage = MemoryStorage(ROOT)
    lake = Lakehouse.create(ROOT, storage=storage, order=3, **small_sizes(3))
    with lake.transaction(message="m" * 3_400) as txn:
        txn.create_namespace("big")
        for number in range(12):
            txn.create_table("big", f"t{number}", table())
    append_rows(lake)
    append_rows(lake)
    operations.plan_export(lake, "kept", version=2).execute()
    yield lake
    drop_memory_root(ROOT)


def reopen(lake: Lakehouse) -> Lakehouse:
    return Lakehouse(lake.storage)


def repair_twice(lake: Lakehouse, *, to_last_good: bool = False) -> RepairReport:
    """Repair the lakehouse, and check that a second run does nothing."""
    before = content(lake)
    report = operations.repair(reopen(lake), to_last_good=to_last_good)
    after = content(lake)
    changed_paths = {path for path in before if after.get(path) != before[path]}
    assert {path for path in changed_paths if not path.startswith("_ops/lease")} <= {HINT_PATH}, (
        "a repair only commits and writes the hint"
    )
    second_plan = operations.plan_repair(reopen(lake), to_last_good=to_last_good)
    assert second_plan.is_empty, second_plan
    assert second_plan.execute().version == report.version == lake.latest_version()
    assert content(lake) == after
    return report


def location_of(lake: Lakehouse, namespace: str, name: str) -> str:
    snapshot = lake.snapshot()
    location = snapshot.entry(snapshot.keys.table_key(namespace, name))
    assert location is not None
    return location


def test_intact_lakehouse_needs_no_repair(lake: Lakehouse) -> None:
    plan = operations.plan_repair(lake)
    assert plan.is_empty
    assert plan.remaining == ()
    report = repair_twice(lake)
    assert report.is_complete
    assert str(report).startswith("Nothing to repair")


def test_wrong_hint_is_repaired(lake: Lakehouse) -> None:
    lake.storage.write(HINT_PATH, b"1")
    plan = operations.plan_repair(lake)
    assert [step.action for step in plan.steps] == ["hint"]
    report = repair_twice(lake)
    assert lake.storage.read(HINT_PATH) == str(lake.latest_version()).encode()
    assert report.version == plan.base_version
    assert "hint" in str(report)


def test_export_without_root_is_dropped(lake: Lakehouse) -> None:
    operations.plan_export(lake, "complete", version=1).execute()
    interrupt_export(lake, "incomplete")
    definition = lake.snapshot().definition
    lake.storage.delete(definition.exported_snapshots["kept"])
    plan = operations.plan_repair(lake)
    assert [(step.action, step.what) for step in plan.steps] == [("drop-export", "exports without a root: kept")]
    assert plan.remaining == ()
    assert repair_twice(lake).is_complete
    assert [info.name for info in operations.list_exports(lake)] == ["complete", "incomplete"]
    assert operations.verify(reopen(lake)).findings == ()


def test_damaged_export_is_kept(lake: Lakehouse) -> None:
    path = lake.snapshot().definition.exported_snapshots["kept"]
    truncate(lake.storage, path)
    report = repair_twice(lake)
    assert report.steps == ()
    assert {finding.path for finding in report.remaining} == {path}
    assert not report.is_complete
    assert "drop the export" in str(report)


def test_replaced_settings_are_reconciled() -> None:
    try:
        aging = Aging.on(MemoryStorage(ROOT))
        grow(aging, 3)
        operations.plan_export(aging.lake, "lost").execute()
        foreign_rollback(aging.lake, 2)
        report = repair_twice(aging.lake)
        assert "reconcile" in [step.action for step in report.steps]
        assert [info.name for info in operations.list_exports(aging.lake)] == ["lost"]
    finally:
        drop_memory_root(ROOT)


def test_damaged_definition_is_rolled_back_only_with_to_last_good(lake: Lakehouse) -> None:
    intact_location = location_of(lake, "big", "t3")
    alter(lake, "big", "t3")
    alter(lake, "big", "t4")
    newer_location = location_of(lake, "big", "t4")
    damaged_location = location_of(lake, "big", "t3")
    lake.storage.delete(damaged_location)
    plan = operations.plan_repair(reopen(lake))
    assert plan.is_empty
    assert [finding.path for finding in plan.remaining] == [damaged_location]
    assert "repair --to-last-good" in plan.remaining[0].advice
    plan = operations.plan_repair(reopen(lake), to_last_good=True)
    assert [(step.action, step.what) for step in plan.steps] == [("rollback", "big.t3")]
    report = repair_twice(lake, to_last_good=True)
    assert location_of(lake, "big", "t3") == intact_location
    assert location_of(lake, "big", "t4") == newer_location, "intact objects are not changed"
    assert str(report.version) not in operations.verify(reopen(lake)).damaged_versions.split(",")
    objects(reopen(lake).snapshot())


def test_table_with_lost_data_file_is_rolled_back_to_intact_version(lake: Lakehouse) -> None:
    create(lake, "other", "t")
    snapshot = lake.snapshot()
    older_files = {file.location for file in files_of(snapshot.table("ns", "t"), StorageFileIO.on(lake.storage))}
    append_rows(lake)
    files = files_of(lake.snapshot().table("ns", "t"), StorageFileIO.on(lake.storage))
    lost_file = next(file.location for file in files if file.kind == FileKind.DATA and file.location not in older_files)
    lake.storage.delete(lost_file)
    report = operations.verify(reopen(lake))
    assert [str(name) for name in report.damaged_objects] == ["ns.t"]
    plan = operations.plan_repair(reopen(lake), report, to_last_good=True)
    assert [(step.what, step.version) for step in plan.steps] == [("ns.t", lake.latest_version() - 1)]
    repair_twice(lake, to_last_good=True)
    with catalog_at(reopen(lake)) as catalog:
        assert catalog.load_table("ns.t").scan().to_arrow().num_rows == 6
    assert reopen(lake).snapshot().has_table("other", "t")


def test_objects_are_rolled_back_to_different_versions(lake: Lakehouse) -> None:
    first_version = create(lake, "new", "table")
    for name in ("t1", "t2", "t1"):
        alter(lake, "big", name)
    for namespace, name in (("big", "t1"), ("big", "t2"), ("new", "table")):
        lake.storage.delete(location_of(lake, namespace, name))
    report = repair_twice(lake, to_last_good=True)
    assert {(step.what, step.version) for step in report.steps} == {
        ("big.t1", first_version + 2),
        ("big.t2", first_version + 1),
    }
    assert [str(name) for name in operations.verify(reopen(lake)).damaged_objects] == ["new.table"]
    advice = {finding.path: finding.advice for finding in report.remaining}
    assert "no older version has it intact" in advice[location_of(lake, "new", "table")]
    assert sum("no older version" in text for text in advice.values()) == 1


def test_other_object_with_same_name_is_not_restored(lake: Lakehouse) -> None:
    """A new table must never get the data of a dropped table with the same name."""
    create(lake, "a", "t", "u")
    drop(lake, "a", "t")
    with lake.transaction() as txn:
        txn.create_table("a", "t", table())
    lake.storage.delete(location_of(lake, "a", "t"))
    append_rows(lake, "a.v")
    lost = TableDef(id="lost", format_properties={METADATA_LOCATION: "tables/lost/metadata/00000-lost.metadata.json"})
    with lake.transaction() as txn:  # every version has a table with this name
        txn.drop_table("a", "v")
        txn.create_table("a", "v", lost)
    report = operations.verify(reopen(lake))
    assert [str(name) for name in report.damaged_objects] == ["a.t", "a.v"]
    plan = operations.plan_repair(reopen(lake), report, to_last_good=True)
    assert plan.is_empty, plan
    advice = {finding.path: finding.advice for finding in plan.remaining}
    assert "no older version has it intact" in advice[location_of(lake, "a", "t")]


def test_damaged_tree_is_rolled_back_under_current_settings(lake: Lakehouse) -> None:
    before = lake.latest_version()
    with lake.transaction(message="m" * 3_400) as txn:
        for number in range(12):
            txn.alter_table("big", f"t{number}", table(changed="yes"))
    operations.plan_export(lake, "late", version=before).execute()
    older_files = {path for version in range(before + 1) for path in needed_files(lake, version)}
    latest = lake.snapshot()
    node = next(child for child in latest.root.children if child not in older_files)
    truncate(lake.storage, node)
    report = operations.verify(reopen(lake))
    assert report.damaged_objects == ()
    plan = operations.plan_repair(reopen(lake), report, to_last_good=True)
    assert [(step.action, step.version) for step in plan.steps] == [("rollback", before)]
    result = repair_twice(lake, to_last_good=True)
    current = reopen(lake).snapshot()
    assert current.version == result.version == latest.version + 1
    assert objects(current) == objects(lake.snapshot(before))
    assert sorted(current.definition.exported_snapshots) == ["kept", "late"]
    assert [finding.path for finding in result.remaining] == [node], "older versions that need the node remain damaged"
    assert str(current.version) not in operations.verify(reopen(lake)).damaged_versions
    create(lake, "later", "t")


@pytest.mark.parametrize("error", [TransientError, StoragePermissionError, ThrottledError])
def test_unreadable_file_is_not_treated_as_damage(lake: Lakehouse, error: type[StorageError]) -> None:
    alter(lake, "big", "t3")
    before = content(lake)
    path = location_of(lake, "big", "t3")
    faulty_storage = FaultyStorage(lake.storage, [fail(1, error, kind="read", path_part=path, times=99)])
    report = operations.verify(Lakehouse(faulty_storage))
    assert report.unanswered == (path,)
    assert not report.is_clean
    with pytest.raises(StorageError):
        operations.plan_repair(reopen(lake), report, to_last_good=True)
    assert operations.plan_repair(reopen(lake), report).is_empty
    assert content(lake) == before


def test_failed_request_for_next_root_is_reported(lake: Lakehouse) -> None:
    """With a stale hint, the root after the latest root is requested repeatedly."""
    operations.plan_export(lake, "checked").execute()
    lake.storage.write(HINT_PATH, b"0")
    next_root = root_path(lake.latest_version() + 1)
    faulty_storage = FaultyStorage(lake.storage)
    expected = operations.verify(Lakehouse(faulty_storage)).findings
    n_requests = [request.kind for request in faulty_storage.log if request.path == next_root].count("stat")
    assert n_requests > 1
    for number in range(1, n_requests + 1):
        faulty_storage = FaultyStorage(lake.storage, [fail(number, TransientError, kind="stat", path_part=next_root)])
        try:
            report = operations.verify(Lakehouse(faulty_storage))
        except TransientError:
            continue
        assert report.unanswered == (next_root,) or report.findings == expected


def test_repair_does_nothing_without_intact_version(lake: Lakehouse) -> None:
    for version in range(lake.latest_version() + 1):
        for path in lake.snapshot(version).root.children:
            lake.storage.delete(path)
    lake.storage.delete(lake.snapshot(0).definition_location)
    report = repair_twice(lake, to_last_good=True)
    assert report.steps == ()
    assert not report.is_complete


@pytest.mark.parametrize("part", ["root", "settings"])
def test_unreadable_latest_version_is_not_repaired(lake: Lakehouse, part: str) -> None:
    latest = lake.snapshot()
    path = latest.location if part == "root" else latest.definition_location
    truncate(lake.storage, path)
    lake.storage.write(HINT_PATH, b"0")
    report = repair_twice(lake, to_last_good=True)
    assert [step.action for step in report.steps] == ["hint"]
    assert path in {finding.path for finding in report.remaining}
    assert not lake.storage.exists(root_path(latest.version + 1))


def test_only_approved_plan_is_executed(lake: Lakehouse) -> None:
    lake.storage.write(HINT_PATH, b"0")
    plan = operations.plan_repair(lake)
    assert json.loads(plan.to_json())["digest"] == plan.digest
    with pytest.raises(PlanChangedError):
        plan.execute("1-" + "0" * 64)
    assert lake.storage.read(HINT_PATH) == b"0"
    create(lake, "since")
    lake.storage.write(HINT_PATH, b"0")
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    report = operations.verify(lake)
    create(lake, "later")
    with pytest.raises(PlanChangedError):
        operations.plan_repair(lake, report)
    lake.storage.write(HINT_PATH, b"0")
    repeated = operations.plan_repair(lake)
    assert repeated.execute(repeated.digest).version == lake.latest_version()


def test_incomplete_report_is_rejected(lake: Lakehouse) -> None:
    report = operations.verify(lake, budget=Budget(max_requests=3))
    with pytest.raises(InvalidInputError):
        operations.plan_repair(lake, report)
