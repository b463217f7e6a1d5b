"""Test that the status page at the server's root is complete and loads nothing else in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from playwright.sync_api import expect

from tests.e2e.browser import opened_page
from tests.lakes import Lakes, lakes
from tests.operations.changes import create
from tests.server.live_server import serving, settings_for
from tests.server.test_access_control import READER, entry
from trinitylake_ops.format.file_names import HINT_PATH

__all__ = ["lakes"]

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(600)]

HOSTILE_NAME = "<img/src=x/onerror=document.title='run'>"


def test_browser_shows_status(lakes: Lakes, tmp_path: Path) -> None:
    lake = lakes.local()
    with lake.transaction(message=HOSTILE_NAME) as txn:
        txn.create_namespace(HOSTILE_NAME)
    create(lake, "ns", "t")
    lake.storage.write(HINT_PATH, b"0")
    with serving(settings_for(lake)) as server, opened_page() as page:
        requested_urls: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: requested_urls.append(request.url))
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{server.url}/")
        expect(page.get_by_role("heading", level=1)).to_contain_text("Version 2, ")
        expect(page.get_by_text(f"trinitylake --root {lake.root} repair-hint")).to_be_visible()
        for name in ("Due", "Findings", "Writers"):
            expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        expect(page.get_by_role("row").filter(has_text="verify").first).to_contain_text("fine")
        page.screenshot(path=tmp_path / "status.png", full_page=True)
        assert (tmp_path / "status.png").stat().st_size > 10_000
        assert page.title().startswith("status: Version 2")
        assert page.locator("script, img, link, iframe").count() == 0
        assert {url.removeprefix(server.url) for url in requested_urls} <= {"/", "/favicon.ico"}
        assert [error for error in errors if "favicon" not in error and "404" not in error] == []


def test_browser_sends_token_as_password(lakes: Lakes, tmp_path: Path) -> None:
    lake = lakes.local()
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"tokens": [entry(READER, "reader", scope="read")]}))
    with serving(settings_for(lake, tokens=tokens)) as server, opened_page() as page:
        browser = page.context.browser
        assert browser is not None
        context = browser.new_context(http_credentials={"username": "user", "password": READER})
        with context:
            authenticated_page = context.new_page()
            authenticated_page.goto(f"{server.url}/")
            expect(authenticated_page.get_by_role("heading", level=1)).to_contain_text("Version 0, ")
