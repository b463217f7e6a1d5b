"""The queue of a process: who commits next, and who goes into the same root (docs/protocol.md, C).

The first arrival becomes the leader and commits at once. Those who come meanwhile wait; when the leader is done, the
first of them leads the next group and takes along all who fit. Interrupts (KeyboardInterrupt, in the main thread) may
come anywhere: who waits gets an answer, and the next one leads.
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
        """Start anew: those who wait are threads that a forked child does not have."""
        self._lock = threading.Lock()
        self._waiting: deque[Member] = deque()
        self._leader: Member | None = None
        self._newest: Committed | None = None

    def commit(self, submission: Submission, max_attempts: int) -> int:
        """Commit a transaction, perhaps together with others; returns its version.

        One that goes alone is committed beside the others: nobody waits for it. Raises what
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
            except BaseException:  # an interrupt: those who wait must not wait for ever
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
        """Wait for writers of other processes that ask for it, a part of the time that ``own`` has, at most.

        Returns the latest version where that took a while, so that ``own`` does not begin with a lost attempt.
        """
        files = own.base.files
        rest_ms = own.begun_at_ms + own.base.definition.txn_ttl_millis - files.storage.now_ms()
        if not self._courtesy.give_way(files.storage, _MOST_OF_THE_REST * rest_ms / 1000):
            return None
        return Committed(*find_latest_after(files.roots, own.base.version))

    def _gather(self, group: Group) -> None:
        """Take from the queue who goes into the next version: the leader, and in their order all who fit.

        Nobody overtakes one who stays behind and whom they touch.
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
                if candidate in self._waiting:  # it may have been interrupted, and left
                    group.take(candidate)
                    self._waiting.remove(candidate)

    def _take_back(self, members: Sequence[Member]) -> None:
        """Let those wait again for whom nothing was sent.

        What was written for them may have been discarded, and a delete whose answer is lost can take effect later.
        """
        for member in members:
            member.submission.rename_files()
        with self._lock:
            self._waiting.extendleft(member for member in reversed(members) if not member.has_left)

    def _leave(self, own: Member) -> None:
        """Leave the queue, however ``own`` ended; who led lets the next one lead. May be repeated from any point."""
        with self._lock:
            own.has_left = True
            if own in self._waiting:
                self._waiting.remove(own)
            self._choose_leader()

    def _choose_leader(self) -> None:
        """Let the first who waits lead, where nobody does: an interrupt may have kept the last one from leaving."""
        if self._leader is None or self._leader.is_done:
            while self._waiting and self._waiting[0].is_done:
                self._waiting.popleft()
            self._leader = self._waiting[0] if self._waiting else None
        if self._leader is None:
            self._newest = None  # whoever comes next has read the latest version itself
        else:
            self._leader.wakes.set()


def shared_queue(identity: str) -> CommitQueue:
    """Return the queue of all in this process who opened the same root in the same way."""
    return _shared_queues.setdefault(identity, CommitQueue())


_shared_queues: WeakValueDictionary[str, CommitQueue] = WeakValueDictionary()
