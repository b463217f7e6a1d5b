"""Lakehouses that were copied: as files, or by exports that leave files in their source."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.engine_tables import EngineTable, make_table
from tests.engine_tables import rows as engine_rows
from tests.lakes import Lakes
from tests.operations.aging import Aging, AgingStorage
from tests.operations.changes import ROWS, append_rows
from tests.operations.copies import clean_up, copied, drop_all, files, rows
from tests.operations.later_tables import make_later
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, InvalidInputError, LocationNotAllowedError
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.operations.definition_commits import MAX_ATTEMPTS
from trinitylake_ops.storage import MeteredStorage, StorageWrapper

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def source(lakes: Lakes) -> Aging:
    aging = Aging.on(lakes.storage("source"))
    append_rows(aging.lake)
    append_rows(aging.lake)
    return aging


@pytest.fixture
def there(lakes: Lakes) -> AgingStorage:
    storage = lakes.storage("copy")
    return AgingStorage(storage, storage.now_ms())


def test_a_copy_of_all_files_reads_and_writes_at_its_own_place(
    source: Aging, there: AgingStorage, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copied(source.lake, there)
    before = files(source.lake)
    with caplog.at_level(logging.WARNING):
        append_rows(copy)
        append_rows(copy)
    said = [record for record in caplog.records if "trinitylake relocate" in record.getMessage()]
    assert len(said) == 1
    assert files(source.lake) == before
    assert rows(copy) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert rows(source.lake) == [1, 1, 2, 2, 3, 3]
    drop_all(source.lake)
    assert rows(copy) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    clean_up(Aging(copy, there))
    assert len(rows(copy)) == 15


def test_relocation_leaves_nothing_that_names_the_former_place(source: Aging, there: AgingStorage) -> None:
    copy = copied(source.lake, there)
    former = source.lake.root
    append_rows(copy)
    drop_all(source.lake)
    report = operations.verify(copy)
    assert report.is_clean
    assert [finding.code for finding in report.findings if finding.mend == "relocate"] == ["moved"]
    data = {path for path in files(copy) if path.endswith(".parquet")}
    plan = operations.plan_relocation(copy)
    assert plan.tables == ("ns.t",)
    done = plan.execute(plan.digest)
    assert (done.tables, done.version) == (("ns.t",), copy.latest_version())
    assert {path for path in files(copy) if path.endswith(".parquet")} == data
    assert operations.plan_relocation(copy).is_empty
    assert operations.plan_relocation(copy).execute().version == done.version
    assert not [finding for finding in operations.verify(copy, deep=True).findings if finding.code == "moved"]
    table = catalog_at(copy).load_table("ns.t")
    assert table.location().startswith(copy.root)
    assert former not in table.metadata.model_dump_json()
    assert all(task.file.file_path.startswith(copy.root) for task in table.scan().plan_files())
    assert rows(copy) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    clean_up(Aging(copy, there))
    assert len(rows(copy)) == 12


def test_a_relocation_that_loses_a_race_is_planned_again(source: Aging, there: AgingStorage) -> None:
    copy = copied(source.lake, there)
    plan = operations.plan_relocation(copy)
    append_rows(copy)
    done = plan.execute()
    assert (done.tables, done.version) == (("ns.t",), copy.latest_version())
    assert rows(copy) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert operations.plan_relocation(copy).is_empty


@pytest.mark.parametrize("is_ever_won", [True, False])
def test_a_commit_between_what_relocation_writes_and_its_commit(
    source: Aging, there: AgingStorage, is_ever_won: bool
) -> None:
    races = iter(range(1) if is_ever_won else range(MAX_ATTEMPTS))

    class Racing(StorageWrapper):
        def create(self, path: str, data: bytes) -> None:
            super().create(path, data)
            if path.endswith(".metadata.json") and next(races, None) is not None:
                append_rows(Lakehouse(there))

    copied(source.lake, there)
    copy = Lakehouse(Racing(there))
    before = files(copy)
    plan = operations.plan_relocation(copy)
    if is_ever_won:
        assert plan.execute().version == copy.latest_version()
        assert rows(copy) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    else:
        with pytest.raises(CommitConflictError):
            plan.execute()
        assert len(rows(copy)) == 6 + 3 * MAX_ATTEMPTS
    assert operations.plan_relocation(copy).is_empty == is_ever_won
    assert {finding.code for finding in operations.verify(copy).findings} <= {"moved"}, "no file was left behind"
    assert before <= files(copy)


@pytest.mark.parametrize("level", ["minimal", "partial", "definitions", "full"])
@pytest.mark.parametrize("source_first", [True, False])
def test_source_and_copy_never_take_what_the_other_needs(
    source: Aging, there: AgingStorage, level: str, source_first: bool
) -> None:
    chosen, definitions = ("partial", True) if level == "definitions" else (level, False)
    operations.plan_export(source.lake, "dev", chosen, target=there.root, definitions=definitions).execute()
    copy = Aging(Lakehouse(there), there)
    before = files(source.lake)
    append_rows(copy.lake)
    assert files(source.lake) == before, "a write in a copy is one below its own root"
    table_id = copy.lake.snapshot().table("ns", "t").id
    assert owner_path(table_id) in files(copy.lake)
    for aging in [source, copy] if source_first else [copy, source]:
        clean_up(aging)
        assert len(rows(source.lake)) >= len(ROWS) * 2
        assert len(rows(copy.lake)) >= len(ROWS) * 3
    for aging in (copy, source, copy):
        clean_up(aging)
    assert operations.verify(source.lake).is_clean
    assert operations.verify(copy.lake).is_clean
    assert len(rows(copy.lake)) == len(ROWS) * 6
    assert operations.plan_relocation(copy.lake).is_empty


def test_a_partial_export_of_a_managed_table_names_its_source(source: Aging, there: AgingStorage) -> None:
    for level, expected in (("partial", [source.lake.root]), ("full", [])):
        drop_all(Lakehouse(there))
        operations.plan_export(source.lake, f"as {level}".replace(" ", "-"), level, target=there.root).execute()
        assert [record.root for record in Lakehouse(there).snapshot().definition.sources] == expected


@pytest.mark.parametrize("level", ["minimal", "partial", "definitions"])
def test_a_copy_of_a_moved_lakehouse_reads_files_where_its_source_has_them(
    lakes: Lakes, source: Aging, there: AgingStorage, level: str
) -> None:
    storage = lakes.storage("moved")
    moved = Aging(copied(source.lake, storage), AgingStorage(storage, source.clock.now_ms()))
    moved = Aging(Lakehouse(moved.clock), moved.clock)
    drop_all(source.lake)
    before = moved.lake.latest_version()
    operations.plan_relocation(moved.lake).execute()
    chosen, definitions = ("partial", True) if level == "definitions" else (level, False)
    for name, version, target in (("before", before, there), ("after", None, lakes.storage("after"))):
        plan = operations.plan_export(
            moved.lake, name, chosen, version=version, target=target.root, definitions=definitions
        )
        plan.execute()
        copy = Lakehouse(target)
        assert rows(copy) == rows(moved.lake) == [1, 1, 2, 2, 3, 3]
        assert {finding.code for finding in operations.verify(copy, deep=True).findings} <= {"orphans"}
        assert operations.plan_relocation(copy).is_empty
    copy, full = Aging(Lakehouse(there), there), lakes.storage("full")
    append_rows(copy.lake)
    for aging in (moved, copy, moved):
        clean_up(aging)
        assert operations.verify(copy.lake, deep=True).is_clean
    operations.plan_export(copy.lake, "all", "full", target=full.root).execute()
    expected = rows(copy.lake)
    for lake in (moved.lake, copy.lake):
        drop_all(lake)
    assert rows(Lakehouse(full)) == expected == sorted([1, 2, 3] * 4)


def test_where_a_moved_file_stands_is_asked_once(lakes: Lakes, source: Aging, there: AgingStorage) -> None:
    moved = copied(source.lake, lakes.storage("moved"))
    operations.plan_export(moved, "dev", "minimal", target=there.root).execute()
    metered = MeteredStorage(there)
    copy = Lakehouse(metered)
    io = reading_io(copy)
    (task, *_) = catalog_at(Lakehouse(there)).load_table("ns.t").scan().plan_files()
    assert task.file.file_path.startswith(source.lake.root)
    before = metered.snapshot().requests.get("stat", 0)
    found = [io.location(task.file.file_path) for _ in range(3)]
    assert set(found) == {task.file.file_path.replace(source.lake.root, moved.root)}
    assert metered.snapshot().requests.get("stat", 0) - before == 1
    assert {pickle.loads(pickle.dumps(io)).location(one) for one in found} == set(found)


def test_a_definition_that_stands_in_another_lakehouse_keeps_its_place_in_further_copies(
    lakes: Lakes, source: Aging, there: AgingStorage
) -> None:
    further = lakes.storage("further")
    operations.plan_export(source.lake, "one", "partial", target=there.root).execute()
    operations.plan_export(Lakehouse(there), "two", "partial", target=further.root, definitions=True).execute()
    assert rows(Lakehouse(further)) == [1, 1, 2, 2, 3, 3]


def test_a_first_write_that_fails_leaves_a_folder_that_is_known_for_the_copys_own(
    source: Aging, there: AgingStorage
) -> None:
    operations.plan_export(source.lake, "dev", "partial", target=there.root).execute()
    copy = Aging(Lakehouse(there), there)
    transaction = catalog_at(copy.lake).load_table("ns.t").transaction()
    transaction.append(ROWS)
    table_id = copy.lake.snapshot().table("ns", "t").id
    assert owner_path(table_id) in files(copy.lake)
    with copy.lake.transaction() as txn:
        txn.drop_table("ns", "t")
    copy.clean_up()
    assert not [path for path in files(copy.lake) if path.startswith("tables/")]


def test_position_deletes_and_vectors_name_the_files_of_the_new_place(source: Aging, there: AgingStorage) -> None:
    make_later(source.lake, "dv", with_vectors=True)
    positions = make_table(source.lake, "pos")
    first = positions.append(engine_rows(1, 2, 3))
    positions.delete_positions({first: [1]})
    copy = copied(source.lake, there)
    drop_all(source.lake)
    report = operations.plan_relocation(copy).execute()
    assert (report.tables, report.refused) == (("ns.dv", "ns.pos", "ns.t"), {})
    assert EngineTable(copy, "pos").ids() == [1, 3]
    assert EngineTable(copy, "dv").ids() == [2, 2, 3, 3]
    assert operations.plan_relocation(copy).is_empty
    assert operations.verify(copy, deep=True).findings == ()


def test_position_deletes_that_cannot_be_written_anew_are_left_and_the_plan_says_what_to_do(
    source: Aging, there: AgingStorage
) -> None:
    positions = make_table(source.lake, "pos")
    positions.delete_positions({positions.append(engine_rows(1, 2, 3)): [1]}, suffix="orc")
    copy = copied(source.lake, there)
    plan = operations.plan_relocation(copy)
    assert (plan.tables, list(plan.refused)) == (("ns.t",), ["ns.pos"])
    assert "compact-tables" in plan.refused["ns.pos"]
    report = plan.execute()
    assert (report.tables, report.refused) == (plan.tables, plan.refused)


@pytest.mark.parametrize("is_source_gone", [False, True], ids=["copied", "moved"])
def test_a_table_root_that_was_the_own_root_is_given_up(
    source: Aging, there: AgingStorage, is_source_gone: bool
) -> None:
    """Whoever writes the definition may name the root itself: both copies have one id, so each would clean up there."""
    lake = source.lake
    with lake.transaction() as transaction:
        transaction.alter_definition(replace(transaction.definition, table_root=lake.root))
    append_rows(lake)
    n_rows = len(rows(lake))
    copy = copied(lake, there)
    before = files(lake)
    if is_source_gone:
        drop_all(lake)
    append_rows(copy)
    assert len(rows(copy)) == n_rows + 3
    if not is_source_gone:
        with pytest.raises(LocationNotAllowedError):
            catalog_at(copy).create_table("ns.new", ROWS.schema)
        assert files(lake) == before
    found = [finding.code for finding in operations.verify(copy).findings if finding.mend == "relocate"]
    assert found == (["moved"] if is_source_gone else ["table-root-kept", "moved"])
    with pytest.raises((InvalidInputError, LocationNotAllowedError)):
        operations.plan_relocation(copy, lake.root)
    plan = operations.plan_relocation(copy)
    assert plan.left_table_root == lake.root
    plan.execute(plan.digest)
    assert copy.snapshot().definition.table_root == ""
    assert operations.plan_relocation(copy).is_empty
    catalog_at(copy).create_table("ns.new", ROWS.schema).append(ROWS)
    assert catalog_at(copy).load_table("ns.new").location().startswith(copy.root)
    clean_up(Aging(copy, there) if is_source_gone else source)  # which appends once more
    assert len(rows(copy)) == n_rows + (6 if is_source_gone else 3)
    assert operations.verify(copy, deep=True).is_clean


def test_a_plan_to_relocate_reads_the_metadata_of_a_table_once(source: Aging, there: AgingStorage) -> None:
    class ReadsNoted(StorageWrapper):
        def read(self, path: str, **kwargs: Any) -> bytes:
            noted[path] += 1
            return self.inner.read(path, **kwargs)

    with source.lake.transaction() as transaction:
        transaction.alter_definition(replace(transaction.definition, table_root=source.lake.root))
    append_rows(source.lake)
    copy = copied(source.lake, there)
    noted: Counter[str] = Counter()
    plan = operations.plan_relocation(Lakehouse(ReadsNoted(there)))
    assert (plan.left_table_root, len(plan.moved)) == (source.lake.root, 1)
    assert noted[plan.moved[0].files.metadata] == 1
    assert copy.latest_version() == plan.base_version


def test_a_lakehouse_is_made_without_its_own_root_as_table_root(lakes: Lakes) -> None:
    storage = lakes.storage("own")
    lake = Lakehouse.create(storage.root, storage=storage, table_root=storage.root.rstrip("/"))
    assert lake.snapshot().definition.table_root == ""
    lake.alter_definition(table_root=storage.root)
    assert lake.snapshot().definition.table_root == ""
