"""Use the catalog in a session of Spark Connect, or in a session that ``build_session`` did not create.

``catalog_program.py ROOT [REMOTE]``. The last line of the output is a JSON document with the results.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.spark import register_catalog, session_scope, spark_failures

OPTIONS = {"fsync": "false"}


def run_queries(spark: SparkSession, root: str) -> dict[str, Any]:
    lake = Lakehouse.create(root, OPTIONS)
    for _ in range(2):  # the second registration changes nothing
        register_catalog(spark, "lake", root, OPTIONS)

    def count(clause: str) -> int:
        return int(spark.sql(f"SELECT count(*) FROM lake.a.t {clause}").collect()[0][0])

    spark.sql("CREATE NAMESPACE lake.a").collect()
    spark.sql("CREATE TABLE lake.a.t PARTITIONED BY (half) AS SELECT id, id % 2 AS half FROM range(10)").collect()
    with ThreadPoolExecutor(1) as thread:  # a thread that has not used the session before
        thread.submit(lambda: spark.sql("INSERT INTO lake.a.t VALUES (10, 0)").collect()).result()
        counts = thread.submit(lambda: [count(""), count("VERSION AS OF 2"), count("WHERE half = 1")]).result()
    spark.range(3).selectExpr("id", "0L AS half").writeTo("lake.a.t").overwritePartitions()
    error_texts = []
    for clause in ("VERSION AS OF 99", "VERSION AS OF 'none'"):
        try:
            with spark_failures("count"):
                count(clause)
        except TrinityLakeError as error:
            error_texts.append([type(error).__name__, str(error)])
    try:
        count("VERSION AS OF 99")
    except PySparkException as error:
        error_texts.append([type(error).__name__, str(error).splitlines()[0]])
    return {
        "counts": [*counts, count("")],
        "versions": lake.latest_version(),
        "errors": error_texts,
        "messages": [row[0] for row in spark.sql("SELECT message FROM lake.versions ORDER BY version").collect()],
    }


def main(root: str, remote: str | None = None) -> None:
    if remote is None:
        spark = SparkSession.builder.getOrCreate()
        print(json.dumps(run_queries(spark, root)))
        spark.stop()
        return
    with session_scope(remote=remote) as session:
        print(json.dumps(run_queries(session, root)))


if __name__ == "__main__":
    main(*sys.argv[1:])
