"""Commands about exports: export, exports, verify-export, drop-export, prune-exports, restore."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from trinitylake_ops import operations
from trinitylake_ops.cli.context import (
    Duration,
    Session,
    approval_options,
    json_option,
    pass_session,
    print_committed,
    print_json,
    print_notice,
    print_plan,
    print_shown,
    print_table,
    shown_progress,
    target_option,
)
from trinitylake_ops.cli.engine import Engine, engine_options
from trinitylake_ops.cli.gc import policy_options_of
from trinitylake_ops.operations import RetentionPolicy
from trinitylake_ops.operations.exports.export import LEVELS
from trinitylake_ops.operations.rendering import new_table
from trinitylake_ops.storage.options import StorageOptions


@click.command(short_help="Keep a version under a name, here or elsewhere.")
@click.argument("name")
@click.option("--level", type=click.Choice(LEVELS), default=LEVELS[0], show_default=True, help="How much is copied.")
@click.option("--version", metavar="N", help="The version to export; default: the latest.")
@click.option("--target", metavar="URI", help="Another root, where the export becomes a lakehouse of its own.")
@target_option
@click.option("--namespace", "namespaces", multiple=True, help="Only this namespace; may be repeated.")
@click.option("--definitions", is_flag=True, help="Let a partial export copy definitions, too.")
@click.option(
    "--retain-for",
    type=Duration(),
    help="Keeps its version so long, such as 30d; default: until dropped. No full export needs it.",
)
@engine_options
@json_option
@pass_session
def export(
    session: Session,
    /,
    name: str,
    level: str,
    version: str | None,
    target: str | None,
    target_options: StorageOptions | None,
    namespaces: tuple[str, ...],
    definitions: bool,
    retain_for: timedelta | None,
    engine: Engine,
    as_json: bool,
) -> None:
    """Keep a version under a name, or finish an export that was cut off.

    The level minimal copies the root node only. The level partial copies all nodes and, with --definitions, these.
    Files that are not copied stay in place and are kept from expiring. The level full copies everything, with the files
    of managed tables. Such an export no longer needs the source, and keeps no version once it is complete. Registered
    tables are named: their files stay with their own catalogs. A damaged table is left out and named, with exit code 1.

    With --target the export is a lakehouse at another root. The next export with the same target, level and
    namespaces adds a version there and copies only what is new.

    Example: trinitylake export nightly-0412 --level full --target s3://backup/lake
    """
    with engine.executor() as executor, shown_progress() as progress:
        plan = operations.plan_export(
            session.lake(),
            name,
            level,
            version,
            target,
            retain_for,
            namespaces=namespaces,
            definitions=definitions,
            target_options=target_options,
            executor=executor,
        )
        report = plan.execute(progress=progress)
    print_shown(report, as_json)
    if not report.is_complete:
        raise click.exceptions.Exit(1)


@click.command()
@json_option
@pass_session
def exports(session: Session, as_json: bool) -> None:
    """List the exports.

    Example: trinitylake exports
    """
    found = operations.list_exports(session.lake())
    if as_json:
        print_json(found)
        return
    rows = [
        (info.name, info.version, info.level, info.state, info.created_at, info.retain_until, info.location)
        for info in found
    ]
    print_table(new_table("", "name", "version", "level", "state", "created (UTC)", "kept until", "root", rows=rows))


@click.command("verify-export", short_help="Compare an export with its manifest.")
@click.argument("name")
@click.option("--deep", is_flag=True, help="Read all copies and compare their checksums, not only their sizes.")
@target_option
@json_option
@pass_session
def verify_export(
    session: Session, name: str, deep: bool, target_options: StorageOptions | None, as_json: bool
) -> None:
    """Say whether all files of an export are present and unchanged. Exit code 1 if not.

    For an export at another root, these are all files that its version needs there, also copies of earlier exports.

    Example: trinitylake verify-export nightly-0412 --deep
    """
    with shown_progress() as progress:
        report = operations.verify_export(
            session.lake(), name, deep=deep, target_options=target_options, progress=progress
        )
    print_shown(report, as_json)
    if not report.is_clean:
        raise click.exceptions.Exit(1)


@click.command("drop-export", short_help="Plan or do the drop of an export.")
@click.argument("name")
@approval_options
@json_option
@pass_session
def drop_export(session: Session, name: str, digest: str | None, yes: bool, as_json: bool) -> None:
    """Forget an export and delete its root; without --apply or --yes, print what follows.

    Its version can expire from then on. The next removal of orphans deletes its other copies, unless a version that it
    was restored to needs them. An export at another root stays there. A minimal or partial one loses the files that it
    still reads from here.

    Example: trinitylake drop-export before-migration
    """
    plan = operations.plan_drop_export(session.lake(), name)
    if digest is None and not yes:
        print_plan(plan, as_json)
        return
    version = plan.execute(digest).version
    print_committed(version, as_json, f"Dropped export {name}", name=name)
    if plan.loses_files:
        print_notice(
            f"The lakehouse at {plan.export.target} reads files from here that nothing keeps any more: they go with the"
            " next expirations, purges and removals of orphans"
        )


@click.command(short_help="Plan or do the restore of an export.")
@click.argument("name")
@click.option("--namespace", "namespaces", multiple=True, help="Only this namespace; may be repeated.")
@click.option("--table", "tables", multiple=True, metavar="NS.TABLE", help="Only this table; may be repeated.")
@target_option
@approval_options
@json_option
@pass_session
def restore(
    session: Session,
    name: str,
    namespaces: tuple[str, ...],
    tables: tuple[str, ...],
    target_options: StorageOptions | None,
    digest: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Bring back what an export holds, as a new version; without --apply or --yes, print what would change.

    From another root, objects that are missing or were changed here are copied back. So are, from a full export, those
    that lost a file here. An export of some namespaces brings back only these. Damaged tables of an export at another
    root stay as they are here and are listed, with exit code 1. Other damaged tables: as for rollback.

    Example: trinitylake restore nightly-0412 --table sales.orders
    """
    plan = operations.plan_restore(session.lake(), name, namespaces, tables, target_options=target_options)
    if digest is None and not yes:
        print_plan(plan, as_json)
        return
    if isinstance(plan, operations.RestorePlan):
        with shown_progress() as progress:
            report = plan.execute(digest, progress=progress)
    else:
        report = plan.execute(digest)
    details = {"changes": plan.changes, "damaged": report.damaged}
    print_committed(report.version, as_json, f"Restored export {name}", has_changed=report.has_changed, **details)
    if not report.is_complete:
        print_notice(f"Damaged tables: {', '.join(report.damaged)}")
    if not report.is_complete and isinstance(plan, operations.RestorePlan):
        raise click.exceptions.Exit(1)


@click.command("prune-exports", short_help="Plan or do the drop of old exports by rules.")
@click.argument("pattern")
@policy_options_of("export")
@approval_options
@json_option
@pass_session
def prune_exports(
    session: Session,
    /,
    pattern: str,
    max_age: timedelta | None,
    digest: str | None,
    yes: bool,
    as_json: bool,
    **rules: int | None,
) -> None:
    """Drop old exports whose names match PATTERN; without --apply or --yes, print which ones and why.

    An export is kept when any rule keeps it, by the time when it was made. The newest one is always kept. Without a
    rule nothing is dropped.

    Example: trinitylake prune-exports 'nightly-*' --keep-daily 7 --keep-weekly 4
    """
    maximum_age_ms = 0 if max_age is None else max_age // timedelta(milliseconds=1)
    minimum = rules.pop("min_versions") or 0
    periods: dict[str, Any] = {name: number or 0 for name, number in rules.items()}
    policy = RetentionPolicy(maximum_age_ms=maximum_age_ms, minimum_versions=minimum, protected_ms=0, **periods)
    plan = operations.plan_prune_exports(session.lake(), pattern, policy)
    if digest is None and not yes:
        print_plan(plan, as_json)
        return
    names = plan.names
    version = plan.execute(digest).version
    print_committed(version, as_json, f"Dropped exports {', '.join(names)}", has_changed=bool(names), names=names)
