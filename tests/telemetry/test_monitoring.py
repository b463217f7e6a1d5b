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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lakes import Lakes, lakes
from tests.maintenance.changes import create
from tests.server.requests import TABLE, TABLES, commit_of, created, properties
from tests.server.served import serving, settings_for
from tests.servers.daemons import free_port
from trinitylake_ops import maintenance
from trinitylake_ops.telemetry.instruments import INSTRUMENTS, Kind

__all__ = ["lakes"]

HERE = Path(__file__).parent
MONITORING = HERE.parents[1] / "deploy" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
#: Those that a server counts itself (server/observed/metrics.py).
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


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run a Prometheus that reads a server every second; yields its address."""
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is not installed"
    job = {"job_name": "trinitylake", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    url = f"127.0.0.1:{free_port()}"
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        [program, *arguments, f"--web.listen-address={url}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait()


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
        served.ask("POST", "/v1/main/namespaces", {"namespace": ["ns"]})
        served.ask("POST", TABLES, created())
        with prometheus(tmp_path, served.url.removeprefix("http://")) as url:
            end_s = time.monotonic() + PATIENCE_SECONDS
            empty: set[str] = {"all"}
            n_made = 0
            while empty and time.monotonic() < end_s:
                n_made += 1
                served.ask("POST", TABLE, commit_of(properties(a=str(n_made))))
                create(lake, f"n{n_made}")
                maintenance.verify(lake, incremental=True)
                time.sleep(1)
                try:
                    empty = {one for one in expressions_of_panels() if not asked(url, one)}
                except OSError:
                    continue  # it begins
                empty -= {one for one in empty if any(word in one for word in MAY_BE_EMPTY)}
    assert empty == set()


#: What a lakehouse that is well does not have: things that are due, and requests that failed in passing.
MAY_BE_EMPTY = ("due_seconds", "storage_retries")


def expressions_of_panels() -> list[str]:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [one.replace("$__rate_interval", "1m").replace("$lakehouse", ".*") for one in found]
