"""Code for the Python processes that Spark starts: helpers of the driver, and tasks.

Spark starts a separate helper for planning, committing and reading back. Helpers only pass pickled bytes, so this
module imports nothing heavy and helpers start fast. The tasks unpickle the bytes and do the work.
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


#: The column with the results of :func:`write_rows`.
WRITTEN_FILE = "data_file"


@dataclass(frozen=True)
class WriteJob:
    """The input of each write task."""

    #: The planned write.
    plan: TableWrite
    #: The approximate maximum size of a data file.
    target_file_size_bytes: int


class TableSink(DataSource):
    """A data source that writes data files of a managed table. Receives a pickled WriteJob, and returns DataFiles."""

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
    """Writes data files in tasks.

    It is created in a helper process of the driver, and pickled to the tasks and to another helper for commit or abort.
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
        # Delete the files of tasks that succeeded. A failed task deletes its own files. A task that is still running,
        # or that Spark kills, leaves orphans.
        from trinitylake_ops.iceberg.write.data_files import delete_data_files

        job: WriteJob = pickle.loads(self._pickled_job)
        for message in _written(messages):
            delete_data_files(job.plan.io, pickle.loads(message.pickled_data_files))


def _written(messages: list[WriterCommitMessage | None]) -> list[_WrittenFiles]:
    return [message for message in messages if isinstance(message, _WrittenFiles)]


def unpickled_data_files(results: list[bytes]) -> list[DataFile]:
    """Return the data files of all tasks, in the order of the tasks."""
    return [data_file for pickled in results for data_file in pickle.loads(pickled)]


@dataclass(frozen=True)
class ReadJob:
    """The input of each scan task."""

    #: The FileIO of the table.
    io: StorageFileIO
    #: The table metadata.
    metadata: TableMetadata
    #: The columns to read.
    schema: Schema
    #: The rows to read.
    row_filter: BooleanExpression
    #: The version that is read, for error messages; None for a table of no version.
    version: ReadVersion | None = None


@dataclass(frozen=True)
class Scan:
    """A planned scan."""

    #: The columns.
    schema: StructType
    #: The pickled ReadJob.
    pickled_job: bytes
    #: For each input partition, the pickled FileScanTasks.
    pickled_groups: tuple[bytes, ...]


class TableScan(DataSource):
    """A data source that reads data files of a table. Receives a Scan, which lives as long as the DataFrame."""

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
        self._scan = Scan(schema, b"", ())  # Spark sends the source to all tasks as well
        return reader


class TableScanReader(DataSourceReader):
    """Reads data files in tasks. It is created in a helper process of the driver, and pickled to the tasks."""

    def __init__(self, scan: Scan, schema: StructType):
        self._schema = schema
        self._pickled_job = scan.pickled_job
        self._partitions = [InputPartition(group) for group in scan.pickled_groups]

    def __getstate__(self) -> dict[str, Any]:
        # A task gets its own input partition only, not those of all tasks.
        return {**self.__dict__, "_partitions": []}

    def partitions(self) -> Sequence[InputPartition]:
        return self._partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        value = value_of(partition)
        tasks: tuple[FileScanTask, ...] = () if value is None else pickle.loads(value)
        return read_tasks(pickle.loads(self._pickled_job), tasks, self._schema)


def read_group(pickled_job: bytes, schema: StructType, pickled_tasks: bytes) -> Iterator[pa.RecordBatch]:
    """Yield the rows of pickled FileScanTasks in the schema that Spark expects.

    Args:
        pickled_job: The ReadJob.
        schema: The schema.
        pickled_tasks: The tuple of FileScanTasks.
    """
    return read_tasks(pickle.loads(pickled_job), pickle.loads(pickled_tasks), schema)


def write_rows(pickled_job: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task as data files. Yield a row with the pickled description of each file.

    Args:
        pickled_job: The WriteJob.
        batches: The rows.
    """
    import pyarrow as pa

    job: WriteJob = pickle.loads(pickled_job)
    for data_file in job.plan.write(batches, target_file_size_bytes=job.target_file_size_bytes):
        yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps([data_file])], pa.binary())], names=[WRITTEN_FILE])


def read_tasks(job: ReadJob, tasks: Sequence[FileScanTask], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files in the schema that Spark expects.

    Args:
        job: The scan.
        tasks: The files.
        schema: The schema.

    Raises:
        CorruptFileError: If the rows of a file do not match the schema.
    """
    from pyiceberg.io.pyarrow import ArrowScan

    from trinitylake_ops.iceberg.delete_files import RemainingRows
    from trinitylake_ops.iceberg.read import file_batches, reading_at

    remaining = RemainingRows(ArrowScan(job.metadata, job.io, job.schema, job.row_filter))
    expected_schema = arrow_schema(schema)
    with reading_at(job.version, job.io):
        for task in tasks:  # one at a time, because pyiceberg keeps all batches of the passed files in memory
            for batch in file_batches(remaining, task, job.io):
                if not batch.num_rows:
                    continue
                try:
                    rows = batch.select(expected_schema.names).cast(expected_schema)
                except ValueError as error:  # a column became required, but old rows contain nulls
                    path = job.io.location(task.file.file_path)
                    raise CorruptFileError(
                        f"data file {path!r} does not match the table's columns: {error}; read only the other columns",
                        path=path,
                    ) from error
                yield rows
