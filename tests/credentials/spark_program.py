"""Stage and read a table on S3 with Spark, with and without errors, and print everything that a user can see.

Run as ``python -m tests.credentials.spark_program ROOT EVENT_LOG_FOLDER``, with the storage options, including
credentials, as JSON on standard input. This process receives credentials only in these options, and the helper
processes of the data source only in ``TRINITYLAKE_STORAGE_OPTIONS``, which nothing else reads.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.credentials.canaries import WRONG_SECRET_ACCESS_KEY
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidInputError, StoragePermissionError
from trinitylake_ops.iceberg.write.staging import publish
from trinitylake_ops.operations.gc.survey import survey_versions
from trinitylake_ops.spark import executor as executor_module
from trinitylake_ops.spark.executor import SparkExecutor
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.spark.session import session_scope
from trinitylake_ops.spark.sql import create_views, register_table_functions
from trinitylake_ops.spark.tables.reader import read_staged
from trinitylake_ops.spark.tables.writer import stage_dataframe
from trinitylake_ops.storage import Storage, StorageWrapper, open_storage
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

DONE = "all operations were run"


class WrongCredentialsInTasks(StorageWrapper):
    """A storage that has wrong credentials after unpickling, and therefore fails only in Spark's tasks."""

    def __init__(self, inner: Storage, options: dict[str, str]):
        super().__init__(inner)
        self._options = {**options, "secret_access_key": WRONG_SECRET_ACCESS_KEY}

    def __reduce__(self) -> tuple[Any, ...]:
        return (open_storage, (self.root, self._options))


def print_plans(spark: SparkSession) -> None:
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    for execution in (executions.apply(index) for index in range(executions.size())):
        print(execution.description(), execution.details(), execution.physicalPlanDescription())


def use_data_source(spark: SparkSession, root: str, lake: Lakehouse) -> None:
    """Read each table with options, with SQL and from an open lakehouse, and pass a credential as an option."""
    source = spark.read.format("trinitylake").option("root", root)
    for table in ("versions", "objects", "files", "changes", "exports", "ns.t"):
        frame = source.load(table)
        frame.explain("extended")
        print(table, frame.collect(), frame.schema)
    source.option("row_filter", "id > 1").load("ns.t").explain("extended")
    create_views(spark, lake)
    register_table_functions(spark)
    for statement in ("SELECT * FROM ns_t WHERE id = 2", f"SELECT * FROM trinitylake_table('{root}', 'ns.t', 1)"):
        spark.sql(statement).explain("extended")
        print(spark.sql(statement).collect())
    try:
        with spark_failures("try"):
            source.option("storage.secret_access_key", WRONG_SECRET_ACCESS_KEY).load("objects")
    except InvalidInputError as error:
        print("rejected:", error, repr(error), traceback.format_exc())


def use_streams(spark: SparkSession, root: str, checkpoint: str) -> None:
    """Write a table with the data source, and copy it with a stream, whose checkpoint is also searched."""
    frame = spark.range(3).selectExpr("id", "'marker-of-the-test' as text")
    frame.write.format("trinitylake").option("root", root).mode("append").save("ns.written")
    stream = spark.readStream.format("trinitylake").option("root", root).load("ns.written").writeStream
    stream = stream.format("trinitylake").option("root", root).option("stream_id", "copy")
    query = stream.option("checkpointLocation", checkpoint).trigger(availableNow=True).start("ns.copied")
    query.awaitTermination()
    query.explain(True)
    print(
        query.recentProgress, spark.read.format("trinitylake").option("root", root).load("ns.copied").count(), "copied"
    )


def use_executor(spark: SparkSession, lake: Lakehouse, failing_lake: Lakehouse) -> None:
    """Verify and delete in tasks, and fail to survey versions with wrong credentials."""
    executor_module.FEW = 0
    executor = SparkExecutor(spark, requests_per_second=500)
    print(operations.verify(lake, deep=True, executor=executor).to_json())
    deletion = executor.delete(lake.storage, ["missing", "files"], None)
    print("deleted", deletion)
    assert not deletion.failures
    try:
        print(list(survey_versions(failing_lake, executor=executor).roots))
    except StoragePermissionError as error:
        print("rejected:", error, repr(error), traceback.format_exc())


def main(root: str, event_logs: str) -> None:
    options: dict[str, str] = json.load(sys.stdin)
    conf = {
        "spark.eventLog.enabled": True,
        "spark.eventLog.compress": False,
        "spark.eventLog.dir": Path(event_logs).as_uri(),
        "spark.ui.enabled": True,
    }
    os.environ[OPTIONS_VARIABLE] = ",".join(f"{name}={value}" for name, value in options.items())
    # One core, because the Python workers of more cores would print the same.
    with session_scope("credentials", "local[1]", **conf) as spark:
        spark.sparkContext.setLogLevel("INFO")
        lake = Lakehouse.create(root, options)
        frame = spark.range(3).selectExpr("id", "'marker-of-the-test' as text")
        staged = stage_dataframe(lake, frame, "ns", "t", mode="append")
        staged_frame = read_staged(spark, lake, staged)
        staged_frame.explain("extended")
        print(staged_frame, staged_frame.count(), staged_frame.schema)
        failing_lake = Lakehouse(WrongCredentialsInTasks(lake.storage, options), options)
        for operation in (
            lambda: stage_dataframe(failing_lake, frame, "ns", "u", mode="append"),
            lambda: read_staged(spark, failing_lake, staged).collect(),
        ):
            try:
                with spark_failures("try"):
                    operation()
            except StoragePermissionError as error:
                print("rejected:", error, repr(error), traceback.format_exc())
        with lake.transaction() as txn:
            publish(txn, [staged])
        use_data_source(spark, root, lake)
        use_streams(spark, root, f"{event_logs}/checkpoint")
        use_executor(spark, lake, failing_lake)
        print_plans(spark)
        print(spark.sparkContext.getConf().getAll(), DONE)


if __name__ == "__main__":
    main(*sys.argv[1:])
