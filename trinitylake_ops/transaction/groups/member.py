"""A transaction that waits in a queue, or goes into a group."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.storage import beside
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.transaction.change_set import Footprint
from trinitylake_ops.transaction.commit import discard
from trinitylake_ops.transaction.submission import Submission
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.latest import reading_bases
from trinitylake_ops.versions.snapshot import Snapshot

#: Larger transactions go alone, beside the queue. They take long, and no other transaction should wait for them.
MAX_GROUP_CHANGES = 1_000


@dataclass(slots=True, eq=False)
class Member:
    """A transaction that waits for its outcome: a version, or an error."""

    submission: Submission
    #: the version that it began on, if it changes nothing there
    unchanged_version: int | None
    #: the last version on which it was found to hold
    base: Snapshot
    max_attempts: int
    footprint: Footprint
    largest_info: CommitInfo
    #: set when there is an outcome, and when this transaction has to lead
    wakes: threading.Event
    n_lost: int = 0
    #: why it may not be committed; the next draft leaves it out
    failure: TrinityLakeError | None = None
    outcome: int | BaseException | None = None
    has_left: bool = False
    #: the files that it wrote ahead, and how long that took
    written: Mapping[str, bytes] = field(default_factory=dict)
    ahead_s: float = 0.0
    #: whether a group has these files, and deletes them if it fails
    is_taken: bool = False

    @classmethod
    def of(cls, submission: Submission, max_attempts: int) -> Member:
        """Ask a transaction, in its own thread, for all values that other threads look at. Raises its errors."""
        info, base = submission.largest_info(), submission.base
        with reading_bases(base):
            footprint = submission.footprint()
            unchanged_version = base.version if submission.changes_nothing else None
        return cls(submission, unchanged_version, base, max_attempts, footprint, info, threading.Event())

    @property
    def begun_at_ms(self) -> int:
        """When the transaction began, by the storage's clock."""
        return self.submission.begun_at_ms

    @property
    def is_done(self) -> bool:
        """Whether the transaction is settled, so that no thread has to commit it any more."""
        return self.has_left or self.outcome is not None

    @property
    def goes_alone(self) -> bool:
        """Whether the transaction gets a version to itself."""
        return self.submission.is_alone or self.is_large

    @property
    def is_large(self) -> bool:
        """Whether it takes so long that no other transaction should wait for it."""
        return len(self.footprint.writes) > MAX_GROUP_CHANGES

    def write_ahead(self, also: Sequence[Callable[[], None]]) -> None:
        """Write its files in its own thread, and make the calls of ``also`` in that round.

        Its names are checked in the same round. Its version then waits for the root alone. Raises ObjectExistsError and
        what the storage raises; no file remains then, best effort.
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
        """Delete the files that it wrote ahead, beside. May be repeated from any point."""
        if self.written:
            beside.put(functools.partial(discard, self.base.files.storage, list(self.written)))
            self.written = {}

    def settle(self, outcome: int | BaseException) -> None:
        """Set the outcome, unless there is one."""
        if self.outcome is None:
            self.outcome = outcome
        self.wakes.set()

    def result(self) -> int:
        """Return the version of the outcome, or raise its error."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome
