"""Stage an upsert: rows replace existing rows with the same keys, and other rows are added.

Data files with rows of the same keys are rewritten without these rows. Files without such rows are kept, as are files
in which all such rows are equal to the new rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    In,
    LessThanOrEqual,
    Reference,
)
from pyiceberg.expressions.literals import literal
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.typedef import Record
from pyiceberg.types import (
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.content_digest import ContentDigest
from trinitylake_ops.iceberg.delete_files import RemainingRows
from trinitylake_ops.iceberg.io.checked_files import CheckedFileIO
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.read import file_batches
from trinitylake_ops.iceberg.rows_digest import DigestedRows
from trinitylake_ops.iceberg.write.arrow import plan_arrow
from trinitylake_ops.iceberg.write.casting import check_distinct, check_values, conform, lacking_with_values
from trinitylake_ops.iceberg.write.data_files import delete_data_files
from trinitylake_ops.iceberg.write.partition_key import PartitionKey, PartitionValue
from trinitylake_ops.iceberg.write.plan import TableWrite
from trinitylake_ops.iceberg.write.replacement import file_without_deletes
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import StagingCatalog, replaced_by, stage_data_files
from trinitylake_ops.transaction.lakehouse import Lakehouse

if TYPE_CHECKING:
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

# Types whose bounds in manifests select the files that may contain a key.
_SELECTIVE_TYPES = (IntegerType, LongType, StringType, DateType, TimestampType, TimestamptzType)
# Maximum number of values in an IN expression that PyIceberg compares with bounds.
_MAX_IN_VALUES = 200
_OLD, _NEW = "old", "new"


def stage_upsert(
    lake: Lakehouse,
    rows: pa.Table | pa.RecordBatchReader,
    namespace: str,
    table: str,
    *,
    keys: Sequence[str],
    partition_by: Sequence[str] | None = None,
    partitions: Sequence[Mapping[str, PartitionValue]] | None = None,
) -> StagedTable:
    """Stage an upsert: rows replace existing rows with the same keys, and other rows are added. Creates missing tables.

    Columns are matched by name, added and widened as described in
    :func:`trinitylake_ops.iceberg.write.arrow.stage_arrow`. Publishing the staged table conflicts with other changes to
    ``partitions`` since then or, without ``partitions``, with any change to the table. The new rows and one data file
    at a time are in memory.

    Args:
        lake: The lakehouse.
        rows: The new rows.
        namespace: Namespace of the table.
        table: Name of the table.
        keys: Columns that identify a row.
        partition_by: Partition columns of the table; None to use those of an existing table.
        partitions: The only partitions to which the rows may belong. Keys are then compared within each partition, and
            rows of other partitions are kept.

    Returns:
        The staged table.

    Raises:
        InvalidInputError: The rows lack a key column, have a key twice or a null key, do not fit the table, belong to
            other partitions, or lack a column or nested field in which a row that they update has a value.
        UnsupportedTypeError: Iceberg does not have the type of a column.
        InvalidDefinitionError: The table has different partitions, or has delete files.
        CommitConflictError: The table changed during the write.
        CorruptFileError: A data file to rewrite does not match its checksums.
        ContentChangedError: The written files do not contain exactly the new rows and the rows that are kept.
    """
    name = f"{namespace}.{table}"
    check_distinct(rows.schema)
    new_rows = rows if isinstance(rows, pa.Table) else rows.read_all()
    if missing := [key for key in keys if key not in new_rows.column_names]:
        raise InvalidInputError(f"table {name}: the rows lack the key column {missing[0]!r}; add it")
    for key in keys:
        _check_not_null(name, key, new_rows[key])
    plan = plan_arrow(lake, new_rows, namespace, table, partition_by=partition_by)
    new = _conform(name, new_rows, plan.metadata.schema())
    compared, wanted = _compared_columns(name, plan, new, keys, partitions)
    upsert = _Upsert(name, plan, new, new_rows.schema, compared)
    if plan.base_metadata_location is not None:
        upsert.compare(StagingCatalog(lake, version=plan.base_version).load_table((namespace, table)))
    data_files = plan.write(upsert.batches())
    try:
        upsert.check_written(data_files)
        return stage_data_files(lake, plan, data_files, replacing=upsert.replaced, partitions=wanted, on_plan=True)
    except BaseException:
        delete_data_files(plan.io, data_files)
        raise


def _check_not_null(name: str, key: str, column: pa.ChunkedArray) -> None:
    if column.null_count:
        raise InvalidInputError(
            f"table {name}: {column.null_count} rows have no value in key column {key!r}; add values, or drop these"
            " rows"
        )


def _conform(name: str, rows: pa.Table, schema: Schema) -> pa.Table:
    """Return rows with the columns and types of a table."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # importing it loads pandas

    arrow_schema = schema_to_pyarrow(schema, include_field_ids=True)
    try:
        tables = [conform(batch, schema, arrow_schema) for batch in rows.to_batches()]
        for table in tables:
            check_values(table)
    except InvalidInputError as error:
        raise InvalidInputError(f"table {name}: {error.message}") from error
    return pa.concat_tables([arrow_schema.empty_table(), *tables]).combine_chunks()


def _compared_columns(
    name: str,
    plan: TableWrite,
    new: pa.Table,
    keys: Sequence[str],
    partitions: Sequence[Mapping[str, PartitionValue]] | None,
) -> tuple[list[str], frozenset[Record] | None]:
    """Check rows, and return the columns that identify a row and the only partitions of the rows."""
    schema = plan.metadata.schema()
    wanted, _ = replaced_by(plan, "append", partitions, new.column_names)
    part_columns = [] if wanted is None else [field.name for field in plan.metadata.spec().fields]
    compared = list(dict.fromkeys([*keys, *part_columns]))
    for key in compared:
        kind = schema.find_type(key)
        if not isinstance(kind, PrimitiveType) or isinstance(kind, FloatType | DoubleType):
            raise InvalidInputError(
                f"table {name}: column {key!r} of type {kind} cannot be a key; use a primitive column that is not a"
                " float"
            )
    for key in keys:
        _check_not_null(name, key, new[key])
    if wanted is not None:
        for values in _distinct(new, part_columns).to_pylist():
            if PartitionKey.of(plan.metadata, values).record not in wanted:
                raise InvalidInputError(
                    f"table {name}: rows belong to partition {values!r}, which is not one of those to write; filter"
                    " them out"
                )
    if len(new) and _distinct(new, compared).num_rows < len(new):
        raise InvalidInputError(f"table {name}: several rows have the same {', '.join(keys)}; keep one of each")
    return compared, wanted


def _distinct(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    return _plain_columns(rows, columns).group_by(list(columns)).aggregate([])


def _plain_columns(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return columns with the types of their storage, which Arrow can group, join and compare."""
    arrays = {}
    for name in columns:
        column = rows[name]
        is_extension = isinstance(column.type, pa.BaseExtensionType)
        arrays[name] = column.cast(column.type.storage_type) if is_extension else column
    return pa.table(arrays)


@dataclass(frozen=True)
class _Matches:
    """Rows of a data file whose keys occur in new rows: the positions of both, and whether all of them are equal."""

    old: pa.ChunkedArray
    new: pa.ChunkedArray
    are_equal: bool


class _Upsert:
    def __init__(self, name: str, plan: TableWrite, new: pa.Table, source_schema: pa.Schema, compared: Sequence[str]):
        self._name = name
        self._plan = plan
        self._new = new
        self._source_schema = source_schema
        self._columns_to_compare = list(compared)
        self._keys = self._positions(new, _NEW)
        self._changed: list[FileScanTask] = []
        self._written: pa.Array | None = None
        self._digest = ContentDigest(plan.metadata.schema())

    @property
    def replaced(self) -> tuple[DataFile, ...]:
        """The data files that are rewritten without the updated rows."""
        return tuple(task.file for task in self._changed)

    def compare(self, table: Table) -> None:
        """Find the data files of a table with rows of the same keys."""
        assert isinstance(table.io, StorageFileIO)
        self._scan_io = table.io
        table_columns = set(table.schema().column_names)
        if not len(self._new) or not table_columns.issuperset(self._columns_to_compare):
            return
        matching_files: list[tuple[FileScanTask, pa.ChunkedArray, bool]] = []
        for task in table.scan(row_filter=self._filter(table.schema())).plan_files():
            old = self._rows_of(task, RemainingRows(self._scan(self._scan_io)))
            matches = self._matches(old)
            if len(matches.old):
                file_without_deletes(task)
                self._check_keeps_values(old, matches)
                matching_files.append((task, matches.new, matches.are_equal))
        counts = (
            pc.value_counts(pa.chunked_array([new for _, new, _ in matching_files], pa.int64()))
            if matching_files
            else []
        )
        duplicates = {count["values"].as_py() for count in counts if count["counts"].as_py() > 1}
        unchanged: list[pa.ChunkedArray] = []
        for task, new, are_equal in matching_files:
            if are_equal and duplicates.isdisjoint(new.to_pylist()):
                unchanged.append(new)
            else:
                self._changed.append(task)
        if unchanged:
            positions = pa.array(range(len(self._new)), pa.int64())
            same = pa.concat_arrays([chunk for new in unchanged for chunk in new.chunks])
            self._written = positions.filter(pc.invert(pc.is_in(positions, same)))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows to write: the kept rows of changed files, and the new rows."""
        kept = (batch for task in self._changed for batch in self._unchanged_rows(task).to_batches())
        new = self._new if self._written is None else self._new.take(self._written)
        for batch in chain(kept, new.to_batches()):
            self._digest.add(batch, self._plan.metadata.schema(), {})
            yield batch

    def check_written(self, written: Sequence[DataFile]) -> None:
        """Raise ContentChangedError unless the stored files contain the rows of :meth:`batches`."""
        stored = DigestedRows(self._scan(self._plan.io))
        for file in written:
            stored.add(file)
        self._check_same(self._digest, stored.digest)

    def _check_same(self, before: ContentDigest, after: ContentDigest) -> None:
        before.check_same(after, self._name, self._plan.metadata.location)

    def _unchanged_rows(self, task: FileScanTask) -> pa.Table:
        # Verify the file, so that a damaged file is not rewritten with new checksums.
        io = CheckedFileIO.like(self._scan_io, {task.file.file_path: task.file.file_size_in_bytes})
        stored = DigestedRows(self._scan(io))
        old = self._rows_of(task, stored)
        read = ContentDigest(self._plan.metadata.schema())
        for batch in old.to_batches():
            read.add(batch, self._plan.metadata.schema(), {})
        self._check_same(stored.digest, read)
        positions = pa.array(range(len(old)), pa.int64())
        return old.filter(pc.invert(pc.is_in(positions, self._matches(old).old.combine_chunks())))

    def _scan(self, io: StorageFileIO) -> ArrowScan:
        from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

        return ArrowScan(self._plan.metadata, io, self._plan.metadata.schema(), AlwaysTrue())

    def _rows_of(self, task: FileScanTask, remaining: RemainingRows) -> pa.Table:
        """Return the rows of a data file in the columns of the table after the write."""
        schema = self._plan.metadata.schema()
        whole = FileScanTask(task.file, task.delete_files)
        batches = list(file_batches(remaining, whole, self._scan_io))
        tables = [conform(batch, schema, self._new.schema) for batch in batches]
        return pa.concat_tables([self._new.schema.empty_table(), *tables]).combine_chunks()

    def _positions(self, rows: pa.Table, name: str) -> pa.Table:
        """Return the compared columns under unique names, with the position of each row."""
        plain = _plain_columns(rows, self._columns_to_compare)
        columns = {f"key{index}": plain[key] for index, key in enumerate(self._columns_to_compare)}
        return pa.table({**columns, name: pa.array(range(len(rows)), pa.int64())})

    def _matches(self, old: pa.Table) -> _Matches:
        keys = [f"key{index}" for index in range(len(self._columns_to_compare))]
        pairs = self._positions(old, _OLD).join(self._keys, keys=keys, join_type="inner")
        before, after = old.take(pairs[_OLD]), self._new.take(pairs[_NEW])
        return _Matches(pairs[_OLD], pairs[_NEW], before.equals(after))

    def _check_keeps_values(self, old: pa.Table, matches: _Matches) -> None:
        kind = pa.struct(list(self._source_schema))  # treats top-level columns like nested fields
        for batch in old.take(matches.old).to_batches():
            missing_path = lacking_with_values(kind, batch.to_struct_array())
            if missing_path is None:
                continue
            raise InvalidInputError(
                f"table {self._name}: rows to update have values in column {missing_path!r}, which the new rows lack;"
                " add it to the new rows"
            )

    def _filter(self, schema: Schema) -> BooleanExpression:
        """Return a filter that matches all files that may contain a key."""
        terms: list[BooleanExpression] = []
        for key in self._columns_to_compare:
            column = self._new[key]
            if column.null_count or not isinstance(schema.find_type(key), _SELECTIVE_TYPES):
                continue
            values = pc.unique(column).to_pylist() if len(column) <= _MAX_IN_VALUES else []
            if values:
                terms.append(In(term=Reference(key), values={literal(value) for value in values}))
            else:
                ends = pc.min_max(column).as_py()
                terms.append(GreaterThanOrEqual(term=Reference(key), value=literal(ends["min"])))
                terms.append(LessThanOrEqual(term=Reference(key), value=literal(ends["max"])))
        if not terms:
            return AlwaysTrue()
        return terms[0] if len(terms) == 1 else And(*terms)
