"""Where Spark runs: Connect, spark-submit, and that sessions end. Each test has Spark in processes of its own."""
