"""The status page at the server's root, which loads nothing from other servers."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest
import yaml

from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes
from tests.operations.changes import create
from tests.operations.html_pages import parse_page
from tests.server.live_server import LiveServer, serving, settings_for
from tests.server.test_access_control import FORBIDDEN, MIXED, READER, UNAUTHORIZED, entry
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import StorageError
from trinitylake_ops.server import telemetry
from trinitylake_ops.server.warehouses import Warehouses

pytestmark = pytest.mark.usefixtures("fixed_requests")


def basic(token: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"user:{token}".encode()).decode()}


def test_page_is_self_contained(server: LiveServer, lake: Lakehouse) -> None:
    create(lake, "<script>")
    response = server.request("GET", "/")
    assert response.status == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert (response.headers["x-content-type-options"], response.headers["cache-control"]) == ("nosniff", "no-store")
    page = response.body.decode()
    assert parse_page(page).headline.startswith("Version 1, ")
    assert "<script" not in page and "src=" not in page and "href=" not in page
    assert server.request("POST", "/", {}).status == 404
    assert server.request("GET", "/", headers={"Origin": "http://evil.example"}).status == 403


def test_page_is_cached_for_seconds(server: LiveServer, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.application is not None
    metered_storage = server.application.warehouses.served[0].lake.storage
    assert server.request("GET", "/").status == 200
    before = metered_storage.snapshot().total  # type: ignore[attr-defined]
    assert server.request("GET", "/").status == 200
    assert metered_storage.snapshot().total == before  # type: ignore[attr-defined]
    create(lake, "ns")
    started_s = time.monotonic()
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: started_s + 2 * telemetry.PAGE_SECONDS)
    assert "Version 1, " in server.request("GET", "/").body.decode()


def test_browser_sends_token_as_password(lake: Lakehouse, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    entries = [
        entry(READER, "reader", scope="read", lakehouses=["two"]),
        entry(MIXED, "mixed", scope="none", namespaces={"ns": "read"}),
    ]
    tokens.write_text(yaml.safe_dump({"tokens": entries}))
    warehouses = Warehouses({"one": Lakehouse(lake.storage), "two": Lakehouse(lake.storage)})
    with serving(settings_for(lake, tokens=tokens), warehouses) as server:
        response = server.request("GET", "/")
        assert (response.error, response.headers["www-authenticate"].partition(" ")[0]) == (UNAUTHORIZED, "Basic")
        assert server.request("GET", "/", headers={"Authorization": "Basic !!"}).error == UNAUTHORIZED
        assert server.request("GET", "/", headers=basic("wrong")).error == UNAUTHORIZED
        assert server.request("GET", "/", headers=basic(MIXED)).error == FORBIDDEN
        for headers in (basic(READER), {"Authorization": f"Bearer {READER}"}):
            page = server.request("GET", "/", headers=headers).body.decode()
            assert "<b>two</b>" in page and "<b>one</b>" not in page
        assert server.request("GET", "/metrics", headers=basic(READER)).error == UNAUTHORIZED
        assert server.request("GET", "/v1/config", headers=basic(READER)).error == UNAUTHORIZED


def test_unreachable_lakehouse_does_not_hide_others(lakes: Lakes) -> None:
    good, unreachable = lakes.local("good"), lakes.local("bad")
    create(good, "ns")
    failing_storage = FaultyStorage(unreachable.storage, [fail(1, StorageError, kind="read", times=10_000)])
    warehouses = Warehouses({"good": good, "bad": Lakehouse(failing_storage)})
    with serving(settings_for(good), warehouses) as server:
        page = server.request("GET", "/").body.decode()
        assert "Version 1, " in page
        assert "<bdi>bad</bdi> does not respond" in page
        metrics = server.request("GET", "/metrics").body.decode()
    assert 'trinitylake_lakehouse_version{lakehouse="good"} 1.0' in metrics
    assert 'lakehouse="bad",of=' not in metrics
