"""Write tables in Spark tasks.

The driver plans the write. Each task writes its rows as Parquet files under the table's location and returns their
descriptions, from which the driver creates one Iceberg snapshot. No rows pass through the driver, and no shared disk is
needed. A task that fails deletes its files, and the driver deletes the files of tasks that succeeded. Files of a
process that was killed, or that Spark stopped because another task failed, are orphans: no version refers to them.

::

    plan = operations.plan_compact_tables(lake)
    report = plan.execute(write_groups_on(spark), run_id="2013-01-31")
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from pyiceberg.exceptions import ValidationError
from pyiceberg.manifest import DataFile
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError
from trinitylake_ops.iceberg.managed import ICEBERG
from trinitylake_ops.iceberg.write.compact import FileGroup
from trinitylake_ops.iceberg.write.data_files import TARGET_FILE_SIZE_BYTES
from trinitylake_ops.iceberg.write.partition_key import PartitionValue
from trinitylake_ops.iceberg.write.plan import Evolution, TableWrite, plan_write
from trinitylake_ops.iceberg.write.rewrite import GroupWriter, Rewriting
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Mode, check_mode, replaced_by, stage_replacing
from trinitylake_ops.spark.runtime.connect import activate, is_remote
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.spark.runtime.java import HANDOVER, handover_folder, receive_output
from trinitylake_ops.spark.runtime.task_jobs import run_in_tasks
from trinitylake_ops.spark.tables.reader import check_reachable
from trinitylake_ops.spark.tables.schema import to_iceberg_schema
from trinitylake_ops.spark.tables.tasks import WRITTEN_FILE, TableSink, WriteJob, unpickled_data_files, write_rows
from trinitylake_ops.transaction.lakehouse import Lakehouse


def stage_dataframe(
    lake: Lakehouse,
    frame: DataFrame,
    namespace: str,
    table: str,
    *,
    partition_by: Sequence[str] | None = None,
    primary_key: Sequence[str] = (),
    mode: Mode,
    partitions: Sequence[Mapping[str, PartitionValue]] | None = None,
    properties: Mapping[str, str] | None = None,
    evolve: Evolution | None = None,
    target_file_size_bytes: int = TARGET_FILE_SIZE_BYTES,
) -> StagedTable:
    """Write the rows of a DataFrame as data files of a managed table, and return the table staged but not published.

    A missing table is created. An existing table keeps its field ids, required columns, partitions and key. Columns
    that only the frame has are added as optional columns, and columns that only the table has are null.

    Rows are clustered by partition, so that each partition gets one file, or a few if Spark splits a large one. An
    unpartitioned table gets one file for each non-empty partition of the frame.

    Args:
        lake: The lakehouse.
        frame: The rows.
        namespace: The table's namespace.
        table: The table name.
        partition_by: Identity partition columns of a new table. None means the table's own partitions.
        primary_key: The identifier columns of a new table.
        mode: Which existing files the new files replace, decided by metadata alone: ``replace_table`` replaces all,
            ``append`` none, ``replace_partitions`` those of ``partitions``.
        partitions: For ``replace_partitions``, the replaced partitions, each with a value for every partition column.
            Rows of other partitions are rejected, and a partition without rows becomes empty. None means the partitions
            of the rows.
        properties: The properties of a new table.
        evolve: Changes an existing table in the same commit, through a pyiceberg transaction: ``update_schema``
            renames, drops and widens columns, and ``update_spec`` sets the partitions of later writes.
        target_file_size_bytes: The approximate maximum size of a data file.

    Raises:
        InvalidInputError: If the request is invalid (before any task runs), or the rows do not match the table.
        InvalidDefinitionError: If the columns or partitions are not valid for the table (before any task runs).
        UnsupportedTypeError: If a type is not supported by Iceberg (before any task runs).
        CommitConflictError: If the table changed in the meantime.
        CorruptFileError: If Spark cannot read a source file.
        JobFailedError: If Spark fails.
        StorageError: If the storage fails. After an error, nothing is staged.
    """
    name = f"{namespace}.{table}"
    check_mode(mode)
    check_reachable(lake)
    plan = plan_rows(lake, frame.schema, namespace, table, partition_by, primary_key, properties, evolve)
    columns = [field.name for field in plan.metadata.spec().fields]
    wanted, replacing = replaced_by(plan, mode, partitions, frame.columns)
    with spark_failures(f"write table {name}"):
        data_files = _write(_cluster(frame, columns), plan, target_file_size_bytes)
    return stage_replacing(lake, plan, data_files, wanted, replacing)


def plan_rows(
    lake: Lakehouse,
    rows: StructType,
    namespace: str,
    table: str,
    partition_by: Sequence[str] | None = None,
    primary_key: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
    evolve: Evolution | None = None,
) -> TableWrite:
    """Plan a write of rows with these columns, including all checks that need no rows.

    Args:
        lake: The lakehouse.
        rows: The columns of the rows.
        namespace: The table's namespace.
        table: The table name.
        partition_by: Identity partition columns of a new table, or None for the table's own.
        primary_key: The identifier columns of a new table.
        properties: The properties of a new table.
        evolve: Changes an existing table in the same commit.

    Raises:
        InvalidInputError: If the table is not an Iceberg table, or the rows lack a required column.
        InvalidDefinitionError: If the columns, partitions or key are not valid for the table.
        UnsupportedTypeError: If a type is not supported by Iceberg.
    """
    name = f"{namespace}.{table}"
    snapshot = lake.snapshot()
    exists = snapshot.has_namespace(namespace) and snapshot.has_table(namespace, table)
    if exists and not snapshot.table(namespace, table).is_iceberg:
        table_format = snapshot.table(namespace, table).table_format
        raise InvalidInputError(f"table {name} has format {table_format!r}; only {ICEBERG} tables can be written")
    # Spark infers nullability for each query. Required columns of the table stay required.
    table_columns: dict[str, bool] = {}
    if exists and evolve is not None:
        evolved_schema = plan_write(lake, namespace, table, evolve=evolve).metadata.schema()
        table_columns = {field.name: field.required for field in evolved_schema.fields}
    elif exists:
        table_columns = {column.name: not column.nullable for column in snapshot.table(namespace, table).schema.columns}
    lower_names = {column.lower(): column for column in table_columns}
    if variant := next(
        (column for column in rows.names if column not in table_columns and column.lower() in lower_names), None
    ):
        raise InvalidDefinitionError(
            f"column {variant!r} differs from column {lower_names[variant.lower()]!r} of table {name} only by case,"
            " which Spark ignores; rename it"
        )
    required = [name for name, is_required in table_columns.items() if is_required]
    schema = to_iceberg_schema(rows, required=required, primary_key=primary_key)
    if missing := next((column for column in required if column not in rows.names), None):
        raise InvalidInputError(f"column {missing!r} of table {name} is required, but missing in the rows")
    if exists:
        added = [
            field.model_copy(update={"required": field.required and field.name in table_columns})
            for field in schema.fields
        ]
        schema = type(schema)(*added)
    try:
        plan = plan_write(
            lake, namespace, table, schema, partition_by=partition_by, properties=properties, evolve=evolve
        )
    except (ValidationError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidDefinitionError(f"the rows do not match table {name}: {reason}") from error
    key = plan.metadata.schema().identifier_field_names()
    if primary_key and key != set(primary_key):
        raise InvalidDefinitionError(
            f"table {name} has primary key ({', '.join(sorted(key))}), not ({', '.join(primary_key)})"
        )
    return plan


def _cluster(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Cluster rows by partition, in Spark partitions of a size that adaptive execution chooses."""
    if not columns:
        return frame
    attributes = [F.col("`" + column.replace("`", "``") + "`") for column in columns]
    # Rows are sorted so that a task writes one file at a time.
    return frame.hint("rebalance", *attributes).sortWithinPartitions(*attributes)


def _write(frame: DataFrame, plan: TableWrite, target_file_size_bytes: int) -> list[DataFile]:
    job = pickle.dumps(WriteJob(plan, target_file_size_bytes))
    if is_remote(frame.sparkSession):
        # The server has another disk, so results cannot be returned in a folder: they are returned as rows.
        written = frame.mapInArrow(partial(write_rows, job), f"{WRITTEN_FILE} binary").toArrow()
        return unpickled_data_files(written.column(WRITTEN_FILE).to_pylist())
    activate(frame.sparkSession)
    frame.sparkSession.dataSource.register(TableSink)
    with handover_folder(job) as folder:
        frame.write.format(TableSink.name()).mode("append").option(HANDOVER, folder).save()
        return unpickled_data_files(receive_output(folder))


def write_groups_on(spark: SparkSession) -> GroupWriter:
    """Return a writer of file groups that uses Spark's tasks.

    The writer raises InvalidInputError for a lakehouse in memory, JobFailedError if Spark fails, and errors of this
    package that tasks raise. After an error, the files of other tasks are orphans, which a removal of orphans deletes.
    """

    def write(groups: Sequence[tuple[Rewriting, FileGroup]]) -> list[list[DataFile]]:
        for rewriting, _ in groups:
            check_reachable(rewriting.io)
        rewritings = {id(rewriting): pickle.dumps(rewriting) for rewriting, _ in groups}
        elements = [pickle.dumps((id(rewriting), group)) for rewriting, group in groups]
        written = run_in_tasks(spark, "rewrite data files", partial(_write_group, rewritings), elements, len(elements))
        return [pickle.loads(files) for files in written]

    return write


def _write_group(rewritings: Mapping[int, bytes], elements: Iterator[bytes]) -> Iterator[bytes]:
    for element in elements:
        number, group = pickle.loads(element)
        rewriting: Rewriting = pickle.loads(rewritings[number])
        yield pickle.dumps(rewriting.rewrite(group))
