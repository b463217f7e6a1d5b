"""The newest root known to a process: from it the latest version is found in one round trip, and is always verified."""

from __future__ import annotations

import pytest

from tests.clock import ManualClock
from tests.foreign import ForeignLake
from tests.lakes import check_lake, table
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.file_names import HINT_PATH, root_path
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.storage import (
    MemoryStorage,
    MeteredStorage,
    Storage,
    StorageWrapper,
    drop_memory_root,
)
from trinitylake_ops.transaction.pacing import COMMITS_BETWEEN_POLLS
from trinitylake_ops.transaction.publish import create_root
from trinitylake_ops.versions.root_files import KnownRoot

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://newest-root/"


@pytest.fixture
def meter() -> MeteredStorage:
    drop_memory_root(ROOT)
    return MeteredStorage(MemoryStorage(ROOT))


@pytest.fixture
def lake(meter: MeteredStorage) -> Lakehouse:
    lake = Lakehouse.create(ROOT, storage=meter)
    commit(lake, "a")
    return lake


def commit(lake: Lakehouse, namespace: str) -> int:
    with lake.transaction() as txn:
        txn.create_namespace(namespace)
    assert txn.committed_version is not None
    return txn.committed_version


def commit_in_other_process(namespace: str) -> int:
    """Commit as another process would."""
    return commit(Lakehouse(MemoryStorage(ROOT)), namespace)


def commit_after_conflict(lake: Lakehouse) -> None:
    """Commit after another process has won the race once."""
    txn = lake.transaction()
    txn.create_namespace("second")
    commit_in_other_process("first")
    txn.commit()


def test_failed_speculative_probe_costs_at_most_one_attempt(lake: Lakehouse, meter: MeteredStorage) -> None:
    faulty = FailingOnce(meter, {root_path(4), root_path(5)})
    writer = Lakehouse(faulty)
    commit_after_conflict(writer)
    txn = writer.transaction()
    txn.create_namespace("b")
    commit_in_other_process("other")
    faulty.is_armed = True
    assert txn.commit() == 5
    assert not faulty.paths


def test_speculative_probes_end_without_contention(lake: Lakehouse, meter: MeteredStorage) -> None:
    commit_after_conflict(lake)
    reads = []
    for number in range(COMMITS_BETWEEN_POLLS + 1):
        txn = lake.transaction()
        txn.create_namespace(f"b{number}")
        with meter.measure() as committing:
            txn.commit()
        reads.append(committing.counts.requests.get("read", 0))
    assert reads[0] == budget("commit while probing").requests["read"]
    assert reads[-1] == budget("commit a namespace").requests.get("read", 0)


def test_partly_failed_probe_resolves_commit(lake: Lakehouse, meter: MeteredStorage) -> None:
    """If the successor and the hint cannot be read, the outcome is known, and newer roots are found later."""
    faulty = FailingOnce(meter, {root_path(3), HINT_PATH})
    writer = Lakehouse(faulty)
    txn = writer.transaction()
    txn.create_namespace("b")
    commit(lake, "other")
    faulty.is_armed = True
    assert txn.commit() == 3
    assert not faulty.paths
    assert lake.snapshot().namespaces() == ["a", "b", "other"]


class FailingOnce(StorageWrapper):
    """Fails the first read of each of ``paths`` while ``is_armed``."""

    def __init__(self, inner: Storage, paths: set[str]):
        super().__init__(inner)
        self.paths = paths
        self.is_armed = False

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if self.is_armed and path in self.paths:
            self.paths.remove(path)
            raise StorageError("the read failed", path=path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)


@pytest.mark.parametrize("hint", [b"0", b"1", b"2", b"3", b"4294967295", b"garbage", None])
def test_wrong_hint_does_not_affect_known_newest_root(
    lake: Lakehouse, meter: MeteredStorage, hint: bytes | None
) -> None:
    other = Lakehouse(meter)
    for n_others in range(4):
        meter.delete(HINT_PATH) if hint is None else meter.write(HINT_PATH, hint)
        assert lake.snapshot().version == lake.latest_version() == 1 + n_others
        commit(other, f"other-{n_others}")
    meter.delete(HINT_PATH) if hint is None else meter.write(HINT_PATH, hint)
    assert lake.snapshot().namespaces() == ["a", *(f"other-{n}" for n in range(4))]


def test_commits_of_other_programs_are_found(lake: Lakehouse, meter: MeteredStorage) -> None:
    foreign = ForeignLake(meter)
    for number in range(3):
        version = foreign.commit_table("a", f"t{number}")
        assert lake.snapshot().version == version
        assert lake.snapshot().tables("a") == [f"t{n}" for n in range(number + 1)]


@pytest.mark.parametrize("n_versions", [1, 2, 3, 5])
def test_replaced_lakehouse_is_detected(lake: Lakehouse, meter: MeteredStorage, n_versions: int) -> None:
    """The new lakehouse can have as many versions, and a commit based on the old nodes would damage it."""
    commit(lake, "b")
    for info in list(meter.list()):
        meter.delete(info.path)
    fresh = Lakehouse.create(ROOT, storage=meter.inner)
    for number in range(n_versions):
        commit(fresh, f"new-{number}")
    assert lake.snapshot().namespaces() == [f"new-{number}" for number in range(n_versions)]
    assert commit(lake, "c") == n_versions + 1
    check_lake(Lakehouse(meter))


def test_root_without_commit_id_is_compared_by_content(lake: Lakehouse, meter: MeteredStorage) -> None:
    version = ForeignLake(meter).commit_table("a", "t")
    assert lake.snapshot().version == version
    data = meter.read(root_path(version))
    with meter.measure() as first_read:
        assert lake.snapshot().version == version
    assert first_read.counts.rounds == budget("begin, warm").rounds
    assert first_read.counts.bytes_read > len(data)


def test_cached_root_of_commit_equals_stored_root(lake: Lakehouse, meter: MeteredStorage) -> None:
    commit(lake, "b")
    with lake.transaction() as txn:
        for number in range(20):
            txn.create_table("b", f"t{number}", table())
        txn.drop_namespace("a")
    cached, stored = lake.snapshot().root, Lakehouse(meter).snapshot().root
    assert (cached, cached.file_size_bytes, cached.is_flat) == (stored, stored.file_size_bytes, stored.is_flat)
    assert lake.snapshot().tree_shape() == Lakehouse(meter).snapshot().tree_shape()


def test_open_succeeds_with_damaged_latest_root_and_reads_fail(meter: MeteredStorage) -> None:
    lake = Lakehouse.create(ROOT, storage=meter)
    meter.write(root_path(commit(lake, "a")), b"garbage")
    opened = Lakehouse.open(ROOT, storage=meter)
    assert opened.latest_version() == 1
    with pytest.raises(Exception, match="Arrow"):
        opened.snapshot()


def test_uncached_lakehouse_reads_root_each_time(lake: Lakehouse, meter: MeteredStorage) -> None:
    uncached = Lakehouse(meter, cache="off")
    for _ in range(2):
        with meter.measure() as first_read:
            uncached.snapshot()
        assert first_read.counts.rounds == budget("begin, without cache").rounds
        assert first_read.counts.bytes_read == len(b"1") + len(meter.inner.read(root_path(1)))


# The version that ``open`` reads


def test_transaction_right_after_open_reuses_opened_version(
    lake: Lakehouse, meter: MeteredStorage, manual_clock: ManualClock
) -> None:
    with meter.measure() as opening:
        opened = Lakehouse.open(ROOT, storage=meter)
    assert opening.counts.rounds == budget("open").rounds
    with meter.measure() as first_read:
        txn = opened.transaction()
    assert first_read.counts.requests == budget("begin right after open").requests
    with meter.measure() as second:
        opened.snapshot()
    assert second.counts.requests == budget("begin, warm").requests
    txn.create_table("a", "t", table())
    assert txn.commit() == 2


def test_opened_version_is_not_reused_later(lake: Lakehouse, meter: MeteredStorage, manual_clock: ManualClock) -> None:
    opened = Lakehouse.open(ROOT, storage=meter)
    manual_clock.advance(0.01)
    with meter.measure() as first_read:
        opened.snapshot()
    assert first_read.counts.requests == budget("begin, warm").requests


def test_opened_version_is_not_reused_after_own_commit(
    lake: Lakehouse, meter: MeteredStorage, manual_clock: ManualClock
) -> None:
    opened = Lakehouse.open(ROOT, storage=meter)
    commit(lake, "b")
    assert opened.snapshot().namespaces() == ["a", "b"]


def test_opened_version_is_not_returned_after_newer_read(
    lake: Lakehouse, meter: MeteredStorage, manual_clock: ManualClock
) -> None:
    """Successive reads of a lakehouse object never return an older version."""
    opened = Lakehouse.open(ROOT, storage=meter)
    ForeignLake(meter).commit_table("a", "t")
    assert opened.latest_version() == 2
    assert opened.snapshot().version == 2


def test_version_opened_during_own_commit_is_not_reused(
    lake: Lakehouse, meter: MeteredStorage, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_lakes: list[Lakehouse] = []
    create = meter.create

    def open_before_create(path: str, data: bytes) -> None:
        if path == root_path(2):
            opened_lakes.append(Lakehouse.open(ROOT, storage=MemoryStorage(ROOT)))
        create(path, data)

    monkeypatch.setattr(meter, "create", open_before_create)
    commit(lake, "b")
    assert opened_lakes[0].snapshot().version == 2


def test_failed_create_of_root_invalidates_opened_version(
    lake: Lakehouse, meter: MeteredStorage, manual_clock: ManualClock
) -> None:
    opened = Lakehouse.open(ROOT, storage=meter)
    other_root = NodeFile(system={COMMIT_ID: "other"})
    assert not create_root(KnownRoot(1, root_path(1), b"other", other_root), lake.files.roots)
    with meter.measure() as first_read:
        opened.snapshot()
    assert first_read.counts.requests == budget("begin, warm").requests
