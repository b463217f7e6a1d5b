"""The commit queue of a process: selects the next transaction and those that share its root (protocol.md, C).

The first transaction becomes the leader and commits at once. Transactions that arrive in the meantime wait. When the
leader is done, the first waiting transaction leads the next group, which contains all waiting transactions that fit. To
follow a single transaction, skip this module: it forms a group of one, which ``commit.py`` commits.

An interrupt (KeyboardInterrupt in the main thread) may occur at any point. The waiting transactions still get an
outcome, and the first of them becomes the leader.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from weakref import WeakValueDictionary

from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.file_names import MAX_VERSION
from trinitylake_ops.storage import process_clock
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.transaction.change_set import Footprint
from trinitylake_ops.transaction.commit import Committed
from trinitylake_ops.transaction.group import Group, Member
from trinitylake_ops.transaction.pacing import Fairness, Pacing, pace
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.roots import find_later
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot

logger = logging.getLogger(__name__)

#: How often a waiting thread checks that there is a leader, because an interrupt may have removed it.
_LEADER_CHECK_INTERVAL_S = 1.0
#: Maximum wait for other writers, as a fraction of a transaction's remaining time to live.
_MAX_SLOT_WAIT_SHARE = 0.25
#: How long a committed version counts as recent: a multiple of the duration of its commit, up to a maximum.
_RECENT_COMMIT_DURATIONS = 10.0
_MAX_RECENT_S = 0.5


@dataclass(frozen=True, slots=True)
class _RecentCommit:
    """A version that this process committed.

    Times are in seconds on the process clock.
    """

    root: KnownRoot
    begun_s: float
    committed_s: float

    def as_base(self, files: LakehouseFiles) -> Snapshot | None:
        """Return the version as the base of a new transaction, or None if it is not recent or no longer the latest."""
        newest, age_s = files.roots.newest, process_clock.now_s() - self.committed_s
        recent_s = min(_RECENT_COMMIT_DURATIONS * (self.committed_s - self.begun_s), _MAX_RECENT_S)
        if age_s >= recent_s or (newest is not None and newest.version > self.root.version):
            return None
        committed_at_ms = files.storage.now_ms() - math.ceil(1000 * age_s)
        return Snapshot(files, self.root.version, self.root.path, self.root.node, committed_at_ms)


@dataclass(frozen=True, slots=True)
class QueueState:
    """The transactions in a commit queue at one moment, excluding those that already have an outcome."""

    #: The transaction whose thread is committing a group.
    leader: Member | None
    #: The transactions that wait for the next group, in order.
    waiting: tuple[Member, ...]
    #: The transactions that are writing their files before they join the queue.
    arriving: frozenset[Member]


class CommitQueue:
    """The transactions of one process that are waiting to be committed to one lakehouse."""

    def __init__(self) -> None:
        #: What this process knows about writers in other processes.
        self.fairness = Fairness()
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Reset all state: the waiting threads do not exist in a forked child."""
        self._lock = threading.Lock()
        self._exclusive_lock = threading.RLock()  # reentrant: a precondition of an exclusive transaction may commit
        self._waiting: deque[Member] = deque()
        self._arriving: set[Member] = set()  # members that are writing their files before they join the queue
        # The leader waits for these members without a lock: an interrupt could release a lock of another thread.
        self._arrivals: SimpleQueue[None] | None = None
        self._leader: Member | None = None
        self._newest: Committed | None = None
        self._newest_exclusive: Committed | None = None
        self._recent_commit: _RecentCommit | None = None

    def state(self) -> QueueState:
        """Return the transactions in the queue."""
        with self._lock:
            leader = self._leader if self._is_led else None
            waiting = tuple(member for member in self._waiting if member is not leader and not member.is_done)
            return QueueState(leader, waiting, frozenset(self._arriving))

    def recent_commit(self, files: LakehouseFiles) -> Snapshot | None:
        """Return the version that this process committed recently, if any.

        Sends no request, so another process may have committed a later version.
        """
        recent_commit = self._recent_commit
        return None if recent_commit is None else recent_commit.as_base(files)

    def commit(self, submission: Submission, max_attempts: int) -> int:
        """Commit a transaction, possibly together with other transactions, and return its version.

        An exclusive transaction bypasses the queue, so that no queued transaction waits for it. Exclusive transactions
        commit one after another, unless they are large, so that they do not conflict with each other.

        Args:
            submission: The transaction.
            max_attempts: The number of conflicts after which it fails.

        Raises:
            CommitConflictError: The transaction conflicts with another commit.
            CommitAttemptsExhaustedError: All attempts conflicted with other commits.
            TransactionExpiredError: The transaction is older than its time to live.
            CommitOutcomeUnknownError: The transaction may or may not have been committed.
            TrinityLakeError: Any other error means that nothing was committed.
        """
        member = Member.of(submission, max_attempts)
        if member.is_exclusive:
            before, pacing = self._newest_exclusive, pace(member.base.files, self.fairness)
            with nullcontext() if member.is_large else self._exclusive_lock, _wait_for_slot(member, pacing) as newest:
                newer = None if self._newest_exclusive is before else self._newest_exclusive
                committed = Group(member, pacing).run(newest or newer)
                self._newest_exclusive = committed or self._newest_exclusive
            return member.result()
        try:
            if not self._leads_at_once(member):
                self._write_ahead(member)
                self._note_arrival(member)
                with self._lock:
                    self._waiting.append(member)
                    self._choose_leader()
            while not member.wakes.wait(_LEADER_CHECK_INTERVAL_S):
                with self._lock:
                    self._choose_leader()
            if member.outcome is None:
                self._lead(member)
            return member.result()
        finally:
            try:
                self._leave_queue(member)
            except BaseException:  # an interrupt: the other transactions must not wait indefinitely
                self._leave_queue(member)
                raise

    def _leads_at_once(self, member: Member) -> bool:
        """Make a transaction the leader before it writes its files, if no other is queued. Return whether it leads.

        Its files are then written in the same round trip as its nodes, so that a local disk is flushed only once. On
        remote storage, transactions always write their files before they join the queue.
        """
        with self._lock:
            if member.base.files.storage.is_remote or self._is_led or self._waiting or self._arriving:
                return False
            self._waiting.append(member)
            self._choose_leader()
            return True

    def _write_ahead(self, member: Member) -> None:
        """Write the files of ``member`` before it joins the queue.

        The first of these transactions also probes for commits of other processes in the same round trip.
        """
        roots, version = member.base.files.roots, member.base.version
        pacing = pace(member.base.files, self.fairness)
        with self._lock:
            is_first = not self._arriving and not self._is_led
            self._arriving.add(member)
        member.write_ahead(pacing.calls_to_probe(roots, version + 1) if is_first and version < MAX_VERSION else ())
        known, latest = roots.newest, pacing.latest_seen(roots)
        if latest is None:
            return
        with self._lock:
            may_be_ours = self._is_led
            self._newest = _later(self._newest, Committed(latest.version, latest))
        if not may_be_ours and (known is None or known.version < latest.version):
            pacing.note_other_commit()

    def _note_arrival(self, member: Member) -> None:
        """Record that ``member`` has written its files. Idempotent."""
        with self._lock:
            self._arriving.discard(member)
            if self._arrivals is not None:
                self._arrivals.put(None)

    def _lead(self, member: Member) -> None:
        """Commit the group that ``member`` leads."""
        pacing = pace(member.base.files, self.fairness)
        group = Group(member, pacing)
        try:
            with _wait_for_slot(member, pacing) as newest:
                self._await_arriving(member)
                self._gather(group)
                begun_s = process_clock.now_s()
                committed = group.run(self._latest_known(member, newest), functools.partial(self._gather, group))
                self._recent_commit = None
                if committed is not None and committed.root is not None:
                    with self._lock:
                        self._newest = _later(self._newest, committed)
                    self._recent_commit = _RecentCommit(committed.root, begun_s, process_clock.now_s())
        finally:
            self._requeue(group.abandoned())

    def _latest_known(self, member: Member, newest: Committed | None) -> Committed | None:
        """Return the latest version that this process knows, so that ``member`` does not conflict with its commits."""
        root = member.base.files.roots.newest
        newest = newest if root is None else _later(newest, Committed(root.version, root))
        return newest if self._newest is None else _later(newest, self._newest)

    def _await_arriving(self, member: Member) -> None:
        """Wait for members that are writing their files, if they are at least as many as the waiting members.

        One version for all of these members takes less time than two versions. The wait lasts at most as long as
        ``member`` took to write its files.
        """
        arrivals = SimpleQueue[None]()
        with self._lock:
            arriving = set(self._arriving)
            if len(arriving) < len(self._waiting):
                return
            self._arrivals = arrivals
        deadline_s = time.monotonic() + member.ahead_s
        try:
            while not arriving.isdisjoint(self._arriving):
                arrivals.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except Empty:
            pass  # the remaining members go into a later version
        finally:
            self._arrivals = None

    def _gather(self, group: Group, base_version: int = MAX_VERSION) -> None:
        """Move the members of the next version from the queue to a group: the leader, then, in order, all that fit.

        Skips transactions whose base is later than ``base_version``, and a transaction that has become the leader
        because the leader of the group already has its outcome. Also skips each transaction that may conflict with a
        skipped transaction, so that it does not overtake that transaction.
        """
        with self._lock:
            candidates = [waiting for waiting in self._waiting if waiting not in group and not waiting.is_done]
        skipped: list[Footprint] = []
        for candidate in candidates:
            footprint = candidate.footprint
            conflicts_with_skipped = any(footprint.may_conflict(other) for other in skipped)
            if conflicts_with_skipped or candidate.base.version > base_version or not group.has_room_for(candidate):
                skipped.append(footprint)
                continue
            with self._lock:
                # An interrupted thread may have removed its transaction from the queue.
                is_available = candidate in self._waiting and candidate is not self._leader
                if is_available:
                    group.take(candidate)
                    self._waiting.remove(candidate)
            if not is_available:
                skipped.append(footprint)

    def _requeue(self, members: Sequence[Member]) -> None:
        """Put members for which no root was sent back into the queue.

        Their files get new names, because the old files may have been discarded, or a delete whose response was lost
        may still take effect.
        """
        for member in members:
            member.submission.rename_files()
            member.discard_written()
            member.is_taken = False
        with self._lock:
            self._waiting.extendleft(member for member in reversed(members) if not member.has_left)

    def _leave_queue(self, member: Member) -> None:
        """Remove ``member`` from the queue, whatever its outcome. Can be repeated after an interrupt at any point.

        If it was the leader, the next member leads. Files that it wrote are deleted unless a group has taken them.
        """
        self._note_arrival(member)
        with self._lock:
            member.has_left = True
            if member in self._waiting:
                self._waiting.remove(member)
            self._choose_leader()
        if not member.is_taken:
            member.discard_written()

    @property
    def _is_led(self) -> bool:
        """Whether there is an active leader. After an interrupt, a finished leader may still be in the queue."""
        return self._leader is not None and not self._leader.is_done

    def _choose_leader(self) -> None:
        """Make the first waiting transaction the leader, if there is none."""
        if not self._is_led:
            while self._waiting and self._waiting[0].is_done:
                self._waiting.popleft()
            self._leader = self._waiting[0] if self._waiting else None
        if self._leader is not None:
            self._leader.wakes.set()
        elif not self._arriving:
            self._newest = None  # the next transaction has read the latest version itself


@contextmanager
def _wait_for_slot(member: Member, pacing: Pacing) -> Iterator[Committed | None]:
    """Wait for writers of other processes, for up to a fraction of the remaining time to live of ``member``.

    Yields the latest version after a wait, so that the first attempt of ``member`` does not conflict.
    """
    files = member.base.files
    remaining_ms = member.begun_at_ms + member.base.definition.txn_ttl_millis - files.storage.now_ms()
    with pacing.slot(_MAX_SLOT_WAIT_SHARE * remaining_ms / 1000) as has_waited:
        yield _latest(files, member.base.version) if has_waited else None


def _latest(files: LakehouseFiles, known_version: int) -> Committed | None:
    """Return the latest version, or None if it is ``known_version`` or cannot be read."""
    try:
        version = find_later(files.roots, known_version)
        if version == known_version:
            return None
        return Committed(version, files.roots.known(version, files.roots.storage.read(files.roots.path(version))))
    except StorageError as error:
        logger.info("the latest version could not be read before a commit; committing without it: %s", error)
        return None


def _later(first: Committed | None, second: Committed) -> Committed:
    return second if first is None or first.version < second.version else first


def shared_queue(identity: str) -> CommitQueue:
    """Return the queue of this process for a storage identity (root and options)."""
    return _shared_queues.setdefault(identity, CommitQueue())


_shared_queues: WeakValueDictionary[str, CommitQueue] = WeakValueDictionary()
