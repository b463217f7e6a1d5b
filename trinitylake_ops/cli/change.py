"""Commands that change a lakehouse or check it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from trinitylake_ops import operations
from trinitylake_ops.cli.context import (
    TIME_FORMS,
    Session,
    Timestamp,
    WholeNumber,
    approval_options,
    html_option,
    json_option,
    key_values,
    limit_options,
    page_written,
    pass_session,
    print_committed,
    print_json,
    print_line,
    print_notice,
    print_outcome,
    print_plan,
    print_shown,
    shown_progress,
)
from trinitylake_ops.cli.engine import Engine, engine_options
from trinitylake_ops.transaction.publish import CommitResolution

if TYPE_CHECKING:
    from trinitylake_ops.iceberg.write.rewrite import GroupWriter


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


@click.command("resolve-commit", short_help="Show the outcome of a commit that got no answer.")
@click.argument("version", type=WholeNumber())
@click.argument("commit_id")
@click.option("--fence", is_flag=True, help="Decide an undecided one: take its version with an empty commit.")
@json_option
@pass_session
def resolve_commit(session: Session, version: int, commit_id: str, fence: bool, as_json: bool) -> None:
    """Say whether a commit that ended without an answer took place: committed, lost or undecided.

    VERSION and COMMIT_ID are those that its error named. Undecided means that a request still on its way may create the
    version. With --fence it no longer can, and the answer is final. Exit code 0 when it was committed, 1 when not.

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
    plan = operations.plan_drop_namespace(session.lake(), namespace, cascade)
    if digest is None and not yes:
        print_plan(plan, as_json)
        return
    version = plan.execute(approved_digest=digest).version
    print_committed(version, as_json, f"Dropped namespace {namespace}", tables=plan.tables)


@click.command(short_help="Plan or do a rollback.")
@click.argument("to", required=False)
@click.option("--timestamp", type=Timestamp(), help=f"Go back to the newest version at that time: {TIME_FORMS}.")
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

    The rollback is a new version. The versions in between stay readable, so it can be undone the same way. A plan lists
    tables whose files are damaged or missing in that version. They come back unreadable, which only --apply permits.

    Example: trinitylake rollback 11 --table sales.orders
    """
    if (to is None) == (timestamp is None):
        raise click.UsageError("give a version or the name of an export, or else --timestamp")
    plan = operations.plan_rollback(session.lake(), to, namespaces, tables, timestamp=timestamp)
    if digest is None and not yes:
        print_plan(plan, as_json)
        return
    report = plan.execute(approved_digest=digest, reapply=reapply)
    what = f"Rolled back to the content of version {plan.to_version}"
    details = {"changes": plan.changes, "damaged": report.damaged}
    print_committed(report.version, as_json, what, has_changed=report.has_changed, **details)
    if not report.is_complete:
        print_notice(f"Damaged tables, which cannot be read: {', '.join(report.damaged)}")


@click.command(short_help="Check the hint file, or repair it.")
@click.option("--repair", is_flag=True, help="Write the latest version into it.")
@json_option
@pass_session
def hint(session: Session, repair: bool, as_json: bool) -> None:
    """Check whether the hint file names the latest version. Exit code 1 when it does not.

    A wrong hint never makes a read wrong; it costs every reader requests. With --repair the exit code is 0 unless the
    repair fails.

    Example: trinitylake hint --repair
    """
    lake = session.lake()
    report = operations.repair_hint(lake) if repair else operations.inspect_hint(lake)
    print_shown(report, as_json)
    if not report.is_right:
        raise click.exceptions.Exit(1)


@click.command(short_help="Flush buffers and merge thin nodes.")
@click.option("--message", help="Why, for the log.")
@json_option
@pass_session
def compact(session: Session, message: str | None, as_json: bool) -> None:
    """Flush all buffers of the tree down and merge thin nodes, as a version of its own.

    No namespace and no table changes. A tree in order is left alone, and nothing is committed. The command reads all
    nodes, before and after. Use it when tree shows thin nodes or many messages.

    Example: trinitylake compact
    """
    with Console(stderr=True).status("reading and packing the tree"):
        report = operations.compact(session.lake(), message)
    print_shown(report, as_json)


@click.command("compact-tables", short_help="Plan or do the merge of small data files.")
@click.argument("tables", metavar="[NAMESPACE.TABLE]...", nargs=-1)
@click.option("--target-bytes", type=WholeNumber(1), help="Size of file to aim at, instead of the table's own.")
@click.option("--min-files", type=WholeNumber(2), default=5, show_default=True, help="Merge no fewer small files.")
@click.option("--repartition", is_flag=True, help="Write all files of older partition specs by the current one.")
@click.option(
    "--spark",
    "master",
    metavar="MASTER",
    help="Write in tasks of Spark at this master, such as local[4], or at a server of Spark Connect, sc://host:15002.",
)
@click.option("--run-id", help="A run commits once under its id, however often it is started.")
@click.option("--message", help="Why, for the log.")
@approval_options
@json_option
@pass_session
def compact_tables(
    session: Session,
    tables: tuple[str, ...],
    target_bytes: int | None,
    min_files: int,
    repartition: bool,
    master: str | None,
    run_id: str | None,
    message: str | None,
    digest: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Write small data files of managed Iceberg tables anew as fewer; without --apply or --yes, print which.

    Files of one partition below three quarters of the target are merged, if there are enough of them. Files of which
    delete files delete rows are written anew without these, and the delete files go. The result is one new version for
    all tables, or for the named ones. No row changes, and older versions read the old files. Commits of others in
    between are kept. Give the same options again with --apply.

    Example: trinitylake compact-tables sales.orders --spark 'local[4]'
    """
    with shown_progress("reading the tables"):
        plan = operations.plan_compact_tables(
            session.lake(),
            tables or None,
            target_file_size_bytes=target_bytes,
            min_input_files=min_files,
            repartition=repartition,
        )
    report = None
    if digest is not None or yes:
        with shown_progress("writing data files"), group_writer(master) as write:
            report = plan.execute(write, run_id=run_id, approved_digest=digest, message=message)
    print_outcome(plan, report, as_json)


@contextmanager
def group_writer(master: str | None) -> Iterator[GroupWriter]:
    """Return the writer of groups of data files: this process, or Spark at a master."""
    from trinitylake_ops.iceberg.write.rewrite import rewrite_in_process

    if master is None:
        yield rewrite_in_process
        return
    from trinitylake_ops.spark import session_scope, write_groups_on

    with session_scope(master=master, remote=master if master.startswith("sc://") else None) as spark:
        yield write_groups_on(spark)


@click.command(short_help="Check all versions and their files.")
@click.option("--deep", is_flag=True, help="Read all again, data files of tables too, and compare it with the record.")
@click.option("--incremental", is_flag=True, help="Keep a record, and do not read again what it knows.")
@limit_options("Stop after so many requests", "Stop after so many seconds")
@engine_options
@html_option
@json_option
@pass_session
def verify(
    session: Session,
    /,
    deep: bool,
    incremental: bool,
    engine: Engine,
    html: Path | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Check all versions and every file that they reach. Exit code 1 when there is an error, or a limit ended it early.

    Warnings, such as a stale hint, are printed and do not count. With --incremental the next run goes on where a limit
    ended this one. A file that was read once is not read again if the listing shows it unchanged. Each run still checks
    that all files are there, with their sizes. With Spark all files are read first, without limits.

    Example: trinitylake verify --incremental --max-seconds 600 --html verify.html
    """
    lake = session.lake()
    with engine.executor() as executor, shown_progress("versions") as progress:
        report = operations.verify(
            lake,
            partial(progress, "versions"),
            deep=deep,
            incremental=incremental,
            budget=operations.Budget(**limits),
            executor=executor,
        )
    try:
        print_shown(report, as_json)
    finally:
        if html is not None:
            from trinitylake_ops.reports import verification_page  # with the code that draws it

            page_written(html, verification_page(report, lake.storage.now_ms()))
    if not report.is_clean or not report.is_complete:
        raise click.exceptions.Exit(1)


@click.command(short_help="Plan or do a repair of the findings of verify.")
@click.option(
    "--to-last-good",
    is_flag=True,
    help="Where the latest version is damaged, go back to what is whole: its damaged objects alone, or all.",
)
@click.option("--deep", is_flag=True, help="Read data files, too, as verify --deep does.")
@approval_options
@json_option
@pass_session
def repair(session: Session, to_last_good: bool, deep: bool, digest: str | None, yes: bool, as_json: bool) -> None:
    """Verify, and repair what can be repaired safely; without --apply or --yes, print what would be done.

    Repair sets the hint, reconciles the changes of another program to the settings, and forgets exports whose roots are
    gone. With --to-last-good it goes back to what is whole. All repairs are new commits, except the hint: nothing is
    deleted. Findings that are left are listed with what you can do. Exit code 1 when errors are among them. Give
    --to-last-good and --deep again with --apply.

    Example: trinitylake repair --to-last-good
    """
    lake = session.lake()
    with shown_progress("versions") as progress:
        report = operations.verify(lake, partial(progress, "versions"), deep=deep)
        plan = operations.plan_repair(lake, report, to_last_good=to_last_good)
        done = None if digest is None and not yes else plan.execute(digest)
    if done is None and plan.is_empty and not plan.is_complete:
        print_shown(plan, as_json)
        print_notice("No step of repair mends the errors that are left. What you can do is listed.")
        raise click.exceptions.Exit(1)
    is_complete = done is None or done.is_complete
    print_outcome(plan, done, as_json, is_complete=is_complete)


@click.command(short_help="Plan or do the relocation of tables.")
@click.option(
    "--table-root",
    metavar="URI",
    help="Where the files under the table root stand now. It becomes the table root of this lakehouse, which from then"
    " on frees what it does not need there. No copy of the lakehouse may go on using it.",
)
@approval_options
@json_option
@pass_session
def relocate(session: Session, table_root: str | None, digest: str | None, yes: bool, as_json: bool) -> None:
    """Write the tables' metadata for the place where the lakehouse is; without --apply or --yes, print which.

    This is for a lakehouse whose files were copied or moved. The files of its Iceberg tables hold full URIs, which name
    the former place. The lakehouse reads them at its own place all the same; other engines do not. No data file is
    copied, and the result is one new version for all tables.

    With --table-root it is for a lakehouse whose tables stand under a table root. Give the new one when its files were
    copied there, while writers rest. Give the same one when only the lakehouse itself was moved. Purge, orphans and
    expire then delete files there.

    Example: trinitylake relocate --table-root s3://new-bucket/tables
    """
    lake = session.lake()
    with shown_progress("reading the tables"):
        plan = operations.plan_relocation(lake, table_root)
        report = None if digest is None and not yes else plan.execute(digest)
    print_outcome(plan, report, as_json)
