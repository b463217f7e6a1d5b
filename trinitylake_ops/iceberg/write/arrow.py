"""Stages Arrow data as a managed table, in this process. With Spark, ``spark_jobs.table_writer`` does the same."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyiceberg.types import IcebergType

from trinitylake_ops.errors import InvalidInputError, UnsupportedTypeError
from trinitylake_ops.format.definitions import Schema as Columns
from trinitylake_ops.iceberg.types import arrow_to_iceberg_schema, storable, to_iceberg_schema
from trinitylake_ops.iceberg.write.casting import cast_exactly, check_distinct
from trinitylake_ops.iceberg.write.partition_key import PartitionValue
from trinitylake_ops.iceberg.write.plan import TableWrite, evolve_to, plan_write
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Mode, check_mode, replaced_by, stage_replacing
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
    replaces_columns: bool = False,
) -> StagedTable:
    """Write rows as data files of a managed table and return it staged, unpublished.

    A missing table is created, with identity partitions by ``partition_by``. Columns that an existing table lacks are
    added as optional ones. Its columns that the rows lack are null. Rows are cast to the table's types. A column that a
    table's rows do not fit is widened where Iceberg widens it, such as int to long. Times are stored in microseconds,
    those of other zones in UTC, unsigned integers of 32 bits as long; rows that would lose a part of a value are
    refused. ``mode`` says which files the new ones replace. ``replace_table`` replaces all, ``append`` none.
    ``replace_partitions`` replaces those of ``partitions``, each a value for every partition column (text is read as
    the column's type). Without ``partitions`` it replaces those that rows arrive for. With ``append``, ``partitions``
    are the only ones that rows may have. With ``replaces_columns``, ``replace_table`` gives the table the columns of
    the rows, too (:func:`write_plan.evolve_to`). Memory is bounded if ``rows`` are a reader.

    Raises InvalidInputError for a wrong request and for rows that do not fit, CommitConflictError when the table
    changed meanwhile. Raises InvalidDefinitionError, UnsupportedTypeError, StorageError. Nothing is staged then.
    """
    check_mode(mode)
    replaces_table = replaces_columns and mode == "replace_table"
    plan = plan_arrow(lake, rows, namespace, table, partition_by=partition_by, replaces_table=replaces_table)
    wanted, replacing = replaced_by(plan, mode, partitions, rows.schema.names)
    batches = rows.to_batches() if isinstance(rows, pa.Table) else rows
    return stage_replacing(lake, plan, plan.write(batches), wanted, replacing)


def plan_arrow(
    lake: Lakehouse,
    rows: pa.Table | pa.RecordBatchReader,
    namespace: str,
    table: str,
    *,
    partition_by: Sequence[str] | None = None,
    replaces_table: bool = False,
) -> TableWrite:
    """Plan a write of rows, with the changes of the table's columns that the rows need. See :func:`stage_arrow`.

    Args:
        lake: The lakehouse.
        rows: The rows. Those of a reader are not read.
        namespace: The namespace of the table.
        table: The name of the table.
        partition_by: The partition columns, None for those of an existing table.
        replaces_table: The table gets the columns of the rows.

    Raises:
        InvalidInputError: Two columns have one name, or there are none for a new table.
        UnsupportedTypeError: Iceberg has no type for a column.
        InvalidDefinitionError: The table has other partitions.
    """
    check_distinct(rows.schema)
    snapshot = lake.snapshot()
    exists = snapshot.has_namespace(namespace) and snapshot.has_table(namespace, table)
    schema, evolve = storable(rows.schema.remove_metadata()), None
    if exists:
        known = snapshot.table(namespace, table).schema
        wanted_types = _types_that_do_not_fit(rows, schema, known, is_whole=replaces_table)
        evolve = evolve_to(wanted_types, replaces_table=replaces_table)
        names = {column.name for column in known.columns}
        schema = pa.schema([field.with_nullable(True) for field in schema if field.name not in names])
    elif not len(schema):
        raise InvalidInputError(
            f"table {namespace}.{table} cannot be created: the rows have no columns; give them columns, also if there"
            " are no rows"
        )
    columns = schema if len(schema) else None
    return plan_write(lake, namespace, table, columns, partition_by=partition_by, evolve=evolve)


def _types_that_do_not_fit(
    rows: pa.Table | pa.RecordBatchReader, given: pa.Schema, known: Columns, *, is_whole: bool
) -> dict[str, IcebergType | None]:
    """Return the type of each column of rows that is not stored as the table has it, None for the others.

    If the rows replace the whole table (``is_whole``), types count. Otherwise values do: rows that can be cast fit.
    pandas makes floats of integers as soon as one is missing, so such floats fit integers in any case. Rows of a reader
    are not looked at: they fit.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # importing it loads pandas

    stored = {field.name: field.type for field in schema_to_pyarrow(to_iceberg_schema(known), include_field_ids=False)}
    found: dict[str, IcebergType | None] = {}
    for at, field in enumerate(given):
        found[field.name] = None
        target = stored.get(field.name)
        if target is None or field.type == target:
            continue
        is_missing_integers = pa.types.is_floating(field.type) and pa.types.is_integer(target)
        looks = isinstance(rows, pa.Table) and (is_missing_integers or not is_whole)
        if (looks and _can_be_cast(rows.column(at), target)) or not (is_whole or isinstance(rows, pa.Table)):
            continue
        with contextlib.suppress(UnsupportedTypeError):  # the cast is tried
            found[field.name] = arrow_to_iceberg_schema(pa.schema([field])).fields[0].field_type
    return found


def _can_be_cast(column: pa.ChunkedArray, target: pa.DataType) -> bool:
    try:
        cast_exactly(column, target)
    except pa.ArrowException:
        return False
    return True
