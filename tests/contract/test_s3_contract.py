"""The contract on S3, for each client: with ``open_storage`` on a real server, and without wrappers on moto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.s3_server import S3Server
from trinitylake_ops.storage import RetryStorage, Storage, open_storage
from trinitylake_ops.storage.contract.suite import ODD_NAMES, StorageContract
from trinitylake_ops.storage.s3.obstore_storage import ObstoreS3Storage
from trinitylake_ops.storage.s3.s3fs_storage import S3Storage


class S3Contract(StorageContract):
    """A separate prefix for each test on the server ``server``, deleted after the test."""

    time_precision_ms = 1000
    n_passing_files = 20
    client = "s3fs"

    @pytest.fixture
    def server(self) -> S3Server:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def s3_root(self, server: S3Server) -> Iterator[str]:
        self._server = server
        self._root = server.fresh_root()
        yield self._root
        server.delete_all(self._root)

    def options(self) -> dict[str, str]:
        return {**self._server.storage_options, "client": self.client}


class OnRadosgw(S3Contract):
    @pytest.fixture
    def server(self, radosgw: S3Server) -> S3Server:
        return radosgw


class OnMoto(S3Contract):
    n_listed_files = 60  # the real server covers the second page, because moto is slow for that many objects

    @pytest.fixture
    def server(self, moto: S3Server) -> S3Server:
        return moto

    # moto finds no object whose name contains a line break; a real server does.
    @pytest.mark.parametrize("name", [name for name in ODD_NAMES if "\n" not in name])
    def test_names_are_literal(self, storage: Storage, name: str) -> None:
        super().test_names_are_literal(storage, name)

    # moto fails some reads with 500 while the object is being replaced; the other responses are complete.
    def test_readers_during_overwrites_see_one_version(self, storage: Storage) -> None:
        super().test_readers_during_overwrites_see_one_version(RetryStorage(storage, attempts=20))


class TestS3fsOnRadosgw(OnRadosgw):
    def make_storage(self, folder: Path) -> Storage:
        return open_storage(self._root, self.options())


class TestObstoreOnRadosgw(OnRadosgw):
    client = "obstore"

    def make_storage(self, folder: Path) -> Storage:
        return open_storage(self._root, self.options())


@pytest.mark.soak  # the real server covers each client
class TestS3fsOnMoto(OnMoto):
    def make_storage(self, folder: Path) -> Storage:
        return S3Storage(self._root, self.options())


@pytest.mark.soak
class TestObstoreOnMoto(OnMoto):
    client = "obstore"

    def make_storage(self, folder: Path) -> Storage:
        return ObstoreS3Storage(self._root, self.options())
