"""Operations on tables that other engines wrote (docs/rest-catalog/engine-writes.md)."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.table.snapshots import Operation
from pyiceberg.transforms import BucketTransform

from tests.clock import AgingStorage
from tests.engine_tables import (
    EQUALITY,
    EVOLVED,
    KINDS,
    POSITIONS,
    EngineTable,
    make_table,
    rows,
    with_equality,
    with_evolution,
    with_positions,
    with_statistics,
)
from tests.lakes import Lakes, allowing, listed
from tests.operations.aging import HOUR_MS, LONG_MS, Aging
from tests.operations.format_v3_tables import make_format_v3_table, read_avro
from tests.server.live_server import duckdb_with_iceberg
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CommitConflictError,
    InvalidDefinitionError,
    InvalidInputError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.iceberg.delete_files import RemainingRows, planned_tasks
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.read import file_batches
from trinitylake_ops.iceberg.write.rewrite import rewrite_in_process


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


def read_with_duckdb(table: EngineTable) -> list[tuple[Any, ...]]:
    """Return the rows that DuckDB's Iceberg extension reads from a local metadata file."""
    metadata = table.loaded.metadata_location.removeprefix("file://")
    with duckdb_with_iceberg() as connection:
        return connection.execute(f"SELECT id, place FROM iceberg_scan('{metadata}') ORDER BY ALL").fetchall()


def read_like_spark(table: EngineTable) -> list[tuple[Any, ...]]:
    """Return the rows that Spark tasks would read, without Spark."""
    metadata, io = table.loaded.metadata, table.loaded.io
    assert isinstance(io, StorageFileIO)
    remaining = RemainingRows(ArrowScan(metadata, io, metadata.schema(), AlwaysTrue()))
    tasks = planned_tasks(metadata, io, AlwaysTrue())
    table_rows = [row for task in tasks for batch in file_batches(remaining, task, io) for row in batch.to_pylist()]
    return sorted((row["id"], row["place"]) for row in table_rows)


def live_files(lake: Lakehouse, name: str) -> set[str]:
    """Return all live files in a table's metadata, without using this package's readers."""
    location = lake.snapshot().table("ns", name).format_properties[METADATA_LOCATION]
    metadata = json.loads(lake.storage.read(location))
    uris = {lake.root + location}
    for kind in ("statistics", "partition-statistics"):
        uris |= {file["statistics-path"] for file in metadata.get(kind) or ()}
    for snapshot in metadata["snapshots"]:
        uris.add(snapshot["manifest-list"])
        for manifest in read_avro(lake, snapshot["manifest-list"])[1]:
            uris.add(manifest["manifest_path"])
            entries = read_avro(lake, manifest["manifest_path"])[1]
            uris |= {entry["data_file"]["file_path"] for entry in entries if entry["status"] != 2}
    return {uri.removeprefix(lake.root) for uri in uris}


def summary_of(table: EngineTable, *names: str) -> list[str]:
    snapshot = table.loaded.current_snapshot()
    assert snapshot is not None and snapshot.summary is not None
    assert snapshot.summary.operation == Operation.REPLACE
    return [snapshot.summary[f"total-{name}"] for name in names]


@pytest.mark.local_only("DuckDB reads local files")
def test_duckdb_reads_the_same_rows_of_test_tables(lake: Lakehouse) -> None:
    """The test tables follow the specification, so other engines read the same rows."""
    assert read_with_duckdb(with_positions(lake)) == POSITIONS
    assert read_with_duckdb(with_equality(lake)) == EQUALITY
    # DuckDB 1.5 crashes on equality deletes by a column that was dropped later.
    assert read_like_spark(with_evolution(lake)) == EVOLVED


# Compaction


def test_diff_counts_rows_of_delete_files(lake: Lakehouse) -> None:
    """A diff shows the effect of an engine's DELETE, and compaction does not change the number of rows."""
    table = with_positions(lake)
    latest = lake.latest_version()

    def row_counts(before: int, after: int) -> tuple[int | None, ...]:
        (change,) = operations.diff_versions(lake, lake.snapshot(before), lake.snapshot(after)).tables
        assert change.delta is not None and change.after is not None
        return change.delta.rows_added, change.delta.rows_removed, change.after.rows

    assert len(table.ids()) == 3
    assert row_counts(latest - 2, latest - 1) == (0, 2, 4)
    assert row_counts(latest - 1, latest) == (0, 1, 3)
    assert row_counts(latest, latest - 1) == (1, 0, 4)
    operations.plan_compact_tables(lake).execute()
    added, removed, n_rows = row_counts(latest, lake.latest_version())
    assert (added, n_rows) == (removed, 3)


@pytest.mark.parametrize("suffix", ["parquet", "orc"])
def test_compaction_applies_position_deletes(lake: Lakehouse, suffix: str) -> None:
    table = with_positions(lake, suffix)
    before = lake.latest_version()
    report = operations.plan_compact_tables(lake).execute()
    assert [compacted.table for compacted in report.tables] == ["ns.positions"]
    assert table.ids() == [2, 3, 4] == table.ids(before)
    assert summary_of(table, "records", "data-files", "delete-files", "position-deletes") == ["3", "1", "0", "0"]
    assert operations.plan_compact_tables(lake).is_empty
    assert operations.verify(lake, deep=True).findings == ()


@pytest.mark.local_only("DuckDB reads local files")
def test_compaction_applies_equality_deletes(lake: Lakehouse) -> None:
    table = with_equality(lake)
    operations.plan_compact_tables(lake).execute()
    table_rows = table.loaded.scan().to_arrow().to_pylist()
    assert sorted((row["id"], row["place"]) for row in table_rows) == EQUALITY == read_with_duckdb(table)
    assert summary_of(table, "records", "equality-deletes", "delete-files") == ["5", "0", "0"]


@pytest.mark.local_only("DuckDB reads local files")
def test_compaction_applies_deletes_of_older_specs_schemas_and_columns(lake: Lakehouse) -> None:
    table = with_evolution(lake)
    plan = operations.plan_compact_tables(lake)
    assert dict(plan.older_spec_files) == {}
    plan.execute()
    table_rows = table.loaded.scan().to_arrow().to_pylist()
    assert sorted((row["id"], row["place"]) for row in table_rows) == EVOLVED == read_with_duckdb(table)
    assert summary_of(table, "records", "data-files", "delete-files") == ["3", "2", "0"]


def test_compaction_keeps_deletes_of_files_that_cannot_be_rewritten(lake: Lakehouse) -> None:
    """The rows of an older spec cannot be split by a transform such as bucket, so their deletes are needed."""
    table = with_positions(lake)
    with table.loaded.update_spec() as spec:
        spec.add_field("id", BucketTransform(4))
    plan = operations.plan_compact_tables(lake)
    assert (plan.is_empty, dict(plan.older_spec_files)) == (True, {"ns.positions": 2})
    assert table.ids() == [2, 3, 4]


def test_compaction_keeps_concurrent_deletes(lake: Lakehouse) -> None:
    table, other = make_table(lake, "t"), with_positions(lake)
    path = table.append(rows(1, 2, 3))
    table.delete_positions({path: [0]})
    plan = operations.plan_compact_tables(lake)

    def write(groups: Any) -> Any:
        new_files = rewrite_in_process(groups)
        table.delete_equal(pa.table({"id": pa.array([2], pa.int64())}))
        other.append(rows(7))
        return new_files

    report = plan.execute(write)
    assert [compacted.table for compacted in report.tables] == ["ns.positions"]
    assert "some of its rows were deleted" in report.left["ns.t"]
    assert other.ids() == [2, 3, 4, 7]
    operations.plan_compact_tables(lake).execute()
    assert table.ids() == [3]


def test_compaction_fails_if_all_tables_changed(lake: Lakehouse) -> None:
    table = with_positions(lake)
    plan = operations.plan_compact_tables(lake)
    before = listed(lake.storage)

    def write(groups: Any) -> Any:
        new_files = rewrite_in_process(groups)
        table.delete_positions({table.data_files[0]: [1]})
        return new_files

    with pytest.raises(CommitConflictError):
        plan.execute(write)
    new = {path for path in listed(lake.storage) - before if path.endswith(".parquet")}
    assert len(new) == 1, "the rewritten files are deleted, and the delete file is kept"


def test_compaction_rejects_position_deletes_in_avro(lake: Lakehouse) -> None:
    table = with_positions(lake, "avro")
    (reason,) = operations.plan_compact_tables(lake).left.values()
    assert "position deletes in the format AVRO are not supported" in reason
    with pytest.raises(InvalidInputError, match=r"ns\.positions"):
        operations.plan_compact_tables(lake, tables=["ns.positions"])
    assert len(table.data_files) == 2


# Exports and restores


@pytest.mark.local_only("DuckDB reads local files")
@pytest.mark.parametrize("kind", KINDS)
def test_full_export_preserves_tables_of_engines(lakes: Lakes, lake: Lakehouse, kind: str) -> None:
    table = KINDS[kind](lake)
    read = read_like_spark if kind == "evolved" else read_with_duckdb
    expected = read_like_spark(table)
    root = lakes.root("copy")
    operations.plan_export(lake, "away", "full", target=root).execute()
    operations.plan_export(lake, "here", "full").execute()
    copy = EngineTable(Lakehouse.open(root), table.name)
    assert operations.verify_export(lake, "away", deep=True).is_clean
    assert operations.verify_export(lake, "here", deep=True).is_clean
    assert read(copy) == expected
    check_same_metadata(table, copy)
    for name in ("here", "away"):
        with lake.transaction() as txn:
            txn.drop_table("ns", table.name)
        operations.plan_restore(lake, name).execute()
        assert read(table) == expected
    for checked_lake in (lake, copy.lake):
        assert operations.verify(checked_lake, deep=True).findings == ()
        assert live_files(checked_lake, table.name) <= listed(checked_lake.storage)


def check_same_metadata(table: EngineTable, copy: EngineTable) -> None:
    original, copied = (side.loaded.metadata for side in (table, copy))
    assert (original.schemas, original.partition_specs, original.sort_orders) == (
        copied.schemas,
        copied.partition_specs,
        copied.sort_orders,
    )
    assert (original.refs, original.current_snapshot_id) == (copied.refs, copied.current_snapshot_id)
    assert [snapshot.snapshot_id for snapshot in original.snapshots] == [
        snapshot.snapshot_id for snapshot in copied.snapshots
    ]
    for name in ("statistics", "partition_statistics"):
        files = [getattr(metadata, name) for metadata in (original, copied)]
        assert [file.snapshot_id for file in files[0]] == [file.snapshot_id for file in files[1]]
        assert all(file.statistics_path.startswith(copy.lake.root) for file in files[1])


def test_compaction_rejects_equality_deletes_in_avro(lake: Lakehouse) -> None:
    table = make_table(lake, "t")
    table.append(rows(1))
    table.delete_equal(rows(1), suffix="avro")
    (reason,) = operations.plan_compact_tables(lake).left.values()
    assert "equality deletes in the format AVRO are not supported" in reason


@pytest.mark.parametrize("suffix", ["parquet", "avro"])
def test_copied_position_deletes_refer_to_copied_files(lakes: Lakes, lake: Lakehouse, suffix: str) -> None:
    with_positions(lake, suffix)
    root = lakes.root("copy")
    operations.plan_export(lake, "x", "full", target=root).execute()
    copy = Lakehouse.open(root)
    location = copy.snapshot().table("ns", "positions").format_properties[METADATA_LOCATION]
    metadata = json.loads(copy.storage.read(location))
    (current,) = [
        snapshot for snapshot in metadata["snapshots"] if snapshot["snapshot-id"] == metadata["current-snapshot-id"]
    ]
    delete_files = []
    for manifest in read_avro(copy, current["manifest-list"])[1]:
        for entry in read_avro(copy, manifest["manifest_path"])[1] if manifest["content"] == 1 else ():
            file = entry["data_file"]
            assert file["file_size_in_bytes"] == len(copy.storage.read(file["file_path"].removeprefix(root)))
            bounds = [[bound["value"] for bound in file[name] or ()] for name in ("lower_bounds", "upper_bounds")]
            delete_files.append((file["record_count"], bounds))
    assert [bounds for count, bounds in delete_files if count == 2] == [[[], []]], "no bounds for two files"
    ((lower_bound,),) = [bounds[0] for count, bounds in delete_files if count == 1]
    assert lower_bound.decode().startswith(root)
    if suffix == "parquet":
        assert EngineTable(copy, "positions").ids() == [2, 3, 4]
    # A second export into the same target copies only metadata.
    report = operations.plan_export(lake, "y", "full", target=root).execute()
    assert report.copied_files <= 2


def test_export_rejects_unsupported_files_and_reports_damaged_tables(lakes: Lakes, lake: Lakehouse) -> None:
    table = with_positions(lake, "orc")
    with pytest.raises(InvalidInputError):
        operations.plan_export(lake, "x", "full", target=lakes.root("copy")).execute()
    with lake.transaction() as txn:
        txn.drop_table("ns", "positions")
    broken = make_table(lake, "broken")
    path = broken.append(rows(1)).removeprefix(lake.root)
    plan = operations.plan_export(lake, "x", "full", target=lakes.root("copy"))
    lake.storage.delete(path)
    report = plan.execute()
    assert list(report.damaged) == ["ns.broken"]
    assert path in report.damaged["ns.broken"]
    assert "broken" not in Lakehouse.open(lakes.root("copy")).snapshot().tables("ns")
    assert table.name not in lake.snapshot().tables("ns")


def test_full_export_reports_registered_tables(lakes: Lakes, lake: Lakehouse) -> None:
    other = lakes.local("other")
    foreign = make_table(other, "t")
    foreign.append(rows(1))
    make_table(lake, "own").append(rows(2))
    lake_with_access = allowing(lake, other.root)
    operations.register_table(lake_with_access, "ns", "theirs", foreign.loaded.metadata_location)
    target = lakes.root("copy")
    plan = operations.plan_export(lake_with_access, "x", "full", target=target)
    report = plan.execute()
    assert plan.registered == report.registered == ("ns.theirs",)
    for rendered in (plan.table(), report.table()):
        assert "registered tables" in str(rendered.title) and "ns.theirs" in str(rendered.title)
    minimal = operations.plan_export(lake_with_access, "y")
    assert minimal.registered == ()
    copy = allowing(Lakehouse.open(target), other.root)
    assert EngineTable(copy, "theirs").ids() == [1]


@pytest.mark.parametrize("lost_file", ["data", "deletes", "statistics", "metadata", "damaged"])
def test_restore_replaces_lost_files_of_unchanged_table(lakes: Lakes, lake: Lakehouse, lost_file: str) -> None:
    table, other = with_positions(lake), make_table(lake, "other")
    other.append(rows(1))
    path = {
        "data": table.data_files[0],
        "deletes": table.delete_positions({table.data_files[0]: [1]}),
        "statistics": table.set_statistics()[0],
        "metadata": table.loaded.metadata_location,
        "damaged": manifest_list_of(table),
    }[lost_file].removeprefix(lake.root)
    expected = table.ids()
    operations.plan_export(lake, "x", "full", target=lakes.root("copy")).execute()
    assert operations.plan_restore(lake, "x").is_empty
    lake.storage.delete(path)
    if lost_file == "damaged":
        lake.storage.create(path, b"Obj\x01 truncated")
    plan = operations.plan_restore(lake, "x")
    assert [(change.kind, change.table) for change in plan.changes] == [("changed", "positions")]
    plan.execute()
    assert table.ids() == expected
    assert live_files(lake, "positions") <= listed(lake.storage)


def test_promotion_copies_delete_files_of_clone(lakes: Lakes, lake: Lakehouse) -> None:
    """Delete files refer to data files of both sides. The clone's data files get new paths in the parent."""
    table = make_table(lake, "t")
    parent_file = table.append(rows(1, 2, 3))
    root = lakes.root("clone")
    operations.plan_clone(lake, root, "dev").execute()
    table_in_clone = EngineTable(Lakehouse.open(root), "t")
    clone_file = table_in_clone.append(rows(4, 5))
    table_in_clone.delete_positions({parent_file: [0], clone_file: [1]})
    table_in_clone.delete_positions({parent_file: [1]})
    assert table_in_clone.ids() == [3, 4]
    operations.plan_promotion(lake, "dev").execute()
    assert table.ids() == [3, 4]
    operations.plan_drop_clone(lake, "dev", delete_files=True).execute()
    assert table.ids() == [3, 4]
    operations.plan_compact_tables(lake).execute()
    assert table.ids() == [3, 4]
    assert operations.verify(lake, deep=True).findings == ()


def manifest_list_of(table: EngineTable) -> str:
    snapshot = table.loaded.current_snapshot()
    assert snapshot is not None
    return snapshot.manifest_list


# Reclaiming space


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    storage = lakes.storage()
    clock = AgingStorage(storage, storage.now_ms())
    return Aging(lakes.watch(Lakehouse.create(storage.root, storage=clock)), clock)


@pytest.mark.parametrize("kind", [*KINDS, "vectors"])
def test_cleanup_keeps_files_in_table_metadata(aging: Aging, kind: str) -> None:
    """Run a complete cleanup twice, with a trim in between, and check that all files in the latest metadata exist."""
    lake = aging.lake
    name = "dv" if kind == "vectors" else kind
    if kind == "vectors":
        make_format_v3_table(lake, "dv", with_vectors=True)
    else:
        KINDS[kind](lake)
    for _ in range(2):
        needed = live_files(lake, name)
        aging.clean_up()
        assert needed == live_files(lake, name) <= listed(lake.storage)
        operations.plan_trim_tables(lake).execute()
    aging.clean_up()
    assert live_files(lake, name) <= listed(lake.storage)
    assert operations.verify(lake, deep=True).findings == ()
    with lake.transaction() as txn:
        txn.drop_table("ns", name)
    aging.clean_up()
    assert not any(path.startswith("tables/") for path in listed(lake.storage)), "files of a dropped table are deleted"


def test_cleanup_deletes_compacted_files_and_applied_deletes(aging: Aging) -> None:
    table = with_positions(aging.lake)
    before = live_files(aging.lake, "positions")
    operations.plan_compact_tables(aging.lake).execute()
    operations.plan_trim_tables(aging.lake).execute()
    aging.later()
    aging.expire()
    operations.plan_trim_tables(aging.lake).execute()
    aging.clean_up()
    remaining = before & listed(aging.lake.storage)
    assert not any("deletes" in path or path.endswith(".parquet") for path in remaining)
    assert table.ids() == [2, 3, 4]


def test_trim_keeps_branches_tags_audits_and_their_statistics(aging: Aging) -> None:
    table = with_statistics(aging.lake)
    before = table.loaded.metadata
    aging.later()
    aging.expire()
    (trim,) = operations.plan_trim_tables(aging.lake).tables
    snapshots_by_id = {snapshot.snapshot_id: snapshot for snapshot in before.snapshots}
    audit_snapshot = next(
        snapshot
        for snapshot in before.snapshots
        if snapshot.summary and "wap.id" in snapshot.summary.additional_properties
    )
    assert len(trim.dropped) == 1, "only the snapshot of main that no reference needs"
    assert {audit_snapshot.snapshot_id, before.current_snapshot_id} <= set(trim.kept)
    assert {ref.snapshot_id for ref in before.refs.values()} <= set(trim.kept)
    operations.plan_trim_tables(aging.lake).execute()
    after = table.loaded.metadata
    assert after.refs == before.refs
    assert (len(before.statistics), after.statistics) == (2, before.statistics)
    assert (len(before.partition_statistics), after.partition_statistics) == (2, before.partition_statistics)
    aging.later(5 * 24 * HOUR_MS)
    (trim,) = operations.plan_trim_tables(aging.lake).tables
    assert trim.dropped == (audit_snapshot.snapshot_id,), "it was not published within the maximum snapshot age"
    assert audit_snapshot.snapshot_id in snapshots_by_id


def test_commit_rejects_old_statistics_files(aging: Aging) -> None:
    """Orphan removal may delete files that are older than any transaction, so a commit must not refer to them."""
    table = make_table(aging.lake, "t")
    table.append(rows(1))
    statistics = table.statistics_files()
    aging.later(LONG_MS)
    version = aging.lake.latest_version()
    for set_statistics in (table.set_table_statistics, table.set_partition_statistics):
        with pytest.raises(CommitFailedException, match="txn_ttl_millis"):
            set_statistics(statistics)
    aging.remove_orphans()
    for set_statistics in (table.set_table_statistics, table.set_partition_statistics):
        with pytest.raises(CommitFailedException, match="was deleted as an orphan"):
            set_statistics(statistics)
    assert table.loaded.metadata.statistics == []
    assert version <= aging.lake.latest_version()


# Writes of this package


def test_replacing_files_with_deletes_is_rejected(lake: Lakehouse) -> None:
    from trinitylake_ops.iceberg.write.replacement import all_files

    for table in (with_positions(lake), with_equality(lake)):
        with pytest.raises(InvalidDefinitionError):
            all_files(table.loaded)
    operations.plan_compact_tables(lake).execute()
    assert all(len(all_files(EngineTable(lake, name).loaded)) == 1 for name in ("positions", "equality"))


def test_appends_keep_deletes(lake: Lakehouse) -> None:
    table = with_positions(lake)
    table.append(rows(7))
    assert table.ids() == [2, 3, 4, 7]
    table.loaded.delete("id == 3")
    assert table.ids() == [2, 4, 7]
