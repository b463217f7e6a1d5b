"""The page at the server's root: the state of its lakehouses, for a browser, with nothing from elsewhere."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest
import yaml

from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes
from tests.operations.changes import create
from tests.operations.pages import parsed
from tests.server.served import Served, serving, settings_for
from tests.server.test_safety import FORBIDDEN, MIXED, READER, UNAUTHORIZED, entry
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import StorageError
from trinitylake_ops.server import telemetry
from trinitylake_ops.server.warehouses import Warehouses

pytestmark = pytest.mark.usefixtures("fixed_requests")


def basic(token: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()}


def test_the_page_needs_nothing_from_elsewhere(served: Served, lake: Lakehouse) -> None:
    create(lake, "<script>")
    answer = served.ask("GET", "/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
    page = answer.body.decode()
    assert parsed(page).headline.startswith("Version 1, ")
    assert "<script" not in page and "src=" not in page and "href=" not in page
    assert served.ask("POST", "/", {}).status == 404
    assert served.ask("GET", "/", headers={"Origin": "http://evil.example"}).status == 403


def test_it_is_read_at_most_every_few_seconds(served: Served, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.application is not None
    counted = served.application.warehouses.served[0].lake.storage
    assert served.ask("GET", "/").status == 200
    before = counted.snapshot().total  # type: ignore[attr-defined]
    assert served.ask("GET", "/").status == 200
    assert counted.snapshot().total == before  # type: ignore[attr-defined]
    create(lake, "ns")
    begun_s = time.monotonic()
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: begun_s + 2 * telemetry.PAGE_SECONDS)
    assert "Version 1, " in served.ask("GET", "/").body.decode()


def test_a_browser_sends_its_token_as_a_password(lake: Lakehouse, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    entries = [
        entry(READER, "reader", scope="read", lakehouses=["two"]),
        entry(MIXED, "mixed", scope="none", namespaces={"ns": "read"}),
    ]
    tokens.write_text(yaml.safe_dump({"tokens": entries}))
    warehouses = Warehouses({"one": Lakehouse(lake.storage), "two": Lakehouse(lake.storage)})
    with serving(settings_for(lake, tokens=tokens), warehouses) as served:
        asked = served.ask("GET", "/")
        assert (asked.error, asked.headers["www-authenticate"].partition(" ")[0]) == (UNAUTHORIZED, "Basic")
        assert served.ask("GET", "/", headers={"Authorization": "Basic !!"}).error == UNAUTHORIZED
        assert served.ask("GET", "/", headers=basic("wrong")).error == UNAUTHORIZED
        assert served.ask("GET", "/", headers=basic(MIXED)).error == FORBIDDEN
        for headers in (basic(READER), {"Authorization": f"Bearer {READER}"}):
            page = served.ask("GET", "/", headers=headers).body.decode()
            assert "<b>two</b>" in page and "<b>one</b>" not in page
        assert served.ask("GET", "/metrics", headers=basic(READER)).error == UNAUTHORIZED
        assert served.ask("GET", "/v1/config", headers=basic(READER)).error == UNAUTHORIZED


def test_a_lakehouse_that_does_not_answer_hides_no_other(lakes: Lakes) -> None:
    good, bad = lakes.local("good"), lakes.local("bad")
    create(good, "ns")
    broken = FaultyStorage(bad.storage, [fail(1, StorageError, kind="read", times=10_000)])
    warehouses = Warehouses({"good": good, "bad": Lakehouse(broken)})
    with serving(settings_for(good), warehouses) as served:
        page = served.ask("GET", "/").body.decode()
        assert "Version 1, " in page
        assert "<bdi>bad</bdi> does not respond" in page
        told = served.ask("GET", "/metrics").body.decode()
    assert 'trinitylake_lakehouse_version{lakehouse="good"} 1.0' in told
    assert 'lakehouse="bad",of=' not in told
