"""What operations show of their work: tables, Markdown, JSON and links. Dagster and Airflow draw it, and log it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.operations.rendering import Table, new_table, visible

MAX_DETAIL_ROWS = 200
MAX_CELL_CHARS = 2000
_MAX_LOGGED_ROWS = 100

# What begins or ends something in Markdown. Underscores within a word do not, nor does an ampersand before a space.
_MARKDOWN = re.compile(r"[\\|`<\[*~]|(?<![^\W_])_|_(?![^\W_])|&(?=[#\w])")

# What Markdown of GitHub links by itself: addresses with a scheme, with "www.", and of mail. Renderers look for them in
# text after they have removed the backslashes, but never in code.
_ADDRESS = re.compile(r"([^\s|\\`]*(?:://|www\.|@)[^\s|\\`]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Link:
    """A link to a page: its text, and the address, which is ours and holds nothing that Markdown means."""

    text: str
    url: str

    def __str__(self) -> str:
        return self.text

    @property
    def markdown(self) -> str:
        """The link as Markdown."""
        text = _escaped(_one_line(self.text)).replace("]", r"\]")
        return f"[{text}]({self.url})"


@dataclass(frozen=True, slots=True)
class Markdown:
    """Text to be drawn as Markdown."""

    text: str


class InlineChart(Markdown):
    """A drawing, which lies in the text itself."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Json:
    """A value of JSON, which a page lets copy."""

    value: Any


def listing(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return rows that an operation reports: they are logged, and shown as a table."""
    return new_table("", *header, rows=rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Markdown:
    """Return rows as a Markdown table. It has at most MAX_DETAIL_ROWS rows and a line with the number of the others."""
    listed = [list(map(_cell, row)) for row in rows]
    lines = [list(map(_cell, header)), ["---"] * len(header), *listed[:MAX_DETAIL_ROWS]]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if len(listed) > MAX_DETAIL_ROWS:
        text += f"\n\n{len(listed) - MAX_DETAIL_ROWS} more rows"
    return Markdown(text)


def inline_chart(svg: str) -> InlineChart:
    """Return a drawing as Markdown."""
    encoded = base64.b64encode(svg.encode()).decode("ascii")
    return InlineChart(f"![The versions of the lakehouse](data:image/svg+xml;base64,{encoded})")


def _cell(value: object) -> str:
    """Return a value as the text of a cell, on one line, all visible. Only a Link is a link, and nothing is HTML."""
    return value.markdown if isinstance(value, Link) else plain_markdown(value)


def plain_markdown(value: object) -> str:
    """Return a value as Markdown that shows its text, on one line, all visible."""
    parts = _ADDRESS.split(_one_line(str(value)))
    return "".join(f"`{part}`" if is_address else _escaped(part) for is_address, part in _alternating(parts))


def _alternating(parts: Sequence[str]) -> Iterator[tuple[bool, str]]:
    return ((position % 2 == 1, part) for position, part in enumerate(parts))


def _one_line(text: str) -> str:
    return visible(shortened(" ".join(text.splitlines())))


def _escaped(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", text)


def shortened(text: str) -> str:
    """Return the beginning of a text, with dots where it was cut."""
    return text if len(text) <= MAX_CELL_CHARS else f"{text[:MAX_CELL_CHARS]}..."


def log_text(values: Mapping[str, object]) -> str:
    """Return figures and tables as text for a log, which is all that a command line shows.

    Of a table it has the first rows, and the number of the others.
    """
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float) and value != ""}
    lines = [f"{name}: {visible(str(value))}" for name, value in plain.items()]
    tables = {name: value for name, value in values.items() if isinstance(value, Table) and value.rows}
    for name, table in tables.items():
        rows = [["" if cell is None else shortened(str(cell)) for cell in row] for row in table.rows[:_MAX_LOGGED_ROWS]]
        lines += [f"{name}:", str(listing(table.columns, rows))]
        if (more := len(table.rows) - len(rows)) > 0:
            lines.append(f"{more} more rows")
    return "\n".join(lines)
