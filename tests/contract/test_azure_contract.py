"""The contract on Azurite: with ``open_storage``, for roots with and without an account name.

Azurite stores names that Azure changes. The storage rejects these names, so that both behave the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.azurite import AzureServer
from trinitylake_ops.storage import Storage, open_storage
from trinitylake_ops.storage.azure import blob_storage
from trinitylake_ops.storage.contract.suite import StorageContract


class AzureContract(StorageContract):
    """A separate prefix for each test, deleted after the test."""

    time_precision_ms = 1000
    # Azure treats "\" as "/", rejects control characters, and drops trailing dots of a segment.
    refused_names = frozenset({"back\\slash", "new\nline", "tab\t", "a..", "..."})
    n_passing_files = 20
    n_listed_files = 250
    scheme = ""

    @pytest.fixture(autouse=True)
    def azure_root(self, azurite: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        monkeypatch.setattr(blob_storage, "MAX_NAMES_PER_PAGE", 100)  # Azure returns up to 5,000
        self._server = azurite
        self._root = azurite.fresh_root(scheme=self.scheme)
        yield self._root
        azurite.delete_all(self._root)

    def make_storage(self, folder: Path) -> Storage:
        return open_storage(self._root, self._server.storage_options)


class TestWithAccount(AzureContract):
    scheme = "abfss"


@pytest.mark.soak  # the other tests of Azure use both kinds of roots
class TestWithoutAccount(AzureContract):
    scheme = "az"
