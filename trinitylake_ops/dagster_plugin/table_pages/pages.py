"""The metadata of a table's asset: columns, totals, place, versions, partitions and first rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.head_metadata import VERSION
from trinitylake_ops.dagster_plugin.metadata import column_schema, inline_tables, link_metadata, table_value
from trinitylake_ops.dagster_plugin.table_pages.bounds import Bounds
from trinitylake_ops.dagster_plugin.table_pages.rows import files_of, partition_table, preview
from trinitylake_ops.dagster_plugin.versions.links import Links, go_back_text
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.maintenance.differences.table_history import TableHistory, TableVersion, table_history
from trinitylake_ops.operations.shown import Link
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.files.metadata import table_metadata as load_iceberg
from trinitylake_ops.tables.files.totals import totals_of
from trinitylake_ops.tables.managed import metadata_uri
from trinitylake_ops.versions.snapshot import Snapshot

#: How many versions a page lists, and among how many of the last ones they are looked for.
LISTED_VERSIONS, LOOKED_BACK = 10, 30

_COLUMNS = (
    "version", "created (UTC)", "operation", "by", "change", "rows", "rows changed", "data files", "bytes", "what to do"
)  # fmt: skip


@dataclass
class TablePages:
    """The pages of tables at one version of a lakehouse, within the bounds of a step.

    ``links`` lead to launchpads, as far as they know the code location.
    """

    lake: Lakehouse
    version: Snapshot
    links: Links
    bounds: Bounds = field(default_factory=Bounds)

    def of(self, namespace: str, table: str, *, preview_rows: int = 0) -> dict[str, Any]:
        """Return all of a table's page that the bounds allow. Raises TableNotFoundError, StorageError.

        What cannot be read is said in its place: a damaged file must not hide the rest.
        """
        definition = self.version.table(namespace, table)
        shown = table_metadata(self.lake, self.version, namespace, table, definition)
        if not self.bounds.take_page():
            return shown
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
        shown: dict[str, Any] = self._versions(history, namespace, table)
        newest = next(iter(history.versions), None)
        if newest is not None and newest.rows_changed is not None:
            shown["rows_changed"] = newest.rows_changed
        if columns := [(one.info.version, line) for one in history.versions for line in one.columns]:
            shown["columns_changed"] = table_value(("version", "column"), columns)
        if history.before is not None:
            text = f"roll back {namespace}.{table} alone to version {history.before}"
            if link := self.links.roll_back(history.before, text, f"{namespace}.{table}"):
                shown["roll_back"] = link_metadata(link)
        return shown

    def _versions(self, history: TableHistory, namespace: str, table: str) -> dict[str, Any]:
        rows = [
            (*_version_row(one), self._action(one, namespace, table, is_newest=number == 0))
            for number, one in enumerate(history.versions)
        ]
        return {**inline_tables("versions", _COLUMNS, rows), "versions_compared_down_to": str(history.looked_back_to)}

    def _action(self, one: TableVersion, namespace: str, table: str, *, is_newest: bool) -> Link | str:
        """Return a link that rolls this table back to a version that has it, and is not the one that is shown."""
        if is_newest or one.change.kind == "removed" or one.info.state != "live":
            return ""
        doubts = [] if one.undone_by is None else [f"undone by {one.undone_by}"]
        return (
            self.links.roll_back(one.info.version, go_back_text(one.info.version, doubts), f"{namespace}.{table}") or ""
        )

    def _rows(self, namespace: str, table: str, preview_rows: int) -> dict[str, Any]:
        loaded = catalog_at(self.lake, self.version.version).load_table((namespace, table))
        files = files_of(loaded)
        if isinstance(files, str):
            return {"partition_rows": f"not listed: {files}"}
        partitions = partition_table(loaded, files)
        shown: dict[str, Any] = {} if partitions is None else {"partition_rows": partitions}
        return {**shown, "preview": preview(loaded, files, preview_rows)} if preview_rows else shown


def _version_row(one: TableVersion) -> tuple[object, ...]:
    info, after = one.info, one.change.after
    changed = one.rows_changed
    return (
        info.version,
        f"{info.created_at:%Y-%m-%d %H:%M:%S}",
        info.operation or "",
        info.approved_by or info.user or "",
        one.change.kind,
        _counted(None if after is None else after.rows),
        "" if changed is None else f"{changed:+,}",
        _counted(None if after is None else after.files),
        _counted(None if after is None else after.bytes),
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
    snapshot = load_iceberg(definition, catalog_at(lake, version.version).io).current_snapshot()
    counted = totals_of(snapshot)
    totals = {"dagster/row_count": counted.rows, "bytes": counted.bytes, "data_files": counted.files}
    return {
        **shown,
        "dagster/uri": metadata_uri(definition, lake.root),
        **{name: total for name, total in totals.items() if total is not None},
        "snapshot_id": "none" if snapshot is None else str(snapshot.snapshot_id),
    }
