"""The session of a thread: Spark looks for Python's data sources in that alone when it writes."""

from __future__ import annotations

from pyspark.sql import SparkSession


def activate(spark: SparkSession) -> None:
    """Make a session the one of this thread. Of the thread that built it, it is."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    jvm.SparkSession.setActiveSession(spark._jsparkSession)
