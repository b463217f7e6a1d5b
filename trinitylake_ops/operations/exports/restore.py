"""Restore the content of an export (docs/internals/protocol.md, "Restore").

A restore from an export within the lakehouse is a rollback. An export at another root is a separate lakehouse: objects
that differ from the latest version are copied back under new names and committed as one version. From a full export,
objects for which a file is missing in this lakehouse are copied back as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    FileMissingError,
    LocationNotAllowedError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import ExportLevel
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io, writing_io
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.operations.base import (
    CommitReport,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
    operation_span,
    uncached,
)
from trinitylake_ops.operations.export_records import check_no_clone, record_of
from trinitylake_ops.operations.exports.outcome import left_out, reasons
from trinitylake_ops.operations.exports.roots import check_is_export_of
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.gc.tables import check_table_files
from trinitylake_ops.operations.rendering import Table, change_rows, new_table
from trinitylake_ops.operations.rollback_target import is_selected, selected_objects
from trinitylake_ops.operations.rollbacks import RollbackPlan, plan_rollback
from trinitylake_ops.operations.transfer.copy import Transfer, claim_table_folders
from trinitylake_ops.operations.transfer.names import Destination
from trinitylake_ops.operations.transfer.selection import Choice, Selection, Selector, selected_entries
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.change_set import NewNames, is_namespace_key
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.tree.diff import KeyChange
from trinitylake_ops.tree.search import scan
from trinitylake_ops.versions.history import Change, change_of
from trinitylake_ops.versions.snapshot import Entry, Snapshot
from trinitylake_ops.versions.table_names import table_ids
from trinitylake_ops.versions.undone import ROLLED_BACK_TO

_OPERATION = "restore"
_MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True, kw_only=True)
class RestorePlan(Plan):
    """The changes that a restore from another root would make, and the files that it would copy."""

    #: The latest version when the plan was made.
    base_version: int
    #: The name of the export.
    name: str
    #: The root of the export.
    target: str
    #: The selected namespaces and tables; empty for all.
    only: tuple[str, ...]
    #: The changes to namespaces and tables.
    changes: tuple[Change, ...]
    #: The number of files to copy.
    files: int
    #: The bytes of data files and manifests to copy.
    bytes: int
    #: Tables that stay unchanged because some of their exported files cannot be read, with the reason.
    damaged: Mapping[str, str]
    #: The version of the lakehouse at the root of the export.
    export_version: int = field(repr=False, compare=False)
    #: The version of this lakehouse that was exported, according to the record of the export.
    exported: int | None = field(repr=False, compare=False)
    #: The files to copy.
    selection: Selection = field(repr=False, compare=False)
    #: The keys of objects that the restore removes.
    removed: tuple[str, ...] = field(repr=False, compare=False)
    operation: Restore = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over the export, all changes, and the names of damaged tables."""
        changes = [[change.kind, change.namespace, change.table] for change in self.changes]
        damaged = sorted(self.damaged)
        content = (self.name, self.target, self.export_version, list(self.only), changes, self.files, damaged)
        return digest_of(self.base_version, self.base_id, _OPERATION, *content)

    @property
    def is_empty(self) -> bool:
        """Whether the lakehouse already has the content of the export."""
        return not self.changes

    def table(self) -> Table:
        """Return one row for each namespace and table that would change."""
        title = (
            f"Restore of export {self.name} from {self.target} into version {self.base_version}:"
            f" {self.files} files to copy, {self.bytes} bytes of data{left_out(self.damaged)}"
        )
        return new_table(title, "change", "object", rows=change_rows(self.changes))

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> CommitReport:
        """Copy missing files and commit, or commit nothing if nothing differs.

        An orphan removal later deletes files that were copied before a failure.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.
            progress: Called with the number of files copied so far.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            CommitConflictError: Another commit happened since the plan was made.
            CorruptFileError: A copy differs from its source.
            StorageError: A storage request failed.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)


def plan_restore(
    lake: Lakehouse,
    name: str,
    namespaces: Sequence[str] | None = None,
    tables: Sequence[str] | None = None,
    *,
    target_options: Mapping[str, str] | None = None,
) -> RollbackPlan | RestorePlan:
    """Plan to restore an export, or selected namespaces and tables in it, without writing anything.

    An export that contains only some namespaces restores only these namespaces. Damaged tables of an export at another
    root are listed in the plan and stay unchanged.

    Args:
        lake: The lakehouse to restore into.
        name: The name of the export.
        namespaces: Restore only these namespaces.
        tables: Restore only these tables, as ``namespace.table``.
        target_options: Options of the storage of an export at another root; None to derive them from the options of the
            lakehouse.

    Returns:
        A rollback plan for an export within the lakehouse; otherwise, a restore plan.

    Raises:
        ExportNotFoundError: The export does not exist.
        InvalidInputError: The export lacks a selected object, or is a clone.
        FileMissingError: A file of a table in ``tables`` is missing in the export.
        CorruptFileError: A file of a table in ``tables`` is damaged in the export.
        LocationNotAllowedError: A table in ``tables`` refers to a file outside the allowed roots.
        StorageError: A storage request failed.
    """
    lake = uncached(lake)
    export = lake.exported(name, target_options)
    if export.files is lake.files:
        return plan_rollback(lake, name, namespaces, tables)
    return Restore(
        lake=lake,
        name=name,
        namespaces=tuple(namespaces or ()),
        tables=tuple(tables or ()),
        target_options=target_options,
    ).plan()


def restore_export(
    lake: Lakehouse,
    name: str,
    namespaces: Sequence[str] | None = None,
    tables: Sequence[str] | None = None,
    *,
    target_options: Mapping[str, str] | None = None,
) -> int:
    """Plan and execute a restore, and return the new version.

    Args:
        lake: The lakehouse to restore into.
        name: The name of the export.
        namespaces: Restore only these namespaces.
        tables: Restore only these tables, as ``namespace.table``.
        target_options: Options of the storage of an export at another root; None to derive them from the options of the
            lakehouse.

    Raises:
        TrinityLakeError: See :func:`plan_restore` and :meth:`RestorePlan.execute`. Unlike planning, this fails if any
            table is damaged.
    """
    with operation_span(Restore.telemetry_name):
        plan = plan_restore(lake, name, namespaces, tables, target_options=target_options)
        if not isinstance(plan, RestorePlan):
            return plan.execute().version
        for error in plan.selection.damaged.values():
            raise error
        return plan.operation.run(plan, None).version


@dataclass(frozen=True, kw_only=True)
class Restore(PlannedOperation[RestorePlan, CommitReport]):
    """Restore objects by name from an export at another root."""

    telemetry_name = "restore"

    name: str
    namespaces: tuple[str, ...]
    tables: tuple[str, ...]
    target_options: Mapping[str, str] | None
    #: The version to restore from; opened by planning.
    export: Snapshot | None = None
    progress: Progress = no_progress

    def plan(self) -> RestorePlan:
        """Make a plan based on the latest version. See :func:`plan_restore` for the errors."""
        base, export = self.lake.snapshot(), self.lake.exported(self.name, self.target_options)
        record = record_of(base.definition, self.name)
        check_no_clone(record)
        check_is_export_of(export, base, self.name)
        only = selected_objects(base, export, self.name, self.namespaces, self.tables)
        current = dict(entry for entry in scan(base.files.nodes, base.root) if is_selected(base, entry[0], only))
        exported = dict(entry for entry in selected_entries(export, ()) if is_selected(base, entry[0], only))
        own_io = reading_io(self.lake)
        is_same = self._comparison(base, export)
        different = [
            (key, location) for key, location in exported.items() if not is_same(key, current.get(key), location)
        ]
        lost = self._with_missing_files(base, current, exported.keys() - dict(different), own_io)
        different = sorted([*different, *((key, exported[key]) for key in lost)])
        identifier = uuid.uuid4()
        destination = Destination(self.lake.root, identifier, f"restore-{identifier}/")
        io = self._export_io(export.files.storage, self.lake)
        selection = Selector(export, Choice(ExportLevel.FULL), io).select(destination, different, own_io=own_io)
        self._leave_out_uncopied(selection, export.version, own_io)
        for name in only:
            if name.table and str(name) in selection.damaged:
                raise selection.damaged[str(name)]
        selected = {key for key, _ in selection.entries}
        skipped = {key: location for key, location in different if key not in selected}
        removed = tuple(sorted(current.keys() - exported.keys() - _same_tables(base, current, export, skipped)))
        restored = {key: _definition_of(export, key, location) for key, location in different if key in selected}
        NewNames(base, {**restored, **dict.fromkeys(removed)}).check(base)
        key_changes = [KeyChange(key, current.get(key), location) for key, location in selection.entries]
        key_changes += [KeyChange(key, current[key], None) for key in removed]
        changes = [change_of(base.keys, change) for change in sorted(key_changes, key=lambda change: change.key)]
        return RestorePlan(
            base_version=base.version,
            base_id=base_id_of(base),
            name=self.name,
            target=export.files.storage.root,
            only=tuple(map(str, only)),
            changes=tuple(change for change in changes if change is not None),
            files=selection.n_files,
            bytes=selection.known_bytes,
            damaged=reasons(selection.damaged),
            export_version=export.version,
            exported=None if record is None else record.version,
            selection=selection,
            removed=removed,
            operation=replace(self, export=export),
        )

    def run(self, plan: RestorePlan, approved_digest: str | None) -> CommitReport:
        """Copy missing files and commit."""
        metered = MeteredLakehouse(self.lake, keeps_cache=True)
        plan = replace(self, lake=metered.lake).checked(plan, approved_digest)
        return CommitReport(
            operation=_OPERATION,
            base_version=plan.base_version,
            version=replace(self, export=plan.operation.export).commit(plan, metered),
            changed=len(plan.changes),
            damaged=plan.damaged,
            cost=metered.cost(),
        )

    def commit(self, plan: RestorePlan, metered: MeteredLakehouse) -> int:
        """Copy missing files, commit, and return the version.

        Args:
            plan: The plan.
            metered: The lakehouse to commit to, which counts requests.
        """
        assert self.export is not None
        lake = metered.lake
        io = self._export_io(metered.meter(self.export.files.storage), lake)
        message = f"export {self.name} from {plan.target}"[:_MAX_MESSAGE_CHARS]
        properties = {} if plan.exported is None else {ROLLED_BACK_TO: str(plan.exported)}
        with lake.transaction(message=message, properties=properties, operation=_OPERATION) as txn:
            txn.require(lambda base: self._check_base(plan, base))
            for key in plan.removed:
                txn.restore_entry(key, None)
            for key, location in plan.selection.entries:
                txn.restore_entry(key, location)
            transfer = Transfer(lake.storage, io, self.progress, plan.selection.n_files)
            transfer.table_storages = claim_table_folders(writing_io(lake), plan.selection.tables, txn.base.definition)
            transfer.copy(plan.selection)
        assert txn.committed_version is not None
        return txn.committed_version

    def _check_base(self, plan: RestorePlan, base: Snapshot) -> None:
        if base.version != plan.base_version:
            raise CommitConflictError(
                f"version {base.version} was committed after version {plan.base_version}, on which the restore was"
                " planned; review the new plan",
                conflicts=(f"version {base.version}",),
                base_version=plan.base_version,
                latest_version=base.version,
            )

    def _leave_out_uncopied(self, selection: Selection, version: int, own_io: StorageFileIO) -> None:
        """Leave out tables of a partial export if some of their files, which are in this lakehouse, cannot be read."""
        damaged: dict[str, TrinityLakeError] = {}
        for definition in selection.uncopied:
            try:
                check_table_files(version, own_io, definition)
            except DAMAGE as error:
                damaged[definition.id] = error
        selection.leave_out(damaged)

    def _with_missing_files(
        self, base: Snapshot, current: Mapping[str, str], keys: Iterable[str], own_io: StorageFileIO
    ) -> list[str]:
        """Return the keys of unchanged objects that lack a file in this lakehouse and that a full export can restore.

        A damaged definition, metadata file or manifest counts as missing. Data files are not read.
        """
        record = record_of(base.definition, self.name)
        if record is None or record.level != ExportLevel.FULL:
            return []  # the export has no copies of the files

        def lacks_file(key: str) -> bool:
            name = base.keys.decode(key)
            if name is None:
                return False
            try:
                if name.table is None:
                    base.files.definitions.namespace(current[key])
                else:
                    check_table_files(base.version, own_io, base.files.definitions.table(current[key]))
            except LocationNotAllowedError:
                return False  # an external file, which no export of this lakehouse copies
            except (FileMissingError, CorruptFileError):
                return True
            return False

        candidates = sorted(keys)
        results = run_parallel(lacks_file, candidates, self.lake.storage.concurrency)
        return [key for key, is_lost in zip(candidates, results, strict=True) if is_lost]

    def _export_io(self, other: Storage, lake: Lakehouse) -> StorageFileIO:
        """Return a reader of the export's files and of the files that were not copied from the lakehouse."""
        options = self.target_options if self.target_options is not None else options_for(self.lake, other.root)
        return StorageFileIO.on(other, options, read_only=True, others=[lake.storage])

    def _comparison(self, base: Snapshot, export: Snapshot) -> Callable[[str, str | None, str], bool]:
        """Return a predicate that checks whether an exported entry is a copy of the current entry with the same key."""
        record = record_of(base.definition, self.name)
        level = ExportLevel.FULL if record is None else record.level
        exported = Destination.other_root(export.files.storage.root, base.definition.id, level)
        limit_bytes = base.definition.file_path_max_size_bytes

        def is_same(key: str, current: str | None, location: str) -> bool:
            name = base.keys.decode(key)
            if current is None:
                return False
            if location == exported.pointer(self.lake.root, current):
                return True
            return name is not None and exported.is_copy(location, name, current, limit_bytes)

        return is_same


def _same_tables(base: Snapshot, current: Mapping[str, str], export: Snapshot, skipped: Mapping[str, str]) -> set[str]:
    """Return the keys of current tables, and of their namespaces, that the restore skips in the export under any name.

    Args:
        base: The version before the restore.
        current: The locations of the definitions in ``base`` by key.
        export: The exported version.
        skipped: The locations of the exported definitions that the restore skips, by key.

    Raises:
        StorageError: A storage request failed.
    """
    ids = set(table_ids(export, skipped).values()) if skipped else set()
    tables = {key: location for key, location in current.items() if not is_namespace_key(key)} if ids else {}
    keys = {key for key, table_id in table_ids(base, tables).items() if table_id in ids}
    return keys | {base.keys.namespace_key(base.object_name(key).namespace) for key in keys}


def _definition_of(export: Snapshot, key: str, location: str) -> Entry:
    """Return the definition of a namespace, or the location of a table."""
    return export.namespace_at(location) if is_namespace_key(key) else location
