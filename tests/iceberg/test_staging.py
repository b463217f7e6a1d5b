"""Tables are staged, audited and then published."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.expressions.visitors import _ManifestEvalVisitor
from pyiceberg.table.snapshots import Operation
from pyiceberg.types import LongType

from tests.iceberg.test_catalog import SCHEMA, ids_of, rows
from tests.iceberg.test_data_files import FLIGHTS, flights
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    InvalidDefinitionError,
    InvalidInputError,
    NamespaceNotFoundError,
    TableNotFoundError,
    UnsupportedTypeError,
)
from trinitylake_ops.format.definitions import Column, DataType, Schema
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.plan import plan_write
from trinitylake_ops.iceberg.write.staging import (
    Replace,
    StagedTable,
    StagingCatalog,
    load_staged,
    publish,
    stage_appended,
    stage_data_files,
)


def stage(
    lake: Lakehouse, *batches: pa.RecordBatch, table: str = "daily", replacing: Replace | str = Replace.NOTHING
) -> StagedTable:
    """Plan a write, write the files with a pickled copy of the plan as an executor does, and stage them."""
    write = plan_write(lake, "flights", table, FLIGHTS, partition_by=("year", "month"))
    files = pickle.loads(pickle.dumps(write)).write(batches)
    return stage_data_files(lake, write, pickle.loads(pickle.dumps(files)), replacing=replacing)


def publish_all(lake: Lakehouse, *staged: StagedTable) -> int:
    with lake.transaction() as txn:
        publish(txn, staged)
    assert txn.committed_version is not None
    return txn.committed_version


def months(lake: Lakehouse, table: str = "daily", version: int | None = None) -> dict[int, int]:
    """Return the number of rows of each month."""
    values = catalog_at(lake, version).load_table(("flights", table)).scan().to_arrow()["month"].to_pylist()
    return {month: values.count(month) for month in sorted(set(values))}


def test_new_table_is_written_audited_and_published(lake: Lakehouse) -> None:
    version = lake.latest_version()
    staged = stage(lake, flights(1, 1, 2), flights(2))
    assert lake.latest_version() == version
    assert not lake.snapshot().has_namespace("flights")
    assert load_staged(lake, staged).scan().to_arrow().num_rows == 4
    assert publish_all(lake, staged) == version + 1
    assert months(lake) == {1: 2, 2: 2}
    data_files = [info for info in lake.storage.list("tables/") if info.path.endswith(".parquet")]
    assert staged.total_bytes == staged.added_bytes == sum(info.size_bytes for info in data_files)
    counts = (staged.row_count, staged.added_files, staged.added_rows, staged.removed_files, staged.removed_bytes)
    assert counts == (4, 2, 4, 0, 0)
    assert staged.partitions == ("year=2013/month=1", "year=2013/month=2")
    assert staged.base_metadata_location is None
    assert staged.base_version == version
    table = catalog_at(lake).load_table("flights.daily")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.snapshot_id == staged.snapshot_id
    assert table.metadata_location == lake.root + staged.metadata_location
    assert table.properties["gc.enabled"] == "false"


def test_partitions_are_replaced_in_one_snapshot(lake: Lakehouse) -> None:
    publish_all(lake, stage(lake, flights(1, 1, 2, 3)))
    before = lake.latest_version()
    staged = stage(lake, flights(2, 2, 2), flights(4), replacing=Replace.PARTITIONS)
    publish_all(lake, staged)
    assert months(lake) == {1: 2, 2: 3, 3: 1, 4: 1}
    assert months(lake, version=before) == {1: 2, 2: 1, 3: 1}
    assert staged.partitions == ("year=2013/month=2", "year=2013/month=4")
    assert (staged.row_count, staged.added_rows, staged.removed_rows) == (7, 4, 1)
    assert (staged.added_files, staged.removed_files) == (2, 1)
    snapshots = catalog_at(lake).load_table("flights.daily").snapshots()
    assert [snapshot.summary.operation for snapshot in snapshots if snapshot.summary] == [
        Operation.APPEND,
        Operation.OVERWRITE,
    ]


def test_null_partition_is_replaced(lake: Lakehouse) -> None:
    publish_all(lake, stage(lake, flights(None, None, 1)))
    publish_all(lake, stage(lake, flights(None), replacing=Replace.PARTITIONS))
    month_values = catalog_at(lake).load_table("flights.daily").scan().to_arrow()["month"].to_pylist()
    assert sorted(month_values, key=str) == [1, None]


def test_many_partitions_are_replaced_at_once(lake: Lakehouse) -> None:
    all_months = range(150)
    publish_all(lake, stage(lake, flights(*all_months)))
    publish_all(lake, stage(lake, flights(*all_months, *all_months), replacing=Replace.PARTITIONS))
    assert months(lake) == dict.fromkeys(all_months, 2)


def test_manifest_filters_are_not_shared_between_threads(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyIceberg searches for files to delete in several threads that share one filter."""
    for month in range(1, 13):
        publish_all(lake, stage(lake, flights(month)))
    evaluate = _ManifestEvalVisitor.visit_equal

    def visit_equal(self: Any, **arguments: Any) -> bool:
        time.sleep(0.002)  # so that the threads overlap
        return evaluate(self, **arguments)

    monkeypatch.setattr(_ManifestEvalVisitor, "visit_equal", visit_equal)
    publish_all(lake, stage(lake, flights(5, 5, 5), replacing=Replace.PARTITIONS))
    monkeypatch.undo()
    assert months(lake) == {month: 3 if month == 5 else 1 for month in range(1, 13)}


def test_all_rows_or_matching_files_are_replaced(lake: Lakehouse) -> None:
    publish_all(lake, stage(lake, flights(1, 2, 3)))
    publish_all(lake, stage(lake, replacing="year = 2013 and month = 2"))
    assert months(lake) == {1: 1, 3: 1}
    with pytest.raises(InvalidInputError):
        stage(lake, flights(1), replacing="delay = 0")
    publish_all(lake, stage(lake, flights(9), replacing=Replace.ALL))
    assert months(lake) == {9: 1}
    emptied = stage(lake, replacing=Replace.ALL)
    assert (emptied.row_count, emptied.removed_rows) == (0, 1)
    publish_all(lake, emptied)
    assert months(lake) == {}


def test_unpartitioned_table_is_replaced_as_a_whole(lake: Lakehouse) -> None:
    for batch in (flights(1, 2), flights(3)):
        write = plan_write(lake, "flights", "plain", FLIGHTS)
        staged = stage_data_files(lake, write, write.write([batch]), replacing=Replace.ALL)
        publish_all(lake, staged)
    assert months(lake, "plain") == {3: 1}
    assert (staged.removed_rows, staged.partitions) == (2, ())
    with pytest.raises(InvalidInputError):
        stage_data_files(
            lake, write := plan_write(lake, "flights", "plain"), write.write([flights(1)]), replacing=Replace.PARTITIONS
        )


def test_publication_is_one_version_and_staging_changes_no_version(lake: Lakehouse) -> None:
    staged = [stage(lake, flights(1), table=name) for name in ("a", "b", "c")]
    version = publish_all(lake, *staged)
    assert [lake.snapshot(version - 1).has_namespace("flights"), lake.snapshot().tables("flights")] == [
        False,
        ["a", "b", "c"],
    ]
    unchanged = stage(lake, table="a", replacing=Replace.PARTITIONS)
    assert unchanged.metadata_location == unchanged.base_metadata_location
    assert publish_all(lake, unchanged) == version


def test_empty_table_is_created(lake: Lakehouse) -> None:
    staged = stage(lake)
    assert (staged.row_count, staged.snapshot_id) == (0, None)
    publish_all(lake, staged)
    assert months(lake) == {}


def test_incompatible_schema_or_partitions_are_rejected(lake: Lakehouse) -> None:
    publish_all(lake, stage(lake, flights(1)))
    wider_schema = FLIGHTS.append(pa.field("distance", pa.int64()))
    write = plan_write(lake, "flights", "daily", wider_schema)
    batch = flights(2).append_column("distance", pa.array([100], pa.int64()))
    publish_all(lake, stage_data_files(lake, write, write.write([batch])))
    table = catalog_at(lake).load_table("flights.daily")
    assert sorted(table.scan().to_arrow()["distance"].to_pylist(), key=str) == [100, None]
    assert [column.name for column in lake.snapshot().table("flights", "daily").schema.columns][-1] == "distance"
    with pytest.raises(InvalidDefinitionError):
        plan_write(lake, "flights", "daily", partition_by=("year",))
    with pytest.raises(InvalidDefinitionError, match="'nothing'"):
        plan_write(lake, "flights", "new", FLIGHTS, partition_by=("nothing",))
    with pytest.raises(TableNotFoundError):
        plan_write(lake, "flights", "new")
    with pytest.raises(InvalidDefinitionError):
        plan_write(lake, "flights", "new", FLIGHTS, properties={"format-version": "3"})
    schema = Schema(columns=(Column(id=1, name="code", type=DataType.CHAR),))
    with pytest.raises(UnsupportedTypeError):
        plan_write(lake, "flights", "new", schema)


@pytest.mark.parametrize("timing", ["before staging", "before publishing", "before the commit"])
@pytest.mark.parametrize("change", ["changed", "dropped", "created"])
def test_table_changed_since_staging_is_not_published(lake: Lakehouse, timing: str, change: str) -> None:
    if change != "created":
        publish_all(lake, stage(lake, flights(1)))

    def change_table() -> None:
        if change == "dropped":
            catalog_at(lake).drop_table("flights.daily")
        else:
            publish_all(lake, stage(lake, flights(5)))

    write = plan_write(lake, "flights", "daily", FLIGHTS, partition_by=("year", "month"))
    files = write.write([flights(2)])
    if timing == "before staging":
        change_table()
        with pytest.raises(CommitConflictError, match=f"flights.daily was staged on version .* {change}"):
            stage_data_files(lake, write, files)
        return
    staged = stage_data_files(lake, write, files)
    if timing == "before publishing":
        change_table()
        with pytest.raises(CommitConflictError, match=f"flights.daily was staged on version .* {change}") as caught:
            publish_all(lake, staged)
        assert caught.value.base_version == staged.base_version
        return
    txn = lake.transaction()
    publish(txn, [staged])
    change_table()
    version = lake.latest_version()
    with pytest.raises(CommitConflictError):
        txn.commit()
    assert lake.latest_version() == version


def test_recreated_table_is_not_published(lake: Lakehouse) -> None:
    publish_all(lake, stage(lake, flights(1)))
    staged = stage(lake, flights(2))
    catalog = catalog_at(lake)
    catalog.drop_table("flights.daily")
    with lake.transaction() as txn:
        definition = lake.snapshot(lake.latest_version() - 1).table("flights", "daily")
        fields = {name: getattr(definition, name) for name in type(definition).__dataclass_fields__}
        txn.create_table("flights", "daily", type(definition)(**{**fields, "id": "another"}))
    with pytest.raises(CorruptFileError, match="'another'"):
        catalog.load_table("flights.daily")
    with pytest.raises(CommitConflictError):
        publish_all(lake, staged)


def test_namespace_is_created_only_if_requested(lake: Lakehouse) -> None:
    staged = stage(lake, flights(1))
    with pytest.raises(NamespaceNotFoundError), lake.transaction() as txn:
        publish(txn, [staged], create_namespaces=False)


def test_staging_catalog_stages_pyiceberg_writes(lake: Lakehouse) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.old", SCHEMA).append(rows(1, 2, 3))
    version = lake.latest_version()
    staging = StagingCatalog(lake)
    old = staging.load_table("ns.old")
    old.overwrite(rows(9), overwrite_filter="id == 1")
    staging.create_table("fresh.new", SCHEMA).append(rows(5))
    assert staging.base_version == version == lake.latest_version()
    staged = [staging.staged("ns.old"), staging.staged("fresh.new")]
    assert [(item.namespace, item.table, item.row_count) for item in staged] == [("ns", "old", 3), ("fresh", "new", 1)]
    assert (staged[0].added_rows, staged[0].removed_rows) == (3, 3)  # the two unchanged rows were rewritten
    assert ids_of(load_staged(lake, staged[0])) == [2, 3, 9]
    for change in (lambda: staging.drop_table("ns.old"), lambda: staging.rename_table("ns.old", "ns.x")):
        with pytest.raises(InvalidInputError):
            change()
    assert publish_all(lake, *staged) == version + 1
    assert ids_of(catalog.load_table("fresh.new")) == [5]
    assert ids_of(catalog.load_table("ns.old")) == [2, 3, 9]


def test_loaded_staged_table_is_read_only(lake: Lakehouse) -> None:
    table = load_staged(lake, stage(lake, flights(1)))
    with pytest.raises(InvalidInputError):
        table.append(pa.Table.from_batches([flights(2)]).select(FLIGHTS.names).cast(FLIGHTS))


def test_staged_table_is_encoded_as_json(lake: Lakehouse) -> None:
    staged = stage(lake, flights(1, 2))
    decoded = StagedTable.from_json(staged.to_json())
    assert decoded == staged
    assert json.loads(staged.to_json())["row_count"] == 2
    for text in ("", "[]", "{}", '{"table_def": "!"}', json.dumps({**json.loads(staged.to_json()), "extra": 1})):
        with pytest.raises(InvalidInputError):
            StagedTable.from_json(text)


STAGING_PROCESS = """
import sys
import pyarrow as pa
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.write.staging import stage_data_files
from trinitylake_ops.iceberg.write.plan import plan_write
lake = Lakehouse.open(sys.argv[1], {"fsync": "false"})
batch = pa.record_batch({"year": pa.array([2013] * 3, pa.int32()), "id": pa.array([1, 2, 3], pa.int64())})
write = plan_write(lake, "ns", "t", batch.schema, partition_by=("year",))
print(stage_data_files(lake, write, write.write([batch])).to_json())
"""
PUBLISHING_PROCESS = """
import sys
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.write.staging import StagedTable, load_staged, publish
lake = Lakehouse.open(sys.argv[1], {"fsync": "false"})
staged = StagedTable.from_json(sys.stdin.read())
assert load_staged(lake, staged).scan().to_arrow().num_rows == 3
with lake.transaction(message="published by another process") as txn:
    publish(txn, [staged])
print(txn.committed_version)
"""


@pytest.mark.local_only("opens a folder by its path; the pipeline tests cover jobs on S3")
def test_staged_table_is_published_by_another_process(lakes: Lakes) -> None:
    lake = lakes.local()

    def run(program: str, stdin: str = "") -> str:
        return subprocess.run(
            [sys.executable, "-c", program, lake.root],
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    staged = run(STAGING_PROCESS)
    assert lake.latest_version() == 0
    assert run(PUBLISHING_PROCESS, staged).strip() == "1"
    assert ids_of(catalog_at(lake).load_table("ns.t")) == [1, 2, 3]


def test_stage_appended_uses_current_table(lake: Lakehouse) -> None:
    first_row = pa.table({"id": pa.array([1], pa.int64())})
    catalog = catalog_at(lake)
    catalog.create_namespace_if_not_exists("appends")
    table = catalog.create_table("appends.t", first_row.schema)
    plan = plan_write(lake, "appends", "t", pa.schema([("id", pa.int64()), ("note", pa.string())]))
    files = plan.write(pa.table({"id": [2], "note": ["x"]}).to_batches())
    table.append(first_row)
    with lake.transaction() as txn:
        publish(txn, [stage_appended(lake, plan, files)])
    rows = catalog.load_table("appends.t").scan().to_arrow().to_pylist()
    assert sorted(rows, key=lambda row: row["id"]) == [{"id": 1, "note": None}, {"id": 2, "note": "x"}]

    plan = plan_write(lake, "appends", "t", pa.schema([("id", pa.int64()), ("more", pa.string())]))
    files = plan.write(pa.table({"id": [3], "more": ["y"]}).to_batches())
    with catalog.load_table("appends.t").update_schema() as update:
        update.add_column("others", LongType())  # gets the field id that the files use for another column
    with pytest.raises(CommitConflictError):
        stage_appended(lake, plan, files)
    plan = plan_write(lake, "appends", "t")
    with catalog.load_table("appends.t").update_spec() as spec:
        spec.add_identity("id")
    with pytest.raises(CommitConflictError):
        stage_appended(lake, plan, [])
    catalog.drop_table("appends.t")
    with pytest.raises(CommitConflictError):
        stage_appended(lake, plan, [])
    catalog.create_table("appends.t", first_row.schema)
    with pytest.raises(CommitConflictError):
        stage_appended(lake, plan, [])
