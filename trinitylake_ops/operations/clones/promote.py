"""Promotes what was made in a clone: copies what is new there, and points the parent to it in one commit."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import NamespaceNotFoundError
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExportRecord, PromotionRecord, TableDef
from trinitylake_ops.format.file_names import new_lakehouse_def_path, new_table_path, table_prefix
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.iceberg.copy import REWRITTEN
from trinitylake_ops.iceberg.io.file_io import writing_io
from trinitylake_ops.iceberg.managed import claim_location
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, digest_of, uncached
from trinitylake_ops.operations.clones.appends import Appends, FindsAppends, combined
from trinitylake_ops.operations.clones.merge import (
    Choices,
    Conflict,
    Merge,
    MergeOperation,
    MergePlan,
    change_steps,
    check_rebase,
    steps_table,
)
from trinitylake_ops.operations.clones.promoted import Promoted, PromotedContent, clone_io
from trinitylake_ops.operations.clones.records import same_clone
from trinitylake_ops.operations.clones.three_way import MergeInputs, ObjectState
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.exports.copy import Copier
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.table_records import discarded_on_failure
from trinitylake_ops.transaction.change_set import NewNames
from trinitylake_ops.transaction.draft import Draft, RootStamp, Writes
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
    promoted: Promoted = field(repr=False, compare=False)
    operation: Promote = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over both versions and all changes and conflicts."""
        changes = [[change.kind, change.namespace, change.table] for change in self.changes]
        conflicts = [[conflict.name, conflict.reason] for conflict in self.conflicts]
        appended = [[str(one.name), len(one.files)] for one in self.appended]
        sides = (self.name, self.clone_version, self.shared_version, list(self.only))
        return digest_of(self.base_version, PROMOTE, *sides, changes, conflicts, self.files, appended)

    def steps(self) -> Table:
        """Return each file that would be copied or written, and each object that would change."""
        content = self.promoted.content
        copies = [
            ("write anew" if file.kind in REWRITTEN else "copy", file.kind, file.source, table.places.path(file.source))
            for table in content.tables
            for file in table.files
        ]
        definitions = [("write", "definition", copy.source, copy.target) for copy in content.definitions]
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
        content = PromotedContent(sides, promotion_id)
        promoted = content.of(merge.changes)
        promoted.content.tables += [content.appended(one.table_id, one.files) for one in merge.appended]
        merge.check_names()
        keys = sides.latest.keys
        entries = {**promoted.entries, **{one.key: "combined" for one in merge.appended}}
        changes = [
            change_of(keys, KeyChange(key, sides.latest.entry(key), location))
            for key, location in sorted(entries.items())
        ]
        return PromotionPlan(
            base_version=sides.latest.version,
            name=self.name,
            clone_version=sides.clone.latest.version,
            shared_version=sides.base.version,
            only=tuple(map(str, only)),
            changes=tuple(change for change in changes if change is not None),
            conflicts=tuple(merge.conflicts),
            kept=tuple(merge.kept),
            appended=tuple(merge.appended),
            table_ids=merge.table_ids,
            files=promoted.content.n_files,
            bytes=promoted.content.known_bytes,
            promotion_id=promotion_id,
            promoted=promoted,
            operation=self,
        )

    def run(self, plan: PromotionPlan, approved_digest: str | None) -> PromotionReport:
        """Copy and commit."""
        metered = MeteredLakehouse(self.lake)
        sides = self.opened(metered)
        plan = self.decided(plan, approved_digest, sides)
        copier = Copier(metered.lake.storage, progress=self.progress, n_expected=plan.files, executor=self.executor)
        version = plan.base_version if plan.is_empty else self._promote(plan, sides, copier)
        return PromotionReport(
            name=plan.name,
            clone_version=plan.clone_version,
            base_version=plan.base_version,
            version=version,
            changed=len(plan.changes),
            copied_files=copier.copied_files,
            copied_bytes=copier.copied_bytes,
            cost=metered.cost(),
        )

    def _promote(self, plan: PromotionPlan, sides: MergeInputs, copier: Copier) -> int:
        lake, content = sides.lake, plan.promoted.content
        base = lake.snapshot(plan.base_version, latest=sides.latest)
        written_since_ms = lake.storage.now_ms()
        for table_id in sorted({table.places.table_id for table in content.tables}):
            claim_location(lake.storage, f"{lake.root}{table_prefix(table_id)}".rstrip("/"), base.definition)
        properties = {
            "promoted-from": plan.name,
            "clone_id": sides.record.clone_id,
            "clone_version": str(plan.clone_version),
            "promotion": plan.promotion_id,
        }
        message = f"clone {plan.name}, version {plan.clone_version}"[:500]
        info = CommitInfo(PROMOTE, message, properties=properties, counts={"changed": len(plan.changes)})
        with discarded_on_failure(writing_io(lake)) as written:
            try:
                copier.copy_content(content, clone_io(sides))
            finally:
                written += [file.target for file in copier.files]
            change = _Promotion(plan, sides.record, info, self._combined(plan, sides, base, written))
            return lake.commit(change, base, written_since_ms=written_since_ms)

    def _combined(
        self, plan: PromotionPlan, sides: MergeInputs, base: Snapshot, written: list[str]
    ) -> dict[str, tuple[str, TableDef]]:
        """Return the definitions of tables that both sides appended to, by key, with their paths."""
        content, found = PromotedContent(sides, plan.promotion_id), {}
        limit_bytes = base.definition.file_path_max_size_bytes
        for one in plan.appended:
            definition = combined(sides.lake, base, one, content.relocated_uri(one.table_id))
            written.append(definition.format_properties[METADATA_LOCATION])
            path = new_table_path(one.name.namespace, one.name.table or "", limit_bytes)
            found[one.key] = (path, definition)
        return found


@dataclass(frozen=True)
class _Promotion:
    """The commit of a promotion, which records it with the clone (commit.Committable)."""

    plan: PromotionPlan
    clone: ExportRecord
    info: CommitInfo
    combined: Mapping[str, tuple[str, TableDef]]

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft:
        record = same_clone(base.definition, self.clone)
        mine = PromotionRecord(
            id=self.plan.promotion_id,
            clone_version=self.plan.clone_version,
            version=base.version + 1,
            only=self.plan.only,
            kept=self.plan.kept,
        )
        noted = replace(record, promotions=(*record.promotions, mine)[-_MOST_PROMOTIONS:])
        exports = tuple(noted if one.name == record.name else one for one in base.definition.exports)
        definition, path = replace(base.definition, exports=exports), new_lakehouse_def_path()
        files = {path: definition.to_bytes(path)}
        files |= {place: table.to_bytes(place) for place, table in self.combined.values()}
        NewNames(base, self._entries).check(base)
        return Writes(self._entries, files, self.info, path, definition).draft(base, stamp)

    @property
    def _entries(self) -> dict[str, str | None]:
        return {**self.plan.promoted.entries, **{key: path for key, (path, _) in self.combined.items()}}

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        check_rebase(base, latest, self._entries, self.plan.table_ids, "promotion")


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
