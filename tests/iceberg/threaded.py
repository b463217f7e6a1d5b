"""A storage wrapper that is treated as high-latency storage, so that requests are sent in parallel threads."""

from __future__ import annotations

from trinitylake_ops.storage import Storage, StorageWrapper


class ThreadedStorage(StorageWrapper):
    """Forwards requests. Its concurrency makes the package send requests and pending files in parallel threads."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.concurrency = 8
        self.serial_read_limit = self.serial_create_limit = 1
