"""What README.md and docs/python.md show runs; links in all documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lakes import check_lake
from trinitylake_ops import Lakehouse

PROJECT = Path(__file__).parents[1]
README = PROJECT / "README.md"
GETTING_STARTED = PROJECT / "docs" / "python.md"
DOCUMENTS = [
    *sorted(PROJECT.glob("*.md")),
    *sorted((PROJECT / "docs").rglob("*.md")),
    PROJECT / "examples" / "README.md",
    PROJECT / "trinitylake_ops" / "format" / "FORMAT.md",
]


def without_code(document: Path) -> str:
    """Return the text of a document without what stands in fences and in backquotes."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", lambda code: re.sub(r"[()\[\]]", "", code[0]), text)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as they are made where repositories are shown."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_examples_run_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for document in (README, GETTING_STARTED):
        examples = re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert examples
        for example in examples:
            exec(compile(example.replace("/data/lake", str(tmp_path / "lake")), str(document), "exec"), names)
    lake = Lakehouse.open(str(tmp_path / "lake"))
    assert lake.snapshot().tables("sales") == ["orders"]
    assert lake.snapshot().namespaces() == ["archive", "attic", "sales"]
    assert lake.snapshot("before-migration").version == 2
    assert "Rollback of the lakehouse from version 4 to the content of version 1" in capsys.readouterr().out
    check_lake(lake)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(PROJECT)))
def test_every_link_leads_to_a_file_and_an_anchor_that_exist(document: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_dead_links_are_noticed(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# On `s3://bucket/`, and more\n\n## A word\n```\n# no heading\n[no](link.md)\n```\n[a](b.md)\n"
    )
    assert anchors(document) == {"on-s3bucket-and-more", "a-word"}
    assert re.findall(r"\]\(([^)\s]+)\)", without_code(document)) == ["b.md"]
