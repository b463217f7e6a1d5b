"""Fixtures for a local folder and a storage in it."""

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
