"""Compaction of tables reduces the number of files and keeps the rows of every version, also after conflicts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa
import pyiceberg.io.pyarrow as iceberg_arrow
import pytest
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.types import LongType, StringType

from tests.clock import AgingStorage
from tests.faults import FaultyStorage, lose_response
from tests.iceberg.nested import nested_rows
from tests.lakes import Lakes
from tests.operations.changes import create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CommitConflictError,
    ContentChangedError,
    CorruptFileError,
    InvalidInputError,
    PlanChangedError,
    TableNotFoundError,
    TransactionExpiredError,
)
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.compact import FileGroup
from trinitylake_ops.iceberg.write.rewrite import Rewriting, rewrite_in_process

pytestmark = pytest.mark.usefixtures("fixed_requests")

RewrittenFiles = list[list[DataFile]]
TTL_MS = 60_000
Groups = Sequence[tuple[Rewriting, FileGroup]]


def rows(*ids: int | None, place: str | None = "a") -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "place": pa.array([place] * len(ids), pa.string())})


def fill(lake: Lakehouse, name: str, *batches: pa.Table, partitioned: bool = True) -> Table:
    catalog = catalog_at(lake)
    catalog.create_namespace_if_not_exists("ns")
    iceberg_table = catalog.create_table_if_not_exists(("ns", name), batches[0].schema)
    if partitioned and iceberg_table.spec().is_unpartitioned():
        with iceberg_table.update_spec() as update:
            update.add_identity("place")
    for batch in batches:
        iceberg_table.append(batch)
    return iceberg_table


def create_with_small_files(lake: Lakehouse, name: str = "t", times: int = 6) -> Table:
    """Create a table with two partitions, one of them null, and ``times`` files in each."""
    return fill(lake, name, *(rows(number, None, place=place) for number in range(times) for place in ("a", None)))


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.memory()


def load(lake: Lakehouse, name: str = "t", version: int | None = None) -> Table:
    return catalog_at(lake, version).load_table(("ns", name))


def content(lake: Lakehouse, name: str = "t", version: int | None = None) -> list[tuple[object, ...]]:
    rows = load(lake, name, version).scan().to_arrow()
    return sorted(map(tuple, (row.values() for row in rows.to_pylist())), key=repr)


def n_files(lake: Lakehouse, name: str = "t", version: int | None = None) -> int:
    return len(list(load(lake, name, version).scan().plan_files()))


def data_paths(lake: Lakehouse) -> set[str]:
    return {info.path for info in lake.storage.list() if info.path.endswith(".parquet")}


def test_compact_tables_merges_files_and_keeps_rows(lake: Lakehouse) -> None:
    create_with_small_files(lake)
    create_with_small_files(lake, "u", 5)
    fill(lake, "single", rows(1), partitioned=False)
    before, version = {name: content(lake, name) for name in ("t", "u", "single")}, lake.latest_version()
    plan = operations.plan_compact_tables(lake)
    assert [(table.name, table.files, table.data_files, table.groups, table.partitions) for table in plan.tables] == [
        ("ns.t", 12, 12, 2, 2),
        ("ns.u", 10, 10, 2, 2),
    ]
    assert (plan.left, plan.files, lake.latest_version()) == ({}, 22, version)
    assert json.loads(plan.to_json())["tables"][0]["rows"] == 24
    assert "ns.u" in str(plan) and "10 of 10" in str(plan)

    report = plan.execute(message="nightly")
    assert (report.version, report.was_done, report.attempts) == (version + 1, False, 1)
    assert lake.latest_version() == version + 1, "one version for all tables"
    info = next(iter(lake.history(limit=1)))
    assert (info.operation, info.message) == ("compact-tables", "nightly")
    assert [(table.table, table.files_before, table.files_after, table.rows) for table in report.tables] == [
        ("ns.t", 12, 2, 24),
        ("ns.u", 10, 2, 20),
    ]
    assert {name: content(lake, name) for name in before} == before
    assert {name: content(lake, name, version) for name in before} == before
    assert (n_files(lake), n_files(lake, "t", version)) == (2, 12)
    assert operations.plan_compact_tables(lake, min_input_files=2).is_empty
    assert operations.verify(lake, deep=True).is_clean


def test_compact_tables_commits_nothing_if_not_needed(lake: Lakehouse) -> None:
    fill(lake, "t", rows(1))
    plan = operations.plan_compact_tables(lake)
    version = lake.latest_version()
    report = plan.execute(run_id="r")
    assert (plan.is_empty, report.version, report.tables, lake.latest_version()) == (True, version, (), version)


def test_compact_tables_rejects_invalid_options(lake: Lakehouse) -> None:
    create_with_small_files(lake)
    create(lake, "other", "x")
    plan = operations.plan_compact_tables(lake)
    assert plan.left == {}
    with pytest.raises(InvalidInputError, match=r"other\.x"):
        operations.plan_compact_tables(lake, ["other.x"])
    with pytest.raises(TableNotFoundError):
        operations.plan_compact_tables(lake, ["ns.nothing"])
    with pytest.raises(InvalidInputError, match="min_input_files"):
        operations.plan_compact_tables(lake, min_input_files=1)
    with pytest.raises(InvalidInputError, match="target_file_size_bytes"):
        operations.plan_compact_tables(lake, target_file_size_bytes=0)
    assert operations.plan_compact_tables(lake, ["ns.t"], target_file_size_bytes=1).is_empty
    assert operations.plan_compact_tables(lake, ["ns.t"]).tables[0].files == 12


def test_compact_tables_executes_the_approved_plan(lake: Lakehouse) -> None:
    iceberg_table = create_with_small_files(lake)
    digest = operations.plan_compact_tables(lake).digest
    assert operations.plan_compact_tables(lake).digest == digest
    iceberg_table.append(rows(9))
    plan = operations.plan_compact_tables(lake)
    version = lake.latest_version()
    with pytest.raises(PlanChangedError):
        plan.execute(approved_digest=digest)
    assert lake.latest_version() == version
    assert plan.execute(approved_digest=plan.digest).version == version + 1


def test_compact_tables_keeps_concurrent_appends(lake: Lakehouse) -> None:
    """Appends between two attempts are kept as well."""
    iceberg_table = create_with_small_files(lake)
    plan = operations.plan_compact_tables(lake)

    def write(groups: Groups) -> RewrittenFiles:
        new_files = rewrite_in_process(groups)
        iceberg_table.append(rows(100, 101))
        with iceberg_table.update_schema() as update:
            update.add_column("more", pa.string() and iceberg_table.schema().find_field("place").field_type)
        return new_files

    before = content(lake)
    report = plan.execute(write)
    assert [row[0] for row in content(lake)].count(100) == 1
    assert len(content(lake)) == len(before) + 2
    assert [field.name for field in load(lake).schema().fields] == ["id", "place", "more"]
    assert (report.left, n_files(lake)) == ({}, 3)


def test_compact_tables_skips_tables_rewritten_concurrently(lake: Lakehouse) -> None:
    iceberg_table = create_with_small_files(lake)
    create_with_small_files(lake, "u")
    plan = operations.plan_compact_tables(lake)
    before = data_paths(lake)

    def write(groups: Groups) -> RewrittenFiles:
        new_files = rewrite_in_process(groups)
        iceberg_table.overwrite(rows(7))
        return new_files

    report = plan.execute(write)
    assert [table.table for table in report.tables] == ["ns.u"]
    assert list(report.left) == ["ns.t"] and "some of its files were removed" in report.left["ns.t"]
    assert content(lake) == [(7, "a")]
    assert len(data_paths(lake)) == len(before) + 2 + 1, "the new files of the skipped table are deleted"
    assert "ns.t" in str(report)


def test_compact_tables_fails_after_a_concurrent_delete(lake: Lakehouse) -> None:
    iceberg_table = create_with_small_files(lake)
    plan = operations.plan_compact_tables(lake)
    before = data_paths(lake)

    def write(groups: Groups) -> RewrittenFiles:
        new_files = rewrite_in_process(groups)
        iceberg_table.delete("id = 3")
        return new_files

    with pytest.raises(CommitConflictError):
        plan.execute(write)
    assert (3, "a") not in content(lake) and (4, "a") in content(lake)
    assert before <= data_paths(lake)
    assert operations.plan_compact_tables(lake).execute().tables[0].files_after == 2


def test_compact_tables_follows_schema_and_partition_changes(lake: Lakehouse) -> None:
    iceberg_table = fill(lake, "t", *(rows(number) for number in range(3)), partitioned=False)
    with iceberg_table.update_schema() as update:
        update.rename_column("id", "number")
        update.add_column("note", iceberg_table.schema().find_field("place").field_type)
    with iceberg_table.update_spec() as spec_update:
        spec_update.add_identity("place")
    all_columns = pa.table({"number": [10], "place": ["b"], "note": ["new"]})
    for _ in range(5):
        iceberg_table.append(all_columns)
    before, version = content(lake), lake.latest_version()
    plan = operations.plan_compact_tables(lake)
    assert (plan.tables[0].files, plan.older_spec_files) == (5, {"ns.t": 3})
    assert "use repartition to rewrite them" in str(plan)
    plan.execute()
    assert (content(lake), n_files(lake)) == (before, 4)
    repeated = operations.plan_compact_tables(lake, repartition=True)
    assert (repeated.tables[0].files, repeated.older_spec_files) == (3, {})
    repeated.execute()
    assert (content(lake), n_files(lake), content(lake, version=version)) == (before, 2, before)
    assert {task.file.spec_id for task in load(lake).scan().plan_files()} == {1}
    assert operations.plan_compact_tables(lake, repartition=True).is_empty


def test_compact_tables_commits_once_per_run(lake: Lakehouse) -> None:
    iceberg_table = create_with_small_files(lake)
    first = operations.plan_compact_tables(lake).execute(run_id="r")
    for number in range(6):
        iceberg_table.append(rows(number))
    version = lake.latest_version()
    repeated = operations.plan_compact_tables(lake)
    assert not repeated.is_empty
    report = repeated.execute(run_id="r")
    assert (report.version, report.was_done, lake.latest_version()) == (first.version, True, version)
    assert f"already committed version {first.version}" in str(report)
    assert repeated.execute(run_id="another").version == version + 1


def test_compact_tables_reports_the_version_of_a_faster_run(lake: Lakehouse) -> None:
    create_with_small_files(lake)
    plan = operations.plan_compact_tables(lake)
    faster_plan = operations.plan_compact_tables(lake)
    committed_versions: list[int] = []

    def write(groups: Groups) -> RewrittenFiles:
        new_files = rewrite_in_process(groups)
        committed_versions.append(faster_plan.execute(run_id="r").version)
        return new_files

    before = content(lake)
    report = plan.execute(write, run_id="r")
    assert (report.version, report.was_done) == (committed_versions[0], True)
    assert (content(lake), lake.latest_version()) == (before, committed_versions[0])
    paths = {task.file.file_path.removeprefix(lake.root) for task in load(lake).scan().plan_files()}
    assert len(data_paths(lake) - paths) == 12, "only the old files are unused"


def test_compact_tables_detects_its_commit_after_a_lost_response(lakes: Lakes) -> None:
    lake = lakes.memory()
    create_with_small_files(lake)
    version, before = lake.latest_version(), content(lake)
    faulty = FaultyStorage(lake.storage, [lose_response(1, kind="create", path_part=root_path(version + 1))])
    plan = operations.plan_compact_tables(Lakehouse(faulty))
    report = plan.execute(run_id="r")
    assert (report.version, lake.latest_version()) == (version + 1, version + 1)
    assert operations.plan_compact_tables(lake).execute(run_id="r").version == version + 1
    assert content(lake) == before


def test_compact_tables_rejects_lost_rows(lake: Lakehouse) -> None:
    create_with_small_files(lake)
    plan = operations.plan_compact_tables(lake)
    version, before = lake.latest_version(), data_paths(lake)

    def write(groups: Groups) -> RewrittenFiles:
        new_files = rewrite_in_process(groups)
        return [new_files[0], []]

    with pytest.raises(CorruptFileError):
        plan.execute(write)
    assert lake.latest_version() == version
    assert data_paths(lake) >= before


def test_compact_tables_skips_unreadable_tables(lake: Lakehouse) -> None:
    create_with_small_files(lake)
    create_with_small_files(lake, "u")
    location = lake.snapshot().table("ns", "u").format_properties["metadata_location"]
    lake.storage.delete(location)
    plan = operations.plan_compact_tables(lake)
    assert [table.name for table in plan.tables] == ["ns.t"]
    assert location in plan.left["ns.u"] and "ns.u" in str(plan)
    with pytest.raises(InvalidInputError, match=r"ns\.u"):
        operations.plan_compact_tables(lake, ["ns.u"])


@pytest.mark.parametrize(("written_ms", "is_committed"), [(1_000, True), (TTL_MS + 1, False)])
def test_compact_tables_expires_relative_to_its_first_new_file(
    lakes: Lakes, written_ms: int, is_committed: bool
) -> None:
    """Reading the rows may take longer than the time to live, because only new files age."""
    lakehouse = lakes.memory(txn_ttl_millis=TTL_MS)
    clock = AgingStorage(lakehouse.storage, lakehouse.storage.now_ms())
    lake = Lakehouse(clock)
    create_with_small_files(lake)
    before, version, files = content(lake), lake.latest_version(), data_paths(lake)
    plan = operations.plan_compact_tables(lake)

    def write(groups: Groups) -> RewrittenFiles:
        clock.time_ms += 2 * TTL_MS
        new_files = rewrite_in_process(groups)
        clock.written_ms |= dict.fromkeys(data_paths(lake) - files, clock.time_ms)
        clock.time_ms += written_ms
        return new_files

    if is_committed:
        assert plan.execute(write).version == version + 1
        assert n_files(lake) == 2
    else:
        with pytest.raises(TransactionExpiredError):
            plan.execute(write)
        assert (lake.latest_version(), data_paths(lake)) == (version, files)
    assert content(lake) == before
    assert operations.verify(lake, deep=True).is_clean


def test_compact_tables_fails_if_a_new_file_was_deleted(lakes: Lakes) -> None:
    lakehouse = lakes.memory(txn_ttl_millis=TTL_MS)
    clock = AgingStorage(lakehouse.storage, lakehouse.storage.now_ms())
    lake = Lakehouse(clock)
    create_with_small_files(lake)
    version, files = lake.latest_version(), data_paths(lake)
    plan = operations.plan_compact_tables(lake)

    def write(groups: Groups) -> RewrittenFiles:
        new_files = rewrite_in_process(groups)
        clock.time_ms += 2 * TTL_MS
        lake.storage.delete(min(data_paths(lake) - files))
        return new_files

    with pytest.raises(TransactionExpiredError):
        plan.execute(write)
    assert (lake.latest_version(), data_paths(lake)) == (version, files)


def test_compact_tables_detects_changed_rows(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the library that reads the rows turns null lists into empty lists."""
    list_type = pa.list_(pa.struct([("k", pa.int32())]))
    fill(
        lake,
        "t",
        *(pa.table({"id": [number], "l": pa.array([None], list_type)}) for number in range(6)),
        partitioned=False,
    )
    before, files, project = lake.latest_version(), data_paths(lake), iceberg_arrow._to_requested_schema

    def project_with_fault(
        requested: object, stored: object, batch: pa.RecordBatch, *args: object, **options: object
    ) -> object:
        projected = project(requested, stored, batch, *args, **options)
        column = projected.column("l")
        empty = pa.array([[] if value is None else value for value in column.to_pylist()], column.type)
        return projected.set_column(1, projected.schema.field("l"), empty)

    with monkeypatch.context() as patch:
        patch.setattr(iceberg_arrow, "_to_requested_schema", project_with_fault)
        with pytest.raises(ContentChangedError, match=r"'ns\.t'"):
            operations.plan_compact_tables(lake).execute()
    assert (lake.latest_version(), data_paths(lake)) == (before, files)
    operations.plan_compact_tables(lake).execute()
    assert load(lake).scan().to_arrow()["l"].to_pylist() == [None] * 6
    assert n_files(lake) == 1


@pytest.mark.parametrize("seed", [11, 12])
def test_compact_tables_keeps_nested_rows(lake: Lakehouse, seed: int) -> None:
    rows = nested_rows(seed)
    fill(lake, "t", *(rows.slice(4 * number, 4) for number in range(7)), partitioned=False)
    with load(lake).update_schema() as update:
        update.rename_column("n0", "renamed")
        update.add_column("added", StringType())
        update.delete_column("p0")
        update.update_column("p1", LongType())
    expected = sorted(map(repr, load(lake).scan().to_arrow().to_pylist()))
    operations.plan_compact_tables(lake).execute()
    assert n_files(lake) == 1
    assert sorted(map(repr, load(lake).scan().to_arrow().to_pylist())) == expected
    renamed = load(lake).scan().to_arrow().select(["id", "renamed"]).to_pylist()
    assert repr([row["renamed"] for row in sorted(renamed, key=lambda row: row["id"])]) == repr(rows["n0"].to_pylist())
