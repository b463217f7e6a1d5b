"""The command log, which lists the versions of a lakehouse or of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.filesize import decimal

from trinitylake_ops import Lakehouse
from trinitylake_ops.cli.context import (
    Session,
    WholeNumber,
    html_option,
    json_option,
    pass_session,
    print_json,
    print_table,
    write_html_page,
)
from trinitylake_ops.errors import TableNotFoundError
from trinitylake_ops.operations.rendering import jsonable, new_table
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import resolve_table
from trinitylake_ops.versions.undone import find_undone

if TYPE_CHECKING:
    from trinitylake_ops.operations.diff.versions import VersionDiff


@click.command(short_help="List versions, or those that changed a table, newest first.")
@click.argument("name", metavar="[NS.TABLE]", required=False)
@click.option("--limit", type=WholeNumber(min=1), help="At most N versions.")
@click.option("--stat", is_flag=True, help="Show what each commit changed and wrote, with rows of tables.")
@html_option
@json_option
@pass_session
def log(session: Session, name: str | None, limit: int | None, stat: bool, html: Path | None, as_json: bool) -> None:
    """List versions, newest first, with the operation, the committer and the run.

    Versions that a later rollback undid are marked. Transactions that were committed together as one version are listed
    below it. With --stat the rows, files and bytes come from the metadata of the tables that each version changed, so
    pass a --limit.

    With a table name, only the versions that changed the table are listed, with its rows, files and bytes, and the
    columns that changed. The table may have been dropped since. The search ends after --limit versions.

    Example: trinitylake log sales.orders --limit 10
    """
    lake = session.lake()
    if name is not None:
        if html is not None:
            raise click.UsageError("--html does not support the log of a table; leave one of them out")
        _log_of_table(lake, name, limit, as_json)
        return
    latest = lake.snapshot() if html is not None or stat else None
    history = list(lake.history(limit, latest))
    undone = find_undone(lake.files, history)
    diffs = _diffs(lake, history, latest) if stat and latest is not None else {}
    if html is not None and latest is not None:
        from trinitylake_ops.reports import log_page  # imports the chart code

        write_html_page(html, log_page(latest, history, lake.storage.now_ms()))
    if as_json:
        lines = [{**jsonable(info), "undone_by": undone.by(info.version)} for info in history]
        print_json([{**line, "diff": diffs[line["version"]]} for line in lines] if stat else lines)
    elif stat:
        columns: tuple[str, ...] = (
            "version",
            "created (UTC)",
            "operation",
            "message",
            *_COUNTED,
            *("rows", "files of tables", "bytes of tables"),
            "attempts",
            "requests",
            "bytes",
        )
        rows = [row for info in history for row in _stat_rows(info, diffs[info.version])]
        print_table(new_table("", *columns, rows=rows))
    else:
        columns = ("version", "created (UTC)", "operation", "message", "by", "run", "state")
        print_table(
            new_table(
                "", *columns, rows=[row for info in history for row in _log_rows(info, undone.text(info.version))]
            )
        )


_COUNTED = ("set", "deleted")


def _log_rows(info: VersionInfo, mark: str) -> Iterator[tuple[object, ...]]:
    by, state = _by(info.committer, info.approved_by), ", ".join(filter(None, (info.state, mark)))
    yield info.version, info.created_at, _operation(info), info.message, by, info.run_id, state
    for member in info.transactions:
        by = _by(member.client, member.approved_by)
        yield "", "", f"- {member.operation}", member.message, by, member.run_id, ""


def _by(committer: str, approved_by: str | None) -> str:
    return ", ".join(filter(None, (committer, f"approved by {approved_by}" if approved_by else "")))


def _diffs(lake: Lakehouse, history: Sequence[VersionInfo], latest: Snapshot) -> dict[int, VersionDiff | None]:
    """Return the changes of each version."""
    from trinitylake_ops.operations.diff.versions import diffs_of  # imports Iceberg

    return dict(diffs_of(lake, [info.version for info in history], latest))


def _stat_rows(info: VersionInfo, diff: VersionDiff | None) -> Iterator[tuple[object, ...]]:
    from trinitylake_ops.operations.diff.versions import delta_texts

    tables = ("", "", "") if diff is not None and not diff.tables else delta_texts(None if diff is None else diff.sums)
    cost = (info.cost.get("attempts"), info.cost.get("requests"), _size(info.bytes_written))
    counts = map(info.counts.get, _COUNTED)
    yield info.version, info.created_at, _operation(info), info.message, *counts, *tables, *cost
    for member in info.transactions:
        counts = map(member.counts.get, _COUNTED)
        yield "", "", f"- {member.operation}", member.message, *counts, "", "", "", "", "", ""


def _operation(info: VersionInfo) -> str:
    notes = [
        *([] if info.rollback_from is None else [f"from {info.rollback_from}"]),
        *(["clock set back"] if info.is_clock_reset else []),
    ]
    return f"{info.operation or '-'} ({', '.join(notes)})" if notes else info.operation or "-"


def _log_of_table(lake: Lakehouse, name: str, limit: int | None, as_json: bool) -> None:
    from trinitylake_ops.operations.diff.table_history import table_history  # imports Iceberg
    from trinitylake_ops.operations.diff.versions import delta_texts

    latest = lake.snapshot()
    versions = latest.version + 1
    history = table_history(lake, *_table_name(name, latest), head=latest, most=limit or versions, look_back=versions)
    if not history.versions:
        raise TableNotFoundError(f"table {name} is in no readable version")
    if as_json:
        print_json(
            [
                {
                    **jsonable(entry.info),
                    "undone_by": entry.undone_by,
                    "since": entry.since,
                    "change": jsonable(entry.change),
                }
                for entry in history.versions
            ]
        )
        return
    columns = (
        *("version", "created (UTC)", "operation", "message", "by", "run", "state"),
        *("change", "rows", "files", "bytes", "columns"),
    )
    rows = [
        (
            *next(_log_rows(entry.info, "" if entry.undone_by is None else f"undone by {entry.undone_by}")),
            *(entry.change.kind, *delta_texts(entry.change.delta), "; ".join(entry.columns)),
        )
        for entry in history.versions
    ]
    print_table(new_table("", *columns, rows=rows))


def _table_name(name: str, latest: Snapshot) -> tuple[str, str]:
    """Return the namespace and the table of a name. The name of a dropped table must have exactly one dot."""
    try:
        return resolve_table(name, latest)
    except TableNotFoundError:
        namespace, _, table = name.partition(".")
        if "." in table:
            raise
        return namespace, table


def _size(size_bytes: float) -> str:
    return str(decimal(round(size_bytes)))
