"""Tests of Spark Connect, spark-submit and the end of sessions. Each test runs Spark in separate processes."""
