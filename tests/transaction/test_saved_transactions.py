"""Saved transactions, which another process resumes, and definitions that other processes stage for them."""

from __future__ import annotations

import pickle
import uuid
from dataclasses import replace

import pytest

from tests.clock import ClockStorage
from tests.faults import FaultyStorage, fail, lose_response
from tests.lakes import Lakes, seal, table, unreferenced_paths
from tests.processes import fork
from trinitylake_ops import Lakehouse, TableDef, operations
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitConflictError,
    CommitOutcomeUnknownError,
    ConflictError,
    CorruptFileError,
    InvalidDefinitionError,
    InvalidInputError,
    NamespaceNotFoundError,
    StoragePermissionError,
    TransactionExpiredError,
    TransactionNotFoundError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import root_path, saved_transaction_path
from trinitylake_ops.storage import drop_memory_root
from trinitylake_ops.transaction.saved import StagedDefinition

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def filled_lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse whose version 1 has a namespace with two tables."""
    lake = lakes.local(order=4)
    with lake.transaction() as txn:
        txn.create_namespace("ns", {"a": "b"})
        txn.create_table("ns", "t", table())
        txn.create_table("ns", "u", table())
    return lake


def reopened(lake: Lakehouse) -> Lakehouse:
    """Return the lakehouse as another process would open it."""
    return Lakehouse(lake.storage)


def save_all_changes(lake: Lakehouse) -> str:
    """Save a transaction with every kind of change, and return its id."""
    txn = lake.transaction("serializable", "all of it", {"k": "v"}, operation="publish", run_id="run-1")
    txn.create_namespace("new", {"x": "y"})
    txn.create_table("new", "made", table(n="1"))
    txn.alter_table("ns", "t", table(n="2"))
    txn.drop_table("ns", "u")
    txn.alter_namespace("ns", {"c": "d"})
    txn.alter_definition(replace(txn.definition, properties={"p": "q"}))
    return txn.save()


@pytest.mark.forks
def test_saved_transaction_is_resumed_in_another_process(filled_lake: Lakehouse) -> None:
    transaction_id = save_all_changes(filled_lake)
    assert filled_lake.latest_version() == 1, "saving commits nothing"

    def commit(report: object) -> None:
        txn = reopened(filled_lake).resume_transaction(transaction_id)
        assert txn.table("new", "made").properties == {"n": "1"}
        assert txn.namespaces() == ["new", "ns"]
        txn.create_table("new", "added", table())
        assert txn.commit() == 2

    assert fork(commit).finish() == (0, [])
    snapshot = filled_lake.snapshot()
    assert (snapshot.tables("new"), snapshot.tables("ns")) == (["added", "made"], ["t"])
    assert snapshot.namespace("ns").properties == {"c": "d"}
    assert snapshot.definition.properties == {"p": "q"}
    info = next(filled_lake.history())
    assert (info.operation, info.message, info.run_id) == ("publish", "all of it", "run-1")
    assert (info.members, info.properties) == ((transaction_id,), {"k": "v"})
    assert unreferenced_paths(filled_lake) == set(), "the file of the saved transaction was deleted"


def test_reads_before_save_conflict_after_resume(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction("serializable")
    assert txn.tables("ns") == ["t", "u"]
    txn.create_namespace("other")
    transaction_id = txn.save()
    with reopened(filled_lake).transaction() as other:
        other.create_table("ns", "v", table())
    with pytest.raises(CommitConflictError, match=r"ns\.v") as caught:
        filled_lake.resume_transaction(transaction_id).commit()
    assert (caught.value.base_version, caught.value.latest_version) == (1, 2)


def test_saved_transaction_ends_in_its_process(filled_lake: Lakehouse) -> None:
    with filled_lake.transaction() as txn:
        txn.create_table("ns", "v", table())
        txn.save()
    assert filled_lake.latest_version() == 1
    with pytest.raises(ConflictError):
        txn.commit()


def test_saved_transaction_can_be_saved_again_and_dropped(filled_lake: Lakehouse) -> None:
    first = filled_lake.resume_transaction(save_all_changes(filled_lake))
    first.drop_table("ns", "t")
    second = filled_lake.resume_transaction(first.save())
    assert second.tables("ns") == []
    second.rollback()
    with pytest.raises(TransactionNotFoundError):
        filled_lake.resume_transaction(second.id)
    assert filled_lake.latest_version() == 1
    assert unreferenced_paths(filled_lake) == set()


def test_transaction_resumed_twice_is_committed_once(filled_lake: Lakehouse) -> None:
    transaction_id = save_all_changes(filled_lake)
    first, second = (reopened(filled_lake).resume_transaction(transaction_id) for _ in range(2))
    assert first.commit() == 2
    with reopened(filled_lake).transaction() as other:
        other.alter_table("new", "made", table(n="changed since"))
    assert second.commit() == 2, "the version of the first commit"
    assert filled_lake.latest_version() == 3
    assert filled_lake.snapshot().table("new", "made").properties == {"n": "changed since"}
    assert unreferenced_paths(filled_lake) == set()


@pytest.mark.parametrize("undo", ["drop", "rollback"])
def test_transaction_resumed_twice_after_undo_is_committed_once(filled_lake: Lakehouse, undo: str) -> None:
    """After the undo, only the intermediate versions show that the transaction was committed."""
    txn = filled_lake.transaction()
    txn.create_table("ns", "made", table())
    transaction_id = txn.save()
    first, second = (reopened(filled_lake).resume_transaction(transaction_id) for _ in range(2))
    assert first.commit() == 2
    if undo == "drop":
        with reopened(filled_lake).transaction() as other:
            other.drop_table("ns", "made")
    else:
        operations.rollback(reopened(filled_lake), 1)
    assert second.commit() == 2, "the version of the first commit"
    assert filled_lake.latest_version() == 3
    assert filled_lake.snapshot().tables("ns") == ["t", "u"], "the undo is kept"


def test_changed_copy_of_committed_transaction_conflicts(filled_lake: Lakehouse) -> None:
    transaction_id = save_all_changes(filled_lake)
    first, second = (reopened(filled_lake).resume_transaction(transaction_id) for _ in range(2))
    second.create_table("new", "extra", table())
    assert first.commit() == 2
    with pytest.raises(CommitConflictError):
        second.commit()
    assert filled_lake.snapshot().tables("new") == ["made"]


def test_transaction_resumed_twice_fails_when_version_was_purged(filled_lake: Lakehouse) -> None:
    """The content of the version was deleted and cannot be compared, but its commit is still known."""
    txn = filled_lake.transaction()
    txn.create_table("ns", "new", table())
    transaction_id = txn.save()
    first, second = filled_lake.resume_transaction(transaction_id), filled_lake.resume_transaction(transaction_id)
    version = first.commit()
    operations.compact(filled_lake)
    with filled_lake.transaction() as other:
        other.create_namespace("later")
    seal(filled_lake, version)
    with pytest.raises(TransactionExpiredError, match=f"as version {version}; that version was purged"):
        second.commit()


def test_exception_in_block_keeps_saved_transaction(filled_lake: Lakehouse) -> None:
    transaction_id = save_all_changes(filled_lake)
    with pytest.raises(ZeroDivisionError), filled_lake.resume_transaction(transaction_id):
        _ = 1 / 0
    assert filled_lake.resume_transaction(transaction_id).commit() == 2


def test_deleted_root_leaves_outcome_unknown(lakes: Lakes) -> None:
    lake = Lakehouse.create("memory://deleted-root/")
    try:
        lake.alter_definition(properties={"n": "1"})
        txn = lake.transaction()
        txn.create_namespace("ns")
        transaction_id = txn.save()
        resumed = lake.resume_transaction(transaction_id)
        for number in (2, 3, 4):
            lake.alter_definition(properties={"n": str(number)})
        lake.storage.delete(root_path(3))
        with pytest.raises(VersionNotFoundError):
            resumed.commit()
    finally:
        drop_memory_root(lake.root)


@pytest.mark.local_only("damages each byte of a file in turn, with the same result on every storage")
def test_damaged_saved_transactions_are_rejected(filled_lake: Lakehouse) -> None:
    transaction_id = save_all_changes(filled_lake)
    path = saved_transaction_path(transaction_id)
    saved = filled_lake.storage.read(path)
    for position in range(len(saved)):
        filled_lake.storage.write(path, saved[:position] + bytes([saved[position] ^ 1]) + saved[position + 1 :])
        with pytest.raises(CorruptFileError):
            filled_lake.resume_transaction(transaction_id)
    filled_lake.storage.delete(path)


def test_saved_transaction_with_unknown_outcome_is_committed_once(lakes: Lakes) -> None:
    inner = lakes.storage()
    lake = lakes.watch(Lakehouse.create(inner.root, storage=inner))
    txn = lake.transaction()
    txn.create_namespace("ns")
    transaction_id = txn.save()
    faults = [
        lose_response(1, kind="create", path_part="_1000"),
        fail(3, StoragePermissionError, kind="read", path_part="_1000", times=9),
    ]
    with pytest.raises(CommitOutcomeUnknownError):
        Lakehouse(FaultyStorage(inner, faults)).resume_transaction(transaction_id).commit()
    assert lake.resume_transaction(transaction_id).commit() == 1
    assert lake.latest_version() == 1


def test_resumed_transaction_keeps_its_age(lakes: Lakes) -> None:
    storage = ClockStorage(lakes.storage(), 1_000_000)
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage, txn_ttl_millis=1_000))
    txn = lake.transaction()
    txn.create_namespace("ns")
    transaction_id = txn.save()
    storage.time_ms += 1_000
    resumed = lake.resume_transaction(transaction_id)
    storage.time_ms += 1
    with pytest.raises(TransactionExpiredError, match="1001"):
        resumed.commit()
    with pytest.raises(TransactionExpiredError, match="1001"):
        lake.resume_transaction(transaction_id)
    assert lake.latest_version() == 0


@pytest.mark.parametrize("transaction_id", ["", "x", "../../etc/passwd", None, 5, "0" * 5_000])
def test_unknown_transaction_ids_are_rejected(filled_lake: Lakehouse, transaction_id: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        filled_lake.resume_transaction(transaction_id)
    assert len(str(caught.value)) < 200


def test_invalid_saved_transaction_files_are_rejected(filled_lake: Lakehouse) -> None:
    transaction_id = save_all_changes(filled_lake)
    saved = filled_lake.storage.read(saved_transaction_path(transaction_id))
    unknown = str(uuid.uuid4())
    with pytest.raises(TransactionNotFoundError):
        filled_lake.resume_transaction(unknown)
    filled_lake.storage.write(saved_transaction_path(unknown), saved)
    with pytest.raises(CorruptFileError):
        filled_lake.resume_transaction(unknown)
    filled_lake.storage.write(saved_transaction_path(unknown), b"\xff garbage")
    with pytest.raises(CorruptFileError):
        filled_lake.resume_transaction(unknown)
    assert filled_lake.resume_transaction(transaction_id).commit() == 2
    filled_lake.storage.delete(saved_transaction_path(unknown))


def test_transaction_with_preconditions_cannot_be_saved(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction()
    txn.require(lambda base: None)
    with pytest.raises(InvalidInputError):
        txn.save()
    txn.rollback()


@pytest.mark.forks
def test_other_processes_stage_definitions(filled_lake: Lakehouse) -> None:
    txn = filled_lake.transaction()
    definition = txn.table("ns", "t")

    def stage(report: object) -> None:
        lake = reopened(filled_lake)
        staged = [
            lake.stage_definition("ns", "t", replace(definition, properties={"by": "executor"})),
            lake.stage_definition("ns", "fresh", table(by="executor")),
        ]
        report(pickle.dumps(staged).hex())  # type: ignore[operator]

    code, (line,) = fork(stage).finish()
    assert code == 0
    assert filled_lake.latest_version() == 1
    staged: list[StagedDefinition] = pickle.loads(bytes.fromhex(line))
    resumed = reopened(filled_lake).resume_transaction(txn.save())
    resumed.put_staged(staged)
    assert resumed.table("ns", "fresh").properties == {"by": "executor"}
    assert resumed.commit() == 2
    assert filled_lake.snapshot().table("ns", "t").id == definition.id
    assert filled_lake.snapshot().table("ns", "fresh").properties == {"by": "executor"}
    assert unreferenced_paths(filled_lake) == set()


def test_invalid_staged_definitions_are_rejected(lakes: Lakes) -> None:
    storage = ClockStorage(lakes.storage(), 1_700_000_000_000)
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", table())
    with pytest.raises(InvalidDefinitionError):
        lake.transaction().put_staged([lake.stage_definition("ns", "t", table(other="one"))])
    with pytest.raises(NamespaceNotFoundError):
        lake.transaction().put_staged([lake.stage_definition("nowhere", "t", table())])
    staged = lake.stage_definition("ns", "new", table())
    storage.time_ms = lake.storage.stat(staged.location).last_modified_ms + 10 * 60 * 1000
    with pytest.raises(InvalidInputError):
        lake.transaction().put_staged([staged])


@pytest.mark.parametrize("limit_bytes", [None, 80])
@pytest.mark.parametrize(("namespace", "name"), [("ns", "new"), ("n-s", "a/b"), ("ns", "航班"), ("ns", "x" * 60)])
def test_staged_definitions_are_recognized_by_path(
    lakes: Lakes, namespace: str, name: str, limit_bytes: int | None
) -> None:
    lake = lakes.memory(**({} if limit_bytes is None else {"file_path_max_size_bytes": limit_bytes}))
    with lake.transaction() as txn:
        txn.create_namespace(namespace)
        txn.put_staged([lake.stage_definition(namespace, name, table())])
    assert lake.snapshot().tables(namespace) == [name]


def test_staged_files_of_other_tables_are_rejected(filled_lake: Lakehouse) -> None:
    """Publishing a definition under another name would create two tables with the same id."""
    published = filled_lake.snapshot().entry(filled_lake.snapshot().keys.table_key("ns", "t"))
    for location in (
        published,
        filled_lake.snapshot().definition_location,
        filled_lake.snapshot().location,
        "_ops/x",
        "../x",
    ):
        with pytest.raises(InvalidInputError):
            filled_lake.transaction().put_staged([StagedDefinition("ns", "new", str(location))])


def test_transaction_with_lost_save_response_is_committed_once(lakes: Lakes) -> None:
    """The file exists, and another process resumes the transaction while the first process continues."""
    storage = FaultyStorage(lakes.storage(), [lose_response(1, kind="write", path_part="_ops/")])
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    txn = lake.transaction()
    txn.alter_definition(replace(lake.snapshot().definition, properties={"a": "b"}))
    with pytest.raises(AmbiguousWriteError):
        txn.save()
    assert lake.resume_transaction(txn.id).commit() == 1
    lake.alter_definition(properties={"a": "c"})
    assert txn.commit() == 1
    assert lake.latest_version() == 2


def test_resumed_copy_with_changed_settings_conflicts(lakes: Lakes) -> None:
    lake = lakes.memory()
    txn = lake.transaction()
    txn.create_namespace("ns")
    transaction_id = txn.save()
    first, altered, unaltered = (lake.resume_transaction(transaction_id) for _ in range(3))
    assert first.commit() == 1
    altered.alter_definition(replace(lake.snapshot().definition, properties={"k": "v"}))
    with pytest.raises(CommitConflictError):
        altered.commit()
    assert unaltered.commit() == 1


def test_transaction_cannot_change_after_failed_save(lakes: Lakes) -> None:
    """The save request may still succeed, and its file would lack the change."""
    storage = FaultyStorage(lakes.storage(), [lose_response(1, kind="write", path_part="_ops/")])
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    txn = lake.transaction()
    txn.create_namespace("ns")
    with pytest.raises(AmbiguousWriteError):
        txn.save()
    for change in (
        lambda: txn.create_table("ns", "t", table()),
        lambda: txn.alter_definition(replace(txn.definition, properties={"a": "b"})),
        lambda: txn.put_staged([]),
    ):
        with pytest.raises(ConflictError):
            change()
    assert lake.resume_transaction(txn.save()).commit() == 1


@pytest.mark.parametrize(("staged_for", "published_as"), [(("ns", "t1"), ("nsx", "t1")), (("p", "t"), ("prod", "t"))])
def test_staged_names_with_common_prefix_are_distinguished(
    lakes: Lakes, staged_for: tuple[str, str], published_as: tuple[str, str]
) -> None:
    lake = lakes.memory()
    with lake.transaction() as txn:
        for namespace, _ in (staged_for, published_as):
            txn.create_namespace(namespace)
    location = lake.stage_definition(*staged_for, table()).location
    with pytest.raises(InvalidInputError):
        lake.transaction().put_staged([StagedDefinition(*published_as, location)])


def test_invalid_staged_definition_files_are_rejected(filled_lake: Lakehouse) -> None:
    staged, other = (
        filled_lake.stage_definition("ns", "new", table()),
        filled_lake.stage_definition("ns", "new", table()),
    )
    txn = filled_lake.transaction()
    for staged_list in (
        [staged, other],
        [staged, replace(staged, table="again")],
        ["x"],
        [replace(staged, location=None)],
    ):
        with pytest.raises(InvalidInputError):
            txn.put_staged(staged_list)  # type: ignore[arg-type]
    for content in (b"", b"garbage", filled_lake.storage.read(filled_lake.snapshot().definition_location)[:0]):
        filled_lake.storage.write(other.location, content)
        with pytest.raises((CorruptFileError, InvalidDefinitionError)):
            txn.put_staged([other])
    with pytest.raises(InvalidDefinitionError):
        filled_lake.stage_definition("ns", "new", TableDef(id="../x"))
    txn.put_staged([staged])
    assert txn.commit() == 2
    filled_lake.storage.delete(other.location)
