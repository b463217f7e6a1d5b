"""Files of tables as pyiceberg reads and writes them, and the Parquet files that we write."""
