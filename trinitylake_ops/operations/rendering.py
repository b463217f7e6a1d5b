"""Plans and reports as JSON and as human-readable tables. Imports only modules that tables need."""

from __future__ import annotations

import base64
import io
import json
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

    from trinitylake_ops.versions.history import Change

_WIDEST_TABLE_CHARS = 100_000  # wide enough that without a terminal nothing is truncated or wrapped
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
#: The maximum number of sample rows for a table in a plan.
MAX_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Table:
    """A human-readable table. It is printed as text, or rendered by rich."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def __rich__(self) -> RichTable:
        return _rich_table(self, self.title)

    def __str__(self) -> str:
        return table_text(self, _WIDEST_TABLE_CHARS)


class Document(ABC):
    """Base of plans and reports, which are frozen dataclasses. Fields with ``repr=False`` are not shown."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content as JSON values."""
        return _content(self)

    def to_json(self) -> str:
        """Return the content as one JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @abstractmethod
    def table(self) -> Table:
        """Return the content as a human-readable table."""

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return str(self.table())


def jsonable(value: Any) -> Any:
    """Convert a value to JSON values: dataclasses to objects, times to ISO 8601, and enums to their lower-case names.

    Unknown definition fields, which are bytes, are encoded as base64, and omitted if empty.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return _content(value)
    if isinstance(value, Enum):
        return value.name.lower() if isinstance(value, IntEnum) else value.value
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def _content(value: Any) -> dict[str, Any]:
    values = ((spec.name, getattr(value, spec.name)) for spec in fields(value) if spec.repr)
    return {name: jsonable(content) for name, content in values if not (name == "unknown_fields" and not content)}


# Human-readable tables


def table_text(table: Table, width_chars: int) -> str:
    """Return a table as text of a given width, with its title on a separate line.

    Args:
        table: The table.
        width_chars: The width, in characters.
    """
    from rich.console import Console  # not needed for JSON

    title = visible(table.title)
    if title and not table.rows:
        return title
    text = io.StringIO()
    console = Console(file=text, width=width_chars, color_system=None)
    console.print(_rich_table(table, title=None))
    lines = [title] if title else []
    return "\n".join([*lines, *(line.rstrip() for line in text.getvalue().splitlines())])


def new_table(title: str, *columns: str, rows: Iterable[Sequence[object]] = ()) -> Table:
    """Return a table whose cells show their values in full.

    Args:
        title: The title, or an empty text.
        *columns: The names of the columns.
        rows: The rows of values.
    """
    return Table(title, columns, tuple(map(tuple, rows)))


def _rich_table(table: Table, title: str | None) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    title_text = None if title is None else Text(visible(title))
    rich_table = RichTable(title=title_text, title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        rich_table.add_column(Text(column), overflow="fold")
    for row in table.rows:
        rich_table.add_row(*map(cell, row))
    return rich_table


def cell(value: object) -> Text:
    """Return a value as one line of literal text, without markup and with control characters escaped."""
    from rich.text import Text

    if value is None:
        return Text("")
    if isinstance(value, datetime):
        return Text(value.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z")
    return Text(visible(str(value)))


def visible(text: str) -> str:
    """Escape control and other invisible characters, so that they cannot control a terminal."""
    return "".join(
        char.encode("unicode_escape").decode("ascii") if unicodedata.category(char) in _INVISIBLE else char
        for char in text
    )


def change_rows(changes: Iterable[Change]) -> list[tuple[str, str]]:
    """Return changes as rows: the kind, and the namespace or table."""
    return [
        (change.kind, f"namespace {change.namespace}" if change.table is None else f"{change.namespace}.{change.table}")
        for change in changes
    ]
