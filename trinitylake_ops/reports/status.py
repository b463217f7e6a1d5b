"""The page of ``status``: the state of one lakehouse, or of several on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trinitylake_ops.operations.status.activity import Committer
from trinitylake_ops.operations.status.due import Due, StatusFinding
from trinitylake_ops.operations.status.state import Status
from trinitylake_ops.reports.chart import ago, clipped, counted, size, utc
from trinitylake_ops.reports.content import Heading, Metric, Step
from trinitylake_ops.reports.rendering import render_status
from trinitylake_ops.versions.snapshot import epoch_ms

_LONGEST_CHARS = 300
_TONES = {"due": "warn", "later": "plain", "look": "plain", "fine": "good", "error": "bad", "warning": "warn"}


@dataclass(frozen=True, slots=True)
class StatusRow:
    """A row of a table: its cells, and the tone of the second one."""

    cells: tuple[str, ...]
    tone: str = "plain"


@dataclass(frozen=True, slots=True)
class StatusTable:
    """A table of the page. ``empty`` stands there where it has no row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[StatusRow, ...]
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """What is shown of one lakehouse. ``name`` is the one that a server knows it by."""

    name: str
    heading: Heading
    figures: tuple[Metric, ...]
    tables: tuple[StatusTable, ...]
    note: str


def status_page(states: Sequence[tuple[str, Status]], *, silent: Sequence[str] = (), refresh_seconds: int = 0) -> str:
    """Return a page of the state of lakehouses, by their names; ``silent`` ones do not answer. Reads nothing.

    A page with ``refresh_seconds`` is asked for again by the browser, without a script.
    """
    return render_status([_section(name, status) for name, status in states], silent, refresh_seconds)


def _section(name: str, status: Status) -> Section:
    steps = tuple(Step("", clipped(command, _LONGEST_CHARS)) for command in status.commands)
    heading = Heading(
        subject="status",
        root=status.root,
        now_ms=epoch_ms(status.now),
        headline=clipped(status.headline, _LONGEST_CHARS),
        tone=status.tone,
        steps=steps,
    )
    tables = (
        StatusTable("Due", ("what", "state", "why", "command"), tuple(map(_due, status.due))),
        StatusTable("Findings", ("what", "severity", "command"), tuple(map(_finding_row, status.findings)), "None."),
        StatusTable("Who commits", _COMMITTERS, tuple(map(_committer, status.commits.committers))),
    )
    cost = status.cost
    note = f"Told by {counted(cost.total_requests, 'request')} to the storage. Whether all files are sound, only verify"
    return Section(clipped(name, 64), heading, _status_metrics(status), tables, f"{note} tells.")


_COMMITTERS = ("who", "engine", "versions", "transactions", "lost attempts", "last", "operations")


def _status_metrics(status: Status) -> tuple[Metric, ...]:
    commits, now_ms = status.commits, epoch_ms(status.now)
    space = status.space.reclaimable_bytes
    hint = "unknown" if status.hint is None else status.hint.value
    lost = f"{commits.lost:,} of {commits.attempts:,}" if commits.attempts else "unknown"
    return (
        Metric("Latest", f"{status.version:,}", ago(now_ms - epoch_ms(status.created_at))),
        Metric("Versions", f"{status.kept:,}", f"and {status.expired:,} that wait for a purge"),
        *(Metric("Undone", one.versions, f"by version {one.by:,}", "warn") for one in status.undone),
        Metric("Lost attempts", lost, f"of the newest {counted(commits.versions, 'version')}"),
        Metric("Reclaimable", "unknown" if space is None else size(space), clipped(status.space.note, _LONGEST_CHARS)),
        Metric("Hint", hint, "", "good" if hint == "right" else "warn"),
        Metric("Exports", f"{status.exports:,}", counted(status.clones, "clone")),
        Metric("Running", "yes" if status.running else "none", clipped(status.running or "", _LONGEST_CHARS)),
    )


def _due(one: Due) -> StatusRow:
    cells = (one.what, one.state.value, clipped(one.why, _LONGEST_CHARS), clipped(one.command, _LONGEST_CHARS))
    return StatusRow(cells, _TONES[one.state.value])


def _finding_row(one: StatusFinding) -> StatusRow:
    return StatusRow((clipped(one.message, _LONGEST_CHARS), one.severity, one.command), _TONES[one.severity])


def _committer(one: Committer) -> StatusRow:
    return StatusRow(
        (
            clipped(one.name, _LONGEST_CHARS),
            clipped(one.engine or "", 80),
            f"{one.versions:,}",
            f"{one.transactions:,}",
            f"{one.lost:,}",
            utc(epoch_ms(one.last_at)),
            clipped(", ".join(one.operations), _LONGEST_CHARS),
        )
    )
