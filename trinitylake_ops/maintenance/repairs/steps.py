"""The steps of a repair. Each step takes the version that it expects to be the latest, and returns the one after it.

Each checks again whether it is needed, so that a repair that was cut off can be planned and run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trinitylake_ops.errors import CommitConflictError, InvalidInputError, StorageError
from trinitylake_ops.format.definitions import ExportState, LakehouseDef
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.format.nodes.node_file import NodeFile
from trinitylake_ops.maintenance.gc.reconcile import reconcile
from trinitylake_ops.maintenance.hint import repair_hint
from trinitylake_ops.maintenance.state.export_records import without_exports
from trinitylake_ops.maintenance.state.state_change import StateChange
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tables.ownership import claim_folder
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


def gone_exports(lake: Lakehouse, definition: LakehouseDef) -> list[str]:
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
            gone = [name for name in gone_exports(lake, base.definition) if name in self.names]
            return without_exports(base.definition, gone) if gone else None

        change = StateChange(OPERATION, f"exports without their root: {', '.join(self.names)}", dropped)
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
        raise _lost_race(latest, base.version)
    return base


def _lost_race(base_version: int, latest_version: int) -> CommitConflictError:
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
        raise _lost_race(base.version, latest.version)


@dataclass(frozen=True, slots=True)
class GoBack:
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
                raise _lost_race(latest, base.version)

        message = f"objects of version {self.version}, which has them whole"
        with lake.transaction(message=message, operation=OPERATION) as txn:
            txn.require(check)
            for key, location in sorted(self.entries.items()):
                txn.restore_entry(key, location)
        assert txn.committed_version is not None
        return txn.committed_version
