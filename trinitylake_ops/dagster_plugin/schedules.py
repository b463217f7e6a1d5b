"""Schedules of maintenance operations, and an automation condition for published tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import dagster as dg

from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.declarations.options import is_root_uri
from trinitylake_ops.declarations.texts import MAX_DAYS, duration_text
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations import Budget

#: Recommended cron expressions of all operations that can be scheduled, and of the checks, by unprefixed job name.
CRONS: Mapping[str, str] = {
    "repair_hint": "7 * * * *",
    "verify": "0 1 * * *",
    "drop_overdue_clones": "30 2 * * *",  # before expiration, which can then reclaim the versions kept for the clones
    "expire": "0 3 * * *",
    "trim": "0 2 * * 0",
    "purge": "0 4 * * 0",
    "orphans": "0 5 * * 0",
    "export": "0 6 * * 0",
    "check": "30 6 * * *",
}

#: The operations that reclaim space. Schedules run them without approval, and therefore only within limits.
LIMITED = ("trim", "expire", "purge", "orphans", "drop_overdue_clones")

WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackoutWindow:
    """A daily time window, in the schedules' time zone, in which no schedule starts a run.

    Raises:
        InvalidInputError: A day is not a weekday, ``days`` is empty, or a time has a time zone.
    """

    #: First time of day in the window.
    start: time
    #: First time of day after the window. If it is before ``start``, the window ends on the next day; if both are
    #: equal, the window lasts 24 hours.
    end: time
    #: Reason shown for skipped ticks.
    reason: str
    #: Weekdays on which the window starts.
    days: tuple[str, ...] = WEEKDAYS

    def __post_init__(self) -> None:
        if unknown := [day for day in self.days if day not in WEEKDAYS]:
            raise InvalidInputError(f"{unknown[0]!r} is not a weekday; choose from {', '.join(WEEKDAYS)}")
        if not self.days:
            raise InvalidInputError(f"blackout {self} has no days; omit days to cover every day")
        if self.start.tzinfo is not None or self.end.tzinfo is not None:
            raise InvalidInputError(
                f"blackout {self} has times with a time zone; use times without one, in the schedules' time zone"
            )

    def covers(self, at: datetime) -> bool:
        """Whether a local time is within the window."""
        clock = at.time()
        begins_today, began_yesterday = (WEEKDAYS[(at - back).weekday()] in self.days for back in (timedelta(0), _DAY))
        if self.start < self.end:
            return begins_today and self.start <= clock < self.end
        return (begins_today and clock >= self.start) or (began_yesterday and clock < self.end)

    def __str__(self) -> str:
        return f"{self.start:%H:%M} to {self.end:%H:%M}: {self.reason}"


def build_maintenance_schedules(
    names: LakehouseNames = ONLY,
    *,
    crons: Mapping[str, str] = CRONS,
    timezone: str = "UTC",
    blackouts: Sequence[BlackoutWindow] = (),
    export_target: str = "",
    export_prefix: str = "weekly",
    export_retain: timedelta = timedelta(days=35),
    verify_seconds: float = 3600.0,
    budget: Budget | None = None,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
) -> list[dg.ScheduleDefinition]:
    """Build the schedules ``<operation>_schedule`` of jobs from ``build_jobs``, which must include the operations.

    Trim, expire, purge, orphans and drop_overdue_clones run without approval, within the ``limits`` of ``build_jobs``.

    Args:
        names: The names of the lakehouse's definitions.
        crons: The cron expression of each operation to schedule. The allowed operations are the keys of CRONS.
        timezone: The IANA time zone of the cron expressions and of the blackouts.
        blackouts: Windows in which ticks are skipped.
        export_target: The root URI of scheduled exports. If empty, they are stored in the lakehouse.
        export_prefix: Name prefix of scheduled exports, which is followed by the date.
        export_retain: Retention of scheduled exports, which are full exports.
        verify_seconds: Time limit of a scheduled verify.
        budget: Bounds of each purge or orphan removal.
        default_status: The initial status of the schedules.

    Raises:
        InvalidInputError: An operation, the time zone or a setting of exports is invalid.
    """
    if unknown := sorted(set(crons) - set(CRONS)):
        raise InvalidInputError(f"cannot schedule unknown operation {unknown[0]!r}; choose from {', '.join(CRONS)}")
    if export_target and not is_root_uri(export_target):
        raise InvalidInputError(
            "export_target is invalid (its value is not shown because it may contain credentials); use an absolute path"
            " or a URI such as s3://BUCKET/PREFIX"
        )
    if not timedelta(0) <= export_retain <= timedelta(days=MAX_DAYS):
        raise InvalidInputError(f"export_retain is {export_retain}; it must be between 0 and {MAX_DAYS:,} days")
    zone = _zone(timezone)
    deletion = {"unattended": True, **asdict(budget or Budget())}
    configs: dict[str, _RunConfigFunction] = {
        "verify": lambda _at: {"incremental": True, "max_seconds": verify_seconds},
        "export": _export_config(export_prefix, export_target, export_retain),
        "trim": lambda _at: {"unattended": True},
        "expire": lambda _at: {"unattended": True},
        "purge": lambda _at: deletion,
        "orphans": lambda _at: deletion,
    }
    return [
        dg.ScheduleDefinition(
            name=names.of(f"{name}_schedule"),
            job_name=names.of(name),
            cron_schedule=cron,
            execution_timezone=timezone,
            execution_fn=_tick(configs.get(name, _no_config), zone, blackouts),
            default_status=default_status,
        )
        for name, cron in crons.items()
    ]


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (
        ZoneInfoNotFoundError,
        ValueError,
        OSError,
    ) as error:  # ValueError and OSError: the name is a path or a directory
        raise InvalidInputError(f"unknown time zone {name!r}; use an IANA name such as Europe/Berlin or UTC") from error


_RunConfigFunction = Callable[[datetime], Mapping[str, Any]]


def _tick(
    config: _RunConfigFunction, zone: ZoneInfo, blackouts: Sequence[BlackoutWindow]
) -> Callable[[dg.ScheduleEvaluationContext], dg.RunRequest | dg.SkipReason]:
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        at = context.scheduled_execution_time.astimezone(zone)
        for window in blackouts:
            if window.covers(at):
                return dg.SkipReason(f"{at:%A %H:%M} is within the blackout {window}")
        return dg.RunRequest(run_config=config(at))

    return tick


def _no_config(_at: datetime) -> Mapping[str, Any]:
    return {}


def _export_config(prefix: str, target: str, retain: timedelta) -> _RunConfigFunction:
    def config(at: datetime) -> Mapping[str, Any]:
        return {
            "name": f"{prefix}-{at:%Y-%m-%d}",
            "level": "full",
            "target": target or None,
            "retain_for": duration_text(retain) if retain else None,
        }

    return config


def published() -> Any:
    """Return an ``AutomationCondition`` that requests an asset after a table that it depends on was published.

    The condition works like ``AutomationCondition.eager()``, except that the asset never joins the run that stages the
    table. In that run, the asset would read a table that is not published yet.
    """
    condition = dg.AutomationCondition
    is_new = condition.newly_updated() & ~condition.executed_with_root_target()
    return (
        condition.in_latest_time_window()
        & (condition.newly_missing() | condition.any_deps_match(is_new)).since_last_handled()
        & ~condition.any_deps_match(condition.missing())
        & ~condition.any_deps_in_progress()
        & ~condition.in_progress()
    ).with_label("published")
