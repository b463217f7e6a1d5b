"""Resolving commits with unknown outcome: committed, lost or undecided, and fencing undecided ones."""

from __future__ import annotations

import pytest

from tests.lakes import objects, seal, table, unreferenced_paths
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitOutcomeUnknownError,
    CorruptFileError,
    FileExistsAlreadyError,
    InvalidInputError,
    StoragePermissionError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.storage import Storage, StorageWrapper

ROOT_1 = root_path(1)
UNKNOWN_ID = "7c52cec4-43e3-4f73-91a3-87cfd94da1f0"


class LostResponseStorage(StorageWrapper):
    """Loses the request or the response when version 1 is created, and cannot read that root afterwards."""

    def __init__(self, inner: Storage, *, arrives: bool):
        super().__init__(inner)
        self._arrives = arrives
        self._is_sent = False

    def create(self, path: str, data: bytes) -> None:
        if path == ROOT_1:
            self._is_sent = True
            if self._arrives:
                self.inner.create(path, data)
            raise AmbiguousWriteError("no response", path=path)
        self.inner.create(path, data)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == ROOT_1 and self._is_sent:
            raise StoragePermissionError("not now", path=path)
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)


class DelayedStorage(StorageWrapper):
    """Delays the create of version 1 until ``deliver``, and cannot read that root once the create was sent."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self._delayed: bytes | None = None

    def create(self, path: str, data: bytes) -> None:
        if path == ROOT_1:
            self._delayed = data
            raise AmbiguousWriteError("no response", path=path)
        self.inner.create(path, data)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == ROOT_1 and self._delayed is not None:
            raise StoragePermissionError("not now", path=path)
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def deliver(self) -> None:
        assert self._delayed is not None
        self.inner.create(ROOT_1, self._delayed)


def commit_with_unknown_outcome(storage: Storage) -> CommitOutcomeUnknownError:
    """Commit version 1 with an unknown outcome, and return the error."""
    txn = Lakehouse(storage).transaction(message="m" * 2000)
    txn.create_namespace("new")
    for number in range(12):
        txn.create_table("new", f"t{number}", table())
    with pytest.raises(CommitOutcomeUnknownError) as caught:
        txn.commit()
    assert caught.value.version == 1
    assert f"trinitylake resolve-commit 1 {caught.value.commit_id}" in str(caught.value)
    return caught.value


def resolve(lake: Lakehouse, error: CommitOutcomeUnknownError, *, fence: bool = False) -> str:
    assert error.version is not None
    return lake.resolve_commit(error.version, error.commit_id, fence=fence)


@pytest.mark.parametrize("fence", [False, True])
def test_resolve_commit_reports_committed(lake: Lakehouse, fence: bool) -> None:
    error = commit_with_unknown_outcome(LostResponseStorage(lake.storage, arrives=True))
    assert resolve(lake, error, fence=fence) == "committed"
    assert lake.latest_version() == 1
    assert lake.snapshot().tables("new")
    with lake.transaction() as txn:
        txn.create_namespace("later")
    assert resolve(lake, error, fence=fence) == "committed"


@pytest.mark.parametrize("fence", [False, True])
def test_resolve_commit_reports_lost(lake: Lakehouse, fence: bool) -> None:
    error = commit_with_unknown_outcome(LostResponseStorage(lake.storage, arrives=False))
    with lake.transaction() as txn:
        txn.create_namespace("other")
    assert resolve(lake, error, fence=fence) == "lost"
    assert lake.latest_version() == 1


def test_commit_in_flight_is_undecided(lake: Lakehouse) -> None:
    delayed = DelayedStorage(lake.storage)
    error = commit_with_unknown_outcome(delayed)
    assert resolve(lake, error) == "undecided"
    assert lake.latest_version() == 0
    delayed.deliver()
    assert resolve(lake, error) == "committed"
    assert len(objects(lake.snapshot(1))) == 13, "all of its files still exist"


def test_fence_prevents_undecided_commit(lake: Lakehouse) -> None:
    delayed = DelayedStorage(lake.storage)
    error = commit_with_unknown_outcome(delayed)
    assert resolve(lake, error, fence=True) == "lost"
    fence = lake.snapshot(1)
    assert objects(fence) == objects(lake.snapshot(0))
    (info,) = lake.history(1)
    assert (info.version, info.operation) == (1, "fence")
    assert error.commit_id in str(info.message)
    with pytest.raises(FileExistsAlreadyError):
        delayed.deliver()
    assert resolve(lake, error) == resolve(lake, error, fence=True) == "lost"
    assert lake.latest_version() == 1, "a second fence is not needed"
    lake.close()
    assert lake.storage.read("_latest_hint.txt") == b"1"


def test_fence_keeps_all_content(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(40):
            txn.create_table("ns", f"t{number}", table())
    before = objects(lake.snapshot())
    assert lake.resolve_commit(2, UNKNOWN_ID, fence=True) == "lost"
    assert objects(lake.snapshot(2)) == before
    assert lake.snapshot(2).root.children == lake.snapshot(1).root.children != []
    assert unreferenced_paths(lake) == set()
    assert operations.verify(lake).findings == ()


def test_fence_after_delivered_commit_reports_committed(lake: Lakehouse) -> None:
    """The delayed request arrives between the check and the fence."""
    delayed = DelayedStorage(lake.storage)
    error = commit_with_unknown_outcome(delayed)

    class DeliverBeforeFence(StorageWrapper):
        def create(self, path: str, data: bytes) -> None:
            if path == ROOT_1:
                delayed.deliver()
            self.inner.create(path, data)

    assert resolve(Lakehouse(DeliverBeforeFence(lake.storage)), error, fence=True) == "committed"
    assert lake.latest_version() == 1
    assert len(objects(lake.snapshot(1))) == 13


def test_fence_with_lost_response_can_be_retried(lake: Lakehouse) -> None:
    error = commit_with_unknown_outcome(DelayedStorage(lake.storage))
    with pytest.raises(CommitOutcomeUnknownError):
        resolve(Lakehouse(LostResponseStorage(lake.storage, arrives=True)), error, fence=True)
    assert resolve(lake, error, fence=True) == "lost"
    assert lake.latest_version() == 1


def test_resolve_commit_reads_sealed_root(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    commit_id = str(next(lake.history(1)).commit_id)
    with lake.transaction() as txn:
        txn.create_namespace("later")
    seal(lake, 1)
    assert lake.resolve_commit(1, commit_id) == "committed"
    assert lake.resolve_commit(1, UNKNOWN_ID) == "lost"


def test_resolve_commit_rejects_invalid_arguments(lake: Lakehouse) -> None:
    for version in (-1, 2**32):
        with pytest.raises(InvalidInputError):
            lake.resolve_commit(version, UNKNOWN_ID)
    for commit_id in ("", "nope", "a" * 100_000, "\udc80"):
        with pytest.raises(InvalidInputError):
            lake.resolve_commit(0, commit_id)
    with pytest.raises(VersionNotFoundError):
        lake.resolve_commit(2, UNKNOWN_ID, fence=True)
    assert lake.latest_version() == 0
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    root_0 = lake.storage.read(root_path(0))
    lake.storage.delete(root_path(0))
    with pytest.raises(CorruptFileError):
        lake.resolve_commit(0, UNKNOWN_ID, fence=True)
    lake.storage.create(root_path(0), root_0)
