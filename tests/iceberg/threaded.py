"""A storage in memory whose requests are handed to threads, as those of a server are."""

from __future__ import annotations

from trinitylake_ops.storage import Storage, StorageWrapper


class ThreadedStorage(StorageWrapper):
    """Hands requests on; the engine sends those of one round, and files of a change, by threads."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.concurrency = 8
        self.serial_read_limit = self.serial_create_limit = 1
