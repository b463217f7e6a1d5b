"""The package's results as Dagster metadata: numbers plot by themselves, and tables render."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.maintenance.differences.deltas import type_name
from trinitylake_ops.maintenance.plans.document import Table, new_table, visible
from trinitylake_ops.tables.types import DOC
from trinitylake_ops.tables.writing.staged_table import StagedTable

MAX_DETAIL_ROWS = 200
MAX_CELL_CHARS = 2000
_MAX_LOGGED_ROWS = 100

# What begins or ends something in Markdown. Underscores within a word do not, nor does an ampersand before a space.
_MARKDOWN = re.compile(r"[\\|`<\[*~]|(?<![^\W_])_|_(?![^\W_])|&(?=[#\w])")

#: The metadata entry of an asset that says how many of its table's first rows are shown.
PREVIEW_ROWS = "trinitylake/preview_rows"

#: The tag of columns that the table's partitions are made of.
_PARTITION_TAG = "trinitylake/partition"

#: The tag of an event of an asset that says which data it is about.
DATA_VERSION_TAG = "dagster/data_version"


@dataclass(frozen=True, slots=True)
class Link:
    """A link to a page of Dagster: its text, and the address, which is ours and holds nothing that Markdown means."""

    text: str
    url: str

    def __str__(self) -> str:
        return self.text

    @property
    def markdown(self) -> str:
        """The link as Markdown."""
        text = _cell(self.text).replace("]", r"\]")
        return f"[{text}]({self.url})"

    def metadata(self) -> dg.MarkdownMetadataValue:
        """Return the link as an entry of its own. Short Markdown stands on a page as it is."""
        return dg.MetadataValue.md(self.markdown)


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
                type_name(column),
                description=_shortened(column.properties.get(DOC, ""))
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


def listing(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return rows that an operation reports: they are logged, and shown as a table."""
    return new_table("", *header, rows=rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> dg.MarkdownMetadataValue:
    """Return rows as a Markdown table. It has at most MAX_DETAIL_ROWS rows and a line with the number of the others."""
    listed = [list(map(_cell, row)) for row in rows]
    lines = [list(map(_cell, header)), ["---"] * len(header), *listed[:MAX_DETAIL_ROWS]]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if len(listed) > MAX_DETAIL_ROWS:
        text += f"\n\n{len(listed) - MAX_DETAIL_ROWS} more rows"
    return dg.MetadataValue.md(text)


def picture(svg: str) -> dg.MarkdownMetadataValue:
    """Return a drawing as Markdown. The drawing lies in the metadata itself."""
    encoded = base64.b64encode(svg.encode()).decode("ascii")
    return dg.MetadataValue.md(f"![The versions of the lakehouse](data:image/svg+xml;base64,{encoded})")


def _cell(value: object) -> str:
    """Return a value as the text of a cell, on one line, all visible. Only a Link is a link, and nothing is HTML."""
    if isinstance(value, Link):
        return value.markdown
    text = visible(_shortened(" ".join(str(value).splitlines())))
    return _MARKDOWN.sub(r"\\\g<0>", text)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARS else f"{text[:MAX_CELL_CHARS]}..."


def figures(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the entries that Dagster can show: None as text, tables as Markdown."""
    return {name: _shown(value) for name, value in values.items()}


def _shown(value: object) -> object:
    if isinstance(value, Table):
        return markdown_table(value.columns, value.rows)
    return "none" if value is None else value


def log_text(values: Mapping[str, object]) -> str:
    """Return figures and tables as text for a log, which is all that a command line shows.

    Of a table it has the first rows, and the number of the others.
    """
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float) and value != ""}
    lines = [f"{name}: {visible(str(value))}" for name, value in plain.items()]
    tables = {name: value for name, value in values.items() if isinstance(value, Table) and value.rows}
    for name, table in tables.items():
        rows = [
            ["" if cell is None else _shortened(str(cell)) for cell in row] for row in table.rows[:_MAX_LOGGED_ROWS]
        ]
        lines += [f"{name}:", str(listing(table.columns, rows))]
        if (more := len(table.rows) - len(rows)) > 0:
            lines.append(f"{more} more rows")
    return "\n".join(lines)
