"""Dagster's records of a run and the runs that it goes on from, by its public API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

import dagster as dg

from trinitylake_ops.versions.time_travel import CLOCK_SKEW

_PAGE = 100
BACKFILL_TAG = "dagster/backfill"
ROOT_TAG = "dagster/root_run_id"
_LONGEST_RUN_ID_CHARS = 255  # characters of the column in Dagster's databases


def known_run(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRun | None:
    """Return a run by the id that a commit names, None for one that this instance does not know.

    Commits of other programs may name any text, and some databases refuse some texts.
    """
    is_askable = run_id.isascii() and run_id.isprintable() and len(run_id) <= _LONGEST_RUN_ID_CHARS
    return instance.get_run_by_id(run_id) if is_askable else None


def run_chain(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.DagsterRun]:
    """Return a run and those it was re-executed from, the newest first, as far as Dagster still has them."""
    chain = [run]
    while (parent_id := chain[-1].parent_run_id) is not None:
        parent = instance.get_run_by_id(parent_id)
        if parent is None or parent in chain:
            break
        chain.append(parent)
    return chain


def all_executions(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[dg.DagsterRun]:
    """Return a run, followed by all other executions of the run that it was first executed as, the newest first.

    A user may execute any of them again, not only the latest one. Runs that Dagster's Python API executed again have no
    tag of their root, and are found as parents only.
    """
    root_id = run.root_run_id
    tagged = [] if root_id is None else instance.get_runs(dg.RunsFilter(tags={ROOT_TAG: root_id}))
    related = {other.run_id for other in (*tagged, *run_chain(instance, run))}
    if root_id is not None:
        related.add(root_id)
    related.discard(run.run_id)
    others = instance.get_runs(dg.RunsFilter(run_ids=sorted(related))) if related else []  # the newest first
    return [run, *others]


def backfill_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str | None:
    """Return the backfill of a run, or of the run that it re-executes, None if there is none.

    Dagster gives a re-execution the tag of the backfill only while the backfill is in progress.
    """
    tags = (one.tags.get(BACKFILL_TAG) for one in run_chain(instance, run))
    return next((backfill for backfill in tags if backfill is not None), None)


def created_at(instance: dg.DagsterInstance, run: dg.DagsterRun) -> datetime | None:
    """Return when a run was created, None when Dagster has no record of it."""
    record = instance.get_run_record_by_id(run.run_id)
    return None if record is None else record.create_timestamp


def newest_materialization(
    instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey
) -> dg.EventLogRecord | None:
    """Return the newest materialization of an asset by the first of some runs that has one, None if none has."""
    found: dict[str, dg.EventLogRecord] = {}
    for record in _materializations(instance, runs, asset_key):
        found.setdefault(record.run_id, record)
        if record.run_id == runs[0].run_id:
            break
    return next((found[run.run_id] for run in runs if run.run_id in found), None)


def published_version_of(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey) -> int:
    """Return the version of the lakehouse by which the first of some runs published an asset, -1 if none did."""
    record = newest_materialization(instance, runs, asset_key)
    event = None if record is None else record.asset_materialization
    version = None if event is None else event.metadata.get("lakehouse_version")
    return version.value if version is not None and isinstance(version.value, int) else -1


def _materializations(
    instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun], asset_key: dg.AssetKey
) -> Iterator[dg.EventLogRecord]:
    """Yield all materializations of an asset since the oldest of some runs was created, newest first."""
    begun = created_at(instance, runs[-1])
    records_filter = dg.AssetRecordsFilter(
        asset_key, after_timestamp=None if begun is None else (begun - CLOCK_SKEW).timestamp()
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
    """Yield the events of one type that a run logged of an asset, in their order."""
    return (event for event in run_events(instance, run_id, of_type) if event.asset_key == asset_key)


def run_events(
    instance: dg.DagsterInstance, run_id: str, of_type: dg.DagsterEventType
) -> Iterator[dg.AssetMaterialization | dg.AssetObservation]:
    """Yield the events of one type that a run logged of any asset, in their order."""
    for record in _records(instance, run_id, of_type):
        event = record.asset_observation or record.asset_materialization
        if event is not None:
            yield event


def planned_events(instance: dg.DagsterInstance, run_id: str) -> Iterator[dg.EventLogRecord]:
    """Yield a record for each asset, and partition of one, that a run was to make when it was created."""
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

    A step that publishes its table reports it before it ends, so it can fail, or be killed, after that.
    """
    steps = {
        record.event_log_entry.step_key
        for record in _records(instance, run_id, dg.DagsterEventType.ASSET_MATERIALIZATION)
        if record.asset_key == asset_key
    }
    ended = _records(instance, run_id, dg.DagsterEventType.STEP_SUCCESS) if steps else ()
    return any(record.event_log_entry.step_key in steps for record in ended)


def failed_blocking_checks(instance: dg.DagsterInstance, run_id: str, asset_key: dg.AssetKey) -> list[str]:
    """Return the blocking checks of an asset that failed in a run, in their order."""
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
    """Whether a step of a run asked to be started again later.

    Args:
        instance: The Dagster instance.
        run_id: The run.
        step_key: The step.
    """
    records = _records(instance, run_id, dg.DagsterEventType.STEP_UP_FOR_RETRY)
    return any(record.event_log_entry.step_key == step_key for record in records)


def step_failures(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    """Return the steps of a run that failed."""
    return list(_steps(instance, run_id, dg.DagsterEventType.STEP_FAILURE))


def step_successes(instance: dg.DagsterInstance, run_id: str) -> set[str]:
    """Return the steps of a run that succeeded."""
    return set(_steps(instance, run_id, dg.DagsterEventType.STEP_SUCCESS))


def _steps(instance: dg.DagsterInstance, run_id: str, of_type: dg.DagsterEventType) -> Iterator[str]:
    records = _records(instance, run_id, of_type)
    events = (record.event_log_entry.dagster_event for record in records)
    return (event.step_key for event in events if event is not None and event.step_key is not None)
