"""Operations that are planned first. One job shows the plan and its digest, and another one executes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from pydantic import Field, field_validator

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.maintenance import Budget, OrphanReport, PurgeReport, RetentionPolicy
from trinitylake_ops.maintenance.plans.budget import Spending
from trinitylake_ops.maintenance.plans.document import Table
from trinitylake_ops.operations.operation import Operation, Running, report_figures
from trinitylake_ops.operations.options import MOST_DAYS, DigestText, Options, PersonText, limit_field
from trinitylake_ops.operations.shown import Json, Link, Markdown, listing, markdown_table

_LAKEHOUSES_OWN = -1


class ExecutablePlan(Protocol):
    """The interface of these operations' plans."""

    @property
    def base_version(self) -> int:
        """The version on which the plan was made."""

    @property
    def digest(self) -> str:
        """The digest of the plan's effects."""

    @property
    def is_empty(self) -> bool:
        """Whether the plan would do nothing."""

    def table(self) -> Table:
        """Return the plan in a form for people."""


PlanOptionsT = TypeVar("PlanOptionsT", bound=Options)
PlanT = TypeVar("PlanT", bound=ExecutablePlan)


class Approval(Options):
    """The plan that somebody approved. The other options are those of the plan."""

    approved_digest: DigestText = Field(
        default="",
        description="Required: digest of the plan to carry out. The run that plans shows it, and a link"
        " that fills this in. When something else would happen by now, the run fails and nothing is done.",
    )
    approved_by: PersonText = Field(
        default="",
        description="Required: who looked at the plan and approves it. It is recorded with the run, and in the log of"
        " the lakehouse. In Dagster+ leave it empty: it is the user who launches the run.",
    )


def _rule(what: str) -> Any:
    return Field(default=_LAKEHOUSES_OWN, ge=_LAKEHOUSES_OWN, description=f"{what}; -1: as the lakehouse's settings.")


class RulesOptions(Options):
    """Rules of retention that replace single settings of the lakehouse for one run."""

    max_age_days: float = Field(
        default=_LAKEHOUSES_OWN,
        le=MOST_DAYS,
        allow_inf_nan=False,
        description="Keep what was superseded no longer ago than so many days; -1: as the lakehouse's settings.",
    )
    min_versions: int = _rule("Keep at least so many of the newest versions")
    keep_last: int = _rule("Keep the last so many versions")
    keep_hourly: int = _rule("Keep the newest version of each of the last so many hours that have one")
    keep_daily: int = _rule("The same for days")
    keep_weekly: int = _rule("The same for weeks, from Monday")
    keep_monthly: int = _rule("The same for months")

    @field_validator("max_age_days")
    @classmethod
    def _check_age(cls, days: float) -> float:
        if days < 0 and days != _LAKEHOUSES_OWN:
            raise InvalidInputError(
                f"max_age_days is {days}, it must be at least 0, or -1 for the lakehouse's own setting"
            )
        return days

    def policy(self, lake: Lakehouse) -> RetentionPolicy | None:
        """Return the lakehouse's settings with these rules in their place, None if all are its own."""
        numbers = {
            "minimum_versions": self.min_versions,
            "keep_last": self.keep_last,
            "keep_hourly": self.keep_hourly,
            "keep_daily": self.keep_daily,
            "keep_weekly": self.keep_weekly,
            "keep_monthly": self.keep_monthly,
        }
        rules: dict[str, Any] = {name: number for name, number in numbers.items() if number != _LAKEHOUSES_OWN}
        if self.max_age_days != _LAKEHOUSES_OWN:
            rules["maximum_age_ms"] = timedelta(days=self.max_age_days) // timedelta(milliseconds=1)
        return replace(RetentionPolicy.of(lake.snapshot().definition), **rules) if rules else None


class BudgetOptions(Options):
    """The bounds on the requests of a run that deletes."""

    max_requests: int = Field(
        default=0,
        ge=0,
        description="Stop after so many requests, planning included; the next run goes on; 0: no limit.",
    )
    max_seconds: float = limit_field("Stop after so many seconds, planning included; the next run goes on")
    requests_per_second: float = limit_field("Send no more requests that delete than that")

    def budget(self) -> Budget:
        """Return the limits."""
        return Budget(
            max_requests=self.max_requests or None,
            max_seconds=self.max_seconds or None,
            requests_per_second=self.requests_per_second or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Generic[PlanOptionsT, PlanT]):
    """An operation as a plan and its execution.

    ``plan`` makes the plan from ``options``, None if there are none. ``shown`` is the plan's metadata. ``apply``
    executes it, approved by a digest, or within limits without one, and reports. ``approval`` has the options of the
    job that applies, including those of the plan. ``applied`` returns the latter for a plan that was made, by default
    as they were given. ``left`` says what is wrong that the plan does not mend. A plan that mends nothing of it is a
    failed run. ``more`` is further metadata of the run that plans. What came of one that ``is_proved`` is shown.
    """

    name: str
    plans: str
    applies: str
    options: type[PlanOptionsT] | None
    approval: type[Approval]
    plan: Callable[[Running[PlanOptionsT]], PlanT]
    shown: Callable[[PlanT], Mapping[str, Any]]
    apply: Callable[[Running[Any], PlanT, str | None], None]
    is_pooled: bool = True
    changes_exports: bool = False
    left: Callable[[PlanT], str] = lambda _plan: ""
    applied: Callable[[PlanOptionsT, PlanT], Mapping[str, Any]] = lambda options, _plan: options.model_dump()
    more: Callable[[Running[PlanOptionsT], PlanT], Mapping[str, Any]] = lambda _run, _plan: {}
    is_proved: bool = False

    def operations(self) -> tuple[Operation[Any], Operation[Any]]:
        """Return the job that plans and the one that applies."""
        return (
            Operation(
                job=f"{self.name}_plan", description=f"{self.plans}; reads only.", options=self.options, step=self._show
            ),
            Operation(
                job=f"{self.name}_apply",
                description=self.applies,
                options=self.approval,
                step=self._apply_approved,
                is_pooled=self.is_pooled,
                changes_exports=self.changes_exports,
                is_proved=self.is_proved,
            ),
        )

    def _show(self, run: Running[PlanOptionsT]) -> None:
        plan = self.plan(run)
        title = str(plan.table().title)
        apply_job = run.job(f"{self.name}_apply")
        to_do = f"to do it, run {apply_job} with approved_digest {plan.digest}"
        options = {} if self.options is None else self.applied(run.options, plan)
        approval = {**options, "approved_digest": plan.digest, "approved_by": ""}
        metadata: dict[str, Any] = {
            "digest": plan.digest,
            "base_version": plan.base_version,
            "is_empty": plan.is_empty,
            **self.shown(plan),
            f"configuration of {apply_job}": Json(approval),
        }
        metadata.update(self.more(run, plan))
        logged = {**metadata, f"configuration of {apply_job}": json.dumps(approval, ensure_ascii=False)}
        link = None if plan.is_empty else run.link(f"{self.name}_apply", {**approval, "approved_by": None})
        if link is not None:
            metadata[f"open {apply_job}"] = Markdown(link.markdown)
            metadata.update(_linked(metadata, link))
        left = self.left(plan)
        if left and plan.is_empty:
            raise run.failure(f"{title}; {left}", metadata)
        if left:
            run.log.warning("%s", left)
        if plan.is_empty:
            run.report(f"{title}; there is nothing to do", metadata, logged=logged)
        else:
            run.report(title, metadata, to_do=to_do, logged=logged)

    def _apply_approved(self, run: Running[Any]) -> None:
        if isinstance(run.options, BudgetOptions):
            run = replace(run, spending=Spending(run.options.budget()))
        self.apply(run, self.plan(run), run.options.approved_digest)


def _linked(metadata: Mapping[str, Any], link: Link) -> dict[str, Any]:
    """Return the table of what would be done with the link that does it above, so that both are seen at once."""
    for name in ("plan", "steps", "what_follows"):
        shown = metadata.get(name)
        if isinstance(shown, Table):
            return {name: Markdown(f"{link.markdown}\n\n{markdown_table(shown.columns, shown.rows).text}")}
    return {}


def end_deletion(run: Running[Any], operation: str, report: PurgeReport | OrphanReport) -> None:
    """Report what was deleted.

    Raises Failure for files that the storage refused to delete, and warns when a limit was reached.
    """
    failures = sorted(report.failures.items())
    metadata = {
        **report_figures(report.to_dict()),
        "failed_files": len(failures),
        "failures": listing(("path", "reason"), failures),
    }
    again = f"run {run.job(f'{operation}_plan')} and {run.job(f'{operation}_apply')} again"
    if failures:
        path, reason = failures[0]
        raise run.failure(
            f"{len(failures)} files were not deleted; {again} once the reason is mended, the first is {path}: {reason}",
            metadata,
        )
    # A purge that ended early has committed its begin.
    has_committed = report.version is not None or report.stopped is not None
    run.report(str(report.table().title), metadata, committed=operation if has_committed else None)
    if report.stopped is not None:
        run.log.warning("not finished, as %s: %s", report.stopped, again)
