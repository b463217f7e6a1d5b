"""End-to-end tests of lakehouses on HDFS, and races of processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clock import AgingStorage
from tests.lakes import check_lake
from tests.servers.hdfs import SUPERUSER, HdfsServer
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import FileExistsAlreadyError, VersionExpiredError
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import MIB, run_together

REPOSITORY = Path(__file__).parents[2]
N_THREADS, N_PROCESSES = 32, 8
SOAK_MARKS = [pytest.mark.soak, pytest.mark.timeout(3600)]
START_DELAY_NS = 5_000_000
#: Longer than the time to live of a transaction and the clock margin.
TWO_DAYS_MS = 2 * 24 * 3_600_000


@pytest.fixture
def root(hdfs: HdfsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HADOOP_USER_NAME", SUPERUSER)
    new_root = hdfs.fresh_root()
    yield new_root
    hdfs.delete_all(new_root)


class Worker:
    """A process of ``tests.storage.hdfs_worker``."""

    def __init__(self, kind: str, root: str, number: int):
        command = [sys.executable, "-m", "tests.storage.hdfs_worker", kind, root, str(number)]
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def workers(request: pytest.FixtureRequest, root: str) -> Iterator[list[Worker]]:
    kind, n_workers = request.param
    if kind == "commit":
        Lakehouse.create(root)
    running_workers = [Worker(kind, root, number) for number in range(n_workers)]
    try:
        assert {worker.read_line() for worker in running_workers} == {"ready"}
        yield running_workers
    finally:
        for worker in running_workers:
            worker.stop()


def check_round(storage: Storage, name: str, outcomes: list[str], size_bytes: int) -> None:
    assert sorted(outcomes) == ["FileExistsAlreadyError"] * (len(outcomes) - 1) + ["won"]
    winner = outcomes.index("won")
    assert storage.read(name) == bytes([winner]) * size_bytes
    assert [(file.path, file.size_bytes) for file in storage.list()] == [(name, size_bytes)]
    storage.delete(name)


@pytest.mark.parametrize(
    ("size_bytes", "n_rounds"),
    [
        (0, 3), (MIB, 1),
        *(pytest.param(size_bytes, 100, marks=SOAK_MARKS, id=f"{size_bytes}-full") for size_bytes in (0, MIB, 9 * MIB)),
    ],
)  # fmt: skip
def test_concurrent_creates_in_32_threads_have_one_winner(root: str, size_bytes: int, n_rounds: int) -> None:
    storage = open_storage(root)
    for number in range(n_rounds):
        name = f"round-{number}/name"  # creating the folder is also a race

        def create(racer: int, name: str = name) -> str:
            try:
                storage.create(name, bytes([racer]) * size_bytes)
            except FileExistsAlreadyError as error:
                return type(error).__name__
            return "won"

        outcomes = run_together([lambda racer=racer: create(racer) for racer in range(N_THREADS)])  # type: ignore[misc]
        check_round(storage, name, [str(outcome) for outcome in outcomes], size_bytes)
    assert list(storage.list("_ops/tmp/")) == []


@pytest.mark.parametrize("workers", [("create", N_PROCESSES)], indirect=True, ids=[""])
@pytest.mark.parametrize(
    "rounds_by_size",
    [
        {0: 2, MIB: 1},
        pytest.param({0: 100, MIB: 100, 9 * MIB: 100}, marks=SOAK_MARKS, id="full"),
    ],
)
def test_concurrent_creates_in_8_processes_have_one_winner(
    root: str, workers: list[Worker], rounds_by_size: dict[int, int]
) -> None:
    storage = open_storage(root)
    for size_bytes, n_rounds in rounds_by_size.items():
        for number in range(n_rounds):
            name = f"round-{size_bytes}-{number}/name"
            start_ns = time.monotonic_ns() + START_DELAY_NS
            for worker in workers:
                worker.send(f"{name} {size_bytes} {start_ns}")
            check_round(storage, name, [worker.read_line() for worker in workers], size_bytes)
    assert list(storage.list("_ops/tmp/")) == []


@pytest.mark.parametrize("workers", [("commit", 2)], indirect=True, ids=[""])
@pytest.mark.parametrize("n_commits", [20, pytest.param(200, marks=SOAK_MARKS)])
def test_two_processes_lose_no_commit(root: str, workers: list[Worker], n_commits: int) -> None:
    for worker in workers:
        worker.send(str(n_commits))
    assert max(int(worker.read_line()) for worker in workers) == 2 * n_commits
    lake = Lakehouse.open(root)
    assert lake.latest_version() == 2 * n_commits
    expected = {f"ns_{worker}_{number}" for worker in range(2) for number in range(n_commits)}
    assert set(lake.snapshot().namespaces()) == expected
    check_lake(lake)


def test_lakehouse_end_to_end(root: str) -> None:
    storage = open_storage(root)
    clock = AgingStorage(storage, storage.now_ms())
    lake = Lakehouse.create(root, storage=clock)
    for number in range(4):
        with lake.transaction() as txn:
            txn.create_namespace(f"ns{number}")
    operations.rollback(lake, 3)
    assert lake.snapshot().namespaces() == ["ns0", "ns1", "ns2"]
    assert [info.version for info in lake.history()] == [5, 4, 3, 2, 1, 0]

    backup = f"{root.removesuffix('lake/')}backup/"
    operations.plan_export(lake, "backup", level="full", target=backup).execute()
    assert Lakehouse.open(backup).snapshot().namespaces() == ["ns0", "ns1", "ns2"]

    clock.time_ms += TWO_DAYS_MS
    policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    assert operations.plan_expiration(lake, policy).execute().versions
    with pytest.raises(VersionExpiredError):
        lake.snapshot(2)
    paths_before = {file.path for file in storage.list()}
    clock.time_ms += TWO_DAYS_MS
    report = operations.plan_purge(lake).execute()
    deleted_paths = paths_before - {file.path for file in storage.list()}
    assert len(deleted_paths) >= report.files > 0
    assert any("ns3" in path for path in deleted_paths), "files that only expired versions used are deleted"
    assert operations.verify(lake, deep=True).findings == ()
    check_lake(Lakehouse.open(root))
