"""Trim, expire, purge and orphans without approval.

They are planned and applied in one op, within limits set in code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.maintenance import Budget, RetentionPolicy
from trinitylake_ops.maintenance.plans.budget import Spending
from trinitylake_ops.operations.declared.purge import ORPHANS, PURGE
from trinitylake_ops.operations.declared.retention import EXPIRE, TRIM
from trinitylake_ops.operations.operation import Operation, Running
from trinitylake_ops.operations.planned import Planned, PlanT

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyLimits:
    """The limits within which a schedule may free something without anybody's approval.

    A plan with more files or bytes fails its run, and nothing is done. Only things older than ``min_age`` are in a
    plan. That is the time since versions were superseded or, for a purge, expired, and since orphans were written. If
    the lakehouse's own settings ask for more, those count. Raises InvalidInputError for negative limits.
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
        """Return the lakehouse's settings, changed so that nothing too young is freed."""
        own = RetentionPolicy.of(lake.snapshot().definition)
        return replace(own, protected_ms=max(own.protected_ms, self.min_age // _MILLISECOND))


def scheduled_operations(limits: ApplyLimits, budget: Budget) -> dict[str, Operation[None]]:
    """Return trim, expire, purge and orphans by these names. The last two stop at ``budget``."""
    within = _Scheduled(limits, budget)
    return {
        "trim": within.operation(
            TRIM,
            lambda run: maintenance.plan_trim_tables(run.lake, limits.policy(run.lake)),
            "trims",
            "Drops snapshots that no kept version needs from the latest version of managed tables.",
        ),
        "expire": within.operation(
            EXPIRE,
            lambda run: maintenance.plan_expiration(
                run.lake, limits.policy(run.lake), progress=run.progress(), executor=run.executor()
            ),
            "lets go of",
            "Lets versions expire by the lakehouse's settings. Until purged, undelete brings them back.",
        ),
        "purge": within.operation(
            PURGE,
            within.deletion(maintenance.plan_purge),
            "deletes",
            "Deletes the files that only expired versions need. They cannot come back.",
        ),
        "orphans": within.operation(
            ORPHANS,
            within.deletion(maintenance.plan_orphan_removal),
            "deletes",
            "Deletes what failed commits and aborted writes left behind.",
        ),
    }


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """The common parts of scheduled operations."""

    limits: ApplyLimits
    budget: Budget

    def deletion(self, plan: Callable[..., PlanT]) -> Callable[[Running[None]], PlanT]:
        """Return what plans the deletion of what is old enough, within the run's spending."""

        def made(run: Running[None]) -> PlanT:
            return plan(
                run.lake,
                self.limits.min_age,
                budget=run.spending,
                progress=run.progress(),
                executor=run.executor(),
            )

        return made

    def operation(
        self,
        planned: Planned[Any, PlanT],
        plan: Callable[[Running[None]], PlanT],
        does: str,
        description: str,
    ) -> Operation[None]:
        """Return an operation that is approved within the limits. ``does`` is a verb for its effect on files."""

        def step(run: Running[None]) -> None:
            within = replace(run, spending=Spending(self.budget))
            made = plan(within)
            planned.apply(self._approved(within, planned, made, does), made, None)

        return Operation(
            job=f"{planned.name}_scheduled",
            description=f"{description} Without approval, within limits set in code: {self.limits}.",
            step=step,
            is_pooled=planned.is_pooled,
            changes_exports=planned.changes_exports,
            approved_by="the limits of schedules",
        )

    def _approved(self, run: Running[None], planned: Planned[Any, PlanT], plan: PlanT, does: str) -> Running[None]:
        """Return the run of a plan within the limits, with the words of its report.

        Raises Failure for a plan beyond the limits. Plans that count no files are within limits of files and bytes.
        """
        shown = planned.shown(plan)
        files, size_bytes = int(shown.get("files", 0)), int(shown.get("bytes", 0))
        about = {"digest": plan.digest, "base_version": plan.base_version, "limits": str(self.limits)}
        if files > self.limits.max_files or size_bytes > self.limits.max_bytes:
            plan_job, apply_job = (run.job(f"{planned.name}_{step}") for step in ("plan", "apply"))
            raise replace(run, details={}).failure(
                f"this {planned.name} {does} {files} files of {size_bytes} bytes, which is beyond what schedules may do"
                f" without approval ({self.limits}); nothing was done: look at the plan, then run {plan_job}, and"
                f" {apply_job} with the digest that it shows",
                {**about, **shown},
            )
        run.log.info("%s; within the limits of schedules: %s", plan.table().title, self.limits)
        return replace(run, details={**run.details, **about})
