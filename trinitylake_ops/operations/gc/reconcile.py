"""Reconcile another program's changes to the lakehouse definition (docs/internals/protocol.md, "Reconcile").

A program that only knows the standard fields of the format can restore an older definition by a rollback. The older
definition may lack exports, whose files would be deleted, and may list versions as expired that were undeleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.format.definitions import ExpirationBatch, ExpirationState, ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.base import (
    Cost,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
    operation_span,
)
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.operations.gc.listing import (
    acknowledged_versions,
    check_faulty,
    parse_acknowledged,
    with_acknowledged,
)
from trinitylake_ops.operations.gc.survey import RECONCILE, Survey, expired_versions, survey_versions, versions_in
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

_BEGUN = (ExpirationState.PURGING, ExpirationState.PURGED)


@dataclass(frozen=True, kw_only=True)
class ReconcileReport(Document):
    """The result of a reconcile."""

    #: The version that recorded the reconcile; None if there was nothing to reconcile.
    version: int | None
    #: The versions in which another program replaced the lakehouse definition.
    steps: tuple[int, ...]
    #: Exports that were missing in the latest definition.
    restored_exports: tuple[str, ...]
    #: Exports without a root because they were dropped, and exports that can no longer be finished.
    dropped_exports: tuple[str, ...]
    #: Versions that are not expired in all definitions, and are therefore live again.
    live_again: str
    acknowledged: str = ""
    cost: Cost

    def table(self) -> Table:
        """Return one row for each correction."""
        if self.version is None:
            return new_table("Nothing to reconcile")
        title = f"Reconciled in version {self.version}"
        if self.steps:
            title += f": other programs' versions {', '.join(map(str, self.steps))}"
        return new_table(title, "what", "which", rows=_rows(self))


def _rows(settled: ReconcileReport | ReconcilePlan) -> list[tuple[str, str]]:
    rows = [("export restored", name) for name in settled.restored_exports]
    rows += [("export was dropped", name) for name in settled.dropped_exports]
    rows += [("live again", settled.live_again)] if settled.live_again else []
    return rows + ([("acknowledged", settled.acknowledged)] if settled.acknowledged else [])


@dataclass(frozen=True, kw_only=True)
class ReconcilePlan(Plan):
    """The corrections of a reconcile. See :class:`ReconcileReport` for the fields."""

    base_version: int
    steps: tuple[int, ...]
    restored_exports: tuple[str, ...]
    dropped_exports: tuple[str, ...]
    live_again: str
    acknowledged: str
    operation: Reconcile = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the corrections."""
        effects = (self.steps, self.restored_exports, self.dropped_exports, self.live_again, self.acknowledged)
        return digest_of(self.base_version, self.base_id, RECONCILE, *effects)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to reconcile."""
        return not self.steps and not self.acknowledged

    def table(self) -> Table:
        """Return one row for each correction."""
        if self.is_empty:
            return new_table("Nothing to reconcile")
        title = f"Reconcile of version {self.base_version}"
        if self.steps:
            title += f": other programs' versions {', '.join(map(str, self.steps))}"
        return new_table(title, "what", "which", rows=_rows(self))

    def execute(self, approved_digest: str | None = None) -> ReconcileReport:
        """Apply the corrections. See :func:`reconcile`.

        Raises PlanChangedError if the corrections are no longer the approved ones.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Reconcile(PlannedOperation[ReconcilePlan, ReconcileReport]):
    """Reconciles changes of other programs, and acknowledges versions."""

    telemetry_name = "reconcile"

    acknowledge: str

    def plan(self) -> ReconcilePlan:
        """Make a plan based on the latest version. Raises the errors of :func:`plan_reconcile`."""
        survey = survey_versions(self.lake)
        wanted = parse_acknowledged(self.acknowledge) if self.acknowledge else VersionRanges()
        check_faulty(survey.base, wanted)
        return self.of(survey.base, _Reconciliation.of(survey))

    def of(self, base: Snapshot, settled: _Reconciliation) -> ReconcilePlan:
        """Return the plan for corrections of a version.

        Args:
            base: The version.
            settled: The corrections.
        """
        wanted = parse_acknowledged(self.acknowledge) if self.acknowledge else VersionRanges()
        return ReconcilePlan(
            base_version=base.version,
            base_id=base_id_of(base),
            steps=settled.steps,
            restored_exports=settled.restored,
            dropped_exports=settled.dropped,
            live_again=settled.live_again,
            acknowledged=str(wanted - acknowledged_versions(base.definition)),
            operation=self,
        )

    def run(self, plan: ReconcilePlan, approved_digest: str | None) -> ReconcileReport:
        """Reconcile."""

        def check(base: Snapshot, settled: _Reconciliation) -> None:
            if approved_digest is not None:
                self.of(base, settled).check_approved(approved_digest)

        return _reconcile(self.lake, self.acknowledge, check)


def plan_reconcile(lake: Lakehouse, *, acknowledge: str = "") -> ReconcilePlan:
    """Plan a reconcile, without writing. Raises the errors of :func:`reconcile` that precede its commit.

    Args:
        lake: The lakehouse.
        acknowledge: Versions to acknowledge, such as ``7,9-12``.
    """
    return Reconcile(lake=lake, acknowledge=acknowledge).plan()


def reconcile(lake: Lakehouse, *, acknowledge: str = "") -> ReconcileReport:
    """Correct exports, pins and expirations in one commit after another program has replaced the lakehouse definition.

    Exports and retention settings of individual versions are kept from the latest definition and each replaced
    definition. Versions stay expired only if all of these definitions expire them.

    Args:
        lake: The lakehouse.
        acknowledge: Versions such as ``7,9-12`` whose roots do not follow their predecessors, and which an operator has
            inspected. From then on, verify reports them as known.

    Raises:
        InvalidInputError: A version has nothing to acknowledge.
        CorruptFileError: A replaced definition is damaged.
        FileMissingError: A replaced definition is missing.
        MaintenanceBlockedError: Another operation holds the lease.
        CommitConflictError: All attempts conflicted with other commits.
        StorageError: A storage request failed.
    """
    with operation_span(Reconcile.telemetry_name):
        return _reconcile(lake, acknowledge, lambda _base, _settled: None)


def _reconcile(
    lake: Lakehouse, acknowledge: str, check: Callable[[Snapshot, _Reconciliation], None]
) -> ReconcileReport:
    """Reconcile if ``check`` accepts the corrections for the version that the commit is based on."""
    metered = MeteredLakehouse(lake)
    settled: list[_Reconciliation] = []
    acknowledged = parse_acknowledged(acknowledge) if acknowledge else VersionRanges()
    with lease(metered.lake.storage, RECONCILE):  # a running purge may be sealing versions that would become live again
        survey = survey_versions(metered.lake)
        check_faulty(survey.base, acknowledged)

        def change(base: Snapshot) -> LakehouseDef | None:
            now = survey if survey.base.version == base.version else survey.extended(base)
            settled[:] = [_Reconciliation.of(now)]
            check(base, settled[0])
            definition = with_acknowledged(settled[0].definition or base.definition, [acknowledged])
            return None if definition == base.definition and not settled[0].steps else definition

        base_version = survey.base.version
        committed = DefinitionChange(RECONCILE, "exports, pins and expirations of both sides", change)
        version = committed.commit(metered.lake, survey.base)
    result = settled[0]
    return ReconcileReport(
        version=None if version == base_version else version,
        steps=result.steps,
        restored_exports=result.restored,
        dropped_exports=result.dropped,
        live_again=result.live_again,
        acknowledged=str(acknowledged),
        cost=metered.cost(),
    )


@dataclass(frozen=True)
class _Reconciliation:
    """The corrections, and the corrected definition, or None if there is nothing to reconcile."""

    definition: LakehouseDef | None
    steps: tuple[int, ...]
    restored: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    live_again: str = ""

    @classmethod
    def of(cls, survey: Survey) -> _Reconciliation:
        steps = tuple(survey.foreign_steps())
        if not steps:
            return cls(None, ())
        ours = survey.definition
        definitions = survey.lake.files.definitions
        replaced = [definitions.lakehouse(survey.roots[version - 1].lakehouse_def) for version in steps]
        root_uri = survey.lake.root
        spelled = [_with_normalized_roots(root_uri, definition) for definition in (ours, *replaced)]
        records, snapshots = _all_exports(spelled[0], spelled[1:])
        expirations = _common_batches(ours, replaced)
        begun_versions = versions_in(expirations, _BEGUN)
        dropped = {name for name, location in snapshots.items() if not _exists(survey, location)}
        dropped |= {
            name
            for name, record in records.items()
            if record.state == ExportState.COPYING and record.version in begun_versions
        }
        dropped |= {name for name, record in records.items() if _was_dropped(survey, record, (ours, *replaced))}
        records = {name: record for name, record in records.items() if name not in dropped}
        snapshots = {name: location for name, location in snapshots.items() if name not in dropped}
        known = {record.name for record in ours.exports} | set(ours.exported_snapshots)
        sealed = VersionRanges.of(version for version, root in survey.roots.items() if root.is_sealed)
        before = VersionRanges()
        for definition in (ours, *replaced):
            before |= expired_versions(definition)
        return cls(
            replace(
                with_acknowledged(ours, map(acknowledged_versions, replaced)),
                exports=tuple(record for _, record in sorted(records.items())),
                exported_snapshots=snapshots,
                expirations=expirations,
                maximum_version_age_millis_overrides=_longest_ages(ours, replaced),
                sources=tuple({one.root: one for known in (*replaced, ours) for one in known.sources}.values()),
                parent=next((one.parent for one in (ours, *replaced) if one.parent is not None), None),
                orphans_removed_before_millis=max(
                    definition.orphans_removed_before_millis for definition in (ours, *replaced)
                ),
            ),
            steps,
            tuple(sorted((set(records) | set(snapshots)) - known)),
            tuple(sorted(dropped)),
            str(before - versions_in(expirations) - sealed),
        )


def _all_exports(ours: LakehouseDef, replaced: list[LakehouseDef]) -> tuple[dict[str, ExportRecord], dict[str, str]]:
    """Return the exports of all definitions by name. Different exports with the same name are kept under two names."""
    records = {record.name: record for record in ours.exports}
    snapshots = dict(ours.exported_snapshots)
    for definition in reversed(replaced):
        theirs = {record.name: record for record in definition.exports}
        for name in theirs.keys() | definition.exported_snapshots.keys():
            record, location = theirs.get(name), definition.exported_snapshots.get(name)
            if _is_same(name, record, location, records, snapshots):
                continue
            free = _free_name(name, records, snapshots)
            if record is not None:
                records[free] = replace(record, name=free)
            if location is not None:
                snapshots[free] = location
    return records, snapshots


def _is_same(
    name: str,
    record: ExportRecord | None,
    location: str | None,
    records: Mapping[str, ExportRecord],
    snapshots: Mapping[str, str],
) -> bool:
    """Whether the export with this name is the same, even if it is now complete and ``record`` is still copying."""
    existing = records.get(name)
    same_record = record is None or (existing is not None and existing.root_location == record.root_location)
    return same_record and (location is None or snapshots.get(name) == location)


def _with_normalized_roots(root_uri: str, definition: LakehouseDef) -> LakehouseDef:
    """Return a definition in which export roots under the root are paths, so that they can be compared."""

    def spelled(record: ExportRecord) -> ExportRecord:
        location = record.root_location
        return replace(record, root_location=to_location(root_uri, location)) if location else record

    return replace(
        definition,
        exports=tuple(map(spelled, definition.exports)),
        exported_snapshots={
            name: to_location(root_uri, location) for name, location in definition.exported_snapshots.items()
        },
    )


def _free_name(name: str, records: Mapping[str, ExportRecord], snapshots: Mapping[str, str]) -> str:
    used_names = records.keys() | snapshots.keys()
    number = 1
    free = name
    while free in used_names:
        number += 1
        free = f"{name}-{number}"
    return free


def _was_dropped(survey: Survey, record: ExportRecord, sides: Iterable[LakehouseDef]) -> bool:
    """Whether an export at another root was dropped: its manifest was deleted, and a definition lacks the export."""
    is_known = all(record.manifest_path in {other.manifest_path for other in side.exports} for side in sides)
    return bool(record.target_uri) and not is_known and not _exists(survey, record.manifest_path)


def _exists(survey: Survey, location: str) -> bool:
    path = to_location(survey.lake.root, location)
    if is_uri(path):
        return True
    try:
        survey.lake.storage.stat(path)
    except FileMissingError:
        return False
    return True


def _common_batches(ours: LakehouseDef, replaced: list[LakehouseDef]) -> tuple[ExpirationBatch, ...]:
    """Return the batches with the versions that all definitions expire.

    Versions whose purge has begun in any definition cannot be undeleted, so their purge has to continue.
    """
    begun = expired_versions(ours, _BEGUN)
    for definition in replaced:
        begun |= expired_versions(definition, _BEGUN)
    common: list[ExpirationBatch] = []
    for batch in ours.expirations:
        ranges = batch.ranges()
        for definition in replaced:
            ranges -= ranges - expired_versions(definition)
        untouched = ranges - begun
        state = batch.state if batch.state in _BEGUN else ExpirationState.PURGING
        if ranges - untouched:
            common.append(replace(batch, versions=str(ranges - untouched), state=state))
        if untouched:
            own_id = str(uuid.uuid4()) if ranges - untouched else batch.id
            common.append(replace(batch, id=own_id, versions=str(untouched)))
    for batch in (batch for definition in replaced for batch in definition.expirations if batch.state in _BEGUN):
        rest = batch.ranges() - versions_in(common)
        if rest:
            common.append(replace(batch, id=str(uuid.uuid4()), versions=str(rest)))
    return tuple(common)


def _longest_ages(ours: LakehouseDef, replaced: list[LakehouseDef]) -> dict[int, int]:
    ages: dict[int, int] = {}
    for definition in (ours, *replaced):
        for version, age_ms in definition.maximum_version_age_millis_overrides.items():
            ages[version] = max(age_ms, ages.get(version, 0))
    return ages
