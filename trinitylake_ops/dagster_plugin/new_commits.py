"""Commits since a cursor: bounded work, at least once, and gaps are reported (docs/dagster.md, "Sensors")."""

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

#: Whose run made a version: one of this code location that ended well, or still runs, or of nobody here. A neighbor
#: told only a part of it: a run of another code location of this Dagster instance, or one that was killed.
RunOrigin: TypeAlias = Literal["own", "running", "neighbor", "other"]
_RUN_ORIGINS: tuple[RunOrigin, ...] = ("other", "neighbor", "running", "own")
#: So many of the last versions that were made by running runs are looked at again, when these ended.
_MOST_RUNNING = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far commits of a lakehouse were reported: all up to ``version``.

    A list of changes may be too long for one tick. Of those between ``version`` and ``until``, the first ``reported``
    were reported. ``requested`` is the version that was the latest when a run was last requested. ``running`` are
    versions up to ``version`` whose runs had not ended: one that is killed does not report its version itself.
    """

    lakehouse_id: str
    version: int
    until: int | None = None
    reported: int = 0
    requested: int = -1
    running: tuple[int, ...] = ()

    def encode(self) -> str:
        """Return the cursor as text."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, text: str) -> Cursor:
        """Read a cursor. Raises InvalidInputError for a text that is no cursor."""
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
                raise InvalidInputError("it is not of this format")
            cursor = cls(**{**fields, "running": tuple(fields.pop("running", ()))})
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInputError(f"it cannot be read: {error}") from error
        until = 0 if cursor.until is None else cursor.until
        numbers = (cursor.version, cursor.reported, cursor.requested, until)
        least = (0, 0, -1, 0)
        is_known = len(cursor.running) <= _MOST_RUNNING and all(
            type(one) is int and 0 < one <= cursor.version for one in cursor.running
        )
        is_right = is_known and all(
            type(number) is int and number >= low for number, low in zip(numbers, least, strict=True)
        )
        if not is_right or type(cursor.lakehouse_id) is not str:
            raise InvalidInputError("it holds values of the wrong kind")
        return cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one look: versions, changed objects, and seconds until it begins nothing more."""

    versions: int
    changes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRange:
    """Versions ``first`` to ``last`` that others committed, and the changes of all of them together.

    ``by_neighbors`` says that runs of this instance made all of them, and told a part of it.
    ``ends`` are the version before the first, as far as it can be read, and the last. ``commits`` describe each of them
    whose root is there.
    """

    first: int
    last: int
    ends: tuple[Snapshot, Snapshot]
    changes: tuple[Change, ...]
    commits: tuple[VersionInfo, ...]
    by_neighbors: bool = False

    @property
    def versions(self) -> str:
        """The versions, as a range."""
        return str(VersionRanges(((self.first, self.last),)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatch:
    """The result of one look, up to ``cursor``, from which the next one goes on.

    ``notes`` say what could not be found out. ``own`` counts the versions of our own runs. ``lag_versions`` and
    ``lag_ms`` tell how far the cursor was behind before: versions, and the age of the first of them. ``is_run_due``
    says that the latest version has changes for which no run was requested.
    """

    head: Snapshot
    cursor: Cursor
    commit_ranges: tuple[CommitRange, ...] = ()
    notes: tuple[str, ...] = ()
    own: int = 0
    lag_versions: int = 0
    lag_ms: int = 0
    is_run_due: bool = False

    @property
    def versions_left(self) -> int:
        """How far the new cursor is behind the latest version."""
        return self.head.version - self.cursor.version


def poll_commits(
    lake: Lakehouse, cursor_text: str | None, origin_of: Callable[[str], RunOrigin], limits: Limits
) -> CommitBatch:
    """Return the commits of others since a cursor, as far as the limits allow. ``origin_of`` a run says whose it is.

    At least one version is returned if there is any. Without a cursor there is no news: the cursor begins at the latest
    version. The latest version, with a note, replaces a cursor that cannot be read, is of another lakehouse or beyond
    the latest version. Raises LakehouseNotFoundError, VersionExpiredError for a version that is purged meanwhile,
    CorruptFileError, StorageError.
    """
    head = lake.snapshot()
    if not cursor_text:
        return CommitBatch(head=head, cursor=_at(head, requested=head.version))
    try:
        cursor = Cursor.decode(cursor_text)
    except InvalidInputError as error:
        note = f"the cursor was lost, as {error.message}: commits before version {head.version} may not be reported"
        return CommitBatch(head=head, cursor=_at(head, requested=head.version), notes=(note,), is_run_due=True)
    seen = max(cursor.version, cursor.until or 0, cursor.requested)
    if cursor.lakehouse_id != head.definition.id or seen > head.version:
        note = (
            f"the lakehouse was replaced: version {seen} was seen, and now version {head.version} of"
            f" {'this' if cursor.lakehouse_id == head.definition.id else 'another'} lakehouse is the latest; what"
            " differs is not reported"
        )
        return CommitBatch(head=head, cursor=_at(head, requested=head.version), notes=(note,), is_run_due=True)
    if cursor.version == head.version and not cursor.running:
        return CommitBatch(head=head, cursor=cursor)
    return _CommitPoll(lake, head, origin_of, limits).since(cursor)


def _at(head: Snapshot, requested: int) -> Cursor:
    return Cursor(lakehouse_id=head.definition.id, version=head.version, requested=requested)


@dataclass
class _CommitPoll:
    """One look at the versions up to ``head``."""

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
        self._makers: dict[str, RunOrigin] = {}

    def since(self, cursor: Cursor) -> CommitBatch:
        """Return the news since a cursor."""
        self._recheck_killed_runs(cursor.running)
        if cursor.version == self.head.version:
            looked = replace(cursor, running=tuple(self.running))
            return CommitBatch(
                head=self.head, cursor=looked, commit_ranges=tuple(self.commit_ranges), notes=tuple(self.notes)
            )
        base = self._readable_from(cursor.version)
        if base.version > cursor.version:
            self.notes.append(
                f"version {cursor.version} cannot be read any more: what versions"
                f" {VersionRanges(((cursor.version + 1, base.version),))} changed is not reported"
            )
        infos = self._infos(base)
        lag_ms = self._lag_ms(infos)
        reached = self._report(base, infos, cursor)
        by_others = [commit_range.last for commit_range in self.commit_ranges if not commit_range.by_neighbors]
        is_news = bool(self.notes or by_others)
        newest = max(by_others, default=base.version)
        is_run_due = is_news and newest > cursor.requested
        return CommitBatch(
            head=self.head,
            cursor=replace(
                reached,
                requested=self.head.version if is_run_due else cursor.requested,
                running=tuple(self.running[-_MOST_RUNNING:]),
            ),
            commit_ranges=tuple(self.commit_ranges),
            notes=tuple(self.notes),
            own=self.own,
            lag_versions=self.head.version - cursor.version,
            lag_ms=lag_ms,
            is_run_due=is_run_due,
        )

    def _recheck_killed_runs(self, versions: Sequence[int]) -> None:
        """Take what runs committed that have been killed since: what they did not report themselves is told now."""
        for info in version_infos(self.lake.files, versions, self.head):
            maker = self._run_origin(info)
            if maker == "running":
                self.running.append(info.version)
            if maker in ("own", "running"):
                continue
            try:
                before, after = (self.lake.snapshot(one, latest=self.head) for one in (info.version - 1, info.version))
            except (VersionExpiredError, VersionNotFoundError):
                self.notes.append(f"version {info.version} cannot be read any more, and its run was cut off")
                continue
            changes = diff_snapshots(before, after)
            if len(changes) > self.limits.changes:
                self.notes.append(f"version {info.version} changed {len(changes)} objects, and its run was cut off")
            found = CommitRange(
                first=info.version,
                last=info.version,
                ends=(before, after),
                changes=tuple(changes[: self.limits.changes]),
                commits=(info,),
                by_neighbors=True,
            )
            self.commit_ranges.append(found)

    def _readable_from(self, version: int) -> Snapshot:
        """Return a version, or the first one after it that can be opened. It is the latest if that is hard to find."""
        behind = VersionRanges(((version, self.head.version),)) - expired_versions(self.head.definition)
        try:
            return self.lake.snapshot(next(iter(behind)), latest=self.head)
        except (VersionExpiredError, VersionNotFoundError):  # by other programs
            return self.head

    def _infos(self, base: Snapshot) -> dict[int, VersionInfo | None]:
        """Return the records of the versions after ``base``, as many as one look may read, None if a root is gone."""
        first = base.version + 1
        last = min(self.head.version, base.version + self.limits.versions)
        found: dict[int, VersionInfo | None] = {}
        for info in version_infos(self.lake.files, range(first, last + 1), self.head, base):
            found[info.version] = info
            if time.monotonic() >= self._ends_s:
                last = info.version
                break
        return {version: found.get(version) for version in range(first, last + 1)}

    def _lag_ms(self, infos: Mapping[int, VersionInfo | None]) -> int:
        created_ms = [epoch_ms(info.created_at) for info in infos.values() if info is not None]
        if not created_ms:
            created_ms = [self.head.created_at_ms]
        return max(0, self.lake.storage.now_ms() - min(created_ms))

    def _run_origin(self, info: VersionInfo | None) -> RunOrigin:
        """Return who made a version. If it has several transactions, all of them count."""
        if info is None:
            return "other"
        runs = [own.run_id for own in info.transactions] or [info.run_id]
        makers = {self._origin_of(run) for run in runs}
        return next(maker for maker in _RUN_ORIGINS if maker in makers)

    def _origin_of(self, run_id: str | None) -> RunOrigin:
        if run_id is None:
            return "other"
        if run_id not in self._makers:
            self._makers[run_id] = self.origin_of(run_id)
        return self._makers[run_id]

    def _report(self, base: Snapshot, infos: Mapping[int, VersionInfo | None], cursor: Cursor) -> Cursor:
        """Go on from ``base`` stretch by stretch, each of own or of others' versions. Returns how far it came."""
        found_makers = {version: self._run_origin(info) for version, info in infos.items()}
        makers = {one: "own" if maker == "running" else maker for one, maker in found_makers.items()}
        reached = Cursor(lakehouse_id=cursor.lakehouse_id, version=base.version)
        until, skipped = (cursor.until, cursor.reported) if base.version == cursor.version else (None, 0)
        last = max((*infos, until or 0), default=base.version)  # expired versions lead beyond those looked at
        room = self.limits.changes
        while base.version < last and room > 0 and (reached.version == cursor.version or not self._is_late()):
            first = base.version + 1
            end = first
            while end < last and (end < (until or 0) or (until is None and makers[end + 1] == makers[first])):
                end += 1
            target = self._readable_from(end)
            if makers[first] == "own" and until is None and target.version == end:
                self.own += end + 1 - first
                self.running += [one for one in range(first, end + 1) if found_makers[one] == "running"]
            else:
                skipped = skipped if target.version == until else 0
                changes = diff_snapshots(base, target)[skipped:]
                commits = [info for version in range(first, target.version + 1) if (info := infos.get(version))]
                listed = tuple(changes[:room])
                met = {makers.get(version, "other") for version in range(first, target.version + 1)}
                found = CommitRange(
                    first=first,
                    last=target.version,
                    ends=(base, target),
                    changes=listed,
                    commits=tuple(commits),
                    by_neighbors=met == {"neighbor"},
                )
                self.commit_ranges.append(found)
                if len(changes) > room:
                    return replace(reached, until=target.version, reported=skipped + room)
                room -= len(changes)
            until, skipped = None, 0
            base = target
            reached = replace(reached, version=base.version)
        return reached

    def _is_late(self) -> bool:
        return time.monotonic() >= self._ends_s
