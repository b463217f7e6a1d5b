"""The contract on a real HDFS server, with ``open_storage``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.hdfs import SUPERUSER, HdfsServer
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import StorageContract


class HdfsContract(StorageContract):
    """A separate folder for each test, deleted after the test."""

    refused_names = frozenset({"a:b"})  # no name in HDFS has a colon
    n_passing_files = 10
    n_listed_files = 250  # the test servers return 100 names at a time
    fsync = "true"

    @pytest.fixture(autouse=True)
    def hdfs_root(self, hdfs: HdfsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        monkeypatch.setenv("HADOOP_USER_NAME", SUPERUSER)
        self._root = hdfs.fresh_root()
        yield self._root
        hdfs.delete_all(self._root)

    def make_storage(self, folder: Path) -> Storage:
        return open_storage(self._root, {"fsync": self.fsync})


class TestHdfsWithoutFsync(HdfsContract):
    fsync = "false"


@pytest.mark.soak  # tests/storage/test_hdfs.py covers the default, with fsync
class TestHdfsWithFsync(HdfsContract):
    fsync = "true"
