"""The examples in README.md and docs/python.md work, and links in all documents have existing targets."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from tests.dagster_plugin.run_config import QUIET
from tests.lakes import check_lake
from trinitylake_ops import Lakehouse

PROJECT = Path(__file__).parents[1]
README = PROJECT / "README.md"
PYTHON_GUIDE = PROJECT / "docs" / "python.md"
DOCUMENTS = [
    *sorted(PROJECT.glob("*.md")),
    *sorted((PROJECT / "docs").rglob("*.md")),
    PROJECT / "examples" / "README.md",
    PROJECT / "trinitylake_ops" / "format" / "FORMAT.md",
]


def without_code(document: Path) -> str:
    """Return the text of a document without fenced code and without brackets in inline code."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", lambda code: re.sub(r"[()\[\]]", "", code[0]), text)


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings of a document, as code hosting sites derive them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def fences(document: Path, language: str) -> list[str]:
    """Return the contents of the fenced blocks in this language, in order."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [content for name, content in blocks if name == language]


def test_python_guide_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for example in fences(PYTHON_GUIDE, "python"):
        exec(compile(example.replace("/data/lake", str(tmp_path / "lake")), str(PYTHON_GUIDE), "exec"), names)
    lake = Lakehouse.open(str(tmp_path / "lake"))
    assert lake.snapshot().tables("sales") == ["orders"]
    assert lake.snapshot().tables("archive") == ["orders"]
    assert lake.snapshot().namespaces() == ["archive", "attic", "cellar", "sales"]
    assert lake.snapshot("before-migration").version == 2
    assert "Rollback of the lakehouse from version 4 to the content of version 1" in capsys.readouterr().out
    check_lake(lake)


def test_readme_quickstart_examples_run(tmp_path: Path) -> None:
    """The commands print the output shown in the README. The Dagster run is executed in this process."""
    root = tmp_path / "lake"
    (code,) = fences(README, "python")
    (console,) = fences(README, "")
    scope: dict[str, object] = {"__name__": "definitions"}
    exec(compile(code.replace("/data/lake", str(root)), str(README), "exec", dont_inherit=True), scope)
    definitions = scope["defs"]
    assert isinstance(definitions, dg.Definitions)
    export, *steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, flags=re.MULTILINE)
    assert export == ("export TRINITYLAKE_ROOT=/data/lake", "")
    for line, output in steps:
        program, *arguments = shlex.split(line)
        if program == "dagster":
            assert arguments[:-1] == ["asset", "materialize", "-f", "definitions.py", "--select"]
            keys = dg.AssetSelection.from_string(arguments[-1]).resolve(definitions.resolve_asset_graph())
            job = definitions.resolve_implicit_global_asset_job_def()
            with dg.DagsterInstance.ephemeral() as instance:
                assert job.execute_in_process(instance=instance, asset_selection=[*keys], run_config=QUIET).success
        else:
            command = [sys.executable, "-m", "trinitylake_ops.cli", *arguments]
            environment = {**os.environ, "TRINITYLAKE_ROOT": str(root)}
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            printed_lines = [text.rstrip() for text in result.stdout.splitlines()]
            assert not output or printed_lines == output.splitlines(), line


def test_readme_has_at_most_90_lines() -> None:
    assert len(README.read_text().splitlines()) <= 90


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(PROJECT)))
def test_links_have_existing_targets(document: Path) -> None:
    broken_links = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken_links.append(link)
    assert broken_links == []


def test_anchors_and_links_ignore_code(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# On `s3://bucket/`, and more\n\n## A word\n```\n# no heading\n[no](link.md)\n```\n[a](b.md)\n"
    )
    assert anchors(document) == {"on-s3bucket-and-more", "a-word"}
    assert re.findall(r"\]\(([^)\s]+)\)", without_code(document)) == ["b.md"]
