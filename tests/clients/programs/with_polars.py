"""Polars with pyiceberg tables: read, write, read an earlier version, and fail to write to it."""

import json
import os
import sys

os.environ["POLARS_ICEBERG_PLANNER"] = "pyiceberg"

import polars as pl
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.table import Table


def scan(table: Table) -> pl.LazyFrame:
    """Scan a table with the vended credentials, which Polars does not take from pyiceberg's table itself."""
    return pl.scan_iceberg(table, storage_options=table.io.properties)


url = sys.argv[1]
more = pl.DataFrame({"id": [9], "amount": [1.0]})
now, then = (RestCatalog(name, uri=url, warehouse=name).load_table("sales.orders") for name in ("main", "v3"))
found = {"filtered": scan(now).filter(pl.col("id") > 1).collect().height}
more.write_iceberg(now, mode="append")
now = RestCatalog("main", uri=url, warehouse="main").load_table("sales.orders")
found |= {"now": scan(now).collect().height, "then": scan(then).collect().height}
try:
    more.write_iceberg(then, mode="append")
except Exception as error:  # noqa: BLE001 - the test checks its class
    found["error"] = type(error).__name__
print(json.dumps(found))
