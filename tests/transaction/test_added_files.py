"""Added files: a commit writes them together with the definitions that refer to them."""

from __future__ import annotations

import pytest

from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, table
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitConflictError,
    CommitOutcomeUnknownError,
    ConflictError,
    FileExistsAlreadyError,
    InvalidInputError,
    StorageFullError,
    TransientError,
)
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.storage import MeteredStorage, Storage

pytestmark = pytest.mark.usefixtures("fixed_requests")

PATH = "tables/t/metadata/0.json"


@pytest.fixture
def storage(lakes: Lakes) -> Storage:
    return lakes.storage()


@pytest.fixture
def lake(lakes: Lakes, storage: Storage) -> Lakehouse:
    """A lakehouse with one table."""
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", table())
    return lake


def test_added_files_take_no_extra_round_trip(lake: Lakehouse, storage: Storage) -> None:
    meter = MeteredStorage(storage)
    txn = Lakehouse(meter).transaction()
    txn.alter_table("ns", "t", table(a="1"))
    with meter.measure() as without_file:
        txn.commit()
    txn = Lakehouse(meter).transaction()
    txn.alter_table("ns", "t", table(a="2"))
    txn.add_file(PATH, b"x")
    with meter.measure() as with_file:
        txn.commit()
    assert with_file.counts.requests["create"] == without_file.counts.requests["create"] + 1
    assert with_file.counts.rounds == without_file.counts.rounds
    assert storage.read(PATH) == b"x"


def test_transaction_without_changes_writes_no_added_files(lake: Lakehouse, storage: Storage) -> None:
    with lake.transaction() as txn:
        txn.add_file(PATH, b"x")
    with lake.transaction() as txn:
        txn.add_file(PATH, b"x")
        txn.create_table("ns", "u", table())
        txn.drop_table("ns", "u")
    assert (lake.latest_version(), storage.exists(PATH)) == (1, False)


def test_rebase_writes_added_files_once(lake: Lakehouse, storage: Storage) -> None:
    meter = MeteredStorage(storage)
    txn = Lakehouse(meter).transaction()
    txn.alter_table("ns", "t", table(a="1"))
    txn.add_file(PATH, b"x")
    with lake.transaction() as other:
        other.create_table("ns", "u", table())
    with meter.measure() as measured:
        assert txn.commit() == 3
    assert measured.counts.requests["create"] == budget("commit after a conflict").requests["create"] + 1
    assert storage.read(PATH) == b"x"


def test_conflict_deletes_added_files(lake: Lakehouse, storage: Storage) -> None:
    txn = lake.transaction()
    txn.alter_table("ns", "t", table(a="1"))
    txn.add_file(PATH, b"x")
    with lake.transaction() as other:
        other.alter_table("ns", "t", table(a="2"))
    with pytest.raises(CommitConflictError):
        txn.commit()
    assert not storage.exists(PATH)


def test_failure_deletes_added_files(lake: Lakehouse, storage: Storage) -> None:
    before = {info.path for info in storage.list()}
    faulty_storage = FaultyStorage(storage, [fail(1, StorageFullError, kind="create", path_part=PATH)])
    txn = Lakehouse(faulty_storage).transaction()
    txn.alter_table("ns", "t", table(a="1"))
    txn.add_file(PATH, b"x")
    with pytest.raises(StorageFullError):
        txn.commit()
    assert {info.path for info in storage.list()} == before


def test_unknown_outcome_keeps_added_files(lake: Lakehouse, storage: Storage) -> None:
    root = root_path(2)
    lost_response = fail(1, AmbiguousWriteError, "after", kind="create", path_part=root)
    unreadable_root = fail(2, TransientError, kind="read", path_part=root, times=100)
    txn = Lakehouse(FaultyStorage(storage, [lost_response, unreadable_root])).transaction()
    txn.alter_table("ns", "t", table(a="1"))
    txn.add_file(PATH, b"x")
    with pytest.raises(CommitOutcomeUnknownError):
        txn.commit()
    assert (lake.latest_version(), storage.read(PATH)) == (2, b"x")


def test_added_files_do_not_replace_existing_files(lake: Lakehouse, storage: Storage) -> None:
    storage.create(PATH, b"theirs")
    txn = lake.transaction()
    txn.alter_table("ns", "t", table(a="1"))
    txn.add_file(PATH, b"ours")
    with pytest.raises(FileExistsAlreadyError):
        txn.commit()
    assert lake.latest_version() == 1


def test_transaction_with_added_files_cannot_be_saved(lake: Lakehouse) -> None:
    txn = lake.transaction()
    txn.add_file(PATH, b"x")
    with pytest.raises(InvalidInputError):
        txn.save()
    txn.rollback()
    with pytest.raises(ConflictError):
        txn.add_file(PATH, b"x")
