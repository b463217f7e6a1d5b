"""One call for a code location: all definitions that show lakehouses, keep them in order and change them in Dagster."""

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
    """The settings of one lakehouse in a code location.

    ``name`` begins the names of all its definitions (see LakehouseNames), and has to be given. An empty one leaves them
    as they are: such a lakehouse takes ``lakehouse``, ``exports``, ``verify`` and so on of its code location.
    ``tables``, each as ``namespace.table``, become observable assets. They are tables that no asset here stages.
    ``published_by`` are the assets that publish into the lakehouse. ``operations`` adds jobs to the common ones: names
    of operations, the groups ``"clones"``, ``"tables"`` and ``"admin"``, or ``"all"``. ``checks`` are the names of the
    checks, or ``"all"``, and ``check_limits`` those beyond which they fail. What checks and schedules need is among the
    jobs in any case. ``crons`` schedules operations, and ``"check"`` all checks, in ``timezone``: CRONS has recommended
    times. ``limits`` are those of runs that free something without approval. Without them none of these is scheduled.
    ``observe_cron`` says when head and tables are observed, None never. Within ``blackouts`` nothing that ``crons``
    schedules begins. ``export_target`` is the root of scheduled exports; if empty, it is the lakehouse's own.
    ``budget`` bounds the requests of a scheduled purge or removal of orphans. ``location_name`` is the code location,
    for links of checks to jobs. ``reclaimable_seconds`` is how long an observation may count the bytes that can be
    freed. ``on_commit`` names a job to run after commits of others. ``table_key(namespace, table)`` names the asset to
    which changes of a table are reported, by default the assets that hold it (:class:`TableAssets`). ``alert`` is
    called for each failed run of the lakehouse's jobs. Schedules and sensors are off until a person turns them on, or
    ``is_on``. ``spark`` is for the IO manager and the operations that use Spark.
    """

    lakehouse: TrinityLakeResource
    name: str | None = None
    tables: Sequence[str] = ()
    published_by: Sequence[dg.AssetKey] = ()
    operations: str | Sequence[str] = ()
    checks: str | Sequence[str] = DEFAULT_CHECKS
    check_limits: CheckLimits | None = None
    limits: ApplyLimits | None = None
    timezone: str = "UTC"
    crons: Mapping[str, str] = field(default_factory=dict)
    observe_cron: str | None = "*/30 * * * *"
    blackouts: Sequence[BlackoutWindow] = ()
    export_target: str = ""
    export_retain: timedelta = timedelta(days=35)
    budget: Budget | None = None
    location_name: str | None = None
    reclaimable_seconds: float = RECLAIMABLE_SECONDS
    on_commit: str | None = None
    table_key: TableKey | None = None
    alert: Callable[[FailedRun], None] | None = None
    is_on: bool = False
    spark: SparkResource = field(default_factory=SparkResource)

    @property
    def names(self) -> LakehouseNames:
        """The names of its definitions. Raises InvalidInputError."""
        return LakehouseNames(self.name or "")


def build_trinitylake_definitions(*lakehouses: LakehouseSettings) -> dg.Definitions:
    """Return all definitions of some lakehouses, for a code location or to merge with others of it.

    Each has its resource and IO manager. Head, exports and tables become assets. There are checks, the operations as
    jobs, a sensor for commits of others, and schedules. With an alert there is a sensor for failed runs.

    Raises:
        InvalidInputError: Two have one name or root, one of several has no name, or settings are impossible.
    """
    for settings in lakehouses:
        _check_settings(settings)
    _check_apart(lakehouses)
    return dg.Definitions.merge(*map(_definitions, lakehouses))


def _check_settings(settings: LakehouseSettings) -> None:
    if settings.name is None:
        raise InvalidInputError(
            "name= of LakehouseSettings is missing: it begins the names of all definitions of the lakehouse, such as"
            " name='sales' those of sales_expire and sales/lakehouse. name='' leaves names as they are without"
            " one; take it where runs and assets have these names already"
        )
    if settings.limits is None and (asked := [name for name in LIMITED if name in settings.crons]):
        raise InvalidInputError(f"crons has {asked[0]!r}, which no schedule does without limits")
    if not 0 <= settings.reclaimable_seconds < math.inf:
        raise InvalidInputError(f"reclaimable_seconds is {settings.reclaimable_seconds}, it must be at least 0")


def _check_apart(lakehouses: Sequence[LakehouseSettings]) -> None:
    names, roots = Counter(one.name for one in lakehouses), Counter(map(_root, lakehouses))
    if len(lakehouses) > 1 and "" in names:
        raise InvalidInputError("a lakehouse beside others needs a name=: its definitions begin with it")
    if twice := [name for name, times in names.items() if times > 1]:
        raise InvalidInputError(f"two lakehouses have the same name={twice[0]!r}")
    if shared := [root for root, times in roots.items() if times > 1]:
        same = ", ".join(repr(one.name) for one in lakehouses if _root(one) == shared[0])
        raise InvalidInputError(f"{same} have one root: a lakehouse has one set of schedules and sensors")


def _root(settings: LakehouseSettings) -> tuple[str, str | None]:
    """Return the root by which two lakehouses are compared, with its server, as each has its own buckets or tables."""
    root = _value(settings.lakehouse.root)
    if root is None or not is_root_uri(root):  # the variable is not set here yet, or the opener will refuse it
        return settings.lakehouse.root, None
    root = normalize_root_uri(root)
    options = settings.lakehouse.storage_options
    given = (_value(options.of_scheme(root.partition("://")[0], name)) for name in server_options(root))
    return root, next((place.rstrip("/") for place in given if place), None)


def _value(given: str | None) -> str | None:
    """Return the value of an EnvVar in this process, and anything else as it is."""
    return given.get_value() if isinstance(given, dg.EnvVar) else given


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
    """Return the operations that are chosen, and those that the checks and schedules need."""
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
