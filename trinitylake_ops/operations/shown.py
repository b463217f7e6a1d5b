"""What operations show of their work: Markdown, JSON and links. Dagster and Airflow draw it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.maintenance.plans.document import visible

MAX_DETAIL_ROWS = 200
MAX_CELL_CHARS = 2000

# What begins or ends something in Markdown. Underscores within a word do not, nor does an ampersand before a space.
_MARKDOWN = re.compile(r"[\\|`<\[*~]|(?<![^\W_])_|_(?![^\W_])|&(?=[#\w])")


@dataclass(frozen=True, slots=True)
class Link:
    """A link to a page: its text, and the address, which is ours and holds nothing that Markdown means."""

    text: str
    url: str

    @property
    def markdown(self) -> str:
        """The link as Markdown."""
        text = _cell(self.text).replace("]", r"\]")
        return f"[{text}]({self.url})"


@dataclass(frozen=True, slots=True)
class Markdown:
    """Text to be drawn as Markdown."""

    text: str


class Picture(Markdown):
    """A drawing, which lies in the text itself."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Json:
    """A value of JSON, which a page lets copy."""

    value: Any


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Markdown:
    """Return rows as a Markdown table. It has at most MAX_DETAIL_ROWS rows and a line with the number of the others."""
    listed = [list(map(_cell, row)) for row in rows]
    lines = [list(map(_cell, header)), ["---"] * len(header), *listed[:MAX_DETAIL_ROWS]]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if len(listed) > MAX_DETAIL_ROWS:
        text += f"\n\n{len(listed) - MAX_DETAIL_ROWS} more rows"
    return Markdown(text)


def picture(svg: str) -> Picture:
    """Return a drawing as Markdown."""
    encoded = base64.b64encode(svg.encode()).decode("ascii")
    return Picture(f"![The versions of the lakehouse](data:image/svg+xml;base64,{encoded})")


def _cell(value: object) -> str:
    """Return a value as the text of a cell, on one line, all visible. Only a Link is a link, and nothing is HTML."""
    if isinstance(value, Link):
        return value.markdown
    text = visible(shortened(" ".join(str(value).splitlines())))
    return _MARKDOWN.sub(r"\\\g<0>", text)


def shortened(text: str) -> str:
    """Return the beginning of a text, with dots where it was cut."""
    return text if len(text) <= MAX_CELL_CHARS else f"{text[:MAX_CELL_CHARS]}..."
