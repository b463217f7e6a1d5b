"""All tests to which docs/internals/threat-model.md and docs/rest-catalog/engine-writes.md refer exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_PROJECT = Path(__file__).resolve().parent.parent
_TEXT = (_PROJECT / "docs" / "internals" / "threat-model.md").read_text()
_PAGES = (_TEXT, (_PROJECT / "docs" / "rest-catalog" / "engine-writes.md").read_text())
_REFERENCE = re.compile(r"`(tests/[a-z0-9_/]+\.py)?(?:::(test_[a-z0-9_]+))?`")


def _references() -> list[tuple[str, str]]:
    """Return the file and the test of each reference. ``::test`` without a file is in the previous file."""
    references, file = [], ""
    for path, test in (match for page in _PAGES for match in _REFERENCE.findall(page)):
        file = path or file
        references.append((file, test))
    return references


@pytest.mark.parametrize(("file", "test"), _references())
def test_referenced_test_exists(file: str, test: str) -> None:
    text = (_PROJECT / file).read_text()
    assert re.search(rf"^def {test}\(" if test else r"^def test_", text, re.MULTILINE)


def test_every_row_of_threat_tables_refers_to_test() -> None:
    sections = [part for part in _TEXT.split("\n## ") if part.startswith(("What a writer cannot", "What content"))]
    lines = [line for section in sections for line in section.splitlines() if line.startswith("|")]
    assert len(sections) == 2
    assert [line for line in lines[2:] if "test" not in line and "---" not in line] == []
