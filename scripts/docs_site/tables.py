"""Tables and words of generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def cell(text: object) -> str:
    """Return text for a cell: one line, and no bar that ends it. Bars in code do not."""
    line = re.sub(r"\s+", " ", str(text)).strip()
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in re.split("(`[^`]*`)", line))


def code(text: object) -> str:
    """Return text as code, empty for none."""
    return f"`{text}`" if str(text) else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, with an empty line at its end. Cells are Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell(one) for one in line)} |\n" for line in lines) + "\n"


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown: roles of Sphinx become code."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda found: f"`{found[1].rpartition('.')[2]}`", docstring or "")
    return re.sub(r"``", "`", text)
