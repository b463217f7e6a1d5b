"""Read the snippets of documentation pages, with their section, language and title."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"

_FENCE = re.compile(
    r"^## (?P<section>[^\n]*)$|^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """A fenced code block of a page. ``title`` is a job name, a file name or empty."""

    section: str
    language: str
    title: str
    text: str


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield the snippets of a page in order."""
    section = ""
    for match in _FENCE.finditer(page.read_text()):
        if match["section"] is not None:
            section = match["section"]
        else:
            yield Snippet(section, match["language"], match["title"] or "", match["text"])
