"""Read the hint, and write it after a commit (docs/protocol.md, F1 and C5). It only saves requests."""

from __future__ import annotations

import logging

from trinitylake_ops.errors import FileMissingError, StorageError, TrinityLakeError
from trinitylake_ops.format.file_names import HINT_PATH, parse_hint
from trinitylake_ops.storage import background
from trinitylake_ops.storage.interface import Storage

logger = logging.getLogger(__name__)

HINT_READ_BYTES = 64  # more than any number takes, with white space; a file of garbage may be huge


def read_hint(storage: Storage) -> int | None:
    """Return the version the hint names, or None when it is missing, holds no version or cannot be read."""
    try:
        return parse_hint(storage.read(HINT_PATH, length=HINT_READ_BYTES))
    except FileMissingError:
        return None
    except StorageError as error:
        logger.warning("the hint cannot be read, going on without it: %s", error)
        return None


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
