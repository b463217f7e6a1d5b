"""Query Dagster's records of a run and of the runs that it re-executes, through Dagster's public API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

import dagster as dg

from trinitylake_ops.versions.time_travel import CLOCK_SKEW

_PAGE = 100
BACKFILL_TAG = "dagster/backfill"
ROOT_TAG = "dagster/root_run_id"
_MAX_RUN_ID_CHARS = 255  # length of the column in Dagster's databases


def known_run(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRun | None:
    """Return the run with the id that a commit records, or None if this instance does not have that run.

    The id is untrusted: commits of other programs can contain any text, and some databases reject certain texts.
    """
    is_valid = run_id.isascii() and run_id.isprintable() and len(run_id) <= _MAX_RUN_ID_CHARS
    return instance.get_run_by_id(run_id) if is_valid else None


def run_chain(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.DagsterRun]:
    """Return a run and the runs that it re-executes, newest first, as far as Dagster still has them."""
    chain = [run]
    while (parent_id := chain[-1].parent_run_id) is not None:
        parent = instance.get_run_by_id(parent_id)
        if parent is None or parent in chain:
            break
        chain.append(parent)
    return chain


def all_executions(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.DagsterRun]:
    """Return a run, followed by all other executions of the same root run, newest first.

    A user may re-execute any of them, not only the latest one. Runs that were re-executed through Dagster's Python API
    have no root tag, so only the parents of this run are found among them.
    """
    root_id = run.root_run_id
    tagged = [] if root_id is None else instance.get_runs(dg.RunsFilter(tags={ROOT_TAG: root_id}))
    related = {other.run_id for other in (*tagged, *run_chain(instance, run))}
    if root_id is not None:
        related.add(root_id)
    related.discard(run.run_id)
    others = instance.get_runs(dg.RunsFilter(run_ids=sorted(related))) if related else []  # newest first
    return [run, *others]


def backfill_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str | None:
    """Return the backfill of a run or of a run that it re-executes, or None.

    Dagster tags a re-execution with the backfill only while the backfill is in progress.
    """
    tags = (execution.tags.get(BACKFILL_TAG) for execution in run_chain(instance, run))
    return next((backfill for backfill in tags if backfill is not None), None)


def created_at(instance: dg.DagsterInstance, run: dg.DagsterRun) -> datetime | None:
    """Return the creation time of a run, or None if Dagster has no record of it."""
    record = instance.get_run_record_by_id(run.run_id)
    return None if record is None else record.create_timestamp


def newest_materialization(
    instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey
) -> dg.EventLogRecord | None:
    """Return the newest materialization of an asset by the first run that logged one, or None.

    Args:
        instance: The Dagster instance.
        runs: The runs, newest first.
        asset_key: The asset.
    """
    newest: dict[str, dg.EventLogRecord] = {}
    for record in _materializations(instance, runs, asset_key):
        newest.setdefault(record.run_id, record)
        if record.run_id == runs[0].run_id:
            break
    return next((newest[run.run_id] for run in runs if run.run_id in newest), None)


def published_version_of(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey) -> int:
    """Return the version that the first run to publish an asset committed, or -1 if no run published it.

    Args:
        instance: The Dagster instance.
        runs: The runs, newest first.
        asset_key: The asset.
    """
    record = newest_materialization(instance, runs, asset_key)
    event = None if record is None else record.asset_materialization
    version = None if event is None else event.metadata.get("lakehouse_version")
    return version.value if version is not None and isinstance(version.value, int) else -1


def _materializations(
    instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey
) -> Iterator[dg.EventLogRecord]:
    """Yield all materializations of an asset since the creation of the oldest run, newest first."""
    created = created_at(instance, runs[-1])
    records_filter = dg.AssetRecordsFilter(
        asset_key, after_timestamp=None if created is None else (created - CLOCK_SKEW).timestamp()
    )
    cursor: str | None = None
    while True:
        page = instance.fetch_materializations(records_filter, limit=_PAGE, cursor=cursor)
        yield from page.records
        if not page.has_more:
            return
        cursor = page.cursor


def asset_events(
    instance: dg.DagsterInstance, run_id: str, of_type: dg.DagsterEventType, asset_key: dg.AssetKey
) -> Iterator[dg.AssetMaterialization | dg.AssetObservation]:
    """Yield the events of one type that a run logged for an asset, in order.

    Args:
        instance: The Dagster instance.
        run_id: The run.
        of_type: The event type.
        asset_key: The asset.
    """
    return (event for event in run_events(instance, run_id, of_type) if event.asset_key == asset_key)


def run_events(
    instance: dg.DagsterInstance, run_id: str, of_type: dg.DagsterEventType
) -> Iterator[dg.AssetMaterialization | dg.AssetObservation]:
    """Yield the events of one type that a run logged for any asset, in order.

    Args:
        instance: The Dagster instance.
        run_id: The run.
        of_type: The event type.
    """
    for record in _records(instance, run_id, of_type):
        event = record.asset_observation or record.asset_materialization
        if event is not None:
            yield event


def planned_events(instance: dg.DagsterInstance, run_id: str) -> Iterator[dg.EventLogRecord]:
    """Yield a record for each asset or partition that a run planned to materialize when it was created."""
    return _records(instance, run_id, dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)


def _records(instance: dg.DagsterInstance, run_id: str, of_type: dg.DagsterEventType) -> Iterator[dg.EventLogRecord]:
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(run_id, cursor, of_type, _PAGE)
        yield from page.records
        if not page.has_more:
            return
        cursor = page.cursor


def has_succeeded(instance: dg.DagsterInstance, run_id: str, asset_key: dg.AssetKey) -> bool:
    """Whether a step of a run reported an asset and succeeded.

    A step that publishes its own table reports the table before the step ends, so it can still fail or be killed
    afterwards.

    Args:
        instance: The Dagster instance.
        run_id: The run.
        asset_key: The asset.
    """
    steps = {
        record.event_log_entry.step_key
        for record in _records(instance, run_id, dg.DagsterEventType.ASSET_MATERIALIZATION)
        if record.asset_key == asset_key
    }
    successes = _records(instance, run_id, dg.DagsterEventType.STEP_SUCCESS) if steps else ()
    return any(record.event_log_entry.step_key in steps for record in successes)


def failed_blocking_checks(instance: dg.DagsterInstance, run_id: str, asset_key: dg.AssetKey) -> list[str]:
    """Return the names of the blocking checks of an asset that failed in a run, in order.

    Args:
        instance: The Dagster instance.
        run_id: The run.
        asset_key: The asset.
    """
    records = _records(instance, run_id, dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    events = (record.event_log_entry.dagster_event for record in records)
    checks = (event.asset_check_evaluation_data for event in events if event is not None)
    return [
        check.check_name
        for check in checks
        if check.asset_key == asset_key
        and check.blocking
        and not check.passed
        and check.severity == dg.AssetCheckSeverity.ERROR
    ]


def has_waited(instance: dg.DagsterInstance, run_id: str, step_key: str) -> bool:
    """Whether a step of a run requested a retry.

    Args:
        instance: The Dagster instance.
        run_id: The run.
        step_key: The step.
    """
    records = _records(instance, run_id, dg.DagsterEventType.STEP_UP_FOR_RETRY)
    return any(record.event_log_entry.step_key == step_key for record in records)


def step_failures(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    """Return the keys of the failed steps of a run."""
    return list(_steps(instance, run_id, dg.DagsterEventType.STEP_FAILURE))


def step_successes(instance: dg.DagsterInstance, run_id: str) -> set[str]:
    """Return the keys of the succeeded steps of a run."""
    return set(_steps(instance, run_id, dg.DagsterEventType.STEP_SUCCESS))


def _steps(instance: dg.DagsterInstance, run_id: str, of_type: dg.DagsterEventType) -> Iterator[str]:
    records = _records(instance, run_id, of_type)
    events = (record.event_log_entry.dagster_event for record in records)
    return (event.step_key for event in events if event is not None and event.step_key is not None)
