"""Read and write the data of tables in tasks."""
