"""Spark with Iceberg's Java runtime.

Arguments: the server's address, the jars, the warehouse folder, and additional options of the catalog.
"""

from __future__ import annotations

import sys
from typing import Any

from driver import SPARK, SqlEngine, serve
from pyspark.sql import SparkSession

url, jars, folder, *options = sys.argv[1:]
CATALOG = "spark.sql.catalog.lake"
settings = {
    "spark.jars": jars,
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.warehouse.dir": folder,
    "spark.driver.memory": "800m",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    CATALOG: "org.apache.iceberg.spark.SparkCatalog",
    f"{CATALOG}.type": "rest",
    f"{CATALOG}.uri": url,
    f"{CATALOG}.warehouse": "main",
    f"{CATALOG}.cache-enabled": "false",  # other engines write between two commands
    **{f"{CATALOG}.{name}": value for name, _, value in (option.partition("=") for option in options)},
}
builder = SparkSession.builder.master("local[1]")
for name, value in settings.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("ERROR")


def fetch(query: str) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in spark.sql(query).collect()]


serve(SqlEngine(SPARK, fetch, fetch, lambda table: f"lake.{table}").commands())
