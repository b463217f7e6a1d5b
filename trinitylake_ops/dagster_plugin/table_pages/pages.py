"""The metadata of a table's asset: columns, totals, place, versions, partitions and first rows."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.head_metadata import VERSION
from trinitylake_ops.dagster_plugin.metadata import column_schema, markdown_table
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.runs.launchpads import launchpad_path
from trinitylake_ops.dagster_plugin.table_pages.rows import files_of, partition_table, preview
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.catalog.history import TableHistory, TableVersion, table_history, table_state
from trinitylake_ops.tables.managed import metadata_uri
from trinitylake_ops.versions.snapshot import Snapshot

#: The job that plans the rollback of a table.
ROLL_BACK_JOB = "rollback_plan"
#: How many versions a page lists, and among how many of the last ones they are looked for.
LISTED_VERSIONS, LOOKED_BACK = 10, 30
#: How many tables of one step get whole pages, and for how long. Beyond, totals are shown alone.
MOST_PAGES = 20
_SECONDS = 20.0


@dataclass
class TablePages:
    """The pages of tables at one version of a lakehouse, within bounds of number and time.

    ``location`` is the code location, for links to jobs. Without it there are none.
    """

    lake: Lakehouse
    version: Snapshot
    names: LakehouseNames = ONLY
    location: str | None = None
    most: int = MOST_PAGES
    _ends_s: float = field(default_factory=lambda: time.monotonic() + _SECONDS)

    def of(self, namespace: str, table: str, *, preview_rows: int = 0) -> dict[str, Any]:
        """Return all of a table's page that the bounds allow. Raises TableNotFoundError, StorageError.

        What cannot be read is said in its place: a damaged file must not hide the rest.
        """
        definition = self.version.table(namespace, table)
        shown = table_metadata(self.lake, self.version, namespace, table, definition)
        if self.most <= 0 or time.monotonic() > self._ends_s:
            return shown
        self.most -= 1
        try:
            shown |= self._history(namespace, table)
            if definition.is_iceberg:
                shown |= self._rows(namespace, table, preview_rows)
        except TrinityLakeError as error:
            shown["not_shown"] = str(error)
        return shown

    def _history(self, namespace: str, table: str) -> dict[str, Any]:
        history = table_history(
            self.lake, namespace, table, head=self.version, most=LISTED_VERSIONS, look_back=LOOKED_BACK
        )
        shown: dict[str, Any] = {"versions": self._versions(history, namespace, table)}
        newest = next(iter(history.versions), None)
        if newest is not None and newest.row_delta is not None:
            shown["rows_changed"] = newest.row_delta
        if columns := [(one.info.version, line) for one in history.versions for line in one.columns]:
            shown["columns_changed"] = markdown_table(("version", "column"), columns)
        if newest is not None and newest.before is not None and self.location is not None:
            shown["roll_back"] = dg.MetadataValue.url(self._link(self.location, namespace, table, newest.since))
        return shown

    def _link(self, location: str, namespace: str, table: str, to: int) -> str:
        config = {"to": str(to), "tables": [f"{namespace}.{table}"]}
        return launchpad_path(location, self.names.of(ROLL_BACK_JOB), json.dumps(config))

    def _versions(self, history: TableHistory, namespace: str, table: str) -> dg.MarkdownMetadataValue:
        rows = [_version_row(one) for one in history.versions]
        shown = markdown_table(
            ("version", "created (UTC)", "operation", "by", "change", "rows", "rows changed", "data files", "bytes"),
            rows,
        ).value
        links = [
            f"[{one.info.version}]({self._link(self.location, namespace, table, one.info.version)})"
            for one in history.versions[1:]
            if self.location is not None and one.after is not None
        ]
        text = f"{shown}\n\nVersions down to {history.looked_back_to} were compared."
        if links:
            text += f" Roll this table back to version {', '.join(links)}."
        return dg.MetadataValue.md(text)

    def _rows(self, namespace: str, table: str, preview_rows: int) -> dict[str, Any]:
        loaded = catalog_at(self.lake, self.version.version).load_table((namespace, table))
        files = files_of(loaded)
        if isinstance(files, str):
            return {"partition_rows": f"not listed: {files}"}
        partitions = partition_table(loaded, files)
        shown: dict[str, Any] = {} if partitions is None else {"partition_rows": partitions}
        return {**shown, "preview": preview(loaded, files, preview_rows)} if preview_rows else shown


def _version_row(one: TableVersion) -> tuple[object, ...]:
    info, after = one.info, one.after
    delta = one.row_delta
    return (
        info.version,
        f"{info.created_at:%Y-%m-%d %H:%M:%S}",
        info.operation or "",
        info.approved_by or info.user or "",
        one.kind,
        _counted(None if after is None else after.rows),
        "" if delta is None else f"{delta:+,}",
        _counted(None if after is None else after.data_files),
        _counted(None if after is None else after.size_bytes),
    )


def _counted(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def table_metadata(
    lake: Lakehouse, version: Snapshot, namespace: str, table: str, definition: TableDef
) -> dict[str, Any]:
    """Return the entries of a table for Dagster's catalog: columns, rows, place, snapshot, and the lakehouse's version.

    Totals that the writer of its snapshot did not count is left out.
    """
    shown: dict[str, Any] = {
        "dagster/table_name": f"{namespace}.{table}",
        "dagster/column_schema": column_schema(definition),
        VERSION: version.version,
        "format": definition.table_format,
    }
    if not definition.is_iceberg:
        return shown
    state = table_state(definition, catalog_at(lake, version.version).io)
    totals = {"dagster/row_count": state.rows, "bytes": state.size_bytes, "data_files": state.data_files}
    return {
        **shown,
        "dagster/uri": metadata_uri(definition, lake.root),
        **{name: total for name, total in totals.items() if total is not None},
        "snapshot_id": "none" if state.snapshot_id is None else str(state.snapshot_id),
    }
