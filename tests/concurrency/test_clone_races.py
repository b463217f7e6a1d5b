"""Processes that change a clone and its parent are killed at random; no row is lost or duplicated."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException, ValidationException

from tests.conftest import SUMMARY_PROPERTY
from tests.operations.aging import keeping
from tests.processes import Child, fork
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import FileInfo, LocalStorage

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.local_only("processes on one folder")]
#: Factor by which the clock and file times run faster, so that orphans are old after seconds.
CLOCK_SPEEDUP = 200
DURATION_S = 90.0
Work = Callable[[tuple[str, str], Callable[[str], None]], None]


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ms = time.time_ns() // 1_000_000

    def sped_up(time_ms: int) -> int:
        return start_ms + (time_ms - start_ms) * CLOCK_SPEEDUP if time_ms > start_ms else time_ms

    original_stat, original_list = LocalStorage.stat, LocalStorage.list

    def with_fast_clock(info: FileInfo) -> FileInfo:
        return replace(info, last_modified_ms=sped_up(info.last_modified_ms))

    monkeypatch.setattr(LocalStorage, "stat", lambda storage, path: with_fast_clock(original_stat(storage, path)))
    monkeypatch.setattr(
        LocalStorage, "list", lambda storage, prefix="": map(with_fast_clock, original_list(storage, prefix))
    )
    monkeypatch.setattr(LocalStorage, "now_ms", lambda _storage: sped_up(time.time_ns() // 1_000_000))


@pytest.fixture
def roots(fast_clock: None, tmp_path: Path) -> tuple[str, str]:
    lake = Lakehouse.create(f"{tmp_path}/lake", {"fsync": "false"}, txn_ttl_millis=600_000)
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        for name in ("ns.clone", "ns.parent", "ns.both"):
            catalog.create_table(name, pa.schema([("id", pa.int64())]))
    operations.plan_clone(lake, f"{tmp_path}/clone", "feature").execute()
    return f"{tmp_path}/lake", f"{tmp_path}/clone"


def open_lake(root: str) -> Lakehouse:
    return Lakehouse.open(root, {"fsync": "false"})


def append(lake: Lakehouse, name: str, number: int) -> None:
    with catalog_at(lake) as catalog:
        catalog.load_table(name).append(pa.table({"id": pa.array([number], pa.int64())}))


def rows(lake: Lakehouse, name: str) -> list[int]:
    with catalog_at(lake) as catalog:
        return sorted(catalog.load_table(name).scan().to_arrow()["id"].to_pylist())


def work_in_clone(roots: tuple[str, str], report: Callable[[str], None]) -> None:
    """Append to tables of the clone and promote it. Report each acknowledged row."""
    rng = random.Random(os.getpid())
    while True:
        name, number = rng.choice(["ns.clone", "ns.both"]), rng.getrandbits(60)
        run_step(lambda: append(open_lake(roots[1]), name, number), lambda: report(f"{name} {number}"))  # noqa: B023
        if rng.random() < 0.6:
            run_step(
                lambda: operations.plan_promotion(open_lake(roots[0]), "feature").execute(), lambda: report("promoted")
            )


def work_in_parent(roots: tuple[str, str], report: Callable[[str], None]) -> None:
    """Append to tables of the parent, and sometimes refresh the clone."""
    rng = random.Random(os.getpid())
    while True:
        name, number = rng.choice(["ns.parent", "ns.both"]), rng.getrandbits(60)
        run_step(lambda: append(open_lake(roots[0]), name, number), lambda: report(f"{name} {number}"))  # noqa: B023
        if rng.random() < 0.2:
            run_step(
                lambda: operations.plan_refresh(open_lake(roots[0]), "feature").execute(), lambda: report("refreshed")
            )
        time.sleep(0.2)


def reclaim_files(roots: tuple[str, str], report: Callable[[str], None]) -> None:
    """Reclaim files that the clone or its parent no longer needs."""
    rng = random.Random(os.getpid())
    while True:
        lake = open_lake(rng.choice(roots))
        for operation in (
            lambda: operations.plan_expiration(lake, keeping(1)).execute(),  # noqa: B023
            lambda: operations.plan_purge(lake).execute(),  # noqa: B023
            lambda: operations.plan_orphan_removal(lake).execute(),  # noqa: B023
            lambda: operations.compact(lake),  # noqa: B023
        ):
            run_step(operation, lambda: report("reclaimed"))


def run_step(operation: Callable[[], object], on_success: Callable[[], None]) -> None:
    """Run one operation. Errors of this package and conflicts are expected; any other error fails the test."""
    try:
        operation()
    # A refresh may have replaced the snapshot that an append is based on, which is a ValidationException.
    except (TrinityLakeError, CommitFailedException, ValidationException):
        return
    on_success()


class Workers:
    """Processes that work until they are killed, and their reports."""

    def __init__(self, roots: tuple[str, str]):
        self._roots = roots
        self._running: list[tuple[Child, Work]] = []
        self.completed_steps: list[str] = []

    def start(self, work: Work) -> None:
        child = fork(lambda report: work(self._roots, report), time_limit_seconds=int(DURATION_S) + 120)
        self._running.append((child, work))

    def kill(self, index: int) -> Work:
        child, work = self._running.pop(index)
        os.kill(child.pid, signal.SIGKILL)
        status, lines = child.finish()
        self.completed_steps += lines
        assert status == -signal.SIGKILL, f"{work.__name__} exited before it was killed"
        return work

    def kill_all(self) -> None:
        while self._running:
            self.kill(0)


@pytest.fixture
def workers(roots: tuple[str, str]) -> Iterator[Workers]:
    running_workers = Workers(roots)
    yield running_workers
    running_workers.kill_all()


def test_killed_processes_neither_lose_nor_duplicate_rows(
    roots: tuple[str, str], workers: Workers, record_property: Callable[[str, object], None]
) -> None:
    work_functions = [work_in_clone, work_in_clone, work_in_parent, reclaim_files, reclaim_files]
    rng, n_kills = random.Random(), 0
    for work in work_functions:
        workers.start(work)
    deadline_s = time.monotonic() + DURATION_S
    while time.monotonic() < deadline_s:
        time.sleep(rng.uniform(0.1, 2.0))
        workers.start(workers.kill(rng.randrange(len(work_functions))))
        n_kills += 1
    workers.kill_all()
    completed_steps = workers.completed_steps
    time.sleep(600_000 / 1000 / CLOCK_SPEEDUP * 2)  # until the leases of the killed processes have expired
    check_lakehouses(roots, completed_steps)
    counts = {word: completed_steps.count(word) for word in ("promoted", "refreshed", "reclaimed")}
    record_property(SUMMARY_PROPERTY, f"{n_kills} kills, {len(completed_steps)} completed steps, including {counts}")
    assert all(counts.values())


def check_lakehouses(roots: tuple[str, str], completed_steps: list[str]) -> None:
    """Check that each acknowledged row exists exactly once in both lakehouses after a final promotion and refresh."""
    lake, clone = map(open_lake, roots)
    for plan in (operations.plan_promotion(lake, "feature"), operations.plan_refresh(lake, "feature")):
        assert plan.conflicts == ()
    operations.plan_promotion(lake, "feature").execute()
    operations.plan_refresh(lake, "feature").execute()
    for name in ("ns.clone", "ns.parent", "ns.both"):
        acknowledged = {int(line.split()[1]) for line in completed_steps if line.startswith(f"{name} ")}
        row_ids = rows(lake, name)
        assert len(row_ids) == len(set(row_ids)), f"{name} has duplicate rows"
        assert acknowledged <= set(row_ids), f"{name} lost rows"
        assert rows(clone, name) == row_ids
    for lakehouse in (lake, clone):
        operations.repair_hint(lakehouse)
        findings = operations.verify(lakehouse, deep=True).findings
        assert [finding for finding in findings if finding.severity == "error"] == []
