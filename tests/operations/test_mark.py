"""Test which files are kept, reachable and deletable, as all deletions define them."""

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


# Reachable files


def test_roots_reach_shadowed_values(aging: Aging, lake: Lakehouse) -> None:
    """A message in the root's buffer shadows other values, which are still needed."""
    grow(aging, 4)
    base = lake.snapshot()
    keys = [next(key for key in base.root.keys if key.startswith("C===")), base.keys.table_key("n0", "a")]
    staged = [lake.stage_definition("n0", "a", table(newest="yes")).location for _ in keys]
    aging.later(HOUR_MS)
    # Other programs may buffer messages for keys of the root itself, which this package applies immediately.
    foreign = ForeignLake(lake.storage)
    foreign.commit(base.version, [*foreign.rows(base.location), *zip(keys, staged, (None, None), strict=True)])
    snapshot = lake.snapshot()
    assert keys[0] in snapshot.root.buffer.keys() & set(snapshot.root.keys)
    locations = {
        value
        for visited in walk(lake.files.nodes, snapshot.root, snapshot.location)
        for key, value in [*zip(visited.node.keys, visited.node.values, strict=True), *visited.node.buffer.items()]
        if key in keys and value is not None
    }
    assert len(locations) == 4, "one definition of each kind is shadowed"
    reach = CatalogReach(lake.files)
    survey = survey_versions(lake)
    reach.add([survey.roots[snapshot.version]])
    assert reach.nodes | reach.tables | reach.others == needed_files(lake).keys() - {snapshot.location}
    assert locations <= reach.tables
    aging.clean_up()
    assert locations <= listed(lake.storage)
    assert snapshot.location not in reach, "a root does not reach itself or the previous root"
    with lake.transaction(message="m" * 3_400) as txn:  # all parts of the tree can still be changed
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


def test_files_reached_only_by_exported_roots_are_kept(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 3)
    operations.plan_export(lake, "e", version=1).execute()
    exported = needed_files(lake, "e")
    # Another program records only the name and the root of an export, so that the version itself expires.
    lake.alter_definition(exports=())
    aging.clean_up()
    assert {path: lake.storage.read(path) for path in exported} == exported
    assert needed_files(lake, "e") == exported
    manifest = next(iter(path for path in listed(lake.storage) if path.startswith("_ops/export-")), None)
    assert manifest is None, "no record refers to the manifest anymore"


def test_version_whose_root_is_exported_is_pinned(aging: Aging, lake: Lakehouse) -> None:
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
    assert retained_roots(survey_versions(lake)).paths >= {copies[0], manifest}, "no file is written yet"
    for path in copies[:2]:
        lake.storage.create(path, b"copy")
    stray_path = f"1111/1111/1111/11111110-node-{UUID}.arrow"
    lake.storage.create(stray_path, b"not in the manifest")
    entries = ",".join(f'{{"source": "x", "target": "{path}"}}' for path in copies)
    lake.storage.create(manifest, f'{{"files": [{entries}]}}'.encode())
    aging.clean_up()
    assert {*copies[:2], manifest} <= listed(lake.storage)
    assert stray_path not in listed(lake.storage)
    assert lake.snapshot(1), "the exported version is pinned"
    lake.storage.write(manifest, b"garbage")
    for operation in (lambda: operations.plan_expiration(lake, keeping(1)).execute(), aging.remove_orphans):
        create(lake, f"n{len(listed(lake.storage))}")
        aging.later()
        with pytest.raises(CorruptFileError):
            operation()


# Unreadable kept files stop marking


@pytest.mark.parametrize("damage", ["missing", "truncated", "unreadable"])
@pytest.mark.parametrize("kind", ["node", "root", "exported root", "table definition", "manifest list"])
def test_unreadable_kept_file_blocks_deletion(aging: Aging, lake: Lakehouse, kind: str, damage: str) -> None:
    grow(aging, 4)
    append_rows(lake)
    operations.plan_export(lake, "e", version=1).execute()
    grow(aging, 1, "o")
    aging.later()
    aging.expire(keeping(3))
    lake.storage.create(f"tables/{lake.snapshot().table('ns', 't').id}/data/stray.parquet", b"orphan")
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
    elif damage == "truncated":
        truncate(lake.storage, path)
        aging.later()
    else:
        storage = FailingReadStorage(lake.storage, path)
    before = listed(lake.storage)
    damaged_lake = Lakehouse(storage)
    plan_functions: list[Callable[[], Any]] = [
        lambda: operations.plan_expiration(damaged_lake, keeping(1)),
        lambda: operations.plan_orphan_removal(damaged_lake),
    ]
    if kind not in ("table definition", "manifest list"):
        plan_functions.append(lambda: operations.plan_purge(damaged_lake))  # a purge plan lists no table files
    if kind in ("table definition", "manifest list"):
        del plan_functions[0]  # no table file would expire
    for make_plan in plan_functions:
        if kind == "manifest list" and damage in (
            "missing",
            "truncated",
        ):  # this blocks deletions only in the table's folder
            plan = make_plan()
            assert len(plan.damaged) == 1
            assert not [path for path in plan.paths if path.startswith("tables/")]
            continue
        with pytest.raises(StorageError):
            make_plan()
    assert listed(lake.storage) == before


class FailingReadStorage(StorageWrapper):
    def __init__(self, inner: Any, path: str):
        super().__init__(inner)
        self.path = path

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == self.path:
            raise TransientError("injected", path=path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_damage_of_expiring_versions_does_not_block_deletion(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 5)
    append_rows(lake)
    append_rows(lake)
    latest_files = needed_files(lake)
    expiring = needed_files(lake, 6).keys() - latest_files.keys()
    aging.later()
    for path in expiring:
        if not path.startswith("_"):
            lake.storage.delete(path)
    aging.clean_up()
    assert (
        needed_files(lake).items()
        >= {path: data for path, data in latest_files.items() if not path.startswith("_")}.items()
    )


# Deletable files


@pytest.mark.parametrize(
    ("path", "is_generated_name"),
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
def test_is_deletable_accepts_generated_names_only(path: str, is_generated_name: bool) -> None:
    assert is_deletable(path, {"owned"}) == is_generated_name


def test_stray_files_are_kept(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 3)
    append_rows(lake)
    dropped_id = lake.snapshot().table("ns", "t").id
    drop(lake, "ns")
    stray_paths = [
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
        f"archive/tables/{dropped_id}/data/1.parquet",
        f"tables/other/{dropped_id}/data/1.parquet",
        "tables/foreign/_owner.json",
        "tables/foreign/data/1.parquet",
    ]
    for path in stray_paths:
        lake.storage.create(path, b'{"lakehouse_id": "another"}' if path.endswith("_owner.json") else b"stray")
    aging.clean_up()
    assert set(stray_paths) <= listed(lake.storage)
    assert not list(lake.storage.list(f"tables/{dropped_id}/"))
    plan = operations.plan_orphan_removal(lake)
    assert (plan.is_empty, plan.unowned_files) == (True, 5)
    assert "5 files under tables/ have no known owner and are kept" in str(plan)


def test_files_with_uris_are_never_deleted(aging: Aging, lake: Lakehouse, lakes: Lakes) -> None:
    """Pointers of a version may refer to files that another lakehouse owns."""
    other = Aging.on(lakes.storage("other")).lake
    create(other, "ns", "t")
    other_path = next(path for path in needed_files(other) if "table-t-ns" in path)
    grow(aging, 2)
    path = lake.files.roots.path(lake.latest_version())
    columns = node_columns(lake.storage.read(path))
    snapshot = lake.snapshot()
    for name, value in (
        (snapshot.keys.table_key("n0", "z"), other.root + other_path),
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
    """Two definitions refer to one metadata file, and one of them is dropped."""
    append_rows(lake)
    definition = lake.snapshot().table("ns", "t")
    with lake.transaction() as txn:
        txn.create_table("ns", "copy", replace(definition, id="copy", table_type=table_type))
    append_rows(lake, "ns.t")  # the copy still refers to the old metadata, which shares data files
    drop(lake, "ns", dropped)
    remaining = "copy" if dropped == "t" else "t"
    if (remaining, table_type) == ("copy", "MANAGED"):  # a managed table can read only its own metadata
        shared = {file.location for file in files_of(definition, StorageFileIO.on(lake.storage)) if file.live}
        aging.clean_up()
        assert shared <= {info.path for info in lake.storage.list("tables/")}
    else:
        expected = read_rows(lake, f"ns.{remaining}")
        aging.clean_up()
        assert read_rows(lake, f"ns.{remaining}") == expected
        assert operations.verify(lake).is_clean
    drop(lake, "ns", remaining)
    aging.clean_up()
    remaining_paths = {info.path for info in lake.storage.list("tables/")}
    assert remaining_paths == set(), "no file remains after the last table is dropped"


def test_table_files_do_not_depend_on_the_order_of_definitions(aging: Aging, lake: Lakehouse) -> None:
    """If several definitions refer to one metadata file, only the owner of the folder contributes its files."""
    append_rows(lake)
    owner = lake.snapshot().table("ns", "t")
    copies = [replace(owner, id="copy"), replace(owner, table_type="EXTERNAL")]
    io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
    files = table_files([owner], io)
    assert len(files) == len(list(lake.storage.list("tables/"))) - 1, "all files except the owner file"
    assert table_files([*copies, owner], io) == table_files([owner, *copies], io) == files
    assert table_files(copies, io) == {}


@pytest.mark.local_only("opens another lakehouse without storage options")
@pytest.mark.parametrize("table_type", ["EXTERNAL", "FEDERATED"])
def test_files_of_unmanaged_tables_are_kept(aging: Aging, lake: Lakehouse, lakes: Lakes, table_type: str) -> None:
    """This includes files in another lakehouse and in a folder of this root."""
    other = Aging.on(lakes.storage("other")).lake
    append_rows(other)
    location = other.snapshot().table("ns", "t").format_properties[METADATA_LOCATION]
    for info in other.storage.list("tables/"):
        lake.storage.create(f"external/{info.path}", other.storage.read(info.path))
    create(lake, "ns")
    operations.register_table(lake, "ns", "remote", other.root + location, table_type=table_type)
    with lake.transaction() as txn:
        definition = lake.snapshot().table("ns", "remote")
        properties = {METADATA_LOCATION: f"external/{location}"}
        txn.create_table("ns", "local", replace(definition, id="local", format_properties=properties))
    before = listed(other.storage), {path for path in listed(lake.storage) if path.startswith("external/")}
    drop(lake, "ns", "remote", "local")
    aging.clean_up()
    assert (listed(other.storage), {path for path in listed(lake.storage) if path.startswith("external/")}) == before


@pytest.mark.local_only("opens another root without storage options")
def test_files_of_external_managed_tables_are_kept(aging: Aging, lake: Lakehouse, lakes: Lakes) -> None:
    """``table_root`` may be outside of the root, where the definition alone does not permit deletions."""
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
    """Tables of other formats, and tables whose metadata file is missing, are opaque. Their files may be the only
    copy.
    """
    append_rows(lake, "ns.damaged")
    append_rows(lake, "ns.damaged")
    damaged_table = lake.snapshot().table("ns", "damaged")
    with lake.transaction() as txn:
        txn.create_table("ns", "lance", TableDef(id="lance-id", table_format="LANCE"))
        txn.create_table("ns", "bare", TableDef(id="bare-id", table_format="ICEBERG"))
    for table_id in ("lance-id", "bare-id"):
        lake.storage.create(f"tables/{table_id}/data/1", b"rows")
    lake.storage.delete(damaged_table.format_properties[METADATA_LOCATION])
    before = {info.path for info in lake.storage.list("tables/")}
    aging.clean_up()
    assert {info.path for info in lake.storage.list("tables/")} == before
    drop(lake, "ns", "damaged", "lance", "bare")
    operations.compact(lake)  # otherwise messages shadow definitions that are still reachable
    aging.clean_up()
    remaining = {info.path for info in lake.storage.list("tables/")}
    assert remaining == {"tables/lance-id/data/1", "tables/bare-id/data/1"}, "files without an owner file are kept"


def test_metadata_of_expired_versions_is_purged(aging: Aging, lake: Lakehouse) -> None:
    """Scans never read the former metadata files in Iceberg's metadata log, so a purge deletes them with their
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
    assert read_rows(lake, "ns.t") == rows, "the current snapshot contains all rows"
    append_rows(lake)
    assert len(read_rows(lake, "ns.t")) == len(rows) + 3


# Marks


def test_mark_keeps_files_when_it_is_extended(aging: Aging, lake: Lakehouse) -> None:
    grow(aging, 3)
    append_rows(lake)
    mark = Mark(survey_versions(lake))
    mark.add_tables()
    before = mark.catalog.nodes | mark.catalog.tables | mark.catalog.others | mark.tables.files
    version = append_rows(lake)
    drop(lake, "n0")
    new_files = set(needed_files(lake, version)) - before
    assert new_files
    mark.extend(lake.snapshot())
    assert mark.base.version == version + 1
    assert all(path in mark for path in before)
    assert all(path in mark for path in new_files if path != lake.files.roots.path(version))


def test_every_node_is_read_once(aging: Aging, lake: Lakehouse) -> None:
    """A plan reads each kept and each expiring node once."""
    grow(aging, 6)
    aging.later(DAY_MS)
    aging.later(HOUR_MS)
    counting_storage = CountingStorage(lake.storage)
    plan = operations.plan_expiration(Lakehouse(counting_storage), keeping(1))
    nodes = {path for version in range(7) for path in needed_files(lake, version) if "-node-" in path}
    assert plan.versions
    assert sorted(path for path in counting_storage.reads if "-node-" in path) == sorted(nodes)


class CountingStorage(StorageWrapper):
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
    with pytest.raises(FileMissingError) as raised:
        operations.plan_expiration(lake, keeping(1))
    assert raised.value.path == path


class FailOnceStorage(StorageWrapper):
    """A storage that fails the second read of some paths once."""

    def __init__(self, inner: Storage, paths: set[str]):
        super().__init__(inner)
        self.concurrency = 1
        self._paths = paths
        self._n_reads = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path in self._paths:
            self._n_reads += 1
            if self._n_reads == 2:
                raise TransientError("injected", path=path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_failed_walk_is_repeated(aging: Aging, lake: Lakehouse) -> None:
    """Otherwise objects below nodes that were read before the failure would count as unreached."""
    grow(aging, 12)
    survey = survey_versions(lake)
    root = survey.roots[lake.latest_version()]
    reach = CatalogReach(lake.files)
    reach.add([root])
    inner = reach.nodes - set(root.pointers.nodes)
    assert len(inner) > 1, "the tree has two levels below its root"
    interrupted = CatalogReach(Lakehouse(FailOnceStorage(lake.storage, inner), cache="off").files)
    with pytest.raises(TransientError):
        interrupted.add([root])
    interrupted.add([root])
    assert (interrupted.nodes, interrupted.tables, interrupted.others) == (reach.nodes, reach.tables, reach.others)


def test_executor_window_does_not_change_reached_files_or_reads(lakes: Lakes) -> None:
    class WindowExecutor(LocalExecutor):
        def __init__(self, window: int):
            self.window = window

    aging = Aging.on(lakes.storage())
    for name in ("ns.a", "ns.b"):
        append_rows(aging.lake, name)
        append_rows(aging.lake, name)
    outcomes = []
    for window in (1, 2, 256, sys.maxsize):
        metered = MeteredStorage(aging.lake.storage)
        survey = survey_versions(Lakehouse(metered, cache="off"), executor=WindowExecutor(window))
        mark = Mark(survey, with_tables=True)
        reads = metered.snapshot().requests
        outcomes.append((mark.tables.files, reads))
    assert len(outcomes[0][0]) > 8
    assert outcomes[1:] == outcomes[:1] * 3
