"""Writes groups of small data files anew by Spark's tasks, a task each. ``CompactTablesPlan.execute`` takes it.

::

    plan = maintenance.plan_compact_tables(lake)
    report = plan.execute(write_groups_on(spark), run_id="2013-01-31")
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from pyiceberg.manifest import DataFile
from pyspark.sql import SparkSession

from trinitylake_ops.spark_jobs.runtime.task_jobs import run_in_tasks
from trinitylake_ops.spark_jobs.tables.reader import check_reachable
from trinitylake_ops.tables.writing.compacting.groups import FileGroup
from trinitylake_ops.tables.writing.rewriting import GroupWriter, Rewriting


def write_groups_on(spark: SparkSession) -> GroupWriter:
    """Return a writer of groups by Spark's tasks.

    It raises InvalidInputError for a lakehouse in memory, errors of this package as tasks raised them, and
    JobFailedError for other failures. Then a removal of orphans deletes the files of the other tasks, as nothing names
    them.
    """

    def write(groups: Sequence[tuple[Rewriting, FileGroup]]) -> list[list[DataFile]]:
        for rewriting, _ in groups:
            check_reachable(rewriting.io)
        rewritings = {id(rewriting): pickle.dumps(rewriting) for rewriting, _ in groups}
        elements = [pickle.dumps((id(rewriting), group)) for rewriting, group in groups]
        written = run_in_tasks(spark, "write data files anew", partial(_write, rewritings), elements, len(elements))
        return [pickle.loads(files) for files in written]

    return write


def _write(rewritings: Mapping[int, bytes], elements: Iterator[bytes]) -> Iterator[bytes]:
    for element in elements:
        number, group = pickle.loads(element)
        rewriting: Rewriting = pickle.loads(rewritings[number])
        yield pickle.dumps(rewriting.rewrite(group))
