"""Rows of data files without those that delete files delete.

pyiceberg applies deletes by position. Equality deletes are applied here: a row goes where its values in some columns
are those of a row of a delete file. Nulls are equal to each other there, and so are NaNs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFile, DataFileContent
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import NestedField

from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError

if TYPE_CHECKING:
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

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
