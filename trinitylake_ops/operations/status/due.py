"""Which operations are due, and problems found while reading the status."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.format.file_names import VERIFIED_PREFIX
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.gc.batches import PurgeBatch
from trinitylake_ops.operations.gc.listing import acknowledged_versions
from trinitylake_ops.operations.gc.survey import expired_versions, is_lapsed, is_past
from trinitylake_ops.operations.hint import HintState
from trinitylake_ops.operations.policy.document import DEFAULT_POLICY, ExportTarget, MaintenancePolicy
from trinitylake_ops.operations.retention import RetentionPolicy, VersionAge, judge, span_text
from trinitylake_ops.operations.status.activity import Commits
from trinitylake_ops.versions.history import VersionInfo, version_infos
from trinitylake_ops.versions.lookup import clones_of
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms, utc_of

#: The number of oldest unpinned versions to read.
_OLDEST = 2
_MAX_NAMES = 3


class DueState(StrEnum):
    """Whether an operation is due."""

    DUE = "due"
    #: Due only if a plan has effects, because plans without effects leave no record.
    LOOK = "look"
    LATER = "later"
    FINE = "fine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """An operation that may be due."""

    what: str
    state: DueState
    why: str
    #: The command to run, without the root. If the operation has a plan, the command only makes the plan.
    command: str
    #: How long ago the operation became due.
    since_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DueAges:
    """The intervals after which operations are due again, in milliseconds; None for unused operations."""

    verify_ms: int | None = DEFAULT_POLICY.targets.verify_every_ms
    orphans_ms: int | None = DEFAULT_POLICY.targets.orphans_every_ms
    export_ms: int | None = None
    #: The export of the policy, which decides what exports count; None to count all.
    export_target: ExportTarget | None = None
    unfinished_ms: int = DEFAULT_POLICY.targets.unfinished_after_ms

    @classmethod
    def of(cls, policy: MaintenancePolicy) -> Self:
        """Return the intervals of a policy."""
        targets = policy.targets
        return cls(
            verify_ms=targets.verify_every_ms,
            orphans_ms=targets.orphans_every_ms,
            export_ms=None if targets.export is None else targets.export.every_ms,
            export_target=targets.export,
            unfinished_ms=targets.unfinished_after_ms,
        )


DEFAULT_AGES = DueAges()


@dataclass(frozen=True, kw_only=True)
class MaintenanceInputs:
    """The inputs of the rules, in addition to the settings."""

    #: The oldest versions that are neither expired nor pinned.
    oldest: tuple[VersionInfo, ...] = ()
    #: When version 0 was created, in milliseconds since the epoch.
    first_ms: int | None = None
    #: When the newest record of a verification was written, in milliseconds since the epoch.
    verified_ms: int | None = None

    @classmethod
    def of(cls, latest: Snapshot, commits: Commits, now_ms: int) -> MaintenanceInputs:
        """Read the inputs with at most three roots and one listing.

        Args:
            latest: The latest version.
            commits: The summary of the newest versions.
            now_ms: The storage's time, in milliseconds since the epoch.

        Raises:
            CorruptFileError: A root is damaged.
            StorageError: A storage request failed.
        """
        definition = latest.definition
        pinned = {record.version for record in definition.exports if not is_lapsed(record, now_ms)}
        excluded = expired_versions(definition) | VersionRanges.of(pinned)
        live = (VersionRanges(((0, latest.version),)) - excluded).ranges
        start = live[0][0] if live else latest.version
        wanted = sorted({0, *range(start, min(start + _OLDEST, latest.version + 1))})
        infos_by_version = {info.version: info for info in commits.infos}
        missing = [version for version in wanted if version not in infos_by_version]
        infos_by_version |= (
            {info.version: info for info in version_infos(latest.files, missing, latest)} if missing else {}
        )
        verified = [info.last_modified_ms for info in latest.files.roots.storage.list(VERIFIED_PREFIX)]
        return cls(
            oldest=tuple(
                infos_by_version[version] for version in wanted if version in infos_by_version and version >= start
            ),
            first_ms=epoch_ms(infos_by_version[0].created_at) if 0 in infos_by_version else None,
            verified_ms=max(verified, default=None),
        )


def due_of(
    definition: LakehouseDef,
    inputs: MaintenanceInputs,
    commits: Commits,
    batches: Sequence[PurgeBatch],
    ages: DueAges,
    now_ms: int,
) -> tuple[Due, ...]:
    """Return all operations with their states, in the order in which they should run.

    Args:
        definition: The lakehouse definition.
        inputs: The inputs that were read for the rules.
        commits: The summary of the newest versions.
        batches: The unpurged batches of expired versions.
        ages: The intervals of operations.
        now_ms: The storage's time, in milliseconds since the epoch.
    """
    return (
        _expiry(definition, inputs, commits, now_ms),
        _purge(batches, now_ms),
        _orphans(definition, inputs, ages, now_ms),
        _by_age("verify", "verify --incremental", inputs.verified_ms, inputs, ages.verify_ms, now_ms),
        _exports(definition, inputs, ages, now_ms),
        _clones(definition, ages, now_ms),
    )


def _superseded_at_ms(info: VersionInfo, successor: VersionInfo | None) -> int | None:
    """Return when the next version was committed, or None if unknown."""
    return None if successor is None else epoch_ms(max(info.created_at, successor.created_at))


def _expiry(definition: LakehouseDef, inputs: MaintenanceInputs, commits: Commits, now_ms: int) -> Due:
    """Apply the retention rules to the versions that were read. Reading fewer versions never expires more of them."""
    known = {info.version: info for info in (*commits.infos, *inputs.oldest)}
    infos = {version: info for version, info in known.items() if info.state == "live"}
    pinned = {record.version for record in definition.exports if not is_lapsed(record, now_ms)}
    versions = [
        VersionAge(
            version=number,
            created_at_ms=epoch_ms(info.created_at),
            superseded_at_ms=_superseded_at_ms(info, known.get(number + 1)),
            pins=("an export",) if number in pinned else (),
        )
        for number, info in infos.items()
    ]
    reset = max((number for number, info in infos.items() if info.is_clock_reset), default=-1)
    versions = [
        age.settled(epoch_ms(infos[reset].created_at), now_ms) if age.version < reset else age for age in versions
    ]
    policy = RetentionPolicy.of(definition)
    if policy.is_empty or not versions:
        why = "no version could be read" if not versions else "the settings contain no retention rule"
        return Due(what="expiry", state=DueState.LOOK, why=why, command="expire")
    expiring = [verdict.version for verdict in judge(versions, policy, now_ms) if verdict.expires]
    if not expiring:
        return Due(what="expiry", state=DueState.FINE, why="no version is old enough", command="")
    oldest = min((age for age in versions if age.version in expiring), key=lambda age: age.version)
    waited_ms = now_ms - (oldest.superseded_at_ms or now_ms) - policy.maximum_age_ms
    return Due(
        what="expiry",
        state=DueState.DUE,
        why=f"version {oldest.version} can expire since {span_text(max(0, waited_ms))}",
        command="expire",
        since_seconds=max(0, waited_ms) / 1000,
    )


def _purge(batches: Sequence[PurgeBatch], now_ms: int) -> Due:
    if not batches:
        return Due(what="purge", state=DueState.FINE, why="no expired version is waiting for it", command="")
    due = [batch for batch in batches if batch.is_due]
    if not due:
        next_ms = min(epoch_ms(batch.purgeable_at) for batch in batches)
        why = f"expired versions can be purged in {span_text(next_ms - now_ms)}"
        return Due(what="purge", state=DueState.LATER, why=why, command="purge")
    waited_ms = now_ms - min(epoch_ms(batch.purgeable_at) for batch in due)
    ranges = ",".join(batch.versions for batch in due)
    why = f"versions {_truncate(ranges)} can be purged since {span_text(max(0, waited_ms))}"
    since_seconds = max(0, waited_ms) / 1000
    return Due(what="purge", state=DueState.DUE, why=why, command="purge", since_seconds=since_seconds)


def _orphans(definition: LakehouseDef, inputs: MaintenanceInputs, ages: DueAges, now_ms: int) -> Due:
    """Report the age of files last checked for orphans. Only a listing can find newer orphans."""
    removed_ms = definition.orphans_removed_before_millis or None
    # A removal records the age of the files that it checked, not the time of the removal.
    template = "files older than {} were checked"
    due = _by_age("orphans", "orphans", removed_ms, inputs, ages.orphans_ms, now_ms, template)
    if due.state != DueState.DUE:
        return due
    return replace(due, state=DueState.LOOK, why=due.why.replace("due every", "check due every"))


def _by_age(
    what: str,
    command: str,
    last_ms: int | None,
    inputs: MaintenanceInputs,
    max_ms: int | None,
    now_ms: int,
    template: str = "the last was {} ago",
) -> Due:
    """Return whether an operation that last ran at ``last_ms``, or never ran, is due again."""
    begun_ms = last_ms if last_ms is not None else inputs.first_ms
    age_ms = None if begun_ms is None else max(0, now_ms - begun_ms)
    happened = "" if last_ms is None or age_ms is None else template.format(span_text(age_ms))
    if max_ms is None:
        return Due(what=what, state=DueState.FINE, why=happened or "none so far", command="")
    every = f"due every {span_text(max_ms)}"
    if age_ms is not None and age_ms <= max_ms:
        return Due(what=what, state=DueState.FINE, why=f"{happened or 'the lakehouse is new'}; {every}", command="")
    since_seconds = None if age_ms is None else (age_ms - max_ms) / 1000
    why = f"{happened or 'none so far'}; {every}"
    return Due(what=what, state=DueState.DUE, why=why, command=command, since_seconds=since_seconds)


def _exports(definition: LakehouseDef, inputs: MaintenanceInputs, ages: DueAges, now_ms: int) -> Due:
    exports = [record for record in definition.exports if not record.clone_id]
    overdue = [record.name for record in exports if is_past(record, now_ms)]
    if overdue:
        why = f"{_named(overdue)} is overdue"
        return Due(what="exports", state=DueState.DUE, why=why, command="prune-exports")
    interrupted = list(_interrupted(exports, ages, now_ms))
    if interrupted:
        why = f"{_named(interrupted)} was started and is not finished"
        return Due(what="exports", state=DueState.DUE, why=why, command="exports")
    command = f"export kept-{utc_of(now_ms):%Y-%m-%d}"
    newest_ms = newest_export_ms(definition, ages.export_target)
    return _by_age("exports", command, newest_ms, inputs, ages.export_ms, now_ms)


def newest_export_ms(definition: LakehouseDef, target: ExportTarget | None) -> int | None:
    """Return when the newest complete export was created, in milliseconds since the epoch; None if there is none.

    Args:
        definition: The settings of the lakehouse.
        target: The export of the policy. Only exports of all namespaces to the same root, with at least the same level,
            count. None counts all exports.
    """
    complete = (
        record.created_at_millis
        for record in definition.exports
        if record.state == ExportState.COMPLETE and not record.clone_id and _meets(record, target)
    )
    return max(complete, default=None)


def _meets(record: ExportRecord, target: ExportTarget | None) -> bool:
    if target is None:
        return True
    root = "" if target.target is None else normalize_root_uri(target.target)
    is_same_root = record.target_uri == root
    return is_same_root and record.level >= ExportLevel[target.level.upper()] and not record.namespaces


def _clones(definition: LakehouseDef, ages: DueAges, now_ms: int) -> Due:
    clones = clones_of(definition)
    overdue = [record.name for record in clones if is_past(record, now_ms)]
    if overdue:
        why, command = f"{_named(overdue)} is overdue", f"drop-clone {shlex.quote(overdue[0])}"
        return Due(what="clones", state=DueState.DUE, why=why, command=command)
    interrupted = list(_interrupted(clones, ages, now_ms))
    if interrupted:
        why, command = (
            f"{_named(interrupted)} was started and is not finished",
            f"drop-clone {shlex.quote(interrupted[0])}",
        )
        return Due(what="clones", state=DueState.DUE, why=why, command=command)
    return Due(what="clones", state=DueState.FINE, why=f"{len(clones) or 'no'} clones", command="")


def _interrupted(records: Sequence[ExportRecord], ages: DueAges, now_ms: int) -> Iterator[str]:
    for record in records:
        if record.state == ExportState.COPYING and now_ms - record.created_at_millis > ages.unfinished_ms:
            yield record.name


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return _truncate(", ".join(names[:_MAX_NAMES])) + (f" and {more} more" if more > 0 else "")


def _truncate(text: str, max_chars: int = 80) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


_FUTURE_MS = 5 * 60 * 1000


@dataclass(frozen=True, slots=True)
class StatusFinding:
    """A problem, with its severity (error or warning)."""

    severity: str
    message: str
    #: The command that fixes or explains the problem, without the root.
    command: str


def status_findings(
    definition: LakehouseDef, commits: Commits, hint: HintState | None, now_ms: int
) -> tuple[StatusFinding, ...]:
    """Return problems with the hint and the newest versions, except problems that an operator acknowledged.

    Args:
        definition: The lakehouse definition.
        commits: The summary of the newest versions.
        hint: The state of the hint; None if it could not be read.
        now_ms: The storage's time, in milliseconds since the epoch.
    """
    acknowledged = acknowledged_versions(definition)
    findings = []
    if hint not in (None, HintState.RIGHT):
        findings.append(
            StatusFinding("warning", f"the hint is {hint.value}, which costs readers requests", "repair-hint")
        )
    for version in commits.backwards:
        if version not in acknowledged:
            message = f"version {version} is not newer than its predecessor"
            findings.append(StatusFinding("warning", message, f"reconcile --acknowledge {version}"))
    foreign = [version for version in commits.foreign if version not in acknowledged]
    if foreign:
        message = f"another program committed {len(foreign)} of the newest versions, for example {foreign[0]}"
        findings.append(StatusFinding("warning", message, "log"))
    newest = commits.newest
    if newest is not None and newest.created_at.timestamp() * 1000 > now_ms + _FUTURE_MS:
        findings.append(
            StatusFinding("warning", "the latest version is from the future, because a writer's clock is wrong", "log")
        )
    return tuple(findings)
