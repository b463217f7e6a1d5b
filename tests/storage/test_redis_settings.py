"""Roots and options of Redis: validation, and messages without credentials."""

from __future__ import annotations

import pickle

import pytest

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError, StorageError
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.options import StorageOptions, redact_assignments
from trinitylake_ops.storage.redis.server import ServerClock
from trinitylake_ops.storage.redis.settings import MAX_PATH_BYTES, RedisLocation, RedisSettings
from trinitylake_ops.storage.redis.storage import RedisStorage

ROOT = "redis://host:6380/3/lake/below/"


def settings(root: str = "redis://host/0/lake/", **options: str) -> RedisSettings:
    return RedisSettings.of(StorageOptions(options), RedisLocation.of(root))


def test_root_is_split_into_its_parts() -> None:
    location = RedisLocation.of(ROOT)
    assert (location.host, location.port, location.database, location.name, location.folder, location.is_tls) == (
        "host", 6380, 3, "lake", "below/", False,
    )  # fmt: skip
    assert location.index_key == b"{lake}"
    assert location.content_key(location.member_path("a/b")) == b"{lake}/below/a/b"
    assert RedisLocation.of("rediss://[::1]/0/lake/").address == "::1:6379"
    assert RedisLocation.of("rediss://[::1]/0/lake/").is_tls


@pytest.mark.parametrize(
    "root",
    [
        "redis://host/", "redis://host/0/", "redis://host:0/0/lake/", "redis://host:65536/0/lake/",
        "redis://host/00/lake/", "redis://host/x/lake/", "redis://host/0/la{ke}/", "redis://host/0?prefix=lake/",
        "redis://host/0/lake?prefix=x/", "redis://:hidden@host/0/lake/", "redis://user:hidden@host/0/lake/",
        "redis://hidden@host:1/0/lake/", "redis:///0/lake/", f"redis://host/0/{'n' * 65}/",
    ],
)  # fmt: skip
def test_invalid_roots_are_not_shown(root: str) -> None:
    with pytest.raises(InvalidLocationError, match=r"redis://HOST:PORT/DB/NAME/") as caught:
        open_storage(root)
    assert "hidden" not in str(caught.value)


def test_normalization_appends_a_slash_to_a_query() -> None:
    """The prefix of a root is therefore part of its path instead of a query."""
    assert normalize_root_uri("redis://host/0?prefix=lake") == "redis://host/0?prefix=lake/"
    assert normalize_root_uri("redis://host:6379/0/lake") == "redis://host:6379/0/lake/"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durability": "never"}, "must be one of always, waitaof, everysec, assured"),
        ({"volatile": "yes"}, "must be 'true' or 'false'"),
        ({"volatile": "true", "durability": "always"}, "exclude each other"),
        ({"wait_replicas": "1.5"}, "must be a whole number"),
        ({"wait_replicas": "-1"}, "must be a whole number from 0 to 1000"),
        ({"username": "user"}, "requires a password"),
        ({"password": ""}, "is empty"),
        ({"tls_ca_file": "/ca.pem"}, "use the scheme rediss://"),
        ({"read_timeout_seconds": "0"}, "must be a number from 0.001"),
        ({"region": "here"}, "unknown storage option 'region'"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_storage("redis://host/0/lake/", options)


def test_cluster_requires_database_0() -> None:
    with pytest.raises(InvalidInputError):
        settings("redis://host/1/lake/", cluster="true")
    assert settings(cluster="true").cluster


def test_credentials_come_from_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_USERNAME", "environment-user")
    monkeypatch.setenv("REDIS_PASSWORD", "hidden-there")
    assert (settings().username, settings().password) == ("environment-user", "hidden-there")
    assert (settings(password="option").username, settings(password="option").password) == (None, "option")
    assert StorageOptions().redact("password hidden-there") == "password ***"


def test_password_is_never_shown() -> None:
    storage = RedisStorage(ROOT, {"username": "me", "password": "hidden-word"})
    assert "hidden-word" not in repr(storage) + repr(storage.options)
    assert "hidden-word" not in redact_assignments("password=hidden-word,username=me")
    assert pickle.loads(pickle.dumps(storage)).options == storage.options


def test_durability_option_sets_the_wait_command() -> None:
    assert settings().wait is None
    assert settings(wait_replicas="2", read_timeout_seconds="10").wait == ("WAIT", 2, 8000)
    assert settings(durability="waitaof", wait_replicas="1", read_timeout_seconds="1").wait == ("WAITAOF", 1, 1, 800)
    assert settings(volatile="true").wait is None


def test_too_long_paths_and_too_large_files_are_rejected() -> None:
    storage = RedisStorage("redis://127.0.0.1:1/0/lake/")
    with pytest.raises(InvalidLocationError, match=f"limit of {MAX_PATH_BYTES} bytes"):
        storage.read("x" * (MAX_PATH_BYTES + 1))

    class Large(bytes):
        def __len__(self) -> int:
            return (512 << 20) + 1

        def __bytes__(self) -> bytes:
            return self

    with pytest.raises(StorageError, match="536870913"):
        storage.create("big", Large())


def test_server_time_is_requested_once_a_minute() -> None:
    local_ms, server_ms, n_requests = 1000.0, 500_000.0, 0

    def request_time() -> float:
        nonlocal n_requests
        n_requests += 1
        return server_ms

    clock = ServerClock(lambda: local_ms)
    assert clock.now_ms(request_time) == 500_000
    local_ms += 30_000
    assert (clock.now_ms(request_time), n_requests) == (529_994, 1), "the clock is never ahead"
    local_ms, server_ms = local_ms + 30_001, 560_500.0
    assert (clock.now_ms(request_time), n_requests) == (560_500, 2)
    server_ms, local_ms = 100_000.0, 1.0  # after a failover to a machine with another clock
    assert (clock.now_ms(request_time), n_requests) == (100_000, 3)
