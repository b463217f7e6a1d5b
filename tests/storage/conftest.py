"""A local folder, and the storage in it, for tests that make none of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinitylake_ops.storage import LocalStorage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def storage(folder: Path) -> LocalStorage:
    return LocalStorage(f"file://{folder}/")
