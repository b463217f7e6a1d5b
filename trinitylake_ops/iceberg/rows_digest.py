"""Compute digests of the rows that a rewrite reads and writes, and of the rows in a stream's epoch.

The digest of a rewrite is computed from the columns as Arrow reads them, before PyIceberg projects them to the table's
schema, so that faults of the projection or of a later step are detected when the written files are compared.

A stream repeats an epoch after a failure. The rows then arrive in a different order and in different batches and tasks.
A sum of double values may differ in its last bits because the values were added in another order, so ``double`` values
are hashed with the precision of ``float``. All other values are hashed exactly.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import mmh3
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema, prune_columns
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform

from trinitylake_ops.iceberg.content_digest import ContentDigest
from trinitylake_ops.iceberg.delete_files import RemainingRows

if TYPE_CHECKING:
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

#: PyIceberg truncates nanoseconds for tables of format versions up to this one.
_LAST_VERSION_WITHOUT_NANOSECONDS = 2


@dataclass(frozen=True, slots=True)
class _StoredRows:
    """Rows with the columns of their file, and the values of columns that the file lacks."""

    batch: pa.RecordBatch
    columns: Schema
    constants: Mapping[int, Any]


class DigestedRows(RemainingRows):
    """Scans data files without their deleted rows and computes the digest of all rows. The scan has no filter."""

    def __init__(self, scan: ArrowScan):
        super().__init__(scan)
        #: Digest of the rows read so far.
        self.digest = ContentDigest(scan._projected_schema)

    def batches(self, task: FileScanTask) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows of a data file in the table's columns, like :meth:`RemainingRows.batches`."""
        from pyiceberg.io import pyarrow as iceberg_arrow  # importing it loads pandas

        metadata: TableMetadata = self.scan._table_metadata
        parameters = inspect.signature(iceberg_arrow._to_requested_schema).parameters
        # Readers may return UTC timestamps without a time zone. PyIceberg 0.11 always does so, and has no such
        # parameter.
        allowed: dict[str, Any] = {name: True for name in ("allow_timestamp_tz_mismatch",) if name in parameters}
        for stored in self._remaining_rows(task):
            self.digest.add(stored.batch, stored.columns, stored.constants)
            yield iceberg_arrow._to_requested_schema(
                self.scan._projected_schema,
                stored.columns,
                stored.batch,
                downcast_ns_timestamp_to_us=metadata.format_version <= _LAST_VERSION_WITHOUT_NANOSECONDS,
                projected_missing_fields=dict(stored.constants),
                **allowed,
            )

    def add(self, file: DataFile) -> None:
        """Add the rows of a data file without delete files to the digest.

        Raises StorageError and the errors of the decoders.
        """
        for stored in self._stored(file):
            self.digest.add(stored.batch, stored.columns, stored.constants)

    def _remaining_rows(self, task: FileScanTask) -> Iterator[_StoredRows]:
        """Yield the remaining rows of a data file."""
        from pyiceberg.io.pyarrow import _combine_positional_deletes, _read_all_delete_files

        by_ids: dict[tuple[int, ...], list[DataFile]] = {}
        for file in sorted(task.delete_files, key=lambda file: file.file_path):
            if file.content == DataFileContent.EQUALITY_DELETES:
                by_ids.setdefault(tuple(sorted(set(file.equality_ids or ()))), []).append(file)
        columns = {number: self._column(number) for ids in by_ids for number in ids}
        keys = {ids: self._deleted(ids, files, columns) for ids, files in by_ids.items()}
        by_position = {file for file in task.delete_files if file.content == DataFileContent.POSITION_DELETES}
        positions = _read_all_delete_files(self.scan._io, [FileScanTask(task.file, by_position)])
        deleted = positions.get(task.file.file_path)
        first = 0
        for stored in self._stored(task.file, set(columns)):
            batch, end = stored.batch, first + stored.batch.num_rows
            if deleted:
                batch = batch.take(_combine_positional_deletes(deleted, first, end))
            first = end
            remaining = _StoredRows(batch, stored.columns, stored.constants)
            deleted_masks = [
                deleted_keys.matches([self._values(remaining, number, columns) for number in ids])
                for ids, deleted_keys in keys.items()
            ]
            if deleted_masks:
                kept = batch.filter(pc.invert(functools.reduce(pc.or_, deleted_masks)))
                remaining = _StoredRows(kept, stored.columns, stored.constants)
            if remaining.batch.num_rows:
                yield remaining

    def _values(self, rows: _StoredRows, number: int, columns: Mapping[int, Any]) -> pa.Array:
        """Return a column for comparison with equality deletes."""
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        kind = schema_to_pyarrow(columns[number].field_type, include_field_ids=False)
        for field in rows.columns.fields:
            if field.field_id == number:
                return rows.batch.column(field.name).cast(kind)
        value = rows.constants.get(number, columns[number].initial_default)
        return pa.repeat(pa.scalar(value, kind), rows.batch.num_rows)

    def _stored(self, file: DataFile, extra_ids: set[int] | None = None) -> Iterator[_StoredRows]:
        """Yield all rows of a data file, with the columns of the scan and of ``extra_ids``."""
        from pyarrow.dataset import Scanner  # importing it loads pandas
        from pyiceberg.io.pyarrow import _get_file_format, pyarrow_to_schema

        metadata: TableMetadata = self.scan._table_metadata
        options: dict[str, Any] = {"pre_buffer": True} if file.file_format == FileFormat.PARQUET else {}
        with self.scan._io.new_input(file.file_path).open() as stream:
            fragment = _get_file_format(file.file_format, **options).make_fragment(stream)
            physical = fragment.physical_schema
            columns = pyarrow_to_schema(
                physical,
                metadata.name_mapping(),
                downcast_ns_timestamp_to_us=metadata.format_version <= _LAST_VERSION_WITHOUT_NANOSECONDS,
                format_version=metadata.format_version,
            )
            read_schema = prune_columns(
                columns, self.scan._projected_field_ids | (extra_ids or set()), select_full_types=False
            )
            constants = self._constants(file, columns.field_ids)
            names = [field.name for field in read_schema.fields]
            for batch in Scanner.from_fragment(fragment, schema=physical, columns=names).to_batches():
                if batch.num_rows:
                    yield _StoredRows(batch, read_schema, constants)

    def _constants(self, file: DataFile, stored: set[int]) -> dict[int, Any]:
        """Return the values of identity partition columns that are not stored in the file."""
        metadata: TableMetadata = self.scan._table_metadata
        spec = metadata.specs().get(file.spec_id)
        values = {}
        for index, field in enumerate(spec.fields if spec is not None else ()):
            if isinstance(field.transform, IdentityTransform) and field.source_id not in stored:
                values[field.source_id] = file.partition[index]
        return {number: value for number, value in values.items() if value is not None}


_BITS = 64
_MASK = (1 << _BITS) - 1
_NULL, _COLUMN = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_MULTIPLIERS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


class RowsDigest:
    """The number of rows, and the sum of their hashes."""

    def __init__(self, n_rows: int = 0, total: int = 0):
        self.n_rows = n_rows
        self.total = total

    def __str__(self) -> str:
        return f"{self.n_rows}:{self.total:016x}"

    def __add__(self, other: RowsDigest) -> RowsDigest:
        return RowsDigest(self.n_rows + other.n_rows, (self.total + other.total) & _MASK)

    def over(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches unchanged, and add their rows to the digest."""
        for batch in batches:
            self.n_rows += batch.num_rows
            hashes = _combine_hashes(batch.columns, batch.num_rows)
            self.total = (self.total + (pc.sum(hashes).as_py() or 0)) & _MASK
            yield batch


def total_of(digests: Iterable[RowsDigest]) -> RowsDigest:
    """Return the sum of the digests of all tasks."""
    return reduce(RowsDigest.__add__, digests, RowsDigest())


def _combine_hashes(columns: Iterable[pa.Array], n_rows: int) -> pa.Array:
    """Return a hash of each row over several columns, in order."""
    rows = pa.repeat(_number(0), n_rows)
    for column in columns:
        rows = _finalize(pc.add(pc.multiply(rows, _number(_COLUMN)), _hashes(column)))
    return rows


def _hashes(column: pa.Array) -> pa.Array:
    """Return a 64-bit unsigned hash of each value, using wrapping arithmetic."""
    kind = column.type
    if pa.types.is_struct(kind):
        values = _combine_hashes(column.flatten(), len(column))
    elif pa.types.is_nested(kind):
        values = _string_hashes(map(repr, column.to_pylist()))
    elif pa.types.is_floating(kind):
        values = _finalize(_bits(column.cast(pa.float32(), safe=False), pa.int32()))
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        values = _finalize(column.cast(pa.int64(), safe=False).cast(pa.uint64(), safe=False))
    elif pa.types.is_temporal(kind) and kind.bit_width in (32, _BITS):
        values = _finalize(_bits(column, pa.int32() if kind.bit_width < _BITS else pa.int64()))
    elif pa.types.is_null(kind):
        return pa.repeat(_number(_NULL), len(column))
    else:
        distinct = column.dictionary_encode()
        values_list = distinct.dictionary.to_pylist()
        is_text = pa.types.is_string(kind) or pa.types.is_binary(kind)
        values = _string_hashes(values_list if is_text else map(repr, values_list)).take(distinct.indices)
    return pc.if_else(column.is_null(), _number(_NULL), values)


def _bits(column: pa.Array, integer: pa.DataType) -> pa.Array:
    return column.view(integer).cast(pa.int64()).cast(pa.uint64(), safe=False)


def _finalize(values: pa.Array) -> pa.Array:
    """Finalize hashes as Murmur3 does, so that each input bit affects all output bits."""
    shift = pa.scalar(33, pa.uint64())
    for multiplier in _MULTIPLIERS:
        values = pc.multiply(pc.bit_wise_xor(values, pc.shift_right(values, shift)), _number(multiplier))
    return pc.bit_wise_xor(values, pc.shift_right(values, shift))


def _number(value: int) -> pa.Scalar:
    return pa.scalar(value, pa.uint64())


def _string_hashes(values: Iterable[str | bytes]) -> pa.Array:
    return pa.array([mmh3.hash64(value, signed=False)[0] for value in values], pa.uint64())
