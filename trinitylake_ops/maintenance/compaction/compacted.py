"""The result of a compaction of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.maintenance.plans.cost import Cost
from trinitylake_ops.maintenance.plans.document import Document, Table, new_table
from trinitylake_ops.tables.writing.publication import Publication
from trinitylake_ops.tables.writing.staged_table import StagedTable


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
