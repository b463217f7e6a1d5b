"""The code in the Python processes that Spark starts: helpers of the driver, and tasks.

Spark starts a helper for each of planning, committing and reading back. They only carry pickled bytes. This module
imports nothing heavy, so that they start fast. The tasks unpickle the bytes and do the work.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.spark.runtime.errors import arrow_schema, value_of
from trinitylake_ops.spark.runtime.java import HANDOVER, receive_input, send_output

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask
    from pyiceberg.table.metadata import TableMetadata

    from trinitylake_ops.iceberg.io.file_io import StorageFileIO
    from trinitylake_ops.iceberg.read import ReadVersion
    from trinitylake_ops.iceberg.write.plan import TableWrite


#: The column of the rows of :func:`write_rows`.
WRITTEN_FILE = "data_file"


@dataclass(frozen=True)
class WriteJob:
    """The input of each task of a write."""

    plan: TableWrite
    target_file_size_bytes: int


class TableSink(DataSource):
    """Data files of a managed table, for writing. Carries a pickled WriteJob, and returns a list of DataFiles."""

    @classmethod
    def name(cls) -> str:
        return "trinitylake_table_sink"

    def writer(self, schema: StructType, overwrite: bool) -> TableSinkWriter:
        folder = self.options[HANDOVER]
        return TableSinkWriter(folder, receive_input(folder))


@dataclass
class _WrittenFiles(WriterCommitMessage):
    pickled_data_files: bytes


class TableSinkWriter(DataSourceArrowWriter):
    """A helper of the driver makes the writer.

    It is pickled to the tasks, and to another helper for commit or abort.
    """

    def __init__(self, folder: str, pickled_job: bytes):
        self._folder = folder
        self._pickled_job = pickled_job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        job: WriteJob = pickle.loads(self._pickled_job)
        data_files = job.plan.write(iterator, target_file_size_bytes=job.target_file_size_bytes)
        return _WrittenFiles(pickle.dumps(data_files))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        send_output(self._folder, [message.pickled_data_files for message in _written(messages)])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        # These are the files of tasks that ended well. A failed task has deleted its own. One that still runs, or that
        # Spark kills, leaves files that nothing names.
        from trinitylake_ops.iceberg.write.data_files import delete_data_files

        job: WriteJob = pickle.loads(self._pickled_job)
        for message in _written(messages):
            delete_data_files(job.plan.io, pickle.loads(message.pickled_data_files))


def _written(messages: list[WriterCommitMessage | None]) -> list[_WrittenFiles]:
    return [message for message in messages if isinstance(message, _WrittenFiles)]


def unpickled_data_files(returned: list[bytes]) -> list[DataFile]:
    """Return the data files of all tasks, in the order of the tasks."""
    return [data_file for pickled in returned for data_file in pickle.loads(pickled)]


@dataclass(frozen=True)
class ReadJob:
    """The input of each task of a scan."""

    io: StorageFileIO
    metadata: TableMetadata
    schema: Schema
    row_filter: BooleanExpression
    version: ReadVersion | None = None


@dataclass(frozen=True)
class Scan:
    """A planned scan: its schema, a pickled ReadJob, and for each input partition pickled FileScanTasks."""

    schema: StructType
    pickled_job: bytes
    pickled_groups: tuple[bytes, ...]


class TableScan(DataSource):
    """Data files of a table, for reading. Carries a Scan, which lives as long as the DataFrame."""

    def __init__(self, options: dict[str, str]):
        super().__init__(options)
        self._scan: Scan = receive_input(options[HANDOVER])

    @classmethod
    def name(cls) -> str:
        return "trinitylake_table_scan"

    def schema(self) -> StructType:
        return self._scan.schema

    def reader(self, schema: StructType) -> TableScanReader:
        reader = TableScanReader(self._scan, schema)
        self._scan = Scan(schema, b"", ())  # Spark sends the source to all tasks beside the reader
        return reader


class TableScanReader(DataSourceReader):
    """A helper of the driver makes it, and it is pickled to the tasks."""

    def __init__(self, scan: Scan, schema: StructType):
        self._schema = schema
        self._pickled_job = scan.pickled_job
        self._partitions = [InputPartition(group) for group in scan.pickled_groups]

    def __getstate__(self) -> dict[str, Any]:
        # Each task gets its own input partition, not those of all others.
        return {**self.__dict__, "_partitions": []}

    def partitions(self) -> Sequence[InputPartition]:
        return self._partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        value = value_of(partition)
        tasks: tuple[FileScanTask, ...] = () if value is None else pickle.loads(value)
        return read_tasks(pickle.loads(self._pickled_job), tasks, self._schema)


def read_group(pickled_job: bytes, schema: StructType, pickled_tasks: bytes) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a pickled tuple of FileScanTasks as Spark wants them."""
    return read_tasks(pickle.loads(pickled_job), pickle.loads(pickled_tasks), schema)


def write_rows(pickled_job: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task as data files. Yields a row for each, pickled."""
    import pyarrow as pa

    job: WriteJob = pickle.loads(pickled_job)
    for data_file in job.plan.write(batches, target_file_size_bytes=job.target_file_size_bytes):
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps([data_file])], pa.binary())], names=[WRITTEN_FILE])


def read_tasks(job: ReadJob, tasks: Sequence[FileScanTask], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files as Spark wants them."""
    from pyiceberg.io.pyarrow import ArrowScan

    from trinitylake_ops.iceberg.delete_files import RemainingRows
    from trinitylake_ops.iceberg.read import file_batches, reading_at

    remaining = RemainingRows(ArrowScan(job.metadata, job.io, job.schema, job.row_filter))
    wanted = arrow_schema(schema)
    with reading_at(job.version, job.io):
        for task in tasks:  # one at a time: pyiceberg holds all batches of the files it is given
            for batch in file_batches(remaining, task, job.io):
                if not batch.num_rows:
                    continue
                try:
                    rows = batch.select(wanted.names).cast(wanted)
                except ValueError as error:  # the table's columns became required while old rows have nulls
                    path = job.io.location(task.file.file_path)
                    raise CorruptFileError(
                        f"data file {path!r} does not fit the table's columns: {error}; read the other columns only",
                        path=path,
                    ) from error
                yield rows
