"""The session of a thread: Spark looks for Python's data sources in that alone when it writes."""

from __future__ import annotations

from pyspark.sql import SparkSession

from trinitylake_ops.spark_jobs.runtime.connect import is_remote


def activate(spark: SparkSession) -> None:
    """Make a session the one of this thread, as it is of the thread that built it; one of Spark Connect needs none."""
    if not is_remote(spark):
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        jvm.SparkSession.setActiveSession(spark._jsparkSession)
