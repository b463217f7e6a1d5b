"""PySpark's worker daemon, with the tables layer imported before it forks.

Spark plans, reads and writes a Python data source in workers of their own, forked from a daemon. The
libraries of a table take a second to import; imported here, once per daemon, they are there in every fork.
"""

import pyarrow.parquet  # noqa: F401
from pyspark.daemon import manager

import trinitylake_ops.spark_jobs.table_reader
import trinitylake_ops.spark_jobs.table_writer  # noqa: F401

if __name__ == "__main__":
    manager()
