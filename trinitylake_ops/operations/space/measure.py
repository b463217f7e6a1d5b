"""Measure the space of a lakehouse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from trinitylake_ops.errors import MaintenanceBlockedError, UnreadablePolicyError
from trinitylake_ops.format.definitions import ExpirationState
from trinitylake_ops.format.file_names import ROOT_PREFIX
from trinitylake_ops.operations.base import MeteredLakehouse, operation_span
from trinitylake_ops.operations.executor import LOCAL
from trinitylake_ops.operations.gc.listing import list_without
from trinitylake_ops.operations.gc.mark import Mark
from trinitylake_ops.operations.gc.orphan_search import Orphans, find_orphans, find_table_root_orphans
from trinitylake_ops.operations.gc.orphans import plan_orphan_removal
from trinitylake_ops.operations.gc.survey import Progress, expired_versions, no_progress, on_latest, survey_versions
from trinitylake_ops.operations.gc.trim_candidates import snapshot_rule
from trinitylake_ops.operations.policy.document import DEFAULT_POLICY, MaintenancePolicy
from trinitylake_ops.operations.policy.stored import policy_of
from trinitylake_ops.operations.retention import protected_ms
from trinitylake_ops.operations.space.report import Amount, Reclaimable, SpaceReport, UnreachedSpace
from trinitylake_ops.operations.space.tables import DEFAULT_TARGET_BYTES
from trinitylake_ops.operations.space.totals import SpaceTotals
from trinitylake_ops.operations.space.update import SummaryInputs, update_summary
from trinitylake_ops.operations.space.uses import SpaceUse, root_version, version_uses
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.telemetry import hub
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

#: The default number of tables in a report, and of versions.
LARGEST_TABLES = 10
LAST_VERSIONS = 20
_OPERATION = "space"


def measure_space(
    lake: Lakehouse,
    *,
    top: int = LARGEST_TABLES,
    last: int = LAST_VERSIONS,
    find_unreached: bool = False,
    inventory: str | None = None,
    read_only: bool = False,
    progress: Progress = no_progress,
) -> SpaceReport:
    """Measure the space of a lakehouse by use, namespace and table.

    The sums are kept in the lakehouse as a summary (FORMAT.md), so that a run reads only what was committed since the
    previous one. The sizes of data files are those that manifests declare.

    Args:
        lake: The lakehouse.
        top: The number of largest tables to report.
        last: The number of newest versions to report.
        find_unreached: Whether to list all files to measure orphans and staged files. This reads everything that kept
            versions reach.
        inventory: The URI of the manifest of an inventory with which to measure orphans, instead of a listing.
        read_only: Whether to leave the summary as it is.
        progress: Called with the unit that is counted, the number done, and the total.

    Raises:
        LakehouseNotFoundError: There is no lakehouse at the root.
        CorruptFileError: A root or a node is damaged.
        InvalidInputError: The inventory does not cover the lakehouse.
        StorageError: The storage failed.
    """
    metered = MeteredLakehouse(lake, keeps_cache=True)

    def measure(base: Snapshot) -> tuple[Snapshot, SpaceReport]:
        listed = {info.path: info for info in metered.lake.storage.list(ROOT_PREFIX)}
        now_ms = metered.lake.storage.now_ms()
        policy = _policy_of(base)
        inputs = SummaryInputs(
            lake=metered.lake,
            base=base,
            listed=listed,
            versions=_versions(base, listed),
            target_bytes=policy.targets.file_size_bytes or DEFAULT_TARGET_BYTES,
            rule_of=partial(snapshot_rule, policy),
            progress=progress,
            writes=not read_only,
        )
        updated = update_summary(inputs)
        uses = version_uses(metered.lake, base, updated, listed, now_ms)
        return base, SpaceTotals(updated, uses, base, listed).report(top, last, utc_of(now_ms))

    with operation_span(_OPERATION):
        base, report = on_latest(metered.lake, measure)
        unreached = _unreached(metered.lake, base, find_unreached=find_unreached, inventory=inventory)
    reclaimable = report.reclaimable
    if unreached.orphans is not None and unreached.orphans.files:
        why = "files that failed commits and aborted writes left"
        orphans = Reclaimable(
            command="orphans", amount=unreached.orphans, deletable_at=report.now, is_runnable=True, why=why
        )
        reclaimable = (*reclaimable, orphans)
    return replace(report, unreached=unreached, reclaimable=reclaimable, cost=metered.cost())


def _versions(base: Snapshot, listed: Mapping[str, FileInfo]) -> list[int]:
    """Return the versions up to ``base`` that can be read or undeleted, in ascending order."""
    gone = expired_versions(base.definition, (ExpirationState.PURGING, ExpirationState.PURGED))
    numbers = (version for path in listed if (version := root_version(path)) is not None)
    return sorted({version for version in numbers if version <= base.version and version not in gone} | {base.version})


def _policy_of(base: Snapshot) -> MaintenancePolicy:
    try:
        return policy_of(base.definition)
    except UnreadablePolicyError:  # reported by status
        return DEFAULT_POLICY


def _unreached(lake: Lakehouse, base: Snapshot, *, find_unreached: bool, inventory: str | None) -> UnreachedSpace:
    """Measure files that no version needs, if requested."""
    removed_ms = base.definition.orphans_removed_before_millis
    removed = utc_of(removed_ms) if removed_ms else None
    try:
        if inventory is not None:
            plan = plan_orphan_removal(lake, inventory=inventory)
            return UnreachedSpace(orphans=Amount(len(plan.paths), plan.bytes), orphans_removed_before=removed)
        if find_unreached:
            orphans, staged = _listed_unreached(lake)
            return UnreachedSpace(orphans=orphans, staged=staged, orphans_removed_before=removed)
    except MaintenanceBlockedError as error:
        return UnreachedSpace(orphans_removed_before=removed, failure=error.message)
    return UnreachedSpace(orphans_removed_before=removed)


def _listed_unreached(lake: Lakehouse) -> tuple[Amount, Amount]:
    """List all files, and return the orphans and the younger unreached files."""

    def find(base: Snapshot) -> tuple[Amount, Amount]:
        mark = Mark(survey_versions(lake, base))
        listed = list(list_without(lake.storage, LOCAL, mark.catalog.paths))
        now_ms, age_ms = lake.storage.now_ms(), protected_ms(base.definition)
        old = _all_orphans(lake, mark, listed, now_ms, age_ms)
        everything = _all_orphans(lake, mark, listed, now_ms, -1)
        return old, Amount(everything.files - old.files, everything.bytes - old.bytes)

    return on_latest(lake, find)


def _all_orphans(lake: Lakehouse, mark: Mark, listed: list[FileInfo], now_ms: int, age_ms: int) -> Amount:
    below_root = find_orphans(lake, mark, listed, now_ms - age_ms)
    orphans = Orphans.of_all(below_root, find_table_root_orphans(mark, now_ms, age_ms))
    sizes_bytes = {**orphans.sizes_bytes, **orphans.owners}
    return Amount(len(sizes_bytes), sum(sizes_bytes.values()))


def emit_space_metrics(report: SpaceReport, lakehouse: str) -> None:
    """Set the gauges of the space of a lakehouse.

    Args:
        report: The report.
        lakehouse: The name of the lakehouse in the metrics.
    """
    amounts = {use.value: report.use.of_use(use) for use in SpaceUse} | {"operations": report.operations}
    for name, measured in (("orphans", report.unreached.orphans), ("staged", report.unreached.staged)):
        amounts |= {} if measured is None else {name: measured}
    for name, amount in amounts.items():
        hub.put(hub.SPACE_BYTES, amount.bytes, lakehouse=lakehouse, use=name)
        hub.put(hub.SPACE_FILES, amount.files, lakehouse=lakehouse, use=name)
    hub.put(hub.SMALL_FILES, report.small.files, lakehouse=lakehouse)
    hub.put(hub.DELETE_FILES, report.deletes.files, lakehouse=lakehouse)
