"""Rewriting groups of small files: how files are grouped, how rows are sorted, and what is rejected."""

from __future__ import annotations

import json
import math
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile, ManifestEntryStatus
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.table.update import RemovePartitionSpecsUpdate, RemoveSchemasUpdate
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DoubleType, LongType, NestedField, StringType, UUIDType

from tests.lakes import listed
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, CorruptFileError, InvalidDefinitionError, InvalidInputError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.compact import TARGET_PROPERTY, FileGroup, RewriteRules, find_groups
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.iceberg.write.rewrite import Rewriting, rewrite_in_process, rewriting_of, stage_rewritten
from trinitylake_ops.iceberg.write.staging import load_staged

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "city", StringType(), required=False),
    NestedField(3, "score", DoubleType(), required=False),
)


def rows(*ids: int | None, city: str | None = "a", score: float | None = None) -> pa.Table:
    columns = [pa.array(ids, pa.int64()), pa.array([city] * len(ids), pa.string())]
    return pa.Table.from_arrays([*columns, pa.array([score] * len(ids), pa.float64())], ["id", "city", "score"])


def create_with_appends(catalog: TrinityLakeCatalog, *parts: pa.Table, **options: object) -> Table:
    table = catalog.create_table("ns.t", SCHEMA, **options)  # type: ignore[arg-type]
    for part in parts:
        table.append(part)
    return table


def io_of(table: Table) -> StorageFileIO:
    assert isinstance(table.io, StorageFileIO)
    return table.io


def groups_of(table: Table, rules: RewriteRules) -> tuple[FileGroup, ...]:
    return find_groups(table.metadata, io_of(table), rules).groups


def read_ids(table: Table, new_files: list[list[DataFile]]) -> list[list[int | None]]:
    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    return [scan.to_table([FileScanTask(file)])["id"].to_pylist() for files in new_files for file in files]


def test_neighboring_files_are_grouped_up_to_target_size(catalog: TrinityLakeCatalog) -> None:
    table = create_with_appends(catalog, *(rows(number) for number in range(7)))
    size = max(task.file.file_size_in_bytes for task in table.scan().plan_files())
    plan = find_groups(table.metadata, io_of(table), RewriteRules(3 * size, min_input_files=2))
    assert [len(group.files) for group in plan.groups] == [3, 3], "the seventh file is not grouped"
    assert (plan.data_files, plan.older_spec_files) == (7, 0)
    ids = [[row_id for (row_id,) in read_ids(table, [[*group.files]])] for group in plan.groups]
    assert ids == [[0, 1, 2], [3, 4, 5]], "in commit order"
    assert groups_of(table, RewriteRules(size, min_input_files=2)) == (), "no file is small"
    assert [len(group.files) for group in groups_of(table, RewriteRules(min_input_files=7))] == [7]
    assert groups_of(table, RewriteRules(min_input_files=8)) == ()
    assert len(groups_of(table, RewriteRules(3 * size, min_input_files=8))) == 2, "only groups that fill a file"


@pytest.mark.parametrize("text", ["9" * 5000, "0", "-1", "x", "", "1e9", "\u0663"])
def test_invalid_target_size_property_is_ignored(catalog: TrinityLakeCatalog, text: str) -> None:
    metadata = catalog.create_table("ns.t", SCHEMA).metadata
    metadata_with_property = metadata.model_copy(update={"properties": {TARGET_PROPERTY: text}})
    assert RewriteRules().target_bytes(metadata_with_property) == RewriteRules().target_bytes(metadata)


def test_target_size_is_table_property(catalog: TrinityLakeCatalog) -> None:
    table = create_with_appends(
        catalog, *(rows(number) for number in range(4)), properties={"write.target-file-size-bytes": "1"}
    )
    assert groups_of(table, RewriteRules(min_input_files=2)) == ()
    assert rewriting_of(table.metadata, io_of(table), RewriteRules()).max_file_bytes == 1
    assert len(groups_of(table, RewriteRules(1 << 20, min_input_files=2))) == 1


def test_rewritten_rows_are_sorted(catalog: TrinityLakeCatalog) -> None:
    order = SortOrder(
        SortField(3, IdentityTransform(), SortDirection.DESC, NullOrder.NULLS_FIRST),
        SortField(1, IdentityTransform(), SortDirection.ASC, NullOrder.NULLS_LAST),
    )
    parts = [rows(3, None, 1, score=1.0), rows(7, score=math.nan), rows(5, score=None), rows(2, score=2.0)]
    table = create_with_appends(catalog, *parts, sort_order=order)
    groups = groups_of(table, RewriteRules(min_input_files=2))
    rewriting = rewriting_of(table.metadata, io_of(table), RewriteRules())
    new_files = rewrite_in_process([(rewriting, group) for group in groups])
    assert read_ids(table, new_files) == [[5, 7, 2, 1, 3, None]]
    assert [file.sort_order_id for files in new_files for file in files] == [table.metadata.default_sort_order_id]


def test_rewritten_rows_are_sorted_by_uuid(catalog: TrinityLakeCatalog) -> None:
    schema = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "key", UUIDType(), required=False))
    order = SortOrder(SortField(2, IdentityTransform(), SortDirection.DESC, NullOrder.NULLS_LAST))
    table = catalog.create_table("ns.t", schema, sort_order=order)
    for number, key in ((1, uuid.UUID(int=1)), (2, None), (3, uuid.UUID(int=2**127))):
        keys = pa.array([None if key is None else key.bytes], pa.uuid())
        table.append(pa.table({"id": pa.array([number], pa.int64()), "key": keys}))
    (group,) = groups_of(table, RewriteRules(min_input_files=2))
    new_files = rewrite_in_process([(rewriting_of(table.metadata, io_of(table), RewriteRules()), group)])
    assert read_ids(table, new_files) == [[3, 1, 2]]


def test_partition_of_any_transform_keeps_its_value(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    """Only other engines write such files. PyIceberg does not."""
    table = create_with_appends(catalog, *(rows(number) for number in range(3)))
    (group,) = groups_of(table, RewriteRules(min_input_files=2))
    with table.update_spec() as update:
        update.add_field("id", BucketTransform(8), "id_bucket")
    for file in group.files:
        file.spec_id = table.metadata.default_spec_id
    rewriting = rewriting_of(table.metadata, io_of(table), RewriteRules())
    (new_files,) = rewrite_in_process([(rewriting, FileGroup(group.files, Record(5)))])
    assert [(file.partition[0], "/id_bucket=5/" in file.file_path) for file in new_files] == [(5, True)]
    assert read_ids(table, [new_files]) == [[0, 1, 2]]
    with pytest.raises(InvalidDefinitionError):
        groups_of(table, RewriteRules(repartition=True))


def test_files_of_older_spec_are_repartitioned(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = create_with_appends(catalog, rows(1, city="a"), rows(2, city=None), rows(3, city="a"))
    with table.update_spec() as update:
        update.add_identity("city")
    table.append(rows(4, city="b"))
    assert groups_of(table, RewriteRules(min_input_files=2)) == ()
    plan = find_groups(table.metadata, io_of(table), RewriteRules(min_input_files=2, repartition=True))
    assert ([len(group.files) for group in plan.groups], plan.older_spec_files) == ([3], 3)
    new_files = rewrite_in_process([(rewriting_of(table.metadata, io_of(table), RewriteRules()), plan.groups[0])])
    staged = stage_rewritten(
        lake, ("ns", "t"), table.metadata, plan.groups[:1], new_files[0], begun_at_ms=lake.storage.now_ms()
    )
    after = load_staged(lake, staged)
    assert {(task.file.spec_id, task.file.partition[0]) for task in after.scan().plan_files()} == {
        (1, "a"),
        (1, None),
        (1, "b"),
    }
    assert sorted(after.scan().to_arrow()["id"].to_pylist()) == [1, 2, 3, 4]
    assert sorted(after.scan(row_filter="city is null").to_arrow()["id"].to_pylist()) == [2]
    current = after.current_snapshot()
    assert current is not None and current.summary is not None
    assert current.summary.operation.value == "replace"
    assert current.summary["total-records"] == "4"


@pytest.mark.parametrize("operation", ["compaction", "replacement", "overwrite"])
def test_files_of_spec_with_dropped_column_are_rewritten(
    lake: Lakehouse, catalog: TrinityLakeCatalog, operation: str
) -> None:
    by_city = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "city"))
    table = create_with_appends(
        catalog, rows(1, city="a"), rows(2, city=None), rows(3, city="b"), partition_spec=by_city
    )
    with table.update_spec() as spec:
        spec.remove_field("city")
    with table.update_schema() as columns:
        columns.delete_column("city")
    one_row = rows(4).drop_columns(["city"])
    if operation == "overwrite":
        table.overwrite(one_row)
    elif operation == "replacement":
        staged = stage_arrow(lake, one_row, "ns", "t", mode="replace_table")
        publish_once(lake, [staged], publication_id("dropped", "city"))
    else:
        operations.plan_compact_tables(lake, repartition=True).execute()
    after = catalog.load_table("ns.t")
    assert {task.file.spec_id for task in after.scan().plan_files()} == {after.metadata.default_spec_id}
    expected = [1, 2, 3] if operation == "compaction" else [4]
    assert sorted(after.scan(row_filter="id > 0").to_arrow()["id"].to_pylist()) == expected
    io = io_of(after)
    entries = [
        entry
        for snapshot in after.metadata.snapshots
        for manifest in manifests_in(snapshot, io)
        for entry in entries_in(manifest, io)
    ]
    values = {entry.data_file.partition[0] for entry in entries if entry.status == ManifestEntryStatus.DELETED}
    assert values == {"a", None, "b"}, "partition values of the old spec are preserved"


def test_void_field_of_dropped_column_is_rejected(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    """In format version 1 a removed partition field remains in the current spec, without values."""
    by_city = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "city"))
    version = {"format-version": "1"}
    table = create_with_appends(catalog, rows(1), rows(2), partition_spec=by_city, properties=version)
    with table.update_spec() as spec:
        spec.remove_field("city")
    with table.update_schema() as columns:
        columns.delete_column("city")
    with pytest.raises(InvalidInputError):
        operations.plan_compact_tables(lake, tables=["ns.t"], repartition=True)
    assert operations.plan_compact_tables(lake, repartition=True).tables == ()
    with pytest.raises(InvalidDefinitionError):
        stage_arrow(lake, rows(4).drop_columns(["city"]), "ns", "t", mode="append")


def test_last_schema_with_partition_column_cannot_be_removed(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    by_city = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "city"))
    table = create_with_appends(catalog, rows(1), partition_spec=by_city)
    with table.update_spec() as spec:
        spec.remove_field("city")
    with table.update_schema() as columns:
        columns.delete_column("city")
    with pytest.raises(InvalidDefinitionError):
        catalog.commit_table(table, (), (RemoveSchemasUpdate(schema_ids=[0]),))
    assert table.spec().spec_id != 0
    catalog.commit_table(table, (), (RemovePartitionSpecsUpdate(spec_ids=[0]),))
    catalog.commit_table(catalog.load_table("ns.t"), (), (RemoveSchemasUpdate(schema_ids=[0]),))


def test_file_with_unexpected_row_count_is_rejected(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = create_with_appends(catalog, rows(1, 2), rows(3))
    (group,) = groups_of(table, RewriteRules(min_input_files=2))
    first, second = (file.file_path.removeprefix(lake.root) for file in group.files)
    other = pa.BufferOutputStream()
    pq.write_table(pq.read_table(pa.BufferReader(lake.storage.read(first))), other)  # written by another program
    lake.storage.write(second, other.getvalue().to_pybytes())
    before = listed(lake.storage)
    with pytest.raises(CorruptFileError, match=f"{second}' has 2 rows, but its manifest declares 1"):
        rewrite_in_process([(rewriting_of(table.metadata, io_of(table), RewriteRules()), group)])
    assert listed(lake.storage) == before


def rewrite_first_group(table: Table) -> tuple[FileGroup, list[DataFile]]:
    (group,) = groups_of(table, RewriteRules(min_input_files=2))
    rewriting: Rewriting = rewriting_of(table.metadata, io_of(table), RewriteRules())
    return group, rewrite_in_process([(rewriting, group)])[0]


def test_corrupt_manifest_raises_error_with_path(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = create_with_appends(catalog, rows(1), rows(2))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    path = snapshot.manifests(table.io)[0].manifest_path.removeprefix(lake.root)
    lake.storage.write(path, b"junk")
    with pytest.raises(CorruptFileError) as caught:
        groups_of(catalog_at(lake).load_table("ns.t"), RewriteRules())
    assert caught.value.path == path


def test_table_of_unsupported_format_version_is_rejected(catalog: TrinityLakeCatalog) -> None:
    table = create_with_appends(catalog, rows(1), rows(2))
    metadata = {**json.loads(table.metadata.model_dump_json()), "format-version": 3, "next-row-id": 2}
    metadata_v3 = TableMetadataUtil.parse_raw(json.dumps(metadata))
    with pytest.raises(InvalidDefinitionError):
        find_groups(metadata_v3, io_of(table), RewriteRules())


@pytest.mark.parametrize("change", ["overwrite", "drop", "recreate", "new spec"])
def test_staging_conflicts_if_table_changed(lake: Lakehouse, catalog: TrinityLakeCatalog, change: str) -> None:
    table = create_with_appends(catalog, rows(1), rows(2))
    metadata = table.metadata
    group, new_files = rewrite_first_group(table)
    if change == "overwrite":
        table.overwrite(rows(9))
    elif change == "new spec":
        with table.update_spec() as update:
            update.add_identity("city")
    else:
        catalog.drop_table("ns.t")
        if change == "recreate":
            catalog.create_table("ns.t", SCHEMA)
    with pytest.raises(CommitConflictError, match=r"ns\.t"):
        stage_rewritten(lake, ("ns", "t"), metadata, [group], new_files, begun_at_ms=0)
