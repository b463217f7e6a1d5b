"""The commit protocol under failures: the outcome, the files that remain, and the files that are never deleted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.clock import ClockStorage
from tests.faults import Fault, FaultyStorage, fail, lose_response
from tests.lakes import Lakes, check_lake, listed, objects, seal, table, unreferenced_paths
from tests.transaction.groups import commit_queued
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitOutcomeUnknownError,
    InvalidDefinitionError,
    LakehouseExistsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransactionExpiredError,
    TransientError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import HINT_PATH, MAX_VERSION, root_path
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.storage import RetryStorage, Storage, StorageWrapper
from trinitylake_ops.tree.shape import walk

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT_2 = root_path(2)
ROOTS = frozenset(map(root_path, range(10)))
LONG_MESSAGE = "m" * 3500  # leaves little space in the root, so that messages are flushed to new nodes


@pytest.fixture
def filled_lake(lake: Lakehouse) -> Lakehouse:
    """A lakehouse whose tree has several levels at version 1."""
    with lake.transaction(message=LONG_MESSAGE) as txn:
        txn.create_namespace("ns")
        for number in range(30):
            txn.create_table("ns", f"t{number:02d}", table())
    return lake


def commit_with_faults(lake: Lakehouse, *faults: Fault) -> int:
    """Create the namespace ``new`` and many tables through a storage with faults."""
    txn = Lakehouse(FaultyStorage(lake.storage, faults)).transaction(message=LONG_MESSAGE)
    txn.create_namespace("new")
    for number in range(30):
        txn.create_table("new", f"t{number}", table())
    return txn.commit()


def assert_committed_once(lake: Lakehouse, version: int) -> None:
    assert lake.latest_version() == version
    assert len(lake.snapshot().tables("new")) == 30
    members = [member for info in lake.history() for member in info.members]
    assert len(members) == len(set(members)) == version
    assert unreferenced_paths(lake) == set()
    check_lake(lake)


# Lost responses


def test_lost_response_of_root_is_resolved_by_read_back(filled_lake: Lakehouse) -> None:
    assert commit_with_faults(filled_lake, lose_response(1, kind="create", path_part=ROOT_2)) == 2
    assert_committed_once(filled_lake, 2)


def test_lost_root_is_resent_with_same_bytes(filled_lake: Lakehouse) -> None:
    faults = [fail(1, AmbiguousWriteError, kind="create", path_part=ROOT_2, times=3)]
    storage = FaultyStorage(filled_lake.storage, faults)
    sent = _SentBytes(storage)
    with Lakehouse(sent).transaction() as txn:
        txn.create_namespace("new")
    assert txn.committed_version == 2
    assert len(sent.roots) == 4
    assert len(set(sent.roots)) == 1


class _SentBytes(StorageWrapper):
    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.roots: list[bytes] = []

    def create(self, path: str, data: bytes) -> None:
        if path == ROOT_2:
            self.roots.append(data)
        self.inner.create(path, data)


def test_lost_response_after_other_commit_is_rebased(filled_lake: Lakehouse) -> None:
    """The request did not arrive, and another transaction creates the root before the retry."""
    storage = _ConflictingStorage(filled_lake.storage)
    txn = Lakehouse(storage).transaction()
    txn.create_namespace("new")
    for number in range(30):
        txn.create_table("new", f"t{number}", table())
    assert txn.commit() == 3
    assert filled_lake.snapshot(2).has_namespace("other")
    assert_committed_once(filled_lake, 3)


class _ConflictingStorage(StorageWrapper):
    """Loses the first create of version 2, after another transaction has committed that version."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._is_first = True

    def create(self, path: str, data: bytes) -> None:
        if path == ROOT_2 and self._is_first:
            self._is_first = False
            with Lakehouse(self.inner).transaction() as txn:
                txn.create_namespace("other")
            raise AmbiguousWriteError("injected", path=path)
        self.inner.create(path, data)


@pytest.mark.parametrize("error", [StoragePermissionError, TransientError])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_unreadable_root_leaves_outcome_unknown_and_files_in_place(
    filled_lake: Lakehouse, error: type[TransientError], moment: str
) -> None:
    before = listed(filled_lake.storage)
    lost = Fault(1, "after" if moment == "after" else "before", AmbiguousWriteError, "create", ROOT_2)
    # The first read of version 2 searches for the latest version, and the second one is the read-back.
    with pytest.raises(CommitOutcomeUnknownError) as caught:
        commit_with_faults(filled_lake, lost, fail(2, error, kind="read", path_part=ROOT_2, times=99))
    assert (caught.value.version, caught.value.path) == (2, ROOT_2)
    new_paths = listed(filled_lake.storage) - before
    assert any("-node-" in path for path in new_paths), "the tree has several nodes"
    if moment == "after":
        root = decode_node(filled_lake.storage.read(ROOT_2), ROOT_2)
        assert root.system[COMMIT_ID] == caught.value.commit_id
        assert_committed_once(filled_lake, 2)
    else:
        assert filled_lake.latest_version() == 1
        assert len([path for path in new_paths if "-table-" in path]) == 30, "nothing was deleted"


def test_corrupt_root_leaves_outcome_unknown(filled_lake: Lakehouse) -> None:
    storage = FaultyStorage(filled_lake.storage)
    txn = Lakehouse(storage).transaction()
    txn.create_namespace("new")
    filled_lake.storage.create(ROOT_2, b"garbage")
    with pytest.raises(CommitOutcomeUnknownError):
        txn.commit()
    filled_lake.storage.delete(ROOT_2)


@pytest.mark.parametrize(
    "retry_fault", [fail(2, StoragePermissionError, kind="create", path_part=ROOT_2), None], ids=["rejected", "expired"]
)
def test_rejection_after_lost_response_leaves_outcome_unknown(
    filled_lake: Lakehouse, retry_fault: Fault | None
) -> None:
    """The first request may still arrive, so its files must be kept."""
    clock = ClockStorage(filled_lake.storage, filled_lake.snapshot().created_at_ms + 10)
    faults = [fail(1, AmbiguousWriteError, kind="create", path_part=ROOT_2), *([retry_fault] if retry_fault else [])]
    delayed = _SentBytes(FaultyStorage(clock, faults))
    txn = Lakehouse(delayed).transaction()
    txn.create_namespace("new")
    for number in range(30):
        txn.create_table("new", f"t{number}", table())
    if retry_fault is None:
        txn.require(lambda _: None)
        delayed.create = _advancing(delayed, clock)  # type: ignore[method-assign]
    with pytest.raises(CommitOutcomeUnknownError) as caught:
        txn.commit()
    filled_lake.storage.create(ROOT_2, delayed.roots[0])
    assert decode_node(delayed.roots[0], ROOT_2).system[COMMIT_ID] == caught.value.commit_id
    assert_committed_once(filled_lake, 2)


def _advancing(sent: _SentBytes, clock: ClockStorage):  # type: ignore[no-untyped-def]
    def create(path: str, data: bytes) -> None:
        try:
            _SentBytes.create(sent, path, data)
        finally:
            if path == ROOT_2:
                clock.time_ms += 10**10

    return create


def test_unreachable_root_leaves_outcome_unknown(filled_lake: Lakehouse) -> None:
    with pytest.raises(CommitOutcomeUnknownError):
        commit_with_faults(filled_lake, fail(1, AmbiguousWriteError, kind="create", path_part=ROOT_2, times=99))


# Failures before the root is created


@pytest.mark.parametrize("error", [StorageFullError, StoragePermissionError, TransientError])
@pytest.mark.parametrize("path_part", ["-table-", "-namespace-", "-node-", ROOT_2])
def test_failed_commit_leaves_no_files(filled_lake: Lakehouse, error: type[StorageFullError], path_part: str) -> None:
    before = listed(filled_lake.storage)
    with pytest.raises(error):
        commit_with_faults(filled_lake, fail(1, error, kind="create", path_part=path_part, times=99))
    assert listed(filled_lake.storage) == before
    assert filled_lake.latest_version() == 1


def test_undeletable_files_are_logged_and_error_is_kept(
    filled_lake: Lakehouse, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StorageFullError), caplog.at_level(logging.WARNING):
        commit_with_faults(
            filled_lake,
            fail(1, StorageFullError, kind="create", path_part=ROOT_2),
            fail(1, StoragePermissionError, kind="delete", times=999),
        )
    assert "could not be deleted" in caplog.text
    assert filled_lake.latest_version() == 1
    check_lake(filled_lake)


@pytest.mark.parametrize("error", [StoragePermissionError, TransientError, StorageFullError])
def test_unwritable_hint_is_logged_and_commit_succeeds(
    filled_lake: Lakehouse, caplog: pytest.LogCaptureFixture, error: type[TransientError]
) -> None:
    with caplog.at_level(logging.WARNING):
        assert commit_with_faults(filled_lake, fail(1, error, kind="write", path_part=HINT_PATH)) == 2
    assert "its hint could not be written" in caplog.text
    assert filled_lake.storage.read(HINT_PATH) == b"1"
    assert_committed_once(filled_lake, 2)


@pytest.mark.parametrize("path_part", ["-table-", "-node-", ROOT_2, HINT_PATH])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_interrupted_commit_keeps_files_of_committed_versions(
    filled_lake: Lakehouse, path_part: str, moment: str
) -> None:
    """The commit happens completely or not at all, whichever request Ctrl-C interrupts."""
    with pytest.raises(KeyboardInterrupt):
        txn = Lakehouse(_InterruptingStorage(filled_lake.storage, path_part, moment)).transaction(message=LONG_MESSAGE)
        txn.create_namespace("new")
        for number in range(30):
            txn.create_table("new", f"t{number}", table())
        txn.commit()
    check_lake(filled_lake)
    is_committed = path_part == HINT_PATH or (path_part == ROOT_2 and moment == "after")
    assert filled_lake.latest_version() == (2 if is_committed else 1)
    assert filled_lake.snapshot().has_namespace("new") == is_committed


class _InterruptingStorage(StorageWrapper):
    def __init__(self, inner: Storage, path_part: str, moment: str):
        super().__init__(inner)
        self._path_part = path_part
        self._moment = moment

    def create(self, path: str, data: bytes) -> None:
        self._run_or_interrupt(self.inner.create, path, data)

    def write(self, path: str, data: bytes) -> None:
        self._run_or_interrupt(self.inner.write, path, data)

    def _run_or_interrupt(self, put, path: str, data: bytes) -> None:  # type: ignore[no-untyped-def]
        is_hit = self._path_part in path
        if not is_hit or self._moment == "after":
            put(path, data)
        if is_hit:
            raise KeyboardInterrupt


# Time to live


def test_expired_transaction_fails(filled_lake: Lakehouse) -> None:
    filled_lake.alter_definition(txn_ttl_millis=1_000)
    clock = ClockStorage(filled_lake.storage, filled_lake.snapshot().created_at_ms + 10)
    lake = Lakehouse(clock)
    in_time, late = lake.transaction(), lake.transaction()
    in_time.create_namespace("in-time")
    late.create_namespace("late")
    clock.time_ms += 1_000
    assert in_time.commit() == 3
    clock.time_ms += 1
    with pytest.raises(TransactionExpiredError, match="txn_ttl_millis"):
        late.commit()
    assert not filled_lake.snapshot().has_namespace("late")
    assert unreferenced_paths(filled_lake) == set()


def test_latest_time_to_live_applies(filled_lake: Lakehouse) -> None:
    clock = ClockStorage(filled_lake.storage, filled_lake.snapshot().created_at_ms + 10)
    txn = Lakehouse(clock).transaction()
    txn.create_namespace("new")
    filled_lake.alter_definition(txn_ttl_millis=1_000)
    clock.time_ms += 1_001
    with pytest.raises(TransactionExpiredError):
        txn.commit()
    assert unreferenced_paths(filled_lake) == set()


class _SleepingStorage(ClockStorage):
    """Calls ``before_root`` once, just before a root is created, and advances its clock by ``sleeps_ms``."""

    before_root: Callable[[], object] | None = None
    sleeps_ms = 10**9

    def create(self, path: str, data: bytes) -> None:
        before_root, self.before_root = (self.before_root, None) if path in ROOTS else (None, self.before_root)
        if before_root is not None:
            before_root()
            self.time_ms += self.sleeps_ms
        super().create(path, data)


def test_suspended_transaction_expires_regardless_of_its_base(lake: Lakehouse) -> None:
    """An expired transaction does not read the nodes of its base, which may be purged."""
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(40):
            txn.create_table("ns", f"t{number:02}", table())
    clock = _SleepingStorage(lake.storage, lake.snapshot().created_at_ms + 10)
    txn = Lakehouse(clock).transaction()
    txn.alter_table("ns", "t00", table(slow="true"))
    clock.before_root = lambda: _purge_first_versions(lake)
    with pytest.raises(TransactionExpiredError, match="txn_ttl_millis"):
        txn.commit()
    assert not lake.snapshot().table("ns", "t00").properties.get("slow")


@pytest.mark.parametrize("is_suspended_in_commit", [False, True])
def test_transaction_with_purged_base_expires(lake: Lakehouse, is_suspended_in_commit: bool) -> None:
    """It fails although it is young enough, because the time to live was shorter in between. Its group continues."""
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(40):
            txn.create_table("ns", f"t{number:02}", table())
    clock = _SleepingStorage(lake.storage, lake.snapshot().created_at_ms + 10)
    clock.sleeps_ms = 0
    suspended_lake = Lakehouse(clock)
    txn = suspended_lake.transaction()
    txn.alter_table("ns", "t00", table(slow="true"))
    if is_suspended_in_commit:
        clock.before_root = lambda: _purge_first_versions(lake)
        with pytest.raises(TransactionExpiredError):
            txn.commit()
    else:
        _purge_first_versions(lake)
        young = suspended_lake.transaction()
        young.alter_table("ns", "t01", table(slow="false"))
        outcomes = commit_queued(suspended_lake, [txn, young])
        assert isinstance(outcomes[0], TransactionExpiredError)
        assert outcomes[1] == lake.latest_version()
    assert not lake.snapshot().table("ns", "t00").properties.get("slow")


def test_transaction_with_purged_namespace_expires(lake: Lakehouse) -> None:
    """It is no longer possible to check whether the namespace was replaced."""
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", table())
    old = lake.snapshot()
    clock = _SleepingStorage(lake.storage, old.created_at_ms + 10)
    clock.sleeps_ms = 0
    txn = Lakehouse(clock, cache="off").transaction()
    txn.alter_table("ns", "t", table(slow="true"))

    def purge() -> None:
        with lake.transaction() as other:
            other.alter_namespace("ns", {"a": "b"})
        seal(lake, old.version)
        lake.storage.delete(old.entry(old.keys.namespace_key("ns")) or "")

    clock.before_root = purge
    with pytest.raises(TransactionExpiredError):
        txn.commit()
    assert lake.snapshot().table("ns", "t").properties == table().properties


def _purge_first_versions(lake: Lakehouse) -> None:
    """Change all objects, then purge versions 0 and 1."""
    first = lake.snapshot(1)
    operations.compact(lake)
    with lake.transaction() as other:
        for number in range(40):
            other.alter_table("ns", f"t{number:02}", table(n="1"))
    latest = lake.snapshot()
    first_paths, latest_paths = (
        {visited.location for visited in walk(lake.files.nodes, snapshot.root, snapshot.location)}
        for snapshot in (first, latest)
    )
    for version in (0, 1):
        seal(lake, version)
    purged_paths = first_paths - latest_paths - ROOTS
    assert purged_paths
    for path in purged_paths:
        lake.storage.delete(path)


# The last version


def test_commit_after_last_version_fails_before_any_write(lakes: Lakes) -> None:
    start = lakes.memory("start")
    storage = lakes.storage("end")
    definition = start.snapshot().definition
    storage.write("def", definition.to_bytes())
    node = start.snapshot().root
    node = replace(node, system={**node.system, "lakehouse_def": "def", "previous_root": root_path(MAX_VERSION - 2)})
    storage.write(root_path(MAX_VERSION - 1), encode_node(node, definition.order))
    storage.write(HINT_PATH, str(MAX_VERSION - 1).encode())
    lake = Lakehouse(storage)
    with lake.transaction() as txn:
        txn.create_namespace("last")
    assert txn.committed_version == lake.latest_version() == MAX_VERSION
    assert lake.snapshot().root.system["previous_root"] == root_path(MAX_VERSION - 1)
    faulty = FaultyStorage(storage)
    beyond = Lakehouse(faulty).transaction()
    beyond.create_namespace("beyond")
    with pytest.raises(VersionNotFoundError, match=str(MAX_VERSION)):
        beyond.commit()
    assert {request.kind for request in faulty.log} == {"read"}, "nothing was written"
    assert [info.version for info in lake.history(2)] == [MAX_VERSION, MAX_VERSION - 1]


# Creating


def test_one_of_two_concurrent_creates_succeeds(lakes: Lakes) -> None:
    storage = lakes.storage("two")
    first = _CreateFirst(storage)
    with pytest.raises(LakehouseExistsError):
        Lakehouse.create(storage.root, storage=first)
    lake = lakes.watch(Lakehouse.open(storage.root, storage=storage))
    assert lake.snapshot().definition.properties == {"by": "the other"}
    assert unreferenced_paths(lake) == set()


class _CreateFirst(StorageWrapper):
    """Creates the lakehouse from another process just before our version 0."""

    def create(self, path: str, data: bytes) -> None:
        if path == root_path(0):
            Lakehouse.create(self.root, storage=self.inner, properties={"by": "the other"})
        self.inner.create(path, data)


def test_lost_response_of_version_zero_is_resolved(lakes: Lakes) -> None:
    storage = lakes.storage("zero")
    faulty = FaultyStorage(storage, [lose_response(1, kind="create", path_part=root_path(0))])
    Lakehouse.create(storage.root, storage=faulty, order=3)
    lake = lakes.watch(Lakehouse.open(storage.root, storage=storage))
    assert lake.snapshot().definition.order == 3


def test_failed_create_leaves_no_files(lakes: Lakes) -> None:
    storage = lakes.storage("full")
    faulty = FaultyStorage(storage, [fail(1, StorageFullError, kind="create", path_part=root_path(0))])
    with pytest.raises(StorageFullError):
        Lakehouse.create(storage.root, storage=faulty)
    assert listed(storage) == set()


def test_settings_rejected_at_commit_leave_no_files(filled_lake: Lakehouse) -> None:
    before = objects(filled_lake.snapshot())
    with pytest.raises(InvalidDefinitionError), filled_lake.transaction() as txn:
        txn.create_namespace("new")
        txn.alter_definition(replace(txn.definition, order=99))
    assert objects(filled_lake.snapshot()) == before


class _OverwritingStorage(StorageWrapper):
    """A server that ignores the condition of a create."""

    def create(self, path: str, data: bytes) -> None:
        self.inner.write(path, data)


def test_create_rejects_storage_that_overwrites(lakes: Lakes) -> None:
    storage = lakes.storage("overwriting")
    with pytest.raises(StorageError):
        Lakehouse.create(storage.root, storage=_OverwritingStorage(storage))
    assert listed(storage) == set()


@pytest.mark.parametrize("error", [ThrottledError, TransientError])
def test_each_create_is_retried_after_failure_without_effect(lakes: Lakes, error: type[StorageError]) -> None:
    """A new lakehouse and its first commit send at most eight creates, one of them as a check of the storage."""
    for number in range(1, 9):
        faulty = FaultyStorage(lakes.storage(f"throttled-{number}"), [fail(number, error, kind="create")])
        lake = Lakehouse.create(faulty.root, storage=RetryStorage(faulty, base_delay_seconds=0))
        with lake.transaction() as txn:
            txn.create_namespace("ns")
        assert lake.snapshot().namespaces() == ["ns"]
    creates = [request for request in faulty.log if request.kind == "create"]
    assert len(creates) < number, "the last fault was not reached, so each create failed once"
