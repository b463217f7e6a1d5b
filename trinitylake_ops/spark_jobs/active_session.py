"""The session of a thread: Spark looks for Python's data sources in that alone when it writes."""

from __future__ import annotations

from pyspark.sql import SparkSession


def activate(spark: SparkSession) -> None:
    """Make a session the one of this thread, as it is of the thread that built it; one of Spark Connect needs none."""
    session = getattr(spark, "_jsparkSession", None)
    jvm = None if session is None else spark.sparkContext._jvm
    if jvm is not None:
        jvm.SparkSession.setActiveSession(session)
