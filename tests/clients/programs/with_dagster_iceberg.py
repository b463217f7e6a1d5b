"""Assets of Dagster are stored, and loaded again, by the I/O manager of dagster-iceberg."""

import json
import sys

import dagster as dg
import pyarrow as pa
from dagster_iceberg.config import IcebergCatalogConfig
from dagster_iceberg.io_manager.arrow import PyArrowIcebergIOManager
from pyiceberg.catalog.rest import RestCatalog

url = sys.argv[1]


def stored(warehouse: str) -> PyArrowIcebergIOManager:
    config = IcebergCatalogConfig(properties={"type": "rest", "uri": url, "warehouse": warehouse})
    return PyArrowIcebergIOManager(name="lake", config=config, namespace="sales")


@dg.asset
def of_dagster() -> pa.Table:
    return pa.table({"id": pa.array([1, 2], pa.int64())})


@dg.asset
def doubled(of_dagster: pa.Table) -> pa.Table:
    return pa.table({"id": [2 * value for value in of_dagster["id"].to_pylist()]})


found = {
    name: dg.materialize([of_dagster, doubled], resources={"io_manager": stored(name)}, raise_on_error=False).success
    for name in ("main", "v3")
}
kept = RestCatalog("main", uri=url, warehouse="main").load_table("sales.doubled").scan().to_arrow()
print(json.dumps({**found, "doubled": sorted(kept["id"].to_pylist())}))
