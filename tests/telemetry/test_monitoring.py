"""Test the alert rules and the dashboard: their metrics exist, and each alert fires.

The slow tests run promtool and a Prometheus server that scrapes a REST server.
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

from scripts.draw_dashboard import PICTURE, Window, draw, format_value, legend, prometheus, query_series
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
#: Metrics that only the server emits (server/telemetry.py).
SERVER_METRICS = {
    "trinitylake_requests_total", "trinitylake_request_seconds_bucket", "trinitylake_requests_in_progress",
    "trinitylake_commits_total", "trinitylake_lost_attempts_total",
}  # fmt: skip
_NAME = re.compile(r"\btrinitylake_[a-z_]+")
_LABELS = re.compile(r"(trinitylake_[a-z_]+)\{([^}]*)\}")
_ENDINGS = {Kind.COUNTER: ("_total",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count"), Kind.GAUGE: ("",)}
TIMEOUT_SECONDS = 120


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in RULES]


def series() -> dict[str, tuple[str, ...]]:
    """Return the labels of each metric by its name in Prometheus."""
    return {
        f"trinitylake_{name}{ending}": instrument.labels
        for name, instrument in INSTRUMENTS.items()
        for ending in _ENDINGS[instrument.kind]
    }


def test_expressions_use_known_metrics() -> None:
    known_series = series()
    for expression in expressions():
        assert set(_NAME.findall(expression)) <= known_series.keys() | SERVER_METRICS, expression
        for name, selectors in _LABELS.findall(expression):
            for label in re.findall(r"(\w+)[=!]", selectors):
                assert name in SERVER_METRICS or label in known_series[name], expression
    used_series = {name for expression in expressions() for name in _NAME.findall(expression)}
    used = {name.removeprefix("trinitylake_") for name in used_series}
    unused = [
        name
        for name, instrument in INSTRUMENTS.items()
        if not {f"{name}{ending}" for ending in _ENDINGS[instrument.kind]} & used
    ]
    assert unused == []


def test_each_alert_has_test_and_instructions() -> None:
    tests = yaml.safe_load((HERE / "alerts.yaml").read_text())["tests"]
    firing = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    silent = {case["alertname"] for test in tests for case in test["alert_rule_test"] if not case["exp_alerts"]}
    assert firing == silent == {rule["alert"] for rule in RULES}
    assert all(rule["annotations"]["next"] and rule["annotations"]["summary"] for rule in RULES)


def test_dashboard_contains_no_addresses() -> None:
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
        process = subprocess.run([promtool, *arguments], capture_output=True, text=True, cwd=HERE)
        assert process.returncode == 0, process.stdout + process.stderr
        assert "SUCCESS" in process.stdout


def run_query(url: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=10) as response:
        result: list[Any] = json.load(response)["data"]["result"]
    return result


@pytest.mark.soak
@pytest.mark.debian_packages
@pytest.mark.timeout(600)
def test_panels_show_data_of_running_server(lakes: Lakes, tmp_path: Path) -> None:
    """Prometheus accepts all expressions, and all return data, except those about failures."""
    lake = lakes.local()
    with serving(settings_for(lake)) as server:
        server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]})
        server.request("POST", TABLES, create_body())
        with prometheus(tmp_path, server.url.removeprefix("http://"), scrape_s=1) as url:
            started = time.time()
            deadline = time.monotonic() + TIMEOUT_SECONDS
            empty: set[str] = {"all"}
            n_commits = 0
            while empty and time.monotonic() < deadline:
                n_commits += 1
                server.request("POST", TABLE, commit_of(properties(a=str(n_commits))))
                create(lake, f"n{n_commits}")
                operations.verify(lake, incremental=True)
                time.sleep(1)
                try:
                    empty = {expression for expression in expressions_of_panels() if not run_query(url, expression)}
                except OSError:
                    continue  # Prometheus is still starting
                empty -= {expression for expression in empty if any(name in expression for name in MAY_BE_EMPTY)}
            window = Window(started, time.time(), scrape=15)  # the expressions contain rates over one minute
            picture = tmp_path / "dashboard.png"
            n_drawn = draw(DASHBOARD, lambda target: query_series(url, window, target), window, "", picture)
    assert empty == set()
    optional = [panel for panel in panels() if any(name in panel["targets"][0]["expr"] for name in MAY_BE_EMPTY)]
    assert n_drawn >= len(panels()) - len(optional)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_values_and_names_are_formatted() -> None:
    texts = {
        (0.0042, "s"): "4.2 ms",
        (90, "s"): "1.5 min",
        (187_200, "s"): "2.17 d",
        (4_400_000, "bytes"): "4.2 MiB",
        (0.125, "percentunit"): "12.5 %",
        (120, "none"): "120",
        (1_234, "none"): "1234",
        (0, "ops"): "0 ops/s",
        (float("inf"), "s"): "∞",
    }
    assert {(value, unit): format_value(value, unit) for value, unit in texts} == texts
    assert legend("{{lakehouse}} {{of}}, a minute", {"lakehouse": "main"}) == "main , a minute"
    assert legend("{{status}}", {}) == "Value"
    assert Window(0, 600, 2).expand('rate(x{l=~"$lakehouse"}[$__rate_interval])') == 'rate(x{l=~".*"}[8s])'


def test_all_units_of_dashboard_are_supported() -> None:
    assert all(format_value(1, panel["fieldConfig"]["defaults"]["unit"]) for panel in panels())
    assert PICTURE.is_file()
    assert f"images/{PICTURE.name}" in (MONITORING.parents[1] / "docs" / "deploy" / "monitoring.md").read_text()


#: Metrics that a healthy lakehouse does not have: overdue maintenance and transient request failures.
MAY_BE_EMPTY = ("due_seconds", "storage_retries")


def expressions_of_panels() -> list[str]:
    templates = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [template.replace("$__rate_interval", "1m").replace("$lakehouse", ".*") for template in templates]
