"""The differences between versions, with table rows, files and bytes.

For each table, the definition and Iceberg metadata file of both versions are read, but no manifests and no data.
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
    """The changes to a table: rows, data files and bytes added and removed, and column changes.

    The numbers come from snapshot summaries. They are None if snapshots in between were dropped.
    """

    rows_added: int | None = None
    rows_removed: int | None = None
    files_added: int | None = None
    files_removed: int | None = None
    bytes_added: int | None = None
    bytes_removed: int | None = None
    #: A description of each changed column.
    schema: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableState:
    """A table at one version."""

    definition: TableDef
    #: The Iceberg metadata; None if there is none.
    metadata: TableMetadata | None
    #: False for a table of another format, and for a table whose metadata cannot be read.
    is_counted: bool = True

    @property
    def totals(self) -> TableTotals:
        """Rows, data files and bytes of the current snapshot. All are zero for a table without a snapshot."""
        if not self.is_counted:
            return TableTotals(rows=None, files=None, bytes=None)
        return totals_of(None if self.metadata is None else self.metadata.current_snapshot())

    @property
    def counted(self) -> _Counts:
        """The totals as numbers, with 0 for unknown totals."""
        totals = self.totals
        return totals.rows or 0, totals.files or 0, totals.bytes or 0


_Counts = tuple[int, int, int]


def table_delta(before: TableState | None, after: TableState | None) -> TableDelta:
    """Return the additions and removals between two states of a table. Either state may be the newer one.

    Args:
        before: The first state; None if the table did not exist.
        after: The second state; None if the table does not exist.
    """
    added, removed = _added_and_removed(before, after)
    rows, files, size = added or (None, None, None)
    removed_rows, removed_files, removed_bytes = removed or (None, None, None)
    return TableDelta(
        rows_added=rows,
        rows_removed=removed_rows,
        files_added=files,
        files_removed=removed_files,
        bytes_added=size,
        bytes_removed=removed_bytes,
        schema=()
        if before is None or after is None
        else column_changes(before.definition.schema, after.definition.schema),
    )


def _added_and_removed(before: TableState | None, after: TableState | None) -> tuple[_Counts | None, _Counts | None]:
    if any(state is not None and not state.is_counted for state in (before, after)):
        return None, None
    if before is None or after is None or before.definition.id != after.definition.id:
        nothing = (0, 0, 0)
        return (nothing if after is None else after.counted), (nothing if before is None else before.counted)
    forward = _snapshots_between(before.metadata, after.metadata)
    if forward is not None:
        return _sums(forward)
    backward = _snapshots_between(after.metadata, before.metadata)
    return (None, None) if backward is None else _sums(backward)[::-1]


def _sums(between: Sequence[TableSnapshot]) -> tuple[_Counts, _Counts]:
    """Return the sums of what snapshots added and removed."""
    added = [_numbers(snapshot, "added-records", "added-data-files", "added-files-size") for snapshot in between]
    removed = [
        (rows_removed(snapshot), *_numbers(snapshot, "deleted-data-files", "removed-files-size"))
        for snapshot in between
    ]
    return _sum(added), _sum(removed)


def _snapshots_between(base: TableMetadata | None, side: TableMetadata | None) -> list[TableSnapshot] | None:
    """Return the snapshots after the snapshot of ``base`` up to that of ``side``; None if some were dropped."""
    end = None if base is None else base.current_snapshot_id
    snapshots: list[TableSnapshot] = []
    number = None if side is None else side.current_snapshot_id
    visited: set[int] = set()
    while number is not None and number != end and side is not None:
        snapshot = side.snapshot_by_id(number)
        if snapshot is None or number in visited:
            return None
        visited.add(number)
        snapshots.append(snapshot)
        number = snapshot.parent_snapshot_id
    return snapshots if number == end and not (number is None and snapshots and not is_first(snapshots[-1])) else None


def _numbers(snapshot: TableSnapshot, *names: str) -> Any:
    """Return entries of a snapshot summary as numbers. Missing and invalid entries count as 0."""
    return tuple(count_in(snapshot, name) or 0 for name in names)


def _sum(counts: Sequence[_Counts]) -> _Counts:
    rows, files, size = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return rows, files, size


def column_changes(before: Schema, after: Schema) -> tuple[str, ...]:
    """Return the changes between two schemas, one line each. Columns are matched by id.

    Args:
        before: The first schema.
        after: The second schema.
    """
    old, new = ({column.id: column for column in schema.columns} for schema in (before, after))
    lines = [f"dropped {old[column_id].name}" for column_id in old if column_id not in new]
    lines += [f"added {new[column_id].name} {new[column_id].type_name}" for column_id in new if column_id not in old]
    for column_id in [column_id for column_id in old if column_id in new]:
        lines += _changes_of(old[column_id], new[column_id])
    return tuple(lines)


def _changes_of(was: Column, now: Column) -> list[str]:
    changes = []
    if was.name != now.name:
        changes.append(f"renamed {was.name} to {now.name}")
    if was.type_name != now.type_name:
        changes.append(f"{now.name} was {was.type_name}, is {now.type_name}")
    elif _parts(was) != _parts(now):
        changes.append(f"{now.name} has other fields")
    if was.nullable != now.nullable:
        changes.append(f"{now.name} {'may be null' if now.nullable else 'is never null'}")
    if not changes and was != now:
        changes.append(f"{now.name} has another description")
    return changes


def _parts(column: Column) -> tuple[object, ...]:
    return column.struct_fields, column.map_key, column.map_value, column.list_element


def signed(added: int | None, removed: int | None) -> str:
    """Format added and removed numbers, or a question mark if they are unknown.

    Args:
        added: The number added, if known.
        removed: The number removed, if known.
    """
    return "?" if added is None or removed is None else f"+{added:,} -{removed:,}"


#: The maximum number of changed tables in a version that are counted. Other changed tables are only named.
MAX_COUNTED = 100

# Errors in table files that prevent counting the table. Verify reports these errors.
_UNREADABLE = (CorruptFileError, FileMissingError, InvalidDefinitionError, InvalidLocationError, StoragePermissionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedObject:
    """A namespace or table that differs. Numbers are None if they are unknown."""

    kind: Literal["added", "changed", "removed"]
    namespace: str
    table: str | None = None
    before: TableTotals | None = None
    after: TableTotals | None = None
    #: None for a namespace, and for a table that was not counted.
    delta: TableDelta | None = None

    @property
    def name(self) -> str:
        """The table as ``namespace.table``, or the namespace."""
        return self.namespace if self.table is None else f"{self.namespace}.{self.table}"


@dataclass(frozen=True, kw_only=True)
class VersionDiff(Document):
    """The differences from version ``before`` to version ``after``."""

    before: int
    after: int
    objects: tuple[ChangedObject, ...]
    #: The number of differing tables that were not counted, because there were too many.
    uncounted: int = 0

    @property
    def tables(self) -> tuple[ChangedObject, ...]:
        """The tables that differ."""
        return tuple(changed for changed in self.objects if changed.table is not None)

    @property
    def sums(self) -> TableDelta:
        """The total changes to all tables; a number is None if it is unknown for any table."""
        return TableDelta(
            rows_added=self._sum("rows_added"),
            rows_removed=self._sum("rows_removed"),
            files_added=self._sum("files_added"),
            files_removed=self._sum("files_removed"),
            bytes_added=self._sum("bytes_added"),
            bytes_removed=self._sum("bytes_removed"),
        )

    def _sum(self, name: str) -> int | None:
        return sum_of(None if table.delta is None else getattr(table.delta, name) for table in self.tables)

    def table(self) -> Table:
        """Return one row for each namespace and table that differs."""
        more = f"; {self.uncounted} more tables are not counted" if self.uncounted else ""
        title = f"From version {self.before} to version {self.after}: {len(self.objects)} objects differ{more}"
        columns = ("change", "object", "rows", "rows now", "files", "bytes", "columns")
        return new_table(title, *columns, rows=map(_row, self.objects))


def sum_of(numbers: Iterable[int | None]) -> int | None:
    """Return a sum, or None if an item is unknown."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _row(changed: ChangedObject) -> tuple[object, ...]:
    if changed.table is None:
        return changed.kind, f"namespace {changed.namespace}", "", "", "", "", ""
    cells = delta_texts(changed.delta)
    now = "" if changed.after is None or changed.after.rows is None else f"{changed.after.rows:,}"
    return (
        changed.kind,
        changed.name,
        cells[0],
        now,
        *cells[1:],
        "; ".join(changed.delta.schema) if changed.delta else "",
    )


def delta_texts(delta: TableDelta | None) -> tuple[str, str, str]:
    """Format the rows, files and bytes added and removed."""
    if delta is None:
        return "?", "?", "?"
    return (
        signed(delta.rows_added, delta.rows_removed),
        signed(delta.files_added, delta.files_removed),
        signed(delta.bytes_added, delta.bytes_removed),
    )


def diff_versions(lake: Lakehouse, before: Snapshot, after: Snapshot) -> VersionDiff:
    """Return the differences between two versions, with the numbers of the first MAX_COUNTED tables.

    Tables in an export at another root are not counted.

    Args:
        lake: The lakehouse.
        before: The first version.
        after: The second version.

    Raises:
        CorruptFileError: The tree of a version is damaged.
        StorageError: A storage request failed.
    """
    return count_changes(lake, before, after, diff_snapshots(before, after))


def count_changes(lake: Lakehouse, before: Snapshot, after: Snapshot, changes: Sequence[Change]) -> VersionDiff:
    """Return known differences between two versions, with the numbers of the first MAX_COUNTED tables.

    Args:
        lake: The lakehouse.
        before: The first version.
        after: The second version.
        changes: The differences.
    """
    are_here = before.files is lake.files and after.files is lake.files
    tables = [change for change in changes if change.table is not None]
    counted = tables[:MAX_COUNTED] if are_here else []
    states = TableStates(lake)
    counts = run_parallel(
        in_one_round_trip(lambda change: states.changed(before, after, change)), counted, lake.storage.concurrency
    )
    by_name = {(table.namespace, table.table): table for table in counts}
    objects = [
        by_name.get((change.namespace, change.table))
        or ChangedObject(kind=change.kind, namespace=change.namespace, table=change.table)
        for change in changes
    ]
    return VersionDiff(
        before=before.version, after=after.version, objects=tuple(objects), uncounted=len(tables) - len(counted)
    )


class TableStates:
    """Reads the states of tables of one lakehouse, as far as possible."""

    def __init__(self, lake: Lakehouse):
        self.io = reading_io(lake)

    def changed(self, before: Snapshot, after: Snapshot, change: Change) -> ChangedObject:
        """Return a changed table with its numbers.

        Args:
            before: The first version.
            after: The second version.
            change: The change of a table between them.
        """
        assert change.table is not None
        was = None if change.kind == "added" else self.of(before, change.namespace, change.table)
        now = None if change.kind == "removed" else self.of(after, change.namespace, change.table)
        return changed_table(change, was, now)

    def of(self, version: Snapshot, namespace: str, table: str) -> TableState | None:
        """Return a table of a version, or None if it does not exist or its definition cannot be read.

        Args:
            version: The version.
            namespace: The namespace.
            table: The name of the table.
        """
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
    """Return a changed table with its numbers.

    Args:
        change: The change of the table.
        was: The first state; None if the table did not exist or cannot be read.
        now: The second state; None if the table does not exist or cannot be read.
    """
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
    """Compare versions with their predecessors.

    Args:
        lake: The lakehouse.
        versions: The numbers of the versions.
        latest: The latest version.
        is_over: Returns whether the time limit was reached.

    Yields:
        Each version with its differences; None if a version expired or is damaged, or the time limit was reached.
    """
    opened: dict[int, Snapshot | None] = {latest.version: latest}
    for version in versions:
        if version == 0:
            yield version, VersionDiff(before=0, after=0, objects=())
            continue
        if is_over():
            yield version, None
            continue
        ends = [_opened(lake, number, latest, opened) for number in (version - 1, version)]
        for unneeded in [number for number in opened if number not in (version - 1, version, latest.version)]:
            del opened[unneeded]
        yield version, _diff(lake, *ends)


def _opened(lake: Lakehouse, version: int, latest: Snapshot, opened: dict[int, Snapshot | None]) -> Snapshot | None:
    """Return a version, or None if it cannot be read."""
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
