"""Match delete files to data files, and filter the deleted rows.

A position delete file applies to data files whose sequence number is not greater than its own and that are in its
partition or have the path in its bounds. An equality delete file applies to older data files in its partition, or to
all older data files if its partition spec has no fields.

PyIceberg applies position deletes. Equality deletes are applied here: a row is deleted if its values in the key columns
equal those of a row of the delete file. Nulls equal each other, and so do NaNs.
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

#: A spec id and a partition of that spec; None for files that apply to all partitions.
_Scope = tuple[int, Record] | None
_Numbered = tuple[int, DataFile]


class DeleteFiles:
    """The live delete files of manifest entries, indexed by the data files and partitions that they apply to.

    The constructor raises InvalidDefinitionError for a delete file of an unsupported format.
    """

    def __init__(self, entries: Iterable[ManifestEntry], metadata: TableMetadata):
        self._specs = metadata.specs()
        self._by_path: dict[str, list[_Numbered]] = {}
        self._by_partition: dict[_Scope, list[_Numbered]] = {}
        self._equality: dict[_Scope, list[_Numbered]] = {}
        #: The live entries.
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
        """Return the delete files that apply to the data file of an entry."""
        file, number = entry.data_file, entry.sequence_number or 0
        scope = _scope(file)
        by_position = [*self._by_path.get(file.file_path, ()), *self._by_partition.get(scope, ())]
        by_value = [*self._equality.get(None, ()), *self._equality.get(scope, ())]
        position_deletes = {
            delete for later, delete in by_position if later >= number and _may_name(delete, file.file_path)
        }
        return position_deletes | {delete for later, delete in by_value if later > number}


def check_is_read(file: DataFile) -> None:
    """Raise InvalidDefinitionError, with the file's name, for a delete file of an unsupported format."""
    is_equality = file.content == DataFileContent.EQUALITY_DELETES
    if file.file_format not in (_EQUALITY_FORMATS if is_equality else _POSITION_FORMATS):
        kind = "equality" if is_equality else "position"
        raise InvalidDefinitionError(
            f"{kind} deletes in the format {file.file_format.value} are not supported ({file.file_path!r}); rewrite the"
            " data files with the engine that wrote them"
        )


def _scope(file: DataFile) -> _Scope:
    return file.spec_id, file.partition


def _path_bounds(file: DataFile) -> tuple[bytes, bytes] | None:
    """Return the least and the greatest path in a position delete file, if its manifest records both."""
    lower, upper = file.lower_bounds or {}, file.upper_bounds or {}
    if PATH_FIELD_ID not in lower or PATH_FIELD_ID not in upper:
        return None
    return lower[PATH_FIELD_ID], upper[PATH_FIELD_ID]


def only_path(file: DataFile) -> str | None:
    """Return the path of the data file to which a position delete file applies, if its bounds name only one path."""
    bounds = _path_bounds(file)
    return bounds[0].decode(errors="surrogateescape") if bounds is not None and bounds[0] == bounds[1] else None


def _may_name(delete: DataFile, path: str) -> bool:
    bounds = _path_bounds(delete)
    return bounds is None or bounds[0] <= path.encode(errors="surrogateescape") <= bounds[1]


def live_entries(manifests: Iterable[ManifestFile], io: StorageFileIO, content: ManifestContent) -> list[ManifestEntry]:
    """Return the live entries of manifests, ordered by sequence number and path.

    Args:
        manifests: Manifests of a snapshot.
        io: Reads the manifests.
        content: Return only entries of manifests with this content.

    Raises:
        CorruptFileError: A manifest is corrupt.
        StorageError: A manifest cannot be read.
    """
    entries = [
        entry
        for manifest in manifests
        if manifest.content == content
        for entry in entries_in(manifest, io)
        if entry.status != ManifestEntryStatus.DELETED
    ]
    return sorted(entries, key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))


def planned_tasks(
    metadata: TableMetadata, io: StorageFileIO, row_filter: BooleanExpression, snapshot_id: int | None = None
) -> list[FileScanTask]:
    """Return a scan task for each data file that may match a filter, with all position and equality deletes that apply.

    PyIceberg itself cannot scan tables with equality deletes.

    Args:
        metadata: Metadata of the table.
        io: Reads the manifests of the table.
        row_filter: The filter.
        snapshot_id: The snapshot to read; by default the current one.

    Raises:
        InvalidDefinitionError: A delete file has an unsupported format.
        CorruptFileError: A manifest is corrupt.
        StorageError: A manifest cannot be read.
    """
    snapshot = metadata.current_snapshot() if snapshot_id is None else metadata.snapshot_by_id(snapshot_id)
    manifests = [] if snapshot is None else manifests_in(snapshot, io)
    deletes = DeleteFiles(live_entries(manifests, io, ManifestContent.DELETES), metadata)
    may_match = _file_filter(metadata, row_filter)
    return [
        FileScanTask(entry.data_file, deletes.of(entry), row_filter)
        for entry in live_entries(manifests, io, ManifestContent.DATA)
        if may_match(entry.data_file)
    ]


def _file_filter(metadata: TableMetadata, row_filter: BooleanExpression) -> Callable[[DataFile], bool]:
    """Return a predicate that checks whether a data file may match a filter, by its partition and statistics."""
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


#: Prefix of columns that a scan reads only to apply deletes.
_OWN_COLUMN = "trinitylake.delete-key-"


class RemainingRows:
    """Scans data files without their deleted rows. Each equality delete file is read once."""

    def __init__(self, scan: ArrowScan):
        self.scan = scan
        self._read: dict[str, pa.Table] = {}
        self._keys: dict[frozenset[str], _DeletedKeys] = {}

    def batches(self, task: FileScanTask) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows of a data file.

        Raises InvalidDefinitionError for equality deletes on columns that cannot be compared, StorageError, and
        PyIceberg's errors.
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
        wider_scan, names = self._wider_scan(columns)
        keys = [
            (self._deleted(ids, files, columns), [names[number] for number in ids]) for ids, files in by_ids.items()
        ]
        visible = [field.name for field in self.scan._projected_schema.fields]
        for batch in wider_scan.to_record_batches([FileScanTask(task.file, positions, task.residual)]):
            deleted_masks = [deleted.matches([batch.column(name) for name in key_names]) for deleted, key_names in keys]
            yield batch.filter(pc.invert(functools.reduce(pc.or_, deleted_masks))).select(visible)

    def _column(self, number: int) -> NestedField:
        """Return a column by its id, even if it has since been dropped."""
        metadata: TableMetadata = self.scan._table_metadata
        for schema in (metadata.schema(), *reversed(metadata.schemas)):
            column = next((field for field in schema.fields if field.field_id == number), None)
            if column is not None and column.field_type.is_primitive:
                return column
        raise InvalidDefinitionError(
            f"equality deletes by column {number} are not supported: it is not a primitive column of the table; rewrite"
            " the data files with the engine that wrote them"
        )

    def _wider_scan(self, columns: dict[int, NestedField]) -> tuple[ArrowScan, dict[int, str]]:
        """Return a scan that also reads the given columns, and the names of its columns by field id."""
        projected: Schema = self.scan._projected_schema
        names = {field.field_id: field.name for field in projected.fields}
        added = [
            field.model_copy(update={"name": f"{_OWN_COLUMN}{number}", "required": False})
            for number, field in columns.items()
            if number not in names
        ]
        wider_scan = copy.copy(self.scan)
        wider_scan._projected_schema = Schema(*projected.fields, *added)
        return wider_scan, names | {field.field_id: field.name for field in added}

    def _deleted(
        self, ids: tuple[int, ...], files: Sequence[DataFile], columns: dict[int, NestedField]
    ) -> _DeletedKeys:
        """Return the deleted keys of delete files with the same key columns."""
        paths = frozenset(file.file_path for file in files)
        if paths not in self._keys:
            schema = Schema(*(columns[number].model_copy(update={"required": False}) for number in ids))
            tables = [self._table(file, schema) for file in files]
            self._keys[paths] = _DeletedKeys(pa.concat_tables(tables))
        return self._keys[paths]

    def _table(self, file: DataFile, schema: Schema) -> pa.Table:
        from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow  # importing it loads pandas

        if file.file_path not in self._read:
            scan = ArrowScan(self.scan._table_metadata, self.scan._io, schema, AlwaysTrue())
            table = scan.to_table([FileScanTask(file)])
            if table.num_rows != file.record_count:
                raise CorruptFileError(
                    f"delete file {file.file_path!r} has {table.num_rows} rows, but its manifest records"
                    f" {file.record_count}",
                    path=file.file_path,
                )
            self._read[file.file_path] = table.cast(schema_to_pyarrow(schema, include_field_ids=False))
        return self._read[file.file_path]


class _DeletedKeys:
    """Set of multi-column keys, built from the rows of a table.

    The values of each column are encoded as integer codes, and then each pair of codes is encoded as one code. A row
    with an unknown code does not match.
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
            codes_by_value = pairs.unique()
            self._steps.append((values, codes_by_value))
            key = pc.index_in(pairs, value_set=codes_by_value)

    def matches(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Return a mask of the rows whose key is in the set. Columns must have the same order as in the table."""
        key: pa.Array | None = None
        for column, (values, codes_by_value) in zip(columns, self._steps, strict=True):
            codes = pc.index_in(_plain(column).cast(values.type), value_set=values)
            key = (
                codes
                if key is None or codes_by_value is None
                else pc.index_in(_pairs(key, codes, len(values)), value_set=codes_by_value)
            )
        assert key is not None
        return pc.is_valid(key)


def _pairs(first: pa.Array, second: pa.Array, n_second: int) -> pa.Array:
    return pc.add(pc.multiply(first.cast(pa.int64()), n_second), second.cast(pa.int64()))


def _plain(column: pa.Array) -> pa.Array:
    """Return a column without dictionary encoding."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
