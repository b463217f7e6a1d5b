"""Sixteen writer processes commit to one lakehouse while some of them are killed and others are paused.

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

pytestmark = pytest.mark.local_only("creates its own lakehouse")

N_WRITERS = 16
N_SHARED_TABLES = 4
SHARED_FRACTION = 0.3  # fraction of transactions that change a shared table
DURATION_S, THREADS_DURATION_S, SOAK_DURATION_S = 3, 20, 300
#: On a busy machine the run continues until it has this many commits.
MIN_COMMITS = 2 * N_WRITERS
#: With fewer commits the writers' shares are random, so each writer only has to commit once.
MIN_COMMITS_FOR_SHARES = 1_000
MAX_OVERRUN_S = 240  # time after the planned end of the run


def writer_cases() -> Iterator[object]:
    """Yield storage, seconds and threads per process: short runs, and long runs for ``make soak``."""
    for storage_kind in ("local", "s3"):
        marks = [] if storage_kind == "local" else [pytest.mark.debian_packages]
        short_marks = [*marks, pytest.mark.timeout(DURATION_S + MAX_OVERRUN_S + 60)]
        if storage_kind == "s3":
            short_marks.append(pytest.mark.soak)
        yield pytest.param(storage_kind, DURATION_S, 1, marks=short_marks, id=storage_kind)
        soak = [*marks, pytest.mark.soak, pytest.mark.timeout(1_800)]
        yield pytest.param(storage_kind, SOAK_DURATION_S, 1, marks=soak, id=f"{storage_kind}-long")
        yield pytest.param(storage_kind, THREADS_DURATION_S, 4, marks=soak, id=f"{storage_kind}-threads")


@pytest.fixture
def counter_lake(request: pytest.FixtureRequest, storage_kind: str, tmp_path: Path) -> Iterator[Lakehouse]:
    """A lakehouse with one counter table for each writer and some shared ones."""
    server: S3Server | None = request.getfixturevalue("radosgw") if storage_kind == "s3" else None
    lakes = Lakes(tmp_path, server)
    lake = lakes.local(order=8, is_watched=False)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for name in itertools.chain(map(_private_table, range(N_WRITERS)), map(_shared_table, range(N_SHARED_TABLES))):
            txn.create_table("ns", name, table(n="0"))
    yield lake
    lakes.finish()


def _private_table(writer: int) -> str:
    return f"private{writer:02}"


def _shared_table(number: int) -> str:
    return f"shared{number}"


def _counting_writers(
    counter_lake: Lakehouse, writers: Sequence[int], incarnation: int, seconds: float
) -> Callable[[Report], None]:
    """Increment counters for ``seconds`` and until there are enough commits. Report the outcome of each transaction."""

    def work(report: Report) -> None:
        lake = Lakehouse(counter_lake.storage)
        deadline = time.monotonic() + seconds
        failures: list[BaseException] = []

        def run(writer: int) -> None:
            try:
                count(lake, writer, deadline, report)
            except BaseException as error:  # noqa: BLE001 - raised in the main thread, so that the process fails
                failures.append(error)

        threads = [threading.Thread(target=run, args=(writer,)) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failure in failures:
            raise failure

    def count(lake: Lakehouse, writer: int, deadline: float, report: Report) -> None:
        rng = random.Random(f"{writer} {incarnation}")
        n_won = 0
        while (txn := lake.transaction()).base.version < MIN_COMMITS or time.monotonic() < deadline or n_won == 0:
            is_shared = rng.random() < SHARED_FRACTION
            name = _shared_table(rng.randrange(N_SHARED_TABLES)) if is_shared else _private_table(writer)
            number = int(txn.table("ns", name).properties["n"])
            txn.alter_table("ns", name, table(n=str(number + 1)))
            try:
                report(f"committed {txn.commit()} {txn.id} {name}")
                n_won += 1
            except (CommitConflictError, CommitAttemptsExhaustedError):
                report(f"conflict 0 {txn.id} {name}")
            except CommitOutcomeUnknownError as error:
                report(f"unknown {error.version} {txn.id} {name}")

    return work


@pytest.mark.parametrize(("storage_kind", "seconds", "n_threads"), list(writer_cases()))
def test_killed_and_paused_writers_lose_no_commit(
    counter_lake: Lakehouse, storage_kind: str, seconds: int, n_threads: int
) -> None:
    """A third of the processes are killed once and restarted, and another third are paused repeatedly."""
    rng = random.Random(storage_kind)
    deadline = time.monotonic() + seconds
    writers = [range(N_WRITERS)[first : first + n_threads] for first in range(0, N_WRITERS, n_threads)]
    children = {
        process: fork(
            _counting_writers(counter_lake, process_writers, 0, seconds), time_limit_seconds=seconds + MAX_OVERRUN_S
        )
        for process, process_writers in enumerate(writers)
    }
    killed: list[Child] = []
    to_kill = [process for process in children if process % 3 == 0]
    to_pause = [process for process in children if process % 3 == 1]
    while (remaining_s := deadline - time.monotonic()) > 1:
        time.sleep(min(remaining_s, seconds / 20))
        if to_kill:
            process = to_kill.pop()
            os.kill(children[process].pid, signal.SIGKILL)
            killed.append(children[process])
            children[process] = fork(
                _counting_writers(counter_lake, writers[process], 1, deadline - time.monotonic()),
                time_limit_seconds=seconds + MAX_OVERRUN_S,
            )
        paused = rng.choice(to_pause)
        os.kill(children[paused].pid, signal.SIGSTOP)
        time.sleep(min(1.0, seconds / 20))
        os.kill(children[paused].pid, signal.SIGCONT)

    results = {process: child.finish() for process, child in children.items()}
    assert {process: exit_code for process, (exit_code, _) in results.items()} == dict.fromkeys(children, 0)
    killed_results = [child.finish() for child in killed]
    assert [exit_code for exit_code, _ in killed_results] == [-signal.SIGKILL] * len(killed)
    reports = [line.split() for _, lines in (*results.values(), *killed_results) for line in lines]

    infos = {info.version: info for info in counter_lake.history()}
    occurrences = Counter(member for info in infos.values() for member in info.members)
    assert set(occurrences.values()) == {1}, "each transaction is a member of one version"
    for outcome, version, transaction_id, _ in reports:
        if outcome == "committed":
            assert transaction_id in infos[int(version)].members
        elif outcome == "conflict":
            assert transaction_id not in occurrences
    snapshot = counter_lake.snapshot()
    counters = {name: int(snapshot.table("ns", name).properties["n"]) for name in snapshot.tables("ns")}
    assert sum(counters.values()) == len(occurrences) - 1, "each commit incremented one counter"
    committed = Counter(name for outcome, _, _, name in reports if outcome == "committed")
    assert all(counters[name] >= count for name, count in committed.items())
    assert any(outcome == "conflict" for outcome, *_ in reports), "some transactions conflicted"
    if n_threads > 1:
        assert any(len(info.members) > 1 for info in infos.values()), "some transactions were committed in groups"
    undisturbed = [process for process in children if process % 3 == 2]
    shares = [sum(line.startswith("committed") for line in results[process][1]) for process in undisturbed]
    assert min(shares) > 0, f"a writer starved: {shares}"
    if sum(shares) >= MIN_COMMITS_FOR_SHARES:
        assert min(shares) * 4 >= sum(shares) / len(shares), f"a writer committed far less than the others: {shares}"

    report = operations.verify(counter_lake)
    assert report.is_clean, report.findings
