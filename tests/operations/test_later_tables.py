"""Tables of Iceberg's format version 3: nothing that they need goes, and nothing is silently lost of them."""

from __future__ import annotations

import json

import pytest

from tests.lakes import Lakes, allowing, listed
from tests.operations.aging import Aging
from tests.operations.changes import append_rows
from tests.operations.later_tables import LaterTable, make_later, read_avro
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.plan import plan_write

KEPT = [2, 2, 3, 3]


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


@pytest.fixture
def vectors(lake: Lakehouse) -> LaterTable:
    return make_later(lake, "dv", with_vectors=True)


@pytest.fixture
def lineage(lake: Lakehouse) -> LaterTable:
    return make_later(lake, "lineage", with_vectors=False)


def test_deletion_vectors_are_read_and_verified(lake: Lakehouse, vectors: LaterTable) -> None:
    assert vectors.ids() == KEPT
    assert operations.verify(lake, deep=True).findings == ()
    assert vectors.puffin_path is not None
    lake.storage.delete(vectors.puffin_path)
    found = operations.verify(lake, deep=True).findings
    assert any(vectors.puffin_path in str(finding) for finding in found)


def test_expiry_purge_and_orphan_removal_spare_what_vectors_need(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    lakes.watch(aging.lake)
    table = make_later(aging.lake, "dv", with_vectors=True)
    append_rows(aging.lake, "ns.other")
    aging.clean_up()
    assert table.ids() == KEPT
    assert table.puffin_path in listed(aging.lake.storage)
    with aging.lake.transaction() as txn:
        txn.drop_table("ns", "dv")
    aging.clean_up()
    assert table.puffin_path not in listed(aging.lake.storage), "once no version has the table they go"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_full_export_has_vectors_of_its_own_data_files(
    lakes: Lakes, lake: Lakehouse, vectors: LaterTable, elsewhere: bool
) -> None:
    target = lakes.root("copy") if elsewhere else None
    operations.plan_export(lake, "x", "full", target=target).execute()
    assert operations.verify_export(lake, "x", deep=True).is_clean
    with lake.transaction() as txn:
        txn.drop_table("ns", "dv")
    operations.plan_restore(lake, "x").execute()
    assert vectors.ids() == KEPT
    check_vectors(lake, vectors)
    if target is not None:
        copy = Lakehouse.open(target)
        check_vectors(copy, vectors)
        assert operations.verify(copy, deep=True).findings == ()


def check_vectors(copy: Lakehouse, table: LaterTable) -> None:
    """Check that manifest and Puffin file name the data files of a copy, and that blobs stand where they stood."""
    definition = copy.snapshot().table("ns", "dv")
    metadata = json.loads(copy.storage.read(definition.format_properties[METADATA_LOCATION]))
    _, manifests, _ = read_avro(copy, metadata["snapshots"][-1]["manifest-list"])
    (listed_deletes,) = (manifest for manifest in manifests if manifest["content"] == 1)
    _, entries, _ = read_avro(copy, listed_deletes["manifest_path"])
    assert table.puffin_path is not None
    source = table.lake.storage.read(table.puffin_path)
    for entry in (entry["data_file"] for entry in entries):
        data = copy.storage.read(entry["file_path"].removeprefix(copy.root))
        assert entry["file_size_in_bytes"] == len(data)
        start, size = entry["content_offset"], entry["content_size_in_bytes"]
        assert data[start : start + size] == source[start : start + size]
        assert entry["referenced_data_file"].startswith(copy.root)
        assert f'"referenced-data-file":"{entry["referenced_data_file"]}"'.encode() in data


@pytest.mark.parametrize("level", ["minimal", "partial"])
def test_exports_without_data_keep_vectors_and_are_restored(lake: Lakehouse, vectors: LaterTable, level: str) -> None:
    operations.plan_export(lake, "x", level).execute()
    before = lake.latest_version()
    with lake.transaction() as txn:
        txn.drop_table("ns", "dv")
    operations.plan_restore(lake, "x").execute()
    assert lake.latest_version() > before
    assert vectors.ids() == KEPT


def test_a_full_export_carries_row_lineage_on(lakes: Lakes, lake: Lakehouse, lineage: LaterTable) -> None:
    root = lakes.root("copy")
    operations.plan_export(lake, "x", "full", target=root).execute()
    check_lineage(Lakehouse.open(root), lineage)
    with lake.transaction() as txn:
        txn.drop_table("ns", "lineage")
    operations.plan_restore(lake, "x").execute()
    check_lineage(lake, lineage)


def check_lineage(copy: Lakehouse, table: LaterTable) -> None:
    """Check that a copy of a table has all that its metadata and manifest list say but for the places of files."""
    source = json.loads(table.lake.storage.read(table.metadata_path))
    definition = copy.snapshot().table("ns", "lineage")
    found = json.loads(copy.storage.read(definition.format_properties[METADATA_LOCATION]))
    for name in ("next-row-id", "encryption-keys", "format-version", "table-uuid"):
        assert found[name] == source[name], name
    for ours, theirs in zip(found["snapshots"], source["snapshots"], strict=True):
        assert {**ours, "manifest-list": ""} == {**theirs, "manifest-list": ""}
    _, manifests, header = read_avro(copy, found["snapshots"][-1]["manifest-list"])
    assert [manifest["first_row_id"] for manifest in manifests] == [0, 3]
    assert header["format-version"] == "3"
    with catalog_at(copy) as catalog:
        assert sorted(catalog.load_table("ns.lineage").scan().to_arrow()["id"].to_pylist()) == [1, 1, 2, 2, 3, 3]
    assert operations.verify(copy, deep=True).findings == ()


def test_compaction_leaves_later_tables_and_does_the_others(
    lake: Lakehouse, vectors: LaterTable, lineage: LaterTable
) -> None:
    for _ in range(5):
        append_rows(lake, "ns.small")
    plan = operations.plan_compact_tables(lake)
    assert {name for name, why in plan.left.items() if "format version is 3" in why} == {"ns.dv", "ns.lineage"}
    assert [done.table for done in plan.execute().tables] == ["ns.small"]
    assert vectors.ids() == KEPT
    assert len(lineage.ids()) == 6
    definition = lake.snapshot().table("ns", "lineage")
    assert definition.format_properties[METADATA_LOCATION] == lineage.metadata_path
    with pytest.raises((InvalidDefinitionError, InvalidInputError)):
        operations.plan_compact_tables(lake, tables=["ns.dv"])


def test_trimming_leaves_later_tables_and_does_the_others(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    lakes.watch(aging.lake)
    later = make_later(aging.lake, "later", with_vectors=True)
    for _ in range(3):
        append_rows(aging.lake, "ns.plain")
    aging.later()
    aging.expire()
    plan = operations.plan_trim_tables(aging.lake)
    assert plan.unwritable == ("ns.later",)
    assert [trim.table for trim in plan.tables] == ["plain"]
    plan.execute()
    assert later.ids() == KEPT
    with pytest.raises(InvalidInputError, match=r"ns\.later"):
        operations.plan_trim_tables(aging.lake, tables=["ns.later"])


def test_a_write_to_a_later_table_is_refused(lake: Lakehouse, vectors: LaterTable) -> None:
    latest = lake.latest_version()
    with pytest.raises(InvalidDefinitionError):
        plan_write(lake, "ns", "dv")
    with pytest.raises(ValueError, match="table version: 3"):  # pyiceberg's own, to who writes by its tables
        append_rows(lake, "ns.dv")
    assert lake.latest_version() == latest
    assert vectors.ids() == KEPT


def test_a_roll_back_brings_vectors_back(lake: Lakehouse, vectors: LaterTable) -> None:
    version = lake.latest_version()
    with lake.transaction() as txn:
        txn.drop_table("ns", "dv")
    operations.plan_rollback(lake, version).execute()
    assert vectors.ids() == KEPT


def test_a_later_table_is_registered_and_read(lakes: Lakes, vectors: LaterTable) -> None:
    other = allowing(lakes.local("other"), vectors.lake.root)
    metadata = vectors.lake.root + vectors.metadata_path
    with other.transaction() as txn:
        txn.create_namespace("ns")
    operations.register_table(other, "ns", "dv", metadata)
    with catalog_at(other) as catalog:
        assert sorted(catalog.load_table("ns.dv").scan().to_arrow()["id"].to_pylist()) == KEPT
    assert isinstance(other.snapshot().table("ns", "dv"), TableDef)
