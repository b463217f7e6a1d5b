"""Writing the hint after a commit (docs/protocol.md, C5)."""

from __future__ import annotations

import logging
import threading

from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.storage.interface import Storage

logger = logging.getLogger(__name__)


class HintWriter:
    """Writes the hint, best effort: it only saves requests, so a failure is logged and counted, no more."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._lock = threading.Lock()
        self._n_failures = 0

    @property
    def n_failures(self) -> int:
        """How many hints could not be written."""
        return self._n_failures

    def write(self, version: int) -> None:
        """Let the hint name a version that was just committed."""
        try:
            self._storage.write(HINT_PATH, str(version).encode("ascii"))
        except StorageError as error:
            with self._lock:
                self._n_failures += 1
            logger.warning("version %d is committed, but its hint could not be written: %s", version, error)
