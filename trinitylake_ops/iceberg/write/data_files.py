"""Write data files in the process that has the rows: in Spark's executors, or in any process without a catalog.

The driver plans the write (``write.plan.plan_write``), each task writes its rows as data files with this module, and
the driver stages all of them as one Iceberg snapshot (``write.staging.stage_data_files``). A ``DataFile`` can be
pickled together with its partition, statistics and spec id.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionFieldValue, PartitionKey, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DoubleType, FloatType, PrimitiveType, UUIDType

from trinitylake_ops.errors import InvalidDefinitionError, StorageError
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.output_file import StorageOutputFile
from trinitylake_ops.iceberg.properties import location_provider
from trinitylake_ops.iceberg.write.casting import check_values, conform

if TYPE_CHECKING:
    from trinitylake_ops.iceberg.io.parquet_writer import SealedParquetWriter

logger = logging.getLogger(__name__)

TARGET_FILE_SIZE_BYTES = 128 << 20
#: Maximum Arrow size of the rows of all partitions that are buffered in memory, which is enough for a row group.
BUFFER_BYTES = 64 << 20
#: Maximum number of open files. When it is reached, the largest file is finished first.
MAX_OPEN_FILES = 64
#: File systems allow names of 255 bytes, and object stores paths of 1,024. Partitions with longer names get no separate
#: folder.
_MAX_FOLDER_BYTES = 255

_Key = tuple[object, ...]


def write_data_files(
    io: StorageFileIO,
    table_metadata: TableMetadata,
    batches: Iterable[pa.RecordBatch],
    *,
    target_file_size_bytes: int = TARGET_FILE_SIZE_BYTES,
    buffer_bytes: int = BUFFER_BYTES,
    partition: Record | None = None,
    sort_order_id: int | None = None,
) -> list[DataFile]:
    """Write Arrow batches as Parquet files of a table, without publishing them.

    Columns are matched by name and cast to the table's types. Optional columns may be missing. Rows are split by the
    table's identity partitions. Memory is limited to ``buffer_bytes`` of rows, 8 MiB for each of up to MAX_OPEN_FILES
    open files, and one finished file.

    Args:
        io: Writes the files.
        table_metadata: Metadata of the table.
        batches: The rows.
        target_file_size_bytes: Size at which a file is finished.
        buffer_bytes: Maximum size of buffered rows.
        partition: The partition to which all rows belong, if the caller knows it. Any transform is supported.
        sort_order_id: Id of the sort order of the rows.

    Returns:
        The files. After an exception, the files written so far are deleted, best-effort.

    Raises:
        InvalidInputError: The rows do not fit the schema.
        InvalidDefinitionError: A partition transform is not identity, or its column is a float.
        StorageError: A file cannot be written.
    """
    writer = _PartitionedWriter(
        io, table_metadata, target_file_size_bytes, buffer_bytes, partition=partition, sort_order_id=sort_order_id
    )
    try:
        for batch in batches:
            writer.add(batch)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


@dataclass(frozen=True)
class _KnownPartition(PartitionKey):
    """A partition with any transforms, as stored in a data file."""

    record: Record = field(default_factory=Record)

    @property
    def partition(self) -> Record:
        return self.record


@dataclass
class _Partition:
    """Buffered rows and the open file of one partition."""

    key: PartitionKey | None
    waiting: list[pa.Table] = field(default_factory=list)
    waiting_bytes: int = 0
    file: _GrowingFile | None = None


@dataclass
class _GrowingFile:
    """An open Parquet file with row groups, which is not visible yet."""

    output: StorageOutputFile
    writer: SealedParquetWriter
    size_bytes: int = 0


class _PartitionedWriter:
    def __init__(
        self,
        io: StorageFileIO,
        metadata: TableMetadata,
        target_file_size_bytes: int,
        buffer_bytes: int,
        *,
        partition: Record | None,
        sort_order_id: int | None,
    ):
        self._io = io
        self._metadata = metadata
        self._spec = metadata.spec()
        self._schema = metadata.schema()
        # Imported here because it loads pandas, which readers and writers of metadata do not need.
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        self._arrow_schema = schema_to_pyarrow(self._schema, include_field_ids=True)
        self._known: PartitionKey | None = None
        if partition is not None and self._spec.fields:
            self._known = _KnownPartition([], self._spec, self._schema, partition)
        self._partition_columns = [] if partition is not None else identity_columns(self._spec, self._schema)
        self._sort_order_id = sort_order_id
        self._locations = location_provider(metadata)
        self._target_file_size_bytes = target_file_size_bytes
        self._buffer_bytes = buffer_bytes
        self._partitions: dict[_Key, _Partition] = {}
        self._waiting_bytes = 0
        self._write_id = uuid.uuid4()
        self._files = 0
        self._done: list[DataFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        conforming_batch = conform(batch, self._schema, self._arrow_schema)
        check_values(conforming_batch)
        for values, rows in self._split(conforming_batch):
            partition = self._partitions.setdefault(values, _Partition(self._partition_key(values)))
            partition.waiting.append(rows)
            partition.waiting_bytes += rows.nbytes
            self._waiting_bytes += rows.nbytes
        while self._waiting_bytes > self._buffer_bytes:
            self._flush(max(self._partitions.values(), key=lambda partition: partition.waiting_bytes))

    def finish(self) -> list[DataFile]:
        for partition in self._partitions.values():
            self._flush(partition)
            self._close(partition)
        return self._done

    def abort(self) -> None:
        """Clean up: discard open files and delete finished ones."""
        for partition in self._partitions.values():
            if partition.file is not None:
                partition.file.output.discard()
                if partition.file.output.written_bytes:
                    partition.file.writer.close()
        for data_file in self._done:
            try:
                self._io.delete(data_file.file_path)
            except StorageError as error:
                logger.warning("could not delete %s of the failed write: %s", data_file.file_path, error)

    def _split(self, rows: pa.Table) -> list[tuple[_Key, pa.Table]]:
        names = self._partition_columns
        if not names:
            return [((), rows)]
        distinct = rows.select(names).group_by(names, use_threads=False).aggregate([]).to_pylist()
        if len(distinct) == 1:
            return [(tuple(distinct[0][name] for name in names), rows)]
        parts = []
        for values in distinct:
            mask = None
            for name in names:
                value = values[name]
                column = rows[name]
                equal = pc.is_null(column) if value is None else pc.equal(column, pa.scalar(value, column.type))
                mask = equal if mask is None else pc.and_(mask, equal)
            parts.append((tuple(values[name] for name in names), rows.filter(mask)))
        return parts

    def _partition_key(self, values: _Key) -> PartitionKey | None:
        if not self._partition_columns:
            return self._known
        field_values = [
            PartitionFieldValue(field=partition_field, value=value)
            for partition_field, value in zip(self._spec.fields, values, strict=True)
        ]
        return PartitionKey(field_values=field_values, partition_spec=self._spec, schema=self._schema)

    def _flush(self, partition: _Partition) -> None:
        """Write the buffered rows of a partition as row groups."""
        if not partition.waiting:
            return
        rows = pa.concat_tables(partition.waiting).combine_chunks()
        self._waiting_bytes -= partition.waiting_bytes
        partition.waiting, partition.waiting_bytes = [], 0
        if partition.file is None:
            self._make_room()
            partition.file = self._new_file(partition.key)
        partition.file.writer.write(rows)
        partition.file.size_bytes = partition.file.output.written_bytes
        if partition.file.size_bytes >= self._target_file_size_bytes:
            self._close(partition)

    def _make_room(self) -> None:
        growing = [partition for partition in self._partitions.values() if partition.file is not None]
        if len(growing) >= MAX_OPEN_FILES:
            self._close(max(growing, key=lambda partition: partition.file.size_bytes if partition.file else 0))

    def _new_file(self, key: PartitionKey | None) -> _GrowingFile:
        name = f"{self._files:05d}-{self._write_id}.parquet"
        self._files += 1
        folder = None if key is None or len(key.to_path().encode()) > _MAX_FOLDER_BYTES else key
        output = self._io.new_output(self._locations.new_data_location(name, folder))
        from trinitylake_ops.iceberg.io.parquet_writer import SealedParquetWriter

        return _GrowingFile(output, SealedParquetWriter(output, self._schema, self._metadata.properties))

    def _close(self, partition: _Partition) -> None:
        if partition.file is None:
            return
        growing, partition.file = partition.file, None
        statistics = growing.writer.close()
        data_file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=growing.output.location,
            file_format=FileFormat.PARQUET,
            partition=partition.key.partition if partition.key is not None else Record(),
            file_size_in_bytes=len(growing.output),
            sort_order_id=self._sort_order_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )
        data_file.spec_id = self._metadata.default_spec_id
        self._done.append(data_file)


def identity_columns(spec: PartitionSpec, schema: Schema) -> list[str]:
    """Return the partition columns of a table with identity partitions, in the order of the spec.

    Args:
        spec: The partition spec.
        schema: Schema of the table.

    Raises:
        InvalidDefinitionError: A field has another transform, or its column is nested, a float or a UUID. NaN and
            signed zeros of floats do not match partitions reliably, and PyIceberg cannot find files by a UUID.
    """
    names = []
    for partition_field in spec.fields:
        if not isinstance(partition_field.transform, IdentityTransform):
            raise InvalidDefinitionError(
                f"partition field {partition_field.name!r} has the transform {partition_field.transform}, which cannot"
                " be written; use identity partitions"
            )
        source = schema.find_field(partition_field.source_id)
        if schema.find_column_name(source.field_id) != source.name or isinstance(
            source.field_type, FloatType | DoubleType | UUIDType
        ):
            raise InvalidDefinitionError(
                f"partition field {partition_field.name!r} cannot be written: use a top-level column that is not a"
                " float or UUID"
            )
        assert isinstance(source.field_type, PrimitiveType)
        names.append(source.name)
    return names


def delete_data_files(io: StorageFileIO, data_files: Iterable[DataFile]) -> None:
    """Delete unreferenced files, best-effort. Orphan removal deletes the files that remain."""
    for data_file in data_files:
        try:
            io.delete(data_file.file_path)
        except StorageError as error:
            logger.warning("could not delete %s, left for orphan removal: %s", data_file.file_path, error)


def with_path(file: DataFile, uri: str) -> DataFile:
    """Return a copy of a data file with another path."""
    moved = copy.copy(file)
    moved._data = list(file._data)
    moved[moved._data.index(file.file_path)] = uri  # the path is the first string among the fields
    return moved
