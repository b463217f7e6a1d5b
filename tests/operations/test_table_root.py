"""Test operations on a lakehouse with a table root: which files they delete, and which files they keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from tests.clock import AgingStorage
from tests.operations.aging import DAY_MS, Aging, keeping
from tests.operations.changes import ROWS, append_rows, drop, overwrite_rows
from tests.operations.copies import clean_up, copy_lakehouse, delete_all_files, rows
from tests.operations.table_roots import NEW_ID, TableRoots, needed_paths, paths_under, put_orphans, table_roots
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.access.allowed_roots import FileAddress
from trinitylake_ops.access.table_owners import TableUser, add_user, claim_table_root, users_of
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.errors import (
    FileMissingError,
    InvalidDefinitionError,
    InvalidInputError,
    LocationNotAllowedError,
    MaintenanceBlockedError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.gc.mark import Mark
from trinitylake_ops.operations.gc.survey import survey_versions
from trinitylake_ops.operations.gc.unreached import delete_unreached, unreached
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.storage import Storage, open_storage

__all__ = ["table_roots"]

pytestmark = pytest.mark.local_only("opens memory roots without storage options")


@pytest.fixture
def root(table_roots: TableRoots) -> str:
    """An empty table root."""
    return table_roots.root()


@pytest.fixture
def aging(table_roots: TableRoots, root: str) -> Aging:
    """A lakehouse with a table under its table root that also has unneeded files."""
    aging = table_roots.lake(root)
    append_rows(aging.lake)
    overwrite_rows(aging.lake, "ns.t")
    return aging


def copy_of(aging: Aging, table_roots: TableRoots) -> Aging:
    """Copy the files of a lakehouse, except those under its table root."""
    storage = table_roots.lakes.storage("copy")
    clock = AgingStorage(storage, aging.clock.time_ms)
    return Aging(copy_lakehouse(aging.lake, clock), clock)


def test_unneeded_files_under_the_table_root_are_deleted(aging: Aging, root: str) -> None:
    lake = aging.lake
    assert list(lake.storage.list("tables/")) == []
    put_orphans(aging, root)
    before = rows(lake)
    clean_up(aging)
    assert len(rows(lake)) == len(before) + 3
    assert paths_under(root) == needed_paths(lake, root)
    report = operations.verify(lake, deep=True)
    assert (report.findings, report.orphan_files) == ((), 0)
    drop(lake, "ns", "t")
    operations.compact(lake)
    aging.clean_up()
    assert paths_under(root) == {TableUser(lake.snapshot().definition.id, lake.root).path}


def test_plans_list_table_root_files_by_uri(aging: Aging, root: str) -> None:
    lake = aging.lake
    orphan_paths = put_orphans(aging, root)
    assert operations.plan_orphan_removal(lake).is_empty, "the files are too young"
    aging.later()
    plan = operations.plan_orphan_removal(lake)
    assert plan.paths == sorted(f"{root}{path}" for path in orphan_paths)
    assert plan.files == {"table file": 3}
    assert operations.verify(lake).orphan_files == 3
    assert plan.execute(plan.digest).files == 3
    assert paths_under(root).isdisjoint(orphan_paths)
    operations.plan_trim_tables(lake, keeping(1)).execute()
    aging.later()
    expiration_plan = operations.plan_expiration(lake, keeping(1))
    reclaimed_uris = {path for path in expiration_plan.freed.sizes_bytes if path.startswith(root)}
    assert {path.removeprefix(root) for path in reclaimed_uris} == paths_under(root) - needed_paths(lake, root)
    expiration_plan.execute()
    aging.later()
    assert operations.plan_purge(lake).sizes_bytes.keys() >= reclaimed_uris
    purged = operations.plan_purge(lake).execute(budget=operations.Budget(requests_per_second=10_000))
    assert purged.is_complete
    assert paths_under(root) == needed_paths(lake, root)


def test_slow_clock_of_the_table_root_does_not_age_files(
    aging: Aging, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files under the table root have times of its clock, so a new file seems old by the lakehouse's clock."""
    put_orphans(aging, root)
    storage = aging.lake.external_storages.storage_of(FileAddress(root, ""))
    now_ms = aging.clock.time_ms
    aging.later(3 * DAY_MS)
    monkeypatch.setattr(type(storage), "now_ms", lambda _self: now_ms)
    assert operations.plan_orphan_removal(aging.lake).is_empty
    monkeypatch.undo()


def test_foreign_files_under_the_table_root_are_kept(aging: Aging, table_roots: TableRoots, root: str) -> None:
    """Two lakehouses share a table root that also contains other files."""
    other = table_roots.lake(root, "other")
    append_rows(other.lake)
    foreign_paths = {
        "tables/unowned/data/1.parquet",
        "tables/damaged/_owner.json",
        "tables/damaged/data/1",
        "notes.txt",
        "tables/x",
    }
    storage = open_storage(root)
    for path in foreign_paths:
        storage.create(path, b"foreign")
    put_orphans(aging, root)
    clean_up(aging)
    assert paths_under(root) == needed_paths(aging.lake, root) | needed_files_of(other.lake, root) | foreign_paths
    assert rows(other.lake) == [1, 2, 3]
    before = needed_paths(aging.lake, root)
    clean_up(other)
    drop(other.lake, "ns", "t")
    operations.compact(other.lake)
    other.clean_up()
    user = TableUser(other.lake.snapshot().definition.id, other.lake.root).path
    assert paths_under(root) == before | {user} | foreign_paths
    assert operations.verify(aging.lake, deep=True).findings == ()


def needed_files_of(lake: Lakehouse, root: str) -> set[str]:
    """Return the needed files in the folder of the lakehouse's only table, including the owner file."""
    table_id = lake.snapshot().table("ns", "t").id
    paths = {path for path in paths_under(root) if path.startswith(f"tables/{table_id}/")}
    return paths | {TableUser(lake.snapshot().definition.id, lake.root).path}


def test_copy_does_not_delete_files_of_its_original(aging: Aging, table_roots: TableRoots, root: str) -> None:
    """Both lakehouses have the same id, so owner files do not distinguish them."""
    copy = copy_of(aging, table_roots)
    before = paths_under(root)
    copy.later()
    plan = operations.plan_trim_tables(copy.lake, keeping(1))
    assert plan.tables, "the copy has the same snapshots"
    copy.expire()
    copy.later()
    copy.purge()
    copy.remove_orphans()
    assert paths_under(root) == before
    title = str(operations.plan_orphan_removal(copy.lake).table().title)
    assert f"files under the table root {root} are kept" in title
    assert f"the lakehouse at {aging.lake.root!r} with the same id" in title
    assert [entry.code for entry in operations.verify(copy.lake).findings if entry.path == root] == ["table-root-kept"]


def test_original_does_not_delete_files_of_a_copy(aging: Aging, table_roots: TableRoots, root: str) -> None:
    copy = copy_of(aging, table_roots)
    append_rows(copy.lake)
    expected = rows(copy.lake)
    before = paths_under(root)
    aging.later()
    plan = operations.plan_orphan_removal(aging.lake)
    assert not [path for path in plan.paths if path.startswith(root)]
    assert copy.lake.root in plan.left_table_root
    aging.clean_up()
    assert paths_under(root) == before
    assert rows(copy.lake) == expected
    delete_all_files(copy.lake)
    relocation = operations.plan_relocation(aging.lake, root)
    assert (relocation.table_root, relocation.tables, relocation.is_empty) == (root, (), False)
    version = aging.lake.latest_version()
    assert relocation.execute(relocation.digest).version == version, "the lakehouse does not change"
    assert operations.plan_relocation(aging.lake, root).is_empty
    clean_up(aging)
    assert paths_under(root) == needed_paths(aging.lake, root)


def test_moved_lakehouse_claims_its_table_root(aging: Aging, table_roots: TableRoots, root: str) -> None:
    moved = copy_of(aging, table_roots)
    delete_all_files(aging.lake)
    append_rows(moved.lake)
    expected = rows(moved.lake)
    assert [finding.fix for finding in operations.verify(moved.lake).findings] == ["relocate"]
    operations.plan_relocation(moved.lake, root).execute()
    assert [user.root for user in users_of(open_storage(root), moved.lake.snapshot().definition.id)] == [
        moved.lake.root
    ]
    assert operations.verify(moved.lake, deep=True).findings == ()
    assert rows(moved.lake) == expected


def test_definition_alone_does_not_allow_deletion(table_roots: TableRoots, root: str) -> None:
    """A hostile definition contains the table root, and even the id, of another lakehouse."""
    victim = table_roots.lake(root)
    append_rows(victim.lake)
    overwrite_rows(victim.lake, "ns.t")
    put_orphans(victim, root)
    before = paths_under(root)
    hostile = table_roots.aging(table_roots.lakes.storage("hostile"), id=victim.lake.snapshot().definition.id)
    with hostile.lake.transaction() as txn:
        txn.alter_definition(replace(txn.definition, table_root=root))
    hostile.clean_up()
    assert paths_under(root) == before
    second_hostile = table_roots.aging(table_roots.lakes.storage("second"))
    with second_hostile.lake.transaction() as txn:
        txn.alter_definition(replace(txn.definition, table_root=victim.lake.root))
    second_hostile.clean_up()
    assert operations.verify(victim.lake).is_clean


def test_unclaimed_table_root_is_kept(table_roots: TableRoots, root: str) -> None:
    """This includes lakehouses of older releases, which did not record users of table roots."""
    aging = table_roots.aging(table_roots.lakes.storage())
    with aging.lake.transaction() as txn:
        txn.alter_definition(replace(txn.definition, table_root=root))
    append_rows(aging.lake)
    overwrite_rows(aging.lake, "ns.t")
    before = paths_under(root)
    aging.clean_up()
    assert paths_under(root) == before
    assert "it is not claimed for the lakehouse" in operations.plan_orphan_removal(aging.lake).left_table_root
    operations.plan_relocation(aging.lake, root).execute()
    clean_up(aging)
    assert paths_under(root) == needed_paths(aging.lake, root)


def test_plan_file_with_arbitrary_locations_is_harmless(aging: Aging, table_roots: TableRoots, root: str) -> None:
    """Plans are files of the lakehouse, and a forged plan must not delete files of another lakehouse."""
    other = table_roots.lake(root, "other")
    append_rows(other.lake)
    other_uris = {f"{root}{path}" for path in needed_files_of(other.lake, root)}
    own_uri = f"{root}tables/{aging.lake.snapshot().table('ns', 't').id}/data/stray.parquet"
    unowned_uris = {"memory://any/tables/x/data/1", f"{root}notes.txt", f"{root}tables/unowned/data/1"}
    mark = Mark(survey_versions(aging.lake), with_tables=True)
    assert unreached(mark, dict.fromkeys({*other_uris, *unowned_uris, own_uri}, 1)) == {own_uri: 1}


@pytest.mark.parametrize("link_name", ["", "tables"])
def test_cleanup_keeps_files_if_table_root_is_a_link_to_the_root(
    table_roots: TableRoots, tmp_path: Path, link_name: str
) -> None:
    """The same files are listed twice, and each listing contains only some of the needed names."""
    folder, link = tmp_path / "lake", tmp_path / "link"
    aging = table_roots.aging(open_storage(f"file://{folder}/", {"fsync": "false"}))
    append_rows(aging.lake, "ns.older")
    if link_name:
        link.mkdir()
    (link / link_name).symlink_to(folder / link_name)
    aging.lake.alter_definition(table_root=f"file://{link}/")
    if not link_name:
        with pytest.raises(LocationNotAllowedError):
            append_rows(aging.lake)
        aging.clean_up()
        assert catalog_at(aging.lake).load_table("ns.older").scan().to_arrow().num_rows == 3
        return
    append_rows(aging.lake)
    overwrite_rows(aging.lake, "ns.t")
    expected = rows(aging.lake)
    aging.clean_up()
    clean_up(aging)
    aging.clean_up()
    assert len(rows(aging.lake)) == len(expected) + 3
    assert catalog_at(aging.lake).load_table("ns.older").scan().to_arrow().num_rows == 3
    assert [
        finding for finding in operations.verify(aging.lake, deep=True).findings if finding.severity == "error"
    ] == []


def test_cleanup_keeps_files_if_table_root_is_another_lakehouse(table_roots: TableRoots) -> None:
    host = table_roots.aging(table_roots.lakes.storage("host"))
    append_rows(host.lake)
    guest = table_roots.lake(host.lake.root, "guest")
    append_rows(guest.lake)
    overwrite_rows(guest.lake, "ns.t")
    for aging in (guest, host, guest):
        clean_up(aging)
    assert len(rows(host.lake)) == 6
    assert operations.verify(host.lake, deep=True).findings == ()
    assert operations.verify(guest.lake, deep=True).findings == ()
    drop(guest.lake, "ns", "t")
    operations.compact(guest.lake)
    guest.clean_up()
    host_id = host.lake.snapshot().table("ns", "t").id
    remaining = {path for path in paths_under(host.lake.root) if path.startswith("tables/")}
    user = TableUser(guest.lake.snapshot().definition.id, guest.lake.root).path
    assert {path for path in remaining if not path.startswith(f"tables/{host_id}/")} == {user}


def test_deletion_stops_if_a_copy_writes_to_the_table_root(aging: Aging, root: str) -> None:
    put_orphans(aging, root)
    before = paths_under(root)
    lake, storage = aging.lake, open_storage(root)
    mark = Mark(survey_versions(lake), with_tables=True)
    with lease(lake.storage, "orphans") as lease_guard:
        add_user(storage, lake.snapshot().definition.id, "memory://copy/")
        with pytest.raises(MaintenanceBlockedError):
            delete_unreached(lake.storage, {f"{root}tables/{NEW_ID}/data/stray.parquet": 5}, mark, lease_guard)
    assert paths_under(root) >= before


def test_damaged_user_file_blocks_deletions_under_the_table_root(aging: Aging, root: str) -> None:
    storage, lakehouse_id = open_storage(root), aging.lake.snapshot().definition.id
    user = TableUser(lakehouse_id, aging.lake.root, frees=True)
    for damage in (b"", b"{}", user.to_bytes()[:-9], TableUser("other", "memory://x/").to_bytes()):
        storage.write(user.path, damage)
        plan = operations.plan_orphan_removal(aging.lake)
        assert "are kept: " in plan.left_table_root, damage
    claim_table_root(storage, lakehouse_id, aging.lake.root)
    assert operations.plan_orphan_removal(aging.lake).left_table_root == ""


def test_exports_and_restores_keep_table_root_files(aging: Aging, table_roots: TableRoots, root: str) -> None:
    """A full export within the lakehouse must not resolve table files below the lakehouse root."""
    lake = aging.lake
    expected = rows(lake)
    plan = operations.plan_export(lake, "here", "full")
    plan.execute(plan.digest)
    assert list(lake.storage.list("tables/")) == []
    verification = operations.verify_export(lake, "here", deep=True)
    assert (verification.missing, verification.changed) == ((), ())
    target_root = table_roots.root("away")
    operations.plan_export(lake, "away", "full", target=target_root).execute()
    assert rows(lake) == expected
    for name in ("here", "away"):
        append_rows(lake)
        operations.plan_restore(lake, name).execute()
        assert rows(lake) == expected
        assert catalog_at(lake).load_table("ns.t").location().startswith(root)
        assert list(lake.storage.list("tables/")) == []
    append_rows(lake)
    assert len(rows(lake)) == len(expected) + 3
    for name in ("here", "away"):
        operations.drop_export(lake, name)
    clean_up(aging)
    assert paths_under(root) == needed_paths(lake, root)
    assert operations.verify(lake, deep=True).findings == ()


def test_interrupted_export_keeps_its_table_root_copies(aging: Aging, root: str) -> None:
    lake = aging.lake
    before = paths_under(root)

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "copied" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        operations.plan_export(lake, "here", "full").execute(progress=interrupt)
    copies = paths_under(root) - before
    assert copies
    aging.later()
    aging.remove_orphans()
    assert paths_under(root) >= copies, "the manifest of the export lists the copies"
    report = operations.plan_export(lake, "here", "full").execute()
    assert (report.resumed, report.copied_files < report.files) == (True, True)
    operations.drop_export(lake, "here")
    aging.clean_up()
    assert paths_under(root).isdisjoint(copies)


def move_files(root: str, target: str) -> Storage:
    """Move all files under a table root to another root, and return its storage."""
    source, storage = open_storage(root), open_storage(target)
    for info in list(source.list()):
        storage.write(info.path, source.read(info.path))
        source.delete(info.path)
    return storage


def test_relocation_changes_the_table_root(aging: Aging, table_roots: TableRoots, root: str) -> None:
    lake, target = aging.lake, table_roots.root("new-tables")
    version = lake.latest_version()
    older_row_counts = [catalog_at(lake, number).load_table("ns.t").scan().to_arrow().num_rows for number in (2, 3)]
    other_reader = Lakehouse.open(lake.root)
    expected = rows(other_reader)
    with pytest.raises(FileMissingError):
        operations.plan_relocation(lake, target)
    move_files(root, target)
    plan = operations.plan_relocation(lake, target)
    assert (plan.tables, plan.table_root) == (("ns.t",), target)
    assert lake.latest_version() == version
    plan.execute(plan.digest)
    reopened = Lakehouse.open(lake.root)
    assert reopened.snapshot().definition.table_root == target
    assert operations.plan_relocation(reopened, target).is_empty
    assert rows(reopened) == expected
    assert root not in catalog_at(reopened).load_table("ns.t").metadata.model_dump_json()
    assert [
        catalog_at(reopened, number).load_table("ns.t").scan().to_arrow().num_rows for number in (2, 3)
    ] == older_row_counts
    append_rows(reopened)
    assert len(rows(other_reader)) == len(expected) + 3, "an open lakehouse uses the new table root"
    assert operations.verify(lake, deep=True).findings == ()
    data_files = {path for path in paths_under(target) if path.endswith(".parquet")}
    aging.later()
    aging.remove_orphans()
    assert paths_under(target) >= data_files, "older versions need the data files"
    clean_up(aging)
    assert paths_under(target) == needed_paths(lake, target) | (
        {TableUser(lake.snapshot().definition.id, lake.root).path}
    )
    assert paths_under(root) == set()


def test_invalid_table_roots_are_rejected(aging: Aging, table_roots: TableRoots, root: str) -> None:
    lake = aging.lake
    with pytest.raises(InvalidInputError):
        lake.alter_definition(table_root=table_roots.root("new-tables"))
    with pytest.raises(InvalidInputError):
        operations.plan_relocation(lake, lake.root)
    copy = copy_of(aging, table_roots)
    with pytest.raises(LocationNotAllowedError):
        operations.plan_relocation(lake, copy.lake.root)
    drop(lake, "ns", "t")
    other = table_roots.root("new-tables")
    lake.alter_definition(table_root=other)
    with catalog_at(lake) as catalog:
        catalog.create_table("ns.t", ROWS.schema).append(ROWS)
    assert paths_under(other) >= needed_paths(lake, other)


def test_file_that_a_purge_may_delete_cannot_be_registered(aging: Aging, table_roots: TableRoots, root: str) -> None:
    other = table_roots.lake(root, "other")
    append_rows(other.lake)
    uri, other_uri = (
        lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION] for lake in (aging.lake, other.lake)
    )
    with pytest.raises(InvalidInputError):
        catalog_at(aging.lake).register_table("ns.second", uri)
    operations.register_table(aging.lake, "ns", "second", uri)
    catalog_at(aging.lake).register_table("ns.theirs", other_uri)
    drop(aging.lake, "ns", "t")
    operations.compact(aging.lake)
    aging.clean_up()
    assert catalog_at(aging.lake).load_table("ns.second").scan().to_arrow().num_rows == 3


def test_commands_use_and_claim_a_table_root(tmp_path: Path) -> None:
    root, table_root = tmp_path / "lake", f"file://{tmp_path}/tables/"
    command = ["--root", str(root), "--storage-option", "fsync=false"]

    def run(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(trinitylake, [*command, *arguments, "--json"])
        assert result.exit_code == 0, result.output
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    run("init", "--table-root", table_root)
    append_rows(Lakehouse.open(str(root)))
    assert run("orphans")["left_table_root"] == ""
    root.rename(tmp_path / "moved")
    command[1] = str(tmp_path / "moved")
    append_rows(Lakehouse.open(command[1]))
    assert f"the lakehouse at 'file://{root}/'" in run("orphans")["left_table_root"]
    plan = run("relocate", "--table-root", table_root)
    assert plan["table_root"] == table_root
    assert run("relocate", "--table-root", table_root, "--apply", plan["digest"])["table_root"] == table_root
    assert run("orphans")["left_table_root"] == ""
    assert run("verify")["findings"] == []


@pytest.mark.usefixtures("fixed_requests_of_test")
def test_verify_checks_table_root_outside_the_lakehouse(tmp_path: Path) -> None:
    table_root = tmp_path / "tables"
    lake = Lakehouse.create(str(tmp_path / "damaged"), {"fsync": "false"}, table_root=str(table_root))
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        rows = pa.table({"id": pa.array([1], pa.int64())})
        catalog.create_table("ns.t", rows.schema).append(rows)
    assert operations.verify(lake).findings == ()
    (data,) = table_root.rglob("*.parquet")
    data.unlink()
    (finding,) = operations.verify(lake).findings
    assert (finding.code, finding.path) == ("table-file-missing", f"file://{data}")


def test_invalid_table_root_is_rejected(tmp_path: Path) -> None:
    for table_root in ("a//b", "../x", "s3://", "."):
        with pytest.raises(InvalidDefinitionError, match="table_root"):
            Lakehouse.create(str(tmp_path / "damaged"), {"fsync": "false"}, table_root=table_root)
