"""HTML reports about versions and about comparisons with clones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.clones.compare import ChangedOn, ComparedObject, Comparison
from trinitylake_ops.operations.diff.versions import TableDelta
from trinitylake_ops.operations.gc.expire import ExpirationPlan, ExpirationReport
from trinitylake_ops.operations.verification.verify import Finding, VerifyReport
from trinitylake_ops.operations.version_records import VersionRecord
from trinitylake_ops.reports.chart import Chart, counted, draw, listed, size, truncate, utc
from trinitylake_ops.reports.content import (
    LABELS,
    Heading,
    KindRow,
    Metric,
    Page,
    Step,
    Tree,
    export_notes,
    finding_rows,
    kind_rows,
    latest_version_metric,
    state_rows,
    tree_of,
    version_count_metrics,
    version_rows,
)
from trinitylake_ops.reports.rendering import render_chart, render_comparison, render_page
from trinitylake_ops.reports.timeline import Timeline, VersionState, timeline
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms


def log_page(latest: Snapshot, history: Sequence[VersionInfo], now_ms: int) -> str:
    """Return a report of versions. Reads the nodes of the latest version's tree, but no roots.

    Args:
        latest: The latest version.
        history: The versions, newest first.
        now_ms: When the report is created.
    """
    records = list(map(_record_of, history)) or [VersionRecord.of(latest.version, latest.root.system)]
    versions = timeline(records, latest.definition)
    shown = counted(len(history), "version") if versions.first == 0 else f"The newest {len(history):,} versions"
    heading = Heading(
        subject="log",
        root=latest.files.storage.root,
        now_ms=now_ms,
        headline=f"{shown}{_unreadable_versions(versions)}; the latest is {latest.version:,}",
    )
    return render_page(_page(heading, versions, draw(versions), tree_of(latest)))


def expiration_page(plan: ExpirationPlan, report: ExpirationReport | None = None) -> str:
    """Return a report of a planned or completed expiration: the fate of each version, and the bytes to reclaim.

    Reads the nodes of the tree of the plan's base version, but no roots.

    Args:
        plan: The plan.
        report: The result, or None before the plan is applied.
    """
    versions = _planned(plan, report)
    n_bytes, n_files = (plan.bytes, len(plan.freed.sizes_bytes)) if report is None else (report.bytes, report.files)
    n_expiring = sum(verdict.expires for verdict in plan.verdicts)
    figures = [Metric("Purge reclaims" if report else "Would reclaim", size(n_bytes), counted(n_files, "file"))]
    if report is None:
        figures.insert(0, Metric("Would expire", f"{n_expiring:,}", "not applied yet"))
    heading = Heading(
        subject="expire",
        root=plan.base.files.storage.root,
        now_ms=plan.now_ms,
        headline=_expiration_headline(plan, report, versions),
        steps=_expiration_steps(plan, report),
    )
    chart, tree, kinds = _planned_chart(plan, versions), tree_of(plan.base), kind_rows(plan.freed)
    return render_page(_page(heading, versions, chart, tree, figures=figures, kinds=kinds))


def expiration_chart(plan: ExpirationPlan) -> str:
    """Return the chart of a plan as an SVG file. Performs no I/O."""
    versions = _planned(plan, None)
    return _chart_text(versions, _planned_chart(plan, versions), _expiration_headline(plan, None, versions))


def verification_page(report: VerifyReport, now_ms: int) -> str:
    """Return a report of all versions and verify's findings.

    Reads the nodes of the latest version's tree, but no roots. Notes in the report list the versions and definitions
    that cannot be read.

    Args:
        report: The result of verify.
        now_ms: When the report is created.
    """
    versions, note = _verification_timeline(report)
    heading = Heading(
        subject="verify",
        root=report.root,
        now_ms=now_ms,
        headline=_verification_headline(report, versions),
        tone=_tone(report),
    )
    unread = Tree(note="The root of the latest version cannot be read.")
    n_findings = f"{len(report.findings):,}" if report.findings else "none"
    return render_page(
        _page(
            heading,
            versions,
            _verified_chart(report, versions),
            unread if report.latest is None else tree_of(report.latest),
            figures=[Metric("Findings", n_findings, tone=heading.tone)],
            findings=report.findings,
            notes=[*_verification_notes(report), *([note] if note else [])],
        )
    )


def verification_chart(report: VerifyReport) -> str:
    """Return the chart of verify's findings as an SVG file. Performs no I/O."""
    versions, _ = _verification_timeline(report)
    return _chart_text(versions, _verified_chart(report, versions), _verification_headline(report, versions))


def _chart_text(versions: Timeline, chart: Chart, headline: str) -> str:
    states = {state: f"{LABELS[state]} {number:,}" for state, number in versions.counts.items()}
    return render_chart(chart, states, headline)


def _page(
    heading: Heading,
    versions: Timeline,
    chart: Chart,
    tree: Tree,
    *,
    figures: Sequence[Metric] = (),
    kinds: Sequence[KindRow] = (),
    findings: Sequence[Finding] | None = None,
    notes: Sequence[str] = (),
) -> Page:
    """Return a report with the common parts. ``findings`` is None if the command does not check for findings."""
    of_interest = [finding.version for finding in findings or () if finding.version is not None]
    rows, rows_left_out = version_rows(versions, of_interest)
    return Page(
        heading=heading,
        figures=(
            latest_version_metric(versions, heading.now_ms),
            *figures,
            *version_count_metrics(versions),
            *([tree.figure] if tree.figure else []),
        ),
        chart=chart,
        states=state_rows(versions),
        kinds=tuple(kinds),
        tree=tree,
        findings=None if findings is None else finding_rows(findings),
        versions=rows,
        versions_left_out=rows_left_out,
        notes=(*notes, *export_notes(versions), *chart.left_out),
    )


# log


def _record_of(info: VersionInfo) -> VersionRecord:
    record = VersionRecord(
        version=info.version,
        created_at_ms=epoch_ms(info.created_at),
        operation=info.operation,
        message=info.message,
        commit_id=info.commit_id,
        is_sealed=info.state == "sealed",
    )
    return record.with_rollback(info.rollback_from, info.properties)


def _unreadable_versions(versions: Timeline) -> str:
    """Return a note with the number of versions that cannot be read."""
    words = {
        VersionState.EXPIRED: "expired",
        VersionState.PURGED: "purged",
        VersionState.DELETED: "deleted by another program",
        VersionState.UNREADABLE: "unreadable",
        VersionState.UNSEEN: "not checked",
    }
    parts = [f"{versions.counts[state]:,} {word}" for state, word in words.items() if state in versions.counts]
    return f", of which {listed(parts)}" if parts else ""


# expire


def _planned(plan: ExpirationPlan, report: ExpirationReport | None) -> Timeline:
    expired_now = VersionRanges.parse(report.versions if report else "")
    spared = VersionRanges.parse(report.spared if report else "")
    verdicts = [
        replace(verdict, expires=False, reason="not expired, because it is kept now")
        if verdict.version in spared
        else verdict
        for verdict in plan.verdicts
    ]
    return timeline(plan.records, plan.base.definition, verdicts=verdicts, expired_now=expired_now)


def _planned_chart(plan: ExpirationPlan, versions: Timeline) -> Chart:
    return draw(versions, bytes_by_version=plan.freed.bytes_by(plan.freed.writers))


def _expiration_headline(plan: ExpirationPlan, report: ExpirationReport | None, versions: Timeline) -> str:
    every = counted(len(versions.versions), "version") + _unreadable_versions(versions)
    latest = f"the latest is {plan.base_version:,}"
    if report is not None and report.version is not None:
        n_expired = len(VersionRanges.parse(report.versions))
        outcome = f"{n_expired:,} expired just now, by version {report.version:,}"
        return f"{every}; {outcome}; a purge reclaims {size(report.bytes)}"
    exports_ended = f"; {counted(len(plan.exports), 'export')} would end" if plan.exports else ""
    if plan.is_empty:
        return f"{every}; none would expire; {latest}"
    n_expiring = sum(verdict.expires for verdict in plan.verdicts)
    return f"{every}; {n_expiring:,} would expire and reclaim {size(plan.bytes)}; {latest}{exports_ended}"


def _expiration_steps(plan: ExpirationPlan, report: ExpirationReport | None) -> tuple[Step, ...]:
    if report is not None:
        if report.version is None:
            return (Step("Nothing expired."),)
        begin = "" if report.purgeable_at_ms is None else f" from {utc(report.purgeable_at_ms)} on"
        return (
            Step(f"To reclaim the space{begin}:", "trinitylake purge"),
            Step("To restore them before that:", f"trinitylake undelete {report.versions}"),
        )
    if plan.is_empty:
        return (Step("Nothing to do."),)
    return (
        Step(
            "The plan is not applied yet. To apply it, with the same options:",
            f"trinitylake expire --apply {plan.digest}",
        ),
    )


# verify


def _verification_timeline(report: VerifyReport) -> tuple[Timeline, str]:
    """Return the versions, and a note if the definition of the latest version cannot be read."""
    try:
        definition = None if report.latest is None else report.latest.definition
        return timeline(report.records, definition, latest=report.latest_version), ""
    except TrinityLakeError as error:
        note = f"Exports and expirations are not shown, because the lakehouse definition cannot be read: {error}"
        return timeline(report.records, None, latest=report.latest_version), note


def _verified_chart(report: VerifyReport, versions: Timeline) -> Chart:
    counts = Counter(finding.version for finding in report.findings if finding.version is not None)
    return draw(versions, findings_by_version=counts)


def _verification_notes(report: VerifyReport) -> list[str]:
    checked = (
        f"Verify checked {counted(report.versions, 'version')}, {counted(report.nodes, 'node')},"
        f" {counted(report.definitions, 'definition')}, {counted(report.table_files, 'table file')} and"
        f" {counted(report.exports, 'export')}, in {counted(report.cost.total_requests, 'request')}."
    )
    checksums = f"Checksums: {report.checksums}." if report.checksums else ""
    skipped = f"Not checked: {truncate('; '.join(report.unchecked), 400)}." if report.unchecked else ""
    return list(filter(None, (checked, checksums, skipped)))


def _tone(report: VerifyReport) -> str:
    if report.is_clean and not report.is_complete:
        return "warn"
    if not report.is_clean:
        return "bad"
    return "warn" if any(finding.severity == "warning" for finding in report.findings) else "good"


def _verification_headline(report: VerifyReport, versions: Timeline) -> str:
    n_errors = sum(finding.severity == "error" for finding in report.findings)
    n_warnings = sum(finding.severity == "warning" for finding in report.findings)
    n_past = len(report.findings) - n_errors - n_warnings
    words = ((n_errors, "error"), (n_warnings, "warning"), (n_past, "past finding"))
    parts = [counted(number, word) for number, word in words if number]
    summary = " and ".join(parts) or "no findings"
    every = counted(len(versions.versions), "version")
    latest = f"the latest is {report.latest_version:,}"
    if report.stopped is not None:
        unreadable = _unreadable_versions(versions)
        return f"Not finished, because {report.stopped}; {summary} so far; {every}{unreadable}; {latest}"
    if report.findings:
        return f"{summary}; {every}{_unreadable_versions(versions)}; {latest}"
    return f"{every}{_unreadable_versions(versions)}; {latest}; {summary}"


_MAX_ROWS = 500
_MAX_NAME_CHARS = 120
_MAX_COLUMNS_CHARS = 300
#: Ordered by importance for a reader.
_SECTIONS = (
    (ChangedOn.BOTH, "Changed on both sides: resolve before a promotion"),
    (ChangedOn.CLONE, "Changed only in the clone: included in a promotion"),
    (ChangedOn.PARENT, "Changed only in the parent: included in a refresh"),
    (ChangedOn.SAME, "Changed equally on both sides since the shared version"),
)


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One object, with its change on each side."""

    name: str
    clone: str
    parent: str


@dataclass(frozen=True, slots=True)
class ComparedSection:
    """The objects that changed on the same sides."""

    title: str
    rows: tuple[ComparedRow, ...]
    #: The number of objects that are not listed.
    left_out: int


def comparison_page(comparison: Comparison, now_ms: int) -> str:
    """Return a comparison report. Performs no I/O.

    Args:
        comparison: The comparison.
        now_ms: When the report is created.
    """
    conflicts = len(comparison.on(ChangedOn.BOTH))
    promote = f"trinitylake promote {comparison.name}"
    step = Step("To show the plan of a promotion:", promote)
    if conflicts:
        step = Step("Resolve each object below that changed on both sides with --ours or --theirs:", promote)
    heading = Heading(
        subject="compare",
        root=comparison.root,
        now_ms=now_ms,
        headline=truncate(comparison.headline, 300),
        tone="warn" if conflicts else "good",
        steps=(step,),
    )
    figures = (
        Metric(
            "Only in the clone", f"{len(comparison.on(ChangedOn.CLONE)):,}", f"version {comparison.clone_version:,}"
        ),
        Metric("Only in the parent", f"{len(comparison.on(ChangedOn.PARENT)):,}", f"version {comparison.version:,}"),
        Metric("In both", f"{conflicts:,}", f"since version {comparison.shared_version:,}", heading.tone),
    )
    sections = [_section(comparison, side, title) for side, title in _SECTIONS]
    return render_comparison(heading, figures, [section for section in sections if section.rows])


def _section(comparison: Comparison, side: ChangedOn, title: str) -> ComparedSection:
    objects = comparison.on(side)
    return ComparedSection(title, tuple(map(_row, objects[:_MAX_ROWS])), max(0, len(objects) - _MAX_ROWS))


def _row(compared: ComparedObject) -> ComparedRow:
    name = compared.name if compared.table is not None else f"namespace {compared.name}"
    return ComparedRow(
        truncate(name, _MAX_NAME_CHARS),
        _text(compared.in_clone, compared.clone),
        _text(compared.in_parent, compared.parent),
    )


def _text(kind: str | None, delta: TableDelta | None) -> str:
    """Describe the change on one side: its kind, and the numbers of rows and bytes."""
    if kind is None:
        return ""
    parts = [kind]
    if delta is not None and delta.rows_added is not None and delta.rows_removed is not None:
        parts += [f"{sign}{counted(rows, 'row')}" for sign, rows in _signed(delta.rows_added, delta.rows_removed)]
        parts += [f"{sign}{size(bytes_)}" for sign, bytes_ in _signed(delta.bytes_added or 0, delta.bytes_removed or 0)]
    if delta is not None and delta.schema:
        parts.append(truncate(f"columns {'; '.join(delta.schema)}", _MAX_COLUMNS_CHARS))
    return ", ".join(parts)


def _signed(added: int, removed: int) -> list[tuple[str, int]]:
    return [(sign, number) for sign, number in (("+", added), ("−", removed)) if number]
