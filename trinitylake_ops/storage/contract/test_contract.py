"""The contract on the storage that ``--storage`` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.contract.plugin import FACTORY
from trinitylake_ops.storage.contract.suite import StorageContract


class TestStorage(StorageContract):
    """A class attribute that the factory has, such as ``time_precision_ms``, takes the place of the contract's."""

    @pytest.fixture(autouse=True)
    def factory(self, request: pytest.FixtureRequest) -> None:
        """Take the factory, and what it says about the storage."""
        self._factory = request.config.stash[FACTORY]
        for name in ("time_precision_ms", "n_passing_files", "n_listed_files"):
            setattr(self, name, getattr(self._factory, name, getattr(StorageContract, name)))

    def make_storage(self, folder: Path) -> Storage:
        return self._factory(folder)
