"""Tests of Spark Connect, spark-submit and the end of sessions. All tests run Spark in separate processes."""
