"""The queue of a process: which transaction commits next, and which go into the same root (protocol.md, C).

The first arrival becomes the leader and commits at once. Transactions that arrive meanwhile wait. When the leader is
done, the first of them leads the next group and takes along all that fit. A reader who follows one transaction can skip
the queue: alone, it becomes a group of one, which ``commit.py`` commits.

An interrupt (KeyboardInterrupt, in the main thread) may come at any point. The waiting transactions still get an
outcome, and the next one leads.
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

_PATIENCE_SECONDS = 1.0
_MOST_OF_THE_REST = 0.25
#: What a commit made is taken for the latest version for so many times as long as it took, and no longer than this.
_MOMENT_COMMITS = 10.0
_LONGEST_MOMENT_S = 0.5


@dataclass(frozen=True, slots=True)
class _RecentCommit:
    """A version that this process committed, and when."""

    root: KnownRoot
    begun_s: float
    made_s: float

    def as_base(self, files: LakehouseFiles) -> Snapshot | None:
        """Return it for a transaction that begins now, None after a moment, and where a later one is known."""
        newest, age_s = files.roots.newest, time.monotonic() - self.made_s
        moment_s = min(_MOMENT_COMMITS * (self.made_s - self.begun_s), _LONGEST_MOMENT_S)
        if age_s >= moment_s or (newest is not None and newest.version > self.root.version):
            return None
        stood_at_ms = files.storage.now_ms() - math.ceil(1000 * age_s)
        return Snapshot(files, self.root.version, self.root.path, self.root.node, stood_at_ms)


class CommitQueue:
    """The transactions of a process that are to be committed to one lakehouse."""

    def __init__(self) -> None:
        self._fairness = Fairness()
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Start anew: the waiting threads do not exist in a forked child."""
        self._lock = threading.Lock()
        self._beside = threading.RLock()  # a precondition of one that goes alone may commit, too
        self._waiting: deque[Member] = deque()
        self._coming: set[Member] = set()  # who writes files before it waits
        # Who waits for those holds no lock meanwhile: an interrupt would release one that another thread holds.
        self._arrivals: SimpleQueue[None] | None = None
        self._leader: Member | None = None
        self._newest: Committed | None = None
        self._newest_of_others: Committed | None = None
        self._recent_commit: _RecentCommit | None = None

    def recent_commit(self, files: LakehouseFiles) -> Snapshot | None:
        """Return the version that this process committed a moment ago, if there is one.

        The storage is not asked, so another process may have committed since.
        """
        recent_commit = self._recent_commit
        return None if recent_commit is None else recent_commit.as_base(files)

    def commit(self, submission: Submission, max_attempts: int) -> int:
        """Commit a transaction, perhaps together with others; returns its version.

        A transaction that goes alone is committed beside the queue: none in the queue waits for it. Unless they are
        large, such transactions go one after the other, so that they lose no attempts to each other. Raises what
        :meth:`commit.Commit.run` raises.
        """
        own = Member.of(submission, max_attempts)
        if own.is_exclusive:
            before, pacing = self._newest_of_others, pace(own.base.files, self._fairness)
            with nullcontext() if own.is_large else self._beside, _wait_for_slot(own, pacing) as newest:
                meanwhile = None if self._newest_of_others is before else self._newest_of_others
                committed = Group(own, pacing).run(newest or meanwhile)
                self._newest_of_others = committed or self._newest_of_others
            return own.result()
        try:
            if not self._leads_at_once(own):
                self._write_ahead(own)
                self._has_arrived(own)
                with self._lock:
                    self._waiting.append(own)
                    self._choose_leader()
            while not own.wakes.wait(_PATIENCE_SECONDS):
                with self._lock:
                    self._choose_leader()
            if own.outcome is None:
                self._lead(own)
            return own.result()
        finally:
            try:
                self._leave_queue(own)
            except BaseException:  # an interrupt: the other transactions must not wait for ever
                self._leave_queue(own)
                raise

    def _leads_at_once(self, own: Member) -> bool:
        """Let a transaction lead that has not written its files, if no other is there. Returns whether it leads.

        Its files are then written in the round of its nodes, which saves a local disk a wait for the device. Storages
        across a network write them before in any case, as others that come meanwhile do.
        """
        with self._lock:
            if own.base.files.storage.is_remote or self._is_led or self._waiting or self._coming:
                return False
            self._waiting.append(own)
            self._choose_leader()
            return True

    def _write_ahead(self, own: Member) -> None:
        """Write the files of ``own`` before it waits. The first of those who do so looks for other processes beside."""
        roots, version = own.base.files.roots, own.base.version
        pacing = pace(own.base.files, self._fairness)
        with self._lock:
            is_first = not self._coming and not self._is_led
            self._coming.add(own)
        own.write_ahead(pacing.calls_to_probe(roots, version + 1) if is_first and version < MAX_VERSION else ())
        known, latest = roots.newest, pacing.latest_seen(roots)
        if latest is None:
            return
        with self._lock:
            is_ours = self._is_led
            self._newest = _later(self._newest, Committed(latest.version, latest))
        if not is_ours and (known is None or known.version < latest.version):
            pacing.note_other_commit()

    def _has_arrived(self, own: Member) -> None:
        """Note that it writes no files any more. May be repeated."""
        with self._lock:
            self._coming.discard(own)
            if self._arrivals is not None:
                self._arrivals.put(None)

    def _lead(self, own: Member) -> None:
        """Commit the group that begins with ``own``."""
        pacing = pace(own.base.files, self._fairness)
        group = Group(own, pacing)
        try:
            with _wait_for_slot(own, pacing) as newest:
                self._await_coming(own)
                self._gather(group)
                begun_s = time.monotonic()
                made = group.run(self._latest_known(own, newest), functools.partial(self._gather, group))
                self._recent_commit = None
                if made is not None and made.root is not None:
                    with self._lock:
                        self._newest = _later(self._newest, made)
                    self._recent_commit = _RecentCommit(made.root, begun_s, time.monotonic())
        finally:
            self._requeue(group.abandoned())

    def _latest_known(self, own: Member, newest: Committed | None) -> Committed | None:
        """Return the latest version that anybody here knows, so that ``own`` loses no attempt to its own process."""
        kept = own.base.files.roots.newest
        newest = newest if kept is None else _later(newest, Committed(kept.version, kept))
        return newest if self._newest is None else _later(newest, self._newest)

    def _await_coming(self, own: Member) -> None:
        """Wait for those who write their files, where they are no fewer than those who wait.

        One version for all of them is sooner there than two. They get as long as ``own`` took for its files.
        """
        arrivals = SimpleQueue[None]()
        with self._lock:
            coming = set(self._coming)
            if len(coming) < len(self._waiting):
                return
            self._arrivals = arrivals
        deadline_s = time.monotonic() + own.ahead_s
        try:
            while not coming.isdisjoint(self._coming):
                arrivals.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except Empty:
            pass  # they took too long
        finally:
            self._arrivals = None

    def _gather(self, group: Group, base_version: int = MAX_VERSION) -> None:
        """Take the members of the next version from the queue: the leader, then in order all that fit.

        No transaction overtakes one that stays behind and that it touches. One that began on a version later than
        ``base_version`` stays behind. So does one that leads by now, since the leader of the group has its outcome.
        """
        with self._lock:
            candidates = [waiting for waiting in self._waiting if waiting not in group and not waiting.is_done]
        behind: list[Footprint] = []
        for candidate in candidates:
            footprint = candidate.footprint
            overtakes = any(footprint.may_conflict(other) for other in behind)
            if overtakes or candidate.base.version > base_version or not group.has_room_for(candidate):
                behind.append(footprint)
                continue
            with self._lock:
                # The thread of another may have been interrupted, and left the queue.
                is_free = candidate in self._waiting and candidate is not self._leader
                if is_free:
                    group.take(candidate)
                    self._waiting.remove(candidate)
            if not is_free:
                behind.append(footprint)

    def _requeue(self, members: Sequence[Member]) -> None:
        """Let members wait again for which nothing was sent.

        Their files may have been discarded, and a delete whose answer was lost can take effect later. So they get new
        names.
        """
        for member in members:
            member.submission.rename_files()
            member.discard_written()
            member.is_taken = False
        with self._lock:
            self._waiting.extendleft(member for member in reversed(members) if not member.has_left)

    def _leave_queue(self, own: Member) -> None:
        """Leave the queue, however ``own`` ended. If it led, the next one leads. May be repeated from any point.

        Files that it wrote for nobody are deleted.
        """
        self._has_arrived(own)
        with self._lock:
            own.has_left = True
            if own in self._waiting:
                self._waiting.remove(own)
            self._choose_leader()
        if not own.is_taken:
            own.discard_written()

    @property
    def _is_led(self) -> bool:
        """Whether a transaction leads. An interrupt may have kept one that is done from leaving."""
        return self._leader is not None and not self._leader.is_done

    def _choose_leader(self) -> None:
        """Let the first waiting transaction lead, where none leads."""
        if not self._is_led:
            while self._waiting and self._waiting[0].is_done:
                self._waiting.popleft()
            self._leader = self._waiting[0] if self._waiting else None
        if self._leader is not None:
            self._leader.wakes.set()
        elif not self._coming:
            self._newest = None  # the next arrival has read the latest version itself


@contextmanager
def _wait_for_slot(own: Member, pacing: Pacing) -> Iterator[Committed | None]:
    """Wait for writers of other processes, for a part of the time that ``own`` has left.

    Yields the latest version if it waited, so that ``own`` does not begin with a conflict.
    """
    files = own.base.files
    rest_ms = own.begun_at_ms + own.base.definition.txn_ttl_millis - files.storage.now_ms()
    with pacing.slot(_MOST_OF_THE_REST * rest_ms / 1000) as has_waited:
        yield _latest(files, own.base.version) if has_waited else None


def _latest(files: LakehouseFiles, known: int) -> Committed | None:
    """Return the latest version, None where it is the one that is known, or where it cannot be told."""
    try:
        version = find_later(files.roots, known)
        if version == known:
            return None
        return Committed(version, files.roots.known(version, files.roots.storage.read(files.roots.path(version))))
    except StorageError as error:
        logger.info("the latest version cannot be told before a commit, which goes on without it: %s", error)
        return None


def _later(one: Committed | None, other: Committed) -> Committed:
    return other if one is None or one.version < other.version else one


def shared_queue(identity: str) -> CommitQueue:
    """Return the queue that all share who opened the same root in the same way in this process."""
    return _shared_queues.setdefault(identity, CommitQueue())


_shared_queues: WeakValueDictionary[str, CommitQueue] = WeakValueDictionary()
