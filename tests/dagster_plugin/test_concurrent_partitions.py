"""Runs of different partitions publish to the same tables at the same time, and nothing of any is lost."""

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

from tests.dagster_plugin.monthly_project import MEANWHILE, MONTHS, definitions
from tests.dagster_plugin.quiet import QUIET
from tests.lakes import check_lake
from tests.processes import fork
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at

KEYS = MONTHS.get_partition_keys()
_KILLED_AFTER_S = (0.2, 4.0)


class Sales:
    """The project on one lakehouse, with one Dagster instance on disk."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance):
        self.lake = Lakehouse.create(str(folder / "lake"), {"fsync": "false"})
        self.instance = instance
        self._folder = folder

    def run(self, key: str) -> dg.ExecuteInProcessResult:
        job = definitions(str(self._folder)).resolve_job_def("month")
        return job.execute_in_process(instance=self.instance, run_config=QUIET, partition_key=key, raise_on_error=False)

    def execute(self, key: str, again: dg.ReexecutionOptions | None = None) -> dg.DagsterRun:
        """Run the job as a run's worker does."""
        made = dg.build_reconstructable_job("tests.dagster_plugin.monthly_project", "month_job", (str(self._folder),))
        with dg.DagsterInstance.from_ref(self.instance.get_ref()) as instance:
            tags = {"dagster/partition": key}
            with dg.execute_job(
                made, instance, run_config=QUIET, reexecution_options=again, tags=tags, raise_on_error=False
            ) as result:
                run = instance.get_run_by_id(result.run_id)
        assert run is not None
        return run

    def retry(self, run_id: str, key: str) -> dg.DagsterRun:
        return self.execute(key, dg.ReexecutionOptions.from_failure(run_id, self.instance))

    def has_left_steps(self, run_id: str) -> bool:
        """Say whether a run died before its last step succeeded. Dagster retries no run that has none left."""
        records = self.instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.STEP_SUCCESS).records
        succeeded = [record.event_log_entry.step_key for record in records]
        assert len(succeeded) == len(set(succeeded))
        return len(succeeded) < len(("orders", "events", "publish"))

    def months(self, table: str) -> dict[int, int]:
        """Rows of each month, and no file twice."""
        loaded = catalog_at(self.lake).load_table(("sales", table))
        files = [task.file.file_path for task in loaded.scan().plan_files()]
        assert len(files) == len(set(files))
        found = loaded.scan().to_arrow()["month"].to_pylist()
        return {month: found.count(month) for month in sorted(set(found))}

    def published(self) -> list[str]:
        return [info.properties["partition"] for info in self.lake.history() if info.operation == "publish"]


@pytest.fixture
def sales(tmp_path: Path) -> Iterator[Sales]:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        made = Sales(tmp_path, instance)
        yield made
        MEANWHILE.clear()
        check_lake(made.lake)


def test_runs_of_other_partitions_publish_in_between(sales: Sales) -> None:
    """The first of all, too, when each run has made the tables."""
    MEANWHILE.extend([lambda: sales.run(KEYS[2]), lambda: sales.run(KEYS[1])])
    first = sales.run(KEYS[0])
    assert first.success
    assert sorted(sales.published()) == KEYS[:3]
    assert (sales.months("orders"), sales.months("events")) == ({1: 1, 2: 2, 3: 3}, {1: 1, 2: 1, 3: 1})
    event = first.asset_materializations_for_node("publish__month")[-1]
    assert event.metadata["rows_added"].value == 2
    MEANWHILE.append(lambda: sales.run(KEYS[3]))
    assert sales.run(KEYS[1]).success
    assert (sales.months("orders"), sales.months("events")) == ({1: 1, 2: 2, 3: 3, 4: 4}, {1: 1, 2: 2, 3: 1, 4: 1})
    assert operations.verify(sales.lake).is_clean


def test_a_retry_from_failure_replaces_what_is_there_by_then(sales: Sales) -> None:
    assert sales.run(KEYS[0]).success
    MEANWHILE.append(lambda: sales.run(KEYS[1]))
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
    conflict = (
        "table sales.orders was staged on version 1 and since then other writers changed the data that it replaces"
    )
    assert f"{conflict} (month=2)" in failure.description
    staged_by = set(catalog_at(sales.lake).load_table(("sales", "orders")).scan().to_arrow()["run"].to_pylist())
    assert failed.run_id not in staged_by
    again = sales.retry(failed.run_id, KEYS[1])
    assert again.is_success
    assert sales.published() == [KEYS[1], KEYS[1], KEYS[0]]
    assert (sales.months("orders"), sales.months("events")) == ({1: 1, 2: 2}, {1: 1, 2: 2})
    staged_by = set(catalog_at(sales.lake).load_table(("sales", "orders")).scan().to_arrow()["run"].to_pylist())
    assert failed.run_id in staged_by


def _backfill(sales: Sales, keys: list[str], seed: int) -> int:
    """Run partitions, four workers at a time, and kill one of them at random, as often as one dies before its end.

    What a killed worker leaves is run again from where it failed, as Dagster's daemon does by itself. Returns how many
    were killed.
    """
    chance = random.Random(seed)
    doomed = {key: chance.uniform(*_KILLED_AFTER_S) for key in chance.sample(keys, max(1, len(keys) // 6))}

    def work(key: str) -> bool:
        child = fork(lambda report: report(sales.execute(key).run_id), time_limit_seconds=180)
        if key in doomed:
            time.sleep(doomed[key])
            os.kill(child.pid, signal.SIGKILL)
        status, _ = child.finish()
        assert status in (0, -signal.SIGKILL)
        return status != 0

    with ThreadPoolExecutor(4) as pool:
        killed = [key for key, was_killed in zip(keys, pool.map(work, keys), strict=True) if was_killed]
    for run in sales.instance.get_runs():
        if not run.is_finished:
            sales.instance.report_run_failed(run)  # as Dagster's run monitoring does
    runs = sales.instance.get_runs()
    retried = {run.parent_run_id for run in runs}
    for run in runs:
        key = run.tags["dagster/partition"]
        if run.is_failure and run.run_id not in retried:
            assert key in killed, "nothing fails but what was killed"
            if sales.has_left_steps(run.run_id):
                assert sales.retry(run.run_id, key).is_success
    for key in set(keys) - {run.tags["dagster/partition"] for run in runs}:  # killed before there was a run
        assert sales.execute(key).is_success
    return len(killed)


def _check_all(sales: Sales, months: int, times: int) -> None:
    assert sales.months("orders") == {month: month for month in range(1, months + 1)}
    assert sales.months("events") == dict.fromkeys(range(1, months + 1), times)
    assert sorted(sales.published()) == sorted(KEYS[:months] * times)
    assert operations.verify(sales.lake).is_clean


@pytest.mark.timeout(300)
def test_a_worker_killed_among_others(sales: Sales) -> None:
    _backfill(sales, KEYS[:4], seed=random.SystemRandom().randrange(1 << 32))
    _check_all(sales, 4, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twelve_partitions_three_times_with_workers_killed(sales: Sales) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    killed = 0
    for time_of in range(3):
        killed += _backfill(sales, KEYS, seed + time_of)
        _check_all(sales, 12, time_of + 1)
    print("workers killed:", killed)
