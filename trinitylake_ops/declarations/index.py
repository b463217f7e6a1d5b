"""What people read about each operation, and where it is declared. Only ``load_operation`` loads a declaration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinitylake_ops.declarations.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The texts of an operation, which help and completion show without loading its declaration."""

    #: The module of this package that declares the operation, as the name of its job in capitals.
    module: str
    #: The name of the generated command, None without one.
    command: str | None = None
    #: One line: a verb and an object.
    summary: str = ""
    #: What the command does, in paragraphs, with an example.
    help: str = ""
    #: Whether it is one of the steps that reclaim space.
    is_reclaiming: bool = False


#: Shown below the help of each command that reclaims space.
RECLAIMING = """\b
Space is reclaimed in this order, each step a plan first:
  trim      drops old snapshots of Iceberg tables from the latest version
  expire    expires old versions; undelete brings them back until their purge begins
  purge     after the grace: deletes the files that only expired versions need
  orphans   now and then: deletes what failed commits and aborted writes left
Nothing is deleted while another of them deletes, or before a reconcile when another
program changed the settings."""

#: The operations by the names of their jobs.
INDEX: Mapping[str, Entry] = {
    "rollback": Entry(
        module="rollback",
        command="rollback",
        summary="Return to the content of an earlier version.",
        help="""Return to the content of TO: the number of a version, or the name of an export.

    The rollback is a new version. The versions in between stay readable, so it can be undone the same way. The plan
    lists tables whose files are damaged or missing in that version. They come back unreadable, which only --apply
    permits.

    Example: trinitylake rollback 11 --table sales.orders""",
    ),
    "export": Entry(
        module="exports",
        command="export",
        summary="Keep a version under a name, here or at another root.",
        help="""Keep a version under a name, or finish an export that was interrupted.

    The level minimal copies the root node only. The level partial copies all nodes and, with --definitions, these.
    Files that are not copied stay in place and are kept from expiring. The level full copies everything, with the files
    of managed tables. Such an export no longer needs the source, and keeps no version once it is complete. Registered
    tables are named: their files stay with their own catalogs. A damaged table is left out and named, with exit code 1.

    With --target the export is a separate lakehouse at another root. The next export with the same target, level and
    namespaces adds a version there and copies only what is new.

    Example: trinitylake export nightly-0412 --level full --target s3://backup/lake""",
    ),
    "restore": Entry(
        module="rollback",
        command="restore",
        summary="Restore the content of an export.",
        help="""Bring back the content of an export, as a new version.

    From another root, objects that are missing or were changed here are copied back. So are, from a full export, those
    that lost a file here. An export of some namespaces brings back only these. Damaged tables of an export at another
    root stay as they are here and are listed, with exit code 1. Other damaged tables: as for rollback.

    Example: trinitylake restore nightly-0412 --table sales.orders""",
    ),
    "expire": Entry(
        module="gc",
        command="expire",
        summary="Expire old versions.",
        help="""Expire the versions that no rule of retention keeps.

    Nothing is deleted yet. Readers can no longer open these versions, and a later purge deletes the files that only
    they need. Until that purge begins, undelete brings them back.

    A version is kept when any rule keeps it. A rule that you pass replaces that rule of the lakehouse for this run.
    Pass the same ones with --apply. The latest version, and versions that an export needs, are always kept. So are
    versions that were superseded less than the txn_ttl_millis of the lakehouse and 5 minutes ago.

    Example: trinitylake expire --max-age 30d --keep-monthly 12""",
        is_reclaiming=True,
    ),
    "undelete": Entry(
        module="gc",
        command="undelete",
        summary="Bring expired versions back.",
        help="""Bring expired VERSIONS back, such as 3-90,95, byte for byte.

    This is possible until their purge begins. The next expiry expires them again, unless an export needs them or a
    setting keeps them.

    Example: trinitylake undelete 3-90,95""",
        is_reclaiming=True,
    ),
    "purge": Entry(
        module="gc",
        command="purge",
        summary="Delete the files of expired versions.",
        help="""Delete the files that only expired versions need. The plan shows how many, and from when.

    Once it has begun, nothing brings these versions back. It deletes files that the plans of their expiry list and that
    nothing reaches any more. These are nodes, definitions, and files of managed tables in their own locations,
    including those under a table root. It never deletes files of external, federated or registered tables, or files
    that no plan lists.

    A purge that was interrupted, or stopped by a limit, continues when you run it again. Exit code 1 when files are
    left, because of a limit or because the storage refused. The report says which files and why. Pass --grace again
    with --apply.

    Example: trinitylake purge --grace 7d --max-seconds 3600""",
        is_reclaiming=True,
    ),
    "verify": Entry(
        module="checks",
        command="verify",
        summary="Check all versions and their files.",
        help="""Check all versions and every file that they reach.

    Exit code 1 when there is an error, or when a limit ended the check early.

    Warnings, such as a stale hint, are printed and do not count. With --incremental the next run continues where a
    limit ended this one. A file that was read once is not read again if the listing shows it unchanged. Each run still
    checks that all files are there, with their sizes. With Spark all files are read first, without limits.

    Example: trinitylake verify --incremental --max-seconds 600 --html verify.html""",
    ),
    "repair": Entry(
        module="checks",
        command="repair",
        summary="Fix what verify finds, as far as that is safe.",
        help="""Verify the lakehouse, and fix the findings that can be fixed safely.

    Repair sets the hint, reconciles the changes of another program to the settings, and drops the records of exports
    whose roots were deleted. With --to-last-good it returns to what is undamaged. All repairs are new commits, except
    the hint: nothing is deleted. Findings that are left are listed with what you can do. Exit code 1 when errors are
    among them. Pass --to-last-good and --deep again with --apply.

    Example: trinitylake repair --to-last-good""",
    ),
    "clone": Entry(
        module="clones",
        command="clone",
        summary="Clone the lakehouse to another root, without a copy of its tables.",
        help="""Make a separate lakehouse at TARGET, which has all objects of a version.

    No file of a table is copied: the clone reads them here, and they are kept until the clone is dropped. What is
    committed there is written below its own root. A clone that was interrupted continues when the command is run again.

    Example: trinitylake clone s3://dev/feature-x --retain-for 14d""",
    ),
    "compare_clone": Entry(
        module="clones",
        command="compare",
        summary="Compare a clone with this lakehouse.",
        help="""List what changed in a clone, here, or in both, since the version that both share.

    Rows, files and bytes are those that the snapshots of tables record. The first are those of the clone.

    Example: trinitylake compare feature-x""",
    ),
    "promote": Entry(
        module="clones",
        command="promote",
        summary="Commit the changes of a clone to this lakehouse.",
        help="""Commit what changed in a clone to this lakehouse, as one version.

    Files that are new in the clone are copied. What changed on both sides is a conflict. With --ours it stays as it is
    here, and with --theirs it becomes what the clone has. Rows that both sides appended to a table are combined.

    Example: trinitylake promote feature-x --theirs sales.orders""",
    ),
    "refresh_clone": Entry(
        module="clones",
        command="refresh",
        summary="Commit the changes of this lakehouse to a clone.",
        help="""Commit what changed here to a clone, as one version there.

    What changed on both sides is a conflict. With --ours it stays as it is in the clone, and with --theirs it becomes
    what this lakehouse has.

    Example: trinitylake refresh feature-x --ours sales.orders""",
    ),
    "drop_clone": Entry(
        module="clones",
        command="drop-clone",
        summary="Drop a clone.",
        help="""Release what is kept for a clone.

    A clone whose own files stay then loses those that it reads here. With --delete-files its own files are deleted
    first: stop all writers there before. Exit code 1 when a file could not be deleted.

    Example: trinitylake drop-clone feature-x --delete-files""",
    ),
    "drop_closed_branch": Entry(module="clones"),
    "drop_overdue_clones": Entry(module="clone_list"),
    "clones": Entry(
        module="clone_list",
        command="clones",
        summary="List the clones.",
        help="""List the clones: their age, how far they are ahead and behind, and the bytes of their own files.

    Versions count if they changed objects: those of the clone since it was made, and those here since it was made or
    refreshed.

    Example: trinitylake clones""",
    ),
    "compact_tables": Entry(
        module="compaction",
        command="compact-tables",
        summary="Merge small data files of tables.",
        help="""Merge small data files of managed Iceberg tables into fewer.

    Files of one partition below three quarters of the target are merged, if there are enough of them. Files of which
    delete files delete rows are rewritten without these, and the delete files are dropped. The result is one new
    version for all tables, or for the named ones. No row changes, and older versions read the old files. Commits of
    others in between are kept. Pass the same options again with --apply.

    Example: trinitylake compact-tables sales.orders --engine spark""",
    ),
    "trim": Entry(
        module="gc",
        command="trim",
        summary="Expire snapshots of tables.",
        help="""Expire the snapshots of managed Iceberg tables that no kept version needs.

    The metadata of an Iceberg table lists all its snapshots. So the latest version needs the files of all of them, and
    expiring versions alone reclaims no data. A trim deletes no file. The result is one new version for all tables, or
    for the named ones. Older versions read as before. The files of the dropped snapshots are deleted when all versions
    from before the trim are expired and purged. Snapshots that a branch or a tag names stay.

    The rules say which versions are kept, as those of expire do. Pass both commands the same ones.

    Example: trinitylake trim sales.orders""",
        is_reclaiming=True,
    ),
    "history": Entry(module="history"),
    "relocate": Entry(
        module="gc",
        command="relocate",
        summary="Rewrite table metadata after a move of the lakehouse.",
        help="""Rewrite the metadata of tables for the location where the lakehouse is now.

    This is for a lakehouse whose files were copied or moved. The files of its Iceberg tables contain full URIs, which
    name the former location. The lakehouse reads them at its own location all the same; other engines do not. No data
    file is copied, and the result is one new version for all tables.

    Use --table-root for a lakehouse whose tables are below a table root. Pass the new one when its files were copied
    there, while no writer runs. Pass the same one when only the lakehouse itself was moved. Purge, orphans and expire
    then delete files there.

    Example: trinitylake relocate --table-root s3://new-bucket/tables""",
    ),
    "orphans": Entry(
        module="gc",
        command="orphans",
        summary="Delete the files that failed commits left.",
        help="""Delete the files that failed commits and aborted writes left behind. The plan lists them.

    An orphan has a name that the lakehouse gives, and is under its root, or under its table root in a table's folder.
    No version that can be opened or undeleted reaches it. It is older than any transaction can be. Other files in the
    same folders are never deleted, nor are those of external, federated or registered tables.

    Exit code 1 when files are left, because of a limit or because the storage refused. The report says which files and
    why. Pass --older-than and --inventory again with --apply.

    Example: trinitylake orphans --older-than 7d""",
        is_reclaiming=True,
    ),
    "drop_export": Entry(
        module="exports",
        command="drop-export",
        summary="Drop an export.",
        help="""Drop an export and delete its root. The plan shows what follows.

    Its version can expire from then on. The next removal of orphans deletes its other copies, unless a version that it
    was restored to needs them. An export at another root stays there. A minimal or partial one loses the files that it
    still reads from here.

    Example: trinitylake drop-export before-migration""",
    ),
    "compact": Entry(
        module="compaction",
        command="compact",
        summary="Flush buffers and merge thin nodes.",
        help="""Flush all buffers of the tree and merge thin nodes, as a separate version.

    No namespace and no table changes. A tree in order is left alone, and nothing is committed. The command reads all
    nodes, before and after. Use it when tree shows thin nodes or many messages.

    Example: trinitylake compact""",
    ),
    "reconcile": Entry(
        module="exports",
        command="reconcile",
        summary="Correct the settings after another program changed them.",
        help="""Correct exports and expirations after another program returned to older settings of the lakehouse.

    A program that does not know exports and expirations can cause this by a rollback. From then on nothing is deleted
    until this command ran. Exports of both sides are kept. Versions stay expired if they are expired on both sides. If
    there is nothing to correct, nothing is committed.

    A root that does not follow the one before (chain-broken, time-not-rising) cannot be corrected. With --acknowledge
    this is recorded as known, and verify reports it as past from then on.

    Example: trinitylake reconcile --acknowledge 7""",
    ),
    "repair_hint": Entry(
        module="exports",
        command="repair-hint",
        summary="Write the latest version into the hint file.",
        help="""Write the number of the latest version into the hint file.

    A wrong hint never makes a read wrong; it costs every reader requests. With --check-only nothing is written, and the
    exit code is 1 when the hint is wrong.

    Example: trinitylake repair-hint""",
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
        help="""Check whether all files of an export are present and unchanged. Exit code 1 if not.

    For an export at another root, these are all files that its version needs there, including copies of earlier
    exports.

    Example: trinitylake verify-export nightly-0412 --deep""",
    ),
    "prune_exports": Entry(
        module="retained_exports",
        command="prune-exports",
        summary="Drop old exports by rules.",
        help="""Drop old exports whose names match PATTERN. The plan shows which ones and why.

    An export is kept when any rule keeps it, by the time when it was made. The newest one is always kept. Without a
    rule nothing is dropped.

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
        help="""Drop a namespace from the latest version. The plan shows what goes with it.

    Older versions keep it: rollback brings it back.

    Example: trinitylake drop-namespace sales --cascade""",
    ),
    "resolve_commit": Entry(
        module="namespaces",
        command="resolve-commit",
        summary="Show the outcome of a commit whose response was lost.",
        help="""Show whether a commit whose response was lost took place: committed, lost or undecided.

    VERSION and COMMIT_ID are those that its error named. Undecided means that a request still on its way may create the
    version. With --fence it no longer can, and the result is final. Exit code 0 when it was committed, 1 when not.

    Example: trinitylake resolve-commit 12 6f1b1c1e-5f0a-4c53-8a6e-1f0e8a7f6b2d --fence""",
    ),
    "log": Entry(module="history"),
    "diff": Entry(module="history"),
}


def load_operation(job: str) -> Operation[Any]:
    """Return an operation by the name of its job, and load only the module that declares it."""
    from trinitylake_ops.declarations.planned import PlanDeclaration

    declared = getattr(import_module(f"trinitylake_ops.declarations.{INDEX[job].module}"), job.upper())
    operation: Operation[Any] = declared.operation() if isinstance(declared, PlanDeclaration) else declared
    return operation
