"""The command that shows the state of a lakehouse."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.text import Text

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.cli.context import (
    Duration,
    Number,
    Session,
    WholeNumber,
    html_option,
    json_option,
    pass_session,
    print_json,
    write_html_page,
    write_output,
)
from trinitylake_ops.operations.rendering import cell, new_table, visible
from trinitylake_ops.operations.status.due import DueState
from trinitylake_ops.operations.status.state import LAST_VERSIONS, Status, emit_status_metrics

_STYLES = {
    "good": "bold green", "warn": "bold yellow", "bad": "bold red",
    "due": "yellow", "later": "cyan", "look": "cyan", "fine": "green", "error": "red", "warning": "yellow",
}  # fmt: skip
_WIDEST_CHARS = 10_000
_MS = 1000


@click.command(short_help="Show the state of the lakehouse, and what to run next.")
@click.option(
    "--watch",
    type=Number(1, 86_400),
    metavar="SECONDS",
    help="Show the state repeatedly, until Ctrl-C. With --json, one line each time.",
)
@click.option(
    "--last",
    type=WholeNumber(1, 1_000),
    default=LAST_VERSIONS,
    show_default=True,
    help="The number of versions to read; each takes a request.",
)
@click.option("--verify-every", type=Duration(), help="The interval of verify. Default: that of the policy.")
@click.option("--orphans-every", type=Duration(), help="The interval of orphans. Default: that of the policy.")
@click.option("--export-every", type=Duration(), help="The interval of exports. Default: that of the policy.")
@click.option(
    "--plan-seconds",
    type=Number(0, 86_400),
    default=0,
    metavar="N",
    help="Count reclaimable bytes with new plans, for at most N seconds. The plans read all kept roots.",
)
@html_option
@json_option
@pass_session
def status(session: Session, /, watch: float | None, html: Path | None, as_json: bool, **settings: Any) -> None:
    """Show the state of the lakehouse on one screen, and what to run next.

    The screen has the latest version and its age, committers and their conflicts, due operations, reclaimable bytes,
    findings, and commands. The command reads the newest versions and at most 48 more files, however large the
    lakehouse is.

    Example: trinitylake status --watch 10
    """
    lake = session.lake()
    console = Console()

    def fetch_status() -> Status:
        current = operations.lakehouse_status(
            lake,
            last=settings["last"],
            plan_seconds=settings["plan_seconds"],
            ages=_ages(lake, settings),
        )
        emit_status_metrics(current, current.root)
        if html is not None:
            from trinitylake_ops.reports import status_page

            write_html_page(html, status_page([("", current)], refresh_seconds=round(watch or 0)))
        return current

    def show(current: Status) -> None:
        if as_json:
            print_json(current.to_dict(), is_line=watch is not None)
        else:
            _print(console, current)

    if watch is None:
        show(fetch_status())
    else:
        _watch(console, watch, fetch_status, show, clears=not as_json)


def _ages(lake: Lakehouse, settings: Mapping[str, Any]) -> operations.DueAges | None:
    """Return the policy's intervals, overridden by those on the command line; None if the command line sets none."""
    names = {"verify_ms": "verify_every", "orphans_ms": "orphans_every", "export_ms": "export_every"}
    intervals = {name: settings[option] for name, option in names.items() if settings[option] is not None}
    if not intervals:
        return None
    milliseconds = {name: round(interval.total_seconds() * _MS) for name, interval in intervals.items()}
    return replace(operations.DueAges.of(operations.read_policy(lake).policy), **milliseconds)


def _watch(
    console: Console,
    seconds: float,
    fetch_status: Callable[[], Status],
    show: Callable[[Status], None],
    *,
    clears: bool,
) -> None:
    """Show the state repeatedly. A terminal is cleared each time; other outputs list one state after another."""
    while True:
        status = fetch_status()
        if clears and console.is_terminal:
            console.clear()
        show(status)
        time.sleep(seconds)


def _print(console: Console, status: Status) -> None:
    """Print the screen at the width of the terminal, in color if the terminal supports it."""
    screen = Group(*_parts(status))
    if console.is_terminal:
        console.print(screen)
        return
    text = io.StringIO()
    Console(file=text, width=_WIDEST_CHARS, color_system=None).print(screen)
    write_output("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _parts(status: Status) -> list[Any]:
    """Return the parts of the screen in order."""
    parts: list[Any] = [Text(visible(status.headline), _STYLES[status.tone]), Text(visible(status.root), "dim")]
    parts += [_line(name, text) for name, text in _summary_rows(status)]
    rows = [(due.what, _styled(due.state), due.why, due.command) for due in status.due]
    parts += ["", _table("Due", ("what", "state", "why", "command"), rows)]
    if status.commits.committers:
        columns = ("committer", "versions", "transactions", "conflicts", "last (UTC)", "operations")
        committers = [
            (
                *(committer.name, committer.versions, committer.transactions, committer.lost, committer.last_at),
                ", ".join(committer.operations),
            )
            for committer in status.commits.committers
        ]
        parts += ["", _table("Committers", columns, committers)]
    if status.findings:
        findings = [(_styled(finding.severity), finding.message, finding.command) for finding in status.findings]
        parts += ["", _table("Findings", ("severity", "what", "command"), findings)]
    if status.commands:
        parts += ["", Text("Next:"), *(Text(f"  {visible(command)}", "bold") for command in status.commands)]
    return parts


def _summary_rows(status: Status) -> list[tuple[str, str]]:
    commits, space = status.commits, status.space.reclaimable_bytes
    lost = f"{commits.lost:,} of {commits.attempts:,} attempts of the newest {commits.versions:,} versions"
    reclaimable = "unknown" if space is None else _size(space)
    return [
        ("versions", f"{status.kept:,} kept, {status.expired:,} expired and not purged"),
        *(("undone", f"{undone.versions} by version {undone.by:,}") for undone in status.undone),
        ("conflicts", lost),
        ("reclaimable", f"{reclaimable} ({status.space.note})" if status.space.note else reclaimable),
        ("exports", f"{status.exports:,}, and {status.clones:,} clones"),
        ("hint", "unknown" if status.hint is None else status.hint.value),
        ("running", status.running or "nothing"),
        ("cost", f"{status.cost.total_requests:,} requests"),
    ]


def _size(size_bytes: int) -> str:
    from rich.filesize import decimal

    return str(decimal(size_bytes))


def _line(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<12}", "dim"), visible(text))


def _styled(state: DueState | str) -> Text:
    return Text(str(state), _STYLES[str(state)])


def _table(title: str, columns: tuple[str, ...], rows: Sequence[Sequence[object]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in new_table("", *columns, rows=rows).rows:
        table.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    return table
