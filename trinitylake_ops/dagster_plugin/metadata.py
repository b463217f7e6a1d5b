"""Conversion of results to Dagster metadata, in which numbers are plotted and tables are rendered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from trinitylake_ops.declarations import rendering
from trinitylake_ops.declarations.rendering import Json, Link, Markdown, shortened
from trinitylake_ops.operations.rendering import Table, visible

if TYPE_CHECKING:
    from trinitylake_ops.format.definitions import TableDef
    from trinitylake_ops.iceberg.write.staged_table import StagedTable

#: Asset metadata key for the number of rows to preview from the asset's table.
PREVIEW_ROWS = "trinitylake/preview_rows"

#: Maximum length of Markdown that the UI renders inline. Longer Markdown, and all Markdown in runs, is opened with a
#: click.
INLINE_MARKDOWN_CHARS = 1_000

#: Maximum number of table rows shown inline.
MAX_INLINE_ROWS = 50

#: Tag of partition columns.
_PARTITION_TAG = "trinitylake/partition"

#: Tag of an asset event that contains the data version.
DATA_VERSION_TAG = "dagster/data_version"


def staged_table_metadata(staged: StagedTable) -> dict[str, Any]:
    """Return the metadata of one staged table."""
    return {
        "dagster/table_name": f"{staged.namespace}.{staged.table}",
        "dagster/row_count": staged.row_count,
        "dagster/column_schema": column_schema(staged.table_def),
        "rows_added": staged.added_rows,
        "bytes_added": staged.added_bytes,
        "files_added": staged.added_files,
        "rows_removed": staged.removed_rows,
        "files_removed": staged.removed_files,
        "partitions": ", ".join(staged.partitions) or "none",
        "metadata_location": staged.metadata_location,
        "base_version": staged.base_version,
    }


def staged_tables_metadata(staged: Sequence[StagedTable]) -> dict[str, Any]:
    """Return the combined metadata of tables that were published together."""
    return {
        "tables": len(staged),
        "rows_added": sum(table.added_rows for table in staged),
        "bytes_added": sum(table.added_bytes for table in staged),
        "changes": table_value(
            ("table", "rows", "rows added", "rows removed", "files added", "bytes added", "partitions"),
            (
                (
                    f"{table.namespace}.{table.table}",
                    f"{table.row_count:,}",
                    f"{table.added_rows:,}",
                    f"{table.removed_rows:,}",
                    table.added_files,
                    f"{table.added_bytes:,}",
                    ", ".join(table.partitions),
                )
                for table in staged
            ),
        ),
    }


def column_schema(definition: TableDef, described: dg.TableSchema | None = None) -> dg.TableSchema:
    """Return the columns of a table as a schema for Dagster's catalog.

    Args:
        definition: The table.
        described: A schema with further descriptions and tags. The table's own column documentation takes precedence.
    """
    keys = set(definition.primary_keys)
    columns_by_name = {} if described is None else {column.name: column for column in described.columns}
    from trinitylake_ops.iceberg.types import DOC  # imported here because it loads pyiceberg

    parts = set(definition.distribution_keys)
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                column.name,
                column.type_name,
                description=shortened(column.properties.get(DOC, ""))
                or (columns_by_name[column.name].description if column.name in columns_by_name else None),
                constraints=dg.TableColumnConstraints(
                    nullable=column.nullable, unique=len(keys) == 1 and column.id in keys
                ),
                tags={
                    **(columns_by_name[column.name].tags if column.name in columns_by_name else {}),
                    **({_PARTITION_TAG: ""} if column.id in parts else {}),
                },
            )
            for column in definition.schema.columns
        ]
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> dg.MarkdownMetadataValue:
    """Return rows as a Markdown table (:func:`rendering.markdown_table`). Cells may be links."""
    return dg.MetadataValue.md(rendering.markdown_table(header, rows).text)


def table_value(header: Sequence[str], rows: Iterable[Sequence[object]]) -> dg.MetadataValue[Any]:
    """Return rows without links as a table that the UI always renders inline.

    Args:
        header: The distinct names of the columns.
        rows: The rows. Only the first MAX_INLINE_ROWS and the number of further rows are included.
    """
    listed = [*rows]
    cells = [[visible(shortened("" if cell is None else str(cell))) for cell in row] for row in listed]
    if (more := len(cells) - MAX_INLINE_ROWS) > 0:
        cells = [*cells[:MAX_INLINE_ROWS], [f"{more:,} more rows", *[""] * (len(header) - 1)]]
    records = [dg.TableRecord(dict(zip(header, row, strict=True))) for row in cells]
    return dg.MetadataValue.table(records, dg.TableSchema([dg.TableColumn(name) for name in header]))


def inline_tables(
    name: str, header: Sequence[str], rows: Iterable[Sequence[object]]
) -> dict[str, dg.MarkdownMetadataValue]:
    """Split rows with links into Markdown tables that are short enough to be rendered inline on the page of an asset.

    Args:
        name: The name of the first entry. The names of further entries end with a number.
        header: The names of the columns.
        rows: The rows. A single row that is too long is opened with a click.
    """
    parts: list[list[Sequence[object]]] = [[]]
    for row in rows:
        if parts[-1] and len(rendering.markdown_table(header, [*parts[-1], row]).text) >= INLINE_MARKDOWN_CHARS:
            parts.append([])
        parts[-1].append(row)
    return {
        part: markdown_table(header, listed)
        for part, listed in zip(_numbered_names(name, len(parts)), parts, strict=True)
    }


def inline_lists(name: str, items: Iterable[str]) -> dict[str, dg.MarkdownMetadataValue]:
    """Split items into Markdown lists that are short enough to be rendered inline on the page of an asset.

    Args:
        name: The name of the first entry. The names of further entries end with a number.
        items: The items, each as one line of Markdown.
    """
    parts = [""]
    for item in items:
        line = f"- {item}\n"
        if parts[-1] and len(parts[-1] + line) >= INLINE_MARKDOWN_CHARS:
            parts.append("")
        parts[-1] += line
    return {
        part: dg.MetadataValue.md(text) for part, text in zip(_numbered_names(name, len(parts)), parts, strict=True)
    }


def _numbered_names(name: str, n_parts: int) -> list[str]:
    """Return the names of consecutive entries."""
    return [name, *(f"{name}_{number}" for number in range(2, n_parts + 1))]


def link_metadata(link: Link) -> dg.MarkdownMetadataValue:
    """Return a link as a separate metadata entry. Short Markdown is rendered inline."""
    return dg.MetadataValue.md(link.markdown)


def metadata_entries(values: Mapping[str, object]) -> dict[str, Any]:
    """Convert values to metadata entries that Dagster can display.

    None is converted to text. A table with links, or with many rows, gets an additional Markdown entry that opens on
    click.
    """
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Table):
            entries |= _table_entries(name, value)
        else:
            entries[name] = _metadata_entry(value)
    return entries


def _table_entries(name: str, table: Table) -> dict[str, Any]:
    has_links = any(isinstance(cell, Link) for row in table.rows for cell in row)
    entries: dict[str, Any] = {name: table_value(table.columns, table.rows)}
    if has_links:
        entries[f"{name}_with_links"] = markdown_table(table.columns, table.rows)
    elif len(table.rows) > MAX_INLINE_ROWS:
        entries[f"all_{name}"] = markdown_table(table.columns, table.rows)
    return entries


def _metadata_entry(value: object) -> object:
    if isinstance(value, Link):  # the only kind of link that the page of a run renders inline
        return dg.MetadataValue.url(value.url)
    if isinstance(value, Markdown):
        return dg.MetadataValue.md(value.text)
    if isinstance(value, Json):
        return dg.MetadataValue.json(value.value)
    return "none" if value is None else value
