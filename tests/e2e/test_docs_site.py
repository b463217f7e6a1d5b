"""Test the documentation site built by `make docs`, in a browser that may send requests only to the test server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Page, Request, expect

from scripts.docs_site.__main__ import HTML
from tests.conftest import SUMMARY_PROPERTY
from tests.docs.pages import PROJECT
from tests.e2e.browser import opened_page

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


class _SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site_folder() -> Path:
    result = subprocess.run(
        [sys.executable, "-m", "scripts.docs_site"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return HTML


@pytest.fixture(scope="module")
def site_url(site_folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_SilentHandler, directory=str(site_folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class _PageParser(HTMLParser):
    """Collects the anchors and links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := attributes.get(name))}
        self.links |= {value for name in ("href", "src") if (value := attributes.get(name))}


def test_links_of_built_pages_have_targets(site_folder: Path, record_property: pytest.RecordProperty) -> None:
    """Zensical checks links in Markdown. This also checks the navigation and docstrings."""
    parsers = {}
    for path in sorted(site_folder.rglob("*.html")):
        parsers[path] = _PageParser()
        parsers[path].feed(path.read_text())
    dead_links, n_links = [], 0
    for path, page in parsers.items():
        for link in page.links:
            if re.match(r"[a-z]+:|/", link) or path.name == "404.html":
                continue
            n_links += 1
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and target in parsers and anchor not in parsers[target].anchors):
                dead_links.append(f"{path.relative_to(site_folder)}: {link}")
    record_property(SUMMARY_PROPERTY, f"{len(parsers)} pages, {n_links:,} links, {len(dead_links)} dead")
    assert dead_links == []


def test_lists_and_tables_are_rendered(site_folder: Path) -> None:
    """Lists and tables that Markdown does not recognize remain in paragraphs as raw text."""
    for path in site_folder.rglob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        for paragraph in re.findall(r"<p>(.*?)</p>", text, flags=re.DOTALL):
            assert not re.search(r"^(?:[-*] |\d+\. |\|.*\|$|```)", paragraph, flags=re.MULTILINE), (path, paragraph)


@pytest.fixture
def page(site_url: str) -> Iterator[Page]:
    external_requests: list[str] = []
    page_errors: list[str] = []
    with opened_page() as browser_page:

        def record_external(request: Request) -> None:
            if not request.url.startswith((site_url, "data:", "blob:")):
                external_requests.append(request.url)

        browser_page.on("request", record_external)
        browser_page.on("pageerror", lambda error: page_errors.append(str(error)))
        yield browser_page
    assert (external_requests, page_errors) == ([], [])


def test_start_page_leads_to_concepts(page: Page, site_url: str) -> None:
    page.goto(site_url)
    expect(page.get_by_role("heading", level=1)).to_contain_text("Documentation")
    page.locator("article").get_by_role("link", name="Concepts", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Concepts")
    image = page.locator("article img").first
    assert image.evaluate("image => image.complete && image.naturalWidth") == 900
    page.goto(f"{site_url}operations/rollback.html")
    expect(page.locator("article table").first).to_contain_text("What to do")
    page.goto(f"{site_url}api/operations.html#trinitylake_ops.operations.plan_rollback")
    expect(page.locator("article")).to_contain_text("plan_rollback")


def test_search_finds_an_operation(page: Page, site_url: str) -> None:
    page.goto(site_url)
    page.keyboard.press("/")
    page.keyboard.type("undelete")
    expect(page.get_by_role("option", name="Expire", exact=True).first).to_be_visible(timeout=60_000)
