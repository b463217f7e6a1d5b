"""Commit a change: draft it, write its files and publish its root; after a conflict, rebase it and try again.

``Commit._until_decided`` implements the protocol (docs/internals/protocol.md, C). Transactions and operations use it
to create all versions after the first. It can be understood without these modules:

- ``publish.py``: how a root is created if absent, and how an unknown outcome is resolved;
- ``pacing.py``: how writers share a lakehouse, which saves requests and time;
- ``commit_queue.py`` and ``group.py``: how the transactions of a process share a version.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from trinitylake_ops.errors import (
    CommitAttemptsExhaustedError,
    CommitOutcomeUnknownError,
    TrinityLakeError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import MAX_VERSION
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.storage import background, process_clock
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.hub import LOST_ATTEMPTS, VERSION_ATTEMPTS, VERSION_SECONDS
from trinitylake_ops.transaction.draft import Draft, RootStamp
from trinitylake_ops.transaction.pacing import Pacing
from trinitylake_ops.transaction.publish import Created, Lost, publish_root
from trinitylake_ops.transaction.time_to_live import AgeLimit
from trinitylake_ops.versions.commit_info import CommitCost
from trinitylake_ops.versions.latest import latest_after, reading_bases
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.roots import RootProbe
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.versions.time_travel import time_after

logger = logging.getLogger(__name__)

#: On fast storage, a commit can lose a hundred attempts within 0.2 seconds by chance.
DEFAULT_MAX_ATTEMPTS = 1_000


class Committable(Protocol):
    """A change that can be committed."""

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        """Return the draft of the change on ``base``, or None if nothing would change."""

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Check that the change is still valid on ``latest``. Raises CommitConflictError, or errors of the change."""


class DraftOutdatedError(TrinityLakeError):
    """Raised before the root is sent if the content of the change is no longer the content of the draft.

    The change is then drafted again on the same base.
    """


@dataclass(frozen=True, slots=True)
class Committed:
    """The version that contains a change, and its root. The root is None if nothing had to be committed."""

    version: int
    root: KnownRoot | None


class Commit:
    """Commits one change.

    Args:
        files: The files of the lakehouse.
        change: The change.
        age_limit: Limits the age of the change when its root is sent.
        max_attempts: The number of attempts after which a conflict fails the commit.
        pacing: Coordinates the commit with other writers.
        definitions: Definition files that are already written for later drafts. The caller may add more between drafts.
    """

    def __init__(
        self,
        files: LakehouseFiles,
        change: Committable,
        age_limit: AgeLimit,
        max_attempts: int,
        pacing: Pacing,
        definitions: dict[str, bytes] | None = None,
    ):
        self._files = files
        self._change = change
        self._age_limit = age_limit
        self._max_attempts = max_attempts
        self._pacing = pacing
        self._definitions = {} if definitions is None else definitions  # attempts share them
        self._unwritten: set[str] = set()  # definitions whose write failed: they may or may not exist
        self._nodes: dict[str, bytes] = {}  # nodes of this attempt
        self._n_conflicts = 0
        self._n_requests = 0
        #: The version and the commit id of the current attempt, once its root was sent.
        self.sent: tuple[int, str] | None = None
        #: None until the outcome is known.
        self.committed: Committed | None = None

    def run(self, base: Snapshot) -> Committed:
        """Commit on ``base`` or a later version. Return the new version, or the version of ``base`` if nothing changes.

        Unless the outcome is unknown, the files of a failed commit are deleted, best effort.

        Args:
            base: The version on which the change was made.

        Raises:
            CommitConflictError: The change conflicts with another commit.
            CommitAttemptsExhaustedError: All attempts conflicted with other commits.
            TransactionExpiredError: The change is too old.
            CommitOutcomeUnknownError: The change may or may not have been committed.
            TrinityLakeError: The storage failed. Nothing was committed.
        """
        begun_s = process_clock.now_s()
        try:
            with spans.span("commit", {"trinitylake.base_version": base.version}) as span:
                self.committed = self._until_decided(base)
                span.set(
                    {
                        "trinitylake.version": self.committed.version,
                        "trinitylake.lost_attempts": self._n_conflicts,
                    }
                )
            self._settle(self.committed)
            if self.committed.root is not None:
                hub.observe(VERSION_SECONDS, process_clock.now_s() - begun_s)
                hub.observe(VERSION_ATTEMPTS, self._n_conflicts + 1)
            return self.committed
        finally:
            self._pacing.close()

    def _until_decided(self, base: Snapshot) -> Committed:
        """Attempt the commit on successive versions, until it succeeds or fails permanently."""
        try:
            while True:
                begun_s = process_clock.now_s()
                with reading_bases(base), spans.span("attempt", {"trinitylake.base_version": base.version}):
                    draft = self._change.draft(base, self._stamp(base))
                    if draft is None:
                        return Committed(base.version, None)
                    try:
                        outcome: Created | Lost | None = self._publish(self._write_files(draft, base), base)
                    except DraftOutdatedError:
                        outcome = None
                    finally:
                        self._pacing.end_attempt()
                match outcome:
                    case Created(root):
                        return Committed(root.version, root)
                    case Lost(probe):
                        self._forget_attempt()
                        base = self._rebase(base, probe, begun_s)
                    case None:  # a part of the change was removed: draft the rest on the same base
                        self._forget_attempt()
        except CommitOutcomeUnknownError:
            self._pacing.withdraw()
            raise
        except TrinityLakeError:
            # A typed error means that no root was created. After any other exception, such as an interrupt, a root may
            # exist. Its files must therefore be kept, at worst as orphans.
            self._pacing.withdraw()
            discard(self._files.storage, [*self._definitions, *self._nodes])
            raise

    def _stamp(self, base: Snapshot) -> RootStamp:
        if base.version >= MAX_VERSION:
            raise VersionNotFoundError(
                f"version {MAX_VERSION} is the last one a lakehouse can have; nothing was committed"
            )
        return RootStamp(time_after(base, self._files.storage.now_ms()), str(uuid.uuid4()))

    def _write_files(self, draft: Draft, base: Snapshot) -> KnownRoot:
        """Write all files of a draft except its root in one round trip, each definition only once. Return the root."""
        # Files that the draft no longer contains: a lakehouse definition from before a merge, or definitions of a
        # transaction that left its group.
        replaced = self._definitions.keys() - draft.definition_files.keys()
        if replaced:
            discard(self._files.storage, sorted(replaced))
            for path in replaced:
                del self._definitions[path]
        if not self._definitions:
            self._age_limit.begin_writing()
        fresh = {
            path: data
            for path, data in draft.definition_files.items()
            if path not in self._definitions or path in self._unwritten
        }
        self._definitions |= fresh
        nodes = draft.tree.node_files
        self._n_requests += len(nodes) + 1
        n_bytes = sum(map(len, self._definitions.values())) + sum(map(len, nodes.values()))
        cost = CommitCost(self._n_conflicts + 1, self._n_requests + len(self._definitions) + 1, n_bytes)
        roots, version = base.files.roots, base.version + 1
        root = draft.root(cost, roots.path(version), version)
        self._nodes = nodes
        calls = self._pacing.calls_with_files(root, roots, has_files=bool(fresh or nodes))
        try:
            create_fresh(self._files.storage, {**fresh, **nodes}, [*draft.checks, *calls])
        except TrinityLakeError as error:
            self._unwritten |= fresh.keys()
            if draft.on_write_error is not None:
                draft.on_write_error(error)
            raise
        self._unwritten.clear()
        return root

    def _publish(self, root: KnownRoot, base: Snapshot) -> Created | Lost:
        """Create the root if absent, within the time to live."""

        def before_send() -> None:
            self._age_limit.check(base.definition)
            self.sent = (root.version, root.node.system[COMMIT_ID])

        return publish_root(root, base.files.roots, before_send, self._pacing)

    def _rebase(self, base: Snapshot, probe: RootProbe, begun_s: float) -> Snapshot:
        """Check the change against the latest version, and return that version."""
        self._n_conflicts += 1
        hub.add(LOST_ATTEMPTS)
        self._pacing.note_other_commit()
        if self._n_conflicts >= self._max_attempts:
            raise attempts_exhausted_error(self._max_attempts, base.version + 1)
        self._pacing.note_conflict(self._n_conflicts, process_clock.now_s() - begun_s)
        latest = latest_after(self._files, probe)
        # The age is checked first, because a purge may have deleted files that the base of an old change needs.
        with contextlib.suppress(DraftOutdatedError):  # rebase and draft leave out transactions that are too old
            self._age_limit.check_base(latest.definition)
        with reading_bases(base, latest):
            self._change.rebase(base, latest)
        return latest

    def _settle(self, committed: Committed) -> None:
        """Update the hint in the background, or delete files that were written but are not needed."""
        if committed.root is None:
            self._pacing.withdraw()
            discard(self._files.storage, self._definitions)
            return
        self._files.roots.keep(committed.root)
        self._files.hint.note(committed.version)
        self._pacing.committed()

    def _forget_attempt(self) -> None:
        """Record that the root of the attempt was not created. Its nodes are deleted while the next attempt runs."""
        self.sent = None
        if self._nodes:
            background.submit(functools.partial(discard, self._files.storage, list(self._nodes)))
            self._nodes = {}


def attempts_exhausted_error(n_attempts: int, version: int) -> CommitAttemptsExhaustedError:
    """Return the error for a change whose attempts all conflicted; ``version`` is the version of the last conflict."""
    return CommitAttemptsExhaustedError(
        f"commit failed after {n_attempts} conflicts with other writers; nothing was committed; retry later",
        version=version,
    )


def discard(storage: Storage, paths: Iterable[str]) -> None:
    """Delete files of a failed attempt, best effort. Remaining files are orphans."""
    for path, error in storage.delete_many(list(paths)).items():
        logger.warning("file %r of a failed commit could not be deleted: %s", path, error)
