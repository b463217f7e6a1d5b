"""The alert rules and the dashboard: they ask for numbers that are told, and each alert fires on what it is for.

The longer tests run promtool and a Prometheus that reads a server.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.draw_dashboard import PICTURE, Window, answered, draw, legend, prometheus, shown
from tests.lakes import Lakes, lakes
from tests.operations.changes import create
from tests.server.live_server import serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, commit_of, create_body, properties
from trinitylake_ops import operations
from trinitylake_ops.telemetry.hub import INSTRUMENTS, Kind

__all__ = ["lakes"]

HERE = Path(__file__).parent
MONITORING = HERE.parents[1] / "deploy" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
#: Those that a server counts itself (server/telemetry.py).
OF_SERVER = {
    "trinitylake_requests_total", "trinitylake_request_seconds_bucket", "trinitylake_requests_in_progress",
    "trinitylake_commits_total", "trinitylake_lost_attempts_total",
}  # fmt: skip
_NAME = re.compile(r"\btrinitylake_[a-z_]+")
_LABELS = re.compile(r"(trinitylake_[a-z_]+)\{([^}]*)\}")
_ENDINGS = {Kind.COUNTER: ("_total",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count"), Kind.GAUGE: ("",)}
PATIENCE_SECONDS = 120


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in RULES]


def series() -> dict[str, tuple[str, ...]]:
    """Return the series that are told, with their labels."""
    return {
        f"trinitylake_{name}{ending}": one.labels for name, one in INSTRUMENTS.items() for ending in _ENDINGS[one.kind]
    }


def test_what_is_asked_for_is_told() -> None:
    told = series()
    for expression in expressions():
        assert set(_NAME.findall(expression)) <= told.keys() | OF_SERVER, expression
        for name, selectors in _LABELS.findall(expression):
            for label in re.findall(r"(\w+)[=!]", selectors):
                assert name in OF_SERVER or label in told[name], expression
    asked = {name for expression in expressions() for name in _NAME.findall(expression)}
    shown = {name.removeprefix("trinitylake_") for name in asked}
    missing = [name for name, one in INSTRUMENTS.items() if not {f"{name}{end}" for end in _ENDINGS[one.kind]} & shown]
    assert missing == []


def test_each_alert_has_a_test_that_lets_it_fire_and_says_what_to_do() -> None:
    tests = yaml.safe_load((HERE / "alerts.yaml").read_text())["tests"]
    fires = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}
    calm = {one["alertname"] for test in tests for one in test["alert_rule_test"] if not one["exp_alerts"]}
    assert fires == calm == {rule["alert"] for rule in RULES}
    assert all(rule["annotations"]["next"] and rule["annotations"]["summary"] for rule in RULES)


def test_the_dashboard_has_no_place_of_ours_in_it() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())
    assert "http" not in json.dumps(DASHBOARD)


@pytest.mark.soak
@pytest.mark.debian_packages
def test_each_alert_fires() -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is not installed"
    for arguments in (["check", "rules", str(MONITORING / "alerts.yaml")], ["test", "rules", "alerts.yaml"]):
        ran = subprocess.run([promtool, *arguments], capture_output=True, text=True, cwd=HERE)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "SUCCESS" in ran.stdout


def asked(url: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=10) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
    return found


@pytest.mark.soak
@pytest.mark.debian_packages
@pytest.mark.timeout(600)
def test_the_panels_have_data_of_a_server(lakes: Lakes, tmp_path: Path) -> None:
    """Each expression is understood by Prometheus. Those of a lakehouse at work have data; failures have none."""
    lake = lakes.local()
    with serving(settings_for(lake)) as served:
        served.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]})
        served.request("POST", TABLES, create_body())
        with prometheus(tmp_path, served.url.removeprefix("http://"), scrape_s=1) as url:
            begun = time.time()
            end_s = time.monotonic() + PATIENCE_SECONDS
            empty: set[str] = {"all"}
            n_made = 0
            while empty and time.monotonic() < end_s:
                n_made += 1
                served.request("POST", TABLE, commit_of(properties(a=str(n_made))))
                create(lake, f"n{n_made}")
                operations.verify(lake, incremental=True)
                time.sleep(1)
                try:
                    empty = {one for one in expressions_of_panels() if not asked(url, one)}
                except OSError:
                    continue  # it begins
                empty -= {one for one in empty if any(word in one for word in MAY_BE_EMPTY)}
            window = Window(begun, time.time(), scrape=15)  # rates of a minute, as asked above
            picture = tmp_path / "dashboard.png"
            n_drawn = draw(DASHBOARD, lambda target: answered(url, window, target), window, "", picture)
    assert empty == set()
    may_be = [p for p in panels() if any(word in p["targets"][0]["expr"] for word in MAY_BE_EMPTY)]
    assert n_drawn >= len(panels()) - len(may_be)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_values_and_names_are_drawn_as_they_are_read() -> None:
    texts = [
        shown(0.0042, "s"),
        shown(90, "s"),
        shown(187_200, "s"),
        shown(4_400_000, "bytes"),
        shown(0.125, "percentunit"),
    ]
    assert texts == ["4.2 ms", "1.5 min", "2.17 d", "4.2 MiB", "12.5 %"]
    assert [shown(120, "none"), shown(1_234, "none"), shown(0, "ops"), shown(float("inf"), "s")] == [
        "120", "1234", "0 ops/s", "∞",
    ]  # fmt: skip
    assert legend("{{lakehouse}} {{of}}, a minute", {"lakehouse": "main"}) == "main , a minute"
    assert legend("{{status}}", {}) == "Value"
    assert Window(0, 600, 2).filled('rate(x{l=~"$lakehouse"}[$__rate_interval])') == 'rate(x{l=~".*"}[8s])'


def test_all_units_of_the_dashboard_are_drawn() -> None:
    assert all(shown(1, panel["fieldConfig"]["defaults"]["unit"]) for panel in panels())
    assert PICTURE.is_file()
    assert f"images/{PICTURE.name}" in (MONITORING.parents[1] / "docs" / "deploy" / "monitoring.md").read_text()


#: What a lakehouse that is well does not have: things that are due, and requests that failed in passing.
MAY_BE_EMPTY = ("due_seconds", "storage_retries")


def expressions_of_panels() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [one.replace("$__rate_interval", "1m").replace("$lakehouse", ".*") for one in found]
