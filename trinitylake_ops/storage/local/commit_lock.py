"""An advisory lock on a folder that processes hold while they commit (docs/internals/protocol.md, C).

Correctness does not depend on the lock: a commit is decided only by the creation of its root. The lock avoids conflicts
between processes. The kernel releases it when a process ends, even if the process is killed.
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

#: For this long after a wait, assume that other processes have committed, even if the lock was free.
_CROWDED_S = 1.0


class CommitLock:
    """A lock on one folder. Thread-safe."""

    def __init__(self, folder: bytes):
        self._folder = folder
        self._crowded_until_s = 0.0
        self._abandoned_wait: _Wait | None = None

    @contextlib.contextmanager
    def acquire(self, max_s: float) -> Iterator[bool]:
        """Hold the lock while a block runs, and yield whether another process holds it or held it in the last second.

        The block runs without the lock if it is not acquired in ``max_s`` seconds, or if the file system does not
        support locks.
        """
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield False  # the first write reports the problem with the folder
            return
        is_free = _lock(descriptor)
        if not (is_free or self._wait(descriptor, max_s)):
            yield True
            return
        try:
            yield not is_free or time.monotonic() < self._crowded_until_s
        finally:
            _unlock(descriptor)

    def _wait(self, descriptor: int, max_s: float) -> bool:
        """Wait for the lock. Return whether it was acquired. Otherwise close the descriptor.

        Do not wait if an earlier wait timed out and is still blocked.
        """
        if self._abandoned_wait is not None and self._abandoned_wait.is_waiting:
            os.close(descriptor)
            return False
        wait = _Wait(descriptor)
        if wait.ends_within(max_s):
            self._crowded_until_s = time.monotonic() + _CROWDED_S
            return True
        self._abandoned_wait = wait
        logger.info("gave up waiting for a process that commits to %r", os.fsdecode(self._folder))
        return False


class _Wait:
    """A blocking call for the lock in a separate thread, because the call cannot be interrupted.

    The kernel grants the lock to blocked callers in order, and wakes one at a time. Polling would cost each of many
    processes CPU time for every commit.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._choice = threading.Lock()
        self._is_over = threading.Event()
        self._is_abandoned = False

    @property
    def is_waiting(self) -> bool:
        """Whether the call is still blocked."""
        return not self._is_over.is_set()

    def ends_within(self, max_s: float) -> bool:
        """Wait for the lock. Return whether it was acquired. Otherwise release it as soon as it is acquired."""
        try:
            threading.Thread(target=self._block, name="commit-lock", daemon=True).start()
        except RuntimeError as error:
            logger.debug("cannot start a thread that waits for the lock: %s", error)
            os.close(self._descriptor)
            self._is_over.set()
            return False
        try:
            return self._is_over.wait(max_s) or not self._abandon()
        except BaseException:  # an interrupt
            if not self._abandon():
                _unlock(self._descriptor)
            raise

    def _block(self) -> None:
        _lock(self._descriptor, is_blocking=True)
        with self._choice:
            if self._is_abandoned:
                _unlock(self._descriptor)
            self._is_over.set()

    def _abandon(self) -> bool:
        """Abandon the wait, unless the lock was just acquired. Return whether the wait was abandoned."""
        with self._choice:
            self._is_abandoned = self.is_waiting
            return self._is_abandoned


def _lock(descriptor: int, *, is_blocking: bool = False) -> bool:
    """Acquire the lock. Return False if it is held and ``is_blocking`` is false.

    Return True if the file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if is_blocking else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("the file system does not support advisory locks: %s", error)
    return True


def _unlock(descriptor: int) -> None:
    """Release the lock and close the descriptor. Closing is not enough: a forked child may have a copy of it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        logger.debug("the file system does not support advisory locks: %s", error)
    finally:
        os.close(descriptor)
