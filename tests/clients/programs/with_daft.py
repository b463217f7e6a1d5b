"""Daft: read, write, read an earlier version, and fail to write to it."""

import json
import sys

import daft
from pyiceberg.catalog.rest import RestCatalog

url = sys.argv[1]
more = daft.from_pydict({"id": [9], "amount": [1.0]})
now, then = (RestCatalog(name, uri=url, warehouse=name).load_table("sales.orders") for name in ("main", "v3"))
found = {"filtered": daft.read_iceberg(now).where(daft.col("id") > 1).count_rows()}
more.write_iceberg(now, mode="append")
now = RestCatalog("main", uri=url, warehouse="main").load_table("sales.orders")
found |= {"now": daft.read_iceberg(now).count_rows(), "then": daft.read_iceberg(then).count_rows()}
try:
    more.write_iceberg(then, mode="append")
except Exception as error:  # noqa: BLE001 - the test checks its class
    found["error"] = type(error).__name__
print(json.dumps(found))
