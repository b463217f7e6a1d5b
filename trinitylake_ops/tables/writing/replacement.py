"""Finds the data files of a table that new ones replace, and puts those in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, IsNull, Or, Reference
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.table import FileScanTask, Table, Transaction
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.typedef import Record

from trinitylake_ops.errors import InvalidDefinitionError, InvalidInputError
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.managed import table_id_of
from trinitylake_ops.tables.writing.data_files import identity_columns

#: Whether pyiceberg looks for files to remove by a filter, and raises where it found less. That of 0.11 looks into all
#: manifests, removes what it finds and says nothing: whoever asks it has to know that the files are there.
FILTERS_MANIFESTS = hasattr(_OverwriteFiles, "_build_manifest_evaluator")

# Beyond this many partitions all manifests are read instead of filtered: deep expressions overflow the stack.
_MAX_FILTERED_PARTITIONS = 100


def all_files(table: Table) -> list[DataFile]:
    """Return every data file of the current snapshot. Raises InvalidDefinitionError for delete files."""
    return [file_without_deletes(task) for task in _planned(table, AlwaysTrue())]


def files_at(table: Table, paths: Collection[str]) -> list[DataFile]:
    """Return the data files of the current snapshot that have one of the paths.

    Raises InvalidDefinitionError for delete files.
    """
    return [file_without_deletes(task) for task in _planned(table, AlwaysTrue()) if task.file.file_path in paths]


def files_in_partitions(table: Table, partitions: Collection[Record]) -> list[DataFile]:
    """Return the data files of some partitions of the table's current spec.

    Raises InvalidInputError for an unpartitioned table. Raises InvalidDefinitionError when the partition spec changed
    and files of an older one overlap.
    """
    spec = table.spec()
    if spec.is_unpartitioned():
        raise InvalidInputError(f"{'.'.join(table.name())} is unpartitioned; replace all, or nothing")
    if not partitions:
        return []
    columns = identity_columns(spec, table.schema())
    replaced = []
    for task in _planned(table, _partitions_filter(columns, partitions)):
        if task.file.spec_id != spec.spec_id:
            raise InvalidDefinitionError(
                f"{'.'.join(table.name())} holds files of an older partition spec; rewrite them first"
            )
        if task.file.partition in partitions:
            replaced.append(file_without_deletes(task))
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
        replaced.append(file_without_deletes(task))
    return replaced


def add_snapshot(
    change: Transaction, added: Sequence[DataFile], removed: Sequence[DataFile], properties: dict[str, str]
) -> None:
    """Add and remove data files in a change of a table, as one snapshot.

    Raises LocationNotAllowedError for a file that the table cannot have.
    """
    io = change._table.io
    assert isinstance(io, StorageFileIO)
    own_io = io.for_managed(table_id_of(change.table_metadata.location) or "")
    for data_file in added:
        own_io.check_may_have(data_file.file_path)
    if not added and not removed:
        return
    snapshot = change.update_snapshot(snapshot_properties=properties)
    if not removed:
        with snapshot.fast_append() as append:
            for data_file in added:
                append.append_data_file(data_file)
        return
    with _filtering_by_itself(snapshot.overwrite()) as overwrite:
        specs = change.table_metadata.specs()
        if FILTERS_MANIFESTS and any(specs[data_file.spec_id].is_unpartitioned() for data_file in removed):
            # Without this, pyiceberg searches no manifest of such a table for the files to delete.
            overwrite.delete_by_predicate(AlwaysTrue())
        for data_file in removed:
            overwrite.delete_data_file(data_file)
        for data_file in added:
            overwrite.append_data_file(data_file)


def _filtering_by_itself(overwrite: _OverwriteFiles) -> _OverwriteFiles:
    """Let each search in a manifest have a filter of its own.

    The search for files to delete runs in several threads of pyiceberg with one filter object. That holds the manifest
    of one search. So sometimes pyiceberg passes over the manifest that it needs, and refuses to commit.
    """
    if not FILTERS_MANIFESTS:
        return overwrite
    build = overwrite._build_manifest_evaluator

    def build_for_each(spec_id: int) -> Callable[[ManifestFile], bool]:
        def evaluate(manifest: ManifestFile) -> bool:
            return build(spec_id)(manifest)

        return evaluate

    overwrite._build_manifest_evaluator = build_for_each  # type: ignore[method-assign]
    return overwrite


def _planned(table: Table, row_filter: str | BooleanExpression) -> list[FileScanTask]:
    try:
        return list(table.scan(row_filter=row_filter).plan_files())
    except ValueError as error:
        if "equality delete" not in str(error):
            raise
        raise InvalidDefinitionError(f"{'.'.join(table.name())} has equality deletes; {_COMPACT_FIRST}") from error


_COMPACT_FIRST = "let 'trinitylake compact-tables' apply its delete files first"


def file_without_deletes(task: FileScanTask) -> DataFile:
    """Return the data file of a task. Raises InvalidDefinitionError if it has delete files."""
    if task.delete_files:
        raise InvalidDefinitionError(f"{task.file.file_path!r} has delete files; {_COMPACT_FIRST}")
    return task.file


def _partitions_filter(columns: list[str], partitions: Collection[Record]) -> BooleanExpression:
    if len(partitions) > _MAX_FILTERED_PARTITIONS:
        return AlwaysTrue()
    per_partition = [
        _all_of([_equals(name, partition[at]) for at, name in enumerate(columns)]) for partition in partitions
    ]
    return per_partition[0] if len(per_partition) == 1 else Or(*per_partition)


def _all_of(terms: list[BooleanExpression]) -> BooleanExpression:
    return terms[0] if len(terms) == 1 else And(*terms)


def _equals(column: str, value: Any) -> BooleanExpression:
    return IsNull(term=Reference(column)) if value is None else EqualTo(term=Reference(column), value=value)
