"""The contract on local storages, wrappers, and stacks of wrappers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import FaultyStorage
from trinitylake_ops.format.file_names import is_immutable_path
from trinitylake_ops.storage import (
    LocalStorage,
    MemoryStorage,
    MeteredStorage,
    RetryStorage,
    Storage,
    StorageWrapper,
    open_storage,
)
from trinitylake_ops.storage.cache.storage import private_cache_view, shared_cache_view
from trinitylake_ops.storage.contract.suite import StorageContract
from trinitylake_ops.storage.meter import PacedStorage


def memory(folder: Path) -> Storage:
    return MemoryStorage(f"memory://contract{folder}/")


def local(folder: Path, *, fsync: bool = False) -> Storage:
    return LocalStorage(f"file://{folder}/lake/", fsync=fsync)


def any_path(path: str) -> bool:
    return True


class TestMemoryStorage(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return memory(folder)


class TestLocalStorageWithFsync(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return local(folder, fsync=True)


class TestLocalStorageWithoutFsync(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return local(folder)


class TestOpenedLocalStorage(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return open_storage(f"file://{folder}/lake/", {"fsync": "false"})


@pytest.mark.soak  # TestTallStack covers it
class TestStorageWrapper(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return StorageWrapper(memory(folder))


class TestRetryStorage(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return RetryStorage(memory(folder))


class TestMeteredStorage(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return MeteredStorage(memory(folder))


class TestPacedStorage(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return PacedStorage(memory(folder), 100_000)


@pytest.mark.soak  # TestTallStack covers it
class TestFaultyStorageWithoutFaults(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return FaultyStorage(memory(folder))


@pytest.mark.soak  # TestTallStack covers it
class TestRetryOverMeter(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return RetryStorage(MeteredStorage(local(folder)))


@pytest.mark.soak  # TestTallStack covers it
class TestMeterOverRetry(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return MeteredStorage(RetryStorage(local(folder)))


class TestTallStack(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return MeteredStorage(RetryStorage(FaultyStorage(MeteredStorage(RetryStorage(memory(folder))))))


class TestCacheOfAnyPath(StorageContract):
    """Each file is treated as immutable, but overwrites are visible at once because all clients share the cache."""

    def make_storage(self, folder: Path) -> Storage:
        return shared_cache_view(memory(folder), any_path)


class TestCacheOfAnyPathInFolder(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        options = {"cache_folder": f"{folder}/cache", "cache_bytes": "100000"}
        return shared_cache_view(RetryStorage(local(folder)), any_path, options)


class TestCacheOfImmutableFiles(StorageContract):
    def make_storage(self, folder: Path) -> Storage:
        return MeteredStorage(private_cache_view(local(folder), is_immutable_path))
