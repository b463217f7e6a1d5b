"""Test promoting a clone with local threads and with Spark tasks: both produce the same files and version."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.lakes import Lakes
from tests.operations.changes import append_rows
from tests.operations.copies import files, rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.spark.executor import SparkExecutor

pytestmark = [pytest.mark.local_only("tasks open the lakehouse by its folder"), pytest.mark.timeout(300)]


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["local", "spark"])
def test_promotion_with_each_engine(lakes: Lakes, spark: SparkSession, tmp_path: Path, engine: str) -> None:
    lake = lakes.local()
    append_rows(lake)
    operations.plan_clone(lake, f"{tmp_path}/clone", "feature").execute()
    clone = Lakehouse.open(f"{tmp_path}/clone", {"fsync": "false"})
    append_rows(lake)
    append_rows(clone)
    for number in range(4):
        append_rows(clone, f"new.t{number}")
    executor: Executor = LOCAL if engine == "local" else SparkExecutor(spark)
    plan = operations.plan_promotion(lake, "feature", executor=executor)
    report = plan.execute(plan.digest)
    # Each new table has a data file, a manifest, a manifest list, a metadata file and a definition. The new namespace
    # has a definition. The table to which both sides appended adds one data file.
    assert report.copied_files == plan.files == 4 * 5 + 1 + 1
    assert rows(lake) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert lake.snapshot().tables("new") == [f"t{number}" for number in range(4)]
    assert len([path for path in files(lake) if path.endswith(".parquet")]) == 2 + 1 + 4
    assert operations.verify(lake, deep=True).is_clean


@pytest.mark.soak
def test_tasks_do_not_follow_link_out_of_clone(lakes: Lakes, spark: SparkSession, tmp_path: Path) -> None:
    """Tasks have the permissions of the promoting process, which the writers of the clone may not have."""
    lake = lakes.local()
    append_rows(lake)
    operations.plan_clone(lake, f"{tmp_path}/clone", "feature").execute()
    append_rows(Lakehouse.open(f"{tmp_path}/clone", {"fsync": "false"}))
    (data,) = (tmp_path / "clone").glob("tables/*/data/*.parquet")
    data.rename(tmp_path / "secret")
    data.symlink_to(tmp_path / "secret")
    before = lake.latest_version()
    with pytest.raises(TrinityLakeError):
        operations.plan_promotion(lake, "feature", executor=SparkExecutor(spark)).execute()
    assert (lake.latest_version(), rows(lake)) == (before, [1, 2, 3])
