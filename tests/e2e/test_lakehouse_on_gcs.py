"""Test a lakehouse on Google Cloud Storage from creation to purge, and with two processes that commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lakes import check_lake, objects, table, unreferenced_paths
from tests.operations.aging import Aging, grow, needed_files
from tests.operations.changes import append_rows, create, drop
from tests.processes import fork
from tests.proxy import FaultyProxy
from tests.servers.gcs import GcsServer
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CommitConflictError, LakehouseExistsError, VersionExpiredError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import open_storage

N_PROCESSES = 2


@pytest.fixture
def root(fake_gcs: GcsServer) -> Iterator[str]:
    fresh_root = fake_gcs.fresh_root()
    yield fresh_root
    fake_gcs.delete_all(fresh_root)


def rows(lake: Lakehouse) -> list[int]:
    with catalog_at(lake) as catalog:
        return sorted(catalog.load_table("ns.t").scan().to_arrow()["id"].to_pylist())


def test_lakehouse_is_created_changed_and_exported(fake_gcs: GcsServer, root: str, tmp_path: Path) -> None:
    options = fake_gcs.storage_options
    lake = Lakehouse.create(root, options, order=4)
    with pytest.raises(LakehouseExistsError):
        Lakehouse.create(root, options)
    create(lake, "a", "t", "u")
    append_rows(lake)
    kept_version = lake.latest_version()
    expected = objects(lake.snapshot()), rows(lake)
    conflicting = lake.transaction()
    conflicting.alter_table("a", "t", table(conflicting="yes"))
    drop(lake, "a")
    with pytest.raises(CommitConflictError):
        conflicting.commit()
    append_rows(lake)
    assert Lakehouse.open(root, options).snapshot().namespaces() == ["ns"]
    assert rows(lake) == sorted([1, 2, 3] * 2)

    operations.rollback(lake, kept_version)
    assert (objects(lake.snapshot()), rows(lake)) == expected
    operations.plan_export(lake, "external", "full", target=str(tmp_path / "copy")).execute()
    copy = Lakehouse.open(str(tmp_path / "copy"))
    assert (objects(copy.snapshot()).keys(), rows(copy)) == (expected[0].keys(), expected[1])
    copy_root = fake_gcs.fresh_root("copy")
    operations.plan_export(copy, "second", "full", target=copy_root, target_options=options).execute()
    assert rows(Lakehouse.open(copy_root, options)) == expected[1]
    fake_gcs.delete_all(copy_root)
    assert operations.verify(lake, deep=True).findings == ()
    check_lake(lake)


def test_expired_files_are_purged(fake_gcs: GcsServer, root: str) -> None:
    aging = Aging.on(open_storage(root, fake_gcs.storage_options))
    grow(aging, 5)
    aging.later()
    needed = needed_files(aging.lake)
    expired = aging.expire()
    with pytest.raises(VersionExpiredError):
        aging.lake.snapshot(1)
    before = set(fake_gcs.names(root))
    aging.later()
    purged = aging.purge()
    assert (purged.files, purged.is_complete) == (expired.files, True)
    assert expired.files > 10
    deleted = before - set(fake_gcs.names(root))
    assert len([name for name in deleted if not name.startswith("_ops/")]) == expired.files
    assert needed_files(aging.lake, 5) == needed
    aging.later()
    fake_gcs.put(root, "0101/orphan.binpb", b"x")
    assert aging.remove_orphans().version is None, "the file is too young"
    assert operations.verify(aging.lake).findings == ()
    check_lake(aging.lake)


@pytest.mark.usefixtures("fixed_requests_of_test")
def test_commit_sends_three_requests(fake_gcs: GcsServer, root: str) -> None:
    """As documented in docs/storages/README.md: an upload for each new file, the root, and the hint as best effort."""
    with FaultyProxy(fake_gcs.endpoint) as proxy:
        lake = Lakehouse.create(root, {**fake_gcs.storage_options, "endpoint": proxy.url})
        create(lake, "a", "t")
        transaction = lake.transaction()
        transaction.alter_table("a", "t", table(n="1"))
        proxy.begin()
        transaction.commit()
        uploads = [exchange for exchange in proxy.log if exchange.path.startswith("/upload/")]
        assert ["ifGenerationMatch=0" in exchange.query for exchange in uploads] == [True, True, False]
        assert len(proxy.log) == 3


@pytest.mark.parametrize(
    "n_commits", [20, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1_800)], id="200-soak")]
)
def test_concurrent_processes_lose_no_commits(fake_gcs: GcsServer, root: str, n_commits: int) -> None:
    """Both processes alter a separate and a shared table. Each commit has a separate version, and none is lost."""
    lake = Lakehouse.create(root, fake_gcs.storage_options, order=8)
    create(lake, "ns", "shared", *(f"t{number}" for number in range(N_PROCESSES)))
    first = lake.latest_version()

    def writer_process(number: int) -> Callable[[Callable[[str], None]], None]:
        def commit_all(report: Callable[[str], None]) -> None:
            lakehouse = Lakehouse.open(root, fake_gcs.storage_options)
            n_committed = 0
            while n_committed < n_commits:
                try:
                    with lakehouse.transaction() as txn:
                        txn.alter_table("ns", f"t{number}", table(n=str(n_committed + 1)))
                        if n_committed % 5 == 0:
                            txn.alter_table("ns", "shared", table(by=f"{number}-{n_committed}"))
                except CommitConflictError:
                    continue
                report(str(txn.committed_version))
                n_committed += 1

        return commit_all

    children = [fork(writer_process(number), time_limit_seconds=1_700) for number in range(N_PROCESSES)]
    results = [child.finish() for child in children]
    assert [status for status, _ in results] == [0] * N_PROCESSES
    versions = sorted(int(line) for _, lines in results for line in lines)
    assert versions == list(range(first + 1, first + 1 + N_PROCESSES * n_commits))
    snapshot = lake.snapshot()
    for number in range(N_PROCESSES):
        assert snapshot.table("ns", f"t{number}").properties["n"] == str(n_commits)
    assert unreferenced_paths(lake) == set()
    assert {finding.code for finding in operations.verify(lake).findings} <= {"hint-wrong"}
