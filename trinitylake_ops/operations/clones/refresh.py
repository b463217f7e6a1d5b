"""Brings the parent's newer changes into a clone, as one commit there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.format.definitions import ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.format.file_names import new_manifest_path
from trinitylake_ops.iceberg.io.file_io import writing_io
from trinitylake_ops.operations.base import CommitReport, MeteredLakehouse, base_id_of, digest_of, uncached
from trinitylake_ops.operations.clones.appends import Appends, FindsAppends, write_combined
from trinitylake_ops.operations.clones.clone_records import records_of_clone, same_clone
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
_MOST_REFRESHES = 100


@dataclass(frozen=True, kw_only=True)
class RefreshPlan(MergePlan):
    """What a refresh would change in a clone. With ``conflicts`` it cannot be executed before somebody chooses.

    ``base_version`` is the parent's version that comes in, ``shared_version`` the one that both sides were compared
    with so far, and ``clone_version`` the clone's latest. ``kept`` are the objects for which the clone's side was
    chosen: from then on they are changes of the clone alone. ``same`` are those that were promoted. They do not
    change, and the clone reads the parent's files of them from then on.
    """

    into_parent = False
    base_version: int
    name: str
    clone_version: int
    shared_version: int
    changes: tuple[Change, ...]
    conflicts: tuple[Conflict, ...]
    kept: tuple[str, ...]
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
        appended = [[str(one.name), len(one.files)] for one in self.appended]
        content = (self.name, self.clone_version, self.shared_version, changes, conflicts, list(self.kept), appended)
        return digest_of(self.base_version, self.base_id, REFRESH, *content, list(self.same))

    @property
    def is_empty(self) -> bool:
        """Whether the parent has nothing that the clone lacks, and nobody decided about what it has."""
        return super().is_empty and not self.kept and not self.same

    def rows(self) -> list[Sequence[object]]:
        """Return what :meth:`MergePlan.rows` does, and one row for each object that stays as it is."""
        kept = [("kept", name, "as the clone has it") for name in self.kept]
        same = [("same", name, "it was promoted; the clone reads the parent's files of it") for name in self.same]
        return [*super().rows(), *kept, *same]

    def steps(self) -> Table:
        """Return that the parent's version is kept, and each object that would change in the clone."""
        kept = ("keep", f"version {self.base_version} for the clone", "", "the parent")
        appended = [
            ("append", f"{len(one.files)} files, {one.rows} rows", "the clone", f"{one.name} as the parent has it")
            for one in self.appended
        ]
        chosen = [("leave", name, "", "the clone") for name in self.kept]
        same = [("read", name, "the clone", "the parent, which has the same") for name in self.same]
        changes = change_steps(self.changes, self.clone_version + 1)
        rows = [] if self.is_empty else [kept, *chosen, *same, *appended, *changes]
        return steps_table(str(self.table().title), rows)

    def table(self) -> Table:
        """Return one row for each namespace and table that would change, and for each conflict."""
        title = f"Refresh of clone {self.name}, version {self.clone_version}, with version {self.base_version}"
        return new_table(title, "change", "object", "why", rows=self.rows())

    def execute(self, approved_digest: str | None = None) -> CommitReport:
        """Keep the parent's version for the clone, and commit there. ``version`` of the report is the clone's.

        Raises PlanChangedError, CommitConflictError for conflicts that nobody decided, and when a commit in the clone
        touched what comes in. Raises VersionExpiredError, StorageError.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Refresh(MergeOperation[RefreshPlan, CommitReport]):
    """The refresh of a clone, with the sides that were chosen for conflicts."""

    telemetry_name = "refresh"

    def planned(self, sides: MergeInputs) -> RefreshPlan:
        """Plan on both sides. Raises what :func:`plan_refresh` raises."""
        clone = sides.clone.latest
        merge = Merge.of(sides, sides.states, self.choices, FindsAppends(sides), into_parent=False)
        merge.check_names()
        # What was promoted is read from the parent from now on, and so the same on both sides.
        adopted = {
            state.key: state.parent
            for state in sides.states
            if state.changed_on == ChangedOn.SAME and state.parent != state.clone
        }
        combining = {one.key: "combined" for one in merge.appended}
        changes = [
            change_of(clone.keys, KeyChange(key, clone.entry(key), location))
            for key, location in sorted({**merge.changes, **combining}.items())
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
        """Keep and commit."""
        metered = MeteredLakehouse(self.lake)
        sides = self.opened(metered)
        plan = self.decided(plan, approved_digest, sides)
        version = plan.clone_version
        if not plan.is_empty:
            _keep(sides, plan)
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


def _keep(sides: MergeInputs, plan: RefreshPlan) -> None:
    """Commit in the parent that it keeps one more version for the clone, unless an earlier attempt did so.

    Versions that the clone shared before stay, too: its own versions, and files of its tables, need them.
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

    def kept(base: Snapshot) -> LakehouseDef | None:
        same_clone(base.definition, clone)
        known = records_of_clone(base.definition, clone.clone_id)
        if any(record.version == wanted.version for record in known):
            return None
        if len(known) > _MOST_REFRESHES:
            raise InvalidInputError(
                f"clone {clone.name!r} was refreshed {_MOST_REFRESHES} times, and the parent keeps a version for each;"
                " promote it and make a new one"
            )
        check_unused(base.definition, wanted.name)
        check_not_expired(wanted.version, base.definition)
        definition = base.definition
        snapshots = {**definition.exported_snapshots, wanted.name: wanted.root_location}
        return replace(definition, exports=(*definition.exports, wanted), exported_snapshots=snapshots)

    change = DefinitionChange(REFRESH, f"{clone.name}: keep version {wanted.version}", kept)
    # A record may not name a manifest that was old enough to be removed as an orphan before.
    version = change.commit(lake, sides.latest, written_since_ms=wanted.created_at_millis)
    if version == sides.latest.version:
        discard(lake.storage, [wanted.manifest_path])


def _free_name(definition: LakehouseDef, name: str) -> str:
    """Return a name that no export has, nor a clone: this one, or one that begins with it."""
    others = (f"{name}.{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], others) if not is_used(definition, one))


class _Refresh(MergeCommit):
    """The commit in the clone: entries of the parent, and which version both share from now on."""

    noun = "refresh"

    def definition(self, base: Snapshot) -> LakehouseDef:
        parent = base.definition.parent
        assert parent is not None
        return replace(base.definition, parent=replace(parent, version=self.plan.base_version))

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        if latest.definition.parent != base.definition.parent:
            raise CommitConflictError(
                "the clone was refreshed by another process; create a new plan",
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
    """Plan to bring the parent's changes into a clone. Only reads.

    ``lake`` is the parent. Objects that changed on both sides are conflicts, unless both appended to a table. ``ours``
    names those that stay as the clone has them, and ``theirs`` those that become what the parent has. Raises what
    :func:`plan_promotion` raises.
    """
    return Refresh(
        lake=uncached(lake), name=name, choices=Choices.of(ours, theirs), target_options=target_options
    ).plan()
