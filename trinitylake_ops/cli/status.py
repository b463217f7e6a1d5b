"""The command that shows the state of a lakehouse on one screen."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.text import Text

from trinitylake_ops import operations
from trinitylake_ops.cli.context import (
    Duration,
    Number,
    Session,
    WholeNumber,
    html_option,
    json_option,
    page_written,
    pass_session,
    print_json,
    write_output,
)
from trinitylake_ops.operations.rendering import cell, new_table, visible
from trinitylake_ops.operations.status.due import DEFAULT_AGES, DueState
from trinitylake_ops.operations.status.state import LAST_VERSIONS, Status, emit_status_metrics

_STYLES = {
    "good": "bold green", "warn": "bold yellow", "bad": "bold red",
    "due": "yellow", "later": "cyan", "look": "cyan", "fine": "green", "error": "red", "warning": "yellow",
}  # fmt: skip
_WIDEST_CHARS = 10_000
_MS = 1000


@click.command(short_help="Show the state on one screen, and what to run next.")
@click.option(
    "--watch",
    type=Number(1, 86_400),
    metavar="SECONDS",
    help="Show it repeatedly, until Ctrl-C. With --json, as one line each time.",
)
@click.option(
    "--last",
    type=WholeNumber(1, 1_000),
    default=LAST_VERSIONS,
    show_default=True,
    help="How many versions to look at; each is a request.",
)
@click.option("--verify-every", type=Duration(), default="7d", show_default=True, help="When verify is due again.")
@click.option("--orphans-every", type=Duration(), default="30d", show_default=True, help="When orphans is due again.")
@click.option("--export-every", type=Duration(), help="When an export is due again.  [default: never]")
@click.option(
    "--plan-seconds",
    type=Number(0, 86_400),
    default=0,
    metavar="N",
    help="Count the bytes that can be freed by new plans, for so long at most. They read all kept roots.",
)
@html_option
@json_option
@pass_session
def status(session: Session, /, watch: float | None, html: Path | None, as_json: bool, **chosen: Any) -> None:
    """Show the state of the lakehouse on one screen, and what to run next.

    The latest version and its age, who commits and how often writers met, what is due, the bytes that can be freed,
    findings, and commands. It reads the newest versions and at most 48 files more, whatever the lakehouse holds.

    Example: trinitylake status --watch 10
    """
    lake = session.lake()
    console = Console()

    def fetch_status() -> Status:
        found = operations.lakehouse_status(
            lake,
            last=chosen["last"],
            plan_seconds=chosen["plan_seconds"],
            ages=operations.DueAges(
                verify_ms=_ms(chosen["verify_every"]),
                orphans_ms=_ms(chosen["orphans_every"]),
                export_ms=_ms(chosen["export_every"]),
                unfinished_ms=DEFAULT_AGES.unfinished_ms,
            ),
        )
        emit_status_metrics(found, found.root)
        if html is not None:
            from trinitylake_ops.reports import status_page

            page_written(html, status_page([("", found)], refresh_seconds=round(watch or 0)))
        return found

    def show(found: Status) -> None:
        if as_json:
            print_json(found.to_dict(), is_line=watch is not None)
        else:
            _print(console, found)

    if watch is None:
        show(fetch_status())
    else:
        _watch(console, watch, fetch_status, show, clears=not as_json)


def _ms(duration: Any) -> int | None:
    return None if duration is None else round(duration.total_seconds() * _MS)


def _watch(
    console: Console,
    seconds: float,
    fetch_status: Callable[[], Status],
    show: Callable[[Status], None],
    *,
    clears: bool,
) -> None:
    """Show the state again and again. A terminal is cleared, other outputs get one state after the other."""
    while True:
        found = fetch_status()
        if clears and console.is_terminal:
            console.clear()
        show(found)
        time.sleep(seconds)


def _print(console: Console, found: Status) -> None:
    """Print the screen, as wide as the terminal, in colors where it has them."""
    screen = Group(*_parts(found))
    if console.is_terminal:
        console.print(screen)
        return
    text = io.StringIO()
    Console(file=text, width=_WIDEST_CHARS, color_system=None).print(screen)
    write_output("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _parts(found: Status) -> list[Any]:
    """Return the parts of the screen, in the order in which they are read."""
    parts: list[Any] = [Text(visible(found.headline), _STYLES[found.tone]), Text(visible(found.root), "dim")]
    parts += [_line(name, text) for name, text in _summary_rows(found)]
    rows = [(one.what, _styled(one.state), one.why, one.command) for one in found.due]
    parts += ["", _table("Due", ("what", "state", "why", "command"), rows)]
    if found.commits.committers:
        columns = ("who", "versions", "transactions", "lost", "last (UTC)", "operations")
        committers = [
            (one.name, one.versions, one.transactions, one.lost, one.last_at, ", ".join(one.operations))
            for one in found.commits.committers
        ]
        parts += ["", _table("Who commits", columns, committers)]
    if found.findings:
        noticed = [(_styled(one.severity), one.message, one.command) for one in found.findings]
        parts += ["", _table("Findings", ("severity", "what", "command"), noticed)]
    if found.commands:
        parts += ["", Text("To run next:"), *(Text(f"  {visible(command)}", "bold") for command in found.commands)]
    return parts


def _summary_rows(found: Status) -> list[tuple[str, str]]:
    commits, space = found.commits, found.space.reclaimable_bytes
    lost = f"{commits.lost:,} of {commits.attempts:,} attempts lost to others, in the newest {commits.versions:,}"
    reclaimable = "unknown" if space is None else _size(space)
    return [
        ("versions", f"{found.kept:,} kept, {found.expired:,} wait for a purge"),
        *(("undone", f"{one.versions} by version {one.by:,}") for one in found.undone),
        ("conflicts", lost),
        ("reclaimable", f"{reclaimable} ({found.space.note})" if found.space.note else reclaimable),
        ("exports", f"{found.exports:,}, and {found.clones:,} clones"),
        ("hint", "unknown" if found.hint is None else found.hint.value),
        ("deletes now", found.running or "nothing"),
        ("asked", f"{found.cost.total_requests:,} requests"),
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

    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in new_table("", *columns, rows=rows).rows:
        made.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    return made
