"""dagster-iceberg's IO manager: store and load assets, load an earlier version, and fail to store to it."""

import json
import sys
import time

import dagster as dg
import pyarrow as pa
from dagster_iceberg.config import IcebergCatalogConfig
from dagster_iceberg.io_manager.arrow import PyArrowIcebergIOManager
from pyiceberg.catalog.rest import RestCatalog

url = sys.argv[1]
rows = [1, 2]


def io_manager_for(warehouse: str) -> PyArrowIcebergIOManager:
    config = IcebergCatalogConfig(properties={"type": "rest", "uri": url, "warehouse": warehouse})
    return PyArrowIcebergIOManager(name="lake", config=config, namespace="sales")


@dg.asset
def orders_of_dagster() -> pa.Table:
    return pa.table({"id": pa.array(rows, pa.int64())})


@dg.asset
def doubled(orders_of_dagster: pa.Table) -> pa.Table:
    return pa.table({"id": [2 * value for value in orders_of_dagster["id"].to_pylist()]})


def materialize(warehouse: str) -> bool:
    resources = {"io_manager": io_manager_for(warehouse)}
    return dg.materialize([orders_of_dagster, doubled], resources=resources, raise_on_error=False).success


def load(warehouse: str) -> list[int]:
    assets = dg.Definitions([orders_of_dagster, doubled], resources={"io_manager": io_manager_for(warehouse)})
    return sorted(assets.load_asset_value("orders_of_dagster", python_type=pa.Table)["id"].to_pylist())


result: dict[str, object] = {"main": materialize("main")}
doubled_rows = RestCatalog("main", uri=url, warehouse="main").load_table("sales.doubled").scan().to_arrow()
result["doubled"] = sorted(doubled_rows["id"].to_pylist())
time.sleep(1.1)  # some storages have timestamps with a resolution of one second
warehouse_at_time = f"at-{time.time_ns() // 1_000_000}"
time.sleep(1.1)
rows = [5]
materialize("main")
result |= {"latest": load("main"), "earlier": load(warehouse_at_time), "v3": materialize("v3")}
print(json.dumps(result))
