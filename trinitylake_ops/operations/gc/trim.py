"""Trim tables: drop Iceberg snapshots that no kept version needs (called "expire snapshots" in Iceberg).

The metadata of an Iceberg table lists all its snapshots, so the latest version needs the files of all snapshots, and
expiring versions alone reclaims no data. Trimming deletes nothing, and older versions keep their own metadata files.
Files that only older versions reach are reclaimed when these versions are expired and purged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExpirationState, TableDef
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.iceberg.io.file_io import reading_io, writing_io
from trinitylake_ops.iceberg.managed import LATEST_WRITTEN_VERSION
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.iceberg.trim import (
    ListedSnapshots,
    is_trimmable,
    listed_snapshots,
    referred_snapshots,
    write_without_snapshots,
)
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, Plan, PlannedOperation, base_id_of, digest_of
from trinitylake_ops.operations.definition_commits import commit_on_latest
from trinitylake_ops.operations.gc.mark import CatalogReach, retained_roots
from trinitylake_ops.operations.gc.survey import on_latest, survey_versions
from trinitylake_ops.operations.gc.tables import in_batches, tables_of, with_definitions
from trinitylake_ops.operations.metadata_rewrites import alter_tables, check_tables, discarded_on_failure
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.roots import check_no_gap
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTrim:
    """The planned trim of one table, with the ids of its Iceberg snapshots, oldest first."""

    namespace: str
    table: str
    table_id: str
    metadata_location: str
    dropped: tuple[int, ...]
    kept: tuple[int, ...]
    definition_location: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A managed table whose metadata lists snapshots that are neither current nor referenced by a branch or tag."""

    name: ObjectName
    definition_location: str
    table_id: str
    metadata_location: str
    snapshots: ListedSnapshots


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates, and the names of managed tables that cannot be trimmed."""

    tables: tuple[Candidate, ...]
    #: Tables whose metadata is missing or corrupt.
    unreadable: tuple[str, ...]
    #: Tables whose Iceberg format version cannot be written.
    unwritable: tuple[str, ...]


def candidates_of(lake: Lakehouse, base: Snapshot, only: Sequence[str] | None) -> Candidates:
    """Return the candidates of a version.

    Args:
        lake: The lakehouse.
        base: The version.
        only: The tables, as ``namespace.table``; by default, all tables.

    Raises:
        TableNotFoundError: A table does not exist.
        InvalidInputError: A named table cannot be trimmed.
        StorageError: A storage request failed.
    """
    io = reading_io(lake)

    def listed(definition: TableDef) -> ListedSnapshots | None:
        try:
            return listed_snapshots(definition, io)
        except DAMAGE:
            return None

    candidates: list[Candidate] = []
    unreadable: list[str] = []
    unwritable: list[str] = []
    rejected: list[str] = []
    for entries in with_definitions(base, tables_of(base, only)):
        rejected += [str(name) for name, _, definition in entries if not is_trimmable(definition, io)]
        trimmable = [entry for entry in entries if is_trimmable(entry[2], io)]
        listings = run_parallel(
            in_one_round_trip(listed), [definition for _, _, definition in trimmable], lake.storage.concurrency
        )
        for (name, location, definition), snapshots in zip(trimmable, listings, strict=True):
            if snapshots is None:
                unreadable.append(str(name))
            elif not snapshots.is_in_place:
                rejected.append(str(name))
            elif not snapshots.is_writable:
                unwritable.append(str(name))
            elif snapshots.others:
                metadata_location = definition.format_properties[METADATA_LOCATION]
                candidates.append(Candidate(name, location, definition.id, metadata_location, snapshots))
    if only is not None and rejected:
        raise InvalidInputError(
            f"table {rejected[0]} cannot be trimmed: only MANAGED Iceberg tables in their own folders can"
        )
    if only is not None and unwritable:
        raise InvalidInputError(
            f"table {unwritable[0]} cannot be trimmed: its Iceberg format version is newer than"
            f" {LATEST_WRITTEN_VERSION}, the newest that can be written; expire its snapshots with another engine"
        )
    return Candidates(tuple(candidates), tuple(unreadable), tuple(unwritable))


def trims_of(
    lake: Lakehouse, candidates: Sequence[Candidate], kept_definitions: Collection[str]
) -> tuple[TableTrim, ...]:
    """Return the snapshots that each table may drop.

    Args:
        lake: The lakehouse.
        candidates: The candidates.
        kept_definitions: The locations of the table definitions that kept versions need.
    """
    needed = _needed_snapshots(lake, candidates, kept_definitions)
    trims = []
    for candidate in candidates:
        ids, kept = candidate.snapshots.ids, candidate.snapshots.referred | needed[candidate.table_id]
        dropped = tuple(snapshot_id for snapshot_id in ids if snapshot_id not in kept)
        if dropped:
            trims.append(
                TableTrim(
                    namespace=candidate.name.namespace,
                    table=candidate.name.table or "",
                    table_id=candidate.table_id,
                    metadata_location=candidate.metadata_location,
                    dropped=dropped,
                    kept=tuple(snapshot_id for snapshot_id in ids if snapshot_id in kept),
                    definition_location=candidate.definition_location,
                )
            )
    return tuple(trims)


def _needed_snapshots(
    lake: Lakehouse, candidates: Sequence[Candidate], kept_definitions: Collection[str]
) -> dict[str, set[int]]:
    """Return, by table id, the snapshots of candidates that other definitions of the same table refer to."""
    needed: dict[str, set[int]] = {candidate.table_id: set() for candidate in candidates}
    undecided: dict[str, set[int]] = {table_id: set() for table_id in needed}
    for candidate in candidates:
        undecided[candidate.table_id] |= candidate.snapshots.others
    seen_locations = {candidate.metadata_location for candidate in candidates}
    current = {candidate.definition_location for candidate in candidates}
    io = reading_io(lake)

    def referred(definition: TableDef) -> Collection[int]:
        try:
            return referred_snapshots(definition, io)
        except DAMAGE:  # the snapshots that this version needs are unknown
            return undecided[definition.id].copy()

    # Two tables can have the same id. A snapshot that one of the tables needs is kept in both.
    for candidate in candidates:
        needed[candidate.table_id] |= candidate.snapshots.referred
    for batch in in_batches([location for location in kept_definitions if location not in current]):
        fresh: dict[str, TableDef] = {}
        for definition in lake.files.definitions.tables(batch):
            metadata_location = definition.format_properties.get(METADATA_LOCATION, "")
            if (
                undecided.get(definition.id)
                and is_trimmable(definition, io)
                and metadata_location not in seen_locations
            ):
                fresh[metadata_location] = definition
        seen_locations.update(fresh)
        references = run_parallel(in_one_round_trip(referred), list(fresh.values()), lake.storage.concurrency)
        for definition, ids in zip(fresh.values(), references, strict=True):
            needed[definition.id] |= undecided[definition.id].intersection(ids)
            undecided[definition.id].difference_update(ids)
    return needed


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
            [trim.namespace, trim.table, trim.table_id, trim.metadata_location, list(trim.dropped)]
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
            (f"{trim.namespace}.{trim.table}", len(trim.dropped), _shown(trim.dropped), len(trim.kept))
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

        A new plan is made first and after each conflict, and at most the snapshots in this plan are dropped. Files of a
        failed attempt are deleted on a best-effort basis.

        Args:
            approved_digest: The digest of the approved plan, if any.

        Raises:
            PlanChangedError: The new plan is not the approved one.
            CommitConflictError: All attempts conflicted with other commits.
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

    def plan(self) -> TrimPlan:
        """Make a plan based on the latest version. Raises the errors of :func:`plan_trim_tables`."""
        return on_latest(self.lake, self._plan_on)

    def _plan_on(self, base: Snapshot) -> TrimPlan:
        check_no_gap(self.lake.files.roots, base.version)
        candidates = candidates_of(self.lake, base, self.only)
        kept = _retained_definitions(self.lake, base, self.policy) if candidates.tables else frozenset()
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
        operation = replace(self, lake=metered.lake)
        approved = {(trim.namespace, trim.table, trim.table_id): frozenset(trim.dropped) for trim in plan.tables}
        first = operation.plan()
        if approved_digest is not None:
            first.check_approved(approved_digest)

        def attempt(number: int) -> TrimReport:
            now = first if number == 1 else operation.plan()
            trims = _within(now.tables, approved)
            version = _commit(metered.lake, now, trims) if trims else now.base_version
            return _report(plan, trims, version, number, metered.cost())

        return commit_on_latest(attempt)


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


def _retained_definitions(lake: Lakehouse, base: Snapshot, policy: RetentionPolicy | None) -> frozenset[str]:
    """Return the locations of all table definitions that kept versions and exports reach."""
    survey = survey_versions(lake, base)
    survey.check_reconciled()
    verdicts = survey.verdicts(policy or RetentionPolicy.of(base.definition), lake.storage.now_ms())
    leaving = [verdict.version for verdict in verdicts if verdict.expires]
    # Versions that can be undeleted have their own metadata, and need nothing from the latest version.
    kept = retained_roots(survey, without=[*leaving, *survey.expired(ExpirationState.EXPIRED)])
    reach = CatalogReach(lake.files)
    reach.add(kept.roots)
    return frozenset(reach.tables)


def _within(
    trims: Sequence[TableTrim], approved: Mapping[tuple[str, str, str], frozenset[int]]
) -> list[tuple[TableTrim, frozenset[int]]]:
    """Return the tables with approved snapshots to drop."""
    approved_trims = []
    for trim in trims:
        dropped = approved.get((trim.namespace, trim.table, trim.table_id), frozenset()).intersection(trim.dropped)
        if dropped:
            approved_trims.append((trim, dropped))
    return approved_trims


def _commit(lake: Lakehouse, plan: TrimPlan, trims: Sequence[tuple[TableTrim, frozenset[int]]]) -> int:
    """Write the new metadata files, and commit. Raises CommitConflictError if the plan is out of date."""
    message = f"{sum(len(dropped) for _, dropped in trims)} snapshots of {len(trims)} tables"
    tables = [trim for trim, _ in trims]
    dropped_of = {(trim.namespace, trim.table): dropped for trim, dropped in trims}
    io = writing_io(lake)
    with (
        discarded_on_failure(io) as written,
        lake.transaction(message=message, operation=_OPERATION) as txn,
    ):
        base = txn.base
        txn.require(lambda latest: _check_settings(latest, plan))
        check_tables(txn, tables, _OPERATION, remedy="; make a new plan")

        def write(trim: TableTrim) -> TableDef:
            dropped = dropped_of[trim.namespace, trim.table]
            return write_without_snapshots(base.table_at(trim.definition_location), io, dropped, written.append)

        alter_tables(txn, lake.storage, tables, write)
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


def _report(
    plan: TrimPlan, trims: Sequence[tuple[TableTrim, frozenset[int]]], version: int, attempts: int, cost: Cost
) -> TrimReport:
    done = {f"{trim.namespace}.{trim.table}": len(dropped) for trim, dropped in trims}
    planned = [f"{trim.namespace}.{trim.table}" for trim in plan.tables]
    return TrimReport(
        version=version,
        tables=tuple(done),
        left=tuple(name for name in planned if name not in done),
        snapshots_dropped=sum(done.values()),
        attempts=attempts,
        cost=cost,
    )


def _shown(ids: Sequence[int]) -> str:
    text = ", ".join(map(str, ids[:_SHOWN_IDS]))
    return f"{text} and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else text
