"""Expire and undelete versions.

Expired versions cannot be opened, and a purge may delete the files that only they need (docs/internals/protocol.md).
Expiring deletes nothing, and undelete restores expired versions until their purge begins.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from trinitylake_ops.errors import (
    CommitConflictError,
    CommitOutcomeUnknownError,
    InvalidInputError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.format.definitions import ExpirationBatch, ExpirationState, LakehouseDef
from trinitylake_ops.format.keys import SEALED_AT_MILLIS
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.base import (
    Cost,
    MeteredLakehouse,
    TimedOperation,
    TimedPlan,
    base_id_of,
    operation_span,
    timed_digest,
    uncached,
)
from trinitylake_ops.operations.definition_commits import DefinitionChange, commit_on_latest
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.export_records import without_exports
from trinitylake_ops.operations.gc.plan_files import PlanFile, write_plan_file
from trinitylake_ops.operations.gc.survey import Progress, is_lapsed, no_progress, on_latest, survey_versions
from trinitylake_ops.operations.gc.unreached import ReclaimedFiles, damaged_tables, reclaimed_files
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.retention import RetentionPolicy, Verdict, protected_ms
from trinitylake_ops.operations.version_records import VersionRecord
from trinitylake_ops.transaction.commit import discard
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.roots import read_roots
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

_OPERATION = "expire"
_MAX_PLANS = 20
_ROOTS_AT_ONCE = 64
#: The settings that affect verdicts.
_DECIDING_SETTINGS = (
    "expirations",
    "exports",
    "exported_snapshots",
    "maximum_version_age_millis",
    "maximum_version_age_millis_overrides",
    "minimum_versions_to_keep",
    "orphans_removed_before_millis",  # if another program dropped it, a reconcile is required first
    "retention_rules",
    "txn_ttl_millis",
)


@dataclass(frozen=True, kw_only=True)
class ExpirationReport(Document):
    """The expired versions, and what a purge will reclaim."""

    #: The version that recorded the expiration; None if nothing expired.
    version: int | None
    batch: str | None
    versions: str
    #: The versions in the approved plan that were kept.
    spared: str
    exports: tuple[str, ...]
    #: The number of files that only expired versions reach.
    files: int
    #: The total size of these files.
    bytes: int
    plan_path: str | None
    #: When a purge may begin, in milliseconds since the epoch.
    purgeable_at_ms: int | None
    #: Tables with unreadable files, and the reason for each. Their folders are kept.
    damaged: Mapping[str, str]
    cost: Cost

    def table(self) -> Table:
        """Return one row."""
        if self.version is None:
            return new_table("Nothing expired")
        title = f"Expired in version {self.version}; undelete restores the versions until their purge begins"
        title += damaged_tables(self.damaged)
        until = None if self.purgeable_at_ms is None else utc_of(self.purgeable_at_ms)
        row = (self.versions, ", ".join(self.exports), self.files, self.bytes, until)
        return new_table(title, "versions", "exports", "files", "bytes", "purge from", rows=[row])


@dataclass(frozen=True, kw_only=True)
class ExpirationPlan(TimedPlan):
    """The versions and exports to expire, with the reasons."""

    base_version: int
    now_ms: int
    versions: str
    #: The names of exports whose retention period has ended.
    exports: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    #: The number of files that only these versions and exports reach, by kind.
    files: Mapping[str, int]
    #: The total size of these files.
    bytes: int
    #: Tables with unreadable files, and the reason for each. Their folders are kept.
    damaged: Mapping[str, str] = field(compare=False)
    #: The files that a purge may delete.
    freed: ReclaimedFiles = field(repr=False, compare=False)
    #: The records of all versions, in ascending order.
    records: tuple[VersionRecord, ...] = field(repr=False, compare=False)
    operation: Expiration = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<time in ms>-<sha256>`` over versions, exports and all files."""
        return timed_digest(self.base_version, self.now_ms, self.base_id, self.plan_file().digest)

    @property
    def base(self) -> Snapshot:
        """The version that the plan is based on, read without caches."""
        assert self.operation.base is not None
        return self.operation.base

    @property
    def is_empty(self) -> bool:
        """Whether nothing would expire."""
        return not self.versions and not self.exports

    def plan_file(self) -> PlanFile:
        """Return the plan file, which lists the files that a purge may delete."""
        sizes_bytes = self.freed.sizes_bytes
        return PlanFile(_OPERATION, self.base_version, self.now_ms, self.versions, self.exports, sizes_bytes)

    def table(self) -> Table:
        """Return one row for each version with its verdict. The title of an empty plan states the reason."""
        title = (
            f"At version {self.base_version}: {len(VersionRanges.parse(self.versions))} of {len(self.verdicts)}"
            f" versions expire, with {len(self.freed.sizes_bytes)} files of {self.bytes} bytes{self._why_empty()}"
            f"{damaged_tables(self.damaged)}"
        )
        if self.is_empty:
            return new_table(title)
        rows: list[tuple[object, ...]] = [
            (verdict.version, "expires" if verdict.expires else "kept", verdict.reason) for verdict in self.verdicts
        ]
        rows += [(f"export {name}", "ends", "its retention is over") for name in self.exports]
        return new_table(title, "version", "verdict", "why", rows=rows)

    def _why_empty(self) -> str:
        """Return why the oldest version is kept, for an empty plan."""
        if not self.is_empty or not self.verdicts:
            return ""
        oldest = min(self.verdicts, key=lambda verdict: verdict.version)
        return f": the oldest one, version {oldest.version}, is kept: {oldest.reason}"

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> ExpirationReport:
        """Record the expiration in one commit. Versions that must now be kept are left out, and no version is added.

        Args:
            approved_digest: The digest of the approved plan, if any.
            progress: Called with the unit that is counted, the number done, and the total.

        Raises:
            PlanChangedError: The approved plan can no longer be made.
            MaintenanceBlockedError: A reconcile is required.
            CommitConflictError: A concurrent commit changed the settings, or all attempts conflicted.
            StorageError: A storage request failed.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)

    def within(self, reclaimed: ReclaimedFiles) -> Self:
        """Return this plan restricted to the files in ``reclaimed``."""
        within = self.freed.within(reclaimed)
        return replace(self, freed=within, bytes=within.bytes)


@dataclass(frozen=True, kw_only=True)
class Expiration(TimedOperation[ExpirationPlan, ExpirationReport]):
    """Expires versions by a policy."""

    telemetry_name = "expiration"

    #: The policy; None to use the lakehouse settings.
    policy: RetentionPolicy | None
    executor: Executor
    #: The version that a plan is based on.
    base: Snapshot | None = None
    progress: Progress = no_progress

    def plan(self) -> ExpirationPlan:
        """Make a plan based on the latest version. Raises the errors of :func:`plan_expiration`."""
        plan = on_latest(self.lake, lambda base: self.plan_at(base, self.lake.storage.now_ms()))
        return replace(plan, operation=replace(plan.operation, progress=no_progress))

    def plan_at(self, base: Snapshot, now_ms: int, *, within: ExpirationPlan | None = None) -> ExpirationPlan:
        """Make a plan for a version and a time.

        Args:
            base: The version.
            now_ms: The time, in milliseconds since the epoch.
            within: A plan whose versions and exports limit the new plan.
        """
        survey = survey_versions(self.lake, base, self.progress, executor=self.executor)
        survey.check_reconciled()
        policy = own_policy = RetentionPolicy.of(base.definition)
        if self.policy is not None:
            policy = replace(self.policy, protected_ms=max(self.policy.protected_ms, own_policy.protected_ms))
        verdicts = survey.verdicts(policy, now_ms)
        expiring = [verdict.version for verdict in verdicts if verdict.expires]
        exports = [record.name for record in base.definition.exports if is_lapsed(record, now_ms)]
        if within is not None:
            allowed = VersionRanges.parse(within.versions)
            expiring = [version for version in expiring if version in allowed]
            exports = [name for name in exports if name in within.exports]
        reclaimed = reclaimed_files(survey, expiring, exports, self.progress)
        return ExpirationPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            now_ms=now_ms,
            versions=str(VersionRanges.of(expiring)),
            exports=tuple(sorted(exports)),
            verdicts=verdicts,
            files=reclaimed.counts(),
            bytes=reclaimed.bytes,
            damaged=reclaimed.damaged,
            freed=reclaimed,
            records=survey.records(),
            operation=replace(self, base=base),
        )

    def run(self, plan: ExpirationPlan, approved_digest: str | None) -> ExpirationReport:
        """Record the expiration in one commit."""
        metered = MeteredLakehouse(self.lake)
        operation = replace(self, lake=metered.lake)
        approved = operation.as_approved(plan, approved_digest)

        def attempt(_number: int) -> ExpirationReport:
            latest, now = on_latest(operation.lake, lambda base: (base, operation._on(base, approved)))
            if now.is_empty:
                return _report(now, approved, None, None, metered)
            return _commit(now, latest, approved, metered)

        return commit_on_latest(attempt, _MAX_PLANS)

    def _on(self, latest: Snapshot, approved: ExpirationPlan) -> ExpirationPlan:
        """Return the approved plan, or a plan for a newer version with at most the same versions and files."""
        if latest.version == approved.base_version:
            return approved
        return self.plan_at(latest, approved.now_ms, within=approved).within(approved.freed)


def _commit(
    plan: ExpirationPlan, base: Snapshot, approved: ExpirationPlan, metered: MeteredLakehouse
) -> ExpirationReport:
    lake = metered.lake
    written_since_ms = lake.storage.now_ms()
    plan_path = write_plan_file(lake.storage, plan.plan_file())
    digest = plan.plan_file().digest  # a purge compares this digest with the file
    batch = ExpirationBatch(id=str(uuid.uuid4()), versions=plan.versions, plan_path=plan_path, digest=digest)

    def expired(base: Snapshot) -> LakehouseDef:
        nonlocal batch
        batch = replace(batch, expired_at_version=base.version + 1, expired_at_millis=lake.storage.now_ms())
        return without_exports(
            replace(base.definition, expirations=(*base.definition.expirations, batch)), plan.exports
        )

    change = DefinitionChange(
        _OPERATION,
        f"versions {plan.versions or 'none'}{', exports ' if plan.exports else ''}{', '.join(plan.exports)}",
        expired,
        _check_same_settings,
        {
            "versions": len(VersionRanges.parse(plan.versions)),
            "files": len(plan.freed.sizes_bytes),
            "bytes": plan.bytes,
        },
    )
    try:
        version = change.commit(lake, base, written_since_ms=written_since_ms)
    except CommitOutcomeUnknownError:
        raise
    except TrinityLakeError:
        discard(lake.storage, [plan_path])
        raise
    return _report(plan, approved, version, batch, metered)


def _report(
    plan: ExpirationPlan,
    approved: ExpirationPlan,
    version: int | None,
    batch: ExpirationBatch | None,
    metered: MeteredLakehouse,
) -> ExpirationReport:
    spared = VersionRanges.parse(approved.versions) - VersionRanges.parse(plan.versions)
    grace_ms = protected_ms(metered.lake.snapshot().definition)
    return ExpirationReport(
        version=version,
        batch=None if batch is None else batch.id,
        versions=plan.versions,
        spared=str(spared),
        exports=plan.exports,
        files=len(plan.freed.sizes_bytes),
        bytes=plan.bytes,
        plan_path=None if batch is None else batch.plan_path,
        purgeable_at_ms=None if batch is None else batch.expired_at_millis + grace_ms,
        damaged=plan.damaged,
        cost=metered.cost(),
    )


def _check_same_settings(base: Snapshot, latest: Snapshot) -> None:
    """Raise CommitConflictError if a concurrent commit changed settings that affect verdicts.

    New versions do not change verdicts, but settings, exports and expirations do.
    """
    if latest.definition_location != base.definition_location:
        for name in _DECIDING_SETTINGS:
            if getattr(base.definition, name) != getattr(latest.definition, name):
                raise CommitConflictError(
                    f"nothing expired: version {latest.version} changed {name} of the lakehouse; run expire again",
                    conflicts=(f"settings of the lakehouse: {name} changed since the plan",),
                    base_version=base.version,
                    latest_version=latest.version,
                )


def plan_expiration(
    lake: Lakehouse,
    policy: RetentionPolicy | None = None,
    *,
    progress: Progress = no_progress,
    executor: Executor = LOCAL,
) -> ExpirationPlan:
    """Plan which versions expire, without writing.

    Reads all unpurged roots, the nodes that kept versions reach, and the other nodes of expiring versions.

    Args:
        lake: The lakehouse.
        policy: The policy; by default, the lakehouse settings.
        progress: Called with the unit that is counted, the number done, and the total.
        executor: Reads the files.

    Raises:
        InvalidInputError: The policy is empty.
        MaintenanceBlockedError: A reconcile is required.
        CorruptFileError: A kept root or node is damaged.
        FileMissingError: A kept root or node is missing.
        StorageError: A storage request failed.
    """
    return Expiration(lake=uncached(lake), policy=policy, executor=executor, progress=progress).plan()


def undelete(lake: Lakehouse, versions: str | int | Iterable[int]) -> int:
    """Restore expired versions. The next expiration expires them again unless an export or a setting keeps them.

    Args:
        lake: The lakehouse.
        versions: The versions as text, such as ``3-90,95``, as one number, or as several numbers.

    Returns:
        The version that recorded the change.

    Raises:
        VersionExpiredError: The purge of a version has begun.
        InvalidInputError: A version is not expired.
        MaintenanceBlockedError: A reconcile is required.
    """
    with operation_span("undelete"):
        wanted = _ranges(versions)
        if not len(wanted):
            raise InvalidInputError("versions must not be empty; use a format such as 3-90,95")

        lake = uncached(lake)
        survey = survey_versions(lake)
        survey.check_reconciled()  # another program may list versions as EXPIRED that a purge is sealing

        def undeleted(base: Snapshot) -> LakehouseDef:
            if base.version != survey.base.version:
                survey.extended(base).check_reconciled()
            remaining = _without(base.definition.expirations, wanted)
            _check_not_sealed(lake, wanted)
            return replace(base.definition, expirations=remaining)

        return DefinitionChange("undelete", f"versions {wanted}", undeleted).commit(lake, survey.base)


def _check_not_sealed(lake: Lakehouse, versions: VersionRanges) -> None:
    """Raise VersionExpiredError for sealed roots.

    The lakehouse definition may lack the purge if another program restored an older definition.
    """
    roots = lake.files.roots
    for version, data in read_roots(roots, list(versions), _ROOTS_AT_ONCE):
        if data is None or SEALED_AT_MILLIS in decode_system_rows(data, roots.path(version)):
            raise VersionExpiredError(
                f"version {version} cannot be undeleted: it was purged", path=roots.path(version), version=version
            )


def _ranges(versions: str | int | Iterable[int]) -> VersionRanges:
    if isinstance(versions, str):
        return VersionRanges.parse(versions)
    values: list[object] = list(versions) if isinstance(versions, Iterable) else [versions]
    numbers = [version for version in values if type(version) is int and version >= 0]
    if len(numbers) < len(values):
        raise InvalidInputError("versions must be a text such as 3-90,95, a number, or numbers")
    return VersionRanges.of(numbers)


def _without(batches: Iterable[ExpirationBatch], wanted: VersionRanges) -> tuple[ExpirationBatch, ...]:
    """Return batches without the wanted versions. Each wanted version must be in a batch that can be undeleted."""
    left, rest = [], wanted
    for batch in batches:
        ranges = batch.ranges()
        undeleted = ranges - (ranges - wanted)
        if undeleted and batch.state != ExpirationState.EXPIRED:
            raise VersionExpiredError(
                f"versions {undeleted} cannot be undeleted: their purge has begun", version=next(iter(undeleted))
            )
        rest -= undeleted
        remaining = ranges - undeleted
        if remaining or not undeleted:
            left.append(replace(batch, versions=str(remaining)) if undeleted else batch)
    if rest:
        raise InvalidInputError(f"versions {rest} are not expired; list expired versions with: trinitylake log")
    return tuple(left)
