"""Sensors: commits made outside of Dagster, failed runs, and closed branches."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from tenacity import Retrying, stop_after_attempt, wait_random_exponential

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.lakehouse_metadata import GAP, VERSION
from trinitylake_ops.dagster_plugin.links import Links, code_location_of
from trinitylake_ops.dagster_plugin.metadata import DATA_VERSION_TAG, table_value
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.new_commits import CommitBatch, CommitRange, Limits, RunOrigin, poll_commits
from trinitylake_ops.dagster_plugin.resources import branch_clone, lakehouse_of
from trinitylake_ops.dagster_plugin.runs.records import known_run, run_events
from trinitylake_ops.dagster_plugin.table_events import TableAssets, TableChanges, TableEvent, TableKey
from trinitylake_ops.dagster_plugin.version_page import VersionsPage
from trinitylake_ops.declarations.options import BRANCH_PREFIX
from trinitylake_ops.errors import LakehouseNotFoundError
from trinitylake_ops.format.keys import COMMIT_ID
from trinitylake_ops.versions.lookup import clones_of

#: Tag of a run that a sensor requested: the version that was the latest.
VERSION_TAG = "trinitylake/version"

_GRPC_TIMEOUT_VARIABLES = ("DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS", "DAGSTER_GRPC_TIMEOUT_SECONDS")
_GRPC_TIMEOUT_SECONDS = 60
_GRPC_MARGIN_SECONDS = 20
_LEAST_SECONDS = 5.0
_ALERT_ATTEMPTS = 3


def tick_budget_seconds() -> float:
    """Return how long a tick may work: the time that Dagster's daemon waits for a sensor, less a margin."""
    given = next((os.environ[name] for name in _GRPC_TIMEOUT_VARIABLES if os.environ.get(name)), None)
    timeout = int(given) if given is not None else _GRPC_TIMEOUT_SECONDS
    return max(_LEAST_SECONDS, timeout - _GRPC_MARGIN_SECONDS)


def build_commit_sensor(
    names: LakehouseNames = ONLY,
    *,
    name: str = "commits",
    job: dg.JobDefinition | None = None,
    job_name: str | None = None,
    run_config: Callable[[int], Mapping[str, Any]] | None = None,
    table_key: TableKey | None = None,
    minimum_interval_seconds: int = 30,
    max_versions_per_tick: int = 1000,
    max_tables_per_tick: int = 1000,
    max_seconds_per_tick: float | None = None,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Return a sensor that reports commits to a lakehouse by others than runs of this code location.

    Of commits by other code locations of this Dagster instance, only tables are reported, to assets that those runs did
    not report themselves.
    Each table that such commits added or changed becomes a materialization of the assets that hold it, of the
    partitions that have other files (:class:`TableAssets`). ``table_key(namespace, table)`` names its asset instead. A
    removed table becomes an observation. Each tick with news is a materialization of the lakehouse. One run of the job,
    if any, is requested for the newest version (``job_name`` gives a job of assets). ``run_config`` makes its
    configuration from that version's number. The first tick only remembers the latest version. A tick does no more than
    the limits say, and the next one goes on. By default its time is what the daemon waits, less 20 seconds. Events are
    delivered at least once, and a run is requested once.
    """
    limits = Limits(
        versions=max_versions_per_tick,
        changes=max_tables_per_tick,
        seconds=max_seconds_per_tick or tick_budget_seconds(),
    )
    has_job = job is not None or job_name is not None

    @dg.sensor(
        name=names.of(name),
        job=job,
        job_name=job_name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        required_resource_keys={names.resource_key},
        description="Reports tables that were changed by commits made outside of Dagster.",
    )
    def commits(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        instance = context.instance
        try:
            resource = lakehouse_of(context.resources, names)
            lake = resource.open()
        except LakehouseNotFoundError as error:
            return dg.SensorResult(skip_reason=str(error))
        place = _code_location(context)
        commit_batch = poll_commits(lake, context.cursor, lambda run: _run_origin(instance, run, place), limits)
        location = context.repository_def
        keys = table_key or (names.table_key if location is None else None)  # a test has no code location
        assets = TableAssets(location, names, resource, keys)
        page = VersionsPage(instance, location, names, Links.at(location, place, names, resource.webserver_url))
        events = [
            *_note_events(commit_batch, names.lakehouse_key),
            *_table_events(commit_batch, lake, assets, instance),
            *_events(commit_batch, lake, page),
        ]
        requests = [_run_request(commit_batch, run_config)] if has_job and commit_batch.is_run_due else []
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else _tick_message(commit_batch),
            cursor=commit_batch.cursor.encode(),
            asset_events=events,
        )

    return commits


def _code_location(context: dg.SensorEvaluationContext) -> str | None:
    """Return the code location of a sensor as runs name it, None in a test, which has none."""
    origin = context.code_location_origin
    return None if origin is None else f"{context.repository_name}@{origin.location_name}"


def _run_origin(instance: dg.DagsterInstance, run_id: str, place: str | None) -> RunOrigin:
    """Return whose run it is. A run that names no code location counts as of this one.

    A run that was killed between its commit and its events told a part of what it did, as one of another code location.
    """
    run = known_run(instance, run_id)
    if run is None:
        return "other"
    if place is not None and (code_location_of(run) or place) != place:
        return "neighbor"
    return "running" if not run.is_finished else "own" if run.is_success else "neighbor"


def _run_request(commit_batch: CommitBatch, run_config: Callable[[int], Mapping[str, Any]] | None) -> dg.RunRequest:
    version = commit_batch.head.version
    # This is the commit's own id: a lakehouse that replaces another has the same numbers.
    commit = commit_batch.head.root.system.get(COMMIT_ID, str(commit_batch.head.created_at_ms))
    return dg.RunRequest(
        run_key=f"{commit_batch.cursor.lakehouse_id}-{version}-{commit}",
        run_config={} if run_config is None else run_config(version),
        tags={VERSION_TAG: str(version)},
    )


def _tick_message(commit_batch: CommitBatch) -> str:
    """Return the message of a tick without a run."""
    if commit_batch.commit_ranges or commit_batch.notes:
        what = "; ".join(
            [
                *commit_batch.notes,
                *(f"reported versions {commit_range.versions}" for commit_range in commit_batch.commit_ranges),
            ]
        )
        return f"{what}; no run is due, {commit_batch.versions_left} versions are left"
    own = (
        f"; {commit_batch.own} versions since the last tick are of this instance's own runs" if commit_batch.own else ""
    )
    latest, n_left = commit_batch.head.version, commit_batch.versions_left
    return f"version {latest} is the latest, {n_left} versions are not looked at yet{own}"


def _note_events(commit_batch: CommitBatch, lakehouse_key: dg.AssetKey) -> Iterator[dg.AssetObservation]:
    for note in commit_batch.notes:
        yield dg.AssetObservation(
            lakehouse_key,
            description=note,
            metadata={GAP: note, VERSION: commit_batch.cursor.version},
            tags={
                DATA_VERSION_TAG: str(commit_batch.head.version)
            },  # otherwise Dagster would take it for unknown from here on
        )


def _table_events(
    commit_batch: CommitBatch, lake: Lakehouse, assets: TableAssets, instance: dg.DagsterInstance
) -> Iterator[TableEvent]:
    for commit_range in commit_batch.commit_ranges:
        before, after = commit_range.ends
        changes = TableChanges(lake, before, after, assets, instance)
        materialized = _materialized_by(commit_range, instance) if commit_range.by_neighbors else set()
        for event in changes.events(commit_range.changes, {"versions": commit_range.versions}):
            if event.asset_key not in materialized:
                yield event


def _materialized_by(commit_range: CommitRange, instance: dg.DagsterInstance) -> set[dg.AssetKey]:
    """Return the assets that the runs of a stretch materialized themselves, as those of another code location do."""
    runs = {
        run for info in commit_range.commits for run in (info.run_id, *(one.run_id for one in info.transactions)) if run
    }
    found: set[dg.AssetKey] = set()
    for run_id in runs:
        for event in run_events(instance, run_id, dg.DagsterEventType.ASSET_MATERIALIZATION):
            found.add(event.asset_key)
    return found


def _events(
    commit_batch: CommitBatch, lake: Lakehouse, page: VersionsPage
) -> Iterator[dg.AssetMaterialization | dg.AssetObservation]:
    commit_ranges = [commit_range for commit_range in commit_batch.commit_ranges if not commit_range.by_neighbors]
    if commit_ranges:
        yield from page.events(
            lake,
            "commits",
            version=commit_ranges[-1].last,
            shown={"versions": ", ".join(commit_range.versions for commit_range in commit_ranges)},
            metrics={**_tick_metrics(commit_batch), **_details(commit_ranges)},
            description="Committed outside of this Dagster instance.",
        )


def _tick_metrics(commit_batch: CommitBatch) -> dict[str, float]:
    """Return how far the sensor was behind when the tick began, and the tick's work."""
    changes = [change for commit_range in commit_batch.commit_ranges for change in commit_range.changes]
    return {
        "lag_versions": commit_batch.lag_versions,
        "lag_seconds": commit_batch.lag_ms / 1000,
        "versions_left": commit_batch.versions_left,
        "tables_changed": sum(change.table is not None for change in changes),
        "namespaces_changed": sum(change.table is None for change in changes),
    }


def _details(commit_ranges: Sequence[CommitRange]) -> dict[str, Any]:
    commits = [info for commit_range in commit_ranges for info in commit_range.commits]
    rows = [
        (
            info.version,
            f"{info.created_at:%Y-%m-%d %H:%M:%S}",
            info.operation or "",
            info.message or "",
            info.user or "",
        )
        for info in sorted(commits, key=lambda info: -info.version)
    ]
    return {
        "commits": table_value(("version", "created (UTC)", "operation", "message", "user"), rows),
    }


# Runs that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A failed run, for an alert: the reason, and the failed steps with the reason of each."""

    run_id: str
    job: str
    message: str
    steps: Mapping[str, str]
    tags: Mapping[str, str]


def build_failed_run_sensor(
    alert: Callable[[FailedRun], None],
    names: LakehouseNames = ONLY,
    *,
    name: str = "failed_runs",
    jobs: Sequence[Any] | None = None,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Return a sensor that calls a function for each failed run of some jobs, of ops or assets.

    Without ``jobs`` it covers all jobs of this code location. A call that raises is repeated twice, a few seconds
    later. Then the tick fails with its error.
    """

    @dg.run_failure_sensor(
        name=names.of(name),
        monitored_jobs=list(jobs) if jobs is not None else None,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Tells of runs that failed.",
    )
    def failed_runs(context: dg.RunFailureSensorContext) -> None:
        failed = _failed_run(context)
        waits = wait_random_exponential(multiplier=0.5, max=5)
        for attempt in Retrying(stop=stop_after_attempt(_ALERT_ATTEMPTS), wait=waits, reraise=True):
            with attempt:
                alert(failed)

    return failed_runs


def _failed_run(context: dg.RunFailureSensorContext) -> FailedRun:
    run = context.dagster_run
    reasons: dict[str, str] = {}
    for event in context.get_step_failure_events():
        data = event.step_failure_data
        user_data, error = data.user_failure_data, data.error
        reason = user_data.description if user_data is not None else None
        reasons[event.step_key or ""] = reason or (error.message.strip() if error is not None else "no reason given")
    return FailedRun(
        run_id=run.run_id,
        job=run.job_name,
        message=context.failure_event.message or "",
        steps=reasons,
        tags=dict(run.tags),
    )


_DROP_JOB = "drop_closed_branch"


def build_closed_branch_sensor(
    open_branches: Callable[[], Collection[str]],
    names: LakehouseNames = ONLY,
    *,
    minimum_interval_seconds: int = 300,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Return a sensor that requests the drop of each branch's clone once ``open_branches`` no longer names the branch.

    ``open_branches()`` returns the names of all open branches, as their deployments know them. It must raise where it
    cannot tell: without an open branch all clones of branches go. Clones of other names are left alone. The code
    location must have the job ``drop_closed_branch`` (``operations="clones"``). Each clone is asked for once; a run
    that fails is seen in Dagster, and the clone's own time ends it.
    """

    @dg.sensor(
        name=names.of("closed_branches"),
        job_name=names.of(_DROP_JOB),
        required_resource_keys={names.resource_key},
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Drops the clones of branches that are closed.",
    )
    def closed_branches(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        lake = lakehouse_of(context.resources, names).open()
        definition = lake.snapshot().definition
        # Asked after the clones were listed: the branch of each of them was opened before.
        kept = {branch_clone(branch) for branch in open_branches()}
        clones = [record for record in clones_of(definition) if record.name.startswith(BRANCH_PREFIX)]
        closed = [record for record in clones if record.name not in kept]
        for record in closed:
            yield dg.RunRequest(run_key=record.clone_id, run_config={"name": record.name})
        if not closed:
            yield dg.SkipReason(f"{len(clones)} clones of branches, all of them open")

    return closed_branches
