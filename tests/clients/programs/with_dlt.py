"""dlt-iceberg: load rows twice, read them, read an earlier version, and fail to load into it."""

import json
import sys
import tempfile
import time

import dlt
from dlt_iceberg import iceberg_rest

url = sys.argv[1]
result: dict[str, object] = {}


def pipeline_at(warehouse: str, folder: str) -> dlt.Pipeline:
    destination = iceberg_rest(catalog_uri=url, namespace="sales", warehouse=warehouse)
    return dlt.pipeline("rows", destination=destination, dataset_name="sales", pipelines_dir=folder)


def load(pipeline: dlt.Pipeline) -> None:
    pipeline.run(dlt.resource([{"id": 1}, {"id": 2}], name="of_dlt", write_disposition="append"))


def count(pipeline: dlt.Pipeline) -> int:
    with pipeline.destination_client() as client:
        return client.load_open_table("iceberg", "of_dlt").scan().to_arrow().num_rows


with tempfile.TemporaryDirectory() as folder:
    pipeline = pipeline_at("main", folder)
    load(pipeline)
    time.sleep(1.1)  # some storages have timestamps with a resolution of one second
    warehouse_at_time = f"at-{time.time_ns() // 1_000_000}"
    time.sleep(1.1)
    load(pipeline)
    result["rows"] = count(pipeline)
    earlier = pipeline_at(warehouse_at_time, folder)
    result["earlier"] = count(earlier)
    try:
        load(earlier)
    except Exception as error:  # noqa: BLE001 - the test checks its message
        result["error"] = str(error)[-2_000:]
print(json.dumps(result))
