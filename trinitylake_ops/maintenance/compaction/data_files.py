"""The number and size of managed tables' data files, from the summaries of their Iceberg snapshots."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.nodes.keys import ObjectName
from trinitylake_ops.maintenance.reach.tables import defined, tables_of
from trinitylake_ops.storage.parallel import in_one_round, run_parallel
from trinitylake_ops.tables.files.metadata import table_metadata
from trinitylake_ops.tables.files.totals import totals_of
from trinitylake_ops.tables.files.trimming import is_trimmable
from trinitylake_ops.tables.io.file_io import StorageFileIO, reading_io
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
            in_one_round(lambda definition: _counts(definition, io)),
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
