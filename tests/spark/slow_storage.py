"""A storage that can be sent to Spark tasks and is so slow that operations can be interrupted."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage import Storage, StorageWrapper


class SlowStorage(StorageWrapper):
    """A storage with slow creates and deletes, two files per delete request, and a clock that is ahead."""

    delete_batch_size = 2

    def __init__(self, inner: Storage, ahead_ms: int = 0):
        super().__init__(inner)
        self.concurrency = 2
        self.delete_batch_size = 2
        self.ahead_ms = ahead_ms

    def now_ms(self) -> int:
        return self.inner.now_ms() + self.ahead_ms

    def create(self, path: str, data: bytes) -> None:
        if path.startswith("tables/"):
            time.sleep(0.1)
        self.inner.create(path, data)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        time.sleep(0.4)
        return self.inner.delete_batch(paths)
