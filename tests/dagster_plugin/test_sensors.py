"""The sensors: commits made outside of Dagster, on real lakehouses and instances, and runs that failed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from tests.clock import ClockStorage
from tests.dagster_plugin.plain import plain
from tests.dagster_plugin.quiet import QUIET
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
def look() -> None:
    """Stands for whatever follows new data."""


@dg.job
def consumer() -> None:
    look()


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        yield made


class Ticks:
    """A sensor's ticks on a lakehouse, with what the daemon does about them: events first, then runs, then the cursor.

    Of several requests with a run key one is launched.
    """

    def __init__(self, lake: Lakehouse, instance: dg.DagsterInstance, **options: Any):
        self.lake = lake
        self.instance = instance
        self.resource = TrinityLakeResource(root=lake.root, storage_options=StorageSettings(fsync="false"))
        self.sensor = build_commit_sensor(job=consumer, **options)
        self.cursor: str | None = None
        self.events: list[dg.AssetMaterialization | dg.AssetObservation] = []
        self.launched: dict[str, dg.RunRequest] = {}
        self.said: list[str] = []

    def tick(self, *, is_killed: bool = False) -> None:
        """Run a tick; a killed daemon has sent all, and not saved the cursor."""
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
            self.said.append(result.skip_message)
        if not is_killed:
            self.cursor = result.cursor

    def tables(self) -> Counter[tuple[str, ...]]:
        """How often each table was reported as materialized."""
        keys = [event.asset_key for event in self.events if isinstance(event, dg.AssetMaterialization)]
        return Counter(tuple(key.path) for key in keys if key != ONLY.lakehouse_key)

    def metrics(self) -> list[dg.AssetObservation]:
        """The observations of the lakehouse that hold metrics."""
        seen = [event for event in self.events if isinstance(event, dg.AssetObservation)]
        return [event for event in seen if event.asset_key == ONLY.lakehouse_key and "gap" not in event.metadata]

    def versions_run(self) -> list[str]:
        return [request.tags["trinitylake/version"] for request in self.launched.values()]

    def notes(self) -> list[str]:
        return [event.description or "" for event in self.events if "gap" in event.metadata]


@pytest.fixture
def ticks(lakes: Lakes, instance: dg.DagsterInstance) -> Ticks:
    made = Ticks(lakes.local(), instance)
    create(made.lake, "ns", "a", "b")
    made.tick()
    assert (made.events, made.launched) == ([], {})
    return made


def test_a_commit_made_outside_is_reported_once_with_one_run(ticks: Ticks) -> None:
    version = alter(ticks.lake, "ns", "a")
    ticks.tick()
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 1}
    assert ticks.versions_run() == [str(version)]
    assert ticks.said[-1] == f"latest version: {version}; 0 versions remain"
    lakehouse = ticks.instance.get_latest_materialization_event(ONLY.lakehouse_key)
    assert lakehouse is not None
    assert lakehouse.asset_materialization is not None
    assert plain(lakehouse.asset_materialization.metadata)["lakehouse_version"] == version
    shown = plain(ticks.metrics()[-1].metadata)
    assert (shown["lag_versions"], shown["versions_left"]) == (1, 0)
    assert 0 <= shown["lag_seconds"] < 600
    assert shown["tables_changed"] == 1
    (request,) = ticks.launched.values()
    result = consumer.execute_in_process(instance=ticks.instance, run_config=QUIET, tags=dict(request.tags))
    assert result.success


def test_commits_around_a_clock_ten_years_ahead_are_reported_once(ticks: Ticks) -> None:
    ahead_ms = ticks.lake.storage.now_ms() + 10 * 365 * 86_400_000
    alter(Lakehouse(ClockStorage(ticks.lake.storage, ahead_ms)), "ns", "a")
    ticks.tick()
    assert ticks.metrics()[-1].metadata["lag_seconds"].value == 0
    alter(ticks.lake, "ns", "b")
    ticks.tick()
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 1, ("ns", "b"): 1}
    assert 0 <= plain(ticks.metrics()[-1].metadata)["lag_seconds"] < 600


def test_added_and_removed_tables(ticks: Ticks) -> None:
    create(ticks.lake, "more", "x")
    drop(ticks.lake, "ns", "b")
    ticks.tick()
    assert ticks.tables() == {("more", "x"): 1}
    seen = [event for event in ticks.events if isinstance(event, dg.AssetObservation)]
    (gone,) = [event for event in seen if event.asset_key != ONLY.lakehouse_key]
    assert (gone.asset_key.path, gone.metadata["change"].value) == (["ns", "b"], "removed")


def test_a_killed_daemon_repeats_events_and_no_run(ticks: Ticks) -> None:
    alter(ticks.lake, "ns", "a")
    ticks.tick(is_killed=True)
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 2}
    assert len(ticks.launched) == 1


def test_commits_of_own_runs_are_ignored(ticks: Ticks) -> None:
    own = consumer.execute_in_process(instance=ticks.instance, run_config=QUIET).run_id
    with acting_for_run(own):
        alter(ticks.lake, "ns", "a")
    ticks.tick()
    assert (ticks.events, ticks.launched) == ([], {})
    assert "1 versions since the last tick" in ticks.said[-1]
    alter(ticks.lake, "ns", "b")
    with acting_for_run(own):
        alter(ticks.lake, "ns", "a")
    with acting_for_run("11111111-2222-3333-4444-555555555555"):  # of another instance
        last = alter(ticks.lake, "ns", "b")
    ticks.tick()
    assert ticks.tables() == {("ns", "b"): 2}
    assert ticks.versions_run() == [str(last)]


@pytest.mark.parametrize("max_versions", [1000, 120])
def test_a_burst_of_500_commits(lakes: Lakes, instance: dg.DagsterInstance, max_versions: int) -> None:
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
    assert ticks.versions_run() == [str(lake.latest_version())]
    seen = [event.metadata["lag_versions"].value for event in ticks.metrics()]
    assert seen == list(range(500, 0, -max_versions))


def test_no_time_left_still_goes_on(ticks: Ticks) -> None:
    for _ in range(3):
        alter(ticks.lake, "ns", "a")
    slow = Ticks(ticks.lake, ticks.instance, max_seconds_per_tick=1e-9)
    slow.cursor = ticks.cursor
    for _ in range(3):
        slow.tick()
    assert slow.tables() == {("ns", "a"): 3}
    assert slow.cursor is not None
    assert Cursor.decode(slow.cursor).version == ticks.lake.latest_version()
    assert len(slow.launched) == 1


def test_many_tables_of_one_commit_are_spread_over_ticks(ticks: Ticks) -> None:
    few = Ticks(ticks.lake, ticks.instance, max_tables_per_tick=10)
    few.cursor = ticks.cursor
    create(ticks.lake, "many", *(f"t{number:02}" for number in range(24)))
    alter(ticks.lake, "ns", "a")
    for _ in range(4):
        few.tick()
    assert few.tables() == {("ns", "a"): 1} | {("many", f"t{number:02}"): 1 for number in range(24)}
    assert few.versions_run() == [str(ticks.lake.latest_version())]
    assert few.cursor is not None
    assert Cursor.decode(few.cursor).until is None


def test_expiry_past_the_cursor_is_told_and_jumped(ticks: Ticks) -> None:
    for _ in range(4):
        alter(ticks.lake, "ns", "a")
    kept = alter(ticks.lake, "ns", "b")
    last = alter(ticks.lake, "ns", "a")
    expire(ticks.lake, f"0-{kept - 1}")
    seal(ticks.lake, 1)
    ticks.tick()
    assert ticks.notes() == [
        f"version 1 can no longer be read; the changes of versions 2-{kept} are not reported",
    ]
    assert ticks.tables() == {("ns", "a"): 1}
    assert ticks.versions_run() == [str(last + 1)]
    alter(ticks.lake, "ns", "b")
    ticks.tick()
    assert len(ticks.notes()) == 1


def test_versions_that_expired_between_readable_ones_are_part_of_the_next(ticks: Ticks) -> None:
    own = consumer.execute_in_process(instance=ticks.instance, run_config=QUIET).run_id
    alter(ticks.lake, "ns", "a")
    with acting_for_run(own):
        alter(ticks.lake, "ns", "b")
    expire(ticks.lake, "2")
    ticks.tick()
    assert ticks.notes() == []
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
    ids=["text", "list", "empty", "no fields", "wrong kinds", "number", "nested"],
)
def test_a_cursor_of_garbage_goes_on_at_the_latest_version(ticks: Ticks, cursor: str) -> None:
    latest = alter(ticks.lake, "ns", "a")
    ticks.cursor = cursor
    ticks.tick()
    (note,) = ticks.notes()
    assert note.startswith("the cursor cannot be read")
    assert ticks.versions_run() == [str(latest)]
    alter(ticks.lake, "ns", "b")
    ticks.tick()
    assert ticks.tables() == {("ns", "b"): 1}


@pytest.mark.parametrize("wrong", [{"version": -1}, {"until": False}, {"until": ""}, {"reported": -1}], ids=str)
def test_a_cursor_of_this_lakehouse_with_wrong_values(ticks: Ticks, wrong: dict[str, Any]) -> None:
    assert ticks.cursor is not None
    ticks.cursor = json.dumps({**json.loads(ticks.cursor), **wrong})
    latest = alter(ticks.lake, "ns", "a")
    ticks.tick()
    assert ticks.notes() == [
        "the cursor cannot be read because it contains invalid values; commits before version"
        f" {latest} may not be reported"
    ]
    alter(ticks.lake, "ns", "b")
    ticks.tick()
    assert ticks.tables() == {("ns", "b"): 1}


@pytest.mark.parametrize("run_id", ["a\x00b", "x" * 2900, "run\n"], ids=["nul", "long", "line"])
def test_run_ids_that_no_instance_gives_are_not_asked_for(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    """Another program may write anything there; Postgres refuses to look for some of it."""

    def refuse(_instance: dg.DagsterInstance, run_id: str) -> None:
        raise ValueError("A string literal cannot contain NUL (0x00) characters.")

    monkeypatch.setattr(dg.DagsterInstance, "get_run_by_id", refuse)
    with acting_for_run(run_id):
        alter(ticks.lake, "ns", "a")
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 1}


def test_names_that_are_no_names_of_dagster(ticks: Ticks) -> None:
    names = ["été", "a/b", "a.b", "x" * 100, '"[]"', "日本", "%2F"]
    create(ticks.lake, "n/s.1", *names)
    ticks.tick()
    assert ticks.tables() == {("n/s.1", name): 1 for name in names}
    keys = {dg.AssetKey(["n/s.1", name]) for name in names}
    assert keys <= set(ticks.instance.all_asset_keys())
    assert all(ticks.instance.get_latest_materialization_event(key) is not None for key in keys)


def test_a_lakehouse_in_the_place_of_another(ticks: Ticks) -> None:
    assert ticks.cursor is not None
    known = Cursor.decode(ticks.cursor)
    beyond = (replace(known, version=9), replace(known, version=0, until=9, reported=1), replace(known, requested=9))
    for cursor in (*beyond, replace(known, lakehouse_id="another")):
        ticks.cursor = cursor.encode()
        ticks.tick()
        assert ticks.notes()[-1].startswith("the lakehouse was replaced: version ")
        assert ticks.cursor is not None
        assert Cursor.decode(ticks.cursor).version == 1
    assert len(ticks.launched) == 1


def test_before_there_is_a_lakehouse(instance: dg.DagsterInstance) -> None:
    resource = TrinityLakeResource(root="memory://never-made/")
    context = dg.build_sensor_context(instance=instance, resources={"lakehouse": resource})
    result = build_commit_sensor(job=consumer).evaluate_tick(context)
    assert "there is no lakehouse" in str(result.skip_message)


def test_without_a_job_events_alone(ticks: Ticks) -> None:
    alter(ticks.lake, "ns", "a")
    context = dg.build_sensor_context(
        instance=ticks.instance, cursor=ticks.cursor, resources={"lakehouse": ticks.resource}
    )
    sensor = build_commit_sensor(table_key=lambda namespace, name: dg.AssetKey(["p", namespace, name]))
    result = sensor.evaluate_tick(context)
    assert not result.run_requests
    keys = [event.asset_key.path for event in result.asset_events]
    assert keys == [["p", "ns", "a"], ONLY.lakehouse_key.path, ONLY.lakehouse_key.path], "the page, and metrics"


def test_the_time_of_a_tick_is_below_the_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS", "DAGSTER_GRPC_TIMEOUT_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    assert tick_budget_seconds() == 40
    monkeypatch.setenv("DAGSTER_GRPC_TIMEOUT_SECONDS", "120")
    assert tick_budget_seconds() == 100
    monkeypatch.setenv("DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS", "10")
    assert tick_budget_seconds() == 5


def test_a_failed_run_is_told_with_its_reason(instance: dg.DagsterInstance) -> None:
    resource = TrinityLakeResource(root="memory://never-made/")
    definitions = dg.Definitions(jobs=build_jobs(), resources={"lakehouse": resource})
    job = definitions.resolve_job_def("verify")
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    (event,) = [event for event in result.all_events if event.event_type_value == "PIPELINE_FAILURE"]
    told: list[FailedRun] = []
    calls = 0

    def alert(failed: FailedRun) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError("no answer")
        told.append(failed)

    sensor = build_failed_run_sensor(alert)
    context = dg.build_run_status_sensor_context(sensor.name, event, instance, result.dagster_run)
    sensor(context.for_run_failure())
    (failed,) = told
    assert (failed.run_id, failed.job, calls) == (result.run_id, "verify", 2)
    assert failed.steps == {"run_verify": "there is no lakehouse at memory://never-made/; create one with init"}
    assert json.loads(json.dumps(dict(failed.tags)))["dagster/max_retries"] == "0"


def test_altered_tables_of_one_version(ticks: Ticks) -> None:
    with ticks.lake.transaction() as txn:
        txn.alter_table("ns", "a", table(x="1"))
        txn.alter_table("ns", "b", table(x="1"))
    ticks.tick()
    assert ticks.tables() == {("ns", "a"): 1, ("ns", "b"): 1}
