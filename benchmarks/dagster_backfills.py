"""Measure backfills of 30 days of six assets by Dagster's daemon, with our IO manager and with dagster-iceberg's.

Run from the project's root: ``.venv/bin/python -m benchmarks.dagster_backfills``. It writes
``benchmarks/results/dagster_backfills.md`` and fails if a row is missing or duplicated. ``--days 5`` runs fewer
days. Each case has a separate environment, daemon and Dagster instance, and the cases run one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.execution.asset_backfill import AssetBackfillData
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._time import get_current_timestamp

from benchmarks.backfill_project import (
    DAYS,
    ICEBERG,
    N_COUNTRIES,
    N_CUSTOMERS,
    ONE_PUBLISH_ASSET,
    PUBLISH_PER_STEP,
    PUBLISHER,
    ROWS_PER_DAY,
    TABLES,
)
from benchmarks.report import RESULTS, table, write_result
from tests.environments import make_environment
from tests.servers.downloads import cached_folder
from trinitylake_ops import Lakehouse

PROJECT = Path(__file__).with_name("backfill_project.py")
N_DAYS = 30
DAGSTER_ICEBERG = "0.3.14"
BACKFILL = "benchmark"
#: The cases. Times are relative to the first case.
CASES = (ICEBERG, PUBLISH_PER_STEP, ONE_PUBLISH_ASSET)
#: Files in memory, because on a disk most of the time would be spent on synced writes of Dagster's SQLite databases.
MEMORY = "/dev/shm"
_FIRST_DAY = date(2026, 1, 1)
_MAX_CONCURRENT_RUNS = 4
_TIMEOUT_S = 3_600
#: A program that runs Dagster's daemon with a shorter interval. By default it checks backfills every 30 seconds, which
#: cannot be configured, and the time spent waiting would hide the time spent working.
_DAEMON = """
import dagster._daemon.controller as controller
controller.DEFAULT_DAEMON_INTERVAL_SECONDS = 2
from dagster._daemon.cli import main
main()
"""
_READ_TABLES = "import json; from backfill_project import read_tables; print(json.dumps(read_tables(), default=str))"
_VERSIONS = """
import json
from importlib.metadata import distributions
print(json.dumps({package.name.lower(): package.version for package in distributions()}))
"""
_INSTANCE = {
    "telemetry": {"enabled": False},
    "concurrency": {"runs": {"max_concurrent_runs": _MAX_CONCURRENT_RUNS}},
    "run_coordinator": {
        "module": "dagster._core.run_coordinator",
        "class": "QueuedRunCoordinator",
        "config": {"dequeue_interval_seconds": 1},
    },
}
#: The phases of runs and steps, by the event of Dagster's log with which they end.
_PHASES = {
    "PIPELINE_START": "run: process, imports, definitions",
    "STEP_WORKER_STARTED": "step: process, imports of Dagster",
    "RESOURCE_INIT_STARTED": "step: imports and definitions of the project",
    "RESOURCE_INIT_SUCCESS": "step: resources",
    "STEP_START": "step: resources",
    "LOADED_INPUT": "step: inputs",
    "STEP_INPUT": "step: inputs",
    "STEP_OUTPUT": "step: computation",
    "HANDLED_OUTPUT": "step: output, with commit and report",
    "STEP_SUCCESS": "step: end",
}


@dataclass
class Result:
    """The times of a case, and the tables that it wrote."""

    seconds: float
    is_complete: bool
    runs: Counter[str]
    n_steps: int
    n_retries: int
    n_commits: int
    versions: Mapping[str, str]
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A case with its Python environment, and the folder of its tables and its Dagster instance."""

    name: str
    python: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of its processes."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "PYTHONPATH": str(PROJECT.parent),
            "DAGSTER_HOME": str(self.folder / "home"),
            "BACKFILL_CASE": self.name,
            "BACKFILL_FOLDER": str(self.folder),
        }

    def prepare(self) -> None:
        """Create the catalog, and the folder of the Dagster instance."""
        (self.folder / "home").mkdir(parents=True)
        (self.folder / "tables").mkdir()
        (self.folder / "home" / "dagster.yaml").write_text(yaml.safe_dump(_INSTANCE))
        location = {"python_file": {"relative_path": str(PROJECT), "executable_path": self.python}}
        (self.folder / "workspace.yaml").write_text(yaml.safe_dump({"load_from": [location]}))
        if self.name == ICEBERG:
            program = (
                "from backfill_project import iceberg_properties; from pyiceberg.catalog import load_catalog;"
                "load_catalog('lake', **iceberg_properties()).create_namespace('shop')"
            )
            self.output(program)
        else:
            Lakehouse.create(str(self.folder / "lake"))

    def output(self, program: str) -> Any:
        """Run a program in the environment of the case, and return the JSON that it prints."""
        process = subprocess.run(
            [self.python, "-c", program], env=self.environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return json.loads(process.stdout or "null")

    def run(self, days: Sequence[str]) -> Result:
        """Backfill all assets over some days.

        Raises:
            RuntimeError: If the backfill failed or did not end in time.
        """
        self.prepare()
        selection = [*(asset.key for asset in TABLES), *([PUBLISHER] if self.name == ONE_PUBLISH_ASSET else [])]
        with (
            dg.DagsterInstance.from_config(str(self.folder / "home")) as instance,
            (self.folder / "daemon.log").open("wb") as log,
        ):
            command = [self.python, "-c", _DAEMON, "run", "-w", str(self.folder / "workspace.yaml")]
            daemon = subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=log, stderr=log)
            try:
                started = time.monotonic()
                instance.add_backfill(_backfill(instance, days, selection))
                while (status := _status(instance)) == BulkActionStatus.REQUESTED:
                    if time.monotonic() - started > _TIMEOUT_S or daemon.poll() is not None:
                        break
                    time.sleep(1)
                seconds = time.monotonic() - started
            finally:
                daemon.terminate()
                daemon.wait()
            result = self._result(instance, days, seconds)
        if status != BulkActionStatus.COMPLETED_SUCCESS:
            raise RuntimeError(f"{self.name}: {status}, {result}; see {self.folder}")
        return result

    def _result(self, instance: dg.DagsterInstance, days: Sequence[str], seconds: float) -> Result:
        phases: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        runs = instance.get_run_records()
        for record in runs:
            _count(instance, record.dagster_run.run_id, kinds, phases)
        rows, n_commits = self.output(_READ_TABLES)
        return Result(
            seconds=seconds,
            is_complete=_is_complete(rows, days),
            runs=Counter(record.dagster_run.status.value for record in runs),
            n_steps=kinds["STEP_SUCCESS"],
            n_retries=kinds["STEP_UP_FOR_RETRY"] + kinds["STEP_FAILURE"],
            n_commits=n_commits,
            versions=self.output(_VERSIONS),
            phases=dict(phases),
        )


def _backfill(instance: dg.DagsterInstance, days: Sequence[str], selection: Sequence[dg.AssetKey]) -> PartitionBackfill:
    subset = DAYS.subset_with_partition_keys(days)
    is_partitioned = {asset.key: asset.partitions_def is not None for asset in TABLES}
    target = AssetGraphSubset(
        partitions_subsets_by_asset_key={key: subset for key in selection if is_partitioned.get(key, True)},
        non_partitioned_asset_keys={key for key in selection if not is_partitioned.get(key, True)},
    )
    now = get_current_timestamp()
    return PartitionBackfill(
        backfill_id=BACKFILL,
        status=BulkActionStatus.REQUESTED,
        from_failure=False,
        tags={},
        backfill_timestamp=now,
        asset_selection=selection,
        asset_backfill_data=AssetBackfillData.empty(target, now, instance),
    )


def _status(instance: dg.DagsterInstance) -> BulkActionStatus:
    backfill = instance.get_backfill(BACKFILL)
    assert backfill is not None
    return backfill.status


def _count(instance: dg.DagsterInstance, run_id: str, kinds: Counter[str], phases: Counter[str]) -> None:
    """Add the number of events of a run, and the seconds of its phases."""
    phase_start: dict[str | None, float] = {}
    for entry in instance.all_logs(run_id):
        if entry.dagster_event is None:
            continue
        kind, step = entry.dagster_event.event_type_value, entry.dagster_event.step_key
        kinds[kind] += 1
        if kind in ("PIPELINE_STARTING", "STEP_WORKER_STARTING"):
            phase_start[step] = entry.timestamp
        elif kind in _PHASES and step in phase_start:
            phases[_PHASES[kind]] += entry.timestamp - phase_start[step]
            phase_start[step] = entry.timestamp


def _is_complete(rows: Mapping[str, Sequence[Mapping[str, Any]]], days: Sequence[str]) -> bool:
    """Whether each table has each expected row exactly once, with the values that follow from its inputs."""
    per_customer = ROWS_PER_DAY // N_CUSTOMERS
    countries = Counter(f"country {number % N_COUNTRIES}" for number in range(N_CUSTOMERS))
    expected = {
        "customers": [(number, f"country {number % N_COUNTRIES}") for number in range(N_CUSTOMERS)],
        "orders": [(day, number, number % N_CUSTOMERS, 1) for day in days for number in range(ROWS_PER_DAY)],
        "by_customer": [(day, number, per_customer) for day in days for number in range(N_CUSTOMERS)],
        "two_days": [
            (day, country, count * per_customer * (1 if day == days[0] else 2))
            for day in days
            for country, count in countries.items()
        ],
        "running": [(day, ROWS_PER_DAY * number) for number, day in enumerate(days, 1)],
        "summary": [(ROWS_PER_DAY * len(days),)],
    }
    return all(sorted(tuple(row.values()) for row in rows[name]) == sorted(values) for name, values in expected.items())


def lines(results: Mapping[Case, Result], n_days: int) -> list[str]:
    """Return the lines of the result."""
    baseline_s = next(iter(results.values())).seconds
    phases = [*dict.fromkeys(phase for result in results.values() for phase in result.phases)]
    packages = ("dagster", "dagster-iceberg", "pyiceberg", "pyarrow", "sqlalchemy")
    versions = {
        case.name: ", ".join(f"{name} {result.versions[name]}" for name in packages if name in result.versions)
        for case, result in results.items()
    }
    return [
        "# Backfills of partitioned assets by Dagster",
        "",
        f"A backfill of {n_days} days of six assets: a daily source, a table of the same day, one of this day and the",
        "day before with a lookup table, one that reads its own previous day, the lookup table without partitions, and",
        "one table of all days. Dagster's daemon splits the backfill into runs by these mappings, and starts up to",
        f"{_MAX_CONCURRENT_RUNS} runs at a time, each with the multiprocess executor: a process for the run, and one",
        "for each step. In all cases, the daemon checks the backfill every 2 seconds instead of 30, and the queue",
        "every second. Tables and Dagster's databases are files in memory. The cases run one after another on one",
        "machine.",
        "dagster-iceberg has its catalog in SQLite. Its IO manager fails to read the day before the first one, so the",
        "project returns no rows there for it.",
        "",
        *table(
            ("", "seconds", "ratio", "runs", "steps", "retries and failures", "commits", "each row once"),
            [
                (
                    case.name,
                    f"{result.seconds:.0f}",
                    f"{result.seconds / baseline_s:.2f}",
                    sum(result.runs.values()),
                    result.n_steps,
                    result.n_retries,
                    result.n_commits,
                    "yes" if result.is_complete else "NO",
                )
                for case, result in results.items()
            ],
        ),
        "",
        "Commits of dagster-iceberg are the metadata files of its tables. Those of trinitylake-ops are versions of the",
        "lakehouse. With one publish asset there is one more run, or step, for each day.",
        "",
        "## Time by phase",
        "",
        "Seconds between events of Dagster's log, added over all runs and steps. Up to four runs overlap, so the sum",
        "is more than the seconds above.",
        "",
        *table(
            ("", *(case.name for case in results)),
            [(phase, *(f"{result.phases.get(phase, 0):.1f}" for result in results.values())) for phase in phases],
        ),
        "",
        "## Versions",
        "",
        f"Python {sys.version.split()[0]}.",
        "",
        *(f"- {name}: {text}" for name, text in versions.items()),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cases and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dagster_backfills", description=__doc__)
    parser.add_argument("--days", type=int, default=N_DAYS, help="number of partitions to backfill")
    parser.add_argument("--case", action="append", choices=CASES, help="run this case only; repeatable")
    parser.add_argument("--python", help="Python interpreter for our cases (default: a new environment)")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--keep", type=Path, help="keep the data in this folder (default: a temporary folder)")
    options = parser.parse_args(arguments)
    days = [str(_FIRST_DAY + timedelta(days=number)) for number in range(options.days)]
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-", dir=MEMORY) as temporary:
        folder = options.keep or Path(temporary)
        our_python = options.python
        if our_python is None:
            our_python = str(make_environment(Path(temporary) / "ours", ["dagster"]).folder / "bin" / "python")
        cases = [
            Case(name, _dagster_iceberg_python() if name == ICEBERG else our_python, folder / f"case{number}")
            for number, name in enumerate(options.case or CASES)
        ]
        results = {}
        for case in cases:
            results[case] = case.run(days)
            print(case.name, f"{results[case].seconds:.0f} s", flush=True)
    write_result("dagster_backfills", lines(results, len(days)), options.to)
    if not all(result.is_complete and set(result.runs) == {"SUCCESS"} for result in results.values()):
        raise SystemExit("a run failed, or a row is missing or duplicated")


def _dagster_iceberg_python() -> str:
    """Return the Python of an environment with dagster-iceberg and our version of Dagster."""
    pins = [f"dagster-iceberg=={DAGSTER_ICEBERG}", *(f"{name}=={version(name)}" for name in ("dagster", "pyarrow"))]

    def install(folder: Path) -> None:
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run(
            [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder / "v")], check=True
        )
        python = str(folder / "v" / "bin" / "python")
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *pins], check=True)

    name = "_".join(["dagster_iceberg", *(pin.partition("==")[2] for pin in pins)])
    return str(cached_folder(name, install) / "v" / "bin" / "python")


if __name__ == "__main__":
    main()
