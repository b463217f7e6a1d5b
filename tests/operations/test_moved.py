"""A folder that was moved and a bucket that was copied: the whole upkeep at the new place, without the old one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lakes import local_storage
from tests.operations.aging import Aging, AgingStorage
from tests.operations.changes import append_rows
from tests.operations.copies import clean_up, copied, drop_all, rows
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.storage import Storage, open_storage


@pytest.fixture
def bucket(radosgw: S3Server) -> Iterator[str]:
    root = radosgw.fresh_root()
    yield root
    radosgw.delete_all(root)


def grown(storage: Storage) -> Aging:
    aging = Aging.on(storage)
    append_rows(aging.lake)
    append_rows(aging.lake)
    return aging


def at(storage: Storage, source: Aging) -> Aging:
    clock = AgingStorage(storage, source.clock.now_ms())
    return Aging(Lakehouse(clock), clock)


def kept_up(moved: Aging, former: str) -> None:
    """Write, compact, trim, expire, purge and remove orphans, before a relocation and after it."""
    assert rows(moved.lake) == sorted([1, 2, 3] * 2)
    clean_up(moved)
    assert rows(moved.lake) == sorted([1, 2, 3] * 3)
    assert operations.verify(moved.lake, deep=True).is_clean
    operations.plan_relocation(moved.lake).execute()
    clean_up(moved)
    assert rows(moved.lake) == sorted([1, 2, 3] * 4)
    report = operations.verify(moved.lake, deep=True)
    assert [finding.code for finding in report.findings] == []
    named = [info.path for info in moved.clock.list("tables/") if former.encode() in moved.clock.read(info.path)]
    assert named == [], "once older versions are purged, nothing names the former place"


def test_a_folder_that_was_moved(tmp_path: Path) -> None:
    source = grown(local_storage(tmp_path / "before"))
    source.lake.close()
    shutil.move(tmp_path / "before", tmp_path / "after")
    kept_up(at(local_storage(tmp_path / "after"), source), source.lake.root)
    assert not (tmp_path / "before").exists()


@pytest.mark.debian_packages
def test_a_bucket_that_was_copied(radosgw: S3Server, bucket: str) -> None:
    source = grown(open_storage(f"{bucket}before/", radosgw.storage_options))
    target = open_storage(f"{bucket}after/", radosgw.storage_options)
    copied(source.lake, target)
    drop_all(source.lake)
    kept_up(at(target, source), source.lake.root)
    assert list(source.clock.list()) == []
