"""Numbers and sizes of data files, and the result of a compaction."""

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
from trinitylake_ops.operations.gc.tables import defined, tables_of
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFileCounts:
    """The files of a table's current Iceberg snapshot, as its writer counted them. ``bytes`` has delete files, too."""

    namespace: str
    table: str
    data_files: int
    bytes: int

    @property
    def name(self) -> str:
        """The table as ``namespace.table``."""
        return f"{self.namespace}.{self.table}"

    @property
    def mean_bytes(self) -> float:
        """Bytes of a data file on average, 0 where there is none."""
        return self.bytes / self.data_files if self.data_files else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFileSurvey:
    """The files of the managed Iceberg tables of a version.

    ``uncounted`` are tables whose writer left no counts. ``unreadable`` are those whose metadata file is missing or
    corrupt. Each is given as ``namespace.table``. ``not_looked_at`` is the number of tables for which the time did not
    suffice.
    """

    tables: tuple[TableFileCounts, ...]
    uncounted: tuple[str, ...]
    unreadable: tuple[str, ...]
    not_looked_at: int


def survey_data_files(lake: Lakehouse, version: Snapshot, max_seconds: float) -> DataFileSurvey:
    """Read the metadata file of each managed Iceberg table of a version, until the time is over.

    A table without a snapshot has no files. Raises StorageError.
    """
    end_s = time.monotonic() + max_seconds
    io = reading_io(lake)
    found: list[TableFileCounts] = []
    uncounted: list[str] = []
    unreadable: list[str] = []
    tables = tables_of(version)
    n_seen = 0
    for batch in defined(version, tables):
        n_seen += len(batch)
        ours = [(name, definition) for name, _, definition in batch if is_trimmable(definition, io)]
        counts = run_parallel(
            in_one_round_trip(lambda definition: _counts(definition, io)),
            [definition for _, definition in ours],
            lake.storage.concurrency,
        )
        for (name, _), counted in zip(ours, counts, strict=True):
            if isinstance(counted, tuple):
                found.append(_table_files(name, *counted))
            else:
                (uncounted if counted is None else unreadable).append(str(name))
        if time.monotonic() > end_s:
            break
    return DataFileSurvey(
        tables=tuple(found),
        uncounted=tuple(uncounted),
        unreadable=tuple(unreadable),
        not_looked_at=len(tables) - n_seen,
    )


def _table_files(name: ObjectName, data_files: int, n_bytes: int) -> TableFileCounts:
    return TableFileCounts(namespace=name.namespace, table=name.table or "", data_files=data_files, bytes=n_bytes)


def _counts(definition: TableDef, io: StorageFileIO) -> tuple[int, int] | Exception | None:
    """Return data files and bytes, None if the writer did not count, or the error if the metadata cannot be read."""
    try:
        snapshot = table_metadata(definition, io).current_snapshot()
    except (FileMissingError, CorruptFileError) as error:
        return error
    totals = totals_of(snapshot)
    return None if totals.files is None or totals.bytes is None else (totals.files, totals.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactedTable:
    """The result for one table."""

    table: str
    files_before: int
    files_after: int
    rows: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True)
class CompactTablesReport(Document):
    """The compacted tables.

    ``version`` holds the compacted tables. If there was nothing to do, it is the latest version at that time. With
    ``was_done`` an earlier start of the same run committed it. ``left`` names tables of the plan that others changed
    meanwhile or whose files are damaged, and how. ``cost`` is that of this process, without writing in others.
    """

    version: int
    was_done: bool
    tables: tuple[CompactedTable, ...]
    left: Mapping[str, str]
    attempts: int
    cost: Cost

    def table(self) -> Table:
        """Return one row for each table."""
        rows: list[tuple[object, ...]] = [
            (one.table, f"{one.files_before:,}", f"{one.files_after:,}", f"{one.bytes_after:,}", "")
            for one in self.tables
        ]
        rows += [(name, "", "", "", reason) for name, reason in self.left.items()]
        done = f"committed as version {self.version}" if self.tables else f"nothing to do, version {self.version}"
        if self.was_done:
            done = f"this run had committed version {self.version} before"
        title = (
            f"Compaction of tables, {done}: {sum(one.files_before for one in self.tables):,} files became"
            f" {sum(one.files_after for one in self.tables):,}; {self.cost.duration_ms / 1000:.1f} s"
        )
        return new_table(title, "table", "files", "became", "bytes", "left as it is", rows=rows)


def report_of(
    publication: Publication,
    staged: Mapping[str, StagedTable],
    left: Mapping[str, str],
    attempts: int,
    cost: Cost,
) -> CompactTablesReport:
    """Return the report of what was published."""
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
