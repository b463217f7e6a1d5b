"""The contract on DynamoDB: with ``open_storage`` on dynalite, and without wrappers on moto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.dynalite import DynamoDBServer
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import StorageContract
from trinitylake_ops.storage.dynamodb.storage import DynamoDBStorage


class DynamoDBContract(StorageContract):
    """A separate root for each test on the server ``server``."""

    n_passing_files = 40

    @pytest.fixture
    def server(self) -> DynamoDBServer:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def dynamodb_root(self, server: DynamoDBServer) -> Iterator[str]:
        self._server = server
        self._root = server.fresh_root()
        yield self._root
        # After the listed files are deleted, no item may remain: no part of a file and no upload.
        storage = open_storage(self._root, server.storage_options)
        assert storage.delete_many([*(file.path for file in storage.list()), *self.temporary_paths(storage)]) == {}
        assert server.item_keys(self._root) == []

    def temporary_paths(self, storage: Storage) -> list[str]:
        return [file.path for file in storage.list("_ops/tmp/")]


class TestOnDynalite(DynamoDBContract):
    @pytest.fixture
    def server(self, dynalite: DynamoDBServer) -> DynamoDBServer:
        return dynalite

    def make_storage(self, folder: Path) -> Storage:
        return open_storage(self._root, self._server.storage_options)


@pytest.mark.soak  # the test on dynalite covers it
class TestOnMoto(DynamoDBContract):
    n_listed_files = 60  # moto reads all items of the table for each response

    @pytest.fixture
    def server(self, moto_dynamodb: DynamoDBServer) -> DynamoDBServer:
        return moto_dynamodb

    def make_storage(self, folder: Path) -> Storage:
        return DynamoDBStorage(self._root, self._server.storage_options)
