"""Sixteen writers in real processes commit to one lakehouse while some are killed and others paused.

Processes with several threads commit in groups, so group leaders are also killed and paused.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.lakes import Lakes, table
from tests.processes import Child, fork
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitAttemptsExhaustedError, CommitConflictError, CommitOutcomeUnknownError

Report = Callable[[str], None]

pytestmark = pytest.mark.local_only("chooses its places itself")

N_WRITERS = 16
N_SHARED_TABLES = 4
CONTENDED = 0.3  # share of transactions that change a shared table
SECONDS, THREADS_SECONDS, SOAK_SECONDS = 3, 20, 300
#: On a busy machine the run continues until it has this many commits.
FEWEST_COMMITS = 2 * N_WRITERS
#: With fewer commits the shares are random; then each writer only has to commit once.
FEWEST_FOR_SHARES = 1_000
LATEST_END_S = 240  # after the end of the run


def cases() -> Iterator[object]:
    """Storage, seconds and threads per process: short runs, and long ones for ``make soak``."""
    for storage_kind in ("local", "s3"):
        marks = [] if storage_kind == "local" else [pytest.mark.debian_packages]
        short = [*marks, pytest.mark.timeout(SECONDS + LATEST_END_S + 60)]
        if storage_kind == "s3":
            short.append(pytest.mark.soak)
        yield pytest.param(storage_kind, SECONDS, 1, marks=short, id=storage_kind)
        soak = [*marks, pytest.mark.soak, pytest.mark.timeout(1_800)]
        yield pytest.param(storage_kind, SOAK_SECONDS, 1, marks=soak, id=f"{storage_kind}-long")
        yield pytest.param(storage_kind, THREADS_SECONDS, 4, marks=soak, id=f"{storage_kind}-threads")


@pytest.fixture
def counter_lake(request: pytest.FixtureRequest, storage_kind: str, tmp_path: Path) -> Iterator[Lakehouse]:
    """A lakehouse with one counter for each writer and some shared counters."""
    server: S3Server | None = request.getfixturevalue("radosgw") if storage_kind == "s3" else None
    lakes = Lakes(tmp_path, server)
    lake = lakes.local(order=8, is_watched=False)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for name in itertools.chain(map(_own, range(N_WRITERS)), map(_shared, range(N_SHARED_TABLES))):
            txn.create_table("ns", name, table(n="0"))
    yield lake
    lakes.finish()


def _own(writer: int) -> str:
    return f"own{writer:02}"


def _shared(number: int) -> str:
    return f"shared{number}"


def _count_up(
    counter_lake: Lakehouse, writers: Sequence[int], incarnation: int, seconds: float
) -> Callable[[Report], None]:
    """Increment counters until time and commits suffice, one thread per writer. Report every known outcome."""

    def work(report: Report) -> None:
        lake = Lakehouse(counter_lake.storage)
        end = time.monotonic() + seconds
        failures: list[BaseException] = []

        def run(writer: int) -> None:
            try:
                count(lake, writer, end, report)
            except BaseException as error:  # noqa: BLE001 - raised in the main thread, so that the process fails
                failures.append(error)

        threads = [threading.Thread(target=run, args=(writer,)) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failure in failures:
            raise failure

    def count(lake: Lakehouse, writer: int, end: float, report: Report) -> None:
        chance = random.Random(f"{writer} {incarnation}")
        n_won = 0
        while (txn := lake.transaction()).base.version < FEWEST_COMMITS or time.monotonic() < end or n_won == 0:
            is_shared = chance.random() < CONTENDED
            name = _shared(chance.randrange(N_SHARED_TABLES)) if is_shared else _own(writer)
            number = int(txn.table("ns", name).properties["n"])
            txn.alter_table("ns", name, table(n=str(number + 1)))
            try:
                report(f"won {txn.commit()} {txn.id} {name}")
                n_won += 1
            except (CommitConflictError, CommitAttemptsExhaustedError):
                report(f"lost 0 {txn.id} {name}")
            except CommitOutcomeUnknownError as error:
                report(f"unknown {error.version} {txn.id} {name}")

    return work


@pytest.mark.parametrize(("storage_kind", "seconds", "n_threads"), list(cases()))
def test_killed_and_paused_writers_lose_no_commit(
    counter_lake: Lakehouse, storage_kind: str, seconds: int, n_threads: int
) -> None:
    """A third of the processes is killed once and restarted; another third is paused repeatedly."""
    chance = random.Random(storage_kind)
    end = time.monotonic() + seconds
    writers = [range(N_WRITERS)[first : first + n_threads] for first in range(0, N_WRITERS, n_threads)]
    children = {
        process: fork(_count_up(counter_lake, own, 0, seconds), time_limit_seconds=seconds + LATEST_END_S)
        for process, own in enumerate(writers)
    }
    killed: list[Child] = []
    to_kill = [process for process in children if process % 3 == 0]
    to_stop = [process for process in children if process % 3 == 1]
    while (rest := end - time.monotonic()) > 1:
        time.sleep(min(rest, seconds / 20))
        if to_kill:
            process = to_kill.pop()
            os.kill(children[process].pid, signal.SIGKILL)
            killed.append(children[process])
            children[process] = fork(
                _count_up(counter_lake, writers[process], 1, end - time.monotonic()),
                time_limit_seconds=seconds + LATEST_END_S,
            )
        stopped = chance.choice(to_stop)
        os.kill(children[stopped].pid, signal.SIGSTOP)
        time.sleep(min(1.0, seconds / 20))
        os.kill(children[stopped].pid, signal.SIGCONT)

    ended = {process: child.finish() for process, child in children.items()}
    assert {process: code for process, (code, _) in ended.items()} == dict.fromkeys(children, 0)
    dead = [child.finish() for child in killed]
    assert [code for code, _ in dead] == [-signal.SIGKILL] * len(killed)
    reports = [line.split() for _, lines in (*ended.values(), *dead) for line in lines]

    infos = {info.version: info for info in counter_lake.history()}
    places_of = Counter(member for info in infos.values() for member in info.members)
    assert set(places_of.values()) == {1}, "no transaction is there twice"
    for outcome, version, transaction_id, _ in reports:
        if outcome == "won":
            assert transaction_id in infos[int(version)].members
        elif outcome == "lost":
            assert transaction_id not in places_of
    snapshot = counter_lake.snapshot()
    counters = {name: int(snapshot.table("ns", name).properties["n"]) for name in snapshot.tables("ns")}
    assert sum(counters.values()) == len(places_of) - 1, "each commit counted one table up by one"
    won = Counter(name for outcome, _, _, name in reports if outcome == "won")
    assert all(counters[name] >= count for name, count in won.items())
    assert any(outcome == "lost" for outcome, *_ in reports), "they did contend"
    if n_threads > 1:
        assert any(len(info.members) > 1 for info in infos.values()), "they did go together"
    undisturbed = [process for process in children if process % 3 == 2]
    shares = [sum(line.startswith("won") for line in ended[process][1]) for process in undisturbed]
    assert min(shares) > 0, f"nobody starves: {shares}"
    if sum(shares) >= FEWEST_FOR_SHARES:
        assert min(shares) * 4 >= sum(shares) / len(shares), f"nobody gets far less: {shares}"

    report = operations.verify(counter_lake)
    assert report.is_clean, report.findings
