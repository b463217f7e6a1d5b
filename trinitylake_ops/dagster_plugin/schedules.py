"""Schedules of maintenance operations, and automation conditions that follow what is published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import dagster as dg

from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.declarations.options import MOST_DAYS, duration_text, is_root_uri
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations import Budget

#: Recommended times of the operations that may be scheduled, and of the checks, by the names of their jobs.
CRONS: Mapping[str, str] = {
    "repair_hint": "7 * * * *",
    "verify": "0 1 * * *",
    "drop_overdue_clones": "30 2 * * *",  # before expiry, which frees what was kept for them
    "expire": "0 3 * * *",
    "trim": "0 2 * * 0",
    "purge": "0 4 * * 0",
    "orphans": "0 5 * * 0",
    "export": "0 6 * * 0",
    "check": "30 6 * * *",
}

#: The operations among them that free something. They run without approval, so only within limits.
LIMITED = ("trim", "expire", "purge", "orphans", "drop_overdue_clones")

WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackoutWindow:
    """A daily window without starts, from ``start`` until before ``end``, in the schedules' time zone.

    A window that ends before it starts lasts until the next day. One that ends when it starts lasts a whole day.
    ``days`` are the days on which it begins. Raises InvalidInputError for a day that is no weekday, for no days, and
    for times with a zone.
    """

    start: time
    end: time
    reason: str
    days: tuple[str, ...] = WEEKDAYS

    def __post_init__(self) -> None:
        if unknown := [day for day in self.days if day not in WEEKDAYS]:
            raise InvalidInputError(f"{unknown[0]!r} is no weekday; there are {', '.join(WEEKDAYS)}")
        if not self.days:
            raise InvalidInputError(f"the blackout {self} begins on no day; leave the days out for all")
        if self.start.tzinfo is not None or self.end.tzinfo is not None:
            raise InvalidInputError(f"the blackout {self} has a time zone of its own; its times are in the schedules'")

    def covers(self, at: datetime) -> bool:
        """Whether the window is open at a local time."""
        clock = at.time()
        is_today, is_yesterday = (WEEKDAYS[(at - back).weekday()] in self.days for back in (timedelta(0), _DAY))
        if self.start < self.end:
            return is_today and self.start <= clock < self.end
        return (is_today and clock >= self.start) or (is_yesterday and clock < self.end)

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
    """Return schedules ``<operation>_schedule`` that run jobs of ``build_jobs``, which must have those operations.

    Trim, expire, purge, orphans and the drop of clones run without approval, within the ``limits`` of ``build_jobs``.

    Args:
        names: The names of the lakehouse.
        crons: The time of each operation to schedule, by its name. Those that may be scheduled are in CRONS.
        timezone: The time zone of the times and of the blackouts.
        blackouts: Windows in which ticks are skipped.
        export_target: The root of scheduled exports. Empty: the lakehouse's own.
        export_prefix: The beginning of the name of each scheduled export, before the date.
        export_retain: For how long scheduled exports, which are full, are kept.
        verify_seconds: For how long a scheduled verify may run.
        budget: The bound on the requests of a purge or removal of orphans.
        default_status: Whether the schedules are on until a person turns them on or off.

    Raises:
        InvalidInputError: An operation, a time zone or the settings of exports are impossible.
    """
    if unknown := sorted(set(crons) - set(CRONS)):
        raise InvalidInputError(f"there is no operation {unknown[0]!r} to schedule; there are {', '.join(CRONS)}")
    if export_target and not is_root_uri(export_target):
        raise InvalidInputError(
            "export_target is not shown, as it may hold credentials; give an absolute path or a URI such as"
            " s3://BUCKET/PREFIX"
        )
    if not timedelta(0) <= export_retain <= timedelta(days=MOST_DAYS):
        raise InvalidInputError(f"export_retain is {export_retain}, it must be from 0 to {MOST_DAYS:,} days")
    zone = _zone(timezone)
    deletion = {"unattended": True, **asdict(budget or Budget())}
    configs: dict[str, _MakesConfig] = {
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
    ) as error:  # errors for a path, and for a folder
        raise InvalidInputError(f"there is no time zone {name!r}; write it as Europe/Berlin or UTC") from error


_MakesConfig = Callable[[datetime], Mapping[str, Any]]


def _tick(
    config: _MakesConfig, zone: ZoneInfo, blackouts: Sequence[BlackoutWindow]
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


def _export_config(prefix: str, target: str, retain: timedelta) -> _MakesConfig:
    def config(at: datetime) -> Mapping[str, Any]:
        return {
            "name": f"{prefix}-{at:%Y-%m-%d}",
            "level": "full",
            "target": target or None,
            "retain_for": duration_text(retain) if retain else None,
        }

    return config


def published() -> Any:
    """Return a condition, an ``AutomationCondition``, to run when a table that an asset depends on was published.

    It is as ``AutomationCondition.eager()``, which also follows published tables only. But this one never joins the run
    that stages a table. There the asset would read what no version has yet.
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
