"""The deployment of ``deploy/``, running: that it is whole, and what its daemon does, also when something is killed."""

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
from tests.e2e.aged_lakes import aged_lake
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
#: So soon after a tick has ended its state is saved, and one that was about to start has started.
SETTLES_WITHIN_S = 10
BEFORE_ITS_START = ("QUEUED", "NOT_STARTED", "STARTING")


@pytest.fixture(scope="module", autouse=True)
def expiring(topology: Topology) -> Iterator[Lakehouse]:
    """A lakehouse that is expired by schedule: turned on first, so that the minute passes during other tests."""
    lake = aged_lake(topology.volume / "expiring", n_versions=5, is_expired=False)
    result = topology.graphql(
        "mutation ($selector: ScheduleSelector!) { startSchedule(scheduleSelector: $selector) { __typename } }",
        selector={**CODE, "scheduleName": EXPIRY},
    )
    assert result["startSchedule"]["__typename"] == "ScheduleStateResult"
    yield lake
    check_lake(lake)


@pytest.mark.parametrize("name", ["code", "webserver", "viewer", "daemon"])
def test_the_health_check_of_a_service_says_yes(topology: Topology, name: str) -> None:
    topology.wait_until(topology.services[name].is_healthy, name)


def test_the_pool_of_deletions_has_its_limit(topology: Topology) -> None:
    data = topology.graphql("{ instance { concurrencyLimits { concurrencyKey limit } } }")
    assert {"concurrencyKey": ONLY.pool, "limit": 1} in data["instance"]["concurrencyLimits"]


def test_the_viewer_shows_and_refuses_to_change(topology: Topology) -> None:
    assert topology.graphql("{ runsOrError { __typename } }", viewer=True)["runsOrError"]["__typename"] == "Runs"
    before = len(topology.runs())
    with pytest.raises(AssertionError, match="UnauthorizedError"):
        topology.launch("verify", viewer=True)
    reloaded = topology.graphql("mutation { reloadWorkspace { __typename } }", viewer=True)
    assert reloaded["reloadWorkspace"]["__typename"] == "UnauthorizedError"
    assert len(topology.runs()) == before


# The sensor of commits


class CommitSensor:
    """A sensor of the code location, as its page shows and changes it."""

    def __init__(self, topology: Topology, name: str):
        self.topology = topology
        self.selector = {**CODE, "sensorName": name}

    def start(self) -> None:
        result = self._change("startSensor(sensorSelector: $selector)", "... on Sensor { name }")
        assert "name" in result, result

    def stop(self) -> None:
        """Stop it, and wait until the tick that runs has saved its cursor.

        Dagster changes a sensor's state by a read and a write, and a stop and the end of a tick may come between each
        other's: the cursor that the tick saved is lost, or the sensor runs on. Then it ticks and is stopped once more.
        """
        while not self._stopped():
            self.start()
            self.wait_for_tick()

    def _stopped(self) -> bool:
        """Stop it; returns whether it then stands still, with the cursor of its last tick."""
        result = self.topology.graphql(
            "mutation ($id: String!) { stopSensor(id: $id) { ... on StopSensorMutationResult { instigationState"
            " { status } } } }",
            id=self._state("id")["id"],
        )["stopSensor"]
        assert result["instigationState"]["status"] == "STOPPED", result
        self.topology.wait_until(lambda: self.ticks()[0]["status"] != "STARTED", "the end of the tick")
        time.sleep(SETTLES_WITHIN_S)
        return self._is_still()

    def _is_still(self) -> bool:
        return self._state("status")["status"] == "STOPPED" and self.ticks()[0]["cursor"] == self.cursor()

    def cursor(self) -> str:
        data = self._state("typeSpecificData { ... on SensorData { lastCursor } }")["typeSpecificData"]
        cursor: str = data["lastCursor"]
        return cursor

    def set_cursor(self, text: str) -> None:
        result = self._change(
            "setSensorCursor(sensorSelector: $selector, cursor: $cursor)", "... on Sensor { name }", text
        )
        assert "name" in result, result

    def _change(self, what: str, wanted: str, cursor: str | None = None) -> dict[str, Any]:
        name = what.partition("(")[0]
        declared = "$selector: SensorSelector!" + (", $cursor: String" if cursor is not None else "")
        given = {} if cursor is None else {"cursor": cursor}
        query = f"mutation ({declared}) {{ {name}: {what} {{ __typename {wanted} }} }}"
        result: dict[str, Any] = self.topology.graphql(query, selector=self.selector, **given)[name]
        return result

    def _state(self, wanted: str) -> dict[str, Any]:
        query = (
            "query ($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector)"
            f" {{ ... on Sensor {{ sensorState {{ {wanted} }} }} }} }}"
        )
        data = self.topology.graphql(query, selector=self.selector)
        state: dict[str, Any] = data["sensorOrError"]["sensorState"]
        return state

    def ticks(self) -> list[dict[str, Any]]:
        """Return the ticks, the newest first."""
        found: list[dict[str, Any]] = self._state("ticks(limit: 500) { tickId status skipReason runIds cursor }")[
            "ticks"
        ]
        return found

    def wait_for_tick(self, times: int = 1) -> None:
        """Wait until so many more ticks have ended."""
        before = self._ended()
        self.topology.wait_until(lambda: self._ended() >= before + times, "a tick of the sensor")

    def _ended(self) -> int:
        return sum(tick["status"] != "STARTED" for tick in self.ticks())

    def requested(self) -> list[int]:
        """Return the versions for which it requested a run, in order."""
        runs = self.topology.runs(tags=[{"key": "dagster/sensor_name", "value": self.selector["sensorName"]}])
        return sorted(int(run["tags"][VERSION_TAG]) for run in runs)

    def wait_for_request(self, *versions: int) -> None:
        """Wait for a run for the last of the versions, and see that there were those runs and no others.

        The tick that requested it has ended then: what it reports comes after its runs.
        """
        self.topology.wait_until(lambda: versions[-1] in self.requested(), f"a run for version {versions[-1]}")
        self.wait_for_tick()
        assert self.requested() == list(versions)


def events(topology: Topology, *path: str, kind: str = "assetMaterializations") -> list[dict[str, Any]]:
    """Return the metadata of what was reported of an asset, the newest first."""
    query = (
        "query ($key: AssetKeyInput!) { assetOrError(assetKey: $key)"
        f" {{ ... on Asset {{ found: {kind}(limit: 1000) {{ {METADATA} }} }} }} }}"
    )
    found = topology.graphql(query, key={"path": list(path)})["assetOrError"].get("found", [])
    return [values(event) for event in found]


def values(event: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an event by label."""
    about = ("label", "description", "__typename")
    return {
        entry["label"]: next((value for name, value in entry.items() if name not in about), None)
        for entry in event["metadataEntries"]
    }


@contextmanager
def cursor_not_saved(topology: Topology, version: int) -> Iterator[Any]:
    """Let whoever saves a sensor's state wait from when a run for a version is there on; yields whether one waits."""
    with closing(topology.database.connect()) as connection:
        connection.autocommit = True
        said = connection.cursor()
        said.execute(
            "CREATE FUNCTION stand_still() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF EXISTS (SELECT FROM run_tags WHERE key = '{VERSION_TAG}' AND value = '{version}')"
            " THEN PERFORM pg_sleep(600); END IF; RETURN NEW; END $$"
        )
        said.execute(
            "CREATE TRIGGER stand_still BEFORE UPDATE ON instigators FOR EACH ROW EXECUTE FUNCTION stand_still()"
        )
        waiting = "FROM pg_stat_activity WHERE wait_event = 'PgSleep'"

        def is_waiting() -> bool:
            said.execute(f"SELECT count(*) {waiting}")
            return bool(said.fetchone()[0])

        try:
            yield is_waiting
        finally:
            said.execute(f"SELECT pg_terminate_backend(pid) {waiting}")  # what it wanted to write is gone
            said.execute("DROP FUNCTION stand_still CASCADE")


@pytest.fixture(scope="module")
def sensor(topology: Topology, lake: Lakehouse) -> Iterator[CommitSensor]:
    made = CommitSensor(topology, SENSOR)
    made.start()
    made.wait_for_tick()
    yield made
    made.stop()


@pytest.mark.soak
def test_a_commit_of_another_process_runs_once_also_when_the_daemon_is_killed_before_it_saves_the_cursor(
    topology: Topology, lake: Lakehouse, sensor: CommitSensor
) -> None:
    """The daemon dies with the run requested and the cursor unsaved; meanwhile others commit 500 times."""
    assert sensor.requested() == []
    ticks_before = len(sensor.ticks())
    with cursor_not_saved(topology, lake.latest_version() + 1) as is_waiting:
        first = alter(lake, "ns", "a")
        topology.wait_until(is_waiting, "the end of the tick")
        assert len(sensor.ticks()) <= ticks_before + 2
        # One that the daemon was about to start would count as starting until its time is over.
        topology.wait_until(lambda: not topology.runs(statuses=list(BEFORE_ITS_START)), "the start of all runs")
        topology.services["daemon"].kill()
    assert sensor.requested() == [first]
    before = len(events(topology, "ns", "b"))
    for number in range(BURST - 1):
        alter(lake, "ns", "a" if number % 2 else "b")
    newest = alter(lake, "ns", "b")
    topology.services["daemon"].start()
    sensor.wait_for_request(first, newest)
    burst = events(topology, "ns", "b")
    assert (before, len(burst)) == (0, 1)
    # What the dead daemon had reported is reported again, with the rest: at least once.
    reported = [event["versions"] for event in events(topology, "ns", "a")]
    assert reported == [f"{first}-{newest}", f"{first}"]
    assert events(topology, "ns", "still") == []


@pytest.mark.soak
def test_versions_that_expired_before_the_sensor_saw_them_are_told_and_it_goes_on(
    topology: Topology, lake: Lakehouse, sensor: CommitSensor
) -> None:
    before = sensor.requested()
    sensor.stop()
    seen = lake.latest_version()
    lost = alter(lake, "ns", "a")
    kept = alter(lake, "ns", "b")
    expire(lake, f"{seen}-{lost}")
    newest = lake.latest_version()
    sensor.start()
    sensor.wait_for_request(*before, newest)
    gap = events(topology, "lakehouse", kind="assetObservations")[0]["gap"]
    assert gap == f"version {seen} can no longer be read; the changes of versions {lost}-{kept} are not reported"


@pytest.mark.soak
def test_a_cursor_that_somebody_destroyed_is_told_and_it_goes_on(
    topology: Topology, lake: Lakehouse, sensor: CommitSensor
) -> None:
    before = sensor.requested()
    sensor.stop()
    newest = alter(lake, "ns", "a")
    sensor.set_cursor('{"format": 1, "version": ')
    sensor.start()
    sensor.wait_for_request(*before, newest)
    gap = events(topology, "lakehouse", kind="assetObservations")[0]["gap"]
    assert f"commits before version {newest} " in gap


# A schedule


def test_a_tick_of_the_schedule_expires_what_is_old_within_its_limits(topology: Topology, expiring: Lakehouse) -> None:
    by_schedule = {"tags": [{"key": "dagster/schedule_name", "value": EXPIRY}], "statuses": list(FINISHED)}
    topology.wait_until(lambda: bool(topology.runs(**by_schedule)), "a run of the schedule")
    stop_schedule(topology)
    first = topology.runs(**by_schedule)[-1]
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
def purged(topology: Topology) -> Path:
    """The folder of a lakehouse that jobs named purged_... are for, emptied; its pool has its limit."""
    limited = topology.graphql(
        "mutation ($pool: String!) { setConcurrencyLimit(concurrencyKey: $pool, limit: 1) }",
        pool=LakehouseNames("purged").pool,
    )
    assert limited == {"setConcurrencyLimit": True}
    folder = topology.volume / "purged"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def times(topology: Topology, run_id: str) -> tuple[float, float]:
    """Return when a run began and ended."""
    found = topology.graphql(
        "query ($id: ID!) { runOrError(runId: $id) { ... on Run { startTime endTime } } }", id=run_id
    )
    return found["runOrError"]["startTime"], found["runOrError"]["endTime"]


@pytest.mark.soak
def test_of_two_purges_launched_together_one_waits_in_the_queue_and_has_nothing_to_do(
    topology: Topology, purged: Path
) -> None:
    lake = aged_lake(purged, n_versions=6, is_expired=True)
    files = operations.plan_purge(lake).files
    assert files > 0
    run_ids = [topology.launch("purged_purge", {"unattended": True}) for _ in range(2)]
    assert [topology.wait_for_run(run_id) for run_id in run_ids] == ["SUCCESS", "SUCCESS"]
    first, second = sorted(run_ids, key=lambda run_id: times(topology, run_id))
    assert times(topology, first)[1] <= times(topology, second)[0]
    assert [deleted_files(topology, run_id) for run_id in (first, second)] == [files, 0]
    check_lake(lake)


def deleted_files(topology: Topology, run_id: str) -> int:
    """Return how many files a run says that it deleted."""
    (output,) = [event for event in topology.events(run_id) if event["__typename"] == "ExecutionStepOutputEvent"]
    return int(values(output)["files"])


@pytest.mark.soak
def test_a_killed_purge_leaves_a_clean_lakehouse_and_the_next_one_in_the_queue_completes_it(
    topology: Topology, purged: Path, tmp_path: Path
) -> None:
    lake = aged_lake(purged, n_versions=12, n_tables=100, is_expired=True)
    plan = operations.plan_purge(lake)
    assert plan.files > LocalStorage.delete_batch_size
    before = files_of(lake)
    approval = {"digest": plan.digest, "approved_by": "an operator"}
    approved = {"approval": approval, "requests_per_second": 0.01}
    killed = topology.launch("purged_purge", approved)
    topology.wait_for_run(killed, "STARTED")
    waiting = topology.launch("purged_purge", {"unattended": True})
    topology.wait_until(lambda: len(before - files_of(lake)) >= LocalStorage.delete_batch_size, "the first deletions")
    assert topology.status(waiting) == "QUEUED"
    (pid,) = re.findall(r"Started process for run \(pid: (\d+)\)", "\n".join(topology.messages(killed)))
    os.kill(int(pid), signal.SIGKILL)
    topology.wait_until(lambda: not Path(f"/proc/{pid}/exe").exists(), "the end of the killed process")
    assert 0 < len(files_of(lake) & before) < len(before)
    # The next run waits for the lease. A copy shows what stands now, however long the command takes.
    left = copy_of(lake, tmp_path / "left")
    end_lease(lake)
    end_lease(left)
    assert trinitylake_verify(left) == ["lease-stale", "purge-unfinished"]
    assert topology.wait_for_run(killed) == "FAILURE"
    assert topology.wait_for_run(waiting) == "SUCCESS", topology.messages(waiting)
    assert operations.plan_purge(lake).is_empty
    assert operations.verify(lake).findings == ()
    assert [run["status"] for run in topology.runs(tags=[{"key": "dagster/parent_run_id", "value": killed}])] == []
    check_lake(lake)


def files_of(lake: Lakehouse) -> set[str]:
    """Return the files that a purge may delete, and some more."""
    return {info.path for info in lake.storage.list() if not info.path.startswith("_")}


def copy_of(lake: Lakehouse, folder: Path) -> Lakehouse:
    """Return a lakehouse of the same files."""
    shutil.copytree(urlsplit(lake.root).path, folder)
    return Lakehouse.open(folder.as_uri())


def trinitylake_verify(lake: Lakehouse) -> list[str]:
    """Return what `trinitylake verify` warns of; it ends with an error where it finds one."""
    command = [sys.executable, "-m", "trinitylake_ops.cli", "--root", lake.root, "verify", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return sorted({finding["code"] for finding in json.loads(said)["findings"]})


def end_lease(lake: Lakehouse) -> None:
    """Do what time does: the lease of who was killed ends."""
    (lease,) = lake.storage.list("_ops/lease-")
    held = without_seals(json.loads(lake.storage.read(lease.path)))
    assert held["expires_at_ms"] > lake.storage.now_ms()
    lake.storage.write(lease.path, json.dumps({**held, "expires_at_ms": lake.storage.now_ms()}).encode())


# Secrets


@pytest.mark.soak
def test_no_secret_is_in_a_log_an_event_or_the_database(topology: Topology, sensor: CommitSensor) -> None:
    """Runs last: searches all that the tests of this file left behind."""
    topology.wait_until(lambda: all(run["status"] in FINISHED for run in topology.runs()), "the end of all runs")
    runs = topology.runs()
    assert {run["status"] for run in runs if run["jobName"] == "repair_hint"} == {"SUCCESS"}  # what the sensor began
    shown = {
        "runs": json.dumps(runs),
        "ticks": json.dumps(sensor.ticks()),
        "instance": json.dumps(topology.graphql("{ instance { info } }")),
        **{run["runId"]: json.dumps(topology.events(run["runId"])) for run in runs},
        **topology.logs(),
        "dump": topology.database.dump(),
    }
    assert {name: found for name, text in shown.items() if (found := secrets_in(text))} == {}
    # The search looks at the right places: what is no secret is found there.
    places = {"dump": ONLY.pool, "daemon.log": SENSOR, "code.log": "repair_hint", "ticks": "SUCCESS"}
    assert [name for name, text in places.items() if text not in shown[name]] == []


@pytest.mark.soak
def test_a_planted_secret_is_found(topology: Topology) -> None:
    shipped = CommitSensor(topology, "commits")  # which is off, as all that is shipped
    for secret in (SECRET_ACCESS_KEY, POSTGRES_PASSWORD):
        shipped.set_cursor(f"planted {secret}")
        assert secrets_in(topology.database.dump())
        assert secrets_in(shipped.cursor())
    shipped.set_cursor("")
    assert secrets_in(topology.database.dump()) == []
