"""Create lakehouses in folders with old timestamps, so that another process finds versions to expire or purge."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.clock import AgingStorage
from tests.lakes import table
from tests.operations.aging import DAY_MS, keeping
from tests.operations.changes import create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.storage import LocalStorage

_CREATED_DAYS_AGO, _EXPIRED_DAYS_AGO = 40, 30


def aged_lakehouse(folder: Path, *, n_versions: int, n_tables: int = 1, is_expired: bool) -> Lakehouse:
    """Create a lakehouse with versions that are older than its settings retain.

    Each version alters all tables, so that it writes a file for each of them. With ``is_expired``, all versions but the
    latest are expired.
    """
    storage = LocalStorage(f"file://{folder}/", fsync=False)
    clock = AgingStorage(storage, _days_ago_ms(_CREATED_DAYS_AGO))
    lake = Lakehouse.create(storage.root, storage=clock, maximum_version_age_millis=DAY_MS, minimum_versions_to_keep=1)
    names = [f"t{number}" for number in range(n_tables)]
    create(lake, "ns", *names)
    for version in range(n_versions):
        alter_all(lake, names, version)
    clock.time_ms = _days_ago_ms(_EXPIRED_DAYS_AGO)
    if is_expired:
        operations.plan_expiration(lake, keeping(1)).execute()
    else:
        alter_all(lake, names, n_versions)
    for path, written_ms in clock.written_ms.items():
        if (folder / path).exists():
            os.utime(folder / path, (written_ms / 1000, written_ms / 1000))
    return Lakehouse(storage)


def alter_all(lake: Lakehouse, names: list[str], version: int) -> None:
    with lake.transaction() as txn:
        for name in names:
            txn.alter_table("ns", name, table(version=str(version)))


def _days_ago_ms(days: int) -> int:
    return time.time_ns() // 1_000_000 - days * DAY_MS
