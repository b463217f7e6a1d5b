"""A storage whose clock a test sets."""

from __future__ import annotations

from trinitylake_ops.storage import Storage, StorageWrapper


class ClockStorage(StorageWrapper):
    """Shows ``time_ms`` as the storage's clock."""

    def __init__(self, inner: Storage, time_ms: int):
        super().__init__(inner)
        self.time_ms = time_ms

    def now_ms(self) -> int:
        return self.time_ms
