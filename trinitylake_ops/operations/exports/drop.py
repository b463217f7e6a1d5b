"""Drop exports: one by name, or old ones by rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatchcase

from trinitylake_ops.errors import ExportNotFoundError, InvalidInputError
from trinitylake_ops.format.checksums import name_identity
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.operations.base import (
    CommitReport,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
    operation_span,
)
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.operations.export_records import (
    CLONE,
    EXPORT,
    ExportInfo,
    check_no_clone,
    kind_of,
    list_exports,
    record_of,
    without_exports,
)
from trinitylake_ops.operations.gc.delete import delete_operation_files
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.operations.retention import RetentionPolicy, VersionAge, judge
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

_PRUNE = "prune-exports"
_OWN_NAME = re.compile("(?:_export_|_ops/export-)[^/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportVerdict:
    """Whether an export is dropped, and why."""

    name: str
    created_at: datetime
    is_dropped: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrunePlan(Plan):
    """What rules say of the exports whose names match a pattern, newest first."""

    base_version: int
    pattern: str
    verdicts: tuple[ExportVerdict, ...]
    operation: PruneExports = field(repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The exports to drop."""
        return tuple(verdict.name for verdict in self.verdicts if verdict.is_dropped)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the exports to drop."""
        return digest_of(self.base_version, self.base_id, _PRUNE, self.pattern, list(self.names))

    @property
    def is_empty(self) -> bool:
        """Whether no export would be dropped."""
        return not self.names

    def table(self) -> Table:
        """Return one row for each export."""
        rows = [
            (verdict.name, verdict.created_at, "drop" if verdict.is_dropped else "kept", verdict.reason)
            for verdict in self.verdicts
        ]
        title = f"{len(self.names)} of {len(rows)} exports named {self.pattern} are to be dropped"
        return new_table(title, "name", "created (UTC)", "verdict", "why", rows=rows)

    def execute(self, approved_digest: str | None = None) -> CommitReport:
        """Drop them in one commit; nothing is committed where nothing is to be dropped.

        Raises PlanChangedError when an approved digest is not that of the plan made again now,
        ExportNotFoundError, CommitConflictError, StorageError.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class PruneExports(PlannedOperation[PrunePlan, CommitReport]):
    """The drop of old exports whose names match a pattern, by the rules of a policy."""

    telemetry_name = "prune-exports"

    pattern: str
    policy: RetentionPolicy

    def plan(self) -> PrunePlan:
        """Plan on the latest version. Raises what :func:`plan_prune_exports` raises."""
        if self.policy.age_overrides:
            raise InvalidInputError("rules for single versions mean nothing for exports; leave age_overrides out")
        if self.policy.is_empty:
            raise InvalidInputError(
                "no rule says which exports are kept: all but the newest would be dropped; give a maximum age, a number"
                " of exports, or a rule that keeps some"
            )
        latest = self.lake.snapshot()
        records = [
            record
            for record in latest.definition.exports
            if record.state == ExportState.COMPLETE and not record.clone_id and fnmatchcase(record.name, self.pattern)
        ]
        ordered = sorted(records, key=lambda record: (record.created_at_millis, record.name))
        verdicts = judge(_ages(ordered), replace(self.policy, protected_ms=0), self.lake.storage.now_ms())
        return PrunePlan(
            base_version=latest.version,
            base_id=base_id_of(latest),
            pattern=self.pattern,
            verdicts=tuple(
                ExportVerdict(
                    name=record.name,
                    created_at=utc_of(record.created_at_millis),
                    is_dropped=verdict.expires,
                    reason=self._decision(verdict.reason, is_dropped=verdict.expires),
                )
                for record, verdict in reversed(list(zip(ordered, verdicts, strict=True)))
            ),
            operation=self,
        )

    def _decision(self, reason: str, *, is_dropped: bool) -> str:
        """Return why an export is kept or dropped, of what is said of a version as old as it is."""
        text = reason.replace("superseded", "made").replace(" version of ", " one of ")
        if is_dropped and not self.policy.maximum_age_ms:
            return f"{text.partition(',')[0]}, and no rule keeps it"
        return text.replace("it is the latest", "it is the newest")

    def run(self, plan: PrunePlan, approved_digest: str | None) -> CommitReport:
        """Drop them in one commit."""
        metered = MeteredLakehouse(self.lake, keeps_cache=True)
        plan = replace(self, lake=metered.lake).checked(plan, approved_digest)
        return CommitReport(
            operation=_PRUNE,
            base_version=plan.base_version,
            version=drop_exports(metered.lake, plan.names) if plan.names else plan.base_version,
            changed=len(plan.names),
            cost=metered.cost(),
        )


def plan_prune_exports(lake: Lakehouse, pattern: str, policy: RetentionPolicy) -> PrunePlan:
    """Plan to drop the complete exports whose names match a pattern such as ``nightly-*``; reads only.

    A policy's rules are those of versions, by the time when an export was made; the newest one stays in any case.
    Exports that other programs recorded, and those that are being made, are left alone. Raises InvalidInputError
    for a policy without any rule.
    """
    return PruneExports(lake=lake, pattern=pattern, policy=policy).plan()


def _ages(ordered: Sequence[ExportRecord]) -> list[VersionAge]:
    """Return exports, oldest first, as versions that are as old as they are."""
    newest = len(ordered) - 1
    return [
        VersionAge(
            version=number,
            created_at_ms=record.created_at_millis,
            superseded_at_ms=None if number == newest else record.created_at_millis,
        )
        for number, record in enumerate(ordered)
    ]


_DROP = "drop-export"


@dataclass(frozen=True, kw_only=True)
class DropExportPlan(Plan):
    """The export that would be forgotten. ``other_exports`` keep its version, too.

    ``loses_files`` says whether a lakehouse at another root reads files from here that nothing keeps from then on.
    """

    base_version: int
    export: ExportInfo
    other_exports: tuple[str, ...]
    loses_files: bool
    operation: DropExport = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the export, and of what else keeps its version."""
        export = self.export
        known = [export.name, export.version, export.level, export.state, export.location, export.manifest_path]
        return digest_of(self.base_version, self.base_id, _DROP, known, list(self.other_exports), self.loses_files)

    @property
    def is_empty(self) -> bool:
        """Never: the export is there."""
        return False

    @property
    def consequences(self) -> tuple[str, ...]:
        """What follows from the drop, a sentence each."""
        export = self.export
        if export.version is None:
            notes = [f"nothing keeps {export.location}"]
        elif self.other_exports:
            notes = [f"version {export.version} is still kept by {', '.join(self.other_exports)}"]
        else:
            notes = [f"version {export.version} can expire from then on"]
        if export.target:
            notes.append(f"the lakehouse at {export.target} stays")
        if self.loses_files:
            notes.append(f"{export.target} reads files from here that nothing keeps any more")
        return tuple(notes)

    def table(self) -> Table:
        """Return one row for the export."""
        export = self.export
        columns = ("export", "version", "level", "state", "created (UTC)", "what follows")
        row = (export.name, export.version, export.level, export.state, export.created_at, "; ".join(self.consequences))
        return new_table(f"Drop of export {export.name}", *columns, rows=[row])

    def execute(self, approved_digest: str | None = None) -> CommitReport:
        """Forget it in one commit, then delete its root and manifest.

        Raises PlanChangedError when an approved digest is not that of the plan made again now. Raises what
        :func:`drop_export` raises.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class DropExport(PlannedOperation[DropExportPlan, CommitReport]):
    """The drop of the export of a name."""

    telemetry_name = "drop-export"

    name: str

    def plan(self) -> DropExportPlan:
        """Plan on the latest version. Raises what :func:`plan_drop_export` raises."""
        latest = self.lake.snapshot()
        record = record_of(latest.definition, self.name)
        check_no_clone(record)
        exports = list_exports(self.lake, latest)
        export = next((one for one in exports if one.name == self.name), None)
        if export is None:
            raise ExportNotFoundError(f"there is no export {self.name!r}")
        others = (one.name for one in exports if one.version == export.version and one.name != self.name)
        return DropExportPlan(
            base_version=latest.version,
            base_id=base_id_of(latest),
            export=export,
            other_exports=() if export.version is None else tuple(others),
            loses_files=record is not None and bool(record.target_uri) and record.level != ExportLevel.FULL,
            operation=self,
        )

    def run(self, plan: DropExportPlan, approved_digest: str | None) -> CommitReport:
        """Forget it."""
        metered = MeteredLakehouse(self.lake, keeps_cache=True)
        plan = replace(self, lake=metered.lake).checked(plan, approved_digest)
        return CommitReport(
            operation=_DROP,
            base_version=plan.base_version,
            version=_drop_export(metered.lake, self.name),
            changed=1,
            cost=metered.cost(),
        )


def plan_drop_export(lake: Lakehouse, name: str) -> DropExportPlan:
    """Plan to forget an export; reads only. Raises ExportNotFoundError, InvalidInputError for a clone."""
    return DropExport(lake=lake, name=name).plan()


def drop_export(lake: Lakehouse, name: str) -> int:
    """Forget an export in one commit, then delete its root and manifest. Returns the version.

    Its version can expire from then on. A removal of orphans deletes other copies under this root, and files that could
    not be deleted. A version that the export was restored to may need them. Another root is left as it is. Raises
    ExportNotFoundError, CommitAttemptsExhaustedError, StorageError, and InvalidInputError for a clone.
    """
    with operation_span(DropExport.telemetry_name):
        return _drop_export(lake, name)


def _drop_export(lake: Lakehouse, name: str) -> int:
    check_no_clone(record_of(lake.snapshot().definition, name))
    return drop_exports(lake, [name])


def drop_exports(
    lake: Lakehouse, names: Sequence[str], more: Callable[[LakehouseDef], Iterable[str]] = lambda _definition: ()
) -> int:
    """Forget several exports in one commit, as :func:`drop_export` does one. Returns the version.

    ``more`` returns the names of others that go with them, by what is recorded when they go.
    """
    first = lake.snapshot()
    known = [_known(first.definition, name) for name in names]
    kinds = {kind_of(record_of(first.definition, name)) for name in names}
    kind = CLONE if kinds == {CLONE} else EXPORT
    gone: list[ExportRecord] = []
    remaining = first.definition

    def dropped(base: Snapshot) -> LakehouseDef:
        nonlocal gone, remaining
        for name, before in zip(names, known, strict=True):
            if _known(base.definition, name) != before:
                raise ExportNotFoundError(f"{kind} {name!r} was dropped, and another one has its name")
        all_names = {*names, *more(base.definition)}
        gone = [record for record in base.definition.exports if record.name in all_names]
        remaining = without_exports(base.definition, all_names)
        return remaining

    version = DefinitionChange(f"drop-{kind}", ", ".join(names), dropped).commit(lake, first)
    delete_operation_files(lake.storage, [path for record in gone for path in _own_files(record, remaining)])
    return version


def _own_files(record: ExportRecord, remaining: LakehouseDef) -> list[str]:
    """Return root and manifest of a dropped export, if they have names that we give and no other export needs them.

    Other programs may spell them differently, such as by a full URI through a link: the uuid identifies them.
    """
    own = [path for path in (record.root_location, record.manifest_path) if _OWN_NAME.fullmatch(path)]
    others = {*remaining.exported_snapshots.values()}
    others.update(path for other in remaining.exports for path in (other.root_location, other.manifest_path))
    needed = set(map(name_identity, others))
    return [path for path in own if name_identity(path) not in needed]


def _known(definition: LakehouseDef, name: str) -> str:
    """Return a text that distinguishes an export from a later one of the same name. Raises ExportNotFoundError."""
    record, location = record_of(definition, name), definition.exported_snapshots.get(name)
    if record is None and location is None:
        raise ExportNotFoundError(f"there is no export {name!r}")
    return record.manifest_path if record is not None and record.manifest_path else location or ""
