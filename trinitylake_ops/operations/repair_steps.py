"""The steps of a repair, and advice on findings that no repair fixes.

Each step checks again whether it is needed, so that an interrupted repair can be planned and run again.
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
    """A step of a repair, as a dataclass."""

    def take(self, lake: Lakehouse, latest: int) -> int:
        """Take the step, and return the latest version afterwards.

        Args:
            lake: The lakehouse.
            latest: The expected latest version.
        """


@dataclass(frozen=True, slots=True)
class ReconcileDefinition:
    """Reconcile another program's changes to the lakehouse definition."""

    def take(self, lake: Lakehouse, latest: int) -> int:
        return reconcile(lake).version or latest


def missing_exports(lake: Lakehouse, definition: LakehouseDef) -> list[str]:
    """Return the names of complete exports within the lakehouse whose roots do not exist.

    Args:
        lake: The lakehouse.
        definition: The definition that records the exports.

    Raises:
        StorageError: A storage request failed.
    """
    complete = [record for record in definition.exports if record.state == ExportState.COMPLETE]
    roots = {record.name: record.root_location for record in complete} | dict(definition.exported_snapshots)
    missing = []
    for name, location in sorted(roots.items()):
        try:
            path = to_location(lake.root, location)
        except InvalidInputError:
            continue
        if not is_uri(path) and not lake.storage.exists(path):
            missing.append(name)
    return missing


@dataclass(frozen=True, slots=True)
class DropExports:
    """Drop exports whose roots still do not exist."""

    names: tuple[str, ...]

    def take(self, lake: Lakehouse, latest: int) -> int:
        def drop(base: Snapshot) -> LakehouseDef | None:
            missing = [name for name in missing_exports(lake, base.definition) if name in self.names]
            return without_exports(base.definition, missing) if missing else None

        change = DefinitionChange(OPERATION, f"exports without a root: {', '.join(self.names)}", drop)
        return change.commit(lake, _expected_latest(lake, latest))


@dataclass(frozen=True, slots=True)
class SetHint:
    """Set the hint file to the latest version."""

    def take(self, lake: Lakehouse, latest: int) -> int:
        return max(repair_hint(lake).latest, latest)


@dataclass(frozen=True, slots=True)
class ClaimFolders:
    """Write missing owner files of tables.

    All folders are processed before the first error is raised, for example FileExistsAlreadyError if the owner file
    belongs to another lakehouse.
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


def _expected_latest(lake: Lakehouse, latest: int) -> Snapshot:
    """Return the latest version. Raises CommitConflictError unless it is the expected one."""
    base = lake.snapshot()
    if base.version != latest:
        raise _outdated_plan_error(latest, base.version)
    return base


def _outdated_plan_error(base_version: int, latest_version: int) -> CommitConflictError:
    return CommitConflictError(
        f"the repair plan for version {base_version} is out of date: version {latest_version} was committed; run"
        " verify again, then review the new plan",
        conflicts=(f"version {latest_version}",),
        base_version=base_version,
        latest_version=latest_version,
    )


@dataclass(frozen=True)
class _Tree:
    """Commit the tree of an earlier version under the current lakehouse definition, without reading the latest tree."""

    version: int
    root: NodeFile

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        info = CommitInfo(OPERATION, f"to version {self.version}, the newest intact version")
        return draft_of_tree(base, stamp, self.root, info, is_rollback=True)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        raise _outdated_plan_error(base.version, latest.version)


@dataclass(frozen=True, slots=True)
class RollbackStep:
    """Commit the tree of an earlier version."""

    version: int
    root: NodeFile

    def take(self, lake: Lakehouse, latest: int) -> int:
        base = _expected_latest(lake, latest)
        check_no_gap(lake.files.roots, base.version)
        check_not_expired(self.version, base.definition)
        return lake.commit(_Tree(self.version, self.root), base)


@dataclass(frozen=True, slots=True)
class RestoreEntries:
    """Restore the entries of some keys from an earlier version."""

    version: int
    entries: Mapping[str, str]

    def take(self, lake: Lakehouse, latest: int) -> int:
        check_no_gap(lake.files.roots, latest)

        def check(base: Snapshot) -> None:
            check_not_expired(self.version, base.definition)
            if base.version != latest:
                raise _outdated_plan_error(latest, base.version)

        message = f"objects of version {self.version}, in which they are intact"
        with lake.transaction(message=message, operation=OPERATION) as txn:
            txn.require(check)
            for key, location in sorted(self.entries.items()):
                txn.restore_entry(key, location)
        assert txn.committed_version is not None
        return txn.committed_version


_RESTORE = "restore the file from a backup of the storage"
_OLDER = f"{_RESTORE}; otherwise versions that need it remain damaged until they expire"

_ORPHANS = "run orphans"

_ADVICE = {
    "root-missing": _RESTORE,
    "root-corrupt": f"{_RESTORE}; other versions do not need it",
    "latest-sealed": f"{_RESTORE}; otherwise move it away",
    "root-beyond-gap": "restore the missing root from a backup before anything is committed",
    "root-naming-mixed": "find the program that wrote it, then move it away",
    "node-corrupt": _OLDER,
    "node-missing": _OLDER,
    "pointer-damaged": _OLDER,
    "tree-invariant": _OLDER,
    "definition-unreadable": _OLDER,
    "definition-changed": f"{_RESTORE}; otherwise commit the original settings with the program that changed them",
    "key-malformed": "find the program that wrote it, then roll back to an earlier version",
    "namespace-missing": "create the namespace again, or roll back to an earlier version",
    "chain-broken": "find the program that wrote it, then run reconcile --acknowledge for its versions",
    "time-not-rising": "find the clock that is wrong, then run reconcile --acknowledge for its versions",
    "time-in-future": "correct the clock",
    "clock-set-back": "no action needed: earlier times were ahead; correct the clock that set them",
    "barrier-in-future": "correct the clock; the next orphan removal replaces the barrier",
    "table-file-missing": _OLDER,
    "table-file-size": _OLDER,
    "table-file-corrupt": _OLDER,
    "table-unreadable": _OLDER,
    "table-names-code": "find the program that wrote it; the next commit to the table removes the property",
    "table-file-repeated": "overwrite the rows of that file, or roll the table back",
    "name-shared": "rename the table, or drop the view",
    "table-has-two-names": "decide which name is right, and drop the other one; the files are kept",
    "table-names-connection": "find the program that wrote it; the next commit to the table removes the property",
    "table-bounds": "run compact-tables; older versions keep the bounds until they expire",
    "file-changed": _RESTORE,
    "export-unreadable": "drop the export and export again",
    "export-damaged": "drop the export and export again",
    "export-unpinned": "drop the export or clone",
    "export-cut-off": "export or clone again, or drop it",
    "name-taken-twice": "drop the name, which drops all its records, then create again what is needed",
    "zombie-root": "find the program that wrote it, then seal it by restoring the file that the purge wrote",
    "purge-unfinished": "run purge",
    "lease-stale": "run the operation again",
    "lease-unreadable": "give verify read access to it",
    "operation-file-damaged": "run the operation that writes it again; the damaged file is not used",
    "owner-damaged": "if the folder belongs to this lakehouse, move the file away; repair then writes a new one",
    "owner-other": "find that lakehouse before removing anything; if it has no such table, move the file away",
    "owner-missing": "make the definition of the lakehouse readable; repair then writes the file",
    "owner-missing-there": "write to the table; each write creates the file first",
    "table-root-kept": "if the table root belongs to this lakehouse, run relocate --table-root with it",
    "record-damaged": "run verify --incremental, which writes a new record",
    "record-not-written": "allow verify to create files under _ops/, or run it without --incremental",
    "external-unreadable": "ask the owner of the table, or drop it, or register it again",
    "moved": "run relocate",
    "hint-wrong": "run repair-hint; if the hint is ahead, restore the root that it names first",
    "reconcile-needed": "run reconcile",
    "manifest-missing": "run the export again, or drop it",
    "plan-missing": "run purge, then orphans",
    "plan-left": _ORPHANS,
    "transaction-left": _ORPHANS,
    "export-left": _ORPHANS,
    "orphans": _ORPHANS,
}


def advice_on(code: str) -> str:
    """Return what an operator can do about findings with this code."""
    return _ADVICE.get(code, "see the findings of verify in docs/operations/verify.md")
