"""Test streams of appended rows: each row is read once, and changes that cannot be followed end the stream."""

from __future__ import annotations

import pickle
from decimal import Decimal

import pyarrow as pa
import pytest
from pyiceberg.expressions import AlwaysTrue, BooleanExpression, GreaterThan
from pyiceberg.table import Table
from pyiceberg.types import DecimalType, DoubleType, ListType, LongType

from tests.lakes import Lakes, seal
from tests.operations.changes import expire
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, CorruptFileError, VersionExpiredError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.spark.source.options import StreamOptions
from trinitylake_ops.spark.source.stream_reader import Offset
from trinitylake_ops.spark.source.streams import AppendedPart, FollowedTable
from trinitylake_ops.spark.tables.schema import to_spark_schema

pytestmark = pytest.mark.local_only("these tests read only folders with Spark's readers")

SKIP = StreamOptions(on_overwrite="skip", on_gap="skip")


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


@pytest.fixture
def table(lake: Lakehouse) -> Table:
    """A table at version 2, with one row at version 3."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    created = catalog.create_table("ns.t", rows().schema)
    created.append(rows(1))
    return created


def follow(
    lake: Lakehouse,
    row_filter: BooleanExpression = AlwaysTrue(),  # noqa: B008
    version: int | None = None,
) -> FollowedTable:
    metadata = catalog_at(lake, version).load_table("ns.t").metadata
    if version is None:
        version = lake.latest_version()
    return FollowedTable("ns", "t", version, metadata.table_uuid, metadata.schema(), metadata.schema(), row_filter, 2)


def read(
    lake: Lakehouse,
    start: Offset | int,
    end: Offset | int,
    options: StreamOptions = StreamOptions(),  # noqa: B008
) -> list[int]:
    followed = follow(lake)
    first, last = (followed.at(lake, offset) if isinstance(offset, int) else offset for offset in (start, end))
    schema = to_spark_schema(followed.schema)
    parts = [pickle.loads(pickle.dumps(part)) for part in followed.parts(lake, first, last, options)]
    assert all(isinstance(part, AppendedPart) for part in parts)
    return sorted(row for part in parts for batch in part.batches(schema) for row in batch["id"].to_pylist())


def test_each_row_is_in_one_batch(lake: Lakehouse, table: Table) -> None:
    table.append(rows(2, 3))
    with lake.transaction() as txn:
        txn.create_namespace("other")
    table.append(rows(4))
    begin = follow(lake).before(lake, 0)
    assert follow(lake).before(lake, 5) == follow(lake).at(lake, 4)
    assert [read(lake, begin, end) for end in range(1, 7)] == [[], [], [1], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]
    assert [read(lake, end - 1, end) for end in range(1, 7)] == [[], [], [1], [2, 3], [], [4]]
    assert read(lake, 0, 6) == [1, 2, 3, 4]


def test_offsets_are_validated(lake: Lakehouse, table: Table) -> None:
    followed = follow(lake)
    assert all(
        followed.is_offset(offset) for offset in (followed.before(lake, 0), followed.at(lake, 1), followed.at(lake, 3))
    )
    valid = followed.at(lake, 3)
    invalid = ({"version": 3}, {**valid, "snapshot_id": 7}, {**valid, "snapshot_id": "x"}, {**valid, "table_id": None})
    assert not any(followed.is_offset(offset) for offset in invalid)


def test_compaction_adds_no_rows(lake: Lakehouse, table: Table) -> None:
    for number in range(2, 7):
        table.append(rows(number))
    before = lake.latest_version()
    operations.plan_compact_tables(lake).execute()
    table.refresh().append(rows(7))
    assert read(lake, before, lake.latest_version()) == [7]
    assert read(lake, before - 1, before + 1) == [6]
    assert read(lake, follow(lake).before(lake, 0), lake.latest_version()) == [1, 2, 3, 4, 5, 6, 7]


def test_batches_have_the_columns_of_the_stream(lake: Lakehouse, table: Table) -> None:
    followed = follow(lake)
    with table.update_schema() as update:
        update.rename_column("id", "number")
        update.add_column("more", followed.schema.find_field("id").field_type)
    table.append(pa.table({"number": pa.array([9], pa.int64()), "more": pa.array([1], pa.int64())}))
    (part,) = followed.parts(lake, followed.at(lake, 3), followed.at(lake, 5), StreamOptions())
    assert isinstance(part, AppendedPart)
    assert [batch.to_pydict() for batch in part.batches(to_spark_schema(followed.schema))] == [{"id": [9]}]


def test_filter_refers_to_columns_of_the_stream(lake: Lakehouse, table: Table) -> None:
    with table.update_schema() as update:
        update.add_column("other", LongType())
    followed = follow(lake, GreaterThan("id", 5))
    with table.update_schema() as update:
        update.rename_column("id", "x")
    with table.update_schema() as update:
        update.rename_column("other", "id")
    table.append(pa.table({"x": pa.array([9, 1], pa.int64()), "id": pa.array([1, 9], pa.int64())}))
    (part,) = followed.parts(lake, followed.at(lake, 4), followed.at(lake, lake.latest_version()), StreamOptions())
    assert isinstance(part, AppendedPart)
    batches = [batch.to_pydict() for batch in part.batches(to_spark_schema(followed.schema))]
    assert batches == [{"id": [9], "other": [1]}]


def test_incompatible_columns_end_stream(lake: Lakehouse) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    columns = pa.schema([pa.field("id", pa.int32(), nullable=False), pa.field("part", pa.int64(), nullable=False)])
    table = catalog.create_table("ns.t", columns)
    followed, start = follow(lake), follow(lake).at(lake, lake.latest_version())

    def assert_ends_stream(message: str, rows: pa.Table) -> None:
        catalog.load_table("ns.t").append(rows)
        with pytest.raises(CommitConflictError, match=rf"since .*{message}; restart"):
            followed.parts(lake, start, followed.at(lake, lake.latest_version()), SKIP)

    with table.update_schema() as update:
        update.update_column("id", LongType())
    assert_ends_stream(
        "column 'id' .*long",
        pa.table({"id": [2**40], "part": [1]}, columns.set(0, pa.field("id", pa.int64(), nullable=False))),
    )
    with catalog.load_table("ns.t").update_schema(allow_incompatible_changes=True) as update:
        update.update_column("id", required=False)
    assert_ends_stream(
        "column 'id' became optional",
        pa.table({"id": [None, 1], "part": [1, 2]}, pa.schema([pa.field("id", pa.int64()), columns.field("part")])),
    )
    with catalog.load_table("ns.t").update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("id")
    assert_ends_stream("required column 'id' was dropped", pa.table({"part": [1]}, pa.schema([columns.field("part")])))
    catalog.drop_table("ns.t")
    catalog.create_table("ns.t", pa.schema([("part", pa.int64()), ("id", pa.int32())]))
    assert_ends_stream("another table", pa.table({"part": [1], "id": pa.array([5], pa.int32())}))


def read_versions(lake: Lakehouse, start: int, end: int) -> list[dict[str, object]]:
    """Return rows that were written before schema changes, as read with the later schema of the stream."""
    followed = follow(lake)
    parts = followed.parts(lake, followed.at(lake, start), followed.at(lake, end), StreamOptions())
    assert all(isinstance(part, AppendedPart) for part in parts)
    schema = to_spark_schema(followed.schema)
    batches = [batch for part in parts if isinstance(part, AppendedPart) for batch in part.batches(schema)]
    return [row for batch in batches for row in batch.to_pylist()]


def test_older_rows_are_read_with_wider_columns(lake: Lakehouse) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    inner = pa.struct([pa.field("n", pa.int32())])
    columns = pa.schema([("i", pa.int32()), ("f", pa.float32()), ("d", pa.decimal128(5, 2)), ("s", inner)])
    table = catalog.create_table("ns.t", columns)
    values = {"i": 1, "f": 0.5, "d": Decimal("1.25"), "s": {"n": 7}}
    table.append(pa.Table.from_pylist([values], columns))
    with table.update_schema() as update:
        update.update_column("i", LongType()).update_column("f", DoubleType()).update_column("d", DecimalType(9, 2))
        update.update_column(("s", "n"), LongType())
    assert read_versions(lake, 2, 3) == [values]
    with catalog.load_table("ns.t").update_schema(allow_incompatible_changes=True) as update:
        update.add_column("more", ListType(1, LongType(), element_required=True))
        update.update_column("i", required=True)
    assert read_versions(lake, 2, 3) == [{**values, "more": None}], "one column became required, and one was added"


def test_older_rows_without_required_value_end_stream(lake: Lakehouse, table: Table) -> None:
    table.append(pa.table({"id": pa.array([None], pa.int64())}))
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.update_column("id", required=True)
    assert read_versions(lake, 2, 3) == [{"id": 1}]
    with pytest.raises(CorruptFileError):
        read_versions(lake, 3, 4)
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.add_column("more", LongType(), required=True)
    with pytest.raises(CommitConflictError):
        read_versions(lake, 2, 3)


def test_overwrite_ends_stream_or_is_skipped(lake: Lakehouse, table: Table) -> None:
    table.overwrite(rows(5))
    table.append(rows(6))
    with pytest.raises(CommitConflictError, match=r"ns\.t"):
        read(lake, 3, lake.latest_version())
    # An overwrite of PyIceberg is a delete followed by an append of the new rows.
    assert read(lake, 3, lake.latest_version(), SKIP) == [5, 6]


def test_rollback_ends_stream_or_is_skipped(lake: Lakehouse, table: Table) -> None:
    table.append(rows(2))
    start = follow(lake).at(lake, 4)
    operations.rollback(lake, 3)
    catalog_at(lake).load_table("ns.t").append(rows(3))
    with pytest.raises(CommitConflictError):
        read(lake, start, lake.latest_version())
    assert read(lake, start, lake.latest_version(), SKIP) == [3]


def test_new_table_with_same_name_ends_stream_or_is_skipped(lake: Lakehouse, table: Table) -> None:
    start = follow(lake).at(lake, 3)
    catalog = catalog_at(lake)
    catalog.drop_table("ns.t")
    dropped = followed_offset(lake)
    catalog.create_table("ns.t", rows().schema).append(rows(8))
    with pytest.raises(CommitConflictError):
        read(lake, start, lake.latest_version())
    assert read(lake, start, lake.latest_version(), SKIP) == [8]
    assert read(lake, dropped, lake.latest_version()) == [8]


def followed_offset(lake: Lakehouse) -> Offset:
    return follow(lake, version=3).at(lake, lake.latest_version())


def test_expired_versions_are_no_gap_while_table_keeps_snapshots(lake: Lakehouse, table: Table) -> None:
    start = follow(lake).at(lake, 3)
    for number in range(2, 6):
        table.append(rows(number))
    expire(lake, "2-6")
    seal(lake, 4)
    assert read(lake, start, 7) == [2, 3, 4, 5]
    policy = RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    operations.plan_trim_tables(lake, policy).execute()
    assert read(lake, start, 7) == [2, 3, 4, 5], "version 7 has separate metadata"
    table.refresh().append(rows(6))
    expire(lake, "7-8")
    with pytest.raises(VersionExpiredError, match=r"ns\.t"):
        read(lake, start, lake.latest_version())
    assert read(lake, start, lake.latest_version(), SKIP) == [5, 6], "only snapshots that still exist"


def test_gap_in_table_of_format_version_1(lake: Lakehouse) -> None:
    """Snapshots of format version 1 have no sequence numbers, which otherwise show whether a snapshot is the first."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", rows().schema, properties={"format-version": "1"})
    for number in range(1, 4):
        table.append(rows(number))
    start = follow(lake).at(lake, 4)
    assert read(lake, start, 5) == [3]
    expire(lake, "1-4")
    operations.plan_trim_tables(lake, RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)).execute()
    catalog.load_table("ns.t").append(rows(7))
    assert read(lake, start, lake.latest_version()) == [3, 7], "version 5 refers to the previous snapshot"
    expire(lake, "5-7")
    with pytest.raises(VersionExpiredError, match=r"ns\.t"):
        read(lake, start, lake.latest_version())
    assert read(lake, start, lake.latest_version(), StreamOptions(on_gap="skip")) == [3, 7]
