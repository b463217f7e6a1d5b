"""Caching of repeated reads: nodes and definitions are cached, roots and the hint never are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import FaultyStorage
from tests.lakes import Lakes, local_storage, objects, table
from tests.processes import fork
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import (
    HINT_PATH,
    is_immutable_path,
    new_export_root_path,
    new_lakehouse_def_path,
    new_manifest_path,
    new_namespace_path,
    new_node_path,
    new_table_path,
    root_path,
    table_prefix,
)
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.storage import MeteredStorage, Storage, StorageWrapper
from trinitylake_ops.storage.cache.storage import clear_process_caches

pytestmark = [
    pytest.mark.local_only("tests caches, which work the same on every storage, with files of the local file system"),
    pytest.mark.usefixtures("fixed_requests"),
]

SIZES: dict[str, Any] = {"order": 4, "namespace_name_max_size_bytes": 16, "table_name_max_size_bytes": 16}
N_TABLES = 40
OPTIONS = {"fsync": "false"}


@pytest.fixture
def filled_lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse in a folder, with a tree of several levels and empty caches."""
    limit_bytes = smallest_node_file_limit_bytes(LakehouseDef(id="", **SIZES))
    lake = lakes.local(node_file_max_size_bytes=limit_bytes, **SIZES)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(N_TABLES):
            txn.create_table("ns", f"t{number}", table())
    assert sum("-node-" in info.path for info in lake.storage.list()) > 5
    clear_process_caches()
    return lake


@pytest.fixture
def log(filled_lake: Lakehouse) -> FaultyStorage:
    return FaultyStorage(filled_lake.storage)


def read_paths(log: FaultyStorage, action: Callable[[], object]) -> set[str]:
    """Return the paths that an action reads, after checking that it reads no immutable file twice."""
    before = len(log.log)
    action()
    paths = [request.path for request in log.log[before:] if request.kind == "read"]
    immutable = [path for path in paths if is_immutable_path(path)]
    assert len(set(immutable)) == len(immutable)
    return set(paths)


def roots_and_hint(version: int) -> set[str]:
    return {HINT_PATH, root_path(version), root_path(version + 1)}


def immutable_paths(lake: Lakehouse) -> set[str]:
    return {info.path for info in lake.storage.list() if is_immutable_path(info.path)}


# Immutable files


@pytest.mark.parametrize(
    "path",
    [
        new_node_path(),
        new_node_path().replace(".arrow", ".ipc"),
        new_namespace_path("a\nb", 200),
        new_table_path("ns", "tä/b", 200),
        new_lakehouse_def_path(),
        "0101/0000/1111/00110100-d1c778e6-cbf8-401a-80ad-b24ae11b2b6d.binpb",
    ],
    ids=range(6),  # names are unique to each process
)
def test_nodes_and_definitions_are_immutable(path: str) -> None:
    assert is_immutable_path(path)


@pytest.mark.parametrize(
    "path",
    [
        root_path(7),
        f"_{'0' * 64}.ipc",
        HINT_PATH,
        new_export_root_path(),
        new_manifest_path(),
        "_ops/lease-1.json",
        f"{table_prefix('id')}metadata/{new_node_path()}",
        f"tables/{new_lakehouse_def_path()}",
        "1101/0111/0011/01111110-my-path-my-table-definition.binpb",  # a name that can be reused
        "_lakehouse_def_1.binpb",
        new_node_path() + "/",
        new_node_path() + "\n",
        new_node_path().replace("node-", "node/"),
    ],
    ids=range(13),
)
def test_other_files_are_not_immutable(path: str) -> None:
    assert not is_immutable_path(path)


# Caching within a process


def test_second_snapshot_and_transaction_read_only_roots_and_hint(filled_lake: Lakehouse, log: FaultyStorage) -> None:
    lake = Lakehouse(log)
    assert read_paths(log, lambda: objects(lake.snapshot())) == roots_and_hint(1) | immutable_paths(filled_lake)
    assert read_paths(log, lambda: objects(lake.snapshot())) == roots_and_hint(1)

    def change() -> None:
        with lake.transaction() as txn:
            txn.drop_table("ns", "t3")
            assert len(txn.tables("ns")) == N_TABLES - 1

    assert read_paths(log, change) == roots_and_hint(1)


def test_begin_does_not_read_root_of_own_commit(filled_lake: Lakehouse, log: FaultyStorage) -> None:
    lake = Lakehouse(log, cache="shared")
    with lake.transaction() as txn:
        txn.alter_table("ns", "t1", table(changed="yes"))
        txn.create_namespace("more")
        for number in range(90):
            txn.create_table("more", f"t{number}", table())
    created = {request.path for request in log.log if request.kind == "create"}
    assert sum("-node-" in path for path in created) > 2
    other = Lakehouse(log, cache="shared")  # has its own decoded nodes and definitions
    assert read_paths(log, lambda: objects(other.snapshot())).isdisjoint(created - {root_path(2)})


def test_lakehouses_opened_by_root_share_cache(filled_lake: Lakehouse) -> None:
    first = Lakehouse.open(filled_lake.root, OPTIONS)
    expected = objects(first.snapshot())
    files = {path: filled_lake.storage.read(path) for path in immutable_paths(filled_lake)}
    filled_lake.storage.delete_many(list(files))
    second = Lakehouse.open(filled_lake.root, OPTIONS)
    assert objects(second.snapshot()) == expected  # readable although the files were deleted
    for other_lake in (
        Lakehouse.open(filled_lake.root),
        Lakehouse.open(filled_lake.root, OPTIONS, storage=filled_lake.storage),
    ):
        with pytest.raises(FileMissingError):  # with other options or a separate storage
            objects(other_lake.snapshot())
    filled_lake.storage.create_many(files)


def test_zero_cache_bytes_disable_cache(filled_lake: Lakehouse, log: FaultyStorage) -> None:
    lake, other = (Lakehouse(log, {"cache_bytes": "0"}, cache="shared") for _ in range(2))
    assert read_paths(log, lambda: objects(lake.snapshot())) == read_paths(log, lambda: objects(other.snapshot()))
    assert lake.files.storage is log


@pytest.mark.parametrize(
    "option", [{"cache_bytes": "much"}, {"cache_folder": ""}, {"cache_folder_bytes": "-1"}, {"cache_folder": "."}]
)
def test_invalid_cache_options_are_rejected(
    filled_lake: Lakehouse, option: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(filled_lake.root.removeprefix("file://"))
    with pytest.raises(InvalidInputError, match=next(iter(option))):
        Lakehouse.open(filled_lake.root, {**OPTIONS, **option})


# Caching between processes


def test_second_process_with_shared_cache_folder_reads_only_roots_and_hint(
    filled_lake: Lakehouse, tmp_path: Path
) -> None:
    options = {"cache_folder": str(tmp_path / "cache")}

    def action(report: Callable[[str], None]) -> None:
        log = FaultyStorage(local_storage(tmp_path / "lake"))
        for path in read_paths(log, lambda: objects(Lakehouse(log, options, cache="shared").snapshot())):
            report(path)

    (first_status, first), (second_status, second) = fork(action).finish(), fork(action).finish()
    assert (first_status, second_status) == (0, 0)
    assert set(first) == roots_and_hint(1) | immutable_paths(filled_lake)
    assert set(second) == roots_and_hint(1)


# Reads that bypass the cache


@pytest.fixture
def cached_lake(filled_lake: Lakehouse, tmp_path: Path) -> Iterator[Lakehouse]:
    """A lakehouse whose files are all cached, in memory and on disk."""
    lake = Lakehouse.open(filled_lake.root, {**OPTIONS, "cache_folder": str(tmp_path / "cache")})
    with lake.transaction() as txn:
        txn.drop_namespace("ns", cascade=True)
    for version in (1, 2):
        objects(lake.snapshot(version))
    before = {path: lake.storage.read(path) for path in immutable_paths(lake)}
    yield lake
    for path, data in before.items():
        lake.storage.write(path, data)


def findings(lake: Lakehouse) -> set[tuple[str, str | None]]:
    return {(finding.code, finding.path) for finding in operations.verify(lake).findings}


def test_verify_bypasses_cache(cached_lake: Lakehouse) -> None:
    """It reports a node that exists only in the caches, and a definition that is intact only there."""
    assert operations.verify(cached_lake).is_clean
    node = cached_lake.snapshot(1).root.children[0]
    definition = next(path for path in immutable_paths(cached_lake) if "-table-" in path)
    cached_lake.storage.delete(node)
    assert {("node-missing", node)} == findings(cached_lake)
    cached_lake.storage.write(definition, b"\xff")
    assert len(objects(cached_lake.snapshot(1))) == N_TABLES + 1
    cached_lake.storage.write(
        node, Lakehouse.open(cached_lake.root, cached_lake.storage_options).files.storage.read(node)
    )
    assert {("definition-unreadable", definition)} == findings(cached_lake)


@pytest.mark.parametrize("path_part", ["-node-", "-table-", "-namespace-"])
def test_rollback_detects_missing_file(cached_lake: Lakehouse, path_part: str) -> None:
    deleted_paths = [path for path in immutable_paths(cached_lake) if path_part in path]
    cached_lake.storage.delete_many(deleted_paths)
    with pytest.raises(FileMissingError):
        operations.plan_rollback(cached_lake, 1)


def test_rollback_detects_file_deleted_after_plan(cached_lake: Lakehouse) -> None:
    plan = operations.plan_rollback(cached_lake, 1)
    cached_lake.storage.delete_many([path for path in immutable_paths(cached_lake) if "-table-" in path])
    with pytest.raises(FileMissingError):
        plan.execute(plan.digest)
    assert cached_lake.latest_version() == 2


# Damaged responses


class DamagedReads(StorageWrapper):
    """Damages the first ``times`` reads of each immutable file."""

    def __init__(self, inner: Storage, times: int):
        super().__init__(inner)
        self.times = times
        self.n_reads: dict[str, int] = {}

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        data = self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        self.n_reads[path] = self.n_reads.get(path, 0) + 1
        if not is_immutable_path(path) or self.n_reads[path] > self.times:
            return data
        return data[:-1] if path.endswith(".arrow") else b"\xff" + data


def test_damaged_response_is_read_again(filled_lake: Lakehouse, tmp_path: Path) -> None:
    damaged_reads = DamagedReads(filled_lake.storage, times=1)
    lake = Lakehouse(damaged_reads, {"cache_folder": str(tmp_path / "cache")}, cache="shared")
    assert objects(lake.snapshot()) == objects(filled_lake.snapshot())
    assert {path for path, n_reads in damaged_reads.n_reads.items() if n_reads == 2} >= immutable_paths(filled_lake)


@pytest.mark.parametrize("with_folder", [False, True])
def test_undecodable_file_is_not_cached(filled_lake: Lakehouse, tmp_path: Path, with_folder: bool) -> None:
    options = {"cache_folder": str(tmp_path / "cache")} if with_folder else {}
    damaged_reads = DamagedReads(filled_lake.storage, times=2)
    with pytest.raises(CorruptFileError):
        objects(Lakehouse(damaged_reads, options, cache="shared").snapshot())
    damaged_reads.times = 0
    assert objects(Lakehouse(damaged_reads, options, cache="shared").snapshot()) == objects(filled_lake.snapshot())


def test_damaged_file_is_not_read_again_without_cache(filled_lake: Lakehouse) -> None:
    """Only a file that was read ahead is read again, by the caller that reports the damage."""
    damaged_reads = DamagedReads(filled_lake.storage, times=99)
    lake = Lakehouse(damaged_reads, cache="off")
    with pytest.raises(CorruptFileError):
        objects(lake.snapshot())
    counts = sorted(n_reads for path, n_reads in damaged_reads.n_reads.items() if is_immutable_path(path))
    assert counts[-1] == 2
    assert set(counts[:-1]) == {1}


def test_meter_counts_requests_below_cache(filled_lake: Lakehouse) -> None:
    meter = MeteredStorage(filled_lake.storage)
    lake = Lakehouse(meter)
    with meter.measure() as measured:
        objects(lake.snapshot())
    assert measured.counts.requests["read"] == budget("begin, warm").requests["read"] + len(
        immutable_paths(filled_lake)
    )


def test_lakehouse_on_wrapped_storage_shares_caches(filled_lake: Lakehouse) -> None:
    lake = Lakehouse(filled_lake.storage)
    before = lake.snapshot()
    expected = (before.table("ns", "t7"), before.definition)
    meter = MeteredStorage(filled_lake.storage)
    snapshot = lake.on(meter).snapshot()
    assert (snapshot.table("ns", "t7"), snapshot.definition) == expected
    assert meter.snapshot().requests == budget("begin, warm").requests
