"""Sensors and schedules under Dagster's own daemon: commits made by another process, and a daemon that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.maintenance.changes import alter, create
from trinitylake_ops import Lakehouse

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 240
TICK = "Checking for new runs for sensor: trinitylake_commits"
LAUNCH = "Launching run for trinitylake_commits"

SETTINGS = """
run_coordinator:
  module: dagster._core.run_coordinator
  class: DefaultRunCoordinator
telemetry:
  enabled: false
nux:
  enabled: false
"""

DEFINITIONS = """
import dagster as dg

from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.sensors import build_commit_sensor


@dg.op
def follow():
    pass


@dg.job
def consumer():
    follow()


defs = dg.Definitions(
    jobs=[consumer],
    sensors=[
        build_commit_sensor(
            job=consumer, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING
        )
    ],
    resources={"lakehouse": TrinityLakeResource(root=ROOT, storage_options=StorageSettings(fsync="false"))},
)
"""


class Daemon:
    """The daemon with its code server, as processes of their own."""

    def __init__(self, folder: Path, definitions: str):
        self.folder = folder
        (folder / "dagster.yaml").write_text(SETTINGS)
        (folder / "served.py").write_text(definitions)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "dagster._daemon", "run", "-f", str(self.folder / "served.py")]
        environment = {**os.environ, "DAGSTER_HOME": str(self.folder), "PYTHONPATH": str(REPOSITORY)}
        with (self.folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def said(self) -> str:
        return (self.folder / "daemon.log").read_text()


@pytest.fixture
def lake(tmp_path: Path) -> Lakehouse:
    made = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    create(made, "ns", "a", "b")
    return made


@pytest.fixture
def daemon(tmp_path: Path, lake: Lakehouse) -> Iterator[Daemon]:
    home = tmp_path / "home"
    home.mkdir()
    made = Daemon(home, f"ROOT = {lake.root!r}\n{DEFINITIONS}")
    yield made
    made.kill()


def wait_for(daemon: Daemon, is_done: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + PATIENCE_SECONDS
    while not is_done():
        assert time.monotonic() < ends_s, daemon.said()
        time.sleep(0.5)


@pytest.mark.timeout(900)
def test_a_commit_of_another_process_runs_once_also_after_a_kill(
    daemon: Daemon, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(daemon.folder))
    with dg.DagsterInstance.get() as instance:

        def versions_run() -> list[int]:
            return sorted(int(run.tags["trinitylake/version"]) for run in instance.get_runs())

        def all_succeeded() -> bool:
            return all(run.status == dg.DagsterRunStatus.SUCCESS for run in instance.get_runs())

        def ticked(times: int) -> Callable[[], bool]:
            before = daemon.said().count("Checking for new runs for sensor: trinitylake_commits")
            return lambda: (
                daemon.said().count("Checking for new runs for sensor: trinitylake_commits") >= before + times
            )

        daemon.start()
        wait_for(daemon, lambda: "version 1 is the latest" in daemon.said())
        before = len(daemon.said())
        first = alter(lake, "ns", "a")
        wait_for(daemon, lambda: versions_run() == [first] and all_succeeded())
        ticks, launched, _ = daemon.said()[before:].partition(LAUNCH)
        assert launched
        assert ticks.count(TICK) <= 2

        daemon.kill()
        for _ in range(20):
            alter(lake, "ns", "a")
        second = alter(lake, "ns", "b")
        daemon.start()
        wait_for(daemon, lambda: versions_run() == [first, second] and all_succeeded())
        wait_for(daemon, ticked(2))
        assert versions_run() == [first, second]
        seen = instance.fetch_materializations(dg.AssetKey(["ns", "a"]), limit=10).records
        assert len(seen) == 2
