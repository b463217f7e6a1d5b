"""Trim tables: remove Iceberg snapshots that no kept version needs ("expire snapshots").

An Iceberg table's metadata keeps all its snapshots, and so all their files. Expiring versions alone therefore frees no
data. Trimming deletes nothing: each kept version has its own metadata file, which stays as it is. Files that only older
versions then reach are freed when those are expired and purged.
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
from trinitylake_ops.operations.gc.tables import defined, in_batches, tables_of
from trinitylake_ops.operations.metadata_rewrites import alter_tables, check_tables, discarded_on_failure
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.roots import check_no_gap
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTrim:
    """The plan for one table: ids of Iceberg snapshots, oldest first."""

    namespace: str
    table: str
    table_id: str
    metadata_location: str
    dropped: tuple[int, ...]
    kept: tuple[int, ...]
    definition_location: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A managed table of the base whose metadata lists snapshots that it does not refer to."""

    name: ObjectName
    definition_location: str
    table_id: str
    metadata_location: str
    snapshots: ListedSnapshots


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates, and the names of other managed tables.

    The metadata of ``unreadable`` tables is missing or corrupt. That of ``unwritable`` ones has a later format version
    than can be written.
    """

    tables: tuple[Candidate, ...]
    unreadable: tuple[str, ...]
    unwritable: tuple[str, ...]


def candidates_of(lake: Lakehouse, base: Snapshot, only: Sequence[str] | None) -> Candidates:
    """Return the candidates of a version.

    ``only`` names tables as ``namespace.table``. Raises TableNotFoundError, InvalidInputError for a named
    table that cannot be trimmed, StorageError.
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
    refused: list[str] = []
    for entries in defined(base, tables_of(base, only)):
        refused += [str(name) for name, _, definition in entries if not is_trimmable(definition, io)]
        ours = [entry for entry in entries if is_trimmable(entry[2], io)]
        found = run_parallel(
            in_one_round_trip(listed), [definition for _, _, definition in ours], lake.storage.concurrency
        )
        for (name, location, definition), snapshots in zip(ours, found, strict=True):
            if snapshots is None:
                unreadable.append(str(name))
            elif not snapshots.is_in_place:
                refused.append(str(name))
            elif not snapshots.is_writable:
                unwritable.append(str(name))
            elif snapshots.others:
                metadata_location = definition.format_properties[METADATA_LOCATION]
                candidates.append(Candidate(name, location, definition.id, metadata_location, snapshots))
    if only is not None and refused:
        raise InvalidInputError(
            f"table {refused[0]} cannot be trimmed: only MANAGED Iceberg tables in their own place can"
        )
    if only is not None and unwritable:
        raise InvalidInputError(
            f"table {unwritable[0]} cannot be trimmed: its Iceberg format version is later than"
            f" {LATEST_WRITTEN_VERSION}, the latest that can be written; let another engine expire its snapshots"
        )
    return Candidates(tuple(candidates), tuple(unreadable), tuple(unwritable))


def trims_of(
    lake: Lakehouse, candidates: Sequence[Candidate], kept_definitions: Collection[str]
) -> tuple[TableTrim, ...]:
    """Return what each table may lose while the tables of kept definitions, given by their locations, need the rest."""
    needed = _needed(lake, candidates, kept_definitions)
    trims = []
    for candidate in candidates:
        ids, own = candidate.snapshots.ids, candidate.snapshots.referred | needed[candidate.table_id]
        dropped = tuple(snapshot_id for snapshot_id in ids if snapshot_id not in own)
        if dropped:
            trims.append(
                TableTrim(
                    namespace=candidate.name.namespace,
                    table=candidate.name.table or "",
                    table_id=candidate.table_id,
                    metadata_location=candidate.metadata_location,
                    dropped=dropped,
                    kept=tuple(snapshot_id for snapshot_id in ids if snapshot_id in own),
                    definition_location=candidate.definition_location,
                )
            )
    return tuple(trims)


def _needed(lake: Lakehouse, candidates: Sequence[Candidate], kept_definitions: Collection[str]) -> dict[str, set[int]]:
    """Return, by table id, which of the candidates' snapshots other definitions of the same table refer to."""
    needed: dict[str, set[int]] = {candidate.table_id: set() for candidate in candidates}
    undecided: dict[str, set[int]] = {table_id: set() for table_id in needed}
    for candidate in candidates:
        undecided[candidate.table_id] |= candidate.snapshots.others
    seen = {candidate.metadata_location for candidate in candidates}
    own = {candidate.definition_location for candidate in candidates}
    io = reading_io(lake)

    def referred(definition: TableDef) -> Collection[int]:
        try:
            return referred_snapshots(definition, io)
        except DAMAGE:  # what this version needs is unknown
            return undecided[definition.id].copy()

    # Two tables may have one id: a snapshot that one of them needs stays in both.
    for candidate in candidates:
        needed[candidate.table_id] |= candidate.snapshots.referred
    for batch in in_batches([location for location in kept_definitions if location not in own]):
        fresh: dict[str, TableDef] = {}
        for definition in lake.files.definitions.tables(batch):
            metadata_location = definition.format_properties.get(METADATA_LOCATION, "")
            if undecided.get(definition.id) and is_trimmable(definition, io) and metadata_location not in seen:
                fresh[metadata_location] = definition
        seen.update(fresh)
        found = run_parallel(in_one_round_trip(referred), list(fresh.values()), lake.storage.concurrency)
        for definition, ids in zip(fresh.values(), found, strict=True):
            needed[definition.id] |= undecided[definition.id].intersection(ids)
            undecided[definition.id].difference_update(ids)
    return needed


_OPERATION = "trim"
_SHOWN_IDS = 5


@dataclass(frozen=True, kw_only=True)
class TrimPlan(Plan):
    """The tables whose metadata lists snapshots that no kept version needs.

    ``unreadable`` names managed tables whose current metadata file is missing or corrupt. ``unwritable`` names those of
    a later Iceberg format version than can be written. They are left as they are, and so are tables that are not
    MANAGED Iceberg tables in their own place.
    """

    base_version: int
    tables: tuple[TableTrim, ...]
    unreadable: tuple[str, ...]
    unwritable: tuple[str, ...]
    definition_location: str = field(repr=False, compare=False)
    operation: Trim = field(repr=False, compare=False)

    @property
    def snapshots_dropped(self) -> int:
        """How many snapshots would be dropped, of all tables."""
        return sum(len(trim.dropped) for trim in self.tables)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over all tables and the snapshots that each would lose."""
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
        rows += [(name, "left: its format version cannot be written", "", "") for name in self.unwritable]
        title = (
            f"Trim of version {self.base_version}: {self.snapshots_dropped:,} snapshots of {len(self.tables):,} tables"
        )
        return new_table(title, "table", "dropped", "snapshots dropped", "kept", rows=rows)

    def execute(self, approved_digest: str | None = None) -> TrimReport:
        """Write the tables' new metadata files and point to all of them in one commit.

        The trim is planned again first, and again whenever a concurrent commit touched a table or the lakehouse's
        settings. It never drops more than this plan says. With nothing left to drop, nothing is committed. Raises
        PlanChangedError when an approved digest is not that of the new plan, CommitConflictError after MAX_ATTEMPTS.
        Raises the errors of planning and of a commit. Files of a failed attempt are deleted, best effort.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Trim(PlannedOperation[TrimPlan, "TrimReport"]):
    """The trim of tables by a policy, None for the lakehouse's own. ``only`` names tables as ``namespace.table``."""

    telemetry_name = "trim"

    policy: RetentionPolicy | None
    only: tuple[str, ...] | None

    def plan(self) -> TrimPlan:
        """Plan on the latest version. Raises what :func:`plan_trim_tables` raises."""
        return on_latest(self.lake, self._plan_on)

    def _plan_on(self, base: Snapshot) -> TrimPlan:
        check_no_gap(self.lake.files.roots, base.version)
        found = candidates_of(self.lake, base, self.only)
        kept = _retained_definitions(self.lake, base, self.policy) if found.tables else frozenset()
        return TrimPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            tables=trims_of(self.lake, found.tables, kept),
            unreadable=found.unreadable,
            unwritable=found.unwritable,
            definition_location=base.definition_location,
            operation=self,
        )

    def run(self, plan: TrimPlan, approved_digest: str | None) -> TrimReport:
        """Plan again, and trim at most what the plan names."""
        metered = MeteredLakehouse(self.lake)
        here = replace(self, lake=metered.lake)
        approved = {(trim.namespace, trim.table, trim.table_id): frozenset(trim.dropped) for trim in plan.tables}
        first = here.plan()
        if approved_digest is not None:
            first.check_approved(approved_digest)

        def attempt(number: int) -> TrimReport:
            now = first if number == 1 else here.plan()
            trims = _within(now.tables, approved)
            version = _commit(metered.lake, now, trims) if trims else now.base_version
            return _report(plan, trims, version, number, metered.cost())

        return commit_on_latest(attempt)


@dataclass(frozen=True, kw_only=True)
class TrimReport(Document):
    """The trimmed tables.

    ``version`` holds the trimmed tables. If there was nothing to do, it is the latest version at that time. ``left``
    names tables of the plan that concurrent commits dropped, replaced or trimmed.
    """

    version: int
    tables: tuple[str, ...]
    left: tuple[str, ...]
    snapshots_dropped: int
    attempts: int
    cost: Cost

    def table(self) -> Table:
        """Return one row for each table."""
        rows = [*(("trimmed", name) for name in self.tables), *(("left as it is", name) for name in self.left)]
        done = f"committed as version {self.version}" if self.tables else f"nothing to do, version {self.version}"
        title = (
            f"Trim, {done}: {self.snapshots_dropped:,} snapshots of {len(self.tables):,} tables;"
            f" {self.cost.total_requests:,} requests, {self.cost.duration_ms / 1000:.1f} s"
        )
        return new_table(title, "", "table", rows=rows)


def plan_trim_tables(
    lake: Lakehouse, policy: RetentionPolicy | None = None, *, tables: Sequence[str] | None = None
) -> TrimPlan:
    """Plan to drop the Iceberg snapshots that no kept version needs. Only reads.

    Kept versions are exports, and those that ``policy``, by default the lakehouse's own, keeps now. A version needs of
    a table its current snapshot, and those of its branches and tags. ``tables``, as ``namespace.table``, limit it.
    Raises TableNotFoundError, MaintenanceBlockedError before ``reconcile``. Raises InvalidInputError for a named table
    that cannot be trimmed and for an empty policy. Raises CorruptFileError and other StorageErrors for a kept file that
    cannot be read.
    """
    return Trim(lake=lake, policy=policy, only=None if tables is None else tuple(tables)).plan()


def _retained_definitions(lake: Lakehouse, base: Snapshot, policy: RetentionPolicy | None) -> frozenset[str]:
    """Return the locations of all table definitions that kept versions and exports reach."""
    survey = survey_versions(lake, base)
    survey.check_reconciled()
    verdicts = survey.verdicts(policy or RetentionPolicy.of(base.definition), lake.storage.now_ms())
    leaving = [verdict.version for verdict in verdicts if verdict.expires]
    # Versions that can be undeleted need nothing of the latest metadata: they have their own.
    kept = retained_roots(survey, without=[*leaving, *survey.expired(ExpirationState.EXPIRED)])
    reach = CatalogReach(lake.files)
    reach.add(kept.roots)
    return frozenset(reach.tables)


def _within(
    trims: Sequence[TableTrim], approved: Mapping[tuple[str, str, str], frozenset[int]]
) -> list[tuple[TableTrim, frozenset[int]]]:
    """Return the tables that still have snapshots to drop, as far as that was approved."""
    found = []
    for trim in trims:
        dropped = approved.get((trim.namespace, trim.table, trim.table_id), frozenset()).intersection(trim.dropped)
        if dropped:
            found.append((trim, dropped))
    return found


def _commit(lake: Lakehouse, plan: TrimPlan, trims: Sequence[tuple[TableTrim, frozenset[int]]]) -> int:
    """Write the new metadata files and commit. Raises CommitConflictError when the plan is out of date."""
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
        check_tables(txn, tables, _OPERATION, remedy="; plan it again")

        def write(trim: TableTrim) -> TableDef:
            dropped = dropped_of[trim.namespace, trim.table]
            return write_without_snapshots(base.table_at(trim.definition_location), io, dropped, written.append)

        alter_tables(txn, lake.storage, tables, write)
    assert txn.committed_version is not None
    return txn.committed_version


def _check_settings(base: Snapshot, plan: TrimPlan) -> None:
    """Exports and expirations decide what is kept, so the plan holds only while they are unchanged."""
    if base.definition_location != plan.definition_location:
        raise CommitConflictError(
            f"version {base.version} changed what is kept since the trim was planned; plan it again",
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
    shown = ", ".join(map(str, ids[:_SHOWN_IDS]))
    return f"{shown} and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else shown
