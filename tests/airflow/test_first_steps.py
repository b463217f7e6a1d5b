"""Follow the first steps of docs/deploy/airflow.md as a new user does: standalone Airflow and an approval."""

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

from tests.airflow.deployment import CONSTRAINTS, Api, copy_source, wait_for, wait_for_approval_request
from tests.docs.pages import DOCS, snippets
from tests.e2e.browser import opened_page
from tests.servers.daemons import free_port
from trinitylake_ops import Lakehouse

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(7_200)]

PAGE = DOCS / "deploy" / "airflow.md"
#: The connection that causes each error in the page's table of errors.
CONNECTION_ERRORS = {
    "the host is not a root": {"host": "lake"},
    "the extra has an unknown field": {"host": "/srv/lake", "extra": {"enginee": "local"}},
    "the extra is not JSON": {"host": "/srv/lake", "extra": "engine: local"},
    "there is no lakehouse": {"host": "/srv/lake"},
    "the storage's package is missing": {"host": "s3://bucket/lake"},
}
#: Importing a trigger must be fast, because it blocks the triggerer's event loop.
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
    """Return the page's commands, with this repository as the clone."""
    commands = [snippet.text for snippet in snippets(PAGE) if snippet.section == "First steps"]
    assert len(commands) == 3 and "SOURCE=$HOME/trinitylake-ops\n" in commands[0]
    return [text.replace("SOURCE=$HOME/trinitylake-ops", f"SOURCE={source}") for text in commands]


def clean_environment() -> dict[str, str]:
    """Return the environment variables of this process without those of its virtual environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@contextmanager
def standalone(folder: Path, script: str, ports: dict[str, str]) -> Iterator[Path]:
    """Run a script that ends with a standalone Airflow, and yield the path of its log."""
    log = folder / "standalone.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={**clean_environment(), **ports},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, signal_number)
                process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def test_new_user_publishes_and_approves_rollback(tmp_path: Path) -> None:
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
        # DAGs are unpaused only now, because tasks that start before the server is ready fail.
        for dag in ("trinitylake_follow", "trinitylake_rollback", "trinitylake_publish"):
            airflow.wait_for_dag(dag)
            airflow.request("PATCH", f"/api/v2/dags/{dag}", {"is_paused": False})
        for dag in ("trinitylake_publish", "trinitylake_follow"):
            first, *_ = wait_for(lambda dag=dag: airflow.runs(dag) or None)
            assert airflow.wait_for_run(dag, first) == "success"
        dag, run_id = "trinitylake_rollback", "manual"
        airflow.trigger(dag, run_id, {"version": 0})
        wait_for(lambda: airflow.task_state(dag, run_id, "rollback.approve") == "awaiting_input" or None)
        wait_for_approval_request(log, dag, run_id, "rollback.approve")
        with opened_page() as page:
            page.goto(f"{url}/auth/login/")
            page.get_by_label("Username").fill("admin")
            page.get_by_label("Password").fill(password)
            page.get_by_role("button", name="Sign in").click()
            page.wait_for_url(lambda current_url: "/auth/login" not in current_url)
            page.goto(f"{url}/required_actions")
            page.get_by_text("Approve the plan of rollback?").first.click()
            page.get_by_role("button", name="Approve").click()
            assert airflow.wait_for_run(dag, run_id) == "success"
    lake = Lakehouse.open(str(user / "lake"))
    (info,) = lake.history(1)
    assert (lake.latest_version(), info.operation, info.approved_by) == (2, "rollback", "admin")
    python, home = user / ".venv" / "bin" / "python", user / "home"
    check_error_table(python, home)
    assert last_output_line(python, home, IMPORT_TRIGGER) == ""


def last_output_line(python: Path, home: Path, program: str, **environment: str) -> str:
    """Return the last line that a program prints in an environment."""
    process = subprocess.run(
        [python, "-c", program],
        cwd=home,
        env={**clean_environment(), "AIRFLOW_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return process.stdout.splitlines()[-1]


def check_error_table(python: Path, home: Path) -> None:
    """Compare the page's table of errors with the messages of the hook."""
    rows = dict(re.findall(r"^\| ([^|]+) \| `([^|]+)` \|$", PAGE.read_text(), re.MULTILINE))
    for name, connection in CONNECTION_ERRORS.items():
        connection_json = json.dumps({"conn_type": "trinitylake", **connection})
        assert (
            last_output_line(python, home, TEST_CONNECTION, AIRFLOW_CONN_TRINITYLAKE_DEFAULT=connection_json)
            == rows[name]
        ), name
