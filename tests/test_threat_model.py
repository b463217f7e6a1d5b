"""Tests that docs/internals/threat-model.md and docs/rest-catalog/engine-writes.md name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_PROJECT = Path(__file__).resolve().parent.parent
_TEXT = (_PROJECT / "docs" / "internals" / "threat-model.md").read_text()
_PAGES = (_TEXT, (_PROJECT / "docs" / "rest-catalog" / "engine-writes.md").read_text())
_NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)?(?:::(test_[a-z0-9_]+))?`")


def _named() -> list[tuple[str, str]]:
    """Return (file, test) of what the pages name; ``::test`` alone is of the file named last."""
    found, file = [], ""
    for path, test in (named for page in _PAGES for named in _NAMED.findall(page)):
        file = path or file
        found.append((file, test))
    return found


@pytest.mark.parametrize(("file", "test"), _named())
def test_what_the_pages_name_exists(file: str, test: str) -> None:
    text = (_PROJECT / file).read_text()
    assert re.search(rf"^def {test}\(" if test else r"^def test_", text, re.MULTILINE)


def test_every_line_on_what_is_tried_names_a_test() -> None:
    tables = [part for part in _TEXT.split("\n## ") if part.startswith(("What a writer cannot", "What content"))]
    lines = [line for part in tables for line in part.splitlines() if line.startswith("|")]
    assert len(tables) == 2
    assert [line for line in lines[2:] if "test" not in line and "---" not in line] == []
