"""What the writer of a table counted: the totals in the summaries of its Iceberg snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from pyiceberg.table.snapshots import TOTAL_DATA_FILES, TOTAL_FILE_SIZE, TOTAL_RECORDS, Snapshot

_LONGEST_NUMBER_CHARS = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTotals:
    """Rows, data files and bytes of a table as its writer counted them, None where it did not."""

    rows: int | None
    files: int | None
    bytes: int | None


NO_TOTALS = TableTotals(rows=0, files=0, bytes=0)


def totals_of(snapshot: Snapshot | None) -> TableTotals:
    """Return the totals of a table at its current snapshot. A table without a snapshot has nothing."""
    if snapshot is None:
        return NO_TOTALS
    rows, files, size = (count_in(snapshot, name) for name in (TOTAL_RECORDS, TOTAL_DATA_FILES, TOTAL_FILE_SIZE))
    return TableTotals(rows=rows, files=files, bytes=size)


def count_in(snapshot: Snapshot, name: str) -> int | None:
    """Return an entry of a summary, None where it is none or no number."""
    text = "" if snapshot.summary is None else str(snapshot.summary.get(name, ""))
    is_number = text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER_CHARS
    return int(text) if is_number else None
