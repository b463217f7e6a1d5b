"""Group commit: transactions of one process that wait at the same moment go into one root (docs/protocol.md, C).

Who comes while nobody leads, leads: it commits at once. Those who come meanwhile wait; when the leader
is done, the first of them leads the next group and takes along all who fit. Each is checked as if it
were committed by itself after those before it, and fails by itself. Interrupts (KeyboardInterrupt, in the
main thread) may come anywhere: who waits gets an answer, and the next one leads.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.nodes.node_file import decode_node
from trinitylake_ops.storage.fork import at_fork
from trinitylake_ops.transaction.commit import (
    Commit,
    Committed,
    DraftOutdatedError,
    attempts_exhausted,
    outcome_unknown,
)
from trinitylake_ops.transaction.draft import Draft, RootStamp, Writes
from trinitylake_ops.transaction.time_to_live import check_age, removed_before_ms
from trinitylake_ops.transaction.turns import Courtesy
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.latest import reading_bases
from trinitylake_ops.versions.roots import find_latest_after
from trinitylake_ops.versions.snapshot import Snapshot

#: Larger transactions go alone, beside the queue: they take long, and nobody should wait for them.
MAX_GROUP_CHANGES = 1_000
_PATIENCE_SECONDS = 1.0
_MOST_OF_THE_REST = 0.25


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a transaction touches, to tell whether it may follow others within one version.

    ``writes`` are the keys that it sets or deletes; ``keys`` and ``prefixes`` those whose change by
    another transaction may matter to it. ``is_alone`` for one that only the whole of a version can tell.
    """

    writes: Collection[str]
    keys: Collection[str] = ()
    prefixes: tuple[str, ...] = ()
    is_alone: bool = False

    def meets(self, other: Footprint) -> bool:
        """Whether one of the two may matter to the other."""
        return self.is_touched_by(other.writes) or other.is_touched_by(self.writes)

    def is_touched_by(self, written: Collection[str]) -> bool:
        """Whether others that wrote these keys matter, or may."""
        return any(
            key in self.writes or key in self.keys or (self.prefixes and key.startswith(self.prefixes))
            for key in written
        )


class Groupable(Protocol):
    """A transaction that is ready to be committed."""

    @property
    def begun_at_ms(self) -> int:
        """When it began, by the storage's clock."""

    @property
    def changes_nothing(self) -> bool:
        """Whether it would change nothing in the version that it began on. Raises StorageError."""

    def footprint(self) -> Footprint:
        """Return what it touches."""

    def largest_info(self) -> CommitInfo:
        """Return what it will say about itself, with the largest numbers that may stand there."""

    def writes_on(self, base: Snapshot) -> Writes | None:
        """Return what it would write on ``base``, or None when nothing would change."""

    def rename_files(self) -> None:
        """Give all files that it would write new names: those so far may be deleted at any time."""

    def check(self, base: Snapshot, latest: Snapshot, changes: Mapping[str, KeyChange]) -> None:
        """Check that it still holds on ``latest``, which differs from ``base`` by ``changes``; take over what merges.

        Raises CommitConflictError, or an error of its own preconditions.
        """


@dataclass(slots=True, eq=False)
class _Waiting:
    """A transaction that waits for its outcome: a version, or the error it failed with."""

    transaction: Groupable
    #: The version that it began on, where it changes nothing there.
    unchanged_version: int | None
    base: Snapshot
    max_attempts: int
    footprint: Footprint
    largest_info: CommitInfo
    #: Set when there is an outcome, and when it is this one's turn to lead.
    wakes: threading.Event
    n_lost: int = 0
    expiry: TrinityLakeError | None = None
    outcome: int | BaseException | None = None
    has_left: bool = False

    @classmethod
    def of(cls, transaction: Groupable, base: Snapshot, max_attempts: int) -> _Waiting:
        """Ask a transaction, in its own thread, for all that others look at. Raises its errors."""
        footprint, info = transaction.footprint(), transaction.largest_info()
        with reading_bases(base):
            unchanged_version = base.version if transaction.changes_nothing else None
        return cls(transaction, unchanged_version, base, max_attempts, footprint, info, threading.Event())

    @property
    def begun_at_ms(self) -> int:
        return self.transaction.begun_at_ms

    @property
    def is_done(self) -> bool:
        return self.has_left or self.outcome is not None

    @property
    def goes_alone(self) -> bool:
        return self.footprint.is_alone or len(self.footprint.writes) > MAX_GROUP_CHANGES

    def settle(self, outcome: int | BaseException) -> None:
        """Give it an outcome, unless it has one."""
        if self.outcome is None:
            self.outcome = outcome
        self.wakes.set()

    def result(self) -> int:
        """Return the version that was settled, or raise the error."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class CommitQueue:
    """The transactions of a process that are to be committed to one lakehouse."""

    def __init__(self) -> None:
        self._courtesy = Courtesy()
        self.forget()
        at_fork(self)

    def forget(self) -> None:
        """Start anew: those who wait are threads that a forked child does not have."""
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._leader: _Waiting | None = None
        self._newest: Committed | None = None

    def commit(self, transaction: Groupable, base: Snapshot, max_attempts: int) -> int:
        """Commit a transaction, perhaps together with others; returns its version.

        One that goes alone is committed beside the others: nobody waits for it. Raises what
        :func:`commit.commit` raises.
        """
        own = _Waiting.of(transaction, base, max_attempts)
        if own.goes_alone:
            _Group(own, self._courtesy).run(self._give_way(own))
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

    def _lead(self, own: _Waiting) -> None:
        """Commit the group that begins with ``own``."""
        group = _Group(own, self._courtesy)
        try:
            newest = self._give_way(own) or self._newest
            self._gather(group)
            self._newest = group.run(newest)
        finally:
            self._take_back(group.abandoned())

    def _give_way(self, own: _Waiting) -> Committed | None:
        """Wait for writers of other processes that ask for it, a part of the time that ``own`` has, at most.

        Returns the latest version where that took a while, so that ``own`` does not begin with a lost attempt.
        """
        files = own.base.files
        rest_ms = own.begun_at_ms + own.base.definition.txn_ttl_millis - files.storage.now_ms()
        if not self._courtesy.give_way(files.storage, _MOST_OF_THE_REST * rest_ms / 1000):
            return None
        return Committed(*find_latest_after(files.roots, own.base.version))

    def _gather(self, group: _Group) -> None:
        """Take from the queue who goes into the next version: the leader, and in their order all who fit.

        Nobody overtakes one who stays behind and whom they touch.
        """
        with self._lock:
            candidates = [waiting for waiting in self._waiting if waiting not in group.members and not waiting.is_done]
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

    def _take_back(self, members: Sequence[_Waiting]) -> None:
        """Let those wait again for whom nothing was sent.

        What was written for them may have been discarded, and a delete whose answer is lost can take effect later.
        """
        for member in members:
            member.transaction.rename_files()
        with self._lock:
            self._waiting.extendleft(member for member in reversed(members) if not member.has_left)

    def _leave(self, own: _Waiting) -> None:
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


def group_info(infos: Sequence[CommitInfo]) -> CommitInfo:
    """Return what a root says that commits several transactions."""
    members = tuple(member for info in infos for member in info.members)
    counts: dict[str, int] = {}
    for info in infos:
        for name, number in info.counts.items():
            counts[name] = counts.get(name, 0) + number
    return CommitInfo(
        "group",
        f"{len(infos)} transactions",
        run_id=None,
        approved_by=None,
        members=members,
        counts=counts,
        transactions=tuple(infos),
    )


class _NobodyLeftError(TrinityLakeError):
    """All members of a group have their outcome."""


class _Group:
    """Transactions that go into one root (Committable and AgeLimit).

    ``members`` are those without an outcome so far, the first of them being the leader at the outset.
    """

    def __init__(self, leader: _Waiting, courtesy: Courtesy):
        self.members = [leader]
        self._courtesy = courtesy
        self._taken = [leader]
        self._files = leader.base.files
        self._commit: Commit | None = None

    def has_room_for(self, candidate: _Waiting) -> bool:
        """Whether one more transaction fits: it touches nothing of the others', and the root has room for it."""
        footprints = [member.footprint for member in self.members]
        if sum(len(footprint.writes) for footprint in (*footprints, candidate.footprint)) > MAX_GROUP_CHANGES:
            return False
        if any(candidate.footprint.is_touched_by(footprint.writes) for footprint in footprints):
            return False
        try:
            group_info([member.largest_info for member in (*self.members, candidate)]).largest()
        except InvalidInputError:
            return False
        return True

    def take(self, candidate: _Waiting) -> None:
        """Add a member."""
        self._taken.append(candidate)
        self.members.append(candidate)

    def run(self, newest: Committed | None) -> Committed | None:
        """Commit the members as one version and settle each; returns that version, None where none was committed.

        ``newest`` is the version that was committed just before, by this process.
        """
        bases = [member.base for member in self.members]
        if newest is not None and newest.root_file is not None:
            path = self._files.roots.path(newest.version)
            bases.append(Snapshot(self._files, newest.version, path, decode_node(newest.root_file, path)))
        base = max(bases, key=lambda snapshot: snapshot.version)
        max_attempts = max(member.max_attempts for member in self.members)
        self._commit = Commit(self._files, self, self, max_attempts, self._courtesy)
        try:
            self.bring_to(base)
            committed = self._commit.run(base)
        except _NobodyLeftError:
            return None
        except TrinityLakeError as error:
            self._settle(error)
            return None
        self._settle(committed.version)
        return committed

    def abandoned(self) -> list[_Waiting]:
        """Give an answer to those who have none, since the leader was interrupted, wherever that was.

        Returns those for whom nothing was sent.
        """
        unsent = []
        for member in self._taken[1:]:
            if self._commit is not None and self._commit.committed is not None:
                member.settle(self._commit.committed.version)
            elif self._commit is not None and self._commit.sent is not None:
                reason = "the thread that committed it was interrupted"
                member.settle(outcome_unknown(self._files.roots, *self._commit.sent, reason))
            elif member.outcome is None:
                unsent.append(member)
        return unsent

    def _settle(self, outcome: int | TrinityLakeError) -> None:
        """Give all that have none yet the same outcome."""
        for member in self.members:
            # Raised in several threads, one object would gather all their tracebacks.
            member.settle(copy.copy(outcome) if isinstance(outcome, TrinityLakeError) else outcome)
        self.members = []

    def bring_to(self, base: Snapshot) -> None:
        """Check members that are based on earlier versions against ``base``; those that conflict fail."""
        changes: dict[int, dict[str, KeyChange]] = {}
        for member in list(self.members):
            if member.base.version == base.version:
                continue
            try:
                with reading_bases(member.base, base):
                    if member.base.version not in changes:
                        differences = diff_trees(self._files.nodes, member.base.root, base.root)
                        changes[member.base.version] = {change.key: change for change in differences}
                    member.transaction.check(member.base, base, changes[member.base.version])
                member.base = base
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this member's alone
                self._fail(member, error)
        self._check_somebody_left()

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        """Return what all members together write on ``base``; those who would write nothing are done."""
        parts = []
        for member in list(self.members):
            if member.expiry is not None:
                self._fail(member, member.expiry)
                continue
            try:
                writes = member.transaction.writes_on(base)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this member's alone
                self._fail(member, error)
                continue
            if writes is None:
                # Others changed the same since, or there was nothing to change from the outset.
                self.members.remove(member)
                member.settle(base.version if member.unchanged_version is None else member.unchanged_version)
            else:
                parts.append(writes)
        self._check_somebody_left()
        return (parts[0] if len(parts) == 1 else _together(parts)).draft(base, stamp)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Check every member against ``latest``; those that conflict, are too old, or have tried often enough, fail."""
        for member in list(self.members):
            member.n_lost += 1
            if member.expiry is not None:
                self._fail(member, member.expiry)
            elif member.n_lost >= member.max_attempts:
                self._fail(member, attempts_exhausted(member.max_attempts, latest.version))
        self.bring_to(latest)

    def begin_writing(self) -> None:
        """Nothing: each transaction keeps its age."""

    def check_base(self, definition: LakehouseDef) -> None:
        """Raise DraftOutdatedError as ``check`` does."""
        self.check(definition)

    def check(self, definition: LakehouseDef) -> None:
        """Raise DraftOutdatedError where a member has outlived its time to live: it is left out of the next draft.

        It has no outcome yet: this root may have been sent before, and landed.
        """
        if not self.members:
            return
        oldest_ms = min(member.begun_at_ms for member in self.members)
        barred_ms = removed_before_ms(self._files.storage, definition, oldest_ms)  # first: it may take a while
        now_ms = self._files.storage.now_ms()
        for member in self.members:
            try:
                check_age(member.begun_at_ms, now_ms, definition, barred_ms)
            except TrinityLakeError as error:
                member.expiry = error
        if any(member.expiry is not None for member in self.members):
            raise DraftOutdatedError("some of the transactions are too old")

    def _fail(self, member: _Waiting, error: Exception) -> None:
        self.members.remove(member)
        member.settle(error)

    def _check_somebody_left(self) -> None:
        if not self.members:
            raise _NobodyLeftError("no transaction of the group is left")


def _together(parts: Sequence[Writes]) -> Writes:
    """Return what several transactions write, which touch nothing of each other's."""
    messages: dict[str, str | None] = {}
    files: dict[str, bytes] = {}
    for part in parts:
        messages |= part.messages
        files |= part.files
    return Writes(messages, files, group_info([part.info for part in parts]))
