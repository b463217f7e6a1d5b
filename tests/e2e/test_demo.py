"""The demo, run as a user runs it, on a source of our own: its figures must follow the source."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import polars as pl
import pytest
from pyiceberg.catalog import load_catalog

from tests.lakes import check_lake
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.flights import INITIAL_JOB, MONTHLY_JOB
from trinitylake_ops.spark_jobs.flights_source import FlightsSource

REPOSITORY = Path(__file__).parents[2]
ROWS_PER_MONTH = 150
RUNS = 1 + 12 + 2 + 4


@pytest.fixture(scope="module")
def source_folder(tmp_path_factory: pytest.TempPathFactory, flights_csv: Path) -> Path:
    """A few flights of every month, and all else of the real data."""
    folder = tmp_path_factory.mktemp("source")
    real = FlightsSource()
    for name in ("airlines", "airports", "planes", "weather"):
        shutil.copy(real.path(name), folder / f"{name}.csv")
    taken: Counter[str] = Counter()
    with open(flights_csv, newline="") as rows, open(folder / "flights.csv", "w", newline="") as out:
        reader, writer = csv.reader(rows), csv.writer(out)
        header = next(reader)
        writer.writerow(header)
        for row in reader:
            month = row[header.index("month")]
            if taken[month] < ROWS_PER_MONTH:
                taken[month] += 1
                writer.writerow(row)
    return folder


class FinishedDemo:
    def __init__(self, folder: Path, source_folder: Path):
        self.root = str(folder / "lakehouse")
        self.home = folder / "dagster_home"
        self.home.mkdir()
        shutil.copy(REPOSITORY / "deploy" / "dagster.yaml", self.home)
        environment = {**os.environ, "DAGSTER_HOME": str(self.home), "TRINITYLAKE_ROOT": self.root}
        command = [sys.executable, "-m", "trinitylake_ops.dagster_plugin.demo", "--source", str(source_folder)]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        self.output, self.errors, self.exit_code = done.stdout, done.stderr, done.returncode

    def trinitylake(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "trinitylake_ops.cli", "--root", self.root, *arguments, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, source_folder: Path) -> FinishedDemo:
    return FinishedDemo(tmp_path_factory.mktemp("demo"), source_folder)


def test_it_ends_well_and_counts_what_the_source_has(demo: FinishedDemo) -> None:
    assert demo.exit_code == 0, demo.output + demo.errors
    expected = 12 * ROWS_PER_MONTH
    assert f"{expected:,} flights in the lakehouse, {expected:,} in the source." in demo.output
    assert f"[{RUNS}/{RUNS}]" in demo.output
    assert "stopped by" in demo.output


def test_every_version_names_the_run_that_made_it(demo: FinishedDemo) -> None:
    with dg.DagsterInstance.from_config(str(demo.home)) as instance:
        runs = {run.run_id: run for run in instance.get_runs()}
    assert len(runs) == RUNS
    log = demo.trinitylake("log")
    assert [entry["operation"] for entry in log[-2:]] == ["publish", "init"]
    made_by = {entry["version"]: runs[entry["run_id"]].job_name for entry in log if entry["version"] > 0}
    assert [made_by[1], made_by[2], made_by[13]] == [INITIAL_JOB, MONTHLY_JOB, MONTHLY_JOB]
    publishing = [run for run in runs.values() if run.job_name in (INITIAL_JOB, MONTHLY_JOB)]
    failed = [run for run in publishing if run.status == dg.DagsterRunStatus.FAILURE]
    assert len(failed) == 1
    # Each publishing run made one version, the stopped one none.
    versions = Counter(entry["run_id"] for entry in log if entry["operation"] == "publish")
    assert versions == Counter({run.run_id: 1 for run in publishing if run not in failed})


def test_the_rollback_undid_the_bad_month(demo: FinishedDemo) -> None:
    log = {entry["version"]: entry for entry in demo.trinitylake("log")}
    (rollback,) = [entry for entry in log.values() if entry["operation"] == "rollback"]
    bad = rollback["rollback_from"]
    assert demo.trinitylake("diff", str(bad - 1), str(rollback["version"])) == []
    changed = {(change["namespace"], change["table"]) for change in demo.trinitylake("diff", str(bad - 1), str(bad))}
    assert ("facts", "flights") in changed


def test_duckdb_and_polars_read_two_versions(demo: FinishedDemo) -> None:
    expected = {"2": ROWS_PER_MONTH, "13": 12 * ROWS_PER_MONTH}
    for version, rows in expected.items():
        catalog = load_catalog(
            "lake",
            **{
                "py-catalog-impl": "trinitylake_ops.tables.catalog.TrinityLakeCatalog",
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


def test_everything_verifies_and_the_hint_is_right(demo: FinishedDemo) -> None:
    assert demo.trinitylake("verify")["findings"] == []
    assert demo.trinitylake("hint")["state"] == "right"
    check_lake(Lakehouse.open(demo.root))


def test_output_is_plain_and_complete(demo: FinishedDemo) -> None:
    numbers = re.findall(r"^\[ ?(\d+)/", demo.output, flags=re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, RUNS + 1))
    assert "\x1b" not in demo.output
    assert "Traceback" not in demo.output + demo.errors
