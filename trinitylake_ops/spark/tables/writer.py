"""Write tables in tasks.

The driver plans the write. Each task writes its rows as Parquet files under the table's own prefix and returns their
descriptions. The driver makes one Iceberg snapshot of all of them. No row passes the driver and no disk is shared. A
task that fails deletes its files, and so does the driver for tasks that ended well. Files of a process that dies, or
that Spark stops because another task failed, are orphans: nothing names them.

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
from trinitylake_ops.spark.runtime.java import HANDOVER, handed_over, receive_output
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
    """Write a DataFrame's rows as data files of a managed table and return it staged, unpublished.

    A missing table is created, with identity partitions by ``partition_by``, ``primary_key`` as its identifier fields
    and ``properties``. An existing table keeps its field ids, required columns, partitions and key. Columns that it
    lacks are added as optional ones. Its columns that the frame lacks are null. ``partition_by`` None means the table's
    own partitions. ``evolve`` first changes an existing table, in the same commit, by a transaction of pyiceberg.
    ``update_schema`` renames, drops and widens columns, and ``update_spec`` sets the partitions for later writes.

    ``mode`` says which files the new ones replace, by metadata alone. ``replace_table`` replaces all of them,
    ``append`` none. ``replace_partitions`` replaces those of ``partitions``, each a value for every partition column.
    Rows of another partition are refused then, and a partition without rows becomes empty. Without ``partitions`` it
    replaces the partitions that rows arrive for.

    Rows are clustered by partition, so a partition gets one file. It gets a few when Spark splits a big one. An
    unpartitioned table gets a file per non-empty partition of the frame. Files end at about ``target_file_size_bytes``.

    Raises UnsupportedTypeError, InvalidDefinitionError and InvalidInputError before any task runs if the request is
    wrong. Raises InvalidInputError for rows that do not fit, CommitConflictError when the table changed meanwhile,
    StorageError. Raises CorruptFileError for a source that Spark cannot read, JobFailedError for other failures.
    Nothing is staged then.
    """
    name = f"{namespace}.{table}"
    check_mode(mode)
    check_reachable(lake)
    plan = plan_rows(lake, frame.schema, namespace, table, partition_by, primary_key, properties, evolve)
    columns = [field.name for field in plan.metadata.spec().fields]
    wanted, replacing = replaced_by(plan, mode, partitions, frame.columns)
    with spark_failures(f"write table {name}"):
        data_files = _write(_clustered(frame, columns), plan, target_file_size_bytes)
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
    """Plan to write rows of such columns, with all checks that need no rows. See :func:`stage_dataframe`."""
    name = f"{namespace}.{table}"
    snapshot = lake.snapshot()
    exists = snapshot.has_namespace(namespace) and snapshot.has_table(namespace, table)
    if exists and not snapshot.table(namespace, table).is_iceberg:
        table_format = snapshot.table(namespace, table).table_format
        raise InvalidInputError(f"table {name} has the format {table_format!r}; only {ICEBERG} can be written")
    # Spark infers nullability anew for each query. Required columns of the table stay required.
    known: dict[str, bool] = {}
    if exists and evolve is not None:
        evolved = plan_write(lake, namespace, table, evolve=evolve).metadata.schema()
        known = {field.name: field.required for field in evolved.fields}
    elif exists:
        known = {column.name: not column.nullable for column in snapshot.table(namespace, table).schema.columns}
    alike = {column.lower(): column for column in known}
    if variant := next((column for column in rows.names if column not in known and column.lower() in alike), None):
        raise InvalidDefinitionError(
            f"table {name} has a column {alike[variant.lower()]!r}: {variant!r} would be another one, which Spark does"
            " not tell from it; rename it"
        )
    required = [name for name, is_required in known.items() if is_required]
    schema = to_iceberg_schema(rows, required=required, primary_key=primary_key)
    if missing := next((column for column in required if column not in rows.names), None):
        raise InvalidInputError(f"column {missing!r} of table {name} is required and the rows lack it")
    if exists:
        added = [
            field.model_copy(update={"required": field.required and field.name in known}) for field in schema.fields
        ]
        schema = type(schema)(*added)
    try:
        plan = plan_write(
            lake, namespace, table, schema, partition_by=partition_by, properties=properties, evolve=evolve
        )
    except (ValidationError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidDefinitionError(f"the rows do not fit table {name}: {reason}") from error
    key = plan.metadata.schema().identifier_field_names()
    if primary_key and key != set(primary_key):
        raise InvalidDefinitionError(
            f"table {name} has the primary key ({', '.join(sorted(key))}), not ({', '.join(primary_key)})"
        )
    return plan


def _clustered(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Bring the rows of a partition together, in partitions of a size that Spark's adaptive execution chooses."""
    if not columns:
        return frame
    attributes = [F.col("`" + column.replace("`", "``") + "`") for column in columns]
    # Rows are sorted, so that a task writes one file after the other.
    return frame.hint("rebalance", *attributes).sortWithinPartitions(*attributes)


def _write(frame: DataFrame, plan: TableWrite, target_file_size_bytes: int) -> list[DataFile]:
    job = pickle.dumps(WriteJob(plan, target_file_size_bytes))
    if is_remote(frame.sparkSession):
        # The server has another disk, so no folder takes answers: they come as rows.
        written = frame.mapInArrow(partial(write_rows, job), f"{WRITTEN_FILE} binary").toArrow()
        return unpickled_data_files(written.column(WRITTEN_FILE).to_pylist())
    activate(frame.sparkSession)
    frame.sparkSession.dataSource.register(TableSink)
    with handed_over(job) as folder:
        frame.write.format(TableSink.name()).mode("append").option(HANDOVER, folder).save()
        return unpickled_data_files(receive_output(folder))


def write_groups_on(spark: SparkSession) -> GroupWriter:
    """Return a writer of groups by Spark's tasks.

    It raises InvalidInputError for a lakehouse in memory, errors of this package as tasks raised them, and
    JobFailedError for other failures. Then a removal of orphans deletes the files of the other tasks, as nothing names
    them.
    """

    def write(groups: Sequence[tuple[Rewriting, FileGroup]]) -> list[list[DataFile]]:
        for rewriting, _ in groups:
            check_reachable(rewriting.io)
        rewritings = {id(rewriting): pickle.dumps(rewriting) for rewriting, _ in groups}
        elements = [pickle.dumps((id(rewriting), group)) for rewriting, group in groups]
        written = run_in_tasks(
            spark, "write data files anew", partial(_write_group, rewritings), elements, len(elements)
        )
        return [pickle.loads(files) for files in written]

    return write


def _write_group(rewritings: Mapping[int, bytes], elements: Iterator[bytes]) -> Iterator[bytes]:
    for element in elements:
        number, group = pickle.loads(element)
        rewriting: Rewriting = pickle.loads(rewritings[number])
        yield pickle.dumps(rewriting.rewrite(group))
