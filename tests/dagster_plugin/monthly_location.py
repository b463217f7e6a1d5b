"""A code location of two published tables, one of them partitioned by month, and automation that runs after them."""

import os
from typing import Any

import dagster as dg
import pyarrow as pa

from trinitylake_ops.dagster_plugin.code_location import LakehouseSettings, build_trinitylake_definitions
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.schedules import published
from trinitylake_ops.dagster_plugin.table_settings import stored_as

ROOT = "MONTHLY_LOCATION_ROOT"
MONTHS = dg.MonthlyPartitionsDefinition(start_date="2020-01-01", end_date="2020-04-01")
ORDERS, PRICES = dg.AssetKey(["sales", "orders"]), dg.AssetKey(["raw", "prices_of_today"])
AFTER_ORDERS, AFTER_PRICES = dg.AssetKey(["after_orders"]), dg.AssetKey(["after_prices"])


@dg.asset(
    key=ORDERS,
    partitions_def=MONTHS,
    metadata=stored_as(partition_by=["year", "month"], partition_format={"year": "%Y", "month": "%m"}),
)
def orders(context: dg.AssetExecutionContext) -> pa.Table:
    return pa.table({"year": [2020], "month": [int(context.partition_key[5:7])], "n": [1]})


@dg.asset(key=PRICES, metadata=stored_as(table="sales.prices"))
def prices() -> pa.Table:
    return pa.table({"n": [1]})


def _downstream_asset(
    key: dg.AssetKey, dep: dg.AssetKey, condition: Any, partitions: Any = None
) -> dg.AssetsDefinition:
    @dg.asset(key=key, deps=[dep], automation_condition=condition, partitions_def=partitions, io_manager_key="memory")
    def downstream() -> None:
        """Read the table."""

    return downstream


def location() -> dg.Definitions:
    lakehouse = TrinityLakeResource(root=os.environ[ROOT], storage_options=StorageSettings(fsync="false"))
    return dg.Definitions.merge(
        build_trinitylake_definitions(LakehouseSettings(name="", lakehouse=lakehouse, tables=["others.observed"])),
        dg.Definitions(
            assets=[
                *(orders, prices),
                build_publish_asset(
                    key=["publish", "orders"], tables={"orders": orders}, partitions_def=MONTHS, description="Orders."
                ),
                build_publish_asset(key=["publish", "prices"], tables={"prices": prices}, description="Prices."),
                _downstream_asset(AFTER_ORDERS, ORDERS, dg.AutomationCondition.eager(), MONTHS),
                _downstream_asset(AFTER_PRICES, PRICES, published()),
            ],
            resources={"io_manager": TrinityLakeIOManager(lakehouse=lakehouse), "memory": dg.mem_io_manager},
            jobs=[
                dg.define_asset_job("load_orders", selection=[ORDERS, dg.AssetKey(["publish", "orders"])]),
                dg.define_asset_job("load_prices", selection=[PRICES, dg.AssetKey(["publish", "prices"])]),
            ],
            executor=dg.in_process_executor,
        ),
    )
