"""Commits since a cursor, with bounded work, at-least-once delivery and reported gaps (docs/dagster/automation.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeAlias

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.gc.survey import expired_versions
from trinitylake_ops.versions.history import Change, VersionInfo, diff_snapshots, version_infos
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms

_FORMAT = 1

#: Origin of a version: a run of this code location that succeeded (``own``) or is in progress (``running``); a run that
#: reported only some of its changes, because it belongs to another code location of this Dagster instance or did not
#: succeed (``neighbor``); or a writer outside of this Dagster instance (``other``).
RunOrigin: TypeAlias = Literal["own", "running", "neighbor", "other"]
_RUN_ORIGINS: tuple[RunOrigin, ...] = ("other", "neighbor", "running", "own")
#: Maximum number of versions committed by runs in progress that are checked again after the runs have ended.
_MAX_RUNNING = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The position up to which commits of a lakehouse were reported."""

    lakehouse_id: str
    #: All versions up to this one were reported.
    version: int
    #: End of a version range with too many changes for one tick, or None.
    until: int | None = None
    #: Number of changes between ``version`` and ``until`` that were reported.
    reported: int = 0
    #: The latest version when a run was last requested.
    requested: int = -1
    #: Versions up to ``version`` whose runs had not ended. A run that is killed does not report its versions itself.
    running: tuple[int, ...] = ()

    def encode(self) -> str:
        """Serialize the cursor."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, text: str) -> Cursor:
        """Parse a cursor. Raises InvalidInputError if the text is not a valid cursor."""
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
                raise InvalidInputError("it has an unknown format")
            cursor = cls(**{**fields, "running": tuple(fields.pop("running", ()))})
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInputError(f"it cannot be decoded: {error}") from error
        until = 0 if cursor.until is None else cursor.until
        numbers = (cursor.version, cursor.reported, cursor.requested, until)
        minimums = (0, 0, -1, 0)
        has_valid_running = len(cursor.running) <= _MAX_RUNNING and all(
            type(version) is int and 0 < version <= cursor.version for version in cursor.running
        )
        is_valid = has_valid_running and all(
            type(number) is int and number >= minimum for number, minimum in zip(numbers, minimums, strict=True)
        )
        if not is_valid or type(cursor.lakehouse_id) is not str:
            raise InvalidInputError("it contains invalid values")
        return cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one poll."""

    #: Maximum number of versions to read.
    versions: int
    #: Maximum number of changed objects to report.
    changes: int
    #: Time after which no further work is started.
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRange:
    """A range of versions to report, with their combined changes."""

    #: The first version of the range.
    first: int
    #: The last version of the range.
    last: int
    #: The readable version before the range, and the last version of the range.
    ends: tuple[Snapshot, Snapshot]
    changes: tuple[Change, ...]
    #: The records of the versions whose roots exist.
    commits: tuple[VersionInfo, ...]
    #: Whether all versions were committed by runs of this Dagster instance that reported some of their changes.
    by_neighbors: bool = False

    @property
    def versions(self) -> str:
        """The range as text."""
        return str(VersionRanges(((self.first, self.last),)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatch:
    """The result of one poll."""

    head: Snapshot
    #: The position from which the next poll continues.
    cursor: Cursor
    commit_ranges: tuple[CommitRange, ...] = ()
    #: Descriptions of changes that could not be determined.
    notes: tuple[str, ...] = ()
    #: Number of versions committed by runs of this code location.
    own: int = 0
    #: Number of versions between the previous cursor and the latest version.
    lag_versions: int = 0
    #: Age of the oldest of these versions.
    lag_ms: int = 0
    #: Whether there are changes for which no run was requested.
    is_run_due: bool = False

    @property
    def versions_left(self) -> int:
        """The number of versions between the new cursor and the latest version."""
        return self.head.version - self.cursor.version


def poll_commits(
    lake: Lakehouse, cursor_text: str | None, origin_of: Callable[[str], RunOrigin], limits: Limits
) -> CommitBatch:
    """Return the commits since a cursor that were not made by this code location's runs, within limits.

    Each poll covers at least one new version, if there is any. The first poll, without a cursor, reports nothing and
    starts at the latest version. A cursor that is invalid, belongs to another lakehouse or is ahead of the latest
    version is replaced by the latest version, and a note reports the gap.

    Args:
        lake: The lakehouse.
        cursor_text: The serialized cursor of the previous poll, or None.
        origin_of: Classifies a run by its id.
        limits: The limits of the poll.

    Raises:
        LakehouseNotFoundError: The lakehouse does not exist.
        VersionExpiredError: A version was purged during the poll.
        CorruptFileError: A file is corrupt.
        StorageError: A storage request failed.
    """
    head = lake.snapshot()
    if not cursor_text:
        return CommitBatch(head=head, cursor=_at(head, requested=head.version))
    try:
        cursor = Cursor.decode(cursor_text)
    except InvalidInputError as error:
        note = f"the cursor cannot be read: {error.message}; commits before version {head.version} may not be reported"
        return CommitBatch(head=head, cursor=_at(head, requested=head.version), notes=(note,), is_run_due=True)
    processed = max(cursor.version, cursor.until or 0, cursor.requested)
    if cursor.lakehouse_id != head.definition.id or processed > head.version:
        note = (
            f"the lakehouse was replaced: version {processed} was read earlier, but the latest version is now"
            f" {head.version} of {'this' if cursor.lakehouse_id == head.definition.id else 'another'} lakehouse; the"
            " differences are not reported"
        )
        return CommitBatch(head=head, cursor=_at(head, requested=head.version), notes=(note,), is_run_due=True)
    if cursor.version == head.version and not cursor.running:
        return CommitBatch(head=head, cursor=cursor)
    return _CommitPoll(lake, head, origin_of, limits).since(cursor)


def _at(head: Snapshot, requested: int) -> Cursor:
    return Cursor(lakehouse_id=head.definition.id, version=head.version, requested=requested)


@dataclass
class _CommitPoll:
    """One poll of the versions up to ``head``."""

    lake: Lakehouse
    head: Snapshot
    origin_of: Callable[[str], RunOrigin]
    limits: Limits
    notes: list[str] = field(default_factory=list)
    commit_ranges: list[CommitRange] = field(default_factory=list)
    own: int = 0
    running: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends_s = time.monotonic() + self.limits.seconds
        self._origins: dict[str, RunOrigin] = {}

    def since(self, cursor: Cursor) -> CommitBatch:
        """Return the commits since a cursor."""
        self._recheck_killed_runs(cursor.running)
        if cursor.version == self.head.version:
            new_cursor = replace(cursor, running=tuple(self.running))
            return CommitBatch(
                head=self.head, cursor=new_cursor, commit_ranges=tuple(self.commit_ranges), notes=tuple(self.notes)
            )
        base = self._readable_from(cursor.version)
        if base.version > cursor.version:
            self.notes.append(
                f"version {cursor.version} can no longer be read; the changes of versions"
                f" {VersionRanges(((cursor.version + 1, base.version),))} are not reported"
            )
        infos = self._infos(base)
        lag_ms = self._lag_ms(infos)
        reached = self._report(base, infos, cursor)
        by_others = [commit_range.last for commit_range in self.commit_ranges if not commit_range.by_neighbors]
        has_changes = bool(self.notes or by_others)
        newest = max(by_others, default=base.version)
        is_run_due = has_changes and newest > cursor.requested
        return CommitBatch(
            head=self.head,
            cursor=replace(
                reached,
                requested=self.head.version if is_run_due else cursor.requested,
                running=tuple(self.running[-_MAX_RUNNING:]),
            ),
            commit_ranges=tuple(self.commit_ranges),
            notes=tuple(self.notes),
            own=self.own,
            lag_versions=self.head.version - cursor.version,
            lag_ms=lag_ms,
            is_run_due=is_run_due,
        )

    def _recheck_killed_runs(self, versions: Sequence[int]) -> None:
        """Add the versions of runs that were killed since the previous poll, because their reports may be partial."""
        for info in version_infos(self.lake.files, versions, self.head):
            origin = self._run_origin(info)
            if origin == "running":
                self.running.append(info.version)
            if origin in ("own", "running"):
                continue
            try:
                before, after = (
                    self.lake.snapshot(version, latest=self.head) for version in (info.version - 1, info.version)
                )
            except (VersionExpiredError, VersionNotFoundError):
                self.notes.append(f"version {info.version} can no longer be read, and its run was interrupted")
                continue
            changes = diff_snapshots(before, after)
            if len(changes) > self.limits.changes:
                self.notes.append(
                    f"version {info.version} changed {len(changes)} objects, and its run was interrupted; only the"
                    f" first {self.limits.changes} are reported"
                )
            commit_range = CommitRange(
                first=info.version,
                last=info.version,
                ends=(before, after),
                changes=tuple(changes[: self.limits.changes]),
                commits=(info,),
                by_neighbors=True,
            )
            self.commit_ranges.append(commit_range)

    def _readable_from(self, version: int) -> Snapshot:
        """Return a version, or else the first readable version after it, or else the latest version."""
        candidates = VersionRanges(((version, self.head.version),)) - expired_versions(self.head.definition)
        try:
            return self.lake.snapshot(next(iter(candidates)), latest=self.head)
        except (VersionExpiredError, VersionNotFoundError):  # expired or deleted by another program
            return self.head

    def _infos(self, base: Snapshot) -> dict[int, VersionInfo | None]:
        """Return the records of the versions after ``base`` within the limits, or None for a version without a root."""
        first = base.version + 1
        last = min(self.head.version, base.version + self.limits.versions)
        infos: dict[int, VersionInfo | None] = {}
        for info in version_infos(self.lake.files, range(first, last + 1), self.head, base):
            infos[info.version] = info
            if time.monotonic() >= self._ends_s:
                last = info.version
                break
        return {version: infos.get(version) for version in range(first, last + 1)}

    def _lag_ms(self, infos: Mapping[int, VersionInfo | None]) -> int:
        created_ms = [epoch_ms(info.created_at) for info in infos.values() if info is not None]
        if not created_ms:
            created_ms = [self.head.created_at_ms]
        return max(0, self.lake.storage.now_ms() - min(created_ms))

    def _run_origin(self, info: VersionInfo | None) -> RunOrigin:
        """Return the origin of a version: the origin of a transaction that comes first in ``_RUN_ORIGINS``."""
        if info is None:
            return "other"
        runs = [transaction.run_id for transaction in info.transactions] or [info.run_id]
        origins = {self._origin_of(run) for run in runs}
        return next(origin for origin in _RUN_ORIGINS if origin in origins)

    def _origin_of(self, run_id: str | None) -> RunOrigin:
        if run_id is None:
            return "other"
        if run_id not in self._origins:
            self._origins[run_id] = self.origin_of(run_id)
        return self._origins[run_id]

    def _report(self, base: Snapshot, infos: Mapping[int, VersionInfo | None], cursor: Cursor) -> Cursor:
        """Report the versions after ``base`` in ranges of the same origin. Return the new cursor."""
        origins = {version: self._run_origin(info) for version, info in infos.items()}
        committers = {version: "own" if origin == "running" else origin for version, origin in origins.items()}
        reached = Cursor(lakehouse_id=cursor.lakehouse_id, version=base.version)
        until, skipped = (cursor.until, cursor.reported) if base.version == cursor.version else (None, 0)
        last = max((*infos, until or 0), default=base.version)  # a readable version may be beyond the versions in infos
        room = self.limits.changes
        while base.version < last and room > 0 and (reached.version == cursor.version or not self._is_late()):
            first = base.version + 1
            end = first
            while end < last and (end < (until or 0) or (until is None and committers[end + 1] == committers[first])):
                end += 1
            target = self._readable_from(end)
            if committers[first] == "own" and until is None and target.version == end:
                self.own += end + 1 - first
                self.running += [version for version in range(first, end + 1) if origins[version] == "running"]
            else:
                skipped = skipped if target.version == until else 0
                changes = diff_snapshots(base, target)[skipped:]
                commits = [info for version in range(first, target.version + 1) if (info := infos.get(version))]
                listed = tuple(changes[:room])
                range_committers = {committers.get(version, "other") for version in range(first, target.version + 1)}
                commit_range = CommitRange(
                    first=first,
                    last=target.version,
                    ends=(base, target),
                    changes=listed,
                    commits=tuple(commits),
                    by_neighbors=range_committers == {"neighbor"},
                )
                self.commit_ranges.append(commit_range)
                if len(changes) > room:
                    return replace(reached, until=target.version, reported=skipped + room)
                room -= len(changes)
            until, skipped = None, 0
            base = target
            reached = replace(reached, version=base.version)
        return reached

    def _is_late(self) -> bool:
        return time.monotonic() >= self._ends_s
