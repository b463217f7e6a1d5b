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


def stored(warehouse: str) -> PyArrowIcebergIOManager:
    config = IcebergCatalogConfig(properties={"type": "rest", "uri": url, "warehouse": warehouse})
    return PyArrowIcebergIOManager(name="lake", config=config, namespace="sales")


@dg.asset
def of_dagster() -> pa.Table:
    return pa.table({"id": pa.array(rows, pa.int64())})


@dg.asset
def doubled(of_dagster: pa.Table) -> pa.Table:
    return pa.table({"id": [2 * value for value in of_dagster["id"].to_pylist()]})


def materialized(warehouse: str) -> bool:
    resources = {"io_manager": stored(warehouse)}
    return dg.materialize([of_dagster, doubled], resources=resources, raise_on_error=False).success


def loaded(warehouse: str) -> list[int]:
    assets = dg.Definitions([of_dagster, doubled], resources={"io_manager": stored(warehouse)})
    return sorted(assets.load_asset_value("of_dagster", python_type=pa.Table)["id"].to_pylist())


found: dict[str, object] = {"main": materialized("main")}
kept = RestCatalog("main", uri=url, warehouse="main").load_table("sales.doubled").scan().to_arrow()
found["doubled"] = sorted(kept["id"].to_pylist())
time.sleep(1.1)  # some storages have times with a resolution of one second
moment = f"at-{time.time_ns() // 1_000_000}"
time.sleep(1.1)
rows = [5]
materialized("main")
found |= {"now": loaded("main"), "then": loaded(moment), "v3": materialized("v3")}
print(json.dumps(found))
