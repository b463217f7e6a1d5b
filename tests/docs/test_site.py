"""Check pages, links, images and the reference of the documentation site without building it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.docs_site import api, option_tables, reference, site_map
from scripts.draw_concepts import PICTURES
from tests.docs.pages import DOCS, PROJECT
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.dagster_plugin import build_jobs
from trinitylake_ops.storage.registry import OWN_SCHEMES

#: Folders with pages that are linked from an index page instead of the navigation.
INDEXED = ("decisions/", "measurements/")


@pytest.fixture(scope="module")
def generated_pages() -> dict[str, str]:
    return {**reference.pages(), **api.pages()}


def nav_paths(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from nav_paths(value)


def test_each_page_is_in_navigation_once(generated_pages: dict[str, str]) -> None:
    nav = list(nav_paths(tomllib.loads((PROJECT / "zensical.toml").read_text())["project"]["nav"]))
    paths = {site_map.site_path(name) for name in site_map.sources() if name.endswith(".md")}
    expected = (
        {path for path in paths if not path.startswith(INDEXED)} | generated_pages.keys() | {"decisions/index.md"}
    )
    assert len(nav) == len(set(nav))
    assert set(nav) == expected


def test_links_of_pages_have_targets() -> None:
    """Anchors are checked by tests/test_readme.py and by the build of the site."""
    for name in site_map.sources():
        if name.endswith(".md"):
            site_map.with_site_links(name, (PROJECT / name).read_text())


def test_fences_are_closed() -> None:
    for name in site_map.sources():
        if name.endswith(".md"):
            fences = re.findall(r"^ *```", (PROJECT / name).read_text(), flags=re.MULTILINE)
            assert len(fences) % 2 == 0, name


@pytest.mark.parametrize("name", option_tables.PAGES)
def test_storage_option_tables_are_current(name: str) -> None:
    """``make docs`` updates the tables."""
    text = (PROJECT / name).read_text()
    assert "<!-- options of " in text
    assert option_tables.updated(text) == text


def test_each_scheme_with_options_has_table() -> None:
    pages = "".join((PROJECT / name).read_text() for name in option_tables.PAGES)
    documented = [scheme.options for scheme in OWN_SCHEMES.values() if f"<!-- options of {scheme.name} -->" in pages]
    assert [scheme.name for scheme in OWN_SCHEMES.values() if scheme.options not in documented] == ["memory"]


def test_links_are_converted_to_site_paths() -> None:
    for source, text, converted in (
        ("docs/python.md", "[a](dagster/README.md#one-call)", "[a](dagster/index.md#one-call)"),
        ("docs/versioning.md", "[a](README.md) [b](operations/README.md)", "[a](index.md) [b](operations/index.md)"),
        ("docs/release.md", "[a](../examples/README.md)", "[a](examples.md)"),
        ("docs/storages/s3.md", "![a\nb](../images/runs.png)", "![a\nb](../images/runs.png)"),
        ("README.md", "[a](docs/decisions/README.md) `[b](c)`", "[a](decisions/index.md) `[b](c)`"),
        ("docs/release.md", "[a](../definitions.py)", "[a](source/definitions.py.md)"),
        ("docs/dagster/README.md", "[a](https://example.com/) [b](#c)", "[a](https://example.com/) [b](#c)"),
        ("benchmarks/results/peers.md", "![a](peers.png)", "![a](peers.png)"),
    ):
        assert site_map.with_site_links(source, text) == converted
    with pytest.raises(FileNotFoundError, match=r"links to missing\.md"):
        site_map.with_site_links("docs/quickstart.md", "[a](missing.md)")


def test_lists_are_converted_to_python_markdown() -> None:
    text = "Words:\n- a\n  more\n- b\n   - c\n     more\n1. d\n\nWords.\n```\nx\n- no item\n```\n"
    assert site_map.to_python_markdown(text) == (
        "Words:\n\n- a\n  more\n- b\n    - c\n     more\n1. d\n\nWords.\n```\nx\n- no item\n```\n"
    )


@pytest.mark.parametrize("name", PICTURES)
def test_concept_images_are_current(name: str) -> None:
    assert (DOCS / "images" / name).read_text() == PICTURES[name](), "run: python -m scripts.draw_concepts"


def test_each_image_is_on_page() -> None:
    texts = [(PROJECT / name).read_text() for name in site_map.sources() if name.endswith(".md")]
    linked = {Path(link).name for text in texts for link in site_map.links(text)}
    assert {path.name for path in (DOCS / "images").iterdir()} - linked == set()


def test_reference_lists_all_commands_jobs_options_and_errors(generated_pages: dict[str, str]) -> None:
    assert set(re.findall(r"^## (.*)$", generated_pages["reference/commands.md"], flags=re.MULTILINE)) == set(
        trinitylake.commands
    )
    jobs, operations = generated_pages["reference/jobs.md"], generated_pages["reference/operations.md"]
    for job in build_jobs(operations="all"):
        assert f"## {job.name}\n" in jobs
        section = operations.partition(f"## {job.name}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)) == set(reference.job_options(job)), job.name
    options = {option.name for scheme in OWN_SCHEMES.values() for option in scheme.options}
    assert options <= set(re.findall(r"^\| `(\w+)`", generated_pages["reference/settings.md"], flags=re.MULTILINE))
    errors = (PROJECT / "trinitylake_ops" / "errors.py").read_text()
    assert set(re.findall(r"^class (\w+)", errors, flags=re.MULTILINE)) <= set(
        re.findall(r"^\| `[a-z-]+` \| `(\w+Error)` \|", generated_pages["reference/errors.md"], flags=re.MULTILINE)
    )


def test_reference_describes_each_entry(generated_pages: dict[str, str]) -> None:
    for name in ("reference/commands.md", "reference/errors.md"):
        undescribed = re.findall(r"^\|.*\|  \|$", generated_pages[name], flags=re.MULTILINE)
        assert undescribed == [], name
    code = "\n".join(path.read_text() for path in (PROJECT / "trinitylake_ops").rglob("*.py"))
    assert set(re.findall(r'"(TRINITYLAKE_[A-Z_]+)"', code)) == reference.ENVIRONMENT.keys()
    codes = set(
        re.findall(r"^    exit_code = (\d+)", (PROJECT / "trinitylake_ops/errors.py").read_text(), re.MULTILINE)
    )
    assert {"0", "1", "130, 143", *codes} == set(
        re.findall(r"^\| `([\d, ]+)` \|", generated_pages["reference/errors.md"], flags=re.MULTILINE)
    )
