"""Commits that change the lakehouse definition and no object, and the retry of commits after conflicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from trinitylake_ops.errors import CommitConflictError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import new_lakehouse_def_path
from trinitylake_ops.transaction.draft import Draft, RootStamp, Writes
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.snapshot import Snapshot

T = TypeVar("T")

MAX_ATTEMPTS = 5
_LONGEST_MESSAGE_CHARS = 500


def commit_on_latest(
    attempt: Callable[[int], T],
    max_attempts: int = MAX_ATTEMPTS,
    *,
    may_succeed: Callable[[], bool] = lambda: True,
) -> T:
    """Plan on the latest version and commit, again each time that another commit conflicted.

    Args:
        attempt: Plans, commits, and returns the result. It gets the number of the attempt, from 1 on.
        max_attempts: The number of attempts.
        may_succeed: Whether another attempt can succeed after a conflict.

    Raises:
        CommitConflictError: If the last attempt conflicted.
    """
    for number in itertools.count(1):
        try:
            return attempt(number)
        except CommitConflictError:
            if number >= max_attempts or not may_succeed():
                raise
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True)
class DefinitionChange:
    """A version with the same tree and a definition that follows from the one before (commit.Committable).

    ``change`` returns the definition to record on a base. It is the same one if only the commit itself matters, and
    None if nothing is left to do. It checks its preconditions each time and raises typed errors. ``rebased`` is called
    before it when other commits came between.
    """

    operation: str
    message: str
    change: Callable[[Snapshot], LakehouseDef | None]
    rebased: Callable[[Snapshot, Snapshot], None] = lambda _base, _latest: None
    counts: Mapping[str, int] = field(default_factory=dict)

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        definition = self.change(base)
        if definition is None:
            return None
        info = CommitInfo(self.operation, self.message[:_LONGEST_MESSAGE_CHARS], counts=self.counts)
        if definition == base.definition:
            return Writes({}, {}, info).draft(base, stamp)
        path = new_lakehouse_def_path()
        return Writes({}, {path: definition.to_bytes(path)}, info, path, definition).draft(base, stamp)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        self.rebased(base, latest)

    def commit(self, lake: Lakehouse, base: Snapshot, *, written_since_ms: int | None = None) -> int:
        """Commit on a base or later. Returns the version, or the base's if nothing was left to do.

        ``written_since_ms`` is the time when a file was written that the definition names. Raises the errors of
        ``change`` and ``rebased``, and those of :meth:`Lakehouse.commit`.
        """
        return lake.commit(self, base, written_since_ms=written_since_ms)
