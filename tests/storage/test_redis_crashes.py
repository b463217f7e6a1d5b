"""The state after a Redis server was killed, and after a lagging replica was promoted."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.lakes import check_lake
from tests.redis_proxy import RedisFault, RedisProxy, is_named
from tests.servers.redis import DURABLE, Kind, RedisServer, running, wait_until
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitOutcomeUnknownError,
    FileMissingError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.redis.storage import RedisStorage

SHORT_TIMEOUTS = {"connect_timeout_seconds": "2", "read_timeout_seconds": "2"}
N_WRITERS = 4


class Writers:
    """Threads that commit until the server is killed, and their acknowledged commits."""

    def __init__(self, lake: Lakehouse, round_number: int):
        self.acknowledged: dict[str, int] = {}
        self.uncertain: set[str] = set()
        self._lake = lake
        self._round_number = round_number
        self._threads = [threading.Thread(target=self._commit, args=(number,)) for number in range(N_WRITERS)]
        for thread in self._threads:
            thread.start()

    def _commit(self, writer: int) -> None:
        for number in range(10_000):
            name = f"w{self._round_number}_{writer}_{number}"
            try:
                with self._lake.transaction() as txn:
                    txn.create_namespace(name)
            except CommitOutcomeUnknownError:
                self.uncertain.add(name)
                return
            except TrinityLakeError:
                return  # the server was killed, and the commit had no effect
            assert txn.committed_version is not None
            self.acknowledged[name] = txn.committed_version

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["redis", "valkey"])
@pytest.mark.parametrize("n_kills", [2, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_acknowledged_commits_survive_kills_of_the_server(redis_folder: Path, kind: Kind, n_kills: int) -> None:
    """With ``appendfsync always``, no commit and no index entry is lost."""
    with running(RedisServer(kind, redis_folder)) as server:
        root = server.fresh_root()
        options = SHORT_TIMEOUTS if kind == "redis" else {**SHORT_TIMEOUTS, "durability": "waitaof"}
        Lakehouse.create(root, options)
        acknowledged: dict[str, int] = {}
        uncertain: set[str] = set()
        for round_number in range(n_kills):
            # Without retries, which would wait until the server is back.
            writers = Writers(Lakehouse(RedisStorage(root, options)), round_number)
            n_before = len(acknowledged)
            try:
                wait_until(lambda writers=writers: len(writers.acknowledged) > 10)
            finally:
                server.kill()
                writers.join()
            acknowledged |= writers.acknowledged
            uncertain |= writers.uncertain
            assert len(acknowledged) > n_before
            server.start()
            lake = Lakehouse.open(root, options)
            committed = set(lake.snapshot().namespaces())
            assert set(acknowledged) <= committed, "each acknowledged commit survived"
            assert committed - set(acknowledged) <= uncertain, "only commits with an unknown outcome may exist as well"
            for version in set(acknowledged.values()):
                assert lake.snapshot(version).version == version
        storage = RedisStorage(root)
        listed = {file.path: file.size_bytes for file in storage.list()}
        assert {path: len(storage.read(path)) for path in listed} == listed, "the index matches the contents"
        keys = {key for key in server.admin.scan_iter(count=1000) if b"/" in key}
        assert len(keys) == len(listed)
        check_lake(lake)


def test_killed_server_without_append_only_file_loses_writes(redis_folder: Path) -> None:
    with running(RedisServer("redis", redis_folder, ("--appendonly", "no"))) as server:
        root = server.fresh_root()
        lake = Lakehouse.create(root, {"volatile": "true"})
        server.kill()
        server.start()
        with pytest.raises(TrinityLakeError):
            lake.snapshot()


def test_promotion_of_a_lagging_replica_is_detected(redis_folder: Path) -> None:
    """Lost files are missing. A file never has different content, unless a new commit created it again."""
    primary = RedisServer("redis", redis_folder / "primary")
    replica = RedisServer("redis", redis_folder / "replica")
    with running(primary), running(replica), RedisProxy(primary.port) as proxy:
        replica.admin.replicaof("127.0.0.1", primary.port)
        root = f"redis://127.0.0.1:{proxy.port}/0/lake/"
        lake = Lakehouse.create(root, SHORT_TIMEOUTS)
        with lake.transaction() as txn:
            txn.create_namespace("copied")
        wait_until(lambda: replica.admin.dbsize() == primary.admin.dbsize())
        replica.admin.replicaof("127.0.0.1", 1)  # disconnects the replica, so that it lags
        for name in ("lost1", "lost2"):
            with lake.transaction() as txn:
                txn.create_namespace(name)
        open_snapshot = lake.snapshot()
        assert open_snapshot.version == 3
        files = {file.path: lake.storage.read(file.path) for file in lake.storage.list()}

        primary.kill()
        replica.admin.replicaof("NO", "ONE")
        proxy.target = replica.port
        proxy.close_connections()

        # A client that knows version 3, a client that does not, and a new storage that reads the files of version 3.
        assert lake.latest_version() == 1
        assert Lakehouse.open(root, SHORT_TIMEOUTS).snapshot().namespaces() == ["copied"]
        new_storage = RedisStorage(root, SHORT_TIMEOUTS)
        for path, data in files.items():
            try:
                assert new_storage.read(path) == data or path == HINT_PATH
            except FileMissingError:
                continue
        with pytest.raises(TrinityLakeError):
            lake.snapshot(3)

        # A new commit reuses the version of a lost commit. Clients that read the lost version now read the new one.
        other = Lakehouse.open(root, SHORT_TIMEOUTS)
        for name in ("new2", "new3"):
            with other.transaction() as txn:
                txn.create_namespace(name)
        assert lake.snapshot().namespaces() == ["copied", "new2", "new3"]
        assert lake.snapshot(3).namespaces() == ["copied", "new2", "new3"]
        check_lake(lake)


def test_commits_that_waited_for_the_replica_survive_its_promotion(redis_folder: Path) -> None:
    primary = RedisServer("redis", redis_folder / "primary")
    replica = RedisServer("redis", redis_folder / "replica")
    options = {**SHORT_TIMEOUTS, "wait_replicas": "1"}
    with running(primary), running(replica), RedisProxy(primary.port) as proxy:
        replica.admin.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: primary.admin.info("replication")["connected_slaves"] == 1)
        root = f"redis://127.0.0.1:{proxy.port}/0/lake/"
        lake = Lakehouse.create(root, options)
        wait_until(lambda: replica.admin.info("replication")["master_link_status"] == "up")
        proxy.begin()
        for number in range(20):
            with lake.transaction() as txn:
                txn.create_namespace(f"ns{number:02}")
        assert proxy.names().count("WAIT") > 20

        replica.stall()  # so that it confirms no writes
        storage = RedisStorage(root, options)
        with pytest.raises(AmbiguousWriteError):
            storage.create("unconfirmed", b"x")
        with pytest.raises(TransientError):
            storage.read("unconfirmed")
        replica.resume()
        wait_until(lambda: replica.admin.exists("{lake}/unconfirmed"))
        assert storage.read("unconfirmed") == b"x"

        primary.kill()
        replica.admin.replicaof("NO", "ONE")
        proxy.target = replica.port
        proxy.close_connections()
        reopened_lake = Lakehouse.open(root, SHORT_TIMEOUTS)
        assert reopened_lake.snapshot().namespaces() == [f"ns{number:02}" for number in range(20)]
        check_lake(reopened_lake)


def test_replica_is_rejected_for_reads_and_writes(redis_folder: Path) -> None:
    primary = RedisServer("redis", redis_folder / "primary")
    replica = RedisServer("redis", redis_folder / "replica")
    with running(primary), running(replica):
        replica.admin.replicaof("127.0.0.1", primary.port)
        storage = RedisStorage(replica.fresh_root(), SHORT_TIMEOUTS)
        for call in (lambda: storage.read("name"), lambda: storage.create("name", b"x"), lambda: list(storage.list())):
            with pytest.raises(TransientError):
                call()


def test_server_demoted_to_a_replica_rejects_writes(redis_folder: Path) -> None:
    with running(RedisServer("redis", redis_folder)) as server:
        storage = RedisStorage(server.fresh_root(), SHORT_TIMEOUTS)
        storage.create("before", b"x")
        server.admin.replicaof("127.0.0.1", 1)
        with pytest.raises(TransientError):
            storage.create("after", b"x")


def test_read_confirms_a_write_with_a_lost_wait_response(redis_folder: Path) -> None:
    primary = RedisServer("redis", redis_folder / "primary")
    replica = RedisServer("redis", redis_folder / "replica")
    with running(primary), running(replica), RedisProxy(primary.port) as proxy:
        replica.admin.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: replica.admin.info("replication")["master_link_status"] == "up")
        root = f"redis://127.0.0.1:{proxy.port}/0/lake/"
        storage = open_storage(root, {**SHORT_TIMEOUTS, "wait_replicas": "1"})
        storage.create("first", b"x")
        proxy.begin(RedisFault("drop_response", is_named("WAIT")))
        with pytest.raises(AmbiguousWriteError):
            storage.create("second", b"x")
        proxy.begin()
        assert storage.read("second") == b"x"
        names = [name for name in proxy.names() if name not in ("HELLO", "INFO", "CONFIG")]
        assert names == ["INCR", "WAIT", "EVAL"]
        proxy.begin()
        assert storage.read("second") == b"x"
        assert proxy.names() == ["EVAL"], "a confirmed file needs no further confirmation"


def test_settings_of_the_tests_equal_the_documented_settings() -> None:
    assert DURABLE == ("--appendonly", "yes", "--appendfsync", "always")
