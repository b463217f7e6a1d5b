"""Pages of the documentation, and what is shown in them: each snippet with its section, language and title."""

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
    """What stands in a fence of a page. ``title`` is the job or the file that it is for, empty for none."""

    section: str
    language: str
    title: str
    text: str


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield the snippets of a page in their order."""
    section = ""
    for found in _FENCE.finditer(page.read_text()):
        if found["section"] is not None:
            section = found["section"]
        else:
            yield Snippet(section, found["language"], found["title"] or "", found["text"])
