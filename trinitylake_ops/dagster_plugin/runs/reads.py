"""The reads and publications of a run, and the tables that it took over from other runs.

They are recorded with the run, and gathered when the run publishes. Steps run in processes of their own and are
retried. So their reads are among the events of the run, whatever happens to the step. An event of the engine has no
effect on assets, as an observation of them would have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Self

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import record_in_run
from trinitylake_ops.dagster_plugin.runs.records import run_chain
from trinitylake_ops.dagster_plugin.runs.staging import Note, newest_staged
from trinitylake_ops.iceberg.write.replacement import StagedRead, TableRead
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Replace

_READ = "trinitylake/read"
_STAGED_READ = "trinitylake/staged_read"
_ASSET = "trinitylake/read_asset"
_PARTITIONS = "trinitylake/read_partitions"
_TAKEN_FROM = "trinitylake/taken_from_run"
_ATTEMPT = "trinitylake/publication"
_PAGE = 1000
#: The tag of a run that goes on after a failure, with all results of the run before it.
RESUMED_TAG = "dagster/is_resume_retry"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A publication that a run began. It is recorded before the commit, so that a later run can look for the commit.

    ``asset`` and ``partition`` are the publishing ones, and the partition is empty without any. ``tables`` are the
    locations of the staged metadata, and ``since`` is the version after which the commit can be. ``appended`` describes
    those staged tables that append rows, as JSON.
    """

    publication: str
    asset: str
    partition: str
    tables: tuple[str, ...]
    since: int
    appended: tuple[str, ...] = ()

    @classmethod
    def of(cls, publication: str, asset: str, partition: str, staged: Iterable[StagedTable]) -> Self:
        """Return the attempt to publish staged tables."""
        tables = sorted(staged, key=lambda table: table.metadata_location)
        return cls(
            publication,
            asset,
            partition,
            tuple(table.metadata_location for table in tables),
            min(table.base_version for table in tables),
            tuple(table.to_json() for table in tables if table.replaces == Replace.NOTHING.value),
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :func:`record_attempt` wrote."""
        state: dict[str, Any] = json.loads(text)
        return cls(**{**state, "tables": tuple(state["tables"]), "appended": tuple(state["appended"])})


@dataclass(frozen=True, slots=True)
class BackfillRead:
    """The read of some partitions of an asset that another run of the same backfill staged."""

    asset_key: dg.AssetKey
    #: The partitions, None for an asset without partitions.
    partitions: tuple[str, ...] | None
    read: StagedRead


def record_read(instance: dg.DagsterInstance, run: dg.DagsterRun, asset_key: dg.AssetKey, read: TableRead) -> None:
    """Record that a run read the table of an asset which it does not stage."""
    message = f"reading {read.namespace}.{read.table} at version {read.version} of the lakehouse"
    record_in_run(instance, run, message, {_READ: read.to_json(), _ASSET: asset_key.to_string()})


def record_staged_read(
    instance: dg.DagsterInstance, run: dg.DagsterRun, asset_key: dg.AssetKey, read: StagedRead
) -> None:
    """Record that a run read the table of an asset as it was staged."""
    staged = read.staged
    message = f"reading {staged.namespace}.{staged.table} as it was staged on version {staged.base_version}"
    record_in_run(instance, run, message, {_STAGED_READ: read.to_json(), _ASSET: asset_key.to_string()})


def record_backfill_read(instance: dg.DagsterInstance, run: dg.DagsterRun, read: BackfillRead) -> None:
    """Record that a run read the table of an asset as another run of the backfill staged it."""
    staged = read.read.staged
    message = f"reading {staged.namespace}.{staged.table} as another run of the backfill staged it"
    data = {_STAGED_READ: read.read.to_json(), _ASSET: read.asset_key.to_string()}
    record_in_run(instance, run, message, {**data, _PARTITIONS: json.dumps(read.partitions)})


def backfill_reads(instance: dg.DagsterInstance, run_id: str) -> Sequence[BackfillRead]:
    """Return what a run read of tables that other runs of its backfill staged."""
    return _Events.of(instance, run_id).backfill_reads


def record_takeover(instance: dg.DagsterInstance, run: dg.DagsterRun, asset_key: dg.AssetKey, earlier_id: str) -> None:
    """Record that a run goes on with tables that an earlier one staged, and so with that run's reads."""
    message = f"{asset_key.to_user_string()} is taken as run {earlier_id} staged it"
    record_in_run(instance, run, message, {_TAKEN_FROM: earlier_id})


def record_attempt(instance: dg.DagsterInstance, run: dg.DagsterRun, attempt: Attempt) -> None:
    """Record that a run is about to commit a publication."""
    message = f"{attempt.asset} publishes {len(attempt.tables)} staged tables as publication {attempt.publication}"
    record_in_run(instance, run, message, {_ATTEMPT: json.dumps(asdict(attempt))})


def attempts_of(instance: dg.DagsterInstance, run_id: str) -> Sequence[Attempt]:
    """Return the publications that a run began, in their order."""
    return _Events.of(instance, run_id).attempts


@dataclass(slots=True)
class _Events:
    """The records of one run."""

    reads: list[tuple[dg.AssetKey, TableRead]] = field(default_factory=list)
    staged_reads: list[StagedRead] = field(default_factory=list)
    backfill_reads: list[BackfillRead] = field(default_factory=list)
    taken_from: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    @classmethod
    def of(cls, instance: dg.DagsterInstance, run_id: str) -> _Events:
        """Return the records of a run in their order."""
        events = cls()
        for metadata in _recorded(instance, run_id):
            if _TAKEN_FROM in metadata:
                events.taken_from.append(metadata[_TAKEN_FROM])
            elif _READ in metadata:
                key = dg.AssetKey.from_db_string(metadata[_ASSET])
                assert key is not None
                events.reads.append((key, TableRead.from_json(metadata[_READ])))
            elif _STAGED_READ in metadata:
                staged_read = StagedRead.from_json(metadata[_STAGED_READ])
                events.staged_reads.append(staged_read)
                if _PARTITIONS in metadata:
                    key, partitions = dg.AssetKey.from_db_string(metadata[_ASSET]), json.loads(metadata[_PARTITIONS])
                    assert key is not None
                    named = None if partitions is None else tuple(partitions)
                    events.backfill_reads.append(BackfillRead(key, named, staged_read))
            elif _ATTEMPT in metadata:
                events.attempts.append(Attempt.from_json(metadata[_ATTEMPT]))
        return events


def _recorded(instance: dg.DagsterInstance, run_id: str) -> Iterator[Mapping[str, str]]:
    """Yield the texts of each event that this module recorded with a run."""
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(run_id, cursor, dg.DagsterEventType.ENGINE_EVENT, _PAGE)
        for record in page.records:
            event = record.event_log_entry.dagster_event
            metadata = {} if event is None else event.engine_event_data.metadata
            if any(name in metadata for name in (_READ, _STAGED_READ, _TAKEN_FROM, _ATTEMPT)):
                yield {name: str(value.value) for name, value in metadata.items()}
        if not page.has_more:
            return
        cursor = page.cursor


def runs_with_staged(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.DagsterRun]:
    """Return a run, those it was re-executed from, and the other runs of its backfill whose tables it took over."""
    chain = run_chain(instance, run)
    known = {one.run_id for one in chain}
    taken = (run_id for one in chain for run_id in _Events.of(instance, one.run_id).taken_from)
    others = (instance.get_run_by_id(run_id) for run_id in dict.fromkeys(taken) if run_id not in known)
    return [*chain, *(other for other in others if other is not None)]


class RunReads:
    """The reads that count for a publication: the run's own, and those of runs whose results it takes over."""

    def __init__(
        self, instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], notes: Mapping[dg.AssetKey, Sequence[Note]]
    ):
        """Gather the records of runs.

        Args:
            instance: The instance that has them.
            runs: The run, followed by those that it was re-executed from, the newest first.
            notes: The notes of the assets that it publishes.
        """
        self._instance = instance
        self._runs = runs
        self._events = {run.run_id: _Events.of(instance, run.run_id) for run in runs}
        self._by_asset: dict[dg.AssetKey, list[TableRead]] = {}
        self._staged: dict[str, StagedRead] = {}
        self._of_backfill: list[BackfillRead] = []
        wanted = [runs[0].run_id, *(found[0].run_id for found in notes.values() if found)]
        for run, earlier in pairwise(runs):
            if run.tags.get(RESUMED_TAG) != "true":
                break
            wanted.append(earlier.run_id)
        seen: set[str] = set()
        while wanted:
            run_id = wanted.pop()
            if run_id in seen or run_id not in self._events:
                continue
            seen.add(run_id)
            events = self._events[run_id]
            wanted += events.taken_from
            self._of_backfill += events.backfill_reads
            for asset_key, read in events.reads:
                self._by_asset.setdefault(asset_key, []).append(read)
            for staged_read in events.staged_reads:
                # Of several reads of one staged table, one that includes rows of its base counts.
                location = staged_read.staged.metadata_location
                if location not in self._staged or staged_read.includes_base:
                    self._staged[location] = staged_read

    def all(self) -> list[TableRead]:
        """Return the reads of tables at a version."""
        return [read for reads in self._by_asset.values() for read in reads]

    def as_staged(self) -> list[StagedRead]:
        """Return the reads of tables as they were staged."""
        return list(self._staged.values())

    def of_backfill(self) -> list[BackfillRead]:
        """Return the reads of tables that other runs of the backfill staged."""
        return self._of_backfill

    def staged(self) -> list[StagedTable]:
        """Return the tables among those read that the runs staged themselves."""
        found = (newest_staged(self._instance, self._runs, key) for key in self._by_asset)
        return [staged for _, staged in filter(None, found)]

    def attempts(self, run_id: str) -> Sequence[Attempt]:
        """Return the publications that a run began, in their order."""
        return self._events[run_id].attempts
