"""The first steps of docs/deploy/airflow.md, as a new user takes them: a new environment, standalone, an approval."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.airflow.deployment import CONSTRAINTS, Api, copy_source, wait_for, wait_for_a_question
from tests.docs.pages import DOCS, snippets
from tests.e2e.browser import opened_page
from tests.servers.daemons import free_port
from trinitylake_ops import Lakehouse

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(7_200)]

PAGE = DOCS / "deploy" / "airflow.md"
#: Which connection each row of the page's table is about.
WRONG = {
    "the host is not a root": {"host": "lake"},
    "the extra has an unknown field": {"host": "/srv/lake", "extra": {"enginee": "local"}},
    "the extra is not JSON": {"host": "/srv/lake", "extra": "engine: local"},
    "there is no lakehouse": {"host": "/srv/lake"},
    "the storage's package is missing": {"host": "s3://bucket/lake"},
}
#: The triggerer's loop stands still while it imports a trigger.
IMPORT_TRIGGER = """
import sys
from trinitylake_ops.airflow_plugin import CommitTrigger
print(*{"pyiceberg", "pyspark", "dagster"} & {*sys.modules})
"""
TEST_CONNECTION = """
from trinitylake_ops.airflow_plugin import TrinityLakeHook
print(TrinityLakeHook().test_connection()[1])
"""


def first_steps(source: Path) -> list[str]:
    """Return the commands of the page, for a clone of this repository."""
    shown = [one.text for one in snippets(PAGE) if one.section == "First steps"]
    assert len(shown) == 3 and "SOURCE=$HOME/trinitylake-ops\n" in shown[0]
    return [text.replace("SOURCE=$HOME/trinitylake-ops", f"SOURCE={source}") for text in shown]


def own_environment() -> dict[str, str]:
    """Return the variables of this process, but for those of its own environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@contextmanager
def standalone(folder: Path, script: str, ports: dict[str, str]) -> Iterator[Path]:
    """Run a script that ends with a standalone Airflow. Provides its log."""
    log = folder / "standalone.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={**own_environment(), **ports},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        for moment in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, moment)
                process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def test_a_new_user_publishes_and_approves_a_rollback(tmp_path: Path) -> None:
    source = copy_source(tmp_path / "clone")
    (source / "tests" / "airflow").mkdir(parents=True)
    shutil.copy(CONSTRAINTS, source / "tests" / "airflow")
    (user := tmp_path / "user").mkdir()
    url = f"http://127.0.0.1:{free_port()}"
    ports = {
        "AIRFLOW__API__PORT": url.rpartition(":")[2],
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
    }
    with standalone(user, "\n".join(first_steps(source)), ports) as log:
        passwords = user / "home" / "simple_auth_manager_passwords.json.generated"
        wait_for(lambda: passwords.exists() or None)
        password = json.loads(passwords.read_text())["admin"]
        airflow = Api(url)
        airflow.sign_in("admin", password)
        assert f"Password for user 'admin': {password}" in log.read_text()
        # Not sooner: tasks that begin before the server is there fail.
        for dag in ("trinitylake_follow", "trinitylake_rollback", "trinitylake_publish"):
            airflow.wait_for_dag(dag)
            airflow.ask("PATCH", f"/api/v2/dags/{dag}", {"is_paused": False})
        for dag in ("trinitylake_publish", "trinitylake_follow"):
            first, *_ = wait_for(lambda dag=dag: airflow.runs(dag) or None)
            assert airflow.wait_for_run(dag, first) == "success"
        dag, run_id = "trinitylake_rollback", "by-hand"
        airflow.trigger(dag, run_id, {"version": 0})
        wait_for(lambda: airflow.task_state(dag, run_id, "rollback.approve") == "awaiting_input" or None)
        wait_for_a_question(log, dag, run_id, "rollback.approve")
        with opened_page() as page:
            page.goto(f"{url}/auth/login/")
            page.get_by_label("Username").fill("admin")
            page.get_by_label("Password").fill(password)
            page.get_by_role("button", name="Sign in").click()
            page.wait_for_url(lambda now: "/auth/login" not in now)
            page.goto(f"{url}/required_actions")
            page.get_by_text("Approve the plan of rollback?").first.click()
            page.get_by_role("button", name="Approve").click()
            assert airflow.wait_for_run(dag, run_id) == "success"
    lake = Lakehouse.open(str(user / "lake"))
    (info,) = lake.history(1)
    assert (lake.latest_version(), info.operation, info.approved_by) == (2, "rollback", "admin")
    python, home = user / ".venv" / "bin" / "python", user / "home"
    check_what_is_wrong(python, home)
    assert said(python, home, IMPORT_TRIGGER) == ""


def said(python: Path, home: Path, program: str, **environment: str) -> str:
    """Return the last line that a program of an environment prints."""
    done = subprocess.run(
        [python, "-c", program],
        cwd=home,
        env={**own_environment(), "AIRFLOW_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.splitlines()[-1]


def check_what_is_wrong(python: Path, home: Path) -> None:
    """Compare the page's table of errors with what the hook says."""
    rows = dict(re.findall(r"^\| ([^|]+) \| `([^|]+)` \|$", PAGE.read_text(), re.MULTILINE))
    for name, connection in WRONG.items():
        given = json.dumps({"conn_type": "trinitylake", **connection})
        assert said(python, home, TEST_CONNECTION, AIRFLOW_CONN_TRINITYLAKE_DEFAULT=given) == rows[name], name
