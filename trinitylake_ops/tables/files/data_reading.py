"""The rows of data files as pyiceberg reads them. An error names the file that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import CorruptFileError, FileMissingError, TrinityLakeError, VersionExpiredError
from trinitylake_ops.tables.files.deletes.rows import RemainingRows
from trinitylake_ops.tables.files.reach import entries_in, manifests_in
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.versions.snapshot import Snapshot, is_sealed_root


@dataclass(frozen=True, slots=True)
class ReadVersion:
    """The version at which a table is read, by its root's path under the root of the lakehouse."""

    version: int
    path: str

    @classmethod
    def of(cls, snapshot: Snapshot, io: StorageFileIO) -> ReadVersion | None:
        """Return the version of a snapshot, None for one in another lakehouse, which is never purged from here."""
        return cls(snapshot.version, snapshot.location) if snapshot.files.storage.root == io.root else None


@contextmanager
def reading_at(version: ReadVersion | None, io: StorageFileIO) -> Iterator[None]:
    """Raise VersionExpiredError for a missing file if the version was purged by now."""
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
    """Raise CorruptFileError, which names the file of a task, for any exception of a decoder in the block."""
    try:
        yield
    except (TrinityLakeError, MemoryError):
        raise
    except Exception as error:  # for broken bytes the decoders raise any exception
        location = io.location(task.file.file_path)
        reason = next(iter(str(error).splitlines()), "")
        deletes = ", or a delete file of it," if task.delete_files else ""
        raise CorruptFileError(
            f"data file {location!r}{deletes} cannot be read: {type(error).__name__}: {reason}", path=location
        ) from error


def file_batches(rows: RemainingRows, task: FileScanTask, io: StorageFileIO) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file that a scan selects and no delete file of its task deletes.

    Raises InvalidDefinitionError for deletes that cannot be applied. Raises CorruptFileError if the file, or a delete
    file of it, cannot be decoded or has other columns than the table. Raises it after the last batch if all rows are
    read and their number is not the manifest's. Raises StorageError.
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
            f"data file {location!r} holds {n_rows} rows, its manifest says {task.file.record_count}", path=location
        )


def check_manifests(metadata: TableMetadata, io: StorageFileIO) -> None:
    """Raise CorruptFileError for the first manifest of the current snapshot that cannot be read; StorageError."""
    snapshot = metadata.current_snapshot()
    for manifest in [] if snapshot is None else manifests_in(snapshot, io):
        entries_in(manifest, io)
