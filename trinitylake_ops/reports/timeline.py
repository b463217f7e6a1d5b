"""The state of each version, which a report's chart, legend and table show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from trinitylake_ops.errors import VersionNotFoundError
from trinitylake_ops.format.definitions import ExpirationState, ExportState, LakehouseDef
from trinitylake_ops.format.file_names import parse_root_path
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.gc.survey import expired_versions
from trinitylake_ops.operations.retention import Verdict
from trinitylake_ops.operations.version_records import VersionRecord


class VersionState(StrEnum):
    """The state of a version, now or after a plan, in the order of the report."""

    LATEST = "latest"
    KEPT = "kept"
    EXPIRING = "expiring"
    EXPIRED = "expired"
    PURGED = "purged"
    DELETED = "deleted"
    UNREADABLE = "unreadable"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineVersion:
    """A version in a report."""

    #: The content of the version's root.
    record: VersionRecord
    #: Its state.
    state: VersionState
    #: The reason for its state.
    why: str
    #: The names of its exports.
    exports: tuple[str, ...] = ()
    #: Whether another program wrote it.
    is_foreign: bool = False

    @property
    def number(self) -> int:
        """The number of the version."""
        return self.record.version


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Versions in ascending order, without gaps."""

    versions: tuple[TimelineVersion, ...]
    #: The names of exports whose versions are not in the timeline.
    unplaced_exports: tuple[str, ...] = ()
    #: The number of versions of each state.
    counts: Mapping[VersionState, int] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The number of the oldest version."""
        return self.versions[0].number

    @property
    def latest(self) -> TimelineVersion:
        """The newest version."""
        return self.versions[-1]

    def at(self, version: int) -> TimelineVersion | None:
        """Return a version by number, or None if it is not in the timeline."""
        position = version - self.first
        return self.versions[position] if 0 <= position < len(self.versions) else None

    def of_state(self, state: VersionState) -> list[TimelineVersion]:
        """Return the versions with a state, in ascending order."""
        return [version for version in self.versions if version.state == state]


def timeline(
    records: Iterable[VersionRecord],
    definition: LakehouseDef | None,
    *,
    verdicts: Sequence[Verdict] = (),
    expired_now: Iterable[int] = (),
    latest: int | None = None,
) -> Timeline:
    """Return the states of versions.

    Versions that are missing from the sequence were deleted by another program. Versions between the last record and
    ``latest`` were not checked.

    Args:
        records: The content of the versions' roots.
        definition: The latest lakehouse definition, or None if it is damaged.
        verdicts: The decisions of a plan.
        expired_now: The versions that the plan has expired.
        latest: The latest version, required if there may be no records.

    Raises:
        CorruptFileError: If expirations in the definition are invalid.
    """
    ordered = sorted(records, key=lambda record: record.version)
    last = ordered[-1].version if ordered else -1
    outcomes = _VersionOutcomes(definition, verdicts, expired_now, last if latest is None else latest)
    commit_ids: set[str] = set()
    states: list[TimelineVersion] = []
    for record in ordered:
        states += map(_deleted, range(states[-1].number + 1 if states else record.version, record.version))
        is_known = record.is_readable and record.created_at_ms is not None
        is_foreign = is_known and (record.commit_id is None or record.commit_id in commit_ids)
        commit_ids.add(record.commit_id or "")
        states.append(outcomes.fate(record, is_foreign))
    states += map(_unknown_version, range(last + 1, outcomes.latest + 1))
    numbers = range(states[0].number, outcomes.latest + 1)
    counts = Counter(version.state for version in states)
    return Timeline(
        versions=tuple(states),
        unplaced_exports=tuple(name for name, version in _exports(definition) if version not in numbers),
        counts={state: counts[state] for state in VersionState if counts[state]},
    )


class _VersionOutcomes:
    """Determines the states of versions from the lakehouse definition and a plan."""

    def __init__(
        self,
        definition: LakehouseDef | None,
        verdicts: Sequence[Verdict],
        expired_now: Iterable[int],
        latest: int,
    ):
        self.latest = latest
        self._verdicts = {verdict.version: verdict for verdict in verdicts}
        self._expired_now = frozenset(expired_now)
        self._can_return, self._purging, self._purged = (
            VersionRanges() if definition is None else expired_versions(definition, (state,))
            for state in (ExpirationState.EXPIRED, ExpirationState.PURGING, ExpirationState.PURGED)
        )
        self._exports: dict[int, list[str]] = {}
        for name, version in _exports(definition):
            if version is not None:
                self._exports.setdefault(version, []).append(name)

    def fate(self, record: VersionRecord, is_foreign: bool) -> TimelineVersion:
        state, why = self._state(record)
        exports = tuple(self._exports.get(record.version, ()))
        return TimelineVersion(record=record, state=state, why=why, exports=exports, is_foreign=is_foreign)

    def _state(self, record: VersionRecord) -> tuple[VersionState, str]:
        version, verdict = record.version, self._verdicts.get(record.version)
        if not record.is_readable:
            return VersionState.UNREADABLE, "its root is missing or damaged"
        if record.is_sealed or version in self._purged:
            return VersionState.PURGED, "only its number and time are left"
        if version in self._purging:
            return VersionState.EXPIRED, "its purge has begun, so it cannot be restored"
        if version in self._can_return:
            return VersionState.EXPIRED, "undelete can restore it until its purge begins"
        if version in self._expired_now:
            return VersionState.EXPIRED, "expired just now; undelete can restore it until its purge begins"
        if version == self.latest:
            return VersionState.LATEST, "the version that readers get by default"
        if verdict is not None:
            return VersionState.EXPIRING if verdict.expires else VersionState.KEPT, verdict.reason
        names = self._exports.get(version, ())
        return VersionState.KEPT, f"exported as {_join_names(names)}" if names else "not expired"


def _deleted(version: int) -> TimelineVersion:
    return TimelineVersion(
        record=VersionRecord(version=version, is_readable=False),
        state=VersionState.DELETED,
        why="another program deleted its root",
    )


def _unknown_version(version: int) -> TimelineVersion:
    return TimelineVersion(
        record=VersionRecord(version=version, is_readable=False),
        state=VersionState.UNSEEN,
        why="not checked",
    )


def _exports(definition: LakehouseDef | None) -> list[tuple[str, int | None]]:
    """Return the names of exports, with a note if an export is unfinished, and their versions if known."""
    if definition is None:
        return []
    exports: dict[str, tuple[str, int | None]] = {
        name: (name, _version_at(location)) for name, location in definition.exported_snapshots.items()
    }
    for record in definition.exports:
        unfinished = " (unfinished)" if record.state == ExportState.COPYING else ""
        exports[record.name] = (record.name + unfinished, record.version)
    return [export for _, export in sorted(exports.items())]


def _version_at(location: str) -> int | None:
    """Return the version of an export that another program has recorded as the location of a root."""
    try:
        return parse_root_path(location)
    except VersionNotFoundError:
        return None


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
