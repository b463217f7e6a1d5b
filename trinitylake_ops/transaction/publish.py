"""Publish a root: create it if absent, and resolve the outcome if the response is lost.

A version exists as soon as its root exists, so this step makes a commit durable and visible (protocol.md, C3 and C4).
The response "created" is trusted. After any other response the root is read back, and its ``commit_id`` identifies
the writer that created it. If it cannot be read back, the outcome is unknown until :func:`resolve_commit` finds it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitConflictError,
    CommitOutcomeUnknownError,
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import MAX_VERSION
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.storage.conditional_create import create_settled
from trinitylake_ops.transaction.draft import Draft, RootStamp, draft_of_tree
from trinitylake_ops.transaction.pacing import Pacing
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.latest import latest_snapshot
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.roots import RootProbe, Roots, count_created_root, probe_successors
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot


@dataclass(frozen=True, slots=True)
class Created:
    """This writer created the root: its version is committed."""

    root: KnownRoot


@dataclass(frozen=True, slots=True)
class Lost:
    """Another writer has created the version."""

    #: The root of that version, and its successor if there is one.
    probe: RootProbe


def publish_root(root: KnownRoot, roots: Roots, before_send: Callable[[], None], pacing: Pacing) -> Created | Lost:
    """Create a root if absent.

    Args:
        root: The root, whose files are all written. It has a ``commit_id`` that no other root has.
        roots: The roots of the lakehouse.
        before_send: Called before every send, including resends; an error prevents the send.
        pacing: May already have read the root of another writer for this version, which is then not read again.

    Raises:
        CommitOutcomeUnknownError: The root may exist now or later.
        TrinityLakeError: Any other error means that the root was not created.
    """
    probe = pacing.seen(root.path)
    if probe is not None:
        return Lost(probe)
    calls, probes = pacing.calls_with_root(root, roots), list[RootProbe]()

    def read_back() -> bytes:
        """Read the root and, in the same round trip, its successor in case the root is not ours."""
        probes.append(pacing.seen(root.path) or probe_successors(roots, root.version))
        data = probes[-1].probed.contents[root.path]
        if data is None:
            raise FileMissingError(f"there is no root of version {root.version}", path=root.path)
        return data

    return Created(root) if create_root(root, roots, before_send, read_back, calls) else Lost(probes[-1])


def create_root(
    root: KnownRoot,
    roots: Roots,
    before_send: Callable[[], None] = lambda: None,
    read_back: Callable[[], bytes] | None = None,
    calls: Sequence[Callable[[], None]] = (),
) -> bool:
    """Create a root if absent, and return whether the root of its version is ours.

    Args:
        root: The root.
        roots: The roots of the lakehouse.
        before_send: Called before every send, including resends; an error prevents the send.
        read_back: Reads the root. Allows a caller to read other files in the same round trip.
        calls: Additional calls to make in the round trip of the first send.

    Raises:
        CommitOutcomeUnknownError: The root may exist now or later.
        TrinityLakeError: Any other error means that the root was not created.
    """
    path, commit_id = root.path, root.node.system[COMMIT_ID]
    count_created_root()
    try:
        return create_settled(
            roots.storage,
            path,
            root.data,
            is_ours=lambda data: decode_system_rows(data, path).get(COMMIT_ID) == commit_id,
            before_send=before_send,
            read_back=read_back,
            also=calls,
        )
    except AmbiguousWriteError as error:
        raise outcome_unknown_error(roots, root.version, commit_id, error.message) from error
    finally:
        count_created_root()  # a lakehouse that was opened in the meantime may have missed this root


def outcome_unknown_error(roots: Roots, version: int, commit_id: str, reason: str) -> CommitOutcomeUnknownError:
    """Return the error for a commit whose root may exist now or later.

    Args:
        roots: The roots of the lakehouse.
        version: The version that the commit would create.
        commit_id: The id in its root.
        reason: Why the outcome is unknown.
    """
    advice = f"check later with: trinitylake resolve-commit {version} {commit_id}"
    if version == 0:
        advice = "run init again: it succeeds, or reports that the lakehouse exists"
    return CommitOutcomeUnknownError(
        f"version {version} may or may not have been committed ({reason}); nothing was deleted; {advice}",
        commit_id=commit_id,
        path=roots.path(version),
        version=version,
    )


class CommitResolution(StrEnum):
    """The outcome of one attempt to commit."""

    #: The root of the attempt exists.
    COMMITTED = "committed"
    #: Another commit created the root with that name, so the attempt can never commit.
    LOST = "lost"
    #: There is no root. A request that is still in flight may create it.
    UNDECIDED = "undecided"


def resolve_commit(
    files: LakehouseFiles, version: int, commit_id: str, commit: Callable[[Fence, Snapshot], object] | None = None
) -> CommitResolution:
    """Return whether an attempt to commit created its version.

    Args:
        files: The files of the lakehouse.
        version: The version of the attempt, which CommitOutcomeUnknownError names.
        commit_id: The id of the attempt, which CommitOutcomeUnknownError names.
        commit: Commits a change on a base, to decide an undecided attempt: an empty commit creates the version, unless
            the attempt wins the race. None leaves the attempt undecided.

    Raises:
        InvalidInputError: The version is out of range, or the id is not a UUID.
        VersionNotFoundError: The version cannot have been attempted yet.
        CorruptFileError: The root was deleted.
        CommitOutcomeUnknownError: The outcome of the empty commit is unknown.
    """
    try:
        uuid.UUID(commit_id)
    except (ValueError, AttributeError):
        raise InvalidInputError(f"invalid commit id {commit_id[:64]!r}; pass the id that the error named") from None
    if not 0 <= version <= MAX_VERSION:
        raise InvalidInputError(f"invalid version {version}; it must be between 0 and {MAX_VERSION}")
    owner = _owner(files, version)
    if owner is None:
        # The latest version is found before the root is read again, so a root that is created in between is found.
        latest = latest_snapshot(files)
        owner = _owner(files, version)
        if owner is None:
            _check_next(version, latest)
            if commit is None:
                return CommitResolution.UNDECIDED
            with contextlib.suppress(CommitConflictError):  # the version exists: its root shows which commit created it
                commit(Fence(commit_id), latest)
            owner = _owner(files, version)
    return CommitResolution.COMMITTED if owner == commit_id else CommitResolution.LOST


def _owner(files: LakehouseFiles, version: int) -> str | None:
    """Return the ``commit_id`` of a live or sealed root: empty if the root has none, or None if there is no root."""
    path = files.roots.path(version)
    try:
        return decode_system_rows(files.storage.read(path), path).get(COMMIT_ID, "")
    except FileMissingError:
        return None


def _check_next(version: int, latest: Snapshot) -> None:
    if version <= latest.version:
        raise CorruptFileError(
            "the root of this version was deleted, so it is unknown which commit created it",
            path=latest.files.roots.path(version),
            version=version,
        )
    if version > latest.version + 1:
        raise VersionNotFoundError(
            f"version {version} cannot have been attempted: the latest version is {latest.version}", version=version
        )


@dataclass(frozen=True)
class Fence:
    """An empty commit that takes the next version, so that an earlier attempt cannot create it (commit.Committable).

    On a later version it would have no effect, so a rebase raises CommitConflictError.
    """

    fenced_commit_id: str

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft:
        message = f"takes version {base.version + 1}, so that commit {self.fenced_commit_id} can no longer succeed"
        return draft_of_tree(base, stamp, base.root, CommitInfo("fence", message))

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        raise CommitConflictError(
            f"version {base.version + 1} was taken before the fence",
            base_version=base.version,
            latest_version=latest.version,
        )
