"""Verify: sound lakehouses have no findings, every damage has one at the right path, and none makes it fail."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clock import ClockStorage
from tests.faults import FaultyStorage
from tests.lakes import DATA, Lakes, local_storage, table
from tests.maintenance.changes import (
    append_rows,
    create,
    drop,
    flip,
    node_bytes,
    node_columns,
    seal,
    small_sizes,
    truncate,
)
from tests.maintenance.test_export import cut_off
from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.errors import LakehouseNotFoundError
from trinitylake_ops.format.definitions import ExportState
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path, root_path
from trinitylake_ops.maintenance import Finding
from trinitylake_ops.storage import MemoryStorage, drop_memory_root
from trinitylake_ops.tables.file_io import StorageFileIO
from trinitylake_ops.tables.reach import FileKind, files_of

LATEST = 5
EXPORT = "kept"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file of a sound lakehouse of several levels, with a table of two snapshots and an export of version 3."""
    root = "memory://verify-base/"
    storage = MemoryStorage(root)
    lake = Lakehouse.create(root, storage=storage, order=3, **small_sizes(3))
    with lake.transaction(message="m" * 3_400) as txn:
        txn.create_namespace("big")
        for number in range(12):
            txn.create_table("big", f"t{number}", table())
    storage.delete(HINT_PATH)
    append_rows(lake)
    append_rows(lake)
    assert lake.latest_version() == LATEST
    maintenance.plan_export(lake, EXPORT, version=3).execute()
    found = {info.path: storage.read(info.path) for info in storage.list()}
    drop_memory_root(root)
    return found


@pytest.fixture
def damaged(files: dict[str, bytes], tmp_path: Path) -> Lakehouse:
    """A copy of it, to be damaged."""
    storage = local_storage(tmp_path / "lake")
    for path, data in files.items():
        storage.create(path, data)
    return Lakehouse(storage)
