"""Clone a lakehouse: create its whole tree at another root without copying any table file.

A commit in the parent records the clone, so that the cloned version is kept. Version 0 of the clone refers to the
parent's nodes. A second commit in the parent records the clone as complete. Executing an interrupted clone again
resumes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from trinitylake_ops.errors import (
    ExportExistsError,
    ExportNotFoundError,
    InvalidInputError,
    LakehouseExistsError,
    LakehouseNotFoundError,
)
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, LakehouseDef, ParentRecord
from trinitylake_ops.format.file_names import new_manifest_path
from trinitylake_ops.format.keys import COMMIT_ID, CREATED_AT_MILLIS
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.operations.base import (
    Cost,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
    uncached_on,
)
from trinitylake_ops.operations.clones.clone_records import check_no_table_root
from trinitylake_ops.operations.export_records import (
    CLONE,
    begin,
    check_name,
    check_unused,
    complete,
    finish_manifest,
    is_interrupted,
    record_of,
)
from trinitylake_ops.operations.exports.export import retained_ms
from trinitylake_ops.operations.exports.roots import (
    TargetExport,
    TargetLakehouse,
    build_root,
    export_id,
    lakehouse_def_copy,
)
from trinitylake_ops.operations.gc.delete import delete_operation_files
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.transfer.names import target_root
from trinitylake_ops.operations.transfer.selection import Choice, selected_entries
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.storage.local.posix_files import make_root_folder
from trinitylake_ops.transaction.creation import create_first_version, first_root, has_roots, write_lakehouse_definition
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.tree.edit import carried_tree
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.versions.commit_info import CommitCost, CommitInfo
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.time_travel import bounded_time_ms


@dataclass(frozen=True, kw_only=True)
class ClonePlan(Plan):
    """The clone that would be created."""

    #: The latest version when the plan was made.
    base_version: int
    #: The name of the clone.
    name: str
    #: The version to clone.
    version: int
    #: The cloned namespaces; empty for all.
    namespaces: tuple[str, ...]
    #: The root of the clone.
    target: str
    #: The time until the clone is overdue, in milliseconds; None for never.
    retain_for_ms: int | None
    #: Whether the plan resumes an interrupted clone with the same name.
    resumes: bool
    #: The record of the clone.
    record: ExportRecord = field(repr=False, compare=False)
    operation: Clone = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over the name, the version, the namespaces and the target."""
        content = (self.name, self.version, list(self.namespaces), self.target, self.retain_for_ms)
        return digest_of(self.base_version, self.base_id, CLONE, *content)

    @property
    def is_empty(self) -> bool:
        """Always False, because a clone is always recorded."""
        return False

    def table(self) -> Table:
        """Return one row for the clone."""
        state = "resumes" if self.resumes else "new"
        row = (self.name, self.version, ", ".join(self.namespaces) or "all", self.target, state)
        return new_table("Clone plan", "name", "version", "namespaces", "to", "state", rows=[row])

    def execute(self, approved_digest: str | None = None) -> CloneReport:
        """Create the clone, or finish an interrupted one. No table file is read or written.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            LakehouseExistsError: Another lakehouse exists at the target.
            ExportExistsError: Another export or clone has the same name.
            ExportNotFoundError: The clone was dropped during the run.
            VersionExpiredError: The version expired since the plan was made.
            StorageError: A storage request failed.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class CloneReport(Document):
    """The result of creating a clone."""

    #: The name of the clone.
    name: str
    #: The id of the clone.
    clone_id: str
    #: The parent version that became version 0 of the clone.
    version: int
    #: The root of the clone.
    target: str
    #: The parent version that records the clone as complete.
    committed_version: int
    #: Whether this run resumed an interrupted clone.
    resumed: bool
    #: The requests and time that the clone took.
    cost: Cost

    def table(self) -> Table:
        """Return one row for the clone."""
        cost = self.cost
        row = (self.name, self.version, self.target, cost.total_requests, cost.bytes_written, cost.duration_ms)
        return new_table("Clone", "name", "of version", "root", "requests", "bytes written", "ms", rows=[row])


@dataclass(frozen=True, kw_only=True)
class Clone(PlannedOperation[ClonePlan, CloneReport]):
    """Clone a version."""

    telemetry_name = "clone"

    name: str
    #: A version number or the name of an export; None for the latest version.
    version: int | str | None
    #: Clone the version that was the latest at this time.
    timestamp: datetime | int | None
    target: str
    retain_for: timedelta | int | None
    namespaces: tuple[str, ...]
    target_options: Mapping[str, str] | None

    def plan(self) -> ClonePlan:
        """Make a plan based on the latest version. See :func:`plan_clone` for the errors."""
        check_name(self.name, CLONE)
        retain_for_ms = retained_ms(self.lake, self.retain_for)
        latest = self.lake.snapshot()
        if latest.definition.sources:
            raise InvalidInputError(
                f"{self.lake.root} cannot be cloned: it reads files of {latest.definition.sources[0].root}; clone that"
                " lakehouse instead"
            )
        check_no_table_root(latest.definition, self.lake.root)
        root = target_root(self.lake, self.target, latest.definition)
        existing = record_of(latest.definition, self.name)
        manifest_path = new_manifest_path()
        wanted = ExportRecord(
            name=self.name,
            version=self._version(latest, existing),
            level=ExportLevel.PARTIAL if self.namespaces else ExportLevel.MINIMAL,
            target_uri=root,
            namespaces=self.namespaces,
            manifest_path=manifest_path,
        )
        wanted = replace(wanted, clone_id=str(export_id(wanted)))
        resumes = existing is not None and is_interrupted(existing, wanted)
        if not resumes:
            _check_unused(latest.definition, self.name)
        record = existing if resumes and existing else wanted
        source = self.lake.snapshot(record.version, latest=latest)
        check_no_table_root(source.definition, self.lake.root)
        self._check_namespaces(source)
        self._check_target(record)
        return ClonePlan(
            base_version=latest.version,
            base_id=base_id_of(latest),
            name=self.name,
            version=record.version,
            namespaces=self.namespaces,
            target=root,
            retain_for_ms=retain_for_ms,
            resumes=resumes,
            record=record,
            operation=self,
        )

    def _version(self, latest: Snapshot, existing: ExportRecord | None) -> int:
        if self.version is None and self.timestamp is None:
            return existing.version if existing is not None and existing.clone_id else latest.version
        snapshot = self.lake.snapshot(self.version, self.timestamp, latest=latest)
        if snapshot.files is not self.lake.files:
            raise InvalidInputError(
                f"export {self.version!r} cannot be cloned here: it is a lakehouse at {snapshot.files.storage.root};"
                " open that one to clone it"
            )
        # A clone of an export within the lakehouse reads the files of the exported version, not the export's files.
        return self.lake.snapshot(snapshot.version, latest=latest).version

    def _check_namespaces(self, source: Snapshot) -> None:
        for namespace in self.namespaces:
            source.namespace(namespace)

    def _check_target(self, record: ExportRecord) -> None:
        storage = open_storage(record.target_uri, self._target_options(record.target_uri))
        target = uncached_on(storage, self.target_options)
        if has_roots(storage) and not _is_complete_clone(target, record):
            raise _existing_lakehouse_error(target)

    def _target_options(self, root: str) -> Mapping[str, str] | None:
        return self.target_options if self.target_options is not None else options_for(self.lake, root)

    def run(self, plan: ClonePlan, approved_digest: str | None) -> CloneReport:
        """Create the clone, or finish an interrupted one."""
        plan = replace(self, version=plan.version, timestamp=None).checked(plan, approved_digest)
        metered = MeteredLakehouse(self.lake)
        lake, now_ms = metered.lake, self.lake.storage.now_ms()
        until_ms = None if plan.retain_for_ms is None else now_ms + plan.retain_for_ms
        wanted = replace(plan.record, created_at_millis=now_ms, retain_until_millis=until_ms)
        make_root_folder(wanted.target_uri)
        record, resumed = begin(lake, wanted, lambda base: None)
        options = self._target_options(record.target_uri)
        target = uncached_on(metered.meter(open_storage(record.target_uri, options)), options)
        finish_manifest(lake.storage, record, [], with_definitions=False)
        if not _is_complete_clone(target, record):
            _create_first_version(target, lake.snapshot(record.version), lake.root, record)
        location = f"{target.root}{target.files.roots.path(0)}"
        try:
            committed_version = complete(lake, record, location, until_ms, lambda base: None)
        except ExportNotFoundError:
            delete_operation_files(lake.storage, [record.manifest_path])
            raise
        return CloneReport(
            name=record.name,
            clone_id=record.clone_id,
            version=record.version,
            target=target.root,
            committed_version=committed_version,
            resumed=resumed,
            cost=metered.cost(),
        )


def plan_clone(
    lake: Lakehouse,
    target: str,
    name: str | None = None,
    version: int | str | None = None,
    *,
    timestamp: datetime | int | None = None,
    namespaces: Sequence[str] = (),
    retain_for: timedelta | int | None = None,
    target_options: Mapping[str, str] | None = None,
) -> ClonePlan:
    """Plan a clone of a version at another root, without writing anything.

    Args:
        lake: The lakehouse to clone.
        target: The root of the clone.
        name: The name of the clone in its parent; None to use the last part of ``target``.
        version: A version number or the name of an export; None to clone the latest version.
        timestamp: Clone the version that was the latest at this time, as a datetime or in milliseconds since the epoch.
        namespaces: Clone only these namespaces.
        retain_for: The time until the clone is overdue, as a timedelta or in milliseconds; None for never. The parent
            keeps the version until the clone is dropped.
        target_options: Options of the storage at the target; None to use the options of the lakehouse if the URI scheme
            is the same.

    Raises:
        InvalidNameError: The name is not valid for a clone.
        ExportExistsError: Another export or clone has the same name.
        LakehouseExistsError: A lakehouse exists at the target.
        InvalidInputError: The lakehouse is itself a clone or copy, or has a table root.
        NamespaceNotFoundError: A namespace does not exist in the version.
        VersionNotFoundError: The version does not exist.
        VersionExpiredError: The version has expired.
        StorageError: A storage request failed.
    """
    clone_name = target.rstrip("/").rpartition("/")[2] if name is None else name
    return Clone(
        lake=lake,
        name=clone_name,
        version=version,
        timestamp=timestamp,
        target=target,
        retain_for=retain_for,
        namespaces=tuple(sorted(set(namespaces))),
        target_options=target_options,
    ).plan()


def _check_unused(definition: LakehouseDef, name: str) -> None:
    """Raise ExportExistsError if an export or a clone has the name."""
    existing = record_of(definition, name)
    if existing is not None and existing.clone_id:
        raise ExportExistsError(
            f"clone {name!r} of version {existing.version} already exists at {existing.target_uri}; choose another"
            f" name, or drop it with: trinitylake drop-clone {name}"
        )
    check_unused(definition, name)


def _commit_id(record: ExportRecord) -> str:
    return str(uuid.uuid5(uuid.UUID(record.clone_id), "commit"))


def _is_complete_clone(target: Lakehouse, record: ExportRecord) -> bool:
    """Whether version 0 of this clone exists at the target.

    Raises:
        LakehouseExistsError: Another lakehouse exists at the target.
        StorageError: A storage request failed.
    """
    try:
        first = target.snapshot(0)
    except LakehouseNotFoundError:
        return False
    if first.root.system.get(COMMIT_ID) != _commit_id(record):
        raise _existing_lakehouse_error(target)
    return True


def _existing_lakehouse_error(target: Lakehouse) -> LakehouseExistsError:
    return LakehouseExistsError(
        f"a lakehouse already exists at {target.root}; clone to another target", path=target.root
    )


def _create_first_version(target: Lakehouse, source: Snapshot, source_root: str, record: ExportRecord) -> None:
    """Create version 0 of a clone.

    All names except root names are derived from the record, so that the call can be repeated.
    """
    definition = _definition(target, source, source_root, record)
    definition_path = lakehouse_def_copy(export_id(record))
    write_lakehouse_definition(target.storage, definition_path, definition)
    properties = {"source": source_root, "source_id": source.definition.id, "source_version": str(source.version)}
    info = CommitInfo(CLONE, f"version {source.version} of {source_root}"[:500], properties=properties)
    root = first_root(target.storage, definition, definition_path, _commit_id(record), info, CommitCost(1, 1, 0))
    # Version 0 is not older than the cloned version, so that time travel works across both. The storages may have
    # different clocks: as in commits, a time far ahead of the record's time is not adopted.
    created_at_ms = max(root.created_at_ms, bounded_time_ms(source.created_at_ms, record.created_at_millis))
    root.system[CREATED_AT_MILLIS] = str(created_at_ms)
    limits = TreeLimits.of(definition)
    tree = _tree(target, source, source_root, record, limits)
    tree_edit = carried_tree(target.files.nodes, tree, limits, created_at_ms=created_at_ms, root_system=root.system)
    create_fresh(target.storage, tree_edit.node_files)
    first_version = replace(tree_edit.root, system=root.system)
    if not create_first_version(target.files, definition, first_version) and not _is_complete_clone(target, record):
        raise _existing_lakehouse_error(target)


def _tree(target: Lakehouse, source: Snapshot, source_root: str, record: ExportRecord, limits: TreeLimits) -> NodeFile:
    """Return the root of the clone, without system rows. The root refers only to files of the parent."""
    if not record.namespaces:
        return source.root.rebased(lambda location: to_uri(source_root, location))
    entries = [(key, to_uri(source_root, location)) for key, location in selected_entries(source, record.namespaces)]
    return build_root(
        entries,
        limits,
        export_id(record),
        record.created_at_millis,
        lambda files: create_fresh(target.storage, files),
    )


def _definition(target: Lakehouse, source: Snapshot, source_root: str, record: ExportRecord) -> LakehouseDef:
    """Return the settings of the parent without its operation state, and with a record of the parent."""
    choice = Choice(record.level, record.namespaces)
    definition = TargetExport(TargetLakehouse(target, None), source, source_root, record, choice).definition
    parent = ParentRecord(
        root=source_root,
        lakehouse_id=source.definition.id,
        version=source.version,
        clone_id=record.clone_id,
        name=record.name,
        cloned_version=source.version,
    )
    return replace(definition, parent=parent)
