"""Test DataFrames of tables: all column types, the files that are read, and tables that cannot be read."""

import datetime as dt
import io
import pickle
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import AlwaysTrue, GreaterThan
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.typedef import Record
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType, _parse_datatype_string

from tests.engine_tables import EQUALITY, EVOLVED, with_equality, with_evolution, with_positions
from tests.lakes import check_lake, seal
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidDefinitionError,
    InvalidInputError,
    TableNotFoundError,
    UnsupportedTypeError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import load_staged, publish
from trinitylake_ops.spark.source.opened_table import open_data
from trinitylake_ops.spark.source.options import TableRequest
from trinitylake_ops.spark.tables.reader import (
    GROUP_BYTES,
    group_files,
    open_iceberg_table,
    read_files,
    read_staged,
    read_table,
)
from trinitylake_ops.spark.tables.schema import to_iceberg_schema, to_spark_schema
from trinitylake_ops.spark.tables.tasks import ReadJob, read_tasks
from trinitylake_ops.spark.tables.writer import stage_dataframe
from trinitylake_ops.versions.snapshot import Snapshot

ALL_TYPES = """
    flag boolean, small int, big bigint, single float, double double, money decimal(38, 9), text string, raw binary,
    day date, time time(6), moment timestamp, wall timestamp_ntz, tags array<string>,
    counts map<string, bigint>, place struct<name: string, at: array<struct<lat: double, lon: double>>>
"""
UTC = dt.UTC


def _wall(*parts: int) -> dt.datetime:
    """Return a time without a time zone, as in Spark's rows."""
    return dt.datetime(*parts)  # type: ignore[arg-type]  # noqa: DTZ001


FULL: tuple[Any, ...] = (
    True, -(2**31), 2**63 - 1, 1.5, float("inf"), Decimal("-12345678901234567890123456789.123456789"),
    "naïve 東京 🛫 \x00 '\"", b"\x00\xff", dt.date(1, 1, 1), dt.time(23, 59, 59, 999_999),
    _wall(1969, 12, 31, 23, 59, 59, 999_999), _wall(9999, 12, 31, 23, 59, 59, 1), ["a", None, ""],
    {"é": 1, "": None}, ("JFK", [(40.6, None), None]),
)  # fmt: skip
NULLS = (None,) * len(FULL)
EMPTY: tuple[Any, ...] = (
    False, 0, 0, -0.0, -0.0, Decimal("0E-9"), "", b"", dt.date(1970, 1, 1), dt.time(0), _wall(1970, 1, 1),
    _wall(1970, 1, 1), [], {}, (None, []),
)  # fmt: skip


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lakehouse]:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    yield lake
    check_lake(lake)


def months(spark: SparkSession, *month_numbers: int) -> DataFrame:
    return spark.createDataFrame(
        [(month, day, f"{month}/{day}") for month in month_numbers for day in (1, 2)], "month int, day int, text string"
    )


def publish_months(spark: SparkSession, lake: Lakehouse, *month_numbers: int) -> StagedTable:
    staged = stage_dataframe(
        lake, months(spark, *month_numbers), "facts", "days", partition_by=("month",), mode="append"
    )
    with lake.transaction() as txn:
        publish(txn, [staged])
    return staged


def texts(frame: DataFrame) -> list[str]:
    return sorted(row["text"] for row in frame.collect())


def test_all_types_are_read_as_written(spark: SparkSession, lake: Lakehouse) -> None:
    schema = _parse_datatype_string(ALL_TYPES)
    assert isinstance(schema, StructType)
    frame = spark.createDataFrame([FULL, NULLS, EMPTY], schema).coalesce(1)
    staged = stage_dataframe(lake, frame, "facts", "types", mode="append")
    returned = read_staged(spark, lake, staged)
    assert returned.schema == schema
    assert [tuple(row) for row in returned.collect()] == [tuple(row) for row in frame.collect()]
    # Another reader returns the same values, with the time zone of timestamps.
    arrow = load_staged(lake, staged).scan().to_arrow()
    assert arrow["moment"].to_pylist()[0] == FULL[10].replace(tzinfo=UTC)
    assert (arrow["wall"].to_pylist()[0], arrow["time"].to_pylist()[0]) == (FULL[11], FULL[9])
    assert arrow["money"].to_pylist()[0] == FULL[5]


def test_schemas_are_converted_in_both_directions() -> None:
    schema = _parse_datatype_string(
        "a int not null comment 'first', b struct<c: array<int> not null> not null, d string"
    )
    assert isinstance(schema, StructType)
    assert to_spark_schema(to_iceberg_schema(schema)) == schema
    keyed_schema = to_iceberg_schema(schema, required=("d",), primary_key=("a",))
    assert keyed_schema.identifier_field_names() == {"a"}
    assert [field.required for field in keyed_schema.fields] == [True, True, True]


def test_table_is_read_at_each_version(spark: SparkSession, lake: Lakehouse) -> None:
    publish_months(spark, lake, 1)
    frame = read_table(spark, lake, "facts.days")
    staged = publish_months(spark, lake, 2)
    assert texts(read_table(spark, lake, "facts.days", 1)) == ["1/1", "1/2"]
    assert texts(read_table(spark, lake, "facts.days", "2")) == ["1/1", "1/2", "2/1", "2/2"]
    assert texts(frame) == ["1/1", "1/2"], "a frame keeps the files of its version"
    assert frame.join(frame.withColumnRenamed("text", "same"), ["month", "day"]).where("text = same").count() == 2
    for table in (load_staged(lake, staged), staged.metadata_location, lake.root + staged.metadata_location):
        assert read_files(spark, lake, table).count() == 4


def test_filter_reads_only_matching_files(spark: SparkSession, lake: Lakehouse) -> None:
    staged = publish_months(spark, lake, 1, 2, 3)
    for task in load_staged(lake, staged).scan(row_filter="month = 2").plan_files():
        lake.storage.delete(task.file.file_path.removeprefix(lake.root))
    assert texts(read_staged(spark, lake, staged, row_filter="month = 3")) == ["3/1", "3/2"]
    assert texts(read_table(spark, lake, "facts.days", row_filter="month <> 2 and day = 1")) == ["1/1", "3/1"]
    assert texts(read_table(spark, lake, "facts.days", row_filter=GreaterThan("month", 2))) == ["3/1", "3/2"]  # type: ignore[call-arg, arg-type]
    assert read_table(spark, lake, "facts.days", row_filter="month = 9").count() == 0
    with pytest.raises(PythonException, match=r"TableFileMissingError: .*month=2/"):
        read_table(spark, lake, "facts.days").count()


def test_only_selected_columns_are_read(spark: SparkSession, lake: Lakehouse) -> None:
    staged = publish_months(spark, lake, 1)
    frame = read_staged(spark, lake, staged, columns=["text", "month"], row_filter="day = 2")
    assert [tuple(row) for row in frame.collect()] == [("1/2", 1)]
    with pytest.raises(InvalidInputError, match="'year'"):
        read_staged(spark, lake, staged, columns=["year"])


def test_invalid_reads_are_rejected(spark: SparkSession, lake: Lakehouse) -> None:
    staged = publish_months(spark, lake, 1)
    with lake.transaction() as txn:
        txn.create_table("facts", "other", TableDef(table_type="EXTERNAL", table_format="LANCE"))
    with pytest.raises(TableNotFoundError):
        read_table(spark, lake, "facts.weeks")
    with pytest.raises(VersionNotFoundError):
        read_table(spark, lake, "facts.days", 99)
    with pytest.raises(InvalidInputError, match="'LANCE'"):
        read_table(spark, lake, "facts.other")
    with pytest.raises(TableNotFoundError, match=r"a\.b\.c"):
        read_table(spark, lake, "a.b.c")
    for name in ("days", "facts.", ".days"):
        with pytest.raises(InvalidInputError, match=r"NAMESPACE\.TABLE"):
            read_table(spark, lake, name)
    with pytest.raises(InvalidInputError):
        read_table(spark, lake, "facts.days", columns=["day", "day"])
    for row_filter in ("month =", "year = 2013", "month = 'may'"):
        with pytest.raises(InvalidInputError):
            read_staged(spark, lake, staged, row_filter=row_filter)
    with pytest.raises(InvalidInputError):
        read_files(spark, Lakehouse.create("memory://reader/"), staged.metadata_location)


def test_names_with_dots_are_resolved(lake: Lakehouse) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace(("a.b",))
    catalog.create_table(("a.b", "c.d"), pa.schema([("id", pa.int64())]))
    for request in (TableRequest(table="a.b.c.d"), TableRequest(table="a.b.c.d", version=lake.latest_version())):
        opened = open_data(lake, request)
        assert (opened.schema.names, pickle.loads(opened.pickled_plan).name) == (["id"], ("a.b", "c.d"))


def test_unsupported_type_is_rejected(spark: SparkSession, lake: Lakehouse) -> None:
    from pyiceberg.schema import Schema
    from pyiceberg.types import NestedField, TimestampNanoType

    with pytest.raises(UnsupportedTypeError, match="timestamp_ns"):
        to_spark_schema(Schema(NestedField(1, "at", TimestampNanoType())))


def test_uuid_and_fixed_columns_are_binary(spark: SparkSession, lake: Lakehouse) -> None:
    from pyiceberg.schema import Schema
    from pyiceberg.types import FixedType, NestedField, UUIDType

    catalog = catalog_at(lake)
    catalog.create_namespace("facts")
    schema = Schema(NestedField(1, "id", UUIDType()), NestedField(2, "code", FixedType(3)))
    table = catalog.create_table("facts.ids", schema)
    table.append(
        pa.table(
            {"id": pa.array([b"0123456789abcdef", None], pa.uuid()), "code": pa.array([b"abc", None], pa.binary(3))}
        )
    )
    rows = {
        (row["id"] and bytes(row["id"]), row["code"] and bytes(row["code"]))
        for row in read_table(spark, lake, "facts.ids").collect()
    }
    assert rows == {(b"0123456789abcdef", b"abc"), (None, None)}


def test_files_are_grouped_by_size() -> None:
    def task(path: str, size_bytes: int) -> FileScanTask:
        return FileScanTask(data_file(path, DataFileContent.DATA, size_bytes))

    small = [task(str(number), 10) for number in range(100)]
    assert [len(group) for group in group_files(small, 2)] == [50, 50]
    big = [task("big", 3 * GROUP_BYTES), *small]
    assert [len(group) for group in group_files(big, 2)] == [1, 100]
    assert group_files([], 2) == []
    assert sorted(task.file.file_path for group in group_files(small, 7) for task in group) == sorted(
        str(number) for number in range(100)
    )


def data_file(path: str, content: DataFileContent, size_bytes: int, rows: int = 1) -> DataFile:
    file = DataFile.from_args(
        content=content, file_path=path, file_format=FileFormat.PARQUET, partition=Record(), record_count=rows,
        file_size_in_bytes=size_bytes, column_sizes={}, value_counts={}, null_value_counts={}, nan_value_counts={},
        lower_bounds={}, upper_bounds={}, key_metadata=None, split_offsets=None, sort_order_id=None,
        equality_ids=[1] if content is DataFileContent.EQUALITY_DELETES else None,
    )  # fmt: skip
    file.spec_id = 0
    return file


class DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def with_deletes(lake: Lakehouse, table: Table, content: DataFileContent, delete_rows: pa.Table) -> Table:
    """Return the table with a delete file, as another engine writes it."""
    body = io.BytesIO()
    pq.write_table(delete_rows, body)
    path = f"{table.location()}/data/deletes.parquet"
    lake.storage.create(path.removeprefix(lake.root), body.getvalue())
    file = data_file(path, content, body.tell(), delete_rows.num_rows)
    before = table.current_snapshot()
    assert before is not None
    assert isinstance(table.metadata, TableMetadataV2)
    snapshot_id, sequence_number = before.snapshot_id + 1, table.metadata.last_sequence_number + 1
    output = table.io.new_output(f"{table.location()}/metadata/deletes-m0.avro")
    with DeleteManifestWriter(table.spec(), table.schema(), output, snapshot_id, "null") as manifest:
        manifest.add(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, snapshot_id=snapshot_id, data_file=file))
    list_path = f"{table.location()}/metadata/snap-deletes.avro"
    with write_manifest_list(
        2, table.io.new_output(list_path), snapshot_id, before.snapshot_id, sequence_number, "null"
    ) as manifests:
        manifests.add_manifests([*before.manifests(table.io), manifest.to_manifest_file()])
    after = before.model_copy(
        update={
            "snapshot_id": snapshot_id,
            "parent_snapshot_id": before.snapshot_id,
            "sequence_number": sequence_number,
            "manifest_list": list_path,
        }
    )
    metadata = table.metadata.model_copy(
        update={"snapshots": [*table.metadata.snapshots, after], "current_snapshot_id": snapshot_id}
    )
    return Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)


def damage_bytes(data: bytes, damage: str) -> bytes:
    middle = len(data) // 2
    flipped = bytes(byte ^ 255 for byte in data[middle : middle + 20])
    return {
        "garbage": b"garbage" * 50,
        "half": data[:middle],
        "flipped": data[:middle] + flipped + data[middle + 20 :],
        "empty": b"",
    }[damage]


def read_without_spark(lake: Lakehouse, snapshot: Snapshot | None = None) -> int:
    opened_table = open_iceberg_table(lake, snapshot or lake.snapshot(), "facts", "days")
    job = ReadJob(
        opened_table.io, opened_table.metadata, opened_table.metadata.schema(), AlwaysTrue(), opened_table.version
    )
    schema = to_spark_schema(opened_table.metadata.schema())
    return sum(batch.num_rows for batch in read_tasks(job, opened_table.tasks(), schema))


@pytest.mark.parametrize("damage", ["garbage", "half", "flipped", "empty"])
@pytest.mark.parametrize("kind", ["data", "manifest", "list"])
def test_damaged_files_are_reported_with_their_paths(lake: Lakehouse, kind: str, damage: str) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("facts")
    table = catalog.create_table("facts.days", pa.schema([("day", pa.int64())]))
    table.append(pa.table({"day": range(100)}))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    (task,) = table.scan().plan_files()
    (manifest,) = snapshot.manifests(table.io)
    uri = {"data": task.file.file_path, "manifest": manifest.manifest_path, "list": snapshot.manifest_list}[kind]
    path = uri.removeprefix(lake.root)
    assert read_without_spark(lake) == 100
    lake.storage.write(path, damage_bytes(lake.storage.read(path), damage))
    with pytest.raises(CorruptFileError) as raised:
        read_without_spark(lake)
    assert raised.value.path == path
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["data", "list", "metadata"])
def test_version_purged_during_read_is_reported(lake: Lakehouse, kind: str) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("facts")
    table = catalog.create_table("facts.days", pa.schema([("day", pa.int64())]))
    table.append(pa.table({"day": [1]}))
    snapshot, version = lake.snapshot(), lake.latest_version()
    current = table.current_snapshot()
    assert current is not None
    (task,) = table.scan().plan_files()
    uri = {"data": task.file.file_path, "list": current.manifest_list, "metadata": table.metadata_location}[kind]
    table.append(pa.table({"day": [2]}))
    lake.storage.delete(uri.removeprefix(lake.root))
    with pytest.raises(FileMissingError):
        read_without_spark(lake, snapshot)
    seal(lake, version)
    with pytest.raises(VersionExpiredError) as raised:
        read_without_spark(lake, snapshot)
    assert (raised.value.version, raised.value.path) == (version, uri)


def test_data_file_with_fewer_rows_than_manifest_is_corrupt(lake: Lakehouse) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("facts")
    table = catalog.create_table("facts.days", pa.schema([("day", pa.int64())]))
    table.append(pa.table({"day": range(100)}))
    table.append(pa.table({"day": [1]}))
    small, large = sorted(table.scan().plan_files(), key=lambda task: task.file.record_count)
    small_path, large_path = (task.file.file_path.removeprefix(lake.root) for task in (small, large))
    lake.storage.write(large_path, lake.storage.read(small_path))
    with pytest.raises(CorruptFileError, match=f"{large_path}' has 1 rows, but its manifest declares 100"):
        read_without_spark(lake)


def test_position_deletes_are_applied(spark: SparkSession, lake: Lakehouse) -> None:
    staged = stage_dataframe(lake, months(spark, 1).coalesce(1), "facts", "plain", mode="append")
    table = publish_and_load(lake, staged)
    (task,) = table.scan().plan_files()
    positions = pa.table({"file_path": [task.file.file_path], "pos": pa.array([0], pa.int64())})
    deleted = with_deletes(lake, table, DataFileContent.POSITION_DELETES, positions)
    assert texts(read_files(spark, lake, deleted)) == ["1/2"]
    assert texts(read_files(spark, lake, table)) == ["1/1", "1/2"]


def test_equality_deletes_are_applied(spark: SparkSession, lake: Lakehouse) -> None:
    equality, evolved = with_equality(lake), with_evolution(lake)
    assert ids_and_places(read_table(spark, lake, "ns.equality")) == EQUALITY
    assert ids_and_places(read_table(spark, lake, "ns.evolved")) == EVOLVED
    assert ids_and_places(read_table(spark, lake, "ns.equality", row_filter="id < 3 and place = 'a'")) == [
        (1, "a"),
        (2, "a"),
    ]
    # The delete files refer to a column that is not selected.
    place_frame = read_table(spark, lake, "ns.equality", columns=["place"])
    assert (place_frame.columns, sorted(row.place for row in place_frame.collect())) == (
        ["place"],
        ["a", "a", "a", "b", "b"],
    )
    assert ids_and_places(read_files(spark, lake, equality.loaded)) == EQUALITY
    assert ids_and_places(spark.read.format("trinitylake").option("root", lake.root).load("ns.evolved")) == EVOLVED
    assert evolved.loaded.metadata.default_spec_id == 1


def ids_and_places(frame: DataFrame) -> list[tuple[int, str]]:
    return sorted((row.id, row.place) for row in frame.collect())


def test_avro_delete_files_are_rejected(spark: SparkSession, lake: Lakehouse) -> None:
    positions, equality = with_positions(lake, "avro"), with_equality(lake)
    equality.delete_positions({equality.data_files[0]: [0]}, "avro")
    for table in (positions, equality):
        with pytest.raises(InvalidDefinitionError):
            read_files(spark, lake, table.loaded)


def publish_and_load(lake: Lakehouse, staged: StagedTable) -> Table:
    with lake.transaction() as txn:
        publish(txn, [staged])
    return catalog_at(lake).load_table((staged.namespace, staged.table))
