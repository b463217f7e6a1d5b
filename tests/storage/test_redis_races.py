"""Threads and processes that race for names and versions on Redis."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable

import pytest

from tests.lakes import check_version, left_over_paths
from tests.processes import fork
from tests.servers.redis import RedisServer
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import FileExistsAlreadyError, StorageError
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import MIB, run_together

N_THREADS, N_PROCESSES = 32, 8
TIMEOUT_SECONDS = 60
#: Rounds by the size of the bodies.
SHORT, FULL = {0: 10, MIB: 2, 9 * MIB: 1}, {0: 100, MIB: 100, 9 * MIB: 100}
LONG = [pytest.mark.soak, pytest.mark.timeout(1800)]

Report = Callable[[str], None]


@pytest.fixture
def storage(redis_server: RedisServer) -> Storage:
    return open_storage(redis_server.fresh_root())


def body_of(racer: int, size_bytes: int) -> bytes:
    return bytes([racer]) * size_bytes


def outcome_of(create: Callable[[], None]) -> str:
    try:
        create()
    except StorageError as error:
        return type(error).__name__
    return "won"


def check_round(storage: Storage, name: str, outcomes: list[str], size_bytes: int) -> None:
    assert sorted(outcomes) == [FileExistsAlreadyError.__name__] * (len(outcomes) - 1) + ["won"]
    assert storage.read(name) == body_of(outcomes.index("won"), size_bytes)
    assert [(file.path, file.size_bytes) for file in storage.list("race/")] == [(name, size_bytes)]
    storage.delete(name)


@pytest.mark.parametrize("n_rounds", [pytest.param(SHORT, id="short"), pytest.param(FULL, id="full", marks=LONG)])
def test_32_threads_create_one_name(storage: Storage, n_rounds: dict[int, int]) -> None:
    for size_bytes, times in n_rounds.items():
        bodies = [body_of(racer, size_bytes) for racer in range(N_THREADS)]
        for _ in range(times):
            name = f"race/{uuid.uuid4().hex}"

            def create(data: bytes, name: str = name) -> str:
                return outcome_of(lambda: storage.create(name, data))

            outcomes = run_together([lambda data=data: create(data) for data in bodies])  # type: ignore[misc]
            check_round(storage, name, [str(outcome) for outcome in outcomes], size_bytes)


@pytest.mark.parametrize("n_rounds", [pytest.param(SHORT, id="short"), pytest.param(FULL, id="full", marks=LONG)])
def test_8_processes_create_one_name(storage: Storage, n_rounds: dict[int, int]) -> None:
    names = {f"race/{uuid.uuid4().hex}": size for size, times in n_rounds.items() for _ in range(times)}
    barrier = multiprocessing.get_context("fork").Barrier(N_PROCESSES + 1)

    def racer(number: int) -> Callable[[Report], None]:
        def work(report: Report) -> None:
            for name, size_bytes in names.items():
                data = body_of(number, size_bytes)
                barrier.wait(TIMEOUT_SECONDS)
                report(outcome_of(lambda name=name, data=data: storage.create(name, data)))  # type: ignore[misc]
                barrier.wait(TIMEOUT_SECONDS)
                barrier.wait(TIMEOUT_SECONDS)  # the round is checked, the file deleted

        return work

    storage.exists("race/nothing")  # the children inherit a client that was in use
    children = [fork(racer(number), time_limit_seconds=1800) for number in range(N_PROCESSES)]
    try:
        for name, size_bytes in names.items():
            barrier.wait(TIMEOUT_SECONDS)
            barrier.wait(TIMEOUT_SECONDS)
            check_round(storage, name, [child.next_report() for child in children], size_bytes)
            barrier.wait(TIMEOUT_SECONDS)
    except BaseException:
        barrier.abort()
        raise
    finally:
        ended = [child.finish() for child in children]
    assert [exit_code for exit_code, _ in ended] == [0] * N_PROCESSES


@pytest.mark.parametrize("n_commits", [20, pytest.param(200, marks=LONG)])
def test_two_processes_of_commits_lose_nothing(redis_server: RedisServer, n_commits: int) -> None:
    lake = Lakehouse.create(redis_server.fresh_root(), order=8)

    def committer(worker: int) -> Callable[[Report], None]:
        def work(report: Report) -> None:
            own = Lakehouse(lake.storage)
            for number in range(n_commits):
                with own.transaction() as txn:
                    txn.create_namespace(f"w{worker}_{number:03d}")
                report(f"{txn.committed_version} {txn.id}")

        return work

    ended = [child.finish() for child in [fork(committer(worker), time_limit_seconds=500) for worker in range(2)]]
    assert [exit_code for exit_code, _ in ended] == [0, 0]
    acknowledged = dict(line.split() for _, lines in ended for line in lines)
    assert len(acknowledged) == lake.latest_version() == 2 * n_commits
    assert lake.snapshot().namespaces() == [f"w{w}_{n:03d}" for w in range(2) for n in range(n_commits)]
    infos = {info.version: info for info in lake.history()}
    assert all(infos[int(version)].members == (transaction_id,) for version, transaction_id in acknowledged.items())
    for version in range(0, 2 * n_commits, 13):
        assert len(check_version(lake, version).namespaces()) == version
    assert left_over_paths(lake) == set(), "attempts that lost a race left no file"
