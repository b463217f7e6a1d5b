"""Data file counts, and the report of a table compaction."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.metadata import table_metadata
from trinitylake_ops.iceberg.totals import totals_of
from trinitylake_ops.iceberg.trim import is_trimmable
from trinitylake_ops.iceberg.write.publication import Publication
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.operations.base import Cost
from trinitylake_ops.operations.gc.tables import tables_of, with_definitions
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFileCounts:
    """The files of a table's current Iceberg snapshot, as counted by the writer of the snapshot."""

    namespace: str
    table: str
    data_files: int
    #: Includes delete files.
    bytes: int

    @property
    def name(self) -> str:
        """The table as ``namespace.table``."""
        return f"{self.namespace}.{self.table}"

    @property
    def mean_bytes(self) -> float:
        """The average data file size; 0 if there are no data files."""
        return self.bytes / self.data_files if self.data_files else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFileSurvey:
    """The data files of the managed Iceberg tables of a version. Tables are named as ``namespace.table``."""

    tables: tuple[TableFileCounts, ...]
    #: Tables whose writer recorded no counts.
    uncounted: tuple[str, ...]
    #: Tables whose metadata file is missing or corrupt.
    unreadable: tuple[str, ...]
    #: The number of tables that were not read within the time limit.
    not_checked: int


def survey_data_files(lake: Lakehouse, version: Snapshot, max_seconds: float) -> DataFileSurvey:
    """Read the metadata file of each managed Iceberg table of a version until the time limit is reached.

    Args:
        lake: The lakehouse.
        version: The version.
        max_seconds: The time limit, checked after each batch of tables.

    Raises:
        StorageError: A storage request failed.
    """
    end_s = time.monotonic() + max_seconds
    io = reading_io(lake)
    counted_tables: list[TableFileCounts] = []
    uncounted: list[str] = []
    unreadable: list[str] = []
    tables = tables_of(version)
    n_seen = 0
    for batch in with_definitions(version, tables):
        n_seen += len(batch)
        managed = [(name, definition) for name, _, definition in batch if is_trimmable(definition, io)]
        counts = run_parallel(
            in_one_round_trip(lambda definition: _counts(definition, io)),
            [definition for _, definition in managed],
            lake.storage.concurrency,
        )
        for (name, _), counted in zip(managed, counts, strict=True):
            if isinstance(counted, tuple):
                counted_tables.append(_table_files(name, *counted))
            else:
                (uncounted if counted is None else unreadable).append(str(name))
        if time.monotonic() > end_s:
            break
    return DataFileSurvey(
        tables=tuple(counted_tables),
        uncounted=tuple(uncounted),
        unreadable=tuple(unreadable),
        not_checked=len(tables) - n_seen,
    )


def _table_files(name: ObjectName, data_files: int, n_bytes: int) -> TableFileCounts:
    return TableFileCounts(namespace=name.namespace, table=name.table or "", data_files=data_files, bytes=n_bytes)


def _counts(definition: TableDef, io: StorageFileIO) -> tuple[int, int] | Exception | None:
    """Return the data file count and bytes, None if the writer recorded none, or the error of unreadable metadata."""
    try:
        snapshot = table_metadata(definition, io).current_snapshot()
    except (FileMissingError, CorruptFileError) as error:
        return error
    totals = totals_of(snapshot)
    return None if totals.files is None or totals.bytes is None else (totals.files, totals.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactedTable:
    """The compaction of one table."""

    table: str
    files_before: int
    files_after: int
    rows: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True)
class CompactTablesReport(Document):
    """The result of a table compaction."""

    #: The version with the compacted tables; the latest version if there was nothing to do.
    version: int
    #: Whether an earlier attempt in the same run committed the version.
    was_done: bool
    tables: tuple[CompactedTable, ...]
    #: Skipped tables, with the reason: a concurrent commit changed them, or their files are damaged.
    left: Mapping[str, str]
    attempts: int
    #: The cost in this process, without the cost of other processes that wrote data files.
    cost: Cost

    def table(self) -> Table:
        """Return one row for each table."""
        rows: list[tuple[object, ...]] = [
            (table.table, f"{table.files_before:,}", f"{table.files_after:,}", f"{table.bytes_after:,}", "")
            for table in self.tables
        ]
        rows += [(name, "", "", "", reason) for name, reason in self.left.items()]
        done = f"committed as version {self.version}" if self.tables else f"nothing to do, version {self.version}"
        if self.was_done:
            done = f"this run already committed version {self.version}"
        title = (
            f"Compaction of tables, {done}: {sum(table.files_before for table in self.tables):,} files became"
            f" {sum(table.files_after for table in self.tables):,}; {self.cost.duration_ms / 1000:.1f} s"
        )
        return new_table(title, "table", "files", "became", "bytes", "skipped because", rows=rows)


def report_of(
    publication: Publication,
    staged: Mapping[str, StagedTable],
    left: Mapping[str, str],
    attempts: int,
    cost: Cost,
) -> CompactTablesReport:
    """Build the report of a publication.

    Args:
        publication: The publication.
        staged: The compacted tables, by name.
        left: The skipped tables, with the reason.
        attempts: The number of attempts to commit.
        cost: The cost of the operation.
    """
    return CompactTablesReport(
        version=publication.version,
        was_done=publication.was_published,
        tables=tuple(
            CompactedTable(
                table=name,
                files_before=table.removed_files,
                files_after=table.added_files,
                rows=table.added_rows,
                bytes_before=table.removed_bytes,
                bytes_after=table.added_bytes,
            )
            for name, table in staged.items()
        ),
        left=dict(left),
        attempts=attempts,
        cost=cost,
    )
