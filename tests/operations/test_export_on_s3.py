"""Test exports from a local disk to an S3 server and back, and from an S3 server to a local disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lakes import Lakes, check_lake, objects
from tests.operations.changes import append_rows, create, drop
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import drop_memory_root

pytestmark = pytest.mark.debian_packages


@pytest.fixture
def bucket(radosgw: S3Server) -> Iterator[str]:
    root = radosgw.fresh_root()
    yield root
    radosgw.delete_all(root)


def content(lake: Lakehouse) -> object:
    with catalog_at(lake) as catalog:
        rows = catalog.load_table("ns.t").scan().to_arrow()["id"].to_pylist()
    return objects(lake.snapshot()), sorted(rows)


@pytest.mark.local_only("exports from a local disk")
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("level", ["minimal", "partial", "full"])
def test_export_from_a_disk_to_s3_is_restored(
    lakes: Lakes, radosgw: S3Server, bucket: str, tmp_path: Path, level: str, client: str
) -> None:
    options = {**radosgw.storage_options, "client": client}
    lake = lakes.local(order=4)
    append_rows(lake)
    create(lake, "a", "t", "u")
    expected = content(lake)
    operations.plan_export(lake, "away", level, target=bucket, target_options=options).execute()
    # A lakehouse in a bucket can refer to local files only if the reader allows their root.
    other = Lakehouse.open(bucket, {**options, "allowed_roots": lake.root})
    assert content(other) == expected
    assert operations.verify_export(lake, "away", deep=True, target_options=options).is_clean
    append_rows(lake)
    drop(lake, "a")
    operations.restore_export(lake, "away", target_options=options)
    assert content(lake) == expected
    assert operations.verify(lake).findings == ()
    check_lake(other)

    if level == "full":
        create(lake, "b")
        repeated = operations.plan_export(lake, "again", level, target=bucket, target_options=options).execute()
        assert (repeated.target_version, content(other)) == (1, content(lake))
        copy = str(tmp_path / "copy")
        operations.plan_export(other, "down", level, target=copy).execute()
        assert content(Lakehouse.open(copy)) == content(other)


@pytest.mark.parametrize("level", ["minimal", "partial", "full"])
def test_export_from_s3_to_a_disk_is_restored(radosgw: S3Server, bucket: str, tmp_path: Path, level: str) -> None:
    """Files of the source are read with its storage options, which the environment does not provide."""
    options = {**radosgw.storage_options, "allowed_roots": f"file://{tmp_path}/"}
    lake = Lakehouse.create(f"{bucket}source", options)
    append_rows(lake)
    create(lake, "a", "t", "u")
    expected = content(lake)
    operations.plan_export(lake, "away", level, target=str(tmp_path / "target")).execute()
    assert objects(lake.snapshot("away")) == objects(lake.snapshot())
    append_rows(lake)
    drop(lake, "a")
    operations.restore_export(lake, "away")
    assert content(lake) == expected
    assert operations.verify(lake).findings == ()


def test_export_between_buckets_of_one_server(radosgw: S3Server, bucket: str) -> None:
    options = radosgw.storage_options
    lake = Lakehouse.create(f"{bucket}source", options)
    append_rows(lake)
    operations.plan_export(lake, "away", "full", target=f"{bucket}target").execute()
    assert content(Lakehouse.open(f"{bucket}target", options)) == content(lake)
    assert content(lake) == (objects(lake.snapshot("away")), [1, 2, 3])


def test_export_from_memory_to_s3(radosgw: S3Server, bucket: str) -> None:
    lake = Lakehouse.create("memory://export-to-s3/")
    try:
        create(lake, "a", "t")
        operations.plan_export(lake, "away", "full", target=bucket, target_options=radosgw.storage_options).execute()
        assert objects(Lakehouse.open(bucket, radosgw.storage_options).snapshot()) == objects(lake.snapshot())
    finally:
        drop_memory_root("memory://export-to-s3/")
