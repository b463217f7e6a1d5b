"""Trim tables: drop Iceberg snapshots that no kept version needs (called "expire snapshots" in Iceberg).

The metadata of an Iceberg table lists all its snapshots, so the latest version needs the files of all snapshots, and
expiring versions alone reclaims no data. Trimming deletes nothing, and older versions keep their own metadata files.
Files that only older versions reach are reclaimed when these versions are expired and purged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_random_exponential

from trinitylake_ops.errors import CommitConflictError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg.io.file_io import writing_io
from trinitylake_ops.iceberg.trim import write_without_snapshots
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, Plan, PlannedOperation, base_id_of, digest_of
from trinitylake_ops.operations.definition_commits import MAX_ATTEMPTS
from trinitylake_ops.operations.gc.survey import on_latest
from trinitylake_ops.operations.gc.trim_candidates import RetainedDefinitions, TableTrim, candidates_of, trims_of
from trinitylake_ops.operations.metadata_rewrites import alter_tables, check_tables, discarded_on_failure
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.storage import process_clock
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.roots import check_no_gap
from trinitylake_ops.versions.snapshot import Snapshot

_OPERATION = "trim"
_SHOWN_IDS = 5


@dataclass(frozen=True, kw_only=True)
class TrimPlan(Plan):
    """The snapshots to drop, by table. Only MANAGED Iceberg tables in their own folders are trimmed."""

    base_version: int
    tables: tuple[TableTrim, ...]
    #: Skipped tables whose metadata is missing or corrupt.
    unreadable: tuple[str, ...]
    #: Skipped tables whose Iceberg format version cannot be written.
    unwritable: tuple[str, ...]
    definition_location: str = field(repr=False, compare=False)
    operation: Trim = field(repr=False, compare=False)

    @property
    def snapshots_dropped(self) -> int:
        """The total number of snapshots to drop from all tables."""
        return sum(len(trim.dropped) for trim in self.tables)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over all tables and the snapshots to drop."""
        content = [
            [trim.namespace, trim.table, trim.table_id, trim.metadata_location, list(trim.dropped), *trim.dropped_refs]
            for trim in self.tables
        ]
        return digest_of(self.base_version, self.base_id, _OPERATION, content)

    @property
    def is_empty(self) -> bool:
        """Whether no table would be trimmed."""
        return not self.tables

    def table(self) -> Table:
        """Return one row for each table."""
        rows: list[tuple[object, ...]] = [
            (trim.name, len(trim.dropped), _shown((*trim.dropped_refs, *trim.dropped)), len(trim.kept))
            for trim in self.tables
        ]
        rows += [(name, "metadata unreadable", "", "") for name in self.unreadable]
        rows += [(name, "skipped: its format version cannot be written", "", "") for name in self.unwritable]
        title = (
            f"Trim of version {self.base_version}: {self.snapshots_dropped:,} snapshots of {len(self.tables):,} tables"
        )
        return new_table(title, "table", "dropped", "snapshots dropped", "kept", rows=rows)

    def execute(self, approved_digest: str | None = None) -> TrimReport:
        """Write new metadata files, and point all tables to these files in one commit.

        The plan is made again first, and after a conflict, and at most the snapshots of this plan are dropped. After
        two conflicts, the tables that did not change are committed without the others, and each other table is
        committed by itself. Tables that change too often are left out. Files of a failed attempt are deleted, best
        effort.

        Args:
            approved_digest: The digest of the approved plan, if any.

        Raises:
            PlanChangedError: The new plan is not the approved one.
            CommitConflictError: All tables of the plan change too often.
            TrinityLakeError: Planning or committing failed.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Trim(PlannedOperation[TrimPlan, "TrimReport"]):
    """Trims tables by a policy."""

    telemetry_name = "trim"

    #: The policy; None to use the lakehouse settings.
    policy: RetentionPolicy | None
    #: The tables, as ``namespace.table``; None for all tables.
    only: tuple[str, ...] | None
    #: Whether to skip named tables that cannot be trimmed.
    skips_unsuitable: bool = False
    #: The definitions that kept versions need, if several plans share them.
    retained: RetainedDefinitions | None = None

    def plan(self) -> TrimPlan:
        """Make a plan based on the latest version. Raises the errors of :func:`plan_trim_tables`."""
        return on_latest(self.lake, self._plan_on)

    def _plan_on(self, base: Snapshot) -> TrimPlan:
        check_no_gap(self.lake.files.roots, base.version)
        candidates = candidates_of(self.lake, base, self.only, skips_unsuitable=self.skips_unsuitable)
        retained = self.retained or RetainedDefinitions(self.policy)
        kept = retained.at(self.lake, base) if candidates.tables else frozenset()
        return TrimPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            tables=trims_of(self.lake, candidates.tables, kept),
            unreadable=candidates.unreadable,
            unwritable=candidates.unwritable,
            definition_location=base.definition_location,
            operation=self,
        )

    def run(self, plan: TrimPlan, approved_digest: str | None) -> TrimReport:
        """Make a new plan, and trim at most the snapshots in the original plan."""
        metered = MeteredLakehouse(self.lake)
        here = replace(self, lake=metered.lake)
        first = here.plan()
        if approved_digest is not None:
            first.check_approved(approved_digest)
        return _TrimRun(here, plan, metered).run(first)


@dataclass(frozen=True, kw_only=True)
class TrimReport(Document):
    """The result of a trim."""

    #: The version with the trimmed tables; the latest version if there was nothing to do.
    version: int
    tables: tuple[str, ...]
    #: Planned tables that were left out because concurrent commits dropped, replaced or trimmed them.
    left: tuple[str, ...]
    snapshots_dropped: int
    attempts: int
    cost: Cost

    def table(self) -> Table:
        """Return one row for each table."""
        rows = [*(("trimmed", name) for name in self.tables), *(("skipped", name) for name in self.left)]
        done = f"committed as version {self.version}" if self.tables else f"nothing to do, version {self.version}"
        title = (
            f"Trim, {done}: {self.snapshots_dropped:,} snapshots of {len(self.tables):,} tables;"
            f" {self.cost.total_requests:,} requests, {self.cost.duration_ms / 1000:.1f} s"
        )
        return new_table(title, "", "table", rows=rows)


def plan_trim_tables(
    lake: Lakehouse, policy: RetentionPolicy | None = None, *, tables: Sequence[str] | None = None
) -> TrimPlan:
    """Plan to drop Iceberg snapshots that no kept version needs, without writing.

    A version needs the current snapshot of a table, and the snapshots of its branches and tags.

    Args:
        lake: The lakehouse.
        policy: The policy that decides which versions are kept, in addition to exports; by default, the lakehouse
            settings.
        tables: The tables, as ``namespace.table``; by default, all managed tables.

    Raises:
        TableNotFoundError: A table does not exist.
        InvalidInputError: A named table cannot be trimmed, or the policy is empty.
        MaintenanceBlockedError: A reconcile is required.
        StorageError: A kept file cannot be read, or a storage request failed.
    """
    return Trim(lake=lake, policy=policy, only=None if tables is None else tuple(tables)).plan()


#: The number of attempts that plan all tables again, before tables that change are committed by themselves.
_WHOLE_ATTEMPTS = 2
_PAUSE = wait_random_exponential(multiplier=0.05, max=1.0)


class _TrimRun:
    """One execution of a plan, which may take several commits while other writers change its tables."""

    def __init__(self, operation: Trim, plan: TrimPlan, metered: MeteredLakehouse):
        self._operation = operation
        self._lake = metered.lake
        self._plan = plan
        self._metered = metered
        self._approved = {(trim.namespace, trim.table, trim.table_id): trim for trim in plan.tables}
        self._attempts = 0
        self._version = plan.base_version
        self._done: dict[str, int] = {}
        self._conflict: CommitConflictError | None = None
        #: Whether a table turned out to have nothing left to drop.
        self._has_settled = False

    def run(self, first: TrimPlan) -> TrimReport:
        now = first
        while True:
            trims = [limited for trim in now.tables if (limited := self._within(trim)) is not None]
            self._version = max(self._version, now.base_version)
            if not trims or self._try(now, trims):
                return self._report()
            if self._attempts == _WHOLE_ATTEMPTS:
                break
            now = self._operation.plan()
        self._commit_separately(now, trims)
        if self._conflict is not None and not self._done and not self._has_settled:
            raise self._conflict
        return self._report()

    def _within(self, trim: TableTrim) -> TableTrim | None:
        """Return a trim with only what the plan drops, too; None if nothing is left."""
        approved = self._approved.get((trim.namespace, trim.table, trim.table_id))
        if approved is None:
            return None
        dropped = tuple(snapshot_id for snapshot_id in trim.dropped if snapshot_id in set(approved.dropped))
        refs = tuple(name for name in trim.dropped_refs if name in approved.dropped_refs)
        return replace(trim, dropped=dropped, dropped_refs=refs) if dropped or refs else None

    def _try(self, now: TrimPlan, trims: Sequence[TableTrim]) -> bool:
        """Commit, and return whether that did not conflict with another commit."""
        self._attempts += 1
        try:
            self._version = _commit(self._lake, now, trims)
        except CommitConflictError as conflict:
            self._conflict = conflict
            return False
        self._done |= {trim.name: len(trim.dropped) for trim in trims}
        return True

    def _commit_separately(self, now: TrimPlan, trims: Sequence[TableTrim]) -> None:
        """Commit the tables that do not change, and then each table that does."""
        base = self._lake.snapshot()
        unchanged = [trim for trim in trims if self._entry(base, trim) == trim.definition_location]
        for _ in range(MAX_ATTEMPTS - _WHOLE_ATTEMPTS):
            if not unchanged or self._try(now, unchanged):
                break
            base = self._lake.snapshot()
            unchanged = [trim for trim in unchanged if self._entry(base, trim) == trim.definition_location]
        for trim in trims:
            if trim.name not in self._done:
                self._commit_alone(now, trim)

    def _commit_alone(self, now: TrimPlan, trim: TableTrim) -> None:
        """Commit one table. Its metadata is read right before each attempt, so that an attempt takes little time."""

        def attempt() -> bool:
            current = self._current(trim)
            self._has_settled |= current is None
            return current is None or self._try(now, [current])

        repeat_attempts = Retrying(
            stop=stop_after_attempt(MAX_ATTEMPTS - _WHOLE_ATTEMPTS),
            wait=_PAUSE,
            sleep=process_clock.sleep,
            retry=retry_if_result(lambda is_settled: not is_settled),
            retry_error_callback=lambda _: None,
        )
        repeat_attempts(attempt)

    def _current(self, trim: TableTrim) -> TableTrim | None:
        """Return the trim of the latest metadata of a table; None if it has nothing left to drop.

        Versions since the plan have their own metadata, so what they need is not read again.
        """
        base = self._lake.snapshot()
        location = self._entry(base, trim)
        if location == trim.definition_location:
            return trim
        if location is None:
            return None
        candidates = candidates_of(self._lake, base, [trim.name], skips_unsuitable=True).tables
        if not candidates or candidates[0].table_id != trim.table_id:
            return None
        listed = candidates[0].snapshots
        dropped = tuple(snapshot_id for snapshot_id in trim.dropped if snapshot_id in listed.others)
        refs = tuple(name for name in trim.dropped_refs if name in listed.expired_refs)
        fresh = replace(trim, dropped=dropped, dropped_refs=refs, definition_location=location)
        return fresh if dropped or refs else None

    @staticmethod
    def _entry(base: Snapshot, trim: TableTrim) -> str | None:
        return base.entry(base.keys.table_key(trim.namespace, trim.table))

    def _report(self) -> TrimReport:
        done = {trim.name: self._done[trim.name] for trim in self._plan.tables if trim.name in self._done}
        return TrimReport(
            version=self._version,
            tables=tuple(done),
            left=tuple(trim.name for trim in self._plan.tables if trim.name not in done),
            snapshots_dropped=sum(done.values()),
            attempts=self._attempts,
            cost=self._metered.cost(),
        )


def _commit(lake: Lakehouse, plan: TrimPlan, trims: Sequence[TableTrim]) -> int:
    """Write the new metadata files, and commit. Raises CommitConflictError if the plan is out of date."""
    message = f"{sum(len(trim.dropped) for trim in trims)} snapshots of {len(trims)} tables"
    io = writing_io(lake)
    with (
        discarded_on_failure(io) as written,
        lake.transaction(message=message, operation=_OPERATION) as txn,
    ):
        base = txn.base
        txn.require(lambda latest: _check_settings(latest, plan))
        check_tables(txn, trims, _OPERATION, remedy="; make a new plan")

        def write(trim: TableTrim) -> TableDef:
            definition = base.table_at(trim.definition_location)
            return write_without_snapshots(definition, io, trim.dropped, written.append, trim.dropped_refs)

        alter_tables(txn, lake.storage, trims, write)
    assert txn.committed_version is not None
    return txn.committed_version


def _check_settings(base: Snapshot, plan: TrimPlan) -> None:
    """Raise CommitConflictError if the settings changed, because exports and expirations decide what is kept."""
    if base.definition_location != plan.definition_location:
        raise CommitConflictError(
            f"version {base.version} changed settings that the trim depends on; make a new plan",
            conflicts=("settings of the lakehouse: changed since the plan",),
            base_version=plan.base_version,
            latest_version=base.version,
        )


def _shown(ids: Sequence[int | str]) -> str:
    text = ", ".join(map(str, ids[:_SHOWN_IDS]))
    return f"{text} and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else text
