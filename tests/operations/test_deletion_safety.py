"""Conditions that must block deletions: interrupted marks, outages, other spellings of a path, and other owners."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from tests.lakes import Lakes, allowing
from tests.operations.aging import Aging
from tests.operations.changes import append_rows, create
from trinitylake_ops import Lakehouse, TableDef, operations
from trinitylake_ops.errors import InvalidInputError, MaintenanceBlockedError, ThrottledError
from trinitylake_ops.format.file_names import lease_path, new_node_path, owner_path
from trinitylake_ops.operations.gc.mark import Mark
from trinitylake_ops.operations.gc.survey import survey_versions
from trinitylake_ops.operations.gc.unreached import delete_unreached
from trinitylake_ops.operations.lease import DURATION_MS, lease
from trinitylake_ops.storage import FileInfo, LocalStorage, Storage, StorageWrapper

ROWS = pa.table({"id": pa.array([1], pa.int64())})


pytestmark = pytest.mark.usefixtures("manual_clock")


class ActionStorage(StorageWrapper):
    """A storage that runs an action after the first deletion of a table file, and then fails some requests."""

    def __init__(self, inner: Storage, action: Callable[[], object] = int, *, path_part: str = "", n_failures: int = 0):
        super().__init__(inner)
        self.delete_batch_size = self.concurrency = 1
        self._action = action
        self._path_part = path_part
        self._n_failures = n_failures
        self._has_begun = False

    def delete(self, path: str) -> None:
        super().delete(path)
        if path.startswith("tables/") and not self._has_begun:
            self._action()
            self._has_begun = True

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self._fail(path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._fail(prefix)
        return super().list(prefix)

    def _fail(self, path: str) -> None:
        if self._has_begun and self._n_failures and self._path_part in path:
            self._n_failures -= 1
            raise ThrottledError("injected: slow down", path=path)


def create_with_dropped_table(lakes: Lakes) -> tuple[Aging, TableDef]:
    """Return a lakehouse whose only table was dropped and whose older versions expired, and the table's definition."""
    aging = Aging.on(lakes.storage())
    append_rows(aging.lake)
    definition = aging.lake.snapshot().table("ns", "t")
    with aging.lake.transaction() as txn:
        txn.drop_table("ns", "t")
    aging.later()
    operations.compact(aging.lake)  # so that no message refers to the definition
    aging.expire()
    aging.later()
    return aging, definition


def table_paths(lake: Lakehouse) -> set[str]:
    return {info.path for info in lake.storage.list("tables/")}


def test_interrupted_mark_is_repeated(lakes: Lakes) -> None:
    """A commit during a purge needs files that the purge would delete, and their first check is throttled."""
    aging, definition = create_with_dropped_table(lakes)
    metadata = definition.format_properties["metadata_location"]

    def commit() -> None:  # commits as another program would, without registering the table
        with aging.lake.transaction() as txn:
            txn.create_table("ns", "restored", definition)

    storage = ActionStorage(aging.clock, commit, path_part=".metadata.json", n_failures=1)
    plan = operations.plan_purge(Lakehouse(storage))
    report = plan.execute()
    assert report.is_complete
    assert report.still_needed > 0
    assert report.files + report.still_needed == plan.files
    assert metadata in table_paths(aging.lake)


@pytest.mark.parametrize("operation", ["purge", "orphans"])
def test_outage_during_checks_leaves_files_and_is_reported(lakes: Lakes, operation: str) -> None:
    aging, _ = create_with_dropped_table(lakes)
    if operation == "orphans":
        aging.clock.delete(aging.lake.snapshot().definition.expirations[0].plan_path)
        aging.purge()
        aging.later()
    lake = Lakehouse(ActionStorage(aging.clock, path_part="_ops/lease", n_failures=20))
    plan = operations.plan_purge(lake) if operation == "purge" else operations.plan_orphan_removal(lake)
    report = plan.execute()
    assert not report.is_complete
    assert report.stopped is not None
    assert "slow down" in report.stopped
    assert 0 < report.files < (plan.files if isinstance(plan.files, int) else len(plan.paths))
    assert owner_paths(aging.lake), "the owner file is deleted last"
    report = aging.purge() if operation == "purge" else aging.remove_orphans()
    assert report.is_complete
    aging.later()
    aging.remove_orphans()
    assert table_paths(aging.lake) == set()


def owner_paths(lake: Lakehouse) -> list[str]:
    return [path for path in table_paths(lake) if path.endswith("_owner.json")]


# Other spellings of paths


@pytest.fixture
def external(tmp_path: Path) -> Table:
    """A table of another catalog, unknown to the lakehouse."""
    (tmp_path / "external").mkdir()
    catalog = SqlCatalog("x", uri=f"sqlite:///{tmp_path}/x.db", warehouse=f"file://{tmp_path}/external")
    catalog.create_namespace("e")
    return catalog.create_table("e.t", ROWS.schema)


@pytest.mark.local_only("creates links to folders")
@pytest.mark.parametrize("spelling", ["itself", "hadoop", "link", "link to the table"])
def test_external_table_files_are_kept_in_any_spelling(tmp_path: Path, external: Table, spelling: str) -> None:
    folder = tmp_path / "tables" / "lake"  # a root whose path looks like that of a table
    folder.mkdir(parents=True)
    aging = Aging.on(LocalStorage(f"file://{folder}/", fsync=False))
    aging = replace(aging, lake=allowing(aging.lake, tmp_path))
    append_rows(aging.lake)
    path = next(path for path in table_paths(aging.lake) if path.endswith(".parquet"))
    table_folder, _, name = path.partition("/data/")
    os.symlink(folder, tmp_path / "tables" / "alias")
    os.symlink(folder / table_folder, tmp_path / "sales")
    external.add_files(
        [
            {
                "itself": f"file://{folder}/{path}",
                "hadoop": f"file:{folder}/{path}",
                "link": f"file://{tmp_path}/tables/alias/{path}",
                "link to the table": f"file://{tmp_path}/sales/data/{name}",
            }[spelling]
        ]
    )
    operations.register_table(aging.lake, "ns", "ext", external.metadata_location)
    with aging.lake.transaction() as txn:
        txn.drop_table("ns", "t")
    aging.clean_up()
    assert external.scan().to_arrow().num_rows == 3
    assert "ext" in aging.lake.snapshot().tables("ns")


@pytest.mark.local_only("the other catalog keeps its files in a folder")
def test_missing_files_of_another_catalog_do_not_block_deletion(lakes: Lakes, external: Table, tmp_path: Path) -> None:
    """The writer of a registered table expires its snapshots regularly."""
    aging, _ = create_with_dropped_table(lakes)
    aging = replace(aging, lake=allowing(aging.lake, tmp_path))
    external.append(ROWS)
    external.append(ROWS)
    operations.register_table(aging.lake, "ns", "ext", external.metadata_location)
    Path(external.metadata.snapshots[0].manifest_list.removeprefix("file://")).unlink()
    aging.clean_up()
    assert table_paths(aging.lake) == set()


@pytest.mark.local_only("the other catalog keeps its files in a folder")
def test_empty_path_segments_do_not_block_deletion(lakes: Lakes, external: Table, tmp_path: Path) -> None:
    aging, _ = create_with_dropped_table(lakes)
    aging = replace(aging, lake=allowing(aging.lake, tmp_path))
    external.append(ROWS)
    uri = next(iter(external.scan().plan_files())).file.file_path
    other = external.catalog.create_table("e.u", ROWS.schema)
    other.add_files([uri.replace("/data/", "//data/")])
    operations.register_table(aging.lake, "ns", "ext", other.metadata_location)
    aging.clean_up()
    assert table_paths(aging.lake) == set()


def test_missing_manifest_of_a_managed_table_keeps_its_folder(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    append_rows(aging.lake)
    aging.clock.delete(next(path for path in table_paths(aging.lake) if path.endswith("-m0.avro")))
    before = table_paths(aging.lake)
    aging.later()
    plan = operations.plan_orphan_removal(aging.lake)
    assert len(plan.damaged) == 1
    assert not before.intersection(plan.paths)


# Other owners


def test_files_in_a_folder_of_another_lakehouse_are_not_purged(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    append_rows(aging.lake)
    definition = aging.lake.snapshot().table("ns", "t")
    aging.clock.write(owner_path(definition.id), b'{"lakehouse_id": "another lakehouse"}')
    with aging.lake.transaction() as txn:
        txn.drop_table("ns", "t")
    before = table_paths(aging.lake)
    aging.clean_up()
    assert table_paths(aging.lake) == before


def test_owner_file_of_a_restored_table_is_kept(lakes: Lakes) -> None:
    """The table is restored between plan and removal. Later removals need the owner file."""
    aging, definition = create_with_dropped_table(lakes)
    aging.clock.delete(aging.lake.snapshot().definition.expirations[0].plan_path)
    aging.purge()
    aging.later()
    plan = operations.plan_orphan_removal(aging.lake)
    assert owner_path(definition.id) in plan.paths
    with aging.lake.transaction() as txn:
        txn.create_table("ns", "restored", definition)
    report = plan.execute()
    assert (report.files, report.still_needed) == (len(plan.paths) - report.still_needed, report.still_needed)
    assert owner_path(definition.id) in table_paths(aging.lake)


# Leases


def test_impossible_lease_is_reported(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    aging.clock.create(lease_path(999_999_999_999_999), b"{}")
    aging.later()
    with pytest.raises(MaintenanceBlockedError), lease(aging.clock, "purge"):
        raise AssertionError("the lease was acquired twice")


@pytest.mark.parametrize("make_plan", [operations.plan_purge, operations.plan_orphan_removal])
def test_invalid_durations_and_numbers_are_rejected(lakes: Lakes, make_plan: Callable[..., object]) -> None:
    aging = Aging.on(lakes.storage())
    for invalid_value in ("7d", float("nan"), True, -1):
        with pytest.raises(InvalidInputError):
            make_plan(aging.lake, invalid_value)
    for invalid_value in ("a", float("nan"), False, 0):
        with pytest.raises(InvalidInputError):
            operations.Budget(max_requests=invalid_value)


def test_registration_fails_after_its_lease_expires(lakes: Lakes) -> None:
    """Reading the table's metadata takes longer than the lease of the registration, and a purge runs meanwhile."""
    aging = Aging.on(lakes.storage())
    append_rows(aging.lake)
    metadata = aging.lake.snapshot().table("ns", "t").format_properties["metadata_location"]

    class SlowStorage(StorageWrapper):
        def read(
            self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
        ) -> bytes:
            if path == metadata:
                aging.later(DURATION_MS + 1)
                with lease(aging.clock, "purge"):
                    pass
            return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    with pytest.raises(MaintenanceBlockedError):
        operations.register_table(Lakehouse(SlowStorage(aging.clock)), "ns", "second", metadata)
    assert aging.lake.snapshot().tables("ns") == ["t"]


class LeaseTakeoverStorage(StorageWrapper):
    """A storage that lets the lease expire at the next read while ``is_armed``; another operation then acquires it."""

    def __init__(self, aging: Aging):
        super().__init__(aging.lake.storage)
        self._aging = aging
        self.is_armed = False

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if self.is_armed:
            self.is_armed = False
            self._aging.clock.time_ms += 2 * DURATION_MS
            with lease(self._aging.lake.storage, "purge"):
                pass
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_deletion_stops_if_the_lease_ends_while_marking(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    orphan = new_node_path()
    aging.lake.storage.create(orphan, b"orphan")
    storage = LeaseTakeoverStorage(aging)
    lake = Lakehouse(storage, cache="off")
    mark = Mark(survey_versions(lake, lake.snapshot()))
    with lease(storage, "orphans") as acquired_lease:
        create(aging.lake, "new", "t")
        storage.is_armed = True
        with pytest.raises(MaintenanceBlockedError):
            delete_unreached(storage, {orphan: 6}, mark, acquired_lease)
    assert not storage.is_armed
    assert storage.exists(orphan)
