"""Schedules of the operations that keep a lakehouse in order, and windows in which they rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import dagster as dg

from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.ops.operation import build_job
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.maintenance import Budget
from trinitylake_ops.operations.declared.overdue import drop_overdue
from trinitylake_ops.operations.declared.scheduled import ApplyLimits, scheduled_operations
from trinitylake_ops.operations.names import is_root_uri
from trinitylake_ops.operations.options import MOST_DAYS

#: When each operation runs by default, by its name.
CRONS: Mapping[str, str] = {
    "hint": "7 * * * *",
    "verify": "0 1 * * *",
    "drop_clones": "30 2 * * *",  # before expiry, which frees what was kept for them
    "expire": "0 3 * * *",
    "trim": "0 2 * * 0",
    "purge": "0 4 * * 0",
    "orphans": "0 5 * * 0",
    "export": "0 6 * * 0",
    "checks": "30 6 * * *",
}

WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")

#: The jobs of ``build_jobs`` that schedules run.
_JOBS = {"hint": "repair_hint", "verify": "verify", "export": "export_full"}
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
    limits: ApplyLimits,
    timezone: str = "UTC",
    crons: Mapping[str, str | None] | None = None,
    blackouts: Sequence[BlackoutWindow] = (),
    export_target: str = "",
    export_prefix: str = "weekly",
    export_retain: timedelta = timedelta(days=35),
    verify_seconds: float = 3600.0,
    budget: Budget | None = None,
    checks_job: str | None = None,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
) -> list[dg.ScheduleDefinition]:
    """Return schedules that keep a lakehouse in order: for ``dg.Definitions``, beside the jobs of ``build_jobs``.

    They are named ``<operation>_schedule`` for the operations in CRONS, after the name of the lakehouse, if it has one.
    ``crons`` gives other times; None leaves one out. Trim, expire, purge, orphans and drops of clones run as jobs
    ``<operation>_scheduled``, made here. They run without approval within ``limits``, in the lakehouse's pool. Purge
    and orphans stop at ``budget``. The others run the jobs of the same lakehouse. Exports are full, named by prefix and
    date, and retained for a time. ``checks_job`` is the name of the job that ``build_checks_job`` made, None if there
    is none. Ticks within one of ``blackouts`` are skipped. Raises InvalidInputError for unknown operations and time
    zones, and for impossible exports.
    """
    if unknown := sorted(set(crons or {}) - set(CRONS)):
        raise InvalidInputError(f"there is no operation {unknown[0]!r} to schedule; there are {', '.join(CRONS)}")
    if export_target and not is_root_uri(export_target):
        raise InvalidInputError(
            "export_target is not shown, as it may hold credentials; give an absolute path or a URI such as"
            " s3://BUCKET/PREFIX"
        )
    if not timedelta(0) <= export_retain <= timedelta(days=MOST_DAYS):
        raise InvalidInputError(f"export_retain is {export_retain}, it must be from 0 to {MOST_DAYS:,} days")
    zone = _zone(timezone)
    configs: dict[str, _MakesConfig] = {
        "verify": lambda _at: {"incremental": True, "max_seconds": verify_seconds},
        "export": _export_config(export_prefix, export_target, export_retain),
    }
    scheduled = {**scheduled_operations(limits, budget or Budget()), "drop_clones": drop_overdue(limits)}
    jobs = {name: build_job(operation, names) for name, operation in scheduled.items()}
    others = {name: names.of(job) for name, job in _JOBS.items()} | {"checks": checks_job}
    return [
        dg.ScheduleDefinition(
            name=names.of(f"{name}_schedule"),
            job=jobs.get(name),
            job_name=others.get(name),
            cron_schedule=cron,
            execution_timezone=timezone,
            execution_fn=_tick(configs.get(name, _no_config), zone, blackouts),
            default_status=default_status,
        )
        for name, cron in {**CRONS, **(crons or {})}.items()
        if cron is not None and (name in jobs or others[name] is not None)
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
        return {"name": f"{prefix}-{at:%Y-%m-%d}", "target": target, "retain_days": retain / _DAY}

    return config
