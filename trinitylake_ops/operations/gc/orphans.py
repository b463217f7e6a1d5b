"""Remove orphans: files of failed commits, aborted writes and interrupted operations.

An orphan has a name that matches this package's naming scheme, no kept root reaches it, and it is older than any
transaction that could still refer to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from trinitylake_ops.errors import MaintenanceBlockedError
from trinitylake_ops.format.definitions import ExpirationState, LakehouseDef
from trinitylake_ops.format.file_names import (
    OWNER_NAME,
    TABLES_PREFIX,
    is_immutable_path,
)
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.operations.base import TimedPlan, base_id_of, timed_digest
from trinitylake_ops.operations.budget import NO_LIMITS, Budget, Spending
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.gc.delete import DeletingOperation, Deletion, DeletionReport
from trinitylake_ops.operations.gc.inventory import list_by_inventory, read_inventory
from trinitylake_ops.operations.gc.listing import list_without
from trinitylake_ops.operations.gc.mark import Mark
from trinitylake_ops.operations.gc.orphan_search import Orphans, find_orphans, find_table_root_orphans
from trinitylake_ops.operations.gc.survey import Progress, no_progress, on_latest, survey_versions
from trinitylake_ops.operations.gc.table_files import is_below_tables, table_id_in
from trinitylake_ops.operations.gc.unreached import damaged_tables, delete_unreached, left_table_root, unreached
from trinitylake_ops.operations.lease import Lease, lease
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.operations.retention import barred_before_ms, duration_ms, protected_ms
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.time_to_live import raise_barrier, recorded_barrier_ms
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

_OPERATION = "orphans"
_LISTED = 1000


@dataclass(frozen=True, kw_only=True)
class OrphanReport(DeletionReport):
    """The result of an orphan removal. ``version`` recorded the start of the removal; None if there were no orphans."""

    def table(self) -> Table:
        """Return one row with totals, and one row for each failure."""
        title = "No orphans" if self.version is None else f"Orphans removed, recorded in version {self.version}"
        if not self.is_complete:
            title = f"Not all orphans removed, run it again: {self.stopped or f'{len(self.failures)} not deleted'}"
        title += damaged_tables(self.damaged)
        rows: list[Sequence[object]] = [(self.files, self.bytes, self.still_needed, "")] if self.version else []
        columns = ("files", "bytes", "still needed", "failures")
        return new_table(title, *columns, rows=[*rows, *self.failure_rows(len(columns))])


@dataclass(frozen=True, kw_only=True)
class OrphanPlan(TimedPlan):
    """The orphans to delete. Files under the table root are identified by URI."""

    base_version: int
    now_ms: int
    #: The minimum age of orphans, in milliseconds.
    older_than_ms: int
    #: The number of orphans by kind.
    files: Mapping[str, int]
    #: The total size of the orphans.
    bytes: int
    #: The number of files under ``tables/`` that no version defines and no owner file claims. They are kept.
    unowned_files: int
    #: The total size of these files.
    unowned_bytes: int
    #: The URI of the manifest of the inventory, if one was used. A root that the inventory does not cover was listed.
    inventory: str | None
    #: When the inventory was started, in milliseconds since the epoch. Newer files were not checked.
    inventory_created_at_ms: int | None
    #: The orphans with their sizes, without owner files.
    sizes_bytes: Mapping[str, int] = field(repr=False, compare=False)
    #: The owner files with their sizes, which are deleted last.
    owners: Mapping[str, int] = field(repr=False, compare=False)
    #: Why files under the table root are kept; empty if they are deleted.
    left_table_root: str = field(compare=False)
    #: Tables with unreadable files, and the reason for each. Their folders are kept.
    damaged: Mapping[str, str] = field(compare=False)
    operation: OrphanRemoval = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<time in ms>-<sha256>`` over all files."""
        return timed_digest(self.base_version, self.now_ms, self.base_id, _OPERATION, sorted(self._all().items()))

    @property
    def is_empty(self) -> bool:
        """Whether there are no orphans."""
        return not self._all()

    def _all(self) -> dict[str, int]:
        return {**self.sizes_bytes, **self.owners}

    @property
    def paths(self) -> list[str]:
        """The paths of all orphans, in ascending order."""
        return sorted(self._all())

    def table(self) -> Table:
        """Return one row for each of the first orphans."""
        unowned = (
            f"; {self.unowned_files} files under tables/ have no known owner and are kept" if self.unowned_files else ""
        )
        more = f", the first {_LISTED}" if len(self.paths) > _LISTED else ""
        inventory_time = self.inventory_created_at_ms
        by = "" if inventory_time is None else f" in the inventory of {utc_of(inventory_time):%Y-%m-%d %H:%M} UTC"
        title = f"At version {self.base_version}: {len(self.paths)} orphans of {self.bytes} bytes{by}{more}{unowned}"
        title += f"; {self.left_table_root}" if self.left_table_root else ""
        title += damaged_tables(self.damaged)
        sizes_bytes = self._all()
        rows = [(path, _kind(path), sizes_bytes[path]) for path in self.paths[:_LISTED]]
        return new_table(title, "path", "kind", "bytes", rows=rows)

    def execute(
        self,
        approved_digest: str | None = None,
        *,
        budget: Budget | Spending = NO_LIMITS,
        progress: Progress = no_progress,
    ) -> OrphanReport:
        """Commit the start of the removal, then delete the orphans that are still unreached.

        The commit creates the next version. A transaction that has stalled since before the mark therefore conflicts
        with the commit, and then exceeds its time to live.

        Args:
            approved_digest: The digest of the approved plan, if any.
            budget: The budget of the run.
            progress: Called with the unit that is counted, the number done, and the total.

        Returns:
            The report, with the files that could not be deleted.

        Raises:
            PlanChangedError: The new plan is not the approved one.
            MaintenanceBlockedError: Another operation holds the lease, a purge is unfinished, or a reconcile is
                required.
            BudgetSpentBeforeError: The budget was used up before anything was deleted.
            StorageError: A storage request failed.
        """
        operation = replace(self.operation, spending=Spending.of(budget), progress=progress)
        return operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class OrphanRemoval(DeletingOperation[OrphanPlan, OrphanReport]):
    """Removes orphans."""

    telemetry_name = "orphan-removal"

    #: The minimum age in milliseconds; None for the default.
    older_than_ms: int | None
    #: The URI of the manifest of an inventory to use instead of a listing.
    inventory: str | None

    def plan_at(self, base: Snapshot, now_ms: int) -> OrphanPlan:
        """Make the plan for a version and a time in milliseconds since the epoch."""
        _check_no_purge(base.definition)
        inventory = (
            None if self.inventory is None else read_inventory(self.lake, self.inventory, base.definition.table_root)
        )
        age_ms = max(self.older_than_ms or 0, protected_ms(base.definition))
        survey = survey_versions(self.lake, base, self.progress, executor=self.executor)
        mark = Mark(survey, progress=self.progress)
        listed = in_table_root = None
        if inventory is not None:
            listed, in_table_root = list_by_inventory(self.lake, self.executor, inventory, mark, self.progress)
        if listed is None:
            listed = list_without(self.lake.storage, self.executor, mark.catalog.paths)
        orphans = Orphans.of_all(
            find_orphans(self.lake, mark, listed, now_ms - age_ms),
            find_table_root_orphans(mark, now_ms, age_ms, in_table_root),
        )
        sizes_bytes = {**orphans.sizes_bytes, **orphans.owners}
        return OrphanPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            now_ms=now_ms,
            older_than_ms=age_ms,
            files=dict(sorted(Counter(map(_kind, sizes_bytes)).items())),
            bytes=sum(sizes_bytes.values()),
            unowned_files=orphans.unowned_files,
            unowned_bytes=orphans.unowned_bytes,
            inventory=None if inventory is None else inventory.location,
            inventory_created_at_ms=None if inventory is None else inventory.created_at_ms,
            sizes_bytes=orphans.sizes_bytes,
            owners=orphans.owners,
            left_table_root=left_table_root(mark),
            damaged=dict(sorted(mark.tables.damaged.items())),
            operation=self if inventory is None else replace(self, inventory=inventory.location),
        )

    def run(self, plan: OrphanPlan, approved_digest: str | None) -> OrphanReport:
        """Commit the start of the removal, and delete the orphans that are still unreached, under the lease."""
        operation, metered, approved = self.prepared(plan, approved_digest)
        if approved.is_empty:
            damaged = approved.damaged
            return OrphanReport.of(Deletion(), version=None, still_needed=0, cost=metered.cost(), damaged=damaged)
        with lease(metered.lake.storage, _OPERATION) as held_lease:
            mark, version = operation._begin(approved)
            done, still_needed = operation._delete(approved, mark, held_lease)
        damaged = dict(sorted(mark.tables.damaged.items()))
        return OrphanReport.of(done, version=version, still_needed=still_needed, cost=metered.cost(), damaged=damaged)

    def _begin(self, plan: OrphanPlan) -> tuple[Mark, int]:
        """Mark all kept files, bar older transactions, and record the removal. Returns the mark and the version."""
        lake = self.lake
        has_tables = any(is_uri(path) or is_below_tables(path) for path in plan.paths)
        with self.spending.planning(self.progress) as progress:

            def marked(base: Snapshot) -> Mark:
                survey = survey_versions(lake, base, progress, executor=self.executor)
                return Mark(survey, with_tables=has_tables, progress=progress)

            mark = on_latest(lake, marked)

        # Files of older transactions may be deleted now, so these transactions must not commit, whatever their time to
        # live.
        before_ms = barred_before_ms(plan.now_ms, plan.older_than_ms)
        raise_barrier(lake.storage, before_ms)

        def recorded(base: Snapshot) -> LakehouseDef:
            _check_no_purge(base.definition)
            known_ms = recorded_barrier_ms(base.definition, lake.storage.now_ms())
            return replace(base.definition, orphans_removed_before_millis=max(before_ms, known_ms))

        change = DefinitionChange(
            _OPERATION,
            f"{len(plan.paths)} files of {plan.bytes} bytes",
            recorded,
            lambda _base, latest: mark.extend(latest),
            {"files": len(plan.paths), "bytes": plan.bytes},
        )
        return mark, change.commit(lake, mark.base)

    def _delete(self, plan: OrphanPlan, mark: Mark, held_lease: Lease) -> tuple[Deletion, int]:
        """Delete the unreached files. Returns the result, and how many files are still needed."""
        storage = self.lake.storage
        doomed = unreached(mark, plan.sizes_bytes)
        done = delete_unreached(storage, doomed, mark, held_lease, self.spending, self.progress)
        still_needed = len(plan.sizes_bytes) - len(doomed) + done.spared
        # deleted last, because without an owner file the owner of the other files is unknown
        if done.is_complete and plan.owners:
            kept_owners = {_folder_owner_file(path, mark) for path in plan.sizes_bytes if path not in doomed}
            owners = unreached(mark, plan.owners)
            owners = {path: size for path, size in owners.items() if path not in kept_owners}
            last = delete_unreached(storage, owners, mark, held_lease, self.spending)
            still_needed += len(plan.owners) - len(owners) + last.spared
            done.add(last)
        return done, still_needed


def plan_orphan_removal(
    lake: Lakehouse,
    older_than: timedelta | int | None = None,
    inventory: str | None = None,
    *,
    budget: Budget | Spending = NO_LIMITS,
    progress: Progress = no_progress,
    executor: Executor = LOCAL,
) -> OrphanPlan:
    """Plan the removal of orphans, without writing.

    This lists the root once, and reads all nodes, definitions and table metadata that kept roots reach.

    Args:
        lake: The lakehouse.
        older_than: The minimum time since the last modification, as a timedelta or in milliseconds. The minimum and
            default is the lakehouse's ``txn_ttl_millis`` plus 5 minutes.
        inventory: The URI of the manifest of an inventory, which replaces the listing of the root, the table root, or
            both.
        budget: The budget. Pass the same Spending to ``execute`` to share the budget.
        progress: Called with the unit that is counted, the number done, and the total.
        executor: Reads files, and deletes them when the plan is executed.

    Raises:
        InvalidInputError: The age is negative, or the inventory does not cover the lakehouse.
        MaintenanceBlockedError: A purge is unfinished, or a reconcile is required.
        BudgetSpentBeforeError: The budget was used up.
        StorageError: A kept file or the inventory cannot be read, or a storage request failed.
    """
    older_than_ms = None if older_than is None else duration_ms(older_than, "older_than")
    return OrphanRemoval(
        lake=lake,
        older_than_ms=older_than_ms,
        inventory=inventory,
        executor=executor,
        spending=Spending.of(budget),
        progress=progress,
    ).plan()


def _check_no_purge(definition: LakehouseDef) -> None:
    """Raise MaintenanceBlockedError if a purge is unfinished, because its files are neither kept nor orphans."""
    for batch in definition.expirations:
        if batch.state == ExpirationState.PURGING:
            raise MaintenanceBlockedError(f"the purge of versions {batch.versions} is unfinished; run purge first")


def _folder_owner_file(location: str, mark: Mark) -> str | None:
    """Return the location of the owner file in the table folder that contains a file, or None for other files."""
    root = mark.table_root.root if mark.table_root is not None and location.startswith(mark.table_root.root) else ""
    table_id = table_id_in(location.removeprefix(root))
    return None if table_id is None else f"{root}{TABLES_PREFIX}{table_id}/{OWNER_NAME}"


def _kind(path: str) -> str:
    if is_uri(path) or table_id_in(path) is not None:
        return "table file"
    if not is_immutable_path(path):
        return "operation"
    return "node" if path.endswith((".arrow", ".ipc")) else "definition"
