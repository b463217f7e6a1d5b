"""What operations record in a lakehouse: commits of records, plan files and version records.

Each operation that goes over all roots reads it once, and keeps it for pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trinitylake_ops.errors import CommitConflictError, CorruptFileError
from trinitylake_ops.format.checksums import MAX_FILE_LIST_BYTES
from trinitylake_ops.format.definitions import ExpirationBatch, LakehouseDef
from trinitylake_ops.format.file_names import new_lakehouse_def_path, new_plan_path
from trinitylake_ops.format.keys import COMMIT_ID, CREATED_AT_MILLIS, SEALED_AT_MILLIS, decode_commit_info
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.operations.base import timed_digest
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.transaction.draft import Draft, RootStamp, Writes
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.history import rollback_from
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.undone import rolled_back_to

T = TypeVar("T")

MAX_ATTEMPTS = 5


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
class StateChange:
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


_LONGEST_MESSAGE_CHARS = 500


@dataclass(frozen=True)
class PlanFile:
    """Expiring versions and exports, and the files, with their sizes in bytes, that nothing else reached then."""

    operation: str
    base_version: int
    now_ms: int
    versions: str
    exports: tuple[str, ...]
    sizes_bytes: Mapping[str, int]

    @property
    def digest(self) -> str:
        """Return the digest of all of it."""
        files = sorted(self.sizes_bytes.items())
        return timed_digest(self.base_version, self.now_ms, self.operation, self.versions, list(self.exports), files)

    def to_bytes(self, path: str) -> bytes:
        """Return the file for ``path``, JSON."""
        content = {
            "operation": self.operation,
            "base_version": self.base_version,
            "now_ms": self.now_ms,
            "versions": self.versions,
            "exports": list(self.exports),
            "files": sorted(self.sizes_bytes.items()),
        }
        return encode_sealed_json(content, path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> PlanFile:
        """Read a file. Raises CorruptFileError."""
        try:
            content = decode_sealed_json(data, path)
            return cls(
                content["operation"],
                content["base_version"],
                content["now_ms"],
                content["versions"],
                tuple(content["exports"]),
                {str(file): int(size_bytes) for file, size_bytes in content["files"]},
            )
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CorruptFileError(f"{path!r} is no plan", path=path) from error


def write_plan_file(storage: Storage, plan: PlanFile) -> str:
    """Write a plan under a fresh name and return its path. Raises StorageError."""
    path = new_plan_path()
    create_fresh(storage, {path: plan.to_bytes(path)})
    return path


def read_plan_file(storage: Storage, batch: ExpirationBatch) -> PlanFile:
    """Read the plan of a batch. Raises CorruptFileError if it is not the one that was recorded, StorageError."""
    plan = PlanFile.from_bytes(storage.read(batch.plan_path, limit_bytes=MAX_FILE_LIST_BYTES), batch.plan_path)
    if plan.digest != batch.digest:
        raise CorruptFileError(
            f"the plan {batch.plan_path!r} is not the one that expired versions {batch.versions}", path=batch.plan_path
        )
    return plan


_LONGEST_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One version by its root. Values that its writer did not record are None, and so is the time of an unread root.

    ``rollback_from`` is the version before a rollback. ``rollback_to`` is the one, ``rollback_to`` the one whose
    content came back. Long texts are cut.
    """

    version: int
    created_at_ms: int | None = None
    operation: str | None = None
    message: str | None = None
    commit_id: str | None = None
    rollback_from: int | None = None
    rollback_to: int | None = None
    is_sealed: bool = False
    is_readable: bool = True

    @classmethod
    def of(cls, version: int, system: Mapping[str, str]) -> VersionRecord:
        """Return the record in the system rows of a root."""
        info = decode_commit_info(system)
        operation, message = (_text(info.get(name)) for name in ("operation", "message"))
        made = cls(
            version=version,
            created_at_ms=int(system[CREATED_AT_MILLIS]),
            operation=operation,
            message=message,
            commit_id=system.get(COMMIT_ID),
            is_sealed=SEALED_AT_MILLIS in system,
        )
        return made.with_rollback(rollback_from(version, system), info.get("properties"))

    def with_rollback(self, rollback_from: int | None, properties: object) -> VersionRecord:
        """Return the record of a rollback, where ``rollback_from`` is the version before."""
        if rollback_from is None:
            return self
        to = rolled_back_to(self.version, self.message, properties)
        return replace(self, rollback_from=rollback_from, rollback_to=to)


def _text(value: object) -> str | None:
    """Return a text of ``commit_info``, cut. None if another program wrote another type."""
    return value[:_LONGEST_TEXT_CHARS] if isinstance(value, str) and value else None
