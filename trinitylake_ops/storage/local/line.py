"""The line of processes that commit to one folder, held together by an advisory lock on it (docs/protocol.md, C).

Nothing depends on the line: a commit is decided by the creation of its root alone. It saves the attempts that processes
would lose to each other. The kernel frees the lock of a process that ends, however it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.005
_LOOKS_PER_TURN = 4
#: The part of the usual wait that is slept through: a look costs about as much as a tenth of a commit.
_SLEPT_THROUGH = 0.6
_WEIGHT_OF_LAST = 0.2
#: For so long after a wait, others are taken to have committed meanwhile, even where nobody is seen.
_CROWDED_S = 1.0
#: After a wait in vain, such as for a stopped process, nobody is waited for during this time.
_REST_S = 10.0


class Line:
    """A place in the line before one folder. All threads of a process may use the same object."""

    def __init__(self, folder: bytes):
        self._folder = folder
        self._turn_s = 0.0
        self._usual_wait_s = 0.0
        self._crowded_until_s = 0.0
        self._waits_again_at_s = 0.0

    @contextlib.contextmanager
    def place(self, longest_s: float) -> Iterator[bool]:
        """Hold the front of the line in a block, and yield whether others were before us, now or a moment ago.

        Goes on without a place after ``longest_s``, and where the file system has no such locks.
        """
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield False  # whatever is wrong with the folder, the first write tells it better
            return
        try:
            is_free = _lock(descriptor)
            is_first = is_free or self._wait(descriptor, longest_s)
            begin_s = time.monotonic()
            try:
                yield not is_free or begin_s < self._crowded_until_s
            finally:
                if is_first:
                    self._turn_s = time.monotonic() - begin_s
                    _unlock(descriptor)
        finally:
            os.close(descriptor)

    def _wait(self, descriptor: int, longest_s: float) -> bool:
        """Wait for the front. Returns whether we got there.

        A blocking call would wait for a stopped process without end, so we look again and again.
        """
        begin_s = now_s = time.monotonic()
        if now_s < self._waits_again_at_s:
            return False
        pause_s = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, self._turn_s / _LOOKS_PER_TURN))
        sleep_s = max(pause_s, min(_SLEPT_THROUGH * self._usual_wait_s, longest_s / 2))
        while now_s - begin_s < longest_s:
            time.sleep(random.uniform(0.5, 1) * sleep_s)
            sleep_s = pause_s
            now_s = time.monotonic()
            if _lock(descriptor):
                self._usual_wait_s += _WEIGHT_OF_LAST * (now_s - begin_s - self._usual_wait_s)
                self._crowded_until_s = now_s + _CROWDED_S
                return True
        self._waits_again_at_s = now_s + _REST_S
        logger.info("no longer waiting for a process that commits to %r", os.fsdecode(self._folder))
        return False


def _lock(descriptor: int) -> bool:
    """Take the lock if it is free. It counts as free where the file system knows none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("the file system has no advisory locks: %s", error)
    return True


def _unlock(descriptor: int) -> None:
    """Free the lock. A forked child may hold it by its copy of the descriptor: closing ours would not do."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        logger.debug("the file system has no advisory locks: %s", error)
