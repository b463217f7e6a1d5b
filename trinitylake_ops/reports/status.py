"""The HTML report of ``status``: the state of one lakehouse, or of all lakehouses on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trinitylake_ops.operations.status.activity import Committer
from trinitylake_ops.operations.status.due import Due, StatusFinding
from trinitylake_ops.operations.status.state import Status
from trinitylake_ops.reports.chart import ago, counted, size, truncate, utc
from trinitylake_ops.reports.content import Heading, Metric, Step
from trinitylake_ops.reports.rendering import render_status
from trinitylake_ops.versions.snapshot import epoch_ms

_MAX_CHARS = 300
_TONES = {"due": "warn", "later": "plain", "look": "plain", "fine": "good", "error": "bad", "warning": "warn"}


@dataclass(frozen=True, slots=True)
class StatusRow:
    """A row of a table."""

    #: The texts of the cells.
    cells: tuple[str, ...]
    #: The tone of the second cell.
    tone: str = "plain"


@dataclass(frozen=True, slots=True)
class StatusTable:
    """A table of the report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[StatusRow, ...]
    #: The text to show if the table has no rows.
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """The report of one lakehouse. ``name`` is its name on a server."""

    name: str
    heading: Heading
    figures: tuple[Metric, ...]
    tables: tuple[StatusTable, ...]
    note: str


def status_page(states: Sequence[tuple[str, Status]], *, silent: Sequence[str] = (), refresh_seconds: int = 0) -> str:
    """Render the status report of lakehouses. Performs no I/O.

    Args:
        states: The names and states of the lakehouses.
        silent: The names of lakehouses that do not respond.
        refresh_seconds: The refresh interval of the browser, without a script; 0 disables refreshing.
    """
    return render_status([_section(name, status) for name, status in states], silent, refresh_seconds)


def _section(name: str, status: Status) -> Section:
    steps = tuple(Step("", truncate(command, _MAX_CHARS)) for command in status.commands)
    heading = Heading(
        subject="status",
        root=status.root,
        now_ms=epoch_ms(status.now),
        headline=truncate(status.headline, _MAX_CHARS),
        tone=status.tone,
        steps=steps,
    )
    tables = (
        StatusTable("Due", ("what", "state", "why", "command"), tuple(map(_due, status.due))),
        StatusTable("Findings", ("what", "severity", "command"), tuple(map(_finding_row, status.findings)), "None."),
        StatusTable("Writers", _COMMITTERS, tuple(map(_committer, status.commits.committers))),
    )
    cost = status.cost
    note = f"Read with {counted(cost.total_requests, 'request')}. Use verify to check that all files are intact."
    return Section(truncate(name, 64), heading, _status_metrics(status), tables, note)


_COMMITTERS = ("writer", "engine", "versions", "transactions", "conflicts", "last", "operations")


def _status_metrics(status: Status) -> tuple[Metric, ...]:
    commits, now_ms = status.commits, epoch_ms(status.now)
    space = status.space.reclaimable_bytes
    hint = "unknown" if status.hint is None else status.hint.value
    lost = f"{commits.lost:,} of {commits.attempts:,}" if commits.attempts else "unknown"
    return (
        Metric("Latest", f"{status.version:,}", ago(now_ms - epoch_ms(status.created_at))),
        Metric("Versions", f"{status.kept:,}", f"and {status.expired:,} waiting for a purge"),
        *(Metric("Undone", range_.versions, f"by version {range_.by:,}", "warn") for range_ in status.undone),
        Metric("Conflicts", lost, f"of the newest {counted(commits.versions, 'version')}"),
        Metric("Reclaimable", "unknown" if space is None else size(space), truncate(status.space.note, _MAX_CHARS)),
        Metric("Hint", hint, "", "good" if hint == "right" else "warn"),
        Metric("Exports", f"{status.exports:,}", counted(status.clones, "clone")),
        Metric("Running", "yes" if status.running else "none", truncate(status.running or "", _MAX_CHARS)),
    )


def _due(due: Due) -> StatusRow:
    cells = (due.what, due.state.value, truncate(due.why, _MAX_CHARS), truncate(due.command, _MAX_CHARS))
    return StatusRow(cells, _TONES[due.state.value])


def _finding_row(finding: StatusFinding) -> StatusRow:
    return StatusRow(
        (truncate(finding.message, _MAX_CHARS), finding.severity, finding.command), _TONES[finding.severity]
    )


def _committer(committer: Committer) -> StatusRow:
    return StatusRow(
        (
            truncate(committer.name, _MAX_CHARS),
            truncate(committer.engine or "", 80),
            f"{committer.versions:,}",
            f"{committer.transactions:,}",
            f"{committer.lost:,}",
            utc(epoch_ms(committer.last_at)),
            truncate(", ".join(committer.operations), _MAX_CHARS),
        )
    )
