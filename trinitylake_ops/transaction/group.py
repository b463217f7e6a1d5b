"""Commit several transactions as one version (docs/internals/protocol.md, "Group commit").

To ``commit.py`` a group is one change. Each member is checked as if it were committed alone, after the members before
it. ``commit_queue.py`` decides which transactions form a group and whose thread commits it. To follow a single
transaction, skip both modules.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.storage import background
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.telemetry import hub
from trinitylake_ops.telemetry.hub import GROUP_SIZE
from trinitylake_ops.transaction.change_set import Footprint
from trinitylake_ops.transaction.commit import Commit, Committed, DraftOutdatedError, attempts_exhausted_error, discard
from trinitylake_ops.transaction.draft import Draft, RootStamp, Writes
from trinitylake_ops.transaction.pacing import Pacing
from trinitylake_ops.transaction.publish import outcome_unknown_error
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.transaction.time_to_live import check_age, is_young, recorded_barrier_ms, removed_before_ms
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.latest import reading_bases
from trinitylake_ops.versions.snapshot import Snapshot

#: Transactions with more changes bypass the queue: they take long, and no other transaction should wait for them.
MAX_GROUP_CHANGES = 1_000


@dataclass(slots=True, eq=False)
class Member:
    """A transaction that is waiting for its outcome."""

    #: The transaction.
    submission: Submission
    #: The version that the transaction began on, if its writes have no effect on that version.
    unchanged_version: int | None
    #: The latest version that the transaction was checked against without a conflict.
    base: Snapshot
    #: The number of conflicts after which the transaction fails.
    max_attempts: int
    #: The keys that the transaction touches.
    footprint: Footprint
    #: Upper bound of the transaction's commit info.
    largest_info: CommitInfo
    #: Set when there is an outcome, and when this transaction becomes the leader.
    wakes: threading.Event
    #: The number of conflicts so far.
    n_conflicts: int = 0
    #: The error because of which the transaction must not be committed; the next draft leaves it out.
    failure: TrinityLakeError | None = None
    #: The committed version, or the error. None until the outcome is known.
    outcome: int | BaseException | None = None
    #: Whether the transaction has left the queue.
    has_left: bool = False
    #: The files that the transaction wrote before it joined the queue.
    written: Mapping[str, bytes] = field(default_factory=dict)
    #: The time that writing these files took, in seconds.
    ahead_s: float = 0.0
    #: Whether a group owns these files, and deletes them if it fails.
    is_taken: bool = False

    @classmethod
    def of(cls, submission: Submission, max_attempts: int) -> Member:
        """Compute, in the transaction's thread, all values that other threads read.

        Args:
            submission: The transaction.
            max_attempts: The number of conflicts after which it fails.

        Raises:
            StorageError: The base cannot be read.
            TransactionExpiredError: The base was purged.
        """
        info, base = submission.largest_info(), submission.base
        with reading_bases(base):
            footprint = submission.footprint()
            unchanged_version = base.version if submission.changes_nothing else None
        return cls(submission, unchanged_version, base, max_attempts, footprint, info, threading.Event())

    @property
    def begun_at_ms(self) -> int:
        """When the transaction began, on the storage's clock."""
        return self.submission.begun_at_ms

    @property
    def is_done(self) -> bool:
        """Whether the transaction is settled, so that no thread needs to commit it."""
        return self.has_left or self.outcome is not None

    @property
    def is_exclusive(self) -> bool:
        """Whether the transaction gets a separate version."""
        return self.submission.is_alone or self.is_large

    @property
    def is_large(self) -> bool:
        """Whether the commit takes so long that no other transaction should wait for it."""
        return len(self.footprint.writes) > MAX_GROUP_CHANGES

    def write_ahead(self, also: Sequence[Callable[[], None]]) -> None:
        """Write the files in the transaction's own thread, so that its version only takes the round trip of the root.

        Checks the names of new tables and views in the same round trip. On an error the files are deleted, best effort.

        Args:
            also: Additional calls to make in this round trip.

        Raises:
            ObjectExistsError: A table and a view would have the same name.
            StorageError: A file cannot be written.
        """
        begun_s = time.monotonic()
        with reading_bases(self.base):
            writes = self.submission.writes_on(self.base)
            names = [self._check_names] if writes is not None and self.submission.has_new_names else []
        if writes is None:
            return
        storage = self.base.files.storage
        try:
            create_fresh(storage, writes.files, [*also, *names])
        except TrinityLakeError:
            discard(storage, writes.files)
            raise
        self.written, self.ahead_s = writes.files, time.monotonic() - begun_s

    def _check_names(self) -> None:
        with reading_bases(self.base):
            self.submission.check_names(self.base)

    def discard_written(self) -> None:
        """Delete the files that were written ahead, in the background. Can be repeated after any interrupt."""
        if self.written:
            background.submit(functools.partial(discard, self.base.files.storage, list(self.written)))
            self.written = {}

    def settle(self, outcome: int | BaseException) -> None:
        """Set the outcome, unless it is already set."""
        if self.outcome is None:
            self.outcome = outcome
        self.wakes.set()

    def result(self) -> int:
        """Return the committed version, or raise the error."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class AllSettledError(TrinityLakeError):
    """All members of a group have their outcome."""


class Group:
    """Transactions that are committed as one version: a leader and its followers.

    A group is both the change (commit.Committable) and its age limit (time_to_live.AgeLimit). A member that conflicts,
    has expired or has used up its attempts fails alone, and the other members continue.
    """

    def __init__(self, leader: Member, pacing: Pacing):
        self._leader = leader
        self._pending = [leader]  # members without an outcome
        self._followers: list[Member] = []  # all members except the leader, including settled members
        self._files = leader.base.files
        self._pacing = pacing
        self._written = dict(leader.written)
        self._gather: Callable[[int], None] = lambda _: None
        self._commit: Commit | None = None  # set while the group runs

    def __contains__(self, member: Member) -> bool:
        return member in self._pending

    def has_room_for(self, candidate: Member) -> bool:
        """Whether a transaction fits: it touches no key that a member touches, and the root has room for it.

        A transaction with the same id as a member is a retry of that member. It waits for the next version, where it
        detects that the member was committed.
        """
        members = self._pending
        if any(member.submission.id == candidate.submission.id for member in members):
            return False
        footprints = [member.footprint for member in members]
        if sum(len(footprint.writes) for footprint in (*footprints, candidate.footprint)) > MAX_GROUP_CHANGES:
            return False
        if any(candidate.footprint.is_touched_by(footprint.writes) for footprint in footprints):
            return False
        try:
            group_info([member.largest_info for member in (*members, candidate)]).largest()
        except InvalidInputError:
            return False
        return True

    def take(self, candidate: Member) -> None:
        """Add a member."""
        self._written |= candidate.written
        candidate.is_taken = True
        self._followers.append(candidate)
        self._pending.append(candidate)

    def run(self, newest: Committed | None, gather: Callable[[int], None] = lambda _: None) -> Committed | None:
        """Commit the members as one version and settle each.

        Args:
            newest: The latest known version.
            gather: Adds members that may be committed on a base version. Called before each draft.

        Returns:
            The version, or None if nothing was committed.

        Raises:
            CorruptFileError: The root of ``newest`` cannot be decoded. The members then have no outcome.
        """
        base, self._gather = self._newest_base(newest), gather
        self._leader.is_taken = True
        self._commit = Commit(self._files, self, self, sys.maxsize, self._pacing, self._written)
        committed: Committed | None = None
        try:
            committed = self._commit.run(base)
        except AllSettledError:
            pass
        except TrinityLakeError as error:
            self._settle_all(error)
        else:
            hub.observe(GROUP_SIZE, len(self._pending))
            self._settle_all(committed.version)
        self._commit = None  # all members have their outcome
        return committed

    def _newest_base(self, newest: Committed | None) -> Snapshot:
        """Return the newest known version: the base of a member, or ``newest``."""
        bases = [member.base for member in self._pending]
        if newest is not None and newest.root is not None:
            bases.append(Snapshot(self._files, newest.version, newest.root.path, newest.root.node))
        return max(bases, key=lambda snapshot: snapshot.version)

    def abandoned(self) -> list[Member]:
        """Settle the members without an outcome, after the leader was interrupted at any point.

        Returns:
            The members for which no root was sent.
        """
        unsent = []
        for member in self._followers:
            if self._commit is not None and self._commit.committed is not None:
                member.settle(self._commit.committed.version)
            elif self._commit is not None and self._commit.sent is not None:
                reason = "the thread that committed it was interrupted"
                member.settle(outcome_unknown_error(self._files.roots, *self._commit.sent, reason))
            elif member.outcome is None:
                unsent.append(member)
        return unsent

    # The change

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        """Draft the writes of all members on ``base``, including members that joined since the last attempt.

        Settles members that would write nothing. Fails members that conflict with ``base``.
        """
        self._gather(base.version)
        self._bring_to(base)
        parts, checks = list[Writes](), list[Callable[[], None]]()
        owners: dict[str, Member] = {}
        for member in list(self._pending):
            if member.failure is not None:
                self._settle(member, member.failure)
                continue
            try:
                writes = member.submission.writes_on(base)
                has_new_names = writes is not None and member.submission.has_new_names
            except Exception as error:  # noqa: BLE001 - any error concerns this member only
                self._settle(member, error)
                continue
            if writes is None:
                # Another commit made the same change, or the transaction had no effect in the first place.
                unchanged = base.version if member.unchanged_version is None else member.unchanged_version
                self._settle(member, unchanged)
            else:
                parts.append(writes)
                owners |= dict.fromkeys(writes.files, member)
                if has_new_names:
                    checks.append(functools.partial(_check_names, member, base))
        self._check_any_pending()
        combined = parts[0] if len(parts) == 1 else _combine(parts)
        return combined.draft(base, stamp, checks, functools.partial(_fail_owner, owners))

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Check every member against ``latest``."""
        for member in list(self._pending):
            member.n_conflicts += 1
            if member.failure is not None:
                self._settle(member, member.failure)
            elif member.n_conflicts >= member.max_attempts:
                self._settle(member, attempts_exhausted_error(member.max_attempts, latest.version))
        self._bring_to(latest)

    def _bring_to(self, base: Snapshot) -> None:
        """Check members with earlier bases against ``base``, and fail those that conflict."""
        changes: dict[int, dict[str, KeyChange]] = {}
        for member in list(self._pending):
            if member.base.version == base.version:
                continue
            try:
                with reading_bases(member.base, base):
                    if member.base.version not in changes:
                        differences = diff_trees(base.files.nodes, member.base.root, base.root)
                        changes[member.base.version] = {change.key: change for change in differences}
                    member.submission.check(member.base, base, changes[member.base.version])
                member.base = base
            except Exception as error:  # noqa: BLE001 - any error concerns this member only
                self._settle(member, error)
        self._check_any_pending()

    def _settle(self, member: Member, outcome: int | Exception) -> None:
        """Set the outcome of a member, which leaves the group."""
        self._pending.remove(member)
        member.settle(outcome)

    def _settle_all(self, outcome: int | TrinityLakeError) -> None:
        for member in self._pending:
            # One shared error object would collect the tracebacks of all threads that raise it.
            member.settle(copy.copy(outcome))
        self._pending = []

    def _check_any_pending(self) -> None:
        if not self._pending:
            raise AllSettledError("no transaction of the group is left")

    # The age limit, which is separate for each member

    def begin_writing(self) -> None:
        """Do nothing: each transaction keeps its age."""

    def check_base(self, definition: LakehouseDef) -> None:
        """Raise DraftOutdatedError like ``check``."""
        self.check(definition)

    def check(self, definition: LakehouseDef) -> None:
        """Raise DraftOutdatedError if a member has exceeded its time to live. The next draft leaves it out.

        The member is not settled here, because this root may already have been sent and may exist.
        """
        members = self._pending
        if not members:
            return
        storage, unreadable = self._files.storage, None
        oldest_ms = min(member.begun_at_ms for member in members)
        barred_ms = recorded_barrier_ms(definition, storage.now_ms())
        try:  # read before the clock, because the response may take a while
            barred_ms = removed_before_ms(storage, definition, oldest_ms)
        except TrinityLakeError as error:
            unreadable = error
        now_ms = storage.now_ms()
        for member in members:
            try:
                check_age(member.begun_at_ms, now_ms, definition, barred_ms)
            except TrinityLakeError as error:
                member.failure = error
            if unreadable is not None and not is_young(member.begun_at_ms, now_ms):
                member.failure = copy.copy(unreadable)
        if any(member.failure is not None for member in members):
            raise DraftOutdatedError("a transaction of the group has expired")


def group_info(infos: Iterable[CommitInfo]) -> CommitInfo:
    """Return the ``commit_info`` of a root that commits several transactions."""
    transactions = tuple(infos)
    counts: dict[str, int] = {}
    for info in transactions:
        for name, number in info.counts.items():
            counts[name] = counts.get(name, 0) + number
    return CommitInfo(
        "group",
        f"{len(transactions)} transactions",
        run_id=None,
        approved_by=None,
        members=tuple(member for info in transactions for member in info.members),
        counts=counts,
        transactions=transactions,
    )


def _check_names(member: Member, base: Snapshot) -> None:
    """Check a member's new names. If they are taken, raise DraftOutdatedError; the next draft leaves the member out."""
    try:
        with reading_bases(base):
            member.submission.check_names(base)
    except TrinityLakeError as error:
        member.failure = error
        raise DraftOutdatedError("a new name of a transaction of the group is taken") from error


def _fail_owner(owners: Mapping[str, Member], error: TrinityLakeError) -> None:
    """Fail the member that owns the file that could not be written.

    If there is such a member, raises DraftOutdatedError, and the next draft leaves the member out.
    """
    member = None if error.path is None else owners.get(error.path)
    if member is not None:
        member.failure = error
        raise DraftOutdatedError("a file of a transaction of the group could not be written") from error


def _combine(parts: Sequence[Writes]) -> Writes:
    """Combine the writes of transactions that touch disjoint objects."""
    messages: dict[str, str | None] = {}
    files: dict[str, bytes] = {}
    for part in parts:
        messages |= part.messages
        files |= part.files
    return Writes(messages, files, group_info(part.info for part in parts))
