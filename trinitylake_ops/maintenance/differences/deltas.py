"""How two states of a table differ: rows, files, bytes and columns, by the summaries of its Iceberg snapshots.

No file of data is read, and no manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot as TableSnapshot

from trinitylake_ops.format.definitions import Column, Schema, TableDef
from trinitylake_ops.tables.files.totals import TableTotals, count_in, rows_removed, totals_of
from trinitylake_ops.tables.files.trimming import is_first


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
