"""Exports: a version kept under a name, in its own lakehouse or as another one (docs/internals/protocol.md, "Export").

An export takes three steps, each of which can be repeated. A commit records it as COPYING, which keeps the version from
expiring. The files are copied, the root last. A commit records it as COMPLETE. An export that was cut off continues
where it stopped when it is executed again.
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
    is_cut_off,
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
    built_root,
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
    unendangered,
    with_missing_files,
)
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.local.posix_files import make_root_folder
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.versions.snapshot import Snapshot

LEVELS = tuple(level.name.lower() for level in ExportLevel)


@dataclass(frozen=True, kw_only=True)
class ExportPlan(Plan):
    """The copies that an export would make. ``files`` includes the root, but not nodes, which are built anew.

    ``bytes`` counts the sizes known before: the root of a minimal export, else data files and manifests. ``resumes``
    says that a cut-off export of this name goes on. ``into_version`` is the present version of the lakehouse at the
    target, None if there is none. ``registered`` names tables of a full export whose files another catalog keeps. The
    export has their definitions, and points to their files.
    """

    base_version: int
    name: str
    version: int
    level: str
    namespaces: tuple[str, ...]
    definitions: bool
    target: str | None
    into_version: int | None
    retain_for_ms: int | None
    files: int
    bytes: int
    resumes: bool
    registered: tuple[str, ...]
    damaged: Mapping[str, str]
    record: ExportRecord = field(repr=False, compare=False)
    selection: Selection = field(repr=False, compare=False)
    operation: Export = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the name, the version, the copied files and their targets."""
        choice = (self.version, self.level, list(self.namespaces), self.definitions, self.target, self.into_version)
        return digest_of(
            self.base_version, self.base_id, EXPORT, self.name, *choice, self.retain_for_ms, self.files, self.bytes
        )

    @property
    def is_empty(self) -> bool:
        """Always False: an export is recorded in any case."""
        return False

    def table(self) -> Table:
        """Return one row."""
        where = self.target or "its own lakehouse"
        state = "goes on" if self.resumes else "new"
        row = (self.name, self.version, self.level, ", ".join(self.namespaces), where, self.files, self.bytes, state)
        columns = ("name", "version", "level", "namespaces", "to", "files", "bytes", "state")
        title = f"Export plan{uncopied_note(self.registered)}{left_out(self.damaged)}"
        return new_table(title, *columns, rows=[row])

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> ExportReport:
        """Export, or finish an export that was cut off. The run that finishes it says how long it is retained.

        Raises PlanChangedError when an approved digest is not that of the plan made again now. Raises CorruptFileError
        when a copy is not the source, ExportExistsError, VersionExpiredError, CommitConflictError, StorageError.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Export(PlannedOperation[ExportPlan, ExportReport]):
    """An export of a version, None for the latest."""

    telemetry_name = "export"

    name: str
    level: str
    version: int | str | None
    target: str | None
    retain_for: timedelta | int | None
    namespaces: tuple[str, ...]
    definitions: bool
    target_options: Mapping[str, str] | None
    executor: Executor
    #: Selects files of the version, and the lakehouse at another root: what planning opened.
    selector: Selector | None = None
    target_lake: TargetLakehouse | None = None
    progress: Progress = no_progress

    def plan(self) -> ExportPlan:
        """Plan on the latest version. Raises what :func:`plan_export` raises."""
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
        resumes = existing is not None and is_cut_off(existing, wanted)
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
            raise InvalidInputError(f"export {version!r} is a lakehouse of its own; export from there")
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
        """Return the files to copy under the names of a record. A minimal export copies none but its root."""
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
        assert self.selector is not None, "planning opened it"
        return self.selector

    def run(self, plan: ExportPlan, approved_digest: str | None) -> ExportReport:
        """Export, or finish an export."""
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
        if record.manifest_path != plan.record.manifest_path:  # another run began it since the plan
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
        """Raise ExportNotFoundError if the source is another export that was dropped. Its files are not kept."""
        source = self._selector.source
        if source.location == base.files.roots.path(source.version):
            return
        exported = base.definition.exported_snapshots.values()
        if source.location not in (to_location(base.files.storage.root, location) for location in exported):
            raise ExportNotFoundError(
                f"the export at {source.location!r}, which was to be exported as {self.name!r}, was dropped meanwhile;"
                f" drop {self.name!r}, too"
            )

    def _copy_within(
        self, metered: MeteredLakehouse, record: ExportRecord, selection: Selection, *, resumed: bool
    ) -> _Copied:
        """Copy within the lakehouse. The root of a minimal export is a copy of the source's."""
        storage, io = metered.lake.storage, writing_io(metered.lake)
        source, choice = self._selector.source, self._selector.choice
        transfer = Transfer(storage, io, self.progress, selection.n_files + 1, self.executor, skips_damaged=True)
        if resumed:
            transfer.existing = {info.path: info.size_bytes for info in storage.list()}
        if choice.level == ExportLevel.MINIMAL:
            root = copied_root(source, record.root_location)
        else:
            nodes: list[str] = []
            _built_tree(source, record, selection, nodes.extend)
            targets = [*selection.targets(), *((None, path) for path in nodes)]
            begin_manifest(storage, record, targets, with_definitions=choice.with_definitions)
            transfer.table_storages = claim_table_folders(io, selection.tables, source.definition)
            if resumed:
                transfer.existing |= existing_table_files(transfer.table_storages, selection.tables)
            transfer.copy(selection)
            tree = _built_tree(source, record, selection, transfer.create)
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
        """Copy to another root, unless an earlier run has done so. Commit a version there."""
        selector, base = self._selector, target_lake.base
        source, choice = selector.source, selector.choice
        storage = metered.also(target_lake.lake.storage)
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
        chosen = selection
        if base is not None and txn is not None:
            chosen = unendangered(selection, selector, base, txn, listed, state.known | state.lost)
        if state.tables:
            chosen = with_missing_files(chosen, selector, state.tables, record.target_uri)
        transfer.known = state.known.union(*(table.known for table in state.tables))
        transfer.replaced = state.lost.union(*(table.lost for table in state.tables))
        for table_id in selection.table_ids:
            claim_location(storage, f"{storage.root}{table_prefix(table_id)}".rstrip("/"), writer.target_definition)
        transfer.copy(chosen)
        check_recopied(state.tables, chosen, lake, transfer.sizes_bytes)
        tree = NodeFile() if txn is not None else writer.whole_tree(chosen.entries, transfer.create)
        finish_manifest(metered.lake.storage, record, transfer.files, with_definitions=choice.with_definitions)
        version = writer.put(tree) if txn is None else writer.commit(txn, chosen.entries)
        location = f"{storage.root}{lake.files.roots.path(version)}"
        return _Copied(transfer, location, len(transfer.files) + 1, version, selection.damaged | chosen.damaged)


@dataclass(frozen=True)
class _Copied:
    """The copies of an export: the location of their root, and their number with it."""

    transfer: Transfer
    root_location: str
    files: int
    target_version: int | None
    damaged: Mapping[str, TrinityLakeError]


def _built_tree(source: Snapshot, record: ExportRecord, selection: Selection, write: Write) -> NodeFile:
    limits, created_at_ms = TreeLimits.of(source.definition), record.created_at_millis
    return built_root(selection.entries, limits, export_id(record), created_at_ms, write)


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
    """Plan an export of a version, by default the latest. Only reads.

    ``level`` "minimal" copies the root. "partial" copies the nodes, too, and with ``definitions`` these. "full" copies
    everything, with the files of managed tables. Partial and full ones can be limited to ``namespaces``. ``target`` is
    another root, where the export becomes a lakehouse of its own. ``target_options`` are for its storage. By default
    they are those of this storage if the scheme is the same. If earlier exports of this lakehouse made one there, it
    gets one more version, and only new files are copied. ``retain_for``, a timedelta or milliseconds, is how long the
    export keeps its version from expiring. None means until it is dropped. A full export keeps it until it is complete,
    whatever is given.
    ``executor`` finds the files to copy, and copies them when the plan is executed.

    Raises InvalidNameError, ExportExistsError, NamespaceNotFoundError, VersionNotFoundError, VersionExpiredError,
    StorageError. Raises InvalidInputError for an impossible export.
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
        raise InvalidInputError(f"level {level!r} cannot be exported; levels: {', '.join(LEVELS)}")
    if level == "minimal" and namespaces:
        raise InvalidInputError("a minimal export is that of all namespaces; choose some for a partial or full one")
    if level != "partial" and definitions:
        raise InvalidInputError(f"only for partial exports there is a choice of definitions, not for a {level} one")
    return Choice(ExportLevel[level.upper()], tuple(sorted(set(namespaces))), definitions)


def retained_ms(lake: Lakehouse, retain_for: timedelta | int | None) -> int | None:
    """Return how long an export keeps its version, None for ever. Raises InvalidInputError."""
    if retain_for is None:
        return None
    retain_for_ms = duration_ms(retain_for, "retain_for")
    if retain_for_ms == 0:
        raise InvalidInputError(f"an export is retained for more than 0 ms, not for {retain_for_ms}")
    if lake.storage.now_ms() + retain_for_ms > MAX_TIME_MS:
        raise InvalidInputError("an export is retained until the year 9999 at most; leave the duration out for ever")
    return retain_for_ms
