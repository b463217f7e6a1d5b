"""Test tables of Iceberg format version 3: no operation deletes files that they need or loses their content."""

from __future__ import annotations

import json

import pytest

from tests.lakes import Lakes, allowing, listed
from tests.operations.aging import Aging
from tests.operations.changes import append_rows
from tests.operations.format_v3_tables import FormatV3Table, make_format_v3_table, read_avro
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.plan import plan_write

REMAINING_IDS = [2, 2, 3, 3]


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


@pytest.fixture
def vectors(lake: Lakehouse) -> FormatV3Table:
    return make_format_v3_table(lake, "dv", with_vectors=True)


@pytest.fixture
def lineage(lake: Lakehouse) -> FormatV3Table:
    return make_format_v3_table(lake, "lineage", with_vectors=False)


def test_deletion_vectors_are_read_and_verified(lake: Lakehouse, vectors: FormatV3Table) -> None:
    assert vectors.ids() == REMAINING_IDS
    assert operations.verify(lake, deep=True).findings == ()
    assert vectors.puffin_path is not None
    lake.storage.delete(vectors.puffin_path)
    findings = operations.verify(lake, deep=True).findings
    assert any(vectors.puffin_path in str(finding) for finding in findings)


def test_cleanup_keeps_files_of_deletion_vectors(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    lakes.watch(aging.lake)
    table = make_format_v3_table(aging.lake, "dv", with_vectors=True)
    append_rows(aging.lake, "ns.other")
    aging.clean_up()
    assert table.ids() == REMAINING_IDS
    assert table.puffin_path in listed(aging.lake.storage)
    with aging.lake.transaction() as txn:
        txn.drop_table("ns", "dv")
    aging.clean_up()
    assert table.puffin_path not in listed(aging.lake.storage), "deleted after the last version with the table"


@pytest.mark.parametrize("to_other_root", [False, True])
def test_full_export_copies_deletion_vectors(
    lakes: Lakes, lake: Lakehouse, vectors: FormatV3Table, to_other_root: bool
) -> None:
    target = lakes.root("copy") if to_other_root else None
    operations.plan_export(lake, "x", "full", target=target).execute()
    assert operations.verify_export(lake, "x", deep=True).is_clean
    with lake.transaction() as txn:
        txn.drop_table("ns", "dv")
    operations.plan_restore(lake, "x").execute()
    assert vectors.ids() == REMAINING_IDS
    check_vectors(lake, vectors)
    if target is not None:
        copy = Lakehouse.open(target)
        check_vectors(copy, vectors)
        assert operations.verify(copy, deep=True).findings == ()


def check_vectors(copy: Lakehouse, table: FormatV3Table) -> None:
    """Check that the manifest and the Puffin file refer to copied data files, and that blobs keep their offsets."""
    definition = copy.snapshot().table("ns", "dv")
    metadata = json.loads(copy.storage.read(definition.format_properties[METADATA_LOCATION]))
    _, manifests, _ = read_avro(copy, metadata["snapshots"][-1]["manifest-list"])
    (delete_manifest,) = (manifest for manifest in manifests if manifest["content"] == 1)
    _, entries, _ = read_avro(copy, delete_manifest["manifest_path"])
    assert table.puffin_path is not None
    source = table.lake.storage.read(table.puffin_path)
    for entry in (entry["data_file"] for entry in entries):
        data = copy.storage.read(entry["file_path"].removeprefix(copy.root))
        assert entry["file_size_in_bytes"] == len(data)
        offset, size = entry["content_offset"], entry["content_size_in_bytes"]
        assert data[offset : offset + size] == source[offset : offset + size]
        assert entry["referenced_data_file"].startswith(copy.root)
        assert f'"referenced-data-file":"{entry["referenced_data_file"]}"'.encode() in data


@pytest.mark.parametrize("level", ["minimal", "partial"])
def test_exports_without_data_restore_deletion_vectors(lake: Lakehouse, vectors: FormatV3Table, level: str) -> None:
    operations.plan_export(lake, "x", level).execute()
    before = lake.latest_version()
    with lake.transaction() as txn:
        txn.drop_table("ns", "dv")
    operations.plan_restore(lake, "x").execute()
    assert lake.latest_version() > before
    assert vectors.ids() == REMAINING_IDS


def test_full_export_keeps_row_lineage(lakes: Lakes, lake: Lakehouse, lineage: FormatV3Table) -> None:
    root = lakes.root("copy")
    operations.plan_export(lake, "x", "full", target=root).execute()
    check_lineage(Lakehouse.open(root), lineage)
    with lake.transaction() as txn:
        txn.drop_table("ns", "lineage")
    operations.plan_restore(lake, "x").execute()
    check_lineage(lake, lineage)


def check_lineage(copy: Lakehouse, table: FormatV3Table) -> None:
    """Check that a copied table has the same metadata and manifest list, apart from locations."""
    source_metadata = json.loads(table.lake.storage.read(table.metadata_path))
    definition = copy.snapshot().table("ns", "lineage")
    copied_metadata = json.loads(copy.storage.read(definition.format_properties[METADATA_LOCATION]))
    for name in ("next-row-id", "encryption-keys", "format-version", "table-uuid"):
        assert copied_metadata[name] == source_metadata[name], name
    for copied_snapshot, source_snapshot in zip(
        copied_metadata["snapshots"], source_metadata["snapshots"], strict=True
    ):
        assert {**copied_snapshot, "manifest-list": ""} == {**source_snapshot, "manifest-list": ""}
    _, manifests, header = read_avro(copy, copied_metadata["snapshots"][-1]["manifest-list"])
    assert [manifest["first_row_id"] for manifest in manifests] == [0, 3]
    assert header["format-version"] == "3"
    with catalog_at(copy) as catalog:
        assert sorted(catalog.load_table("ns.lineage").scan().to_arrow()["id"].to_pylist()) == [1, 1, 2, 2, 3, 3]
    assert operations.verify(copy, deep=True).findings == ()


def test_compaction_skips_format_v3_tables(lake: Lakehouse, vectors: FormatV3Table, lineage: FormatV3Table) -> None:
    for _ in range(5):
        append_rows(lake, "ns.small")
    plan = operations.plan_compact_tables(lake)
    assert {name for name, reason in plan.left.items() if "format version 3" in reason} == {"ns.dv", "ns.lineage"}
    assert [result.table for result in plan.execute().tables] == ["ns.small"]
    assert vectors.ids() == REMAINING_IDS
    assert len(lineage.ids()) == 6
    definition = lake.snapshot().table("ns", "lineage")
    assert definition.format_properties[METADATA_LOCATION] == lineage.metadata_path
    with pytest.raises((InvalidDefinitionError, InvalidInputError)):
        operations.plan_compact_tables(lake, tables=["ns.dv"])


def test_trim_skips_format_v3_tables(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    lakes.watch(aging.lake)
    table = make_format_v3_table(aging.lake, "later", with_vectors=True)
    for _ in range(3):
        append_rows(aging.lake, "ns.plain")
    aging.later()
    aging.expire()
    plan = operations.plan_trim_tables(aging.lake)
    assert plan.unwritable == ("ns.later",)
    assert [trim.table for trim in plan.tables] == ["plain"]
    plan.execute()
    assert table.ids() == REMAINING_IDS
    with pytest.raises(InvalidInputError, match=r"ns\.later"):
        operations.plan_trim_tables(aging.lake, tables=["ns.later"])


def test_write_to_format_v3_table_fails(lake: Lakehouse, vectors: FormatV3Table) -> None:
    latest = lake.latest_version()
    with pytest.raises(InvalidDefinitionError):
        plan_write(lake, "ns", "dv")
    with pytest.raises(ValueError, match="table version: 3"):  # pyiceberg raises it for writes to its table
        append_rows(lake, "ns.dv")
    assert lake.latest_version() == latest
    assert vectors.ids() == REMAINING_IDS


def test_rollback_restores_deletion_vectors(lake: Lakehouse, vectors: FormatV3Table) -> None:
    version = lake.latest_version()
    with lake.transaction() as txn:
        txn.drop_table("ns", "dv")
    operations.plan_rollback(lake, version).execute()
    assert vectors.ids() == REMAINING_IDS


def test_format_v3_table_is_registered_and_read(lakes: Lakes, vectors: FormatV3Table) -> None:
    other = allowing(lakes.local("other"), vectors.lake.root)
    metadata = vectors.lake.root + vectors.metadata_path
    with other.transaction() as txn:
        txn.create_namespace("ns")
    operations.register_table(other, "ns", "dv", metadata)
    with catalog_at(other) as catalog:
        assert sorted(catalog.load_table("ns.dv").scan().to_arrow()["id"].to_pylist()) == REMAINING_IDS
    assert isinstance(other.snapshot().table("ns", "dv"), TableDef)
