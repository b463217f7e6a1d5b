"""Commits with a wrong clock, invalid names or an unusual environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.clock import ClockStorage
from tests.lakes import Lakes, table, unreferenced_paths
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    CommitConflictError,
    FileExistsAlreadyError,
    InvalidInputError,
    StorageError,
    TransactionExpiredError,
)
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.keys import MAX_TIME_MS
from trinitylake_ops.storage import MemoryStorage


def test_commit_fails_when_clock_is_out_of_range(lakes: Lakes) -> None:
    lake = lakes.memory()
    lake_in_future = Lakehouse(ClockStorage(lake.storage, MAX_TIME_MS + 1))
    with pytest.raises(StorageError), lake_in_future.transaction() as txn:
        txn.create_namespace("n")
    assert lake.latest_version() == 0
    assert unreferenced_paths(lake) == set()


def test_create_fails_when_clock_is_out_of_range() -> None:
    storage = ClockStorage(MemoryStorage("memory://future/"), MAX_TIME_MS + 1)
    with pytest.raises(StorageError):
        Lakehouse.create("memory://future/", storage=storage)
    assert list(storage.list()) == []


def test_commits_continue_after_largest_time(lakes: Lakes) -> None:
    lake = lakes.memory()
    lake_in_future = Lakehouse(ClockStorage(lake.storage, MAX_TIME_MS))
    for name in ("a", "b"):
        with lake_in_future.transaction() as txn:
            txn.create_namespace(name)
    before_ms = lake.storage.now_ms()
    with lake.transaction() as txn:
        txn.create_namespace("c")
    assert lake.snapshot().namespaces() == ["a", "b", "c"]
    assert before_ms <= lake.snapshot().created_at_ms <= lake.storage.now_ms()


@pytest.mark.local_only("creates a symbolic link, which S3 does not have")
def test_unreadable_path_of_next_root_is_reported(lakes: Lakes, tmp_path: Path) -> None:
    lake = lakes.local()
    (tmp_path / "lake" / root_path(1)).symlink_to("/nowhere")
    with pytest.raises(StorageError) as caught:
        _create(lake)
    assert caught.value.path == root_path(1)
    assert unreferenced_paths(lake) == set()


def _create(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("n")


@pytest.mark.local_only("begins hundreds of transactions to find a size limit that is the same on every storage")
def test_too_long_message_is_rejected_when_transaction_begins(lakes: Lakes) -> None:
    lake = lakes.memory()
    lengths = range(3400, 4200)
    accepted = 0
    for length in lengths:
        try:
            txn = lake.transaction(message="m" * length)
        except InvalidInputError:
            break
        accepted = length
        txn.rollback()
    assert lengths.start < accepted < lengths.stop - 1
    with lake.transaction(message="m" * accepted) as txn:
        txn.create_namespace("n")


def test_user_name_is_truncated(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lakes.memory()
    monkeypatch.setenv("LOGNAME", "\udcff" + "u" * 5000)
    _create(lake)
    (latest,) = lake.history(1)
    assert latest.user == "?" + "u" * 63


def test_transaction_without_changes_commits_nothing(lakes: Lakes) -> None:
    lake = lakes.memory()
    with lake.transaction() as txn:
        txn.create_namespace("n", {"a": "b"})
        txn.create_table("n", "t", table(a="b"))
    with lake.transaction() as txn:
        txn.alter_namespace("n", {"a": "b"})
        txn.alter_table("n", "t", txn.table("n", "t"))
    assert (txn.committed_version, lake.latest_version()) == (1, 1)


def test_settings_conflict_names_both_versions(lakes: Lakes) -> None:
    lake = lakes.memory()
    txn = lake.transaction()
    txn.create_namespace("n")
    txn.alter_definition(_with_property(lake, "ours"))
    lake.alter_definition(properties={"key": "theirs"})
    with lake.transaction() as other:
        other.create_namespace("n")
    with pytest.raises(CommitConflictError) as caught:
        txn.commit()
    assert (caught.value.base_version, caught.value.latest_version) == (0, 2)
    assert len(caught.value.conflicts) == 2


def _with_property(lake: Lakehouse, value: str) -> LakehouseDef:
    return replace(lake.snapshot().definition, properties={"key": value})


def test_history_lists_operations(lakes: Lakes) -> None:
    lake = lakes.memory()
    _create(lake)
    with lake.transaction() as txn:
        txn.create_table("n", "t", table())
    assert [(info.operation, info.message) for info in lake.history()] == [
        ("create-table", "n.t"),
        ("create-namespace", "n"),
        ("init", "create the lakehouse"),
    ]


@pytest.mark.parametrize("version", [1.5, b"1", True, [1]])
def test_version_of_wrong_type_is_rejected(lakes: Lakes, version: object) -> None:
    with pytest.raises(InvalidInputError):
        lakes.memory().snapshot(version)  # type: ignore[arg-type]


def test_timestamp_of_wrong_type_is_rejected(lakes: Lakes) -> None:
    with pytest.raises(InvalidInputError):
        lakes.memory().snapshot(timestamp="x")  # type: ignore[arg-type]


def test_isolation_of_wrong_type_is_rejected(lakes: Lakes) -> None:
    with pytest.raises(InvalidInputError, match="'serializable'"):
        lakes.memory().transaction(isolation=5)  # type: ignore[arg-type]


class FailingClock(ClockStorage):
    """A storage whose clock advances beyond the largest time after a conflict."""

    def create(self, path: str, data: bytes) -> None:
        try:
            super().create(path, data)
        except FileExistsAlreadyError:
            self.time_ms = MAX_TIME_MS + 1
            raise


def test_clock_failure_between_attempts_leaves_no_files(lakes: Lakes) -> None:
    lake = lakes.memory()
    lake_in_future = Lakehouse(FailingClock(lake.storage, lake.storage.now_ms()))
    txn = lake_in_future.transaction()
    txn.create_namespace("n")
    with lake.transaction() as other:
        other.create_namespace("m")
    with pytest.raises(TransactionExpiredError):
        txn.commit()
    assert lake.snapshot().namespaces() == ["m"]
    assert unreferenced_paths(lake) == set()
