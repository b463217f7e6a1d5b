"""Count the rows of a table that differ between two states, by content and regardless of the files that store them.

Files that both states contain with the same deletes are not read. The rows in other files are compared by 64-bit hashes
of all common columns. Differing rows are then read again to compute the minima and maxima of the columns that differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.exceptions import ResolveError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.schema import Schema, promote
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import IcebergType, NestedField

from trinitylake_ops.iceberg.content_digest import ContentDigest
from trinitylake_ops.iceberg.delete_files import RemainingRows, planned_tasks
from trinitylake_ops.iceberg.io.checked_files import CheckedFileIO
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.iceberg.read import file_batches
from trinitylake_ops.operations.diff.versions import TableState
from trinitylake_ops.operations.rendering import MAX_SAMPLES

#: The limits for all tables of a plan together: file bytes, rows to compare, and seconds.
MAX_BYTES = 128 << 20
MAX_ROWS = 5_000_000
MAX_SECONDS = 20.0
_MAX_SAMPLED_COLUMNS = 20
_MAX_VALUE_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRange:
    """The minima and maxima of a column over differing rows, before and after; empty strings if there is no value."""

    column: str
    before: tuple[str, str]
    after: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """The rows of a table that differ between two states."""

    #: None if the rows were not counted.
    added: int | None = None
    removed: int | None = None
    #: None for a table without a primary key, whose changed rows count as removed and added.
    changed: int | None = None
    ranges: tuple[ColumnRange, ...] = ()
    sample_columns: tuple[str, ...] = ()
    #: Sample rows as texts, with rows of the earlier state first. The first value of each row names the state.
    samples: tuple[tuple[str, ...], ...] = ()
    #: Why the rows were not counted.
    note: str = ""


@dataclass
class RowCounter:
    """Counts differing rows of tables, within limits that all tables share."""

    io: StorageFileIO
    #: The number of differing rows to return for each table, at most MAX_SAMPLES. With 0, minima and maxima of texts
    #: and bytes are omitted as well, because they are values of individual rows.
    samples: int = 0
    bytes_left: int = MAX_BYTES
    rows_left: int = MAX_ROWS
    ends_s: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def count(self, before: TableState | None, after: TableState | None) -> RowChanges:
        """Compare the rows of a table. Tables that cannot be read or exceed the limits are not counted.

        Args:
            before: The first state; None if the table did not exist.
            after: The second state; None if the table does not exist.
        """
        if before is None or after is None or before.metadata is None or after.metadata is None:
            return RowChanges(note="not counted: only one version has a readable state of this table")
        if before.definition.id != after.definition.id:
            return RowChanges(note="not counted: another table has the same name")
        try:
            return self._count(before.metadata, after.metadata)
        except _OverLimitError as error:
            return RowChanges(note=f"not counted: {error}")
        except DAMAGE as error:
            return RowChanges(note=f"not counted: {error.message}")

    def _count(self, before: TableMetadata, after: TableMetadata) -> RowChanges:
        schema = common_schema(before.schema(), after.schema())
        if not schema.fields:
            return RowChanges(note="not counted: the versions have no common column")
        tasks = [planned_tasks(state, self.io, AlwaysTrue()) for state in (before, after)]
        differing = _unshared_files(*tasks)
        self._charge(differing)
        sides = [
            _Side(state, schema, self.io, files, self.ends_s)
            for state, files in zip((before, after), differing, strict=True)
        ]
        differing_rows = _differing_rows(*(side.hashes() for side in sides))
        removed, added = (pc.sum(counts, min_count=0).as_py() for _, counts in differing_rows)
        if not removed and not added:
            return RowChanges(added=0, removed=0, changed=0)
        keys = set(after.schema().identifier_field_ids) & set(before.schema().identifier_field_ids)
        for side, (values, _) in zip(sides, differing_rows, strict=True):
            side.read_surplus(values, keys, self.samples)
        changed = len(set.intersection(*(side.keys for side in sides))) if keys else None
        return RowChanges(
            added=added - (changed or 0),
            removed=removed - (changed or 0),
            changed=changed,
            ranges=tuple(_ranges(*sides, shows_texts=self.samples > 0)),
            sample_columns=tuple(name for name, _ in islice(sides[0].ranges.items(), _MAX_SAMPLED_COLUMNS)),
            samples=(*_named("before", sides[0].samples), *_named("after", sides[1].samples)) if self.samples else (),
        )

    def _charge(self, differing: Sequence[Sequence[FileScanTask]]) -> None:
        """Charge the files of both sides to the limits. Raises _OverLimitError."""
        sizes = {}
        for task in (task for tasks in differing for task in tasks):
            for file in (task.file, *task.delete_files):
                sizes[file.file_path] = file.file_size_in_bytes
        rows = sum(task.file.record_count for tasks in differing for task in tasks)
        if sum(sizes.values()) > self.bytes_left:
            raise _OverLimitError(f"its files exceed the {MAX_BYTES >> 20} MiB that a plan reads")
        if rows > self.rows_left:
            raise _OverLimitError(f"it exceeds the {MAX_ROWS:,} rows that a plan compares")
        self.bytes_left -= sum(sizes.values())
        self.rows_left -= rows


class _OverLimitError(Exception):
    """A limit of the plan was reached."""


class _Side:
    """The rows of one state in files that the other state does not contain."""

    def __init__(
        self, metadata: TableMetadata, schema: Schema, io: StorageFileIO, tasks: Sequence[FileScanTask], ends_s: float
    ):
        self.schema = schema
        self.digest = ContentDigest(schema)
        self.ranges: dict[str, list[Any]] = {column.name: [] for column in schema.fields}
        self.samples: list[tuple[str, ...]] = []
        #: The hashes of the keys of rows that the other state does not contain.
        self.keys: set[int] = set()
        self._metadata = metadata
        self._io = io
        self._tasks = tasks
        self._ends_s = ends_s

    def hashes(self) -> pa.ChunkedArray:
        """Return the hash of each row."""
        digest = ContentDigest(self.schema)
        parts = (hashes for batch in self._batches() for _, hashes in digest.hashed(batch, self.schema, {}))
        return pa.chunked_array([*parts], pa.uint64())

    def read_surplus(self, values: pa.Array, keys: set[int], n_samples: int) -> None:
        """Read the rows with these hashes again to collect ranges, keys and samples.

        Args:
            values: The hashes of the rows.
            keys: The ids of the key columns.
            n_samples: The number of samples.
        """
        of_keys = Schema(*(column for column in self.schema.fields if column.field_id in keys))
        hashed, key_digest = ContentDigest(self.schema), ContentDigest(of_keys)
        for batch in self._batches():
            for part, hashes in hashed.hashed(batch, self.schema, {}):
                rows = part.filter(pc.is_in(hashes, value_set=values))
                if not rows.num_rows:
                    continue
                self.digest.add(rows, self.schema, {})
                for _, key_hashes in key_digest.hashed(rows, of_keys, {}) if keys else ():
                    self.keys.update(key_hashes.to_pylist())
                self._record(rows, n_samples)

    def _record(self, rows: pa.RecordBatch, n_samples: int) -> None:
        for name, values in self.ranges.items():
            try:
                ends = pc.min_max(rows.column(name)).as_py()
            except pa.ArrowNotImplementedError:  # nested values
                continue
            values += [end for end in (ends["min"], ends["max"]) if end is not None and not _is_nan(end)]
            values[:] = [min(values), max(values)] if values else []
        missing = min(n_samples, MAX_SAMPLES) // 2 - len(self.samples)
        names = list(islice(self.ranges, _MAX_SAMPLED_COLUMNS))
        for row in rows.slice(0, max(0, missing)).select(names).to_pylist():
            self.samples.append(tuple(_short(row[name]) for name in names))

    def _batches(self) -> Iterator[pa.RecordBatch]:
        from pyiceberg.io.pyarrow import ArrowScan  # this import also imports pandas

        listed = {file.file_path: file for task in self._tasks for file in (task.file, *task.delete_files)}
        io = CheckedFileIO.like(self._io, {path: file.file_size_in_bytes for path, file in listed.items()})
        remaining = RemainingRows(ArrowScan(self._metadata, io, self.schema, AlwaysTrue()))
        for task in self._tasks:
            if time.monotonic() > self._ends_s:
                raise _OverLimitError(f"it takes more than the {MAX_SECONDS:g} seconds of a plan")
            yield from file_batches(remaining, task, io)


def common_schema(before: Schema, after: Schema) -> Schema:
    """Return the columns that both schemas contain, matched by id, with the wider type and the later name.

    Args:
        before: The first schema.
        after: The second schema.
    """
    columns_before = {column.field_id: column for column in before.fields}
    pairs = ((columns_before[column.field_id], column) for column in after.fields if column.field_id in columns_before)
    wider = ((column, _wider(other.field_type, column.field_type)) for other, column in pairs)
    return Schema(
        *(NestedField(column.field_id, column.name, kind, required=False) for column, kind in wider if kind is not None)
    )


def _wider(first: IcebergType, second: IcebergType) -> IcebergType | None:
    """Return the type that can represent values of both types, or None."""
    if first == second:
        return first
    for narrow, wide in ((first, second), (second, first)):
        try:
            return promote(narrow, wide)
        except ResolveError:
            continue
    return None


def _unshared_files(*sides: Sequence[FileScanTask]) -> list[list[FileScanTask]]:
    """Return the files of each side that the other side does not contain with the same deletes."""
    files_with_keys = [
        {(task.file.file_path, frozenset(file.file_path for file in task.delete_files)): task for task in tasks}
        for tasks in sides
    ]
    return [
        [task for key, task in tasks.items() if key not in files_with_keys[1 - side]]
        for side, tasks in enumerate(files_with_keys)
    ]


def _differing_rows(
    first: pa.ChunkedArray, second: pa.ChunkedArray
) -> tuple[tuple[pa.Array, pa.Array], tuple[pa.Array, pa.Array]]:
    """Return the values that occur more often on one side than on the other, with the differences in count."""
    signs = [pa.repeat(pa.scalar(sign, pa.int64()), len(side)) for side, sign in ((first, 1), (second, -1))]
    both = pa.table(
        {"value": pa.chunked_array([*first.chunks, *second.chunks], pa.uint64()), "sign": pa.chunked_array(signs)}
    )
    sums = both.group_by("value").aggregate([("sign", "sum")]).combine_chunks()
    values, counts = (sums.column(name).combine_chunks() for name in ("value", "sign_sum"))
    is_more, is_less = pc.greater(counts, 0), pc.less(counts, 0)
    return (
        (values.filter(is_more), counts.filter(is_more)),
        (values.filter(is_less), pc.negate(counts.filter(is_less))),
    )


def _ranges(before: _Side, after: _Side, *, shows_texts: bool) -> Iterator[ColumnRange]:
    for name in before.digest.differing_columns(after.digest):
        ends = [side.ranges[name] for side in (before, after)]
        values = [value for side in ends for value in side]
        if not values or (isinstance(values[0], str | bytes) and not shows_texts):
            continue
        texts = [(_short(side[0]), _short(side[-1])) if side else ("", "") for side in ends]
        yield ColumnRange(column=name, before=texts[0], after=texts[1])


def _named(state: str, rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    return ((state, *row) for row in rows)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
