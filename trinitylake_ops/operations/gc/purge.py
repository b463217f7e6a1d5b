"""Purge expired versions: seal their roots, then delete the files that only these versions need.

See docs/internals/protocol.md, "Expiry".

Every step can be interrupted and repeated. A batch stays PURGING until its purge is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from trinitylake_ops.errors import FileMissingError, MaintenanceBlockedError, PlanChangedError
from trinitylake_ops.format.definitions import ExpirationState, LakehouseDef
from trinitylake_ops.format.keys import SEALED_AT_MILLIS
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.format.node_file import decode_system_rows, encode_sealed_root
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.base import MeteredLakehouse, TimedPlan, base_id_of, timed_digest
from trinitylake_ops.operations.budget import NO_LIMITS, Budget, Spending
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.gc.batches import PurgeBatch, unpurged_batches, with_purged
from trinitylake_ops.operations.gc.delete import DeletingOperation, Deletion, DeletionReport, delete_operation_files
from trinitylake_ops.operations.gc.mark import Mark
from trinitylake_ops.operations.gc.survey import (
    Progress,
    Survey,
    expired_versions,
    no_progress,
    on_latest,
    pinned_versions,
    survey_versions,
)
from trinitylake_ops.operations.gc.table_files import is_below_tables
from trinitylake_ops.operations.gc.tables import existing_named_files
from trinitylake_ops.operations.gc.unreached import damaged_tables, delete_unreached, left_table_root, unreached
from trinitylake_ops.operations.lease import Lease, lease
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.operations.retention import duration_ms, protected_ms
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

_OPERATION = "purge"
_SEALED_AT_ONCE = 64
_UNFINISHED = (ExpirationState.EXPIRED, ExpirationState.PURGING)


@dataclass(frozen=True, kw_only=True)
class PurgeReport(DeletionReport):
    """The result of a purge. ``version`` is None until the purge is complete."""

    versions: str

    def table(self) -> Table:
        """Return one row with totals, and one row for each failure."""
        if not self.is_complete:
            title = f"Purge not finished, run it again: {self.stopped or f'{len(self.failures)} files not deleted'}"
        else:
            title = "Nothing to purge" if self.version is None else f"Purged, recorded in version {self.version}"
        title += damaged_tables(self.damaged)
        has_result = self.versions or self.files or self.version is not None
        figures = (self.versions or "none", self.files, self.bytes, self.still_needed, "")
        rows: list[Sequence[object]] = [figures] if has_result else []
        columns = ("versions", "files", "bytes", "still needed", "failures")
        return new_table(title, *columns, rows=[*rows, *self.failure_rows(len(columns))])


@dataclass(frozen=True, kw_only=True)
class PurgePlan(TimedPlan):
    """The roots to seal, and the files to delete. Files under the table root are identified by URI.

    Batches without a readable plan are only sealed; an orphan removal deletes their files.
    """

    base_version: int
    now_ms: int
    versions: str
    batches: tuple[PurgeBatch, ...]
    files: int
    bytes: int
    #: The number of files listed in expiration plans that are kept because kept versions reach them now.
    still_needed: int
    #: The files to delete, with their sizes.
    sizes_bytes: Mapping[str, int] = field(repr=False, compare=False)
    #: The files listed in expiration plans, with their sizes.
    planned: Mapping[str, int] = field(repr=False, compare=False)
    #: Why files under the table root are kept; empty if they are deleted.
    left_table_root: str = field(compare=False)
    #: Tables with unreadable files, and the reason for each. Their folders are kept.
    damaged: Mapping[str, str] = field(compare=False)
    operation: Purge = field(repr=False, compare=False)

    @property
    def due(self) -> dict[str, str]:
        """The versions of the batches that are due, by batch id."""
        return {batch.id: batch.versions for batch in self.batches if batch.is_due}

    @property
    def digest(self) -> str:
        """Return ``<base version>-<time in ms>-<sha256>`` over the batches that are due and all files."""
        due = sorted((batch.id, batch.versions) for batch in self.batches if batch.is_due)
        return timed_digest(
            self.base_version, self.now_ms, self.base_id, _OPERATION, due, sorted(self.sizes_bytes.items())
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is due."""
        return not self.due

    def check_batches(self, definition: LakehouseDef, states: Collection[ExpirationState] = _UNFINISHED) -> None:
        """Check that all due batches are unchanged since the plan.

        Args:
            definition: The current lakehouse definition.
            states: The states that the batches may have.

        Raises:
            PlanChangedError: Versions of a batch were undeleted or purged.
        """
        existing = {batch.id: batch.versions for batch in definition.expirations if batch.state in states}
        for batch_id, versions in self.due.items():
            if existing.get(batch_id) != versions:
                raise PlanChangedError(
                    f"expired versions {versions} were undeleted, in part, or purged since the plan; review the new"
                    " plan"
                )

    def table(self) -> Table:
        """Return one row for each unpurged batch."""
        title = (
            f"At version {self.base_version}: purge of {len(VersionRanges.parse(self.versions))} versions deletes"
            f" {self.files} files of {self.bytes} bytes; {self.still_needed} more are still needed"
        )
        title += f"; {self.left_table_root}" if self.left_table_root else ""
        title += damaged_tables(self.damaged)
        rows = [
            (
                batch.versions,
                batch.state,
                "now" if batch.is_due else batch.purgeable_at,
                "" if batch.has_plan else "lost",
            )
            for batch in self.batches
        ]
        return new_table(title, "versions", "state", "purge from", "plan", rows=rows)

    def execute(
        self,
        approved_digest: str | None = None,
        *,
        budget: Budget | Spending = NO_LIMITS,
        progress: Progress = no_progress,
    ) -> PurgeReport:
        """Seal the versions and delete the files, except files that are reached now.

        Args:
            approved_digest: The digest of the approved plan, if any.
            budget: The budget of the run.
            progress: Called with the unit that is counted, the number done, and the total.

        Returns:
            The report, with the files that could not be deleted.

        Raises:
            PlanChangedError: The new plan is not the approved one, or batches have changed.
            MaintenanceBlockedError: Another operation holds the lease, or a reconcile is required.
            BudgetSpentBeforeError: The budget was used up before anything was sealed or deleted.
            StorageError: A storage request failed.
        """
        operation = replace(self.operation, spending=Spending.of(budget), progress=progress)
        return operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Purge(DeletingOperation[PurgePlan, PurgeReport]):
    """Purges versions that expired long enough ago."""

    telemetry_name = "purge"

    #: The grace period in milliseconds; None for the minimum.
    grace_ms: int | None

    def plan_at(self, base: Snapshot, now_ms: int) -> PurgePlan:
        """Make the plan for a version and a time in milliseconds since the epoch."""
        grace_ms = max(self.grace_ms or 0, protected_ms(base.definition))
        batches, versions, planned = unpurged_batches(self.lake, base.definition, now_ms, grace_ms)
        doomed: dict[str, int] = {}
        damaged: dict[str, str] = {}
        left = ""
        if any(batch.is_due for batch in batches):
            survey = survey_versions(self.lake, base, self.progress, executor=self.executor)
            mark = _marked(survey, versions, planned, self.progress)
            check_not_pinned(survey, versions, now_ms)
            doomed, left = unreached(mark, planned), left_table_root(mark)
            damaged = dict(sorted(mark.tables.damaged.items()))
        return PurgePlan(
            base_version=base.version,
            base_id=base_id_of(base),
            now_ms=now_ms,
            versions=str(versions),
            batches=batches,
            files=len(doomed),
            bytes=sum(doomed.values()),
            still_needed=len(planned) - len(doomed),
            sizes_bytes=doomed,
            planned=planned,
            left_table_root=left if any(map(is_uri, planned)) else "",
            damaged=damaged,
            operation=replace(self, grace_ms=grace_ms),
        )

    def run(self, plan: PurgePlan, approved_digest: str | None) -> PurgeReport:
        """Seal the versions and delete the files, under the lease."""
        operation, metered, approved = self.prepared(plan, approved_digest)
        if approved.is_empty:
            return PurgeReport.of(Deletion(), version=None, still_needed=0, cost=metered.cost(), versions="")
        with lease(metered.lake.storage, _OPERATION) as held_lease:
            return operation._purge(approved, held_lease, metered)

    def _purge(self, plan: PurgePlan, held_lease: Lease, metered: MeteredLakehouse) -> PurgeReport:
        """Purge under the lease, on the metered lakehouse."""
        mark, is_resumed = self._begin(plan)
        if (stopped := self._seal(plan, held_lease)) is not None:
            left = Deletion(stopped=stopped)
            return PurgeReport.of(left, version=None, still_needed=0, cost=metered.cost(), versions=plan.versions)
        storage = self.lake.storage
        mark.extend(self.lake.snapshot())
        doomed = unreached(mark, plan.sizes_bytes)
        still_needed = len(plan.planned) - len(doomed)
        if is_resumed:  # otherwise, deleted files would be charged to the budget again and counted twice
            existing = existing_named_files(storage, self.executor, doomed, mark.table_root)
            doomed = {info.path: doomed[info.path] for info in existing}
        deletion = delete_unreached(storage, doomed, mark, held_lease, self.spending, self.progress)
        still_needed += deletion.spared
        version = self._finish(plan, deletion, still_needed) if deletion.is_complete else None
        return PurgeReport.of(
            deletion,
            version=version,
            still_needed=still_needed,
            cost=metered.cost(),
            versions=plan.versions,
            damaged=dict(sorted(mark.tables.damaged.items())),
        )

    def _begin(self, plan: PurgePlan) -> tuple[Mark, bool]:
        """Record the start of the purge in a commit based on exactly the newest version that the mark covers.

        Returns the mark, and whether an earlier run of this purge was interrupted.
        """
        versions, due, is_resumed = VersionRanges.parse(plan.versions), plan.due, False
        with self.spending.planning(self.progress) as progress:

            def marked(base: Snapshot) -> Mark:
                survey = survey_versions(self.lake, base, progress, executor=self.executor)
                return _marked(survey, versions, plan.planned, progress)

            mark = on_latest(self.lake, marked)

        def mark_as_purging(base: Snapshot) -> LakehouseDef | None:
            nonlocal is_resumed
            plan.check_batches(base.definition)
            check_not_pinned(mark.survey, versions, plan.now_ms)
            is_resumed = any(
                batch.id in due and batch.state == ExpirationState.PURGING for batch in base.definition.expirations
            )
            batches = tuple(
                replace(batch, state=ExpirationState.PURGING) if batch.id in due else batch
                for batch in base.definition.expirations
            )
            return None if batches == base.definition.expirations else replace(base.definition, expirations=batches)

        change = DefinitionChange(
            _OPERATION,
            f"begin with versions {versions}",
            mark_as_purging,
            lambda _base, latest: mark.extend(latest),
            {"versions": len(versions), "files": plan.files, "bytes": plan.bytes},
        )
        change.commit(self.lake, mark.base)
        return mark, is_resumed

    def _seal(self, plan: PurgePlan, held_lease: Lease) -> str | None:
        """Replace the roots of all versions, which readers can no longer open, with sealed roots.

        Returns why sealing ended early, or None if all roots are sealed.
        """
        storage, roots = self.lake.storage, self.lake.files.roots

        def seal(version: int) -> None:
            path = roots.path(version)
            try:
                system = decode_system_rows(storage.read(path), path)
            except FileMissingError:
                return  # deleted by another program
            if SEALED_AT_MILLIS not in system:
                storage.write(path, encode_sealed_root(system, storage.now_ms(), path))
                sealed.append(version)

        sealed: list[int] = []
        versions = list(VersionRanges.parse(plan.versions))
        done = 0
        while done < len(versions):
            # A run stops here only after it has sealed at least one root, so that each run makes progress.
            if sealed and (spent := self.spending.exhausted()) is not None:
                return f"{spent}; {len(versions) - done} versions remain to be sealed, and all files to be deleted"
            held_lease.check()
            plan.check_batches(self.lake.snapshot().definition, (ExpirationState.PURGING,))
            batch = versions[done : done + self.spending.within(_SEALED_AT_ONCE)]
            run_parallel(in_one_round_trip(seal), batch, storage.concurrency)
            done += len(batch)
            self.progress("sealed", done, len(versions))
        spent = self.spending.exhausted() if sealed else None
        return None if spent is None else f"{spent}; all versions are sealed, the files remain to be deleted"

    def _finish(self, plan: PurgePlan, deletion: Deletion, still_needed: int) -> int:
        """Record the end of the purge, with all purged batches combined into one, and return the version."""
        plan_paths: list[str] = []
        versions, due = VersionRanges.parse(plan.versions), plan.due

        def purged(base: Snapshot) -> LakehouseDef | None:
            definition = base.definition
            if not versions - expired_versions(definition, (ExpirationState.PURGED,)) and versions:
                return None  # another run finished the purge
            plan.check_batches(definition)
            ours = [batch for batch in definition.expirations if batch.id in due]
            plan_paths[:] = [batch.plan_path for batch in ours if batch.plan_path]
            return replace(definition, expirations=with_purged(definition.expirations, due))

        change = DefinitionChange(
            _OPERATION,
            f"versions {versions}",
            purged,
            counts={
                "versions": len(versions),
                "files": deletion.files,
                "bytes": deletion.bytes,
                "still_needed": still_needed,
            },
        )
        version = change.commit(self.lake, self.lake.snapshot())
        delete_operation_files(self.lake.storage, plan_paths)
        return version


def check_not_pinned(survey: Survey, versions: VersionRanges, now_ms: int) -> None:
    """Check that no export, which another program may have recorded, needs an expired version.

    Args:
        survey: The survey of all versions.
        versions: The versions to purge.
        now_ms: The storage's time, in milliseconds since the epoch.

    Raises:
        MaintenanceBlockedError: An export needs one of the versions.
    """
    for version, pins in sorted(pinned_versions(survey, now_ms).items()):
        if version in versions:
            raise MaintenanceBlockedError(
                f"version {version} is expired, but {', '.join(pins)} needs it; undelete it, or drop the export",
                version=version,
            )


def plan_purge(
    lake: Lakehouse,
    grace: timedelta | int | None = None,
    *,
    budget: Budget | Spending = NO_LIMITS,
    progress: Progress = no_progress,
    executor: Executor = LOCAL,
) -> PurgePlan:
    """Plan the purge of expired versions, without writing. Interrupted purges are due at once.

    Args:
        lake: The lakehouse.
        grace: The minimum time since the expiration, as a timedelta or in milliseconds. The minimum and default is the
            lakehouse's ``txn_ttl_millis`` plus 5 minutes.
        budget: The budget. Pass the same Spending to ``execute`` to share the budget.
        progress: Called with the unit that is counted, the number done, and the total.
        executor: Reads files, and deletes them when the plan is executed.

    Raises:
        InvalidInputError: The grace period is negative.
        MaintenanceBlockedError: A reconcile is required.
        BudgetSpentBeforeError: The budget was used up.
        StorageError: A kept file cannot be read, or a storage request failed.
    """
    grace_ms = None if grace is None else duration_ms(grace, "the grace")
    spending = Spending.of(budget)
    return Purge(lake=lake, grace_ms=grace_ms, executor=executor, spending=spending, progress=progress).plan()


def _marked(survey: Survey, leaving: VersionRanges, planned: Iterable[str], progress: Progress) -> Mark:
    """Mark the files that are kept when versions are purged. Table files are marked only if the plan contains any."""
    with_tables = any(is_uri(path) or is_below_tables(path) for path in planned)
    return Mark(survey, without=leaving, with_tables=with_tables, progress=progress)
