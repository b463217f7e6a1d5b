"""The steps of a repair, and advice for findings that no repair removes.

Each checks again whether it is needed, so that a repair that was cut off can be planned and run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trinitylake_ops.errors import CommitConflictError, InvalidInputError, StorageError
from trinitylake_ops.format.definitions import ExportState, LakehouseDef
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.iceberg.managed import claim_folder
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.operations.export_records import without_exports
from trinitylake_ops.operations.gc.reconcile import reconcile
from trinitylake_ops.operations.hint import repair_hint
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.draft import Draft, RootStamp, draft_of_tree
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.lookup import check_not_expired
from trinitylake_ops.versions.roots import check_no_gap
from trinitylake_ops.versions.snapshot import Snapshot

OPERATION = "repair"


class Step(Protocol):
    """A step, as data."""

    def take(self, lake: Lakehouse, latest: int) -> int:
        """Take the step on the version that is expected to be the latest. Return the latest one then."""


@dataclass(frozen=True, slots=True)
class SettleDefinition:
    """Reconciles another program's changes to the lakehouse definition."""

    def take(self, lake: Lakehouse, latest: int) -> int:
        return reconcile(lake).version or latest


def missing_exports(lake: Lakehouse, definition: LakehouseDef) -> list[str]:
    """Return the names of complete exports whose roots stood under this root and are gone. Raises StorageError."""
    complete = [record for record in definition.exports if record.state == ExportState.COMPLETE]
    roots = {record.name: record.root_location for record in complete} | dict(definition.exported_snapshots)
    gone = []
    for name, location in sorted(roots.items()):
        try:
            path = to_location(lake.root, location)
        except InvalidInputError:
            continue
        if not is_uri(path) and not lake.storage.exists(path):
            gone.append(name)
    return gone


@dataclass(frozen=True, slots=True)
class DropExports:
    """Forgets exports of these names whose roots are still gone."""

    names: tuple[str, ...]

    def take(self, lake: Lakehouse, latest: int) -> int:
        def dropped(base: Snapshot) -> LakehouseDef | None:
            gone = [name for name in missing_exports(lake, base.definition) if name in self.names]
            return without_exports(base.definition, gone) if gone else None

        change = DefinitionChange(OPERATION, f"exports without their root: {', '.join(self.names)}", dropped)
        return change.commit(lake, _expected(lake, latest))


@dataclass(frozen=True, slots=True)
class SetHint:
    """Lets the hint name the latest version."""

    def take(self, lake: Lakehouse, latest: int) -> int:
        return max(repair_hint(lake).latest, latest)


@dataclass(frozen=True, slots=True)
class ClaimFolders:
    """Writes the owner files of tables that versions define.

    All folders are tried. Then raises the first error, such as FileExistsAlreadyError for an owner file of another
    lakehouse.
    """

    table_ids: tuple[str, ...]

    def take(self, lake: Lakehouse, latest: int) -> int:
        storage, lakehouse_id = lake.storage, lake.snapshot().definition.id

        def claim(table_id: str) -> StorageError | None:
            try:
                claim_folder(storage, table_id, lakehouse_id)
            except StorageError as error:
                return error
            return None

        for error in run_parallel(claim, self.table_ids, storage.concurrency):
            if error is not None:
                raise error
        return latest


def _expected(lake: Lakehouse, latest: int) -> Snapshot:
    """Return the latest version. Raises CommitConflictError unless it is the expected one."""
    base = lake.snapshot()
    if base.version != latest:
        raise _outdated_plan_error(latest, base.version)
    return base


def _outdated_plan_error(base_version: int, latest_version: int) -> CommitConflictError:
    return CommitConflictError(
        f"version {latest_version} was committed after version {base_version}, for which the repair was planned;"
        " verify, and look at the new plan",
        conflicts=(f"version {latest_version}",),
        base_version=base_version,
        latest_version=latest_version,
    )


@dataclass(frozen=True)
class _Tree:
    """The tree of an earlier version under the current lakehouse definition. The latest tree is not read."""

    version: int
    root: NodeFile

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        info = CommitInfo(OPERATION, f"to version {self.version}, the newest one that is whole")
        return draft_of_tree(base, stamp, self.root, info, is_rollback=True)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        raise _outdated_plan_error(base.version, latest.version)


@dataclass(frozen=True, slots=True)
class RollbackStep:
    """Commits the tree of an earlier version, by its root."""

    version: int
    root: NodeFile

    def take(self, lake: Lakehouse, latest: int) -> int:
        base = _expected(lake, latest)
        check_no_gap(lake.files.roots, base.version)
        check_not_expired(self.version, base.definition)
        return lake.commit(_Tree(self.version, self.root), base)


@dataclass(frozen=True, slots=True)
class RestoreEntries:
    """Lets keys point to the definitions that an earlier version has."""

    version: int
    entries: Mapping[str, str]

    def take(self, lake: Lakehouse, latest: int) -> int:
        check_no_gap(lake.files.roots, latest)

        def check(base: Snapshot) -> None:
            check_not_expired(self.version, base.definition)
            if base.version != latest:
                raise _outdated_plan_error(latest, base.version)

        message = f"objects of version {self.version}, which has them whole"
        with lake.transaction(message=message, operation=OPERATION) as txn:
            txn.require(check)
            for key, location in sorted(self.entries.items()):
                txn.restore_entry(key, location)
        assert txn.committed_version is not None
        return txn.committed_version


_RESTORE = "restore the file from a backup of the storage"
_OLDER = f"{_RESTORE}; else versions that need it stay damaged until they expire"

_LEFT = "run orphans"

_ADVICE = {
    "root-missing": _RESTORE,
    "root-corrupt": f"{_RESTORE}; other versions do not need it",
    "latest-sealed": f"{_RESTORE}; else move it away",
    "root-beyond-gap": "restore the missing root from a backup; commit nothing before",
    "root-naming-mixed": "find out which program wrote it, then move it away",
    "node-corrupt": _OLDER,
    "node-missing": _OLDER,
    "pointer-damaged": _OLDER,
    "tree-invariant": _OLDER,
    "definition-unreadable": _OLDER,
    "definition-changed": f"{_RESTORE}; else let the program that wrote it commit the settings of creation",
    "key-malformed": "find the program that wrote it, then roll back to a version before",
    "namespace-missing": "create the namespace again, or roll back to a version before",
    "chain-broken": "find the program that wrote it; then reconcile --acknowledge its versions",
    "time-not-rising": "find the clock that is wrong; then reconcile --acknowledge its versions",
    "time-in-future": "set the clock right",
    "clock-set-back": "nothing to do: times before that version were ahead; set the clock right that made them",
    "barrier-in-future": "set the clock right; the next removal of files that no version reaches replaces the barrier",
    "table-file-missing": _OLDER,
    "table-file-size": _OLDER,
    "table-file-corrupt": _OLDER,
    "table-unreadable": _OLDER,
    "table-names-code": "find out who wrote it; any commit to the table leaves the property out",
    "table-file-repeated": "overwrite the rows of that file, or roll the table back; later snapshots list it once then",
    "name-shared": "rename the table, or drop the view",
    "table-has-two-names": "find out which name is right, and drop the other one; the files stay",
    "table-names-connection": "find out who wrote it; any commit to the table leaves the property out",
    "table-bounds": "run compact-tables; older versions keep the bounds until they expire",
    "file-changed": _RESTORE,
    "export-unreadable": "drop the export and make it again",
    "export-damaged": "drop the export and make it again",
    "export-unpinned": "drop the export or clone",
    "export-cut-off": "export or clone again, or drop it",
    "name-taken-twice": "drop that name, which forgets all that have it; then make again what is needed",
    "zombie-root": "find the program that wrote it; seal it by restoring the file that the purge wrote",
    "purge-unfinished": "run purge",
    "lease-stale": "run the operation again",
    "lease-unreadable": "allow verify to read it",
    "operation-file-damaged": "run the operation that writes it again; what it says is not relied on",
    "owner-damaged": "move the file away, if the folder is this lakehouse's; repair then writes it anew",
    "owner-other": "find that lakehouse before anything is removed; if it has no such table, do as with a damaged one",
    "owner-missing": "read the definition of the lakehouse again first; repair then writes it",
    "owner-missing-there": "write to the table: each write makes it first",
    "table-root-kept": "if the table root is this lakehouse's, run relocate --table-root with it",
    "record-damaged": "run verify --incremental, which writes a new one",
    "record-not-written": "allow verify to create files under _ops/, or run it without --incremental",
    "external-unreadable": "ask the owner of the table; else drop it, or register it again",
    "moved": "run relocate",
    "hint-wrong": "run repair-hint; where it is ahead, restore the root that it names first",
    "reconcile-needed": "run reconcile",
    "manifest-missing": "run the export again, or drop it",
    "plan-missing": "run purge, then orphans",
    "plan-left": _LEFT,
    "transaction-left": _LEFT,
    "export-left": _LEFT,
    "orphans": _LEFT,
}


def advice_on(code: str) -> str:
    """Return what an operator can do about findings of this code."""
    return _ADVICE.get(code, "see the findings of verify in docs/operations/verify.md")
