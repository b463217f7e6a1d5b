"""Trim removes unneeded Iceberg snapshots from the latest metadata without changing what readers see."""

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
    """Return a policy that keeps only the newest versions, regardless of the age of the others."""
    return RetentionPolicy(maximum_age_ms=0, minimum_versions=versions, protected_ms=0)


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse whose last commit was an hour ago."""
    lakehouse = lakes.memory()
    return Lakehouse(ClockStorage(lakehouse.storage, lakehouse.storage.now_ms() + HOUR_MS))


def later(lake: Lakehouse) -> None:
    assert isinstance(lake.storage, ClockStorage)
    lake.storage.time_ms += HOUR_MS


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def overwrite(lake: Lakehouse, name: str, times: int, first: int = 0) -> None:
    """Replace the rows of a table, which is created if missing, a number of times with one version each."""
    catalog = catalog_at(lake)
    catalog.create_namespace_if_not_exists("ns")
    table = catalog.create_table_if_not_exists(f"ns.{name}", ROWS.schema)
    for number in range(first, first + times):
        replace_rows(table, number)
    later(lake)


def load(lake: Lakehouse, name: str, version: int | str | None = None) -> Table:
    return catalog_at(lake, version).load_table(f"ns.{name}")


def read(lake: Lakehouse, name: str, version: int | str | None = None) -> list[int]:
    return sorted(load(lake, name, version).scan().to_arrow()["id"].to_pylist())


def contents(lake: Lakehouse) -> dict[int, dict[str, list[int]]]:
    """Return the rows of every table at every version."""
    found = {}
    for version in range(lake.latest_version() + 1):
        snapshot = lake.snapshot(version)
        names = snapshot.tables("ns") if snapshot.has_namespace("ns") else []
        found[version] = {name: read(lake, name, version) for name in names}
    return found


def snapshot_ids(lake: Lakehouse, name: str, version: int | None = None) -> set[int]:
    return {snapshot.snapshot_id for snapshot in load(lake, name, version).snapshots()}


def metadata_files(lake: Lakehouse) -> dict[str, bytes]:
    paths = [info.path for info in lake.storage.list("tables/") if info.path.endswith(".metadata.json")]
    return {path: lake.storage.read(path) for path in paths}


def test_trim_keeps_needed_snapshots_and_all_versions_readable(lake: Lakehouse) -> None:
    for name in ("t", "u"):
        overwrite(lake, name, 6)
    latest = lake.latest_version()
    before, files = contents(lake), metadata_files(lake)
    current_of_kept = {load(lake, "u", version).metadata.current_snapshot_id for version in (latest, latest - 1)}
    plan = operations.plan_trim_tables(lake, keeping(2))
    assert lake.latest_version() == latest
    assert [(trim.namespace, trim.table) for trim in plan.tables] == [("ns", "t"), ("ns", "u")]
    # Each overwrite except the first is two snapshots, a delete and an append.
    assert [(len(trim.dropped), len(trim.kept)) for trim in plan.tables] == [(10, 1), (9, 2)]
    assert set(plan.tables[1].kept) == current_of_kept
    report = plan.execute()
    assert (report.version, report.snapshots_dropped, report.tables) == (latest + 1, 19, ("ns.t", "ns.u"))
    assert (report.left, report.attempts) == ((), 1)
    assert snapshot_ids(lake, "u") == current_of_kept
    assert contents(lake) == {**before, latest + 1: before[latest]}
    assert files.items() < metadata_files(lake).items(), "no metadata file was touched"
    info = next(lake.history(limit=1))
    assert (info.operation, info.message) == ("trim", "19 snapshots of 2 tables")
    assert operations.verify(lake).findings == ()
    table = load(lake, "t")
    table.append(rows(100))
    assert read(lake, "t") == [5, 100]


def test_second_trim_does_nothing(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    policy = keeping(1)
    operations.plan_trim_tables(lake, policy).execute()
    later(lake)
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
    later(lake)
    assert operations.plan_trim_tables(lake).snapshots_dropped == 4
    with pytest.raises(InvalidInputError):
        operations.plan_trim_tables(lake, keeping(0))


def test_trim_keeps_snapshots_of_exports_branches_and_tags(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    exported = lake.latest_version()
    exported_id = load(lake, "t").metadata.current_snapshot_id
    operations.plan_export(lake, "kept").execute()
    overwrite(lake, "t", 1, first=10)
    tagged, branched = (load(lake, "t").snapshots()[at].snapshot_id for at in (0, 2))
    with load(lake, "t").manage_snapshots() as change:
        change.create_tag(tagged, "first").create_branch(branched, "other")
    overwrite(lake, "t", 2, first=20)
    current_id = load(lake, "t").metadata.current_snapshot_id
    later(lake)
    (trim,) = operations.plan_trim_tables(lake, keeping(1)).tables
    assert set(trim.kept) == {exported_id, tagged, branched, current_id}
    operations.plan_trim_tables(lake, keeping(1)).execute()
    assert snapshot_ids(lake, "t") == {exported_id, tagged, branched, current_id}
    assert read(lake, "t", "kept") == read(lake, "t", exported) == [2]
    assert load(lake, "t").scan(snapshot_id=tagged).to_arrow()["id"].to_pylist() == [0]
    assert set(load(lake, "t").metadata.refs) == {"main", "first", "other"}


def test_trim_keeps_a_branch_of_an_older_kept_version(lake: Lakehouse) -> None:
    overwrite(lake, "t", 3)
    tagged = load(lake, "t").snapshots()[0].snapshot_id
    with load(lake, "t").manage_snapshots() as change:
        change.create_tag(tagged, "first")
    with load(lake, "t").manage_snapshots() as change:
        change.remove_tag("first")
    later(lake)
    for kept, is_needed in ((2, True), (1, False)):
        (trim,) = operations.plan_trim_tables(lake, keeping(kept)).tables
        assert (tagged in trim.kept) == is_needed


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
    later(lake)
    operations.plan_trim_tables(lake, keeping(1)).execute()
    metadata = load(lake, "t").metadata
    assert [file.snapshot_id for file in metadata.statistics] == [ids[-1]]
    assert [file.snapshot_id for file in metadata.partition_statistics] == [ids[-1]]


def test_trim_covers_managed_iceberg_tables_in_their_own_folders(lake: Lakehouse, lakes: Lakes) -> None:
    other = lakes.local("other")
    overwrite_real(other, 3)
    overwrite(lake, "t", 3)
    managed = lake.snapshot().table("ns", "t")
    location = managed.format_properties["metadata_location"]
    lake.storage.create("tables/moved/metadata/1.metadata.json", lake.storage.read(location))
    foreign = other.snapshot().table("ns", "t").format_properties["metadata_location"]
    operations.register_table(lake, "ns", "external", other.root + foreign)
    with lake.transaction() as txn:
        txn.create_table("ns", "lance", TableDef(table_format="LANCE"))
        txn.create_table("ns", "bare", TableDef())
        txn.create_table("ns", "federated", replace(managed, id="f", table_type="FEDERATED"))
        txn.create_table("ns", "renamed", replace(managed, id="another"))
        txn.create_table("ns", "moved", metadata_at(managed, "moved", "tables/moved/metadata/1.metadata.json"))
        txn.create_table("ns", "gone", metadata_at(managed, "gone", "tables/gone/metadata/1.metadata.json"))
    later(lake)
    plan = operations.plan_trim_tables(lake, keeping(1))
    assert [trim.table for trim in plan.tables] == ["t"]
    assert plan.unreadable == ("ns.gone", "ns.moved")
    for name in ("external", "lance", "bare", "federated", "renamed"):
        with pytest.raises(InvalidInputError, match=f"ns.{name} cannot be trimmed"):
            operations.plan_trim_tables(lake, keeping(1), tables=[f"ns.{name}"])
    with pytest.raises(TableNotFoundError):
        operations.plan_trim_tables(lake, keeping(1), tables=["ns.nothing"])
    external = lake.snapshot().table("ns", "external")
    plan.execute()
    assert lake.snapshot().table("ns", "external") == external
    with lake.transaction() as txn:
        for name in ("gone", "moved"):
            txn.drop_table("ns", name)


def metadata_at(definition: TableDef, table_id: str, location: str) -> TableDef:
    properties = {**definition.format_properties, "metadata_location": location}
    return replace(definition, id=table_id, format_properties=properties)


def overwrite_real(lake: Lakehouse, times: int) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", ROWS.schema)
    for number in range(times):
        replace_rows(table, number)


def replace_rows(table: Table, number: int) -> None:
    if table.current_snapshot() is None:
        table.append(rows(number))  # pyiceberg warns if there are no rows to overwrite
    else:
        table.overwrite(rows(number))


def test_trim_of_selected_tables(lake: Lakehouse) -> None:
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
    with lake.transaction() as txn:  # like a program that does not check table ids
        txn.restore_entry(keys.table_key("ns", "copy"), middle.entry(keys.table_key("ns", "t")), mirrors=True)
    assert lake.snapshot().table("ns", "copy").id == lake.snapshot().table("ns", "t").id
    later(lake)
    operations.plan_trim_tables(lake, keeping(1)).execute()
    currents = {load(lake, name).metadata.current_snapshot_id for name in ("t", "copy")}
    assert snapshot_ids(lake, "t") == currents
    assert (read(lake, "t"), read(lake, "copy")) == ([12], [2])
    with lake.transaction() as txn:
        txn.drop_table("ns", "copy")


def test_trim_plans_are_shown_and_approved_by_digest(lake: Lakehouse) -> None:
    overwrite(lake, "t", 8)
    plan = operations.plan_trim_tables(lake, keeping(1))
    shown = json.loads(plan.to_json())
    assert shown["digest"] == plan.digest == operations.plan_trim_tables(lake, keeping(1)).digest
    (table,) = shown["tables"]
    assert set(table) == {"namespace", "table", "table_id", "metadata_location", "dropped", "kept"}
    assert len(table["dropped"]) == 14
    assert "14 snapshots of 1 tables" in str(plan)
    assert "and 9 more" in str(plan)
    assert operations.plan_trim_tables(lake, keeping(3)).digest != plan.digest
    overwrite(lake, "t", 1)
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    assert json.loads(plan.execute().to_json())["snapshots_dropped"] == 14, "what was planned, not what came since"
    assert len(snapshot_ids(lake, "t")) == 3


class Racing(StorageWrapper):
    """Runs one of several actions before each root is created."""

    def __init__(self, inner: Any, *actions: Callable[[], None]):
        super().__init__(inner)
        self.actions: Iterator[Callable[[], None]] = iter(actions)

    def create(self, path: str, data: bytes) -> None:
        if path.startswith("_") and path.endswith(".arrow"):
            next(self.actions, lambda: None)()
        super().create(path, data)


def with_conflicts(lake: Lakehouse, plan: TrimPlan, *actions: Callable[[], None]) -> TrimPlan:
    """Return the plan with a storage that causes conflicts."""
    return replace(plan, operation=replace(plan.operation, lake=Lakehouse(Racing(lake.storage, *actions))))


def test_trim_plans_again_if_a_table_changes(lake: Lakehouse) -> None:
    for name in ("t", "u"):
        overwrite(lake, name, 3)
    plan = operations.plan_trim_tables(lake, keeping(1))
    dropped = {trim.table: set(trim.dropped) for trim in plan.tables}
    all_before = snapshot_ids(lake, "t")
    report = with_conflicts(lake, plan, lambda: overwrite(lake, "t", 2, first=50)).execute()
    assert (report.attempts, report.tables) == (2, ("ns.t", "ns.u"))
    assert read(lake, "t") == [51]
    # The snapshot that was current in the plan is not approved for removal, although it is no longer needed.
    assert snapshot_ids(lake, "t") & all_before == all_before - dropped["t"]
    assert len(snapshot_ids(lake, "t")) == 5
    of_table = {path for path in metadata_files(lake) if lake.snapshot().table("ns", "u").id in path}
    assert len(of_table) == 1 + 3 + 1, "files of the lost attempt were deleted"


def test_trim_skips_a_table_dropped_or_replaced_concurrently(lake: Lakehouse) -> None:
    for name in ("t", "u", "v"):
        overwrite(lake, name, 2)
    plan = operations.plan_trim_tables(lake, keeping(1))

    def replace_two() -> None:
        catalog = catalog_at(lake)
        catalog.drop_table("ns.t")
        catalog.drop_table("ns.u")
        overwrite(lake, "u", 2)

    report = with_conflicts(lake, plan, replace_two).execute()
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
    needed = load(lake, "t", version).metadata.current_snapshot_id
    plan = operations.plan_trim_tables(lake, keeping(1))
    assert needed in plan.tables[0].dropped
    report = with_conflicts(
        lake, plan, lambda: print(operations.plan_export(lake, "x", version=version).execute())
    ).execute()
    assert report.attempts == 2
    assert needed in snapshot_ids(lake, "t")


def test_trim_attempts_are_bounded(lake: Lakehouse) -> None:
    overwrite(lake, "t", 2)
    plan = operations.plan_trim_tables(lake, keeping(1))
    appends = [lambda: load(lake, "t").append(rows(7))] * (MAX_ATTEMPTS + 1)
    n_files = len(metadata_files(lake))
    with pytest.raises(CommitConflictError):
        with_conflicts(lake, plan, *appends).execute()
    assert read(lake, "t") == [1, *[7] * MAX_ATTEMPTS]
    assert len(metadata_files(lake)) == n_files + MAX_ATTEMPTS, "nothing of the trim is left"


def test_trim_with_unknown_outcome_deletes_nothing(lake: Lakehouse) -> None:
    overwrite(lake, "t", 2)
    plan = operations.plan_trim_tables(lake, keeping(1))

    class LostResponse(StorageWrapper):
        """Creates a root and loses the response."""

        lost = ""

        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            if path.startswith("_") and path.endswith(".arrow"):
                self.lost = path
                raise errors.AmbiguousWriteError("lost", path=path)

        def read(
            self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
        ) -> bytes:
            if path == self.lost:
                raise errors.StoragePermissionError("unreadable", path=path)
            return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    with pytest.raises(errors.CommitOutcomeUnknownError):
        replace(plan, operation=replace(plan.operation, lake=Lakehouse(LostResponse(lake.storage)))).execute()
    assert read(lake, "t") == [1]
    assert len(snapshot_ids(lake, "t")) == 1, "it was committed"


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
    # hint, roots, lakehouse definition; then definitions and metadata: 2 of the latest, 1 of the previous version
    assert metered.cost().requests["read"] <= versions + 2 * 3 + 8
    assert set(metered.cost().requests) <= {"read", "list", "stat"}
    assert plan.snapshots_dropped > 0
