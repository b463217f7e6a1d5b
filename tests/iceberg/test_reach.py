"""The walk over a table version lists each of its files exactly once."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest

from tests.faults import FaultyStorage, fail
from tests.iceberg.test_catalog import SCHEMA, rows
from tests.lakes import allowing
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import FileMissingError, LocationNotAllowedError, StoragePermissionError
from trinitylake_ops.format.file_names import owner_path
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import FileKind, TableFile, files_of
from trinitylake_ops.storage import MeteredStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")


def files_by_location(lake: Lakehouse, version: int | None = None) -> dict[str, TableFile]:
    files = list(files_of(lake.snapshot(version).table("ns", "t"), reading_io(lake)))
    by_location = {file.location: file for file in files}
    assert len(by_location) == len(files)
    return by_location


def test_walk_lists_every_file_of_every_snapshot_once(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1, 2))
    table.append(rows(3))
    middle_version = lake.latest_version()
    table.overwrite(rows(4), overwrite_filter="id == 1")
    table.delete("id == 3")
    stored = {info.path: info.size_bytes for info in lake.storage.list("tables/")}
    files = files_by_location(lake)
    owner = stored.pop(owner_path(lake.snapshot().table("ns", "t").id))
    assert owner > 0
    assert set(files) == set(stored)
    for file in files.values():
        assert file.size_bytes in (None, stored[file.location])
    kinds = Counter(file.kind for file in files.values())
    assert kinds[FileKind.METADATA] == 1
    assert kinds[FileKind.METADATA_LOG] == 4
    assert kinds[FileKind.MANIFEST_LIST] == len(table.snapshots())
    assert kinds[FileKind.DATA] == 4  # [1, 2], [3], [2] rewritten, [4]
    earlier = files_by_location(lake, middle_version)
    assert set(earlier) < set(files)
    assert sum(file.kind == FileKind.DATA for file in earlier.values()) == 2


def test_data_deleted_in_all_snapshots_is_not_live(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    first = table.current_snapshot()
    assert first is not None
    (first_file,) = (task.file.file_path for task in table.scan().plan_files())
    table.delete("id == 1")
    table.append(rows(2))
    before = files_by_location(lake)
    assert all(file.live for file in before.values() if file.kind == FileKind.DATA)
    table.maintenance.expire_snapshots().by_id(first.snapshot_id).commit()
    after = files_by_location(lake)
    location = first_file.removeprefix(lake.root)
    assert not after[location].live
    assert {file.location for file in after.values() if file.kind == FileKind.DATA and file.live} == {
        file.location for file in before.values() if file.kind == FileKind.DATA
    } - {location}


def test_external_files_are_listed_by_uri(
    lake: Lakehouse, catalog: TrinityLakeCatalog, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("other")
    other = Lakehouse.create(str(folder), {"fsync": "false"})
    other_catalog = TrinityLakeCatalog("other", root=other.root)
    other_catalog.create_namespace("ns")
    table = other_catalog.create_table("ns.t", pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": [1]}))
    catalog.register_table("ns.t", table.metadata_location)
    with pytest.raises(LocationNotAllowedError, match="--allow-root"):
        files_by_location(lake)
    lake = allowing(lake, folder)
    assert len(files_by_location(lake)) == 5
    assert all(location.startswith(other.root) for location in files_by_location(lake))


def test_walk_reads_each_manifest_once(lake: Lakehouse, catalog: TrinityLakeCatalog, meter: MeteredStorage) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    for number in range(5):
        table.append(rows(number))
    definition = lake.snapshot().table("ns", "t")
    with meter.measure() as measured:
        list(files_of(definition, StorageFileIO.on(lake.storage)))
    assert measured.counts.requests == budget("list the files of a table after 5 appends").requests


def test_incomplete_walk_fails(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    definition = lake.snapshot().table("ns", "t")
    for request_number in (1, 2, 3):
        faulty_storage = FaultyStorage(lake.storage, [fail(request_number, StoragePermissionError, kind="read")])
        with pytest.raises(StoragePermissionError):
            list(files_of(definition, StorageFileIO.on(faulty_storage)))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    lake.storage.delete(snapshot.manifest_list.removeprefix(lake.root))
    with pytest.raises(FileMissingError):
        list(files_of(definition, StorageFileIO.on(lake.storage)))
