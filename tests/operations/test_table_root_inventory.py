"""Test orphan removal under a table root with an inventory of the table root, of the lakehouse, or of both."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from tests.inventories import write_inventory
from tests.lakes import listed
from tests.operations.aging import Aging
from tests.operations.changes import append_rows, drop, overwrite_rows
from tests.operations.copies import rows
from tests.operations.table_roots import NEW_ID, TableRoots, needed_paths, paths_under, put_orphans, table_roots
from trinitylake_ops import operations
from trinitylake_ops.access.allowed_roots import FileAddress
from trinitylake_ops.access.table_owners import add_user
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.file_names import new_node_path, owner_path
from trinitylake_ops.storage import Storage

__all__ = ["table_roots"]

pytestmark = pytest.mark.local_only("opens memory roots without storage options")

LATE_PATH = f"tables/{NEW_ID}/data/late.parquet"


@pytest.fixture
def root(table_roots: TableRoots) -> str:
    """An empty table root in the bucket of the lakehouse."""
    return table_roots.root("bucket/tables")


@pytest.fixture
def aging(table_roots: TableRoots, root: str) -> Aging:
    """A lakehouse with orphans under its root and its table root."""
    aging = table_roots.lake(root, "bucket/lake")
    append_rows(aging.lake)
    overwrite_rows(aging.lake, "ns.t")
    put_orphans(aging, root)
    aging.lake.storage.create(new_node_path(), b"orphan")
    aging.later()
    return aging


def storage_at(aging: Aging, root: str) -> Storage:
    return aging.lake.external_storages.storage_of(FileAddress(root, ""))


def keys(prefix: str, paths: Collection[str]) -> list[str]:
    return [f"{prefix}{path}" for path in sorted(paths)]


def write_inventory_of(folder: Path, aging: Aging, root: str, *, has_lake: bool = True, has_tables: bool = True) -> str:
    """Write an inventory of the bucket of both roots, with the keys of the selected roots."""
    bucket = root.removesuffix("tables/")
    paths = keys("lake/", listed(aging.lake.storage)) if has_lake else []
    paths += keys("tables/", paths_under(root)) if has_tables else []
    return write_inventory(folder, bucket, ["other/key", *paths, "tables/x"])


def test_inventory_of_both_roots_yields_the_same_plan_as_a_listing(aging: Aging, root: str, tmp_path: Path) -> None:
    location = write_inventory_of(tmp_path / "inventory", aging, root)
    plan_with_listing = operations.plan_orphan_removal(aging.lake)
    plan = operations.plan_orphan_removal(aging.lake, inventory=location)
    assert len(plan.paths) == 4
    assert (plan.digest, plan.unowned_files) == (plan_with_listing.digest, plan_with_listing.unowned_files)
    assert plan.execute(plan.digest).files == 4
    append_rows(aging.lake)
    aging.clean_up()
    assert paths_under(root) == needed_paths(aging.lake, root)
    assert len(rows(aging.lake)) > 0
    assert operations.verify(aging.lake, deep=True).findings == ()


@pytest.mark.parametrize(("has_lake", "has_tables"), [(True, False), (False, True), (True, True)])
def test_root_missing_from_the_inventory_is_listed(
    aging: Aging, root: str, tmp_path: Path, has_lake: bool, has_tables: bool
) -> None:
    """A root with files in the inventory is not listed, so newer files are removed with a later inventory."""
    storage_at(aging, root).delete(owner_path(NEW_ID))  # an owner file would cause a listing of the whole folder
    location = write_inventory_of(tmp_path / "inventory", aging, root, has_lake=has_lake, has_tables=has_tables)
    table_id = aging.lake.snapshot().table("ns", "t").id
    node, late_file = new_node_path(), f"tables/{table_id}/data/late.parquet"
    aging.lake.storage.create(node, b"late")
    storage_at(aging, root).create(late_file, b"late")
    aging.later()
    orphans = set(operations.plan_orphan_removal(aging.lake, inventory=location).paths)
    assert f"{root}tables/{table_id}/data/stray.parquet" in orphans
    assert (node in orphans, f"{root}{late_file}" in orphans) == (not has_lake, not has_tables)
    assert orphans <= set(operations.plan_orphan_removal(aging.lake).paths)


def test_table_root_owner_file_is_kept_with_newer_files(aging: Aging, root: str, tmp_path: Path) -> None:
    location = write_inventory_of(tmp_path / "inventory", aging, root)
    storage_at(aging, root).create(LATE_PATH, b"late")
    owner = f"{root}{owner_path(NEW_ID)}"
    aging.later(1)
    assert owner not in operations.plan_orphan_removal(aging.lake, inventory=location).paths
    aging.later()
    plan = operations.plan_orphan_removal(aging.lake, inventory=location)
    assert {owner, f"{root}{LATE_PATH}"} <= set(plan.paths)
    assert plan.execute(plan.digest).is_complete
    assert not any(NEW_ID in path for path in paths_under(root))


def test_inventory_may_cover_only_the_table_root(table_roots: TableRoots, tmp_path: Path) -> None:
    """For example, a catalog in Redis has no inventory, but its tables on S3 have one."""
    root = table_roots.root("tables")
    aging = table_roots.lake(root, "lake")
    append_rows(aging.lake)
    orphans = put_orphans(aging, root)
    drop(aging.lake, "ns", "t")
    aging.later()
    location = write_inventory(tmp_path / "tables", root, sorted(paths_under(root)))
    plan = operations.plan_orphan_removal(aging.lake, inventory=location)
    assert plan.paths == sorted(f"{root}{path}" for path in orphans)
    other = write_inventory(tmp_path / "other", "bucket", ["a"])
    with pytest.raises(InvalidInputError, match=f"covers 's3://bucket/', which does not contain .*{root}"):
        operations.plan_orphan_removal(aging.lake, inventory=other)
    unneeded_inventory = write_inventory(tmp_path / "nothing", root, ["a/x", f"tables/{NEW_ID}/data/stray.parquet"])
    with pytest.raises(InvalidInputError):
        operations.plan_orphan_removal(aging.lake, inventory=unneeded_inventory)


def test_inventory_does_not_delete_files_of_a_copy(aging: Aging, root: str, tmp_path: Path) -> None:
    location = write_inventory_of(tmp_path / "inventory", aging, root)
    add_user(storage_at(aging, root), aging.lake.snapshot().definition.id, "memory://copy/")
    plan = operations.plan_orphan_removal(aging.lake, inventory=location)
    assert not [path for path in plan.paths if path.startswith(root)]
    assert "memory://copy/" in plan.left_table_root
