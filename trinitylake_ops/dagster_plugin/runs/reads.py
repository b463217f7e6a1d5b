"""The reads of a run, and the tables that it took over.

They are recorded with the run, and gathered when the run publishes. Steps run in processes of their own and are
retried. So their reads are among the events of the run, whatever happens to the step. An event of the engine has no
effect on assets, as an observation of them would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import dagster as dg

from trinitylake_ops.dagster_plugin.runs.beyond_public import record_in_run
from trinitylake_ops.dagster_plugin.runs.staging import newest_notes, newest_staged
from trinitylake_ops.tables.writing.reads import TableRead
from trinitylake_ops.tables.writing.staged_table import StagedTable

_READ = "trinitylake/read"
_ASSET = "trinitylake/read_asset"
_TAKEN_FROM = "trinitylake/taken_from_run"
_PAGE = 1000
#: The tag of a run that goes on after a failure, with all results of the run before it.
RESUMED_TAG = "dagster/is_resume_retry"


def record_read(instance: dg.DagsterInstance, run: dg.DagsterRun, asset_key: dg.AssetKey, read: TableRead) -> None:
    """Record that a run read the table of an asset which it does not stage."""
    message = f"reading {read.namespace}.{read.table} at version {read.version} of the lakehouse"
    record_in_run(instance, run, message, {_READ: read.to_json(), _ASSET: asset_key.to_string()})


def record_taken(instance: dg.DagsterInstance, run: dg.DagsterRun, asset_key: dg.AssetKey, earlier_id: str) -> None:
    """Record that a run goes on with tables that an earlier one staged, and so with that run's reads."""
    message = f"{asset_key.to_user_string()} is taken as run {earlier_id} staged it"
    record_in_run(instance, run, message, {_TAKEN_FROM: earlier_id})


class RunReads:
    """The reads that count for a publication: the run's own, and those of runs whose results it takes over."""

    def __init__(
        self, instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], published: Sequence[dg.AssetKey] = ()
    ):
        """``runs`` are the run and those that it was re-executed from.

        ``published`` are the assets that it publishes.
        """
        self._instance = instance
        self._runs = runs
        self._by_asset: dict[dg.AssetKey, list[TableRead]] = {}
        known = {run.run_id: run for run in runs}
        wanted = [runs[0].run_id]
        for asset_key in published:
            wanted += [note.run_id for note in newest_notes(instance, runs, asset_key)[:1]]
        for run, earlier in pairwise(runs):
            if run.tags.get(RESUMED_TAG) != "true":
                break
            wanted.append(earlier.run_id)
        seen: set[str] = set()
        while wanted:
            run_id = wanted.pop()
            if run_id in seen or run_id not in known:
                continue
            seen.add(run_id)
            wanted += self._gather(run_id)

    def all(self) -> list[TableRead]:
        """Return the reads."""
        return [read for reads in self._by_asset.values() for read in reads]

    def staged(self) -> list[StagedTable]:
        """Return the tables among those read that the runs staged themselves."""
        found = (newest_staged(self._instance, self._runs, key) for key in self._by_asset)
        return [staged for _, staged in filter(None, found)]

    def _gather(self, run_id: str) -> Iterator[str]:
        """Take the reads of a run. Yields the runs whose results it took over."""
        cursor: str | None = None
        while True:
            page = self._instance.get_records_for_run(run_id, cursor, dg.DagsterEventType.ENGINE_EVENT, _PAGE)
            for record in page.records:
                event = record.event_log_entry.dagster_event
                metadata = {} if event is None else event.engine_event_data.metadata
                if _TAKEN_FROM in metadata:
                    yield str(metadata[_TAKEN_FROM].value)
                asset_key = dg.AssetKey.from_db_string(str(metadata[_ASSET].value)) if _READ in metadata else None
                if asset_key is not None:
                    read = TableRead.from_json(str(metadata[_READ].value))
                    self._by_asset.setdefault(asset_key, []).append(read)
            if not page.has_more:
                return
            cursor = page.cursor
