"""Sail with Spark's client. The argument is the server's address."""

from __future__ import annotations

import os
import sys
from typing import Any

from driver import SPARK, SqlEngine, serve

os.environ["SAIL_CATALOG__LIST"] = f'[{{name="sail",type="iceberg-rest",uri="{sys.argv[1]}",warehouse="main"}}]'

from pysail.spark import SparkConnectServer
from pyspark.sql import SparkSession

server = SparkConnectServer(port=0)
server.start()
spark = SparkSession.builder.remote(f"sc://localhost:{server.listening_address[1]}").getOrCreate()
spark.conf.set("spark.sql.session.timeZone", "UTC")


def fetch(query: str) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in spark.sql(query).collect()]


serve(SqlEngine(SPARK, fetch, fetch, lambda table: f"sail.{table}").commands())
