"""Metadata of table assets: columns, totals, versions, partitions and a preview of rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import dagster as dg
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import FileScanTask, Table

from trinitylake_ops import Lakehouse
from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.dagster_plugin.lakehouse_metadata import VERSION
from trinitylake_ops.dagster_plugin.links import Links, rollback_link_text
from trinitylake_ops.dagster_plugin.metadata import column_schema, inline_tables, link_metadata, table_value
from trinitylake_ops.dagster_plugin.runs.staging import Note
from trinitylake_ops.dagster_plugin.table_settings import table_of
from trinitylake_ops.declarations.rendering import Link
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.metadata import table_metadata as load_iceberg
from trinitylake_ops.iceberg.totals import partition_text, totals_of
from trinitylake_ops.iceberg.write.partition_key import PartitionKey
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.operations.diff.table_history import TableHistory, TableVersion, table_history
from trinitylake_ops.versions.snapshot import Snapshot

#: Maximum number of tables per step with a full page. Further tables, and tables after the time limit, get only totals.
MAX_PAGES = 20
_SECONDS = 20.0
#: Maximum numbers, per step, of tables whose totals are read and of partitions whose rows are counted.
MAX_TABLES = 100
MAX_COUNTED_PARTITIONS = 100


@dataclass
class Bounds:
    """The remaining budget of one step for table metadata."""

    #: Number of full pages.
    pages: int = MAX_PAGES
    #: Number of tables whose totals are read.
    tables: int = MAX_TABLES
    #: Number of partitions whose rows are counted.
    partitions: int = MAX_COUNTED_PARTITIONS
    _ends_s: float = field(default_factory=lambda: time.monotonic() + _SECONDS)

    def take_page(self) -> bool:
        """Consume one full page. Return whether the budget allows it."""
        self.pages -= 1
        return self.pages >= 0 and self._has_time

    def take_table(self) -> bool:
        """Consume one table. Return whether the budget allows reading its totals."""
        self.tables -= 1
        return self.tables >= 0

    def take_partition(self) -> bool:
        """Consume one partition. Return whether the budget allows counting its rows."""
        self.partitions -= 1
        return self.partitions >= 0 and self._has_time

    @property
    def _has_time(self) -> bool:
        return time.monotonic() <= self._ends_s


#: Maximum number of data files for which a table gets partitions and a preview, because these require listing all
#: files.
MAX_DATA_FILES = 10_000
#: Maximum size of a data file that is read for a preview.
MAX_PREVIEWED_BYTES = 64 << 20
MAX_PREVIEWED_COLUMNS = 20
MAX_PREVIEWED_CHARS = 100


@dataclass
class _Partition:
    files: int = 0
    rows: int = 0
    size_bytes: int = 0
    is_exact: bool = True


def partition_row_count(table: Table, values: Mapping[str, str]) -> int | None:
    """Return the row count of a partition from its file metadata.

    Returns None if delete files, or files that also contain rows of other partitions, make the count inexact.

    Args:
        table: The table.
        values: The values of the partition columns.
    """
    rows = 0
    for task in table.scan(row_filter=PartitionKey.of(table.metadata, values).rows).plan_files():
        if task.delete_files or not isinstance(task.residual, AlwaysTrue):
            return None
        rows += task.file.record_count
    return rows


def files_of(table: Table) -> list[FileScanTask] | str:
    """Return the data files of a table, or the reason why they are not listed."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return []
    n_files = totals_of(snapshot).files
    if n_files is None:
        return "its writer did not count its data files"
    if n_files > MAX_DATA_FILES:
        return f"it has {n_files:,} data files, more than {MAX_DATA_FILES:,}"
    return list(table.scan().plan_files())


def partition_table(table: Table, files: Sequence[FileScanTask]) -> dg.MetadataValue[Any] | None:
    """Return the rows, files and bytes of each partition, or None for an unpartitioned table.

    A count with the prefix ``up to`` includes deleted rows that the data files still contain.

    Args:
        table: The table.
        files: Its data files.
    """
    specs, schema = table.specs(), table.schema()
    if not any(spec.fields for spec in specs.values()):
        return None
    partitions: dict[str, _Partition] = {}  # merges files of different specs with the same columns and values
    for task in files:
        spec = specs[task.file.spec_id]
        path = partition_text(task.file.partition, spec, schema) or "(none)"
        partition = partitions.setdefault(path, _Partition())
        partition.files += 1
        partition.rows += task.file.record_count
        partition.size_bytes += task.file.file_size_in_bytes
        partition.is_exact &= not task.delete_files
    rows = (
        (path, f"{'' if entry.is_exact else 'up to '}{entry.rows:,}", entry.files, f"{entry.size_bytes:,}")
        for path, entry in sorted(partitions.items(), reverse=True)
    )
    return table_value(("partition", "rows", "files", "bytes"), rows)


def preview(table: Table, files: Sequence[FileScanTask], n_rows: int) -> dg.MetadataValue[Any]:
    """Return the first rows of the first data file that is small enough, or the reason why there is no preview.

    Reads only the first columns, and truncates long values.

    Args:
        table: The table.
        files: Its data files.
        n_rows: The number of rows.
    """
    small = next((task for task in files if task.file.file_size_in_bytes <= MAX_PREVIEWED_BYTES), None)
    if small is None:
        return dg.MetadataValue.text(
            "the table has no rows" if not files else "the data files are too large for a preview"
        )
    columns = [column.name for column in table.schema().fields[:MAX_PREVIEWED_COLUMNS]]
    from pyiceberg.io.pyarrow import ArrowScan  # importing it loads pandas

    scan = ArrowScan(table.metadata, table.io, table.schema().select(*columns), AlwaysTrue(), limit=n_rows)
    sample: list[Sequence[object]] = []
    for batch in scan.to_record_batches([small]):
        values = [batch.column(name).to_pylist() for name in columns]
        sample += islice(zip(*values, strict=True), n_rows - len(sample))
        if len(sample) >= n_rows:
            break
    return table_value(columns, ([_short(value) for value in row] for row in sample))


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_PREVIEWED_CHARS else f"{text[:MAX_PREVIEWED_CHARS]}..."


#: Maximum number of versions on a page, and number of latest versions that are searched for them.
LISTED_VERSIONS, SEARCHED_VERSIONS = 10, 30

_COLUMNS = (
    "version", "created (UTC)", "operation", "by", "change", "rows", "rows changed", "data files", "bytes", "what to do"
)  # fmt: skip


@dataclass
class TablePages:
    """Pages of tables at one version of a lakehouse."""

    lake: Lakehouse
    version: Snapshot
    links: Links
    #: The remaining budget of the step.
    bounds: Bounds = field(default_factory=Bounds)

    def of(self, namespace: str, table: str, *, preview_rows: int = 0) -> dict[str, Any]:
        """Return the page of a table, as far as the bounds allow.

        If a file of the history or of the data is damaged, the page reports the error and contains everything else.

        Args:
            namespace: The table's namespace.
            table: The table name.
            preview_rows: The number of rows to preview.

        Raises:
            TableNotFoundError: The table does not exist.
            StorageError: A storage request failed.
        """
        definition = self.version.table(namespace, table)
        metadata = table_metadata(self.lake, self.version, namespace, table, definition)
        if not self.bounds.take_page():
            return metadata
        try:
            metadata |= self._history(namespace, table)
            if definition.is_iceberg:
                metadata |= self._rows(namespace, table, preview_rows)
        except TrinityLakeError as error:
            metadata["not_shown"] = str(error)
        return metadata

    def _history(self, namespace: str, table: str) -> dict[str, Any]:
        history = table_history(
            self.lake, namespace, table, head=self.version, most=LISTED_VERSIONS, look_back=SEARCHED_VERSIONS
        )
        metadata: dict[str, Any] = self._versions(history, namespace, table)
        newest = next(iter(history.versions), None)
        if newest is not None and newest.rows_changed is not None:
            metadata["rows_changed"] = newest.rows_changed
        if columns := [(version.info.version, line) for version in history.versions for line in version.columns]:
            metadata["columns_changed"] = table_value(("version", "column"), columns)
        if history.before is not None:
            text = f"roll back {namespace}.{table} alone to version {history.before}"
            if link := self.links.roll_back(history.before, text, f"{namespace}.{table}"):
                metadata["roll_back"] = link_metadata(link)
        return metadata

    def _versions(self, history: TableHistory, namespace: str, table: str) -> dict[str, Any]:
        rows = [
            (*_version_row(version), self._action(version, namespace, table, is_newest=number == 0))
            for number, version in enumerate(history.versions)
        ]
        return {**inline_tables("versions", _COLUMNS, rows), "versions_compared_down_to": str(history.looked_back_to)}

    def _action(self, entry: TableVersion, namespace: str, table: str, *, is_newest: bool) -> Link | str:
        """Return a link that rolls the table back to an earlier version that contains it."""
        if is_newest or entry.change.kind == "removed" or entry.info.state != "live":
            return ""
        warnings = [] if entry.undone_by is None else [f"undone by {entry.undone_by}"]
        return (
            self.links.roll_back(
                entry.info.version, rollback_link_text(entry.info.version, warnings), f"{namespace}.{table}"
            )
            or ""
        )

    def _rows(self, namespace: str, table: str, preview_rows: int) -> dict[str, Any]:
        loaded = catalog_at(self.lake, self.version.version).load_table((namespace, table))
        files = files_of(loaded)
        if isinstance(files, str):
            return {"partition_rows": f"not listed: {files}"}
        partitions = partition_table(loaded, files)
        metadata: dict[str, Any] = {} if partitions is None else {"partition_rows": partitions}
        return {**metadata, "preview": preview(loaded, files, preview_rows)} if preview_rows else metadata


def _version_row(entry: TableVersion) -> tuple[object, ...]:
    info, after = entry.info, entry.change.after
    changed = entry.rows_changed
    return (
        info.version,
        f"{info.created_at:%Y-%m-%d %H:%M:%S}",
        info.operation or "",
        info.approved_by or info.user or "",
        entry.change.kind,
        _number_text(None if after is None else after.rows),
        "" if changed is None else f"{changed:+,}",
        _number_text(None if after is None else after.files),
        _number_text(None if after is None else after.bytes),
    )


def _number_text(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def table_metadata(
    lake: Lakehouse, version: Snapshot, namespace: str, table: str, definition: TableDef
) -> dict[str, Any]:
    """Return the entries of a table for Dagster's catalog: columns, totals, location, snapshot and version.

    Omits totals that the writer of the table's snapshot did not record.

    Args:
        lake: The lakehouse.
        version: The version.
        namespace: The table's namespace.
        table: The table name.
        definition: The table definition.
    """
    metadata: dict[str, Any] = {
        "dagster/table_name": f"{namespace}.{table}",
        "dagster/column_schema": column_schema(definition),
        VERSION: version.version,
        "format": definition.table_format,
    }
    if not definition.is_iceberg:
        return metadata
    snapshot = load_iceberg(definition, catalog_at(lake, version.version).io).current_snapshot()
    totals = totals_of(snapshot)
    figures = {"dagster/row_count": totals.rows, "bytes": totals.bytes, "data_files": totals.files}
    return {
        **metadata,
        "dagster/uri": metadata_uri(definition, lake.root),
        **{name: figure for name, figure in figures.items() if figure is not None},
        "snapshot_id": "none" if snapshot is None else str(snapshot.snapshot_id),
    }


@dataclass(kw_only=True)
class PublishedPages:
    """Pages of the tables that a version published. The page of each table is built only once for all partitions."""

    lake: Lakehouse
    version: int
    links: Links
    bounds: Bounds = field(default_factory=Bounds)
    _by_table: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def __call__(self, staged: StagedTable, note: Note) -> dict[str, Any]:
        """Return the page of a published table for a partition of its asset.

        Errors are reported on the page, because the version is already published.

        Args:
            staged: The table.
            note: The note of the partition.
        """
        name = (staged.namespace, staged.table)
        metadata: dict[str, Any] = {}
        try:
            if name not in self._by_table:
                self._by_table[name] = self._pages.of(*name, preview_rows=note.preview_rows)
            metadata |= self._by_table[name]
            return metadata | self._partition(name, note)
        except TrinityLakeError as error:
            return {**metadata, "not_shown": str(error)}

    @cached_attribute
    def _pages(self) -> TablePages:
        return TablePages(self.lake, self.lake.snapshot(self.version), self.links, self.bounds)

    def _partition(self, name: tuple[str, str], note: Note) -> dict[str, Any]:
        if note.values is None or not self.bounds.take_partition():
            return {}
        rows = partition_row_count(catalog_at(self.lake, self.version).load_table(name), note.values)
        return {} if rows is None else {"dagster/partition_row_count": rows}


#: The asset kinds of each table.
KINDS = frozenset({"iceberg", "trinitylake"})


def as_tables(assets: Iterable[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """Add the attributes of tables in Dagster's catalog to assets that a TrinityLakeIOManager stores.

    These are the kinds ``iceberg`` and ``trinitylake``, the table name and the storage kind. Raises InvalidInputError
    if an asset does not name a table.
    """
    return [*dg.map_asset_specs(_as_table, assets)]


def _as_table(spec: dg.AssetSpec) -> dg.AssetSpec:
    namespace, table = table_of(spec.key, spec.metadata)
    return spec.merge_attributes(
        kinds={*KINDS}, metadata={"dagster/table_name": f"{namespace}.{table}", "dagster/storage_kind": "iceberg"}
    )
