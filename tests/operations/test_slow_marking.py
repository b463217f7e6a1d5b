"""Test that reading may take longer than the time to live of a transaction, because only written files age."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clock import AgingStorage
from tests.foreign import ForeignLake
from tests.lakes import Lakes, listed
from tests.operations.aging import Aging, grow, keeping, states
from tests.operations.changes import append_rows, create, make_untidy, overwrite_rows, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ConflictError, TransactionExpiredError
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.storage import Storage
from trinitylake_ops.transaction.draft import Draft, RootStamp, draft_of_tree
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.snapshot import Snapshot

pytestmark = pytest.mark.local_only("sets the clock of the storage")

TTL_MS = 60_000


class SlowStorage(AgingStorage):
    """A storage that advances its clock at each read and create."""

    def __init__(self, inner: Storage, time_ms: int):
        super().__init__(inner, time_ms)
        self.read_ms = 0
        self.create_ms = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.time_ms += self.read_ms
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        self.time_ms += self.create_ms


@pytest.fixture
def clock(lakes: Lakes) -> SlowStorage:
    storage = lakes.storage()
    return SlowStorage(storage, storage.now_ms())


@pytest.fixture
def lake(clock: SlowStorage, lakes: Lakes) -> Lakehouse:
    """A lakehouse with expirable versions and an orphan. Reading five files takes longer than its time to live."""
    lake = Lakehouse.create(clock.root, storage=clock, txn_ttl_millis=TTL_MS)
    grow(Aging(lake, clock), 4)
    clock.create(new_node_path(), b"orphan")
    clock.time_ms += 10 * TTL_MS
    clock.read_ms = TTL_MS // 4
    return lakes.watch(Lakehouse(clock, cache="off"))


def test_slow_expire_and_purge_complete(lake: Lakehouse, clock: SlowStorage) -> None:
    plan = operations.plan_expiration(lake, keeping(1))
    assert plan.execute(plan.digest).version is not None
    assert states(lake) == [("EXPIRED", "0-3")]
    clock.time_ms += 10 * TTL_MS
    purge_plan = operations.plan_purge(lake)
    assert purge_plan.execute(purge_plan.digest).is_complete
    assert states(lake) == [("PURGED", "0-3")]


def test_slow_orphan_removal_completes(lake: Lakehouse) -> None:
    plan = operations.plan_orphan_removal(lake)
    assert len(plan.paths) == 1
    assert plan.execute(plan.digest).files == 1


def test_slow_marking_includes_concurrent_commits(lake: Lakehouse, clock: SlowStorage) -> None:
    """Marking the concurrent commits also takes longer than the time to live."""
    other = Lakehouse(clock.inner)
    plan = operations.plan_orphan_removal(lake)

    def progress(what: str, done: int, total: int) -> None:
        if what == "versions" and done == total and other.latest_version() < 6:
            create(other, f"more{other.latest_version()}")

    report = plan.execute(progress=progress)
    assert report.files == 1
    assert report.version is not None
    assert report.version > plan.base_version + 1


def test_slow_compaction_completes(clock: SlowStorage) -> None:
    lake_with_small_nodes = Lakehouse.create(
        "memory://untidy/", storage=clock, txn_ttl_millis=TTL_MS, order=4, **small_sizes(4)
    )
    clock.read_ms = 0
    make_untidy(lake_with_small_nodes)
    clock.read_ms = TTL_MS // 4
    assert operations.compact(Lakehouse(clock, cache="off")).has_changed


def test_slow_export_is_created_and_dropped(lake: Lakehouse) -> None:
    operations.plan_export(lake, "all", "full").execute()
    assert lake.snapshot("all").namespaces()
    operations.drop_export(lake, "all")


def test_slow_rollback_completes(lake: Lakehouse) -> None:
    base = lake.latest_version()
    assert operations.plan_rollback(lake, base - 1).execute().version == base + 1
    assert operations.plan_rollback(lake, base, namespaces=["n0"]).execute().version == base + 2


def test_slow_trim_and_table_compaction_complete(lake: Lakehouse, clock: SlowStorage) -> None:
    clock.read_ms = 0
    overwrite_rows(lake, "n0.rows")
    clock.time_ms += 10 * TTL_MS
    clock.read_ms = TTL_MS // 8
    assert operations.plan_trim_tables(lake, keeping(1)).execute().tables == ("n0.rows",)


def test_slow_data_file_compaction_completes(clock: SlowStorage) -> None:
    """Planning may take longer than the time to live, but the rewrite may not."""
    lake_with_small_files = Lakehouse.create("memory://small-files/", storage=clock, txn_ttl_millis=TTL_MS)
    clock.read_ms = 0
    for _ in range(6):
        append_rows(lake_with_small_files, "ns.rows")
    before = lake_with_small_files.latest_version()
    clock.time_ms += 10 * TTL_MS
    clock.read_ms = TTL_MS
    plan = operations.plan_compact_tables(Lakehouse(clock, cache="off"))
    clock.read_ms = TTL_MS // 60
    assert plan.execute().version == before + 1


def test_slow_repair_completes(lake: Lakehouse, clock: SlowStorage) -> None:
    """The verification before the repair takes longer than the time to live."""
    before = lake.latest_version()
    operations.plan_export(lake, "kept").execute()
    version = ForeignLake(clock).rollback(before, keeps_unknown=True)
    started_ms = clock.time_ms
    plan = operations.plan_repair(Lakehouse(clock, cache="off"))
    assert clock.time_ms - started_ms > TTL_MS
    assert not plan.is_empty
    assert plan.execute(plan.digest).is_complete
    assert lake.latest_version() == version + 1


def test_slow_reconcile_completes(lake: Lakehouse, clock: SlowStorage) -> None:
    before = lake.latest_version()
    operations.plan_export(lake, "kept").execute()
    version = ForeignLake(clock).rollback(before, keeps_unknown=True)
    report = operations.reconcile(Lakehouse(clock, cache="off"))
    assert report.version == version + 1
    assert report.restored_exports == ("kept",)


class _SlowChange:
    """A change of nodes that calls ``work`` when it is drafted."""

    def __init__(self, work: Callable[[], None]):
        self._work = work

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        self._work()
        return draft_of_tree(base, stamp, base.root, CommitInfo("test"))

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Accept any concurrent commit."""


def test_files_of_a_slow_attempt_expire(lake: Lakehouse, clock: SlowStorage) -> None:
    """An orphan removal could delete the files before the root is created."""
    clock.create_ms = 2 * TTL_MS
    version = lake.latest_version()
    before = listed(clock)
    change = DefinitionChange("alter-definition", "", lambda base: base.definition.__class__(id=base.definition.id))
    with pytest.raises(TransactionExpiredError):
        change.commit(lake, lake.snapshot())
    assert lake.latest_version() == version
    assert listed(clock) == before, "the written files are deleted"


def test_files_written_before_the_commit_expire_relative_to_their_write(lake: Lakehouse, clock: SlowStorage) -> None:
    written_ms = clock.time_ms

    def work() -> None:
        clock.time_ms = written_ms + TTL_MS + 1

    base = lake.snapshot()
    with pytest.raises(TransactionExpiredError):
        lake.commit(_SlowChange(work), base, written_since_ms=written_ms)
    assert lake.commit(_SlowChange(work), base) == base.version + 1


def test_transaction_expires_relative_to_its_start(lake: Lakehouse, clock: SlowStorage) -> None:
    """The transaction's base and staged definitions may be older than the time to live."""
    txn = lake.transaction()
    txn.create_namespace("late")
    clock.time_ms += TTL_MS + 1
    with pytest.raises(TransactionExpiredError):
        txn.commit()


def test_saved_transaction_keeps_its_age(lake: Lakehouse, clock: SlowStorage) -> None:
    clock.read_ms = 0
    reopened = Lakehouse(lake.storage)
    txn = reopened.transaction()
    txn.create_namespace("saved")
    resumed = reopened.resume_transaction(txn.save())
    with pytest.raises(ConflictError):
        resumed.reset_age()
    resumed.rollback()


def test_operation_marks_again_after_an_orphan_removal(lake: Lakehouse, clock: SlowStorage) -> None:
    """Files that the operation read are older than the limit of the removal, but its own files are not."""
    base = lake.snapshot()
    clock.time_ms += 100 * TTL_MS
    operations.plan_orphan_removal(lake).execute()
    change = DefinitionChange("alter-definition", "", lambda newer: newer.definition)
    assert change.commit(lake, base) > base.version + 1
