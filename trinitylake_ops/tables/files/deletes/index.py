"""Tells which delete files of a snapshot apply to a data file, by the rules of Iceberg's specification.

Deletes by position count for data files that are no younger, of their partition or of the path that their bounds name.
Equality deletes count for older data files of their partition, or of any if their partition spec has no fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.expressions.visitors import _InclusiveMetricsEvaluator, expression_evaluator, inclusive_projection
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.tables.files.deletes.copies import PATH_FIELD_ID
from trinitylake_ops.tables.files.reach import entries_in, manifests_in
from trinitylake_ops.tables.io.file_io import StorageFileIO

_POSITION_FORMATS = (FileFormat.PARQUET, FileFormat.ORC, FileFormat.PUFFIN)
_EQUALITY_FORMATS = (FileFormat.PARQUET,)

#: A spec and a partition of it, None for files that are of all partitions.
_Scope = tuple[int, Record] | None
_Numbered = tuple[int, DataFile]


class DeleteFiles:
    """The live delete files among entries of manifests, which they keep as ``entries``.

    Raises InvalidDefinitionError for one of a format in which it is not read, with its name.
    """

    def __init__(self, entries: Iterable[ManifestEntry], metadata: TableMetadata):
        self._specs = metadata.specs()
        self._by_path: dict[str, list[_Numbered]] = {}
        self._by_partition: dict[_Scope, list[_Numbered]] = {}
        self._equality: dict[_Scope, list[_Numbered]] = {}
        self.entries = [entry for entry in entries if entry.status != ManifestEntryStatus.DELETED]
        for entry in self.entries:
            self._add(entry)

    def _add(self, entry: ManifestEntry) -> None:
        file, number = entry.data_file, entry.sequence_number or 0
        check_is_read(file)
        if file.content == DataFileContent.EQUALITY_DELETES:
            is_of_all = self._specs[file.spec_id].is_unpartitioned()
            self._equality.setdefault(None if is_of_all else _scope(file), []).append((number, file))
        elif (path := only_path(file)) is not None:
            self._by_path.setdefault(path, []).append((number, file))
        else:
            self._by_partition.setdefault(_scope(file), []).append((number, file))

    def of(self, entry: ManifestEntry) -> set[DataFile]:
        """Return those that apply to the data file of an entry."""
        file, number = entry.data_file, entry.sequence_number or 0
        scope = _scope(file)
        by_position = [*self._by_path.get(file.file_path, ()), *self._by_partition.get(scope, ())]
        by_value = [*self._equality.get(None, ()), *self._equality.get(scope, ())]
        found = {delete for later, delete in by_position if later >= number and _may_name(delete, file.file_path)}
        return found | {delete for later, delete in by_value if later > number}


def check_is_read(file: DataFile) -> None:
    """Raise InvalidDefinitionError for a delete file of a format in which it is not read, with its name."""
    is_equality = file.content == DataFileContent.EQUALITY_DELETES
    if file.file_format not in (_EQUALITY_FORMATS if is_equality else _POSITION_FORMATS):
        kind = "equality" if is_equality else "position"
        raise InvalidDefinitionError(
            f"it has {kind} deletes in the format {file.file_format.value}, which is not read here"
            f" ({file.file_path!r}); let the engine that wrote them rewrite its data files"
        )


def _scope(file: DataFile) -> _Scope:
    return file.spec_id, file.partition


def _path_bounds(file: DataFile) -> tuple[bytes, bytes] | None:
    """Return the least and the greatest path in a file of position deletes, if its manifest says them."""
    lower, upper = file.lower_bounds or {}, file.upper_bounds or {}
    if PATH_FIELD_ID not in lower or PATH_FIELD_ID not in upper:
        return None
    return lower[PATH_FIELD_ID], upper[PATH_FIELD_ID]


def only_path(file: DataFile) -> str | None:
    """Return the path of the one data file that a file of position deletes is of, as far as its bounds say it."""
    bounds = _path_bounds(file)
    return bounds[0].decode(errors="surrogateescape") if bounds is not None and bounds[0] == bounds[1] else None


def _may_name(delete: DataFile, path: str) -> bool:
    bounds = _path_bounds(delete)
    return bounds is None or bounds[0] <= path.encode(errors="surrogateescape") <= bounds[1]


def live_entries(manifests: Iterable[ManifestFile], io: StorageFileIO, content: ManifestContent) -> list[ManifestEntry]:
    """Return the entries, but deleted ones, of manifests of data or of deletes. Raises CorruptFileError, StorageError.

    They come in the order in which the files were added.
    """
    found = [
        entry
        for manifest in manifests
        if manifest.content == content
        for entry in entries_in(manifest, io)
        if entry.status != ManifestEntryStatus.DELETED
    ]
    return sorted(found, key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))


def planned_tasks(
    metadata: TableMetadata, io: StorageFileIO, row_filter: BooleanExpression, snapshot_id: int | None = None
) -> list[FileScanTask]:
    """Return the data files of a snapshot that may have rows of a filter, with all deletes that apply, of either kind.

    By default of the current one. pyiceberg plans no scan of a table with equality deletes. Raises
    InvalidDefinitionError for deletes of a format that is not read, CorruptFileError, StorageError.
    """
    snapshot = metadata.current_snapshot() if snapshot_id is None else metadata.snapshot_by_id(snapshot_id)
    manifests = [] if snapshot is None else manifests_in(snapshot, io)
    deletes = DeleteFiles(live_entries(manifests, io, ManifestContent.DELETES), metadata)
    may_match = _pruning(metadata, row_filter)
    return [
        FileScanTask(entry.data_file, deletes.of(entry), row_filter)
        for entry in live_entries(manifests, io, ManifestContent.DATA)
        if may_match(entry.data_file)
    ]


def _pruning(metadata: TableMetadata, row_filter: BooleanExpression) -> Callable[[DataFile], bool]:
    """Return whether a data file may have rows of a filter, by its partition and its statistics."""
    if row_filter == AlwaysTrue():
        return lambda _: True
    schema = metadata.schema()
    metrics = _InclusiveMetricsEvaluator(schema, row_filter).eval
    evaluators: dict[int, Callable[[Record], bool]] = {}
    for number, spec in metadata.specs().items():
        projected = inclusive_projection(schema, spec)(row_filter)
        fields = Schema(*spec.partition_type(schema).fields)
        evaluators[number] = expression_evaluator(fields, projected, case_sensitive=True)
    return lambda file: evaluators[file.spec_id](file.partition) and metrics(file)
