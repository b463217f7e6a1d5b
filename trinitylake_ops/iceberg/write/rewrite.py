"""Rewrite data files of a table as fewer files without deleted rows: write groups, and stage a snapshot.

The rows do not change, so the snapshot has Iceberg's operation ``replace``, which readers of appended rows skip. A
group consists of files of one partition that together fill about one file. Writing it needs only its ``FileGroup`` and
the table's ``Rewriting``, in this process or another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.exceptions import ValidationException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFile, ManifestContent, ManifestFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import EMPTY_DICT

from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    InvalidInputError,
    TrinityLakeError,
)
from trinitylake_ops.iceberg.delete_files import DeleteFiles, live_entries
from trinitylake_ops.iceberg.io.checked_files import CheckedFileIO
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import manifests_in
from trinitylake_ops.iceberg.read import file_batches
from trinitylake_ops.iceberg.rows_digest import DigestedRows
from trinitylake_ops.iceberg.write.casting import conform
from trinitylake_ops.iceberg.write.compact import FileGroup, RewriteRules, without_deletes
from trinitylake_ops.iceberg.write.data_files import delete_data_files, write_data_files
from trinitylake_ops.iceberg.write.replacement import FILTERS_MANIFESTS
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import StagingCatalog
from trinitylake_ops.transaction.lakehouse import Lakehouse

if TYPE_CHECKING:
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

#: Factor by which a written file may exceed the target size, so that no tiny file is left over.
_MAX_SHARE = 1.4


@dataclass(frozen=True, slots=True)
class Rewriting:
    """The input for writing the groups of a table. It is pickled for the processes that write groups."""

    #: Reads and writes the files.
    io: StorageFileIO
    #: Metadata of the table.
    metadata: TableMetadata
    #: Size in bytes at which a new file is finished.
    max_file_bytes: int
    #: Name of the table in errors.
    table: str = ""

    def rewrite(self, group: FileGroup) -> list[DataFile]:
        """Write the rows of a group as new data files, in the table's sort order, without publishing them.

        Deleted rows are dropped. Rows of an unsorted table are streamed. Rows of a sorted table are kept in memory, one
        group at a time. After an error no new files remain.

        Raises CorruptFileError if a file does not match its checksums, if the number of rows differs from the
        manifests, or if the rows cannot be sorted or written. Raises ContentChangedError if the new files do not
        contain the same rows, and StorageError.
        """
        with _as_corrupt_file(group):
            return self._rewrite(group)

    def _rewrite(self, group: FileGroup) -> list[DataFile]:
        order = _arrow_sort_order(self.metadata)
        # Verify source files, so that a damaged file is not rewritten with new checksums.
        listed = [*group.files, *(delete for deletes in group.deletes.values() for delete in deletes)]
        sizes_bytes = {file.file_path: file.file_size_in_bytes for file in listed}
        remaining = DigestedRows(self._scan(CheckedFileIO.like(self.io, sizes_bytes)))
        read = _CountedBatches(self._batches(group, remaining))
        written = write_data_files(
            self.io,
            self.metadata,
            read if order is None else _in_order(read, order, self.metadata.schema()),
            target_file_size_bytes=self.max_file_bytes,
            partition=group.partition,
            sort_order_id=None if order is None else self.metadata.default_sort_order_id,
        )
        rows = sum(file.record_count for file in written)
        if not group.min_rows <= read.rows == rows <= group.rows:
            delete_data_files(self.io, written)
            minimum = "" if group.min_rows == group.rows else f" (at least {group.min_rows} of them not deleted)"
            raise CorruptFileError(
                f"{len(group.files)} data files have {read.rows} rows, but the table's manifests declare {group.rows}"
                f"{minimum}, and {rows} were written; find the damaged file with 'trinitylake verify'",
                path=group.files[0].file_path,
            )
        try:
            self._check_content(remaining, written)
        except BaseException:
            delete_data_files(self.io, written)
            raise
        return written

    def _check_content(self, before: DigestedRows, written: Sequence[DataFile]) -> None:
        """Raise ContentChangedError unless the stored new files contain the rows that were read."""
        after = DigestedRows(self._scan(self.io))
        for file in written:
            after.add(file)
        before.digest.check_same(after.digest, self.table or self.metadata.location, self.metadata.location)

    def _scan(self, io: StorageFileIO) -> ArrowScan:
        from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

        return ArrowScan(self.metadata, io, self.metadata.schema(), AlwaysTrue())

    def _batches(self, group: FileGroup, rows: DigestedRows) -> Iterator[pa.RecordBatch]:
        for file in group.files:  # one file at a time, because PyIceberg keeps all batches of a scan in memory
            yield from file_batches(rows, FileScanTask(file, set(group.deletes_of(file))), self.io)


@contextlib.contextmanager
def _as_corrupt_file(group: FileGroup) -> Iterator[None]:
    """Convert errors for rows that cannot be sorted or written, whichever program wrote them, to CorruptFileError.

    Compaction skips a table with such rows and continues with the other tables.
    """
    try:
        yield
    except InvalidInputError as error:
        raise _rewrite_error(group, str(error)) from error
    except (TrinityLakeError, MemoryError):
        raise
    except Exception as error:  # Arrow raises arbitrary exceptions, such as OSError for an invalid compression level
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise _rewrite_error(group, f"{type(error).__name__}: {reason}") from error


def _rewrite_error(group: FileGroup, reason: str) -> CorruptFileError:
    path = group.files[0].file_path
    return CorruptFileError(
        f"cannot rewrite the rows of {len(group.files)} data files, such as {path!r}: {reason}; check the table with"
        " 'trinitylake verify --deep'",
        path=path,
    )


GroupWriter: TypeAlias = Callable[[Sequence[tuple[Rewriting, FileGroup]]], Sequence[list[DataFile]]]


def rewrite_in_process(groups: Sequence[tuple[Rewriting, FileGroup]]) -> list[list[DataFile]]:
    """Write groups sequentially in this process. After an error of :meth:`Rewriting.rewrite`, no files remain."""
    written: list[list[DataFile]] = []
    try:
        for rewriting, group in groups:
            written.append(rewriting.rewrite(group))
    except BaseException:
        for (rewriting, _), files in zip(groups, written, strict=False):
            delete_data_files(rewriting.io, files)
        raise
    return written


def rewriting_of(metadata: TableMetadata, io: StorageFileIO, rules: RewriteRules, table: str = "") -> Rewriting:
    """Return the input for writing the groups of a table.

    Args:
        metadata: Metadata of the table.
        io: Reads and writes the files of the table.
        rules: Determine the size of new files.
        table: Name of the table in errors; by default the table location.
    """
    return Rewriting(io, metadata, int(_MAX_SHARE * rules.target_bytes(metadata)), table)


def stage_rewritten(
    lake: Lakehouse,
    name: tuple[str, str],
    metadata: TableMetadata,
    groups: Sequence[FileGroup],
    added: Sequence[DataFile],
    *,
    begun_at_ms: int,
) -> StagedTable:
    """Stage the replacement of files of groups by new files with the same rows, as one Iceberg snapshot.

    Delete files that apply to no remaining data file are dropped. Files that other writers have added since are kept.

    Args:
        lake: The lakehouse.
        name: Namespace and name of the table.
        metadata: Metadata of the table for which the new files were written.
        groups: The rewritten groups.
        added: The new files.
        begun_at_ms: Time before the first new file was written, in milliseconds since the epoch.

    Raises:
        CommitConflictError: The table was dropped, recreated or repartitioned, or lost some of the old files or their
            rows.
        CorruptFileError: The numbers of rows do not match.
        StorageError: A file cannot be read or written.
    """
    catalog = StagingCatalog(lake)
    reader = catalog.target.reader()
    if not (reader.has_namespace(name[0]) and reader.has_table(*name) and reader.table(*name).is_iceberg):
        raise _conflict(name, catalog.base_version, "it was dropped")
    table = catalog.load_table(name)
    if table.metadata.table_uuid != metadata.table_uuid:
        raise _conflict(name, catalog.base_version, "another table has its name")
    if table.metadata.default_spec_id != metadata.default_spec_id:
        raise _conflict(name, catalog.base_version, "its partitioning was changed")
    removed = [file for group in groups for file in group.files]
    unused_deletes = _unused_deletes(table, groups, catalog, name)
    change = table.transaction()
    try:
        with _RewriteFiles(change, unused_deletes) as rewrite:
            for data_file in removed:
                rewrite.delete_data_file(data_file)
            for data_file in added:
                rewrite.append_data_file(data_file)
    except ValidationException as error:
        raise _conflict(name, catalog.base_version, _LOST_FILES) from error
    change.commit_transaction()
    staged = replace(catalog.staged(name), begun_at_ms=begun_at_ms)
    min_rows, max_rows = sum(group.min_rows for group in groups), sum(group.rows for group in groups)
    if staged.removed_rows != max_rows or not min_rows <= staged.added_rows <= max_rows:
        raise CorruptFileError(
            f"table {'.'.join(name)} would gain {staged.added_rows - staged.removed_rows} rows in addition to up to"
            f" {max_rows - min_rows} deleted ones; check it with 'trinitylake verify --deep'",
            path=staged.metadata_location,
        )
    return staged


_LOST_FILES = "some of its files were removed"


def _unused_deletes(
    table: Table, groups: Sequence[FileGroup], catalog: StagingCatalog, name: tuple[str, str]
) -> set[DataFile]:
    """Return the delete files that apply only to data files of groups.

    Raises CommitConflictError if the table no longer contains one of the files in the groups, or if other delete files
    now apply to them.
    """
    current, io = table.current_snapshot(), table.io
    assert isinstance(io, StorageFileIO)
    manifests = [] if current is None else manifests_in(current, io)
    has_deletes = any(manifest.content == ManifestContent.DELETES for manifest in manifests)
    if FILTERS_MANIFESTS and not has_deletes and not any(group.deletes for group in groups):
        return set()  # PyIceberg itself searches the data manifests for the files
    deletes = DeleteFiles(live_entries(manifests, io, ManifestContent.DELETES), table.metadata)
    entries = {entry.data_file.file_path: entry for entry in live_entries(manifests, io, ManifestContent.DATA)}
    for group in groups:
        for file in group.files:
            entry = entries.pop(file.file_path, None)
            if entry is None:
                raise _conflict(name, catalog.base_version, _LOST_FILES)
            if deletes.of(entry) != group.deletes_of(file):
                raise _conflict(name, catalog.base_version, "some of its rows were deleted")
    used = {delete for entry in entries.values() for delete in deletes.of(entry)} if deletes.entries else set()
    return {entry.data_file for entry in deletes.entries} - used


class _RewriteFiles(_OverwriteFiles):
    """An Iceberg snapshot with the same rows in other files, and without dropped delete files."""

    def __init__(self, change: Transaction, dropped: set[DataFile]):
        super().__init__(operation=Operation.OVERWRITE, transaction=change, io=change._table.io)
        self._dropped = dropped

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        assert isinstance(self._io, StorageFileIO)
        return without_deletes(super()._process_manifests(manifests), self._dropped, self, self._io)

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        data_files = self._deleted_data_files
        self._deleted_data_files = data_files | self._dropped  # so that dropped delete files are counted
        try:
            summary = super()._summary(snapshot_properties)
        finally:
            self._deleted_data_files = data_files
        # PyIceberg computes totals only for its own operations.
        return Summary(operation=Operation.REPLACE, **summary.additional_properties)

    def _build_delete_files_partition_predicate(self) -> None:
        """Do nothing: expressions over thousands of partitions are too deep, so all manifests are read."""

    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[ManifestFile], bool]:
        return lambda _manifest: True


def _conflict(name: tuple[str, str], base_version: int, change: str) -> CommitConflictError:
    return CommitConflictError(
        f"files of table {'.'.join(name)} were rewritten, but then {change}; create a new plan",
        conflicts=(f"table {'.'.join(name)}: {change}",),
        base_version=base_version,
    )


class _CountedBatches:
    """Yields batches and counts their rows."""

    def __init__(self, batches: Iterable[pa.RecordBatch]):
        self._batches = batches
        self.rows = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.rows += batch.num_rows
            yield batch


def _arrow_sort_order(metadata: TableMetadata) -> list[tuple[str, SortField]] | None:
    """Return the columns of a table's sort order. None if there is no order, or if it is not by plain columns."""
    order = metadata.sort_order_by_id(metadata.default_sort_order_id)
    if order is None or not order.fields:
        return None
    columns: list[tuple[str, SortField]] = []
    schema = metadata.schema()
    for sort_field in order.fields:
        source = None
        with contextlib.suppress(ValueError):  # the column may have been dropped
            source = schema.find_field(sort_field.source_id)
        if source is None or not source.field_type.is_primitive:
            return None
        is_within_another = schema.find_column_name(source.field_id) != source.name
        if is_within_another or not isinstance(sort_field.transform, IdentityTransform):
            return None
        columns.append((source.name, sort_field))
    return columns


def _in_order(
    batches: Iterable[pa.RecordBatch], order: Sequence[tuple[str, SortField]], schema: Schema
) -> Iterator[pa.RecordBatch]:
    """Yield all rows in sort order. The order determines where nulls are; NaN is the greatest number, as in Iceberg."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # importing it loads pandas

    arrow_schema = schema_to_pyarrow(schema)
    tables = [conform(batch, schema, arrow_schema) for batch in batches]
    rows = pa.concat_tables(tables) if tables else arrow_schema.empty_table()
    keys: list[tuple[pa.ChunkedArray, str]] = []
    for name, sort_field in order:
        column = rows[name]
        if isinstance(column.type, pa.BaseExtensionType):  # for example a UUID, whose bytes Arrow can sort
            column = column.cast(column.type.storage_type)
        direction = "ascending" if sort_field.direction == SortDirection.ASC else "descending"
        nulls_first = sort_field.null_order == NullOrder.NULLS_FIRST
        keys.append((pc.is_null(column), "descending" if nulls_first else "ascending"))
        if pa.types.is_floating(column.type):
            keys.append((pc.is_nan(column), direction))
        keys.append((column, direction))
    sortable = pa.table({str(index): key for index, (key, _) in enumerate(keys)})
    indices = pc.sort_indices(
        sortable, sort_keys=[(str(index), direction_of_key) for index, (_, direction_of_key) in enumerate(keys)]
    )
    yield from rows.take(indices).to_batches()
