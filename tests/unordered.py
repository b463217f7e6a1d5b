"""Lists of files in no order, as directory buckets of S3 Express give them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from trinitylake_ops.storage import FileInfo, LocalStorage, MemoryStorage, Storage
from trinitylake_ops.storage.interface import StorageWrapper


class UnorderedStorage(StorageWrapper):
    """Lists in an order of its own, another one each time; the same seed gives the same orders."""

    def __init__(self, inner: Storage, seed: int = 0):
        super().__init__(inner)
        self._chance = random.Random(seed)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        found = list(super().list(prefix))
        self._chance.shuffle(found)
        yield from found


def shuffle_lists(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Let all storages in memory and in folders list as an :class:`UnorderedStorage`."""
    chance = random.Random(seed)
    for kind in (MemoryStorage, LocalStorage):
        ordered = kind.list

        def shuffled(self: Storage, prefix: str = "", ordered=ordered) -> Iterator[FileInfo]:  # type: ignore[no-untyped-def]
            found = list(ordered(self, prefix))
            chance.shuffle(found)
            yield from found

        monkeypatch.setattr(kind, "list", shuffled)
