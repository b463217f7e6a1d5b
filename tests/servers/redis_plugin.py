"""Fixtures ``redis_server`` and ``valkey_server``: started once in each worker that needs them, gone with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers.redis import DURABLE, Kind, RedisServer, running

#: Fixtures whose tests need Debian's redis-server.
_OF_DEBIAN = {"redis_server", "redis_folder"}
#: Tests delete nothing, so that memory bounds what a run may leave.
_MEMORY = ("--maxmemory", "3gb")


@contextmanager
def _kept_in_folder(kind: Kind) -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix=f"trinitylake-{kind}-"))
    try:
        with running(RedisServer(kind, folder, (*DURABLE, *_MEMORY))) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _redis_of_run() -> Iterator[RedisServer]:
    with _kept_in_folder("redis") as server:
        yield server


@pytest.fixture(scope="session")
def _valkey_of_run() -> Iterator[RedisServer]:
    with _kept_in_folder("valkey") as server:
        yield server


@pytest.fixture
def redis_server(_redis_of_run: RedisServer) -> RedisServer:
    """Debian's Redis, which syncs each write; tests that use it are marked ``debian_packages``."""
    return _redis_of_run


@pytest.fixture
def valkey_server(_valkey_of_run: RedisServer) -> RedisServer:
    """Valkey, which syncs each write."""
    return _valkey_of_run


@pytest.fixture
def redis_folder(tmp_path: Path) -> Path:
    """A folder for servers of Debian's Redis that a test starts itself."""
    return tmp_path / "redis"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests on Debian's Redis."""
    for item in items:
        if isinstance(item, pytest.Function) and not _OF_DEBIAN.isdisjoint(item.fixturenames):
            item.add_marker(pytest.mark.debian_packages)
