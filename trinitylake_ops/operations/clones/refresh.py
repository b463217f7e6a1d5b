"""Refresh a clone: merge newer changes in the parent into the clone, in one commit to the clone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.format.definitions import ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.format.file_names import new_manifest_path
from trinitylake_ops.iceberg.io.file_io import writing_io
from trinitylake_ops.operations.base import CommitReport, MeteredLakehouse, base_id_of, digest_of, uncached
from trinitylake_ops.operations.clones.appends import AppendFinder, Appends, write_combined
from trinitylake_ops.operations.clones.clone_records import current_record, records_of_clone
from trinitylake_ops.operations.clones.compare import ChangedOn, MergeInputs
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
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.operations.export_records import check_unused, finish_manifest, is_used
from trinitylake_ops.operations.metadata_rewrites import discarded_on_failure
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.transaction.commit import discard
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import KeyChange
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.history import Change, change_of
from trinitylake_ops.versions.lookup import check_not_expired
from trinitylake_ops.versions.snapshot import Snapshot

REFRESH = "refresh"
_MAX_REFRESHES = 100


@dataclass(frozen=True, kw_only=True)
class RefreshPlan(MergePlan):
    """The changes that a refresh would make in a clone. The plan can be executed only without conflicts."""

    into_parent = False
    #: The parent version to merge.
    base_version: int
    #: The name of the clone.
    name: str
    #: The latest version of the clone.
    clone_version: int
    #: The parent version with which both sides have been compared so far.
    shared_version: int
    #: The changes to namespaces and tables.
    changes: tuple[Change, ...]
    #: Conflicts for which no side was chosen.
    conflicts: tuple[Conflict, ...]
    #: Objects for which the clone's side was chosen. From then on, they count as changed only in the clone.
    kept: tuple[str, ...]
    #: Promoted objects. Their content does not change, but the clone will read their files from the parent.
    same: tuple[str, ...]
    appended: tuple[Appends, ...] = field(repr=False, compare=False)
    table_ids: Mapping[str, str | None] = field(repr=False, compare=False)
    entries: Mapping[str, str | None] = field(repr=False, compare=False)
    operation: Refresh = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over both versions and all changes and conflicts."""
        changes = [[change.kind, change.namespace, change.table] for change in self.changes]
        conflicts = [[conflict.name, conflict.reason] for conflict in self.conflicts]
        appended = [[str(appends.name), len(appends.files)] for appends in self.appended]
        content = (self.name, self.clone_version, self.shared_version, changes, conflicts, list(self.kept), appended)
        return digest_of(self.base_version, self.base_id, REFRESH, *content, list(self.same))

    @property
    def is_empty(self) -> bool:
        """Whether the parent has no changes that the clone lacks, and there is no choice to record."""
        return super().is_empty and not self.kept and not self.same

    def rows(self) -> list[Sequence[object]]:
        """Return the rows of :meth:`MergePlan.rows`, and one row for each object that keeps its content."""
        kept = [("keep", name, "the clone's side was chosen") for name in self.kept]
        same = [("same", name, "it was promoted; the clone will read the parent's files") for name in self.same]
        return [*super().rows(), *kept, *same]

    def steps(self) -> Table:
        """Return the step that keeps the parent version, and a step for each object that would change in the clone."""
        kept = ("keep", f"version {self.base_version} for the clone", "", "the parent")
        appended = [
            ("append", f"{len(appends.files)} files, {appends.rows} rows", "the clone", f"{appends.name} of the parent")
            for appends in self.appended
        ]
        chosen = [("leave", name, "", "the clone") for name in self.kept]
        same = [("read", name, "the clone", "the parent, which has the same content") for name in self.same]
        changes = change_steps(self.changes, self.clone_version + 1)
        rows = [] if self.is_empty else [kept, *chosen, *same, *appended, *changes]
        return steps_table(str(self.table().title), rows)

    def table(self) -> Table:
        """Return one row for each namespace and table that would change, and for each conflict."""
        title = f"Refresh of clone {self.name}, version {self.clone_version}, with version {self.base_version}"
        return new_table(title, "change", "object", "why", rows=self.rows())

    def execute(self, approved_digest: str | None = None) -> CommitReport:
        """Keep the parent version for the clone, and commit to the clone. The report's ``version`` is that of the
        clone.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            CommitConflictError: The plan has unresolved conflicts, or a commit to the clone changed an object to merge.
            VersionExpiredError: The parent version has expired.
            StorageError: A storage request failed.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Refresh(MergeOperation[RefreshPlan, CommitReport]):
    """Refresh a clone."""

    telemetry_name = "refresh"

    def plan_for(self, sides: MergeInputs) -> RefreshPlan:
        """Make a plan for the opened sides. See :func:`plan_refresh` for the errors."""
        clone = sides.clone.latest
        merge = Merge.of(sides, sides.states, self.choices, AppendFinder(sides), into_parent=False)
        merge.check_names()
        # After the refresh, the clone reads promoted objects from the parent, so that both sides are identical.
        adopted = {
            state.key: state.parent
            for state in sides.states
            if state.changed_on == ChangedOn.SAME and state.parent != state.clone
        }
        combined = {appends.key: "combined" for appends in merge.appended}
        changes = [
            change_of(clone.keys, KeyChange(key, clone.entry(key), location))
            for key, location in sorted({**merge.changes, **combined}.items())
        ]
        return RefreshPlan(
            base_version=sides.latest.version,
            base_id=base_id_of(sides.latest),
            name=self.name,
            clone_version=clone.version,
            shared_version=sides.base.version,
            changes=tuple(change for change in changes if change is not None),
            conflicts=tuple(merge.conflicts),
            kept=tuple(merge.kept),
            same=tuple(str(state.name) for state in sides.states if state.key in adopted),
            appended=tuple(merge.appended),
            table_ids=merge.table_ids,
            entries={**adopted, **merge.changes},
            operation=self,
        )

    def run(self, plan: RefreshPlan, approved_digest: str | None) -> CommitReport:
        """Keep the parent version, and commit to the clone."""
        metered = MeteredLakehouse(self.lake)
        sides = self.open_sides(metered)
        plan = self.executable_plan(plan, approved_digest, sides)
        version = plan.clone_version
        if not plan.is_empty:
            _keep_version(sides, plan)
            message = f"version {plan.base_version} of {sides.lake.root}"[:500]
            properties = {"source": sides.lake.root, "source_version": str(plan.base_version)}
            info = CommitInfo(REFRESH, message, properties=properties, counts={"changed": len(plan.changes)})
            clone = sides.clone
            base = clone.lake.snapshot(plan.clone_version, latest=clone.latest)
            written_since_ms = clone.lake.storage.now_ms()
            with discarded_on_failure(writing_io(clone.lake)) as written:
                change = _Refresh(plan, info, write_combined(clone.lake, base, plan.appended, written))
                version = clone.lake.commit(change, base, written_since_ms=written_since_ms)
        return CommitReport(
            operation=REFRESH,
            base_version=plan.clone_version,
            version=version,
            changed=len(plan.changes),
            cost=metered.cost(),
        )


def _keep_version(sides: MergeInputs, plan: RefreshPlan) -> None:
    """Commit a record to the parent that keeps another version for the clone, unless an earlier attempt did so.

    Previously shared versions remain kept, because older versions and tables of the clone need their files.
    """
    lake, clone = sides.lake, sides.record
    wanted = ExportRecord(
        name=_free_name(sides.latest.definition, f"{clone.name}@{plan.base_version}"),
        version=plan.base_version,
        level=clone.level,
        target_uri=clone.target_uri,
        root_location=clone.root_location,
        state=ExportState.COMPLETE,
        created_at_millis=lake.storage.now_ms(),
        retain_until_millis=clone.retain_until_millis,
        namespaces=clone.namespaces,
        manifest_path=new_manifest_path(),
        clone_id=clone.clone_id,
    )
    finish_manifest(lake.storage, wanted, [], with_definitions=False)

    def add_record(base: Snapshot) -> LakehouseDef | None:
        current_record(base.definition, clone)
        records = records_of_clone(base.definition, clone.clone_id)
        if any(record.version == wanted.version for record in records):
            return None
        if len(records) > _MAX_REFRESHES:
            raise InvalidInputError(
                f"clone {clone.name!r} cannot be refreshed more than {_MAX_REFRESHES} times, because the parent keeps a"
                " version for each refresh; promote the clone and create a new one"
            )
        check_unused(base.definition, wanted.name)
        check_not_expired(wanted.version, base.definition)
        definition = base.definition
        snapshots = {**definition.exported_snapshots, wanted.name: wanted.root_location}
        return replace(definition, exports=(*definition.exports, wanted), exported_snapshots=snapshots)

    change = DefinitionChange(REFRESH, f"{clone.name}: keep version {wanted.version}", add_record)
    # A slow commit is rejected, because the manifest may have been removed as an orphan by then.
    version = change.commit(lake, sides.latest, written_since_ms=wanted.created_at_millis)
    if version == sides.latest.version:
        discard(lake.storage, [wanted.manifest_path])


def _free_name(definition: LakehouseDef, name: str) -> str:
    """Return an unused name for an export or clone: ``name``, or ``name`` with a number."""
    candidates = (f"{name}.{number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], candidates) if not is_used(definition, candidate))


class _Refresh(MergeCommit):
    """Commit the parent's entries to the clone, and record the version that both sides share from then on."""

    noun = "refresh"

    def definition(self, base: Snapshot) -> LakehouseDef:
        parent = base.definition.parent
        assert parent is not None
        return replace(base.definition, parent=replace(parent, version=self.plan.base_version))

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        if latest.definition.parent != base.definition.parent:
            raise CommitConflictError(
                "the clone was refreshed by another process; review the new plan",
                conflicts=(f"version {latest.version}",),
                base_version=base.version,
                latest_version=latest.version,
            )
        super().rebase(base, latest)


def plan_refresh(
    lake: Lakehouse,
    name: str,
    *,
    ours: Sequence[str] = (),
    theirs: Sequence[str] = (),
    target_options: Mapping[str, str] | None = None,
) -> RefreshPlan:
    """Plan to merge the parent's changes into a clone, without writing anything.

    Objects that changed on both sides are conflicts, unless both sides only appended to a table.

    Args:
        lake: The parent.
        name: The name of the clone.
        ours: Conflicts for which the clone's side is kept, as ``namespace`` or ``namespace.table``.
        theirs: Conflicts for which the parent's side is taken.
        target_options: Options of the clone's storage; None to derive them from the options of the parent.

    Raises:
        TrinityLakeError: See :func:`plan_promotion`.
    """
    return Refresh(
        lake=uncached(lake), name=name, choices=Choices.of(ours, theirs), target_options=target_options
    ).plan()
