"""Test clones in folders: links, existing files, and empty folders."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.lakes import Lakes, allowing
from tests.operations.changes import append_rows, create
from tests.operations.copies import rows
from tests.storage.file_systems import read_only_modes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    InvalidInputError,
    LocationNotAllowedError,
    MaintenanceBlockedError,
    StoragePermissionError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.format.locations import to_uri

pytestmark = pytest.mark.local_only("folders of one machine")


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    lake = lakes.local(is_watched=False)
    append_rows(lake)
    return lake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "clone"


@pytest.fixture
def clone(lake: Lakehouse, folder: Path) -> Lakehouse:
    operations.plan_clone(lake, str(folder), "feature").execute()
    return Lakehouse.open(str(folder), {"fsync": "false"})


@pytest.mark.parametrize("below", ["", "/deeper/still"])
def test_clone_to_a_file_fails_before_it_is_recorded(lake: Lakehouse, folder: Path, below: str) -> None:
    folder.write_bytes(b"a file")
    before = lake.latest_version()
    for execute in (
        lambda: operations.plan_clone(lake, f"{folder}{below}", "feature").execute(),
        lambda: operations.plan_export(lake, "kept", "full", target=f"{folder}{below}").execute(),
    ):
        with pytest.raises(InvalidInputError):
            execute()
    assert (lake.latest_version(), lake.snapshot().definition.exports) == (before, ())
    assert folder.read_bytes() == b"a file"


def test_clone_to_read_only_folder_fails_before_it_is_recorded() -> None:
    with tempfile.TemporaryDirectory(prefix="trinitylake-test-") as folder:  # every user can enter it
        os.chmod(folder, 0o755)
        lake = Lakehouse.create(f"file://{folder}/lake/", {"fsync": "false"})
        read_only_folder = Path(folder) / "closed"
        read_only_folder.mkdir()
        with read_only_modes(read_only_folder), pytest.raises(StoragePermissionError):
            operations.plan_clone(lake, f"{read_only_folder}/new", "feature")
        assert lake.latest_version() == 0


def test_clone_target_is_checked_after_resolving_links(lake: Lakehouse, lakes: Lakes, tmp_path: Path) -> None:
    root = Path(lake.root.removeprefix("file://"))
    (tmp_path / "link").symlink_to(root)
    (root / "out").symlink_to(tmp_path / "outside")
    link_to_parent_folder = tmp_path / "above"
    link_to_parent_folder.symlink_to(tmp_path)
    for target in (f"{tmp_path}/link/clone", f"{tmp_path}/link", str(link_to_parent_folder)):
        with pytest.raises(InvalidInputError):
            operations.plan_clone(lake, target, "feature")
    with pytest.raises(InvalidInputError):
        operations.plan_clone(lake, f"{root}/out", "feature")
    operations.plan_clone(lake, f"{link_to_parent_folder}/sibling", "feature").execute()
    assert rows(Lakehouse.open(f"{tmp_path}/sibling")) == [1, 2, 3]


def replace_with_link(clone: Lakehouse, kind: str, secret: Path) -> None:
    """Replace a file of the clone, or its folder, with a link, as any user with write access can do."""
    clone_folder = Path(clone.root.removeprefix("file://"))
    (table,) = (clone_folder / "tables").iterdir()
    if kind == "data":
        (file,) = table.glob("data/*.parquet")
        secret.write_bytes(file.read_bytes())
    elif kind == "folder":
        file = table / "data"
        secret = secret.parent / "folder"
        file.rename(secret)
        file.symlink_to(secret)
        return
    else:
        file = next(path for path in table.glob("metadata/*") if path.name.endswith(kind))
        secret.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(secret)


@pytest.mark.parametrize("kind", ["data", "folder", ".avro", ".json"])
def test_promotion_does_not_follow_links_out_of_the_clone(
    lake: Lakehouse, clone: Lakehouse, tmp_path: Path, kind: str
) -> None:
    append_rows(clone)
    replace_with_link(clone, kind, tmp_path / "secret")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    version = lake.latest_version()
    with pytest.raises(StoragePermissionError if kind in ("data", "folder") else LocationNotAllowedError):
        operations.plan_promotion(lake, "feature").execute()
    assert (lake.latest_version(), rows(lake)) == (version, [1, 2, 3])
    remaining = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert not [path for path in remaining if path.suffix == ".parquet"]
    with pytest.raises((StoragePermissionError, LocationNotAllowedError)):
        rows(clone)


def test_drop_does_not_follow_link_created_after_its_plan(
    lake: Lakehouse, clone: Lakehouse, folder: Path, tmp_path: Path
) -> None:
    append_rows(clone)
    plan = operations.plan_drop_clone(lake, "feature", delete_files=True)
    (table,) = (folder / "tables").iterdir()
    linked_folder = tmp_path / "precious"
    (table / "data").rename(linked_folder)
    (table / "data").symlink_to(linked_folder)
    before = {path: path.read_bytes() for path in linked_folder.iterdir()}
    report = plan.execute()
    assert (report.version, report.is_complete) == (None, False)
    assert {path: path.read_bytes() for path in linked_folder.iterdir()} == before
    (table / "data").unlink()
    operations.drop_clone(lake, "feature", delete_files=True)
    assert not folder.exists()


def test_link_to_the_root_of_a_clone_is_followed(lake: Lakehouse, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "disk")
    operations.plan_clone(lake, f"{tmp_path}/linked/feature").execute()
    append_rows(Lakehouse.open(f"{tmp_path}/linked/feature"))
    operations.plan_promotion(lake, "feature").execute()
    assert rows(lake) == [1, 1, 2, 2, 3, 3]


def test_drop_removes_empty_folders(lake: Lakehouse, clone: Lakehouse, folder: Path) -> None:
    append_rows(clone)
    temporary = folder / "_ops" / "tmp" / "of-a-killed-writer"
    temporary.parent.mkdir(exist_ok=True)
    temporary.write_bytes(b"half a file")
    operations.drop_clone(lake, "feature", delete_files=True)
    assert not folder.exists()


def test_drop_keeps_folders_of_other_programs(lake: Lakehouse, clone: Lakehouse, folder: Path) -> None:
    append_rows(clone)
    (folder / "notes" / "empty").mkdir(parents=True)
    (folder / "tables" / "of-others").mkdir()
    (folder / "tables" / "of-others" / "file").write_bytes(b"not ours")
    operations.drop_clone(lake, "feature", delete_files=True)
    remaining = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert remaining == {"notes", "notes/empty", "tables", "tables/of-others", "tables/of-others/file"}


def test_drop_fails_while_parent_has_registered_tables_of_the_clone(
    lake: Lakehouse, clone: Lakehouse, folder: Path
) -> None:
    append_rows(clone, "ns.made")
    definition = clone.snapshot().table("ns", "made")
    metadata = to_uri(clone.root, str(definition.format_properties[METADATA_LOCATION]))
    lake_with_access = allowing(lake, folder)
    operations.register_table(lake_with_access, "ns", "registered", metadata)
    with pytest.raises(MaintenanceBlockedError, match=r"ns\.registered"):
        operations.plan_drop_clone(lake, "feature", delete_files=True)
    operations.plan_drop_clone(lake, "feature")
    with lake.transaction() as txn:
        txn.drop_table("ns", "registered")
    create(lake, "later", "t")
    operations.drop_clone(lake, "feature", delete_files=True)
    assert not folder.exists()


def test_drop_without_files_reports_that_files_remain(lake: Lakehouse, clone: Lakehouse, folder: Path) -> None:
    plan = operations.plan_drop_clone(lake, "feature")
    assert "own files are not deleted" in str(plan)
    report = plan.execute()
    assert (report.files_stay, folder.exists()) == (True, True)
    assert "own files are not deleted" in str(report)
    with pytest.raises(TrinityLakeError):
        operations.plan_drop_clone(lake, "feature")
