"""Test the targets of exports and clones: they must not overlap roots that the lakehouse reads or writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tests.lakes import Lakes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, InvalidInputError, StoragePermissionError
from trinitylake_ops.format.definitions import SourceRecord
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.operations.transfer.names import target_root


@pytest.fixture
def lake(tmp_path: Path) -> Lakehouse:
    """A lakehouse with a table under its table root."""
    lake = Lakehouse.create(f"file://{tmp_path}/lake", {"fsync": "false"}, table_root=f"file://{tmp_path}/data/")
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", pa.schema([("i", pa.int64())])).append(pa.table({"i": [1, 2, 3]}))
    return lake


@pytest.mark.parametrize("level", ["minimal", "partial", "full"])
@pytest.mark.parametrize(
    "target", ["data", "data/tables", "data/tables/backup/", "lake/backup", "link", "link/below", ""]
)
def test_export_into_root_in_use_is_rejected(lake: Lakehouse, tmp_path: Path, level: str, target: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    before = lake.latest_version()
    with pytest.raises(InvalidInputError):
        operations.plan_export(lake, "backup", level, target=f"file://{tmp_path}/{target}")
    assert lake.latest_version() == before


@pytest.mark.parametrize("operation", ["export", "clone"])
def test_unwritable_target_is_rejected_before_it_is_recorded(tmp_path: Path, operation: str) -> None:
    lake = Lakehouse.create(f"file://{tmp_path}/lake", {"fsync": "false"})
    before, target = lake.latest_version(), "file:///proc/trinitylake/target"
    with pytest.raises(StoragePermissionError) as raised:
        if operation == "export":
            operations.plan_export(lake, "backup", "full", target=target).execute()
        else:
            operations.plan_clone(lake, target, "backup").execute()
    assert target in str(raised.value)
    assert lake.latest_version() == before


def test_sibling_with_same_prefix_is_a_valid_target(lake: Lakehouse, tmp_path: Path) -> None:
    operations.plan_export(lake, "backup", "full", target=f"file://{tmp_path}/database").execute()
    exported = catalog_at(Lakehouse.open(f"file://{tmp_path}/database")).load_table("ns.t")
    assert exported.scan().to_arrow()["i"].to_pylist() == [1, 2, 3]
    files = [task.file.file_path for task in exported.scan().plan_files()]
    assert all(file.startswith(f"file://{tmp_path}/database/") for file in files)


def test_target_above_former_table_root_is_rejected(lake: Lakehouse, tmp_path: Path) -> None:
    with lake.transaction(message="another table root") as transaction:
        transaction.alter_definition(replace(transaction.definition, table_root=f"file://{tmp_path}/later/"))
    with pytest.raises(InvalidInputError):
        operations.plan_export(
            lake, "old", "full", version=lake.latest_version() - 1, target=f"file://{tmp_path}/data/x"
        )


def test_clone_into_table_root_or_another_target_is_rejected(lakes: Lakes, tmp_path: Path) -> None:
    lake = Lakehouse.create(f"file://{tmp_path}/lake", {"fsync": "false"})
    operations.plan_clone(lake, f"file://{tmp_path}/clone", "first").execute()
    for target in ("clone/below", "lake/clone"):
        with pytest.raises(InvalidInputError):
            operations.plan_clone(lake, f"file://{tmp_path}/{target}", "second")
        with pytest.raises(InvalidInputError):
            operations.plan_export(lake, "export", "full", target=f"file://{tmp_path}/{target}")


@pytest.mark.parametrize(
    ("used_root", "target", "is_rejected"),
    [
        ("s3://bucket/data/", "s3a://bucket/data", True),
        ("s3://bucket/data/", "s3n://Bucket/data/x/", True),
        ("s3://bucket/data/", "S3://bucket/data/", True),
        ("s3://bucket/data/x/", "s3a://bucket/data/", True),
        ("abfss://c@a.dfs.core.windows.net/data/", "abfs://c@A.dfs.core.windows.net/data/x", True),
        ("gs://bucket/data/", "gcs://bucket/data", True),
        ("s3://bucket/data/", "s3a://bucket/database/", False),
        ("s3://bucket/data/", "s3://other/data/", False),
        ("s3://bucket/data/", "s3://bucket/Data/", False),
    ],
)
def test_other_spellings_of_a_root_are_rejected(lakes: Lakes, used_root: str, target: str, is_rejected: bool) -> None:
    lake = lakes.memory()
    definition = lake.snapshot().definition
    for definition_with_root in (
        replace(definition, table_root=used_root),
        replace(definition, sources=(SourceRecord(root=used_root),)),
    ):
        if is_rejected:
            with pytest.raises(InvalidInputError):
                target_root(lake, target, definition_with_root)
        else:
            assert target_root(lake, target, definition_with_root) == target.rstrip("/") + "/"


def test_relocation_to_files_with_other_sizes_is_rejected(lake: Lakehouse, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    (tmp_path / "data").rename(moved)
    (data,) = list(moved.rglob("*.parquet"))
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(CorruptFileError):
        operations.plan_relocation(lake, f"file://{moved}/")
    data.write_bytes(content)
    operations.plan_relocation(lake, f"file://{moved}/").execute()
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow()["i"].to_pylist() == [1, 2, 3]


def test_export_skips_and_reports_table_that_can_no_longer_be_copied(lake: Lakehouse, tmp_path: Path) -> None:
    """A file is missing at both roots, so the export is not complete."""
    target = f"file://{tmp_path}/backups"
    catalog_at(lake).create_table("ns.other", pa.schema([("i", pa.int64())])).append(pa.table({"i": [7]}))
    operations.plan_export(lake, "first", "full", target=target).execute()
    (task,) = catalog_at(Lakehouse.open(target)).load_table("ns.t").scan().plan_files()
    Path(task.file.file_path.removeprefix("file://")).unlink()
    (task,) = catalog_at(lake).load_table("ns.t").scan().plan_files()
    Path(task.file.file_path.removeprefix("file://")).unlink()
    report = operations.plan_export(lake, "second", "full", target=target).execute()
    assert list(report.damaged) == ["ns.t"]
    assert Lakehouse.open(target).snapshot().tables("ns") == ["other"]


@pytest.mark.parametrize(
    ("pattern", "damage", "is_changed"),
    [
        ("*.parquet", "missing", False),
        ("*.parquet", "truncated", False),
        ("*-m0.avro", "missing", False),
        ("*-m0.avro", "truncated", False),
        ("snap-*.avro", "missing", False),
        ("*.metadata.json", "truncated", False),
        ("*.parquet", "missing", True),
        ("*.parquet", "truncated", True),
        ("*-m0.avro", "truncated", True),
    ],
)
def test_export_copies_damaged_files_at_target_again(
    lake: Lakehouse, tmp_path: Path, pattern: str, damage: str, is_changed: bool
) -> None:
    """Missing and truncated files of unchanged tables are copied again."""
    target = f"file://{tmp_path}/backups"
    catalog_at(lake).create_table("ns.other", pa.schema([("i", pa.int64())])).append(pa.table({"i": [7]}))
    operations.plan_export(lake, "first", "full", target=target).execute()
    folder = Path(catalog_at(Lakehouse.open(target)).load_table("ns.t").location().removeprefix("file://"))
    path = sorted(folder.rglob(pattern))[-1]
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-1])
    catalog_at(lake).load_table("ns.t" if is_changed else "ns.other").append(pa.table({"i": [4]}))
    report = operations.plan_export(lake, "second", "full", target=target).execute()
    assert report.is_complete
    assert path.read_bytes() == content
    exported = catalog_at(Lakehouse.open(target))
    expected = ([1, 2, 3, 4], [7]) if is_changed else ([1, 2, 3], [4, 7])
    for name, rows in zip(("ns.t", "ns.other"), expected, strict=True):
        assert sorted(exported.load_table(name).scan().to_arrow()["i"].to_pylist()) == rows
    assert operations.verify_export(lake, "second", deep=True).is_clean
