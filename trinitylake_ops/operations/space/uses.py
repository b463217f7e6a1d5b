"""Which versions are kept for which reason, and when the files of the others can be reclaimed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from trinitylake_ops.errors import VersionNotFoundError
from trinitylake_ops.format.definitions import ExpirationState
from trinitylake_ops.format.file_names import parse_root_path
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.operations.gc.survey import Pointers, Survey, SurveyedRoot, is_lapsed
from trinitylake_ops.operations.retention import RetentionPolicy, judge, protected_ms
from trinitylake_ops.operations.space.model import Summary
from trinitylake_ops.operations.space.presence import Presence, export_number, intersects
from trinitylake_ops.operations.space.update import UpdatedSummary
from trinitylake_ops.operations.version_records import VersionRecord
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot, utc_of


class SpaceUse(StrEnum):
    """Why a file is kept. A file that several versions need has the first use that applies."""

    #: The latest version needs it.
    CURRENT = "current"
    #: A version that the retention rules keep needs it.
    OLDER = "older"
    #: Only exports need it.
    EXPORTS = "exports"
    #: Only clones need it, besides exports.
    CLONES = "clones"
    #: Only versions that can expire now need it.
    EXPIRABLE = "expirable"
    #: Only expired versions need it. A purge deletes it.
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class ExpiredBatch:
    """Expired versions that a purge deletes together."""

    versions: tuple[int, ...]
    purgeable_at: datetime


class VersionUses:
    """Decides on the use of files by the versions that reach them.

    Args:
        versions: The versions, and the numbers of exports, by use. The uses are in the order of their precedence.
        batches: The expired versions.
        now: The storage's time.
    """

    def __init__(self, versions: Mapping[SpaceUse, Sequence[int]], batches: Sequence[ExpiredBatch], now: datetime):
        self.versions = {use: tuple(sorted(versions.get(use, ()))) for use in SpaceUse}
        self.batches = batches
        self.now = now
        needed = (SpaceUse.CURRENT, SpaceUse.OLDER, SpaceUse.EXPORTS, SpaceUse.CLONES)
        self._needed = tuple(sorted({version for use in needed for version in self.versions[use]}))
        self._uses: dict[Presence, SpaceUse | None] = {}
        self._needed_by_use: dict[Presence, bool] = {}

    def of(self, reach: Presence) -> SpaceUse | None:
        """Return the use of files, or None if no version needs them any more."""
        if reach not in self._uses:
            matching = (use for use in SpaceUse if intersects(reach, self.versions[use]))
            self._uses[reach] = next(matching, None)
        return self._uses[reach]

    def is_kept_by_trim(self, use: Presence) -> bool:
        """Whether a version that is kept uses files, so that a trim does not drop the snapshots that contain them."""
        if use not in self._needed_by_use:
            self._needed_by_use[use] = intersects(use, self._needed)
        return self._needed_by_use[use]

    def purgeable_at(self, reach: Presence) -> datetime:
        """Return when a purge may delete the files of expired versions."""
        times = [batch.purgeable_at for batch in self.batches if intersects(reach, batch.versions)]
        return max(times, default=self.now)


def version_uses(
    lake: Lakehouse, base: Snapshot, updated: UpdatedSummary, listed: Mapping[str, FileInfo], now_ms: int
) -> VersionUses:
    """Apply the retention rules, the exports and the clones of a lakehouse to its versions.

    Args:
        lake: The lakehouse.
        base: The summarized version.
        updated: The summary.
        listed: The files with names that begin with ``_``, by path.
        now_ms: The storage's time, in milliseconds since the epoch.

    Raises:
        CorruptFileError: The settings contain invalid versions.
    """
    survey = _survey(lake, base, updated.summary, listed)
    versions: dict[SpaceUse, list[int]] = {use: [] for use in SpaceUse}
    versions[SpaceUse.CURRENT].append(base.version)
    policy = RetentionPolicy.of(base.definition)
    ages = survey.ages(now_ms)
    pins = {age.version: age.pins for age in ages}
    unpinned = [replace(age, pins=()) for age in ages]
    # Without rules nothing expires.
    expiring = (
        set()
        if policy.is_empty
        else {verdict.version for verdict in judge(unpinned, policy, now_ms) if verdict.expires}
    )
    for age in ages:
        use = SpaceUse.OLDER if age.version not in expiring else _pinned_use(pins[age.version])
        versions[use].append(age.version)
    _add_exports(lake, base, updated, now_ms, versions)
    grace_ms, batches = protected_ms(base.definition), []
    for batch in base.definition.expirations:
        if batch.state == ExpirationState.EXPIRED:
            expired_ms = max(batch.expired_at_millis, survey.written_ms.get(batch.expired_at_version, 0))
            expired = tuple(version for version in batch.ranges() if version in survey.roots)
            batches.append(ExpiredBatch(expired, utc_of(expired_ms + grace_ms)))
            versions[SpaceUse.EXPIRED] += expired
    return VersionUses(versions, batches, utc_of(now_ms))


def _pinned_use(pins: Sequence[str]) -> SpaceUse:
    if not pins:
        return SpaceUse.EXPIRABLE
    return SpaceUse.CLONES if all(pin.startswith("clone ") for pin in pins) else SpaceUse.EXPORTS


def _survey(lake: Lakehouse, base: Snapshot, summary: Summary, listed: Mapping[str, FileInfo]) -> Survey:
    """Return a survey with the times of the versions, but without their contents."""
    nothing = Pointers((), (), ())
    roots = {
        version: SurveyedRoot(
            version, created_ms, "", nothing, VersionRecord(version=version, is_sealed=version in summary.successor_ms)
        )
        for version, created_ms in (*summary.created_ms.items(), *summary.successor_ms.items())
    }
    written = {root_version(path): info.last_modified_ms for path, info in listed.items()}
    return Survey(
        lake,
        base,
        roots,
        {version: ms for version, ms in written.items() if version is not None and version <= base.version},
    )


def _add_exports(
    lake: Lakehouse, base: Snapshot, updated: UpdatedSummary, now_ms: int, versions: dict[SpaceUse, list[int]]
) -> None:
    """Add what the roots of exports reach, which need not be versions any more."""
    lapsed = {record.name for record in base.definition.exports if is_lapsed(record, now_ms)}
    for name, location in base.definition.exported_snapshots.items():
        path = to_location(lake.root, location)
        if is_uri(path):
            continue
        use = SpaceUse.EXPIRABLE if name in lapsed else SpaceUse.EXPORTS
        position = updated.summary.exports.get(path)
        if path in updated.exported_versions:
            versions[use].append(updated.exported_versions[path])
        if position is not None:
            versions[use].append(export_number(position))


def root_version(path: str) -> int | None:
    """Return the version of the path of a root; None for another path, and for a version beyond the maximum."""
    try:
        return parse_root_path(path)
    except VersionNotFoundError:
        return None
