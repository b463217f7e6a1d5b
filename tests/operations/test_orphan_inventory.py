"""Test that an inventory of the storage yields the same orphans as a listing, and only files that still exist."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from tests.inventories import columnar_file, inventory_file, manifest, write_inventory
from tests.lakes import listed
from tests.operations.aging import Aging
from tests.operations.changes import append_rows, drop
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError, InvalidLocationError
from trinitylake_ops.format.file_names import new_node_path, owner_path
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.storage import LocalStorage, MeteredStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def lake(aging: Aging) -> Lakehouse:
    """A lakehouse with tables, unreachable nodes, an interrupted operation and files of other programs."""
    append_rows(aging.lake, "n0.rows")
    for path in (new_node_path(), new_node_path(), "_ops/tmp/123", "tables/foreign/a b+c", "other.txt"):
        aging.lake.storage.create(path, b"orphan")
    aging.later()
    return aging.lake


def keys_of(lake: Lakehouse) -> list[str]:
    """Return the keys of a bucket that contains the lakehouse and other files."""
    temporary_paths = {info.path for info in lake.storage.list("_ops/tmp/")}
    return ["0000/", "odd name a//b", *sorted(listed(lake.storage) | temporary_paths)]


def inventory_of(lake: Lakehouse, folder: Path, file_format: str = "CSV", created_at_ms: int = 0) -> str:
    return write_inventory(folder, lake.root, keys_of(lake), file_format, created_at_ms=created_at_ms)


@pytest.mark.parametrize("file_format", ["CSV", "ORC", "Parquet"])
def test_full_inventory_yields_the_same_plan_as_a_listing(lake: Lakehouse, tmp_path: Path, file_format: str) -> None:
    location = inventory_of(lake, tmp_path / "inventory", file_format, created_at_ms=1_700_000_000_000)
    plan_with_listing = operations.plan_orphan_removal(lake)
    plan = operations.plan_orphan_removal(lake, inventory=location)
    assert len(plan.paths) == 3
    assert (plan.digest, plan.unowned_files) == (plan_with_listing.digest, plan_with_listing.unowned_files)
    assert plan.inventory == f"file://{location}"
    assert "in the inventory of 2023-11-14 22:13 UTC" in str(plan.table().title)
    assert plan.execute(plan_with_listing.digest).files == 3
    assert not {*plan.paths} & {*keys_of(lake)}
    assert operations.verify(lake).is_clean


def test_approved_plan_with_inventory_is_executed_later(lake: Lakehouse, aging: Aging, tmp_path: Path) -> None:
    location = inventory_of(lake, tmp_path / "inventory")
    digest = operations.plan_orphan_removal(lake, inventory=location).digest
    aging.later()
    later_plan = operations.plan_orphan_removal(lake, inventory=location)
    assert later_plan.digest != digest
    assert later_plan.execute(digest).files == 3


def test_files_changed_since_the_inventory_are_kept(lake: Lakehouse, aging: Aging, tmp_path: Path) -> None:
    created, deleted, recreated, *_ = sorted(new_node_path() for _ in range(3))
    for path in (deleted, recreated):
        lake.storage.create(path, b"orphan")
    aging.later()
    location = inventory_of(lake, tmp_path / "inventory")
    for path in (deleted, recreated):
        lake.storage.delete(path)
    lake.storage.create(created, b"orphan")
    aging.later()
    lake.storage.create(recreated, b"young")
    paths = operations.plan_orphan_removal(lake, inventory=location).paths
    assert not {created, deleted, recreated} & {*paths}
    assert {*operations.plan_orphan_removal(lake).paths} == {*paths, created}


def test_owner_file_is_kept_with_files_newer_than_the_inventory(lake: Lakehouse, aging: Aging, tmp_path: Path) -> None:
    table_ids = {table_id for info in lake.storage.list("tables/") if (table_id := table_id_in(info.path))}
    owner = next(owner_path(table_id) for table_id in table_ids if lake.storage.exists(owner_path(table_id)))
    location = inventory_of(lake, tmp_path / "inventory")
    drop(lake, "n0", "rows")
    late_path = owner.rpartition("/")[0] + "/data/late.parquet"
    aging.later()
    aging.expire()
    aging.later()
    aging.purge()
    lake.storage.create(late_path, b"new")
    aging.later(1)
    plan = operations.plan_orphan_removal(lake, inventory=location)
    assert owner not in plan.paths
    aging.later()
    assert {owner, late_path} <= {*operations.plan_orphan_removal(lake, inventory=location).paths}


def test_only_unreached_files_are_requested(lake: Lakehouse, tmp_path: Path) -> None:
    location = inventory_of(lake, tmp_path / "inventory")
    metered = MeteredStorage(lake.storage)
    plan = operations.plan_orphan_removal(Lakehouse(metered), inventory=location)
    hashed_paths = [path for path in plan.paths if not path.startswith("_")]
    usage = metered.snapshot()
    assert usage.requests["stat"] <= len(hashed_paths) + plan.unowned_files + 2
    assert usage.requests["list"] <= 4


def test_invalid_inventories_are_rejected(lake: Lakehouse, aging: Aging, tmp_path: Path) -> None:
    def assert_rejected(error: type[Exception] | tuple[type[Exception], ...], location: str, message: str) -> None:
        with pytest.raises(error, match=message):
            operations.plan_orphan_removal(lake, inventory=location)

    manifest_path = Path(inventory_of(lake, tmp_path / "good"))
    assert_rejected(FileMissingError, f"{manifest_path}.gz", "pass the URI of its manifest.json")
    assert_rejected(InvalidInputError, "manifest.json", "is not a URI or absolute path")
    assert_rejected(CorruptFileError, str(manifest_path.parent / "data" / "0"), "not a manifest of an inventory")
    other_bucket = write_inventory(tmp_path / "b", "bucket", keys_of(lake))
    assert_rejected(InvalidInputError, other_bucket, "covers 's3://bucket/', which does not contain")
    assert_rejected(InvalidInputError, write_inventory(tmp_path / "c", lake.root, ["a/x"]), "contains no file that")
    text = manifest_path.read_text()
    for invalid_text, message in (
        (text.replace('"CSV"', '"Avro"'), "have format 'Avro'"),
        (text.replace(" Key,", " Name,"), "with a column 'Key'"),
        (text.replace('"data/1"', '"data/2"'), "data/2' of inventory .* is missing"),
        (text.replace('"data/1"', '"data/../0"'), "is not a valid path"),
        (text.replace('"creationTimestamp": "0"', '"creationTimestamp": "now"'), "is not a manifest"),
        (json.dumps([text]), "is not a manifest"),
    ):
        manifest_path.write_text(invalid_text)
        assert_rejected((CorruptFileError, FileMissingError, InvalidInputError), str(manifest_path), message)
    manifest_path.write_text(text)
    data_file = manifest_path.parent / "data" / "1"
    for data in (b"\x1f\x8bx", data_file.read_bytes()[:-20], inventory_file(["a"], "Parquet"), gzip.compress(b"short")):
        data_file.write_bytes(data)
        assert_rejected(CorruptFileError, str(manifest_path), "data/1' of inventory .* cannot be read")
    for file_format in ("Parquet", "ORC"):
        manifest_path.write_text(text.replace('"CSV"', f'"{file_format}"'))
        assert_rejected(CorruptFileError, str(manifest_path), "of inventory .* cannot be read")
        for column in (pa.array(["a", None]), pa.array([b"a"]), pa.array([1]), pa.array([["a"]])):
            for name in ("0", "1"):
                (manifest_path.parent / "data" / name).write_bytes(columnar_file(column, file_format))
            assert_rejected(
                CorruptFileError,
                str(manifest_path),
                "of inventory .* cannot be read: its column 'key' does not contain text",
            )


def test_error_names_the_invalid_manifest(lake: Lakehouse, tmp_path: Path) -> None:
    manifest_path = Path(inventory_of(lake, tmp_path / "good"))
    text = manifest_path.read_text()
    for invalid_text, message in (
        (
            text.replace(f'"{lake.root}"', '""'),
            "is not a manifest of an inventory: invalid root 's3:///': it has no bucket",
        ),
        (
            text.replace(f'"{lake.root}"', '"user:pw@b"'),
            "is not a manifest of an inventory: a root must not contain credentials",
        ),
        (text.replace(f'"{lake.root}"', r'"\ud800"'), r"covers 's3://\\ud800/', which does not contain"),
        (text.replace('"data/1"', '""'), "of inventory .* cannot be read: .* is not a valid path"),
        (text.replace('"data/1"', '"/etc/passwd"'), "of inventory .* cannot be read: .* is not a valid path"),
        (text.replace('"data/1"', r'"\ud800"'), "of inventory .* cannot be read: .* lone surrogate"),
    ):
        manifest_path.write_text(invalid_text)
        with pytest.raises((CorruptFileError, InvalidInputError), match=message) as raised:
            operations.plan_orphan_removal(lake, inventory=str(manifest_path))
        assert "pw" not in str(raised.value)
        str(raised.value).encode()
    with pytest.raises(InvalidLocationError):
        operations.plan_orphan_removal(lake, inventory=f"{manifest_path.parent}/")


@pytest.mark.local_only("creates links")
def test_names_that_cannot_be_listed_are_ignored(tmp_path: Path) -> None:
    """A path in an inventory may lead to a needed file through a link."""
    aging = Aging.on(LocalStorage(f"file://{tmp_path}/lake/", fsync=False))
    append_rows(aging.lake)
    aging.later()
    data = next(info.path for info in aging.lake.storage.list("tables/") if info.path.endswith(".parquet"))
    folder, _, name = data.partition("/data/")
    folder_path = Path(aging.lake.root.removeprefix("file://"), folder)
    (folder_path / "again").symlink_to(folder_path / "data")
    (folder_path / "linked").symlink_to(folder_path / "data" / name)
    keys = [*keys_of(aging.lake), f"{folder}/again/{name}", f"{folder}/linked", f"{folder}/{'x' * 300}"]
    location = write_inventory(tmp_path / "inventory", aging.lake.root, keys)
    assert operations.plan_orphan_removal(aging.lake, inventory=location).paths == []


def test_inventory_is_read_from_a_separate_bucket(radosgw: S3Server, tmp_path: Path) -> None:
    root = radosgw.fresh_root()
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    lake = Lakehouse.create(root, storage_options=radosgw.storage_options)
    append_rows(lake)
    lake.storage.create(new_node_path(), b"orphan")
    keys = ["other/0000/x", *(prefix + path for path in sorted(listed(lake.storage)))]
    inventory_bucket = f"{bucket}-inventories"
    radosgw.client.create_bucket(Bucket=inventory_bucket)
    radosgw.client.put_object(Bucket=inventory_bucket, Key="lake/data/0.csv.gz", Body=inventory_file(keys))
    content = manifest(bucket, ["lake/data/0.csv.gz"])
    radosgw.client.put_object(Bucket=inventory_bucket, Key="lake/2026-11-20T01-00Z/manifest.json", Body=content)
    location = f"s3://{inventory_bucket}/lake/2026-11-20T01-00Z/manifest.json"
    plan = operations.plan_orphan_removal(lake, inventory=location)
    assert (plan.is_empty, plan.inventory) == (True, location), "the orphan is too young"


def test_orphans_command_accepts_an_inventory(tmp_path: Path) -> None:
    lake = Lakehouse.create(f"{tmp_path}/lake")
    append_rows(lake)
    location = inventory_of(lake, tmp_path / "inventory")
    result = CliRunner().invoke(trinitylake, ["--root", lake.root, "orphans", "--inventory", location, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["inventory"] == f"file://{location}"
    result = CliRunner().invoke(trinitylake, ["--root", lake.root, "orphans", "--inventory", f"{location}x"])
    assert isinstance(result.exception, FileMissingError)
