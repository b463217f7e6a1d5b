"""Test maintenance of lakehouses with a damaged table: its files are kept, and other tables are maintained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from pyiceberg.manifest import ManifestEntryStatus, ManifestFile

from tests.foreign_files import commit_unchecked, data_files_of, manifests_of, write_manifest_of
from tests.lakes import Lakes
from tests.operations.aging import Aging, keeping
from tests.operations.changes import ROWS, append_rows, overwrite_rows
from tests.operations.copies import copy_lakehouse
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    PlanChangedError,
    StorageError,
    StoragePermissionError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.storage import StorageWrapper

EXISTING = ManifestEntryStatus.EXISTING


class FailingReadStorage(StorageWrapper):
    """A storage that lists all files but fails to read some of them."""

    read_errors: Mapping[str, type[StorageError]] = {}

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path in self.read_errors:
            raise self.read_errors[path]("injected: unreadable", path=path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def failing_storage(lake: Lakehouse) -> FailingReadStorage:
    storage = lake.storage
    while not isinstance(storage, FailingReadStorage):
        assert isinstance(storage, StorageWrapper)
        storage = storage.inner
    return storage


def fail_reads(lake: Lakehouse, path: str, error: type[StorageError]) -> None:
    failing_storage(lake).read_errors = {path: error}


def folder_of(lake: Lakehouse, name: str) -> str:
    return catalog_at(lake).load_table(name).location().removeprefix(lake.root) + "/"


def paths_below(lake: Lakehouse, folder: str) -> set[str]:
    return {info.path for info in lake.storage.list(folder)}


def manifest_path(lake: Lakehouse, manifest: ManifestFile) -> str:
    return manifest.manifest_path.removeprefix(lake.root)


def delete_manifest(lake: Lakehouse) -> None:
    lake.storage.delete(manifest_path(lake, manifests_of(lake, "ns.t")[0]))


def write_garbage_manifest(lake: Lakehouse) -> None:
    lake.storage.write(manifest_path(lake, manifests_of(lake, "ns.t")[0]), b"not Avro")


def forbid_manifest(lake: Lakehouse) -> None:
    fail_reads(lake, manifest_path(lake, manifests_of(lake, "ns.t")[0]), StoragePermissionError)


def archive_manifest(lake: Lakehouse) -> None:
    fail_reads(lake, manifest_path(lake, manifests_of(lake, "ns.t")[0]), StorageError)


def forbid_metadata(lake: Lakehouse) -> None:
    location = lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    fail_reads(lake, location, StoragePermissionError)


def write_garbage_metadata(lake: Lakehouse) -> None:
    location = lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    lake.storage.write(location, b'{"format-version": 2')


def commit_missing_manifest(lake: Lakehouse) -> None:
    manifest = write_manifest_of(lake, catalog_at(lake).load_table("ns.t"), data_files_of(lake, "ns.t"), EXISTING, 5)
    commit_unchecked(lake, "ns.t", [manifest], 5)
    lake.storage.delete(manifest_path(lake, manifest))


def commit_manifest_of_another_table(lake: Lakehouse) -> None:
    commit_unchecked(lake, "ns.t", manifests_of(lake, "other.o"), 5)


def commit_external_file(lake: Lakehouse) -> None:
    (file, *_) = data_files_of(lake, "ns.t")
    file._data[1] = "s3://other/file.parquet"
    commit_unchecked(
        lake, "ns.t", [write_manifest_of(lake, catalog_at(lake).load_table("ns.t"), [file], EXISTING, 5)], 5
    )


DAMAGES = (
    delete_manifest,
    write_garbage_manifest,
    write_garbage_metadata,
    forbid_manifest,
    archive_manifest,
    forbid_metadata,
    commit_missing_manifest,
    commit_manifest_of_another_table,
    commit_external_file,
)


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damage(request: pytest.FixtureRequest) -> Callable[[Lakehouse], None]:
    damage_function: Callable[[Lakehouse], None] = request.param
    return damage_function


def test_damaged_table_does_not_block_deletions_for_others(lakes: Lakes, damage: Callable[[Lakehouse], None]) -> None:
    aging = Aging.on(FailingReadStorage(lakes.storage()))
    lake = aging.lake
    append_rows(lake, "ns.t")
    append_rows(lake, "other.o")
    overwrite_rows(lake, "other.o")
    damage(lake)
    table_id, other_folder = lake.snapshot().table("ns", "t").id, folder_of(lake, "other.o")
    kept_paths = paths_below(lake, f"tables/{table_id}/")
    other_paths = paths_below(lake, other_folder)
    aging.clock.create(f"tables/{table_id}/data/stray.parquet", b"")
    aging.clock.create(f"{other_folder}data/stray.parquet", b"")
    aging.later()
    expiration = operations.plan_expiration(lake, keeping(1)).execute()
    assert expiration.version is not None
    aging.later()
    purged = aging.purge()
    removed = aging.remove_orphans()
    assert purged.is_complete
    assert removed.is_complete
    for report in (purged, removed):
        assert len(report.damaged) == 1
        assert report.to_dict()["damaged"] == report.damaged
    remaining = paths_below(lake, other_folder)
    assert remaining < other_paths, "files of other tables are deleted"
    assert f"{other_folder}data/stray.parquet" not in remaining
    assert catalog_at(lake).load_table("other.o").scan().to_arrow().num_rows == ROWS.num_rows
    assert paths_below(lake, f"tables/{table_id}/") == kept_paths | {f"tables/{table_id}/data/stray.parquet"}
    assert not operations.verify(lake).is_clean


def test_damaged_table_does_not_block_trim_and_compaction_of_others(
    lakes: Lakes, damage: Callable[[Lakehouse], None]
) -> None:
    aging = Aging.on(FailingReadStorage(lakes.storage()))
    lake = aging.lake
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
        append_rows(lake, name)
    damage(lake)
    aging.later()
    compacted = operations.plan_compact_tables(lake, min_input_files=2)
    assert list(compacted.left) == ["ns.t"]
    assert [table.table for table in compacted.execute().tables] == ["other.o"]
    trimmed = operations.plan_trim_tables(lake, keeping(1)).execute()
    assert "other.o" in trimmed.tables


def write_garbage_data_file(lake: Lakehouse) -> None:
    lake.storage.write(data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root), b"not Parquet")


def forbid_data_file(lake: Lakehouse) -> None:
    fail_reads(lake, data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root), StoragePermissionError)


def archive_data_file(lake: Lakehouse) -> None:
    fail_reads(lake, data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root), StorageError)


DATA_DAMAGES = (write_garbage_data_file, forbid_data_file, archive_data_file)


@pytest.mark.parametrize("damage", DATA_DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_data_file_does_not_block_compaction_of_others(
    lakes: Lakes, damage: Callable[[Lakehouse], None]
) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=FailingReadStorage(lakes.storage()))
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
        append_rows(lake, name)
    damage(lake)
    before = paths_below(lake, folder_of(lake, "ns.t"))
    report = operations.plan_compact_tables(lake, min_input_files=2).execute()
    assert [table.table for table in report.tables] == ["other.o"]
    assert list(report.left) == ["ns.t"]
    assert paths_below(lake, folder_of(lake, "ns.t")) == before
    assert catalog_at(lake).load_table("other.o").scan().to_arrow().num_rows == 2 * ROWS.num_rows


class CountingStorage(StorageWrapper):
    """Count the bytes read from data files."""

    n_bytes = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        data = super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        self.n_bytes += len(data) if path.endswith(".parquet") else 0
        return data


def test_compaction_does_not_read_data_file_larger_than_listed(lakes: Lakes) -> None:
    storage = CountingStorage(lakes.storage())
    lake = Lakehouse.create(storage.root, storage=storage)
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
        append_rows(lake, name)
    path = data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root)
    lake.storage.write(path, lake.storage.read(path) + bytes(5_000_000))
    storage.n_bytes = 0
    report = operations.plan_compact_tables(lake, min_input_files=2).execute()
    assert [table.table for table in report.tables] == ["other.o"]
    assert "larger than" in report.left["ns.t"]
    assert storage.n_bytes < 1_000_000


@pytest.mark.parametrize(
    "options",
    [{"compression-codec": "lzo"}, {"compression-codec": "gzip", "compression-level": "99"}],
    ids=["codec", "level"],
)
def test_unwritable_rows_do_not_block_compaction_of_others(lakes: Lakes, options: dict[str, str]) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
        append_rows(lake, name)
    with catalog_at(lake).load_table("ns.t").transaction() as transaction:
        transaction.set_properties({f"write.parquet.{name}": value for name, value in options.items()})
    before = paths_below(lake, folder_of(lake, "ns.t"))
    report = operations.plan_compact_tables(lake, min_input_files=2).execute()
    assert [table.table for table in report.tables] == ["other.o"]
    assert list(report.left) == ["ns.t"]
    assert paths_below(lake, folder_of(lake, "ns.t")) == before


def test_damaged_registered_table_does_not_block_deletions_for_others(lakes: Lakes) -> None:
    aging = Aging.on(FailingReadStorage(lakes.storage()))
    lake = aging.lake
    append_rows(lake, "ns.t")
    append_rows(lake, "other.o")
    with lake.transaction() as txn:
        txn.create_table("ns", "theirs", replace(txn.table("ns", "t"), table_type="EXTERNAL"))
        txn.drop_table("ns", "t")
    kept_paths = paths_below(lake, f"tables/{lake.snapshot().table('ns', 'theirs').id}/")
    manifest = next(path for path in kept_paths if path.endswith("-m0.avro"))
    lake.storage.write(manifest, b"not Avro")
    aging.clock.create(f"{folder_of(lake, 'other.o')}data/stray.parquet", b"")
    aging.later()
    removed = aging.remove_orphans()
    assert removed.damaged
    assert removed.files >= 1
    assert paths_below(lake, next(iter(kept_paths)).rpartition("/")[0].rpartition("/")[0]) >= kept_paths


def test_forbidden_metadata_of_registered_table_blocks_deletions(lakes: Lakes) -> None:
    aging = Aging.on(FailingReadStorage(lakes.storage()))
    lake = aging.lake
    append_rows(lake, "ns.t")
    with lake.transaction() as txn:
        txn.create_table("ns", "theirs", replace(txn.table("ns", "t"), table_type="EXTERNAL"))
        txn.drop_table("ns", "t")
    aging.clean_up()  # removes versions in which the table is MANAGED
    location = lake.snapshot().table("ns", "theirs").format_properties[METADATA_LOCATION]
    fail_reads(lake, location, StoragePermissionError)
    stray = f"{location.rpartition('/')[0]}/stray.avro"
    aging.clock.create(stray, b"")
    aging.later()
    with pytest.raises(StoragePermissionError):
        aging.remove_orphans()
    assert lake.storage.exists(stray)


def delete_data_file(lake: Lakehouse) -> None:
    lake.storage.delete(data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root))


@pytest.mark.parametrize("damage", [*DAMAGES, delete_data_file, *DATA_DAMAGES[1:]], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("location", ["same-lakehouse", "another-root"])
def test_full_export_skips_and_reports_damaged_table(
    lakes: Lakes, damage: Callable[[Lakehouse], None], location: str
) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=FailingReadStorage(lakes.storage()))
    for name in ("ns.t", "ns.whole", "other.o"):
        append_rows(lake, name)
    target = lakes.storage("target") if location == "another-root" else None
    damage(lake)
    for name in ("first", "second"):
        plan = operations.plan_export(lake, name, "full", target=None if target is None else target.root)
        report = plan.execute()
        assert list(report.damaged) == ["ns.t"]
        assert not report.is_complete
        exported = catalog_at(lake, name) if target is None else catalog_at(Lakehouse(target))
        assert exported.list_tables("ns") == [("ns", "whole")]
        for table in ("ns.whole", "other.o"):
            assert exported.load_table(table).scan().to_arrow().num_rows == ROWS.num_rows
        assert operations.verify_export(lake, name, deep=True).is_clean
    if target is not None:
        assert operations.verify(Lakehouse(target), deep=True).is_clean


def change_tables(lake: Lakehouse, name: str) -> int:
    """Change the properties of the damaged table and the rows of another. Return the version before both changes."""
    before = lake.latest_version()
    with lake.transaction() as txn:
        txn.alter_table("ns", "t", replace(txn.table("ns", "t"), properties={"changed": "later"}))
    overwrite_rows(lake, name)
    return before


@pytest.mark.parametrize("selection", [{}, {"namespaces": ["ns", "other"]}], ids=["all", "namespaces"])
@pytest.mark.parametrize("damage", [*DAMAGES, delete_data_file], ids=lambda damage: damage.__name__)
def test_approved_rollback_restores_damaged_table_and_reports_it(
    lakes: Lakes, damage: Callable[[Lakehouse], None], selection: dict[str, list[str]]
) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=FailingReadStorage(lakes.storage()))
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
    damage(lake)
    target = change_tables(lake, "other.o")
    latest = lake.latest_version()
    plan = operations.plan_rollback(lake, target, **selection)
    assert list(plan.damaged) == ["ns.t"]
    for execute in (plan.execute, lambda: operations.rollback(lake, target, **selection)):
        with pytest.raises(DAMAGE):
            execute()
    with pytest.raises(DAMAGE):
        operations.plan_rollback(lake, target, tables=["ns.t"])
    assert lake.latest_version() == latest
    report = plan.execute(plan.digest)
    assert report.version == latest + 1
    assert report.damaged == plan.damaged
    assert not report.is_complete
    assert lake.snapshot().table("ns", "t") == lake.snapshot(target).table("ns", "t")
    assert catalog_at(lake).load_table("other.o").scan().to_arrow().num_rows == ROWS.num_rows


def test_rollback_of_other_tables_needs_no_approval(lakes: Lakes) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=FailingReadStorage(lakes.storage()))
    for name in ("ns.t", "ns.whole"):
        append_rows(lake, name)
    write_garbage_manifest(lake)
    target = change_tables(lake, "ns.whole")
    operations.rollback(lake, target, tables=["ns.whole"])
    assert lake.snapshot().table("ns", "t").properties["changed"] == "later"
    assert lake.snapshot().table("ns", "whole") == lake.snapshot(target).table("ns", "whole")


@pytest.mark.parametrize("selection", [{}, {"namespaces": ["ns"]}], ids=["all", "namespaces"])
def test_rollback_fails_for_damage_missing_from_approved_plan(lakes: Lakes, selection: dict[str, list[str]]) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=FailingReadStorage(lakes.storage()))
    for name in ("ns.t", "ns.whole"):
        append_rows(lake, name)
    target = lake.latest_version()
    for name in ("ns.t", "ns.whole"):
        overwrite_rows(lake, name)
    plan = operations.plan_rollback(lake, target, **selection)
    assert not plan.damaged
    lake.storage.delete(lake.snapshot(target).table("ns", "t").format_properties[METADATA_LOCATION])
    latest = lake.latest_version()
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    with pytest.raises(FileMissingError):
        plan.execute()
    assert lake.latest_version() == latest


def test_full_export_fails_without_permission_to_read_any_table(lakes: Lakes) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=FailingReadStorage(lakes.storage()))
    append_rows(lake, "ns.t")
    forbid_manifest(lake)
    with pytest.raises(StoragePermissionError):
        operations.plan_export(lake, "first", "full", target=lakes.storage("target").root).execute()


@pytest.mark.parametrize("error", [StoragePermissionError, StorageError])
def test_unreadable_owner_file_does_not_block_deletions_for_others(lakes: Lakes, error: type[StorageError]) -> None:
    aging = Aging.on(FailingReadStorage(lakes.storage()))
    lake = aging.lake
    append_rows(lake, "ns.t")
    append_rows(lake, "other.o")
    fail_reads(lake, owner_path(lake.snapshot().table("ns", "t").id), error)
    stray_paths = [f"{folder_of(lake, name)}data/stray.parquet" for name in ("ns.t", "other.o")]
    for path in stray_paths:
        aging.clock.create(path, b"")
    aging.later()
    assert aging.remove_orphans().is_complete
    assert [lake.storage.exists(path) for path in stray_paths] == [True, False]


def test_damaged_table_does_not_block_relocation_of_others(lakes: Lakes, damage: Callable[[Lakehouse], None]) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=FailingReadStorage(lakes.storage()))
    append_rows(lake, "ns.t")
    append_rows(lake, "other.o")
    damage(lake)
    copy_lakehouse(Lakehouse(failing_storage(lake).inner), lakes.storage("moved"))
    moved = Lakehouse(FailingReadStorage(lakes.storage("moved")))
    failing_storage(moved).read_errors = failing_storage(lake).read_errors
    report = operations.plan_relocation(moved).execute()
    assert report.tables == ("other.o",)
    assert list(report.refused) == ["ns.t"]
    assert catalog_at(moved).load_table("other.o").scan().to_arrow().num_rows == ROWS.num_rows


def test_restore_keeps_current_state_of_damaged_table(lakes: Lakes) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    for name in ("ns.t", "ns.whole"):
        append_rows(lake, name)
    target = Lakehouse(lakes.storage("target"))
    operations.plan_export(lake, "away", "full", target=target.root).execute()
    write_garbage_manifest(target)
    overwrite_rows(lake, "ns.whole")
    overwrite_rows(lake, "ns.t")
    with lake.transaction() as txn:
        txn.create_namespace("later")
    catalog_at(lake).rename_table("ns.t", "later.renamed")
    latest = lake.latest_version()
    renamed = lake.snapshot().table("later", "renamed")
    plan = operations.plan_restore(lake, "away")
    assert list(plan.damaged) == ["ns.t"]
    for tables in (None, ["ns.t"]):
        with pytest.raises(DAMAGE):
            operations.restore_export(lake, "away", tables=tables)
    assert lake.latest_version() == latest
    report = plan.execute(plan.digest)
    assert report.version == latest + 1
    assert list(report.damaged) == ["ns.t"]
    assert catalog_at(lake).load_table("ns.whole").scan().to_arrow().num_rows == ROWS.num_rows
    assert lake.snapshot().table("later", "renamed") == renamed
    assert not lake.snapshot().has_table("ns", "t")
    assert operations.verify(lake, deep=True).is_clean


def test_export_continues_with_damaged_table_at_target(lakes: Lakes) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    for name in ("ns.t", "ns.whole"):
        append_rows(lake, name)
    target = Lakehouse(lakes.storage("target"))
    operations.plan_export(lake, "first", "full", target=target.root).execute()
    location = target.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    target.storage.write(location, b'{"format-version": 2')
    for name in ("ns.t", "ns.whole"):
        append_rows(lake, name)
    report = operations.plan_export(lake, "second", "full", target=target.root).execute()
    assert report.is_complete
    for name in ("ns.t", "ns.whole"):
        assert catalog_at(target).load_table(name).scan().to_arrow().num_rows == 2 * ROWS.num_rows


def write_garbage_manifest_list(clone: Lakehouse) -> None:
    table = catalog_at(clone).load_table("ns.t")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    clone.storage.write(snapshot.manifest_list.removeprefix(clone.root), b"not Avro")


def test_damaged_table_of_clone_does_not_block_merging_of_others(lakes: Lakes) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
    clone_storage = lakes.storage("clone")
    operations.plan_clone(lake, clone_storage.root, "copy").execute()
    clone = Lakehouse(clone_storage)
    append_rows(lake, "ns.t")
    append_rows(clone, "ns.t")
    append_rows(clone, "other.o")
    write_garbage_manifest_list(clone)
    for plan in (operations.plan_refresh(lake, "copy"), operations.plan_promotion(lake, "copy")):
        assert [conflict.name for conflict in plan.conflicts] == ["ns.t"]
    operations.plan_promotion(lake, "copy", ours=["ns.t"]).execute()
    assert catalog_at(lake).load_table("other.o").scan().to_arrow().num_rows == 2 * ROWS.num_rows
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow().num_rows == 2 * ROWS.num_rows
    operations.plan_refresh(lake, "copy", theirs=["ns.t"]).execute()
    assert catalog_at(clone).load_table("ns.t").scan().to_arrow().num_rows == 2 * ROWS.num_rows


def test_table_damaged_only_in_clone_does_not_block_promotion_of_selected_tables(lakes: Lakes) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
    clone_storage = lakes.storage("clone")
    operations.plan_clone(lake, clone_storage.root, "copy").execute()
    clone = Lakehouse(clone_storage)
    for name in ("ns.t", "other.o"):
        append_rows(clone, name)
    write_garbage_manifest_list(clone)
    with pytest.raises(CorruptFileError):
        operations.plan_promotion(lake, "copy")
    operations.plan_promotion(lake, "copy", namespaces=["other"]).execute()
    assert catalog_at(lake).load_table("other.o").scan().to_arrow().num_rows == 2 * ROWS.num_rows
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow().num_rows == ROWS.num_rows
