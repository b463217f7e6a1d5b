"""Help texts of all operations, and the modules that declare them. Only ``load_operation`` imports a declaration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinitylake_ops.declarations.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The texts about an operation, which help and completion show without importing its declaration."""

    #: The module of this package that declares the operation. The constant's name is the job name in capitals.
    module: str
    #: The name of the generated command; None if there is none.
    command: str | None = None
    #: One line: verb and object.
    summary: str = ""
    #: What the command does, with an example.
    help: str = ""
    #: Whether the operation is one of the steps that reclaim space.
    is_reclaiming: bool = False


#: The epilog of each command that reclaims space.
RECLAIMING = """\b
Space is reclaimed in this order. Each step makes a plan first:
  trim      drops old snapshots of Iceberg tables from the latest version
  expire    expires old versions; undelete restores them until their purge begins
  purge     deletes the files that only expired versions need, after a grace period
  orphans   deletes the files that failed commits and aborted writes left, occasionally
Only one of these steps deletes at a time. If another program changed the settings,
nothing is deleted before a reconcile."""

#: The operations by name.
INDEX: Mapping[str, Entry] = {
    "maintain": Entry(
        module="maintenance",
        command="maintain",
        summary="Run all due operations by the maintenance policy.",
        help="""Run all operations that are due, by the maintenance policy of the lakehouse.

    In order: repair the hint, reconcile, resume interrupted exports, prune exports, trim and compact tables, compact
    the tree, expire, purge, remove orphans, drop overdue clones, verify, export. Each decision is reported with its
    reason. With --dry-run nothing is changed.

    What the policy does not allow without approval is reported with the command that approves it. Steps that meet a
    limit, and tables that other writers keep changing, are left for the next run, which begins with them. Run the
    command regularly: the next run continues an interrupted one, and two runs at once do no harm. The exit code is 1 if
    a step failed, or verify found errors.

    Example: trinitylake maintain --dry-run""",
    ),
    "rollback": Entry(
        module="rollback",
        command="rollback",
        summary="Return to the content of an earlier version.",
        help="""Return to the content of TO: the number of a version, or the name of an export.

    The rollback is a new version. The versions in between stay readable, so a rollback can itself be rolled back. The
    plan lists tables whose files are damaged or missing in the earlier version. Readers cannot read these tables after
    the rollback, so a plan that has some can only be applied with --apply.

    Example: trinitylake rollback 11 --table sales.orders""",
    ),
    "export": Entry(
        module="exports",
        command="export",
        summary="Keep a version under a name, here or at another root.",
        help="""Keep a version under a name, or finish an export that was interrupted.

    The level minimal copies the root node only. The level partial copies all nodes, and with --definitions also the
    definitions. Files that are not copied stay in place and are kept from expiring. The level full copies everything,
    including the files of managed tables. A full export does not need the source, and keeps no version once it is
    complete. Files of registered tables are never copied; the report lists these tables. Damaged tables are left out
    and listed, with exit code 1.

    With --target the export is a separate lakehouse at another root. The next export with the same target, level and
    namespaces adds a version there and copies only new files.

    Example: trinitylake export nightly-0412 --level full --target s3://backup/lake""",
    ),
    "restore": Entry(
        module="rollback",
        command="restore",
        summary="Restore the content of an export.",
        help="""Restore the content of an export, as a new version.

    From an export at another root, objects that are missing or changed here are copied back, and from a full export
    also objects that lost a file here. An export of some namespaces restores only those. Damaged tables of an export
    at another root are skipped and listed, with exit code 1. Otherwise damaged tables are treated as by rollback.

    Example: trinitylake restore nightly-0412 --table sales.orders""",
    ),
    "expire": Entry(
        module="gc",
        command="expire",
        summary="Expire old versions.",
        help="""Expire the versions that no retention rule keeps.

    Nothing is deleted yet. Readers can no longer open these versions, and a later purge deletes the files that only
    they need. Until that purge begins, undelete restores them.

    A version is kept if any rule keeps it. A rule that you pass replaces that rule of the lakehouse for this run. The
    digest of a plan covers the versions, exports and files that would expire, not the rules: --apply accepts other
    rules only if they expire exactly the same. The latest version, and versions that an export needs, are always kept,
    and so are versions that were superseded less than txn_ttl_millis plus 5 minutes ago.

    Example: trinitylake expire --max-age 30d --keep-monthly 12""",
        is_reclaiming=True,
    ),
    "undelete": Entry(
        module="gc",
        command="undelete",
        summary="Restore expired versions.",
        help="""Restore expired VERSIONS, such as 3-90,95, until their purge begins.

    The next expire expires them again, unless an export needs them or a setting keeps them.

    Example: trinitylake undelete 3-90,95""",
        is_reclaiming=True,
    ),
    "purge": Entry(
        module="gc",
        command="purge",
        summary="Delete the files of expired versions.",
        help="""Delete the files that only expired versions need. The plan shows how many, and from when.

    Once a purge has begun, its versions cannot be undeleted. It deletes files that the plans of their expiration list
    and that no kept version reaches: nodes, definitions, and files of managed tables in their own folders, including
    folders under a table root. It never deletes files of external, federated or registered tables, or files that no
    plan lists.

    A purge that was interrupted, or stopped by a limit, continues when you run it again. The exit code is 1 if files
    are left, because of a limit or because the storage refused to delete them; the report lists them. Pass --grace
    again with --apply.

    Example: trinitylake purge --grace 7d --max-seconds 3600""",
        is_reclaiming=True,
    ),
    "verify": Entry(
        module="checks",
        command="verify",
        summary="Check all versions and their files.",
        help="""Check all versions and every file that they reach.

    The exit code is 1 if there is an error, or if a limit ended the check early. Warnings, such as a stale hint, do not
    change the exit code.

    With --incremental the next run continues where a limit ended this one, and skips files that were read before if the
    listing shows them unchanged. Each run still checks that all files exist with the recorded sizes. With Spark all
    files are read first, without limits.

    Example: trinitylake verify --incremental --max-seconds 600 --html verify.html""",
    ),
    "repair": Entry(
        module="checks",
        command="repair",
        summary="Fix the findings of verify that can be fixed safely.",
        help="""Verify the lakehouse, and fix the findings that can be fixed safely.

    Repair sets the hint, reconciles settings that another program changed, and drops the records of exports whose roots
    were deleted. With --to-last-good it returns damaged objects, or the whole tree, to the last undamaged version. All
    repairs except the hint are new commits, and nothing is deleted. The remaining findings are listed with what you can
    do; the exit code is 1 if errors are among them. Pass --to-last-good and --deep again with --apply.

    Example: trinitylake repair --to-last-good""",
    ),
    "clone": Entry(
        module="clones",
        command="clone",
        summary="Clone the lakehouse to another root, without copying tables.",
        help="""Create a separate lakehouse at TARGET with all objects of a version.

    Table files are not copied: the clone reads them here, and they are kept until the clone is dropped. Commits to the
    clone write below its own root. An interrupted clone continues when you run the command again.

    Example: trinitylake clone s3://dev/feature-x --retain-for 14d""",
    ),
    "compare_clone": Entry(
        module="clones",
        command="compare",
        summary="Compare a clone with this lakehouse.",
        help="""List what changed in a clone, in this lakehouse, or in both, since the version that both share.

    Rows, files and bytes are those that the tables' snapshots record, those of the clone first.

    Example: trinitylake compare feature-x""",
    ),
    "promote": Entry(
        module="clones",
        command="promote",
        summary="Commit the changes of a clone to this lakehouse.",
        help="""Commit the changes of a clone to this lakehouse, as one version.

    Files that are new in the clone are copied. An object that changed on both sides is a conflict: resolve it with
    --ours to keep the state of this lakehouse, or with --theirs to take the state of the clone. Rows that both sides
    appended to a table are combined.

    Example: trinitylake promote feature-x --theirs sales.orders""",
    ),
    "refresh_clone": Entry(
        module="clones",
        command="refresh",
        summary="Commit the changes of this lakehouse to a clone.",
        help="""Commit the changes of this lakehouse to a clone, as one version there.

    An object that changed on both sides is a conflict: resolve it with --ours to keep the state of the clone, or with
    --theirs to take the state of this lakehouse.

    Example: trinitylake refresh feature-x --ours sales.orders""",
    ),
    "drop_clone": Entry(
        module="clones",
        command="drop-clone",
        summary="Drop a clone.",
        help="""Drop a clone, so that the versions that are kept for it can expire.

    Unless --delete-files is set, the files of the clone stay, but it loses the files that it reads here. With
    --delete-files its own files are deleted first; stop all its writers before. The exit code is 1 if a file could not
    be deleted.

    Example: trinitylake drop-clone feature-x --delete-files""",
    ),
    "drop_closed_branch": Entry(module="clones"),
    "drop_overdue_clones": Entry(module="clone_list"),
    "clones": Entry(
        module="clone_list",
        command="clones",
        summary="List the clones.",
        help="""List the clones: their age, how far they are ahead and behind, and the bytes of their own files.

    Only versions that changed objects are counted: those of the clone since it was created, and those of this lakehouse
    since the clone was created or refreshed.

    Example: trinitylake clones""",
    ),
    "compact_tables": Entry(
        module="compaction",
        command="compact-tables",
        summary="Merge small data files of tables.",
        help="""Merge small data files of managed Iceberg tables into fewer.

    Files of a partition that are smaller than three quarters of the target size are merged, if there are enough of
    them. Files with deleted rows are rewritten without those rows, and their delete files are dropped. The result is
    one new version for all tables, or for the named ones. Rows do not change, older versions still read the old files,
    and concurrent commits are kept. Pass the same options again with --apply.

    Example: trinitylake compact-tables sales.orders --engine spark""",
    ),
    "trim": Entry(
        module="gc",
        command="trim",
        summary="Expire snapshots of tables.",
        help="""Expire the snapshots of managed Iceberg tables that no kept version needs.

    The metadata of an Iceberg table lists all its snapshots, so the latest version needs the files of all of them, and
    expiring versions alone reclaims no data. A trim deletes no file. The result is one new version for all tables, or
    for the named ones. Older versions do not change. The files of the dropped snapshots are deleted once all versions
    from before the trim are expired and purged. Snapshots that a branch or a tag refers to are kept.

    The retention rules are those of expire. Pass the same ones to both commands.

    Example: trinitylake trim sales.orders""",
        is_reclaiming=True,
    ),
    "history": Entry(module="history"),
    "relocate": Entry(
        module="gc",
        command="relocate",
        summary="Rewrite table metadata after a move of the lakehouse.",
        help="""Rewrite the metadata of tables for the location where the lakehouse is now.

    Use this after the files of a lakehouse were copied or moved. The metadata of its Iceberg tables contains full URIs,
    which name the former location. This package resolves them at the current location; other engines do not. Data
    files are not copied, and the result is one new version for all tables.

    Use --table-root for a lakehouse whose tables are below a table root. If the files there were copied, pass the new
    table root, while no writer runs. If only the lakehouse itself was moved, pass the current one. Purge, orphans and
    expire then delete files there.

    Example: trinitylake relocate --table-root s3://new-bucket/tables""",
    ),
    "orphans": Entry(
        module="gc",
        command="orphans",
        summary="Delete the files that failed commits left.",
        help="""Delete the files that failed commits and aborted writes left behind. The plan lists them.

    An orphan has a name of the kind that a lakehouse generates, and is under the root, or in a table's folder under the
    table root. No version that can be opened or undeleted reaches it, and it is older than any running transaction can
    be. Other files in the same folders are never deleted, nor are files of external, federated or registered tables.

    The exit code is 1 if files are left, because of a limit or because the storage refused to delete them; the report
    lists them. Pass --older-than and --inventory again with --apply.

    Example: trinitylake orphans --older-than 7d""",
        is_reclaiming=True,
    ),
    "drop_export": Entry(
        module="exports",
        command="drop-export",
        summary="Drop an export.",
        help="""Drop an export and delete its root. The plan shows the consequences.

    The version of the export can then expire. The next orphan removal deletes its other copies, unless a version that
    it was restored to needs them. An export at another root stays there, but a minimal or partial one loses the files
    that it reads from here.

    Example: trinitylake drop-export before-migration""",
    ),
    "compact": Entry(
        module="compaction",
        command="compact",
        summary="Flush buffers and merge thin nodes.",
        help="""Flush all buffers of the tree and merge thin nodes, as a separate version.

    Namespaces and tables do not change. If the tree needs no compaction, nothing is committed. The command reads all
    nodes before and after. Use it if the command tree shows thin nodes or many messages.

    Example: trinitylake compact""",
    ),
    "reconcile": Entry(
        module="exports",
        command="reconcile",
        summary="Correct the settings after another program changed them.",
        help="""Correct exports and expirations after another program went back to older settings of the lakehouse.

    A program that does not support exports and expirations can cause this with a rollback. Nothing is deleted until
    this command has run. It keeps the exports of both settings, and versions stay expired only if both settings expire
    them. If there is nothing to correct, nothing is committed.

    A root that does not follow its predecessor (chain-broken, time-not-rising) cannot be corrected. With --acknowledge
    it is recorded as known, and verify no longer reports it as an error.

    Example: trinitylake reconcile --acknowledge 7""",
    ),
    "repair_hint": Entry(
        module="exports",
        command="repair-hint",
        summary="Write the latest version into the hint file.",
        help="""Write the number of the latest version into the hint file.

    A wrong hint never causes a wrong read, but costs every reader requests. With --check-only nothing is written, and
    the exit code is 1 if the hint is wrong.

    Example: trinitylake repair-hint""",
    ),
    "space": Entry(
        module="space",
        command="space",
        summary="Show bytes and files by table, and what would reclaim space.",
        help="""Show the bytes and files of the lakehouse by namespace and table, and what would reclaim space.

    No file counts twice. It counts for the latest version if that needs it, otherwise for older versions that the
    retention rules keep, for exports, for clones, for versions that can expire, and last for expired versions. Files of
    registered tables and of other lakehouses do not count.

    The sums are kept in the lakehouse, so that a run reads only what was committed since the previous one. Sizes of
    data files are those that manifests declare. Files that no version needs are measured with --find-unreached or
    --inventory.

    Example: trinitylake space --top 20 --html space.html""",
    ),
    "exports": Entry(
        module="retained_exports",
        command="exports",
        summary="List the exports.",
        help="""List the exports.

    Example: trinitylake exports""",
    ),
    "verify_export": Entry(
        module="retained_exports",
        command="verify-export",
        summary="Compare an export with its manifest.",
        help="""Check whether all files of an export are present and unchanged. The exit code is 1 if not.

    For an export at another root, this includes all files that its version needs there, also copies made by earlier
    exports.

    Example: trinitylake verify-export nightly-0412 --deep""",
    ),
    "prune_exports": Entry(
        module="retained_exports",
        command="prune-exports",
        summary="Drop old exports by rules.",
        help="""Drop old exports whose names match PATTERN. The plan shows which ones and why.

    An export is kept if any rule keeps it, by its creation time. The newest one is always kept. At least one rule is
    required.

    Example: trinitylake prune-exports 'nightly-*' --keep-daily 7 --keep-weekly 4""",
    ),
    "create_namespace": Entry(
        module="namespaces",
        command="create-namespace",
        summary="Create a namespace.",
        help="""Create a namespace.

    Example: trinitylake create-namespace sales --property owner=finance""",
    ),
    "drop_namespace": Entry(
        module="namespaces",
        command="drop-namespace",
        summary="Drop a namespace.",
        help="""Drop a namespace from the latest version. The plan lists the tables that are dropped with it.

    Older versions keep the namespace, so rollback restores it.

    Example: trinitylake drop-namespace sales --cascade""",
    ),
    "resolve_commit": Entry(
        module="namespaces",
        command="resolve-commit",
        summary="Show the outcome of a commit whose response was lost.",
        help="""Show the outcome of a commit whose response was lost: committed, lost or undecided.

    VERSION and COMMIT_ID are those that the error of the commit named. Undecided means that a delayed request may still
    create the version. With --fence it no longer can, and the outcome is final. The exit code is 0 if it was committed,
    otherwise 1.

    Example: trinitylake resolve-commit 12 6f1b1c1e-5f0a-4c53-8a6e-1f0e8a7f6b2d --fence""",
    ),
    "log": Entry(module="history"),
    "diff": Entry(module="history"),
}


def load_operation(job: str) -> Operation[Any]:
    """Return an operation by name. Imports only the module that declares it."""
    from trinitylake_ops.declarations.planned import PlanDeclaration

    declared = getattr(import_module(f"trinitylake_ops.declarations.{INDEX[job].module}"), job.upper())
    operation: Operation[Any] = declared.operation() if isinstance(declared, PlanDeclaration) else declared
    return operation
