"""Test maintenance of lakehouses with a damaged table: other tables are maintained, and its files are kept."""

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


class RefusingStorage(StorageWrapper):
    """List some files but fail to return them."""

    refused: Mapping[str, type[StorageError]] = {}

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path in self.refused:
            raise self.refused[path]("the file is not returned", path=path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def refusing_storage(lake: Lakehouse) -> RefusingStorage:
    storage = lake.storage
    while not isinstance(storage, RefusingStorage):
        assert isinstance(storage, StorageWrapper)
        storage = storage.inner
    return storage


def refuse(lake: Lakehouse, path: str, error: type[StorageError]) -> None:
    refusing_storage(lake).refused = {path: error}


def folder_of(lake: Lakehouse, name: str) -> str:
    return catalog_at(lake).load_table(name).location().removeprefix(lake.root) + "/"


def below(lake: Lakehouse, folder: str) -> set[str]:
    return {info.path for info in lake.storage.list(folder)}


def path_of(lake: Lakehouse, manifest: ManifestFile) -> str:
    return manifest.manifest_path.removeprefix(lake.root)


def without_manifest(lake: Lakehouse) -> None:
    lake.storage.delete(path_of(lake, manifests_of(lake, "ns.t")[0]))


def with_garbage(lake: Lakehouse) -> None:
    lake.storage.write(path_of(lake, manifests_of(lake, "ns.t")[0]), b"no Avro")


def with_a_forbidden_manifest(lake: Lakehouse) -> None:
    refuse(lake, path_of(lake, manifests_of(lake, "ns.t")[0]), StoragePermissionError)


def with_an_archived_manifest(lake: Lakehouse) -> None:
    refuse(lake, path_of(lake, manifests_of(lake, "ns.t")[0]), StorageError)


def with_forbidden_metadata(lake: Lakehouse) -> None:
    location = lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    refuse(lake, location, StoragePermissionError)


def with_garbage_metadata(lake: Lakehouse) -> None:
    location = lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    lake.storage.write(location, b'{"format-version": 2')


def with_missing_manifest(lake: Lakehouse) -> None:
    manifest = write_manifest_of(lake, catalog_at(lake).load_table("ns.t"), data_files_of(lake, "ns.t"), EXISTING, 5)
    commit_unchecked(lake, "ns.t", [manifest], 5)
    lake.storage.delete(path_of(lake, manifest))


def with_a_foreign_manifest(lake: Lakehouse) -> None:
    commit_unchecked(lake, "ns.t", manifests_of(lake, "other.o"), 5)


def with_external_file(lake: Lakehouse) -> None:
    (file, *_) = data_files_of(lake, "ns.t")
    file._data[1] = "s3://other/file.parquet"
    commit_unchecked(
        lake, "ns.t", [write_manifest_of(lake, catalog_at(lake).load_table("ns.t"), [file], EXISTING, 5)], 5
    )


DAMAGES = (
    without_manifest,
    with_garbage,
    with_garbage_metadata,
    with_a_forbidden_manifest,
    with_an_archived_manifest,
    with_forbidden_metadata,
    with_missing_manifest,
    with_a_foreign_manifest,
    with_external_file,
)


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damage(request: pytest.FixtureRequest) -> Callable[[Lakehouse], None]:
    damage_function: Callable[[Lakehouse], None] = request.param
    return damage_function


def test_damaged_table_does_not_block_deletions_for_others(lakes: Lakes, damage: Callable[[Lakehouse], None]) -> None:
    aging = Aging.on(RefusingStorage(lakes.storage()))
    lake = aging.lake
    append_rows(lake, "ns.t")
    append_rows(lake, "other.o")
    overwrite_rows(lake, "other.o")
    damage(lake)
    folder, other = lake.snapshot().table("ns", "t").id, folder_of(lake, "other.o")
    own_paths = below(lake, f"tables/{folder}/")
    other_paths = below(lake, other)
    aging.clock.create(f"tables/{folder}/data/stray.parquet", b"")
    aging.clock.create(f"{other}data/stray.parquet", b"")
    aging.later()
    expired = operations.plan_expiration(lake, keeping(1)).execute()
    assert expired.version is not None
    aging.later()
    purged = aging.purge()
    removed = aging.remove_orphans()
    assert purged.is_complete
    assert removed.is_complete
    for report in (purged, removed):
        assert len(report.damaged) == 1
        assert report.to_dict()["damaged"] == report.damaged
    remaining = below(lake, other)
    assert remaining < other_paths, "files of other tables were deleted"
    assert f"{other}data/stray.parquet" not in remaining
    assert catalog_at(lake).load_table("other.o").scan().to_arrow().num_rows == ROWS.num_rows
    assert below(lake, f"tables/{folder}/") == own_paths | {f"tables/{folder}/data/stray.parquet"}
    assert not operations.verify(lake).is_clean


def test_damaged_table_does_not_block_trim_and_compaction_of_others(
    lakes: Lakes, damage: Callable[[Lakehouse], None]
) -> None:
    aging = Aging.on(RefusingStorage(lakes.storage()))
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


def with_a_garbage_data_file(lake: Lakehouse) -> None:
    lake.storage.write(data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root), b"no Parquet")


def with_a_forbidden_data_file(lake: Lakehouse) -> None:
    refuse(lake, data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root), StoragePermissionError)


def with_an_archived_data_file(lake: Lakehouse) -> None:
    refuse(lake, data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root), StorageError)


DATA_DAMAGES = (with_a_garbage_data_file, with_a_forbidden_data_file, with_an_archived_data_file)


@pytest.mark.parametrize("damage", DATA_DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_data_file_does_not_block_compaction_of_others(
    lakes: Lakes, damage: Callable[[Lakehouse], None]
) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=RefusingStorage(lakes.storage()))
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
        append_rows(lake, name)
    damage(lake)
    before = below(lake, folder_of(lake, "ns.t"))
    report = operations.plan_compact_tables(lake, min_input_files=2).execute()
    assert [table.table for table in report.tables] == ["other.o"]
    assert list(report.left) == ["ns.t"]
    assert below(lake, folder_of(lake, "ns.t")) == before
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
    "settings",
    [{"compression-codec": "lzo"}, {"compression-codec": "gzip", "compression-level": "99"}],
    ids=["codec", "level"],
)
def test_unwritable_rows_do_not_block_compaction_of_others(lakes: Lakes, settings: dict[str, str]) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
        append_rows(lake, name)
    with catalog_at(lake).load_table("ns.t").transaction() as change:
        change.set_properties({f"write.parquet.{name}": value for name, value in settings.items()})
    before = below(lake, folder_of(lake, "ns.t"))
    report = operations.plan_compact_tables(lake, min_input_files=2).execute()
    assert [table.table for table in report.tables] == ["other.o"]
    assert list(report.left) == ["ns.t"]
    assert below(lake, folder_of(lake, "ns.t")) == before


def test_damaged_registered_table_does_not_block_deletions_for_others(lakes: Lakes) -> None:
    aging = Aging.on(RefusingStorage(lakes.storage()))
    lake = aging.lake
    append_rows(lake, "ns.t")
    append_rows(lake, "other.o")
    with lake.transaction() as txn:
        txn.create_table("ns", "theirs", replace(txn.table("ns", "t"), table_type="EXTERNAL"))
        txn.drop_table("ns", "t")
    own_paths = below(lake, f"tables/{lake.snapshot().table('ns', 'theirs').id}/")
    manifest = next(path for path in own_paths if path.endswith("-m0.avro"))
    lake.storage.write(manifest, b"no Avro")
    aging.clock.create(f"{folder_of(lake, 'other.o')}data/stray.parquet", b"")
    aging.later()
    removed = aging.remove_orphans()
    assert removed.damaged
    assert removed.files >= 1
    assert below(lake, next(iter(own_paths)).rpartition("/")[0].rpartition("/")[0]) >= own_paths


def test_forbidden_metadata_of_registered_table_blocks_deletions(lakes: Lakes) -> None:
    aging = Aging.on(RefusingStorage(lakes.storage()))
    lake = aging.lake
    append_rows(lake, "ns.t")
    with lake.transaction() as txn:
        txn.create_table("ns", "theirs", replace(txn.table("ns", "t"), table_type="EXTERNAL"))
        txn.drop_table("ns", "t")
    aging.clean_up()  # no kept version has the table as MANAGED
    location = lake.snapshot().table("ns", "theirs").format_properties[METADATA_LOCATION]
    refuse(lake, location, StoragePermissionError)
    stray = f"{location.rpartition('/')[0]}/stray.avro"
    aging.clock.create(stray, b"")
    aging.later()
    with pytest.raises(StoragePermissionError):
        aging.remove_orphans()
    assert lake.storage.exists(stray)


def without_data_file(lake: Lakehouse) -> None:
    lake.storage.delete(data_files_of(lake, "ns.t")[0].file_path.removeprefix(lake.root))


@pytest.mark.parametrize("damage", [*DAMAGES, without_data_file, *DATA_DAMAGES[1:]], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("where", ["here", "away"])
def test_full_export_skips_and_reports_damaged_table(
    lakes: Lakes, damage: Callable[[Lakehouse], None], where: str
) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=RefusingStorage(lakes.storage()))
    for name in ("ns.t", "ns.whole", "other.o"):
        append_rows(lake, name)
    target = lakes.storage("target") if where == "away" else None
    damage(lake)
    for name in ("first", "second"):
        plan = operations.plan_export(lake, name, "full", target=None if target is None else target.root)
        report = plan.execute()
        assert list(report.damaged) == ["ns.t"]
        assert not report.is_complete
        exported = catalog_at(lake, name) if target is None else catalog_at(Lakehouse(target))
        assert exported.list_tables("ns") == [("ns", "whole")]
        for whole in ("ns.whole", "other.o"):
            assert exported.load_table(whole).scan().to_arrow().num_rows == ROWS.num_rows
        assert operations.verify_export(lake, name, deep=True).is_clean
    if target is not None:
        assert operations.verify(Lakehouse(target), deep=True).is_clean


def changed_since(lake: Lakehouse, whole: str) -> int:
    """Change the properties of the damaged table and the rows of another. Returns the version before."""
    before = lake.latest_version()
    with lake.transaction() as txn:
        txn.alter_table("ns", "t", replace(txn.table("ns", "t"), properties={"changed": "later"}))
    overwrite_rows(lake, whole)
    return before


@pytest.mark.parametrize("choice", [{}, {"namespaces": ["ns", "other"]}], ids=["all", "namespaces"])
@pytest.mark.parametrize("damage", [*DAMAGES, without_data_file], ids=lambda damage: damage.__name__)
def test_approved_rollback_restores_damaged_table_and_reports_it(
    lakes: Lakes, damage: Callable[[Lakehouse], None], choice: dict[str, list[str]]
) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=RefusingStorage(lakes.storage()))
    for name in ("ns.t", "other.o"):
        append_rows(lake, name)
    damage(lake)
    target = changed_since(lake, "other.o")
    latest = lake.latest_version()
    plan = operations.plan_rollback(lake, target, **choice)
    assert list(plan.damaged) == ["ns.t"]
    for unapproved in (plan.execute, lambda: operations.rollback(lake, target, **choice)):
        with pytest.raises(DAMAGE):
            unapproved()
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
    lake = Lakehouse.create(lakes.storage().root, storage=RefusingStorage(lakes.storage()))
    for name in ("ns.t", "ns.whole"):
        append_rows(lake, name)
    with_garbage(lake)
    target = changed_since(lake, "ns.whole")
    operations.rollback(lake, target, tables=["ns.whole"])
    assert lake.snapshot().table("ns", "t").properties["changed"] == "later"
    assert lake.snapshot().table("ns", "whole") == lake.snapshot(target).table("ns", "whole")


@pytest.mark.parametrize("choice", [{}, {"namespaces": ["ns"]}], ids=["all", "namespaces"])
def test_rollback_fails_for_damage_missing_from_approved_plan(lakes: Lakes, choice: dict[str, list[str]]) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=RefusingStorage(lakes.storage()))
    for name in ("ns.t", "ns.whole"):
        append_rows(lake, name)
    target = lake.latest_version()
    for name in ("ns.t", "ns.whole"):
        overwrite_rows(lake, name)
    plan = operations.plan_rollback(lake, target, **choice)
    assert not plan.damaged
    lake.storage.delete(lake.snapshot(target).table("ns", "t").format_properties[METADATA_LOCATION])
    latest = lake.latest_version()
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    with pytest.raises(FileMissingError):
        plan.execute()
    assert lake.latest_version() == latest


def test_full_export_fails_without_permission_to_read_any_table(lakes: Lakes) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=RefusingStorage(lakes.storage()))
    append_rows(lake, "ns.t")
    with_a_forbidden_manifest(lake)
    with pytest.raises(StoragePermissionError):
        operations.plan_export(lake, "first", "full", target=lakes.storage("target").root).execute()


@pytest.mark.parametrize("error", [StoragePermissionError, StorageError])
def test_unreadable_owner_file_does_not_block_deletions_for_others(lakes: Lakes, error: type[StorageError]) -> None:
    aging = Aging.on(RefusingStorage(lakes.storage()))
    lake = aging.lake
    append_rows(lake, "ns.t")
    append_rows(lake, "other.o")
    refuse(lake, owner_path(lake.snapshot().table("ns", "t").id), error)
    strays = [f"{folder_of(lake, name)}data/stray.parquet" for name in ("ns.t", "other.o")]
    for stray in strays:
        aging.clock.create(stray, b"")
    aging.later()
    assert aging.remove_orphans().is_complete
    assert [lake.storage.exists(stray) for stray in strays] == [True, False]


def test_damaged_table_does_not_block_relocation_of_others(lakes: Lakes, damage: Callable[[Lakehouse], None]) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=RefusingStorage(lakes.storage()))
    append_rows(lake, "ns.t")
    append_rows(lake, "other.o")
    damage(lake)
    copy_lakehouse(Lakehouse(refusing_storage(lake).inner), lakes.storage("moved"))
    moved = Lakehouse(RefusingStorage(lakes.storage("moved")))
    refusing_storage(moved).refused = refusing_storage(lake).refused
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
    with_garbage(target)
    overwrite_rows(lake, "ns.whole")
    overwrite_rows(lake, "ns.t")
    with lake.transaction() as txn:
        txn.create_namespace("later")
    catalog_at(lake).rename_table("ns.t", "later.renamed")
    latest = lake.latest_version()
    renamed = lake.snapshot().table("later", "renamed")
    plan = operations.plan_restore(lake, "away")
    assert list(plan.damaged) == ["ns.t"]
    for named in (None, ["ns.t"]):
        with pytest.raises(DAMAGE):
            operations.restore_export(lake, "away", tables=named)
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


def with_garbage_in(clone: Lakehouse) -> None:
    table = catalog_at(clone).load_table("ns.t")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    clone.storage.write(snapshot.manifest_list.removeprefix(clone.root), b"no Avro")


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
    with_garbage_in(clone)
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
    with_garbage_in(clone)
    with pytest.raises(CorruptFileError):
        operations.plan_promotion(lake, "copy")
    operations.plan_promotion(lake, "copy", namespaces=["other"]).execute()
    assert catalog_at(lake).load_table("other.o").scan().to_arrow().num_rows == 2 * ROWS.num_rows
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow().num_rows == ROWS.num_rows
