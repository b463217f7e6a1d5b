"""Test that the walkthrough pages in docs/internals quote the current code and list each file that runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PROJECT, snippets
from trinitylake_ops import Lakehouse

#: For each page, the journey of scripts/metrics.py whose files the page lists.
JOURNEYS = {
    "internals/commit.md": "commit of a namespace",
    "internals/rollback.md": "rollback",
    "internals/purge.md": "purge",
}
_MAX_QUOTED_LINES = 40


@pytest.fixture(scope="module")
def traced_files() -> dict[str, list[str]]:
    command = [sys.executable, str(PROJECT / "scripts/metrics.py"), "--files", *JOURNEYS.values()]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    files: dict[str, list[str]] = json.loads(result.stdout)
    return files


@pytest.mark.parametrize("page", JOURNEYS)
def test_quotes_are_current_code(page: str) -> None:
    quotes = [snippet for snippet in snippets(DOCS / page) if snippet.title]
    assert quotes
    for quote in quotes:
        source = (PROJECT / quote.title).read_text()
        assert f"\n{quote.text}" in source, f"{page} quotes code that {quote.title} no longer contains:\n{quote.text}"
        assert quote.text.count("\n") <= _MAX_QUOTED_LINES


@pytest.mark.parametrize("page", JOURNEYS)
def test_listed_files_are_files_that_run(page: str, traced_files: dict[str, list[str]]) -> None:
    _, _, section = (DOCS / page).read_text().partition("\n## Files\n")
    listed_files = re.findall(r"`([a-z_/]+\.py)`", section)
    assert len(listed_files) == len(set(listed_files))
    assert set(listed_files) == set(traced_files[JOURNEYS[page]])


def test_example_of_commit_page_runs(tmp_path: Path) -> None:
    (example,) = (
        snippet
        for snippet in snippets(DOCS / "internals/commit.md")
        if snippet.language == "python" and not snippet.title
    )
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    exec(compile(textwrap.dedent(example.text), "commit.md", "exec"), {"lake": lake})
    assert lake.snapshot().namespaces() == ["sales"]
