"""Commands about clones: clone, clones, compare, promote, refresh, drop-clone."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trinitylake_ops import operations
from trinitylake_ops.cli.context import (
    TIME_FORMS,
    Duration,
    Session,
    Timestamp,
    approval_options,
    html_option,
    json_option,
    page_written,
    pass_session,
    print_json,
    print_nothing,
    print_outcome,
    print_shown,
    print_table,
    shown_progress,
    target_option,
)
from trinitylake_ops.cli.engine import Engine, engine_options
from trinitylake_ops.operations.rendering import Document, new_table
from trinitylake_ops.operations.retention import span_text
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.versions.snapshot import utc_of

if TYPE_CHECKING:
    from trinitylake_ops.operations.clones.merge import MergePlan


@click.command(short_help="Clone the lakehouse to another root, without a copy of its tables.")
@click.argument("target")
@click.option("--name", help="The clone's name here; default: the last part of TARGET.")
@click.option("--version", metavar="N", help="The version to clone; default: the latest.")
@click.option("--export", "exported", metavar="NAME", help="Clone the version of this export.")
@click.option("--timestamp", type=Timestamp(), help=f"Clone the newest version at that time: {TIME_FORMS}.")
@click.option("--namespace", "namespaces", multiple=True, help="Only this namespace; may be repeated.")
@click.option(
    "--retain-for", type=Duration(), help="After this time, such as 14d, it is overdue, and schedules may drop it."
)
@target_option
@json_option
@pass_session
def clone(
    session: Session,
    /,
    target: str,
    name: str | None,
    version: str | None,
    exported: str | None,
    timestamp: datetime | int | None,
    namespaces: tuple[str, ...],
    retain_for: timedelta | None,
    target_options: StorageOptions | None,
    as_json: bool,
) -> None:
    """Make a lakehouse of its own at TARGET, which has all objects of a version.

    No file of a table is copied: the clone reads them here, and they are kept as long as it stands. What is committed
    there goes below its own root. A clone that was cut off goes on when the command is given again.

    Example: trinitylake clone s3://dev/feature-x --retain-for 14d
    """
    if sum(one is not None for one in (version, exported, timestamp)) > 1:
        raise click.UsageError("give one of --version, --export and --timestamp")
    plan = operations.plan_clone(
        session.lake(),
        target,
        name,
        version if exported is None else exported,
        timestamp=timestamp,
        namespaces=namespaces,
        retain_for=retain_for,
        target_options=target_options,
    )
    print_shown(plan.execute(), as_json)


@click.command(short_help="List the clones.")
@target_option
@json_option
@pass_session
def clones(session: Session, target_options: StorageOptions | None, as_json: bool) -> None:
    """List the clones: their age, by how many versions they are ahead and behind, and the bytes of their own files.

    Versions count if they changed objects: those of the clone since it was made, and those here since it was made or
    refreshed.

    Example: trinitylake clones
    """
    lake = session.lake()
    found = operations.list_clones(lake, target_options)
    if as_json:
        print_json(found)
        return
    now = utc_of(lake.storage.now_ms())
    rows = [
        (
            *(one.name, one.state, one.cloned_version, one.version if one.version != one.cloned_version else None),
            *(span_text(max(0, (now - one.created_at) // timedelta(milliseconds=1))), one.retain_until),
            *(one.versions, one.parent_versions, one.own_bytes, one.root),
        )
        for one in found
    ]
    columns = ("name", "state", "of version", "refreshed to", "age", "time until (UTC)", "ahead", "behind")
    print_table(new_table("" if rows else "No clones", *columns, "own bytes", "root", rows=rows))


def choice_options(command: Any) -> Any:
    """Add ``--ours`` and ``--theirs``, by which conflicts are decided."""
    command = click.option(
        "--theirs", multiple=True, metavar="NS[.TABLE]", help="Take this as the other side has it; may be repeated."
    )(command)
    return click.option("--ours", multiple=True, metavar="NS[.TABLE]", help="Leave this as it is; may be repeated.")(
        command
    )


@click.command(short_help="Compare a clone with this lakehouse.")
@click.argument("name", metavar="CLONE")
@target_option
@html_option
@json_option
@pass_session
def compare(
    session: Session, name: str, target_options: StorageOptions | None, html: Path | None, as_json: bool
) -> None:
    """List what changed in a clone, here, or in both, since the version that both share.

    Rows, files and bytes are those that the snapshots of tables record. The first are those of the clone.

    Example: trinitylake compare feature-x
    """
    lake = session.lake()
    comparison = operations.compare(lake, name, target_options=target_options)
    print_shown(comparison, as_json)
    if html is not None:
        from trinitylake_ops.reports import comparison_page  # with the code that draws it

        page_written(html, comparison_page(comparison, lake.storage.now_ms()))


def dry_run_option(command: Any) -> Any:
    """Add ``--dry-run``, which prints the steps of a plan."""
    return click.option("--dry-run", "is_dry_run", is_flag=True, help="Print each step that it would do.")(command)


def _steps_printed(plan: MergePlan, digest: str | None, yes: bool, as_json: bool) -> None:
    """Print the steps of a plan. Raises UsageError where it is to be done."""
    if digest is not None or yes:
        raise click.UsageError("--dry-run does nothing: leave out --apply and --yes")
    steps = plan.steps()
    conflicts = [{"step": "conflict", "what": one.name, "from": one.reason, "to": ""} for one in plan.conflicts]
    if as_json:
        shown = [dict(zip(("step", "what", "from", "to"), row, strict=True)) for row in steps.rows]
        print_json([*shown, *conflicts])
    else:
        print_table(steps)
        for one in plan.conflicts:
            click.echo(f"conflict: {one.name}: {one.reason}")
    if plan.conflicts:
        _print_conflict_choices(plan)
    elif plan.is_empty:
        print_nothing()


def _print_merge(plan: MergePlan, report: Document | None, as_json: bool) -> None:
    """Print the report, or the plan and what to do about it."""
    if report is not None or not plan.conflicts:
        print_outcome(plan, report, as_json)
        return
    print_shown(plan, as_json)
    _print_conflict_choices(plan)


def _print_conflict_choices(plan: MergePlan) -> None:
    click.echo(
        "Nothing was done, and nothing will be while there are conflicts. Choose for each, such as:"
        f" {plan.how_to_choose()}.",
        err=True,
    )


@click.command(short_help="Plan or do the promotion of what was made in a clone.")
@click.argument("name", metavar="CLONE")
@click.option("--namespace", "namespaces", multiple=True, help="Only this namespace; may be repeated.")
@click.option("--table", "tables", multiple=True, metavar="NS.TABLE", help="Only this table; may be repeated.")
@choice_options
@target_option
@engine_options
@dry_run_option
@approval_options
@json_option
@pass_session
def promote(
    session: Session,
    name: str,
    namespaces: tuple[str, ...],
    tables: tuple[str, ...],
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    target_options: StorageOptions | None,
    engine: Engine,
    is_dry_run: bool,
    digest: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Bring what changed in a clone into this lakehouse, as one version; without --apply or --yes, print what.

    Files that are new in the clone are copied. What changed on both sides is a conflict. With --ours it stays as it is
    here, and with --theirs it becomes what the clone has. Rows that both sides appended to a table are combined.

    Example: trinitylake promote feature-x --theirs sales.orders
    """
    lake, report = session.lake(), None
    with engine.executor() as executor, shown_progress() as progress:
        plan = operations.plan_promotion(
            lake,
            name,
            namespaces,
            tables,
            ours=ours,
            theirs=theirs,
            target_options=target_options,
            executor=executor,
        )
        if is_dry_run:
            _steps_printed(plan, digest, yes, as_json)
            return
        if digest is not None or yes:
            report = plan.execute(digest, progress=progress)
    _print_merge(plan, report, as_json)


@click.command(short_help="Plan or do the refresh of a clone with what is new here.")
@click.argument("name", metavar="CLONE")
@choice_options
@target_option
@dry_run_option
@approval_options
@json_option
@pass_session
def refresh(
    session: Session,
    name: str,
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    target_options: StorageOptions | None,
    is_dry_run: bool,
    digest: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Bring what changed here into a clone, as one version there; without --apply or --yes, print what.

    What changed on both sides is a conflict. With --ours it stays as it is in the clone, and with --theirs it becomes
    what this lakehouse has.

    Example: trinitylake refresh feature-x --ours sales.orders
    """
    plan = operations.plan_refresh(session.lake(), name, ours=ours, theirs=theirs, target_options=target_options)
    if is_dry_run:
        _steps_printed(plan, digest, yes, as_json)
        return
    report = None if digest is None and not yes else plan.execute(digest)
    _print_merge(plan, report, as_json)


@click.command("drop-clone", short_help="Plan or do the drop of a clone.")
@click.argument("name")
@click.option("--delete-files", "delete_files", is_flag=True, help="Delete the clone's own files, too.")
@target_option
@approval_options
@json_option
@pass_session
def drop_clone(
    session: Session,
    name: str,
    delete_files: bool,
    target_options: StorageOptions | None,
    digest: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Forget a clone; without --apply or --yes, print what would go.

    Nothing is kept for it from then on: a clone whose own files stay loses those that it reads here. With
    --delete-files its own files go first. End all writers there before. Exit code 1 when a file could not be deleted.

    Example: trinitylake drop-clone feature-x --delete-files
    """
    plan = operations.plan_drop_clone(session.lake(), name, delete_files=delete_files, target_options=target_options)
    report = None
    if digest is not None or yes:
        with shown_progress() as progress:
            report = plan.execute(digest, progress=progress)
    is_complete = report is None or report.is_complete
    print_outcome(plan, report, as_json, is_complete=is_complete)
