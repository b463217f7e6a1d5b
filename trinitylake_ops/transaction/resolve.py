"""Finds out what became of a commit with an unknown outcome (docs/protocol.md, C4)."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from enum import StrEnum

from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import MAX_VERSION
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.transaction.commit import commit
from trinitylake_ops.transaction.draft import Draft, RootStamp, draft_of_tree
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.latest import latest_snapshot
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot


class CommitResolution(StrEnum):
    """The fate of one attempt to commit.

    COMMITTED: its root exists. LOST: another root has the name, so the commit will never land. UNDECIDED: there is no
    root; a request still on its way may create it.
    """

    COMMITTED = "committed"
    LOST = "lost"
    UNDECIDED = "undecided"


def resolve_commit(files: LakehouseFiles, version: int, commit_id: str, *, fence: bool = False) -> CommitResolution:
    """Say whether the attempt ``commit_id`` became version ``version``; CommitOutcomeUnknownError carries both.

    With ``fence`` an undecided attempt is decided: an empty commit takes the version, unless the attempt lands first.
    Raises InvalidInputError for a version that no commit makes, and for what is no commit id. Raises
    VersionNotFoundError for a version that cannot have been attempted yet, CorruptFileError where the root was deleted.
    Raises CommitOutcomeUnknownError when the fence itself got no answer, and StorageError.
    """
    try:
        uuid.UUID(commit_id)
    except (ValueError, AttributeError):
        raise InvalidInputError(f"{commit_id[:64]!r} is no commit id: give the one that the error named") from None
    if not 0 <= version <= MAX_VERSION:
        raise InvalidInputError(f"no commit makes version {version}: give one from 0 to {MAX_VERSION}")
    owner = _owner(files, version)
    if owner is None:
        # The latest version is found before the root is read again, so a root that lands in between is found.
        latest = latest_snapshot(files)
        owner = _owner(files, version)
        if owner is None:
            _check_next(version, latest)
            if not fence:
                return CommitResolution.UNDECIDED
            with contextlib.suppress(CommitConflictError):  # the version was taken: its root says which commit did
                commit(files, _Fence(commit_id), latest)
            owner = _owner(files, version)
    return CommitResolution.COMMITTED if owner == commit_id else CommitResolution.LOST


def _owner(files: LakehouseFiles, version: int) -> str | None:
    """Return the ``commit_id`` of a root, live or sealed.

    It is empty where the writer gave none, and None without a root.
    """
    path = files.roots.path(version)
    try:
        return decode_system_rows(files.storage.read(path), path).get(COMMIT_ID, "")
    except FileMissingError:
        return None


def _check_next(version: int, latest: Snapshot) -> None:
    if version <= latest.version:
        raise CorruptFileError(
            "the root of this version was deleted, so nobody can tell whose it was",
            path=latest.files.roots.path(version),
            version=version,
        )
    if version > latest.version + 1:
        raise VersionNotFoundError(
            f"version {version} cannot have been attempted: the latest version is {latest.version}", version=version
        )


@dataclass(frozen=True)
class _Fence:
    """A commit that changes nothing, but takes the next version."""

    fenced_commit_id: str

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft:
        message = f"takes version {base.version + 1}, so that commit {self.fenced_commit_id} can no longer land"
        return draft_of_tree(base, stamp, base.root, CommitInfo("fence", message))

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        raise CommitConflictError(
            f"version {base.version + 1} was taken before the fence",
            base_version=base.version,
            latest_version=latest.version,
        )
