"""Writing the hint after a commit (docs/protocol.md, C5)."""

from __future__ import annotations

import logging

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.storage import background
from trinitylake_ops.storage.interface import Storage

logger = logging.getLogger(__name__)


class HintWriter:
    """Writes the hint, best effort. The hint only saves requests, so a failure is logged and counted, no more."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._newest = -1
        self._failed: list[int] = []

    @property
    def n_failures(self) -> int:
        """How many hints could not be written."""
        background.flush()
        return len(self._failed)

    def note(self, version: int) -> None:
        """Let the hint name a version that was just committed, unless we have committed a newer one, too.

        It is written beside: the caller does not wait, and of versions that follow each other at once only the last is.
        """
        if version >= self._newest:
            self._newest = version
            background.put(self._write_newest)

    def _write_newest(self) -> None:
        version = self._newest
        try:
            self._storage.write_best_effort(HINT_PATH, str(version).encode("ascii"))
        except TrinityLakeError as error:
            self._failed.append(version)
            logger.warning("version %d is committed, but its hint could not be written: %s", version, error)
