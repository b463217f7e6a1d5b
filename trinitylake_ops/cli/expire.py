"""Commands that let versions go: trim, expire, undelete."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.cli.context import (
    FREEING_SPACE,
    C,
    Duration,
    Session,
    WholeNumber,
    approval_options,
    html_option,
    json_option,
    page_written,
    pass_session,
    print_committed,
    print_outcome,
    shown_progress,
)
from trinitylake_ops.cli.engines import Engine, engine_options
from trinitylake_ops.maintenance import RetentionPolicy
from trinitylake_ops.maintenance.page import expiration_page
from trinitylake_ops.maintenance.report import visible

_NUMBER = WholeNumber(0)
_RULES = (
    ("min_versions", "minimum_versions", "Keep at least so many of the newest versions."),
    ("keep_last", "keep_last", "Keep the last N versions."),
    ("keep_hourly", "keep_hourly", "Keep the newest version of each of the last N hours that have one."),
    ("keep_daily", "keep_daily", "The same for days."),
    ("keep_weekly", "keep_weekly", "The same for weeks, from Monday."),
    ("keep_monthly", "keep_monthly", "The same for months."),
)


def policy_options(command: C) -> C:
    """Add the rules of retention to a command, as keyword arguments, None where one is not given."""
    for name, _, what in reversed(_RULES):
        command = click.option("--" + name.replace("_", "-"), name, type=_NUMBER, metavar="N", help=what)(command)
    return click.option(
        "--max-age", type=Duration(), help="Keep what was superseded no longer ago than that, such as 30d."
    )(command)


def _policy(lake: Lakehouse, max_age: timedelta | None, **given: int | None) -> RetentionPolicy | None:
    """Return the lakehouse's settings with the rules that were given in their place, None where none was."""
    numbers = ((setting, given[name]) for name, setting, _ in _RULES)
    rules: dict[str, Any] = {setting: number for setting, number in numbers if number is not None}
    if max_age is not None:
        rules["maximum_age_ms"] = max_age // timedelta(milliseconds=1)
    return replace(RetentionPolicy.of(lake.snapshot().definition), **rules) if rules else None


@click.command(short_help="Plan or do the expiry of old versions.", epilog=FREEING_SPACE)
@policy_options
@engine_options
@approval_options
@html_option
@json_option
@pass_session
def expire(
    session: Session,
    /,
    engine: Engine,
    digest: str | None,
    yes: bool,
    html: Path | None,
    as_json: bool,
    **rules: Any,
) -> None:
    """Let old versions expire; without --apply or --yes, print which ones and why.

    Nothing is deleted yet: from then on nobody opens these versions, and a later purge frees what only
    they need. Until that purge begins, undelete brings them back.

    A version is kept when any rule keeps it. A rule that is given takes the place of the lakehouse's own for
    this run; give the same ones with --apply. In any case kept are the latest version, what an export
    needs, and what was superseded less than the txn_ttl_millis of the lakehouse and 5 minutes ago.

    Example: trinitylake expire --max-age 30d --keep-monthly 12
    """
    lake = session.lake()
    with engine.executor() as executor, shown_progress() as progress:
        plan = maintenance.plan_expiration(lake, _policy(lake, **rules), progress=progress, executor=executor)
        report = None if digest is None and not yes else plan.execute(digest, progress=progress)
    try:
        print_outcome(plan, report, as_json, is_empty=plan.is_empty)
    finally:
        if html is not None:
            page_written(html, expiration_page(plan, report))


@click.command(short_help="Plan or do the trim of tables.", epilog=FREEING_SPACE)
@click.argument("tables", metavar="[NAMESPACE.TABLE]...", nargs=-1)
@policy_options
@approval_options
@json_option
@pass_session
def trim(
    session: Session, /, tables: tuple[str, ...], digest: str | None, yes: bool, as_json: bool, **rules: Any
) -> None:
    """Drop the Iceberg snapshots of managed tables that no kept version needs; without --apply or --yes, print them.

    The metadata of an Iceberg table lists all its snapshots, so that the latest version needs the files of
    all of them: expiring versions alone frees no data. A trim deletes no file. It is one new version for all
    tables, or for those that are named; older versions read as before, and the files of the dropped snapshots
    go when all versions from before the trim are expired and purged. Snapshots that a branch or a tag
    names stay.

    The rules say which versions are kept, as those of expire do: give both commands the same ones.

    Example: trinitylake trim sales.orders
    """
    lake = session.lake()
    with shown_progress("reading the tables"):
        plan = maintenance.plan_trim_tables(lake, _policy(lake, **rules), tables=tables or None)
        report = None if digest is None and not yes else plan.execute(digest)
    print_outcome(plan, report, as_json, is_empty=plan.is_empty)
    if report is not None and plan.unreadable:
        names = visible(", ".join(plan.unreadable))
        click.echo(f"Left as they are, since their metadata cannot be read: {names}; verify says why", err=True)
    if report is not None and plan.unwritable:
        names = visible(", ".join(plan.unwritable))
        click.echo(f"Left as they are, since their format version cannot be written: {names}", err=True)


@click.command(short_help="Bring expired versions back.", epilog=FREEING_SPACE)
@click.argument("versions")
@json_option
@pass_session
def undelete(session: Session, versions: str, as_json: bool) -> None:
    """Bring expired VERSIONS back, such as 3-90,95, byte for byte.

    That is possible until their purge begins. The next expiry lets them go again, unless an export needs
    them or a setting keeps them.

    Example: trinitylake undelete 3-90,95
    """
    version = maintenance.undelete(session.lake(), versions)
    print_committed(version, as_json, f"Brought back {versions}", versions=versions)


@click.command(short_help="Plan or do the relocation of tables.")
@approval_options
@json_option
@pass_session
def relocate(session: Session, digest: str | None, yes: bool, as_json: bool) -> None:
    """Write the tables' metadata for the place where the lakehouse is; without --apply or --yes, print which.

    For a lakehouse whose files were copied or moved: the files of its Iceberg tables hold full URIs, which name
    the place where it stood before. It reads them at its own place all the same; other engines do not. No data
    file is copied, and it is one new version for all tables.

    Example: trinitylake relocate
    """
    lake = session.lake()
    with shown_progress("reading the tables"):
        plan = maintenance.plan_relocation(lake)
        report = None if digest is None and not yes else plan.execute(digest)
    print_outcome(plan, report, as_json, is_empty=plan.is_empty)
