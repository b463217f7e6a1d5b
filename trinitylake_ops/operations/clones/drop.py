"""Drop a clone: stop keeping files for it in the parent, and optionally delete the clone's own files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    FileMissingError,
    LakehouseNotFoundError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import ExportRecord
from trinitylake_ops.format.file_names import (
    HINT_PATH,
    LAKEHOUSE_DEF_PREFIX,
    MAINTENANCE_STATE_PATH,
    ORPHAN_BARRIER_PATH,
    ROOT_NAMING,
    is_immutable_path,
    is_operation_path,
    is_verified_path,
    owner_path,
    parse_lease_path,
    root_naming,
)
from trinitylake_ops.format.locations import to_location
from trinitylake_ops.operations.base import (
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
    operation_span,
    uncached,
)
from trinitylake_ops.operations.clones.clone_records import (
    OpenedClone,
    OtherLakehouseError,
    check_is_clone_of,
    check_no_dependents,
    check_not_registered,
    clone_lakehouse,
    clone_record,
    is_parent,
    open_clone,
    records_of_clone,
)
from trinitylake_ops.operations.exports.drop import drop_exports
from trinitylake_ops.operations.gc.delete import Deletion, DeletionReport, delete_files
from trinitylake_ops.operations.gc.mark import owned_tables
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.storage import TEMPORARY_PREFIX, background
from trinitylake_ops.transaction.creation import has_roots
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

_OPERATION = "drop-clone"
_FILES_STAY = "the clone's own files are not deleted; delete its folder or prefix when it is no longer needed"


@dataclass(frozen=True, kw_only=True)
class DropClonePlan(Plan):
    """The drop of a clone, with its effects."""

    #: The latest version of the parent when the plan was made.
    base_version: int
    #: The name of the clone.
    name: str
    #: The id of the clone.
    clone_id: str
    #: The root of the clone.
    root: str
    #: The latest version of the clone; None if the clone does not exist or cannot be read.
    clone_version: int | None
    #: Why the clone cannot be read.
    reason: str | None
    #: Whether the clone's own files are deleted.
    deletes_files: bool
    #: The number of files to delete.
    files: int
    #: The total size of these files.
    bytes: int
    #: The number of files below the root that do not belong to the clone.
    left: int
    #: The paths to delete with their sizes in bytes, in stages that are deleted one after another.
    stages: tuple[Mapping[str, int], ...] = field(repr=False, compare=False)
    operation: DropClone = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over the clone, its version, and the files to delete."""
        paths = hashlib.sha256(json.dumps([sorted(stage) for stage in self.stages]).encode("ascii")).hexdigest()
        content = (self.name, self.clone_id, self.clone_version, self.deletes_files, paths)
        return digest_of(self.base_version, self.base_id, _OPERATION, *content)

    @property
    def is_empty(self) -> bool:
        """Always False, because the clone is always dropped."""
        return False

    def table(self) -> Table:
        """Return one row for the clone."""
        effect = "its files are deleted" if self.deletes_files else f"{_FILES_STAY}; the parent may reclaim its files"
        if self.clone_version is None:
            effect = f"only its record is dropped; {self.reason or 'its lakehouse does not exist'}"
        row = (self.name, self.root, self.clone_version, self.files, self.bytes, self.left, effect)
        columns = ("name", "root", "versions since creation", "files", "bytes", "other files", "effect")
        return new_table("Drop of a clone", *columns, rows=[row])

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> DropCloneReport:
        """Delete the clone's own files if planned, then drop its record in one commit.

        If some files cannot be deleted, the record is kept, and the drop can be repeated.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.
            progress: Called with the number of files deleted so far.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            CommitConflictError: A version was committed to the clone since the plan was made.
            ExportNotFoundError: The clone was dropped since the plan was made.
            StorageError: A storage request failed.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class DropCloneReport(DeletionReport):
    """The result of a clone drop. ``version`` is None if the record was kept because files could not be deleted."""

    #: The name of the clone.
    name: str
    #: The root of the clone.
    root: str
    #: Whether the clone's lakehouse still exists. The parent will not delete its files later.
    files_stay: bool

    def table(self) -> Table:
        """Return one row for the clone, and one row for each file that could not be deleted."""
        title = f"Dropped clone {self.name}" if self.version is not None else f"Clone {self.name} is not dropped yet"
        title += f"; {_FILES_STAY}" if self.files_stay else ""
        rows = [(self.root, self.files, self.bytes, ""), *self.failure_rows(4)]
        return new_table(title, "root", "files deleted", "bytes", "not deleted", rows=rows)


@dataclass(frozen=True, kw_only=True)
class DropClone(PlannedOperation[DropClonePlan, DropCloneReport]):
    """Drop a clone by name."""

    telemetry_name = "drop-clone"

    name: str
    deletes_files: bool
    target_options: Mapping[str, str] | None
    progress: Progress = no_progress

    def plan(self) -> DropClonePlan:
        """Make a plan based on the latest version. See :func:`plan_drop_clone` for the errors."""
        metered = MeteredLakehouse(self.lake)
        latest = metered.lake.snapshot()
        record = clone_record(latest.definition, self.name)
        clone, reason = self._open(metered, record)
        stages: tuple[dict[str, int], ...] = ()
        n_other_files = 0
        if clone is not None:
            check_no_dependents(clone)
        if clone is not None and self.deletes_files:
            background.drain()  # otherwise, this process could write a pending hint after the deletion
            check_not_registered(metered.lake, latest, record, clone)
            stages, n_other_files = _own_files(clone)
        elif self.deletes_files:
            remains = clone_lakehouse(metered, record, self.target_options)
            stages = (_leftover_definitions(remains, record, latest),)
        return DropClonePlan(
            base_version=latest.version,
            base_id=base_id_of(latest),
            name=self.name,
            clone_id=record.clone_id,
            root=record.target_uri,
            clone_version=None if clone is None else clone.latest.version,
            reason=reason,
            deletes_files=self.deletes_files,
            files=sum(map(len, stages)),
            bytes=sum(size for stage in stages for size in stage.values()),
            left=n_other_files,
            stages=stages,
            operation=self,
        )

    def _open(self, metered: MeteredLakehouse, record: ExportRecord) -> tuple[OpenedClone | None, str | None]:
        """Return the clone, or None and the reason why it cannot be opened.

        If the clone's lakehouse does not exist or was replaced by another lakehouse, only the record is dropped. A
        clone that cannot be read can be dropped without deleting files, because its storage may be permanently lost.
        """
        try:
            clone = open_clone(metered, record, self.target_options)
            check_is_clone_of(metered.lake, clone)
        except LakehouseNotFoundError:
            return None, None
        except OtherLakehouseError as error:
            return None, error.message
        except TrinityLakeError as error:
            if self.deletes_files:
                raise
            return None, error.message
        return clone, None

    def run(self, plan: DropClonePlan, approved_digest: str | None) -> DropCloneReport:
        """Delete files and drop the clone's record."""
        plan = self.checked(plan, approved_digest)
        metered = MeteredLakehouse(self.lake)
        definition = metered.lake.snapshot().definition
        record = clone_record(definition, plan.name)
        deletion = Deletion()
        if plan.files:
            deletion = self._delete(plan, metered, record)
        version = None
        if deletion.is_complete:
            # A refresh since then may have added another record for the clone.
            version = drop_exports(
                metered.lake,
                [plan.name],
                lambda latest: [kept_record.name for kept_record in records_of_clone(latest, plan.clone_id)],
            )
        return DropCloneReport.of(
            deletion,
            version=version,
            still_needed=0,
            cost=metered.cost(),
            name=plan.name,
            root=plan.root,
            files_stay=plan.clone_version is not None and not plan.deletes_files,
        )

    def _delete(self, plan: DropClonePlan, metered: MeteredLakehouse, record: ExportRecord) -> Deletion:
        if plan.clone_version is None:
            lake, next_version = clone_lakehouse(metered, record, self.target_options), 0
        else:
            lake, next_version = open_clone(metered, record, self.target_options).lake, plan.clone_version + 1
        storage, naming = lake.storage, lake.files.roots.known_naming or ROOT_NAMING

        def check_unchanged() -> None:
            if storage.exists(naming.path(next_version)):
                raise CommitConflictError(
                    f"another process committed to clone {plan.name!r} since its drop was planned; review the new plan",
                    conflicts=(f"version {next_version} of {plan.root}",),
                    base_version=plan.clone_version,
                )

        total = Deletion()
        for stage in plan.stages:
            total.add(delete_files(storage, stage, before_batch=check_unchanged, progress=self.progress))
            if not total.is_complete:
                break
        storage.remove_empty_folders([path for stage in plan.stages for path in stage])
        return total


def plan_drop_clone(
    lake: Lakehouse, name: str, *, delete_files: bool = False, target_options: Mapping[str, str] | None = None
) -> DropClonePlan:
    """Plan the drop of a clone, without writing anything. The parent stops keeping files for the clone.

    Files below the clone's root that the clone did not write, and table folders of other lakehouses, are not deleted.

    Args:
        lake: The parent.
        name: The name of the clone.
        delete_files: Also delete the clone's own files. A clone that cannot be read can be dropped only without this
            option.
        target_options: Options of the clone's storage; None to derive them from the options of the parent.

    Raises:
        ExportNotFoundError: The clone does not exist.
        MaintenanceBlockedError: Another lakehouse reads files of the clone.
        LocationNotAllowedError: With ``delete_files``, the root of the clone is outside the allowed roots.
        StorageError: A storage request failed.
    """
    return DropClone(lake=uncached(lake), name=name, deletes_files=delete_files, target_options=target_options).plan()


def drop_clone(
    lake: Lakehouse, name: str, *, delete_files: bool = False, target_options: Mapping[str, str] | None = None
) -> DropCloneReport:
    """Plan and execute the drop of a clone.

    Args:
        lake: The parent.
        name: The name of the clone.
        delete_files: Also delete the clone's own files.
        target_options: Options of the clone's storage; None to derive them from the options of the parent.

    Raises:
        TrinityLakeError: See :func:`plan_drop_clone` and :meth:`DropClonePlan.execute`.
    """
    with operation_span(DropClone.telemetry_name):
        plan = plan_drop_clone(lake, name, delete_files=delete_files, target_options=target_options)
        return plan.operation.run(plan, None)


def _own_files(clone: OpenedClone) -> tuple[tuple[dict[str, int], ...], int]:
    """Return the files of a clone in deletion stages, and the number of other files below its root.

    The owner file of a table is deleted after the other files in the table folder. The latest root is deleted last,
    followed only by the definition that identifies the clone. After an interruption, another drop can therefore still
    find the clone and the files that belong to it.
    """
    lake, latest = clone.lake, clone.latest
    sizes_bytes = {info.path: info.size_bytes for info in (*lake.storage.list(), *lake.storage.list(TEMPORARY_PREFIX))}
    table_ids = {table_id for path in sizes_bytes if (table_id := table_id_in(path)) is not None}
    owned = owned_tables(lake.storage, table_ids, latest.definition.id)
    last = [latest.location, to_location(lake.root, latest.definition_location)]
    own_paths = [path for path in sizes_bytes if _is_own(path, owned) and path not in last]
    roots = {path for path in own_paths if root_naming(path) is not None or path == HINT_PATH}
    owners = {owner_path(table_id) for table_id in owned}
    others = [path for path in own_paths if path not in roots and path not in owners]
    stages = (others, owners, roots, last[:1], last[1:])
    sized_stages = tuple({path: sizes_bytes[path] for path in stage if path in sizes_bytes} for stage in stages)
    return sized_stages, len(sizes_bytes) - sum(map(len, sized_stages))


def _leftover_definitions(remains: Lakehouse, record: ExportRecord, source: Snapshot) -> dict[str, int]:
    """Return the lakehouse definitions of a clone that has no roots.

    A drop deletes the definition last, and creating a clone writes it first. Each definition identifies its clone. If
    any root exists, the lakehouse has another owner, and nothing is returned.
    """
    storage, source_root = remains.storage, source.files.storage.root
    if has_roots(storage):
        return {}
    sizes_bytes = {}
    for info in storage.list(LAKEHOUSE_DEF_PREFIX):
        try:
            parent = remains.files.definitions.lakehouse(info.path).parent
        except (CorruptFileError, FileMissingError):
            continue
        if parent is not None and parent.root == source_root and is_parent(parent, record, source.definition.id):
            sizes_bytes[info.path] = info.size_bytes
    return sizes_bytes


def _is_own(path: str, owned: set[str]) -> bool:
    table_id = table_id_in(path)
    if table_id is not None:
        return table_id in owned
    return (
        path in (HINT_PATH, MAINTENANCE_STATE_PATH, ORPHAN_BARRIER_PATH)
        or path.startswith(TEMPORARY_PREFIX)  # left by a killed writer
        or is_immutable_path(path)
        or is_operation_path(path)
        or is_verified_path(path)
        or parse_lease_path(path) is not None
        or root_naming(path) is not None
    )
