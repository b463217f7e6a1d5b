"""The package's results as Dagster metadata: numbers plot by themselves, and tables render."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.maintenance.plans.document import Table
from trinitylake_ops.operations import shown
from trinitylake_ops.operations.shown import Json, Link, Markdown, shortened
from trinitylake_ops.tables.types import DOC
from trinitylake_ops.tables.writing.staged_table import StagedTable

#: The metadata entry of an asset that says how many of its table's first rows are shown.
PREVIEW_ROWS = "trinitylake/preview_rows"

#: The tag of columns that the table's partitions are made of.
_PARTITION_TAG = "trinitylake/partition"

#: The tag of an event of an asset that says which data it is about.
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
    """Return the metadata of tables that were published together."""
    return {
        "tables": len(staged),
        "rows_added": sum(table.added_rows for table in staged),
        "bytes_added": sum(table.added_bytes for table in staged),
        "changes": markdown_table(
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
    """Return a table's columns for Dagster's catalog.

    The description of a column is its documentation in the table, or else the one that ``described`` has. So are tags.
    """
    keys = set(definition.primary_keys)
    said = {} if described is None else {column.name: column for column in described.columns}
    parts = set(definition.distribution_keys)
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                column.name,
                column.type_name,
                description=shortened(column.properties.get(DOC, ""))
                or (said[column.name].description if column.name in said else None),
                constraints=dg.TableColumnConstraints(
                    nullable=column.nullable, unique=len(keys) == 1 and column.id in keys
                ),
                tags={
                    **(said[column.name].tags if column.name in said else {}),
                    **({_PARTITION_TAG: ""} if column.id in parts else {}),
                },
            )
            for column in definition.schema.columns
        ]
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> dg.MarkdownMetadataValue:
    """Return rows as a Markdown table, as :func:`shown.markdown_table`."""
    return dg.MetadataValue.md(shown.markdown_table(header, rows).text)


def link_metadata(link: Link) -> dg.MarkdownMetadataValue:
    """Return a link as an entry of its own. Short Markdown stands on a page as it is."""
    return dg.MetadataValue.md(link.markdown)


def figures(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the entries that Dagster can show: None as text, tables as Markdown."""
    return {name: _figure(value) for name, value in values.items()}


def _figure(value: object) -> object:
    if isinstance(value, Table):
        return markdown_table(value.columns, value.rows)
    if isinstance(value, Markdown):
        return dg.MetadataValue.md(value.text)
    if isinstance(value, Json):
        return dg.MetadataValue.json(value.value)
    return "none" if value is None else value
