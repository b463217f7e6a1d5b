"""Test that two code locations of one Dagster instance publish into one lakehouse, to shared and separate tables."""

from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes, check_lake
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import (
    LakehouseNames,
    LakehouseSettings,
    TrinityLakeResource,
    build_publish_asset,
    build_trinitylake_definitions,
    stored_as,
)
from trinitylake_ops.dagster_plugin._dagster_internals import execute_as_launched
from trinitylake_ops.dagster_plugin.sensors import build_commit_sensor
from trinitylake_ops.iceberg.catalog import catalog_at

REGIONS = dg.StaticPartitionsDefinition(["eu", "us"])


class Location:
    """A code location that writes a separate table, and a table partitioned by region that both locations write."""

    def __init__(self, name: str, lake: Lakehouse, instance: dg.DagsterInstance):
        self.name = name
        self.instance = instance
        self.names = LakehouseNames(name)
        self.shared_key, self.separate_key = dg.AssetKey([name, "sales", "orders"]), dg.AssetKey([name, "sales", name])
        self.before_staging: Callable[[], object] = lambda: None
        self._cursor: str | None = None
        lakehouse = TrinityLakeResource(root=lake.root)
        self.definitions = dg.Definitions.merge(
            build_trinitylake_definitions(LakehouseSettings(name=name, lakehouse=lakehouse)),
            dg.Definitions(
                assets=self._assets(),
                jobs=[
                    dg.define_asset_job(
                        "load", selection=[self.shared_key, self.separate_key, dg.AssetKey([name, "publish"])]
                    )
                ],
                executor=dg.in_process_executor,
            ),
        )

    def _assets(self) -> list[dg.AssetsDefinition]:
        def build_asset(key: dg.AssetKey, upstream_keys: list[dg.AssetKey]) -> dg.AssetsDefinition:
            @dg.asset(
                key=key,
                deps=upstream_keys,
                partitions_def=REGIONS,
                io_manager_key=self.names.io_manager_key,
                metadata=stored_as(partition_by=["region"]),
            )
            def table(context: dg.AssetExecutionContext) -> pa.Table:
                if upstream_keys:
                    hook, self.before_staging = self.before_staging, lambda: None
                    hook()
                return pa.table({"region": [context.partition_key], "by": [self.name]})

            return table

        shared_asset, separate_asset = (
            build_asset(self.shared_key, []),
            build_asset(self.separate_key, [self.shared_key]),
        )
        publish = build_publish_asset(
            key=[self.name, "publish"],
            tables={"shared": shared_asset, "separate": separate_asset},
            partitions_def=REGIONS,
            description="Both.",
            names=self.names,
        )
        return [shared_asset, separate_asset, publish]

    def load(self, region: str) -> bool:
        """Load a region in a run that the code location launches, like the UI does."""
        tags = {"dagster/partition": region}
        return execute_as_launched(
            self.definitions, "load", self.instance, file=__file__, location_name=self.name, run_config=QUIET, tags=tags
        ).success

    def tick_sensor(self) -> set[tuple[dg.AssetKey, str | None]]:
        """Evaluate the commit sensor once, like the daemon, and return the reported assets with their partitions."""
        repository = self.definitions.get_repository_def()
        origin = InProcessCodeLocationOrigin(LoadableTargetOrigin(python_file=__file__), location_name=self.name)
        resources = {self.names.resource_key: repository.get_top_level_resources()[self.names.resource_key]}
        with dg.SensorEvaluationContext(
            instance_ref=None,
            last_tick_completion_time=None,
            last_run_key=None,
            cursor=self._cursor,
            repository_name="__repository__",
            repository_def=repository,
            instance=self.instance,
            resources=resources,
            code_location_origin=origin,
        ) as context:
            result = build_commit_sensor(self.names, job_name="load").evaluate_tick(context)
        self._cursor = result.cursor
        assert not result.run_requests
        return {(event.asset_key, event.partition) for event in result.asset_events}


@pytest.fixture
def lake(lakes: Lakes) -> Iterator[Lakehouse]:
    lakehouse = lakes.local()
    yield lakehouse
    check_lake(lakehouse)


@pytest.fixture
def locations(lake: Lakehouse, tmp_path: Path) -> Iterator[tuple[Location, Location]]:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        yield Location("north", lake, instance), Location("south", lake, instance)


def rows(lake: Lakehouse, table: str) -> list[tuple[str, str]]:
    rows = catalog_at(lake).load_table(("sales", table)).scan().to_arrow().to_pylist()
    return sorted((row["region"], row["by"]) for row in rows)


def test_two_locations_publish_concurrently(lake: Lakehouse, locations: tuple[Location, Location]) -> None:
    north, south = locations
    north.before_staging = lambda: south.load("us")
    assert north.load("eu")
    assert rows(lake, "orders") == [("eu", "north"), ("us", "south")]
    assert (rows(lake, "north"), rows(lake, "south")) == ([("eu", "north")], [("us", "south")])
    south.before_staging = lambda: north.load("us")
    assert not south.load("us"), "both runs replace the same partition of the shared table"
    assert rows(lake, "orders") == [("eu", "north"), ("us", "north")]
    assert rows(lake, "south") == [("us", "south")], "the failed run must not publish any of its tables"


def test_sensor_reports_commits_of_other_location(locations: tuple[Location, Location]) -> None:
    north, south = locations
    assert north.load("eu")
    assert (north.tick_sensor(), south.tick_sensor()) == (set(), set()), "the first tick only initializes the cursor"
    assert north.load("us")
    assert north.tick_sensor() == set(), "its own run already reported its assets"
    assert south.tick_sensor() == {(south.shared_key, "us")}
    assert (north.tick_sensor(), south.tick_sensor()) == (set(), set())
