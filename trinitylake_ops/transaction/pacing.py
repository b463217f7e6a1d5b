"""Coordinate a commit with other writers: fairness, the commit lock, early reads and staged roots.

Commits can be understood without this module. ``Pacing`` is its entire interface, and the default implementation does
nothing. The module only saves requests and time and distributes them fairly; the correctness of a commit does not
depend on it.

A writer that has lost several attempts, or one long attempt, requests a slot: other writers then wait before committing
(protocol.md, "Fairness"; fast-commits.md). A request is an empty file whose name contains the
duration of its writer's attempt. The writer renews it every second for as long as the attempt may take. A request that
was not renewed for a few seconds is ignored.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.file_names import SLOT_REQUEST_PREFIX, new_slot_request_path, parse_slot_request_path
from trinitylake_ops.storage import background, process_clock
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.roots import RootProbe, Roots, speculative_probe
from trinitylake_ops.versions.snapshot import LakehouseFiles

logger = logging.getLogger(__name__)

Call = Callable[[], None]

#: Consecutive conflicts after which a writer requests a slot. Fewer conflicts are common among equally fast writers.
CONFLICTS_BEFORE_REQUEST = 5
#: A writer also requests a slot after losing one attempt of at least this duration, because writers with shorter
#: attempts would always win.
LONG_ATTEMPT_S = 0.5
#: A process lists the slot requests of other writers after this number of its own commits.
COMMITS_BETWEEN_POLLS = 8
#: Maximum time that a process waits before one commit, unless a request names a longer attempt.
MAX_WAIT_S = 20.0
#: Maximum time that a process waits for a writer with long attempts: as a multiple of one attempt, and in total.
_MAX_ATTEMPTS_WAITED = 2
MAX_WAIT_FOR_LONG_ATTEMPTS_S = 120.0
#: How often a writer renews its request, and how long a request is valid after a renewal according to the storage's
#: clock.
RENEWAL_S = 1.0
LAPSE_MS = 3_500
_MIN_PAUSES = 8
_MAX_PAUSES = 64
_MAX_PAUSE_S = 1.0  # between two listings of the requests
_MAX_ATTEMPT_MS = 600_000
#: How long a request is renewed: a multiple of one attempt, and at least this time.
_ATTEMPTS_RENEWED = 4
_MIN_RENEWAL_S = 5.0
_MAX_RENEWAL_WAIT_S = 1.0
#: Maximum time that a commit waits for commits of other processes on a storage with a commit lock.
MAX_LOCK_WAIT_S = 2.0


class Pacing:
    """The pacing of one commit. This default implementation does nothing.

    A commit calls ``slot`` around all its work. It calls ``calls_with_files``, ``seen``, ``calls_with_root`` and
    ``end_attempt`` in each attempt, and ``note_other_commit`` and ``note_conflict`` after each conflict. Finally it
    calls ``committed`` or ``withdraw``, and ``close`` in any case. Failures of pacing itself are only logged.
    """

    def slot(self, max_s: float) -> AbstractContextManager[bool]:
        """Wait for other writers for up to ``max_s`` seconds. Yields whether it waited."""
        del max_s
        return nullcontext(False)

    def calls_to_probe(self, roots: Roots, version: int) -> Sequence[Call]:
        """Return reads of a version that other writers may have created, to run in a round trip of the caller."""
        del roots, version
        return ()

    def calls_with_files(self, root: KnownRoot, roots: Roots, *, has_files: bool) -> Sequence[Call]:
        """Return calls for the round trip that writes the files of an attempt, if it has any to write."""
        del root, roots, has_files
        return ()

    def calls_with_root(self, root: KnownRoot, roots: Roots) -> Sequence[Call]:
        """Return calls for the round trip that creates the root of an attempt."""
        del root, roots
        return ()

    def seen(self, path: str) -> RootProbe | None:
        """Return the root that the calls read at this path, or None if there was no root."""
        del path
        return None

    def latest_seen(self, roots: Roots) -> KnownRoot | None:
        """Return the latest version that the calls saw, or None if they saw no version."""
        del roots
        return None

    def end_attempt(self) -> None:
        """Discard the staged root of an attempt, if it was not used."""

    def note_other_commit(self) -> None:
        """Record that another process commits concurrently."""

    def note_conflict(self, n_conflicts: int, attempt_s: float) -> None:
        """Record a conflict.

        Args:
            n_conflicts: The number of conflicts of this commit so far.
            attempt_s: The duration of the last attempt in seconds.
        """

    def committed(self) -> None:
        """End a commit that created a version."""

    def withdraw(self) -> None:
        """End a commit that created no version, or that may have."""

    def close(self) -> None:
        """Stop renewing the slot request, which an interrupted commit would leave behind."""


def pace(files: LakehouseFiles, fairness: Fairness | None = None) -> Pacing:
    """Return the pacing of a commit.

    Args:
        files: The files of the lakehouse.
        fairness: Tracks other writers. None for a commit that does not wait for slots, for example
            the commit of an operation. Such a commit still requests a slot after conflicts.
    """
    return WriterPacing(files, fairness)


class WriterPacing(Pacing):
    """Waits for slots, requests a slot after conflicts, reads the next root early, and stages roots on a local disk."""

    def __init__(self, files: LakehouseFiles, fairness: Fairness | None):
        self._storage = files.storage
        self._fairness = fairness
        self._slot_request: SlotRequest | None = None
        self._staged: Call | None = None  # discards the staged root
        self._probe: RootProbe | None = None

    @contextmanager
    def slot(self, max_s: float) -> Iterator[bool]:
        """Wait for writers of other processes: first for requested slots, then for the commit lock."""
        has_yielded = self._fairness is not None and self._fairness.yield_to_others(self._storage, max_s)
        with self._storage.commit_lock(min(max_s, MAX_LOCK_WAIT_S)) as has_waited:
            yield has_yielded or has_waited

    def calls_to_probe(self, roots: Roots, version: int) -> Sequence[Call]:
        """Return reads of a version and its successor if other processes commit concurrently."""
        self._probe = None
        if self._fairness is None or not self._fairness.is_crowded:
            return ()
        self._probe, reads = speculative_probe(roots, version)
        return reads

    def calls_with_files(self, root: KnownRoot, roots: Roots, *, has_files: bool) -> Sequence[Call]:
        """Stage the root, and probe its version if other processes commit concurrently."""
        calls: list[Call] = []
        if roots.storage.supports_staging:
            calls.append(functools.partial(roots.storage.stage, root.path, root.data))
            self._staged = functools.partial(roots.storage.discard_staged, root.data)
        if has_files:
            calls += self.calls_to_probe(roots, root.version)
        return calls

    def calls_with_root(self, root: KnownRoot, roots: Roots) -> Sequence[Call]:
        """Probe the version and its successor, unless the storage stages roots: there, a rejected create is cheaper."""
        return () if roots.storage.supports_staging else self.calls_to_probe(roots, root.version)

    def seen(self, path: str) -> RootProbe | None:
        return None if self._probe is None or self._probe.probed.contents.get(path) is None else self._probe

    def latest_seen(self, roots: Roots) -> KnownRoot | None:
        return None if self._probe is None else self._probe.latest(roots)

    def end_attempt(self) -> None:
        if self._staged is not None:
            self._staged()

    def note_other_commit(self) -> None:
        if self._fairness is not None:
            self._fairness.note_other_commit()

    def note_conflict(self, n_conflicts: int, attempt_s: float) -> None:
        """Request a slot, or renew the request, in the background."""
        self._probe = None
        if may_request_slot(n_conflicts, attempt_s):
            self._slot_request = self._slot_request or SlotRequest(self._storage)
            background.submit(functools.partial(self._slot_request.note_conflicts, n_conflicts, attempt_s))

    def committed(self) -> None:
        """Withdraw the slot request, and periodically list the requests of other writers, in the background."""
        if self._slot_request is not None:
            background.submit(self._slot_request.withdraw)
        if self._fairness is not None:
            self._fairness.poll_periodically(self._storage)

    def withdraw(self) -> None:
        if self._slot_request is not None:
            self._slot_request.withdraw()

    def close(self) -> None:
        """Stop renewing the request, so that other writers do not wait for an interrupted writer."""
        if self._slot_request is not None:
            self._slot_request.end()


class SlotRequest:
    """The slot request of a writer whose attempts keep conflicting."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._path: str | None = None
        self._renewal: _Renewal | None = None
        self._is_over = False
        self._lock = threading.RLock()  # reentrant: a signal handler may end the request that its thread is writing

    def note_conflicts(self, n_conflicts: int, attempt_seconds: float) -> None:
        """Request a slot, or renew the request, after enough conflicts or a long attempt.

        Runs in the background, so the commit may have ended already.

        Args:
            n_conflicts: The number of conflicts of the commit so far.
            attempt_seconds: The duration of the last attempt, including its rebase.
        """
        with self._lock:
            if may_request_slot(n_conflicts, attempt_seconds) and not self._is_over:
                self._write_request(attempt_seconds)

    def _write_request(self, attempt_seconds: float) -> None:
        attempt_ms = max(1, min(_MAX_ATTEMPT_MS, round(1000 * attempt_seconds)))
        if self._path is not None and attempt_ms > 2 * (parse_slot_request_path(self._path) or 0):
            self._delete()  # the duration in its name is out of date
        self._path = self._path or new_slot_request_path(attempt_ms)
        try:
            self._storage.write(self._path, b"")
        except TrinityLakeError as error:
            logger.warning("a slot request could not be written: %s", error)
        self._end_renewal()
        max_s = max(_MIN_RENEWAL_S, _ATTEMPTS_RENEWED * attempt_ms / 1000)
        self._renewal = _Renewal(self._storage, self._path, process_clock.now_s() + max_s)
        try:
            background.start_thread(self._renewal, "trinitylake-slot-request")
        except RuntimeError as error:  # raised at interpreter exit
            logger.warning("a slot request is not renewed: no thread can be started: %s", error)

    def end(self) -> None:
        """Send no more requests and stop the renewal. A process that still sees the request waits a few seconds."""
        with self._lock:
            self._is_over = True
            self._end_renewal()

    def withdraw(self) -> None:
        """Send no more requests, and delete the current request."""
        with self._lock:
            self._is_over = True
            self._delete()

    def _end_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.end()
            self._renewal = None

    def _delete(self) -> None:
        self._end_renewal()
        if self._path is not None:
            path, self._path = self._path, None
            _delete(self._storage, [path])


def may_request_slot(n_conflicts: int, attempt_seconds: float) -> bool:
    """Return whether a writer may request a slot.

    Args:
        n_conflicts: The number of conflicts of its commit so far.
        attempt_seconds: The duration of its last attempt.
    """
    return n_conflicts >= CONFLICTS_BEFORE_REQUEST or attempt_seconds >= LONG_ATTEMPT_S


class _Renewal:
    """Renews a slot request until the attempt ends, or takes longer than other writers wait."""

    def __init__(self, storage: Storage, path: str, deadline_s: float):
        self._storage = storage
        self._path = path
        self._deadline_s = deadline_s
        self._is_ended = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()

    def __call__(self) -> None:
        """Renew the request every second."""
        while not self._is_ended.wait(RENEWAL_S) and process_clock.now_s() < self._deadline_s:
            self._is_idle.clear()
            try:
                if not self._is_ended.is_set():
                    self._storage.write(self._path, b"")
            except TrinityLakeError as error:
                logger.warning("a slot request could not be renewed: %s", error)
            finally:
                self._is_idle.set()

    def end(self) -> None:
        """Stop. Waits briefly for a renewal in flight, which would otherwise recreate a deleted request."""
        self._is_ended.set()
        self._is_idle.wait(_MAX_RENEWAL_WAIT_S)


class Fairness:
    """Tracks contention with other processes, and waits for writers that requested a slot."""

    def __init__(self) -> None:
        self._n_commits = 0
        self._n_crowded = 0
        self._storage: Storage | None = None
        self._pending_requests: Mapping[str, int] = {}
        self._n_pauses = _MIN_PAUSES

    @property
    def is_crowded(self) -> bool:
        """Whether one of the most recent commits conflicted with a commit of another process."""
        return self._n_commits < self._n_crowded

    def note_other_commit(self) -> None:
        """Record a conflict with a commit of another process."""
        self._n_crowded = self._n_commits + COMMITS_BETWEEN_POLLS

    def poll_periodically(self, storage: Storage) -> None:
        """Count a commit. After every ``COMMITS_BETWEEN_POLLS`` commits, list the slot requests in the background."""
        self._n_commits += 1
        if self._n_commits % COMMITS_BETWEEN_POLLS == 0:
            self._storage = storage
            background.submit(self._poll)

    def _poll(self) -> None:
        if self._storage is not None:
            self.poll(self._storage)

    def poll(self, storage: Storage) -> None:
        """List the requests of other writers."""
        self._pending_requests = _pending_requests(storage)

    def yield_to_others(self, storage: Storage, max_s: float) -> bool:
        """Wait until the writers of the known requests have committed, up to a limit.

        If one of these requests is still pending after the wait, the next commit waits again, for twice as long:
        with many writers, all of them must pause at the same time.

        Args:
            storage: The storage of the requests.
            max_s: Maximum duration of the wait in seconds.

        Returns:
            Whether it waited.
        """
        if not self._pending_requests:
            return False
        logger.info("waiting for writers that requested a slot: %s", ", ".join(self._pending_requests))
        begun_s, first_requests = process_clock.now_s(), set(self._pending_requests)
        n_paused = 0
        while True:
            self.poll(storage)
            attempt_s = max(self._pending_requests.values(), default=0) / 1000
            wait_s = min(_MAX_ATTEMPTS_WAITED * attempt_s, MAX_WAIT_FOR_LONG_ATTEMPTS_S)
            remaining_s = min(max_s, max(MAX_WAIT_S, wait_s)) - (process_clock.now_s() - begun_s)
            pause_s = min(_MAX_PAUSE_S, attempt_s)
            # A long attempt gets the time that it needs, regardless of the number of pauses.
            if not self._pending_requests or remaining_s <= 0 or n_paused >= max(self._n_pauses, 2 * wait_s / pause_s):
                break
            process_clock.sleep(min(remaining_s, random.uniform(0.5, 1) * pause_s))
            n_paused += 1
        is_pending = not first_requests.isdisjoint(self._pending_requests)
        self._n_pauses = min(_MAX_PAUSES, 2 * self._n_pauses) if is_pending else _MIN_PAUSES
        return n_paused > 0


def _pending_requests(storage: Storage) -> dict[str, int]:
    """Return the duration of an attempt in milliseconds for each valid request. Delete expired requests."""
    pending, lapsed = {}, []
    try:
        for info in storage.list(SLOT_REQUEST_PREFIX):
            attempt_ms = parse_slot_request_path(info.path)
            if attempt_ms is None:
                continue
            if abs(storage.now_ms() - info.last_modified_ms) > LAPSE_MS:
                lapsed.append(info.path)
            else:
                pending[info.path] = attempt_ms
    except TrinityLakeError as error:
        logger.warning("the slot requests of other writers could not be listed: %s", error)
        return {}
    _delete(storage, lapsed)
    return pending


def _delete(storage: Storage, paths: list[str]) -> None:
    try:
        for path, error in storage.delete_many(paths).items():
            logger.warning("slot request %r could not be deleted: %s", path, error)
    except TrinityLakeError as error:
        logger.warning("slot requests could not be deleted: %s", error)
