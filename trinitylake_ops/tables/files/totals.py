"""What the writer of a table counted: the totals in the summaries of its Iceberg snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from pyiceberg.table.snapshots import (
    ADDED_POSITION_DELETES,
    DELETED_RECORDS,
    REMOVED_POSITION_DELETES,
    TOTAL_DATA_FILES,
    TOTAL_EQUALITY_DELETES,
    TOTAL_FILE_SIZE,
    TOTAL_POSITION_DELETES,
    TOTAL_RECORDS,
    Snapshot,
)

_LONGEST_NUMBER_CHARS = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTotals:
    """Rows, data files and bytes of a table as its writer counted them, None where it did not.

    Rows that delete files delete by their positions do not count. Nobody counts those that are deleted by equality.
    """

    rows: int | None
    files: int | None
    bytes: int | None


NO_TOTALS = TableTotals(rows=0, files=0, bytes=0)


def totals_of(snapshot: Snapshot | None) -> TableTotals:
    """Return the totals of a table at its current snapshot. A table without a snapshot has nothing."""
    if snapshot is None:
        return NO_TOTALS
    rows, files, size = (count_in(snapshot, name) for name in (TOTAL_RECORDS, TOTAL_DATA_FILES, TOTAL_FILE_SIZE))
    if rows is not None:
        rows = max(0, rows - (count_in(snapshot, TOTAL_POSITION_DELETES) or 0))
    if count_in(snapshot, TOTAL_EQUALITY_DELETES):
        rows = None
    return TableTotals(rows=rows, files=files, bytes=size)


def rows_removed(snapshot: Snapshot) -> int:
    """Return how many rows a snapshot removed, with those of new position deletes, as far as its writer counted them.

    Rows that were deleted before, and go with their files now, do not count once more.
    """
    gone, added, applied = (
        count_in(snapshot, name) or 0 for name in (DELETED_RECORDS, ADDED_POSITION_DELETES, REMOVED_POSITION_DELETES)
    )
    return max(0, gone + added - applied)


def count_in(snapshot: Snapshot, name: str) -> int | None:
    """Return an entry of a summary, None where it is none or no number."""
    text = "" if snapshot.summary is None else str(snapshot.summary.get(name, ""))
    is_number = text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER_CHARS
    return int(text) if is_number else None
