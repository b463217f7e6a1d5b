"""Test that concurrent runs of different partitions publish to the same tables without losing rows."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import pytest

from tests.dagster_plugin.monthly_project import BEFORE_PUBLICATION, MONTHS, definitions
from tests.dagster_plugin.run_config import QUIET
from tests.lakes import check_lake
from tests.processes import fork
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at

KEYS = MONTHS.get_partition_keys()
_KILL_DELAY_RANGE_S = (0.2, 4.0)


class Sales:
    """The project on one lakehouse and one Dagster instance on disk."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance):
        self.lake = Lakehouse.create(str(folder / "lake"), {"fsync": "false"})
        self.instance = instance
        self._folder = folder

    def run(self, key: str) -> dg.ExecuteInProcessResult:
        job = definitions(str(self._folder)).resolve_job_def("month")
        return job.execute_in_process(instance=self.instance, run_config=QUIET, partition_key=key, raise_on_error=False)

    def execute(self, key: str, reexecution: dg.ReexecutionOptions | None = None) -> dg.DagsterRun:
        """Execute the job like a run worker."""
        reconstructable = dg.build_reconstructable_job(
            "tests.dagster_plugin.monthly_project", "month_job", (str(self._folder),)
        )
        with dg.DagsterInstance.from_ref(self.instance.get_ref()) as instance:
            tags = {"dagster/partition": key}
            with dg.execute_job(
                reconstructable,
                instance,
                run_config=QUIET,
                reexecution_options=reexecution,
                tags=tags,
                raise_on_error=False,
            ) as result:
                run = instance.get_run_by_id(result.run_id)
        assert run is not None
        return run

    def retry(self, run_id: str, key: str) -> dg.DagsterRun:
        return self.execute(key, dg.ReexecutionOptions.from_failure(run_id, self.instance))

    def has_unfinished_steps(self, run_id: str) -> bool:
        """Return whether a run died before all its steps succeeded. Dagster retries only such runs."""
        records = self.instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.STEP_SUCCESS).records
        succeeded = [record.event_log_entry.step_key for record in records]
        assert len(succeeded) == len(set(succeeded))
        return len(succeeded) < len(("orders", "events", "publish"))

    def rows_by_month(self, table: str) -> dict[int, int]:
        """Return the number of rows of each month, and assert that no file is listed twice."""
        iceberg_table = catalog_at(self.lake).load_table(("sales", table))
        files = [task.file.file_path for task in iceberg_table.scan().plan_files()]
        assert len(files) == len(set(files))
        months = iceberg_table.scan().to_arrow()["month"].to_pylist()
        return {month: months.count(month) for month in sorted(set(months))}

    def published_partitions(self) -> list[str]:
        return [info.properties["partition"] for info in self.lake.history() if info.operation == "publish"]


@pytest.fixture
def sales(tmp_path: Path) -> Iterator[Sales]:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        project = Sales(tmp_path, instance)
        yield project
        BEFORE_PUBLICATION.clear()
        check_lake(project.lake)


def test_runs_of_different_partitions_publish_concurrently(sales: Sales) -> None:
    """In the first publication, each run creates the tables."""
    BEFORE_PUBLICATION.extend([lambda: sales.run(KEYS[2]), lambda: sales.run(KEYS[1])])
    first = sales.run(KEYS[0])
    assert first.success
    assert sorted(sales.published_partitions()) == KEYS[:3]
    assert (sales.rows_by_month("orders"), sales.rows_by_month("events")) == ({1: 1, 2: 2, 3: 3}, {1: 1, 2: 1, 3: 1})
    event = first.asset_materializations_for_node("publish__month")[-1]
    assert event.metadata["rows_added"].value == 2
    BEFORE_PUBLICATION.append(lambda: sales.run(KEYS[3]))
    assert sales.run(KEYS[1]).success
    assert (sales.rows_by_month("orders"), sales.rows_by_month("events")) == (
        {1: 1, 2: 2, 3: 3, 4: 4},
        {1: 1, 2: 2, 3: 1, 4: 1},
    )
    assert operations.verify(sales.lake).is_clean


def test_retry_from_failure_replaces_current_rows(sales: Sales) -> None:
    assert sales.run(KEYS[0]).success
    BEFORE_PUBLICATION.append(lambda: sales.run(KEYS[1]))
    failed = sales.execute(KEYS[1])
    assert failed.is_failure
    (failure,) = [
        record.event_log_entry.dagster_event.step_failure_data.user_failure_data
        for record in sales.instance.get_records_for_run(
            failed.run_id, of_type=dg.DagsterEventType.STEP_FAILURE
        ).records
        if record.event_log_entry.dagster_event is not None
    ]
    assert failure is not None and failure.description is not None
    message = (
        "table sales.orders was staged on version 1 and since then other writers changed the data that it replaces"
    )
    assert f"{message} (month=2)" in failure.description
    run_ids = set(catalog_at(sales.lake).load_table(("sales", "orders")).scan().to_arrow()["run"].to_pylist())
    assert failed.run_id not in run_ids
    reexecution = sales.retry(failed.run_id, KEYS[1])
    assert reexecution.is_success
    assert sales.published_partitions() == [KEYS[1], KEYS[1], KEYS[0]]
    assert (sales.rows_by_month("orders"), sales.rows_by_month("events")) == ({1: 1, 2: 2}, {1: 1, 2: 2})
    run_ids = set(catalog_at(sales.lake).load_table(("sales", "orders")).scan().to_arrow()["run"].to_pylist())
    assert failed.run_id in run_ids


def _backfill_with_kills(sales: Sales, keys: list[str], seed: int) -> int:
    """Run partitions on four workers, and kill the workers of a sixth of the partitions after a random delay.

    Runs of killed workers are retried from failure, like Dagster's daemon does. Return the number of killed workers.
    """
    rng = random.Random(seed)
    kill_delays_s = {key: rng.uniform(*_KILL_DELAY_RANGE_S) for key in rng.sample(keys, max(1, len(keys) // 6))}

    def run_in_fork(key: str) -> bool:
        child = fork(lambda report: report(sales.execute(key).run_id), time_limit_seconds=180)
        if key in kill_delays_s:
            time.sleep(kill_delays_s[key])
            os.kill(child.pid, signal.SIGKILL)
        status, _ = child.finish()
        assert status in (0, -signal.SIGKILL)
        return status != 0

    with ThreadPoolExecutor(4) as pool:
        killed = [key for key, was_killed in zip(keys, pool.map(run_in_fork, keys), strict=True) if was_killed]
    for run in sales.instance.get_runs():
        if not run.is_finished:
            sales.instance.report_run_failed(run)  # like Dagster's run monitoring
    runs = sales.instance.get_runs()
    retried = {run.parent_run_id for run in runs}
    for run in runs:
        key = run.tags["dagster/partition"]
        if run.is_failure and run.run_id not in retried:
            assert key in killed, "only killed runs may fail"
            if sales.has_unfinished_steps(run.run_id):
                assert sales.retry(run.run_id, key).is_success
    for key in set(keys) - {run.tags["dagster/partition"] for run in runs}:  # killed before the run was created
        assert sales.execute(key).is_success
    return len(killed)


def _assert_all_published(sales: Sales, n_months: int, n_times: int) -> None:
    assert sales.rows_by_month("orders") == {month: month for month in range(1, n_months + 1)}
    assert sales.rows_by_month("events") == dict.fromkeys(range(1, n_months + 1), n_times)
    assert sorted(sales.published_partitions()) == sorted(KEYS[:n_months] * n_times)
    assert operations.verify(sales.lake).is_clean


@pytest.mark.timeout(300)
def test_killed_worker_does_not_affect_other_runs(sales: Sales) -> None:
    _backfill_with_kills(sales, KEYS[:4], seed=random.SystemRandom().randrange(1 << 32))
    _assert_all_published(sales, 4, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_repeated_backfills_with_killed_workers_publish_all_partitions(sales: Sales) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    killed = 0
    for iteration in range(3):
        killed += _backfill_with_kills(sales, KEYS, seed + iteration)
        _assert_all_published(sales, 12, iteration + 1)
    print("workers killed:", killed)
