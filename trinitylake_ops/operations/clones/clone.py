"""Clones a lakehouse: its whole tree at another root, without a copy of any file of a table.

A commit records the clone in its parent, which keeps the version. Version 0 of the clone points to the parent's nodes.
A second commit records that it stands. A clone that was cut off goes on when it is made again.
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
    is_cut_off,
    record_of,
)
from trinitylake_ops.operations.exports.export import retained_ms
from trinitylake_ops.operations.exports.roots import (
    TargetExport,
    TargetLakehouse,
    built_root,
    export_id,
    lakehouse_def_copy,
)
from trinitylake_ops.operations.gc.delete import delete_operation_files
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.transfer.names import target_root
from trinitylake_ops.operations.transfer.selection import Choice, chosen_entries
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
    """A clone that would be made of a version. ``resumes`` says that one that was cut off goes on."""

    base_version: int
    name: str
    version: int
    namespaces: tuple[str, ...]
    target: str
    retain_for_ms: int | None
    resumes: bool
    record: ExportRecord = field(repr=False, compare=False)
    operation: Clone = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the name, the version and the target."""
        content = (self.name, self.version, list(self.namespaces), self.target, self.retain_for_ms)
        return digest_of(self.base_version, self.base_id, CLONE, *content)

    @property
    def is_empty(self) -> bool:
        """Always False: a clone is recorded in any case."""
        return False

    def table(self) -> Table:
        """Return one row."""
        state = "goes on" if self.resumes else "new"
        row = (self.name, self.version, ", ".join(self.namespaces) or "all", self.target, state)
        return new_table("Clone plan", "name", "version", "namespaces", "to", "state", rows=[row])

    def execute(self, approved_digest: str | None = None) -> CloneReport:
        """Make the clone, or finish one that was cut off. No file of a table is read or written.

        Raises PlanChangedError, LakehouseExistsError when another lakehouse took the target, ExportExistsError,
        ExportNotFoundError when the clone was dropped meanwhile, VersionExpiredError, StorageError.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class CloneReport(Document):
    """A clone that stands. ``version`` of its parent, which ``committed_version`` records, is its version 0."""

    name: str
    clone_id: str
    version: int
    target: str
    committed_version: int
    resumed: bool
    cost: Cost

    def table(self) -> Table:
        """Return one row."""
        cost = self.cost
        row = (self.name, self.version, self.target, cost.total_requests, cost.bytes_written, cost.duration_ms)
        return new_table("Clone", "name", "of version", "root", "requests", "bytes written", "ms", rows=[row])


@dataclass(frozen=True, kw_only=True)
class Clone(PlannedOperation[ClonePlan, CloneReport]):
    """The clone of a version, by its number, by the name of an export, or by a time; by default of the latest."""

    telemetry_name = "clone"

    name: str
    version: int | str | None
    timestamp: datetime | int | None
    target: str
    retain_for: timedelta | int | None
    namespaces: tuple[str, ...]
    target_options: Mapping[str, str] | None

    def plan(self) -> ClonePlan:
        """Plan on the latest version. Raises what :func:`plan_clone` raises."""
        check_name(self.name, CLONE)
        retain_for_ms = retained_ms(self.lake, self.retain_for)
        latest = self.lake.snapshot()
        if latest.definition.sources:
            raise InvalidInputError(
                f"{self.lake.root} is a clone or a copy that reads files of {latest.definition.sources[0].root};"
                " clone that lakehouse"
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
        resumes = existing is not None and is_cut_off(existing, wanted)
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
        found = self.lake.snapshot(self.version, self.timestamp, latest=latest)
        if found.files is not self.lake.files:
            raise InvalidInputError(f"{self.version!r} is a lakehouse of its own, at {found.files.storage.root}")
        # An export is pinned by its name only: the clone needs the version, and is made of it.
        return self.lake.snapshot(found.version, latest=latest).version

    def _check_namespaces(self, source: Snapshot) -> None:
        for namespace in self.namespaces:
            source.namespace(namespace)

    def _check_target(self, record: ExportRecord) -> None:
        storage = open_storage(record.target_uri, self._target_options(record.target_uri))
        there = uncached_on(storage, self.target_options)
        if has_roots(storage) and not _is_complete_clone(there, record):
            raise _existing_lakehouse_error(there)

    def _target_options(self, root: str) -> Mapping[str, str] | None:
        return self.target_options if self.target_options is not None else options_for(self.lake, root)

    def run(self, plan: ClonePlan, approved_digest: str | None) -> CloneReport:
        """Make the clone."""
        plan = replace(self, version=plan.version, timestamp=None).checked(plan, approved_digest)
        metered = MeteredLakehouse(self.lake)
        lake, now_ms = metered.lake, self.lake.storage.now_ms()
        until_ms = None if plan.retain_for_ms is None else now_ms + plan.retain_for_ms
        wanted = replace(plan.record, created_at_millis=now_ms, retain_until_millis=until_ms)
        make_root_folder(wanted.target_uri)
        record, resumed = begin(lake, wanted, lambda base: None)
        options = self._target_options(record.target_uri)
        there = uncached_on(metered.also(open_storage(record.target_uri, options)), options)
        finish_manifest(lake.storage, record, [], with_definitions=False)
        if not _is_complete_clone(there, record):
            _make(there, lake.snapshot(record.version), lake.root, record)
        location = f"{there.root}{there.files.roots.path(0)}"
        try:
            committed_version = complete(lake, record, location, until_ms, lambda base: None)
        except ExportNotFoundError:
            delete_operation_files(lake.storage, [record.manifest_path])
            raise
        return CloneReport(
            name=record.name,
            clone_id=record.clone_id,
            version=record.version,
            target=there.root,
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
    """Plan a clone of a version, by default the latest, at another root. Only reads.

    ``name`` is that of the clone here, by default the last part of ``target``. ``version`` is a number or the name of
    an export, ``timestamp`` a time. ``namespaces`` limit the clone to these. ``retain_for``, a timedelta or
    milliseconds, is the time after which the clone is overdue, None for never. Its version is kept until it is dropped.
    ``target_options`` are for the target's storage, by default those of this one if the scheme is the same.

    Raises InvalidNameError, ExportExistsError for a name that is taken, LakehouseExistsError for a target that is.
    Raises NamespaceNotFoundError, VersionNotFoundError, VersionExpiredError, StorageError, and InvalidInputError for a
    clone of a clone or copy.
    """
    own_name = target.rstrip("/").rpartition("/")[2] if name is None else name
    return Clone(
        lake=lake,
        name=own_name,
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
            f"a clone {name!r} of version {existing.version} is recorded, at {existing.target_uri}; choose another"
            f" name, or drop it first: trinitylake drop-clone {name}"
        )
    check_unused(definition, name)


def _commit_id(record: ExportRecord) -> str:
    return str(uuid.uuid5(uuid.UUID(record.clone_id), "commit"))


def _is_complete_clone(there: Lakehouse, record: ExportRecord) -> bool:
    """Whether version 0 of this very clone stands.

    Raises LakehouseExistsError if the lakehouse there is another one, StorageError.
    """
    try:
        first = there.snapshot(0)
    except LakehouseNotFoundError:
        return False
    if first.root.system.get(COMMIT_ID) != _commit_id(record):
        raise _existing_lakehouse_error(there)
    return True


def _existing_lakehouse_error(there: Lakehouse) -> LakehouseExistsError:
    return LakehouseExistsError(
        f"there is a lakehouse at {there.root} already; clone to another target", path=there.root
    )


def _make(there: Lakehouse, source: Snapshot, source_root: str, record: ExportRecord) -> None:
    """Create version 0 of a clone. All names but those of roots follow from the record, so that it may be repeated."""
    definition = _definition(there, source, source_root, record)
    definition_path = lakehouse_def_copy(export_id(record))
    write_lakehouse_definition(there.storage, definition_path, definition)
    properties = {"source": source_root, "source_id": source.definition.id, "source_version": str(source.version)}
    info = CommitInfo(CLONE, f"version {source.version} of {source_root}"[:500], properties=properties)
    root = first_root(there.storage, definition, definition_path, _commit_id(record), info, CommitCost(1, 1, 0))
    # Not before the version that it is made of, whose storage may have another clock: time travel goes on in it.
    # A version far ahead of that other clock does not count, as in commits there.
    created_at_ms = max(root.created_at_ms, bounded_time_ms(source.created_at_ms, record.created_at_millis))
    root.system[CREATED_AT_MILLIS] = str(created_at_ms)
    limits = TreeLimits.of(definition)
    tree = _tree(there, source, source_root, record, limits)
    edited = carried_tree(there.files.nodes, tree, limits, created_at_ms=created_at_ms, root_system=root.system)
    create_fresh(there.storage, edited.node_files)
    first = replace(edited.root, system=root.system)
    if not create_first_version(there.files, definition, first) and not _is_complete_clone(there, record):
        raise _existing_lakehouse_error(there)


def _tree(there: Lakehouse, source: Snapshot, source_root: str, record: ExportRecord, limits: TreeLimits) -> NodeFile:
    """Return the clone's root, without system rows. All that it points to stays in the parent."""
    if not record.namespaces:
        return source.root.rebased(lambda location: to_uri(source_root, location))
    entries = [(key, to_uri(source_root, place)) for key, place in chosen_entries(source, record.namespaces)]
    return built_root(
        entries,
        limits,
        export_id(record),
        record.created_at_millis,
        lambda files: create_fresh(there.storage, files),
    )


def _definition(there: Lakehouse, source: Snapshot, source_root: str, record: ExportRecord) -> LakehouseDef:
    """Return the settings of the parent, without the state of its operations, and who the parent is."""
    choice = Choice(record.level, record.namespaces)
    copied = TargetExport(TargetLakehouse(there, None), source, source_root, record, choice).definition
    parent = ParentRecord(
        root=source_root,
        lakehouse_id=source.definition.id,
        version=source.version,
        clone_id=record.clone_id,
        name=record.name,
        cloned_version=source.version,
    )
    return replace(copied, parent=parent)
