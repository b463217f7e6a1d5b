"""Data files written without a catalog: partitions, statistics, memory use and failures."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType

from tests.faults import FaultyStorage, fail
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError, StorageFullError
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.output_file import StorageOutputFile
from trinitylake_ops.iceberg.managed import new_table_location
from trinitylake_ops.iceberg.types import arrow_to_iceberg_schema
from trinitylake_ops.iceberg.write import data_files as module
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.data_files import write_data_files
from trinitylake_ops.iceberg.write.plan import identity_spec
from trinitylake_ops.storage import MeteredStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

FLIGHTS = pa.schema(
    [
        pa.field("year", pa.int32()),
        pa.field("month", pa.int32()),
        pa.field("carrier", pa.string(), nullable=False),
        pa.field("delay", pa.int64()),
        pa.field("tags", pa.list_(pa.string())),
    ]
)


@pytest.fixture
def io(lake: Lakehouse) -> StorageFileIO:
    return StorageFileIO.on(lake.storage, lake.storage_options)


def metadata_of(lake: Lakehouse, schema: pa.Schema, *partition_by: str) -> TableMetadata:
    iceberg = arrow_to_iceberg_schema(schema)
    return new_table_metadata(
        schema=iceberg,
        partition_spec=identity_spec(iceberg, partition_by),
        sort_order=UNSORTED_SORT_ORDER,
        location=new_table_location(lake.root, lake.snapshot().definition),
        properties={},
    )


def flights(*months: int | None, first_delay: int = 0) -> pa.RecordBatch:
    n_rows = len(months)
    return pa.record_batch(
        {
            "delay": pa.array(range(first_delay, first_delay + n_rows), pa.int64()),
            "carrier": ["AA"] * n_rows,
            "month": pa.array(months, pa.int32()),
            "year": pa.array([2013] * n_rows, pa.int32()),
            "tags": pa.array([["x"]] * n_rows, pa.list_(pa.string())),
        }
    )


def read(io: StorageFileIO, data_file: DataFile) -> pa.Table:
    with io.new_input(data_file.file_path).open() as stream:
        return pq.read_table(stream)


def test_rows_are_split_by_partition(lake: Lakehouse, io: StorageFileIO) -> None:
    metadata = metadata_of(lake, FLIGHTS, "year", "month")
    files = write_data_files(io, metadata, [flights(1, 2, 1), flights(2, None, first_delay=3), flights()])
    by_month = {data_file.partition[1]: data_file for data_file in files}
    assert {month: data_file.record_count for month, data_file in by_month.items()} == {1: 2, 2: 2, None: 1}
    assert all(data_file.partition[0] == 2013 for data_file in files)
    assert "/data/year=2013/month=2/" in by_month[2].file_path
    assert read(io, by_month[2])["delay"].to_pylist() == [1, 3]
    for data_file in files:
        assert data_file.file_size_in_bytes == len(io.new_input(data_file.file_path))
        assert data_file.file_path.startswith(f"{metadata.location}/data/")


def test_data_file_has_field_ids_and_statistics(lake: Lakehouse, io: StorageFileIO) -> None:
    (data_file,) = write_data_files(io, metadata_of(lake, FLIGHTS), [flights(1, 2, None)])
    with io.new_input(data_file.file_path).open() as stream:
        schema = pq.read_schema(stream)
    assert [int(field.metadata[b"PARQUET:field_id"]) for field in schema] == [1, 2, 3, 4, 5]
    assert schema.field("carrier").nullable is False
    assert data_file.null_value_counts[2] == 1
    assert data_file.value_counts[4] == 3
    bounds = data_file.lower_bounds[4], data_file.upper_bounds[4]
    assert [from_bytes(LongType(), bound) for bound in bounds] == [0, 2]
    assert data_file.split_offsets


def test_data_file_can_be_pickled(lake: Lakehouse, io: StorageFileIO) -> None:
    schema = pa.schema([("day", pa.date32()), ("price", pa.decimal128(9, 2)), ("v", pa.float64())])
    batch = pa.record_batch(
        {"day": [date(2013, 1, 2)], "price": pa.array([Decimal("1.50")], pa.decimal128(9, 2)), "v": [0.5]}
    )
    (data_file,) = write_data_files(io, metadata_of(lake, schema, "day", "price"), [batch])
    copy = pickle.loads(pickle.dumps(data_file))
    assert copy._data == data_file._data
    assert (copy.spec_id, copy.partition) == (data_file.spec_id, data_file.partition)
    assert "/day=2013-01-02/price=1.50/" in copy.file_path


def test_new_file_starts_at_target_size(lake: Lakehouse, io: StorageFileIO) -> None:
    batches = [flights(*[1] * 2_000, first_delay=index * 2_000) for index in range(10)]
    files = write_data_files(
        io, metadata_of(lake, FLIGHTS), batches, target_file_size_bytes=20_000, buffer_bytes=100_000
    )
    assert len(files) > 2
    assert sum(data_file.record_count for data_file in files) == 20_000
    delays = sorted(delay for data_file in files for delay in read(io, data_file)["delay"].to_pylist())
    assert delays == list(range(20_000))


class RecordingFileIO(StorageFileIO):
    """Records the files that it creates."""

    outputs: list[StorageOutputFile]

    def new_output(self, location: str, add_file: Callable[[str, bytes], None] | None = None) -> StorageOutputFile:
        self.outputs.append(super().new_output(location, add_file))
        return self.outputs[-1]


def test_memory_is_bounded_for_many_partitions(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_FILES", 3)
    recording_io = RecordingFileIO.on(lake.storage, lake.storage_options)
    recording_io.outputs = []
    n_open: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(60):
            yield flights(*[number % 12] * 500, first_delay=number * 500)
            n_open.append(sum(not output.exists() for output in recording_io.outputs))

    files = write_data_files(recording_io, metadata_of(lake, FLIGHTS, "month"), batches(), buffer_bytes=50_000)
    assert max(n_open) == 3
    n_row_groups = 0
    for data_file in files:
        with recording_io.new_input(data_file.file_path).open() as stream:
            n_row_groups += pq.read_metadata(stream).num_row_groups
    assert n_row_groups > 12, "partitions are flushed when the buffer is full"
    assert sum(data_file.record_count for data_file in files) == 30_000
    assert {data_file.partition[0] for data_file in files} == set(range(12))


def test_write_without_rows_creates_no_file(lake: Lakehouse, io: StorageFileIO, meter: MeteredStorage) -> None:
    metadata = metadata_of(lake, FLIGHTS, "month")
    with meter.measure() as measured:
        assert write_data_files(io, metadata, []) == []
        assert write_data_files(io, metadata, [flights()]) == []
    assert measured.counts.total == 0


def test_failed_write_leaves_no_files(lake: Lakehouse, io: StorageFileIO) -> None:
    def failing_batches() -> Iterator[pa.RecordBatch]:
        for month in range(6):
            yield flights(*[month] * 500)
        raise RuntimeError("the task was killed")

    metadata = metadata_of(lake, FLIGHTS, "month")
    with pytest.raises(RuntimeError, match="killed"):
        write_data_files(io, metadata, failing_batches(), target_file_size_bytes=1, buffer_bytes=20_000)
    assert list(lake.storage.list("tables/")) == []
    for request_number in (1, 2):
        faulty_io = StorageFileIO.on(
            FaultyStorage(lake.storage, [fail(request_number, StorageFullError, kind="write")])
        )
        with pytest.raises(StorageFullError):
            write_data_files(faulty_io, metadata, [flights(1, 2, 3)])
        assert list(lake.storage.list("tables/")) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": pa.array([1])}, "'extra' is not in the table"),
        ({"carrier": pa.array([None], pa.string())}, "'carrier' is required"),
        ({"carrier": None}, "'carrier' is required"),
        ({"month": pa.array([2**40])}, "'month' cannot be stored as int"),
        ({"delay": pa.array(["soon"])}, "'delay' cannot be stored as long"),
    ],
)
def test_unsuitable_rows_raise_error_with_column_name(
    lake: Lakehouse, io: StorageFileIO, change: dict[str, pa.Array | None], message: str
) -> None:
    batch = flights(1)
    columns = {**dict(zip(batch.schema.names, batch.columns, strict=True)), **change}
    modified = pa.record_batch({name: column for name, column in columns.items() if column is not None})
    with pytest.raises(InvalidInputError, match=message) as caught:
        write_data_files(io, metadata_of(lake, FLIGHTS), [modified])
    assert "\n" not in str(caught.value)


def test_missing_optional_columns_are_null(lake: Lakehouse, io: StorageFileIO) -> None:
    (data_file,) = write_data_files(io, metadata_of(lake, FLIGHTS), [pa.record_batch({"carrier": ["AA"]})])
    assert read(io, data_file).to_pylist() == [
        {"year": None, "month": None, "carrier": "AA", "delay": None, "tags": None}
    ]


def test_local_times_are_not_stored_as_utc(lake: Lakehouse, io: StorageFileIO) -> None:
    metadata = metadata_of(lake, pa.schema([("at", pa.timestamp("us", tz="UTC"))]))
    with pytest.raises(InvalidInputError):
        write_data_files(io, metadata, [pa.record_batch({"at": pa.array([0], pa.timestamp("us"))})])
    berlin = pa.record_batch({"at": pa.array([0], pa.timestamp("ms", tz="Europe/Berlin"))})
    (data_file,) = write_data_files(io, metadata, [berlin])
    assert read(io, data_file)["at"].cast(pa.int64()).to_pylist() == [0]


def test_unsupported_partition_is_rejected(lake: Lakehouse, io: StorageFileIO) -> None:
    float_metadata = metadata_of(lake, pa.schema([("v", pa.float64())]), "v")
    with pytest.raises(InvalidDefinitionError):
        write_data_files(io, float_metadata, [])
    with pytest.raises(InvalidDefinitionError):
        write_data_files(io, metadata_of(lake, pa.schema([("v", pa.uuid())]), "v"), [])
    schema: Schema = arrow_to_iceberg_schema(FLIGHTS)
    bucket = PartitionField(source_id=4, field_id=1000, transform=BucketTransform(8), name="delay_bucket")
    bucketed = new_table_metadata(
        schema=schema,
        partition_spec=PartitionSpec(bucket),
        sort_order=UNSORTED_SORT_ORDER,
        location=new_table_location(lake.root, lake.snapshot().definition),
        properties={},
    )
    with pytest.raises(InvalidDefinitionError):
        write_data_files(io, bucketed, [])


X = pa.struct([("x", pa.int64())])
XY = pa.struct([("x", pa.int64()), ("y", pa.int64())])


@pytest.mark.parametrize(
    ("table_type", "row_type", "missing_field"),
    [
        (X, XY, "y"),
        (pa.struct([("a", X)]), pa.struct([("a", XY)]), "a.y"),
        (pa.list_(X), pa.large_list(XY), "y"),
        (pa.map_(pa.string(), X), pa.map_(pa.string(), XY), "y"),
    ],
    ids=["struct", "nested", "list", "map"],
)
def test_unknown_nested_field_is_rejected(
    lake: Lakehouse, io: StorageFileIO, table_type: pa.DataType, row_type: pa.DataType, missing_field: str
) -> None:
    metadata = metadata_of(lake, pa.schema([("n", table_type)]))
    batch = pa.record_batch([pa.nulls(2, row_type)], names=["n"])
    with pytest.raises(
        InvalidInputError, match=f"column 'n' has the field '{missing_field}', which the table's column lacks"
    ):
        write_data_files(io, metadata, [batch])
    matching_batch = pa.record_batch([pa.nulls(2, table_type)], names=["n"])
    assert [data_file.record_count for data_file in write_data_files(io, metadata, [matching_batch])] == [2]


def test_duplicate_column_is_rejected(lake: Lakehouse, io: StorageFileIO) -> None:
    batch = pa.record_batch([pa.array([1]), pa.array([2])], names=["n", "n"])
    with pytest.raises(InvalidInputError, match="'n'"):
        write_data_files(io, metadata_of(lake, pa.schema([("n", pa.int64())])), [batch])
    with pytest.raises(InvalidInputError, match="'n'"):
        stage_arrow(lake, pa.Table.from_batches([batch]), "ns", "t", mode="append")
