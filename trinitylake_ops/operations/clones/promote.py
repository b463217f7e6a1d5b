"""Promote the changes of a clone: copy the clone's new files to the parent, and commit them there in one version."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import NamespaceNotFoundError
from trinitylake_ops.format.definitions import ExportRecord, LakehouseDef, PromotionRecord
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.iceberg.copy import REWRITTEN
from trinitylake_ops.iceberg.io.file_io import writing_io
from trinitylake_ops.iceberg.managed import claim_location
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, base_id_of, digest_of, uncached
from trinitylake_ops.operations.clones.appends import AppendFinder, Appends, write_combined
from trinitylake_ops.operations.clones.clone_records import current_record
from trinitylake_ops.operations.clones.compare import MergeInputs, ObjectState
from trinitylake_ops.operations.clones.merge import (
    Choices,
    Conflict,
    Merge,
    MergeCommit,
    MergeOperation,
    MergePlan,
    change_steps,
    steps_table,
)
from trinitylake_ops.operations.clones.promoted import PromotionSelector, copied_files
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.metadata_rewrites import discarded_on_failure
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.transfer.copy import Transfer
from trinitylake_ops.operations.transfer.selection import Selection
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import KeyChange
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.history import Change, change_of
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import resolve_table

PROMOTE = "promote"
_MAX_PROMOTIONS = 256


@dataclass(frozen=True, kw_only=True)
class PromotionPlan(MergePlan):
    """The changes that a promotion would make in the parent. The plan can be executed only without conflicts."""

    into_parent = True
    #: The latest version of the parent when the plan was made.
    base_version: int
    #: The name of the clone.
    name: str
    #: The version of the clone to promote.
    clone_version: int
    #: The parent version with which both sides are compared.
    shared_version: int
    #: The selected namespaces and tables; empty for all.
    only: tuple[str, ...]
    #: The changes to namespaces and tables.
    changes: tuple[Change, ...]
    #: Conflicts for which no side was chosen.
    conflicts: tuple[Conflict, ...]
    #: The objects for which the parent's side was chosen.
    kept: tuple[str, ...]
    #: The number of files to copy or rewrite.
    files: int
    #: The total size in bytes of the manifests and data files among these files.
    bytes: int
    appended: tuple[Appends, ...] = field(repr=False, compare=False)
    table_ids: Mapping[str, str | None] = field(repr=False, compare=False)
    promotion_id: str = field(repr=False, compare=False)
    entries: Mapping[str, str | None] = field(repr=False, compare=False)
    #: The files to copy.
    selection: Selection = field(repr=False, compare=False)
    operation: Promote = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over both versions and all changes and conflicts."""
        changes = [[change.kind, change.namespace, change.table] for change in self.changes]
        conflicts = [[conflict.name, conflict.reason] for conflict in self.conflicts]
        appended = [[str(appends.name), len(appends.files)] for appends in self.appended]
        sides = (self.name, self.clone_version, self.shared_version, list(self.only))
        return digest_of(self.base_version, self.base_id, PROMOTE, *sides, changes, conflicts, self.files, appended)

    def steps(self) -> Table:
        """Return one row for each file to copy or write, and for each object that would change."""
        copies = [
            ("rewrite" if file.kind in REWRITTEN else "copy", file.kind, file.source, table.places.path(file.source))
            for table in self.selection.tables
            for file in table.files
        ]
        definitions = [("write", "definition", copy.source, copy.target) for copy in self.selection.definitions]
        appended = [
            ("append", f"{len(appends.files)} files, {appends.rows} rows", "the clone", str(appends.name))
            for appends in self.appended
        ]
        rows = [*copies, *definitions, *appended, *change_steps(self.changes, self.base_version + 1)]
        return steps_table(str(self.table().title), rows)

    def table(self) -> Table:
        """Return one row for each namespace and table that would change, and for each conflict."""
        title = (
            f"Promotion of clone {self.name}, version {self.clone_version}, into version {self.base_version}:"
            f" {self.files} files to write, at least {self.bytes} bytes"
        )
        return new_table(title, "change", "object", "why", rows=self.rows())

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> PromotionReport:
        """Copy the new files of the clone and commit, or commit nothing if there is nothing to promote.

        Files copied before a failure are deleted if possible, and otherwise removed later as orphans.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.
            progress: Called with the number of files copied so far.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            CommitConflictError: The plan has unresolved conflicts, or another commit changed an object that is
                promoted.
            CorruptFileError: A file cannot be read, or a copy differs from its source.
            StorageError: A storage request failed.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class PromotionReport(Document):
    """The result of a promotion."""

    #: The name of the clone.
    name: str
    #: The promoted version of the clone.
    clone_version: int
    #: The version of the parent before the promotion.
    base_version: int
    #: The version that the promotion committed; ``base_version`` if there was nothing to promote.
    version: int
    #: The number of changed objects.
    changed: int
    #: The number of files copied or rewritten.
    copied_files: int
    #: The total size of these files.
    copied_bytes: int
    #: The requests and time that the promotion took.
    cost: Cost

    def table(self) -> Table:
        """Return one row for the promotion."""
        row = (self.name, self.clone_version, self.version, self.changed, self.copied_files, self.copied_bytes)
        columns = ("clone", "clone version", "version", "changed", "files written", "bytes written")
        return new_table("Promotion", *columns, rows=[row])


@dataclass(frozen=True, kw_only=True)
class Promote(MergeOperation[PromotionPlan, PromotionReport]):
    """Promote all or selected objects of a clone."""

    telemetry_name = "promote"

    namespaces: tuple[str, ...]
    tables: tuple[str, ...]
    executor: Executor
    progress: Progress = no_progress

    def plan_for(self, sides: MergeInputs) -> PromotionPlan:
        """Make a plan for the opened sides. See :func:`plan_promotion` for the errors."""
        only = selected_names(sides, self.namespaces, self.tables)
        selected = [state for state in sides.states if is_selected(state, only)]
        merge = Merge.of(sides, selected, self.choices, AppendFinder(sides), into_parent=True)
        promotion_id = str(uuid.uuid4())
        selector = PromotionSelector(sides, promotion_id)
        selection, entries = selector.select(merge.changes)
        selection.tables += [selector.appended(appends.table_id, appends.files) for appends in merge.appended]
        merge.check_names()
        keys = sides.latest.keys
        combined = {appends.key: "combined" for appends in merge.appended}
        changes = [
            change_of(keys, KeyChange(key, sides.latest.entry(key), location))
            for key, location in sorted({**entries, **combined}.items())
        ]
        return PromotionPlan(
            base_version=sides.latest.version,
            base_id=base_id_of(sides.latest),
            name=self.name,
            clone_version=sides.clone.latest.version,
            shared_version=sides.base.version,
            only=tuple(map(str, only)),
            changes=tuple(change for change in changes if change is not None),
            conflicts=tuple(merge.conflicts),
            kept=tuple(merge.kept),
            appended=tuple(merge.appended),
            table_ids=merge.table_ids,
            files=selection.n_files,
            bytes=selection.known_bytes,
            promotion_id=promotion_id,
            entries=entries,
            selection=selection,
            operation=self,
        )

    def run(self, plan: PromotionPlan, approved_digest: str | None) -> PromotionReport:
        """Copy the new files of the clone and commit."""
        metered = MeteredLakehouse(self.lake)
        sides = self.open_sides(metered)
        plan = self.executable_plan(plan, approved_digest, sides)
        transfer = Transfer(metered.lake.storage, sides.clone_io(), self.progress, plan.files, self.executor)
        version = plan.base_version if plan.is_empty else self._promote(plan, sides, transfer)
        return PromotionReport(
            name=plan.name,
            clone_version=plan.clone_version,
            base_version=plan.base_version,
            version=version,
            changed=len(plan.changes),
            copied_files=transfer.copied_files,
            copied_bytes=transfer.copied_bytes,
            cost=metered.cost(),
        )

    def _promote(self, plan: PromotionPlan, sides: MergeInputs, transfer: Transfer) -> int:
        lake, selection = sides.lake, plan.selection
        base = lake.snapshot(plan.base_version, latest=sides.latest)
        written_since_ms = lake.storage.now_ms()
        for table_id in selection.table_ids:
            claim_location(lake.storage, f"{lake.root}{table_prefix(table_id)}".rstrip("/"), base.definition)
        properties = {
            "promoted-from": plan.name,
            "clone_id": sides.record.clone_id,
            "clone_version": str(plan.clone_version),
            "promotion": plan.promotion_id,
        }
        promotion = PromotionRecord(
            id=plan.promotion_id,
            clone_version=plan.clone_version,
            version=base.version + 1,
            only=plan.only,
            kept=plan.kept,
        )
        message = f"clone {plan.name}, version {plan.clone_version}"[:500]
        info = CommitInfo(PROMOTE, message, properties=properties, counts={"changed": len(plan.changes)})

        def promoted_uri(table_id: str, uri: str) -> str:
            return copied_files(sides, plan.promotion_id, table_id).uri(transfer.io, uri)

        with discarded_on_failure(writing_io(lake)) as written:
            written += [target for _, target in selection.targets()]
            transfer.copy(selection)
            combined = write_combined(lake, base, plan.appended, written, promoted_uri)
            change = _Promotion(plan, info, combined, sides.record, promotion)
            return lake.commit(change, base, written_since_ms=written_since_ms)


@dataclass(frozen=True)
class _Promotion(MergeCommit):
    """Commit a promotion and record it in the clone's record."""

    noun = "promotion"

    clone: ExportRecord
    promotion: PromotionRecord

    def definition(self, base: Snapshot) -> LakehouseDef:
        record = current_record(base.definition, self.clone)
        promotion = replace(self.promotion, version=base.version + 1)
        updated = replace(record, promotions=(*record.promotions, promotion)[-_MAX_PROMOTIONS:])
        exports = tuple(updated if other.name == record.name else other for other in base.definition.exports)
        return replace(base.definition, exports=exports)


def plan_promotion(
    lake: Lakehouse,
    name: str,
    namespaces: Sequence[str] = (),
    tables: Sequence[str] = (),
    *,
    ours: Sequence[str] = (),
    theirs: Sequence[str] = (),
    target_options: Mapping[str, str] | None = None,
    executor: Executor = LOCAL,
) -> PromotionPlan:
    """Plan to merge the changes of a clone into its parent, without writing anything.

    Objects that changed on both sides are conflicts, unless both sides only appended to a table.

    Args:
        lake: The parent.
        name: The name of the clone.
        namespaces: Promote only these namespaces, and the tables in ``tables``.
        tables: Promote only these tables, as ``namespace.table``, and ``namespaces``.
        ours: Conflicts for which the parent's side is kept, as ``namespace`` or ``namespace.table``.
        theirs: Conflicts for which the clone's side is taken.
        target_options: Options of the clone's storage; None to derive them from the options of the parent.
        executor: Copies the files when the plan is executed.

    Raises:
        ExportNotFoundError: The clone does not exist.
        LakehouseNotFoundError: The clone's lakehouse does not exist.
        NamespaceNotFoundError: A selected namespace exists on neither side.
        TableNotFoundError: A selected table exists on neither side.
        InvalidInputError: Another lakehouse exists at the clone's root, a choice does not refer to a conflict, or a
            table cannot be copied.
        LocationNotAllowedError: A location is outside the allowed roots.
        StorageError: A storage request failed.
    """
    return Promote(
        lake=uncached(lake),
        name=name,
        namespaces=tuple(namespaces),
        tables=tuple(tables),
        choices=Choices.of(ours, theirs),
        target_options=target_options,
        executor=executor,
    ).plan()


def selected_names(sides: MergeInputs, namespaces: Sequence[str], tables: Sequence[str]) -> tuple[ObjectName, ...]:
    """Return the names of selected objects.

    Args:
        sides: The clone and its parent.
        namespaces: Names of namespaces.
        tables: Names of tables, as ``namespace.table``.

    Raises:
        NamespaceNotFoundError: A namespace exists on neither side.
        TableNotFoundError: A table exists on neither side.
    """
    versions = (sides.clone.latest, sides.latest, sides.base)
    for namespace in namespaces:
        if not any(version.has_namespace(namespace) for version in versions):
            raise NamespaceNotFoundError(f"namespace {namespace!r} exists neither in the clone nor in its parent")
    return (*map(ObjectName, namespaces), *(ObjectName(*resolve_table(table, *versions)) for table in tables))


def is_selected(state: ObjectState, only: Sequence[ObjectName]) -> bool:
    """Whether an object or its namespace is selected. An empty selection includes everything."""
    return not only or state.name in only or ObjectName(state.name.namespace) in only
