"""Test that trim removes unneeded Iceberg snapshots from the latest metadata, and readers see the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table
from pyiceberg.table.statistics import PartitionStatisticsFile, StatisticsFile
from pyiceberg.table.update import SetPartitionStatisticsUpdate

from tests.clock import ClockStorage
from tests.lakes import Lakes, listed
from tests.operations.changes import ROWS, create
from trinitylake_ops import Lakehouse, errors, operations
from trinitylake_ops.errors import (
    CommitConflictError,
    InvalidInputError,
    MaintenanceBlockedError,
    PlanChangedError,
    TableNotFoundError,
)
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.base import MeteredLakehouse
from trinitylake_ops.operations.definition_commits import MAX_ATTEMPTS
from trinitylake_ops.operations.gc.trim import TrimPlan
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.storage import StorageWrapper

HOUR_MS = 3_600_000


def keeping(versions: int) -> RetentionPolicy:
    """Return a policy that keeps only the newest versions."""
    return RetentionPolicy(maximum_age_ms=0, minimum_versions=versions, protected_ms=0)


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse whose last commit was an hour ago."""
    lakehouse = lakes.memory()
    return Lakehouse(ClockStorage(lakehouse.storage, lakehouse.storage.now_ms() + HOUR_MS))


def advance_clock(lake: Lakehouse) -> None:
    assert isinstance(lake.storage, ClockStorage)
    lake.storage.time_ms += HOUR_MS


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def overwrite(lake: Lakehouse, name: str, times: int, first: int = 0) -> None:
    """Replace the rows of a table ``times`` times, with a version each. Create the table if it is missing."""
    catalog = catalog_at(lake)
    catalog.create_namespace_if_not_exists("ns")
    table = catalog.create_table_if_not_exists(f"ns.{name}", ROWS.schema)
    for number in range(first, first + times):
        replace_rows(table, number)
    advance_clock(lake)


def load(lake: Lakehouse, name: str, version: int | str | None = None) -> Table:
    return catalog_at(lake, version).load_table(f"ns.{name}")


def read_ids(lake: Lakehouse, name: str, version: int | str | None = None) -> list[int]:
    return sorted(load(lake, name, version).scan().to_arrow()["id"].to_pylist())


def rows_of_all_versions(lake: Lakehouse) -> dict[int, dict[str, list[int]]]:
    """Return the rows of every table at every version."""
    rows_by_version = {}
    for version in range(lake.latest_version() + 1):
        snapshot = lake.snapshot(version)
        names = snapshot.tables("ns") if snapshot.has_namespace("ns") else []
        rows_by_version[version] = {name: read_ids(lake, name, version) for name in names}
    return rows_by_version


def snapshot_ids(lake: Lakehouse, name: str, version: int | None = None) -> set[int]:
    return {snapshot.snapshot_id for snapshot in load(lake, name, version).snapshots()}


def metadata_files(lake: Lakehouse) -> dict[str, bytes]:
    paths = [info.path for info in lake.storage.list("tables/") if info.path.endswith(".metadata.json")]
    return {path: lake.storage.read(path) for path in paths}


def test_trim_keeps_needed_snapshots_and_all_versions_readable(lake: Lakehouse) -> None:
    for name in ("t", "u"):
        overwrite(lake, name, 6)
    latest = lake.latest_version()
    before, files = rows_of_all_versions(lake), metadata_files(lake)
    kept_ids = {load(lake, "u", version).metadata.current_snapshot_id for version in (latest, latest - 1)}
    plan = operations.plan_trim_tables(lake, keeping(2))
    assert lake.latest_version() == latest
    assert [(trim.namespace, trim.table) for trim in plan.tables] == [("ns", "t"), ("ns", "u")]
    # Each overwrite except the first adds two snapshots, a delete and an append.
    assert [(len(trim.dropped), len(trim.kept)) for trim in plan.tables] == [(10, 1), (9, 2)]
    assert set(plan.tables[1].kept) == kept_ids
    report = plan.execute()
    assert (report.version, report.snapshots_dropped, report.tables) == (latest + 1, 19, ("ns.t", "ns.u"))
    assert (report.left, report.attempts) == ((), 1)
    assert snapshot_ids(lake, "u") == kept_ids
    assert rows_of_all_versions(lake) == {**before, latest + 1: before[latest]}
    assert files.items() < metadata_files(lake).items(), "existing metadata files are not changed"
    info = next(lake.history(limit=1))
    assert (info.operation, info.message) == ("trim", "19 snapshots of 2 tables")
    assert operations.verify(lake).findings == ()
    table = load(lake, "t")
    table.append(rows(100))
    assert read_ids(lake, "t") == [5, 100]


def test_second_trim_does_nothing(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    policy = keeping(1)
    operations.plan_trim_tables(lake, policy).execute()
    advance_clock(lake)
    files = listed(lake.storage)
    plan = operations.plan_trim_tables(lake, policy)
    assert (plan.tables, plan.snapshots_dropped) == ((), 0)
    report = plan.execute(plan.digest)
    assert (report.version, report.tables) == (lake.latest_version(), ())
    assert "nothing to do" in str(report)
    assert listed(lake.storage) == files


def test_trim_uses_lakehouse_settings_by_default(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    assert operations.plan_trim_tables(lake).snapshots_dropped < 5, "young versions are kept"
    lake.alter_definition(maximum_version_age_millis=0, minimum_versions_to_keep=1, txn_ttl_millis=1)
    advance_clock(lake)
    assert operations.plan_trim_tables(lake).snapshots_dropped == 4
    with pytest.raises(InvalidInputError):
        operations.plan_trim_tables(lake, keeping(0))


def test_trim_keeps_snapshots_of_exports_branches_and_tags(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    exported_version = lake.latest_version()
    exported_id = load(lake, "t").metadata.current_snapshot_id
    operations.plan_export(lake, "kept").execute()
    overwrite(lake, "t", 1, first=10)
    tagged_id, branched_id = (load(lake, "t").snapshots()[index].snapshot_id for index in (0, 2))
    with load(lake, "t").manage_snapshots() as update:
        update.create_tag(tagged_id, "first").create_branch(branched_id, "other")
    overwrite(lake, "t", 2, first=20)
    current_id = load(lake, "t").metadata.current_snapshot_id
    advance_clock(lake)
    (trim,) = operations.plan_trim_tables(lake, keeping(1)).tables
    assert set(trim.kept) == {exported_id, tagged_id, branched_id, current_id}
    operations.plan_trim_tables(lake, keeping(1)).execute()
    assert snapshot_ids(lake, "t") == {exported_id, tagged_id, branched_id, current_id}
    assert read_ids(lake, "t", "kept") == read_ids(lake, "t", exported_version) == [2]
    assert load(lake, "t").scan(snapshot_id=tagged_id).to_arrow()["id"].to_pylist() == [0]
    assert set(load(lake, "t").metadata.refs) == {"main", "first", "other"}


def test_trim_keeps_tagged_snapshots_of_kept_versions(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    tagged_id = load(lake, "t").snapshots()[0].snapshot_id
    with load(lake, "t").manage_snapshots() as update:
        update.create_tag(tagged_id, "first")
    with load(lake, "t").manage_snapshots() as update:
        update.remove_tag("first")
    advance_clock(lake)
    for n_versions, is_needed in ((2, True), (1, False)):
        (trim,) = operations.plan_trim_tables(lake, keeping(n_versions)).tables
        assert (tagged_id in trim.kept) == is_needed


def test_trim_drops_statistics_of_dropped_snapshots(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    table = load(lake, "t")
    ids = [snapshot.snapshot_id for snapshot in table.snapshots()]
    folder = table.location().removeprefix(lake.root)
    for path in (f"metadata/{ids[0]}.puffin", f"metadata/{ids[-1]}.puffin", "p"):
        lake.storage.create(f"{folder}/{path}", b"1")
    with table.update_statistics() as update:
        for snapshot_id in (ids[0], ids[-1]):
            update.set_statistics(
                StatisticsFile(
                    snapshot_id=snapshot_id,
                    statistics_path=f"{table.location()}/metadata/{snapshot_id}.puffin",
                    file_size_in_bytes=1,
                    file_footer_size_in_bytes=1,
                    blob_metadata=[],
                )
            )
    partitions = [
        PartitionStatisticsFile(snapshot_id=snapshot_id, statistics_path=f"{table.location()}/p", file_size_in_bytes=1)
        for snapshot_id in (ids[0], ids[-1])
    ]
    updates = tuple(SetPartitionStatisticsUpdate(partition_statistics=file) for file in partitions)
    catalog_at(lake).commit_table(table, (), updates)
    advance_clock(lake)
    operations.plan_trim_tables(lake, keeping(1)).execute()
    metadata = load(lake, "t").metadata
    assert [file.snapshot_id for file in metadata.statistics] == [ids[-1]]
    assert [file.snapshot_id for file in metadata.partition_statistics] == [ids[-1]]


def test_trim_covers_managed_iceberg_tables_in_their_own_folders(lake: Lakehouse, lakes: Lakes) -> None:
    other = lakes.local("other")
    create_and_overwrite(other, 3)
    overwrite(lake, "t", 3)
    managed = lake.snapshot().table("ns", "t")
    location = managed.format_properties["metadata_location"]
    lake.storage.create("tables/moved/metadata/1.metadata.json", lake.storage.read(location))
    other_location = other.snapshot().table("ns", "t").format_properties["metadata_location"]
    operations.register_table(lake, "ns", "external", other.root + other_location)
    with lake.transaction() as txn:
        txn.create_table("ns", "lance", TableDef(table_format="LANCE"))
        txn.create_table("ns", "bare", TableDef())
        txn.create_table("ns", "federated", replace(managed, id="f", table_type="FEDERATED"))
        txn.create_table("ns", "renamed", replace(managed, id="another"))
        txn.create_table("ns", "moved", metadata_at(managed, "moved", "tables/moved/metadata/1.metadata.json"))
        txn.create_table("ns", "missing", metadata_at(managed, "missing", "tables/missing/metadata/1.metadata.json"))
    advance_clock(lake)
    plan = operations.plan_trim_tables(lake, keeping(1))
    assert [trim.table for trim in plan.tables] == ["t"]
    assert plan.unreadable == ("ns.missing", "ns.moved")
    for name in ("external", "lance", "bare", "federated", "renamed"):
        with pytest.raises(InvalidInputError, match=f"ns.{name} cannot be trimmed"):
            operations.plan_trim_tables(lake, keeping(1), tables=[f"ns.{name}"])
    with pytest.raises(TableNotFoundError):
        operations.plan_trim_tables(lake, keeping(1), tables=["ns.nothing"])
    external = lake.snapshot().table("ns", "external")
    plan.execute()
    assert lake.snapshot().table("ns", "external") == external
    with lake.transaction() as txn:
        for name in ("missing", "moved"):
            txn.drop_table("ns", name)


def metadata_at(definition: TableDef, table_id: str, location: str) -> TableDef:
    properties = {**definition.format_properties, "metadata_location": location}
    return replace(definition, id=table_id, format_properties=properties)


def create_and_overwrite(lake: Lakehouse, times: int) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", ROWS.schema)
    for number in range(times):
        replace_rows(table, number)


def replace_rows(table: Table, number: int) -> None:
    if table.current_snapshot() is None:
        table.append(rows(number))  # an overwrite of an empty table causes a warning of pyiceberg
    else:
        table.overwrite(rows(number))


def test_selected_tables_are_trimmed(lake: Lakehouse) -> None:
    for name in ("t", "u", "v"):
        overwrite(lake, name, 2)
    plan = operations.plan_trim_tables(lake, keeping(1), tables=["ns.v", "ns.t", "ns.v"])
    assert [trim.table for trim in plan.tables] == ["v", "t"]
    assert plan.execute(plan.digest).tables == ("ns.v", "ns.t")
    assert len(snapshot_ids(lake, "u")) == 3


def test_trim_of_two_tables_in_one_folder_keeps_both(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    middle = lake.snapshot()
    overwrite(lake, "t", 3, first=10)
    keys = middle.keys
    with lake.transaction() as txn:  # commits like a program that does not check table ids
        txn.restore_entry(keys.table_key("ns", "copy"), middle.entry(keys.table_key("ns", "t")), mirrors=True)
    assert lake.snapshot().table("ns", "copy").id == lake.snapshot().table("ns", "t").id
    advance_clock(lake)
    operations.plan_trim_tables(lake, keeping(1)).execute()
    current_ids = {load(lake, name).metadata.current_snapshot_id for name in ("t", "copy")}
    assert snapshot_ids(lake, "t") == current_ids
    assert (read_ids(lake, "t"), read_ids(lake, "copy")) == ([12], [2])
    with lake.transaction() as txn:
        txn.drop_table("ns", "copy")


def test_trim_executes_only_the_approved_plan(lake: Lakehouse) -> None:
    overwrite(lake, "t", 8)
    plan = operations.plan_trim_tables(lake, keeping(1))
    document = json.loads(plan.to_json())
    assert document["digest"] == plan.digest == operations.plan_trim_tables(lake, keeping(1)).digest
    (table,) = document["tables"]
    assert set(table) == {"namespace", "table", "table_id", "metadata_location", "dropped", "kept", "dropped_refs"}
    assert len(table["dropped"]) == 14
    assert "14 snapshots of 1 tables" in str(plan)
    assert "and 9 more" in str(plan)
    assert operations.plan_trim_tables(lake, keeping(3)).digest != plan.digest
    overwrite(lake, "t", 1)
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    assert json.loads(plan.execute().to_json())["snapshots_dropped"] == 14, "only planned snapshots are dropped"
    assert len(snapshot_ids(lake, "t")) == 3


class RacingStorage(StorageWrapper):
    """A storage that runs the next action before each root is created."""

    def __init__(self, inner: Any, *actions: Callable[[], None]):
        super().__init__(inner)
        self.actions: Iterator[Callable[[], None]] = iter(actions)

    def create(self, path: str, data: bytes) -> None:
        if path.startswith("_") and path.endswith(".arrow"):
            next(self.actions, lambda: None)()
        super().create(path, data)


def with_conflicts(lake: Lakehouse, plan: TrimPlan, *actions: Callable[[], None]) -> TrimPlan:
    """Return a plan whose execution conflicts with the commits of ``actions``."""
    return replace(plan, operation=replace(plan.operation, lake=Lakehouse(RacingStorage(lake.storage, *actions))))


def test_trim_plans_again_if_a_table_changes(lake: Lakehouse) -> None:
    for name in ("t", "u"):
        overwrite(lake, name, 3)
    plan = operations.plan_trim_tables(lake, keeping(1))
    planned_drops = {trim.table: set(trim.dropped) for trim in plan.tables}
    ids_before = snapshot_ids(lake, "t")
    report = with_conflicts(lake, plan, lambda: overwrite(lake, "t", 2, first=50)).execute()
    assert (report.attempts, report.tables) == (2, ("ns.t", "ns.u"))
    assert read_ids(lake, "t") == [51]
    # The snapshot that was current in the plan is not approved for removal, although it is no longer needed.
    assert snapshot_ids(lake, "t") & ids_before == ids_before - planned_drops["t"]
    assert len(snapshot_ids(lake, "t")) == 5
    metadata_of_table = {path for path in metadata_files(lake) if lake.snapshot().table("ns", "u").id in path}
    assert len(metadata_of_table) == 1 + 3 + 1, "files of the failed attempt are deleted"


def test_trim_skips_a_table_dropped_or_replaced_concurrently(lake: Lakehouse) -> None:
    for name in ("t", "u", "v"):
        overwrite(lake, name, 2)
    plan = operations.plan_trim_tables(lake, keeping(1))

    def replace_tables() -> None:
        catalog = catalog_at(lake)
        catalog.drop_table("ns.t")
        catalog.drop_table("ns.u")
        overwrite(lake, "u", 2)

    report = with_conflicts(lake, plan, replace_tables).execute()
    assert (report.tables, report.left) == (("ns.v",), ("ns.t", "ns.u"))
    assert len(snapshot_ids(lake, "u")) == 3


def test_trim_ignores_unrelated_commits(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    plan = operations.plan_trim_tables(lake, keeping(1))
    report = with_conflicts(lake, plan, lambda: print(create(lake, "others"))).execute()
    assert (report.attempts, report.version) == (1, lake.latest_version())
    assert lake.snapshot().has_namespace("others")


def test_trim_respects_a_new_export(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    version = lake.latest_version() - 1
    needed_id = load(lake, "t", version).metadata.current_snapshot_id
    plan = operations.plan_trim_tables(lake, keeping(1))
    assert needed_id in plan.tables[0].dropped
    report = with_conflicts(
        lake, plan, lambda: print(operations.plan_export(lake, "x", version=version).execute())
    ).execute()
    assert report.attempts == 2
    assert needed_id in snapshot_ids(lake, "t")


def test_trim_attempts_are_bounded(lake: Lakehouse) -> None:
    overwrite(lake, "t", 2)
    plan = operations.plan_trim_tables(lake, keeping(1))
    actions = [lambda: load(lake, "t").append(rows(7))] * (MAX_ATTEMPTS + 1)
    n_files = len(metadata_files(lake))
    with pytest.raises(CommitConflictError):
        with_conflicts(lake, plan, *actions).execute()
    assert read_ids(lake, "t") == [1, *[7] * MAX_ATTEMPTS]
    assert len(metadata_files(lake)) == n_files + MAX_ATTEMPTS, "no file of the trim remains"


def test_trim_with_unknown_outcome_deletes_nothing(lake: Lakehouse) -> None:
    overwrite(lake, "t", 2)
    plan = operations.plan_trim_tables(lake, keeping(1))

    class LostResponseStorage(StorageWrapper):
        """A storage that creates roots but loses the response."""

        root_path = ""

        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            if path.startswith("_") and path.endswith(".arrow"):
                self.root_path = path
                raise errors.AmbiguousWriteError("lost", path=path)

        def read(
            self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
        ) -> bytes:
            if path == self.root_path:
                raise errors.StoragePermissionError("unreadable", path=path)
            return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    with pytest.raises(errors.CommitOutcomeUnknownError):
        replace(plan, operation=replace(plan.operation, lake=Lakehouse(LostResponseStorage(lake.storage)))).execute()
    assert read_ids(lake, "t") == [1]
    assert len(snapshot_ids(lake, "t")) == 1, "the trim was committed"


def test_trim_is_blocked_before_a_reconcile(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite(lake, "t", 2)
    monkeypatch.setattr("trinitylake_ops.operations.gc.survey.Survey.foreign_steps", lambda _: [1])
    with pytest.raises(MaintenanceBlockedError):
        operations.plan_trim_tables(lake, keeping(1))


def test_trim_plan_reads_each_metadata_file_once(lake: Lakehouse, lakes: Lakes) -> None:
    for name in ("t", "u"):
        overwrite(lake, name, 4)
    metered = MeteredLakehouse(lake)
    plan = operations.plan_trim_tables(metered.lake, keeping(2))
    versions = lake.latest_version() + 1
    # The hint, roots and the lakehouse definition, then three pairs of table definition and metadata file.
    assert metered.cost().requests["read"] <= versions + 2 * 3 + 8
    assert set(metered.cost().requests) <= {"read", "list", "stat"}
    assert plan.snapshots_dropped > 0
