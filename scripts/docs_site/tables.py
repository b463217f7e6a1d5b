"""Format tables and text for generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def cell(text: object) -> str:
    """Return text for a table cell: on one line, with bars escaped except in code."""
    line = re.sub(r"\s+", " ", str(text)).strip()
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in re.split("(`[^`]*`)", line))


def code(text: object) -> str:
    """Return text formatted as code, or an empty string if the text is empty."""
    return f"`{text}`" if str(text) else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table, followed by an empty line.

    Args:
        heads: The column titles.
        rows: Rows of Markdown cells.
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines) + "\n"


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown: Sphinx roles become code, and sections such as ``Raises:`` are omitted."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda match: f"`{match[1].rpartition('.')[2]}`", docstring or "")
    text = re.split(r"\n+(?:Args|Raises|Returns|Yields):\n", text)[0]
    return re.sub(r"``", "`", text)
