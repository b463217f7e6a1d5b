"""Test that needed files are not mistaken for orphans: roots with several names, copies, slow writers and long
transactions.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.exceptions import CommitFailedException

from tests.clock import ClockStorage
from tests.foreign import ForeignLake
from tests.lakes import Lakes, allowing, table
from tests.operations.aging import DAY_MS, Aging, with_least_requests
from tests.operations.changes import append_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidInputError, TransactionExpiredError
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.catalog import catalog_at

pytestmark = pytest.mark.usefixtures("fixed_requests")


def with_later_clock(lake: Lakehouse, days: int = 3) -> Lakehouse:
    return Lakehouse(ClockStorage(lake.storage, lake.storage.now_ms() + days * DAY_MS))


def count_rows(lake: Lakehouse) -> int:
    return len(catalog_at(lake).load_table("ns.t").scan().to_arrow())


@pytest.mark.local_only("links and copies a folder")
def test_link_or_copy_is_not_mistaken_for_a_root_without_table_files(lakes: Lakes, tmp_path: Path) -> None:
    """Table metadata contains URIs with the root at the time of the write."""
    lake = allowing(lakes.local(), tmp_path)
    append_rows(lake)
    folder = Path(lake.root.removeprefix("file://"))
    os.symlink(folder, tmp_path / "link")
    shutil.copytree(folder, tmp_path / "copy")
    for name in ("link", "copy"):
        other = with_later_clock(Lakehouse.open(str(tmp_path / name)))
        before = {info.path for info in other.storage.list("tables/")}
        operations.plan_orphan_removal(other).execute()
        assert {info.path for info in other.storage.list("tables/")} == before
    assert count_rows(lake) == 3


@pytest.mark.local_only("adds files by local paths")
def test_files_added_by_an_absolute_path_are_kept(lakes: Lakes, tmp_path: Path) -> None:
    """Iceberg keeps the original spelling of a path."""
    lake = allowing(lakes.local(), tmp_path)
    append_rows(lake)
    folder = Path(lake.root.removeprefix("file://"))
    with catalog_at(lake) as catalog:
        loaded = catalog.load_table("ns.t")
        data_path = folder / loaded.location().removeprefix(lake.root) / "data" / "added.parquet"
        added_paths = [data_path, tmp_path / "external.parquet"]
        for path in added_paths:
            pq.write_table(loaded.scan().to_arrow(), path)
        loaded.add_files([str(path) for path in added_paths])
        assert loaded.scan().count() == 9
    removed = operations.plan_orphan_removal(with_later_clock(lake)).execute()
    assert count_rows(lake) == 9
    assert not removed.failures
    assert added_paths[1].exists()


def test_foreign_owner_file_is_respected(lakes: Lakes) -> None:
    lake = lakes.memory()
    append_rows(lake)
    lake.storage.create("tables/backup/file.txt", b"foreign")
    lake.storage.create(owner_path("backup"), b'{"lakehouse_id": "another lakehouse"}')
    with lake.transaction() as txn:
        txn.create_table("ns", "x", replace(txn.table("ns", "t"), id="backup"))
    assert operations.plan_orphan_removal(with_later_clock(lake)).is_empty


def test_truncated_manifest_keeps_all_files_of_its_table(lakes: Lakes) -> None:
    lake = lakes.memory()
    append_rows(lake)
    manifest = next(info.path for info in lake.storage.list("tables/") if info.path.endswith("-m0.avro"))
    data = lake.storage.read(manifest)
    sync = data[-16:]
    lake.storage.write(manifest, data[: data.index(sync) + 16])  # keeps the header and removes all entries
    plan = operations.plan_orphan_removal(with_later_clock(lake))
    assert plan.is_empty
    assert len(plan.damaged) == 1


def slow_append(aging: Aging) -> object:
    txn = catalog_at(aging.lake).load_table("ns.t").transaction()
    txn.append(pa.table({"id": pa.array([2], pa.int64())}))
    txn._table.io.settle()  # type: ignore[attr-defined] # writes the files now, before the commit
    return txn


@pytest.mark.parametrize("is_removed", [False, True])
def test_table_write_longer_than_the_ttl_fails(lakes: Lakes, is_removed: bool) -> None:
    aging = Aging.on(lakes.storage())
    append_rows(aging.lake)
    n_rows = count_rows(aging.lake)
    txn = slow_append(aging)
    aging.later()
    if is_removed:
        assert aging.remove_orphans().files > 0
    with pytest.raises((CommitFailedException, TransactionExpiredError)):
        txn.commit_transaction()  # type: ignore[attr-defined]
    assert count_rows(aging.lake) == n_rows


def test_table_loaded_long_ago_can_be_written(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    append_rows(aging.lake)
    loaded = catalog_at(aging.lake).load_table("ns.t")
    aging.later()
    aging.remove_orphans()
    loaded.append(pa.table({"id": pa.array([2], pa.int64())}))
    assert count_rows(aging.lake) == 4


class _ActionStorage(ClockStorage):
    """A storage with a separate clock that runs an action before the next root is created."""

    action = None

    def create(self, path: str, data: bytes) -> None:
        action, self.action = (self.action, None) if path.endswith(".arrow") else (None, self.action)
        if action is not None:
            action()
        super().create(path, data)


@pytest.mark.parametrize("kind", ["raised", "lowered and raised", "lowered, and another program rolls back"])
def test_longer_ttl_does_not_revive_an_expired_transaction(lakes: Lakes, kind: str) -> None:
    """Definitions of the transaction were removed as orphans while the time to live was short."""
    hour_ms, was_long_ttl = DAY_MS // 24, kind != "raised"
    aging = Aging.on(lakes.storage(), txn_ttl_millis=DAY_MS if was_long_ttl else hour_ms)
    with aging.lake.transaction() as txn:
        txn.create_namespace("ns")
    old_version = aging.lake.latest_version()
    storage = _ActionStorage(aging.clock, 0)
    storage.now_ms = aging.clock.now_ms  # type: ignore[method-assign]
    slow_txn = Lakehouse(storage).transaction()
    slow_txn.create_table("ns", "t", table(slow="true"))

    def change_ttl() -> None:
        aging.lake.alter_definition(txn_ttl_millis=hour_ms) if was_long_ttl else aging.lake.alter_definition(
            properties={"a": "b"}
        )
        aging.later(2 * hour_ms)
        assert aging.remove_orphans().files == 1
        if kind.endswith("rolls back"):
            ForeignLake(aging.clock).rollback(old_version, keeps_unknown=False)
        else:
            aging.lake.alter_definition(txn_ttl_millis=DAY_MS)

    storage.action = change_ttl  # type: ignore[assignment]
    with pytest.raises(TransactionExpiredError):
        slow_txn.commit()
    assert aging.lake.snapshot().tables("ns") == []


def test_undeleted_table_is_complete_or_missing(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage(), minimum_versions_to_keep=1, maximum_version_age_millis=1)
    append_rows(aging.lake)
    location = aging.lake.snapshot().table("ns", "t").format_properties["metadata_location"]
    with aging.lake.transaction() as txn:
        txn.drop_table("ns", "t")
    aging.later()
    operations.compact(aging.lake)  # so that no message refers to the old definition
    aging.expire()
    aging.later()
    plan = operations.plan_purge(aging.lake)
    with_least_requests(lambda budget: plan.execute(budget=budget))
    with pytest.raises(InvalidInputError):
        operations.register_table(aging.lake, "ns", "restored", location)
    assert aging.lake.snapshot().tables("ns") == []
