"""The forms of plans and reports: JSON, and tables for people. It loads nothing that a table does not need."""

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

_WIDEST_TABLE_CHARS = 100_000  # text outside a terminal is never cut or folded
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
#: The most rows of a table that a plan shows.
MOST_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people: a title, the names of its columns, and rows of values. It prints as text; rich draws it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def __rich__(self) -> RichTable:
        return _rich_table(self, self.title)

    def __str__(self) -> str:
        return table_text(self, _WIDEST_TABLE_CHARS)


class Document(ABC):
    """Base of plans and reports, which are frozen dataclasses.

    Fields declared with ``repr=False`` are not part of what is shown.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the content as values of JSON."""
        return _shown_fields(self)

    def to_json(self) -> str:
        """Return the content as one JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @abstractmethod
    def table(self) -> Table:
        """Return the content as a table for people."""

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        return str(self.table())


def jsonable(value: Any) -> Any:
    """Return a value as JSON holds it: dataclasses as objects, times as ISO 8601, enums by their lower-case names.

    Unknown fields of definitions are bytes: base64, and omitted if there are none.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return _shown_fields(value)
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


def _shown_fields(value: Any) -> dict[str, Any]:
    shown = ((spec.name, getattr(value, spec.name)) for spec in fields(value) if spec.repr)
    return {name: jsonable(content) for name, content in shown if not (name == "unknown_fields" and not content)}


# Tables for people


def table_text(table: Table, width_chars: int) -> str:
    """Return a table as text of that width, its title as a line of its own, without trailing spaces."""
    from rich.console import Console  # code that prints JSON does not need it

    title = visible(table.title)
    if title and not table.rows:
        return title
    text = io.StringIO()
    console = Console(file=text, width=width_chars, color_system=None)
    console.print(_rich_table(table, title=None))
    lines = [title] if title else []
    return "\n".join([*lines, *(line.rstrip() for line in text.getvalue().splitlines())])


def new_table(title: str, *columns: str, rows: Iterable[Sequence[object]] = ()) -> Table:
    """Return a table whose cells show their values as they are, nothing cut."""
    return Table(title, columns, tuple(map(tuple, rows)))


def _rich_table(table: Table, title: str | None) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = None if title is None else Text(visible(title))
    made = RichTable(title=shown, title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        made.add_column(Text(column), overflow="fold")
    for row in table.rows:
        made.add_row(*map(cell, row))
    return made


def cell(value: object) -> Text:
    """Return a value as one line of literal text: no markup, control characters as escapes."""
    from rich.text import Text

    if value is None:
        return Text("")
    if isinstance(value, datetime):
        return Text(value.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z")
    return Text(visible(str(value)))


def visible(text: str) -> str:
    """Return text with control and other invisible characters as escapes, so that no terminal obeys them."""
    return "".join(
        char.encode("unicode_escape").decode("ascii") if unicodedata.category(char) in _INVISIBLE else char
        for char in text
    )


def change_rows(changes: Iterable[Change]) -> list[tuple[str, str]]:
    """Return changes as rows: what happened, and to which namespace or table."""
    return [
        (change.kind, f"namespace {change.namespace}" if change.table is None else f"{change.namespace}.{change.table}")
        for change in changes
    ]
