"""The differences between versions, with rows, files and bytes of tables.

A table takes the reads of its two definitions and its two Iceberg metadata files. No file of data is read.

No file of data is read, and no manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot as TableSnapshot

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidDefinitionError,
    InvalidLocationError,
    NotFoundError,
    StoragePermissionError,
)
from trinitylake_ops.format.definitions import Column, Schema, TableDef
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.iceberg.metadata import load_table_metadata
from trinitylake_ops.iceberg.totals import NO_TOTALS, TableTotals, count_in, rows_removed, totals_of
from trinitylake_ops.iceberg.trim import is_first
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.history import Change, diff_snapshots
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDelta:
    """How one side changed a table: rows, data files and bytes that came and went, and columns.

    Numbers are those of the snapshots' summaries, None where those in between are gone. ``schema`` has a text for each
    change of a column.
    """

    rows_added: int | None = None
    rows_removed: int | None = None
    files_added: int | None = None
    files_removed: int | None = None
    bytes_added: int | None = None
    bytes_removed: int | None = None
    schema: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableState:
    """A table at one version: its definition, and its Iceberg metadata, None where there is none.

    ``is_counted`` is False for a table of another format, and for one whose metadata cannot be read.
    """

    definition: TableDef
    metadata: TableMetadata | None
    is_counted: bool = True

    @property
    def totals(self) -> TableTotals:
        """Rows, data files and bytes of the current snapshot. A table without a snapshot has none."""
        if not self.is_counted:
            return TableTotals(rows=None, files=None, bytes=None)
        return totals_of(None if self.metadata is None else self.metadata.current_snapshot())

    @property
    def counted(self) -> _Counts:
        """The totals as counts. What nobody counted is 0."""
        totals = self.totals
        return totals.rows or 0, totals.files or 0, totals.bytes or 0


_Counts = tuple[int, int, int]


def table_delta(before: TableState | None, after: TableState | None) -> TableDelta:
    """Return what came and what went from one state of a table to another, either of which may be the later one.

    None stands for no table.
    """
    added, removed = _came_and_went(before, after)
    rows, files, size = added or (None, None, None)
    rows_gone, files_gone, size_gone = removed or (None, None, None)
    return TableDelta(
        rows_added=rows,
        rows_removed=rows_gone,
        files_added=files,
        files_removed=files_gone,
        bytes_added=size,
        bytes_removed=size_gone,
        schema=()
        if before is None or after is None
        else column_changes(before.definition.schema, after.definition.schema),
    )


def _came_and_went(before: TableState | None, after: TableState | None) -> tuple[_Counts | None, _Counts | None]:
    if any(state is not None and not state.is_counted for state in (before, after)):
        return None, None
    if before is None or after is None or before.definition.id != after.definition.id:
        nothing = (0, 0, 0)
        return (nothing if after is None else after.counted), (nothing if before is None else before.counted)
    forth = _between(before.metadata, after.metadata)
    if forth is not None:
        return _sums(forth)
    back = _between(after.metadata, before.metadata)
    return (None, None) if back is None else _sums(back)[::-1]


def _sums(between: Sequence[TableSnapshot]) -> tuple[_Counts, _Counts]:
    """Return what snapshots added, and what they removed."""
    added = [_numbers(one, "added-records", "added-data-files", "added-files-size") for one in between]
    removed = [(rows_removed(one), *_numbers(one, "deleted-data-files", "removed-files-size")) for one in between]
    return _sum(added), _sum(removed)


def _between(base: TableMetadata | None, side: TableMetadata | None) -> list[TableSnapshot] | None:
    """Return the snapshots after that of ``base`` up to that of ``side``, None where some are gone."""
    end = None if base is None else base.current_snapshot_id
    found: list[TableSnapshot] = []
    number = None if side is None else side.current_snapshot_id
    seen: set[int] = set()
    while number is not None and number != end and side is not None:
        snapshot = side.snapshot_by_id(number)
        if snapshot is None or number in seen:
            return None
        seen.add(number)
        found.append(snapshot)
        number = snapshot.parent_snapshot_id
    return found if number == end and not (number is None and found and not is_first(found[-1])) else None


def _numbers(snapshot: TableSnapshot, *names: str) -> Any:
    """Return entries of a summary as numbers; what another writer left out, or wrote as no number, counts as 0."""
    return tuple(count_in(snapshot, name) or 0 for name in names)


def _sum(counts: Sequence[_Counts]) -> _Counts:
    rows, files, size = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return rows, files, size


def column_changes(before: Schema, after: Schema) -> tuple[str, ...]:
    """Return what changed between two lists of columns, one line for each change, by the ids of columns."""
    old, new = ({column.id: column for column in schema.columns} for schema in (before, after))
    lines = [f"dropped {old[at].name}" for at in old if at not in new]
    lines += [f"added {new[at].name} {new[at].type_name}" for at in new if at not in old]
    for at in [at for at in old if at in new]:
        lines += _changes_of(old[at], new[at])
    return tuple(lines)


def _changes_of(was: Column, now: Column) -> list[str]:
    found = []
    if was.name != now.name:
        found.append(f"renamed {was.name} to {now.name}")
    if was.type_name != now.type_name:
        found.append(f"{now.name} was {was.type_name}, is {now.type_name}")
    elif _parts(was) != _parts(now):
        found.append(f"{now.name} has other parts")
    if was.nullable != now.nullable:
        found.append(f"{now.name} {'may be null' if now.nullable else 'is never null'}")
    if not found and was != now:
        found.append(f"{now.name} is described otherwise")
    return found


def _parts(column: Column) -> tuple[object, ...]:
    return column.struct_fields, column.map_key, column.map_value, column.list_element


def signed(added: int | None, removed: int | None) -> str:
    """Return what came and went as people read it, a question mark where nobody knows."""
    return "?" if added is None or removed is None else f"+{added:,} -{removed:,}"


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
        in_one_round_trip(lambda change: states.changed(before, after, change)), counted, lake.storage.concurrency
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
