"""Test the services and the daemon of the running deployment of ``deploy/``, also when processes are killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.credentials.canaries import SECRET_ACCESS_KEY
from tests.e2e.aged_lakehouses import aged_lakehouse
from tests.e2e.graphql import FINISHED, METADATA
from tests.e2e.topology import CODE, POSTGRES_PASSWORD, Topology, secrets_in
from tests.iceberg.hostile import without_seals
from tests.lakes import check_lake
from tests.operations.changes import alter, expire
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.sensors import VERSION_TAG
from trinitylake_ops.storage import LocalStorage

pytestmark = [pytest.mark.usefixtures("radosgw"), pytest.mark.timeout(900)]

SENSOR = "quick_commits"
EXPIRY = "expiring_expire_schedule"
BURST = 500
#: Time after a tick in which its state is saved and a pending tick starts.
TICK_SETTLE_TIME_S = 10
NOT_STARTED = ("QUEUED", "NOT_STARTED", "STARTING")


@pytest.fixture(scope="module", autouse=True)
def expiring(topology: Topology) -> Iterator[Lakehouse]:
    """A lakehouse with scheduled expiry. The schedule is started first, so that it is due during other tests."""
    lake = aged_lakehouse(topology.volume / "expiring", n_versions=5, is_expired=False)
    result = topology.graphql(
        "mutation ($selector: ScheduleSelector!) { startSchedule(scheduleSelector: $selector) { __typename } }",
        selector={**CODE, "scheduleName": EXPIRY},
    )
    assert result["startSchedule"]["__typename"] == "ScheduleStateResult"
    yield lake
    check_lake(lake)


@pytest.mark.parametrize("name", ["code", "webserver", "viewer", "daemon"])
def test_service_is_healthy(topology: Topology, name: str) -> None:
    topology.wait_until(topology.services[name].is_healthy, name)


def test_deletion_pool_has_limit(topology: Topology) -> None:
    data = topology.graphql("{ instance { concurrencyLimits { concurrencyKey limit } } }")
    assert {"concurrencyKey": ONLY.pool, "limit": 1} in data["instance"]["concurrencyLimits"]


def test_viewer_rejects_changes(topology: Topology) -> None:
    assert topology.graphql("{ runsOrError { __typename } }", viewer=True)["runsOrError"]["__typename"] == "Runs"
    before = len(topology.runs())
    with pytest.raises(AssertionError, match="UnauthorizedError"):
        topology.launch("verify", viewer=True)
    reloaded = topology.graphql("mutation { reloadWorkspace { __typename } }", viewer=True)
    assert reloaded["reloadWorkspace"]["__typename"] == "UnauthorizedError"
    assert len(topology.runs()) == before


# Commit sensor


class CommitSensor:
    """A sensor of the code location, controlled like from its page."""

    def __init__(self, topology: Topology, name: str):
        self.topology = topology
        self.selector = {**CODE, "sensorName": name}

    def start(self) -> None:
        result = self._change("startSensor(sensorSelector: $selector)", "... on Sensor { name }")
        assert "name" in result, result

    def stop(self) -> None:
        """Stop the sensor after its current tick has saved the cursor.

        Dagster changes a sensor's state with a read and a write. If a stop and the end of a tick interleave, the tick's
        cursor is lost or the sensor keeps running. In that case, this method waits for another tick and stops the
        sensor again.
        """
        while not self._try_stop():
            self.start()
            self.wait_for_ticks()

    def _try_stop(self) -> bool:
        """Stop the sensor. Return whether it stopped with the cursor of its last tick."""
        result = self.topology.graphql(
            "mutation ($id: String!) { stopSensor(id: $id) { ... on StopSensorMutationResult { instigationState"
            " { status } } } }",
            id=self._state("id")["id"],
        )["stopSensor"]
        assert result["instigationState"]["status"] == "STOPPED", result
        self.topology.wait_until(lambda: self.ticks()[0]["status"] != "STARTED", "the end of the tick")
        time.sleep(TICK_SETTLE_TIME_S)
        return self._is_stopped()

    def _is_stopped(self) -> bool:
        return self._state("status")["status"] == "STOPPED" and self.ticks()[0]["cursor"] == self.cursor()

    def cursor(self) -> str:
        data = self._state("typeSpecificData { ... on SensorData { lastCursor } }")["typeSpecificData"]
        cursor: str = data["lastCursor"]
        return cursor

    def set_cursor(self, cursor: str) -> None:
        result = self._change(
            "setSensorCursor(sensorSelector: $selector, cursor: $cursor)", "... on Sensor { name }", cursor
        )
        assert "name" in result, result

    def _change(self, call: str, fields: str, cursor: str | None = None) -> dict[str, Any]:
        name = call.partition("(")[0]
        declarations = "$selector: SensorSelector!" + (", $cursor: String" if cursor is not None else "")
        variables = {} if cursor is None else {"cursor": cursor}
        query = f"mutation ({declarations}) {{ {name}: {call} {{ __typename {fields} }} }}"
        result: dict[str, Any] = self.topology.graphql(query, selector=self.selector, **variables)[name]
        return result

    def _state(self, fields: str) -> dict[str, Any]:
        query = (
            "query ($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector)"
            f" {{ ... on Sensor {{ sensorState {{ {fields} }} }} }} }}"
        )
        data = self.topology.graphql(query, selector=self.selector)
        state: dict[str, Any] = data["sensorOrError"]["sensorState"]
        return state

    def ticks(self) -> list[dict[str, Any]]:
        """Return the ticks, latest first."""
        ticks: list[dict[str, Any]] = self._state("ticks(limit: 500) { tickId status skipReason runIds cursor }")[
            "ticks"
        ]
        return ticks

    def wait_for_ticks(self, n_ticks: int = 1) -> None:
        """Wait until ``n_ticks`` more ticks have ended."""
        before = self._n_ended_ticks()
        self.topology.wait_until(lambda: self._n_ended_ticks() >= before + n_ticks, "a tick of the sensor")

    def _n_ended_ticks(self) -> int:
        return sum(tick["status"] != "STARTED" for tick in self.ticks())

    def requested_versions(self) -> list[int]:
        """Return the versions for which the sensor requested runs, in ascending order."""
        runs = self.topology.runs(tags=[{"key": "dagster/sensor_name", "value": self.selector["sensorName"]}])
        return sorted(int(run["tags"][VERSION_TAG]) for run in runs)

    def wait_for_request(self, *versions: int) -> None:
        """Wait for a run for the last of the versions, and assert that runs were requested for exactly these versions.

        Also wait for the tick that requested it, because the tick reports events after requesting runs.
        """
        self.topology.wait_until(lambda: versions[-1] in self.requested_versions(), f"a run for version {versions[-1]}")
        self.wait_for_ticks()
        assert self.requested_versions() == list(versions)


def events(topology: Topology, *path: str, kind: str = "assetMaterializations") -> list[dict[str, Any]]:
    """Return the metadata of the events of an asset, latest first."""
    query = (
        "query ($key: AssetKeyInput!) { assetOrError(assetKey: $key)"
        f" {{ ... on Asset {{ events: {kind}(limit: 1000) {{ {METADATA} }} }} }} }}"
    )
    asset_events = topology.graphql(query, key={"path": list(path)})["assetOrError"].get("events", [])
    return [values(event) for event in asset_events]


def values(event: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an event by label."""
    other_fields = ("label", "description", "__typename")
    return {
        entry["label"]: next((value for name, value in entry.items() if name not in other_fields), None)
        for entry in event["metadataEntries"]
    }


@contextmanager
def blocked_cursor_updates(topology: Topology, version: int) -> Iterator[Any]:
    """Block updates of sensor states after a run for a version is created. Yield a function that returns
    whether one is blocked.
    """
    with closing(topology.database.connect()) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(
            "CREATE FUNCTION block_update() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF EXISTS (SELECT FROM run_tags WHERE key = '{VERSION_TAG}' AND value = '{version}')"
            " THEN PERFORM pg_sleep(600); END IF; RETURN NEW; END $$"
        )
        cursor.execute(
            "CREATE TRIGGER block_update BEFORE UPDATE ON instigators FOR EACH ROW EXECUTE FUNCTION block_update()"
        )
        blocked_updates = "FROM pg_stat_activity WHERE wait_event = 'PgSleep'"

        def is_blocked() -> bool:
            cursor.execute(f"SELECT count(*) {blocked_updates}")
            return bool(cursor.fetchone()[0])

        try:
            yield is_blocked
        finally:
            cursor.execute(f"SELECT pg_terminate_backend(pid) {blocked_updates}")  # cancels the blocked update
            cursor.execute("DROP FUNCTION block_update CASCADE")


@pytest.fixture(scope="module")
def sensor(topology: Topology, lake: Lakehouse) -> Iterator[CommitSensor]:
    commit_sensor = CommitSensor(topology, SENSOR)
    commit_sensor.start()
    commit_sensor.wait_for_ticks()
    yield commit_sensor
    commit_sensor.stop()


@pytest.mark.soak
def test_commit_requests_one_run_when_daemon_is_killed_before_saving_cursor(
    topology: Topology, lake: Lakehouse, sensor: CommitSensor
) -> None:
    """The daemon is killed after it requested the run and before it saved the cursor; 500 commits follow."""
    assert sensor.requested_versions() == []
    ticks_before = len(sensor.ticks())
    with blocked_cursor_updates(topology, lake.latest_version() + 1) as is_blocked:
        first = alter(lake, "ns", "a")
        topology.wait_until(is_blocked, "the end of the tick")
        assert len(sensor.ticks()) <= ticks_before + 2
        # If the daemon were killed while it starts a run, the run would be in the status STARTING until its timeout.
        topology.wait_until(lambda: not topology.runs(statuses=list(NOT_STARTED)), "the start of all runs")
        topology.services["daemon"].kill()
    assert sensor.requested_versions() == [first]
    before = len(events(topology, "ns", "b"))
    for number in range(BURST - 1):
        alter(lake, "ns", "a" if number % 2 else "b")
    latest = alter(lake, "ns", "b")
    topology.services["daemon"].start()
    sensor.wait_for_request(first, latest)
    burst_events = events(topology, "ns", "b")
    assert (before, len(burst_events)) == (0, 1)
    # Events are reported at least once, so those of the killed daemon are reported again with the remaining ones.
    reported = [event["versions"] for event in events(topology, "ns", "a")]
    assert reported == [f"{first}-{latest}", f"{first}"]
    assert events(topology, "ns", "still") == []


@pytest.mark.soak
def test_sensor_reports_gap_of_expired_versions_and_continues(
    topology: Topology, lake: Lakehouse, sensor: CommitSensor
) -> None:
    before = sensor.requested_versions()
    sensor.stop()
    last_reported = lake.latest_version()
    expired_version = alter(lake, "ns", "a")
    first_readable = alter(lake, "ns", "b")
    expire(lake, f"{last_reported}-{expired_version}")
    latest = lake.latest_version()
    sensor.start()
    sensor.wait_for_request(*before, latest)
    gap = events(topology, "lakehouse", kind="assetObservations")[0]["gap"]
    assert (
        gap == f"version {last_reported} can no longer be read;"
        f" the changes of versions {expired_version}-{first_readable} are not reported"
    )


@pytest.mark.soak
def test_sensor_reports_corrupt_cursor_and_continues(topology: Topology, lake: Lakehouse, sensor: CommitSensor) -> None:
    before = sensor.requested_versions()
    sensor.stop()
    latest = alter(lake, "ns", "a")
    sensor.set_cursor('{"format": 1, "version": ')
    sensor.start()
    sensor.wait_for_request(*before, latest)
    gap = events(topology, "lakehouse", kind="assetObservations")[0]["gap"]
    assert f"commits before version {latest} " in gap


# Schedule


def test_schedule_expires_old_versions_within_limits(topology: Topology, expiring: Lakehouse) -> None:
    schedule_filter = {"tags": [{"key": "dagster/schedule_name", "value": EXPIRY}], "statuses": list(FINISHED)}
    topology.wait_until(lambda: bool(topology.runs(**schedule_filter)), "a run of the schedule")
    stop_schedule(topology)
    first = topology.runs(**schedule_filter)[-1]
    assert (first["jobName"], first["status"]) == ("expiring_expire", "SUCCESS"), topology.messages(first["runId"])
    committed = {info.run_id: info for info in expiring.history() if info.operation == "expire"}
    assert list(committed) == [first["runId"]]
    base = committed[first["runId"]].version - 1
    assert {info.state for info in expiring.history() if info.version < base} == {"expired"}
    (reported,) = events(topology, "expiring", "lakehouse")
    assert (reported["operation"], reported["lakehouse_version"]) == ("expire", base + 1)
    (metrics,) = events(topology, "expiring", "lakehouse", kind="assetObservations")
    assert metrics["versions"] == f"0-{base - 1}"


def stop_schedule(topology: Topology) -> None:
    query = """query ($selector: ScheduleSelector!) { scheduleOrError(scheduleSelector: $selector) {
        ... on Schedule { scheduleState { id } } } }"""
    state = topology.graphql(query, selector={**CODE, "scheduleName": EXPIRY})["scheduleOrError"]["scheduleState"]
    result = topology.graphql("mutation ($id: String!) { stopRunningSchedule(id: $id) { __typename } }", id=state["id"])
    assert result["stopRunningSchedule"]["__typename"] == "ScheduleStateResult"


# Deletions


@pytest.fixture
def purged_folder(topology: Topology) -> Path:
    """The empty folder of the lakehouse that the ``purged_...`` jobs use, whose pool has a limit."""
    result = topology.graphql(
        "mutation ($pool: String!) { setConcurrencyLimit(concurrencyKey: $pool, limit: 1) }",
        pool=LakehouseNames("purged").pool,
    )
    assert result == {"setConcurrencyLimit": True}
    folder = topology.volume / "purged"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def run_times(topology: Topology, run_id: str) -> tuple[float, float]:
    """Return the start and end time of a run."""
    data = topology.graphql(
        "query ($id: ID!) { runOrError(runId: $id) { ... on Run { startTime endTime } } }", id=run_id
    )
    return data["runOrError"]["startTime"], data["runOrError"]["endTime"]


@pytest.mark.soak
def test_second_concurrent_purge_waits_in_queue(topology: Topology, purged_folder: Path) -> None:
    lake = aged_lakehouse(purged_folder, n_versions=6, is_expired=True)
    files = operations.plan_purge(lake).files
    assert files > 0
    run_ids = [topology.launch("purged_purge", {"unattended": True}) for _ in range(2)]
    assert [topology.wait_for_run(run_id) for run_id in run_ids] == ["SUCCESS", "SUCCESS"]
    first, second = sorted(run_ids, key=lambda run_id: run_times(topology, run_id))
    assert run_times(topology, first)[1] <= run_times(topology, second)[0]
    assert [deleted_files(topology, run_id) for run_id in (first, second)] == [files, 0]
    check_lake(lake)


def deleted_files(topology: Topology, run_id: str) -> int:
    """Return the number of files that a run deleted according to its output."""
    (output,) = [event for event in topology.events(run_id) if event["__typename"] == "ExecutionStepOutputEvent"]
    return int(values(output)["files"])


@pytest.mark.soak
def test_queued_purge_completes_killed_purge(topology: Topology, purged_folder: Path, tmp_path: Path) -> None:
    lake = aged_lakehouse(purged_folder, n_versions=12, n_tables=100, is_expired=True)
    plan = operations.plan_purge(lake)
    assert plan.files > LocalStorage.delete_batch_size
    before = files_of(lake)
    approval = {"digest": plan.digest, "approved_by": "an operator"}
    config = {"approval": approval, "requests_per_second": 0.01}
    killed_run = topology.launch("purged_purge", config)
    topology.wait_for_run(killed_run, "STARTED")
    queued_run = topology.launch("purged_purge", {"unattended": True})
    topology.wait_until(lambda: len(before - files_of(lake)) >= LocalStorage.delete_batch_size, "the first deletions")
    assert topology.status(queued_run) == "QUEUED"
    (pid,) = re.findall(r"Started process for run \(pid: (\d+)\)", "\n".join(topology.messages(killed_run)))
    os.kill(int(pid), signal.SIGKILL)
    topology.wait_until(lambda: not Path(f"/proc/{pid}/exe").exists(), "the end of the killed process")
    assert 0 < len(files_of(lake) & before) < len(before)
    # The next run waits for the lease. The command verifies a copy, because the run continues when the lease ends.
    copy = copy_of(lake, tmp_path / "copy")
    end_lease(lake)
    end_lease(copy)
    assert trinitylake_verify(copy) == ["lease-stale", "purge-unfinished"]
    assert topology.wait_for_run(killed_run) == "FAILURE"
    assert topology.wait_for_run(queued_run) == "SUCCESS", topology.messages(queued_run)
    assert operations.plan_purge(lake).is_empty
    assert operations.verify(lake).findings == ()
    assert [run["status"] for run in topology.runs(tags=[{"key": "dagster/parent_run_id", "value": killed_run}])] == []
    check_lake(lake)


def files_of(lake: Lakehouse) -> set[str]:
    """Return the files of a lakehouse, including all files that a purge may delete."""
    return {info.path for info in lake.storage.list() if not info.path.startswith("_")}


def copy_of(lake: Lakehouse, folder: Path) -> Lakehouse:
    """Copy the files of a lakehouse."""
    shutil.copytree(urlsplit(lake.root).path, folder)
    return Lakehouse.open(folder.as_uri())


def trinitylake_verify(lake: Lakehouse) -> list[str]:
    """Return the codes of the findings of ``trinitylake verify``, which fails if there are errors."""
    command = [sys.executable, "-m", "trinitylake_ops.cli", "--root", lake.root, "verify", "--json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return sorted({finding["code"] for finding in json.loads(output)["findings"]})


def end_lease(lake: Lakehouse) -> None:
    """End the lease of a killed process immediately."""
    (lease,) = lake.storage.list("_ops/lease-")
    lease_record = without_seals(json.loads(lake.storage.read(lease.path)))
    assert lease_record["expires_at_ms"] > lake.storage.now_ms()
    lake.storage.write(lease.path, json.dumps({**lease_record, "expires_at_ms": lake.storage.now_ms()}).encode())


# Secrets


@pytest.mark.soak
def test_no_secret_in_logs_events_and_database(topology: Topology, sensor: CommitSensor) -> None:
    """Search everything that the tests of this module produced. Must run after all other tests of this module."""
    topology.wait_until(lambda: all(run["status"] in FINISHED for run in topology.runs()), "the end of all runs")
    runs = topology.runs()
    assert {run["status"] for run in runs if run["jobName"] == "repair_hint"} == {"SUCCESS"}  # launched by the sensor
    texts = {
        "runs": json.dumps(runs),
        "ticks": json.dumps(sensor.ticks()),
        "instance": json.dumps(topology.graphql("{ instance { info } }")),
        **{run["runId"]: json.dumps(topology.events(run["runId"])) for run in runs},
        **topology.logs(),
        "dump": topology.database.dump(),
    }
    assert {name: secrets for name, text in texts.items() if (secrets := secrets_in(text))} == {}
    # Verify that the search covers these texts.
    expected_texts = {"dump": ONLY.pool, "daemon.log": SENSOR, "code.log": "repair_hint", "ticks": "SUCCESS"}
    assert [name for name, text in expected_texts.items() if text not in texts[name]] == []


@pytest.mark.soak
def test_planted_secret_is_found(topology: Topology) -> None:
    default_sensor = CommitSensor(topology, "commits")  # disabled, like all sensors of definitions.py
    for secret in (SECRET_ACCESS_KEY, POSTGRES_PASSWORD):
        default_sensor.set_cursor(f"planted {secret}")
        assert secrets_in(topology.database.dump())
        assert secrets_in(default_sensor.cursor())
    default_sensor.set_cursor("")
    assert secrets_in(topology.database.dump()) == []
