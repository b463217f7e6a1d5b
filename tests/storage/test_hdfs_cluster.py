"""HDFS while servers are stopped and restarted. Each test starts a separate cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lakes import check_lake
from tests.servers.hdfs import SUPERUSER, HdfsCluster
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    CommitAttemptsExhaustedError,
    CommitOutcomeUnknownError,
    ObjectExistsError,
    StorageError,
    TransientError,
)
from trinitylake_ops.storage import RetryStorage, Storage, open_storage

pytestmark = [pytest.mark.soak, pytest.mark.debian_packages, pytest.mark.timeout(900)]

TIMEOUT_S = 300.0
#: One more than the replicas of a file. With three DataNodes, the NameNode would continue to choose the stopped one.
N_DATANODES = 4


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HdfsCluster]:
    monkeypatch.setenv("HADOOP_USER_NAME", SUPERUSER)
    new_cluster = HdfsCluster(tmp_path, tmp_path / "log", n_datanodes=N_DATANODES)
    new_cluster.start()
    yield new_cluster
    new_cluster.stop()


class Committer(threading.Thread):
    """Commits namespaces until it is stopped, and records those whose commits were acknowledged."""

    def __init__(self, root: str, prefix: str):
        super().__init__()
        self._lake = Lakehouse.open(root, {"read_timeout_seconds": "5"})
        self._prefix = prefix
        self._is_stopping = threading.Event()
        self.committed_names: list[str] = []
        self.n_failures = 0

    def run(self) -> None:
        number = 0
        while not self._is_stopping.is_set():
            name = f"{self._prefix}_{number}"
            try:
                with self._lake.transaction() as txn:
                    txn.create_namespace(name)
            except ObjectExistsError:  # a commit with unknown outcome had succeeded
                assert self.n_failures
            except (StorageError, CommitAttemptsExhaustedError, CommitOutcomeUnknownError):
                self.n_failures += 1
                time.sleep(0.05)
                continue
            self.committed_names.append(name)
            number += 1

    def wait_for(self, n_more: int) -> None:
        n_expected, deadline = len(self.committed_names) + n_more, time.monotonic() + TIMEOUT_S
        while len(self.committed_names) < n_expected:
            assert self.is_alive() and time.monotonic() < deadline, "the commits do not continue"
            time.sleep(0.02)

    def stop(self) -> None:
        self._is_stopping.set()
        self.join(TIMEOUT_S)
        assert not self.is_alive()


def create_lakehouse(cluster: HdfsCluster) -> str:
    root = cluster.server.fresh_root()
    Lakehouse.create(root)
    return root


def check_lakehouse(root: str, committers: list[Committer]) -> None:
    lake = Lakehouse.open(root)
    namespaces = lake.snapshot().namespaces()
    assert sorted(namespaces) == sorted(name for committer in committers for name in committer.committed_names)
    assert lake.latest_version() == len(namespaces), "each commit created one version"
    check_lake(lake)


def test_commits_survive_a_namenode_restart(cluster: HdfsCluster) -> None:
    root = create_lakehouse(cluster)
    committers = [Committer(root, f"w{number}") for number in range(2)]
    for committer in committers:
        committer.start()
    try:
        for _ in range(3):
            for committer in committers:
                committer.wait_for(3)
            cluster.stop_namenode()
            time.sleep(1)
            cluster.start_namenode()
            cluster.wait_until_ready(N_DATANODES)
        for committer in committers:
            committer.wait_for(3)
    finally:
        for committer in committers:
            committer.stop()
    assert sum(committer.n_failures for committer in committers) > 0, "no commit failed during a restart"
    check_lakehouse(root, committers)


def test_commits_survive_a_stopped_datanode(cluster: HdfsCluster) -> None:
    root = create_lakehouse(cluster)
    committer = Committer(root, "w")
    committer.start()
    try:
        committer.wait_for(5)
        cluster.stop_datanode(0)
        committer.wait_for(20)
        cluster.start_datanode(0)
        cluster.wait_until_ready(N_DATANODES)
        committer.wait_for(5)
    finally:
        committer.stop()
    check_lakehouse(root, [committer])


def test_create_in_safe_mode_is_transient(cluster: HdfsCluster) -> None:
    storage = open_storage(cluster.server.fresh_root())
    assert isinstance(storage, RetryStorage)
    storage.create("f", b"x")
    cluster.server.administer("-safemode", "enter")
    with pytest.raises(TransientError):
        storage.inner.create("g", b"x")
    assert storage.read("f") == b"x"
    cluster.server.administer("-safemode", "leave")
    storage.create("g", b"x")


def test_write_without_datanodes_fails_without_loss(cluster: HdfsCluster) -> None:
    storage = open_storage(cluster.server.fresh_root(), {"read_timeout_seconds": "10"})
    assert isinstance(storage, RetryStorage)
    storage.create("f", b"x")
    for number in range(N_DATANODES):
        cluster.stop_datanode(number)
    with pytest.raises(StorageError):
        storage.inner.create("g", b"x")
    with pytest.raises(StorageError):
        storage.inner.read("f")
    assert [file.path for file in storage.list()] == ["f"]
    for number in range(N_DATANODES):
        cluster.start_datanode(number)
    # The NameNode never considers the DataNodes dead, so only a successful write shows that it has their new addresses.
    deadline = time.monotonic() + TIMEOUT_S
    while not _can_create(storage, "g"):
        assert time.monotonic() < deadline
    assert storage.read_many(["f", "g"]) == [b"x", b"g"]
    assert sorted(file.path for file in storage.list()) == ["f", "g"]


def _can_create(storage: Storage, name: str) -> bool:
    try:
        storage.create(name, name.encode())
    except TransientError:
        return False
    return True
