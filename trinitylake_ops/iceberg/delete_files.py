"""Delete files: which of them apply to a data file, and the rows that remain.

Deletes by position count for data files that are no younger, of their partition or of the path that their bounds name.
Equality deletes count for older data files of their partition, or of any if their partition spec has no fields.

pyiceberg applies deletes by position. Equality deletes are applied here: a row goes where its values in some columns
are those of a row of a delete file. Nulls are equal to each other there, and so are NaNs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
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
from pyiceberg.types import NestedField

from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError
from trinitylake_ops.iceberg.copied_deletes import PATH_FIELD_ID
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import entries_in, manifests_in

if TYPE_CHECKING:
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

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


#: A column that a scan reads for the deletes alone.
_OWN_COLUMN = "trinitylake.delete-key-"


class RemainingRows:
    """The rows that a scan selects and no delete file deletes. Each equality delete file is read once."""

    def __init__(self, scan: ArrowScan):
        self.scan = scan
        self._read: dict[str, pa.Table] = {}
        self._keys: dict[frozenset[str], _DeletedKeys] = {}

    def batches(self, task: FileScanTask) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a data file.

        Raises InvalidDefinitionError for deletes by columns that cannot be compared, what pyiceberg raises, and
        StorageError.
        """
        by_ids: dict[tuple[int, ...], list[DataFile]] = {}
        for file in sorted(task.delete_files, key=lambda file: file.file_path):
            if file.content == DataFileContent.EQUALITY_DELETES:
                by_ids.setdefault(tuple(sorted(set(file.equality_ids or ()))), []).append(file)
        if not by_ids:
            yield from self.scan.to_record_batches([task])
            return
        positions = {file for file in task.delete_files if file.content == DataFileContent.POSITION_DELETES}
        columns = {number: self._column(number) for ids in by_ids for number in ids}
        wider, names = self._wider_scan(columns)
        keys = [
            (self._deleted(ids, files, columns), [names[number] for number in ids]) for ids, files in by_ids.items()
        ]
        shown = [field.name for field in self.scan._projected_schema.fields]
        for batch in wider.to_record_batches([FileScanTask(task.file, positions, task.residual)]):
            gone = [deleted.matches([batch.column(name) for name in key_names]) for deleted, key_names in keys]
            yield batch.filter(pc.invert(functools.reduce(pc.or_, gone))).select(shown)

    def _column(self, number: int) -> NestedField:
        """Return a column by its id, also one that was dropped since."""
        metadata: TableMetadata = self.scan._table_metadata
        for schema in (metadata.schema(), *reversed(metadata.schemas)):
            found = next((field for field in schema.fields if field.field_id == number), None)
            if found is not None and found.field_type.is_primitive:
                return found
        raise InvalidDefinitionError(
            f"its equality deletes are by column {number}, which is no column of the table with values of its own; let"
            " the engine that wrote them rewrite its data files"
        )

    def _wider_scan(self, columns: dict[int, NestedField]) -> tuple[ArrowScan, dict[int, str]]:
        """Return a scan that reads these columns, too, and their names in it by their ids."""
        projected: Schema = self.scan._projected_schema
        names = {field.field_id: field.name for field in projected.fields}
        added = [
            field.model_copy(update={"name": f"{_OWN_COLUMN}{number}", "required": False})
            for number, field in columns.items()
            if number not in names
        ]
        wider = copy.copy(self.scan)
        wider._projected_schema = Schema(*projected.fields, *added)
        return wider, names | {field.field_id: field.name for field in added}

    def _deleted(
        self, ids: tuple[int, ...], files: Sequence[DataFile], columns: dict[int, NestedField]
    ) -> _DeletedKeys:
        """Return the keys in delete files by the same columns."""
        which = frozenset(file.file_path for file in files)
        if which not in self._keys:
            schema = Schema(*(columns[number].model_copy(update={"required": False}) for number in ids))
            tables = [self._table(file, schema) for file in files]
            self._keys[which] = _DeletedKeys(pa.concat_tables(tables))
        return self._keys[which]

    def _table(self, file: DataFile, schema: Schema) -> pa.Table:
        from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow  # importing it loads pandas

        if file.file_path not in self._read:
            scan = ArrowScan(self.scan._table_metadata, self.scan._io, schema, AlwaysTrue())
            table = scan.to_table([FileScanTask(file)])
            if table.num_rows != file.record_count:
                raise CorruptFileError(
                    f"delete file {file.file_path!r} holds {table.num_rows} rows, its manifest says"
                    f" {file.record_count}",
                    path=file.file_path,
                )
            self._read[file.file_path] = table.cast(schema_to_pyarrow(schema, include_field_ids=False))
        return self._read[file.file_path]


class _DeletedKeys:
    """Finds rows whose values, in some columns together, are among those of a table.

    Each column's values are numbered, and so is each step's pair of numbers. A row that meets an unknown one stays.
    """

    def __init__(self, table: pa.Table):
        self._steps: list[tuple[pa.Array, pa.Array | None]] = []
        key: pa.ChunkedArray | None = None
        for column in table.columns:
            values = _plain(column).unique()
            codes = pc.index_in(_plain(column), value_set=values)
            if key is None:
                self._steps.append((values, None))
                key = codes
                continue
            pairs = _pairs(key, codes, len(values))
            known = pairs.unique()
            self._steps.append((values, known))
            key = pc.index_in(pairs, value_set=known)

    def matches(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Return which rows of columns, given in the order of the table's, are among its rows."""
        key: pa.Array | None = None
        for column, (values, known) in zip(columns, self._steps, strict=True):
            codes = pc.index_in(_plain(column).cast(values.type), value_set=values)
            key = (
                codes if key is None or known is None else pc.index_in(_pairs(key, codes, len(values)), value_set=known)
            )
        assert key is not None
        return pc.is_valid(key)


def _pairs(first: pa.Array, second: pa.Array, n_second: int) -> pa.Array:
    return pc.add(pc.multiply(first.cast(pa.int64()), n_second), second.cast(pa.int64()))


def _plain(column: pa.Array) -> pa.Array:
    """Return a column without a dictionary, which its values are compared by."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
