"""Trim, expire, purge and orphans without approval: planned and applied in one op, within limits set in code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.dagster_plugin.metadata import figures
from trinitylake_ops.dagster_plugin.ops import log_version, logged_progress, operating, report_metadata
from trinitylake_ops.dagster_plugin.plans import check_pool, end_deletion
from trinitylake_ops.dagster_plugin.purge_ops import orphans_shown, purge_shown
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.retention_ops import expire_shown, trim_shown, warn_of_unreadable
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.maintenance import Budget, RetentionPolicy
from trinitylake_ops.maintenance.report import Plan

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyLimits:
    """Up to where a schedule may let go of something without anybody's approval.

    A plan with more files or bytes fails its run, and nothing is done. What is younger than ``min_age`` is no part of a
    plan: versions superseded, or for a purge expired, and orphans written since; where the lakehouse's own settings ask
    for more, those count. Raises InvalidInputError for negative ones.
    """

    max_files: int
    max_bytes: int
    min_age: timedelta

    def __post_init__(self) -> None:
        for name in ("max_files", "max_bytes"):
            number = getattr(self, name)
            if type(number) is not int or number < 0:
                raise InvalidInputError(f"{name} is {number!r}, it must be a number, at least 0")
        if self.min_age < timedelta(0):
            raise InvalidInputError(f"min_age is {self.min_age}, it must be at least 0")

    def __str__(self) -> str:
        return f"at most {self.max_files} files and {self.max_bytes} bytes, not younger than {self.min_age}"

    def policy(self, lake: Lakehouse) -> RetentionPolicy:
        """Return the lakehouse's settings, which let nothing go that is too young."""
        own = RetentionPolicy.of(lake.snapshot().definition)
        return replace(own, protected_ms=max(own.protected_ms, self.min_age // _MILLISECOND))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """What the ops of schedules have in common: limits, how much they may ask of the storage, and their pool."""

    limits: ApplyLimits
    budget: Budget
    pool: str

    def approve(
        self, context: dg.OpExecutionContext, operation: str, plan: Plan, shown: Mapping[str, Any], done: str
    ) -> dict[str, Any]:
        """Return metadata of a plan within the limits. Raises Failure, with that metadata, for one beyond.

        ``done`` says what the plan does. Plans that count no files are within limits of files and bytes.
        """
        files, size_bytes = int(shown.get("files", 0)), int(shown.get("bytes", 0))
        metadata = figures({"digest": plan.digest, "base_version": plan.base_version, "limits": str(self.limits)})
        if files > self.limits.max_files or size_bytes > self.limits.max_bytes:
            raise dg.Failure(
                description=f"this {operation} {done} {files} files of {size_bytes} bytes, which is beyond what"
                f" schedules may do without approval ({self.limits}); nothing was done: look at the plan, then run"
                f" {operation}_plan, and {operation}_apply with the digest that it shows",
                metadata={**metadata, **figures(shown)},
                allow_retries=False,
            )
        context.log.info("%s; within the limits of schedules: %s", plan.table().title, self.limits)
        return {**metadata, "approved_by": "the limits of schedules"}


def build_scheduled_ops(scheduled: Scheduled) -> dict[str, dg.OpDefinition]:
    """Return an op each for trim, expire, purge and orphans, by these names."""
    steps: dict[str, tuple[Callable[[dg.OpExecutionContext, Lakehouse, Scheduled], None], str]] = {
        "trim": (_trim, "Drops snapshots that no kept version needs from the latest version of managed tables."),
        "expire": (
            _expire,
            "Lets versions expire by the lakehouse's settings. Until purged, undelete brings them back.",
        ),
        "purge": (_purge, "Deletes the files that only expired versions need. They cannot come back."),
        "orphans": (_orphans, "Deletes what failed commits and aborted writes left behind."),
    }
    return {name: _op(name, step, scheduled, description) for name, (step, description) in steps.items()}


def _op(
    name: str,
    step: Callable[[dg.OpExecutionContext, Lakehouse, Scheduled], None],
    scheduled: Scheduled,
    description: str,
) -> dg.OpDefinition:
    @dg.op(
        name=f"run_{name}_scheduled",
        pool=scheduled.pool,
        description=f"{description} Without approval, within limits set in code: {scheduled.limits}.",
    )
    def run(context: dg.OpExecutionContext, lakehouse: TrinityLakeResource) -> None:
        with operating(context, lakehouse) as lake:
            check_pool(context, scheduled.pool)
            step(context, lake, scheduled)

    return run


def _trim(context: dg.OpExecutionContext, lake: Lakehouse, scheduled: Scheduled) -> None:
    plan = maintenance.plan_trim_tables(lake, scheduled.limits.policy(lake))
    warn_of_unreadable(context, plan)
    metadata = scheduled.approve(context, "trim", plan, trim_shown(plan), "trims")
    report = plan.execute()  # plans again after each commit of others, and never drops more than this plan
    metadata |= {**report_metadata(report.to_dict()), "tables": len(report.tables), "left": ", ".join(report.left)}
    if report.tables:
        log_version(context, lake, "trim", metadata)
    context.add_output_metadata(metadata)


def _expire(context: dg.OpExecutionContext, lake: Lakehouse, scheduled: Scheduled) -> None:
    progress = logged_progress(context)
    plan = maintenance.plan_expiration(lake, scheduled.limits.policy(lake), progress=progress)
    metadata = scheduled.approve(context, "expire", plan, expire_shown(plan), "lets go of")
    report = plan.execute(plan.digest, progress=progress)
    metadata |= report_metadata(report.to_dict())
    if report.version is not None:
        log_version(context, lake, "expire", metadata)
    context.add_output_metadata(metadata)


def _purge(context: dg.OpExecutionContext, lake: Lakehouse, scheduled: Scheduled) -> None:
    progress = logged_progress(context)
    plan = maintenance.plan_purge(lake, scheduled.limits.min_age, progress=progress)
    metadata = scheduled.approve(context, "purge", plan, purge_shown(plan), "deletes")
    report = plan.execute(plan.digest, budget=scheduled.budget, progress=progress)
    end_deletion(context, lake, "purge", report, metadata)


def _orphans(context: dg.OpExecutionContext, lake: Lakehouse, scheduled: Scheduled) -> None:
    progress = logged_progress(context)
    plan = maintenance.plan_orphan_removal(lake, scheduled.limits.min_age, progress=progress)
    metadata = scheduled.approve(context, "orphans", plan, orphans_shown(plan), "deletes")
    report = plan.execute(plan.digest, budget=scheduled.budget, progress=progress)
    end_deletion(context, lake, "orphans", report, metadata)
