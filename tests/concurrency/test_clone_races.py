"""A clone and its parent, changed by processes that are killed: no row is lost or duplicated."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
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
from trinitylake_ops.storage import LocalStorage
from trinitylake_ops.storage.local import storage as local_storage

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.local_only("processes on one folder")]
#: Factor by which the clock and file times run faster, so that orphans are old after seconds.
FASTER = 200
SECONDS = 90.0
Work = Callable[[tuple[str, str], Callable[[str], None]], None]


@pytest.fixture
def fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    began_ms = time.time_ns() // 1_000_000

    def fast(at_ms: int) -> int:
        return began_ms + (at_ms - began_ms) * FASTER if at_ms > began_ms else at_ms

    info_of = local_storage._file_info

    def file_info(path: str, status: os.stat_result) -> local_storage.FileInfo:
        info = info_of(path, status)
        return local_storage.FileInfo(info.path, info.size_bytes, fast(info.last_modified_ms))

    monkeypatch.setattr(local_storage, "_file_info", file_info)
    monkeypatch.setattr(LocalStorage, "now_ms", lambda _storage: fast(time.time_ns() // 1_000_000))


@pytest.fixture
def roots(fast_clock: None, tmp_path: Path) -> tuple[str, str]:
    lake = Lakehouse.create(f"{tmp_path}/lake", {"fsync": "false"}, txn_ttl_millis=600_000)
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        for name in ("ns.there", "ns.here", "ns.both"):
            catalog.create_table(name, pa.schema([("id", pa.int64())]))
    operations.plan_clone(lake, f"{tmp_path}/clone", "feature").execute()
    return f"{tmp_path}/lake", f"{tmp_path}/clone"


def opened(root: str) -> Lakehouse:
    return Lakehouse.open(root, {"fsync": "false"})


def append(lake: Lakehouse, name: str, number: int) -> None:
    with catalog_at(lake) as catalog:
        catalog.load_table(name).append(pa.table({"id": pa.array([number], pa.int64())}))


def rows(lake: Lakehouse, name: str) -> list[int]:
    with catalog_at(lake) as catalog:
        return sorted(catalog.load_table(name).scan().to_arrow()["id"].to_pylist())


def work_there(roots: tuple[str, str], report: Callable[[str], None]) -> None:
    """Append in the clone and promote, and report acknowledged rows."""
    chance = random.Random(os.getpid())
    while True:
        name, number = chance.choice(["ns.there", "ns.both"]), chance.getrandbits(60)
        step(lambda: append(opened(roots[1]), name, number), lambda: report(f"{name} {number}"))  # noqa: B023
        if chance.random() < 0.6:
            step(lambda: operations.plan_promotion(opened(roots[0]), "feature").execute(), lambda: report("promoted"))


def work_here(roots: tuple[str, str], report: Callable[[str], None]) -> None:
    """Append in the parent, and sometimes refresh the clone."""
    chance = random.Random(os.getpid())
    while True:
        name, number = chance.choice(["ns.here", "ns.both"]), chance.getrandbits(60)
        step(lambda: append(opened(roots[0]), name, number), lambda: report(f"{name} {number}"))  # noqa: B023
        if chance.random() < 0.2:
            step(lambda: operations.plan_refresh(opened(roots[0]), "feature").execute(), lambda: report("refreshed"))
        time.sleep(0.2)


def upkeep(roots: tuple[str, str], report: Callable[[str], None]) -> None:
    """Reclaim files that one side does not need."""
    chance = random.Random(os.getpid())
    while True:
        lake = opened(chance.choice(roots))
        for what in (
            lambda: operations.plan_expiration(lake, keeping(1)).execute(),  # noqa: B023
            lambda: operations.plan_purge(lake).execute(),  # noqa: B023
            lambda: operations.plan_orphan_removal(lake).execute(),  # noqa: B023
            lambda: operations.compact(lake),  # noqa: B023
        ):
            step(what, lambda: report("upkeep"))


def step(what: Callable[[], object], done: Callable[[], None]) -> None:
    """Run one operation. Errors of this package are expected; any other ends the process and fails the test."""
    try:
        what()
    except (
        TrinityLakeError,
        CommitFailedException,
        ValidationException,
    ):  # only the last row if a refresh took its snapshot
        return
    done()


class Workers:
    """Processes that work until they are killed, and their reports."""

    def __init__(self, roots: tuple[str, str]):
        self._roots = roots
        self._running: list[tuple[Child, Work]] = []
        self.completed_steps: list[str] = []

    def start(self, work: Work) -> None:
        child = fork(lambda report: work(self._roots, report), time_limit_seconds=int(SECONDS) + 120)
        self._running.append((child, work))

    def kill(self, which: int) -> Work:
        child, work = self._running.pop(which)
        os.kill(child.pid, signal.SIGKILL)
        status, lines = child.finish()
        self.completed_steps += lines
        assert status == -signal.SIGKILL, f"{work.__name__} ended by itself before"
        return work

    def kill_all(self) -> None:
        while self._running:
            self.kill(0)


@pytest.fixture
def workers(roots: tuple[str, str]) -> Iterator[Workers]:
    running_workers = Workers(roots)
    yield running_workers
    running_workers.kill_all()


def test_kills_lose_and_duplicate_no_row(
    roots: tuple[str, str], workers: Workers, record_property: Callable[[str, object], None]
) -> None:
    chance, kills, works = random.Random(), 0, [work_there, work_there, work_here, upkeep, upkeep]
    for work in works:
        workers.start(work)
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        time.sleep(chance.uniform(0.1, 2.0))
        workers.start(workers.kill(chance.randrange(len(works))))
        kills += 1
    workers.kill_all()
    completed_steps = workers.completed_steps
    time.sleep(600_000 / 1000 / FASTER * 2)  # leases of the killed processes end
    check(roots, completed_steps)
    counts = {word: completed_steps.count(word) for word in ("promoted", "refreshed", "upkeep")}
    record_property(SUMMARY_PROPERTY, f"{kills} kills, {len(completed_steps)} steps were done, among them {counts}")
    assert all(counts.values())


def check(roots: tuple[str, str], completed_steps: list[str]) -> None:
    """Check both sides. After a final promotion and refresh each acknowledged row exists exactly once."""
    lake, clone = map(opened, roots)
    for plan in (operations.plan_promotion(lake, "feature"), operations.plan_refresh(lake, "feature")):
        assert plan.conflicts == ()
    operations.plan_promotion(lake, "feature").execute()
    operations.plan_refresh(lake, "feature").execute()
    for name in ("ns.there", "ns.here", "ns.both"):
        acknowledged = {int(line.split()[1]) for line in completed_steps if line.startswith(f"{name} ")}
        row_ids = rows(lake, name)
        assert len(row_ids) == len(set(row_ids)), f"rows of {name} came twice"
        assert acknowledged <= set(row_ids), f"rows of {name} are lost"
        assert rows(clone, name) == row_ids
    for each in (lake, clone):
        operations.repair_hint(each)
        findings = operations.verify(each, deep=True).findings
        assert [finding for finding in findings if finding.severity == "error"] == []
