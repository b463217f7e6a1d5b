"""A Dagster project with monthly partitions, which several workers publish concurrently."""

from collections.abc import Callable

import dagster as dg
import pyarrow as pa

from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.table_settings import stored_as

MONTHS = dg.MonthlyPartitionsDefinition(start_date="2020-01-01", end_date="2021-01-01")
ORDERS = dg.AssetKey(["sales", "orders"])
EVENTS = dg.AssetKey(["sales", "events"])
PUBLISHED = dg.AssetKey(["publish", "month"])
#: Functions that the next run calls between staging and publication, to simulate concurrent runs.
BEFORE_PUBLICATION: list[Callable[[], object]] = []


@dg.asset(
    key=ORDERS, partitions_def=MONTHS, metadata=stored_as(partition_by=["month"], partition_format={"month": "%m"})
)
def orders(context: dg.AssetExecutionContext) -> pa.Table:
    month = int(context.partition_key[5:7])
    return pa.table({"month": [month] * month, "run": [context.run.run_id] * month})


@dg.asset(key=EVENTS, partitions_def=MONTHS, metadata=stored_as(mode="append"))
def events(context: dg.AssetExecutionContext, orders: pa.Table) -> pa.Table:
    assert set(orders["month"].to_pylist()) == {int(context.partition_key[5:7])}
    while BEFORE_PUBLICATION:
        BEFORE_PUBLICATION.pop()()
    return pa.table({"month": [int(context.partition_key[5:7])], "run": [context.run.run_id]})


def definitions(folder: str, executor: dg.ExecutorDefinition = dg.in_process_executor) -> dg.Definitions:
    lakehouse = TrinityLakeResource(root=f"{folder}/lake", storage_options=StorageSettings(fsync="false"))
    publish = build_publish_asset(
        key=PUBLISHED.path,
        tables={"orders": orders, "events": events},
        partitions_def=MONTHS,
        description="A month.",
        pool="publish",
    )
    return dg.Definitions(
        assets=[orders, events, publish],
        jobs=[dg.define_asset_job("month")],
        resources={"lakehouse": lakehouse, "io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
        executor=executor,
    )


def month_job(folder: str) -> dg.JobDefinition:
    """Return the job for a run worker that runs all steps in one process."""
    return definitions(folder).resolve_job_def("month")
