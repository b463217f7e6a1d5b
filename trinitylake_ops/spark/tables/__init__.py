"""Read and write the data of tables in Spark tasks."""
