"""pyiceberg: read, append and create with the server's tokens, and fail to append with the reader's token."""

import json
import sys

import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

url, writer, reader, file_io = sys.argv[1:]
rows = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


def catalog(warehouse: str, token: str) -> RestCatalog:
    return RestCatalog("rest", uri=url, warehouse=warehouse, token=token, **{"py-io-impl": file_io})


main = catalog("main", writer)
main.load_table("ns.t").append(rows)
main.create_table("ns.new", rows.schema).append(rows)
reader_table = catalog("main", reader).load_table("ns.t")
result = {
    "latest": reader_table.scan().to_arrow().num_rows,
    "earlier": catalog("v5", reader).load_table("ns.t").scan().to_arrow().num_rows,
}
try:
    reader_table.append(rows)
except Exception as error:  # noqa: BLE001 - the test checks its message
    result["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(result))
