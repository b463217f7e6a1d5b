"""Lakehouses with table roots, whose storages share a simulated clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.clock import AgingStorage
from tests.lakes import Lakes, listed
from tests.operations.aging import Aging
from trinitylake_ops import Lakehouse
from trinitylake_ops.access import external_files
from trinitylake_ops.access.allowed_roots import FileAddress
from trinitylake_ops.access.table_owners import TableUser
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.iceberg.managed import claim_folder
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.storage import Storage, open_storage

#: The id of a table that no version defines.
NEW_ID = "00000000-0000-4000-8000-00000000000a"


class _SharedClockStorage(AgingStorage):
    """A storage that uses the clock of another storage."""

    def __init__(self, inner: Storage, clock: AgingStorage, written_ms: dict[str, int]):
        self._clock = clock
        super().__init__(inner, clock.time_ms)
        self.written_ms = written_ms

    @property
    def time_ms(self) -> int:
        return self._clock.time_ms

    @time_ms.setter
    def time_ms(self, time_ms: int) -> None:
        self._clock.time_ms = time_ms


@dataclass
class TableRoots:
    """Create lakehouses with a table root. The storages of table roots use the clock of the first lakehouse."""

    lakes: Lakes
    clocks: list[AgingStorage]

    def root(self, name: str = "tables") -> str:
        """Return an empty root for tables."""
        return self.lakes.storage(name).root

    def lake(self, table_root: str, name: str = "lake") -> Aging:
        """Create a lakehouse as ``init --table-root`` does."""
        return self.aging(self.lakes.storage(name), table_root=table_root)

    def aging(self, storage: Storage, options: Mapping[str, str] | None = None, **fields: Any) -> Aging:
        shared_clock = self.clocks[0] if self.clocks else None
        clock = (
            AgingStorage(storage, storage.now_ms())
            if shared_clock is None
            else _SharedClockStorage(storage, shared_clock, {})
        )
        self.clocks.append(clock)
        return Aging(Lakehouse.create(storage.root, options, storage=clock, **fields), clock)


@pytest.fixture
def table_roots(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> TableRoots:
    """A factory of lakehouses with a table root."""
    factory = TableRoots(lakes, [])
    written_ms: dict[str, dict[str, int]] = {}

    def open_with_shared_clock(root: str, options: Mapping[str, str] | None = None) -> Storage:
        return _SharedClockStorage(open_storage(root, options), factory.clocks[0], written_ms.setdefault(root, {}))

    monkeypatch.setattr(external_files, "open_storage", open_with_shared_clock)
    return factory


def put_orphans(aging: Aging, root: str) -> set[str]:
    """Create files as a killed writer leaves them, in a table and in a new table. Return their paths."""
    table_id = aging.lake.snapshot().table("ns", "t").id
    storage = aging.lake.external_storages.storage_of(FileAddress(root, ""))
    claim_folder(storage, NEW_ID, aging.lake.snapshot().definition.id)
    paths = {f"tables/{table_id}/data/stray.parquet", f"tables/{NEW_ID}/data/stray.parquet"}
    for path in paths:
        storage.create(path, b"stray")
    return {*paths, owner_path(NEW_ID)}


def paths_under(table_root: str) -> set[str]:
    """Return the paths of all files under a table root in memory or on the local disk."""
    return listed(open_storage(table_root))


def needed_paths(lake: Lakehouse, table_root: str) -> set[str]:
    """Return the paths under a table root that the latest version needs, and those of owner and user files."""
    base = lake.snapshot()
    io = reading_io(lake)
    tables = [base.table(namespace, name) for namespace in base.namespaces() for name in base.tables(namespace)]
    uris = {file.location for table in tables for file in files_of(table, io) if file.live}
    uris |= {f"{table_root}{owner_path(table.id)}" for table in tables}
    user_path = TableUser(base.definition.id, lake.root).path
    return {uri.removeprefix(table_root) for uri in uris if uri.startswith(table_root)} | {user_path}
