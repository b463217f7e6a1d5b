"""Durability checks before the first write, for each setting of a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.redis_proxy import RedisProxy
from tests.servers.redis import RedisServer, running
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileMissingError,
    StorageError,
    StoragePermissionError,
    TransientError,
)
from trinitylake_ops.storage.conditional_create import create_settled
from trinitylake_ops.storage.redis.storage import RedisStorage

EVERY_SECOND = ("--appendonly", "yes", "--appendfsync", "everysec")


@contextmanager
def rejecting(
    server: RedisServer, message: str, error_type: type[StorageError] = StorageError
) -> Iterator[dict[str, str]]:
    """Yield options to fill in. Then assert that writes with these options are rejected and that reads work."""
    options: dict[str, str] = {}
    yield options
    storage = RedisStorage(server.fresh_root(), options)
    with pytest.raises(FileMissingError):
        storage.read("name")
    for change in (storage.create, storage.write):
        with pytest.raises(error_type, match=message) as caught:
            change("name", b"x")
        assert type(caught.value) is error_type
        assert "nothing was written" in str(caught.value)
    assert list(storage.list()) == []
    assert server.admin.dbsize() == 0


@pytest.fixture
def server(redis_folder: Path) -> Iterator[RedisServer]:
    with running(RedisServer("redis", redis_folder)) as server:
        yield server


def test_each_unsafe_server_setting_is_rejected(server: RedisServer) -> None:
    settings = [
        ("appendonly", "no", "yes", r"has no append-only file \('appendonly no'\).*'volatile=true'"),
        ("appendfsync", "everysec", "always", r"'appendfsync everysec'.*'durability=waitaof'"),
        ("appendfsync", "no", "always", "'appendfsync no'"),
        ("no-appendfsync-on-rewrite", "yes", "no", "does not sync while it rewrites"),
        ("maxmemory-policy", "allkeys-lru", "noeviction", "may evict any key .*allkeys-lru"),
    ]
    for name, unsafe_value, safe_value, message in settings:
        server.admin.config_set(name, unsafe_value)
        with rejecting(server, message):
            pass
        root = server.fresh_root()
        with pytest.raises(StorageError, match=message):
            Lakehouse.create(root)
        assert list(RedisStorage(root).list()) == []
        RedisStorage(server.fresh_root(), {"volatile": "true"}).create("name", b"accepted by the operator")
        server.admin.flushall()
        server.admin.config_set(name, safe_value)
    RedisStorage(server.fresh_root()).create("name", b"x")


def test_everysec_accepts_a_server_that_syncs_each_second(redis_folder: Path) -> None:
    with running(RedisServer("redis", redis_folder, EVERY_SECOND)) as server:
        RedisStorage(server.fresh_root(), {"durability": "everysec"}).create("name", b"x")
        RedisStorage(server.fresh_root(), {"durability": "assured"}).create("name", b"x")
        server.admin.flushall()
        if server.admin.execute_command("COMMAND INFO", "waitaof")[0] is not None:  # emulate a server before 7.2
            server.kill()
            server.settings = (*EVERY_SECOND, "--rename-command", "WAITAOF", "")
            server.start()
        with rejecting(server, "WAITAOF") as options:
            options["durability"] = "waitaof"
        server.admin.config_set("maxmemory-policy", "allkeys-random")
        with rejecting(server, "may evict any key") as options:
            options["durability"] = "assured"


def test_server_without_permission_to_read_settings_is_rejected(server: RedisServer) -> None:
    server.admin.acl_setuser("writer", enabled=True, passwords=["+word"], keys=["*"], commands=["+@all", "-config"])
    as_writer = {"username": "writer", "password": "word"}
    message = r"may not read the durability settings .*\(CONFIG GET\).*'durability=everysec'"
    with rejecting(server, message, StoragePermissionError) as options:
        options.update(as_writer)
    RedisStorage(server.fresh_root(), {**as_writer, "durability": "everysec"}).create("name", b"INFO is enough")
    server.admin.flushall()
    server.admin.acl_setuser("writer", enabled=True, commands=["+@all", "-config", "-info"])
    with rejecting(server, r"\(INFO\)", StoragePermissionError) as options:
        options.update(as_writer, durability="assured")
    RedisStorage(server.fresh_root(), {**as_writer, "volatile": "true"}).create("name", b"no settings are read")


def test_durability_check_sends_one_request_per_connection(server: RedisServer) -> None:
    with RedisProxy(server.port) as proxy:
        storage = RedisStorage(f"redis://127.0.0.1:{proxy.port}/0/lake/")
        storage.create("0", b"x")
        assert proxy.names() == ["HELLO", "INFO", "INFO", "INFO", "CONFIG", "EVAL"]
        proxy.begin()
        for number in range(1, 20):
            storage.create(str(number), b"x")
            storage.write(str(number), b"y")
        assert proxy.names() == ["EVAL"] * 38
        proxy.close_connections()
        proxy.begin()
        assert storage.read("7") == b"y"
        assert proxy.names() == ["HELLO", "EVAL"], "a reader needs no permission to read settings"


def test_changed_durability_settings_are_detected_after_reconnect(server: RedisServer) -> None:
    storage = RedisStorage(server.fresh_root())
    storage.create("old", b"x")
    server.kill()
    server.settings = EVERY_SECOND
    server.start()
    with pytest.raises(StorageError, match="'appendfsync everysec'"):
        storage.create("new", b"x")
    assert [file.path for file in storage.list()] == ["old"]


def test_waitaof_makes_valkey_durable(tmp_path: Path) -> None:
    with running(RedisServer("valkey", tmp_path / "valkey", EVERY_SECOND)) as server, RedisProxy(server.port) as proxy:
        storage = RedisStorage(f"redis://127.0.0.1:{proxy.port}/0/lake/", {"durability": "waitaof"})
        storage.create("first", b"x")
        proxy.begin()
        storage.create("second", b"x")
        storage.write("second", b"y")
        assert proxy.names() == ["EVAL", "WAITAOF"] * 2
        proxy.begin()
        assert storage.read("second") == b"y"
        assert proxy.names() == ["EVAL"]


def test_unconfirmed_file_is_confirmed_before_it_is_read(tmp_path: Path) -> None:
    """Reading a name back decides whether an ambiguous create succeeded, so the read also waits."""
    with running(RedisServer("valkey", tmp_path / "valkey", EVERY_SECOND)) as server:
        server.admin.config_set("appendfsync", "no")  # disables syncs
        root = server.fresh_root()
        storage = RedisStorage(root, {"durability": "waitaof", "read_timeout_seconds": "1"})
        with pytest.raises(AmbiguousWriteError):
            storage.create("name", b"x")
        with pytest.raises(AmbiguousWriteError):
            create_settled(storage, "name", b"x", is_ours=lambda content: content == b"x")
        with pytest.raises(TransientError):
            storage.read("name")
        assert RedisStorage(root).read("name") == b"x", "the file is readable without confirmation"
        server.admin.config_set("appendfsync", "always")
        assert create_settled(storage, "name", b"x", is_ours=lambda content: content == b"x")
        server.admin.config_set("appendfsync", "no")
        assert storage.read("name") == b"x", "the file is confirmed only once"


def test_too_few_replicas_are_detected_before_the_write(server: RedisServer) -> None:
    with rejecting(
        server, "has 0 replicas at the moment, and the option 'wait_replicas' requires 1", TransientError
    ) as options:
        options["wait_replicas"] = "1"
