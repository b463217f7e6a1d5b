"""Test that table changes by operations and other engines are reported as events of the corresponding assets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from tests.dagster_plugin.maintenance_jobs import approved_rollback
from tests.dagster_plugin.monthly_location import AFTER_ORDERS, AFTER_PRICES, MONTHS, ORDERS, PRICES, ROOT, location
from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import jobs
from trinitylake_ops.dagster_plugin._dagster_internals import execute_as_launched
from trinitylake_ops.dagster_plugin.names import ONLY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.sensors import build_commit_sensor
from trinitylake_ops.dagster_plugin.table_events import TableAssets, TableChanges
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.versions.history import diff_snapshots

KEYS = MONTHS.get_partition_keys()
#: The code location, as it appears in paths of the UI.
LOCATION_PATH = "__repository__@monthly"


class CodeLocation:
    """The code location on one lakehouse and one Dagster instance."""

    def __init__(self, lake: Lakehouse, instance: dg.DagsterInstance):
        self.lake = lake
        self.instance = instance
        self.definitions = location()
        self._cursor: Any = None
        self._sensor_cursor: str | None = None
        self.tick()

    def run(self, job: str, config: Mapping[str, Any] = QUIET, partition: str | None = None) -> None:
        """Run a job as if the code location had launched it, so that the run knows all its definitions."""
        tags = {} if partition is None else {"dagster/partition": partition}
        assert execute_as_launched(
            self.definitions,
            job,
            self.instance,
            file="monthly_location.py",
            location_name="monthly",
            run_config=config,
            tags=tags,
        ).success

    def load(self) -> None:
        self.run("load_prices")
        for key in KEYS[1:]:
            self.run("load_orders", partition=key)

    def tick(self) -> set[tuple[str, str | None]]:
        """Evaluate automation once, and return the requested assets with their partitions."""
        selection = dg.AssetSelection.assets(AFTER_ORDERS, AFTER_PRICES)
        result = dg.evaluate_automation_conditions(self.definitions, self.instance, selection, cursor=self._cursor)
        self._cursor = result.cursor
        requested = {("after_orders", key) for key in result.get_requested_partitions(AFTER_ORDERS)}
        return requested | ({("after_prices", None)} if result.get_num_requested(AFTER_PRICES) else set())

    def tick_sensor(self) -> list[Any]:
        """Evaluate the commit sensor once, and report its events like the daemon."""
        sensor = build_commit_sensor()
        repository = self.definitions.get_repository_def()
        resources = {"lakehouse": repository.get_top_level_resources()["lakehouse"]}
        with dg.build_sensor_context(
            instance=self.instance, cursor=self._sensor_cursor, repository_def=repository, resources=resources
        ) as context:
            result = sensor.evaluate_tick(context)
        self._sensor_cursor = result.cursor
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)  # type: ignore[arg-type]
        return [event for event in result.asset_events if event.asset_key != ONLY.lakehouse_key]


def append(lake: Lakehouse, table: str, rows: dict[str, list[Any]], namespace: str = "sales") -> None:
    """Append rows to a table like another engine."""
    staged = stage_arrow(lake, pa.table(rows), namespace, table, mode="append")
    publish_once(lake, [staged], publication_id(staged.metadata_location))


@pytest.fixture
def code_location(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> Iterator[CodeLocation]:
    lake = lakes.local()
    monkeypatch.setenv(ROOT, lake.root)
    with dg.instance_for_test() as instance:
        yield CodeLocation(lake, instance)


def test_rollback_job_reports_assets_of_changed_tables(code_location: CodeLocation) -> None:
    code_location.load()
    assert code_location.tick() == {("after_orders", KEYS[2]), ("after_prices", None)}
    append(code_location.lake, "prices", {"n": [7]})
    append(code_location.lake, "orders", {"year": [2020], "month": [3], "n": [7]})
    assert code_location.tick() == set()
    code_location.run("rollback", approved_rollback(code_location.lake, 3))
    assert code_location.tick() == {("after_orders", KEYS[2]), ("after_prices", None)}
    events = {}
    for key in (ORDERS, PRICES):
        record = code_location.instance.get_latest_materialization_event(key)
        assert record is not None and record.asset_materialization is not None
        events[key] = record.asset_materialization
    assert (events[ORDERS].partition, events[PRICES].partition) == (KEYS[2], None)
    assert {event.metadata["lakehouse_version"].value for event in events.values()} == {6}
    assert {event.metadata["operation"].value for event in events.values()} == {"rollback"}
    assert catalog_at(code_location.lake).load_table("sales.orders").scan().to_arrow().num_rows == 2


def test_sensor_reports_assets_of_tables_that_another_engine_changed(code_location: CodeLocation) -> None:
    code_location.load()
    assert code_location.tick_sensor() == []
    assert code_location.tick() == {("after_orders", KEYS[2]), ("after_prices", None)}
    assert code_location.tick() == set()
    append(code_location.lake, "prices", {"n": [7]})
    append(code_location.lake, "orders", {"year": [2020, 2020], "month": [1, 3], "n": [7, 8]})
    append(code_location.lake, "unassigned", {"n": [7]})
    append(code_location.lake, "observed", {"n": [7]}, "others")
    reported = {(event.asset_key, event.partition) for event in code_location.tick_sensor()}
    observed = dg.AssetKey(["others", "observed"])
    assert reported == {(PRICES, None), (ORDERS, KEYS[0]), (ORDERS, KEYS[2]), (observed, None)}
    assert code_location.tick() == {("after_orders", KEYS[2]), ("after_prices", None)}


def test_rewritten_or_removed_table_is_reported_as_observation(code_location: CodeLocation) -> None:
    repository = code_location.definitions.get_repository_def()
    lakehouse = TrinityLakeResource(root=code_location.lake.root)
    append(code_location.lake, "prices", {"n": [7]})
    append(code_location.lake, "orders", {"year": [2020], "month": [3], "n": [7]})
    head = code_location.lake.snapshot()
    changes = diff_snapshots(code_location.lake.snapshot(0), head)

    def events(kind: str, *, has_new_rows: bool = True, **options: Any) -> set[tuple[type, dg.AssetKey]]:
        assets = TableAssets(repository, ONLY, lakehouse, **options)
        table_changes = TableChanges(
            code_location.lake, code_location.lake.snapshot(0), head, assets, code_location.instance
        )
        changed = [dataclasses.replace(change, kind=kind) for change in changes]
        return {
            (type(event), event.asset_key) for event in table_changes.events(changed, {}, has_new_rows=has_new_rows)
        }

    observations = {(dg.AssetObservation, ORDERS), (dg.AssetObservation, PRICES)}
    assert events("removed") == events("changed", has_new_rows=False) == observations
    custom_key = dg.AssetKey(["custom"])
    assert events("changed", table_key=lambda _namespace, _table: custom_key) == {(dg.AssetMaterialization, custom_key)}


def test_sensor_reports_commit_of_killed_run(code_location: CodeLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    code_location.run("load_prices")
    append(code_location.lake, "prices", {"n": [7]})
    code_location.tick_sensor()
    monkeypatch.setattr(jobs, "LISTENERS", [lambda *_: 1 / 0])  # as if the process had been killed after the commit
    with pytest.raises(AssertionError):
        code_location.run("rollback", approved_rollback(code_location.lake, 1))
    assert next(code_location.lake.history()).operation == "rollback"
    (event,) = code_location.tick_sensor()
    assert (event.asset_key, event.metadata["dagster/row_count"].value) == (PRICES, 1)
    assert code_location.tick_sensor() == []


def test_sensor_checks_runs_in_progress_again(code_location: CodeLocation) -> None:
    code_location.tick_sensor()

    def commit(table: str, namespace: str) -> dg.DagsterRun:
        """Commit a table in a run, and return the run, which is still in progress."""
        job = code_location.definitions.resolve_job_def("load_prices")
        run = code_location.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
        staged = stage_arrow(code_location.lake, pa.table({"n": [7]}), namespace, table, mode="append")
        publish_once(code_location.lake, [staged], publication_id(run.run_id), run_id=run.run_id)
        return run

    killed, finished = commit("prices", "sales"), commit("observed", "others")
    assert [code_location.tick_sensor(), code_location.tick_sensor()] == [[], []], (
        "runs in progress may still report their own commits"
    )
    code_location.instance.report_run_failed(killed)
    assert [event.asset_key for event in code_location.tick_sensor()] == [PRICES]
    success = dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, job_name=finished.job_name)
    code_location.instance.report_dagster_event(success, run_id=finished.run_id)
    assert [code_location.tick_sensor(), code_location.tick_sensor()] == [[], []]
