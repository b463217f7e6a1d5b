"""Test that the garbage collector of reused Python workers skips the objects of modules."""

from __future__ import annotations

import gc
import os
from collections import defaultdict

from pyspark.sql import SparkSession

from trinitylake_ops.spark.runtime.worker_memory import freeze_modules


def test_modules_are_frozen_once_and_only_in_workers(spark: SparkSession) -> None:
    frozen = defaultdict(list)
    for _ in range(20):
        process, count = spark.sparkContext.parallelize([0], 1).map(count_frozen).collect()[0]
        frozen[process].append(count)
    reused_workers = [counts for counts in frozen.values() if len(counts) > 3]
    assert reused_workers
    for counts in reused_workers:
        assert counts[-1] == counts[-2] > 10_000
    n_frozen = gc.get_freeze_count()  # pytest's process also has frozen objects, see tests/conftest.py
    freeze_modules()
    gc.collect()
    assert gc.get_freeze_count() <= n_frozen


def count_frozen(_: int) -> tuple[int, int]:
    import trinitylake_ops.spark.tables.tasks  # noqa: F401 - as our tasks do

    return os.getpid(), gc.get_freeze_count()
