"""Test references to external files: they are not read, copied or deleted unless their root is allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntryStatus
from pyiceberg.typedef import Record

from tests.foreign_files import commit_unchecked, data_files_of, manifests_of, write_manifest_of
from tests.lakes import Lakes, allowing
from tests.operations.aging import Aging
from tests.operations.changes import ROWS, append_rows, create
from trinitylake_ops import Lakehouse, TableDef, operations
from trinitylake_ops.errors import LocationNotAllowedError
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage.cache.storage import clear_process_caches

SECRET = b"AWS_SECRET_ACCESS_KEY=hunter2\n"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "id_rsa"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.memory()


def files_with_secret(*lakehouses: Lakehouse) -> list[str]:
    storages = [lake.storage for lake in lakehouses]
    return [info.path for storage in storages for info in storage.list() if SECRET in storage.read(info.path)]


def set_external_definition(lake: Lakehouse, uri: str) -> None:
    """Make the latest root refer to an external file as the definition of the namespace ``ns``."""
    latest = lake.snapshot()
    key = latest.keys.namespace_key("ns")
    node = decode_node(lake.storage.read(latest.location), latest.location)
    buffer = {**node.buffer, key: uri}
    data = encode_node(replace(node, buffer=buffer), latest.definition.order, latest.definition.node_compression)
    lake.storage.write(latest.location, data)


@pytest.mark.parametrize("level", ["partial", "full"])
def test_export_does_not_copy_external_file_of_a_pointer(lakes: Lakes, secret: Path, level: str) -> None:
    storage = lakes.storage()
    lake = Lakehouse.create(storage.root, storage=storage)
    create(lake, "ns")
    set_external_definition(lake, f"file://{secret}")
    reopened = Lakehouse(lake.storage)
    with pytest.raises(LocationNotAllowedError, match="--allow-root"):
        operations.plan_export(reopened, "nightly", level, definitions=level == "partial").execute()
    with pytest.raises(LocationNotAllowedError):
        reopened.snapshot().namespace("ns")
    assert files_with_secret(lake) == []


def add_file(lake: Lakehouse, uri: str) -> None:
    """Make a managed table refer to an external data file."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", ROWS.schema)
    counts = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")
    empty_counts: dict[str, dict[int, int]] = {name: {} for name in counts}
    missing_fields = dict.fromkeys(("key_metadata", "split_offsets", "equality_ids", "sort_order_id"))
    data_file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=uri,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=len(SECRET),
        **empty_counts,
        **missing_fields,
    )
    data_file.spec_id = 0
    manifest = write_manifest_of(lake, table, [data_file], ManifestEntryStatus.ADDED, 1)
    commit_unchecked(lake, "ns.t", [manifest], 1)


def test_export_does_not_copy_external_file_of_a_manifest(lakes: Lakes, secret: Path) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    target = lakes.storage("target")
    add_file(lake, f"file://{secret}")
    for name, target_root in (("here", None), ("away", target.root)):
        report = operations.plan_export(lake, name, "full", target=target_root).execute()
        assert "id_rsa" in report.damaged["ns.t"]
    assert files_with_secret(lake, Lakehouse(target)) == []
    with pytest.raises(PermissionError), catalog_at(lake) as catalog:
        catalog.load_table("ns.t").scan().to_arrow()


def test_verify_reports_external_file_of_managed_table(lakes: Lakes, secret: Path) -> None:
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    add_file(lake, f"file://{secret}")
    report = operations.verify(lake, deep=True)
    assert {(finding.code, finding.severity) for finding in report.findings} >= {("table-unreadable", "error")}
    assert "id_rsa" in report.findings[0].message


def test_deletions_wait_until_root_of_external_table_is_allowed(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage())
    other = lakes.local("other")
    append_rows(other)
    append_rows(aging.lake)
    location = other.snapshot().table("ns", "t").format_properties["metadata_location"]
    operations.register_table(aging.lake, "ns", "theirs", other.root + location)
    with aging.lake.transaction() as txn:
        txn.drop_table("ns", "t")
    aging_with_access = replace(aging, lake=allowing(aging.lake, other.root))
    aging.later()
    aging_with_access.expire()
    aging.later()
    before = {info.path for info in aging.clock.list("tables/")}
    for clean_up in (aging.purge, aging.remove_orphans):
        with pytest.raises(LocationNotAllowedError):
            clean_up()
    assert {info.path for info in aging.clock.list("tables/")} == before
    report = operations.verify(aging.lake)
    assert report.is_clean
    assert any("--allow-root" in location for location in report.unchecked)
    assert list(report.not_allowed) == ["ns.theirs"]
    cells = [str(cell) for row in report.table().rows for cell in row]
    assert sum("ns.theirs" in str(cell) and "--allow-root" in str(cell) for cell in cells) == 1
    assert operations.verify(aging_with_access.lake).not_allowed == {}
    with pytest.raises(LocationNotAllowedError):
        catalog_at(aging.lake).load_table("ns.theirs")
    assert catalog_at(aging_with_access.lake).load_table("ns.theirs").scan().to_arrow().num_rows == 3
    aging_with_access.purge()
    assert {info.path for info in aging.clock.list("tables/")} < before


def test_external_table_is_not_mistaken_for_managed_table(lake: Lakehouse) -> None:
    create(lake, "ns")
    location = "s3://other/tables/an-id/metadata/1.metadata.json"
    with lake.transaction() as txn:
        external = TableDef(table_type="EXTERNAL", format_properties={"metadata_location": location})
        txn.create_table("ns", "t", external)
    with pytest.raises(LocationNotAllowedError, match="'s3://other/tables/an-id/'"):
        catalog_at(lake).load_table("ns.t")


@pytest.fixture(params=["manifest", "entry"])
def lake_with_foreign_files(request: pytest.FixtureRequest, lakes: Lakes) -> Lakehouse:
    """A lakehouse whose table ``ns.t`` refers to files of ``secret.s``, through manifests of either table."""
    lake = Lakehouse.create(lakes.storage().root, storage=lakes.storage())
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema)
    for _ in range(2):
        append_rows(lake, "secret.s")
    manifests = manifests_of(lake, "secret.s")
    if request.param == "entry":
        files = data_files_of(lake, "secret.s")
        manifests = [write_manifest_of(lake, catalog.load_table("ns.t"), files, ManifestEntryStatus.EXISTING, 1)]
    commit_unchecked(lake, "ns.t", manifests, 1)
    return lake


def test_compaction_copies_no_rows_of_another_table(lake_with_foreign_files: Lakehouse) -> None:
    lake = lake_with_foreign_files
    folder = catalog_at(lake).load_table("ns.t").location().removeprefix(lake.root)
    plan = operations.plan_compact_tables(lake, min_input_files=2)
    assert [table.name for table in plan.tables] == ["secret.s"]
    assert list(plan.left) == ["ns.t"]
    assert [item.table for item in plan.execute().tables] == ["secret.s"]
    assert not list(lake.storage.list(f"{folder}/data/"))


def test_verify_reports_files_of_another_table(lake_with_foreign_files: Lakehouse) -> None:
    for _ in range(2):  # the second run reads the record of the first run
        findings = operations.verify(lake_with_foreign_files, deep=True, incremental=True).findings
        assert [(finding.code, finding.severity) for finding in findings] == [("table-unreadable", "error")]


def test_export_copies_no_file_of_another_table(lake_with_foreign_files: Lakehouse, lakes: Lakes) -> None:
    target = lakes.storage("target")
    for name, target_root in (("here", None), ("away", target.root)):
        report = operations.plan_export(
            lake_with_foreign_files, name, "full", target=target_root, namespaces=("ns",)
        ).execute()
        assert list(report.damaged) == ["ns.t"]
    assert not list(target.list("tables/"))
    with pytest.raises(PermissionError), catalog_at(lake_with_foreign_files) as catalog:
        catalog.load_table("ns.t").scan().to_arrow()


@pytest.mark.local_only("creates symbolic links")
@pytest.mark.parametrize("link_kind", ["file", "folder"])
def test_links_to_files_of_another_table_are_not_followed(lakes: Lakes, link_kind: str) -> None:
    """A client with access to its own folder can create a link to a file that only the operator can read."""
    lake = lakes.local()
    catalog = catalog_at(lake)
    folders = {}
    for name in ("ns.t", "secret.s"):
        if not lake.snapshot().has_namespace(name.partition(".")[0]):
            catalog.create_namespace(name.partition(".")[0])
        table = catalog.create_table(name, pa.schema([("id", pa.int64())]))
        for number in range(2):
            table.append(pa.table({"id": [number + (100 if name == "secret.s" else 0)]}))
        folders[name] = Path(table.location().removeprefix("file://")) / "data"
    table_files, secret_files = (sorted(folders[name].iterdir()) for name in ("ns.t", "secret.s"))
    if link_kind == "file":
        table_files[0].unlink()
        table_files[0].symlink_to(secret_files[0])
    else:
        for path in table_files:
            path.rename(folders["secret.s"] / path.name)
        folders["ns.t"].rmdir()
        folders["ns.t"].symlink_to(folders["secret.s"])
    clear_process_caches()
    lake = Lakehouse.open(lake.root)
    with pytest.raises(PermissionError):
        catalog_at(lake).load_table("ns.t").scan().to_arrow()
    plan = operations.plan_compact_tables(lake, min_input_files=2)
    assert [item.table for item in plan.execute().tables] == ["secret.s"]
    report = operations.plan_export(lake, "away", "full", target=lakes.root("away")).execute()
    assert list(report.damaged) == ["ns.t"]


@pytest.mark.local_only("creates symbolic links")
def test_link_within_folder_of_table_is_followed(lakes: Lakes) -> None:
    lake = lakes.local()
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": [1]}))
    (path,) = (Path(table.location().removeprefix("file://")) / "data").iterdir()
    moved = path.parent.parent / "moved.parquet"
    path.rename(moved)
    path.symlink_to(moved)
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow().num_rows == 1
