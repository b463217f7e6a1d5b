"""Remove orphans: files of failed commits, aborted writes and interrupted operations.

An orphan is a file with a name that we give, that no kept root reaches. It is older than any transaction that could
still name it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Self

from trinitylake_ops.errors import MaintenanceBlockedError
from trinitylake_ops.format.checksums import CompactUuidSet
from trinitylake_ops.format.definitions import ExpirationState, LakehouseDef
from trinitylake_ops.format.file_names import (
    OWNER_NAME,
    TABLES_PREFIX,
    is_immutable_path,
    is_operation_path,
    is_verified_path,
    lease_path,
    parse_lease_path,
)
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.operations.base import TimedPlan, base_id_of, timed_digest
from trinitylake_ops.operations.budget import NO_LIMITS, Budget, Spending
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.gc.delete import DeletingOperation, Deletion, DeletionReport
from trinitylake_ops.operations.gc.inventory import list_by_inventory, read_inventory
from trinitylake_ops.operations.gc.listing import list_without
from trinitylake_ops.operations.gc.mark import Mark, is_deletable, owned_tables
from trinitylake_ops.operations.gc.survey import Progress, no_progress, on_latest, survey_versions
from trinitylake_ops.operations.gc.table_files import is_below_tables, table_id_in
from trinitylake_ops.operations.gc.unreached import damaged_tables, delete_unreached, left_table_root, unreached
from trinitylake_ops.operations.lease import Lease, lease
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.operations.retention import barred_before_ms, duration_ms, protected_ms
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.time_to_live import raise_barrier, recorded_barrier_ms
from trinitylake_ops.versions.snapshot import Snapshot, utc_of


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """Orphans with their sizes in bytes, apart from owner files, which are deleted last.

    Also files without a known owner. Files are given by paths, those under the table root by URIs.
    """

    sizes_bytes: Mapping[str, int]
    owners: Mapping[str, int]
    unowned_files: int
    unowned_bytes: int

    @classmethod
    def of_all(cls, *found: Self) -> Self:
        """Return all of several."""
        return cls(
            sizes_bytes=dict(sorted(item for one in found for item in one.sizes_bytes.items())),
            owners=dict(sorted(item for one in found for item in one.owners.items())),
            unowned_files=sum(one.unowned_files for one in found),
            unowned_bytes=sum(one.unowned_bytes for one in found),
        )


def find_orphans(lake: Lakehouse, mark: Mark, listed: Iterable[FileInfo], modified_before_ms: int) -> Orphans:
    """Find the orphans among listed files by a mark, which is extended to files of tables where needed.

    Raises what marking raises.
    """
    found = _Listing.of(listed, modified_before_ms)
    old = {path: info for path, info in found.old.items() if path not in mark}
    table_ids = {table_id for path in old if (table_id := table_id_in(path)) is not None}
    owned: set[str] = set()
    if table_ids:
        mark.add_tables()
        owned = owned_tables(lake.storage, table_ids, mark.base.definition.id, mark.tables.managed_ids)
    orphans = {
        path: info.size_bytes
        for path, info in sorted(old.items())
        if path not in mark and _is_lakehouse_file(path, owned)
    }
    owners = _unused_owner_files(orphans, found, mark.tables.managed_ids)
    unowned = [info for path, info in old.items() if (table_id := table_id_in(path)) and table_id not in owned]
    going = {path: size for path, size in orphans.items() if path in owners or not _is_owner_path(path)}
    return Orphans(
        sizes_bytes={path: size for path, size in going.items() if path not in owners},
        owners={path: size for path, size in going.items() if path in owners},
        unowned_files=len(unowned),
        unowned_bytes=sum(info.size_bytes for info in unowned),
    )


def find_table_root_orphans(mark: Mark, now_ms: int, age_ms: int, listed: Iterable[FileInfo] | None = None) -> Orphans:
    """Find the orphans under the table root, in folders whose owner files name the lakehouse, of an age at ``now_ms``.

    Files of others, and of a table root that is not freed from here, are left alone and not counted. Age is told by the
    clock of its storage where that is behind. Lists all tables there, unless ``listed`` are the files to look at.
    Raises what marking raises.
    """
    table_root = mark.table_root
    if table_root is None or table_root.refusal:
        return Orphans(sizes_bytes={}, owners={}, unowned_files=0, unowned_bytes=0)
    before_ms = min(now_ms, table_root.storage.now_ms()) - age_ms
    found = _Listing.of(table_root.storage.list(TABLES_PREFIX) if listed is None else listed, before_ms)
    old = {path: info for path, info in found.old.items() if table_id_in(path) is not None}
    if old:
        mark.add_tables()
    reached = mark.tables.there
    old = {path: info for path, info in old.items() if path not in reached}
    table_ids = {table_id for path in old if (table_id := table_id_in(path)) is not None}
    owned = owned_tables(table_root.storage, table_ids, table_root.lakehouse_id)
    orphans = {path: info.size_bytes for path, info in sorted(old.items()) if table_id_in(path) in owned}
    owners = _unused_owner_files(orphans, found, reached.managed_ids)
    root = table_root.root
    return Orphans(
        sizes_bytes={f"{root}{path}": size for path, size in orphans.items() if not _is_owner_path(path)},
        owners={f"{root}{path}": orphans[path] for path in sorted(owners)},
        unowned_files=0,
        unowned_bytes=0,
    )


@dataclass(frozen=True)
class _Listing:
    """The listed files under the root: old files that may be ours, and the number in each table's folder."""

    old: dict[str, FileInfo]
    n_table_files: Counter[str]

    @classmethod
    def of(cls, listed: Iterable[FileInfo], modified_before_ms: int) -> Self:
        old: dict[str, FileInfo] = {}
        newest_lease = 0
        newest_record = (0, "")
        n_table_files: Counter[str] = Counter()
        for info in listed:
            table_id = table_id_in(info.path)
            if table_id is not None:
                n_table_files[table_id] += 1
            newest_lease = max(newest_lease, parse_lease_path(info.path) or 0)
            if is_verified_path(info.path):
                newest_record = max(newest_record, (info.last_modified_ms, info.path))
            if info.last_modified_ms < modified_before_ms:
                old[info.path] = info
        old.pop(lease_path(newest_lease), None)  # its number must not be given again
        old.pop(newest_record[1], None)  # the others are superseded
        return cls(old, n_table_files)


def _is_lakehouse_file(path: str, tables: set[str]) -> bool:
    is_operational = is_operation_path(path) or parse_lease_path(path) is not None
    return is_operational or is_deletable(path, tables)


def _is_owner_path(path: str) -> bool:
    table_id = table_id_in(path)
    return table_id is not None and path == f"{TABLES_PREFIX}{table_id}/{OWNER_NAME}"


def _unused_owner_files(orphans: Iterable[str], found: _Listing, managed_ids: CompactUuidSet) -> set[str]:
    """Return the owner files of tables that no kept version defines, if all other files are deleted, too."""
    going = Counter(table_id for path in orphans if (table_id := table_id_in(path)) is not None)
    return {
        path
        for path in orphans
        if _is_owner_path(path)
        and not managed_ids.has_like(table_id := table_id_in(path) or "")
        and going[table_id] == found.n_table_files[table_id]
    }


_OPERATION = "orphans"
_LISTED = 1000


@dataclass(frozen=True, kw_only=True)
class OrphanReport(DeletionReport):
    """The deleted orphans. ``version`` recorded the beginning, None if there were none."""

    def table(self) -> Table:
        """Return a row with the figures, and one for each failure."""
        title = "No orphans" if self.version is None else f"Orphans removed, recorded in version {self.version}"
        if not self.is_complete:
            title = f"Not all orphans removed, run it again: {self.stopped or f'{len(self.failures)} not deleted'}"
        title += damaged_tables(self.damaged)
        rows: list[Sequence[object]] = [(self.files, self.bytes, self.still_needed, "")] if self.version else []
        columns = ("files", "bytes", "still needed", "failures")
        return new_table(title, *columns, rows=[*rows, *self.failure_rows(len(columns))])


@dataclass(frozen=True, kw_only=True)
class OrphanPlan(TimedPlan):
    """The orphans at a version and time: how many by kind, and their bytes.

    ``unowned`` are files under ``tables/`` that no version defines and no owner file claims for this lakehouse. They
    are left alone. Files under the table root are given by URIs; ``left_table_root`` says why none there is deleted,
    empty if they may be. All files in the folders of ``damaged`` tables stay. With an ``inventory``, the URI of its
    manifest, files after its begin were not looked at. That was at ``inventory_created_at_ms``. A root of which it has
    no file was listed.
    """

    base_version: int
    now_ms: int
    older_than_ms: int
    files: Mapping[str, int]
    bytes: int
    unowned_files: int
    unowned_bytes: int
    inventory: str | None
    inventory_created_at_ms: int | None
    sizes_bytes: Mapping[str, int] = field(repr=False, compare=False)
    owners: Mapping[str, int] = field(repr=False, compare=False)
    left_table_root: str = field(compare=False)
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
        """The paths of all orphans, ascending."""
        return sorted(self._all())

    def table(self) -> Table:
        """Return one row for each of the first orphans."""
        unowned = (
            f"; {self.unowned_files} files under tables/ are of nobody we know and stay" if self.unowned_files else ""
        )
        more = f", the first {_LISTED}" if len(self.paths) > _LISTED else ""
        known = self.inventory_created_at_ms
        by = "" if known is None else f", of what the inventory of {utc_of(known):%Y-%m-%d %H:%M} UTC has"
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
        """Commit that orphans are removed, then delete those that nothing reaches by then.

        The commit takes the next version. A transaction that has been stalled since before the mark meets it, and then
        its time to live. Raises PlanChangedError when the plan is not the approved one, StorageError. Raises
        MaintenanceBlockedError while another operation has the lease, a purge is unfinished, or before a reconcile.
        Raises BudgetSpentBeforeError if the budget was used up before anything could be deleted. Files that cannot be
        deleted are in the report.
        """
        operation = replace(self.operation, spending=Spending.of(budget), progress=progress)
        return operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class OrphanRemoval(DeletingOperation[OrphanPlan, OrphanReport]):
    """The removal of orphans of an age, None for the least, found by a listing or an ``inventory``."""

    telemetry_name = "orphan-removal"

    older_than_ms: int | None
    inventory: str | None

    def plan_at(self, base: Snapshot, now_ms: int) -> OrphanPlan:
        """Return the plan with the same age for a version and time."""
        _check_no_purge(base.definition)
        known = (
            None if self.inventory is None else read_inventory(self.lake, self.inventory, base.definition.table_root)
        )
        age_ms = max(self.older_than_ms or 0, protected_ms(base.definition))
        survey = survey_versions(self.lake, base, self.progress, executor=self.executor)
        mark = Mark(survey, progress=self.progress)
        own = there = None
        if known is not None:
            own, there = list_by_inventory(self.lake, self.executor, known, mark, self.progress)
        if own is None:
            own = list_without(self.lake.storage, self.executor, mark.catalog.paths)
        found = Orphans.of_all(
            find_orphans(self.lake, mark, own, now_ms - age_ms), find_table_root_orphans(mark, now_ms, age_ms, there)
        )
        sizes_bytes = {**found.sizes_bytes, **found.owners}
        return OrphanPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            now_ms=now_ms,
            older_than_ms=age_ms,
            files=dict(sorted(Counter(map(_kind, sizes_bytes)).items())),
            bytes=sum(sizes_bytes.values()),
            unowned_files=found.unowned_files,
            unowned_bytes=found.unowned_bytes,
            inventory=None if known is None else known.location,
            inventory_created_at_ms=None if known is None else known.created_at_ms,
            sizes_bytes=found.sizes_bytes,
            owners=found.owners,
            left_table_root=left_table_root(mark),
            damaged=dict(sorted(mark.tables.damaged.items())),
            operation=self if known is None else replace(self, inventory=known.location),
        )

    def run(self, plan: OrphanPlan, approved_digest: str | None) -> OrphanReport:
        """Commit that orphans are removed, and delete those that nothing reaches by then, under the lease."""
        here, metered, approved = self.prepared(plan, approved_digest)
        if approved.is_empty:
            damaged = approved.damaged
            return OrphanReport.of(Deletion(), version=None, still_needed=0, cost=metered.cost(), damaged=damaged)
        with lease(metered.lake.storage, _OPERATION) as held:
            mark, version = here._begin(approved)
            done, still_needed = here._delete(approved, mark, held)
        damaged = dict(sorted(mark.tables.damaged.items()))
        return OrphanReport.of(done, version=version, still_needed=still_needed, cost=metered.cost(), damaged=damaged)

    def _begin(self, plan: OrphanPlan) -> tuple[Mark, int]:
        """Mark everything, bar older transactions, and record the removal. Returns the mark and the version."""
        lake = self.lake
        has_tables = any(is_uri(path) or is_below_tables(path) for path in plan.paths)
        with self.spending.planning(self.progress) as progress:

            def marked(base: Snapshot) -> Mark:
                survey = survey_versions(lake, base, progress, executor=self.executor)
                return Mark(survey, with_tables=has_tables, progress=progress)

            mark = on_latest(lake, marked)

        # Files of older transactions may be deleted now, whatever their time to live is when they commit.
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

    def _delete(self, plan: OrphanPlan, mark: Mark, held: Lease) -> tuple[Deletion, int]:
        """Delete the files that nothing reaches. Returns the result, and how many files are still needed."""
        storage = self.lake.storage
        doomed = unreached(mark, plan.sizes_bytes)
        done = delete_unreached(storage, doomed, mark, held, self.spending, self.progress)
        still_needed = len(plan.sizes_bytes) - len(doomed) + done.spared
        # deleted last: without it, the owner of the other files is unknown
        if done.is_complete and plan.owners:
            inhabited = {_folder_owner_file(path, mark) for path in plan.sizes_bytes if path not in doomed}
            owners = unreached(mark, plan.owners)
            owners = {path: size for path, size in owners.items() if path not in inhabited}
            last = delete_unreached(storage, owners, mark, held, self.spending)
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
    """Find the orphans that were last modified more than ``older_than`` (milliseconds or a timedelta) ago. Only reads.

    The age is never less than the lakehouse's ``txn_ttl_millis`` and 5 minutes, which is also the default. Lists the
    root once and reads all nodes, definitions and tables that kept roots reach, by an executor. An ``inventory``, given
    by its manifest's URI, replaces the listing of the root, of the table root, or of both. ``budget`` is that of the
    whole run if the plan where the plan is executed with the same Spending. Raises InvalidInputError for a negative age
    and for an inventory of something else. Raises MaintenanceBlockedError for an unfinished purge or before a
    reconcile, BudgetSpentBeforeError, and the errors of an inventory and of marking.
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
    """Raise MaintenanceBlockedError while a purge is unfinished: its files are neither kept nor orphans."""
    for batch in definition.expirations:
        if batch.state == ExpirationState.PURGING:
            raise MaintenanceBlockedError(f"the purge of versions {batch.versions} is unfinished; run it first: purge")


def _folder_owner_file(location: str, mark: Mark) -> str | None:
    """Return the location of the owner file of the table in whose folder a file is, None where it is in none."""
    root = mark.table_root.root if mark.table_root is not None and location.startswith(mark.table_root.root) else ""
    table_id = table_id_in(location.removeprefix(root))
    return None if table_id is None else f"{root}{TABLES_PREFIX}{table_id}/{OWNER_NAME}"


def _kind(path: str) -> str:
    if is_uri(path) or table_id_in(path) is not None:
        return "table file"
    if not is_immutable_path(path):
        return "operation"
    return "node" if path.endswith((".arrow", ".ipc")) else "definition"
