"""dlt loads rows into a table, twice, through the destination dlt-iceberg."""

import json
import sys
import tempfile

import dlt
from dlt_iceberg import iceberg_rest
from pyiceberg.catalog.rest import RestCatalog

url = sys.argv[1]
found = {}
for warehouse in ("main", "v3"):
    with tempfile.TemporaryDirectory() as folder:
        destination = iceberg_rest(catalog_uri=url, namespace="sales", warehouse=warehouse)
        pipeline = dlt.pipeline("rows", destination=destination, dataset_name="sales", pipelines_dir=folder)
        rows = dlt.resource([{"id": 1}, {"id": 2}], name="of_dlt", write_disposition="append")
        try:
            pipeline.run(rows)
            pipeline.run(rows)
        except Exception as error:  # noqa: BLE001 - its kind is what is asked for
            found["error"] = str(error)[-2_000:]
found["rows"] = RestCatalog("main", uri=url, warehouse="main").load_table("sales.of_dlt").scan().to_arrow().num_rows
print(json.dumps(found))
