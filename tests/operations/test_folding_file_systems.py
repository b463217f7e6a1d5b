"""Test file systems that normalize names or fold their case: needed files are never deleted."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clock import AgingStorage
from tests.inventories import write_inventory
from tests.lakes import Lakes, table
from tests.operations.aging import LONG_MS, keeping
from tests.operations.changes import ROWS, append_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StorageError
from trinitylake_ops.format import file_names
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.file_names import new_node_path, optimize_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.executor import LOCAL, Executor, Listing, LocalExecutor
from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper

pytestmark = pytest.mark.local_only("simulates other file systems")

NFC, NFD, UPPER_CASE = "größe", unicodedata.normalize("NFD", "größe"), "GRÖßE"


def to_nfd(path: str) -> str:
    return unicodedata.normalize("NFD", path)


class FoldingStorage(StorageWrapper):
    """A storage that finds a file by any name that folds to the same name, and lists the folded name."""

    def __init__(self, inner: Storage, fold: Callable[[str], str]):
        super().__init__(inner)
        self._fold = fold

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        return self.inner.read(self._fold(path), offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        return replace(self.inner.stat(self._fold(path)), path=path)

    def create(self, path: str, data: bytes) -> None:
        self.inner.create(self._fold(path), data)

    def write(self, path: str, data: bytes) -> None:
        self.inner.write(self._fold(path), data)

    def delete(self, path: str) -> None:
        self.inner.delete(self._fold(path))

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        return self.inner.delete_batch([self._fold(path) for path in paths])

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self.inner.list(self._fold(prefix))


class RemoteExecutor(LocalExecutor):
    """An executor that works like Spark's: it lists in parts, omits files that are reached by their exact name, and
    reads ahead.
    """

    window = sys.maxsize

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        work, parts = listing.parts()
        return (info for infos in self.map(work, parts) for info in infos)

    def prefetch(self, read: Callable[[], None]) -> None:
        read()


@pytest.fixture(params=[to_nfd, str.lower], ids=["normalizing", "case-folding"])
def clock(request: pytest.FixtureRequest, lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> AgingStorage:
    """A folding storage, in which definitions are named as in older releases."""
    monkeypatch.setattr(file_names, "readable_name", str)
    storage = lakes.storage()
    return AgingStorage(FoldingStorage(storage, request.param), storage.now_ms())


@pytest.fixture
def lake(clock: AgingStorage) -> Lakehouse:
    lake = Lakehouse.create(clock.root, storage=clock)
    with lake.transaction() as txn:
        txn.create_namespace("Ns")
        for name in (NFC, "Plain"):
            txn.create_table("Ns", name, table(first="yes"))
    append_rows(lake, "Ns.Rows")
    return lake


def check_tables(lake: Lakehouse) -> None:
    reopened = Lakehouse(lake.storage)
    snapshot = reopened.snapshot()
    assert [snapshot.table("Ns", name) is not None for name in (NFC, "Plain", "Rows")] == [True] * 3
    assert catalog_at(reopened).load_table("Ns.Rows").scan().count() == 3


@pytest.mark.parametrize("executor", [LOCAL, RemoteExecutor()], ids=["local", "remote"])
def test_orphan_removal_on_folding_file_systems_keeps_needed_files(
    lake: Lakehouse, clock: AgingStorage, executor: Executor
) -> None:
    orphan = new_node_path()
    lake.storage.create(orphan, b"orphan")
    clock.time_ms += LONG_MS
    plan = operations.plan_orphan_removal(lake, executor=executor)
    assert plan.paths == [orphan]
    plan.execute()
    check_tables(lake)
    assert operations.plan_orphan_removal(lake, executor=executor).is_empty


def test_inventory_on_folding_file_systems_lists_no_needed_file(
    lake: Lakehouse, clock: AgingStorage, tmp_path: Path
) -> None:
    orphan = new_node_path()
    lake.storage.create(orphan, b"orphan")
    clock.time_ms += LONG_MS
    keys = sorted(info.path for info in lake.storage.list())
    location = write_inventory(tmp_path / "inventory", lake.root, keys)
    plan = operations.plan_orphan_removal(lake, inventory=location)
    assert plan.paths == [orphan]
    plan.execute()
    check_tables(lake)


def test_purge_on_folding_file_systems_keeps_needed_files(lake: Lakehouse, clock: AgingStorage) -> None:
    for number in range(3):
        with lake.transaction() as txn:
            txn.alter_table("Ns", NFC, table(number=str(number)))
        append_rows(lake, "Ns.Rows")
    with catalog_at(lake) as catalog:
        catalog.load_table("Ns.Rows").overwrite(ROWS)
    clock.time_ms += LONG_MS
    operations.plan_expiration(lake, keeping(1)).execute()
    clock.time_ms += LONG_MS
    report = operations.plan_purge(lake).execute()
    assert report.is_complete
    check_tables(lake)


def test_folder_of_a_table_id_listed_in_another_form_is_kept(lakes: Lakes) -> None:
    storage = lakes.storage()
    clock = AgingStorage(FoldingStorage(storage, to_nfd), storage.now_ms())
    lake = Lakehouse.create(clock.root, storage=clock)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", TableDef(id=NFC, table_format="HUDI"))  # the files of such a table are unknown
    clock.create(f"tables/{NFC}/_owner.json", f'{{"lakehouse_id": "{lake.snapshot().definition.id}"}}'.encode())
    clock.create(f"tables/{NFC}/data/file", b"needed")
    clock.time_ms += LONG_MS
    operations.plan_orphan_removal(lake).execute()
    assert clock.read(f"tables/{NFC}/data/file") == b"needed"
    assert clock.exists(f"tables/{NFC}/_owner.json")


def test_upper_case_name_of_another_program_is_kept(lakes: Lakes) -> None:
    """Other programs may write a UUID in upper case."""
    storage = lakes.storage()
    clock = AgingStorage(FoldingStorage(storage, str.lower), storage.now_ms())
    lake = Lakehouse.create(clock.root, storage=clock)
    path = optimize_path("table-T-NS-6FCB514B-B878-4C9D-95B7-8DC3A7CE6FD8.binpb")
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", table())
    clock.create(path, lake.snapshot().table("ns", "t").to_bytes())
    with lake.transaction() as txn:
        txn.restore_entry(txn.keys.table_key("ns", "t"), path)
    clock.time_ms += LONG_MS
    assert path.lower() not in operations.plan_orphan_removal(lake).paths


@pytest.mark.parametrize("fold", [to_nfd, str.lower], ids=["normalizing", "case-folding"])
def test_names_that_differ_only_in_case_are_distinct_objects(lakes: Lakes, fold: Callable[[str], str]) -> None:
    storage = lakes.storage()
    lake = Lakehouse.create(storage.root, storage=FoldingStorage(storage, fold))
    tables = [NFC, NFD, UPPER_CASE, "t", "T"]
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_namespace("NS")
        for name in tables:
            txn.create_table("ns", name, table(name=name))
    snapshot = Lakehouse(lake.storage).snapshot()
    assert sorted(snapshot.namespaces()) == ["NS", "ns"]
    assert sorted(snapshot.tables("ns")) == sorted(tables)
    assert [snapshot.table("ns", name).properties["name"] for name in tables] == tables
    assert all(info.path.isascii() for info in lake.storage.list())
    assert operations.verify(lake).is_clean
