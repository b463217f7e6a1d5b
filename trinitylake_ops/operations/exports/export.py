"""Export a version under a name, within its lakehouse or to another lakehouse (docs/internals/protocol.md, "Export").

An export has three idempotent steps. A commit records the export as COPYING, which keeps the version from expiring.
Then the files are copied, with the root last. Another commit records the export as COMPLETE. Executing an interrupted
export again resumes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from trinitylake_ops.errors import ExportNotFoundError, FileMissingError, InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, ExportState
from trinitylake_ops.format.file_names import new_export_root_path, new_manifest_path, table_prefix
from trinitylake_ops.format.keys import MAX_TIME_MS
from trinitylake_ops.format.locations import to_location, to_uri
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io, writing_io
from trinitylake_ops.iceberg.managed import claim_location
from trinitylake_ops.operations.base import MeteredLakehouse, Plan, PlannedOperation, base_id_of, digest_of, uncached_on
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.export_records import (
    EXPORT,
    CopiedFile,
    begin,
    begin_manifest,
    check_name,
    check_unused,
    complete,
    finish_manifest,
    is_interrupted,
    record_of,
)
from trinitylake_ops.operations.exports.outcome import (
    ExportReport,
    after_failure,
    clean_up_if_dropped,
    left_out,
    reasons,
    uncopied_note,
)
from trinitylake_ops.operations.exports.roots import (
    TargetExport,
    TargetLakehouse,
    Write,
    build_root,
    copied_root,
    export_id,
    lakehouse_def_copy,
    root_in_same_lakehouse,
)
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.operations.retention import duration_ms
from trinitylake_ops.operations.transfer.copy import Transfer, claim_table_folders, existing_table_files
from trinitylake_ops.operations.transfer.names import Destination, check_contains_no_source, target_root
from trinitylake_ops.operations.transfer.selection import Choice, Selection, Selector
from trinitylake_ops.operations.transfer.target_files import (
    TargetFiles,
    check_definitions,
    check_recopied,
    names_at,
    with_missing_files,
    with_safe_names,
)
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.local.posix_files import make_root_folder
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.versions.snapshot import Snapshot

LEVELS = tuple(level.name.lower() for level in ExportLevel)


@dataclass(frozen=True, kw_only=True)
class ExportPlan(Plan):
    """The files that an export would copy."""

    #: The latest version when the plan was made.
    base_version: int
    #: The name of the export.
    name: str
    #: The version to export.
    version: int
    #: "minimal", "partial" or "full".
    level: str
    #: The exported namespaces; empty for all.
    namespaces: tuple[str, ...]
    #: Whether a partial export copies the definitions.
    definitions: bool
    #: The root of the lakehouse to export to; None for an export within the lakehouse.
    target: str | None
    #: The latest version of the lakehouse at the target; None if there is no lakehouse yet.
    into_version: int | None
    #: How long the export keeps its version, in milliseconds; None to keep it until the export is dropped.
    retain_for_ms: int | None
    #: The number of files to copy, including the root. Tree nodes are written, not copied, and do not count.
    files: int
    #: The number of bytes known in advance: the root of a minimal export, otherwise data files and manifests.
    bytes: int
    #: Whether the plan resumes an interrupted export with the same name.
    resumes: bool
    #: Registered tables of a full export: their definitions are exported, but their files are not copied.
    registered: tuple[str, ...]
    #: Tables that the export leaves out because some of their files cannot be read, with the reason.
    damaged: Mapping[str, str]
    #: The record of the export.
    record: ExportRecord = field(repr=False, compare=False)
    #: The files to copy.
    selection: Selection = field(repr=False, compare=False)
    operation: Export = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over the name, the options, and the number and size of the copies."""
        choice = (self.version, self.level, list(self.namespaces), self.definitions, self.target, self.into_version)
        return digest_of(
            self.base_version, self.base_id, EXPORT, self.name, *choice, self.retain_for_ms, self.files, self.bytes
        )

    @property
    def is_empty(self) -> bool:
        """Always False, because an export is always recorded."""
        return False

    def table(self) -> Table:
        """Return one row for the export."""
        target = self.target or "same lakehouse"
        state = "resumes" if self.resumes else "new"
        row = (self.name, self.version, self.level, ", ".join(self.namespaces), target, self.files, self.bytes, state)
        columns = ("name", "version", "level", "namespaces", "to", "files", "bytes", "state")
        title = f"Export plan{uncopied_note(self.registered)}{left_out(self.damaged)}"
        return new_table(title, *columns, rows=[row])

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> ExportReport:
        """Export, or finish an interrupted export. The run that finishes the export determines its retention time.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.
            progress: Called with the number of files copied so far.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            ExportExistsError: Another export has the same name.
            VersionExpiredError: The version expired since the plan was made.
            CorruptFileError: A copy differs from its source.
            CommitConflictError: All attempts conflicted with other commits.
            StorageError: A storage request failed.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Export(PlannedOperation[ExportPlan, ExportReport]):
    """Export a version."""

    telemetry_name = "export"

    name: str
    level: str
    #: The version to export; None for the latest version.
    version: int | str | None
    target: str | None
    retain_for: timedelta | int | None
    namespaces: tuple[str, ...]
    definitions: bool
    target_options: Mapping[str, str] | None
    executor: Executor
    #: Selects the files of the version; opened by planning.
    selector: Selector | None = None
    #: The lakehouse at the target; opened by planning.
    target_lake: TargetLakehouse | None = None
    progress: Progress = no_progress

    def plan(self) -> ExportPlan:
        """Make a plan based on the latest version. See :func:`plan_export` for the errors."""
        check_name(self.name)
        choice = _choice(self.level, self.namespaces, self.definitions)
        retain_for_ms = retained_ms(self.lake, self.retain_for)
        latest = self.lake.snapshot()
        existing = record_of(latest.definition, self.name)
        source = self._source(latest, existing)
        target_uri = target_root(self.lake, self.target, latest.definition, source.definition)
        wanted = ExportRecord(
            name=self.name,
            version=source.version,
            level=choice.level,
            target_uri=target_uri,
            root_location="" if target_uri else new_export_root_path(),
            namespaces=choice.namespaces,
            manifest_path=new_manifest_path(),
        )
        resumes = existing is not None and is_interrupted(existing, wanted)
        if not resumes:
            check_unused(latest.definition, self.name)
        options = self.target_options if self.target_options is not None else options_for(self.lake, target_uri)
        record = existing if resumes and existing else wanted
        operation = replace(self, target_options=options)._opened(source, record, choice)
        selection = operation._select(record)
        base = None if operation.target_lake is None else operation.target_lake.base
        known_bytes = selection.known_bytes
        if choice.level == ExportLevel.MINIMAL:
            known_bytes = source.files.storage.stat(source.location).size_bytes
        if target_uri:
            sources = [to_uri(self.lake.root, file.source) for table in selection.tables for file in table.files]
            check_contains_no_source(target_uri, sources)
        return ExportPlan(
            base_version=latest.version,
            base_id=base_id_of(latest),
            name=self.name,
            version=source.version,
            level=self.level,
            namespaces=choice.namespaces,
            definitions=choice.with_definitions,
            target=target_uri or None,
            into_version=None if base is None else base.version,
            retain_for_ms=retain_for_ms,
            files=selection.n_files + 1,
            bytes=known_bytes,
            resumes=resumes,
            registered=tuple(sorted(selection.registered)),
            damaged=reasons(selection.damaged),
            record=record,
            selection=selection,
            operation=operation,
        )

    def _source(self, latest: Snapshot, existing: ExportRecord | None) -> Snapshot:
        version = self.version
        if version is None and existing is not None and existing.state == ExportState.COPYING:
            version = existing.version
        source = latest if version is None else self.lake.snapshot(version)
        if source.files is not self.lake.files:
            raise InvalidInputError(f"export {version!r} is a lakehouse at another root; open that one to export it")
        return source

    def _opened(self, source: Snapshot, record: ExportRecord, choice: Choice) -> Export:
        """Return this operation with the lakehouse at the target of a record, ready to select and copy files."""
        target_lake = None
        if record.target_uri:
            storage = open_storage(record.target_uri, self.target_options)
            target_lake = TargetLakehouse.open(uncached_on(storage, self.target_options), source, choice)
        return replace(
            self, selector=Selector(source, choice, reading_io(self.lake), self.executor), target_lake=target_lake
        )

    def _select(self, record: ExportRecord) -> Selection:
        """Return the files to copy under the names of a record; a minimal export copies only its root."""
        selector = self._selector
        if selector.choice.level == ExportLevel.MINIMAL:
            return Selection()
        if self.target_lake is not None:
            return selector.select(names_at(record.target_uri, selector), existing=self.target_lake.entries())
        selection = selector.select(Destination.same_root(self.lake.root, export_id(record)), own_io=selector.io)
        if selector.choice.copies_definitions:
            selection.add_definition(selector.source.definition_location, lakehouse_def_copy(export_id(record)))
        return selection

    @property
    def _selector(self) -> Selector:
        assert self.selector is not None, "planning opens the selector"
        return self.selector

    def run(self, plan: ExportPlan, approved_digest: str | None) -> ExportReport:
        """Export, or finish an interrupted export."""
        plan = replace(self, version=plan.version).checked(plan, approved_digest)
        return replace(plan.operation, progress=self.progress)._export(plan)

    def _export(self, plan: ExportPlan) -> ExportReport:
        metered = MeteredLakehouse(self.lake)
        wanted = replace(
            plan.record, created_at_millis=self.lake.storage.now_ms(), retain_until_millis=self._retain_until_ms(plan)
        )
        make_root_folder(wanted.target_uri)
        record, resumed = begin(metered.lake, wanted, self._check_source)
        operation, selection = self, plan.selection
        if record.manifest_path != plan.record.manifest_path:  # another run recorded the export after the plan was made
            operation = self._opened(self._selector.source, record, self._selector.choice)
            selection = operation._select(record)
        try:
            if operation.target_lake is None:
                copied = operation._copy_within(metered, record, selection, resumed=resumed)
            else:
                copied = operation._copy_to_target(operation.target_lake, metered, record, selection)
            version = complete(
                metered.lake, record, copied.root_location, self._retain_until_ms(plan), self._check_source
            )
        except TrinityLakeError as error:
            if isinstance(error, ExportNotFoundError | FileMissingError):
                clean_up_if_dropped(metered.lake, record)
            if isinstance(error, ExportNotFoundError):
                raise
            raise after_failure(metered.lake, record, error, resumed=resumed) from error
        return ExportReport(
            name=record.name,
            version=record.version,
            level=record.level.name.lower(),
            location=copied.root_location,
            manifest_path=record.manifest_path,
            committed_version=version,
            target_version=copied.target_version,
            files=copied.files,
            copied_files=copied.transfer.copied_files,
            copied_bytes=copied.transfer.copied_bytes,
            resumed=resumed,
            registered=tuple(sorted(selection.registered)),
            damaged=reasons(copied.damaged),
            cost=metered.cost(),
        )

    def _retain_until_ms(self, plan: ExportPlan) -> int | None:
        return None if plan.retain_for_ms is None else self.lake.storage.now_ms() + plan.retain_for_ms

    def _check_source(self, base: Snapshot) -> None:
        """Raise ExportNotFoundError if the source is a dropped export, because its files are no longer kept."""
        source = self._selector.source
        if source.location == base.files.roots.path(source.version):
            return
        exported = base.definition.exported_snapshots.values()
        if source.location not in (to_location(base.files.storage.root, location) for location in exported):
            raise ExportNotFoundError(
                f"export {self.name!r} failed: its source, the export at {source.location!r}, was dropped; drop"
                f" {self.name!r} as well"
            )

    def _copy_within(
        self, metered: MeteredLakehouse, record: ExportRecord, selection: Selection, *, resumed: bool
    ) -> _Copied:
        """Copy within the lakehouse. A minimal export copies only the root of its version."""
        storage, io = metered.lake.storage, writing_io(metered.lake)
        source, choice = self._selector.source, self._selector.choice
        transfer = Transfer(storage, io, self.progress, selection.n_files + 1, self.executor, skips_damaged=True)
        if resumed:
            transfer.existing = {info.path: info.size_bytes for info in storage.list()}
        if choice.level == ExportLevel.MINIMAL:
            root = copied_root(source, record.root_location)
        else:
            nodes: list[str] = []
            _build_tree(source, record, selection, nodes.extend)
            targets = [*selection.targets(), *((None, path) for path in nodes)]
            begin_manifest(storage, record, targets, with_definitions=choice.with_definitions)
            transfer.table_storages = claim_table_folders(io, selection.tables, source.definition)
            if resumed:
                transfer.existing |= existing_table_files(transfer.table_storages, selection.tables)
            transfer.copy(selection)
            tree = _build_tree(source, record, selection, transfer.create)
            copied_def = lakehouse_def_copy(export_id(record))
            definition_path = copied_def if choice.copies_definitions else source.definition_location
            root = root_in_same_lakehouse(source, tree, definition_path, record.root_location)
        files = [*transfer.files, CopiedFile.of(source.location, record.root_location, root)]
        finish_manifest(storage, record, files, with_definitions=choice.with_definitions)
        transfer.create({record.root_location: root})
        return _Copied(transfer, record.root_location, len(files), None, selection.damaged)

    def _copy_to_target(
        self, target_lake: TargetLakehouse, metered: MeteredLakehouse, record: ExportRecord, selection: Selection
    ) -> _Copied:
        """Copy the files that the other root lacks, and commit a version there."""
        selector, base = self._selector, target_lake.base
        source, choice = selector.source, selector.choice
        storage = metered.meter(target_lake.lake.storage)
        lake = uncached_on(storage, target_lake.lake.storage_options)
        writer = TargetExport(replace(target_lake, lake=lake), source, metered.lake.root, record, choice)
        io = StorageFileIO.on(metered.lake.storage, selector.io.storage_options)
        transfer = Transfer(storage, io, self.progress, selection.n_files + 1, self.executor, skips_damaged=True)
        txn = writer.begin()
        listed = list(storage.list())
        transfer.existing = {info.path: info.size_bytes for info in listed}
        check_definitions(selection, choice, lake.root, transfer.existing)
        state = TargetFiles()
        if base is not None and choice.level == ExportLevel.FULL:
            state = TargetFiles.of(lake, base, selection, transfer.existing)
        to_copy = selection
        if base is not None and txn is not None:
            to_copy = with_safe_names(selection, selector, base, txn, listed, state.known | state.lost)
        if state.tables:
            to_copy = with_missing_files(to_copy, selector, state.tables, record.target_uri)
        transfer.known = state.known.union(*(table.known for table in state.tables))
        transfer.replaced = state.lost.union(*(table.lost for table in state.tables))
        for table_id in selection.table_ids:
            claim_location(storage, f"{storage.root}{table_prefix(table_id)}".rstrip("/"), writer.target_definition)
        transfer.copy(to_copy)
        check_recopied(state.tables, to_copy, lake, transfer.sizes_bytes)
        tree = NodeFile() if txn is not None else writer.whole_tree(to_copy.entries, transfer.create)
        finish_manifest(metered.lake.storage, record, transfer.files, with_definitions=choice.with_definitions)
        version = writer.put(tree) if txn is None else writer.commit(txn, to_copy.entries)
        location = f"{storage.root}{lake.files.roots.path(version)}"
        return _Copied(transfer, location, len(transfer.files) + 1, version, selection.damaged | to_copy.damaged)


@dataclass(frozen=True)
class _Copied:
    """The result of copying the files of an export."""

    #: The transfer that copied the files.
    transfer: Transfer
    #: The location of the exported root.
    root_location: str
    #: The number of files of the export, including its root.
    files: int
    #: The version committed at another root; None within the lakehouse.
    target_version: int | None
    #: The errors of the tables that were left out, by table name.
    damaged: Mapping[str, TrinityLakeError]


def _build_tree(source: Snapshot, record: ExportRecord, selection: Selection, write: Write) -> NodeFile:
    limits, created_at_ms = TreeLimits.of(source.definition), record.created_at_millis
    return build_root(selection.entries, limits, export_id(record), created_at_ms, write)


def plan_export(
    lake: Lakehouse,
    name: str,
    level: str = "minimal",
    version: int | str | None = None,
    target: str | None = None,
    retain_for: timedelta | int | None = None,
    *,
    namespaces: Sequence[str] = (),
    definitions: bool = False,
    target_options: Mapping[str, str] | None = None,
    executor: Executor = LOCAL,
) -> ExportPlan:
    """Plan an export of a version, without writing anything.

    If earlier exports of this lakehouse have created a lakehouse at the target, the export adds a version to it and
    copies only new files.

    Args:
        lake: The lakehouse to export from.
        name: The name of the export.
        level: The content to copy. "minimal" copies the root; "partial" copies the tree nodes as well; "full" copies
            everything, including the files of managed tables.
        version: The version, or the name of an export within the lakehouse. None to export the latest version.
        target: The root of another lakehouse to export to; None to export within the lakehouse.
        retain_for: How long the export keeps its version from expiring, as a timedelta or in milliseconds; None for
            until the export is dropped. An incomplete full export always keeps its version.
        namespaces: Export only these namespaces; not supported for the "minimal" level.
        definitions: Also copy the definitions of namespaces and tables; only for the "partial" level.
        target_options: Options of the storage at the target; None to use the options of the lakehouse if the URI scheme
            is the same.
        executor: Finds the files to copy, and copies them when the plan is executed.

    Raises:
        InvalidNameError: The name is not valid for an export.
        ExportExistsError: Another export has the same name.
        InvalidInputError: The options contradict each other, or the target cannot take this export.
        NamespaceNotFoundError: A namespace does not exist in the version.
        VersionNotFoundError: The version does not exist.
        VersionExpiredError: The version has expired.
        StorageError: A storage request failed.
    """
    return Export(
        lake=lake,
        name=name,
        level=level,
        version=version,
        target=target,
        retain_for=retain_for,
        namespaces=tuple(namespaces),
        definitions=definitions,
        target_options=target_options,
        executor=executor,
    ).plan()


def _choice(level: str, namespaces: Sequence[str], definitions: bool) -> Choice:
    if level not in LEVELS:
        raise InvalidInputError(f"unknown export level {level!r}; use one of {', '.join(LEVELS)}")
    if level == "minimal" and namespaces:
        raise InvalidInputError(
            "a minimal export contains all namespaces; use a partial or full export to select namespaces"
        )
    if level != "partial" and definitions:
        raise InvalidInputError(f"definitions is only for partial exports, not for a {level} one; leave it out")
    return Choice(ExportLevel[level.upper()], tuple(sorted(set(namespaces))), definitions)


def retained_ms(lake: Lakehouse, retain_for: timedelta | int | None) -> int | None:
    """Convert a retention time to milliseconds.

    Args:
        lake: The lakehouse, for the clock of its storage.
        retain_for: A timedelta or a number of milliseconds; None for no limit.

    Raises:
        InvalidInputError: The time is not positive, or ends after the year 9999.
    """
    if retain_for is None:
        return None
    retain_for_ms = duration_ms(retain_for, "retain_for")
    if retain_for_ms == 0:
        raise InvalidInputError("retain_for is 0; use a positive duration, or leave it out to retain the export")
    if lake.storage.now_ms() + retain_for_ms > MAX_TIME_MS:
        raise InvalidInputError("retain_for ends after the year 9999; leave it out to retain the export without limit")
    return retain_for_ms
