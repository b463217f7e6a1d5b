"""Brings back the content of an export (docs/internals/protocol.md, "Restore").

From an export in the lakehouse itself this is a rollback. An export at another root is a lakehouse of its own. Objects
that differ from the latest version are copied back, under fresh names, and committed as one version. So are, from a
full export, objects that lost a file here.
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
from trinitylake_ops.operations.rollback_target import is_chosen, selected_objects
from trinitylake_ops.operations.rollbacks import RollbackPlan, plan_rollback
from trinitylake_ops.operations.transfer.copy import Transfer, claim_table_folders
from trinitylake_ops.operations.transfer.names import Destination
from trinitylake_ops.operations.transfer.selection import Choice, Selection, Selector, chosen_entries
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
_LONGEST_MESSAGE_CHARS = 500


@dataclass(frozen=True, kw_only=True)
class RestorePlan(Plan):
    """The changes of a restore from another root, and the number of files that it would copy.

    ``damaged`` are tables whose files there cannot all be read, with the reason. They stay as they are here.
    """

    base_version: int
    name: str
    target: str
    only: tuple[str, ...]
    changes: tuple[Change, ...]
    files: int
    bytes: int
    damaged: Mapping[str, str]
    export_version: int = field(repr=False, compare=False)
    #: The version of this lakehouse that was exported, as its record says.
    exported: int | None = field(repr=False, compare=False)
    selection: Selection = field(repr=False, compare=False)
    removed: tuple[str, ...] = field(repr=False, compare=False)
    operation: Restore = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over the export, all changes and the names of damaged tables."""
        changes = [[change.kind, change.namespace, change.table] for change in self.changes]
        damaged = sorted(self.damaged)
        content = (self.name, self.target, self.export_version, list(self.only), changes, self.files, damaged)
        return digest_of(self.base_version, self.base_id, _OPERATION, *content)

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs from the export."""
        return not self.changes

    def table(self) -> Table:
        """Return one row for each namespace and table that would change."""
        title = (
            f"Restore of export {self.name} from {self.target} into version {self.base_version}:"
            f" {self.files} files to copy, {self.bytes} bytes of data{left_out(self.damaged)}"
        )
        return new_table(title, "change", "object", rows=change_rows(self.changes))

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> CommitReport:
        """Copy missing files and commit. Nothing is committed if nothing differs.

        A removal of orphans deletes files that were copied before a failure. Raises PlanChangedError,
        CommitConflictError when another commit was made since the plan, CorruptFileError, StorageError.
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
    """Plan to bring back the content of an export, or chosen namespaces and tables of it. Only reads.

    ``target_options`` are for the storage of an export at another root. From an export of some namespaces only these
    come back. Damaged tables of an export at another root are listed in the plan and stay as they are here. Raises
    ExportNotFoundError, InvalidInputError for objects that the export does not have and for a clone, StorageError.
    Raises FileMissingError, CorruptFileError, LocationNotAllowedError for a damaged table that ``tables`` names.
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
    """Plan and execute a restore. Returns the new version.

    Raises the errors of both, and the error of a damaged table, which :func:`plan_restore` leaves out.
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
    """The restore of objects, by name, from an export at another root. ``export`` is what planning opened."""

    telemetry_name = "restore"

    name: str
    namespaces: tuple[str, ...]
    tables: tuple[str, ...]
    target_options: Mapping[str, str] | None
    export: Snapshot | None = None
    progress: Progress = no_progress

    def plan(self) -> RestorePlan:
        """Plan on the latest version. Raises what :func:`plan_restore` raises."""
        base, export = self.lake.snapshot(), self.lake.exported(self.name, self.target_options)
        record = record_of(base.definition, self.name)
        check_no_clone(record)
        check_is_export_of(export, base, self.name)
        only = selected_objects(base, export, self.name, self.namespaces, self.tables)
        here = {key: place for key, place in scan(base.files.nodes, base.root) if is_chosen(base, key, only)}
        there = {key: place for key, place in chosen_entries(export, ()) if is_chosen(base, key, only)}
        own_io = reading_io(self.lake)
        is_same = self._comparison(base, export)
        different = [(key, place) for key, place in there.items() if not is_same(key, here.get(key), place)]
        lost = self._with_missing_files(base, here, there.keys() - dict(different), own_io)
        different = sorted([*different, *((key, there[key]) for key in lost)])
        identifier = uuid.uuid4()
        fresh = Destination(self.lake.root, identifier, f"restore-{identifier}/")
        other = export.files.storage
        io = self._reading(other, self.lake)
        selection = Selector(export, Choice(ExportLevel.FULL), io).select(fresh, different, own_io=own_io)
        self._leave_out_uncopied(selection, export.version, own_io)
        for name in only:
            if name.table and str(name) in selection.damaged:
                raise selection.damaged[str(name)]
        kept = {key for key, _ in selection.entries}
        left = {key: place for key, place in different if key not in kept}
        removed = tuple(sorted(here.keys() - there.keys() - _same_tables(base, here, export, left)))
        restored = {key: _definition_of(export, key, place) for key, place in different if key in kept}
        NewNames(base, {**restored, **dict.fromkeys(removed)}).check(base)
        changes = [KeyChange(key, here.get(key), place) for key, place in selection.entries]
        changes += [KeyChange(key, here[key], None) for key in removed]
        named = [change_of(base.keys, change) for change in sorted(changes, key=lambda change: change.key)]
        return RestorePlan(
            base_version=base.version,
            base_id=base_id_of(base),
            name=self.name,
            target=export.files.storage.root,
            only=tuple(map(str, only)),
            changes=tuple(change for change in named if change is not None),
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
        """Copy missing files and commit; return the version."""
        assert self.export is not None
        lake = metered.lake
        io = self._reading(metered.also(self.export.files.storage), lake)
        message = f"export {self.name} from {plan.target}"[:_LONGEST_MESSAGE_CHARS]
        claim = {} if plan.exported is None else {ROLLED_BACK_TO: str(plan.exported)}
        with lake.transaction(message=message, properties=claim, operation=_OPERATION) as txn:
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
                " planned; look at the new plan",
                conflicts=(f"version {base.version}",),
                base_version=plan.base_version,
                latest_version=base.version,
            )

    def _leave_out_uncopied(self, selection: Selection, version: int, own_io: StorageFileIO) -> None:
        """Leave out tables of a partial export whose files, which are in this lakehouse, cannot all be read."""
        damaged: dict[str, TrinityLakeError] = {}
        for definition in selection.uncopied:
            try:
                check_table_files(version, own_io, definition)
            except DAMAGE as error:
                damaged[definition.id] = error
        selection.leave_out(damaged)

    def _with_missing_files(
        self, base: Snapshot, here: Mapping[str, str], keys: Iterable[str], own_io: StorageFileIO
    ) -> list[str]:
        """Return the keys of objects that lost a file here, of those that are as a full export has them.

        A damaged definition, metadata file or manifest counts as lost. Data files are not read.
        """
        record = record_of(base.definition, self.name)
        if record is None or record.level != ExportLevel.FULL:
            return []  # such an export has no files of its own to bring back

        def lacks_file(key: str) -> bool:
            name = base.keys.decode(key)
            if name is None:
                return False
            try:
                if name.table is None:
                    base.files.definitions.namespace(here[key])
                else:
                    check_table_files(base.version, own_io, base.files.definitions.table(here[key]))
            except LocationNotAllowedError:
                return False  # it needs files of others, which no export of this lakehouse brings back
            except (FileMissingError, CorruptFileError):
                return True
            return False

        chosen = sorted(keys)
        found = run_parallel(lacks_file, chosen, self.lake.storage.concurrency)
        return [key for key, is_lost in zip(chosen, found, strict=True) if is_lost]

    def _reading(self, other: Storage, lake: Lakehouse) -> StorageFileIO:
        """Return a reader of the export's files, and of those that were left in the lakehouse."""
        options = self.target_options if self.target_options is not None else options_for(self.lake, other.root)
        return StorageFileIO.on(other, options, read_only=True, others=[lake.storage])

    def _comparison(self, base: Snapshot, export: Snapshot) -> Callable[[str, str | None, str], bool]:
        """Return a function that tells whether an entry of the export was made of the present one."""
        record = record_of(base.definition, self.name)
        level = ExportLevel.FULL if record is None else record.level
        exported = Destination.other_root(export.files.storage.root, base.definition.id, level)
        limit_bytes = base.definition.file_path_max_size_bytes

        def is_same(key: str, here: str | None, there: str) -> bool:
            name = base.keys.decode(key)
            if here is None:
                return False
            if there == exported.pointer(self.lake.root, here):
                return True
            return name is not None and exported.is_copy(there, name, here, limit_bytes)

        return is_same


def _same_tables(base: Snapshot, here: Mapping[str, str], export: Snapshot, left: Mapping[str, str]) -> set[str]:
    """Return the keys of tables here that are left out of a restore, whatever their names, and of their namespaces.

    Args:
        base: The version before the restore.
        here: The locations of its definitions by key.
        export: The export.
        left: The locations of definitions in the export that are left out, by key.

    Raises:
        StorageError: A definition cannot be read for now.
    """
    ids = set(table_ids(export, left).values()) if left else set()
    tables = {key: place for key, place in here.items() if not is_namespace_key(key)} if ids else {}
    keys = {key for key, table_id in table_ids(base, tables).items() if table_id in ids}
    return keys | {base.keys.namespace_key(base.object_name(key).namespace) for key in keys}


def _definition_of(export: Snapshot, key: str, location: str) -> Entry:
    """Return the definition of a namespace, and the location of a table."""
    return export.namespace_at(location) if is_namespace_key(key) else location
