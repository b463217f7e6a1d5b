"""All definitions to monitor, maintain and change lakehouses in a Dagster code location, built by one function."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any

import dagster as dg

from trinitylake_ops.dagster_plugin.assets import (
    RECLAIMABLE_SECONDS,
    build_exports_asset,
    build_head_asset,
    build_observe_job,
    build_table_asset,
)
from trinitylake_ops.dagster_plugin.checks import (
    CHECK_JOB,
    DEFAULT_CHECKS,
    CheckLimits,
    build_checks_job,
    build_lakehouse_checks,
    chosen_checks,
    repairing_jobs,
)
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
from trinitylake_ops.dagster_plugin.schedules import LIMITED, BlackoutWindow, build_maintenance_schedules
from trinitylake_ops.dagster_plugin.sensors import FailedRun, build_commit_sensor, build_failed_run_sensor
from trinitylake_ops.dagster_plugin.table_events import TableKey
from trinitylake_ops.declarations.options import ApplyLimits, is_root_uri
from trinitylake_ops.declarations.registry import BY_NAME
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.operations import Budget
from trinitylake_ops.storage.registry import server_options


@dataclass(frozen=True, slots=True, kw_only=True)
class LakehouseSettings:
    """Configuration of one lakehouse in a code location."""

    #: The resource that opens the lakehouse.
    lakehouse: TrinityLakeResource
    #: Required. Prefix of the names of all definitions: ``sales`` gives the job ``sales_verify`` and the asset
    #: ``sales/lakehouse``. An empty name adds no prefix, which is only allowed for a single lakehouse.
    name: str | None = None
    #: Tables that no asset of this code location writes, as ``namespace.table``. They become observable assets.
    tables: Sequence[str] = ()
    #: Assets that publish into the lakehouse. The lakehouse asset depends on them.
    published_by: Sequence[dg.AssetKey] = ()
    #: Jobs to add to the default ones: names of operations, the groups ``"clones"``, ``"tables"`` and ``"admin"``, or
    #: ``"all"``. The jobs that checks and schedules need are always included.
    operations: str | Sequence[str] = ()
    #: Names of the checks, or ``"all"``.
    checks: str | Sequence[str] = DEFAULT_CHECKS
    #: Thresholds beyond which the checks fail.
    check_limits: CheckLimits | None = None
    #: Limits for operations that reclaim space without approval. Without limits, they cannot be scheduled.
    limits: ApplyLimits | None = None
    #: IANA time zone of all schedules and blackouts.
    timezone: str = "UTC"
    #: Cron expressions of the operations to schedule, by name. ``"check"`` runs all checks. CRONS contains recommended
    #: values.
    crons: Mapping[str, str] = field(default_factory=dict)
    #: Cron expression for observing the lakehouse and its tables. None disables it.
    observe_cron: str | None = "*/30 * * * *"
    #: Time windows in which no schedule of ``crons`` starts a run.
    blackouts: Sequence[BlackoutWindow] = ()
    #: Root URI of scheduled exports. If empty, they are stored in the lakehouse.
    export_target: str = ""
    #: Retention of scheduled exports.
    export_retain: timedelta = timedelta(days=35)
    #: Bounds of each scheduled purge or orphan removal.
    budget: Budget | None = None
    #: Name of this code location, for links from checks to jobs.
    location_name: str | None = None
    #: Time limit for counting reclaimable bytes in an observation. 0 disables it.
    reclaimable_seconds: float = RECLAIMABLE_SECONDS
    #: Name of a job to run after commits made outside of this code location.
    on_commit: str | None = None
    #: Returns the asset to which changes to a table are reported, given the table's namespace and name. By default,
    #: they are reported to all assets that contain the table (:class:`TableAssets`).
    table_key: TableKey | None = None
    #: Called for each failed run of this lakehouse's jobs.
    alert: Callable[[FailedRun], None] | None = None
    #: Whether schedules and sensors are initially on. Otherwise, they are off until they are turned on in the UI.
    is_on: bool = False
    #: Spark for the IO manager and for operations that use Spark.
    spark: SparkResource = field(default_factory=SparkResource)

    @property
    def names(self) -> LakehouseNames:
        """The names of the lakehouse's definitions. Raises InvalidInputError if ``name`` is invalid."""
        return LakehouseNames(self.name or "")


def build_trinitylake_definitions(*lakehouses: LakehouseSettings) -> dg.Definitions:
    """Build all definitions of one or more lakehouses.

    For each lakehouse, these are a resource and an IO manager, assets for the lakehouse, its exports and its tables,
    checks, operations as jobs, a sensor for commits made outside of the code location, schedules and, with an alert, a
    sensor for failed runs.

    Raises:
        InvalidInputError: Two lakehouses have the same name or root, one of several lakehouses has no name, or settings
            are invalid.
    """
    for settings in lakehouses:
        _check_settings(settings)
    _check_apart(lakehouses)
    return dg.Definitions.merge(*map(_definitions, lakehouses))


def _check_settings(settings: LakehouseSettings) -> None:
    if settings.name is None:
        raise InvalidInputError(
            "name= of LakehouseSettings is required: it prefixes every job and asset of the lakehouse, for example"
            " name='sales' creates the job sales_expire; name='' adds no prefix, which keeps existing unprefixed names"
        )
    if settings.limits is None and (limited := [name for name in LIMITED if name in settings.crons]):
        raise InvalidInputError(
            f"cannot schedule {limited[0]!r}: it reclaims space without approval, and no limits are set; set limits, or"
            " remove it from crons"
        )
    if not 0 <= settings.reclaimable_seconds < math.inf:
        raise InvalidInputError(
            f"reclaimable_seconds is {settings.reclaimable_seconds}; it must be a finite number of at least 0"
        )


def _check_apart(lakehouses: Sequence[LakehouseSettings]) -> None:
    names, roots = Counter(settings.name for settings in lakehouses), Counter(map(_root, lakehouses))
    if len(lakehouses) > 1 and "" in names:
        raise InvalidInputError(
            "name= is empty: with several lakehouses, each needs a name to distinguish its definitions; set name="
        )
    if duplicates := [name for name, count in names.items() if count > 1]:
        raise InvalidInputError(f"two lakehouses have the same name={duplicates[0]!r}; use distinct names")
    if shared := [root for root, count in roots.items() if count > 1]:
        same = ", ".join(repr(settings.name) for settings in lakehouses if _root(settings) == shared[0])
        raise InvalidInputError(
            f"lakehouses {same} have the same root: a lakehouse must have only one set of schedules and sensors; remove"
            " all but one of them"
        )


def _root(settings: LakehouseSettings) -> tuple[str, str | None]:
    """Return the normalized root and its server, because each server has separate buckets or tables."""
    root = _resolve_env(settings.lakehouse.root)
    if root is None or not is_root_uri(root):  # the variable is not set in this process, or opening rejects it
        return settings.lakehouse.root, None
    root = normalize_root_uri(root)
    options = settings.lakehouse.storage_options
    servers = (_resolve_env(options.of_scheme(root.partition("://")[0], name)) for name in server_options(root))
    return root, next((server.rstrip("/") for server in servers if server), None)


def _resolve_env(value: str | None) -> str | None:
    """Return the value of an EnvVar in this process, or the value itself if it is not an EnvVar."""
    return value.get_value() if isinstance(value, dg.EnvVar) else value


def _definitions(settings: LakehouseSettings) -> dg.Definitions:
    names, group = settings.names, settings.names.of("lakehouse")
    tables = [
        build_table_asset(table, names, io_manager_key=names.io_manager_key, group_name=group)
        for table in settings.tables
    ]
    head = build_head_asset(
        names, deps=settings.published_by, reclaimable_seconds=settings.reclaimable_seconds, group_name=group
    )
    checks = build_lakehouse_checks(
        names, checks=settings.checks, limits=settings.check_limits, location_name=settings.location_name
    )
    observe_job = build_observe_job(names, [table.key for table in tables])
    jobs: list[Any] = [
        *build_jobs(
            names,
            settings.spark,
            operations=_operations(settings),
            table_key=settings.table_key,
            limits=settings.limits,
        ),
        observe_job,
    ]
    if CHECK_JOB in settings.crons or settings.on_commit == names.of(CHECK_JOB):
        jobs.append(build_checks_job(checks, names))
    return dg.Definitions(
        assets=[head, build_exports_asset(names, group_name=group), *tables],
        asset_checks=checks,
        jobs=jobs,
        sensors=_sensors(settings, jobs),
        schedules=_schedules(settings, observe_job),
        resources={
            names.resource_key: settings.lakehouse,
            names.io_manager_key: TrinityLakeIOManager(lakehouse=settings.lakehouse, spark=settings.spark),
        },
    )


def _operations(settings: LakehouseSettings) -> list[str]:
    """Return the selected operations, and those that the checks and schedules need."""
    chosen = [settings.operations] if isinstance(settings.operations, str) else settings.operations
    scheduled = [name for name in settings.crons if name in BY_NAME]
    return [*chain(chosen, scheduled, repairing_jobs(chosen_checks(settings.checks)))]


def _sensors(settings: LakehouseSettings, jobs: Sequence[Any]) -> list[dg.SensorDefinition]:
    names = settings.names
    status = dg.DefaultSensorStatus.RUNNING if settings.is_on else dg.DefaultSensorStatus.STOPPED
    commits = build_commit_sensor(
        names,
        job_name=settings.on_commit,
        table_key=settings.table_key,
        default_status=status,
    )
    if settings.alert is None:
        return [commits]
    return [commits, build_failed_run_sensor(settings.alert, names, jobs=jobs, default_status=status)]


def _schedules(settings: LakehouseSettings, observe_job: Any) -> list[dg.ScheduleDefinition]:
    names = settings.names
    status = dg.DefaultScheduleStatus.RUNNING if settings.is_on else dg.DefaultScheduleStatus.STOPPED
    schedules = build_maintenance_schedules(
        names=names,
        crons=settings.crons,
        timezone=settings.timezone,
        blackouts=settings.blackouts,
        export_target=settings.export_target,
        export_retain=settings.export_retain,
        budget=settings.budget,
        default_status=status,
    )
    if settings.observe_cron is None:
        return schedules
    observe = dg.ScheduleDefinition(
        name=names.of("observe_schedule"),
        job=observe_job,
        cron_schedule=settings.observe_cron,
        execution_timezone=settings.timezone,
        default_status=status,
    )
    return [*schedules, observe]
