"""Read managed tables as DataFrames. Spark's tasks read the data files themselves, through this package's storages.

The driver plans the scan, in which Iceberg prunes files by partition and statistics. Small groups of files become
Spark's input partitions, and each task reads its group into Arrow batches. Nothing is written, and the settings of
Spark's own readers do not apply. Requests are counted and retried like all other requests of the lakehouse.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.schema import Schema
from pyiceberg.table import DataScan, FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.iceberg.delete_files import check_is_read, planned_tasks
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.managed import ICEBERG
from trinitylake_ops.iceberg.metadata import read_table_metadata, table_metadata
from trinitylake_ops.iceberg.read import ReadVersion, check_manifests, reading_at
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.spark.runtime.connect import default_parallelism, is_remote
from trinitylake_ops.spark.runtime.java import HANDOVER, handover_folder
from trinitylake_ops.spark.runtime.task_jobs import frame_by_tasks
from trinitylake_ops.spark.tables import native_parquet
from trinitylake_ops.spark.tables.schema import bound, parsed, to_spark_schema
from trinitylake_ops.spark.tables.tasks import ReadJob, Scan, TableScan, TableScanReader, read_group
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import resolve_table

if TYPE_CHECKING:
    import pyarrow as pa

#: The maximum size of the data files in an input partition. A larger file has a separate partition.
GROUP_BYTES = 64 << 20

_ALL_ROWS = AlwaysTrue()


def read_table(
    spark: SparkSession,
    lake: Lakehouse,
    table: str,
    version: int | str | None = None,
    *,
    row_filter: str | BooleanExpression | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """Return the rows of a table at a version of the lakehouse.

    Without a ``row_filter``, plain local files are read by Spark's own Parquet reader where possible
    (:mod:`~trinitylake_ops.spark.tables.native_parquet`). Spark then treats all columns as nullable.

    Args:
        spark: The session.
        lake: The lakehouse.
        table: The table, as ``namespace.table``.
        version: A version number, the name of an export, or None for the latest version at the time of the call.
        row_filter: See :func:`read_files`.
        columns: See :func:`read_files`.

    Raises:
        NotFoundError: If the table, the namespace or the version does not exist.
        InvalidInputError: If the name is invalid or the table is not an Iceberg table. Errors of :func:`read_files` are
            raised as well.
    """
    snapshot = lake.snapshot(version)
    opened = open_iceberg_table(lake, snapshot, *resolved_name(table, snapshot))
    wanted = parsed(row_filter)
    tasks = opened.tasks(wanted)
    native = opened.native_frame(spark, tasks, columns) if row_filter is None else None
    return opened.scanned_frame(spark, tasks, wanted, columns) if native is None else native


def read_staged(
    spark: SparkSession,
    lake: Lakehouse,
    staged: StagedTable,
    *,
    row_filter: str | BooleanExpression | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """Return the rows of a staged table as they would be published. Arguments and errors as in :func:`read_files`.

    Args:
        spark: The session.
        lake: The lakehouse.
        staged: The staged table.
        row_filter: An Iceberg filter, or None for all rows.
        columns: The columns to read, or None for all.
    """
    return read_files(spark, lake, staged.metadata_location, row_filter=row_filter, columns=columns)


def read_files(
    spark: SparkSession,
    lake: Lakehouse,
    table: Table | str,
    *,
    row_filter: str | BooleanExpression | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """Return the current rows of an Iceberg table. Delete files are applied.

    The files are fixed at the time of the call, no matter when and how often the DataFrame is used. If a file is
    missing or broken when a query runs, the query fails with Spark's PythonException.

    Args:
        spark: The session.
        lake: The lakehouse.
        table: The table, or the location of its metadata file.
        row_filter: An Iceberg filter, for example ``"year = 2013 and month = 2"``. It skips files before reading, and
            then filters rows. Spark's own filters and projections are not pushed down to the files.
        columns: The names of top-level columns, in the requested order; None for all.

    Raises:
        InvalidInputError: If the filter is invalid, a column is unknown, or the lakehouse is in memory.
        InvalidDefinitionError: If delete files are in Avro, or apply to a nested column.
        UnsupportedTypeError: If Spark does not support a column's type.
        StorageError: If the storage fails.
    """
    check_reachable(lake)
    io = reading_io(lake)
    metadata = read_table_metadata(io, to_uri(lake.root, table)) if isinstance(table, str) else table.metadata
    opened, wanted = OpenIcebergTable(io, metadata), parsed(row_filter)
    return opened.scanned_frame(spark, opened.tasks(wanted), wanted, columns)


@dataclass(frozen=True, slots=True)
class OpenIcebergTable:
    """The metadata of a table, with the FileIO to read its files."""

    #: The FileIO of the table.
    io: StorageFileIO
    #: The table metadata.
    metadata: TableMetadata
    #: The version that is read, for error messages. None for a table that belongs to no version, or to an export at
    #: another root.
    version: ReadVersion | None = None

    def tasks(self, row_filter: BooleanExpression = _ALL_ROWS) -> list[FileScanTask]:
        """Return the files that may contain rows of a filter. Raises the errors of :func:`read_files`."""
        bound(row_filter, self.metadata.schema())
        with reading_at(self.version, self.io):
            return planned(DataScan(self.metadata, self.io, row_filter=row_filter))

    def native_frame(
        self, spark: SparkSession, tasks: Sequence[FileScanTask], columns: Sequence[str] | None = None
    ) -> DataFrame | None:
        """Return the rows of files through Spark's own Parquet reader, or None if it is not applicable.

        Args:
            spark: The session.
            tasks: The files.
            columns: The columns to read, or None for all.
        """
        schema = projected(self.metadata.schema(), columns)
        frame = native_parquet.frame_of(spark, self.metadata.schema(), tasks, self.io)
        return None if frame is None else native_parquet.selected(frame, schema)

    def scanned_frame(
        self,
        spark: SparkSession,
        tasks: Sequence[FileScanTask],
        row_filter: BooleanExpression = _ALL_ROWS,
        columns: Sequence[str] | None = None,
    ) -> DataFrame:
        """Return the rows of files through this package's reader. Raises the errors of :func:`read_files`.

        Args:
            spark: The session.
            tasks: The files.
            row_filter: The rows to read.
            columns: The columns to read, or None for all.
        """
        schema = projected(self.metadata.schema(), columns)
        groups = list(map(pickle.dumps, group_files(tasks, default_parallelism(spark))))
        job = pickle.dumps(ReadJob(self.io, self.metadata, schema, row_filter, self.version))
        if is_remote(spark):
            rows = to_spark_schema(schema)
            return frame_by_tasks(spark, rows, partial(read_group, job, rows), groups)
        spark.dataSource.register(TableScan)
        with handover_folder(Scan(to_spark_schema(schema), job, tuple(groups))) as folder:
            # Spark creates the data source now and keeps it with the DataFrame, so the folder can be removed.
            return spark.read.format(TableScan.name()).option(HANDOVER, folder).load()


def table_name(text: str) -> tuple[str, str]:
    """Parse ``"namespace.table"``, or a JSON list of both, whose names may contain dots.

    Raises InvalidInputError for any other form.
    """
    if (name := _json_name(text)) is not None:
        return name
    namespace, dot, table = text.partition(".")
    if not (namespace and dot and table) or "." in table:
        raise InvalidInputError(
            f'invalid table name {text!r}; use NAMESPACE.TABLE, or for names with dots ["NAMESPACE", "TABLE"]'
        )
    return namespace, table


def name_option(namespace: str, table: str) -> str:
    """Return the text of a table name that :func:`table_name` parses.

    Args:
        namespace: The namespace name.
        table: The table name.
    """
    is_plain = "." not in namespace + table and not namespace.startswith("[")
    return f"{namespace}.{table}" if is_plain else json.dumps([namespace, table])


def resolved_name(text: str, snapshot: Snapshot) -> tuple[str, str]:
    """Parse a table name, whose parts may contain dots if the name is unambiguous in a snapshot.

    Args:
        text: ``namespace.table``, or a JSON list of both.
        snapshot: The version with the table.

    Raises:
        InvalidInputError: If the form is invalid, or the name matches several tables.
        TableNotFoundError: If no table matches.
    """
    is_exact = text.count(".") < 2 or _json_name(text) is not None
    return table_name(text) if is_exact else resolve_table(text, snapshot)


def _json_name(text: str) -> tuple[str, str] | None:
    if not text.startswith('["'):
        return None
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or len(names) != 2 or not all(isinstance(name, str) and name for name in names):
        raise InvalidInputError(f'invalid table name {text!r}; use ["NAMESPACE", "TABLE"]')
    return names[0], names[1]


def open_iceberg_table(lake: Lakehouse, snapshot: Snapshot, namespace: str, table: str) -> OpenIcebergTable:
    """Open an Iceberg table at a version or export of a lakehouse.

    Args:
        lake: The lakehouse.
        snapshot: The version.
        namespace: The table's namespace.
        table: The table name.

    Raises:
        NotFoundError: If the table or the namespace does not exist.
        InvalidInputError: If the table is not an Iceberg table, or the lakehouse is in memory.
        StorageError: If the storage fails.
    """
    check_reachable(lake)
    definition = snapshot.table(namespace, table)
    if not definition.is_iceberg:
        raise InvalidInputError(
            f"table {namespace}.{table} has format {definition.table_format!r}; only {ICEBERG} tables can be read"
        )
    io = _io_of(lake, snapshot).for_table(definition)
    version = ReadVersion.of(snapshot, io)
    with reading_at(version, io):
        return OpenIcebergTable(io, table_metadata(definition, io), version)


def _io_of(lake: Lakehouse, snapshot: Snapshot) -> StorageFileIO:
    """Return a FileIO for the tables of a version. An export may be at another root."""
    storage = snapshot.files.storage
    if storage.root == lake.root:
        return reading_io(lake)
    names, options = snapshot.files.nodes.external_storages.names, options_for(lake, storage.root)
    return StorageFileIO.on(storage, options, read_only=True, others=[lake.storage], names=names)


def group_files(tasks: Iterable[FileScanTask], parallelism: int) -> list[tuple[FileScanTask, ...]]:
    """Pack files into ``parallelism`` input partitions, or into more of up to GROUP_BYTES each.

    Args:
        tasks: The files.
        parallelism: The number of tasks that can run at a time.
    """
    ordered = sorted(tasks, key=lambda task: (-task.file.file_size_in_bytes, task.file.file_path))
    total_bytes = sum(task.file.file_size_in_bytes for task in ordered)
    group_bytes = min(GROUP_BYTES, -(-total_bytes // max(parallelism, 1)))
    groups: list[list[FileScanTask]] = []
    open_bytes = 0
    for task in ordered:
        if not groups or open_bytes + task.file.file_size_in_bytes > group_bytes:
            groups.append([])
            open_bytes = 0
        groups[-1].append(task)
        open_bytes += task.file.file_size_in_bytes
    return [tuple(group) for group in groups]


def projected(schema: Schema, columns: Sequence[str] | None) -> Schema:
    """Return a schema with some of its top-level columns, in the given order.

    Args:
        schema: The schema.
        columns: The names of the columns, or None for all.

    Raises:
        InvalidInputError: If a column is unknown or occurs twice.
    """
    if columns is None:
        return schema
    names = {field.name: field for field in schema.fields}
    if unknown := next((name for name in columns if name not in names), None):
        raise InvalidInputError(f"the table has no column {unknown!r}; it has {', '.join(names)}")
    if len(set(columns)) < len(columns):
        raise InvalidInputError(f"duplicate column in {', '.join(columns)}")
    return Schema(*(names[name] for name in columns), schema_id=schema.schema_id)


def planned(scan: DataScan) -> list[FileScanTask]:
    """Plan a scan, and return its files.

    Raises InvalidDefinitionError for unsupported delete files, CorruptFileError for a broken manifest, or StorageError.
    """
    assert isinstance(scan.io, StorageFileIO)
    try:
        tasks = list(scan.plan_files())
        for file in {file for task in tasks for file in task.delete_files}:
            check_is_read(file)
        return tasks
    except (TrinityLakeError, MemoryError):
        raise
    except Exception as error:  # the Avro decoder raises arbitrary exceptions for broken bytes
        if isinstance(error, ValueError) and "equality delete" in str(error):
            return planned_tasks(scan.table_metadata, scan.io, scan.row_filter, scan.snapshot_id)
        check_manifests(scan.table_metadata, scan.io)
        raise


def check_reachable(lake: Lakehouse | StorageFileIO) -> None:
    """Raise InvalidInputError for an in-memory lakehouse, which Spark's tasks cannot access."""
    if lake.root.startswith("memory://"):
        raise InvalidInputError(
            f"Spark's tasks cannot access {lake.root}, because they are other processes; use a root on shared storage"
        )


@dataclass(frozen=True, slots=True)
class DataPlan:
    """A planned read of a table."""

    #: The table's namespace and name.
    name: tuple[str, str]
    #: The opened table.
    found: OpenIcebergTable
    #: The columns to read.
    schema: Schema
    #: The rows to read.
    row_filter: BooleanExpression
    #: The minimum number of tasks for a large table.
    parallelism: int


class TableDataReader(DataSourceReader):
    """Plans the files of a DataFrame in a helper process of the driver. Tasks receive it as a TableScanReader."""

    def __init__(self, plan: DataPlan, schema: StructType):
        self._plan = plan
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        groups = group_files(self._plan.found.tasks(self._plan.row_filter), self._plan.parallelism)
        return [InputPartition(pickle.dumps(group)) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._for_tasks().read(partition)

    def __reduce__(self) -> tuple[type[TableScanReader], tuple[Any, ...]]:
        return (TableScanReader, (self._scan(), self._schema))

    def _for_tasks(self) -> TableScanReader:
        return TableScanReader(self._scan(), self._schema)

    def _scan(self) -> Scan:
        opened = self._plan.found
        job = ReadJob(opened.io, opened.metadata, self._plan.schema, self._plan.row_filter, opened.version)
        return Scan(self._schema, pickle.dumps(job), ())
