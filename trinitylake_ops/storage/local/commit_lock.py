"""The line of processes that commit to one folder, held together by an advisory lock on it (protocol.md, C).

Nothing depends on the line: a commit is decided by the creation of its root alone. It saves the attempts that processes
would lose to each other. The kernel frees the lock of a process that ends, however it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

#: For so long after a wait, others are taken to have committed meanwhile, even where nobody is seen.
_CROWDED_S = 1.0


class CommitLock:
    """A place in the line before one folder. All threads of a process may use the same object."""

    def __init__(self, folder: bytes):
        self._folder = folder
        self._crowded_until_s = 0.0
        self._abandoned_wait: _Wait | None = None

    @contextlib.contextmanager
    def acquire(self, longest_s: float) -> Iterator[bool]:
        """Hold the front of the line in a block, and yield whether others were before us, now or a moment ago.

        Goes on without a place after ``longest_s``, and where the file system has no such locks.
        """
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield False  # whatever is wrong with the folder, the first write tells it better
            return
        is_free = _lock(descriptor)
        if not (is_free or self._wait(descriptor, longest_s)):
            yield True
            return
        try:
            yield not is_free or time.monotonic() < self._crowded_until_s
        finally:
            _unlock(descriptor)

    def _wait(self, descriptor: int, longest_s: float) -> bool:
        """Wait for the front. Returns whether we got there; the descriptor is closed if not.

        Where an earlier wait was in vain and its place did not come since, nobody is waited for.
        """
        if self._abandoned_wait is not None and self._abandoned_wait.is_waiting:
            os.close(descriptor)
            return False
        wait = _Wait(descriptor)
        if wait.ends_within(longest_s):
            self._crowded_until_s = time.monotonic() + _CROWDED_S
            return True
        self._abandoned_wait = wait
        logger.info("no longer waiting for a process that commits to %r", os.fsdecode(self._folder))
        return False


class _Wait:
    """A blocking call for the lock, in a thread of its own: the call cannot be ended, but we need not stay for it.

    The kernel lets those through in their order who wait in such calls, and wakes one at a time. To look again and
    again would cost each of many processes a part of every commit.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._choice = threading.Lock()
        self._is_over = threading.Event()
        self._is_left = False

    @property
    def is_waiting(self) -> bool:
        """Whether the lock did not come yet."""
        return not self._is_over.is_set()

    def ends_within(self, longest_s: float) -> bool:
        """Wait for the lock. Returns whether it came; if not, it is freed again as soon as it comes."""
        try:
            threading.Thread(target=self._block, name="commit-line", daemon=True).start()
        except RuntimeError as error:
            logger.debug("no thread can wait: %s", error)
            os.close(self._descriptor)
            self._is_over.set()
            return False
        try:
            return self._is_over.wait(longest_s) or not self._abandon()
        except BaseException:  # an interrupt
            if not self._abandon():
                _unlock(self._descriptor)
            raise

    def _block(self) -> None:
        _lock(self._descriptor, is_blocking=True)
        with self._choice:
            if self._is_left:
                _unlock(self._descriptor)
            self._is_over.set()

    def _abandon(self) -> bool:
        """Stay no longer, unless the lock came just now. Returns whether we left."""
        with self._choice:
            self._is_left = self.is_waiting
            return self._is_left


def _lock(descriptor: int, *, is_blocking: bool = False) -> bool:
    """Take the lock if it is free, or wait for it. It counts as free where the file system knows none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if is_blocking else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("the file system has no advisory locks: %s", error)
    return True


def _unlock(descriptor: int) -> None:
    """Free the lock, and close. A forked child may hold it by its copy of the descriptor: closing ours would not do."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        logger.debug("the file system has no advisory locks: %s", error)
    finally:
        os.close(descriptor)
