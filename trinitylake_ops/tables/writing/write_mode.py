"""The files that a write replaces, as callers say it: a mode, and partitions by their values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

from pyiceberg.expressions import BooleanExpression, Or
from pyiceberg.manifest import DataFile
from pyiceberg.typedef import Record

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.tables.writing.data_files import delete_data_files, identity_columns
from trinitylake_ops.tables.writing.partition_key import PartitionKey, PartitionValue, check_partitions
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import Replace, stage_data_files
from trinitylake_ops.tables.writing.write_plan import TableWrite
from trinitylake_ops.transaction.lakehouse import Lakehouse

Mode: TypeAlias = Literal["replace_table", "replace_partitions", "append"]

_REPLACING: Mapping[str, Replace] = {
    "replace_table": Replace.ALL,
    "replace_partitions": Replace.PARTITIONS,
    "append": Replace.NOTHING,
}


def check_mode(mode: str) -> None:
    """Raise InvalidInputError for an unknown mode."""
    if mode not in _REPLACING:
        raise InvalidInputError(f"mode {mode!r} is none of {', '.join(_REPLACING)}")


def replaced_by(
    plan: TableWrite,
    mode: Mode,
    partitions: Sequence[Mapping[str, PartitionValue]] | None,
    columns: Collection[str],
) -> tuple[frozenset[Record] | None, Replace | BooleanExpression]:
    """Return the only partitions that rows may have, None for any, and the replacement.

    Rows that are appended may be limited to some partitions, too, which keep their rows.

    Args:
        plan: The write.
        mode: What the rows replace.
        partitions: The values of the partitions that rows may have, None for any.
        columns: The columns of the rows.

    Raises:
        InvalidInputError: The mode does not fit the table or the partitions, or the rows lack columns that it needs.
    """
    replacing, name = _REPLACING[mode], f"{plan.namespace}.{plan.table}"
    if replacing is Replace.ALL and not columns:
        raise InvalidInputError(
            f"table {name}: the new rows have no columns; give them the table's columns, also if there are no rows"
        )
    if replacing is Replace.PARTITIONS and plan.metadata.spec().is_unpartitioned():
        raise InvalidInputError(f"table {name} has no partitions to replace; use replace_table or append")
    if replacing is Replace.PARTITIONS:
        known = identity_columns(plan.metadata.spec(), plan.metadata.schema())
        if missing := [column for column in known if column not in columns]:
            raise InvalidInputError(
                f"table {name}: the new rows lack the column {missing[0]!r}, by which the table is partitioned; add it"
            )
    if partitions is None:
        return None, replacing
    if replacing is Replace.ALL or not partitions:
        raise InvalidInputError("partitions names at least one partition, and goes with replace_partitions and append")
    keys = [PartitionKey.of(plan.metadata, values) for values in partitions]
    if replacing is Replace.NOTHING:
        return frozenset(key.record for key in keys), replacing
    rows = keys[0].rows if len(keys) == 1 else Or(*(key.rows for key in keys))
    return frozenset(key.record for key in keys), rows


def stage_replacing(
    lake: Lakehouse,
    plan: TableWrite,
    data_files: Sequence[DataFile],
    wanted: frozenset[Record] | None,
    replacing: Replace | BooleanExpression,
) -> StagedTable:
    """Stage data files that were written for a plan. ``wanted`` and ``replacing`` come from :func:`replaced_by`.

    Raises InvalidInputError for rows of other partitions, and what :func:`staging.stage_data_files` raises. The files
    are deleted then.
    """
    try:
        check_partitions(data_files, wanted, [field.name for field in plan.metadata.spec().fields])
        return stage_data_files(lake, plan, data_files, replacing=replacing, partitions=wanted, on_plan=True)
    except BaseException:
        delete_data_files(plan.io, data_files)
        raise
