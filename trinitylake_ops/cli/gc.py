"""Commands that free space (trim, expire, purge, orphans), and commands that undo or unblock them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.cli.context import (
    FREEING_SPACE,
    C,
    Duration,
    Number,
    Session,
    WholeNumber,
    approval_options,
    html_option,
    json_option,
    limit_options,
    page_written,
    pass_session,
    print_committed,
    print_outcome,
    print_shown,
    shown_progress,
)
from trinitylake_ops.cli.engine import Engine, engine_options
from trinitylake_ops.operations import RetentionPolicy
from trinitylake_ops.operations.budget import Budget, Spending
from trinitylake_ops.operations.rendering import visible

_NUMBER = WholeNumber(0)
_RULES = (
    ("min_versions", "minimum_versions", "Keep at least so many of the newest {what}s."),
    ("keep_last", "keep_last", "Keep the last N {what}s."),
    ("keep_hourly", "keep_hourly", "Keep the newest {what} of each of the last N hours that have one."),
    ("keep_daily", "keep_daily", "The same for days."),
    ("keep_weekly", "keep_weekly", "The same for weeks, from Monday."),
    ("keep_monthly", "keep_monthly", "The same for months."),
)


def policy_options_of(what: str) -> Callable[[C], C]:
    """Return a decorator that adds the rules of retention of versions or exports to a command, as keyword arguments.

    An argument is None if its rule is not given.
    """

    def add(command: C) -> C:
        for name, _, rule in reversed(_RULES):
            flag, help_text = "--" + name.replace("_", "-"), rule.format(what=what)
            command = click.option(flag, name, type=_NUMBER, metavar="N", help=help_text)(command)
        aged = "superseded" if what == "version" else "made"
        return click.option("--max-age", type=Duration(), help=f"Keep what was {aged} no longer ago, such as 30d.")(
            command
        )

    return add


policy_options = policy_options_of("version")


def _policy(lake: Lakehouse, max_age: timedelta | None, **given: int | None) -> RetentionPolicy | None:
    """Return the lakehouse's settings with the given rules in their place, None if no rule was given."""
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

    Nothing is deleted yet. From then on nobody can open these versions, and a later purge frees the files that only
    they need. Until that purge begins, undelete brings them back.

    A version is kept when any rule keeps it. A given rule replaces the lakehouse's own for this run. Give the same ones
    with --apply. The latest version, and versions that an export needs, are always kept. So are versions that were
    superseded less than the txn_ttl_millis of the lakehouse and 5 minutes ago.

    Example: trinitylake expire --max-age 30d --keep-monthly 12
    """
    lake = session.lake()
    with engine.executor() as executor, shown_progress() as progress:
        plan = operations.plan_expiration(lake, _policy(lake, **rules), progress=progress, executor=executor)
        report = None if digest is None and not yes else plan.execute(digest, progress=progress)
    try:
        print_outcome(plan, report, as_json)
    finally:
        if html is not None:
            from trinitylake_ops.reports import expiration_page  # with the code that draws it

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

    The metadata of an Iceberg table lists all its snapshots. So the latest version needs the files of all of them, and
    expiring versions alone frees no data. A trim deletes no file. The result is one new version for all tables, or for
    the named ones. Older versions read as before. The files of the dropped snapshots are freed when all versions from
    before the trim are expired and purged. Snapshots that a branch or a tag names stay.

    The rules say which versions are kept, as those of expire do. Give both commands the same ones.

    Example: trinitylake trim sales.orders
    """
    lake = session.lake()
    with shown_progress("reading the tables"):
        plan = operations.plan_trim_tables(lake, _policy(lake, **rules), tables=tables or None)
        report = None if digest is None and not yes else plan.execute(digest)
    print_outcome(plan, report, as_json)
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

    This is possible until their purge begins. The next expiry expires them again, unless an export needs them or a
    setting keeps them.

    Example: trinitylake undelete 3-90,95
    """
    version = operations.undelete(session.lake(), versions)
    print_committed(version, as_json, f"Brought back {versions}", versions=versions)


_POSITIVE = Number(0, 1_000_000, min_open=True)


def _budget_options(command: C) -> C:
    """Add the limits of an operation that deletes, as the keyword arguments of Budget."""
    rate = "Send no more requests that delete than that."
    command = click.option("--requests-per-second", type=_POSITIVE, metavar="N", help=rate)(command)
    again = "run it again for the rest"
    return limit_options(
        f"Stop after so many requests, planning included; {again}",
        f"Stop after so many seconds, planning included; {again}",
    )(command)


@click.command(short_help="Plan or do the purge of expired versions.", epilog=FREEING_SPACE)
@click.option(
    "--grace",
    type=Duration(),
    help="Only what expired so long ago, such as 7d; never less than the txn_ttl_millis of the lakehouse and 5"
    " minutes, which is the default.",
)
@_budget_options
@engine_options
@approval_options
@json_option
@pass_session
def purge(
    session: Session,
    /,
    grace: timedelta | None,
    engine: Engine,
    digest: str | None,
    yes: bool,
    as_json: bool,
    **limits: Any,
) -> None:
    """Delete the files that only expired versions need; without --apply or --yes, print how many and when.

    Once it has begun, nothing brings these versions back. It deletes files that the plans of their expiry list and that
    nothing reaches by now. These are nodes, definitions, and files of managed tables in their own places, under a table
    root, too. It never deletes files of external, federated or registered tables, or files that no plan lists.

    A purge that was cut off, or stopped by a limit, goes on when you run it again. Exit code 1 when files are left,
    because of a limit or because the storage refused. The report says which files and why. Give --grace again with
    --apply.

    Example: trinitylake purge --grace 7d --max-seconds 3600
    """
    spending = Spending(Budget(**limits))
    lake = session.lake()
    with engine.executor() as executor, shown_progress() as progress:
        plan = operations.plan_purge(lake, grace, budget=spending, progress=progress, executor=executor)
        report = None if digest is None and not yes else plan.execute(digest, budget=spending, progress=progress)
    is_complete = report is None or report.is_complete
    print_outcome(plan, report, as_json, is_complete=is_complete)


@click.command(short_help="Plan or do the removal of orphans.", epilog=FREEING_SPACE)
@click.option(
    "--older-than",
    type=Duration(),
    help="Only files last written so long ago, such as 30d; never less than the txn_ttl_millis of the lakehouse and 5"
    " minutes, which is the default.",
)
@click.option(
    "--inventory",
    metavar="URI",
    help="The manifest.json of an inventory of the storage (Amazon S3 Inventory) to take the files from, instead of"
    " listing them. Files that came later are not looked at. It may be of the root, of the table root, or of both.",
)
@_budget_options
@engine_options
@approval_options
@json_option
@pass_session
def orphans(
    session: Session,
    /,
    older_than: timedelta | None,
    inventory: str | None,
    engine: Engine,
    digest: str | None,
    yes: bool,
    as_json: bool,
    **limits: Any,
) -> None:
    """Delete what failed commits and aborted writes left behind; without --apply or --yes, print these files.

    An orphan has a name that the lakehouse gives, and is under its root, or under its table root in a table's folder.
    No version that can be opened or undeleted reaches it. It is older than any transaction can be. Other files beside
    them are never deleted, nor are those of external, federated or registered tables.

    Exit code 1 when files are left, because of a limit or because the storage refused. The report says which files and
    why. Give --older-than and --inventory again with --apply.

    Example: trinitylake orphans --older-than 7d
    """
    spending = Spending(Budget(**limits))
    lake = session.lake()
    with engine.executor() as executor, shown_progress() as progress:
        plan = operations.plan_orphan_removal(
            lake, older_than, inventory, budget=spending, progress=progress, executor=executor
        )
        report = None if digest is None and not yes else plan.execute(digest, budget=spending, progress=progress)
    is_complete = report is None or report.is_complete
    print_outcome(plan, report, as_json, is_complete=is_complete)


@click.command(short_help="Settle what another program did to the settings.")
@click.option(
    "--acknowledge",
    default="",
    metavar="VERSIONS",
    help="Versions such as 7 or 7,9-12 whose roots another program wrote out of order, and that you have looked into.",
)
@json_option
@pass_session
def reconcile(session: Session, acknowledge: str, as_json: bool) -> None:
    """Repair exports and expirations after another program went back to older settings of the lakehouse.

    A program that knows nothing of exports and expirations can cause this by a rollback. From then on nothing is
    deleted until this command ran. Exports of both sides are kept. Versions stay expired if they are expired on both
    sides. If there is nothing to settle, nothing is committed.

    A root that does not follow the one before (chain-broken, time-not-rising) stays so for ever. With --acknowledge
    this is recorded as known, and verify reports it as past from then on.

    Example: trinitylake reconcile --acknowledge 7
    """
    lake = session.lake()
    with shown_progress("reading all versions"):
        report = operations.reconcile(lake, acknowledge=acknowledge)
    print_shown(report, as_json)
