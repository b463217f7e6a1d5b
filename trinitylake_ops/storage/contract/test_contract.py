"""The contract, run on the storage that the option ``--storage`` selects."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.contract.plugin import FACTORY
from trinitylake_ops.storage.contract.suite import StorageContract


class TestStorage(StorageContract):
    """The contract. Attributes of the factory, for example ``time_precision_ms``, override class attributes."""

    @pytest.fixture(autouse=True)
    def factory(self, request: pytest.FixtureRequest) -> None:
        """Use the factory, and apply its attributes."""
        self._factory = request.config.stash[FACTORY]
        for name in ("time_precision_ms", "n_passing_files", "n_listed_files"):
            setattr(self, name, getattr(self._factory, name, getattr(StorageContract, name)))

    def make_storage(self, folder: Path) -> Storage:
        return self._factory(folder)
