"""Run the demo on real data, and open the Dagster UI with its runs.

`make soak` runs it in a separate process, with a year of data.
"""

import contextlib
import csv
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import polars as pl
import pytest
from click.testing import CliRunner
from dagster_graphql import DagsterGraphQLClient
from playwright.sync_api import expect
from pyiceberg.catalog import load_catalog
from rich.filesize import decimal

from tests.e2e.browser import opened_page
from tests.lakes import check_lake
from trinitylake_ops import Lakehouse
from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.demo.assets import INITIAL_JOB, MONTHLY_JOB
from trinitylake_ops.demo.walkthrough import main

# The soak tests use a year of data, and other test runs use a month.
pytestmark = pytest.mark.timeout(900)

REPOSITORY = Path(__file__).parents[2]
N_OTHER_RUNS = 1 + 2 + 5  # in addition to one run for each month


class FinishedDemo:
    """The demo with its settings, and its output once it has run."""

    def __init__(self, folder: Path, months: int, environment: Mapping[str, str] | None = None):
        self.months = months
        self.n_runs = months + N_OTHER_RUNS
        self.root = str(folder / "lakehouse")
        self.home = folder / "dagster_home"
        self.home.mkdir()
        shutil.copy(REPOSITORY / "deploy" / "demo" / "dagster.yaml", self.home)
        self._variables = {"DAGSTER_HOME": str(self.home), "TRINITYLAKE_ROOT": self.root, **(environment or {})}
        self.environment = {**os.environ, **self._variables}

    def run_program(self) -> None:
        """Run the demo in a separate process, like a user."""
        command = [sys.executable, "-m", "trinitylake_ops.demo", "--months", str(self.months)]
        process = subprocess.run(
            command, cwd=REPOSITORY, env=self.environment, capture_output=True, text=True, timeout=900, check=False
        )
        self.output, self.errors, self.exit_code = process.stdout, process.stderr, process.returncode

    def run_in_session(self) -> None:
        """Run the demo in this process with the Spark session of the tests."""
        arguments = ["--months", str(self.months), "--definitions", str(REPOSITORY / "definitions.py")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # like in a separate process
            result = CliRunner().invoke(main, arguments, env=self._variables)
        self.output, self.errors, self.exit_code = result.stdout, result.stderr, result.exit_code

    def trinitylake(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "trinitylake_ops.cli", "--root", self.root, *arguments, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    @cached_attribute
    def log(self) -> list[dict[str, Any]]:
        """The output of `trinitylake log`, newest version first."""
        entries: list[dict[str, Any]] = self.trinitylake("log")
        return entries


@pytest.fixture(scope="module", params=[1, pytest.param(12, marks=pytest.mark.soak)])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FinishedDemo:
    demo = FinishedDemo(tmp_path_factory.mktemp("demo"), request.param)
    if request.param == 1:
        request.getfixturevalue("spark")  # starting another session takes longer than the demo of a month
        demo.run_in_session()
    else:
        demo.run_program()
    return demo


def test_module_runs_as_program() -> None:
    command = [sys.executable, "-m", "trinitylake_ops.demo", "--help"]
    assert "--months" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_demo_succeeds_and_counts_rows_of_source(demo: FinishedDemo, flights_csv: Path) -> None:
    assert demo.exit_code == 0, demo.output + demo.errors
    with open(flights_csv, newline="") as file:
        months = Counter(row["month"] for row in csv.DictReader(file))
    assert months.total() == 336_776
    rows = sum(months[str(month)] for month in range(1, demo.months + 1))
    assert f"{rows:,} flights in the lakehouse, {rows:,} in the source" in demo.output
    counts_before, counts_after = (row_counts(demo.output, column) for column in (1, 2))
    assert (counts_before["facts.flights"], counts_after["facts.flights"]) == (months["1"], rows)
    assert counts_before["reference.airlines"] == counts_after["reference.airlines"] == 16
    assert re.search(r"publish 2013-01 .*version 2: 5 tables, [\d,]{6,} rows, [\d.]+ [kM]B written\n", demo.output)
    files = [path for path in Path(demo.root).rglob("*") if path.is_file()]
    assert f"{len(files):,} files, {decimal(sum(path.stat().st_size for path in files))}, at" in demo.output


def row_counts(output: str, column: int) -> dict[str, int]:
    """Return a column of the demo's table of row counts."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    return {row[0]: int(row[column].replace(",", "")) for row in cells if "." in row[0] and len(row) == 3}


def test_bad_month_is_blocked_without_version(demo: FinishedDemo) -> None:
    lines = {int(match[1]): line for line in demo.output.splitlines() if (match := re.match(r"\[ ?(\d+)/", line))}
    last_version = 1 + demo.months
    assert lines[last_version + 1].endswith("stopped by known_carriers, positive_distance; nothing published")
    assert f"version {last_version}:" in lines[last_version]
    assert f"version {last_version + 1}:" in lines[last_version + 2]


def test_each_version_has_its_run_id(demo: FinishedDemo) -> None:
    with dg.DagsterInstance.from_config(str(demo.home)) as instance:
        runs = {run.run_id: run for run in instance.get_runs()}
    assert len(runs) == demo.n_runs
    log = demo.log
    assert [entry["operation"] for entry in log[-2:]] == ["publish", "init"]
    assert all(entry["operation"] and entry["message"] for entry in log)
    job_names = {entry["version"]: runs[entry["run_id"]].job_name for entry in log}
    assert [job_names[version] for version in (0, 1, 2, demo.months + 1)] == [
        INITIAL_JOB,
        INITIAL_JOB,
        MONTHLY_JOB,
        MONTHLY_JOB,
    ]
    publishing = [run for run in runs.values() if run.job_name in (INITIAL_JOB, MONTHLY_JOB)]
    failed = [run for run in publishing if run.status == dg.DagsterRunStatus.FAILURE]
    assert len(failed) == 1
    # Each publishing run commits one version, and the blocked run commits none.
    versions = Counter(entry["run_id"] for entry in log if entry["operation"] == "publish")
    assert versions == Counter({run.run_id: 1 for run in publishing if run not in failed})


def test_rollback_undoes_bad_month(demo: FinishedDemo) -> None:
    log = {entry["version"]: entry for entry in demo.log}
    (rollback,) = [entry for entry in log.values() if entry["operation"] == "rollback"]
    bad_version = rollback["rollback_from"]
    undone_lines = [line for line in demo.output.splitlines() if f" undone by {rollback['version']} " in line]
    assert [int(line.strip("│ ").split()[0]) for line in undone_lines] == [bad_version]
    assert demo.trinitylake("diff", str(bad_version - 1), str(rollback["version"])) == []
    changed = {
        (change["namespace"], change["table"])
        for change in demo.trinitylake("diff", str(bad_version - 1), str(bad_version))
    }
    assert ("facts", "flights") in changed


def test_duckdb_and_polars_read_two_versions(demo: FinishedDemo) -> None:
    counts = row_counts(demo.output, 1)["facts.flights"], row_counts(demo.output, 2)["facts.flights"]
    expected = {"2": counts[0], str(demo.months + 1): counts[1]}
    for version, rows in expected.items():
        catalog = load_catalog(
            "lake",
            **{
                "py-catalog-impl": "trinitylake_ops.iceberg.catalog.TrinityLakeCatalog",
                "root": demo.root,
                "version": version,
            },
        )
        scan = catalog.load_table("facts.flights").scan()
        connection: duckdb.DuckDBPyConnection = scan.to_duckdb("flights")
        assert connection.execute("SELECT count(*) FROM flights").fetchall() == [(rows,)]
        polars = scan.to_polars()
        assert isinstance(polars, pl.DataFrame)
        assert len(polars) == rows


def test_verify_finds_nothing_and_hint_is_correct(demo: FinishedDemo) -> None:
    assert demo.trinitylake("verify")["findings"] == []
    assert demo.trinitylake("repair-hint", "--check-only")["state"] == "right"
    check_lake(Lakehouse.open(demo.root))


@contextlib.contextmanager
def ui_of(demo: FinishedDemo) -> Iterator[int]:
    """Start the UI like ``make ui``, and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    command = [sys.executable, "-m", "dagster_webserver", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--python-file", "definitions.py", "--log-level", "error"]
    webserver = subprocess.Popen(command, cwd=REPOSITORY, env=demo.environment)
    try:
        assert _is_up(port)
        yield port
    finally:
        webserver.terminate()
        webserver.wait(30)


def test_ui_shows_all_runs(demo: FinishedDemo) -> None:
    with ui_of(demo) as port:
        response = DagsterGraphQLClient("127.0.0.1", port_number=port)._execute(_UI_QUERY)
    with dg.DagsterInstance.from_config(str(demo.home)) as instance:
        runs = {run.run_id: run.job_name for run in instance.get_runs()}
    listed_runs = response["runsOrError"]["results"]
    assert {run["runId"]: run["jobName"] for run in listed_runs} == runs
    # The home page omits runs without an origin.
    assert {tuple(run["repositoryOrigin"].values()) for run in listed_runs} == {("__repository__", "definitions.py")}
    (location,) = response["workspaceOrError"]["locationEntries"]
    (repository,) = location["locationOrLoadError"]["repositories"]
    assert {"monthly_load", "initial_load", "rollback", "verify"} <= {job["name"] for job in repository["jobs"]}


@pytest.mark.soak
def test_home_page_has_row_for_each_job(demo: FinishedDemo) -> None:
    """Check the page that docs/python.md shows in a screenshot."""
    with ui_of(demo) as port, opened_page() as page:
        page.goto(f"http://127.0.0.1:{port}/")
        for job in (INITIAL_JOB, MONTHLY_JOB, "export", "repair_hint", "rollback", "verify"):
            expect(page.get_by_text(job, exact=True).first).to_be_visible()


_UI_QUERY = """
{
  runsOrError { ... on Runs { results {
    runId jobName repositoryOrigin { repositoryName repositoryLocationName }
  } } }
  workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError {
    ... on RepositoryLocation { repositories { jobs { name } } }
    ... on PythonError { message }
  } } } }
}
"""


def _is_up(port: int) -> bool:
    for _ in range(240):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=5):
            return True
        time.sleep(0.25)
    return False


def test_output_is_plain_and_complete(demo: FinishedDemo) -> None:
    numbers = re.findall(r"^\[ ?(\d+)/", demo.output, flags=re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, demo.n_runs + 1))
    assert "\x1b" not in demo.output
    assert "Traceback" not in demo.output + demo.errors
