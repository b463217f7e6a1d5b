"""Stages Arrow data as a managed table, in this process. With Spark, ``spark_jobs.table_writer`` does the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from trinitylake_ops.tables.writing.data_files import check_distinct
from trinitylake_ops.tables.writing.partition_key import PartitionValue
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.write_mode import Mode, check_mode, replaced_by, stage_replacing
from trinitylake_ops.tables.writing.write_plan import plan_write
from trinitylake_ops.transaction.lakehouse import Lakehouse


def stage_arrow(
    lake: Lakehouse,
    rows: pa.Table | pa.RecordBatchReader,
    namespace: str,
    table: str,
    *,
    mode: Mode,
    partition_by: Sequence[str] | None = None,
    partitions: Sequence[Mapping[str, PartitionValue]] | None = None,
) -> StagedTable:
    """Write rows as data files of a managed table and return it staged, unpublished.

    A missing table is created, with identity partitions by ``partition_by``. An existing table keeps its columns'
    types, and rows are cast to them. Columns that it lacks are added as optional ones. Its columns that the rows lack
    are null. ``mode`` says which files the new ones replace. ``replace_table`` replaces all, ``append`` none.
    ``replace_partitions`` replaces those of ``partitions``, each a value for every partition column (text is read as
    the column's type). Without ``partitions`` it replaces those that rows arrive for. Memory is bounded if ``rows`` are
    a reader.

    Raises InvalidInputError for a wrong request and for rows that do not fit, CommitConflictError when the table
    changed meanwhile. Raises InvalidDefinitionError, UnsupportedTypeError, StorageError. Nothing is staged then.
    """
    check_mode(mode)
    check_distinct(rows.schema)
    schema = _wanted_schema(lake, rows.schema, namespace, table)
    plan = plan_write(lake, namespace, table, schema, partition_by=partition_by)
    wanted, replacing = replaced_by(plan, mode, partitions)
    batches = rows.to_batches() if isinstance(rows, pa.Table) else rows
    return stage_replacing(lake, plan, plan.write(batches), wanted, replacing)


def _wanted_schema(lake: Lakehouse, given: pa.Schema, namespace: str, table: str) -> pa.Schema | None:
    """Return the schema of a new table, or the columns that an existing one lacks, None if there are none."""
    snapshot = lake.snapshot()
    plain = given.remove_metadata()
    if not (snapshot.has_namespace(namespace) and snapshot.has_table(namespace, table)):
        return plain
    known = {column.name for column in snapshot.table(namespace, table).schema.columns}
    added = [field.with_nullable(True) for field in plain if field.name not in known]
    return pa.schema(added) if added else None
