"""Commits that change only the lakehouse definition, and commit retries after conflicts."""

from __future__ import annotations

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
_MAX_MESSAGE_CHARS = 500


def commit_on_latest(
    attempt: Callable[[int], T],
    max_attempts: int = MAX_ATTEMPTS,
    *,
    may_succeed: Callable[[], bool] = lambda: True,
) -> T:
    """Make a plan based on the latest version and commit, and retry after conflicts with other commits.

    Args:
        attempt: Plans, commits, and returns the result. Receives the attempt number, starting at 1.
        max_attempts: The maximum number of attempts.
        may_succeed: Whether another attempt can succeed after a conflict.

    Raises:
        CommitConflictError: The last attempt conflicted.
    """
    for number in range(1, max_attempts):
        try:
            return attempt(number)
        except CommitConflictError:
            if not may_succeed():
                raise
    return attempt(max_attempts)


@dataclass(frozen=True)
class DefinitionChange:
    """A commit that changes the lakehouse definition but no object (implements commit.Committable)."""

    operation: str
    message: str
    #: Returns the definition to record on a base: the unchanged definition if only the commit itself matters, or None
    #: if nothing is left to do. Checks its preconditions on each call, and raises typed errors.
    change: Callable[[Snapshot], LakehouseDef | None]
    #: Called before ``change`` with the old and the new base, if other commits happened in between.
    rebased: Callable[[Snapshot, Snapshot], None] = lambda _base, _latest: None
    counts: Mapping[str, int] = field(default_factory=dict)

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        definition = self.change(base)
        if definition is None:
            return None
        info = CommitInfo(self.operation, self.message[:_MAX_MESSAGE_CHARS], counts=self.counts)
        if definition == base.definition:
            return Writes({}, {}, info).draft(base, stamp)
        path = new_lakehouse_def_path()
        return Writes({}, {path: definition.to_bytes(path)}, info, path, definition).draft(base, stamp)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        self.rebased(base, latest)

    def commit(self, lake: Lakehouse, base: Snapshot, *, written_since_ms: int | None = None) -> int:
        """Commit on a base or on a later version.

        Args:
            lake: The lakehouse.
            base: The version that the change was planned for.
            written_since_ms: When the oldest file that the definition names was written, in milliseconds since the
                epoch, if the definition names files.

        Returns:
            The committed version, or the version of the base if nothing was left to do.

        Raises:
            TrinityLakeError: ``change`` or ``rebased`` raised it, or the commit failed (:meth:`Lakehouse.commit`).
        """
        return lake.commit(self, base, written_since_ms=written_since_ms)
