"""The queue of a process: which transaction commits next, and which go into the same root (docs/protocol.md, C).

The first arrival becomes the leader and commits at once. Transactions that arrive meanwhile wait. When the leader is
done, the first of them leads the next group and takes along all that fit. An interrupt (KeyboardInterrupt, in the main
thread) may come at any point. The waiting transactions still get an answer, and the next one leads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from weakref import WeakValueDictionary

from trinitylake_ops.storage.fork import at_fork
from trinitylake_ops.transaction.change_set import Footprint
from trinitylake_ops.transaction.commit import Committed
from trinitylake_ops.transaction.groups.group import Group
from trinitylake_ops.transaction.groups.member import Member
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.transaction.turns import Courtesy
from trinitylake_ops.versions.roots import find_latest_after

_PATIENCE_SECONDS = 1.0
_MOST_OF_THE_REST = 0.25


class CommitQueue:
    """The transactions of a process that are to be committed to one lakehouse."""

    def __init__(self) -> None:
        self._courtesy = Courtesy()
        self.forget()
        at_fork(self)

    def forget(self) -> None:
        """Start anew: the waiting threads do not exist in a forked child."""
        self._lock = threading.Lock()
        self._waiting: deque[Member] = deque()
        self._leader: Member | None = None
        self._newest: Committed | None = None

    def commit(self, submission: Submission, max_attempts: int) -> int:
        """Commit a transaction, perhaps together with others; returns its version.

        A transaction that goes alone is committed beside the queue: no other waits for it. Raises what
        :func:`commit.commit` raises.
        """
        own = Member.of(submission, max_attempts)
        if own.goes_alone:
            Group(own, self._courtesy).run(self._give_way(own))
            return own.result()
        try:
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
                self._leave(own)
            except BaseException:  # an interrupt: the other transactions must not wait for ever
                self._leave(own)
                raise

    def _lead(self, own: Member) -> None:
        """Commit the group that begins with ``own``."""
        group = Group(own, self._courtesy)
        try:
            newest = self._give_way(own) or self._newest
            self._gather(group)
            self._newest = group.run(newest)
        finally:
            self._take_back(group.abandoned())

    def _give_way(self, own: Member) -> Committed | None:
        """Wait for writers of other processes that ask for a turn, for a part of the time that ``own`` has left.

        Returns the latest version if it waited, so that ``own`` does not begin with a lost attempt.
        """
        files = own.base.files
        rest_ms = own.begun_at_ms + own.base.definition.txn_ttl_millis - files.storage.now_ms()
        if not self._courtesy.give_way(files.storage, _MOST_OF_THE_REST * rest_ms / 1000):
            return None
        version, data = find_latest_after(files.roots, own.base.version)
        return Committed(version, files.roots.known(version, data))

    def _gather(self, group: Group) -> None:
        """Take the members of the next version from the queue: the leader, then in order all that fit.

        No transaction overtakes one that stays behind and that it touches.
        """
        with self._lock:
            candidates = [waiting for waiting in self._waiting if waiting not in group and not waiting.is_done]
        behind: list[Footprint] = []
        for candidate in candidates:
            footprint = candidate.footprint
            overtakes = any(footprint.meets(other) for other in behind)
            if overtakes or not group.has_room_for(candidate):
                behind.append(footprint)
                continue
            with self._lock:
                if candidate in self._waiting:  # its thread may have been interrupted, and left the queue
                    group.take(candidate)
                    self._waiting.remove(candidate)

    def _take_back(self, members: Sequence[Member]) -> None:
        """Let members wait again for which nothing was sent.

        Their files may have been discarded, and a delete whose answer was lost can take effect later. So they get new
        names.
        """
        for member in members:
            member.submission.rename_files()
        with self._lock:
            self._waiting.extendleft(member for member in reversed(members) if not member.has_left)

    def _leave(self, own: Member) -> None:
        """Leave the queue, however ``own`` ended. If it led, the next one leads. May be repeated from any point."""
        with self._lock:
            own.has_left = True
            if own in self._waiting:
                self._waiting.remove(own)
            self._choose_leader()

    def _choose_leader(self) -> None:
        """Let the first waiting transaction lead, where none leads.

        An interrupt may have kept the last leader from leaving.
        """
        if self._leader is None or self._leader.is_done:
            while self._waiting and self._waiting[0].is_done:
                self._waiting.popleft()
            self._leader = self._waiting[0] if self._waiting else None
        if self._leader is None:
            self._newest = None  # the next arrival has read the latest version itself
        else:
            self._leader.wakes.set()


def shared_queue(identity: str) -> CommitQueue:
    """Return the queue that all share who opened the same root in the same way in this process."""
    return _shared_queues.setdefault(identity, CommitQueue())


_shared_queues: WeakValueDictionary[str, CommitQueue] = WeakValueDictionary()
