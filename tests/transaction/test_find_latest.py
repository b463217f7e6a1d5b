from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, seal
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    CorruptFileError,
    LakehouseNotFoundError,
    StoragePermissionError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import HINT_PATH, MAX_VERSION, root_path
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, Storage, StorageWrapper, drop_memory_root
from trinitylake_ops.versions.roots import Roots, find_latest

pytestmark = pytest.mark.usefixtures("fixed_requests")

LATEST = 37


@pytest.fixture
def storage(lakes: Lakes) -> MeteredStorage:
    """The storage of a lakehouse with versions 0 to 37."""
    lake = lakes.memory()
    for number in range(LATEST):
        lake.alter_definition(properties={"n": str(number)})
    return MeteredStorage(lake.storage)


def test_opening_version_takes_same_requests_at_any_age(lakes: Lakes) -> None:
    lake = lakes.memory()
    for number in range(LATEST):
        with lake.transaction() as txn:
            txn.create_namespace(f"ns{number}")
    storage = MeteredStorage(lake.storage)
    for version in (0, 1, 20, LATEST - 1):
        with storage.measure() as measured:
            snapshot = Lakehouse(storage).snapshot(version)
        assert snapshot.version == version
        assert len(snapshot.namespaces()) == version
        assert measured.counts.requests == budget("open version 1, cold").requests
    latest, missing = budget("open the latest version by number, cold"), budget("open a missing version, cold")
    expected = {LATEST: latest, str(LATEST): latest, LATEST + 5: missing, -1: latest, MAX_VERSION + 1: latest}
    for version, row in expected.items():
        with storage.measure() as measured:
            try:
                assert Lakehouse(storage).snapshot(version).version == LATEST
            except VersionNotFoundError as error:
                assert f"version {version} does not exist; the latest is {LATEST}" in str(error)
        assert (measured.counts.rounds, measured.counts.requests) == (row.rounds, row.requests)


@pytest.mark.parametrize(
    ("hint", "max_rounds"),
    [
        (b"36", 6),
        (b"30", 10),
        (b"1", 15),  # roots after the hint are searched first
        (b"0", 14),
        (None, 14),
        (b"", 14),
        (b"garbage", 14),
        (b"\xff\x00", 14),
        (b"-3", 14),
        (b"3.7", 14),
        (b" 37\r\n", 2),
        (b"38", 15),
        (b"1000000", 15),
        (str(MAX_VERSION).encode(), 15),
        (str(MAX_VERSION + 1).encode(), 14),
        (b"9" * 5000, 14),
    ],
)
def test_invalid_hint_never_fails_a_read(storage: MeteredStorage, hint: bytes | None, max_rounds: int) -> None:
    if hint is None:
        storage.delete(HINT_PATH)
    else:
        storage.write(HINT_PATH, hint)
    with storage.measure() as measured:
        assert find_latest(Roots(storage)) == (LATEST, storage.inner.read(root_path(LATEST)))
    assert measured.counts.rounds <= max_rounds
    assert "list" not in measured.counts.requests
    lake = Lakehouse.open(storage.root, storage=storage)
    assert lake.snapshot().definition.properties == {"n": "36"}
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    assert txn.committed_version == LATEST + 1
    assert storage.read(HINT_PATH) == str(LATEST + 1).encode(), "the next commit repairs the hint"


@pytest.mark.parametrize("hint", [None, b"0", b"3", b"20", b"99"])
def test_open_succeeds_when_oldest_roots_were_deleted(
    lakes: Lakes, storage: MeteredStorage, hint: bytes | None
) -> None:
    copy = lakes.storage("copy")
    for info in storage.list():
        copy.write(info.path, storage.read(info.path))
    for version in range(10):
        copy.delete(root_path(version))
    if hint is None:
        copy.delete(HINT_PATH)
    else:
        copy.write(HINT_PATH, hint)
    assert find_latest(Roots(copy))[0] == LATEST
    lake = Lakehouse(copy)
    assert [info.version for info in lake.history()] == list(range(LATEST, 9, -1))
    oldest = lake.snapshot(10)
    assert lake.snapshot(timestamp=oldest.created_at).version == 10
    assert lake.snapshot(timestamp=lake.snapshot(30).created_at).version == 30
    with pytest.raises(Exception, match="version 10 was created at") as caught:
        lake.snapshot(timestamp=oldest.created_at_ms - 1)
    assert caught.type.__name__ == "VersionNotFoundError"


def test_open_fails_when_root_is_empty() -> None:
    with pytest.raises(LakehouseNotFoundError, match="memory://nothing/"):
        Lakehouse.open("memory://nothing/")


def test_open_fails_when_only_hint_exists() -> None:
    storage = MemoryStorage("memory://hint-only/")
    storage.write(HINT_PATH, b"5")
    with pytest.raises(LakehouseNotFoundError):
        Lakehouse.open(storage.root, storage=storage)
    drop_memory_root(storage.root)


def test_unreadable_root_is_an_error(storage: MeteredStorage) -> None:
    for version in (LATEST, LATEST + 1):
        faulty = FaultyStorage(storage, [fail(1, StoragePermissionError, path_part=root_path(version), times=9)])
        with pytest.raises(StoragePermissionError):
            find_latest(Roots(faulty))


def test_largest_possible_version_is_found() -> None:
    storage = MemoryStorage("memory://last-version/")
    storage.write(HINT_PATH, str(MAX_VERSION).encode())
    storage.write(root_path(MAX_VERSION), b"root")
    assert find_latest(Roots(storage)) == (MAX_VERSION, b"root")
    storage.write(HINT_PATH, str(MAX_VERSION - 1).encode())
    storage.write(root_path(MAX_VERSION - 1), b"older")
    assert find_latest(Roots(storage)) == (MAX_VERSION, b"root")
    drop_memory_root(storage.root)


class _ActionBeforeRead(StorageWrapper):
    """Calls ``action`` once, just before a path is read."""

    def __init__(self, inner: Storage, path: str, action: Callable[[], object]):
        super().__init__(inner)
        self._path = path
        self._action: Callable[[], object] | None = action

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path == self._path and self._action is not None:
            action, self._action = self._action, None
            action()
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)


def test_reader_retries_when_root_is_purged(lake: Lakehouse) -> None:
    for name in ("a", "b"):
        with lake.transaction() as txn:
            txn.create_namespace(name)

    def purge_version_2() -> None:
        with lake.transaction() as txn:
            txn.create_namespace("c")
        seal(lake, 2)

    storage = _ActionBeforeRead(lake.storage, root_path(2), purge_version_2)
    assert Lakehouse(storage).snapshot().namespaces() == ["a", "b", "c"]


def test_sealed_latest_root_is_reported(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("a")
    valid_root = lake.storage.read(root_path(1))
    seal(lake, 1)
    with pytest.raises(CorruptFileError):
        lake.snapshot()
    lake.storage.write(root_path(1), valid_root)
