"""Cold lookups read the settings and the first nodes in one round trip. A wrong guess does not change the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.lakes import table
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    CorruptFileError,
    InvalidNameError,
    NamespaceNotFoundError,
    StorageError,
    TableNotFoundError,
)
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, Storage, StorageWrapper, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://read-ahead/"
N_TABLES = 400


def storage_with_lakehouse(**settings: int) -> MemoryStorage:
    """Return the storage of a lakehouse whose tree has several levels below its root."""
    drop_memory_root(ROOT)
    storage = MemoryStorage(ROOT)
    lake = Lakehouse.create(ROOT, storage=storage, order=8, **settings)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(N_TABLES):
            txn.create_table("ns", f"t{number}", table())
    return storage


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    yield storage_with_lakehouse()
    drop_memory_root(ROOT)


def open_cold(storage: Storage) -> Lakehouse:
    """Return a lakehouse with empty caches, as in a new process."""
    return Lakehouse(storage)


def test_cold_lookup_takes_one_round_trip_per_level(storage: MemoryStorage) -> None:
    """The reads are the hint, the root, the settings with the first node, each further node, and the definition."""
    meter = MeteredStorage(storage)
    n_levels = open_cold(storage).snapshot().tree_shape().height
    assert n_levels >= 2
    with meter.measure() as lookup:
        assert open_cold(meter).snapshot().table("ns", "t7") == open_cold(storage).snapshot().table("ns", "t7")
    assert lookup.counts.rounds == 2 + n_levels + 1


def test_cold_listing_takes_one_round_trip_per_level(storage: MemoryStorage) -> None:
    meter = MeteredStorage(storage)
    snapshot = open_cold(storage).snapshot()
    n_levels = snapshot.tree_shape().height
    with meter.measure() as listing:
        assert sorted(open_cold(meter).snapshot().tables("ns")) == sorted(f"t{number}" for number in range(N_TABLES))
    assert listing.counts.rounds == 2 + n_levels


def test_cached_files_are_not_read_ahead(storage: MemoryStorage) -> None:
    meter = MeteredStorage(storage)
    lake = open_cold(meter)
    lake.snapshot().table("ns", "t7")
    with meter.measure() as warm:
        lake.snapshot().table("ns", "t7")
    assert warm.counts.requests == budget("look a table up, warm").requests


READS: dict[str, Callable[[Lakehouse], object]] = {
    "table": lambda lake: lake.snapshot().table("ns", "t42"),
    "tables": lambda lake: lake.snapshot().tables("ns"),
    "namespaces": lambda lake: lake.snapshot().namespaces(),
    "has_table": lambda lake: lake.snapshot().has_table("ns", "t399"),
    "has_table of missing table": lambda lake: lake.snapshot().has_table("ns", "none"),
    "namespace": lambda lake: lake.snapshot().namespace("ns"),
}


@pytest.mark.parametrize("sizes", [(3, 5), (100, 5), (3, 100), (300, 200)])
@pytest.mark.parametrize("read", READS)
def test_lookups_with_other_name_sizes_return_same_results(sizes: tuple[int, int], read: str) -> None:
    storage = storage_with_lakehouse(namespace_name_max_size_bytes=sizes[0], table_name_max_size_bytes=sizes[1])
    lake = open_cold(storage)
    lake.snapshot().definition  # noqa: B018 - reads the settings, so that nothing is guessed
    assert READS[read](open_cold(storage)) == READS[read](lake)
    drop_memory_root(ROOT)


def test_lookup_accepts_names_beyond_default_size() -> None:
    long_name = "t" * 150
    storage = storage_with_lakehouse(table_name_max_size_bytes=200)
    with pytest.raises(TableNotFoundError):
        open_cold(storage).snapshot().table("ns", long_name)
    assert not open_cold(storage).snapshot().has_table("ns", long_name)
    drop_memory_root(ROOT)


def test_read_ahead_raises_same_errors_as_sequential_reads(storage: MemoryStorage) -> None:
    with pytest.raises(InvalidNameError, match="101"):
        open_cold(storage).snapshot().table("ns", "t" * 101)
    with pytest.raises(NamespaceNotFoundError):
        open_cold(storage).snapshot().table("nowhere", "t")
    with pytest.raises(TableNotFoundError):
        open_cold(storage).snapshot().table("ns", "nothing")


class FailingReads(StorageWrapper):
    """Fails the first ``times`` reads of a path, or returns garbage for them."""

    def __init__(self, inner: Storage, path: str, *, is_garbage: bool, times: int):
        super().__init__(inner)
        self.path, self.is_garbage, self.times = path, is_garbage, times

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        data = super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        if path != self.path or self.times == 0:
            return data
        self.times -= 1
        if self.is_garbage:
            return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
        raise StorageError("the read failed", path=path)


@pytest.mark.parametrize("is_garbage", [False, True])
@pytest.mark.parametrize("is_node", [False, True])
def test_failed_read_ahead_is_retried_on_use(storage: MemoryStorage, is_garbage: bool, is_node: bool) -> None:
    snapshot = open_cold(storage).snapshot()
    path = snapshot.root.children[0] if is_node else snapshot.definition_location
    expected = snapshot.tables("ns")
    failing_once = FailingReads(storage, path, is_garbage=is_garbage, times=1)
    assert open_cold(failing_once).snapshot().tables("ns") == expected
    assert failing_once.times == 0
    always_failing = FailingReads(storage, path, is_garbage=is_garbage, times=100)
    with pytest.raises(CorruptFileError if is_garbage else StorageError) as failure:
        open_cold(always_failing).snapshot().tables("ns")
    assert failure.value.path == path
