"""Reading may take longer than the time to live of a transaction, because only written files age."""

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
    """Advances its clock at each read and create."""

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
    """A lakehouse with versions that can expire and an orphan. Reading five files takes longer than its TTL."""
    lake = Lakehouse.create(clock.root, storage=clock, txn_ttl_millis=TTL_MS)
    grow(Aging(lake, clock), 4)
    clock.create(new_node_path(), b"left")
    clock.time_ms += 10 * TTL_MS
    clock.read_ms = TTL_MS // 4
    return lakes.watch(Lakehouse(clock, cache="off"))


def test_slow_expire_and_purge_complete(lake: Lakehouse, clock: SlowStorage) -> None:
    plan = operations.plan_expiration(lake, keeping(1))
    assert plan.execute(plan.digest).version is not None
    assert states(lake) == [("EXPIRED", "0-3")]
    clock.time_ms += 10 * TTL_MS
    due = operations.plan_purge(lake)
    assert due.execute(due.digest).is_complete
    assert states(lake) == [("PURGED", "0-3")]


def test_slow_orphan_removal_completes(lake: Lakehouse) -> None:
    plan = operations.plan_orphan_removal(lake)
    assert len(plan.paths) == 1
    assert plan.execute(plan.digest).files == 1


def test_slow_marking_includes_concurrent_commits(lake: Lakehouse, clock: SlowStorage) -> None:
    """Marking them takes longer than the time to live as well."""
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
    small = Lakehouse.create("memory://untidy/", storage=clock, txn_ttl_millis=TTL_MS, order=4, **small_sizes(4))
    clock.read_ms = 0
    make_untidy(small)
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
    """Finding them may take longer than the time to live, but rewriting them may not."""
    small = Lakehouse.create("memory://small-files/", storage=clock, txn_ttl_millis=TTL_MS)
    clock.read_ms = 0
    for _ in range(6):
        append_rows(small, "ns.rows")
    before = small.latest_version()
    clock.time_ms += 10 * TTL_MS
    clock.read_ms = TTL_MS
    plan = operations.plan_compact_tables(Lakehouse(clock, cache="off"))
    clock.read_ms = TTL_MS // 60
    assert plan.execute().version == before + 1


def test_slow_repair_completes(lake: Lakehouse, clock: SlowStorage) -> None:
    """The verification takes longer than the time to live, and the repair is a commit after it."""
    before = lake.latest_version()
    operations.plan_export(lake, "kept").execute()
    version = ForeignLake(clock).rollback(before, keeps_unknown=True)
    begun_ms = clock.time_ms
    plan = operations.plan_repair(Lakehouse(clock, cache="off"))
    assert clock.time_ms - begun_ms > TTL_MS
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


class _Tree:
    """A change of nodes whose draft takes a chosen time."""

    def __init__(self, work: Callable[[], None]):
        self._work = work

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        self._work()
        return draft_of_tree(base, stamp, base.root, CommitInfo("test"))

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Accept any concurrent commit."""


def test_files_of_an_attempt_age(lake: Lakehouse, clock: SlowStorage) -> None:
    """They could be removed as orphans before the root is created."""
    clock.create_ms = 2 * TTL_MS
    version = lake.latest_version()
    before = listed(clock)
    change = DefinitionChange("alter-definition", "", lambda base: base.definition.__class__(id=base.definition.id))
    with pytest.raises(TransactionExpiredError):
        change.commit(lake, lake.snapshot())
    assert lake.latest_version() == version
    assert listed(clock) == before, "what was written is gone"


def test_files_written_before_the_commit_age_from_their_write(lake: Lakehouse, clock: SlowStorage) -> None:
    written_ms = clock.time_ms

    def work() -> None:
        clock.time_ms = written_ms + TTL_MS + 1

    base = lake.snapshot()
    with pytest.raises(TransactionExpiredError):
        lake.commit(_Tree(work), base, written_since_ms=written_ms)
    assert lake.commit(_Tree(work), base) == base.version + 1


def test_transaction_ages_from_its_start(lake: Lakehouse, clock: SlowStorage) -> None:
    """Its base and its staged definitions may be older."""
    txn = lake.transaction()
    txn.create_namespace("late")
    clock.time_ms += TTL_MS + 1
    with pytest.raises(TransactionExpiredError):
        txn.commit()


def test_saved_transaction_keeps_its_age(lake: Lakehouse, clock: SlowStorage) -> None:
    clock.read_ms = 0
    clock_free = Lakehouse(lake.storage)
    txn = clock_free.transaction()
    txn.create_namespace("saved")
    resumed = clock_free.resume_transaction(txn.save())
    with pytest.raises(ConflictError):
        resumed.reset_age()
    resumed.rollback()


def test_operation_marks_again_after_an_orphan_removal(lake: Lakehouse, clock: SlowStorage) -> None:
    """Files that it read are older than the removal's limit, but not its own files."""
    base = lake.snapshot()
    clock.time_ms += 100 * TTL_MS
    operations.plan_orphan_removal(lake).execute()
    change = DefinitionChange("alter-definition", "", lambda newer: newer.definition)
    assert change.commit(lake, base) > base.version + 1
