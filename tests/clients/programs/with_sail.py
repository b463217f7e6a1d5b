"""Sail with Spark SQL: read, write and create a table at the version that its catalog names.

It also reads the table at a snapshot and at a timestamp.
"""

import json
import os
import sys
from datetime import UTC, datetime
from urllib.request import urlopen

url, warehouse = sys.argv[1:]
os.environ["SAIL_CATALOG__LIST"] = f'[{{name="sail",type="iceberg-rest",uri="{url}",warehouse="{warehouse}"}}]'

from pysail.spark import SparkConnectServer  # noqa: E402 - it reads the environment
from pyspark.sql import SparkSession  # noqa: E402

server = SparkConnectServer(port=0)
server.start()
spark = SparkSession.builder.remote(f"sc://localhost:{server.listening_address[1]}").getOrCreate()


def count(table: str) -> int:
    return spark.sql(f"SELECT count(*) FROM sail.sales.{table}").collect()[0][0]


with urlopen(f"{url}/v1/{warehouse}/namespaces/sales/tables/orders") as response:
    first = json.load(response)["metadata"]["snapshots"][0]
timestamp = datetime.fromtimestamp(first["timestamp-ms"] / 1_000, UTC)
result = {
    "before": count("orders"),
    "snapshot": count(f"orders VERSION AS OF {first['snapshot-id']}"),
    "timestamp": count(f"orders TIMESTAMP AS OF '{timestamp:%Y-%m-%d %H:%M:%S.%f}'"),
}
try:
    spark.sql("INSERT INTO sail.sales.orders VALUES (7, 7.5)").collect()
    spark.sql("CREATE TABLE sail.sales.of_sail (id BIGINT) USING iceberg").collect()
    spark.sql("INSERT INTO sail.sales.of_sail VALUES (1)").collect()
    result["created"] = count("of_sail")
except Exception as error:  # noqa: BLE001 - the test checks its message
    result["error"] = str(error)[:300]
result["after"] = count("orders")
print(json.dumps(result))
