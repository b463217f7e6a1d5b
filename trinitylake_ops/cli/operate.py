"""Commands that change a lakehouse or check it."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from trinitylake_ops import maintenance
from trinitylake_ops.cli.context import (
    Duration,
    Session,
    Timestamp,
    approval_options,
    html_option,
    json_option,
    key_values,
    page_written,
    pass_session,
    print_committed,
    print_json,
    print_line,
    print_plan,
    print_shown,
    print_table,
    shown_progress,
)
from trinitylake_ops.maintenance.export import LEVELS
from trinitylake_ops.maintenance.page import verification_page
from trinitylake_ops.maintenance.report import new_table
from trinitylake_ops.transaction.resolve import CommitResolution


@click.command("create-namespace")
@click.argument("namespace")
@click.option("--property", "properties", multiple=True, metavar="K=V", help="A property; may be repeated.")
@json_option
@pass_session
def create_namespace(session: Session, namespace: str, properties: tuple[str, ...], as_json: bool) -> None:
    """Create a namespace.

    Example: trinitylake create-namespace sales --property owner=finance
    """
    with session.lake().transaction() as txn:
        definition = txn.create_namespace(namespace, key_values(properties, "--property"))
    assert txn.committed_version is not None
    print_committed(
        txn.committed_version, as_json, f"Created namespace {namespace}", namespace=namespace, definition=definition
    )


@click.command("resolve-commit", short_help="Say what became of a commit that got no answer.")
@click.argument("version", type=int)
@click.argument("commit_id")
@click.option("--fence", is_flag=True, help="Decide an undecided one: take its version with an empty commit.")
@json_option
@pass_session
def resolve_commit(session: Session, version: int, commit_id: str, fence: bool, as_json: bool) -> None:
    """Say whether a commit that ended without an answer took place: committed, lost or undecided.

    VERSION and COMMIT_ID are those that its error named. Undecided means that a request still on
    its way may create the version; with --fence it no longer can, and the answer is final.
    Exit code 0 when it was committed, 1 when not.

    Example: trinitylake resolve-commit 12 6f1b1c1e-5f0a-4c53-8a6e-1f0e8a7f6b2d --fence
    """
    resolution = session.lake().resolve_commit(version, commit_id, fence=fence)
    if as_json:
        print_json({"version": version, "commit_id": commit_id, "resolution": resolution})
    else:
        print_line(f"Commit {commit_id} as version {version}: {resolution}")
    if resolution != CommitResolution.COMMITTED:
        sys.exit(1)


@click.command("drop-namespace", short_help="Plan or do the drop of a namespace.")
@click.argument("namespace")
@click.option("--cascade", is_flag=True, help="Drop its tables too.")
@approval_options
@json_option
@pass_session
def drop_namespace(
    session: Session, namespace: str, cascade: bool, digest: str | None, yes: bool, as_json: bool
) -> None:
    """Drop a namespace; without --apply or --yes, print what would go.

    Older versions keep it: rollback brings it back.

    Example: trinitylake drop-namespace sales --cascade
    """
    plan = maintenance.plan_drop_namespace(session.lake(), namespace, cascade)
    if digest is None and not yes:
        print_plan(plan, as_json)
        return
    version = plan.execute(approved_digest=digest)
    print_committed(version, as_json, f"Dropped namespace {namespace}", tables=plan.tables)


@click.command(short_help="Plan or do a rollback.")
@click.argument("to", required=False)
@click.option("--timestamp", type=Timestamp(), help="Go back to the newest version at that time.")
@click.option("--namespace", "namespaces", multiple=True, help="Only this namespace; may be repeated.")
@click.option("--table", "tables", multiple=True, metavar="NS.TABLE", help="Only this table; may be repeated.")
@click.option("--reapply", is_flag=True, help="Roll back on top of commits that get in between.")
@approval_options
@json_option
@pass_session
def rollback(
    session: Session,
    to: str | None,
    timestamp: datetime | int | None,
    namespaces: tuple[str, ...],
    tables: tuple[str, ...],
    reapply: bool,
    digest: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Go back to the content of version or export TO; without --apply or --yes, print what would change.

    The rollback is a new version. Those in between stay readable, so it can be undone the same way.

    Example: trinitylake rollback 11 --table sales.orders
    """
    if (to is None) == (timestamp is None):
        raise click.UsageError("give a version or the name of an export, or else --timestamp")
    plan = maintenance.plan_rollback(session.lake(), to, namespaces, tables, timestamp=timestamp)
    if digest is None and not yes:
        print_plan(plan, as_json)
        return
    version = plan.execute(approved_digest=digest, reapply=reapply)
    if version == plan.base_version:
        print_committed(version, as_json, "Nothing to roll back", changes=plan.changes)
    else:
        print_committed(
            version, as_json, f"Rolled back to the content of version {plan.to_version}", changes=plan.changes
        )


@click.command(short_help="Keep a version under a name.")
@click.argument("name")
@click.option("--level", type=click.Choice(LEVELS), default=LEVELS[0], show_default=True, help="How much is copied.")
@click.option("--version", metavar="N", help="The version to export; default: the latest.")
@click.option("--retain-for", type=Duration(), help="Keeps its version so long, such as 30d; default: until dropped.")
@json_option
@pass_session
def export(
    session: Session, name: str, level: str, version: str | None, retain_for: timedelta | None, as_json: bool
) -> None:
    """Keep a version under a name, or finish an export that was cut off.

    The level minimal copies the root node only; the files it reaches stay where they are and are
    kept from expiring.

    Example: trinitylake export before-migration --version 11 --retain-for 30d
    """
    report = maintenance.plan_export(session.lake(), name, level, version=version, retain_for=retain_for).execute()
    print_shown(report, as_json)


@click.command()
@json_option
@pass_session
def exports(session: Session, as_json: bool) -> None:
    """List the exports.

    Example: trinitylake exports
    """
    found = maintenance.list_exports(session.lake())
    if as_json:
        print_json(found)
        return
    rows = [
        (info.name, info.version, info.level, info.state, info.created_at, info.retain_until, info.location)
        for info in found
    ]
    print_table(new_table("", "name", "version", "level", "state", "created (UTC)", "kept until", "root", rows=rows))


@click.command("drop-export", short_help="Forget an export.")
@click.argument("name")
@json_option
@pass_session
def drop_export(session: Session, name: str, as_json: bool) -> None:
    """Forget an export and delete its own files; its version can expire from then on.

    Example: trinitylake drop-export before-migration
    """
    print_committed(maintenance.drop_export(session.lake(), name), as_json, f"Dropped export {name}", name=name)


@click.command(short_help="Check the hint file, or repair it.")
@click.option("--repair", is_flag=True, help="Let it name the latest version.")
@json_option
@pass_session
def hint(session: Session, repair: bool, as_json: bool) -> None:
    """Say whether the hint file names the latest version.

    A wrong hint never makes a read wrong; it costs every reader requests.

    Example: trinitylake hint --repair
    """
    lake = session.lake()
    print_shown(maintenance.repair_hint(lake) if repair else maintenance.inspect_hint(lake), as_json)


@click.command(short_help="Flush buffers and merge thin nodes.")
@click.option("--message", help="Why, for the log.")
@json_option
@pass_session
def compact(session: Session, message: str | None, as_json: bool) -> None:
    """Flush all buffers of the tree down and merge thin nodes, as a version of its own.

    No namespace and no table changes. A tree in order is left alone: then nothing is committed. Reads all
    nodes, before and after; worth it when tree shows thin nodes or many messages.

    Example: trinitylake compact
    """
    with Console(stderr=True).status("reading and packing the tree"):
        report = maintenance.compact(session.lake(), message)
    print_shown(report, as_json)


@click.command(short_help="Check all versions and their files.")
@html_option
@json_option
@pass_session
def verify(session: Session, html: Path | None, as_json: bool) -> None:
    """Check all versions and every file they reach; exit code 1 when an error is found.

    Warnings, such as a stale hint, are printed and do not count.

    Example: trinitylake verify --html verify.html
    """
    lake = session.lake()
    with shown_progress("versions") as progress:
        report = maintenance.verify(lake, progress=partial(progress, "versions"))
    try:
        print_shown(report, as_json)
    finally:
        if html is not None:
            page_written(html, verification_page(report, lake.storage.now_ms()))
    if not report.is_clean:
        raise click.exceptions.Exit(1)
