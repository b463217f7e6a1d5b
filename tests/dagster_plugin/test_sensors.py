"""Test the sensors for external commits and for failed runs, on real lakehouses and instances."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from tests.clock import ClockStorage
from tests.dagster_plugin.metadata_values import plain
from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes, seal, table
from tests.operations.changes import alter, create, drop, expire
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.dagster_plugin.names import ONLY
from trinitylake_ops.dagster_plugin.new_commits import Cursor
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.sensors import (
    FailedRun,
    build_commit_sensor,
    build_failed_run_sensor,
    tick_budget_seconds,
)
from trinitylake_ops.versions.commit_info import acting_for_run


@dg.op
def consume() -> None:
    """Represent a job that consumes new data."""


@dg.job
def consumer() -> None:
    consume()


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as test_instance:
        yield test_instance


class Ticks:
    """Run a sensor's ticks on a lakehouse and process the results like the daemon: events, then runs, then the cursor.

    Requests with the same run key launch a single run.
    """

    def __init__(self, lake: Lakehouse, instance: dg.DagsterInstance, **options: Any):
        self.lake = lake
        self.instance = instance
        self.resource = TrinityLakeResource(root=lake.root, storage_options=StorageSettings(fsync="false"))
        self.sensor = build_commit_sensor(job=consumer, **options)
        self.cursor: str | None = None
        self.events: list[dg.AssetMaterialization | dg.AssetObservation] = []
        self.launched: dict[str, dg.RunRequest] = {}
        self.log_messages: list[str] = []

    def tick(self, *, is_killed: bool = False) -> None:
        """Run a tick. A killed daemon has reported the events and launched the runs, but has not saved the cursor."""
        context = dg.build_sensor_context(
            instance=self.instance, cursor=self.cursor, resources={"lakehouse": self.resource}
        )
        result = self.sensor.evaluate_tick(context)
        for event in result.asset_events:
            assert not isinstance(event, dg.AssetCheckEvaluation)
            self.instance.report_runless_asset_event(event)
            self.events.append(event)
        for request in result.run_requests or []:
            assert request.run_key is not None
            self.launched.setdefault(request.run_key, request)
        if result.skip_message is not None:
            self.log_messages.append(result.skip_message)
        if not is_killed:
            self.cursor = result.cursor

    def tables(self) -> Counter[tuple[str, ...]]:
        """Return the number of reported materializations of each table."""
        keys = [event.asset_key for event in self.events if isinstance(event, dg.AssetMaterialization)]
        return Counter(tuple(key.path) for key in keys if key != ONLY.lakehouse_key)

    def metrics(self) -> list[dg.AssetObservation]:
        """Return the observations of the lakehouse that contain metrics."""
        observations = [event for event in self.events if isinstance(event, dg.AssetObservation)]
        return [
            event for event in observations if event.asset_key == ONLY.lakehouse_key and "gap" not in event.metadata
        ]

    def versions_of_runs(self) -> list[str]:
        return [request.tags["trinitylake/version"] for request in self.launched.values()]

    def gap_descriptions(self) -> list[str]:
        return [event.description or "" for event in self.events if "gap" in event.metadata]


@pytest.fixture
def ticks(lakes: Lakes, instance: dg.DagsterInstance) -> Ticks:
    ticks = Ticks(lakes.local(), instance)
    create(ticks.lake, "ns", "a", "b")
    ticks.tick()
    assert (ticks.events, ticks.launched) == ([], {})
    return ticks


def test_external_commit_is_reported_once_with_one_run(ticks: Ticks) -> None:
    version = alter(ticks.lake, "ns", "a")
    ticks.tick()
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 1}
    assert ticks.versions_of_runs() == [str(version)]
    assert ticks.log_messages[-1] == f"latest version: {version}; 0 versions remain"
    lakehouse = ticks.instance.get_latest_materialization_event(ONLY.lakehouse_key)
    assert lakehouse is not None
    assert lakehouse.asset_materialization is not None
    assert plain(lakehouse.asset_materialization.metadata)["lakehouse_version"] == version
    metrics = plain(ticks.metrics()[-1].metadata)
    assert (metrics["lag_versions"], metrics["versions_left"]) == (1, 0)
    assert 0 <= metrics["lag_seconds"] < 600
    assert metrics["tables_changed"] == 1
    (request,) = ticks.launched.values()
    result = consumer.execute_in_process(instance=ticks.instance, run_config=QUIET, tags=dict(request.tags))
    assert result.success


def test_commits_are_reported_once_when_a_clock_is_ten_years_ahead(ticks: Ticks) -> None:
    ahead_ms = ticks.lake.storage.now_ms() + 10 * 365 * 86_400_000
    alter(Lakehouse(ClockStorage(ticks.lake.storage, ahead_ms)), "ns", "a")
    ticks.tick()
    assert ticks.metrics()[-1].metadata["lag_seconds"].value == 0
    alter(ticks.lake, "ns", "b")
    ticks.tick()
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 1, ("ns", "b"): 1}
    assert 0 <= plain(ticks.metrics()[-1].metadata)["lag_seconds"] < 600


def test_sensor_reports_added_and_removed_tables(ticks: Ticks) -> None:
    create(ticks.lake, "more", "x")
    drop(ticks.lake, "ns", "b")
    ticks.tick()
    assert ticks.tables() == {("more", "x"): 1}
    observations = [event for event in ticks.events if isinstance(event, dg.AssetObservation)]
    (removed,) = [event for event in observations if event.asset_key != ONLY.lakehouse_key]
    assert (removed.asset_key.path, removed.metadata["change"].value) == (["ns", "b"], "removed")


def test_killed_daemon_repeats_events_but_not_runs(ticks: Ticks) -> None:
    alter(ticks.lake, "ns", "a")
    ticks.tick(is_killed=True)
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 2}
    assert len(ticks.launched) == 1


def test_sensor_ignores_commits_of_own_runs(ticks: Ticks) -> None:
    own_run_id = consumer.execute_in_process(instance=ticks.instance, run_config=QUIET).run_id
    with acting_for_run(own_run_id):
        alter(ticks.lake, "ns", "a")
    ticks.tick()
    assert (ticks.events, ticks.launched) == ([], {})
    assert "1 versions since the last tick" in ticks.log_messages[-1]
    alter(ticks.lake, "ns", "b")
    with acting_for_run(own_run_id):
        alter(ticks.lake, "ns", "a")
    with acting_for_run("11111111-2222-3333-4444-555555555555"):  # a run of another instance
        last = alter(ticks.lake, "ns", "b")
    ticks.tick()
    assert ticks.tables() == {("ns", "b"): 2}
    assert ticks.versions_of_runs() == [str(last)]


@pytest.mark.parametrize("max_versions", [1000, 120])
def test_sensor_reports_burst_of_500_commits(lakes: Lakes, instance: dg.DagsterInstance, max_versions: int) -> None:
    lake = lakes.local(is_watched=False)
    create(lake, "ns", *(f"t{number}" for number in range(7)))
    ticks = Ticks(lake, instance, max_versions_per_tick=max_versions)
    ticks.tick()
    for number in range(500):
        alter(lake, "ns", f"t{number % 7}")
    n_ticks = -(-500 // max_versions)
    for _ in range(n_ticks + 1):
        ticks.tick()
    assert ticks.tables() == {("ns", f"t{number}"): n_ticks for number in range(7)}
    assert ticks.versions_of_runs() == [str(lake.latest_version())]
    lags = [event.metadata["lag_versions"].value for event in ticks.metrics()]
    assert lags == list(range(500, 0, -max_versions))


def test_tick_without_time_left_makes_progress(ticks: Ticks) -> None:
    for _ in range(3):
        alter(ticks.lake, "ns", "a")
    slow_ticks = Ticks(ticks.lake, ticks.instance, max_seconds_per_tick=1e-9)
    slow_ticks.cursor = ticks.cursor
    for _ in range(3):
        slow_ticks.tick()
    assert slow_ticks.tables() == {("ns", "a"): 3}
    assert slow_ticks.cursor is not None
    assert Cursor.decode(slow_ticks.cursor).version == ticks.lake.latest_version()
    assert len(slow_ticks.launched) == 1


def test_large_commit_is_split_over_several_ticks(ticks: Ticks) -> None:
    small_ticks = Ticks(ticks.lake, ticks.instance, max_tables_per_tick=10)
    small_ticks.cursor = ticks.cursor
    create(ticks.lake, "many", *(f"t{number:02}" for number in range(24)))
    alter(ticks.lake, "ns", "a")
    for _ in range(4):
        small_ticks.tick()
    assert small_ticks.tables() == {("ns", "a"): 1} | {("many", f"t{number:02}"): 1 for number in range(24)}
    assert small_ticks.versions_of_runs() == [str(ticks.lake.latest_version())]
    assert small_ticks.cursor is not None
    assert Cursor.decode(small_ticks.cursor).until is None


def test_sensor_reports_gap_and_continues_when_cursor_expired(ticks: Ticks) -> None:
    for _ in range(4):
        alter(ticks.lake, "ns", "a")
    latest = alter(ticks.lake, "ns", "b")
    last = alter(ticks.lake, "ns", "a")
    expire(ticks.lake, f"0-{latest - 1}")
    seal(ticks.lake, 1)
    ticks.tick()
    assert ticks.gap_descriptions() == [
        f"version 1 can no longer be read; the changes of versions 2-{latest} are not reported",
    ]
    assert ticks.tables() == {("ns", "a"): 1}
    assert ticks.versions_of_runs() == [str(last + 1)]
    alter(ticks.lake, "ns", "b")
    ticks.tick()
    assert len(ticks.gap_descriptions()) == 1


def test_changes_of_expired_versions_are_reported_with_the_next_readable_version(ticks: Ticks) -> None:
    own_run_id = consumer.execute_in_process(instance=ticks.instance, run_config=QUIET).run_id
    alter(ticks.lake, "ns", "a")
    with acting_for_run(own_run_id):
        alter(ticks.lake, "ns", "b")
    expire(ticks.lake, "2")
    ticks.tick()
    assert ticks.gap_descriptions() == []
    assert set(ticks.tables()) == {("ns", "a"), ("ns", "b")}


@pytest.mark.parametrize(
    "cursor",
    [
        "garbage",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "lakehouse_id": "x", "version": "4"}',
        "9" * 5000,
        "[" * 9999,
    ],
    ids=["text", "list", "empty", "missing fields", "wrong types", "number", "nested"],
)
def test_sensor_continues_at_latest_version_when_cursor_is_unreadable(ticks: Ticks, cursor: str) -> None:
    latest = alter(ticks.lake, "ns", "a")
    ticks.cursor = cursor
    ticks.tick()
    (description,) = ticks.gap_descriptions()
    assert description.startswith("the cursor cannot be read")
    assert ticks.versions_of_runs() == [str(latest)]
    alter(ticks.lake, "ns", "b")
    ticks.tick()
    assert ticks.tables() == {("ns", "b"): 1}


@pytest.mark.parametrize(
    "invalid_fields", [{"version": -1}, {"until": False}, {"until": ""}, {"reported": -1}], ids=str
)
def test_sensor_continues_at_latest_version_when_cursor_has_invalid_values(
    ticks: Ticks, invalid_fields: dict[str, Any]
) -> None:
    assert ticks.cursor is not None
    ticks.cursor = json.dumps({**json.loads(ticks.cursor), **invalid_fields})
    latest = alter(ticks.lake, "ns", "a")
    ticks.tick()
    assert ticks.gap_descriptions() == [
        f"the cursor cannot be read: it contains invalid values; commits before version {latest} may not be reported"
    ]
    alter(ticks.lake, "ns", "b")
    ticks.tick()
    assert ticks.tables() == {("ns", "b"): 1}


@pytest.mark.parametrize("run_id", ["a\x00b", "x" * 2900, "run\n"], ids=["nul", "long", "newline"])
def test_sensor_does_not_query_malformed_run_ids(ticks: Ticks, monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    """Other programs can write arbitrary text as a run ID, and Postgres rejects queries with certain characters."""

    def reject_query(_instance: dg.DagsterInstance, run_id: str) -> None:
        raise ValueError("A string literal cannot contain NUL (0x00) characters.")

    monkeypatch.setattr(dg.DagsterInstance, "get_run_by_id", reject_query)
    with acting_for_run(run_id):
        alter(ticks.lake, "ns", "a")
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 1}


def test_sensor_reports_tables_with_names_that_dagster_rejects(ticks: Ticks) -> None:
    names = ["été", "a/b", "a.b", "x" * 100, '"[]"', "日本", "%2F"]
    create(ticks.lake, "n/s.1", *names)
    ticks.tick()
    assert ticks.tables() == {("n/s.1", name): 1 for name in names}
    keys = {dg.AssetKey(["n/s.1", name]) for name in names}
    assert keys <= set(ticks.instance.all_asset_keys())
    assert all(ticks.instance.get_latest_materialization_event(key) is not None for key in keys)


def test_sensor_reports_replaced_lakehouse(ticks: Ticks) -> None:
    assert ticks.cursor is not None
    decoded = Cursor.decode(ticks.cursor)
    invalid_cursors = (
        replace(decoded, version=9),
        replace(decoded, version=0, until=9, reported=1),
        replace(decoded, requested=9),
    )
    for cursor in (*invalid_cursors, replace(decoded, lakehouse_id="another")):
        ticks.cursor = cursor.encode()
        ticks.tick()
        assert ticks.gap_descriptions()[-1].startswith("the lakehouse was replaced: version ")
        assert ticks.cursor is not None
        assert Cursor.decode(ticks.cursor).version == 1
    assert len(ticks.launched) == 1


def test_sensor_skips_when_lakehouse_does_not_exist(instance: dg.DagsterInstance) -> None:
    resource = TrinityLakeResource(root="memory://missing/")
    context = dg.build_sensor_context(instance=instance, resources={"lakehouse": resource})
    result = build_commit_sensor(job=consumer).evaluate_tick(context)
    assert "there is no lakehouse" in str(result.skip_message)


def test_sensor_without_job_only_reports_events(ticks: Ticks) -> None:
    alter(ticks.lake, "ns", "a")
    context = dg.build_sensor_context(
        instance=ticks.instance, cursor=ticks.cursor, resources={"lakehouse": ticks.resource}
    )
    sensor = build_commit_sensor(table_key=lambda namespace, name: dg.AssetKey(["p", namespace, name]))
    result = sensor.evaluate_tick(context)
    assert not result.run_requests
    keys = [event.asset_key.path for event in result.asset_events]
    assert keys == [["p", "ns", "a"], ONLY.lakehouse_key.path, ONLY.lakehouse_key.path], (
        "the versions page and the metrics"
    )


def test_tick_time_limit_is_below_daemon_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS", "DAGSTER_GRPC_TIMEOUT_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    assert tick_budget_seconds() == 40
    monkeypatch.setenv("DAGSTER_GRPC_TIMEOUT_SECONDS", "120")
    assert tick_budget_seconds() == 100
    monkeypatch.setenv("DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS", "10")
    assert tick_budget_seconds() == 5


def test_alert_receives_failed_run_with_its_error(instance: dg.DagsterInstance) -> None:
    resource = TrinityLakeResource(root="memory://missing/")
    definitions = dg.Definitions(jobs=build_jobs(), resources={"lakehouse": resource})
    job = definitions.resolve_job_def("verify")
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    (event,) = [event for event in result.all_events if event.event_type_value == "PIPELINE_FAILURE"]
    alerts: list[FailedRun] = []
    calls = 0

    def alert(failed: FailedRun) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError("no response")
        alerts.append(failed)

    sensor = build_failed_run_sensor(alert)
    context = dg.build_run_status_sensor_context(sensor.name, event, instance, result.dagster_run)
    sensor(context.for_run_failure())
    (failed,) = alerts
    assert (failed.run_id, failed.job, calls) == (result.run_id, "verify", 2)
    assert failed.steps == {"run_verify": "there is no lakehouse at memory://missing/; create one with init"}
    assert json.loads(json.dumps(dict(failed.tags)))["dagster/max_retries"] == "0"


def test_sensor_reports_altered_tables_of_one_version(ticks: Ticks) -> None:
    with ticks.lake.transaction() as txn:
        txn.alter_table("ns", "a", table(x="1"))
        txn.alter_table("ns", "b", table(x="1"))
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 1, ("ns", "b"): 1}
