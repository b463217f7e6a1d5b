"""Drops a clone: what keeps its files in the parent ends, and its own files go if that is asked for."""

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
    clone_record,
    is_parent,
    lakehouse_of,
    opened_clone,
    records_of_clone,
)
from trinitylake_ops.operations.exports.drop import drop_exports
from trinitylake_ops.operations.gc.delete import Deletion, DeletionReport, delete_files
from trinitylake_ops.operations.gc.mark import owned_tables
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.storage import TEMPORARY_PREFIX
from trinitylake_ops.transaction.creation import has_roots
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

_OPERATION = "drop-clone"
_LEFT = "its own files stay, and no command deletes them later: delete that folder or prefix when nobody needs it"


@dataclass(frozen=True, kw_only=True)
class DropClonePlan(Plan):
    """The drop of a clone. ``clone_version`` is its latest version, None where it is gone, or not read for ``reason``.

    ``stages`` are the paths of its own files with their sizes in bytes, which are deleted one stage after the other.
    They are empty unless files are to be deleted. ``left`` counts files below its root that are not the clone's.
    """

    base_version: int
    name: str
    clone_id: str
    root: str
    clone_version: int | None
    reason: str | None
    deletes_files: bool
    files: int
    bytes: int
    left: int
    stages: tuple[Mapping[str, int], ...] = field(repr=False, compare=False)
    operation: DropClone = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the clone, its version, and all files that go."""
        paths = hashlib.sha256(json.dumps([sorted(stage) for stage in self.stages]).encode("ascii")).hexdigest()
        content = (self.name, self.clone_id, self.clone_version, self.deletes_files, paths)
        return digest_of(self.base_version, self.base_id, _OPERATION, *content)

    @property
    def is_empty(self) -> bool:
        """Always False: the clone is forgotten in any case."""
        return False

    def table(self) -> Table:
        """Return one row."""
        what = "its files are deleted" if self.deletes_files else f"{_LEFT}; those of the parent may go"
        if self.clone_version is None:
            what = f"it is forgotten; {self.reason or 'its lakehouse is gone'}"
        row = (self.name, self.root, self.clone_version, self.files, self.bytes, self.left, what)
        columns = ("name", "root", "versions since it was made", "files", "bytes", "files of others", "what happens")
        return new_table("Drop of a clone", *columns, rows=[row])

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> DropCloneReport:
        """Delete the clone's own files if planned, then forget the clone in one commit.

        It is kept where files could not be deleted: drop it again. Raises PlanChangedError, CommitConflictError when
        somebody committed to the clone since the plan, ExportNotFoundError, StorageError.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class DropCloneReport(DeletionReport):
    """A dropped clone. ``version`` of the parent recorded it, None if files are left and the clone is kept.

    ``files_stay`` says that its lakehouse stands, and that nobody deletes its own files from here any more.
    """

    name: str
    root: str
    files_stay: bool

    def table(self) -> Table:
        """Return one row, and one for each failure."""
        title = f"Dropped clone {self.name}" if self.version is not None else f"Clone {self.name} is not dropped yet"
        title += f"; {_LEFT}" if self.files_stay else ""
        rows = [(self.root, self.files, self.bytes, ""), *self.failure_rows(4)]
        return new_table(title, "root", "files deleted", "bytes", "not deleted", rows=rows)


@dataclass(frozen=True, kw_only=True)
class DropClone(PlannedOperation[DropClonePlan, DropCloneReport]):
    """The drop of a clone by its name."""

    telemetry_name = "drop-clone"

    name: str
    deletes_files: bool
    target_options: Mapping[str, str] | None
    progress: Progress = no_progress

    def plan(self) -> DropClonePlan:
        """Plan on the latest version. Raises what :func:`plan_drop_clone` raises."""
        metered = MeteredLakehouse(self.lake)
        latest = metered.lake.snapshot()
        record = clone_record(latest.definition, self.name)
        clone, reason = self._opened(metered, record)
        stages: tuple[dict[str, int], ...] = ()
        n_left = 0
        if clone is not None:
            check_no_dependents(clone)
        if clone is not None and self.deletes_files:
            check_not_registered(metered.lake, latest, record, clone)
            stages, n_left = _own_files(clone)
        elif self.deletes_files:
            left = lakehouse_of(metered, record, self.target_options)
            stages = (_last_files(left, record, latest),)
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
            left=n_left,
            stages=stages,
            operation=self,
        )

    def _opened(self, metered: MeteredLakehouse, record: ExportRecord) -> tuple[OpenedClone | None, str | None]:
        """Return the clone, or why not: it is gone, another lakehouse stands there, or it is the clone of another one.

        Those are left alone. One that cannot be read can be forgotten, since its storage may never answer again.
        Nothing there is deleted.
        """
        try:
            clone = opened_clone(metered, record, self.target_options)
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
        """Delete files and forget the clone."""
        plan = self.checked(plan, approved_digest)
        metered = MeteredLakehouse(self.lake)
        definition = metered.lake.snapshot().definition
        record = clone_record(definition, plan.name)
        deletion = Deletion()
        if plan.files:
            deletion = self._delete(plan, metered, record)
        version = None
        if deletion.is_complete:
            # A refresh may have kept one version more for it since then.
            version = drop_exports(
                metered.lake, [plan.name], lambda now: [one.name for one in records_of_clone(now, plan.clone_id)]
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
            lake, following = lakehouse_of(metered, record, self.target_options), 0
        else:
            lake, following = opened_clone(metered, record, self.target_options).lake, plan.clone_version + 1
        storage, naming = lake.storage, lake.files.roots.known_naming or ROOT_NAMING

        def check_unchanged() -> None:
            if storage.exists(naming.path(following)):
                raise CommitConflictError(
                    f"somebody committed to the clone {plan.name!r} since its drop was planned; review the new plan",
                    conflicts=(f"version {following} of {plan.root}",),
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
    """Plan the drop of a clone: its parent no longer keeps files for it. Only reads.

    With ``delete_files`` the clone's own files go first. Files below its root that no lakehouse names stay, and so do
    folders of tables that belong to others. Without it, a clone that cannot be read is forgotten, too. Raises
    ExportNotFoundError, MaintenanceBlockedError where other lakehouses read files of the clone. With ``delete_files``
    it raises LocationNotAllowedError and StorageError, too.
    """
    return DropClone(lake=uncached(lake), name=name, deletes_files=delete_files, target_options=target_options).plan()


def drop_clone(
    lake: Lakehouse, name: str, *, delete_files: bool = False, target_options: Mapping[str, str] | None = None
) -> DropCloneReport:
    """Plan and execute the drop of a clone. Raises what both raise."""
    with operation_span(DropClone.telemetry_name):
        plan = plan_drop_clone(lake, name, delete_files=delete_files, target_options=target_options)
        return plan.operation.run(plan, None)


def _own_files(clone: OpenedClone) -> tuple[tuple[dict[str, int], ...], int]:
    """Return the files of a clone in the order in which they go, and the number of other files below its root.

    A table's owner file goes when the rest of its folder is gone. The latest root goes last but for the definition that
    tells whose it is. So a drop that was cut off finds the clone, and what is the clone's.
    """
    lake, latest = clone.lake, clone.latest
    sizes_bytes = {info.path: info.size_bytes for info in (*lake.storage.list(), *lake.storage.list(TEMPORARY_PREFIX))}
    table_ids = {table_id for path in sizes_bytes if (table_id := table_id_in(path)) is not None}
    owned = owned_tables(lake.storage, table_ids, latest.definition.id)
    last = [latest.location, to_location(lake.root, latest.definition_location)]
    own = [path for path in sizes_bytes if _is_own(path, owned) and path not in last]
    roots = {path for path in own if root_naming(path) is not None or path == HINT_PATH}
    owners = {owner_path(table_id) for table_id in owned}
    others = [path for path in own if path not in roots and path not in owners]
    stages = (others, owners, roots, last[:1], last[1:])
    sized = tuple({path: sizes_bytes[path] for path in stage if path in sizes_bytes} for stage in stages)
    return sized, len(sizes_bytes) - sum(map(len, sized))


def _last_files(left: Lakehouse, record: ExportRecord, source: Snapshot) -> dict[str, int]:
    """Return the definitions of a clone without roots: a drop deletes one last, and a clone that is made begins by it.

    Each says itself that it is of this clone. Where any root stands, that is the lakehouse of somebody else.
    """
    storage, source_root = left.storage, source.files.storage.root
    if has_roots(storage):
        return {}
    found = {}
    for info in storage.list(LAKEHOUSE_DEF_PREFIX):
        try:
            parent = left.files.definitions.lakehouse(info.path).parent
        except (CorruptFileError, FileMissingError):
            continue
        if parent is not None and parent.root == source_root and is_parent(parent, record, source.definition.id):
            found[info.path] = info.size_bytes
    return found


def _is_own(path: str, owned: set[str]) -> bool:
    table_id = table_id_in(path)
    if table_id is not None:
        return table_id in owned
    return (
        path in (HINT_PATH, ORPHAN_BARRIER_PATH)
        or path.startswith(TEMPORARY_PREFIX)  # of a writer that was killed
        or is_immutable_path(path)
        or is_operation_path(path)
        or is_verified_path(path)
        or parse_lease_path(path) is not None
        or root_naming(path) is not None
    )
