"""What a trim may drop: the tables with snapshots, branches and tags that no kept version needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExpirationState, TableDef
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.iceberg.managed import LATEST_WRITTEN_VERSION
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.iceberg.snapshot_retention import HEADS_ONLY, SnapshotRule
from trinitylake_ops.iceberg.trim import ListedSnapshots, is_trimmable, listed_snapshots, referred_snapshots
from trinitylake_ops.operations.gc.mark import CatalogReach, retained_roots
from trinitylake_ops.operations.gc.survey import Survey, survey_versions
from trinitylake_ops.operations.gc.tables import in_batches, tables_of, with_definitions
from trinitylake_ops.operations.policy.document import MaintenancePolicy
from trinitylake_ops.operations.policy.stored import policy_of
from trinitylake_ops.operations.retention import RetentionPolicy
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTrim:
    """The plan for one table, with the ids of Iceberg snapshots, oldest first."""

    namespace: str
    table: str
    table_id: str
    metadata_location: str
    dropped: tuple[int, ...]
    kept: tuple[int, ...]
    #: Branches and tags to drop, because they are older than their maximum age.
    dropped_refs: tuple[str, ...] = ()
    definition_location: str = field(repr=False)

    @property
    def name(self) -> str:
        """The table as ``namespace.table``."""
        return f"{self.namespace}.{self.table}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A managed table whose metadata lists snapshots, branches or tags that it does not have to keep."""

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
    #: Tables with an Iceberg format version that cannot be written.
    unwritable: tuple[str, ...]


def snapshot_rule(policy: MaintenancePolicy, namespace: str, table: str) -> SnapshotRule:
    """Return which snapshots of branches a policy retains in a table.

    Args:
        policy: The policy of the lakehouse.
        namespace: The namespace.
        table: The name of the table.
    """
    rule = policy.table_rule(namespace, table)
    return HEADS_ONLY if rule is None else SnapshotRule(rule.max_snapshot_age_ms, rule.min_snapshots)


def candidates_of(
    lake: Lakehouse, base: Snapshot, only: Sequence[str] | None, *, skips_unsuitable: bool = False
) -> Candidates:
    """Return the candidates of a version.

    Args:
        lake: The lakehouse.
        base: The version.
        only: The tables, as ``namespace.table``; by default all.
        skips_unsuitable: Whether to skip named tables that cannot be trimmed.

    Raises:
        TableNotFoundError: A table does not exist.
        InvalidInputError: A named table cannot be trimmed.
        UnreadablePolicyError: The maintenance policy cannot be read.
        StorageError: The storage failed.
    """
    io, policy = reading_io(lake), policy_of(base.definition)

    def listed(entry: tuple[ObjectName, str, TableDef]) -> ListedSnapshots | None:
        name, _, definition = entry
        try:
            return listed_snapshots(definition, io, snapshot_rule(policy, name.namespace, name.table or ""))
        except DAMAGE:
            return None

    candidates: list[Candidate] = []
    unreadable: list[str] = []
    unwritable: list[str] = []
    rejected: list[str] = []
    for entries in with_definitions(base, tables_of(base, only)):
        rejected += [str(name) for name, _, definition in entries if not is_trimmable(definition, io)]
        trimmable = [entry for entry in entries if is_trimmable(entry[2], io)]
        listings = run_parallel(in_one_round_trip(listed), trimmable, lake.storage.concurrency)
        for (name, location, definition), snapshots in zip(trimmable, listings, strict=True):
            if snapshots is None:
                unreadable.append(str(name))
            elif not snapshots.is_in_place:
                rejected.append(str(name))
            elif not snapshots.is_writable:
                unwritable.append(str(name))
            elif snapshots.others or snapshots.expired_refs:
                metadata_location = definition.format_properties[METADATA_LOCATION]
                candidates.append(Candidate(name, location, definition.id, metadata_location, snapshots))
    is_strict = only is not None and not skips_unsuitable
    if is_strict and rejected:
        raise InvalidInputError(
            f"table {rejected[0]} cannot be trimmed: only MANAGED Iceberg tables in their own folders can"
        )
    if is_strict and unwritable:
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
    needed = _needed(lake, candidates, kept_definitions)
    trims = []
    for candidate in candidates:
        ids, listed = candidate.snapshots.ids, candidate.snapshots
        kept = listed.referred | listed.retained | needed[candidate.table_id]
        dropped = tuple(snapshot_id for snapshot_id in ids if snapshot_id not in kept)
        if dropped or listed.expired_refs:
            trims.append(
                TableTrim(
                    namespace=candidate.name.namespace,
                    table=candidate.name.table or "",
                    table_id=candidate.table_id,
                    metadata_location=candidate.metadata_location,
                    dropped=dropped,
                    kept=tuple(snapshot_id for snapshot_id in ids if snapshot_id in kept),
                    dropped_refs=listed.expired_refs,
                    definition_location=candidate.definition_location,
                )
            )
    return tuple(trims)


def _needed(lake: Lakehouse, candidates: Sequence[Candidate], kept_definitions: Collection[str]) -> dict[str, set[int]]:
    """Return, by table id, the snapshots of candidates that other definitions of the same table refer to."""
    needed: dict[str, set[int]] = {candidate.table_id: set() for candidate in candidates}
    undecided: dict[str, set[int]] = {table_id: set() for table_id in needed}
    for candidate in candidates:
        undecided[candidate.table_id] |= candidate.snapshots.others
    seen = {candidate.metadata_location for candidate in candidates}
    current = {candidate.definition_location for candidate in candidates}
    io = reading_io(lake)

    def referred(definition: TableDef) -> Collection[int]:
        try:
            return referred_snapshots(definition, io)
        except DAMAGE:  # what this version needs is unknown
            return undecided[definition.id].copy()

    # Two tables may have the same id. A snapshot that one of them needs is kept in both.
    for candidate in candidates:
        needed[candidate.table_id] |= candidate.snapshots.referred
    for batch in in_batches([location for location in kept_definitions if location not in current]):
        fresh: dict[str, TableDef] = {}
        for definition in lake.files.definitions.tables(batch):
            metadata_location = definition.format_properties.get(METADATA_LOCATION, "")
            if undecided.get(definition.id) and is_trimmable(definition, io) and metadata_location not in seen:
                fresh[metadata_location] = definition
        seen.update(fresh)
        references = run_parallel(in_one_round_trip(referred), list(fresh.values()), lake.storage.concurrency)
        for definition, ids in zip(fresh.values(), references, strict=True):
            needed[definition.id] |= undecided[definition.id].intersection(ids)
            undecided[definition.id].difference_update(ids)
    return needed


class RetainedDefinitions:
    """The locations of the table definitions that kept versions and exports reach. Later versions only add some.

    Args:
        policy: The policy that decides which versions are kept; None for the lakehouse's own settings.
    """

    def __init__(self, policy: RetentionPolicy | None):
        self._policy = policy
        self._survey: Survey | None = None
        self._reach: CatalogReach | None = None

    def at(self, lake: Lakehouse, base: Snapshot) -> frozenset[str]:
        """Return the locations for the versions up to ``base``. Reads only what is new since an earlier call.

        Args:
            lake: The lakehouse.
            base: The version.

        Raises:
            InvalidInputError: The policy is empty.
            MaintenanceBlockedError: A reconcile is needed.
            StorageError: A kept file cannot be read.
        """
        survey = survey_versions(lake, base) if self._survey is None else self._survey.extended(base)
        survey.check_reconciled()
        verdicts = survey.verdicts(self._policy or RetentionPolicy.of(base.definition), lake.storage.now_ms())
        leaving = [verdict.version for verdict in verdicts if verdict.expires]
        # Versions that can be undeleted have their own metadata, and need nothing of the latest.
        kept = retained_roots(survey, without=[*leaving, *survey.expired(ExpirationState.EXPIRED)])
        reach = CatalogReach(lake.files) if self._reach is None else self._reach
        reach.add(kept.roots)
        self._survey, self._reach = survey, reach
        return frozenset(reach.tables)
