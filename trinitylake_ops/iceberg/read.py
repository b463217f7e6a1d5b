"""Read rows of tables without a query engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.iceberg.delete_files import RemainingRows, planned_tasks
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.versions.snapshot import Snapshot, is_sealed_root

if TYPE_CHECKING:
    from pyiceberg.io.pyarrow import ArrowScan


@dataclass(frozen=True, slots=True)
class ReadVersion:
    """The version at which a table is read."""

    version: int
    #: Path of its root file under the lakehouse's root.
    path: str

    @classmethod
    def of(cls, snapshot: Snapshot, io: StorageFileIO) -> ReadVersion | None:
        """Return the version of a snapshot, or None for a snapshot of another lakehouse, which is never purged here.

        Args:
            snapshot: The snapshot.
            io: File IO of this lakehouse.
        """
        return cls(snapshot.version, snapshot.location) if snapshot.files.storage.root == io.root else None


@contextmanager
def reading_at(version: ReadVersion | None, io: StorageFileIO) -> Iterator[None]:
    """Raise VersionExpiredError for a missing file if the version was purged while it was read.

    Args:
        version: The version that is read; None if it cannot be purged.
        io: File IO of the lakehouse.
    """
    try:
        yield
    except FileMissingError as error:
        if version is None or not is_sealed_root(io.storage, version.path):
            raise
        raise VersionExpiredError(
            "the version was expired and purged while it was read", path=error.path, version=version.version
        ) from error


@contextmanager
def decoding(task: FileScanTask, io: StorageFileIO) -> Iterator[None]:
    """Convert exceptions of decoders in the block to CorruptFileError, with the name of the task's file."""
    try:
        yield
    except (TrinityLakeError, MemoryError):
        raise
    except Exception as error:  # decoders raise arbitrary exceptions for corrupt input
        location = io.location(task.file.file_path)
        reason = next(iter(str(error).splitlines()), "")
        deletes = " or one of its delete files" if task.delete_files else ""
        raise CorruptFileError(
            f"cannot read data file {location!r}{deletes}: {type(error).__name__}: {reason}", path=location
        ) from error


def file_batches(rows: RemainingRows, task: FileScanTask, io: StorageFileIO) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a data file that match a scan and are not deleted.

    Args:
        rows: The scan and its delete files.
        task: The data file.
        io: The table's file IO, for locations in errors.

    Raises:
        InvalidDefinitionError: Deletes cannot be applied.
        CorruptFileError: The file or a delete file cannot be decoded, or its columns do not match the table. Also
            raised after the last batch if all rows were read and their number differs from that in the manifest.
        StorageError: A file cannot be read.
    """
    n_rows = 0
    batches = rows.batches(task)
    while True:
        with decoding(task, io):
            batch = next(batches, None)
        if batch is None:
            break
        n_rows += batch.num_rows
        yield batch
    reads_all = not task.delete_files and rows.scan._bound_row_filter is AlwaysTrue()
    if reads_all and n_rows != task.file.record_count:
        location = io.location(task.file.file_path)
        raise CorruptFileError(
            f"data file {location!r} has {n_rows} rows, but its manifest declares {task.file.record_count}",
            path=location,
        )


def check_manifests(metadata: TableMetadata, io: StorageFileIO) -> None:
    """Read all manifests of the current snapshot. Raises StorageError, and CorruptFileError for a corrupt manifest."""
    snapshot = metadata.current_snapshot()
    for manifest in [] if snapshot is None else manifests_in(snapshot, io):
        entries_in(manifest, io)


_FIELD_ID = b"PARQUET:field_id"
_BATCH_ROWS = 1_024
#: If too few rows remain after deletes, the number of rows to read is multiplied by this factor.
_GROWTH = 8


def first_rows(
    metadata: TableMetadata, io: StorageFileIO, limit: int, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return up to ``limit`` rows of a table, from its oldest data files.

    Args:
        metadata: The metadata of the table.
        io: Reads the files of the table.
        limit: Maximum number of rows, at least 1.
        columns: Names of top-level columns, in the order of the result. By default all columns.

    Raises:
        InvalidInputError: The table has no such column, or a column is named twice.
        InvalidDefinitionError: A delete file cannot be applied.
        CorruptFileError: A file cannot be decoded.
        StorageError: A file cannot be read.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # importing it loads pandas

    schema = _select(metadata.schema(), columns)
    names = [field.name for field in schema.fields] if columns is None else list(columns)
    batches: list[pa.RecordBatch] = []
    left = limit
    for task in planned_tasks(metadata, io, AlwaysTrue()):
        for batch in _first_batches(metadata, io, schema, task, left):
            batches.append(batch.slice(0, left))
            left -= batches[-1].num_rows
            if left == 0:
                return _table(batches, names)
    return _table(batches, names) if batches else schema_to_pyarrow(schema).empty_table().select(names)


def count_rows(metadata: TableMetadata, io: StorageFileIO) -> int:
    """Return the number of rows of a table.

    For data files without delete files, the number is read from the manifest. For other data files, one column is read.

    Args:
        metadata: The metadata of the table.
        io: Reads the files of the table.

    Raises:
        InvalidDefinitionError: A delete file cannot be applied.
        CorruptFileError: A file cannot be decoded.
        StorageError: A file cannot be read.
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


def _first_batches(
    metadata: TableMetadata, io: StorageFileIO, schema: Schema, task: FileScanTask, limit: int
) -> Iterator[pa.RecordBatch]:
    """Yield at least ``limit`` rows of a data file, or all its rows.

    An Arrow scan cannot be stopped early: its threads continue to read through the FileIO, and abort the process if the
    interpreter exits. So the first rows are copied to memory and only the copy is scanned. Rows keep their positions.
    """
    if task.file.file_format != FileFormat.PARQUET:
        yield from _batches(metadata, io, schema, task)
        return
    n_rows = limit
    while True:
        with decoding(task, io):
            first = _FirstRows.of(task, io, schema, n_rows)
            batches = list(RemainingRows(_scan(metadata, first, schema)).batches(task))
        if first.is_whole and first.n_rows != task.file.record_count:
            location = io.location(task.file.file_path)
            raise CorruptFileError(
                f"data file {location!r} has {first.n_rows} rows, but its manifest declares {task.file.record_count}",
                path=location,
            )
        if first.is_whole or sum(batch.num_rows for batch in batches) >= limit:
            yield from batches
            return
        n_rows *= _GROWTH


@dataclass(frozen=True, slots=True)
class _FirstRows(FileIO):
    """A FileIO that returns only the first rows of one data file."""

    io: StorageFileIO
    location: str
    data: pa.Buffer
    n_rows: int
    is_whole: bool

    @classmethod
    def of(cls, task: FileScanTask, io: StorageFileIO, schema: Schema, n_rows: int) -> Self:
        """Copy the first rows of a Parquet file, with the columns that a scan and its deletes need."""
        location = task.file.file_path
        numbers = {number for file in task.delete_files for number in file.equality_ids or ()}
        numbers |= {field.field_id for field in schema.fields}
        sink = pa.BufferOutputStream()
        left = n_rows
        with io.new_input(location).open() as stream, pq.ParquetFile(stream, pre_buffer=False) as file:
            columns = _columns_of(file.schema_arrow, numbers)
            kept = pa.schema([file.schema_arrow.field(name) for name in columns])
            with pq.ParquetWriter(sink, kept) as writer:
                for batch in file.iter_batches(min(n_rows, _BATCH_ROWS), columns=columns, use_threads=False):
                    writer.write_batch(batch.slice(0, left))
                    left -= min(left, batch.num_rows)
                    if left == 0:
                        break
            is_whole = file.metadata.num_rows <= n_rows
        return cls(io, location, sink.getvalue(), n_rows - left, is_whole)

    def new_input(self, location: str) -> InputFile:
        return _InMemory(location, self.data) if location == self.location else self.io.new_input(location)

    def new_output(self, location: str) -> OutputFile:
        raise NotImplementedError

    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise NotImplementedError


class _InMemory(InputFile):
    """A file in memory, opened as an Arrow stream that Arrow's threads can read without the interpreter lock."""

    def __init__(self, location: str, data: pa.Buffer):
        super().__init__(location)
        self._data = data

    def __len__(self) -> int:
        return int(self._data.size)

    def exists(self) -> bool:
        return True

    def open(self, seekable: bool = True) -> InputStream:
        return cast(InputStream, pa.BufferReader(self._data))


def _columns_of(schema: pa.Schema, numbers: Collection[int]) -> list[str]:
    """Return the names of top-level columns of a file by their ids, or all columns if some have no id."""
    ids = {field.name: int((field.metadata or {}).get(_FIELD_ID, b"-1")) for field in schema}
    if len(ids) < len(schema) or -1 in ids.values():
        return list(schema.names)
    return [name for name, number in ids.items() if number in numbers] or list(schema.names[:1])


def _scan(metadata: TableMetadata, io: FileIO, schema: Schema) -> ArrowScan:
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

    return ArrowScan(metadata, io, schema, AlwaysTrue())


def _batches(
    metadata: TableMetadata, io: StorageFileIO, schema: Schema, task: FileScanTask
) -> Iterator[pa.RecordBatch]:
    yield from file_batches(RemainingRows(_scan(metadata, io, schema)), task, io)


def _select(schema: Schema, columns: Sequence[str] | None) -> Schema:
    if columns is None:
        return schema
    fields = {field.name: field for field in schema.fields}
    if unknown := [name for name in columns if name not in fields]:
        available = ", ".join(list(fields)[:20])
        raise InvalidInputError(f"the table has no column {unknown[0][:200]!r}; use one of {available[:1000]}")
    if len(set(columns)) < len(columns):
        raise InvalidInputError("a column is named twice; name each column once")
    return Schema(*(field for field in schema.fields if field.name in columns))


def _table(batches: Sequence[pa.RecordBatch], names: Sequence[str]) -> pa.Table:
    return pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches], promote_options="permissive").select(
        names
    )
