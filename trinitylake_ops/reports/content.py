"""The content of a report, without its layout. Text that other programs wrote is clipped and escaped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.operations.gc.unreached import ReclaimedFiles
from trinitylake_ops.operations.verification.verify import Finding
from trinitylake_ops.reports.chart import Chart, ago, counted, ranges, size, truncate, utc
from trinitylake_ops.reports.timeline import Timeline, TimelineVersion, VersionState
from trinitylake_ops.versions.snapshot import Snapshot

MAX_ROWS = 200
_NEWEST_ROWS = 40
_MAX_MESSAGE_CHARS = 160
_MAX_ROOT_CHARS = 200
_MAX_FINDING_CHARS = 400
_MAX_REASONS = 4
_SPAN = re.compile(r"superseded (?:\d+ (?:d|h|min|s) ?)+ago")

LABELS: Mapping[VersionState, str] = {
    VersionState.LATEST: "latest",
    VersionState.KEPT: "kept",
    VersionState.EXPIRING: "would expire",
    VersionState.EXPIRED: "expired",
    VersionState.PURGED: "purged",
    VersionState.DELETED: "deleted by another program",
    VersionState.UNREADABLE: "unreadable",
    VersionState.UNSEEN: "not checked",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One important number."""

    #: What the number measures.
    label: str
    #: The formatted value.
    value: str
    #: A short explanation.
    note: str = ""
    #: ``good``, ``warn``, ``bad`` or ``plain``.
    tone: str = "plain"


@dataclass(frozen=True, slots=True)
class Step:
    """A suggested next step, with its command."""

    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class StateRow:
    """The versions of one state."""

    state: VersionState
    label: str
    count: str
    versions: str
    why: str


@dataclass(frozen=True, slots=True)
class KindRow:
    """The files of one kind that a plan reclaims."""

    #: The kind of files.
    kind: str
    #: The number of files.
    files: str
    #: The total size of the files.
    size: str
    #: The percentage of all reclaimed bytes, from 0 to 100.
    percent: float


@dataclass(frozen=True, slots=True)
class LevelRow:
    """One level of the tree."""

    name: str
    nodes: str
    keys: str
    fill_percent: float
    keys_of_a_node: str
    messages: str
    message_size: str
    file_size: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The tree of the latest version, level by level. If it cannot be read, only ``note`` is set."""

    note: str
    levels: tuple[LevelRow, ...] = ()
    figure: Metric | None = None


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One finding of ``verify``, with its remedy."""

    severity: str
    code: str
    message: str
    version: str
    path: str
    #: The command that repairs the finding, or empty if it must be repaired manually.
    remedy: str


@dataclass(frozen=True, slots=True)
class VersionRow:
    """The details of one version."""

    number: str
    time: str
    state: VersionState
    label: str
    operation: str
    message: str
    why: str
    #: Labels: its exports, whether it is a rollback, and whether another program wrote it.
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings in a report, and a summary of the findings that are not listed."""

    rows: tuple[FindingRow, ...]
    left_out: str


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The heading of a report."""

    #: The command that created the report.
    subject: str
    #: The root of the lakehouse.
    root: str
    #: When the report was created.
    now_ms: int
    #: The result in one sentence.
    headline: str
    #: The tone of the headline, with the same values as the tone of a ``Metric``.
    tone: str = "plain"
    #: The suggested next steps.
    steps: tuple[Step, ...] = ()

    @property
    def place(self) -> str:
        """The root, clipped to a maximum length."""
        return truncate(self.root, _MAX_ROOT_CHARS)

    @property
    def made_at(self) -> str:
        """When the report was created, in UTC."""
        return utc(self.now_ms)


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole content of a report. ``findings`` is None if the command does not check for findings."""

    heading: Heading
    figures: tuple[Metric, ...]
    chart: Chart
    states: tuple[StateRow, ...]
    kinds: tuple[KindRow, ...]
    tree: Tree
    findings: Findings | None
    versions: tuple[VersionRow, ...]
    versions_left_out: str
    notes: tuple[str, ...]


def state_rows(timeline: Timeline) -> tuple[StateRow, ...]:
    """Return the versions of each state, with the most frequent reasons."""
    rows = []
    for state in timeline.counts:
        versions = timeline.of_state(state)
        reasons = Counter(_SPAN.sub("superseded", version.why) for version in versions)
        texts = [
            truncate(reason, _MAX_MESSAGE_CHARS) + (f" ({number:,})" if len(reasons) > 1 else "")
            for reason, number in reasons.most_common(_MAX_REASONS)
        ]
        more = len(reasons) - _MAX_REASONS
        why = "; ".join(texts) + (f"; and {counted(more, 'other reason')}" if more > 0 else "")
        numbers = ranges(version.number for version in versions)
        rows.append(StateRow(state, LABELS[state], f"{len(versions):,}", numbers, why))
    return tuple(rows)


def kind_rows(reclaimed: ReclaimedFiles) -> tuple[KindRow, ...]:
    """Return the reclaimed files by kind, largest first."""
    counts, sizes = reclaimed.counts(), reclaimed.bytes_by(reclaimed.kinds)
    total = reclaimed.bytes or 1
    ordered = sorted(sizes, key=lambda kind: (-sizes[kind], kind))
    return tuple(KindRow(kind, f"{counts[kind]:,}", size(sizes[kind]), 100 * sizes[kind] / total) for kind in ordered)


def tree_of(snapshot: Snapshot) -> Tree:
    """Return the tree of a version, or the reason why it cannot be read. Reads all its nodes.

    A damaged tree must not prevent the report, because damage is a reason to create a report.
    """
    try:
        shape = snapshot.tree_shape()
    except TrinityLakeError as error:
        return Tree(note=f"The tree cannot be read: {truncate(str(error), _MAX_FINDING_CHARS)}")
    rows = tuple(
        LevelRow(
            name="root" if level.depth == 0 else "leaves" if level.depth == shape.height else f"level {level.depth}",
            nodes=f"{level.nodes:,}",
            keys=f"{level.keys:,}",
            fill_percent=min(100.0, 100 * level.fill),
            keys_of_a_node=f"{level.fewest_keys:,}–{level.most_keys:,} of {snapshot.limits.max_keys:,}",
            messages=f"{level.messages:,}",
            message_size=size(level.message_bytes),
            file_size=size(level.file_bytes),
        )
        for level in shape.levels
    )
    note = (
        f"Version {snapshot.version:,}: {counted(shape.nodes, 'node')} on {counted(shape.height + 1, 'level')},"
        f" {size(shape.file_bytes)}; {counted(shape.messages, 'message')} in buffers."
        " Sparse nodes and many messages make reads slower; trinitylake compact fixes both."
    )
    levels = f"{counted(shape.nodes, 'node')}, {counted(shape.height + 1, 'level')}"
    return Tree(note=note, levels=rows, figure=Metric("Leaf fill", f"{shape.leaf_fill:.0%}", levels))


_SEVERITIES = ("error", "warning", "past")


def finding_rows(findings: Sequence[Finding]) -> Findings:
    """Return the first findings, errors first, and a summary of the remaining findings."""
    ordered = sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))
    rows = tuple(
        FindingRow(
            severity=finding.severity,
            code=truncate(finding.code, 60),
            message=truncate(finding.message, _MAX_FINDING_CHARS),
            version="" if finding.version is None else f"{finding.version:,}",
            path=truncate(finding.path or "", _MAX_FINDING_CHARS),
            remedy=truncate(finding.fix or "", _MAX_MESSAGE_CHARS),
        )
        for finding in ordered[:MAX_ROWS]
    )
    omitted = Counter(finding.code for finding in ordered[MAX_ROWS:])
    return Findings(rows, ", ".join(f"{number:,} more {code}" for code, number in omitted.most_common()))


def version_rows(timeline: Timeline, of_interest: Iterable[int]) -> tuple[tuple[VersionRow, ...], str]:
    """Return rows for versions, newest first: either all versions, or the newest and the notable versions.

    Args:
        timeline: The versions.
        of_interest: Versions to prefer, for example those with findings.

    Returns:
        The rows, and a note about versions that are not listed.
    """
    versions = timeline.versions
    chosen = versions if len(versions) <= MAX_ROWS else _notable(timeline, of_interest)
    rows = tuple(_version_row(version) for version in reversed(chosen))
    n_left = len(versions) - len(chosen)
    more = f"{counted(n_left, 'version')} not listed: the table contains the newest and the notable ones."
    return rows, f"{more} All of them: trinitylake log" if n_left else ""


def _notable(timeline: Timeline, of_interest: Iterable[int]) -> list[TimelineVersion]:
    versions = timeline.versions
    newest = [version.number for version in versions[-_NEWEST_ROWS:]]
    rollbacks = [version.record for version in versions if version.record.rollback_from is not None]
    boundaries = [
        number
        for before, after in pairwise(versions)
        if before.state != after.state
        for number in (before.number, after.number)
    ]
    ordered = [
        *reversed(newest),
        *of_interest,
        *(version.number for version in reversed(versions) if version.exports),
        *(number for record in reversed(rollbacks) for number in (record.version, record.rollback_to)),
        *reversed(boundaries),
        *(version.number for version in reversed(versions) if version.is_foreign),
        *(version.number for version in reversed(versions[-MAX_ROWS:])),
    ]
    selected: dict[int, TimelineVersion] = {}
    for number in ordered:
        version = None if number is None else timeline.at(number)
        if version is not None and len(selected) < MAX_ROWS:
            selected[version.number] = version
    return sorted(selected.values(), key=lambda version: version.number)


def _version_row(version: TimelineVersion) -> VersionRow:
    record = version.record
    signs = [f"exported as {truncate(name, 60)}" for name in version.exports[:_MAX_REASONS]]
    if len(version.exports) > _MAX_REASONS:
        signs.append(f"and {counted(len(version.exports) - _MAX_REASONS, 'export')} more")
    if record.rollback_from is not None:
        to = "" if record.rollback_to is None else f" to {record.rollback_to:,}"
        signs.append(f"rolled back from {record.rollback_from:,}{to}")
    if version.is_foreign:
        signs.append("by another program")
    return VersionRow(
        number=f"{version.number:,}",
        time="" if record.created_at_ms is None else utc(record.created_at_ms),
        state=version.state,
        label=LABELS[version.state],
        operation=truncate(record.operation or "", 40),
        message=truncate(record.message or "", _MAX_MESSAGE_CHARS),
        why=truncate(version.why, _MAX_MESSAGE_CHARS),
        signs=tuple(signs),
    )


def latest_version_metric(timeline: Timeline, now_ms: int) -> Metric:
    """Return a metric for the latest version, with its time and operation.

    Args:
        timeline: The versions.
        now_ms: When the report was created.
    """
    record = timeline.latest.record
    age = "" if record.created_at_ms is None else ago(now_ms - record.created_at_ms)
    by = truncate(record.operation or "", 40)
    return Metric("Latest", f"{record.version:,}", " by ".join(filter(None, (age, by))))


def version_count_metrics(timeline: Timeline) -> list[Metric]:
    """Return metrics for past states that occur, for exports, and for versions that other programs wrote."""
    counts = timeline.counts
    figures = [Metric("Kept", f"{counts.get(VersionState.KEPT, 0):,}", "in addition to the latest")]
    notes = {
        VersionState.EXPIRED: "no longer readable",
        VersionState.PURGED: "deleted permanently",
        VersionState.DELETED: "by another program",
        VersionState.UNREADABLE: "roots missing or damaged",
        VersionState.UNSEEN: "verify stopped before them",
    }
    for state, note in notes.items():
        if state in counts:
            tone = "bad" if state in (VersionState.UNREADABLE, VersionState.DELETED) else "plain"
            label = LABELS[state].split(" by ")[0]
            figures.append(Metric(label[0].upper() + label[1:], f"{counts[state]:,}", note, tone))
    names = [name for version in timeline.versions for name in version.exports] + list(timeline.unplaced_exports)
    if names:
        figures.append(Metric("Exports", f"{len(names):,}", truncate(", ".join(reversed(names)), 32)))
    if foreign := sum(version.is_foreign for version in timeline.versions):
        figures.append(Metric("Other programs", f"{foreign:,}", "versions that another program wrote", "warn"))
    return figures


def export_notes(timeline: Timeline) -> list[str]:
    """Return a note about exports whose versions are not in the report, if there are any."""
    names = timeline.unplaced_exports
    listed_names = ", ".join(truncate(name, 60) for name in names[:10])
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return [f"Exports of versions that are not in this report: {listed_names}{more}."] if names else []
