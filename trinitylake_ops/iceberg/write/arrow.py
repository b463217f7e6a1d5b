"""Stage Arrow data as a managed table in this process. With Spark, use ``spark.tables.writer``."""

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
    """Write rows as data files of a managed table, and return the staged table without publishing it.

    A missing table is created. Columns that an existing table lacks are added as optional columns. Table columns that
    the rows lack are set to null. Rows are cast to the table's types. If values do not fit into a table column, the
    column is widened where Iceberg allows it, for example from int to long. Times are stored in microseconds,
    timestamps with a time zone in UTC, and unsigned 32-bit integers as long. Rows that would lose part of a value are
    rejected. Memory is bounded if ``rows`` is a reader.

    Args:
        lake: The lakehouse.
        rows: The rows.
        namespace: Namespace of the table.
        table: Name of the table.
        mode: Which files the new files replace: all (``replace_table``), the files of ``partitions``
            (``replace_partitions``), or none (``append``).
        partition_by: Columns for identity partitions of a new table; None to use the partitions of an existing table.
        partitions: Partitions to replace, each with a value for every partition column; strings are parsed as the
            column's type. By default ``replace_partitions`` replaces the partitions that occur in the rows. With
            ``append``, the rows may only belong to these partitions.
        replaces_columns: With ``replace_table``, also replace the table's columns with those of the rows (see
            :func:`trinitylake_ops.iceberg.write.plan.evolve_to`).

    Returns:
        The staged table.

    Raises:
        InvalidInputError: The arguments are not valid, or the rows do not fit. Nothing is staged.
        CommitConflictError: The table changed during the write.
        InvalidDefinitionError: The table or its columns are not valid.
        UnsupportedTypeError: Iceberg does not have the type of a column.
        StorageError: A file cannot be read or written.
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
    """Plan a write of rows, including the required changes to the table's columns. See :func:`stage_arrow`.

    Args:
        lake: The lakehouse.
        rows: The rows. A reader is not consumed.
        namespace: Namespace of the table.
        table: Name of the table.
        partition_by: Partition columns; None to use those of an existing table.
        replaces_table: Whether to replace the table's columns with those of the rows.

    Raises:
        InvalidInputError: Two columns have the same name, or a new table would have no columns.
        UnsupportedTypeError: Iceberg does not have the type of a column.
        InvalidDefinitionError: The table has different partitions.
    """
    check_distinct(rows.schema)
    snapshot = lake.snapshot()
    exists = snapshot.has_namespace(namespace) and snapshot.has_table(namespace, table)
    schema, evolve = storable(rows.schema.remove_metadata()), None
    if exists:
        table_columns = snapshot.table(namespace, table).schema
        wanted_types = _types_that_do_not_fit(rows, schema, table_columns, is_whole=replaces_table)
        evolve = evolve_to(wanted_types, replaces_table=replaces_table)
        names = {column.name for column in table_columns.columns}
        schema = pa.schema([field.with_nullable(True) for field in schema if field.name not in names])
    elif not len(schema):
        raise InvalidInputError(
            f"table {namespace}.{table} cannot be created: the data has no columns; add columns, even if there are no"
            " rows"
        )
    columns = schema if len(schema) else None
    return plan_write(lake, namespace, table, columns, partition_by=partition_by, evolve=evolve)


def _types_that_do_not_fit(
    rows: pa.Table | pa.RecordBatchReader, schema: pa.Schema, table_columns: Columns, *, is_whole: bool
) -> dict[str, IcebergType | None]:
    """Return the type of each row column that does not fit the table, and None for each other column.

    If the rows replace the whole table (``is_whole``), types are compared. Otherwise, a column fits if its values can
    be cast. pandas converts integers with a missing value to floats, so such floats fit integers in any case. The rows
    of a reader are not read and are assumed to fit.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # importing it loads pandas

    stored = {
        field.name: field.type for field in schema_to_pyarrow(to_iceberg_schema(table_columns), include_field_ids=False)
    }
    types: dict[str, IcebergType | None] = {}
    for index, field in enumerate(schema):
        types[field.name] = None
        target = stored.get(field.name)
        if target is None or field.type == target:
            continue
        is_missing_integers = pa.types.is_floating(field.type) and pa.types.is_integer(target)
        checks_values = isinstance(rows, pa.Table) and (is_missing_integers or not is_whole)
        if (checks_values and _can_be_cast(rows.column(index), target)) or not (is_whole or isinstance(rows, pa.Table)):
            continue
        with contextlib.suppress(UnsupportedTypeError):  # reported by the later cast
            types[field.name] = arrow_to_iceberg_schema(pa.schema([field])).fields[0].field_type
    return types


def _can_be_cast(column: pa.ChunkedArray, target: pa.DataType) -> bool:
    try:
        cast_exactly(column, target)
    except pa.ArrowException:
        return False
    return True
