"""A program of its own, such as one for spark-submit: it stages a table, and tells the run that started it.

It takes the root of the lakehouse. It needs this package with its extra ``spark``, and ``dagster-pipes``.
"""

import sys

from dagster_pipes import open_dagster_pipes

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin import report_staged
from trinitylake_ops.spark import session_scope, stage_dataframe


def main(root: str) -> None:
    """Stage the orders of today's file. Nothing is published by it."""
    with open_dagster_pipes() as pipes, session_scope("load-orders", master=None) as spark:
        orders = spark.createDataFrame([(1, 20.0), (2, 5.5)], "customer int, euros double")
        staged = stage_dataframe(Lakehouse.open(root), orders, "shop", "orders", mode="replace_table")
        report_staged(pipes, staged)


if __name__ == "__main__":
    main(sys.argv[1])
