"""End-to-end tests of lakehouses on Azure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lakes import check_lake, table, unreferenced_paths
from tests.operations.aging import Aging, expired_files, grow, needed_files
from tests.processes import fork
from tests.proxy import FaultyProxy, drop_response
from tests.servers.azurite import ACCOUNT_NAME, AzureServer
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import LakehouseExistsError, VersionExpiredError
from trinitylake_ops.storage import open_storage

pytestmark = [pytest.mark.debian_packages, pytest.mark.usefixtures("fixed_requests")]


@pytest.fixture
def root(azurite: AzureServer) -> Iterator[str]:
    new_root = azurite.fresh_root(scheme="abfss")
    yield new_root
    azurite.delete_all(new_root)


def create_tables(lake: Lakehouse, *names: str) -> int:
    with lake.transaction() as txn:
        for name in names:
            txn.create_table("ns", name, table(name=name))
    assert txn.committed_version is not None
    return txn.committed_version


def test_lakehouse_end_to_end(azurite: AzureServer, root: str, tmp_path: Path) -> None:
    options = azurite.storage_options
    lake = Lakehouse.create(root, options)
    with pytest.raises(LakehouseExistsError):
        Lakehouse.create(root, options)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    for number in range(4):
        create_tables(lake, f"t{number}")
    assert Lakehouse.open(root, options).snapshot().tables("ns") == ["t0", "t1", "t2", "t3"]
    operations.plan_rollback(lake, 3).execute()
    assert lake.snapshot().tables("ns") == ["t0", "t1"]
    assert {finding.code for finding in operations.verify(lake).findings} <= {"hint-wrong"}

    copy = str(tmp_path / "copy")
    operations.plan_export(lake, "export", "full", target=copy).execute()
    assert Lakehouse.open(copy).snapshot().tables("ns") == ["t0", "t1"]
    second_root = f"{root}second/"
    operations.plan_export(Lakehouse.open(copy), "second", "full", target=second_root, target_options=options).execute()
    assert Lakehouse.open(second_root, options).snapshot().tables("ns") == ["t0", "t1"]
    check_lake(lake)


def test_expired_versions_are_purged_and_their_files_deleted(azurite: AzureServer, root: str) -> None:
    aging = Aging.on(open_storage(root, azurite.storage_options))
    grow(aging, 4)
    aging.later()
    aging.expire()
    expired, needed = set(expired_files(aging.lake)), set(needed_files(aging.lake))
    aging.later()
    aging.purge()
    with pytest.raises(VersionExpiredError):
        aging.lake.snapshot(1)
    remaining_names = set(azurite.names(root))
    assert needed <= remaining_names
    only_expired = expired - needed
    assert only_expired
    assert {path for path in only_expired & remaining_names if not path.startswith("_")} == set(), (
        "files that only expired versions need are deleted"
    )
    aging.later()
    aging.remove_orphans()
    assert operations.verify(aging.lake).findings == ()


def test_commit_with_a_lost_response_recognizes_its_own_root(azurite: AzureServer, root: str) -> None:
    Lakehouse.create(root, azurite.storage_options)
    with FaultyProxy(azurite.endpoint) as proxy:
        options = {**azurite.storage_options, "endpoint": f"{proxy.url}/{ACCOUNT_NAME}"}
        lake = Lakehouse.open(root, options)
        proxy.begin(drop_response(method="PUT", target_part="/_", times=1))
        with lake.transaction() as txn:
            txn.create_namespace("ns")
        assert [exchange.fault is not None for exchange in proxy.log].count(True) == 1
    assert txn.committed_version == 1
    assert Lakehouse.open(root, azurite.storage_options).latest_version() == 1


def check_two_processes(azurite: AzureServer, root: str, n_commits: int) -> None:
    options = azurite.storage_options
    lake = Lakehouse.create(root, options, order=8)
    with lake.transaction() as txn:
        txn.create_namespace("ns")

    def table_creator(worker: int):  # type: ignore[no-untyped-def]
        def work(report) -> None:  # type: ignore[no-untyped-def]
            worker_lake = Lakehouse.open(root, options)
            for number in range(n_commits):
                report(str(create_tables(worker_lake, f"w{worker}-{number:03d}")))

        return work

    children = [fork(table_creator(worker), time_limit_seconds=500) for worker in range(2)]
    results = [child.finish() for child in children]
    assert [status for status, _ in results] == [0, 0]
    versions = [int(line) for _, lines in results for line in lines]
    assert sorted(versions) == list(range(2, 2 * n_commits + 2)), "each version was acknowledged once"
    lake = Lakehouse.open(root, options)
    assert lake.snapshot().tables("ns") == [f"w{w}-{n:03d}" for w in range(2) for n in range(n_commits)]
    assert unreferenced_paths(lake) == set()


def test_two_processes_lose_no_commit(azurite: AzureServer, root: str) -> None:
    check_two_processes(azurite, root, 20)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_processes_lose_none_of_400_commits(azurite: AzureServer, root: str) -> None:
    check_two_processes(azurite, root, 200)
