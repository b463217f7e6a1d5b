"""Redis: lost responses, rejections, invalid credentials, and full or silent servers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lakes import unreferenced_paths
from tests.processes import fork
from tests.redis_proxy import RedisFault, RedisProxy, is_create, is_delete, is_list, is_named, is_read, is_write
from tests.servers.daemons import free_port
from tests.servers.redis import DURABLE, RedisServer, is_complete, running, running_cluster, wait_until
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    UnreachableError,
)
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.redis.storage import RedisStorage

SHORT_TIMEOUTS = {"connect_timeout_seconds": "0.5", "read_timeout_seconds": "0.5"}
#: Commands of the handshake and of the durability check, which are not storage requests.
CONNECTION_COMMANDS = {"HELLO", "INFO", "CONFIG"}


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[RedisProxy]:
    with RedisProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def root(proxy: RedisProxy, redis_server: RedisServer) -> str:
    return redis_server.fresh_root().replace(str(redis_server.port), str(proxy.port))


def count_requests(proxy: RedisProxy) -> int:
    """Return the number of requests since the proxy was reset."""
    return len([name for name in proxy.names() if name not in CONNECTION_COMMANDS])


# Lost responses


def test_create_with_a_lost_response_is_ambiguous_and_sent_once(proxy: RedisProxy, root: str) -> None:
    storage = open_storage(root)
    for action, is_created in (("drop_response", True), ("drop_request", False)):
        name = f"after-{action}"
        proxy.begin(RedisFault(action, is_create))
        with pytest.raises(AmbiguousWriteError, match=f"cannot create '{name}' .* no complete response"):
            storage.create(name, b"x")
        assert count_requests(proxy) == 1, "the request is sent once"
        assert storage.exists(name) is is_created


def test_writes_and_deletes_are_retried_after_a_lost_response(proxy: RedisProxy, root: str) -> None:
    bare_storage, storage = RedisStorage(root), open_storage(root)
    for is_change, change in (
        (is_write, lambda target_storage: target_storage.write("name", b"x")),
        (is_delete, lambda target_storage: target_storage.delete("name")),
        (is_delete, lambda target_storage: target_storage.delete_batch(["name", "other"])),
    ):
        proxy.begin(RedisFault("drop_response", is_change))
        with pytest.raises(AmbiguousWriteError):
            change(bare_storage)
        proxy.begin(RedisFault("drop_response", is_change, times=2))
        change(storage)
        assert count_requests(proxy) == 3
    assert list(storage.list()) == []


def test_reads_with_lost_responses_are_retried(proxy: RedisProxy, root: str) -> None:
    bare_storage, storage = RedisStorage(root), open_storage(root)
    storage.create_many({f"many/{number:04}": b"x" for number in range(1001)})
    for matches, read in (
        (is_read, lambda target_storage: target_storage.read("many/0000")),
        (is_named("ZRANGEBYLEX"), lambda target_storage: target_storage.stat("many/0000").size_bytes),
        (
            is_named("TIME"),
            lambda target_storage: (
                RedisStorage(target_storage.root).now_ms() > 0
                if target_storage is bare_storage
                else open_storage(root).now_ms() > 0
            ),
        ),
        (is_list, lambda target_storage: len(list(target_storage.list("many/")))),
    ):
        expected = read(storage)
        for action in ("drop_response", "drop_request"):
            proxy.begin(RedisFault(action, matches))
            with pytest.raises(TransientError):
                read(bare_storage)
            proxy.begin(RedisFault(action, matches, times=2))
            assert read(storage) == expected
    proxy.begin(RedisFault("drop_response", is_list, at=2, times=2))
    assert len(list(storage.list("many/"))) == 1001, "a later page is requested again"
    storage.delete_many([f"many/{number:04}" for number in range(1001)])


def test_commit_with_a_lost_response_finds_its_root(proxy: RedisProxy, root: str) -> None:
    lake = Lakehouse.create(root)
    proxy.begin()
    with lake.transaction() as txn:
        txn.create_namespace("ns1")
    n_creates = sum(map(is_create, proxy.log))
    assert n_creates >= 2
    names = ["ns1"]
    for action in ("drop_response", "drop_request"):
        for at in range(1, n_creates + 1):
            names.append(f"ns{len(names) + 1}")
            proxy.begin(RedisFault(action, is_create, at))
            with lake.transaction() as txn:
                txn.create_namespace(names[-1])
            assert txn.committed_version == len(names)
    assert lake.snapshot().namespaces() == sorted(names)
    assert unreferenced_paths(lake) == set()


def test_silent_server_times_out(proxy: RedisProxy, root: str) -> None:
    storage = RedisStorage(root, SHORT_TIMEOUTS)
    storage.create("before", b"x")
    proxy.begin(RedisFault("never_respond", lambda _: True, times=None))
    for call, error_type in (
        (lambda: storage.read("before"), TransientError),
        (lambda: storage.create("name", b"x"), UnreachableError),  # the handshake of the new connection times out
    ):
        started_s = time.monotonic()
        with pytest.raises(error_type, match=r"\(timeout\)|Timeout"):
            call()
        assert time.monotonic() - started_s < 3


def test_tls_to_a_port_without_tls_fails_quickly(redis_server: RedisServer) -> None:
    """Five handshakes with the timeout of a response would take two and a half minutes."""
    root = redis_server.fresh_root().replace("redis://", "rediss://")
    for options in ({}, {"cluster": "true"}):
        storage = open_storage(root, {"connect_timeout_seconds": "1", "read_timeout_seconds": "300", **options})
        for _ in range(3):  # a line-based server responds if part of the handshake looks like a line
            with pytest.raises(StorageError, match=r"redis://") as caught:
                storage.read("name")
            assert not isinstance(caught.value, TransientError), "the error must not be retried"


class LineServer(threading.Thread):
    """Behaves like Redis if no byte of a TLS handshake is a line break, and records the lines that it receives."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lines: list[bytes] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._respond, args=(connection,), daemon=True).start()

    def _respond(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):  # the client may disconnect
            while data := connection.recv(4096):
                if data.startswith(b"PING"):
                    self.lines.append(data)
                    connection.sendall(b"-NOAUTH Authentication required.\r\n")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join(10)


def test_port_without_tls_is_detected_by_a_plain_probe() -> None:
    server = LineServer()
    try:
        secret = {"username": "user", "password": "secret-of-this-test"}
        storage = RedisStorage(
            f"rediss://127.0.0.1:{server.port}/0/lake/", {"connect_timeout_seconds": "0.3", **secret}
        )
        with pytest.raises(StorageError) as caught:
            storage.read("name")
        assert not isinstance(caught.value, TransientError)
        assert server.lines == [b"PING\r\n"], "no credentials were sent in plain text"
    finally:
        server.close()


def test_handshake_without_a_response_is_transient() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        root = f"rediss://127.0.0.1:{listener.getsockname()[1]}/0/lake/"
        with pytest.raises(UnreachableError):
            RedisStorage(root, {"connect_timeout_seconds": "0.3"}).read("name")


def test_unreachable_server_fails_quickly(tmp_path: Path) -> None:
    storage = RedisStorage(f"redis://127.0.0.1:{free_port()}/0/lake/", SHORT_TIMEOUTS)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        silent_storage = RedisStorage(f"redis://127.0.0.1:{listener.getsockname()[1]}/0/lake/", SHORT_TIMEOUTS)
        unknown_host_storage = RedisStorage("redis://no-such-host.invalid/0/lake/", SHORT_TIMEOUTS)
        for unreachable_storage in (storage, silent_storage, unknown_host_storage):
            started_s = time.monotonic()
            for call in (
                lambda unreachable_storage=unreachable_storage: unreachable_storage.read("a"),
                lambda unreachable_storage=unreachable_storage: unreachable_storage.create("a", b"x"),
            ):
                with pytest.raises(UnreachableError):
                    call()
            assert time.monotonic() - started_s < 5


# Rejections


@pytest.mark.parametrize(
    ("reply", "error_type"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", StorageFullError),
        ("ERR Error running script (call to f_0): @user_script:3: -OOM command not allowed", StorageFullError),
        ("MISCONF Errors writing to the AOF file: No space left on device", StorageFullError),
        ("MISCONF Redis is configured to save RDB snapshots, but cannot persist", StorageError),
        ("READONLY You can't write against a read only replica.", TransientError),
        ("NOREPLICAS Not enough good replicas to write.", TransientError),
        ("LOADING Redis is loading the dataset in memory", TransientError),
        ("MASTERDOWN Link with MASTER is down", TransientError),
        ("CLUSTERDOWN The cluster is down", TransientError),
        ("TRYAGAIN Multiple keys request during rehashing of slot", TransientError),
        ("BUSY Redis is busy running a script.", ThrottledError),
        ("NOPERM this user has no permissions to run the 'eval' command", StoragePermissionError),
        ("NOAUTH Authentication required.", StoragePermissionError),
        ("MOVED 3999 127.0.0.1:1", StorageError),
        ("ERR something else", StorageError),
    ],
)
def test_each_error_response_maps_to_its_error(
    proxy: RedisProxy, root: str, reply: str, error_type: type[StorageError]
) -> None:
    storage = RedisStorage(root)
    storage.write("existing", b"x")
    for matches, call in (
        (is_create, lambda: storage.create("name", b"x")),
        (is_read, lambda: storage.read("existing")),
    ):
        proxy.begin(RedisFault("respond", matches, error=b"-" + reply.encode() + b"\r\n"))
        with pytest.raises(error_type) as caught:
            call()
        assert type(caught.value) is error_type
        assert "\n" not in str(caught.value)
        call()  # the connection is usable, without an unread response
        proxy.begin()
    assert storage.read("name") == b"x"


def test_error_of_a_cluster_node_names_the_option(proxy: RedisProxy, root: str) -> None:
    proxy.begin(RedisFault("respond", is_read, error=b"-MOVED 3999 127.0.0.1:1\r\n"))
    with pytest.raises(StorageError, match="'cluster=true'"):
        RedisStorage(root).read("name")
    with pytest.raises(StorageError, match="'cluster'"):
        RedisStorage(root, {"cluster": "true"}).read("name")


def test_wrong_credentials_and_missing_permissions_are_reported(
    redis_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(RedisServer("redis", redis_folder)) as server:
        server.admin.acl_setuser("reader", enabled=True, passwords=["+read-word"], keys=["*"],
                                 commands=["+@all", "-@write", "+eval", "-set"])  # fmt: skip
        server.admin.acl_setuser("partial-writer", enabled=True, passwords=["+partial-word"], keys=["*"],
                                 commands=["+@all", "-set"])  # fmt: skip
        root = server.fresh_root()
        RedisStorage(root).create("name", b"x")
        reader = RedisStorage(root, {"username": "reader", "password": "read-word"})
        assert reader.read("name") == b"x"
        assert [file.path for file in reader.list()] == ["name"]
        for change in (lambda: reader.create("new", b"x"), lambda: reader.delete("name")):
            with pytest.raises(StoragePermissionError):
                change()
        partial_writer = RedisStorage(root, {"username": "partial-writer", "password": "partial-word"})
        for change in (lambda: partial_writer.create("new", b"x"), lambda: partial_writer.write("name", b"y")):
            with pytest.raises(StoragePermissionError):
                change()
        info = RedisStorage(root).stat("name")
        assert list(RedisStorage(root).list()) == [info], "a failed script has no effect"
        assert info.size_bytes == 1
        for options in (
            {"username": "reader", "password": "canary-word"},
            {"username": "unknown", "password": "canary-word"},
        ):
            with pytest.raises(StoragePermissionError) as caught:
                RedisStorage(root, options).read("name")
            assert "canary-word" not in str(caught.value)
        server.admin.config_set("requirepass", "default-word")
        with pytest.raises(StoragePermissionError):
            RedisStorage(root).read("name")
        monkeypatch.setenv("REDIS_PASSWORD", "default-word")
        assert RedisStorage(root).read("name") == b"x"


def test_missing_database_is_reported(redis_server: RedisServer) -> None:
    root = redis_server.fresh_root().replace("/0/", "/99/")
    with pytest.raises(StorageError) as caught:
        RedisStorage(root).create("name", b"x")
    assert type(caught.value) is StorageError


def test_databases_and_names_are_separate_and_folders_are_shared(redis_server: RedisServer) -> None:
    root = redis_server.fresh_root()
    RedisStorage(root).create("folder/name", b"x")
    assert RedisStorage(f"{root}folder/").read("name") == b"x"
    assert [file.path for file in RedisStorage(f"{root}folder/").list()] == ["name"]
    for other in (root.replace("/0/", "/1/"), redis_server.fresh_root()):
        with pytest.raises(FileMissingError):
            RedisStorage(other).read("folder/name")


def test_full_server_rejects_writes_and_accepts_deletes(redis_folder: Path) -> None:
    with running(RedisServer("redis", redis_folder, (*DURABLE, "--maxmemory", "8mb"))) as server:
        storage = RedisStorage(server.fresh_root())
        names: list[str] = []
        with pytest.raises(StorageFullError):
            for number in range(100):
                storage.create(f"{number:03}", bytes(1 << 20))
                names.append(f"{number:03}")
        assert names
        with pytest.raises(StorageFullError):
            storage.write(names[0], bytes(2 << 20))
        assert sorted(file.path for file in storage.list()) == names, (
            "each listed file has content, and no file is lost"
        )
        assert all(storage.read(name) == bytes(1 << 20) for name in names)
        storage.delete_batch(names[1:])
        storage.create("after", b"x")


def test_too_many_clients_are_reported(redis_folder: Path) -> None:
    with running(RedisServer("redis", redis_folder)) as server:
        server.admin.config_set("maxclients", 1)
        with pytest.raises((ThrottledError, UnreachableError)):
            RedisStorage(server.fresh_root()).read("name")


def test_invalid_index_is_reported(redis_server: RedisServer) -> None:
    root = redis_server.fresh_root()
    storage = RedisStorage(root)
    redis_server.admin.zadd(f"{{{root.split('/')[4]}}}", {"foreign": 0})
    with pytest.raises(StorageError):
        list(storage.list())
    redis_server.admin.delete(f"{{{root.split('/')[4]}}}")
    redis_server.admin.set(f"{{{root.split('/')[4]}}}", "not an index")
    with pytest.raises(StorageError):
        storage.create("name", b"x")
    with pytest.raises(FileMissingError):
        storage.read("name")


# Processes and clusters


def test_forked_child_opens_new_connections(redis_server: RedisServer) -> None:
    storage = open_storage(redis_server.fresh_root())
    storage.create("parent", b"x")
    with storage.inner._lock:  # type: ignore[attr-defined]  # as if another thread held the lock

        def work(report: object) -> None:
            assert storage.read("parent") == b"x"
            storage.create(f"child-{os.getpid()}", b"y")

        child = fork(work)
        for _ in range(50):
            assert storage.read("parent") == b"x"
    assert child.finish()[0] == 0
    assert storage.exists(f"child-{child.pid}")


def test_cluster_redirects_are_followed(redis_folder: Path) -> None:
    with running_cluster(redis_folder) as nodes:
        root = nodes[0].fresh_root()
        lake = Lakehouse.create(root, {"cluster": "true"})
        slot = int(nodes[0].admin.execute_command("CLUSTER KEYSLOT", f"{{{root.split('/')[4]}}}"))
        (owner,) = [node for node in nodes if node.admin.execute_command("CLUSTER COUNTKEYSINSLOT", slot)]
        target = next(node for node in nodes if node is not owner)
        ids = {node.port: node.admin.execute_command("CLUSTER MYID").decode() for node in nodes}
        with lake.transaction() as txn:
            txn.create_namespace("before")
        target.admin.execute_command(f"CLUSTER SETSLOT {slot} IMPORTING {ids[owner.port]}")
        owner.admin.execute_command(f"CLUSTER SETSLOT {slot} MIGRATING {ids[target.port]}")
        assert lake.snapshot().namespaces() == ["before"]
        while keys := owner.admin.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            owner.admin.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        assert lake.snapshot().namespaces() == ["before"], "the request is redirected to the new node"
        for node in (target, owner, *nodes):
            node.admin.execute_command(f"CLUSTER SETSLOT {slot} NODE {ids[target.port]}")
        with lake.transaction() as txn:
            txn.create_namespace("after")
        assert Lakehouse.open(root, {"cluster": "true"}).snapshot().namespaces() == ["after", "before"]
        with pytest.raises(FileExistsAlreadyError):
            storage = RedisStorage(root, {"cluster": "true"})
            storage.create(next(iter(storage.list())).path, b"x")


def test_documented_permissions_suffice(redis_folder: Path) -> None:
    reader = ["eval", "time", "exists", "strlen", "get", "getrange", "zrangebylex", "select"]
    writer = [*reader, "set", "unlink", "zadd", "zrem", "info", "config|get"]
    with running(RedisServer("redis", redis_folder)) as server:
        for user, commands in (("reader", reader), ("writer", writer)):
            server.admin.acl_setuser(
                user, enabled=True, passwords=["+word"], keys=["{lake}*"], commands=[f"+{name}" for name in commands]
            )
        root = f"redis://127.0.0.1:{server.port}/1/lake/"
        as_writer, as_reader = ({"username": user, "password": "word"} for user in ("writer", "reader"))
        lake = Lakehouse.create(root, as_writer)
        with lake.transaction() as txn:
            txn.create_namespace("a")
        lake.storage.delete_many(["missing"])
        reader_lake = Lakehouse.open(root, as_reader)
        assert reader_lake.snapshot().namespaces() == ["a"]
        assert reader_lake.storage.stat(next(iter(reader_lake.storage.list())).path).size_bytes > 0
        with pytest.raises(StoragePermissionError):
            reader_lake.storage.create("name", b"x")
        with pytest.raises(StoragePermissionError):
            RedisStorage(root.replace("lake", "other"), as_reader).read("name")


def test_cluster_fails_over_to_a_replica(redis_folder: Path) -> None:
    with running_cluster(redis_folder) as nodes:
        root = nodes[0].fresh_root()
        slot = int(nodes[0].admin.execute_command("CLUSTER KEYSLOT", f"{{{root.split('/')[4]}}}"))
        ids = {node.port: node.admin.execute_command("CLUSTER MYID").decode() for node in nodes}
        owner = nodes[slot * len(nodes) // 16_384]
        replica = add_replica(nodes, ids[owner.port], redis_folder / "replica")
        try:
            options = {**SHORT_TIMEOUTS, "cluster": "true", "wait_replicas": "1"}
            lake = Lakehouse.create(root.replace(str(nodes[0].port), str(replica.port)), options)
            with lake.transaction() as txn:
                txn.create_namespace("before")
            owner.kill()
            with pytest.raises(TransientError):
                RedisStorage(lake.root, options).read("name")
            replica.admin.execute_command("CLUSTER FAILOVER TAKEOVER")
            alive = [replica, *(node for node in nodes if node is not owner)]
            wait_until(lambda: all(primary_port(slot, node) == replica.port for node in alive))
            wait_until(lambda: all(is_complete(node, len(nodes) + 1) for node in alive))
            assert lake.snapshot().namespaces() == ["before"]
            assert Lakehouse.open(lake.root, options).snapshot().namespaces() == ["before"]
            with pytest.raises(TransientError):
                RedisStorage(lake.root, options).create("name", b"x")
        finally:
            replica.kill()


def primary_port(slot: int, node: RedisServer) -> int | None:
    """Return the port of a slot's primary according to a node of the cluster."""
    for first, last, primary, *_ in node.admin.execute_command("CLUSTER SLOTS"):  # type: ignore[union-attr]
        if first <= slot <= last:
            return int(primary[1])
    return None


def add_replica(nodes: list[RedisServer], primary_id: str, folder: Path) -> RedisServer:
    """Add a replica of one of the primaries to a cluster and return it."""
    replica = RedisServer("redis", folder, (*nodes[0].settings[:-1], str(free_port()))).start()
    bus = nodes[0].settings[-1]
    replica.admin.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port, bus)

    def knows_all() -> bool:
        cluster_infos = [node.admin.execute_command("CLUSTER INFO") for node in (*nodes, replica)]
        return all(int(cluster_info["cluster_known_nodes"]) == len(nodes) + 1 for cluster_info in cluster_infos)  # type: ignore[index]

    wait_until(knows_all)
    wait_until(lambda: primary_id.encode() in str(replica.admin.execute_command("CLUSTER NODES")).encode())
    replica.admin.execute_command("CLUSTER REPLICATE", primary_id)
    wait_until(lambda: replica.admin.info("replication").get("master_link_status") == "up")
    return replica
