"""Commands that delete files, and the one that settles what blocks them: purge, orphans, reconcile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from trinitylake_ops import maintenance
from trinitylake_ops.cli.context import (
    FREEING_SPACE,
    C,
    Duration,
    Number,
    Session,
    approval_options,
    json_option,
    limit_options,
    pass_session,
    print_outcome,
    print_shown,
    shown_progress,
)
from trinitylake_ops.cli.engines import Engine, engine_options
from trinitylake_ops.maintenance.budget import Budget, Spending

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

    From its begin on, nothing brings these versions back. Deleted is what the plans of their expiry list and
    nothing reaches by now: nodes, definitions, and files of managed tables in their own places. Never
    deleted are files of external, federated or registered tables, nor any that no plan lists.

    A purge that was cut off, or stopped by a limit, goes on where it was by running it again. Exit code 1
    when files are left, because of a limit or as the storage refused: the report says which and why.
    Give --grace again with --apply.

    Example: trinitylake purge --grace 7d --max-seconds 3600
    """
    spending = Spending(Budget(**limits))
    lake = session.lake()
    with engine.executor() as executor, shown_progress() as progress:
        plan = maintenance.plan_purge(lake, grace, budget=spending, progress=progress, executor=executor)
        report = None if digest is None and not yes else plan.execute(digest, budget=spending, progress=progress)
    is_complete = report is None or report.is_complete
    print_outcome(plan, report, as_json, is_empty=plan.is_empty, is_complete=is_complete)


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
    help="The manifest.json of an inventory of the storage (Amazon S3 Inventory) to take what stands from, instead of"
    " listing it; what came since the inventory is not looked at.",
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

    An orphan bears a name that the lakehouse gives, lies under its root or in the place of one of its managed
    tables, is reached by no version that can be opened or undeleted, and is older than any transaction
    can be. Never deleted are any other files beside them, nor those of external, federated or registered tables.

    Exit code 1 when files are left, because of a limit or as the storage refused: the report says which and
    why. Give --older-than and --inventory again with --apply.

    Example: trinitylake orphans --older-than 7d
    """
    spending = Spending(Budget(**limits))
    lake = session.lake()
    with engine.executor() as executor, shown_progress() as progress:
        plan = maintenance.plan_orphan_removal(
            lake, older_than, inventory, budget=spending, progress=progress, executor=executor
        )
        report = None if digest is None and not yes else plan.execute(digest, budget=spending, progress=progress)
    is_complete = report is None or report.is_complete
    print_outcome(plan, report, as_json, is_empty=plan.is_empty, is_complete=is_complete)


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
    """Put exports and expirations right after another program went back to older settings of the lakehouse.

    A program that knows nothing of exports and expirations can do so by a rollback. Nothing is deleted from
    then on until this command ran. Exports of both sides stay; expired stays what is expired on both.
    With nothing to settle, nothing is committed.

    A root that does not follow the one before (chain-broken, time-not-rising) stays so for ever. With --acknowledge
    that is recorded as known, and verify tells it as past from then on.

    Example: trinitylake reconcile --acknowledge 7
    """
    lake = session.lake()
    with shown_progress("reading all versions"):
        report = maintenance.reconcile(lake, acknowledge=acknowledge)
    print_shown(report, as_json)
