"""Group commit: transactions of one process that wait at the same moment go into one root (docs/protocol.md, C).

Who comes while nobody commits, leads: it commits at once. Those who come meanwhile wait; when the
leader is done, the first of them leads the next group and takes along all who fit. Each is checked as
if it were committed by itself after those before it, and fails by itself.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from trinitylake_ops.errors import ConflictError, InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.storage.lru import at_fork
from trinitylake_ops.transaction.commit import (
    LARGEST_COST,
    Commit,
    CommitInfo,
    Draft,
    DraftOutdatedError,
    RootStamp,
    Writes,
    attempts_exhausted,
    check_age,
    outcome_unknown,
)
from trinitylake_ops.transaction.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.tree.diff import KeyChange, diff_trees

#: Larger transactions go alone: what they write takes long anyway, and nobody should wait for it.
MAX_GROUP_CHANGES = 1_000


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

    def is_touched_by(self, written: Collection[str]) -> bool:
        """Whether others that wrote these keys matter, or may."""
        return any(
            key in self.writes or key in self.keys or (self.prefixes and key.startswith(self.prefixes))
            for key in written
        )


class Groupable(Protocol):
    """A transaction that is ready to be committed."""

    def footprint(self) -> Footprint:
        """Return what it touches."""

    def largest_info(self) -> CommitInfo:
        """Return what it will say about itself, with the largest numbers that may stand there."""

    def writes_on(self, base: Snapshot) -> Writes | None:
        """Return what it would write on ``base``, or None when nothing would change."""

    def check(self, base: Snapshot, latest: Snapshot, changes: Mapping[str, KeyChange]) -> None:
        """Check that it still holds on ``latest``, which differs from ``base`` by ``changes``; take over what merges.

        Raises CommitConflictError, or an error of its own preconditions.
        """


@dataclass(slots=True, eq=False)
class _Waiting:
    """A transaction that waits for its outcome: a version, or the error it failed with."""

    transaction: Groupable
    begun_on_version: int
    base: Snapshot
    max_attempts: int
    footprint: Footprint
    begun_at_ms: int
    #: Set when there is an outcome, and when it is this one's turn to lead.
    wakes: threading.Event
    n_lost: int = 0
    expiry: TrinityLakeError | None = None
    outcome: int | BaseException | None = None

    def settle(self, outcome: int | BaseException) -> None:
        self.outcome = outcome
        self.wakes.set()

    def result(self) -> int:
        """Return the version that was settled, or raise the error."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


#: The queue for which this thread commits now.
_led_here: ContextVar[CommitQueue | None] = ContextVar("led_here", default=None)


class CommitQueue:
    """The transactions of a process that are to be committed to one lakehouse."""

    def __init__(self) -> None:
        self.forget()
        at_fork(self)

    def forget(self) -> None:
        """Start anew: those who wait are threads that a forked child does not have."""
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._is_led = False
        self._newest: Snapshot | None = None

    def commit(self, transaction: Groupable, base: Snapshot, max_attempts: int) -> int:
        """Commit a transaction, perhaps together with others; returns its version.

        Raises what :func:`commit.commit` raises.
        """
        footprint = transaction.footprint()
        own = _Waiting(transaction, base.version, base, max_attempts, footprint, base.read_at_ms, threading.Event())
        if _led_here.get() is self:  # begun by a precondition of one that is being committed
            _commit_group([own], None)
            return own.result()
        with self._lock:
            self._waiting.append(own)
            leads, self._is_led = not self._is_led, True
        try:
            if not leads:
                own.wakes.wait()
        except BaseException:
            self._leave(own)
            raise
        if own.outcome is None:
            self._lead(own)
        return own.result()

    def _lead(self, own: _Waiting) -> None:
        """Commit the group that begins with ``own``; then let the next one lead."""
        token = _led_here.set(self)
        try:
            group = self._take_group(own)
            self._newest = _commit_group(group, self._newest)
        finally:
            _led_here.reset(token)
            self._hand_over()

    def _take_group(self, own: _Waiting) -> list[_Waiting]:
        """Take from the queue who goes into the next version: ``own``, and in their order all who fit."""
        with self._lock:
            self._waiting.remove(own)
            candidates = list(self._waiting)
        group = [own]
        if own.footprint.is_alone or len(own.footprint.writes) > MAX_GROUP_CHANGES:
            return group
        written = set(own.footprint.writes)
        for candidate in candidates:
            footprint = candidate.footprint
            if footprint.is_alone or len(written) + len(footprint.writes) > MAX_GROUP_CHANGES:
                continue
            if not footprint.is_touched_by(written) and _fit_one_root([*group, candidate]):
                group.append(candidate)
                written |= set(footprint.writes)
        with self._lock:
            # Who was interrupted meanwhile has left.
            group = [member for member in group if member is own or member in self._waiting]
            for member in group[1:]:
                self._waiting.remove(member)
        return group

    def _hand_over(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting[0].wakes.set()
            else:
                # Whoever comes next has read the latest version itself.
                self._is_led, self._newest = False, None

    def _leave(self, own: _Waiting) -> None:
        """Leave the queue, where the wait was interrupted; one whose turn it was to lead lets the next one."""
        with self._lock:
            leads = own.wakes.is_set() and own.outcome is None
            if own in self._waiting:
                self._waiting.remove(own)
        if leads:
            self._hand_over()


def shared_queue(identity: str) -> CommitQueue:
    """Return the queue of all in this process who opened the same root in the same way."""
    with _shared_lock:
        return _shared_queues.setdefault(identity, CommitQueue())


_shared_lock = threading.Lock()
_shared_queues: WeakValueDictionary[str, CommitQueue] = WeakValueDictionary()


def _fit_one_root(group: Sequence[_Waiting]) -> bool:
    """Whether a root has room for what all of them say about themselves."""
    try:
        group_info([member.transaction.largest_info() for member in group]).encode(LARGEST_COST)
    except InvalidInputError:
        return False
    return True


def group_info(infos: Sequence[CommitInfo]) -> CommitInfo:
    """Return what a root says that commits several transactions."""
    members = tuple(member for info in infos for member in info.members)
    counts: dict[str, int] = {}
    for info in infos:
        for name, number in info.counts.items():
            counts[name] = counts.get(name, 0) + number
    return CommitInfo(
        "group", f"{len(infos)} transactions", None, members=members, counts=counts, transactions=tuple(infos)
    )


def _commit_group(waiting: Sequence[_Waiting], newest: Snapshot | None) -> Snapshot | None:
    """Commit transactions as one version and settle each; returns that version, None where none was committed."""
    files = waiting[0].base.files
    bases = [member.base for member in waiting]
    base = max(bases if newest is None else [*bases, newest], key=lambda snapshot: snapshot.version)
    group = _Group(files, waiting)
    commit = Commit(files, group, group, max(member.max_attempts for member in waiting))
    try:
        group.bring_to(base)
        committed = commit.run(base)
    except _NobodyLeftError:
        return None
    except TrinityLakeError as error:
        group.settle(error)
        return None
    except BaseException:
        # A root may stand, unless it was not sent: each of the others learns how to find out.
        reason = "the thread that committed it was interrupted"
        if commit.sent is None:
            group.settle(ConflictError(f"nothing was committed: {reason}; begin a new transaction"))
        else:
            group.settle(outcome_unknown(files.roots, *commit.sent, reason))
        raise
    group.settle(committed.version)
    if committed.root_file is None:
        return None
    path = files.roots.path(committed.version)
    return Snapshot(files, committed.version, path, decode_node(committed.root_file, path))


class _NobodyLeftError(TrinityLakeError):
    """All members of a group have their outcome."""


class _Group:
    """Transactions that go into one root (transaction.commit.Committable and Clock)."""

    def __init__(self, files: LakehouseFiles, members: Iterable[_Waiting]):
        self._files = files
        self._members = list(members)

    def settle(self, outcome: int | BaseException) -> None:
        """Give all that have none yet the same outcome."""
        for member in self._members:
            # Raised in several threads, one object would gather all their tracebacks.
            member.settle(copy.copy(outcome) if isinstance(outcome, TrinityLakeError) else outcome)
        self._members = []

    def bring_to(self, base: Snapshot) -> None:
        """Check members that are based on earlier versions against ``base``; those that conflict fail."""
        changes: dict[int, dict[str, KeyChange]] = {}
        for member in list(self._members):
            if member.base.version == base.version:
                continue
            if member.base.version not in changes:
                differences = diff_trees(self._files.nodes, member.base.root, base.root)
                changes[member.base.version] = {change.key: change for change in differences}
            try:
                member.transaction.check(member.base, base, changes[member.base.version])
                member.base = base
            except TrinityLakeError as error:
                self._fail(member, error)
        self._check_somebody_left()

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        """Return what all members together write on ``base``; those who would write nothing are done."""
        parts = []
        for member in list(self._members):
            if member.expiry is not None:
                self._fail(member, member.expiry)
                continue
            try:
                writes = member.transaction.writes_on(base)
            except TrinityLakeError as error:
                self._fail(member, error)
                continue
            if writes is None:
                # Nothing to change from the outset, or others changed the same since.
                had_changes = member.n_lost or member.footprint.is_alone
                self._members.remove(member)
                member.settle(base.version if had_changes else member.begun_on_version)
            else:
                parts.append(writes)
        self._check_somebody_left()
        return (parts[0] if len(parts) == 1 else _together(parts)).draft(base, stamp)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Check every member against ``latest``; those that conflict, or have tried often enough, fail."""
        for member in list(self._members):
            member.n_lost += 1
            if member.n_lost >= member.max_attempts:
                self._fail(member, attempts_exhausted(member.max_attempts, latest.version))
        self.bring_to(latest)

    def check(self, definition: LakehouseDef) -> None:
        """Raise DraftOutdatedError where a member has outlived its time to live: it is left out of the next draft.

        It has no outcome yet: this root may have been sent before, and landed.
        """
        now_ms = self._files.storage.now_ms()
        for member in self._members:
            try:
                check_age(now_ms - member.begun_at_ms, definition)
            except TrinityLakeError as error:
                member.expiry = error
        if any(member.expiry is not None for member in self._members):
            raise DraftOutdatedError("some of the transactions are too old")

    def _fail(self, member: _Waiting, error: TrinityLakeError) -> None:
        self._members.remove(member)
        member.settle(error)

    def _check_somebody_left(self) -> None:
        if not self._members:
            raise _NobodyLeftError("no transaction of the group is left")


def _together(parts: Sequence[Writes]) -> Writes:
    """Return what several transactions write, which touch nothing of each other's."""
    messages: dict[str, str | None] = {}
    files: dict[str, bytes] = {}
    for part in parts:
        messages |= part.messages
        files |= part.files
    return Writes(messages, files, group_info([part.info for part in parts]))
