"""A storage wrapper with the latency class of a server, whose requests are sent by threads."""

from __future__ import annotations

from trinitylake_ops.storage import Storage, StorageWrapper


class ThreadedStorage(StorageWrapper):
    """Passes requests on. The engine sends parallel requests and pending files in threads."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.concurrency = 8
        self.serial_read_limit = self.serial_create_limit = 1
