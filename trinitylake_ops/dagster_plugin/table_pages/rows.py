"""Rows of a table's partitions, and its first rows, within bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import dagster as dg
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import FileScanTask, Table

from trinitylake_ops.dagster_plugin.metadata import table_value
from trinitylake_ops.tables.files.changed_files import partition_text
from trinitylake_ops.tables.files.totals import totals_of
from trinitylake_ops.tables.writing.partition_key import PartitionKey

#: Of a table with more data files neither partitions nor rows are shown, as each file has to be listed for it.
MOST_DATA_FILES = 10_000
#: A larger file is not read for its first rows.
MOST_PREVIEWED_BYTES = 64 << 20
MOST_PREVIEWED_COLUMNS = 20
MOST_PREVIEWED_CHARS = 100


@dataclass
class _Partition:
    files: int = 0
    rows: int = 0
    size_bytes: int = 0
    is_exact: bool = True


def partition_row_count(table: Table, values: Mapping[str, str]) -> int | None:
    """Return the rows of one partition, by the counts of its files. None if deletes or other files make it unclear."""
    rows = 0
    for task in table.scan(row_filter=PartitionKey.of(table.metadata, values).rows).plan_files():
        if task.delete_files or not isinstance(task.residual, AlwaysTrue):
            return None
        rows += task.file.record_count
    return rows


def files_of(table: Table) -> list[FileScanTask] | str:
    """Return the files of a table, or in words why they are not listed."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return []
    n_files = totals_of(snapshot).files
    if n_files is None:
        return "its writer did not count its data files"
    if n_files > MOST_DATA_FILES:
        return f"it has {n_files:,} data files, more than {MOST_DATA_FILES:,}"
    return list(table.scan().plan_files())


def partition_table(table: Table, files: Sequence[FileScanTask]) -> dg.MetadataValue[Any] | None:
    """Return rows, files and bytes of each partition. None for a table that has none.

    Rows with ``up to`` are those of the files: deleted ones are still in them.
    """
    specs, schema = table.specs(), table.schema()
    if not any(spec.fields for spec in specs.values()):
        return None
    found: dict[str, _Partition] = {}  # files of all specs with the same columns and values are in one row
    for task in files:
        spec = specs[task.file.spec_id]
        path = partition_text(task.file.partition, spec, schema) or "(none)"
        partition = found.setdefault(path, _Partition())
        partition.files += 1
        partition.rows += task.file.record_count
        partition.size_bytes += task.file.file_size_in_bytes
        partition.is_exact &= not task.delete_files
    rows = (
        (path, f"{'' if one.is_exact else 'up to '}{one.rows:,}", one.files, f"{one.size_bytes:,}")
        for path, one in sorted(found.items(), reverse=True)
    )
    return table_value(("partition", "rows", "files", "bytes"), rows)


def preview(table: Table, files: Sequence[FileScanTask], n_rows: int) -> dg.MetadataValue[Any]:
    """Return the first rows of the first data file that is small enough, or in words why there are none.

    Only the first columns are read, and long values are cut off.
    """
    small = next((task for task in files if task.file.file_size_in_bytes <= MOST_PREVIEWED_BYTES), None)
    if small is None:
        return dg.MetadataValue.text("it has no rows" if not files else "its data files are too large to read for it")
    columns = [column.name for column in table.schema().fields[:MOST_PREVIEWED_COLUMNS]]
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

    scan = ArrowScan(table.metadata, table.io, table.schema().select(*columns), AlwaysTrue(), limit=n_rows)
    shown: list[Sequence[object]] = []
    for batch in scan.to_record_batches([small]):
        values = [batch.column(name).to_pylist() for name in columns]
        shown += islice(zip(*values, strict=True), n_rows - len(shown))
        if len(shown) >= n_rows:
            break
    return table_value(columns, ([_short(value) for value in row] for row in shown))


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MOST_PREVIEWED_CHARS else f"{text[:MOST_PREVIEWED_CHARS]}..."
