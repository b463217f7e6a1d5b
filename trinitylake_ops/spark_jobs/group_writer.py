"""Writing groups of small data files anew by Spark's tasks, a task each: ``CompactTablesPlan.execute`` takes it.

::

    plan = maintenance.plan_compact_tables(lake)
    report = plan.execute(write_groups_on(spark), run_id="2013-01-31")
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from pyiceberg.manifest import DataFile
from pyspark import Broadcast
from pyspark.sql import SparkSession

from trinitylake_ops.spark_jobs.spark_errors import spark_failures
from trinitylake_ops.spark_jobs.table_reader import check_reachable
from trinitylake_ops.tables.rewriting import FileGroup, GroupWriter, Rewriting


def write_groups_on(spark: SparkSession) -> GroupWriter:
    """Return what writes groups by Spark's tasks.

    It raises InvalidInputError for a lakehouse in memory, errors of this package as tasks raised them, and
    JobFailedError for what else failed. Files of the other tasks are left to orphan removal then: nothing names them.
    """

    def write(groups: Sequence[tuple[Rewriting, FileGroup]]) -> list[list[DataFile]]:
        context = spark.sparkContext
        for rewriting, _ in groups:
            check_reachable(rewriting.io)
        # A table's metadata may be large: each goes to an executor once, not with every group.
        rewritings = {id(rewriting): rewriting for rewriting, _ in groups}
        sent = {key: context.broadcast(pickle.dumps(rewriting)) for key, rewriting in rewritings.items()}
        tasks = [(sent[id(rewriting)], pickle.dumps(group)) for rewriting, group in groups]
        try:
            with spark_failures("write data files anew"):
                written = context.parallelize(tasks, len(tasks)).map(_write).collect()
        finally:
            for broadcast in sent.values():
                broadcast.destroy()
        return [pickle.loads(files) for files in written]

    return write


def _write(task: tuple[Broadcast[bytes], bytes]) -> bytes:
    rewriting: Rewriting = pickle.loads(task[0].value)
    return pickle.dumps(rewriting.rewrite(pickle.loads(task[1])))
