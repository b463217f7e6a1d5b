"""Writes small data files of a table anew as fewer: the choice of files, the writing of a group, and the snapshot.

The rows do not change, so the snapshot is a ``replace`` to Iceberg. Readers that follow appended rows pass it by. A
group has files of one partition that together fill about one file. Writing it needs nothing but its ``FileGroup`` and
the table's ``Rewriting``, in this process or another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.exceptions import ValidationException
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntry, ManifestEntryStatus, ManifestFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import EMPTY_DICT, Record

from trinitylake_ops.errors import CommitConflictError, CorruptFileError, InvalidDefinitionError
from trinitylake_ops.tables.files.data_reading import file_batches
from trinitylake_ops.tables.files.reach import entries_in, manifests_in
from trinitylake_ops.tables.io.checked_files import CheckedFileIO
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.managed import check_format_version
from trinitylake_ops.tables.writing.data_files import (
    TARGET_FILE_SIZE_BYTES,
    conform,
    delete_data_files,
    identity_columns,
    write_data_files,
)
from trinitylake_ops.tables.writing.replacement import FILTERS_MANIFESTS
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import StagingCatalog
from trinitylake_ops.transaction.lakehouse import Lakehouse

TARGET_PROPERTY = "write.target-file-size-bytes"
_MOST_DIGITS = 18
#: A file below this share of the target is small.
SMALL_SHARE = 0.75
#: A group may grow to this share of the target when it is written, so that no tiny file is left over.
_LARGEST_SHARE = 1.4


@dataclass(frozen=True, slots=True)
class RewriteRules:
    """The options that say which files are worth writing anew.

    ``target_file_size_bytes`` None means the table's own property, else the default. A group needs ``min_input_files``,
    or else two that fill a file of the target. With ``repartition`` all files of older partition specs are written by
    the current one, whatever their size.
    """

    target_file_size_bytes: int | None = None
    min_input_files: int = 5
    repartition: bool = False

    def target_bytes(self, metadata: TableMetadata) -> int:
        """Return the size of file that a table's files should have."""
        if self.target_file_size_bytes is not None:
            return self.target_file_size_bytes
        own = metadata.properties.get(TARGET_PROPERTY, "")
        # A longer text is no size of a file, and Python refuses numbers of thousands of digits.
        is_size = own.isascii() and own.isdecimal() and len(own) <= _MOST_DIGITS
        return (int(own) if is_size else 0) or TARGET_FILE_SIZE_BYTES


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Data files that become about one. ``partition`` is theirs, None for files of an older partition spec."""

    files: tuple[DataFile, ...]
    partition: Record | None

    @property
    def bytes(self) -> int:
        """Their size."""
        return sum(file.file_size_in_bytes for file in self.files)

    @property
    def rows(self) -> int:
        """Their rows, as manifests count them."""
        return sum(file.record_count for file in self.files)


@dataclass(frozen=True, slots=True)
class Rewriting:
    """The input for writing the groups of a table. It pickles, and goes to every process that writes them."""

    io: StorageFileIO
    metadata: TableMetadata
    max_file_bytes: int

    def rewrite(self, group: FileGroup) -> list[DataFile]:
        """Write the rows of a group as new data files, in the table's sort order, and return them, unpublished.

        Rows of an unsorted table are streamed. For a sorted table they are held in memory, one group at a time. Raises
        CorruptFileError if a file does not match its checksums, or if the number of rows is not that of the manifests.
        Raises StorageError. Nothing is left then.
        """
        order = _arrow_sort_order(self.metadata)
        read = _Counted(self._batches(group))
        written = write_data_files(
            self.io,
            self.metadata,
            read if order is None else _in_order(read, order, self.metadata.schema()),
            target_file_size_bytes=self.max_file_bytes,
            partition=group.partition,
            sort_order_id=None if order is None else self.metadata.default_sort_order_id,
        )
        rows = sum(file.record_count for file in written)
        if not read.rows == rows == group.rows:
            delete_data_files(self.io, written)
            raise CorruptFileError(
                f"{len(group.files)} data files hold {read.rows} rows where the table's manifests say {group.rows}, and"
                f" {rows} were written; verify says which file is wrong",
                path=group.files[0].file_path,
            )
        return written

    def _batches(self, group: FileGroup) -> Iterator[pa.RecordBatch]:
        from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

        # A damaged file is not written anew, with fresh checksums.
        scan = ArrowScan(self.metadata, CheckedFileIO.like(self.io), self.metadata.schema(), AlwaysTrue())
        for file in group.files:  # one at a time: pyiceberg holds all batches of the files it is given
            yield from file_batches(scan, FileScanTask(file), self.io)


GroupWriter: TypeAlias = Callable[[Sequence[tuple[Rewriting, FileGroup]]], Sequence[list[DataFile]]]


def rewrite_here(groups: Sequence[tuple[Rewriting, FileGroup]]) -> list[list[DataFile]]:
    """Write groups one after the other in this process. Raises as :meth:`Rewriting.rewrite`. Nothing is left then."""
    written: list[list[DataFile]] = []
    try:
        for rewriting, group in groups:
            written.append(rewriting.rewrite(group))
    except BaseException:
        for (rewriting, _), files in zip(groups, written, strict=False):
            delete_data_files(rewriting.io, files)
        raise
    return written


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The data files of a table: groups worth writing anew, and how many files stay in older partition specs."""

    groups: tuple[FileGroup, ...]
    data_files: int
    older_spec_files: int


def find_groups(metadata: TableMetadata, io: StorageFileIO, rules: RewriteRules) -> FoundFiles:
    """Look through a table's manifests for files that are is worth writing anew.

    Raises InvalidDefinitionError for a table with delete files or of a format version that cannot be written. Raises it
    also if rows would have to be split by a partition transform other than identity. Raises StorageError.
    """
    check_format_version(metadata)
    snapshot = metadata.current_snapshot()
    entries = [] if snapshot is None else _data_entries(manifests_in(snapshot, io), io)
    current = [entry for entry in entries if entry.data_file.spec_id == metadata.default_spec_id]
    older = [entry.data_file for entry in entries if entry.data_file.spec_id != metadata.default_spec_id]
    target_bytes = rules.target_bytes(metadata)
    groups: list[FileGroup] = []
    if rules.repartition and older:
        identity_columns(metadata.spec(), metadata.schema())
        groups += [FileGroup(files, None) for files in _packed(older, target_bytes)]
    by_partition: dict[Record, list[DataFile]] = {}
    for entry in current:
        if entry.data_file.file_size_in_bytes < SMALL_SHARE * target_bytes:
            by_partition.setdefault(entry.data_file.partition, []).append(entry.data_file)
    for partition, files in by_partition.items():
        for packed in _packed(files, target_bytes):
            is_full = sum(file.file_size_in_bytes for file in packed) >= SMALL_SHARE * target_bytes
            if len(packed) >= rules.min_input_files or (is_full and len(packed) > 1):
                groups.append(FileGroup(packed, partition))
    return FoundFiles(tuple(groups), len(entries), len(older))


def rewriting_of(metadata: TableMetadata, io: StorageFileIO, rules: RewriteRules) -> Rewriting:
    """Return the input for writing the groups of a table."""
    return Rewriting(io, metadata, int(_LARGEST_SHARE * rules.target_bytes(metadata)))


def stage_rewritten(
    lake: Lakehouse,
    name: tuple[str, str],
    metadata: TableMetadata,
    removed: Sequence[DataFile],
    added: Sequence[DataFile],
    *,
    begun_at_ms: int,
) -> StagedTable:
    """Replace files by new ones with the same rows, as one Iceberg snapshot, unpublished.

    ``metadata`` is that of the table the new files were written for. Files that others added since stay. Raises
    CommitConflictError if the table is gone, is another, is partitioned in another way, or lost one of the old files or
    rows of them. Raises StorageError.
    """
    catalog = StagingCatalog(lake)
    reader = catalog.target.reader()
    if not (reader.has_namespace(name[0]) and reader.has_table(*name) and reader.table(*name).is_iceberg):
        raise _moved(name, catalog.base_version, "it was dropped")
    table = catalog.load_table(name)
    if table.metadata.table_uuid != metadata.table_uuid:
        raise _moved(name, catalog.base_version, "another table has its name")
    if table.metadata.default_spec_id != metadata.default_spec_id:
        raise _moved(name, catalog.base_version, "it is partitioned in another way")
    current = table.current_snapshot()
    manifests = [] if current is None else current.manifests(table.io)
    if any(manifest.content != ManifestContent.DATA for manifest in manifests):
        raise _moved(name, catalog.base_version, "rows of it were deleted by delete files")
    if not FILTERS_MANIFESTS and not _are_there(removed, manifests, catalog.io):
        raise _moved(name, catalog.base_version, _LOST_FILES)
    change = table.transaction()
    try:
        with _RewriteFiles(change) as rewrite:
            for data_file in removed:
                rewrite.delete_data_file(data_file)
            for data_file in added:
                rewrite.append_data_file(data_file)
    except ValidationException as error:
        raise _moved(name, catalog.base_version, _LOST_FILES) from error
    change.commit_transaction()
    staged = replace(catalog.staged(name), begun_at_ms=begun_at_ms)
    if not staged.removed_rows == staged.added_rows == sum(file.record_count for file in removed):
        raise CorruptFileError(
            f"table {'.'.join(name)} would have {staged.added_rows - staged.removed_rows} rows more than before",
            path=staged.metadata_location,
        )
    return staged


_LOST_FILES = "some of the files are not in it any more"


class _RewriteFiles(_OverwriteFiles):
    """An Iceberg snapshot that holds the same rows in other files."""

    def __init__(self, change: Transaction):
        super().__init__(operation=Operation.OVERWRITE, transaction=change, io=change._table.io)

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        # Totals are summed up by pyiceberg only for the operations that it makes itself.
        summary = super()._summary(snapshot_properties)
        return Summary(operation=Operation.REPLACE, **summary.additional_properties)

    def _build_delete_files_partition_predicate(self) -> None:
        """All manifests are read: expressions over thousands of partitions are too deep to evaluate."""

    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[ManifestFile], bool]:
        return lambda _manifest: True


def _moved(name: tuple[str, str], base_version: int, how: str) -> CommitConflictError:
    return CommitConflictError(
        f"the files of table {'.'.join(name)} were written anew, and since then {how}; plan it again",
        conflicts=(f"table {'.'.join(name)}: {how}",),
        base_version=base_version,
    )


def _are_there(files: Iterable[DataFile], manifests: Iterable[ManifestFile], io: StorageFileIO) -> bool:
    """Whether a table has all these files."""
    return {file.file_path for file in files} <= {entry.data_file.file_path for entry in _data_entries(manifests, io)}


def _data_entries(manifests: Iterable[ManifestFile], io: StorageFileIO) -> list[ManifestEntry]:
    """Return the live data files in the order in which they were added."""
    found: list[ManifestEntry] = []
    for manifest in manifests:
        if manifest.content != ManifestContent.DATA:
            raise InvalidDefinitionError(
                "it has delete files, which cannot be applied here; rewrite it with the engine that wrote them"
            )
        found += [entry for entry in entries_in(manifest, io) if entry.status != ManifestEntryStatus.DELETED]
    return sorted(found, key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))


def _packed(files: Sequence[DataFile], target_bytes: int) -> list[tuple[DataFile, ...]]:
    """Return files in groups of up to the target.

    A group has neighbours, so that files that arrived together stay together.
    """
    groups: list[list[DataFile]] = []
    group_bytes = 0
    for file in files:
        if not groups or group_bytes + file.file_size_in_bytes > target_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(file)
        group_bytes += file.file_size_in_bytes
    return [tuple(group) for group in groups]


class _Counted:
    """Yield batches, counting their rows."""

    def __init__(self, batches: Iterable[pa.RecordBatch]):
        self._batches = batches
        self.rows = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.rows += batch.num_rows
            yield batch


def _arrow_sort_order(metadata: TableMetadata) -> list[tuple[str, SortField]] | None:
    """Return the columns of a table's sort order. None if it has no order, or one that needs more than columns."""
    order = metadata.sort_order_by_id(metadata.default_sort_order_id)
    if order is None or not order.fields:
        return None
    columns: list[tuple[str, SortField]] = []
    schema = metadata.schema()
    for sort_field in order.fields:
        source = None
        with contextlib.suppress(ValueError):  # the column was dropped since
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
    """Yield all rows in an order, with nulls where it puts them. NaN is the greatest number, as in Iceberg."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # importing it loads pandas

    arrow_schema = schema_to_pyarrow(schema)
    held = [conform(batch, schema, arrow_schema) for batch in batches]
    rows = pa.concat_tables(held) if held else arrow_schema.empty_table()
    keys: list[tuple[pa.ChunkedArray, str]] = []
    for name, sort_field in order:
        column = rows[name]
        direction = "ascending" if sort_field.direction == SortDirection.ASC else "descending"
        nulls_first = sort_field.null_order == NullOrder.NULLS_FIRST
        keys.append((pc.is_null(column), "descending" if nulls_first else "ascending"))
        if pa.types.is_floating(column.type):
            keys.append((pc.is_nan(column), direction))
        keys.append((column, direction))
    sortable = pa.table({str(at): key for at, (key, _) in enumerate(keys)})
    indices = pc.sort_indices(sortable, sort_keys=[(str(at), how) for at, (_, how) in enumerate(keys)])
    yield from rows.take(indices).to_batches()
