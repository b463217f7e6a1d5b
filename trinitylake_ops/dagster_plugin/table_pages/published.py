"""What the assets of published tables show, beside what was staged for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trinitylake_ops import Lakehouse
from trinitylake_ops.cached_attribute import cached_attribute
from trinitylake_ops.dagster_plugin.runs.staging import Note
from trinitylake_ops.dagster_plugin.table_pages.bounds import Bounds
from trinitylake_ops.dagster_plugin.table_pages.pages import TablePages
from trinitylake_ops.dagster_plugin.table_pages.rows import partition_row_count
from trinitylake_ops.dagster_plugin.versions.links import Links
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.writing.staged_table import StagedTable


@dataclass(kw_only=True)
class PublishedPages:
    """The pages of tables that one version brought. Each is made once, also for an asset of many partitions."""

    lake: Lakehouse
    version: int
    links: Links
    bounds: Bounds = field(default_factory=Bounds)
    _made: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

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
        return TablePages(self.lake, self.lake.snapshot(self.version), self.links, self.bounds)

    def _partition(self, name: tuple[str, str], note: Note) -> dict[str, Any]:
        if note.values is None or not self.bounds.take_partition():
            return {}
        rows = partition_row_count(catalog_at(self.lake, self.version).load_table(name), note.values)
        return {} if rows is None else {"dagster/partition_row_count": rows}
