"""What the assets of published tables show, beside what was staged for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trinitylake_ops import Lakehouse
from trinitylake_ops.cached_attribute import cached_attribute
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.runs.staging import Note
from trinitylake_ops.dagster_plugin.table_pages.pages import TablePages
from trinitylake_ops.dagster_plugin.table_pages.rows import partition_row_count
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.writing.staged_table import StagedTable

#: Of how many partitions of one run the rows are counted, each by a listing of its files.
MOST_COUNTED_PARTITIONS = 100


@dataclass(kw_only=True)
class PublishedPages:
    """The pages of tables that one version brought. Each is made once, also for an asset of many partitions."""

    lake: Lakehouse
    version: int
    names: LakehouseNames
    location: str | None
    _made: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    _counted: int = 0

    def __call__(self, staged: StagedTable, note: Note) -> dict[str, Any]:
        """Return the page of a published table for a partition of its asset.

        What cannot be read is said there. The version is published, whatever happens to its pages.
        """
        name = (staged.namespace, staged.table)
        shown: dict[str, Any] = {}
        try:
            if name not in self._made:
                self._made[name] = self._pages.of(*name, preview_rows=note.preview_rows)
            shown |= self._made[name]
            return shown | self._partition(name, note)
        except TrinityLakeError as error:
            return {**shown, "not_shown": str(error)}

    @cached_attribute
    def _pages(self) -> TablePages:
        return TablePages(self.lake, self.lake.snapshot(self.version), self.names, self.location)

    def _partition(self, name: tuple[str, str], note: Note) -> dict[str, Any]:
        if note.values is None or self._counted >= MOST_COUNTED_PARTITIONS:
            return {}
        self._counted += 1
        rows = partition_row_count(catalog_at(self.lake, self.version).load_table(name), note.values)
        return {} if rows is None else {"dagster/partition_row_count": rows}
