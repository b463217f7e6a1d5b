"""A transaction that waits in a queue, or goes into a group."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.transaction.change_set import Footprint
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.latest import reading_bases
from trinitylake_ops.versions.snapshot import Snapshot

#: Larger transactions go alone, beside the queue: they take long, and nobody should wait for them.
MAX_GROUP_CHANGES = 1_000


@dataclass(slots=True, eq=False)
class Member:
    """A transaction that waits for its outcome: a version, or the error it failed with."""

    submission: Submission
    #: The version that it began on, where it changes nothing there.
    unchanged_version: int | None
    #: The version that it was last found to hold on.
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
    def of(cls, submission: Submission, max_attempts: int) -> Member:
        """Ask a transaction, in its own thread, for all that others look at. Raises its errors."""
        footprint, info, base = submission.footprint(), submission.largest_info(), submission.base
        with reading_bases(base):
            unchanged_version = base.version if submission.changes_nothing else None
        return cls(submission, unchanged_version, base, max_attempts, footprint, info, threading.Event())

    @property
    def begun_at_ms(self) -> int:
        """When the transaction began, by the storage's clock."""
        return self.submission.begun_at_ms

    @property
    def is_done(self) -> bool:
        """Whether nobody has to commit it any more."""
        return self.has_left or self.outcome is not None

    @property
    def goes_alone(self) -> bool:
        """Whether no other goes into a version with it."""
        return self.submission.is_alone or len(self.footprint.writes) > MAX_GROUP_CHANGES

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
