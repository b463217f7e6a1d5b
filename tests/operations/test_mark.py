"""Kept, reachable and deletable files: the definitions that every deletion uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from tests.foreign import ForeignLake
from tests.lakes import Lakes, listed, table
from tests.operations.aging import DAY_MS, HOUR_MS, Aging, grow, keeping, needed_files
from tests.operations.changes import append_rows, create, drop, node_bytes, node_columns, truncate
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    MaintenanceBlockedError,
    StorageError,
    TransientError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExportLevel, ExportRecord, ExportState, TableDef
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.operations.executor import LocalExecutor
from trinitylake_ops.operations.gc.mark import CatalogReach, Mark, is_deletable, retained_roots
from trinitylake_ops.operations.gc.survey import survey_versions
from trinitylake_ops.operations.gc.tables import table_files
from trinitylake_ops.storage import MeteredStorage, Storage, StorageWrapper
from trinitylake_ops.tree.shape import walk

pytestmark = pytest.mark.usefixtures("fixed_requests")

UUID = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    return Aging.on(lakes.storage())


@pytest.fixture
def lake(aging: Aging) -> Lakehouse:
    return aging.lake


def read_rows(lake: Lakehouse, name: str) -> list[int]:
    with catalog_at(lake) as catalog:
        ids: list[int] = catalog.load_table(name).scan().to_arrow()["id"].to_pylist()
    return sorted(ids)


# Reachable


def test_roots_reach_shadowed_values(aging: Aging, lake: Lakehouse) -> None:
    """A message in the root's buffer shadows other values, which are still needed."""
    grow(aging, 4)
    base = lake.snapshot()
    keys = [next(key for key in base.root.keys if key.startswith("C===")), base.keys.table_key("n0", "a")]
    staged = [lake.stage_definition("n0", "a", table(newest="yes")).location for _ in keys]
    aging.later(HOUR_MS)
    # other programs may buffer messages for a root's own keys, which this package applies immediately
    foreign = ForeignLake(lake.storage)
    foreign.commit(base.version, [*foreign.rows(base.location), *zip(keys, staged, (None, None), strict=True)])
    snapshot = lake.snapshot()
    assert keys[0] in snapshot.root.buffer.keys() & set(snapshot.root.keys)
    locations = {
        value
        for visited in walk(lake.files.nodes, snapshot.root, snapshot.location)
        for at, value in [*zip(visited.node.keys, visited.node.values, strict=True), *visited.node.buffer.items()]
        if at in keys and value is not None
    }
    assert len(locations) == 4, "one of each kind is shadowed"
    reach = CatalogReach(lake.files)
    survey = survey_versions(lake)
    reach.add([survey.roots[snapshot.version]])
    assert reach.nodes | reach.tables | reach.others == needed_files(lake).keys() - {snapshot.location}
    assert locations <= reach.tables
    aging.clean_up()
    assert locations <= listed(lake.storage)
    assert snapshot.location not in reach, "previous_root and the root itself are no pointers"
    with lake.transaction(message="m" * 3_400) as txn:  # every part of the tree can still be changed
        for name in ("n1", "n2", "n3"):
            txn.drop_namespace(name, cascade=True)
    assert operations.verify(lake).is_clean


def test_known_subtrees_are_skipped(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 4)
    survey = survey_versions(lake)
    first = CatalogReach(lake.files)
    first.add([survey.roots[4]])
    second = CatalogReach(lake.files, first)
    second.add([survey.roots[4], survey.roots[3]])
    assert not second.nodes & first.nodes
    assert not second.tables & first.tables


def test_exported_roots_reach_files_that_versions_do_not(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 3)
    operations.plan_export(lake, "e", version=1).execute()
    exported = needed_files(lake, "e")
    # Another program records only the name and the root, so that the version itself expires.
    lake.alter_definition(exports=())
    aging.clean_up()
    assert {path: lake.storage.read(path) for path in exported} == exported
    assert needed_files(lake, "e") == exported
    manifest = next(iter(path for path in listed(lake.storage) if path.startswith("_ops/export-")), None)
    assert manifest is None, "no record names it any more"


def test_version_that_is_an_export_root_is_pinned(aging: Aging, lake: Lakehouse) -> None:
    """The format allows an export to refer to the version's own root."""
    grow(aging, 3)
    lake.alter_definition(exported_snapshots={"theirs": lake.files.roots.path(2)})
    aging.later()
    plan = operations.plan_expiration(lake, keeping(1))
    assert plan.versions == "0-1,3"
    assert plan.verdicts[2].reason == "pinned by export 'theirs'"
    plan.execute()
    aging.later()
    aging.purge()
    assert needed_files(lake, "theirs")[lake.files.roots.path(2)]


def test_export_of_an_expired_version_blocks_its_purge(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 3)
    aging.later()
    aging.expire()
    lake.alter_definition(exported_snapshots={"theirs": lake.files.roots.path(1)})
    aging.later()
    with pytest.raises(MaintenanceBlockedError, match="'theirs'"):
        operations.plan_purge(lake)
    operations.undelete(lake, 1)
    assert aging.purge().is_complete
    assert needed_files(lake, "theirs")


def test_copies_of_an_unfinished_export_are_kept(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 2)
    copies = [f"_export_{UUID}.arrow", f"1111/1111/1111/11111111-node-{UUID}.arrow", "_ops/manifest-of-others"]
    manifest = f"_ops/export-{UUID}.json"
    record = ExportRecord(
        name="copying",
        version=1,
        level=ExportLevel.PARTIAL,
        root_location=copies[0],
        state=ExportState.COPYING,
        created_at_millis=aging.clock.time_ms,
        manifest_path=manifest,
    )
    lake.alter_definition(exports=(record,))
    assert retained_roots(survey_versions(lake)).paths >= {copies[0], manifest}, "nothing is written yet"
    for path in copies[:2]:
        lake.storage.create(path, b"copy")
    stray = f"1111/1111/1111/11111110-node-{UUID}.arrow"
    lake.storage.create(stray, b"not in the manifest")
    text = ",".join(f'{{"source": "x", "target": "{path}"}}' for path in copies)
    lake.storage.create(manifest, f'{{"files": [{text}]}}'.encode())
    aging.clean_up()
    assert {*copies[:2], manifest} <= listed(lake.storage)
    assert stray not in listed(lake.storage)
    assert lake.snapshot(1), "its version is pinned"
    lake.storage.write(manifest, b"garbage")
    for plan in (lambda: operations.plan_expiration(lake, keeping(1)).execute(), aging.remove_orphans):
        create(lake, f"n{len(listed(lake.storage))}")
        aging.later()
        with pytest.raises(CorruptFileError):
            plan()


# Kept files: an unreadable one stops marking


@pytest.mark.parametrize("damage", ["missing", "cut", "refused"])
@pytest.mark.parametrize("kind", ["node", "root", "exported root", "table definition", "manifest list"])
def test_unreadable_kept_file_blocks_deletion(aging: Aging, lake: Lakehouse, kind: str, damage: str) -> None:
    grow(aging, 4)
    append_rows(lake)
    operations.plan_export(lake, "e", version=1).execute()
    grow(aging, 1, "o")
    aging.later()
    aging.expire(keeping(3))
    lake.storage.create(f"tables/{lake.snapshot().table('ns', 't').id}/data/left.parquet", b"orphan")
    aging.later()
    create(lake, "last")
    aging.later()
    latest = needed_files(lake)
    path = {
        "node": next(path for path in latest if "-node-" in path),
        "root": lake.files.roots.path(lake.latest_version() - 1),
        "exported root": lake.snapshot().definition.exported_snapshots["e"],
        "table definition": next(path for path in latest if "table-t-ns" in path),
        "manifest list": next(path for path in latest if "/metadata/snap-" in path),
    }[kind]
    storage: Any = lake.storage
    if damage == "missing":
        lake.storage.delete(path)
    elif damage == "cut":
        truncate(lake.storage, path)
        aging.later()
    else:
        storage = Refusing(lake.storage, path)
    before = listed(lake.storage)
    damaged = Lakehouse(storage)
    plans: list[Callable[[], Any]] = [
        lambda: operations.plan_expiration(damaged, keeping(1)),
        lambda: operations.plan_orphan_removal(damaged),
    ]
    if kind not in ("table definition", "manifest list"):
        plans.append(lambda: operations.plan_purge(damaged))  # its plan contains no table file
    if kind in ("table definition", "manifest list"):
        del plans[0]  # no table file expires
    for plan in plans:
        if kind == "manifest list" and damage in ("missing", "cut"):  # only this table's folder is kept
            removal = plan()
            assert len(removal.damaged) == 1
            assert not [path for path in removal.paths if path.startswith("tables/")]
            continue
        with pytest.raises(StorageError):
            plan()
    assert listed(lake.storage) == before


class Refusing(StorageWrapper):
    def __init__(self, inner: Any, path: str):
        super().__init__(inner)
        self.path = path

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == self.path:
            raise TransientError("not now", path=path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_damage_of_expiring_versions_does_not_block_deletion(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 5)
    append_rows(lake)
    append_rows(lake)
    latest_only = needed_files(lake)
    expiring = needed_files(lake, 6).keys() - latest_only.keys()
    aging.later()
    for path in expiring:
        if not path.startswith("_"):
            lake.storage.delete(path)
    aging.clean_up()
    assert (
        needed_files(lake).items()
        >= {path: data for path, data in latest_only.items() if not path.startswith("_")}.items()
    )


# Deletable


@pytest.mark.parametrize(
    ("path", "is_ours"),
    [
        (f"0101/0101/0101/01010101-node-{UUID}.arrow", True),
        (f"0101/0101/0101/01010101-table-t-ns-{UUID}.binpb", True),
        (f"_lakehouse_def_{UUID}.binpb", True),
        ("tables/owned/data/1.parquet", True),
        ("tables/other/data/1.parquet", False),
        ("tables/owned", False),
        ("tables/", False),
        ("_10000000000000000000000000000000.arrow", False),
        ("_latest_hint.txt", False),
        ("0101/0101/0101/01010101-node.arrow", False),
        ("0101/0101/0101/notes.txt", False),
        (f"x/0101/0101/0101/01010101-node-{UUID}.arrow", False),
        (f"memory://other/0101/0101/0101/01010101-node-{UUID}.arrow", False),
        ("s3://bucket/tables/owned/data/1.parquet", False),
        ("file:///tables/owned/x", False),
    ],
)
def test_is_deletable_accepts_generated_names_only(path: str, is_ours: bool) -> None:
    assert is_deletable(path, {"owned"}) == is_ours


def test_stray_files_are_kept(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 3)
    append_rows(lake)
    dropped = lake.snapshot().table("ns", "t").id
    drop(lake, "ns")
    stray = [
        "notes.txt",
        "_notes.arrow",
        "_ops/notes.json",
        "_ops/plan-mine.json",
        "0101/0101/0101/notes.txt",
        "0101/0101/0101/01010101-notes.arrow",
        "1010/data.parquet",
        "tables/mine/data/1.parquet",
        "tables/readme.txt",
        f"tables/{UUID}/data/1.parquet",
        f"archive/tables/{dropped}/data/1.parquet",
        f"tables/other/{dropped}/data/1.parquet",
        "tables/foreign/_owner.json",
        "tables/foreign/data/1.parquet",
    ]
    for path in stray:
        lake.storage.create(path, b'{"lakehouse_id": "another"}' if path.endswith("_owner.json") else b"stray")
    aging.clean_up()
    assert set(stray) <= listed(lake.storage)
    assert not list(lake.storage.list(f"tables/{dropped}/"))
    plan = operations.plan_orphan_removal(lake)
    assert (plan.is_empty, plan.unowned_files) == (True, 5)
    assert "5 files under tables/ have no known owner and are kept" in str(plan)


def test_files_named_by_uris_are_never_deleted(aging: Aging, lake: Lakehouse, lakes: Lakes) -> None:
    """Pointers of a version may refer to another lakehouse, which owns these files."""
    other = Aging.on(lakes.storage("other")).lake
    create(other, "ns", "t")
    theirs = next(path for path in needed_files(other) if "table-t-ns" in path)
    grow(aging, 2)
    path = lake.files.roots.path(lake.latest_version())
    columns = node_columns(lake.storage.read(path))
    snapshot = lake.snapshot()
    for name, value in (
        (snapshot.keys.table_key("n0", "z"), other.root + theirs),
        (snapshot.keys.table_key("n0", "y"), f"{lake.root}notes.txt"),
    ):
        for column, cell in zip(columns.values(), (name, value, None), strict=True):
            column.append(cell)
    lake.storage.write(path, node_bytes(columns))
    lake.storage.create("notes.txt", b"not a definition's name")
    with lake.transaction() as txn:
        for name in "yz":
            txn.drop_table("n0", name)
    before = listed(other.storage)
    aging.later()
    report = aging.expire()
    assert report.versions == "0-2"
    aging.later()
    aging.purge()
    assert listed(other.storage) == before
    assert "notes.txt" in listed(lake.storage)


# Tables


SCHEMA = pa.schema([("id", pa.int64())])


@pytest.mark.parametrize("table_type", ["MANAGED", "EXTERNAL"])
@pytest.mark.parametrize("dropped", ["t", "copy"])
def test_files_shared_by_tables_are_kept(aging: Aging, lake: Lakehouse, table_type: str, dropped: str) -> None:
    """Two definitions refer to one metadata file, and either may be dropped."""
    append_rows(lake)
    definition = lake.snapshot().table("ns", "t")
    with lake.transaction() as txn:
        txn.create_table("ns", "copy", replace(definition, id="copy", table_type=table_type))
    append_rows(lake, "ns.t")  # the copy keeps the location: it shares data files
    drop(lake, "ns", dropped)
    left = "copy" if dropped == "t" else "t"
    if (left, table_type) == ("copy", "MANAGED"):  # only a managed table's own metadata is read
        shared = {file.location for file in files_of(definition, StorageFileIO.on(lake.storage)) if file.live}
        aging.clean_up()
        assert shared <= {info.path for info in lake.storage.list("tables/")}
    else:
        expected = read_rows(lake, f"ns.{left}")
        aging.clean_up()
        assert read_rows(lake, f"ns.{left}") == expected
        assert operations.verify(lake).is_clean
    drop(lake, "ns", left)
    aging.clean_up()
    other_paths = {info.path for info in lake.storage.list("tables/")}
    assert other_paths == set(), "the last table has no other paths"


def test_own_files_of_a_table_are_found_in_any_order(aging: Aging, lake: Lakehouse) -> None:
    """Of two definitions with one metadata file, the owner of the folder yields its files, in any order."""
    append_rows(lake)
    own_table = lake.snapshot().table("ns", "t")
    copies = [replace(own_table, id="copy"), replace(own_table, table_type="EXTERNAL")]
    io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
    files = table_files([own_table], io)
    assert len(files) == len(list(lake.storage.list("tables/"))) - 1, "all but the owner file"
    assert table_files([*copies, own_table], io) == table_files([own_table, *copies], io) == files
    assert table_files(copies, io) == {}


@pytest.mark.local_only("opens another lakehouse by its root alone")
@pytest.mark.parametrize("table_type", ["EXTERNAL", "FEDERATED"])
def test_files_of_unmanaged_tables_are_kept(aging: Aging, lake: Lakehouse, lakes: Lakes, table_type: str) -> None:
    """Neither files in another lakehouse nor in a folder of this root are deleted."""
    other = Aging.on(lakes.storage("other")).lake
    append_rows(other)
    location = other.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    for info in other.storage.list("tables/"):
        lake.storage.create(f"lent/{info.path}", other.storage.read(info.path))
    create(lake, "ns")
    operations.register_table(lake, "ns", "far", other.root + location, table_type=table_type)
    with lake.transaction() as txn:
        definition = lake.snapshot().table("ns", "far")
        properties = {METADATA_LOCATION: f"lent/{location}"}
        txn.create_table("ns", "near", replace(definition, id="near", format_properties=properties))
    before = listed(other.storage), {path for path in listed(lake.storage) if path.startswith("lent/")}
    drop(lake, "ns", "far", "near")
    aging.clean_up()
    assert (listed(other.storage), {path for path in listed(lake.storage) if path.startswith("lent/")}) == before


@pytest.mark.local_only("opens another root by its name alone")
def test_files_of_external_managed_tables_are_kept(aging: Aging, lake: Lakehouse, lakes: Lakes) -> None:
    """``table_root`` may be outside of the root, where content alone does not permit deletions."""
    other = lakes.storage("tables-of-others")
    with lake.transaction() as txn:
        txn.alter_definition(replace(txn.definition, table_root=other.root))
    append_rows(lake)
    before = listed(other)
    assert before
    drop(lake, "ns", "t")
    aging.clean_up()
    assert listed(other) == before


def test_folders_of_opaque_tables_are_kept(aging: Aging, lake: Lakehouse) -> None:
    """These are tables of other formats, and tables without their metadata file, whose other files may be the only
    copy.
    """
    append_rows(lake, "ns.lost")
    append_rows(lake, "ns.lost")
    lost = lake.snapshot().table("ns", "lost")
    with lake.transaction() as txn:
        txn.create_table("ns", "lance", TableDef(id="lance-id", table_format="LANCE"))
        txn.create_table("ns", "bare", TableDef(id="bare-id", table_format="ICEBERG"))
    for table_id in ("lance-id", "bare-id"):
        lake.storage.create(f"tables/{table_id}/data/1", b"rows")
    lake.storage.delete(lost.format_properties[METADATA_LOCATION])
    before = {info.path for info in lake.storage.list("tables/")}
    aging.clean_up()
    assert {info.path for info in lake.storage.list("tables/")} == before
    drop(lake, "ns", "lost", "lance", "bare")
    operations.compact(lake)  # otherwise the message shadows a remaining definition
    aging.clean_up()
    left = {info.path for info in lake.storage.list("tables/")}
    assert left == {"tables/lance-id/data/1", "tables/bare-id/data/1"}, "no owner file says that they are ours"


def test_metadata_of_expired_versions_is_purged(aging: Aging, lake: Lakehouse) -> None:
    """Former metadata files in Iceberg's metadata log are never read by scans, so they are purged with their
    versions.
    """
    for _ in range(3):
        append_rows(lake)
    paths = [path for path in listed(lake.storage) if path.endswith(".metadata.json")]
    assert len(paths) == 4
    rows = read_rows(lake, "ns.t")
    aging.clean_up()
    current = lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    assert [path for path in listed(lake.storage) if path.endswith(".metadata.json")] == [current]
    assert read_rows(lake, "ns.t") == rows, "all data is in the current snapshot's history"
    append_rows(lake)
    assert len(read_rows(lake, "ns.t")) == len(rows) + 3


# Marks


def test_mark_only_grows(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 3)
    append_rows(lake)
    mark = Mark(survey_versions(lake))
    mark.add_tables()
    before = mark.catalog.nodes | mark.catalog.tables | mark.catalog.others | mark.tables.files
    version = append_rows(lake)
    drop(lake, "n0")
    fresh = set(needed_files(lake, version)) - before
    assert fresh
    mark.extend(lake.snapshot())
    assert mark.base.version == version + 1
    assert all(path in mark for path in before)
    assert all(path in mark for path in fresh if path != lake.files.roots.path(version))


def test_every_node_is_read_once(aging: Aging, lake: Lakehouse) -> None:
    """A plan reads each kept and each expiring node once."""
    grow(aging, 6)
    aging.later(DAY_MS)
    aging.later(HOUR_MS)
    counted = Counting(lake.storage)
    plan = operations.plan_expiration(Lakehouse(counted), keeping(1))
    nodes = {path for version in range(7) for path in needed_files(lake, version) if "-node-" in path}
    assert plan.versions
    assert sorted(path for path in counted.reads if "-node-" in path) == sorted(nodes)


class Counting(StorageWrapper):
    def __init__(self, inner: Any):
        super().__init__(inner)
        self.reads: list[str] = []

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.reads.append(path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_missing_kept_files_are_named_in_the_error(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 5)
    aging.later()
    path = next(path for path in needed_files(lake) if "-node-" in path)
    lake.storage.delete(path)
    with pytest.raises(FileMissingError) as caught:
        operations.plan_expiration(lake, keeping(1))
    assert caught.value.path == path


class FailsOnce(StorageWrapper):
    """Fails the second of some reads once."""

    def __init__(self, inner: Storage, paths: set[str]):
        super().__init__(inner)
        self.concurrency = 1
        self._paths = paths
        self._n_reads = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path in self._paths:
            self._n_reads += 1
            if self._n_reads == 2:
                raise TransientError("not now", path=path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_failed_walk_starts_over(aging: Aging, lake: Lakehouse) -> None:
    """Otherwise the objects below the nodes that were read before the failure would count as unreached."""
    grow(aging, 12)
    survey = survey_versions(lake)
    root = survey.roots[lake.latest_version()]
    reach = CatalogReach(lake.files)
    reach.add([root])
    inner = reach.nodes - set(root.pointers.nodes)
    assert len(inner) > 1, "the tree has two levels below its root"
    cut = CatalogReach(Lakehouse(FailsOnce(lake.storage, inner), cache="off").files)
    with pytest.raises(TransientError):
        cut.add([root])
    cut.add([root])
    assert (cut.nodes, cut.tables, cut.others) == (reach.nodes, reach.tables, reach.others)


def test_executor_window_does_not_change_reached_files_or_reads(lakes: Lakes) -> None:
    class Gathering(LocalExecutor):
        def __init__(self, window: int):
            self.window = window

    aging = Aging.on(lakes.storage())
    for name in ("ns.a", "ns.b"):
        append_rows(aging.lake, name)
        append_rows(aging.lake, name)
    outcomes = []
    for window in (1, 2, 256, sys.maxsize):
        metered = MeteredStorage(aging.lake.storage)
        survey = survey_versions(Lakehouse(metered, cache="off"), executor=Gathering(window))
        mark = Mark(survey, with_tables=True)
        reads = metered.snapshot().requests
        outcomes.append((mark.tables.files, reads))
    assert len(outcomes[0][0]) > 8
    assert outcomes[1:] == outcomes[:1] * 3
