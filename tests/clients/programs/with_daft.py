"""Daft: read, write, read an earlier version, and fail to write to it."""

import json
import sys

import daft
from pyiceberg.catalog.rest import RestCatalog

url = sys.argv[1]
new_rows = daft.from_pydict({"id": [9], "amount": [1.0]})
latest, earlier = (RestCatalog(name, uri=url, warehouse=name).load_table("sales.orders") for name in ("main", "v3"))
result = {"filtered": daft.read_iceberg(latest).where(daft.col("id") > 1).count_rows()}
new_rows.write_iceberg(latest, mode="append")
latest = RestCatalog("main", uri=url, warehouse="main").load_table("sales.orders")
result |= {"latest": daft.read_iceberg(latest).count_rows(), "earlier": daft.read_iceberg(earlier).count_rows()}
try:
    new_rows.write_iceberg(earlier, mode="append")
except Exception as error:  # noqa: BLE001 - the test checks its class
    result["error"] = type(error).__name__
print(json.dumps(result))
