"""A code location with one published table, and a check that fails on negative amounts."""

import os
from pathlib import Path

import dagster as dg
import pyarrow as pa

from trinitylake_ops.dagster_plugin.code_location import LakehouseSettings, build_trinitylake_definitions
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.table_settings import stored_as

ROOT = "INCIDENT_PROJECT_ROOT"
#: Environment variable with the URL of the UI, if it has a path prefix.
URL = "INCIDENT_PROJECT_URL"
#: Environment variable that makes the check blocking.
BLOCKING = "INCIDENT_PROJECT_BLOCKING"
NAMES = LakehouseNames("shop")
ORDERS = NAMES.table_key("sales", "orders")
LOAD = "shop_load"
#: File next to the lakehouse's folder with the amounts that the next load reads, one per line.
SOURCE = "shop-amounts.txt"


def shop_definitions(root: str) -> dg.Definitions:
    """Return the definitions of the lakehouse ``shop`` in a folder, with the table, its check and the load job."""
    lakehouse = TrinityLakeResource(
        root=root, storage_options=StorageSettings(fsync="false"), webserver_url=os.environ.get(URL, "")
    )

    @dg.asset(key=ORDERS, metadata=stored_as(table="sales.orders"), io_manager_key=NAMES.io_manager_key)
    def orders() -> pa.Table:
        amounts = [int(line) for line in Path(root).with_name(SOURCE).read_text().split()]
        return pa.table({"amount": pa.array(amounts, pa.int64())})

    @dg.asset_check(asset=orders, blocking=BLOCKING in os.environ)
    def no_negative_amounts(orders: pa.Table) -> dg.AssetCheckResult:
        negative = sum(amount < 0 for amount in orders["amount"].to_pylist())
        return dg.AssetCheckResult(passed=not negative, metadata={"negative": negative})

    publish = build_publish_asset(
        key=["publish", "shop"], tables={"orders": orders}, description="Publishes the orders.", names=NAMES
    )
    settings = LakehouseSettings(
        name=NAMES.name, lakehouse=lakehouse, published_by=[publish.key], operations=["history"]
    )
    return dg.Definitions.merge(
        build_trinitylake_definitions(settings),
        dg.Definitions(
            assets=[orders, publish],
            asset_checks=[no_negative_amounts],
            jobs=[
                dg.define_asset_job(LOAD, selection=dg.AssetSelection.assets(ORDERS, publish.key)),
            ],
        ),
    )


def location() -> dg.Definitions:
    return dg.Definitions.merge(shop_definitions(os.environ[ROOT]), dg.Definitions(executor=dg.in_process_executor))


def load_job() -> dg.JobDefinition:
    """Return the job that loads the table, for re-executions from failure."""
    return location().resolve_job_def(LOAD)
