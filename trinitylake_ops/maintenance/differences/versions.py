"""What differs between versions, with rows, files and bytes of tables.

A table takes the reads of its two definitions and its two Iceberg metadata files. No file of data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidDefinitionError,
    InvalidLocationError,
    NotFoundError,
    StoragePermissionError,
)
from trinitylake_ops.maintenance.differences.deltas import (
    TableDelta,
    TableState,
    signed,
    table_delta,
)
from trinitylake_ops.maintenance.plans.document import Document, Table, new_table
from trinitylake_ops.maintenance.reach.table_files import iceberg_metadata
from trinitylake_ops.storage.parallel import in_one_round, run_parallel
from trinitylake_ops.tables.files.metadata import load_table_metadata
from trinitylake_ops.tables.files.totals import NO_TOTALS, TableTotals
from trinitylake_ops.tables.io.file_io import reading_io
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.changes import Change, diff_snapshots
from trinitylake_ops.versions.snapshot import Snapshot

#: Beyond so many changed tables, the others of a version are named, and not counted.
MOST_COUNTED = 100

# A table's file with one of these has no numbers. Verify says why.
_UNREADABLE = (CorruptFileError, FileMissingError, InvalidDefinitionError, InvalidLocationError, StoragePermissionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedObject:
    """A namespace, or a table with its totals on both sides, and what came and went from the first to the second.

    Numbers are None where a writer left no counts, or metadata cannot be read. ``delta`` is None for a namespace, and
    for a table that was not looked at.
    """

    kind: Literal["added", "changed", "removed"]
    namespace: str
    table: str | None = None
    before: TableTotals | None = None
    after: TableTotals | None = None
    delta: TableDelta | None = None

    @property
    def name(self) -> str:
        """The table as ``namespace.table``, or the namespace."""
        return self.namespace if self.table is None else f"{self.namespace}.{self.table}"


@dataclass(frozen=True, kw_only=True)
class VersionDiff(Document):
    """What leads from version ``before`` to ``after``. ``uncounted`` tables were too many to be looked at."""

    before: int
    after: int
    objects: tuple[ChangedObject, ...]
    uncounted: int = 0

    @property
    def tables(self) -> tuple[ChangedObject, ...]:
        """The tables that differ."""
        return tuple(one for one in self.objects if one.table is not None)

    @property
    def sums(self) -> TableDelta:
        """What came and went in all tables together, None where a table's numbers are not known."""
        return TableDelta(
            rows_added=self._sum("rows_added"),
            rows_removed=self._sum("rows_removed"),
            files_added=self._sum("files_added"),
            files_removed=self._sum("files_removed"),
            bytes_added=self._sum("bytes_added"),
            bytes_removed=self._sum("bytes_removed"),
        )

    def _sum(self, name: str) -> int | None:
        return sum_of(None if one.delta is None else getattr(one.delta, name) for one in self.tables)

    def table(self) -> Table:
        """Return one row for each namespace and table that differs."""
        more = f"; {self.uncounted} more tables are not counted" if self.uncounted else ""
        title = f"From version {self.before} to version {self.after}: {len(self.objects)} objects differ{more}"
        columns = ("change", "object", "rows", "rows now", "files", "bytes", "columns")
        return new_table(title, *columns, rows=map(_row, self.objects))


def sum_of(numbers: Iterable[int | None]) -> int | None:
    """Return a sum, None where a part of it is not known."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _row(one: ChangedObject) -> tuple[object, ...]:
    if one.table is None:
        return one.kind, f"namespace {one.namespace}", "", "", "", "", ""
    shown = delta_texts(one.delta)
    now = "" if one.after is None or one.after.rows is None else f"{one.after.rows:,}"
    return one.kind, one.name, shown[0], now, *shown[1:], "; ".join(one.delta.schema) if one.delta else ""


def delta_texts(delta: TableDelta | None) -> tuple[str, str, str]:
    """Return rows, files and bytes that came and went as people read them."""
    if delta is None:
        return "?", "?", "?"
    return (
        signed(delta.rows_added, delta.rows_removed),
        signed(delta.files_added, delta.files_removed),
        signed(delta.bytes_added, delta.bytes_removed),
    )


def diff_versions(lake: Lakehouse, before: Snapshot, after: Snapshot) -> VersionDiff:
    """Return what differs between two versions of a lakehouse, with the numbers of its first MOST_COUNTED tables.

    The tables of an export at another root are not counted. Raises CorruptFileError, StorageError for a damaged tree.
    """
    return count_changes(lake, before, after, diff_snapshots(before, after))


def count_changes(lake: Lakehouse, before: Snapshot, after: Snapshot, changes: Sequence[Change]) -> VersionDiff:
    """Return known changes from one version to another, with the numbers of the first MOST_COUNTED tables."""
    are_here = before.files is lake.files and after.files is lake.files
    tables = [change for change in changes if change.table is not None]
    counted = tables[:MOST_COUNTED] if are_here else []
    states = TableStates(lake)
    found = run_parallel(
        in_one_round(lambda change: states.changed(before, after, change)), counted, lake.storage.concurrency
    )
    by_name = {(one.namespace, one.table): one for one in found}
    objects = [
        by_name.get((change.namespace, change.table))
        or ChangedObject(kind=change.kind, namespace=change.namespace, table=change.table)
        for change in changes
    ]
    return VersionDiff(
        before=before.version, after=after.version, objects=tuple(objects), uncounted=len(tables) - len(counted)
    )


class TableStates:
    """Reads tables of versions of one lakehouse, as far as they can be read."""

    def __init__(self, lake: Lakehouse):
        self.io = reading_io(lake)

    def changed(self, before: Snapshot, after: Snapshot, change: Change) -> ChangedObject:
        """Return a changed table with its numbers."""
        assert change.table is not None
        was = None if change.kind == "added" else self.of(before, change.namespace, change.table)
        now = None if change.kind == "removed" else self.of(after, change.namespace, change.table)
        return changed_table(change, was, now)

    def of(self, version: Snapshot, namespace: str, table: str) -> TableState | None:
        """Return a table of a version, None where its definition cannot be read or is not there."""
        try:
            definition = version.table(namespace, table)
        except (NotFoundError, *_UNREADABLE):
            return None
        if not definition.is_iceberg:
            return TableState(definition, None, is_counted=False)
        if iceberg_metadata(definition) is None:
            return TableState(definition, None)
        try:
            return TableState(definition, load_table_metadata(definition, self.io).metadata)
        except _UNREADABLE:
            return TableState(definition, None, is_counted=False)


def changed_table(change: Change, was: TableState | None, now: TableState | None) -> ChangedObject:
    """Return a changed table with its numbers. A state of None on a side that has the table cannot be read."""
    is_known = (was is not None or change.kind == "added") and (now is not None or change.kind == "removed")
    return ChangedObject(
        kind=change.kind,
        namespace=change.namespace,
        table=change.table,
        before=NO_TOTALS if change.kind == "added" else None if was is None else was.totals,
        after=NO_TOTALS if change.kind == "removed" else None if now is None else now.totals,
        delta=table_delta(was, now) if is_known else TableDelta(),
    )


def diffs_of(
    lake: Lakehouse, versions: Sequence[int], latest: Snapshot, *, is_over: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, VersionDiff | None]]:
    """Yield each of some versions with what it changed of the version before it.

    None stands for a version where that cannot be told: one of both expired or is damaged, or the time is over.
    """
    opened: dict[int, Snapshot | None] = {latest.version: latest}
    for version in versions:
        if version == 0:
            yield version, VersionDiff(before=0, after=0, objects=())
            continue
        if is_over():
            yield version, None
            continue
        ends = [_opened(lake, one, latest, opened) for one in (version - 1, version)]
        for known in [one for one in opened if one not in (version - 1, version, latest.version)]:
            del opened[known]
        yield version, _diff(lake, *ends)


def _opened(lake: Lakehouse, version: int, latest: Snapshot, opened: dict[int, Snapshot | None]) -> Snapshot | None:
    """Return a version, None where it cannot be read."""
    if version not in opened:
        try:
            opened[version] = lake.snapshot(version, latest=latest)
        except (NotFoundError, CorruptFileError):
            opened[version] = None
    return opened[version]


def _diff(lake: Lakehouse, before: Snapshot | None, after: Snapshot | None) -> VersionDiff | None:
    if before is None or after is None:
        return None
    try:
        return diff_versions(lake, before, after)
    except (FileMissingError, CorruptFileError):
        return None
