"""Expires versions.

From then on nobody can open them, and a purge may free the files that only they need (docs/internals/protocol.md).
Nothing is deleted here. Until the purge begins, undelete brings expired versions back.
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
#: The basis of verdicts besides versions and time.
_DECIDING_SETTINGS = (
    "expirations",
    "exports",
    "exported_snapshots",
    "maximum_version_age_millis",
    "maximum_version_age_millis_overrides",
    "minimum_versions_to_keep",
    "orphans_removed_before_millis",  # lost where another program went back: to be reconciled first
    "retention_rules",
    "txn_ttl_millis",
)


@dataclass(frozen=True, kw_only=True)
class ExpirationReport(Document):
    """Versions that expired, and the files that a purge will free. ``version`` recorded it, None if nothing expired.

    ``spared`` are versions of the approved plan that are kept now. ``files`` are those that only expired versions
    reach, ``bytes`` their sizes. ``purgeable_at_ms`` is when a purge may begin, in milliseconds since the epoch. All
    files in the folders of ``damaged`` tables stay.
    """

    version: int | None
    batch: str | None
    versions: str
    spared: str
    exports: tuple[str, ...]
    files: int
    bytes: int
    plan_path: str | None
    purgeable_at_ms: int | None
    damaged: Mapping[str, str]
    cost: Cost

    def table(self) -> Table:
        """Return one row."""
        if self.version is None:
            return new_table("Nothing expired")
        title = f"Expired in version {self.version}; undelete brings them back until the purge begins"
        title += damaged_tables(self.damaged)
        until = None if self.purgeable_at_ms is None else utc_of(self.purgeable_at_ms)
        row = (self.versions, ", ".join(self.exports), self.files, self.bytes, until)
        return new_table(title, "versions", "exports", "files", "bytes", "purge from", rows=[row])


@dataclass(frozen=True, kw_only=True)
class ExpirationPlan(TimedPlan):
    """The versions that would expire, and the reasons, at a version and time.

    ``exports`` are the names of exports that are past their time. ``files`` counts the files that only these versions
    and exports reach, by kind, and ``bytes`` their sizes. A purge frees them. All files in the folders of ``damaged``
    tables stay. ``records`` are those of all versions' roots, ascending, those of the past included.
    """

    base_version: int
    now_ms: int
    versions: str
    exports: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    files: Mapping[str, int]
    bytes: int
    damaged: Mapping[str, str] = field(compare=False)
    freed: ReclaimedFiles = field(repr=False, compare=False)
    records: tuple[VersionRecord, ...] = field(repr=False, compare=False)
    operation: Expiration = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<time in ms>-<sha256>`` over versions, exports and all files."""
        return timed_digest(self.base_version, self.now_ms, self.base_id, self.plan_file().digest)

    @property
    def base(self) -> Snapshot:
        """The version at which it was planned, read past all caches."""
        assert self.operation.base is not None
        return self.operation.base

    @property
    def is_empty(self) -> bool:
        """Whether nothing would expire."""
        return not self.versions and not self.exports

    def plan_file(self) -> PlanFile:
        """Return the files that a purge will be allowed to delete."""
        sizes_bytes = self.freed.sizes_bytes
        return PlanFile(_OPERATION, self.base_version, self.now_ms, self.versions, self.exports, sizes_bytes)

    def table(self) -> Table:
        """Return one row for each version, what happens to it and why. An empty plan has its reason in the title."""
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
        rows += [(f"export {name}", "ends", "it is past the time for which it is retained") for name in self.exports]
        return new_table(title, "version", "verdict", "why", rows=rows)

    def _why_empty(self) -> str:
        """Say of an empty plan why the oldest version is kept, or that there is but one."""
        if not self.is_empty or not self.verdicts:
            return ""
        oldest = min(self.verdicts, key=lambda verdict: verdict.version)
        return f": the oldest one, version {oldest.version}, is kept: {oldest.reason}"

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> ExpirationReport:
        """Record the expiry in one commit. Versions that are kept by now are spared, and none is added.

        Raises PlanChangedError when the approved plan cannot be made again, MaintenanceBlockedError before a
        reconcile, CommitConflictError, StorageError.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)

    def within(self, freed: ReclaimedFiles) -> Self:
        """Return this plan with those of its files that others have, too."""
        within = self.freed.within(freed)
        return replace(self, freed=within, bytes=within.bytes)


@dataclass(frozen=True, kw_only=True)
class Expiration(TimedOperation[ExpirationPlan, ExpirationReport]):
    """The expiry of versions by a policy, None for the lakehouse's own. ``base`` is where a plan was made."""

    telemetry_name = "expiration"

    policy: RetentionPolicy | None
    executor: Executor
    base: Snapshot | None = None
    progress: Progress = no_progress

    def plan(self) -> ExpirationPlan:
        """Plan on the latest version. Raises what :func:`plan_expiration` raises."""
        made = on_latest(self.lake, lambda base: self.plan_at(base, self.lake.storage.now_ms()))
        return replace(made, operation=replace(made.operation, progress=no_progress))

    def plan_at(self, base: Snapshot, now_ms: int, *, within: ExpirationPlan | None = None) -> ExpirationPlan:
        """Plan at a version and time. ``within`` limits it to what another plan lets expire."""
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
        freed = reclaimed_files(survey, expiring, exports, self.progress)
        return ExpirationPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            now_ms=now_ms,
            versions=str(VersionRanges.of(expiring)),
            exports=tuple(sorted(exports)),
            verdicts=verdicts,
            files=freed.counts(),
            bytes=freed.bytes,
            damaged=freed.damaged,
            freed=freed,
            records=survey.records(),
            operation=replace(self, base=base),
        )

    def run(self, plan: ExpirationPlan, approved_digest: str | None) -> ExpirationReport:
        """Record the expiry in one commit."""
        metered = MeteredLakehouse(self.lake)
        here = replace(self, lake=metered.lake)
        approved = here.as_approved(plan, approved_digest)

        def attempt(_number: int) -> ExpirationReport:
            latest, now = on_latest(here.lake, lambda base: (base, here._on(base, approved)))
            if now.is_empty:
                return _report(now, approved, None, None, metered)
            return _commit(now, latest, approved, metered)

        return commit_on_latest(attempt, _MAX_PLANS)

    def _on(self, latest: Snapshot, approved: ExpirationPlan) -> ExpirationPlan:
        """Return a plan on its or a later version: without versions kept there, and never with more."""
        if latest.version == approved.base_version:
            return approved
        return self.plan_at(latest, approved.now_ms, within=approved).within(approved.freed)


def _commit(
    plan: ExpirationPlan, base: Snapshot, approved: ExpirationPlan, metered: MeteredLakehouse
) -> ExpirationReport:
    lake = metered.lake
    written_since_ms = lake.storage.now_ms()
    plan_path = write_plan_file(lake.storage, plan.plan_file())
    digest = plan.plan_file().digest  # of the file, which a purge compares
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
    """Raise CommitConflictError if a commit in between changed the basis of verdicts.

    Further versions never make a version expire less, but other settings, exports and expirations do.
    """
    if latest.definition_location != base.definition_location:
        for name in _DECIDING_SETTINGS:
            if getattr(base.definition, name) != getattr(latest.definition, name):
                raise CommitConflictError(
                    f"nothing expired: version {latest.version} changed {name} of the lakehouse; run it again",
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
    """Plan which versions expire by a policy, by default the lakehouse's own settings. Only reads.

    An executor reads all unpurged roots, the nodes that kept versions reach, and further nodes of expiring ones. Raises
    InvalidInputError for an empty policy, MaintenanceBlockedError before a reconcile, StorageError. Raises
    CorruptFileError and FileMissingError for a kept root or node that cannot be read.
    """
    return Expiration(lake=uncached(lake), policy=policy, executor=executor, progress=progress).plan()


def undelete(lake: Lakehouse, versions: str | int | Iterable[int]) -> int:
    """Bring expired versions back, given as ``3-90,95``, a number or numbers. Returns the version that records it.

    They expire again by the next expiry unless an export pins them or a setting keeps them. Raises
    VersionExpiredError where their purge has begun, InvalidInputError for versions that are not expired,
    MaintenanceBlockedError before a reconcile.
    """
    with operation_span("undelete"):
        wanted = _ranges(versions)
        if not len(wanted):
            raise InvalidInputError("undelete which versions? Write them as 3-90,95")

        lake = uncached(lake)
        survey = survey_versions(lake)
        survey.check_reconciled()  # another program's definition may say EXPIRED of versions that a purge is sealing

        def undeleted(base: Snapshot) -> LakehouseDef:
            if base.version != survey.base.version:
                survey.extended(base).check_reconciled()
            remaining = _without(base.definition.expirations, wanted)
            _check_not_sealed(lake, wanted)
            return replace(base.definition, expirations=remaining)

        return DefinitionChange("undelete", f"versions {wanted}", undeleted).commit(lake, survey.base)


def _check_not_sealed(lake: Lakehouse, versions: VersionRanges) -> None:
    """Raise VersionExpiredError for sealed roots, even if the lakehouse definition has forgotten that.

    This can happen after another program went back to an older one.
    """
    roots = lake.files.roots
    for version, data in read_roots(roots, list(versions), _ROOTS_AT_ONCE):
        if data is None or SEALED_AT_MILLIS in decode_system_rows(data, roots.path(version)):
            raise VersionExpiredError(
                f"version {version} cannot come back: it was purged", path=roots.path(version), version=version
            )


def _ranges(versions: str | int | Iterable[int]) -> VersionRanges:
    if isinstance(versions, str):
        return VersionRanges.parse(versions)
    given: list[object] = list(versions) if isinstance(versions, Iterable) else [versions]
    numbers = [version for version in given if type(version) is int and version >= 0]
    if len(numbers) < len(given):
        raise InvalidInputError("versions are given as 3-90,95, as a number, or as numbers")
    return VersionRanges.of(numbers)


def _without(batches: Iterable[ExpirationBatch], wanted: VersionRanges) -> tuple[ExpirationBatch, ...]:
    """Return batches without the wanted versions, each of which must be in one that can be undeleted."""
    left, rest = [], wanted
    for batch in batches:
        ranges = batch.ranges()
        found = ranges - (ranges - wanted)
        if found and batch.state != ExpirationState.EXPIRED:
            raise VersionExpiredError(
                f"versions {found} cannot come back: their purge has begun", version=next(iter(found))
            )
        rest -= found
        remaining = ranges - found
        if remaining or not found:
            left.append(replace(batch, versions=str(remaining)) if found else batch)
    if rest:
        raise InvalidInputError(f"versions {rest} are not expired; log says which are")
    return tuple(left)
