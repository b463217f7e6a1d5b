"""Finds the Iceberg snapshots that the tables of a version list, and those that kept versions need."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.nodes.keys import ObjectName
from trinitylake_ops.maintenance.reach.tables import defined, in_batches, tables_of
from trinitylake_ops.storage.parallel import in_one_round, run_parallel
from trinitylake_ops.tables.files.reach import DAMAGE
from trinitylake_ops.tables.files.trimming import ListedSnapshots, is_trimmable, listed_snapshots, referred_snapshots
from trinitylake_ops.tables.io.file_io import reading_io
from trinitylake_ops.tables.managed import LATEST_WRITTEN_VERSION
from trinitylake_ops.transaction.lakehouse import Lakehouse
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
        found = run_parallel(in_one_round(listed), [definition for _, _, definition in ours], lake.storage.concurrency)
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
        found = run_parallel(in_one_round(referred), list(fresh.values()), lake.storage.concurrency)
        for definition, ids in zip(fresh.values(), found, strict=True):
            needed[definition.id] |= undecided[definition.id].intersection(ids)
            undecided[definition.id].difference_update(ids)
    return needed
