"""How a commit shares a lakehouse with other writers: fairness, the commit lock, early reads and staged roots.

A reader can understand commits without this module. ``Pacing`` is its whole interface, and its default does nothing:
everything here only saves requests and time, or shares them fairly, and no commit depends on it.

A writer that lost often, or much, requests a slot: others then wait before they commit (docs/internals/protocol.md,
"Fairness"; docs/internals/fast-commits.md). A request is an empty file, whose name says how long an attempt of its
writer takes. Its writer renews it every second for as long as the attempt may take. A request that was not renewed for
some seconds counts for nothing.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.file_names import SLOT_REQUEST_PREFIX, new_slot_request_path, parse_slot_request_path
from trinitylake_ops.storage import background
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.roots import RootProbe, Roots, speculative_probe
from trinitylake_ops.versions.snapshot import LakehouseFiles

logger = logging.getLogger(__name__)

Call = Callable[[], None]

#: Attempts in a row that a writer loses before it asks for a turn. Fewer losses are common among equals.
CONFLICTS_BEFORE_REQUEST = 5
#: A writer also asks after losing one attempt of this length: writers with short attempts would win every time.
LONG_ATTEMPT_S = 0.5
#: A process looks for requests after so many of its commits.
COMMITS_BETWEEN_POLLS = 8
#: The maximum time that a process waits before one commit, unless a request says that its attempts take longer.
LONGEST_WAIT_S = 20.0
#: The maximum time that a process waits for a writer whose attempts take long, as a multiple of one attempt and in all.
_ATTEMPTS_WAITED_FOR = 2
LONGEST_WAIT_FOR_LONG_ATTEMPTS_S = 120.0
#: How often a writer renews its request, and how long the request counts after that, by the storage's clock.
RENEWAL_S = 1.0
LAPSE_MS = 3_500
_FEWEST_PAUSES = 8
_MOST_PAUSES = 64
_LONGEST_PAUSE_S = 1.0  # between two looks for the requests
_LONGEST_ATTEMPT_MS = 600_000
_ATTEMPTS_RENEWED = 4
_SHORTEST_RENEWAL_S = 5.0
_LONGEST_RENEWAL_WAIT_S = 1.0
#: The maximum time that a commit waits for those of other processes, where its storage has a commit lock.
LONGEST_LOCK_WAIT_S = 2.0


class Pacing:
    """The pacing of one commit. This default does nothing.

    A commit calls ``slot`` around all its work. It calls ``calls_with_files``, ``seen``, ``calls_with_root`` and
    ``end_attempt`` in each attempt, and ``note_other_commit`` and ``note_conflict`` after each conflict. In the end it
    calls ``committed`` or ``withdraw``, and ``close`` in any case. What this module itself cannot do is logged.
    """

    def slot(self, longest_s: float) -> AbstractContextManager[bool]:
        """Wait for other writers for up to ``longest_s`` seconds. The block gets whether it waited."""
        del longest_s
        return nullcontext(False)

    def calls_to_probe(self, roots: Roots, version: int) -> Sequence[Call]:
        """Return reads of a version that other writers may have created, for a round trip of the caller."""
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
        """Return what the calls read, if they saw a root at this path."""
        del path
        return None

    def latest_seen(self, roots: Roots) -> KnownRoot | None:
        """Return the latest version that the calls saw, None if they saw none."""
        del roots
        return None

    def end_attempt(self) -> None:
        """Undo what was prepared for the root of an attempt and not used."""

    def note_other_commit(self) -> None:
        """Note that another process commits at the same time."""

    def note_conflict(self, n_conflicts: int, attempt_s: float) -> None:
        """Note that attempts were lost, of which the last one took ``attempt_s`` seconds."""

    def committed(self) -> None:
        """End a commit that created a version."""

    def withdraw(self) -> None:
        """End a commit that created no version, or that may have."""

    def close(self) -> None:
        """Release what an interrupted commit would hold otherwise."""


def pace(files: LakehouseFiles, fairness: Fairness | None = None) -> Pacing:
    """Return the pacing of a commit.

    Args:
        files: The files of the lakehouse.
        fairness: What this process knows of other writers. None for a commit that waits for no slot, as those of
            operations do: it still requests one.
    """
    return WriterPacing(files, fairness)


class WriterPacing(Pacing):
    """Waits for slots, requests one after conflicts, reads the next root early, and stages ours on a local disk."""

    def __init__(self, files: LakehouseFiles, fairness: Fairness | None):
        self._storage = files.storage
        self._fairness = fairness
        self._slot_request: SlotRequest | None = None
        self._staged: Call | None = None  # discards it
        self._probe: RootProbe | None = None

    @contextmanager
    def slot(self, longest_s: float) -> Iterator[bool]:
        """Wait for writers of other processes: first for those that request a slot, then for the commit lock."""
        gave_way = self._fairness is not None and self._fairness.yield_to_others(self._storage, longest_s)
        with self._storage.commit_lock(min(longest_s, LONGEST_LOCK_WAIT_S)) as has_waited:
            yield gave_way or has_waited

    def calls_to_probe(self, roots: Roots, version: int) -> Sequence[Call]:
        """Return reads of a version and of the one after it, where others commit at the same time."""
        self._probe = None
        if self._fairness is None or not self._fairness.is_crowded:
            return ()
        self._probe, reads = speculative_probe(roots, version)
        return reads

    def calls_with_files(self, root: KnownRoot, roots: Roots, *, has_files: bool) -> Sequence[Call]:
        """Stage the root, and read it early where others commit at the same time."""
        calls: list[Call] = []
        if roots.storage.supports_staging:
            calls.append(functools.partial(roots.storage.stage, root.path, root.data))
            self._staged = functools.partial(roots.storage.discard_staged, root.data)
        if has_files:
            calls += self.calls_to_probe(roots, root.version)
        return calls

    def calls_with_root(self, root: KnownRoot, roots: Roots) -> Sequence[Call]:
        """Read the root and the next one early. A read costs a storage that stages more than a rejected create."""
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
            background.put(functools.partial(self._slot_request.note_conflicts, n_conflicts, attempt_s))

    def committed(self) -> None:
        """Withdraw the request in the background. After some commits, list the requests of other writers there."""
        if self._slot_request is not None:
            background.put(self._slot_request.withdraw)
        if self._fairness is not None:
            self._fairness.poll_periodically(self._storage)

    def withdraw(self) -> None:
        if self._slot_request is not None:
            self._slot_request.withdraw()

    def close(self) -> None:
        """Renew the request no longer, so that others do not wait for a writer that was interrupted."""
        if self._slot_request is not None:
            self._slot_request.end()


class SlotRequest:
    """The request for a turn of a writer that loses one attempt after the other."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._path: str | None = None
        self._renewal: _Renewal | None = None
        self._is_over = False
        self._lock = threading.RLock()  # a signal handler may end what its thread was asking for

    def note_conflicts(self, n_conflicts: int, attempt_seconds: float) -> None:
        """Request a turn, or renew the request, if attempts were lost often enough or took long enough.

        Runs in the background, so the commit may have ended already.

        Args:
            n_conflicts: The number of lost attempts.
            attempt_seconds: The time of the last one, including its rebase.
        """
        with self._lock:
            if may_request_slot(n_conflicts, attempt_seconds) and not self._is_over:
                self._write_request(attempt_seconds)

    def _write_request(self, attempt_seconds: float) -> None:
        attempt_ms = max(1, min(_LONGEST_ATTEMPT_MS, round(1000 * attempt_seconds)))
        if self._path is not None and attempt_ms > 2 * (parse_slot_request_path(self._path) or 0):
            self._delete()  # the time in its name is no longer true
        self._path = self._path or new_slot_request_path(attempt_ms)
        try:
            self._storage.write(self._path, b"")
        except TrinityLakeError as error:
            logger.warning("could not ask other writers to wait: %s", error)
        self._end_renewal()
        longest_s = max(_SHORTEST_RENEWAL_S, _ATTEMPTS_RENEWED * attempt_ms / 1000)
        self._renewal = _Renewal(self._storage, self._path, time.monotonic() + longest_s)
        start_in_background(self._renewal)

    def end(self) -> None:
        """Ask no more, and renew the request no longer. A process that sees it waits some seconds at most."""
        with self._lock:
            self._is_over = True
            self._end_renewal()

    def withdraw(self) -> None:
        """Ask no more, and delete the request."""
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
    """Return whether a writer may request a turn after losing attempts, the last of which took ``attempt_seconds``."""
    return n_conflicts >= CONFLICTS_BEFORE_REQUEST or attempt_seconds >= LONG_ATTEMPT_S


class _Renewal:
    """Shows that the writer of a request is there.

    It ends with the attempt, or when that takes too long to be waited for.
    """

    def __init__(self, storage: Storage, path: str, until_s: float):
        self._storage = storage
        self._path = path
        self._until_s = until_s
        self._is_ended = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()

    def __call__(self) -> None:
        """Renew the request every second."""
        while not self._is_ended.wait(RENEWAL_S) and time.monotonic() < self._until_s:
            self._is_idle.clear()
            try:
                if not self._is_ended.is_set():
                    self._storage.write(self._path, b"")
            except TrinityLakeError as error:
                logger.warning("could not go on asking other writers to wait: %s", error)
            finally:
                self._is_idle.set()

    def end(self) -> None:
        """Renew no more. Waits a little for a renewal on its way, which would outlive the request's deletion."""
        self._is_ended.set()
        self._is_idle.wait(_LONGEST_RENEWAL_WAIT_S)


def start_in_background(work: Callable[[], None]) -> None:
    """Do work in a thread of its own, which ends with the process."""
    try:
        threading.Thread(target=work, name="turn-request", daemon=True).start()
    except RuntimeError as error:  # an interpreter that ends can start no threads
        logger.warning("a request for a turn is not renewed: %s", error)


class Fairness:
    """What one process knows of others that commit to the same lakehouse, and its waiting for those that ask."""

    def __init__(self) -> None:
        self._n_commits = 0
        self._n_crowded = 0
        self._storage: Storage | None = None
        self._pending_requests: Mapping[str, int] = {}
        self._n_pauses = _FEWEST_PAUSES

    @property
    def is_crowded(self) -> bool:
        """Whether the commit of another process was first in one of the last commits."""
        return self._n_commits < self._n_crowded

    def note_other_commit(self) -> None:
        """Note that the commit of another process was first."""
        self._n_crowded = self._n_commits + COMMITS_BETWEEN_POLLS

    def poll_periodically(self, storage: Storage) -> None:
        """Count a commit. Beside one in so many, look for requests of others."""
        self._n_commits += 1
        if self._n_commits % COMMITS_BETWEEN_POLLS == 0:
            self._storage = storage
            background.put(self._poll)

    def _poll(self) -> None:
        if self._storage is not None:
            self.poll(self._storage)

    def poll(self, storage: Storage) -> None:
        """Look for requests of others."""
        self._pending_requests = _pending_requests(storage)

    def yield_to_others(self, storage: Storage, longest_s: float) -> bool:
        """Wait until the writers that were seen to ask have committed, but not for ever. Returns whether it waited.

        If such a writer still asks then, the next commit waits too, and twice as long. Where many writers wait, each in
        its own time, all of them must do so at once.
        """
        if not self._pending_requests:
            return False
        logger.info("waiting for other writers that lose all the time: %s", ", ".join(self._pending_requests))
        begin_s, waited_for = time.monotonic(), set(self._pending_requests)
        n_paused = 0
        while True:
            self.poll(storage)
            attempt_s = max(self._pending_requests.values(), default=0) / 1000
            wait_s = min(_ATTEMPTS_WAITED_FOR * attempt_s, LONGEST_WAIT_FOR_LONG_ATTEMPTS_S)
            rest_s = min(longest_s, max(LONGEST_WAIT_S, wait_s)) - (time.monotonic() - begin_s)
            pause_s = min(_LONGEST_PAUSE_S, attempt_s)
            # A long attempt gets the time that it needs, however many pauses that takes.
            if not self._pending_requests or rest_s <= 0 or n_paused >= max(self._n_pauses, 2 * wait_s / pause_s):
                break
            time.sleep(min(rest_s, random.uniform(0.5, 1) * pause_s))
            n_paused += 1
        is_one_left = not waited_for.isdisjoint(self._pending_requests)
        self._n_pauses = min(_MOST_PAUSES, 2 * self._n_pauses) if is_one_left else _FEWEST_PAUSES
        return n_paused > 0


def _pending_requests(storage: Storage) -> dict[str, int]:
    """Return the requests that count, with how many milliseconds an attempt takes. Lapsed requests are deleted."""
    asking, lapsed = {}, []
    try:
        for info in storage.list(SLOT_REQUEST_PREFIX):
            attempt_ms = parse_slot_request_path(info.path)
            if attempt_ms is None:
                continue
            if abs(storage.now_ms() - info.last_modified_ms) > LAPSE_MS:
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
