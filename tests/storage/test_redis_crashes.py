"""State after a Redis server was killed, and after the promotion of a lagging replica."""

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

SOON = {"connect_timeout_seconds": "2", "read_timeout_seconds": "2"}
N_WRITERS = 4


class Writers:
    """Threads that commit until their server is killed, and the acknowledged commits."""

    def __init__(self, lake: Lakehouse, turn: int):
        self.acknowledged: dict[str, int] = {}
        self.uncertain: set[str] = set()
        self._lake = lake
        self._turn = turn
        self._threads = [threading.Thread(target=self._commit, args=(number,)) for number in range(N_WRITERS)]
        for thread in self._threads:
            thread.start()

    def _commit(self, writer: int) -> None:
        for number in range(10_000):
            name = f"w{self._turn}_{writer}_{number}"
            try:
                with self._lake.transaction() as txn:
                    txn.create_namespace(name)
            except CommitOutcomeUnknownError:
                self.uncertain.add(name)
                return
            except TrinityLakeError:
                return  # the server was killed; this commit had no effect
            assert txn.committed_version is not None
            self.acknowledged[name] = txn.committed_version

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["redis", "valkey"])
@pytest.mark.parametrize("n_kills", [2, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_acknowledged_commits_survive_kills_of_the_server(redis_folder: Path, kind: Kind, n_kills: int) -> None:
    """With ``appendfsync always`` no commit and no entry of the index is lost."""
    with running(RedisServer(kind, redis_folder)) as server:
        root = server.fresh_root()
        options = SOON if kind == "redis" else {**SOON, "durability": "waitaof"}
        Lakehouse.create(root, options)
        acknowledged: dict[str, int] = {}
        uncertain: set[str] = set()
        for turn in range(n_kills):
            # Without retries, which would wait until the server is back.
            writers = Writers(Lakehouse(RedisStorage(root, options)), turn)
            before = len(acknowledged)
            try:
                wait_until(lambda writers=writers: len(writers.acknowledged) > 10)
            finally:
                server.kill()
                writers.join()
            acknowledged |= writers.acknowledged
            uncertain |= writers.uncertain
            assert len(acknowledged) > before
            server.start()
            lake = Lakehouse.open(root, options)
            committed = set(lake.snapshot().namespaces())
            assert set(acknowledged) <= committed, "each acknowledged commit is there"
            assert committed - set(acknowledged) <= uncertain, "what nobody was told of may be there"
            for version in set(acknowledged.values()):
                assert lake.snapshot(version).version == version
        storage = RedisStorage(root)
        listed = {file.path: file.size_bytes for file in storage.list()}
        assert {path: len(storage.read(path)) for path in listed} == listed, "the index and the contents agree"
        keys = {key for key in server.admin.scan_iter(count=1000) if b"/" in key}
        assert len(keys) == len(listed)
        check_lake(lake)


def test_killed_server_without_synced_file_loses_writes(redis_folder: Path) -> None:
    with running(RedisServer("redis", redis_folder, ("--appendonly", "no"))) as server:
        root = server.fresh_root()
        lake = Lakehouse.create(root, {"volatile": "true"})
        server.kill()
        server.start()
        with pytest.raises(TrinityLakeError):
            lake.snapshot()


def test_promotion_of_a_lagging_replica_is_detected(redis_folder: Path) -> None:
    """Lost files are missing. A name never has other bytes, except those of a new commit."""
    primary = RedisServer("redis", redis_folder / "primary")
    replica = RedisServer("redis", redis_folder / "replica")
    with running(primary), running(replica), RedisProxy(primary.port) as address:
        replica.admin.replicaof("127.0.0.1", primary.port)
        root = f"redis://127.0.0.1:{address.port}/0/lake/"
        lake = Lakehouse.create(root, SOON)
        with lake.transaction() as txn:
            txn.create_namespace("copied")
        wait_until(lambda: replica.admin.dbsize() == primary.admin.dbsize())
        replica.admin.replicaof("127.0.0.1", 1)  # the connection is cut, so it lags from now on
        for name in ("lost1", "lost2"):
            with lake.transaction() as txn:
                txn.create_namespace(name)
        held = lake.snapshot()
        assert held.version == 3
        files = {file.path: lake.storage.read(file.path) for file in lake.storage.list()}

        primary.kill()
        replica.admin.replicaof("NO", "ONE")
        address.target = replica.port
        address.close_connections()

        # A reader that knows version 3, one that does not, and one that has the version open.
        assert lake.latest_version() == 1
        assert Lakehouse.open(root, SOON).snapshot().namespaces() == ["copied"]
        fresh = RedisStorage(root, SOON)
        for path, data in files.items():
            try:
                assert fresh.read(path) == data or path == HINT_PATH
            except FileMissingError:
                continue
        with pytest.raises(TrinityLakeError):
            lake.snapshot(3)

        # A new commit takes the version of a lost commit: clients that had read the lost one read the new one.
        other = Lakehouse.open(root, SOON)
        for name in ("new2", "new3"):
            with other.transaction() as txn:
                txn.create_namespace(name)
        assert lake.snapshot().namespaces() == ["copied", "new2", "new3"]
        assert lake.snapshot(3).namespaces() == ["copied", "new2", "new3"]
        check_lake(lake)


def test_commits_that_waited_for_the_replica_survive_its_promotion(redis_folder: Path) -> None:
    primary = RedisServer("redis", redis_folder / "primary")
    replica = RedisServer("redis", redis_folder / "replica")
    options = {**SOON, "wait_replicas": "1"}
    with running(primary), running(replica), RedisProxy(primary.port) as address:
        replica.admin.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: primary.admin.info("replication")["connected_slaves"] == 1)
        root = f"redis://127.0.0.1:{address.port}/0/lake/"
        lake = Lakehouse.create(root, options)
        wait_until(lambda: replica.admin.info("replication")["master_link_status"] == "up")
        address.begin()
        for number in range(20):
            with lake.transaction() as txn:
                txn.create_namespace(f"ns{number:02}")
        assert address.names().count("WAIT") > 20

        replica.stall()  # it confirms no writes now
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
        address.target = replica.port
        address.close_connections()
        again = Lakehouse.open(root, SOON)
        assert again.snapshot().namespaces() == [f"ns{number:02}" for number in range(20)]
        check_lake(again)


def test_replica_is_rejected_for_reads_and_writes(redis_folder: Path) -> None:
    primary = RedisServer("redis", redis_folder / "primary")
    replica = RedisServer("redis", redis_folder / "replica")
    with running(primary), running(replica):
        replica.admin.replicaof("127.0.0.1", primary.port)
        storage = RedisStorage(replica.fresh_root(), SOON)
        for call in (lambda: storage.read("name"), lambda: storage.create("name", b"x"), lambda: list(storage.list())):
            with pytest.raises(TransientError):
                call()


def test_server_demoted_to_a_replica_rejects_writes(redis_folder: Path) -> None:
    with running(RedisServer("redis", redis_folder)) as server:
        storage = RedisStorage(server.fresh_root(), SOON)
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
        storage = open_storage(root, {**SOON, "wait_replicas": "1"})
        storage.create("first", b"x")
        proxy.begin(RedisFault("drop_response", is_named("WAIT")))
        with pytest.raises(AmbiguousWriteError):
            storage.create("second", b"x")
        proxy.begin()
        assert storage.read("second") == b"x"
        sent = [name for name in proxy.names() if name not in ("HELLO", "INFO", "CONFIG")]
        assert sent == ["INCR", "WAIT", "EVAL"]
        proxy.begin()
        assert storage.read("second") == b"x"
        assert proxy.names() == ["EVAL"], "once confirmed, it costs nothing more"


def test_test_settings_equal_the_documented_settings() -> None:
    assert DURABLE == ("--appendonly", "yes", "--appendfsync", "always")
