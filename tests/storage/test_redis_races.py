"""Races of threads and processes for files and versions on Redis and, in soak runs, on Valkey."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from tests.lakes import check_version, unreferenced_paths
from tests.processes import fork
from tests.races import race_processes, race_threads
from tests.servers.redis import RedisServer
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import MIB

#: Number of rounds by file size.
SHORT_ROUNDS, FULL_ROUNDS = {0: 10, MIB: 2, 9 * MIB: 1}, {0: 100, MIB: 100, 9 * MIB: 100}
SOAK_MARKS = [pytest.mark.soak, pytest.mark.timeout(1800)]

Report = Callable[[str], None]


@pytest.fixture(
    params=[
        pytest.param("redis_server", marks=pytest.mark.debian_packages),
        pytest.param("valkey_server", marks=pytest.mark.soak),
    ]
)
def server(request: pytest.FixtureRequest) -> RedisServer:
    redis_server: RedisServer = request.getfixturevalue(request.param)
    return redis_server


@pytest.fixture
def storage(server: RedisServer) -> Storage:
    return open_storage(server.fresh_root())


@pytest.mark.parametrize(
    "rounds_by_size", [pytest.param(SHORT_ROUNDS, id="short"), pytest.param(FULL_ROUNDS, id="full", marks=SOAK_MARKS)]
)
def test_concurrent_creates_in_32_threads_have_one_winner(storage: Storage, rounds_by_size: dict[int, int]) -> None:
    for size_bytes, n_rounds in rounds_by_size.items():
        for _ in range(n_rounds):
            race_threads(storage, f"race/{uuid.uuid4().hex}", size_bytes)


@pytest.mark.parametrize(
    "rounds_by_size", [pytest.param(SHORT_ROUNDS, id="short"), pytest.param(FULL_ROUNDS, id="full", marks=SOAK_MARKS)]
)
def test_concurrent_creates_in_8_processes_have_one_winner(storage: Storage, rounds_by_size: dict[int, int]) -> None:
    names = {
        f"race/{uuid.uuid4().hex}": size_bytes
        for size_bytes, n_rounds in rounds_by_size.items()
        for _ in range(n_rounds)
    }
    race_processes(storage, names)


@pytest.mark.parametrize("n_commits", [20, pytest.param(200, marks=SOAK_MARKS)])
def test_two_processes_lose_no_commit(server: RedisServer, n_commits: int) -> None:
    lake = Lakehouse.create(server.fresh_root(), order=8)

    def committer(worker: int) -> Callable[[Report], None]:
        def work(report: Report) -> None:
            worker_lake = Lakehouse(lake.storage)
            for number in range(n_commits):
                with worker_lake.transaction() as txn:
                    txn.create_namespace(f"w{worker}_{number:03d}")
                report(f"{txn.committed_version} {txn.id}")

        return work

    results = [child.finish() for child in [fork(committer(worker), time_limit_seconds=500) for worker in range(2)]]
    assert [exit_code for exit_code, _ in results] == [0, 0]
    acknowledged = dict(line.split() for _, lines in results for line in lines)
    assert len(acknowledged) == lake.latest_version() == 2 * n_commits
    assert lake.snapshot().namespaces() == [f"w{w}_{n:03d}" for w in range(2) for n in range(n_commits)]
    infos = {info.version: info for info in lake.history()}
    assert all(infos[int(version)].members == (transaction_id,) for version, transaction_id in acknowledged.items())
    for version in range(0, 2 * n_commits, 13):
        assert len(check_version(lake, version).namespaces()) == version
    assert unreferenced_paths(lake) == set(), "failed attempts left no files"
