"""Records and clones that somebody wrote by hand: nothing but the clone's own is read, written or deleted for them."""

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

pytestmark = pytest.mark.local_only("folders of one machine")


@pytest.fixture
def lake(lakes: Lakes, tmp_path: Path) -> Lakehouse:
    lake = lakes.local(is_watched=False)
    append_rows(lake)
    operations.plan_clone(lake, f"{tmp_path}/clone", "feature").execute()
    return lake


@pytest.fixture
def clone(lake: Lakehouse, tmp_path: Path) -> Lakehouse:
    return Lakehouse.open(f"{tmp_path}/clone", {"fsync": "false"})


def record_of(lake: Lakehouse) -> ExportRecord:
    (record,) = lake.snapshot().definition.exports
    return record


def everything(folder: Path) -> dict[Path, bytes]:
    background.drain()
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


RECORDS: dict[str, Callable[[ExportRecord], ExportRecord]] = {
    "a manifest of no name of ours": lambda one: replace(one, manifest_path="../../etc/passwd"),
    "no manifest": lambda one: replace(one, manifest_path=""),
    "an id that is none": lambda one: replace(one, clone_id="../../x"),
    "the root of this machine": lambda one: replace(one, target_uri="file:///"),
    "no root": lambda one: replace(one, target_uri=""),
    "a relative root": lambda one: replace(one, target_uri="../x"),
    "a root of an unknown storage": lambda one: replace(one, target_uri="gopher://x/"),
    "a root with dots": lambda one: replace(one, target_uri=f"{one.target_uri}../../"),
    "a bucket of somebody": lambda one: replace(one, target_uri="s3://somebody/lake/"),
    "a time beyond all calendars": lambda one: replace(one, created_at_millis=2**63, retain_until_millis=2**63),
}


@pytest.mark.parametrize("change", RECORDS)
def test_whatever_a_record_says_it_is_listed_and_can_be_forgotten(
    lake: Lakehouse, clone: Lakehouse, tmp_path: Path, change: str
) -> None:
    """One that names no clone hides no other, and none deletes what is not the clone's."""
    good = record_of(lake)
    operations.plan_clone(lake, f"{tmp_path}/other", "other").execute()
    others = [one for one in lake.snapshot().definition.exports if one.name == "other"]
    lake.alter_definition(exports=(RECORDS[change](good), *others))
    before = everything(tmp_path / "clone"), everything(tmp_path / "other")
    listed = {one.name: one.state for one in operations.list_clones(lake)}
    assert listed.keys() == {"feature", "other"}
    assert listed["other"] == CloneState.STANDING
    if listed["feature"] != CloneState.STANDING:
        for work in (operations.compare, operations.plan_promotion, operations.plan_refresh):
            with pytest.raises(TrinityLakeError):
                work(lake, "feature")  # type: ignore[operator]
    operations.drop_clone(lake, "feature")
    assert [one.name for one in operations.list_clones(lake)] == ["other"]
    assert (everything(tmp_path / "clone"), everything(tmp_path / "other")) == before
    assert operations.verify(lake).is_clean


def test_a_version_that_is_kept_for_a_clone_without_record_is_told_and_forgotten(
    lake: Lakehouse, clone: Lakehouse
) -> None:
    append_rows(lake)
    operations.plan_refresh(lake, "feature").execute()
    kept = [one for one in lake.snapshot().definition.exports if one.name != "feature"]
    lake.alter_definition(exports=tuple(kept))
    (found,) = operations.list_clones(lake)
    assert (found.name, found.state) == (kept[0].name, CloneState.STANDING)
    operations.drop_clone(lake, found.name, delete_files=True)
    assert lake.snapshot().definition.exports == ()
    assert files(clone) == set()


def test_a_refresh_in_the_middle_of_a_drop_leaves_no_version_kept(
    lake: Lakehouse, clone: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in time to keep one more version, and not to be seen by whoever drops."""
    append_rows(lake)
    refreshed = operations.plan_refresh(lake, "feature")
    plan = operations.plan_drop_clone(lake, "feature")
    drop_exports = operations.clones.drop.drop_exports

    def later(*arguments: object) -> int:
        refreshed.execute()
        return drop_exports(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(operations.clones.drop, "drop_exports", later)
    plan.execute()
    assert lake.snapshot().definition.exports == ()
    with pytest.raises(ExportNotFoundError):
        operations.compare(lake, "feature")


def altered(clone: Lakehouse, **fields: object) -> None:
    with clone.transaction() as txn:
        definition = txn.table("ns", "t")
        known = {name: getattr(definition, name) for name in TableDef.__dataclass_fields__}
        txn.alter_table("ns", "t", TableDef(**{**known, **fields}))


@pytest.mark.parametrize("identifier", ["../../outside", "/etc", "a/b", "x" * 300])
def test_an_id_of_a_table_is_no_path(lake: Lakehouse, clone: Lakehouse, tmp_path: Path, identifier: str) -> None:
    append_rows(clone)
    before = everything(tmp_path)
    with pytest.raises(TrinityLakeError):
        altered(clone, id=identifier)
        operations.plan_promotion(lake, "feature").execute()
    outside = {path for path in everything(tmp_path).keys() - before.keys() if tmp_path / "clone" not in path.parents}
    assert outside == set()
    assert rows(lake) == [1, 2, 3]


def test_a_drop_follows_no_link(lake: Lakehouse, clone: Lakehouse, tmp_path: Path) -> None:
    append_rows(clone)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "00000-0-data.parquet").write_bytes(b"precious")
    (owned,) = (tmp_path / "clone" / "tables").iterdir()
    (owned / "linked").symlink_to(precious)
    (owned / "data" / "linked.parquet").symlink_to(precious / "00000-0-data.parquet")
    operations.drop_clone(lake, "feature", delete_files=True)
    assert (precious / "00000-0-data.parquet").read_bytes() == b"precious"


def test_two_promotions_at_once_are_one(lake: Lakehouse, clone: Lakehouse) -> None:
    """The second one names what the first one changed; both planned on the same version."""
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
    create(lake, "goes-on")
    assert operations.verify(lake, deep=True).is_clean


@pytest.mark.parametrize("named", ["missing", "dropped", "of another table"])
def test_metadata_of_the_parent_is_promoted_if_it_is_kept_for_the_clone(
    lake: Lakehouse, clone: Lakehouse, named: str
) -> None:
    """A clone that somebody wrote names metadata below the parent's root: a purge may have taken its files."""
    mine = clone.snapshot().table("ns", "t")
    metadata = str(mine.format_properties[METADATA_LOCATION])
    if named == "missing":
        metadata = f"{metadata.rpartition('/')[0]}/00009-nofile.metadata.json"
    elif named == "dropped":
        append_rows(lake)  # its metadata came after the version that is kept
        metadata = to_uri(lake.root, str(lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]))
    with clone.transaction() as txn:
        fields = {**mine.format_properties, METADATA_LOCATION: to_uri(lake.root, metadata)}
        table_id = str(uuid.uuid4()) if named == "of another table" else mine.id
        txn.create_table("ns", "u", replace(mine, id=table_id, format_properties=fields))
        if named != "of another table":
            txn.drop_table("ns", "t")
    before = lake.latest_version()
    with pytest.raises(InvalidInputError):
        operations.plan_promotion(lake, "feature", tables=["ns.t", "ns.u"]).execute()
    assert lake.latest_version() == before
    assert operations.verify(lake, deep=True).is_clean


def test_a_table_that_was_renamed_in_the_clone_keeps_the_parents_files(lake: Lakehouse, clone: Lakehouse) -> None:
    catalog_at(clone).rename_table("ns.t", "ns.renamed")
    operations.plan_promotion(lake, "feature").execute()
    assert lake.snapshot().tables("ns") == ["renamed"]
    assert catalog_at(lake).load_table("ns.renamed").scan().to_arrow()["id"].to_pylist() == [1, 2, 3]
    assert operations.verify(lake, deep=True).is_clean


# --- copies of the parent, which have its records ----------------------------------------------------------------


@pytest.fixture
def copied(lake: Lakehouse, clone: Lakehouse, tmp_path: Path) -> Lakehouse:
    """A plain copy of all files of the parent, after a commit in the clone."""
    append_rows(clone)
    shutil.copytree(lake.root.removeprefix("file://"), tmp_path / "staging")
    return Lakehouse.open(f"{tmp_path}/staging", {"fsync": "false"})


@pytest.mark.parametrize("delete_files", [False, True])
def test_a_copy_of_the_parent_forgets_the_clone_and_leaves_it_alone(
    lake: Lakehouse, clone: Lakehouse, copied: Lakehouse, tmp_path: Path, delete_files: bool
) -> None:
    before = everything(tmp_path / "clone")
    plan = operations.plan_drop_clone(copied, "feature", delete_files=delete_files)
    assert (plan.files, plan.clone_version) == (0, None)
    assert f"belongs to the lakehouse at {lake.root}" in str(plan.reason)
    plan.execute()
    assert operations.list_clones(copied) == []
    assert everything(tmp_path / "clone") == before
    assert [one.state for one in operations.list_clones(lake)] == [CloneState.STANDING]
    assert operations.verify(clone, deep=True).is_clean


@pytest.mark.parametrize("step", [operations.compare, operations.plan_promotion, operations.plan_refresh])
def test_a_copy_of_the_parent_is_told_whose_clone_it_is(
    lake: Lakehouse, copied: Lakehouse, tmp_path: Path, step: Callable[[Lakehouse, str], object]
) -> None:
    before = everything(tmp_path / "clone")
    with pytest.raises(InvalidInputError, match=f"belongs to the lakehouse at {lake.root}"):
        step(copied, "feature")
    (info,) = operations.list_clones(copied)
    assert info.state == CloneState.STANDING
    assert "belongs to the lakehouse" in str(info.reason)
    assert everything(tmp_path / "clone") == before


def test_a_copy_deletes_no_definition_of_a_clone_that_is_being_made(
    lake: Lakehouse, clone: Lakehouse, copied: Lakehouse, tmp_path: Path
) -> None:
    """A clone begins by its definition, and a drop ends by it: then it has no roots."""
    for info in list(clone.storage.list()):
        if root_naming(info.path) is not None:
            clone.storage.delete(info.path)
    before = everything(tmp_path / "clone")
    assert operations.plan_drop_clone(lake, "feature", delete_files=True).files > 0
    assert operations.drop_clone(copied, "feature", delete_files=True).files == 0
    assert everything(tmp_path / "clone") == before


def test_a_parent_by_another_name_is_told_the_name(lake: Lakehouse, clone: Lakehouse, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(lake.root.removeprefix("file://").rstrip("/"))
    linked = Lakehouse.open(f"{tmp_path}/link", {"fsync": "false"})
    append_rows(clone)
    with pytest.raises(InvalidInputError, match=f"--root {lake.root}"):
        operations.plan_promotion(linked, "feature")
    assert operations.plan_drop_clone(linked, "feature", delete_files=True).files == 0


def test_a_parent_that_was_moved_forgets_its_clones(lake: Lakehouse, clone: Lakehouse, tmp_path: Path) -> None:
    before = everything(tmp_path / "clone")
    Path(lake.root.removeprefix("file://")).rename(tmp_path / "moved")
    moved = Lakehouse.open(f"{tmp_path}/moved", {"fsync": "false"})
    operations.drop_clone(moved, "feature", delete_files=True)
    assert operations.list_clones(moved) == []
    assert everything(tmp_path / "clone") == before
