"""Test workflows of Dagster's UI on tables: the rows of a successful run are always visible."""

from collections.abc import Sequence
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from tests.dagster_plugin.run_config import QUIET
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import (
    LakehouseNames,
    LakehouseSettings,
    TrinityLakeIOManager,
    TrinityLakeResource,
    build_publish_asset,
    build_trinitylake_definitions,
    stored_as,
)
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at

LAKE = LakehouseNames("lake")
IO = LAKE.io_manager_key
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-06")
OPTIONAL_DATAFRAME = pd.DataFrame | None
BY_DAY = stored_as(partition_by=["day"])


class Project:
    """The assets of a test on one lakehouse and one Dagster instance."""

    def __init__(self, lake: Lakehouse, instance: dg.DagsterInstance, assets: Sequence[Any], **options: Any):
        self.lake, self.instance = lake, instance
        resource = TrinityLakeResource(root=lake.root)
        self.definitions = dg.Definitions(
            assets=assets,
            resources={
                LAKE.resource_key: resource,
                IO: TrinityLakeIOManager(lakehouse=resource),
                "io_manager": dg.mem_io_manager,
            },
            executor=dg.in_process_executor,
            **options,
        )

    def run(self, *keys: str, job: str = "", **options: Any) -> dg.ExecuteInProcessResult:
        if job:
            definition = self.definitions.resolve_job_def(job)
        else:
            definition = self.definitions.resolve_implicit_global_asset_job_def()
            options["asset_selection"] = [dg.AssetKey(key.split("/")) for key in keys]
        return definition.execute_in_process(instance=self.instance, run_config=QUIET, raise_on_error=False, **options)

    def rows(self, table: str) -> list[dict[str, Any]] | None:
        namespace, name = table.split(".")
        head = self.lake.snapshot()
        if not (head.has_namespace(namespace) and head.has_table(namespace, name)):
            return None
        rows: list[dict[str, Any]] = catalog_at(self.lake).load_table((namespace, name)).scan().to_arrow().to_pylist()
        return rows

    def event(self, key: str) -> dg.AssetMaterialization | None:
        event_log_entry = self.instance.get_latest_materialization_event(dg.AssetKey(key.split("/")))
        return None if event_log_entry is None else event_log_entry.asset_materialization


def failures(result: dg.ExecuteInProcessResult) -> list[str]:
    """Return the messages of failed steps, as displayed in the UI."""
    errors = [event.step_failure_data.error for event in result.all_events if event.is_step_failure]
    return [(error.cause or error).message.strip() for error in errors if error is not None]


@dg.asset(key=["shop", "orders"], io_manager_key=IO)
def orders() -> pa.Table:
    return pa.table({"customer": ["Ann", "Ann", "Bob"], "euros": [20.0, 5.5, 12.0]})


@dg.asset(key=["shop", "revenue"], io_manager_key=IO)
def revenue(orders: pa.Table) -> pa.Table:
    return orders.group_by("customer").aggregate([("euros", "sum")])


def publish(*tables: dg.AssetsDefinition | dg.AssetKey, **options: Any) -> dg.AssetsDefinition:
    tables_by_name = {(table if isinstance(table, dg.AssetKey) else table.key).path[-1]: table for table in tables}
    return build_publish_asset(
        key=["publish", "shop"], tables=tables_by_name, description="Shop.", names=LAKE, **options
    )


def test_table_without_publish_asset_is_published_by_its_step(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    project = Project(lake, instance, [orders, revenue])
    assert project.run("shop/orders").success
    assert len(project.rows("shop.orders") or []) == 3
    event = project.event("shop/orders")
    assert event is not None
    assert (event.metadata["lakehouse_version"].value, event.metadata["dagster/row_count"].value) == (1, 3)
    head = project.event("lake/lakehouse")
    assert head is not None and head.metadata["lakehouse_version"].value == 1
    assert project.run("shop/orders", "shop/revenue").success
    assert len(project.rows("shop.revenue") or []) == 2
    assert [info.properties["asset"] for info in lake.history(2)] == ["shop/revenue", "shop/orders"]
    assert project.run("shop/revenue").success, "its input must be read from the lakehouse"


def test_table_is_not_stored_without_its_publish_asset(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    project = Project(
        lake,
        instance,
        [orders, revenue, publish(orders, revenue)],
        jobs=[dg.define_asset_job("tables", selection=[orders.key, revenue.key])],
    )
    for result in (project.run("shop/orders"), project.run(job="tables")):
        (message,) = failures(result)
        assert 'key:"shop/orders" or key:"publish/shop"' in message
    assert (project.rows("shop.orders"), project.event("shop/orders"), lake.latest_version()) == (None, None, 0)
    selection = dg.AssetSelection.from_string('key:"shop/orders" or key:"publish/shop"')
    keys = selection.resolve(project.definitions.resolve_asset_graph())
    assert project.run(*(key.to_user_string() for key in keys)).success
    assert len(project.rows("shop.orders") or []) == 3
    assert project.rows("shop.revenue") is None
    (message,) = failures(project.run("publish/shop"))
    suggested_selection = dg.AssetSelection.from_string(message.partition("--select: ")[2])
    keys = suggested_selection.resolve(project.definitions.resolve_asset_graph())
    assert {key.to_user_string() for key in keys} == {"shop/orders", "shop/revenue", "publish/shop"}
    assert project.run(*(key.to_user_string() for key in keys)).success
    assert len(project.rows("shop.revenue") or []) == 2
    result = project.run("shop/revenue", "publish/shop")
    assert result.success, "the other table of the publication must be read from the lakehouse"


def test_publication_fails_when_asset_returns_nothing(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    @dg.asset(key=["shop", "nothing"], io_manager_key=IO)
    def nothing() -> None: ...

    project = Project(lake, instance, [orders, nothing, publish(orders, nothing)])
    result = project.run("shop/orders", "shop/nothing", "publish/shop")
    assert not result.success
    (text,) = failures(result)
    assert "shop/nothing was not published" in text
    assert project.rows("shop.orders") is None
    assert project.run("shop/orders", "publish/shop").success
    assert len(project.rows("shop.orders") or []) == 3


def test_downstream_asset_waits_for_publication(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    check_fails = [True]

    @dg.asset(ins={"orders": dg.AssetIn(orders.key, input_manager_key=IO)})
    def report(orders: pa.Table) -> int:
        return orders.num_rows

    @dg.asset_check(asset=orders, blocking=True)
    def has_three_rows(orders: pa.Table) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=not check_fails[0] and orders.num_rows == 3)

    project = Project(lake, instance, [orders, publish(orders), report], asset_checks=[has_three_rows])
    assert not project.run("shop/orders", "publish/shop", "report").success
    assert (project.event("report"), project.rows("shop.orders")) == (None, None)
    check_fails[0] = False
    result = project.run("shop/orders", "publish/shop", "report")
    assert result.success
    assert result.output_for_node("report") == 3


@pytest.mark.parametrize(
    ("input_type", "is_published_together"),
    [
        (pd.DataFrame, True),
        (pl.DataFrame, False),
        (pa.Table, False),
        (pa.RecordBatchReader, False),
        (OPTIONAL_DATAFRAME, False),
    ],
)
def test_asset_reads_its_previous_partition_from_first_day(
    lake: Lakehouse, instance: dg.DagsterInstance, input_type: Any, is_published_together: bool
) -> None:
    inputs: list[Any] = []

    def total(context, previous):  # type: ignore[no-untyped-def]
        inputs.append(previous)
        previous_table = previous.read_all() if input_type is pa.RecordBatchReader else previous
        count = 0 if previous_table is None else len(previous_table)
        before = (
            0
            if count == 0
            else int(
                previous_table["total"][0].as_py()
                if input_type is pa.Table or input_type is pa.RecordBatchReader
                else previous_table["total"][0]
            )
        )
        return pa.table({"day": [context.partition_key], "total": [before + 1]})

    total.__annotations__.update(context=dg.AssetExecutionContext, previous=input_type)
    mapping = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
    asset = dg.asset(
        key=["shop", "total"],
        io_manager_key=IO,
        partitions_def=DAYS,
        metadata=BY_DAY,
        ins={"previous": dg.AssetIn(["shop", "total"], partition_mapping=mapping)},
    )(total)
    assets = [asset, publish(asset, partitions_def=DAYS)] if is_published_together else [asset]
    project = Project(lake, instance, assets)
    keys = ["shop/total", "publish/shop"][: len(assets)]
    for day in ("2026-01-01", "2026-01-02", "2026-01-04", "2026-01-02"):
        result = project.run(*keys, partition_key=day)
        assert result.success, failures(result)
    totals = {row["day"]: row["total"] for row in project.rows("shop.total") or []}
    assert totals == {"2026-01-01": 1, "2026-01-02": 2, "2026-01-04": 1}
    assert (inputs[0] is None) == (input_type == OPTIONAL_DATAFRAME)


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
def test_asset_with_two_dimensions_reads_its_previous_partition(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    dimensions = dg.MultiPartitionsDefinition({"day": DAYS, "shop": dg.StaticPartitionsDefinition(["a", "b"])})
    previous_day = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
    mapping = dg.MultiPartitionMapping(
        {
            "day": dg.DimensionPartitionMapping("day", previous_day),
            "shop": dg.DimensionPartitionMapping("shop", dg.IdentityPartitionMapping()),
        }
    )

    @dg.asset(
        key=["shop", "total"],
        io_manager_key=IO,
        partitions_def=dimensions,
        ins={"previous": dg.AssetIn(["shop", "total"], partition_mapping=mapping)},
    )
    def total(context: dg.AssetExecutionContext, previous: pd.DataFrame) -> pd.DataFrame:
        key = context.partition_key
        assert isinstance(key, dg.MultiPartitionKey)
        return pd.DataFrame(
            {**{name: [value] for name, value in key.keys_by_dimension.items()}, "n": [len(previous) + 1]}
        )

    project = Project(lake, instance, [total])
    for day, shop in [("2026-01-01", "a"), ("2026-01-02", "a"), ("2026-01-02", "b")]:
        result = project.run("shop/total", partition_key=dg.MultiPartitionKey({"day": day, "shop": shop}))
        assert result.success, failures(result)
    counts = {(row["day"], row["shop"]): row["n"] for row in project.rows("shop.total") or []}
    assert counts == {("2026-01-01", "a"): 1, ("2026-01-02", "a"): 2, ("2026-01-02", "b"): 1}


def test_missing_input_table_is_named_in_error(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    project = Project(lake, instance, [orders, revenue])
    (message,) = failures(project.run("shop/revenue"))
    assert "materialize shop/orders first" in message


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
@pytest.mark.parametrize("is_published_together", [False, True])
def test_data_version_and_tags_of_output_reach_materialization(
    lake: Lakehouse, instance: dg.DagsterInstance, is_published_together: bool
) -> None:
    @dg.asset(key=["shop", "a"], io_manager_key=IO)
    def asset_with_output() -> dg.Output[pa.Table]:
        return dg.Output(pa.table({"n": [1]}), data_version=dg.DataVersion("seven"), tags={"k": "v"})

    @dg.asset(key=["shop", "b"], io_manager_key=IO)
    def asset_with_result() -> dg.MaterializeResult[pa.Table]:
        return dg.MaterializeResult(value=pa.table({"n": [1]}), data_version=dg.DataVersion("eight"), tags={"k": "v"})

    assets = [asset_with_output, asset_with_result]
    project = Project(lake, instance, [*assets, publish(*assets)] if is_published_together else assets)
    result = project.run("shop/a", "shop/b", *(["publish/shop"] if is_published_together else []))
    assert result.success, failures(result)
    for key, version in [("shop/a", "seven"), ("shop/b", "eight")]:
        event = project.event(key)
        assert event is not None and event.tags is not None
        assert (event.tags["dagster/data_version"], event.tags["k"]) == (version, "v")


@pytest.mark.parametrize("partitions", [None, DAYS])
def test_no_asset_is_stale_after_successful_run(
    lake: Lakehouse, instance: dg.DagsterInstance, partitions: dg.PartitionsDefinition[str] | None
) -> None:
    @dg.asset(key=["shop", "days"], io_manager_key=IO, partitions_def=partitions, metadata=BY_DAY)
    def days() -> pa.Table:
        return pa.table({"day": ["2026-01-01"]})

    publisher = publish(days, partitions_def=partitions)
    project = Project(lake, instance, [days, publisher])
    key = None if partitions is None else "2026-01-01"
    for _ in range(2):
        result = project.run("shop/days", "publish/shop", partition_key=key)
        assert result.success, failures(result)
        graph = project.definitions.resolve_asset_graph()
        resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
        for asset in (days, publisher):
            assert resolver.get_status(asset.key, key) == StaleStatus.FRESH


@pytest.mark.parametrize("has_tables_by_key", [False, True])
def test_automation_of_tables_requests_publish_asset(
    lake: Lakehouse, instance: dg.DagsterInstance, has_tables_by_key: bool
) -> None:
    eager = dg.AutomationCondition.eager()

    @dg.asset
    def raw() -> int:
        return 1

    @dg.asset(key=["au", "a"], io_manager_key=IO, deps=[raw], automation_condition=eager)
    def a() -> pa.Table:
        return pa.table({"x": [1]})

    @dg.asset(key=["au", "b"], io_manager_key=IO, automation_condition=eager)
    def b(a: pa.Table) -> pa.Table:
        return a

    @dg.asset(automation_condition=eager, ins={"b": dg.AssetIn(["au", "b"], input_manager_key=IO)})
    def report(b: pa.Table) -> int:
        return b.num_rows

    publisher = publish(a.key, b.key) if has_tables_by_key else publish(a, b)
    project = Project(lake, instance, [raw, a, b, publisher, report])
    cursor: Any = None

    def tick() -> list[str]:
        nonlocal cursor
        all_assets = dg.AssetSelection.all()
        result = dg.evaluate_automation_conditions(project.definitions, instance, all_assets, cursor=cursor)
        cursor = result.cursor
        keys = project.definitions.resolve_asset_graph().get_all_asset_keys()
        return sorted(key.to_user_string() for key in keys if result.get_num_requested(key))

    tick()
    assert project.run("raw").success
    requested: list[str] = []
    for _ in range(5):
        keys = tick()
        requested += keys
        if keys:
            result = project.run(*keys)
            assert result.success, failures(result)
    assert sorted(requested) == ["au/a", "au/b", "publish/shop", "report"]
    assert (project.rows("au.a"), project.rows("au.b")) == ([{"x": 1}], [{"x": 1}])


def test_tables_that_no_run_publishes_are_rejected_when_definitions_load() -> None:
    def table(partitions: dg.PartitionsDefinition[str] | None, condition: Any = None) -> dg.AssetsDefinition:
        @dg.asset(
            key=["shop", "t"],
            io_manager_key=IO,
            partitions_def=partitions,
            metadata=BY_DAY,
            automation_condition=condition,
        )
        def table_asset() -> pa.Table:
            return pa.table({"day": ["2026-01-01"]})

        return table_asset

    weeks, eager = dg.WeeklyPartitionsDefinition("2026-01-01"), dg.AutomationCondition.eager()
    for asset, partitions in [
        (table(DAYS), weeks),
        (table(DAYS, eager), None),
        (table(None, eager), DAYS),
    ]:
        with pytest.raises(InvalidInputError):
            publish(asset, partitions_def=partitions)
    publish(table(DAYS), partitions_def=None)
    publish(table(None), partitions_def=DAYS)
    automated = publish(table(DAYS, eager), partitions_def=DAYS)
    assert automated.get_asset_spec(automated.key).automation_condition is not None


def test_lakehouse_definitions_work_without_publish_asset(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    settings = LakehouseSettings(name=LAKE.name, lakehouse=TrinityLakeResource(root=lake.root))
    definitions = dg.Definitions.merge(
        dg.Definitions(assets=[orders, revenue], executor=dg.in_process_executor),
        build_trinitylake_definitions(settings),
    )
    job = definitions.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(
        instance=instance, run_config=QUIET, asset_selection=[orders.key, revenue.key], raise_on_error=False
    )
    assert result.success, failures(result)
    assert lake.latest_version() == 2


@dg.op(out=dg.Out(pa.Table, io_manager_key=IO))
def numbers() -> pa.Table:
    return pa.table({"n": [1]})


@dg.op(out=dg.Out(pa.Table, io_manager_key=IO))
def repeated(table: pa.Table) -> pa.Table:
    return pa.table({"n": table["n"].to_pylist() * 2})


@dg.graph_multi_asset(
    outs={name: dg.AssetOut(key=["shop", name], io_manager_key=IO) for name in ("numbers", "repeated")}
)
def graph() -> dict[str, Any]:
    table = numbers()
    return {"numbers": table, "repeated": repeated(table)}


@pytest.mark.parametrize("is_published_together", [False, True])
def test_graph_step_reads_output_of_earlier_step(
    lake: Lakehouse, instance: dg.DagsterInstance, is_published_together: bool
) -> None:
    keys = {name: dg.AssetKey(["shop", name]) for name in ("numbers", "repeated")}
    publisher = build_publish_asset(key=["publish", "graph"], tables=keys, names=LAKE)

    @dg.asset
    def other() -> int:  # Dagster needs the default IO manager for the outputs of a graph
        return 1

    project = Project(lake, instance, [graph, other, *([publisher] if is_published_together else [])])
    for _ in range(2):
        publish_keys = ["publish/graph"] if is_published_together else []
        result = project.run("shop/numbers", "shop/repeated", "other", *publish_keys)
        assert failures(result) == []
        assert (project.rows("shop.numbers"), project.rows("shop.repeated")) == ([{"n": 1}], [{"n": 1}, {"n": 1}])


@pytest.mark.parametrize("metadata", [BY_DAY, {}])
def test_partitions_of_other_code_location_are_read_by_column_of_asset_spec(
    lake: Lakehouse, instance: dg.DagsterInstance, metadata: dict[str, Any]
) -> None:
    key = dg.AssetKey(["shop", "days"])

    @dg.asset(key=key, io_manager_key=IO, partitions_def=DAYS, metadata=BY_DAY)
    def days(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"day": [context.partition_key] * 2})

    @dg.asset(partitions_def=DAYS, ins={"days": dg.AssetIn(key, input_manager_key=IO)})
    def count_of_day(days: pa.Table) -> int:
        return days.num_rows

    @dg.asset(ins={"days": dg.AssetIn(key, input_manager_key=IO)})
    def count_of_all_days(days: pa.Table) -> int:
        return days.num_rows

    first_location = Project(lake, instance, [days])
    for day in ("2026-01-01", "2026-01-02"):
        assert first_location.run("shop/days", partition_key=day).success
    spec = dg.AssetSpec(key, partitions_def=DAYS, metadata=metadata)
    other_location = Project(lake, instance, [spec, count_of_day, count_of_all_days])
    result = other_location.run("count_of_day", partition_key="2026-01-02")
    if metadata:
        assert result.output_for_node("count_of_day") == 2
    else:
        assert not result.success
        assert "stored_as(partition_by=[COLUMN])" in failures(result)[0]
    assert other_location.run("count_of_all_days").output_for_node("count_of_all_days") == 4


def test_publish_asset_of_table_in_other_code_location_fails(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    @dg.asset(key=["shop", "items"], io_manager_key=IO)
    def items() -> pa.Table:
        return pa.table({"x": [1]})

    first_location = Project(lake, instance, [orders])
    spec = dg.AssetSpec(orders.key).with_io_manager_key(IO)
    other_location = Project(lake, instance, [spec, items, publish(orders.key, items)])
    assert first_location.run("shop/orders").success, "the table must be published by its step"
    for keys in (["publish/shop"], ["shop/items", "publish/shop"]):
        result = other_location.run(*keys)
        assert not result.success
        assert "build the publish asset in the code location of shop/orders" in failures(result)[0]
    assert (
        len(first_location.rows("shop.orders") or []),
        first_location.rows("shop.items"),
        lake.latest_version(),
    ) == (
        3,
        None,
        1,
    )
