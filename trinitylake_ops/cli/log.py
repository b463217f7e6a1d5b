"""The command log: the versions of a lakehouse, or those that changed a table."""

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
    page_written,
    pass_session,
    print_json,
    print_table,
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
@click.option("--limit", type=WholeNumber(min=1), help="At most so many versions.")
@click.option("--stat", is_flag=True, help="How much each commit changed, sent and wrote, also in rows of tables.")
@html_option
@json_option
@pass_session
def log(session: Session, name: str | None, limit: int | None, stat: bool, html: Path | None, as_json: bool) -> None:
    """List versions, newest first: what was done, by whom, in which run.

    A version that a later rollback undid is marked. Transactions that were committed together as one version are listed
    after it, one by one. With --stat the rows,
    files and bytes come from the metadata of the tables that each version changed, so give a --limit.

    With the name of a table only the versions that changed it are listed, with its rows, files and bytes, and with the
    columns that changed. The table may have been dropped since. The search ends when --limit versions are found.

    Example: trinitylake log sales.orders --limit 10
    """
    lake = session.lake()
    if name is not None:
        if html is not None:
            raise click.UsageError("--html is for the log of the lakehouse; leave out the table or --html")
        _log_of_table(lake, name, limit, as_json)
        return
    latest = lake.snapshot() if html is not None or stat else None
    history = list(lake.history(limit, latest))
    undone = find_undone(lake.files, history)
    diffs = _diffs(lake, history, latest) if stat and latest is not None else {}
    if html is not None and latest is not None:
        from trinitylake_ops.reports import log_page  # with the code that draws it

        page_written(html, log_page(latest, history, lake.storage.now_ms()))
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
    for each in info.transactions:
        yield "", "", f"- {each.operation}", each.message, _by(each.client, each.approved_by), each.run_id, ""


def _by(committer: str, approved_by: str | None) -> str:
    return ", ".join(filter(None, (committer, f"approved by {approved_by}" if approved_by else "")))


def _diffs(lake: Lakehouse, history: Sequence[VersionInfo], latest: Snapshot) -> dict[int, VersionDiff | None]:
    """Return what each version changed."""
    from trinitylake_ops.operations.diff.versions import diffs_of  # with Iceberg

    return dict(diffs_of(lake, [info.version for info in history], latest))


def _stat_rows(info: VersionInfo, diff: VersionDiff | None) -> Iterator[tuple[object, ...]]:
    from trinitylake_ops.operations.diff.versions import delta_texts

    tables = ("", "", "") if diff is not None and not diff.tables else delta_texts(None if diff is None else diff.sums)
    cost = (info.cost.get("attempts"), info.cost.get("requests"), _size(info.bytes_written))
    counted = map(info.counts.get, _COUNTED)
    yield info.version, info.created_at, _operation(info), info.message, *counted, *tables, *cost
    for one in info.transactions:
        yield "", "", f"- {one.operation}", one.message, *map(one.counts.get, _COUNTED), "", "", "", "", "", ""


def _operation(info: VersionInfo) -> str:
    notes = [
        *([] if info.rollback_from is None else [f"from {info.rollback_from}"]),
        *(["clock set back"] if info.is_clock_reset else []),
    ]
    return f"{info.operation or '-'} ({', '.join(notes)})" if notes else info.operation or "-"


def _log_of_table(lake: Lakehouse, name: str, limit: int | None, as_json: bool) -> None:
    from trinitylake_ops.operations.diff.table_history import table_history  # with Iceberg
    from trinitylake_ops.operations.diff.versions import delta_texts

    latest = lake.snapshot()
    versions = latest.version + 1
    history = table_history(lake, *_table_name(name, latest), head=latest, most=limit or versions, look_back=versions)
    if not history.versions:
        raise TableNotFoundError(f"no version that can be read has a table {name}")
    if as_json:
        print_json(
            [
                {**jsonable(one.info), "undone_by": one.undone_by, "since": one.since, "change": jsonable(one.change)}
                for one in history.versions
            ]
        )
        return
    columns = (
        *("version", "created (UTC)", "operation", "message", "by", "run", "state"),
        *("change", "rows", "files", "bytes", "columns"),
    )
    rows = [
        (
            *next(_log_rows(one.info, "" if one.undone_by is None else f"undone by {one.undone_by}")),
            *(one.change.kind, *delta_texts(one.change.delta), "; ".join(one.columns)),
        )
        for one in history.versions
    ]
    print_table(new_table("", *columns, rows=rows))


def _table_name(name: str, latest: Snapshot) -> tuple[str, str]:
    """Return the namespace and the table of a name. A table that was dropped has one dot in its name."""
    try:
        return resolve_table(name, latest)
    except TableNotFoundError:
        namespace, _, table = name.partition(".")
        if "." in table:
            raise
        return namespace, table


def _size(size_bytes: float) -> str:
    return str(decimal(round(size_bytes)))
