"""The contract on an emulator of Google Cloud Storage: with ``open_storage``, and without wrappers.

The emulator, fake-gcs-server, enforces ``ifGenerationMatch`` for multipart uploads, the only kind that the storage
sends, but ignores it for plain uploads. It accepts names with line breaks, which the service rejects, so the
storage always rejects them itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.gcs import GcsServer
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.contract.suite import StorageContract
from trinitylake_ops.storage.gcs.storage import GcsStorage


class OnFakeGcs(StorageContract):
    """A separate prefix for each test, deleted after the test."""

    time_precision_ms = 1000
    n_passing_files = 40
    refused_names = frozenset({"new\nline"})

    @pytest.fixture(autouse=True)
    def gcs_root(self, fake_gcs: GcsServer) -> Iterator[str]:
        self._server = fake_gcs
        self._root = fake_gcs.fresh_root()
        yield self._root
        fake_gcs.delete_all(self._root)


class TestGcs(OnFakeGcs):
    def make_storage(self, folder: Path) -> Storage:
        return open_storage(self._root, self._server.storage_options)


@pytest.mark.soak  # the same tests without retries
class TestBareGcs(OnFakeGcs):
    def make_storage(self, folder: Path) -> Storage:
        return GcsStorage(self._root, self._server.storage_options)
