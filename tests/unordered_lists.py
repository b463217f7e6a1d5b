"""Unordered listings, as directory buckets of S3 Express return them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from trinitylake_ops.storage import FileInfo, LocalStorage, MemoryStorage, Storage
from trinitylake_ops.storage.interface import StorageWrapper


class UnorderedStorage(StorageWrapper):
    """A storage that lists files in random order. The same seed always produces the same order."""

    def __init__(self, inner: Storage, seed: int = 0):
        super().__init__(inner)
        self._rng = random.Random(seed)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        infos = list(super().list(prefix))
        self._rng.shuffle(infos)
        yield from infos


def shuffle_listings(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Make all memory and local storages list like an :class:`UnorderedStorage`."""
    rng = random.Random(seed)
    for storage_class in (MemoryStorage, LocalStorage):
        ordered_list = storage_class.list

        def shuffled_list(self: Storage, prefix: str = "", ordered_list=ordered_list) -> Iterator[FileInfo]:  # type: ignore[no-untyped-def]
            infos = list(ordered_list(self, prefix))
            rng.shuffle(infos)
            yield from infos

        monkeypatch.setattr(storage_class, "list", shuffled_list)
