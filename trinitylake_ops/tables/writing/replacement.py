"""Finds the data files of a table that new ones replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, IsNull, Or, Reference
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table
from pyiceberg.typedef import Record

from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError
from trinitylake_ops.tables.writing.data_files import identity_columns

# Beyond this many partitions all manifests are read instead of filtered: deep expressions overflow the stack.
_MAX_FILTERED_PARTITIONS = 100


def all_files(table: Table) -> list[DataFile]:
    """Return every data file of the current snapshot. Raises InvalidDefinitionError for delete files."""
    return [_without_deletes(task) for task in _planned(table, AlwaysTrue())]


def files_in_partitions_of(table: Table, data_files: Sequence[DataFile]) -> list[DataFile]:
    """Return the data files of all partitions that ``data_files`` are in.

    Raises InvalidInputError for an unpartitioned table. Raises InvalidDefinitionError when the partition spec changed
    and files of an older one overlap.
    """
    spec = table.spec()
    if spec.is_unpartitioned():
        raise InvalidInputError(f"{'.'.join(table.name())} is unpartitioned; replace all, or nothing")
    partitions = {data_file.partition for data_file in data_files}
    columns = identity_columns(spec, table.schema())
    replaced = []
    for task in _planned(table, _partitions_filter(columns, partitions)):
        if task.file.spec_id != spec.spec_id:
            raise InvalidDefinitionError(
                f"{'.'.join(table.name())} holds files of an older partition spec; rewrite them first"
            )
        if task.file.partition in partitions:
            replaced.append(_without_deletes(task))
    return replaced


def files_matching(table: Table, row_filter: str | BooleanExpression) -> list[DataFile]:
    """Return the data files whose rows all match a filter.

    Raises InvalidInputError when a file holds rows on both sides.
    """
    replaced = []
    for task in _planned(table, row_filter):
        if task.residual != AlwaysTrue():
            raise InvalidInputError(
                f"the filter {row_filter!r} may cut through {task.file.file_path!r}; filter by whole partitions"
            )
        replaced.append(_without_deletes(task))
    return replaced


def _planned(table: Table, row_filter: str | BooleanExpression) -> list[FileScanTask]:
    return list(table.scan(row_filter=row_filter).plan_files())


def _without_deletes(task: FileScanTask) -> DataFile:
    if task.delete_files:
        raise InvalidDefinitionError(
            f"{task.file.file_path!r} has delete files, which this version cannot replace; rewrite the table first"
        )
    return task.file


def _partitions_filter(columns: list[str], partitions: set[Record]) -> BooleanExpression:
    if not partitions or len(partitions) > _MAX_FILTERED_PARTITIONS:
        return AlwaysTrue()
    per_partition = [
        _all_of([_equals(name, partition[at]) for at, name in enumerate(columns)]) for partition in partitions
    ]
    return per_partition[0] if len(per_partition) == 1 else Or(*per_partition)


def _all_of(terms: list[BooleanExpression]) -> BooleanExpression:
    return terms[0] if len(terms) == 1 else And(*terms)


def _equals(column: str, value: Any) -> BooleanExpression:
    return IsNull(term=Reference(column)) if value is None else EqualTo(term=Reference(column), value=value)
