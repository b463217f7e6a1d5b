"""Test the UI behind a path prefix in a real browser: the links for versions and tables open pages and launch jobs.

Like behind a proxy, the webserver does not respond outside of its prefix. Names and messages from other writers are
displayed as text, and load or run nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from playwright.sync_api import Page, expect

from tests.dagster_plugin.incident_project import LOAD, ROOT, SOURCE, URL, location
from tests.e2e.browser import opened_page
from tests.lakes import check_lake, table
from tests.servers.daemons import free_port
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin._dagster_internals import execute_as_launched
from trinitylake_ops.iceberg.catalog import catalog_at

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1_200)]

REPOSITORY = Path(__file__).parents[2]
PROJECT = REPOSITORY / "tests" / "dagster_plugin" / "incident_project.py"
PREFIX = "/ops"
TIMEOUT_SECONDS = 240
HOSTILE_NAME = "<script>alert(1)</script>|[x](http://evil.example/x)"
HOSTILE_MESSAGE = "![image](http://evil.example/image.png) <img src=http://evil.example/i onerror=alert(1)> | __init__"
RUN_PAGE = re.compile(rf"{PREFIX}/runs/(?P<run_id>[0-9a-f-]{{36}})")


class PrefixedUi:
    """A lakehouse with a good and a bad publication, and the UI of its code location."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}{PREFIX}"
        self.lake = Lakehouse.create(str(folder / "shop"), {"fsync": "false"})
        home = folder / "home"
        home.mkdir()
        (home / "dagster.yaml").write_text((REPOSITORY / "deploy" / "demo" / "dagster.yaml").read_text())
        variables = {
            ROOT: str(folder / "shop"),
            URL: self.url,
            "DAGSTER_HOME": str(home),
            "PYTHONPATH": str(REPOSITORY),
        }
        for name, value in variables.items():
            patch.setenv(name, value)
        definitions = location()
        with dg.DagsterInstance.get() as instance:
            for amounts in ("1\n2\n3", "4\n-5"):
                (folder / SOURCE).write_text(amounts)
                assert execute_as_launched(
                    definitions, LOAD, instance, file=str(PROJECT), location_name=f"{PROJECT.name}:location"
                ).success
                if self.lake.latest_version() == 1:
                    self._commit_hostile_names()

    def _commit_hostile_names(self) -> None:
        with self.lake.transaction(message=HOSTILE_MESSAGE) as txn:
            txn.create_namespace(HOSTILE_NAME)
            txn.create_table(HOSTILE_NAME, HOSTILE_NAME, table())

    def serve(self) -> Iterator[None]:
        command = [sys.executable, "-m", "dagster_webserver", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--path-prefix", PREFIX, "--python-file", str(PROJECT), "--attribute", "location"]
        server = subprocess.Popen([*command, "--log-level", "error"], cwd=REPOSITORY, env=os.environ)
        try:
            self._wait_until_up()
            yield
        finally:
            server.terminate()
            server.wait(60)

    def _wait_until_up(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(f"{self.url}/server_info", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"no response from {self.url}")


@pytest.fixture(scope="module")
def prefixed_ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixedUi]:
    with pytest.MonkeyPatch.context() as patch:
        ui = PrefixedUi(tmp_path_factory.mktemp("prefixed"), patch)
        yield from (ui for _ in ui.serve())
        check_lake(ui.lake)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with opened_page() as browser_page:
        yield browser_page


def show_markdown(page: Page, label: str) -> None:
    """Show a Markdown value of the newest event, which is either inline or behind a button."""
    row = page.get_by_role("row").filter(has=page.get_by_role("cell", name=label, exact=True)).last
    expect(row).to_be_visible()
    if (button := row.get_by_text("[Show Markdown]")).count():
        button.click()
        expect(page.get_by_role("dialog").last).to_be_visible()


def launch(page: Page, prefixed_ui: PrefixedUi) -> None:
    page.wait_for_url(re.compile(f"{PREFIX}/locations/.*/playground"))
    page.get_by_role("button", name=re.compile("Launch Run$", re.IGNORECASE)).click()
    page.wait_for_url(RUN_PAGE)
    expect(page.get_by_text("Success", exact=True).first).to_be_visible()


def test_requests_outside_of_prefix_fail(prefixed_ui: PrefixedUi) -> None:
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{prefixed_ui.port}/assets", timeout=30)


def test_text_from_other_writers_is_escaped(prefixed_ui: PrefixedUi, page: Page) -> None:
    requested_urls: list[str] = []
    dialogs: list[str] = []
    page.on("request", lambda request: requested_urls.append(request.url))
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.goto(f"{prefixed_ui.url}/assets/shop/lakehouse")
    show_markdown(page, "last_versions")
    expect(page.get_by_text(HOSTILE_NAME).first).to_be_visible()
    assert ([url for url in requested_urls if "evil.example" in url], dialogs) == ([], [])
    assert page.locator("[role=dialog] img, [role=dialog] script").count() == 0
    links = {link.get_attribute("href") or "" for link in page.locator("[role=dialog] a").all()}
    assert [
        link for link in links if not link.startswith((prefixed_ui.url, f"{PREFIX}/", "http://evil.example/x"))
    ] == []


def test_links_roll_back_version_and_table(prefixed_ui: PrefixedUi, page: Page) -> None:
    def rows() -> list[int]:
        amounts: list[int] = (
            catalog_at(prefixed_ui.lake).load_table("sales.orders").scan().to_arrow()["amount"].to_pylist()
        )
        return amounts

    assert rows() == [4, -5]
    page.goto(f"{prefixed_ui.url}/assets/shop/sales/orders")
    link = page.get_by_role("link", name="roll back sales.orders alone to version 2")
    expect(link.first).to_be_visible()
    assert (link.first.get_attribute("href") or "").startswith(f"{prefixed_ui.url}/locations/")
    link.first.click()
    launch(page, prefixed_ui)
    show_markdown(page, "plan")
    row = page.get_by_role("row").filter(has=page.get_by_role("cell", name="apply", exact=True)).last
    url = row.get_by_role("link").first.get_attribute("href") or ""
    assert url.startswith(f"{prefixed_ui.url}/locations/")
    page.goto(url)
    page.wait_for_url(re.compile(f"{PREFIX}/locations/.*/playground"))
    page.locator(".CodeMirror-line", has_text="approved_by:").click()
    page.keyboard.press("End")
    page.keyboard.type("Ada")
    page.keyboard.press("Escape")
    launch(page, prefixed_ui)
    assert rows() == [1, 2, 3]
    assert next(prefixed_ui.lake.history()).approved_by == "Ada"
    page.goto(f"{prefixed_ui.url}/assets/shop/lakehouse")
    show_markdown(page, "last_versions")
    page.get_by_role("link", name="roll back to the last version that passed").first.click()
    page.wait_for_url(re.compile(f"{PREFIX}/locations/.*/jobs/shop_rollback/playground"))
