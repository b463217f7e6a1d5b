"""The first rows of a table, and their number, without the rows that delete files delete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFileContent
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.tables.files.data_reading import file_batches
from trinitylake_ops.tables.files.deletes.index import planned_tasks
from trinitylake_ops.tables.files.deletes.rows import RemainingRows
from trinitylake_ops.tables.io.file_io import StorageFileIO


def first_rows(
    metadata: TableMetadata, io: StorageFileIO, limit: int, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return up to ``limit`` rows of a table, from its oldest data files.

    Args:
        metadata: The metadata of the table.
        io: Reads the files of the table.
        limit: The most rows, at least 1.
        columns: The names of top-level columns, in the order of the result. By default all.

    Raises:
        InvalidInputError: The table has no such column, or a column is named twice.
        InvalidDefinitionError: A delete file cannot be applied.
        CorruptFileError: A file cannot be decoded.
        StorageError: Another failure of the storage.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # importing it loads pandas

    schema = _selected(metadata.schema(), columns)
    names = [field.name for field in schema.fields] if columns is None else list(columns)
    batches: list[pa.RecordBatch] = []
    left = limit
    for task in planned_tasks(metadata, io, AlwaysTrue()):
        for batch in _batches(metadata, io, schema, task, left):
            batches.append(batch.slice(0, left))
            left -= batches[-1].num_rows
            if left == 0:
                return _table(batches, names)
    return _table(batches, names) if batches else schema_to_pyarrow(schema).empty_table().select(names)


def count_rows(metadata: TableMetadata, io: StorageFileIO) -> int:
    """Return the number of rows of a table.

    A data file without delete files has the rows that its manifest counts. Other data files are read, one column of
    each.

    Args:
        metadata: The metadata of the table.
        io: Reads the files of the table.

    Raises:
        InvalidDefinitionError: A delete file cannot be applied.
        CorruptFileError: A file cannot be decoded.
        StorageError: Another failure of the storage.
    """
    fields = metadata.schema().fields
    narrow = next((field for field in fields if field.field_type.is_primitive), None) or next(iter(fields), None)
    schema = Schema(*([] if narrow is None else [narrow]))
    return sum(
        sum(batch.num_rows for batch in _batches(metadata, io, schema, task))
        if task.delete_files
        else task.file.record_count
        for task in planned_tasks(metadata, io, AlwaysTrue())
    )


def _batches(
    metadata: TableMetadata, io: StorageFileIO, schema: Schema, task: FileScanTask, limit: int | None = None
) -> Iterator[pa.RecordBatch]:
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

    # Equality deletes are applied to the rows that pyiceberg returns, so that its limit would count deleted rows.
    has_equality = any(file.content == DataFileContent.EQUALITY_DELETES for file in task.delete_files)
    scan = ArrowScan(metadata, io, schema, AlwaysTrue(), limit=None if has_equality else limit)
    yield from file_batches(RemainingRows(scan), task, io)


def _selected(schema: Schema, columns: Sequence[str] | None) -> Schema:
    if columns is None:
        return schema
    fields = {field.name: field for field in schema.fields}
    if unknown := [name for name in columns if name not in fields]:
        shown = ", ".join(list(fields)[:20])
        raise InvalidInputError(f"the table has no column {unknown[0][:200]!r}; its columns are {shown[:1000]}")
    if len(set(columns)) < len(columns):
        raise InvalidInputError("a column is named twice; name each column once")
    return Schema(*(field for field in schema.fields if field.name in columns))


def _table(batches: Sequence[pa.RecordBatch], names: Sequence[str]) -> pa.Table:
    return pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches], promote_options="permissive").select(
        names
    )
