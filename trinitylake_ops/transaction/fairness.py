"""Fairness between processes: who has lost often asks the others to wait (docs/protocol.md, C; decision 10).

A request is an empty file, whose name says how long an attempt of its writer takes. It is advice: no commit depends on
it, no failure of it harms one, and one that its writer no longer renews counts for nothing.
"""

from __future__ import annotations

import logging
import random
import time

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.file_names import TURN_PREFIX, new_turn_path, parse_turn_path
from trinitylake_ops.storage.interface import Storage

logger = logging.getLogger(__name__)

#: Attempts in a row that a writer loses before it asks for a turn; fewer are common among equals.
LOSSES_BEFORE_ASKING = 5
#: A process looks for requests after so many of its commits.
COMMITS_BETWEEN_LOOKS = 8
_LOSSES_BETWEEN_RENEWALS = 2
_LONGEST_ATTEMPT_MS = 5_000
_MOST_PAUSES = 8


class TurnRequest:
    """What a writer asks for that loses one attempt after the other."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._path: str | None = None

    def lost(self, n_lost: int, attempt_seconds: float) -> None:
        """Ask, or go on asking, where ``n_lost`` attempts were lost; the last one, with its rebase, took so long."""
        n_asked = n_lost - LOSSES_BEFORE_ASKING
        if n_asked < 0 or n_asked % _LOSSES_BETWEEN_RENEWALS:
            return
        if self._path is None:
            self._path = new_turn_path(max(1, min(_LONGEST_ATTEMPT_MS, round(1000 * attempt_seconds))))
        try:
            self._storage.write(self._path, b"")
        except TrinityLakeError as error:
            logger.warning("could not ask other writers to wait: %s", error)

    def withdraw(self) -> None:
        """Ask no longer."""
        if self._path is not None:
            _delete(self._storage, self._path)


class Courtesy:
    """What one process does for others that ask for a turn."""

    def __init__(self) -> None:
        self._n_commits = 0
        self._somebody_asks = False

    def is_time_to_look(self) -> bool:
        """Count a commit; returns whether to look, beside the request that follows it."""
        self._n_commits += 1
        return self._n_commits % COMMITS_BETWEEN_LOOKS == 0

    def look(self, storage: Storage) -> None:
        """See whether others ask."""
        self._somebody_asks = _longest_asked_ms(storage) is not None

    def give_way(self, storage: Storage) -> None:
        """Wait for those who were seen to ask: until they have committed, or for some of their attempts."""
        for _ in range(_MOST_PAUSES):
            if not self._somebody_asks:
                return
            attempt_ms = _longest_asked_ms(storage)
            self._somebody_asks = attempt_ms is not None
            if attempt_ms is not None:
                time.sleep(random.uniform(0.5, 1) * attempt_ms / 1000)


def _longest_asked_ms(storage: Storage) -> int | None:
    """Return how long an attempt takes of the slowest who asks now, None where nobody does; old requests go."""
    longest_ms = None
    try:
        for info in list(storage.list(TURN_PREFIX)):
            attempt_ms = parse_turn_path(info.path)
            if attempt_ms is None:
                continue
            attempt_ms = min(_LONGEST_ATTEMPT_MS, attempt_ms)
            # Renewed at every second loss; a second more, as some storages count in seconds.
            if abs(storage.now_ms() - info.last_modified_ms) > 2 * _LOSSES_BETWEEN_RENEWALS * attempt_ms + 1_000:
                _delete(storage, info.path)
            else:
                longest_ms = max(longest_ms or 0, attempt_ms)
    except TrinityLakeError as error:
        logger.warning("could not see whether other writers wait: %s", error)
        return None
    return longest_ms


def _delete(storage: Storage, path: str) -> None:
    try:
        storage.delete(path)
    except TrinityLakeError as error:
        logger.warning("the request of a writer for its turn could not be deleted: %s", error)
