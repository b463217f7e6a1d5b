"""Sensors for commits made outside of a code location, failed runs and closed branches."""

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

#: Tag of a run that a sensor requested, with the latest version at that time.
VERSION_TAG = "trinitylake/version"

_GRPC_TIMEOUT_VARIABLES = ("DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS", "DAGSTER_GRPC_TIMEOUT_SECONDS")
_GRPC_TIMEOUT_SECONDS = 60
_GRPC_MARGIN_SECONDS = 20
_MIN_SECONDS = 5.0
_ALERT_ATTEMPTS = 3


def tick_budget_seconds() -> float:
    """Return the time limit of a tick: the timeout of Dagster's daemon for a sensor, minus a margin."""
    value = next((os.environ[name] for name in _GRPC_TIMEOUT_VARIABLES if os.environ.get(name)), None)
    timeout = int(value) if value is not None else _GRPC_TIMEOUT_SECONDS
    return max(_MIN_SECONDS, timeout - _GRPC_MARGIN_SECONDS)


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
    """Build a sensor that reports commits that were not made by runs of this code location.

    A table that such a commit added or changed is reported as a materialization of the assets that contain it, for the
    partitions whose files changed (:class:`TableAssets`). A removed table is reported as an observation. A tick that
    reports commits also materializes the lakehouse asset. For commits by other code locations of the same Dagster
    instance, only tables are reported, and only to assets that those runs did not report themselves.

    The first tick only records the latest version. A tick stops at its limits, and the next tick continues from there.
    Events are delivered at least once, and a run is requested once.

    Args:
        names: The names of the lakehouse's definitions.
        name: The unprefixed name of the sensor.
        job: The job to run for the newest version, if any.
        job_name: The name of the job to run, as an alternative to ``job``, for asset jobs.
        run_config: Returns the job's run configuration for a version.
        table_key: Returns the asset to which changes to a table are reported, given the table's namespace and name. By
            default, they are reported to all assets that contain the table.
        minimum_interval_seconds: Minimum time between ticks.
        max_versions_per_tick: Maximum number of versions that a tick reads.
        max_tables_per_tick: Maximum number of changed objects that a tick reports.
        max_seconds_per_tick: Time after which a tick starts no further work. Defaults to the daemon's timeout minus 20
            seconds.
        default_status: The initial status of the sensor.
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
        description="Report tables changed by commits made outside of this code location.",
    )
    def commits(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        instance = context.instance
        try:
            resource = lakehouse_of(context.resources, names)
            lake = resource.open()
        except LakehouseNotFoundError as error:
            return dg.SensorResult(skip_reason=str(error))
        code_location = _code_location(context)
        commit_batch = poll_commits(lake, context.cursor, lambda run: _run_origin(instance, run, code_location), limits)
        location = context.repository_def
        keys = table_key or (names.table_key if location is None else None)  # tests have no code location
        assets = TableAssets(location, names, resource, keys)
        page = VersionsPage(instance, location, names, Links.at(location, code_location, names, resource.webserver_url))
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
    """Return the sensor's code location in the form that runs use, or None in a test without a code location."""
    origin = context.code_location_origin
    return None if origin is None else f"{context.repository_name}@{origin.location_name}"


def _run_origin(instance: dg.DagsterInstance, run_id: str, code_location: str | None) -> RunOrigin:
    """Classify a run. A run that does not name a code location counts as a run of this one.

    A finished run that did not succeed may have been killed between its commit and its events. It reported only a part
    of its changes, like a run of another code location.
    """
    run = known_run(instance, run_id)
    if run is None:
        return "other"
    if code_location is not None and (code_location_of(run) or code_location) != code_location:
        return "neighbor"
    return "running" if not run.is_finished else "own" if run.is_success else "neighbor"


def _run_request(commit_batch: CommitBatch, run_config: Callable[[int], Mapping[str, Any]] | None) -> dg.RunRequest:
    version = commit_batch.head.version
    # Include the commit's id, because a lakehouse that replaces another one reuses version numbers.
    commit = commit_batch.head.root.system.get(COMMIT_ID, str(commit_batch.head.created_at_ms))
    return dg.RunRequest(
        run_key=f"{commit_batch.cursor.lakehouse_id}-{version}-{commit}",
        run_config={} if run_config is None else run_config(version),
        tags={VERSION_TAG: str(version)},
    )


def _tick_message(commit_batch: CommitBatch) -> str:
    """Return the skip reason of a tick that requests no run."""
    if commit_batch.commit_ranges or commit_batch.notes:
        summary = "; ".join(
            [
                *commit_batch.notes,
                *(f"reported versions {commit_range.versions}" for commit_range in commit_batch.commit_ranges),
            ]
        )
        return f"{summary}; no run is due; {commit_batch.versions_left} versions remain"
    message = f"latest version: {commit_batch.head.version}; {commit_batch.versions_left} versions remain"
    if not commit_batch.own:
        return message
    return f"{message}; {commit_batch.own} versions since the last tick were committed by own runs"


def _note_events(commit_batch: CommitBatch, lakehouse_key: dg.AssetKey) -> Iterator[dg.AssetObservation]:
    for note in commit_batch.notes:
        yield dg.AssetObservation(
            lakehouse_key,
            description=note,
            metadata={GAP: note, VERSION: commit_batch.cursor.version},
            # Without the tag, the data version would become unknown to Dagster.
            tags={DATA_VERSION_TAG: str(commit_batch.head.version)},
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
    """Return the assets that the runs of a commit range materialized themselves."""
    run_ids = {
        run_id
        for info in commit_range.commits
        for run_id in (info.run_id, *(transaction.run_id for transaction in info.transactions))
        if run_id
    }
    materialized: set[dg.AssetKey] = set()
    for run_id in run_ids:
        for event in run_events(instance, run_id, dg.DagsterEventType.ASSET_MATERIALIZATION):
            materialized.add(event.asset_key)
    return materialized


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
            description="Commits made outside of this Dagster instance.",
        )


def _tick_metrics(commit_batch: CommitBatch) -> dict[str, float]:
    """Return how far the sensor was behind when the tick started, and what the tick reported."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A failed run, as passed to an alert."""

    run_id: str
    #: The job name.
    job: str
    #: The run's error message.
    message: str
    #: Each failed step's error message, by step key.
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
    """Build a sensor that calls a function for each failed run.

    Args:
        alert: The function. If it raises, it is called up to two more times within a few seconds; then the tick fails
            with its error.
        names: The names of the lakehouse's definitions.
        name: The unprefixed name of the sensor.
        jobs: The jobs to monitor. Defaults to all jobs of this code location.
        minimum_interval_seconds: Minimum time between ticks.
        default_status: The initial status of the sensor.
    """

    @dg.run_failure_sensor(
        name=names.of(name),
        monitored_jobs=list(jobs) if jobs is not None else None,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Alert on failed runs.",
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
        reasons[event.step_key or ""] = reason or (error.message.strip() if error is not None else "no error message")
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
    """Build a sensor that drops the clone of each branch that is no longer open.

    Only clones of branches are dropped. The code location must have the job ``drop_closed_branch``
    (``operations="clones"``). The sensor requests one run for each clone. If that run fails, it is visible in Dagster,
    and the clone becomes overdue after its retention.

    Args:
        open_branches: Returns the names of all open branches, as branch deployments name them. It must raise if it
            cannot determine them, because an empty result drops the clones of all branches.
        names: The names of the lakehouse's definitions.
        minimum_interval_seconds: Minimum time between ticks.
        default_status: The initial status of the sensor.
    """

    @dg.sensor(
        name=names.of("closed_branches"),
        job_name=names.of(_DROP_JOB),
        required_resource_keys={names.resource_key},
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Drop the clones of closed branches.",
    )
    def closed_branches(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        lake = lakehouse_of(context.resources, names).open()
        definition = lake.snapshot().definition
        # Query the branches after listing the clones, so that the branch of each listed clone was already open.
        open_clones = {branch_clone(branch) for branch in open_branches()}
        clones = [record for record in clones_of(definition) if record.name.startswith(BRANCH_PREFIX)]
        closed_clones = [record for record in clones if record.name not in open_clones]
        for record in closed_clones:
            yield dg.RunRequest(run_key=record.clone_id, run_config={"name": record.name})
        if not closed_clones:
            yield dg.SkipReason(f"no closed branches; {len(clones)} clones belong to open branches")

    return closed_branches
