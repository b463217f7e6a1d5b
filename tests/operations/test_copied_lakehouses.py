"""Test lakehouses that were copied or moved as files, and exports that refer to files of their source."""

from __future__ import annotations

import logging
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine_tables import EngineTable, make_table
from tests.engine_tables import rows as engine_rows
from tests.lakes import Lakes, local_storage
from tests.operations.aging import Aging, AgingStorage
from tests.operations.changes import ROWS, append_rows
from tests.operations.copies import clean_up, copy_lakehouse, delete_all_files, files, rows
from tests.operations.format_v3_tables import make_format_v3_table
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, InvalidInputError, LocationNotAllowedError
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.operations.definition_commits import MAX_ATTEMPTS
from trinitylake_ops.storage import MeteredStorage, Storage, StorageWrapper, open_storage

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def source(lakes: Lakes) -> Aging:
    aging = Aging.on(lakes.storage("source"))
    append_rows(aging.lake)
    append_rows(aging.lake)
    return aging


@pytest.fixture
def copy_storage(lakes: Lakes) -> AgingStorage:
    storage = lakes.storage("copy")
    return AgingStorage(storage, storage.now_ms())


def test_copied_lakehouse_reads_and_writes_at_its_own_root(
    source: Aging, copy_storage: AgingStorage, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copy_lakehouse(source.lake, copy_storage)
    before = files(source.lake)
    with caplog.at_level(logging.WARNING):
        append_rows(copy)
        append_rows(copy)
    warnings = [record for record in caplog.records if "trinitylake relocate" in record.getMessage()]
    assert len(warnings) == 1
    assert files(source.lake) == before
    assert rows(copy) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert rows(source.lake) == [1, 1, 2, 2, 3, 3]
    delete_all_files(source.lake)
    assert rows(copy) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    clean_up(Aging(copy, copy_storage))
    assert len(rows(copy)) == 15


def test_relocation_leaves_no_reference_to_former_root(source: Aging, copy_storage: AgingStorage) -> None:
    copy = copy_lakehouse(source.lake, copy_storage)
    former_root = source.lake.root
    append_rows(copy)
    delete_all_files(source.lake)
    report = operations.verify(copy)
    assert report.is_clean
    assert [finding.code for finding in report.findings if finding.fix == "relocate"] == ["moved"]
    data = {path for path in files(copy) if path.endswith(".parquet")}
    plan = operations.plan_relocation(copy)
    assert plan.tables == ("ns.t",)
    report = plan.execute(plan.digest)
    assert (report.tables, report.version) == (("ns.t",), copy.latest_version())
    assert {path for path in files(copy) if path.endswith(".parquet")} == data
    assert operations.plan_relocation(copy).is_empty
    assert operations.plan_relocation(copy).execute().version == report.version
    assert not [finding for finding in operations.verify(copy, deep=True).findings if finding.code == "moved"]
    table = catalog_at(copy).load_table("ns.t")
    assert table.location().startswith(copy.root)
    assert former_root not in table.metadata.model_dump_json()
    assert all(task.file.file_path.startswith(copy.root) for task in table.scan().plan_files())
    assert rows(copy) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    clean_up(Aging(copy, copy_storage))
    assert len(rows(copy)) == 12


def test_relocation_is_planned_again_after_a_conflict(source: Aging, copy_storage: AgingStorage) -> None:
    copy = copy_lakehouse(source.lake, copy_storage)
    plan = operations.plan_relocation(copy)
    append_rows(copy)
    report = plan.execute()
    assert (report.tables, report.version) == (("ns.t",), copy.latest_version())
    assert rows(copy) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert operations.plan_relocation(copy).is_empty


@pytest.mark.parametrize("succeeds", [True, False])
def test_commit_during_relocation_is_kept(source: Aging, copy_storage: AgingStorage, succeeds: bool) -> None:
    remaining_appends = iter(range(1) if succeeds else range(MAX_ATTEMPTS))

    class RacingStorage(StorageWrapper):
        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            if path.endswith(".metadata.json") and next(remaining_appends, None) is not None:
                append_rows(Lakehouse(copy_storage))

    copy_lakehouse(source.lake, copy_storage)
    copy = Lakehouse(RacingStorage(copy_storage))
    before = files(copy)
    plan = operations.plan_relocation(copy)
    if succeeds:
        assert plan.execute().version == copy.latest_version()
        assert rows(copy) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    else:
        with pytest.raises(CommitConflictError):
            plan.execute()
        assert len(rows(copy)) == 6 + 3 * MAX_ATTEMPTS
    assert operations.plan_relocation(copy).is_empty == succeeds
    assert {finding.code for finding in operations.verify(copy).findings} <= {"moved"}, "no orphans remain"
    assert before <= files(copy)


@pytest.mark.parametrize("level", ["minimal", "partial", "definitions", "full"])
@pytest.mark.parametrize("is_source_first", [True, False])
def test_source_and_copy_keep_files_of_each_other(
    source: Aging, copy_storage: AgingStorage, level: str, is_source_first: bool
) -> None:
    export_level, definitions = ("partial", True) if level == "definitions" else (level, False)
    operations.plan_export(
        source.lake, "dev", export_level, target=copy_storage.root, definitions=definitions
    ).execute()
    copy = Aging(Lakehouse(copy_storage), copy_storage)
    before = files(source.lake)
    append_rows(copy.lake)
    assert files(source.lake) == before, "a copy writes only below its own root"
    table_id = copy.lake.snapshot().table("ns", "t").id
    assert owner_path(table_id) in files(copy.lake)
    for aging in [source, copy] if is_source_first else [copy, source]:
        clean_up(aging)
        assert len(rows(source.lake)) >= len(ROWS) * 2
        assert len(rows(copy.lake)) >= len(ROWS) * 3
    for aging in (copy, source, copy):
        clean_up(aging)
    assert operations.verify(source.lake).is_clean
    assert operations.verify(copy.lake).is_clean
    assert len(rows(copy.lake)) == len(ROWS) * 6
    assert operations.plan_relocation(copy.lake).is_empty


def test_partial_export_refers_to_its_source(source: Aging, copy_storage: AgingStorage) -> None:
    for level, expected in (("partial", [source.lake.root]), ("full", [])):
        delete_all_files(Lakehouse(copy_storage))
        operations.plan_export(source.lake, f"as {level}".replace(" ", "-"), level, target=copy_storage.root).execute()
        assert [record.root for record in Lakehouse(copy_storage).snapshot().definition.sources] == expected


@pytest.mark.parametrize("level", ["minimal", "partial", "definitions"])
def test_copy_of_moved_lakehouse_reads_files_of_its_source(
    lakes: Lakes, source: Aging, copy_storage: AgingStorage, level: str
) -> None:
    storage = lakes.storage("moved")
    moved = Aging(copy_lakehouse(source.lake, storage), AgingStorage(storage, source.clock.now_ms()))
    moved = Aging(Lakehouse(moved.clock), moved.clock)
    delete_all_files(source.lake)
    before = moved.lake.latest_version()
    operations.plan_relocation(moved.lake).execute()
    export_level, definitions = ("partial", True) if level == "definitions" else (level, False)
    for name, version, target in (("before", before, copy_storage), ("after", None, lakes.storage("after"))):
        plan = operations.plan_export(
            moved.lake, name, export_level, version=version, target=target.root, definitions=definitions
        )
        plan.execute()
        copy = Lakehouse(target)
        assert rows(copy) == rows(moved.lake) == [1, 1, 2, 2, 3, 3]
        assert {finding.code for finding in operations.verify(copy, deep=True).findings} <= {"orphans"}
        assert operations.plan_relocation(copy).is_empty
    copy, full = Aging(Lakehouse(copy_storage), copy_storage), lakes.storage("full")
    append_rows(copy.lake)
    for aging in (moved, copy, moved):
        clean_up(aging)
        assert operations.verify(copy.lake, deep=True).is_clean
    operations.plan_export(copy.lake, "all", "full", target=full.root).execute()
    expected = rows(copy.lake)
    for lake in (moved.lake, copy.lake):
        delete_all_files(lake)
    assert rows(Lakehouse(full)) == expected == sorted([1, 2, 3] * 4)


def test_location_of_moved_file_is_requested_once(lakes: Lakes, source: Aging, copy_storage: AgingStorage) -> None:
    moved = copy_lakehouse(source.lake, lakes.storage("moved"))
    operations.plan_export(moved, "dev", "minimal", target=copy_storage.root).execute()
    metered = MeteredStorage(copy_storage)
    copy = Lakehouse(metered)
    io = reading_io(copy)
    (task, *_) = catalog_at(Lakehouse(copy_storage)).load_table("ns.t").scan().plan_files()
    assert task.file.file_path.startswith(source.lake.root)
    before = metered.snapshot().requests.get("stat", 0)
    locations = [io.location(task.file.file_path) for _ in range(3)]
    assert set(locations) == {task.file.file_path.replace(source.lake.root, moved.root)}
    assert metered.snapshot().requests.get("stat", 0) - before == 1
    assert {pickle.loads(pickle.dumps(io)).location(location) for location in locations} == set(locations)


def test_further_copies_refer_to_definitions_in_the_first_source(
    lakes: Lakes, source: Aging, copy_storage: AgingStorage
) -> None:
    second_copy = lakes.storage("further")
    operations.plan_export(source.lake, "one", "partial", target=copy_storage.root).execute()
    operations.plan_export(
        Lakehouse(copy_storage), "two", "partial", target=second_copy.root, definitions=True
    ).execute()
    assert rows(Lakehouse(second_copy)) == [1, 1, 2, 2, 3, 3]


def test_folder_of_unfinished_first_write_has_owner_file_and_is_removed(
    source: Aging, copy_storage: AgingStorage
) -> None:
    operations.plan_export(source.lake, "dev", "partial", target=copy_storage.root).execute()
    copy = Aging(Lakehouse(copy_storage), copy_storage)
    transaction = catalog_at(copy.lake).load_table("ns.t").transaction()
    transaction.append(ROWS)
    table_id = copy.lake.snapshot().table("ns", "t").id
    assert owner_path(table_id) in files(copy.lake)
    with copy.lake.transaction() as txn:
        txn.drop_table("ns", "t")
    copy.clean_up()
    assert not [path for path in files(copy.lake) if path.startswith("tables/")]


def test_copied_position_deletes_and_vectors_refer_to_copied_files(source: Aging, copy_storage: AgingStorage) -> None:
    make_format_v3_table(source.lake, "dv", with_vectors=True)
    positions = make_table(source.lake, "pos")
    data_file = positions.append(engine_rows(1, 2, 3))
    positions.delete_positions({data_file: [1]})
    copy = copy_lakehouse(source.lake, copy_storage)
    delete_all_files(source.lake)
    report = operations.plan_relocation(copy).execute()
    assert (report.tables, report.refused) == (("ns.dv", "ns.pos", "ns.t"), {})
    assert EngineTable(copy, "pos").ids() == [1, 3]
    assert EngineTable(copy, "dv").ids() == [2, 2, 3, 3]
    assert operations.plan_relocation(copy).is_empty
    assert operations.verify(copy, deep=True).findings == ()


def test_relocation_skips_position_deletes_and_suggests_a_remedy(source: Aging, copy_storage: AgingStorage) -> None:
    positions = make_table(source.lake, "pos")
    positions.delete_positions({positions.append(engine_rows(1, 2, 3)): [1]}, suffix="orc")
    copy = copy_lakehouse(source.lake, copy_storage)
    plan = operations.plan_relocation(copy)
    assert (plan.tables, list(plan.refused)) == (("ns.t",), ["ns.pos"])
    assert "compact-tables" in plan.refused["ns.pos"]
    report = plan.execute()
    assert (report.tables, report.refused) == (plan.tables, plan.refused)


@pytest.mark.parametrize("is_source_deleted", [False, True], ids=["copied", "moved"])
def test_relocation_stops_using_former_root_as_table_root(
    source: Aging, copy_storage: AgingStorage, is_source_deleted: bool
) -> None:
    """A definition can name its own root as table root; copies with the same id would then clean up the same root."""
    lake = source.lake
    with lake.transaction() as transaction:
        transaction.alter_definition(replace(transaction.definition, table_root=lake.root))
    append_rows(lake)
    n_rows = len(rows(lake))
    copy = copy_lakehouse(lake, copy_storage)
    before = files(lake)
    if is_source_deleted:
        delete_all_files(lake)
    append_rows(copy)
    assert len(rows(copy)) == n_rows + 3
    if not is_source_deleted:
        with pytest.raises(LocationNotAllowedError):
            catalog_at(copy).create_table("ns.new", ROWS.schema)
        assert files(lake) == before
    codes = [finding.code for finding in operations.verify(copy).findings if finding.fix == "relocate"]
    assert codes == (["moved"] if is_source_deleted else ["table-root-kept", "moved"])
    with pytest.raises((InvalidInputError, LocationNotAllowedError)):
        operations.plan_relocation(copy, lake.root)
    plan = operations.plan_relocation(copy)
    assert plan.left_table_root == lake.root
    plan.execute(plan.digest)
    assert copy.snapshot().definition.table_root == ""
    assert operations.plan_relocation(copy).is_empty
    catalog_at(copy).create_table("ns.new", ROWS.schema).append(ROWS)
    assert catalog_at(copy).load_table("ns.new").location().startswith(copy.root)
    clean_up(Aging(copy, copy_storage) if is_source_deleted else source)  # appends again
    assert len(rows(copy)) == n_rows + (6 if is_source_deleted else 3)
    assert operations.verify(copy, deep=True).is_clean


def test_relocation_plan_reads_table_metadata_once(source: Aging, copy_storage: AgingStorage) -> None:
    class ReadCountingStorage(StorageWrapper):
        def read(self, path: str, **kwargs: Any) -> bytes:
            n_reads[path] += 1
            return self.inner.read(path, **kwargs)

    with source.lake.transaction() as transaction:
        transaction.alter_definition(replace(transaction.definition, table_root=source.lake.root))
    append_rows(source.lake)
    copy = copy_lakehouse(source.lake, copy_storage)
    n_reads: Counter[str] = Counter()
    plan = operations.plan_relocation(Lakehouse(ReadCountingStorage(copy_storage)))
    assert (plan.left_table_root, len(plan.moved)) == (source.lake.root, 1)
    assert n_reads[plan.moved[0].files.metadata] == 1
    assert copy.latest_version() == plan.base_version


def test_create_ignores_own_root_as_table_root(lakes: Lakes) -> None:
    storage = lakes.storage("own")
    lake = Lakehouse.create(storage.root, storage=storage, table_root=storage.root.rstrip("/"))
    assert lake.snapshot().definition.table_root == ""
    lake.alter_definition(table_root=storage.root)
    assert lake.snapshot().definition.table_root == ""


@pytest.fixture
def bucket(radosgw: S3Server) -> Iterator[str]:
    root = radosgw.fresh_root()
    yield root
    radosgw.delete_all(root)


def grow_lake(storage: Storage) -> Aging:
    aging = Aging.on(storage)
    append_rows(aging.lake)
    append_rows(aging.lake)
    return aging


def copy_with_clock_of(storage: Storage, source: Aging) -> Aging:
    clock = AgingStorage(storage, source.clock.now_ms())
    return Aging(Lakehouse(clock), clock)


def check_maintenance(moved: Aging, former_root: str) -> None:
    """Run all maintenance operations before and after a relocation."""
    assert rows(moved.lake) == sorted([1, 2, 3] * 2)
    clean_up(moved)
    assert rows(moved.lake) == sorted([1, 2, 3] * 3)
    assert operations.verify(moved.lake, deep=True).is_clean
    operations.plan_relocation(moved.lake).execute()
    clean_up(moved)
    assert rows(moved.lake) == sorted([1, 2, 3] * 4)
    report = operations.verify(moved.lake, deep=True)
    assert [finding.code for finding in report.findings] == []
    paths = [info.path for info in moved.clock.list("tables/") if former_root.encode() in moved.clock.read(info.path)]
    assert paths == [], "no remaining file refers to the former root"


def test_moved_folder_is_maintained_at_its_new_location(tmp_path: Path) -> None:
    source = grow_lake(local_storage(tmp_path / "before"))
    source.lake.close()
    shutil.move(tmp_path / "before", tmp_path / "after")
    check_maintenance(copy_with_clock_of(local_storage(tmp_path / "after"), source), source.lake.root)
    assert not (tmp_path / "before").exists()


@pytest.mark.debian_packages
def test_copied_bucket_is_maintained_at_its_new_location(radosgw: S3Server, bucket: str) -> None:
    source = grow_lake(open_storage(f"{bucket}before/", radosgw.storage_options))
    target = open_storage(f"{bucket}after/", radosgw.storage_options)
    copy_lakehouse(source.lake, target)
    delete_all_files(source.lake)
    check_maintenance(copy_with_clock_of(target, source), source.lake.root)
    assert list(source.clock.list()) == []
