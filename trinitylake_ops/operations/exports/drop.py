"""Drop one export by name, or old exports by retention rules."""

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
_CREATED_NAME = re.compile("(?:_export_|_ops/export-)[^/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportVerdict:
    """Whether a prune drops an export, and why."""

    #: The name of the export.
    name: str
    #: When the export was created.
    created_at: datetime
    #: Whether the prune drops the export.
    is_dropped: bool
    #: The rule that drops or keeps the export.
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrunePlan(Plan):
    """The exports whose names match a pattern, and which of them retention rules drop."""

    #: The latest version when the plan was made.
    base_version: int
    #: The pattern that names must match.
    pattern: str
    #: One verdict for each matching export, newest first.
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
            (verdict.name, verdict.created_at, "drop" if verdict.is_dropped else "keep", verdict.reason)
            for verdict in self.verdicts
        ]
        title = f"{len(self.names)} of {len(rows)} exports named {self.pattern} would be dropped"
        return new_table(title, "name", "created (UTC)", "verdict", "why", rows=rows)

    def execute(self, approved_digest: str | None = None) -> CommitReport:
        """Drop the exports in one commit, or commit nothing if there are no exports to drop.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            ExportNotFoundError: An export was dropped since the plan was made.
            CommitConflictError: All attempts conflicted with other commits.
            StorageError: A storage request failed.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class PruneExports(PlannedOperation[PrunePlan, CommitReport]):
    """Drop old exports whose names match a pattern, by the rules of a retention policy."""

    telemetry_name = "prune-exports"

    pattern: str
    policy: RetentionPolicy
    #: Patterns of the names of exports to leave out, although they match ``pattern``.
    excluded: tuple[str, ...] = ()

    def plan(self) -> PrunePlan:
        """Make a plan based on the latest version. See :func:`plan_prune_exports` for the errors."""
        if self.policy.age_overrides:
            raise InvalidInputError("age_overrides apply to versions, not to exports; leave them out")
        if self.policy.is_empty:
            raise InvalidInputError(
                "the retention policy is empty: all exports but the newest would be dropped; add a maximum age, a"
                " number of exports, or a rule that keeps some"
            )
        latest = self.lake.snapshot()
        records = [
            record
            for record in latest.definition.exports
            if record.state == ExportState.COMPLETE and not record.clone_id and self._matches(record.name)
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

    def _matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern) and not any(fnmatchcase(name, other) for other in self.excluded)

    def _decision(self, reason: str, *, is_dropped: bool) -> str:
        """Reword the reason of a verdict, which refers to versions, for an export."""
        text = reason.replace("superseded", "made").replace(" version of ", " one of ")
        if is_dropped and not self.policy.maximum_age_ms:
            return f"{text.partition(',')[0]}, and no rule keeps it"
        return text.replace("it is the latest", "it is the newest")

    def run(self, plan: PrunePlan, approved_digest: str | None) -> CommitReport:
        """Drop the exports in one commit."""
        metered = MeteredLakehouse(self.lake, keeps_cache=True)
        plan = replace(self, lake=metered.lake).checked(plan, approved_digest)
        return CommitReport(
            operation=_PRUNE,
            base_version=plan.base_version,
            version=drop_exports(metered.lake, plan.names) if plan.names else plan.base_version,
            changed=len(plan.names),
            cost=metered.cost(),
        )


def plan_prune_exports(
    lake: Lakehouse, pattern: str, policy: RetentionPolicy, *, excluded: Sequence[str] = ()
) -> PrunePlan:
    """Plan to drop complete exports whose names match a pattern, without writing anything.

    Only complete exports recorded by this library are considered, and the newest of them is always kept.

    Args:
        lake: The lakehouse that records the exports.
        pattern: A shell-style pattern, for example ``nightly-*``.
        policy: The rules, applied to the creation times of the exports.
        excluded: Patterns of the names of exports to leave out.

    Raises:
        InvalidInputError: The policy has no rule, or has rules for individual versions.
        StorageError: A storage request failed.
    """
    return PruneExports(lake=lake, pattern=pattern, policy=policy, excluded=tuple(excluded)).plan()


def _ages(ordered: Sequence[ExportRecord]) -> list[VersionAge]:
    """Return the ages of exports, ordered from oldest to newest, in the form that version rules require."""
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
    """The export that would be dropped, and the consequences of the drop."""

    #: The latest version when the plan was made.
    base_version: int
    #: The export to drop.
    export: ExportInfo
    #: Other exports that keep the same version.
    other_exports: tuple[str, ...]
    #: Whether a lakehouse at another root reads files of this root that would no longer be kept.
    loses_files: bool
    operation: DropExport = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over the export and the other exports that keep its version."""
        export = self.export
        fields = [export.name, export.version, export.level, export.state, export.location, export.manifest_path]
        return digest_of(self.base_version, self.base_id, _DROP, fields, list(self.other_exports), self.loses_files)

    @property
    def is_empty(self) -> bool:
        """Always False, because the plan drops an export."""
        return False

    @property
    def consequences(self) -> tuple[str, ...]:
        """The consequences of the drop, one sentence each."""
        export = self.export
        if export.version is None:
            notes = [f"{export.location} is no longer kept"]
        elif self.other_exports:
            notes = [f"version {export.version} is still kept by {', '.join(self.other_exports)}"]
        else:
            notes = [f"version {export.version} can expire"]
        if export.target:
            notes.append(f"the lakehouse at {export.target} is not deleted")
        if self.loses_files:
            notes.append(f"{export.target} reads files of this lakehouse that can now be deleted")
        return tuple(notes)

    def table(self) -> Table:
        """Return one row for the export."""
        export = self.export
        columns = ("export", "version", "level", "state", "created (UTC)", "consequences")
        row = (export.name, export.version, export.level, export.state, export.created_at, "; ".join(self.consequences))
        return new_table(f"Drop of export {export.name}", *columns, rows=[row])

    def execute(self, approved_digest: str | None = None) -> CommitReport:
        """Drop the export in one commit, then delete its root and its manifest.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            TrinityLakeError: See :func:`drop_export`.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class DropExport(PlannedOperation[DropExportPlan, CommitReport]):
    """Drop one export by name."""

    telemetry_name = "drop-export"

    name: str

    def plan(self) -> DropExportPlan:
        """Make a plan based on the latest version. See :func:`plan_drop_export` for the errors."""
        latest = self.lake.snapshot()
        record = record_of(latest.definition, self.name)
        check_no_clone(record)
        exports = list_exports(self.lake, latest)
        export = next((info for info in exports if info.name == self.name), None)
        if export is None:
            raise ExportNotFoundError(f"export {self.name!r} does not exist")
        others = (info.name for info in exports if info.version == export.version and info.name != self.name)
        return DropExportPlan(
            base_version=latest.version,
            base_id=base_id_of(latest),
            export=export,
            other_exports=() if export.version is None else tuple(others),
            loses_files=record is not None and bool(record.target_uri) and record.level != ExportLevel.FULL,
            operation=self,
        )

    def run(self, plan: DropExportPlan, approved_digest: str | None) -> CommitReport:
        """Drop the export."""
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
    """Plan to drop an export, without writing anything.

    Args:
        lake: The lakehouse that records the export.
        name: The name of the export.

    Raises:
        ExportNotFoundError: The export does not exist.
        InvalidInputError: The name belongs to a clone.
        StorageError: A storage request failed.
    """
    return DropExport(lake=lake, name=name).plan()


def drop_export(lake: Lakehouse, name: str) -> int:
    """Drop an export in one commit, delete its root and its manifest, and return the version.

    The exported version can then expire. An orphan removal later deletes files that could not be deleted now, and the
    other copies under this root unless a restored version still needs them. A lakehouse at another root is not touched.

    Args:
        lake: The lakehouse that records the export.
        name: The name of the export.

    Raises:
        ExportNotFoundError: The export does not exist.
        InvalidInputError: The name belongs to a clone.
        CommitAttemptsExhaustedError: All attempts conflicted with other commits.
        StorageError: A storage request failed.
    """
    with operation_span(DropExport.telemetry_name):
        return _drop_export(lake, name)


def _drop_export(lake: Lakehouse, name: str) -> int:
    check_no_clone(record_of(lake.snapshot().definition, name))
    return drop_exports(lake, [name])


def drop_exports(
    lake: Lakehouse, names: Sequence[str], more: Callable[[LakehouseDef], Iterable[str]] = lambda _definition: ()
) -> int:
    """Drop several exports or clones in one commit, as :func:`drop_export` does, and return the version.

    Args:
        lake: The lakehouse that records the exports or clones.
        names: The names of the exports or clones.
        more: Returns the names of additional records to drop, given the latest lakehouse definition.

    Raises:
        ExportNotFoundError: An export or clone does not exist, or was replaced by another one with the same name.
        CommitAttemptsExhaustedError: All attempts conflicted with other commits.
        StorageError: A storage request failed.
    """
    base = lake.snapshot()
    identities = [_identity_of(base.definition, name) for name in names]
    kinds = {kind_of(record_of(base.definition, name)) for name in names}
    kind = CLONE if kinds == {CLONE} else EXPORT
    dropped_records: list[ExportRecord] = []
    remaining = base.definition

    def change(latest: Snapshot) -> LakehouseDef:
        nonlocal dropped_records, remaining
        for name, identity in zip(names, identities, strict=True):
            if _identity_of(latest.definition, name) != identity:
                raise ExportNotFoundError(f"{kind} {name!r} was dropped, and another one now has this name")
        all_names = {*names, *more(latest.definition)}
        dropped_records = [record for record in latest.definition.exports if record.name in all_names]
        remaining = without_exports(latest.definition, all_names)
        return remaining

    version = DefinitionChange(f"drop-{kind}", ", ".join(names), change).commit(lake, base)
    delete_operation_files(
        lake.storage, [path for record in dropped_records for path in _unneeded_files(record, remaining)]
    )
    return version


def _unneeded_files(record: ExportRecord, remaining: LakehouseDef) -> list[str]:
    """Return the root and the manifest of a dropped export that can be deleted.

    Files can be deleted if this library named them and no other export needs them. Other programs may spell locations
    differently, for example as a full URI through a symbolic link. Therefore, files are compared by the UUID in their
    names.
    """
    created = [path for path in (record.root_location, record.manifest_path) if _CREATED_NAME.fullmatch(path)]
    others = {*remaining.exported_snapshots.values()}
    others.update(path for other in remaining.exports for path in (other.root_location, other.manifest_path))
    needed = set(map(name_identity, others))
    return [path for path in created if name_identity(path) not in needed]


def _identity_of(definition: LakehouseDef, name: str) -> str:
    """Return a text that distinguishes an export from a later export with the same name. Raises ExportNotFoundError."""
    record, location = record_of(definition, name), definition.exported_snapshots.get(name)
    if record is None and location is None:
        raise ExportNotFoundError(f"export {name!r} does not exist")
    return record.manifest_path if record is not None and record.manifest_path else location or ""
