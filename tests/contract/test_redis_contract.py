"""The contract on Redis, on Valkey and on a cluster, with ``open_storage``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.redis import RedisServer, running_cluster
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import StorageContract


class RedisContract(StorageContract):
    """A separate name for each test on the server ``server``, deleted after the test."""

    @pytest.fixture
    def server(self) -> RedisServer:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def redis_root(self, server: RedisServer) -> Iterator[str]:
        self._root = server.fresh_root("parent", "lake")
        yield self._root
        storage = open_storage(self._root, self.options())
        names = [file.path for prefix in ("", "_ops/tmp/") for file in storage.list(prefix)]
        assert storage.delete_many(names) == {}

    def options(self) -> dict[str, str]:
        return {}

    def make_storage(self, folder: Path) -> Storage:
        return open_storage(self._root, self.options())


class TestOnRedis(RedisContract):
    @pytest.fixture
    def server(self, redis_server: RedisServer) -> RedisServer:
        return redis_server


class TestOnValkey(RedisContract):
    @pytest.fixture
    def server(self, valkey_server: RedisServer) -> RedisServer:
        return valkey_server


@pytest.mark.soak  # test_redis_durability.py covers the waits
class TestOnValkeyWithWaits(TestOnValkey):
    """Each request that creates or writes a file waits until the append-only file is synced."""

    def options(self) -> dict[str, str]:
        return {"durability": "waitaof"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes[0]


@pytest.mark.soak  # test_redis_faults.py covers redirects and failovers of clusters
class TestOnCluster(RedisContract):
    @pytest.fixture
    def server(self, cluster: RedisServer, redis_folder: Path) -> RedisServer:
        return cluster

    def options(self) -> dict[str, str]:
        return {"cluster": "true"}
