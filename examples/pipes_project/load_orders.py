"""A program for spark-submit that stages a table and reports it to the Dagster run that started it.

Its argument is the root of the lakehouse. It needs this package with its extra ``spark``, and ``dagster-pipes``.
"""

import sys

from dagster_pipes import open_dagster_pipes

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import report_staged
from trinitylake_ops.spark import session_scope, stage_dataframe


def main(root: str) -> None:
    """Stage today's orders without publishing them."""
    with open_dagster_pipes() as pipes, session_scope("load-orders", master=None) as spark:
        orders = spark.createDataFrame([(1, 20.0), (2, 5.5)], "customer int, euros double")
        staged = stage_dataframe(Lakehouse.open(root), orders, "shop", "orders", mode="replace_table")
        report_staged(pipes, staged)


if __name__ == "__main__":
    main(sys.argv[1])
