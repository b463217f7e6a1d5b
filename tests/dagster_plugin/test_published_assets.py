"""Test that only published tables materialize assets and trigger downstream assets."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.schedules import published
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once

ORDERS, TOTALS = dg.AssetKey(["sales", "orders"]), dg.AssetKey(["sales", "totals"])
PUBLISHED = dg.AssetKey(["publish", "sales"])
REPORT, SUMMARY = dg.AssetKey(["report"]), dg.AssetKey(["summary"])


class Project:
    """Two tables that one run stages and publishes, and two assets that automation runs afterwards."""

    def __init__(self, lake: Lakehouse, instance: dg.DagsterInstance):
        self.lake = lake
        self.instance = instance
        self.has_conflict = False
        lakehouse = TrinityLakeResource(root=lake.root)
        assets = [
            *self._tables(),
            self._downstream_asset(REPORT, dg.AutomationCondition.eager()),
            self._downstream_asset(SUMMARY, published()),
        ]
        self.definitions = dg.Definitions(
            assets=assets,
            resources={
                "lakehouse": lakehouse,
                "io_manager": TrinityLakeIOManager(lakehouse=lakehouse),
                "memory": dg.mem_io_manager,
            },
            jobs=[
                dg.define_asset_job("all", selection=[ORDERS, TOTALS, PUBLISHED]),
                dg.define_asset_job("stage", selection=[ORDERS, TOTALS]),
            ],
            executor=dg.in_process_executor,
        )
        self.cursor: Any = None
        self.tick()

    def _tables(self) -> list[dg.AssetsDefinition]:
        @dg.asset(key=ORDERS, code_version="1", metadata={"owner": "ann"})
        def orders() -> pa.Table:
            return pa.table({"n": [1, 2]})

        @dg.asset(key=TOTALS, code_version="1")
        def totals(context: dg.AssetExecutionContext, orders: pa.Table) -> pa.Table:
            if self.has_conflict:
                publish_externally(self.lake, "orders")
            context.add_output_metadata({"checked": 1})
            return pa.table({"n": [sum(orders["n"].to_pylist())]})

        publish = build_publish_asset(
            key=PUBLISHED.path, tables={"totals": totals, "orders": orders}, description="Sales."
        )
        return [orders, totals, publish]

    @staticmethod
    def _downstream_asset(key: dg.AssetKey, condition: Any) -> dg.AssetsDefinition:
        @dg.asset(key=key, deps=[TOTALS], automation_condition=condition, io_manager_key="memory")
        def downstream() -> None:
            """Read the totals."""

        return downstream

    def run(self, job: str = "all") -> dg.ExecuteInProcessResult:
        definition = self.definitions.resolve_job_def(job)
        return definition.execute_in_process(instance=self.instance, run_config=QUIET, raise_on_error=False)

    def tick(self) -> set[dg.AssetKey]:
        """Evaluate automation once, and return the requested assets."""
        result = dg.evaluate_automation_conditions(
            self.definitions, self.instance, dg.AssetSelection.assets(REPORT, SUMMARY), cursor=self.cursor
        )
        self.cursor = result.cursor
        return {key for key in (REPORT, SUMMARY) if result.get_num_requested(key)}

    def versions(self, key: dg.AssetKey) -> list[int]:
        records = self.instance.fetch_materializations(key, limit=100).records
        events = [record.asset_materialization for record in records]
        return [event.metadata["lakehouse_version"].value for event in events if event is not None]  # type: ignore[misc]

    def stale_status(self, key: dg.AssetKey) -> StaleStatus:
        graph = self.definitions.resolve_asset_graph()
        resolver = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        return resolver.get_status(key)


def publish_externally(lake: Lakehouse, table: str) -> None:
    staged = stage_arrow(lake, pa.table({"n": [7]}), "sales", table, mode="append")
    publish_once(lake, [staged], publication_id("external", staged.metadata_location))


@pytest.fixture
def project(lakes: Lakes) -> Iterator[Project]:
    with dg.instance_for_test() as instance:
        yield Project(lakes.local(), instance)


def test_publication_materializes_its_tables(project: Project) -> None:
    result = project.run()
    assert result.success
    assert (project.versions(ORDERS), project.versions(TOTALS)) == ([1], [1])
    assert project.tick() == {REPORT, SUMMARY}
    assert project.tick() == set()
    event = project.instance.get_latest_materialization_event(TOTALS)
    assert event is not None and event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    assert (metadata["dagster/row_count"].value, metadata["checked"].value) == (1, 1)
    assert metadata["staged_by"].value == event.run_id == result.run_id
    assert event.step_key == "publish__sales"
    assert "trinitylake/staged" not in metadata
    (record,) = project.instance.fetch_observations(TOTALS, limit=9).records
    assert record.asset_observation is not None and record.asset_observation.description == "Staged, not yet published."


def test_run_without_publish_asset_fails_and_materializes_nothing(project: Project) -> None:
    assert not project.run("stage").success
    assert (project.versions(ORDERS), project.versions(TOTALS)) == ([], [])
    assert project.tick() == set()


def test_failed_publication_does_not_change_tables(project: Project) -> None:
    assert project.run().success
    assert project.tick() == {REPORT, SUMMARY}
    project.has_conflict = True
    assert not project.run().success
    assert (project.versions(ORDERS), project.versions(TOTALS), project.lake.latest_version()) == ([1], [1], 2)
    assert project.tick() == set()


def test_tables_of_one_run_are_not_stale(project: Project) -> None:
    """Dagster considers the tables fresh, although one staged table was computed from another."""
    for _ in range(2):
        assert project.run().success
        assert [project.stale_status(key) for key in (ORDERS, TOTALS)] == [StaleStatus.FRESH] * 2
    event = project.instance.get_latest_materialization_event(TOTALS)
    assert event is not None and event.asset_materialization is not None
    tags = event.asset_materialization.tags or {}
    (orders,) = project.instance.fetch_materializations(ORDERS, limit=1).records
    assert tags["dagster/input_event_pointer/sales/orders"] == str(orders.storage_id)
    assert tags["dagster/code_version"] == "1"


def test_automation_publishes_downstream_table(lakes: Lakes) -> None:
    lake = lakes.local()
    lakehouse = TrinityLakeResource(root=lake.root)

    @dg.asset(key=ORDERS)
    def orders() -> pa.Table:
        return pa.table({"n": [1, 2]})

    @dg.asset(key=TOTALS, automation_condition=published(), ins={"orders": dg.AssetIn(ORDERS)})
    def totals(orders: pa.Table) -> pa.Table:
        return pa.table({"n": [sum(orders["n"].to_pylist())]})

    first = build_publish_asset(key=["publish", "orders"], tables={"orders": orders}, description="Orders.")
    second = build_publish_asset(
        key=["publish", "totals"],
        tables={"totals": totals},
        description="Totals.",
    ).map_asset_specs(lambda spec: spec.replace_attributes(automation_condition=dg.AutomationCondition.eager()))
    definitions = dg.Definitions(
        assets=[orders, totals, first, second],
        resources={"lakehouse": lakehouse, "io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
        executor=dg.in_process_executor,
    )
    with dg.instance_for_test() as instance:
        cursor: Any = None

        def requested_assets() -> set[dg.AssetKey]:
            nonlocal cursor
            result = dg.evaluate_automation_conditions(
                definitions, instance, dg.AssetSelection.assets(totals, second), cursor=cursor
            )
            cursor = result.cursor
            return {key for key in (totals.key, second.key) if result.get_num_requested(key)}

        def run(*assets: dg.AssetsDefinition) -> None:
            job = definitions.resolve_implicit_global_asset_job_def()
            keys = [asset.key for asset in assets]
            assert job.execute_in_process(instance=instance, run_config=QUIET, asset_selection=keys).success

        assert requested_assets() == set()
        run(orders, first)
        assert lake.latest_version() == 1
        assert requested_assets() == {totals.key, second.key}
        run(totals, second)
        assert lake.latest_version() == 2
        assert requested_assets() == set()
