"""Polars with pyiceberg tables: read, write, read an earlier version, and fail to write to it."""

import json
import os
import sys

os.environ["POLARS_ICEBERG_PLANNER"] = "pyiceberg"

import polars as pl
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.table import Table


def scan(table: Table) -> pl.LazyFrame:
    """Scan a table with the vended credentials, which Polars does not take from the pyiceberg table."""
    return pl.scan_iceberg(table, storage_options=table.io.properties)


url = sys.argv[1]
new_rows = pl.DataFrame({"id": [9], "amount": [1.0]})
latest, earlier = (RestCatalog(name, uri=url, warehouse=name).load_table("sales.orders") for name in ("main", "v3"))
result = {"filtered": scan(latest).filter(pl.col("id") > 1).collect().height}
new_rows.write_iceberg(latest, mode="append")
latest = RestCatalog("main", uri=url, warehouse="main").load_table("sales.orders")
result |= {"latest": scan(latest).collect().height, "earlier": scan(earlier).collect().height}
try:
    new_rows.write_iceberg(earlier, mode="append")
except Exception as error:  # noqa: BLE001 - the test checks its class
    result["error"] = type(error).__name__
print(json.dumps(result))
