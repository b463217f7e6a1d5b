"""Commands that show rows of tables: head and count. Rows are untrusted, so values are escaped for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from trinitylake_ops.cli.context import (
    Session,
    WholeNumber,
    at_options,
    json_option,
    pass_session,
    print_json,
    print_line,
    print_notice,
    write_output,
)
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.rendering import visible
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import resolve_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table.metadata import TableMetadata

    from trinitylake_ops.iceberg.io.file_io import StorageFileIO

_MAX_ROWS = 10_000
#: The maximum length of a value outside of JSON, and the minimum width of a column on a terminal.
_MAX_CHARS, _MIN_WIDTH_CHARS = 1_000, 8
_GAP = "  "
_CUT = "\N{HORIZONTAL ELLIPSIS}"


@click.command(short_help="Print the first rows of a table.")
@click.argument("name", metavar="NS.TABLE")
@click.option("--limit", type=WholeNumber(1, _MAX_ROWS), default=10, show_default=True, help="At most N rows.")
@click.option("--columns", metavar="NAME,...", help="Only these columns, in this order.")
@at_options
@json_option
@pass_session
def head(
    session: Session,
    name: str,
    limit: int,
    columns: str | None,
    version: str | None,
    timestamp: datetime | int | None,
    as_json: bool,
) -> None:
    """Print rows of a table, beginning with its oldest data files. Deleted rows are left out.

    On a terminal, values and columns that do not fit are cut. Otherwise values are cut after 1,000 characters. With
    --json, values are complete and in Iceberg's JSON form.

    Example: trinitylake head sales.orders --limit 5 --columns id,amount
    """
    from trinitylake_ops.iceberg.read import first_rows  # imports Iceberg

    snapshot, (namespace, table) = _table_at(session, name, version, timestamp)
    with _reading(session, snapshot, namespace, table) as (metadata, io):
        rows = first_rows(metadata, io, limit, None if columns is None else columns.split(","))
    values = [[_to_python(value) for value in rows.column(index)] for index in range(rows.num_columns)]
    if as_json:
        lines = [
            {field.name: _json_value(column[index]) for field, column in zip(rows.schema, values, strict=True)}
            for index in range(rows.num_rows)
        ]
        print_json({"version": snapshot.version, "namespace": namespace, "table": table, "rows": lines})
        return
    is_number = [_is_number(field.type) for field in rows.schema]
    texts = [[visible(_text(value)) for value in column] for column in values]
    _print_aligned([visible(field.name) for field in rows.schema], texts, is_number)


@click.command(short_help="Count the rows of a table.")
@click.argument("name", metavar="NS.TABLE")
@at_options
@json_option
@pass_session
def count(session: Session, name: str, version: str | None, timestamp: datetime | int | None, as_json: bool) -> None:
    """Print the number of rows of a table, without deleted rows.

    The row counts come from the manifests of the table. Only data files with delete files are read.

    Example: trinitylake count sales.orders --version 12
    """
    from trinitylake_ops.iceberg.read import count_rows  # imports Iceberg

    snapshot, (namespace, table) = _table_at(session, name, version, timestamp)
    with _reading(session, snapshot, namespace, table) as (metadata, io):
        rows = count_rows(metadata, io)
    if as_json:
        print_json({"version": snapshot.version, "namespace": namespace, "table": table, "rows": rows})
    else:
        print_line(str(rows))


def _table_at(
    session: Session, name: str, version: str | None, timestamp: datetime | int | None
) -> tuple[Snapshot, tuple[str, str]]:
    snapshot = session.lake().snapshot(version, timestamp)
    return snapshot, resolve_table(name, snapshot)


@contextmanager
def _reading(
    session: Session, snapshot: Snapshot, namespace: str, table: str
) -> Iterator[tuple[TableMetadata, StorageFileIO]]:
    """Provide the metadata of a table at a version, and the FileIO for its files."""
    from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
    from trinitylake_ops.iceberg.metadata import table_metadata
    from trinitylake_ops.iceberg.read import ReadVersion, reading_at
    from trinitylake_ops.iceberg.table_change import SnapshotTarget

    definition = snapshot.table(namespace, table)
    if not definition.is_iceberg:
        raise InvalidInputError(
            f"cannot read rows of table {namespace}.{table}: its format is {definition.table_format!r}; use an engine"
            " for that format"
        )
    io = TrinityLakeCatalog.on(SnapshotTarget(snapshot, session.storage_options)).io
    with reading_at(ReadVersion.of(snapshot, io), io):
        yield table_metadata(definition, io), io.for_table(definition)


def _to_python(scalar: pa.Scalar[Any]) -> object:
    """Convert a value to Python, or to its raw number or bytes if Python has no such value (a year after 9999)."""
    try:
        return scalar.as_py()
    except (ValueError, ArithmeticError):  # an OverflowError is an ArithmeticError
        if hasattr(scalar, "value"):
            return scalar.value
        if hasattr(scalar, "as_buffer"):
            return scalar.as_buffer().to_pybytes()
        return f"a {scalar.type} that is out of range"


def _json_value(value: Any) -> Any:
    """Convert a value of a row to JSON."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case bytes():
            return value.hex()
        case date() | time():
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
        case Mapping():
            return {str(key): _json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [_json_value(item) for item in value]
    return value


def _text(value: object) -> str:
    """Format a value for display, cut after 1,000 characters."""
    match value:
        case None:
            text = "NULL"
        case str():
            text = value
        case bytes():
            text = value[:_MAX_CHARS].hex()
        case datetime():
            text = value.isoformat(sep=" ")
        case list() | Mapping():
            text = json.dumps(_json_value(value), ensure_ascii=False)
        case _:
            text = str(value)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 1]}{_CUT}"


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _print_aligned(names: Sequence[str], columns: Sequence[Sequence[str]], is_number: Sequence[bool]) -> None:
    """Print columns of escaped text, cut to the width of a terminal. In other outputs, nothing is cut."""
    from rich.cells import cell_len
    from rich.console import Console

    console = Console()
    natural_widths = [max(map(cell_len, (name, *texts))) for name, texts in zip(names, columns, strict=True)]
    widths = fitted_widths(natural_widths, console.width) if console.is_terminal else natural_widths
    for line in zip(*((name, *texts) for name, texts in zip(names, columns, strict=True)), strict=True):
        cells = [_cell(text, width, right) for text, width, right in zip(line, widths, is_number, strict=False)]
        write_output(_GAP.join(cells).rstrip())
    if len(widths) < len(names):
        print_notice(f"{len(names) - len(widths)} more columns do not fit; select some with --columns, or use --json")
    if not columns or not columns[0]:
        print_notice("No rows.")


def fitted_widths(natural_widths: Sequence[int], total: int) -> list[int]:
    """Return the widths of the first columns that fit on a line.

    Args:
        natural_widths: The content width of each column, in characters.
        total: The width of the line, in characters.
    """
    widths: list[int] = []
    for want in natural_widths:
        width = min(want, _MIN_WIDTH_CHARS)
        if widths and sum(widths) + len(_GAP) * len(widths) + width > total:
            break
        widths.append(width)
    spare = max(0, total - sum(widths) - len(_GAP) * (len(widths) - 1))
    narrow_first = sorted(range(len(widths)), key=lambda index: natural_widths[index])
    for n_done, index in enumerate(narrow_first):
        added = min(natural_widths[index] - widths[index], spare // (len(widths) - n_done))
        widths[index] += added
        spare -= added
    return [min(width, total) for width in widths]


def _cell(text: str, width: int, right: bool) -> str:
    """Pad or cut a text to an exact width on a terminal."""
    from rich.cells import cell_len, set_cell_size

    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + _CUT
    return " " * (width - size) + text if right else text + " " * (width - size)
