"""Fairness between processes: who has lost often asks the others to wait (docs/protocol.md, C; decision 10).

A request is an empty file, whose name says how long an attempt of its writer takes. It is advice: no commit depends on
it, no failure of it harms one, and one that its writer no longer renews counts for nothing.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.file_names import TURN_PREFIX, new_turn_path, parse_turn_path
from trinitylake_ops.storage.interface import Storage

logger = logging.getLogger(__name__)

#: Attempts in a row that a writer loses before it asks for a turn; fewer are common among equals.
LOSSES_BEFORE_ASKING = 5
#: A process looks for requests after so many of its commits.
COMMITS_BETWEEN_LOOKS = 8
#: How long a process waits at once, whoever asks.
LONGEST_WAIT_S = 60.0
_FEWEST_PAUSES = 8
_MOST_PAUSES = 64
_LONGEST_PAUSE_S = 5.0
_LONGEST_ATTEMPT_MS = 600_000
_CLOCK_MARGIN_MS = 5_000


class TurnRequest:
    """What a writer asks for that loses one attempt after the other."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._path: str | None = None

    def lost(self, n_lost: int, attempt_seconds: float) -> None:
        """Ask, or go on asking, where ``n_lost`` attempts were lost; the last one, with its rebase, took so long."""
        if n_lost < LOSSES_BEFORE_ASKING:
            return
        attempt_ms = max(1, min(_LONGEST_ATTEMPT_MS, round(1000 * attempt_seconds)))
        if self._path is not None and attempt_ms > 2 * (parse_turn_path(self._path) or 0):
            self.withdraw()  # what it says is no longer true
        self._path = self._path or new_turn_path(attempt_ms)
        try:
            self._storage.write(self._path, b"")
        except TrinityLakeError as error:
            logger.warning("could not ask other writers to wait: %s", error)

    def withdraw(self) -> None:
        """Ask no longer."""
        if self._path is not None:
            path, self._path = self._path, None
            _delete(self._storage, [path])


class Courtesy:
    """What one process does for others that ask for a turn."""

    def __init__(self) -> None:
        self._n_commits = 0
        self._asking: Mapping[str, int] = {}
        self._n_pauses = _FEWEST_PAUSES

    def is_time_to_look(self) -> bool:
        """Count a commit; returns whether to look, beside the request that follows it."""
        self._n_commits += 1
        return self._n_commits % COMMITS_BETWEEN_LOOKS == 0

    def look(self, storage: Storage) -> None:
        """See whether others ask."""
        self._asking = _asking(storage)

    def give_way(self, storage: Storage, longest_s: float) -> bool:
        """Wait for those who were seen to ask, until they have committed, but not for ever; returns whether it did.

        Who still asks then is waited for before the next commit, too, and twice as long: where many writers
        wait, each in its own time, all of them must do so at once.
        """
        if not self._asking:
            return False
        logger.info("waiting for other writers that lose all the time: %s", ", ".join(self._asking))
        begin_s, has_paused, waited_for = time.monotonic(), False, set(self._asking)
        for _ in range(self._n_pauses):
            self.look(storage)
            rest_s = min(longest_s, LONGEST_WAIT_S) - (time.monotonic() - begin_s)
            if not self._asking or rest_s <= 0:
                break
            pause_s = min(_LONGEST_PAUSE_S, max(self._asking.values()) / 1000)
            time.sleep(min(rest_s, random.uniform(0.5, 1) * pause_s))
            has_paused = True
        is_one_left = not waited_for.isdisjoint(self._asking)
        self._n_pauses = min(_MOST_PAUSES, 2 * self._n_pauses) if is_one_left else _FEWEST_PAUSES
        return has_paused


def _asking(storage: Storage) -> dict[str, int]:
    """Return the requests that count, with how many milliseconds an attempt takes; those that do not are deleted."""
    asking, lapsed = {}, []
    try:
        for info in storage.list(TURN_PREFIX):
            attempt_ms = parse_turn_path(info.path)
            if attempt_ms is None:
                continue
            # Renewed at each loss.
            if abs(storage.now_ms() - info.last_modified_ms) > 4 * attempt_ms + _CLOCK_MARGIN_MS:
                lapsed.append(info.path)
            else:
                asking[info.path] = attempt_ms
    except TrinityLakeError as error:
        logger.warning("could not see whether other writers wait: %s", error)
        return {}
    _delete(storage, lapsed)
    return asking


def _delete(storage: Storage, paths: list[str]) -> None:
    try:
        for path, error in storage.delete_many(paths).items():
            logger.warning("the request %r of a writer for its turn could not be deleted: %s", path, error)
    except TrinityLakeError as error:
        logger.warning("requests of writers for their turns could not be deleted: %s", error)
