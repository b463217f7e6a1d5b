"""Records of a run's reads, its publications, and the tables that it took over from other runs.

They are recorded in the event log of the run and collected when the run publishes. Steps run in separate processes and
are retried, so the event log is the only place in which their reads persist. Engine events are used because, unlike
observations, they have no effect on assets.
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
#: Tag of a re-execution from failure, which reuses the results of the earlier run.
RESUMED_TAG = "dagster/is_resume_retry"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A publication that a run started, recorded before the commit so that a later run can search for the commit."""

    #: The publication id.
    publication: str
    #: The publishing asset.
    asset: str
    #: The partition of the publishing asset, or an empty string.
    partition: str
    #: The locations of the staged metadata.
    tables: tuple[str, ...]
    #: If the commit exists, its version is later than this one.
    since: int
    #: The staged tables that append rows, as JSON.
    appended: tuple[str, ...] = ()

    @classmethod
    def of(cls, publication: str, asset: str, partition: str, staged: Iterable[StagedTable]) -> Self:
        """Create the attempt to publish staged tables.

        Args:
            publication: The publication id.
            asset: The publishing asset.
            partition: Its partition, or an empty string.
            staged: The staged tables.
        """
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
        """Parse an attempt that :func:`record_attempt` recorded."""
        state: dict[str, Any] = json.loads(text)
        return cls(**{**state, "tables": tuple(state["tables"]), "appended": tuple(state["appended"])})


@dataclass(frozen=True, slots=True)
class BackfillRead:
    """A read of an asset that another run of the same backfill staged."""

    asset_key: dg.AssetKey
    #: The partitions that were read, or None for an asset without partitions.
    partitions: tuple[str, ...] | None
    read: StagedRead


def record_read(instance: dg.DagsterInstance, run: dg.DagsterRun, asset_key: dg.AssetKey, read: TableRead) -> None:
    """Record that a run read the published table of an asset that it does not stage."""
    message = f"reading {read.namespace}.{read.table} at version {read.version} of the lakehouse"
    record_in_run(instance, run, message, {_READ: read.to_json(), _ASSET: asset_key.to_string()})


def record_staged_read(
    instance: dg.DagsterInstance, run: dg.DagsterRun, asset_key: dg.AssetKey, read: StagedRead
) -> None:
    """Record that a run read the staged table of an asset."""
    staged = read.staged
    message = f"reading staged table {staged.namespace}.{staged.table}, based on version {staged.base_version}"
    record_in_run(instance, run, message, {_STAGED_READ: read.to_json(), _ASSET: asset_key.to_string()})


def record_backfill_read(instance: dg.DagsterInstance, run: dg.DagsterRun, read: BackfillRead) -> None:
    """Record that a run read a table that another run of the backfill staged."""
    staged = read.read.staged
    message = f"reading table {staged.namespace}.{staged.table}, which another run of the backfill staged"
    data = {_STAGED_READ: read.read.to_json(), _ASSET: read.asset_key.to_string()}
    record_in_run(instance, run, message, {**data, _PARTITIONS: json.dumps(read.partitions)})


def backfill_reads(instance: dg.DagsterInstance, run_id: str) -> Sequence[BackfillRead]:
    """Return a run's reads of tables that other runs of its backfill staged."""
    return _Events.of(instance, run_id).backfill_reads


def record_takeover(instance: dg.DagsterInstance, run: dg.DagsterRun, asset_key: dg.AssetKey, earlier_id: str) -> None:
    """Record that a run takes over a table that an earlier run staged, and therefore also that run's reads."""
    message = f"taking over {asset_key.to_user_string()}, which run {earlier_id} staged"
    record_in_run(instance, run, message, {_TAKEN_FROM: earlier_id})


def record_attempt(instance: dg.DagsterInstance, run: dg.DagsterRun, attempt: Attempt) -> None:
    """Record that a run is about to commit a publication."""
    message = f"{attempt.asset} publishes {len(attempt.tables)} staged tables as publication {attempt.publication}"
    record_in_run(instance, run, message, {_ATTEMPT: json.dumps(asdict(attempt))})


def attempts_of(instance: dg.DagsterInstance, run_id: str) -> Sequence[Attempt]:
    """Return the publications that a run started, in order."""
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
        """Load the records of a run in order."""
        events = cls()
        for metadata in _recorded_reads(instance, run_id):
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
                    keys = None if partitions is None else tuple(partitions)
                    events.backfill_reads.append(BackfillRead(key, keys, staged_read))
            elif _ATTEMPT in metadata:
                events.attempts.append(Attempt.from_json(metadata[_ATTEMPT]))
        return events


def _recorded_reads(instance: dg.DagsterInstance, run_id: str) -> Iterator[Mapping[str, str]]:
    """Yield the metadata of each event that this module recorded in a run, as strings."""
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
    """Return a run, the runs that it re-executes, and the other runs of its backfill whose tables it took over."""
    chain = run_chain(instance, run)
    chain_ids = {execution.run_id for execution in chain}
    source_ids = (run_id for execution in chain for run_id in _Events.of(instance, execution.run_id).taken_from)
    sources = (instance.get_run_by_id(run_id) for run_id in dict.fromkeys(source_ids) if run_id not in chain_ids)
    return [*chain, *(source for source in sources if source is not None)]


class RunReads:
    """The reads to validate in a publication: those of the run, and those of runs whose results it takes over."""

    def __init__(
        self, instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], notes: Mapping[dg.AssetKey, Sequence[Note]]
    ):
        """Collect the records of runs.

        Args:
            instance: The Dagster instance.
            runs: The run, followed by the runs that it re-executes, newest first.
            notes: The notes of the assets that the run publishes.
        """
        self._instance = instance
        self._runs = runs
        self._events = {run.run_id: _Events.of(instance, run.run_id) for run in runs}
        self._by_asset: dict[dg.AssetKey, list[TableRead]] = {}
        self._staged: dict[str, StagedRead] = {}
        self._of_backfill: list[BackfillRead] = []
        pending = [runs[0].run_id, *(asset_notes[0].run_id for asset_notes in notes.values() if asset_notes)]
        for run, earlier in pairwise(runs):
            if run.tags.get(RESUMED_TAG) != "true":
                break
            pending.append(earlier.run_id)
        visited: set[str] = set()
        while pending:
            run_id = pending.pop()
            if run_id in visited or run_id not in self._events:
                continue
            visited.add(run_id)
            events = self._events[run_id]
            pending += events.taken_from
            self._of_backfill += events.backfill_reads
            for asset_key, read in events.reads:
                self._by_asset.setdefault(asset_key, []).append(read)
            for staged_read in events.staged_reads:
                # A read that includes rows of the base takes precedence over other reads of the same staged table.
                location = staged_read.staged.metadata_location
                if location not in self._staged or staged_read.includes_base:
                    self._staged[location] = staged_read

    def all(self) -> list[TableRead]:
        """Return the reads of tables at a version."""
        return [read for reads in self._by_asset.values() for read in reads]

    def as_staged(self) -> list[StagedRead]:
        """Return the reads of staged tables."""
        return list(self._staged.values())

    def of_backfill(self) -> list[BackfillRead]:
        """Return the reads of tables that other runs of the backfill staged."""
        return self._of_backfill

    def staged(self) -> list[StagedTable]:
        """Return the tables that the runs both read at a version and staged."""
        newest = (newest_staged(self._instance, self._runs, key) for key in self._by_asset)
        return [staged for _, staged in filter(None, newest)]

    def attempts(self, run_id: str) -> Sequence[Attempt]:
        """Return the publications that a run started, in order."""
        return self._events[run_id].attempts
