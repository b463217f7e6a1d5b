"""Promotes what was made in a clone: copies what is new there, and points the parent to it in one commit."""

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
from trinitylake_ops.operations.clones.appends import Appends, FindsAppends, write_combined
from trinitylake_ops.operations.clones.clone_records import same_clone
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
_MOST_PROMOTIONS = 256


@dataclass(frozen=True, kw_only=True)
class PromotionPlan(MergePlan):
    """What a promotion would change in the parent. With ``conflicts`` it cannot be executed before somebody chooses.

    ``clone_version`` is promoted. ``shared_version`` of the parent is the one that both sides are compared with.
    ``kept`` are the objects for which the parent's side was chosen. ``files`` counts what would be copied or written
    anew. ``bytes`` are those of manifests and data files among them.
    """

    into_parent = True
    base_version: int
    name: str
    clone_version: int
    shared_version: int
    only: tuple[str, ...]
    changes: tuple[Change, ...]
    conflicts: tuple[Conflict, ...]
    kept: tuple[str, ...]
    files: int
    bytes: int
    appended: tuple[Appends, ...] = field(repr=False, compare=False)
    table_ids: Mapping[str, str | None] = field(repr=False, compare=False)
    promotion_id: str = field(repr=False, compare=False)
    entries: Mapping[str, str | None] = field(repr=False, compare=False)
    selection: Selection = field(repr=False, compare=False)
    operation: Promote = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over both versions and all changes and conflicts."""
        changes = [[change.kind, change.namespace, change.table] for change in self.changes]
        conflicts = [[conflict.name, conflict.reason] for conflict in self.conflicts]
        appended = [[str(one.name), len(one.files)] for one in self.appended]
        sides = (self.name, self.clone_version, self.shared_version, list(self.only))
        return digest_of(self.base_version, self.base_id, PROMOTE, *sides, changes, conflicts, self.files, appended)

    def steps(self) -> Table:
        """Return each file that would be copied or written, and each object that would change."""
        copies = [
            ("write anew" if file.kind in REWRITTEN else "copy", file.kind, file.source, table.places.path(file.source))
            for table in self.selection.tables
            for file in table.files
        ]
        definitions = [("write", "definition", copy.source, copy.target) for copy in self.selection.definitions]
        appended = [
            ("append", f"{len(one.files)} files, {one.rows} rows", "the clone", str(one.name)) for one in self.appended
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
        """Copy what is new in the clone, and commit. Nothing is committed where nothing is to be promoted.

        What was copied before a failure is deleted, best effort, or removed as orphans later. Raises PlanChangedError,
        CommitConflictError for conflicts that nobody decided, and when a commit in between touched what is promoted.
        Raises CorruptFileError, StorageError.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class PromotionReport(Document):
    """A promotion. ``version`` of the parent has it; it is ``base_version`` if there was nothing to promote."""

    name: str
    clone_version: int
    base_version: int
    version: int
    changed: int
    copied_files: int
    copied_bytes: int
    cost: Cost

    def table(self) -> Table:
        """Return one row."""
        row = (self.name, self.clone_version, self.version, self.changed, self.copied_files, self.copied_bytes)
        columns = ("clone", "version there", "version", "changed", "files written", "bytes written")
        return new_table("Promotion", *columns, rows=[row])


@dataclass(frozen=True, kw_only=True)
class Promote(MergeOperation[PromotionPlan, PromotionReport]):
    """The promotion of a clone, or of chosen objects, with the sides that were chosen for conflicts."""

    telemetry_name = "promote"

    namespaces: tuple[str, ...]
    tables: tuple[str, ...]
    executor: Executor
    progress: Progress = no_progress

    def planned(self, sides: MergeInputs) -> PromotionPlan:
        """Plan on both sides. Raises what :func:`plan_promotion` raises."""
        only = chosen_names(sides, self.namespaces, self.tables)
        chosen = [state for state in sides.states if is_chosen(state, only)]
        merge = Merge.of(sides, chosen, self.choices, FindsAppends(sides), into_parent=True)
        promotion_id = str(uuid.uuid4())
        selector = PromotionSelector(sides, promotion_id)
        selection, entries = selector.select(merge.changes)
        selection.tables += [selector.appended(one.table_id, one.files) for one in merge.appended]
        merge.check_names()
        keys = sides.latest.keys
        combining = {one.key: "combined" for one in merge.appended}
        changes = [
            change_of(keys, KeyChange(key, sides.latest.entry(key), location))
            for key, location in sorted({**entries, **combining}.items())
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
        """Copy and commit."""
        metered = MeteredLakehouse(self.lake)
        sides = self.opened(metered)
        plan = self.decided(plan, approved_digest, sides)
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
    """The commit of a promotion, which records it with the clone."""

    noun = "promotion"

    clone: ExportRecord
    promotion: PromotionRecord

    def definition(self, base: Snapshot) -> LakehouseDef:
        record = same_clone(base.definition, self.clone)
        promotion = replace(self.promotion, version=base.version + 1)
        noted = replace(record, promotions=(*record.promotions, promotion)[-_MOST_PROMOTIONS:])
        exports = tuple(noted if one.name == record.name else one for one in base.definition.exports)
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
    """Plan to bring the changes of a clone into its parent, or those of chosen namespaces and tables. Only reads.

    Objects that changed on both sides are conflicts, unless both appended to a table. ``ours`` names those, as
    namespaces or ``namespace.table``, that stay as the parent has them, and ``theirs`` those that become what the clone
    has. ``executor`` copies files when the plan is executed.

    Raises ExportNotFoundError, LakehouseNotFoundError if the clone is gone, NamespaceNotFoundError, TableNotFoundError,
    LocationNotAllowedError, StorageError. Raises InvalidInputError for another lakehouse at the clone's root, for a
    choice where there is no conflict, and for tables that cannot be copied.
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


def chosen_names(sides: MergeInputs, namespaces: Sequence[str], tables: Sequence[str]) -> tuple[ObjectName, ...]:
    """Return what was named, as one of the sides has it. Raises NamespaceNotFoundError, TableNotFoundError."""
    readers = (sides.clone.latest, sides.latest, sides.base)
    for namespace in namespaces:
        if not any(reader.has_namespace(namespace) for reader in readers):
            raise NamespaceNotFoundError(f"there is no namespace {namespace!r} in the clone and in its parent")
    return (*map(ObjectName, namespaces), *(ObjectName(*resolve_table(table, *readers)) for table in tables))


def is_chosen(state: ObjectState, only: Sequence[ObjectName]) -> bool:
    """Whether an object was named, by itself or by its namespace. Without names all are."""
    return not only or state.name in only or ObjectName(state.name.namespace) in only
