"""Reads managed tables as DataFrames. Spark's tasks read the data files themselves, through Storage.

The driver plans the scan (Iceberg prunes files by partition and statistics). Spark gets small groups of files as input
partitions, and each task reads its group into Arrow batches. Nothing is written, and no other reader's settings apply.
Requests are counted and retried as elsewhere in the lakehouse.
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
from trinitylake_ops.spark.runtime.java import HANDOVER, handed_over
from trinitylake_ops.spark.runtime.task_jobs import frame_by_tasks
from trinitylake_ops.spark.tables import native_parquet
from trinitylake_ops.spark.tables.schema import bound, parsed, to_spark_schema
from trinitylake_ops.spark.tables.tasks import ReadJob, Scan, TableScan, TableScanReader, read_group
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import resolve_table

if TYPE_CHECKING:
    import pyarrow as pa

#: An input partition takes up to so many bytes of data files. A bigger file has its own partition.
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
    """Return a table ``"namespace.table"`` at a version of the lakehouse (a number, or an export's name).

    Without ``version`` the latest one is read, as it is now. ``row_filter`` and ``columns`` as in :func:`read_files`.
    Without a ``row_filter`` Spark's own reader of Parquet reads plain local files if they need no more
    (:mod:`~trinitylake_ops.spark.tables.native_parquet`). Then all columns can be null, as far as Spark knows.
    Raises TableNotFoundError, NamespaceNotFoundError, VersionNotFoundError. Raises InvalidInputError for another form
    of name or a table that is not Iceberg's, and the errors of read_files.
    """
    snapshot = lake.snapshot(version)
    found = open_iceberg_table(lake, snapshot, *resolved_name(table, snapshot))
    wanted = parsed(row_filter)
    tasks = found.tasks(wanted)
    native = found.native_frame(spark, tasks, columns) if row_filter is None else None
    return found.scanned_frame(spark, tasks, wanted, columns) if native is None else native


def read_staged(
    spark: SparkSession,
    lake: Lakehouse,
    staged: StagedTable,
    *,
    row_filter: str | BooleanExpression | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """Return a staged table as it would be published. Raises what :func:`read_files` raises."""
    return read_files(spark, lake, staged.metadata_location, row_filter=row_filter, columns=columns)


def read_files(
    spark: SparkSession,
    lake: Lakehouse,
    table: Table | str,
    *,
    row_filter: str | BooleanExpression | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """Return the current rows of an Iceberg table, given as such or by the location of its metadata file.

    ``row_filter`` is Iceberg's (``"year = 2013 and month = 2"``). It skips files before anything is read, and then
    filters rows. Spark's own filters and projections do not reach the files, so pass known ones here. ``columns`` are
    top-level names, in the order wanted. The files are those of this moment, however late and often the DataFrame is
    used.

    Delete files are applied. Raises InvalidDefinitionError for some in Avro, or by a column within another. Raises
    InvalidInputError for a filter that cannot be parsed or bound, an unknown column or a lakehouse in memory. Raises
    UnsupportedTypeError, StorageError. When the frame is used, a missing or broken file comes as Spark's
    PythonException.
    """
    check_reachable(lake)
    io = reading_io(lake)
    metadata = read_table_metadata(io, to_uri(lake.root, table)) if isinstance(table, str) else table.metadata
    found, wanted = OpenIcebergTable(io, metadata), parsed(row_filter)
    return found.scanned_frame(spark, found.tasks(wanted), wanted, columns)


@dataclass(frozen=True, slots=True)
class OpenIcebergTable:
    """The metadata of a table, and the FileIO for its files.

    ``version`` is None for a table of no version, or elsewhere.
    """

    io: StorageFileIO
    metadata: TableMetadata
    version: ReadVersion | None = None

    def tasks(self, row_filter: BooleanExpression = _ALL_ROWS) -> list[FileScanTask]:
        """Return the files that hold the rows of a filter. Raises what :func:`read_files` raises."""
        bound(row_filter, self.metadata.schema())
        with reading_at(self.version, self.io):
            return planned(DataScan(self.metadata, self.io, row_filter=row_filter))

    def native_frame(
        self, spark: SparkSession, tasks: Sequence[FileScanTask], columns: Sequence[str] | None = None
    ) -> DataFrame | None:
        """Return the rows of files by Spark's own reader of Parquet, None if it cannot be used."""
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
        """Return the rows of files as our own reader gives them. Raises what :func:`read_files` raises."""
        schema = projected(self.metadata.schema(), columns)
        groups = list(map(pickle.dumps, group_files(tasks, default_parallelism(spark))))
        job = pickle.dumps(ReadJob(self.io, self.metadata, schema, row_filter, self.version))
        if is_remote(spark):
            rows = to_spark_schema(schema)
            return frame_by_tasks(spark, rows, partial(read_group, job, rows), groups)
        spark.dataSource.register(TableScan)
        with handed_over(Scan(to_spark_schema(schema), job, tuple(groups))) as folder:
            # Spark makes the data source now and keeps it with the DataFrame, so the folder is not needed any more.
            return spark.read.format(TableScan.name()).option(HANDOVER, folder).load()


def table_name(text: str) -> tuple[str, str]:
    """Return namespace and table of ``"namespace.table"``, or of a JSON list of both, which may contain dots.

    Raises InvalidInputError for another form.
    """
    if (name := _json_name(text)) is not None:
        return name
    namespace, dot, table = text.partition(".")
    if not (namespace and dot and table) or "." in table:
        raise InvalidInputError(
            f'{text!r} names no table; write NAMESPACE.TABLE, or for a name with dots ["NAMESPACE", "TABLE"]'
        )
    return namespace, table


def name_option(namespace: str, table: str) -> str:
    """Return the text from which :func:`table_name` returns these names."""
    is_plain = "." not in namespace + table and not namespace.startswith("[")
    return f"{namespace}.{table}" if is_plain else json.dumps([namespace, table])


def resolved_name(text: str, snapshot: Snapshot) -> tuple[str, str]:
    """Return namespace and table of ``"namespace.table"``, of which either may hold dots itself, or of a JSON list.

    Raises InvalidInputError for another form or a name that means several tables, TableNotFoundError.
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
    if not isinstance(names, list) or len(names) != 2 or not all(isinstance(one, str) and one for one in names):
        raise InvalidInputError(f'{text!r} names no table; write ["NAMESPACE", "TABLE"]')
    return names[0], names[1]


def open_iceberg_table(lake: Lakehouse, snapshot: Snapshot, namespace: str, table: str) -> OpenIcebergTable:
    """Return an Iceberg table of a version of a lakehouse, or of its export. Raises as :func:`read_table`."""
    check_reachable(lake)
    definition = snapshot.table(namespace, table)
    if not definition.is_iceberg:
        raise InvalidInputError(
            f"table {namespace}.{table} has the format {definition.table_format!r}; only {ICEBERG} can be read"
        )
    io = _io_of(lake, snapshot).for_table(definition)
    version = ReadVersion.of(snapshot, io)
    with reading_at(version, io):
        return OpenIcebergTable(io, table_metadata(definition, io), version)


def _io_of(lake: Lakehouse, snapshot: Snapshot) -> StorageFileIO:
    """Return a FileIO for the tables of a version. An export may be in another lakehouse, below its own root."""
    storage = snapshot.files.storage
    if storage.root == lake.root:
        return reading_io(lake)
    names, options = snapshot.files.nodes.external_storages.names, options_for(lake, storage.root)
    return StorageFileIO.on(storage, options, read_only=True, others=[lake.storage], names=names)


def group_files(tasks: Iterable[FileScanTask], parallelism: int) -> list[tuple[FileScanTask, ...]]:
    """Pack files into input partitions: ``parallelism`` of them, or more so that each has up to GROUP_BYTES."""
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
    """Return a schema with some of its top-level columns. Raises InvalidInputError for an unknown column."""
    if columns is None:
        return schema
    names = {field.name: field for field in schema.fields}
    if unknown := next((name for name in columns if name not in names), None):
        raise InvalidInputError(f"the table has no column {unknown!r}; it has {', '.join(names)}")
    if len(set(columns)) < len(columns):
        raise InvalidInputError(f"a column is asked for twice: {', '.join(columns)}")
    return Schema(*(names[name] for name in columns), schema_id=schema.schema_id)


def planned(scan: DataScan) -> list[FileScanTask]:
    """Return the files of a scan.

    Raises InvalidDefinitionError for delete files that are not read, CorruptFileError for a manifest, StorageError.
    """
    assert isinstance(scan.io, StorageFileIO)
    try:
        tasks = list(scan.plan_files())
        for file in {file for task in tasks for file in task.delete_files}:
            check_is_read(file)
        return tasks
    except (TrinityLakeError, MemoryError):
        raise
    except Exception as error:  # for broken bytes the Avro decoder raises any exception
        if isinstance(error, ValueError) and "equality delete" in str(error):
            return planned_tasks(scan.table_metadata, scan.io, scan.row_filter, scan.snapshot_id)
        check_manifests(scan.table_metadata, scan.io)
        raise


def check_reachable(lake: Lakehouse | StorageFileIO) -> None:
    """Raise InvalidInputError for a lakehouse in this process's memory, which Spark's tasks would not see."""
    if lake.root.startswith("memory://"):
        raise InvalidInputError(
            f"Spark's tasks are other processes and cannot see {lake.root}; use a root on a storage that they reach"
        )


@dataclass(frozen=True, slots=True)
class DataPlan:
    """The read of a table. ``schema`` has the columns, and at least so many tasks share it if it is large enough."""

    name: tuple[str, str]
    found: OpenIcebergTable
    schema: Schema
    row_filter: BooleanExpression
    parallelism: int


class TableDataReader(DataSourceReader):
    """Plans the files of a frame in a helper of the driver. The tasks get it as a TableScanReader."""

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
        found = self._plan.found
        job = ReadJob(found.io, found.metadata, self._plan.schema, self._plan.row_filter, found.version)
        return Scan(self._schema, pickle.dumps(job), ())
