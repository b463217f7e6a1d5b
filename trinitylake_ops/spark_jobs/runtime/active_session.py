"""The session of a thread. When it writes, Spark looks for Python's data sources only in that session."""

from __future__ import annotations

from pyspark.sql import SparkSession

from trinitylake_ops.spark_jobs.runtime.connect import is_remote


def activate(spark: SparkSession) -> None:
    """Make a session the active one of this thread, as it is for the thread that built it.

    A session of Spark Connect needs none.
    """
    if not is_remote(spark):
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        jvm.SparkSession.setActiveSession(spark._jsparkSession)
