"""Test forged clone records and clones: no files of other lakehouses are read, written or deleted."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lakes import Lakes
from tests.operations.changes import append_rows, create, overwrite_rows
from tests.operations.copies import files, rows
from trinitylake_ops import Lakehouse, TableDef, operations
from trinitylake_ops.errors import ExportNotFoundError, InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExportRecord
from trinitylake_ops.format.file_names import root_naming
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import CloneState
from trinitylake_ops.storage import background

pytestmark = pytest.mark.local_only("uses local folders")


@pytest.fixture
def lake(lakes: Lakes, tmp_path: Path) -> Lakehouse:
    lake = lakes.local(is_watched=False)
    append_rows(lake)
    operations.plan_clone(lake, f"{tmp_path}/clone", "feature").execute()
    return lake


@pytest.fixture
def clone(lake: Lakehouse, tmp_path: Path) -> Lakehouse:
    return Lakehouse.open(f"{tmp_path}/clone", {"fsync": "false"})


def get_only_record(lake: Lakehouse) -> ExportRecord:
    (record,) = lake.snapshot().definition.exports
    return record


def read_all_files(folder: Path) -> dict[Path, bytes]:
    background.drain()
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FORGED_RECORDS: dict[str, Callable[[ExportRecord], ExportRecord]] = {
    "a manifest with an unknown name": lambda record: replace(record, manifest_path="../../etc/passwd"),
    "no manifest": lambda record: replace(record, manifest_path=""),
    "an invalid id": lambda record: replace(record, clone_id="../../x"),
    "the root of the file system": lambda record: replace(record, target_uri="file:///"),
    "no root": lambda record: replace(record, target_uri=""),
    "a relative root": lambda record: replace(record, target_uri="../x"),
    "a root of an unknown storage": lambda record: replace(record, target_uri="gopher://x/"),
    "a root with dots": lambda record: replace(record, target_uri=f"{record.target_uri}../../"),
    "another user's bucket": lambda record: replace(record, target_uri="s3://other-user/lake/"),
    "a time after the year 9999": lambda record: replace(record, created_at_millis=2**63, retain_until_millis=2**63),
}


@pytest.mark.parametrize("change", FORGED_RECORDS)
def test_invalid_clone_record_is_listed_and_can_be_dropped(
    lake: Lakehouse, clone: Lakehouse, tmp_path: Path, change: str
) -> None:
    """A forged record hides no other clone, and never causes the deletion of other files."""
    record = get_only_record(lake)
    operations.plan_clone(lake, f"{tmp_path}/other", "other").execute()
    other_records = [export for export in lake.snapshot().definition.exports if export.name == "other"]
    lake.alter_definition(exports=(FORGED_RECORDS[change](record), *other_records))
    before = read_all_files(tmp_path / "clone"), read_all_files(tmp_path / "other")
    states = {item.name: item.state for item in operations.list_clones(lake)}
    assert states.keys() == {"feature", "other"}
    assert states["other"] == CloneState.ACTIVE
    if states["feature"] != CloneState.ACTIVE:
        for operation in (operations.compare, operations.plan_promotion, operations.plan_refresh):
            with pytest.raises(TrinityLakeError):
                operation(lake, "feature")  # type: ignore[operator]
    operations.drop_clone(lake, "feature")
    assert [item.name for item in operations.list_clones(lake)] == ["other"]
    assert (read_all_files(tmp_path / "clone"), read_all_files(tmp_path / "other")) == before
    assert operations.verify(lake).is_clean


def test_version_kept_for_unrecorded_clone_is_reported_and_dropped(lake: Lakehouse, clone: Lakehouse) -> None:
    append_rows(lake)
    operations.plan_refresh(lake, "feature").execute()
    kept_records = [export for export in lake.snapshot().definition.exports if export.name != "feature"]
    lake.alter_definition(exports=tuple(kept_records))
    (item,) = operations.list_clones(lake)
    assert (item.name, item.state) == (kept_records[0].name, CloneState.ACTIVE)
    operations.drop_clone(lake, item.name, delete_files=True)
    assert lake.snapshot().definition.exports == ()
    assert files(clone) == set()


def test_refresh_during_drop_leaves_no_kept_version(
    lake: Lakehouse, clone: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refresh adds a record after the plan of the drop was made."""
    append_rows(lake)
    refresh_plan = operations.plan_refresh(lake, "feature")
    plan = operations.plan_drop_clone(lake, "feature")
    drop_exports = operations.clones.drop.drop_exports

    def refresh_and_drop(*arguments: object) -> int:
        refresh_plan.execute()
        return drop_exports(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(operations.clones.drop, "drop_exports", refresh_and_drop)
    plan.execute()
    assert lake.snapshot().definition.exports == ()
    with pytest.raises(ExportNotFoundError):
        operations.compare(lake, "feature")


def alter_table(clone: Lakehouse, **fields: object) -> None:
    with clone.transaction() as txn:
        definition = txn.table("ns", "t")
        current_fields = {name: getattr(definition, name) for name in TableDef.__dataclass_fields__}
        txn.alter_table("ns", "t", TableDef(**{**current_fields, **fields}))


@pytest.mark.parametrize("identifier", ["../../outside", "/etc", "a/b", "x" * 300])
def test_table_id_is_not_used_as_path(lake: Lakehouse, clone: Lakehouse, tmp_path: Path, identifier: str) -> None:
    append_rows(clone)
    before = read_all_files(tmp_path)
    with pytest.raises(TrinityLakeError):
        alter_table(clone, id=identifier)
        operations.plan_promotion(lake, "feature").execute()
    outside = {
        path for path in read_all_files(tmp_path).keys() - before.keys() if tmp_path / "clone" not in path.parents
    }
    assert outside == set()
    assert rows(lake) == [1, 2, 3]


def test_drop_does_not_follow_links(lake: Lakehouse, clone: Lakehouse, tmp_path: Path) -> None:
    append_rows(clone)
    external_folder = tmp_path / "external"
    external_folder.mkdir()
    (external_folder / "00000-0-data.parquet").write_bytes(b"external")
    (table_folder,) = (tmp_path / "clone" / "tables").iterdir()
    (table_folder / "linked").symlink_to(external_folder)
    (table_folder / "data" / "linked.parquet").symlink_to(external_folder / "00000-0-data.parquet")
    operations.drop_clone(lake, "feature", delete_files=True)
    assert (external_folder / "00000-0-data.parquet").read_bytes() == b"external"


def test_concurrent_promotions_commit_once(lake: Lakehouse, clone: Lakehouse) -> None:
    """Both promotions are planned on the same version, and the second conflicts with the first."""
    overwrite_rows(clone, "ns.t")
    append_rows(clone, "new.t")
    plans = [operations.plan_promotion(lake, "feature") for _ in range(2)]
    plans[0].execute()
    before = files(lake)
    with pytest.raises(TrinityLakeError):
        plans[1].execute()
    assert files(lake) == before
    assert rows(lake) == rows(clone)
    assert operations.plan_promotion(lake, "feature").is_empty
    create(lake, "later")
    assert operations.verify(lake, deep=True).is_clean


@pytest.mark.parametrize("metadata_kind", ["missing", "dropped", "of another table"])
def test_parent_metadata_is_promoted_only_if_kept_for_the_clone(
    lake: Lakehouse, clone: Lakehouse, metadata_kind: str
) -> None:
    """A forged clone refers to metadata below the parent's root that may have been purged."""
    definition = clone.snapshot().table("ns", "t")
    location = str(definition.format_properties[METADATA_LOCATION])
    if metadata_kind == "missing":
        location = f"{location.rpartition('/')[0]}/00009-nofile.metadata.json"
    elif metadata_kind == "dropped":
        append_rows(lake)  # the new metadata is not part of the kept version
        location = to_uri(lake.root, str(lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]))
    with clone.transaction() as txn:
        fields = {**definition.format_properties, METADATA_LOCATION: to_uri(lake.root, location)}
        table_id = str(uuid.uuid4()) if metadata_kind == "of another table" else definition.id
        txn.create_table("ns", "u", replace(definition, id=table_id, format_properties=fields))
        if metadata_kind != "of another table":
            txn.drop_table("ns", "t")
    before = lake.latest_version()
    with pytest.raises(InvalidInputError):
        operations.plan_promotion(lake, "feature", tables=["ns.t", "ns.u"]).execute()
    assert lake.latest_version() == before
    assert operations.verify(lake, deep=True).is_clean


def test_table_renamed_in_clone_keeps_parent_files(lake: Lakehouse, clone: Lakehouse) -> None:
    catalog_at(clone).rename_table("ns.t", "ns.renamed")
    operations.plan_promotion(lake, "feature").execute()
    assert lake.snapshot().tables("ns") == ["renamed"]
    assert catalog_at(lake).load_table("ns.renamed").scan().to_arrow()["id"].to_pylist() == [1, 2, 3]
    assert operations.verify(lake, deep=True).is_clean


# Copies of the parent, which contain the same records


@pytest.fixture
def copied_parent(lake: Lakehouse, clone: Lakehouse, tmp_path: Path) -> Lakehouse:
    """A copy of all files of the parent, made after a commit in the clone."""
    append_rows(clone)
    shutil.copytree(lake.root.removeprefix("file://"), tmp_path / "staging")
    return Lakehouse.open(f"{tmp_path}/staging", {"fsync": "false"})


@pytest.mark.parametrize("delete_files", [False, True])
def test_copy_of_parent_drops_only_the_record_of_the_clone(
    lake: Lakehouse, clone: Lakehouse, copied_parent: Lakehouse, tmp_path: Path, delete_files: bool
) -> None:
    before = read_all_files(tmp_path / "clone")
    plan = operations.plan_drop_clone(copied_parent, "feature", delete_files=delete_files)
    assert (plan.files, plan.clone_version) == (0, None)
    assert f"belongs to the lakehouse at {lake.root}" in str(plan.reason)
    plan.execute()
    assert operations.list_clones(copied_parent) == []
    assert read_all_files(tmp_path / "clone") == before
    assert [item.state for item in operations.list_clones(lake)] == [CloneState.ACTIVE]
    assert operations.verify(clone, deep=True).is_clean


@pytest.mark.parametrize("operation", [operations.compare, operations.plan_promotion, operations.plan_refresh])
def test_copy_of_parent_reports_the_owner_of_the_clone(
    lake: Lakehouse, copied_parent: Lakehouse, tmp_path: Path, operation: Callable[[Lakehouse, str], object]
) -> None:
    before = read_all_files(tmp_path / "clone")
    with pytest.raises(InvalidInputError, match=f"belongs to the lakehouse at {lake.root}"):
        operation(copied_parent, "feature")
    (info,) = operations.list_clones(copied_parent)
    assert info.state == CloneState.ACTIVE
    assert "belongs to the lakehouse" in str(info.reason)
    assert read_all_files(tmp_path / "clone") == before


def test_copy_of_parent_keeps_definition_of_incomplete_clone(
    lake: Lakehouse, clone: Lakehouse, copied_parent: Lakehouse, tmp_path: Path
) -> None:
    """A clone has only a definition at the start of its creation and at the end of its drop."""
    for info in list(clone.storage.list()):
        if root_naming(info.path) is not None:
            clone.storage.delete(info.path)
    before = read_all_files(tmp_path / "clone")
    assert operations.plan_drop_clone(lake, "feature", delete_files=True).files > 0
    assert operations.drop_clone(copied_parent, "feature", delete_files=True).files == 0
    assert read_all_files(tmp_path / "clone") == before


def test_error_names_the_recorded_root_of_the_parent(lake: Lakehouse, clone: Lakehouse, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(lake.root.removeprefix("file://").rstrip("/"))
    linked_parent = Lakehouse.open(f"{tmp_path}/link", {"fsync": "false"})
    append_rows(clone)
    with pytest.raises(InvalidInputError, match=f"--root {lake.root}"):
        operations.plan_promotion(linked_parent, "feature")
    assert operations.plan_drop_clone(linked_parent, "feature", delete_files=True).files == 0


def test_moved_parent_drops_only_records_of_its_clones(lake: Lakehouse, clone: Lakehouse, tmp_path: Path) -> None:
    before = read_all_files(tmp_path / "clone")
    Path(lake.root.removeprefix("file://")).rename(tmp_path / "moved")
    moved_parent = Lakehouse.open(f"{tmp_path}/moved", {"fsync": "false"})
    operations.drop_clone(moved_parent, "feature", delete_files=True)
    assert operations.list_clones(moved_parent) == []
    assert read_all_files(tmp_path / "clone") == before
