"""Operations with a plan: one job shows the plan, and the same job applies it once the plan's digest is approved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pydantic import Field, model_validator

from trinitylake_ops import Lakehouse
from trinitylake_ops.declarations.operation import (
    CommandSpec,
    Operation,
    OperationContext,
    ReportingContext,
    report_entries,
)
from trinitylake_ops.declarations.options import (
    LIMITS_APPROVE,
    ApplyLimits,
    DigestText,
    DurationText,
    Options,
    PersonText,
    limit_field,
)
from trinitylake_ops.declarations.rendering import Json, listing
from trinitylake_ops.declarations.texts import duration_of
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.budget import Budget, Spending
from trinitylake_ops.operations.rendering import Table
from trinitylake_ops.operations.retention import RetentionPolicy

if TYPE_CHECKING:
    from trinitylake_ops.operations import OrphanReport, PurgeReport

#: The text of the link that opens the launchpad of the same job with the approval of a plan.
APPLY_THIS_PLAN = "apply this plan"

#: Ends the report of each plan that changes nothing.
NOTHING_TO_DO = "there is nothing to do"
#: The options that say whether a run plans or applies. A command has ``--apply`` and ``--yes`` instead.
MODES = ("approval", "unattended")


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

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON."""

    def table(self) -> Table:
        """Return the plan in a form for people."""


PlanT = TypeVar("PlanT", bound=ExecutablePlan)


class Approval(Options):
    """The approval of one plan by a person."""

    digest: DigestText = Field(
        description="Digest of the plan to apply, which the run that planned shows. If something else would happen"
        " now, the run fails and nothing is done."
    )
    approved_by: PersonText = Field(
        default="",
        description="Name of the person who approves the plan. It is recorded with the run, and in the log of the"
        " lakehouse. In Dagster+ leave it out: it is the user who launches the run.",
    )


class PlannedOptions(Options):
    """Options of an operation with a plan. Without an approval the run only plans."""

    approval: Approval | None = Field(
        default=None, description="Default: only plan. Otherwise apply the plan that this approves."
    )

    @property
    def is_plan(self) -> bool:
        """Whether a run with these options only plans."""
        return self.approval is None

    def approver(self, user: str | None = None) -> str | None:
        """Return who approved what the run does, None for a run that only plans.

        Args:
            user: The user who launched the run, None if that is not known.

        Raises:
            InvalidInputError: The approval names another person than the user, or no person.
        """
        if self.approval is None:
            return None
        name = self.approval.approved_by.strip()
        if user is not None and name not in ("", user):
            raise InvalidInputError(
                f"approved_by={name!r} does not match the signed-in user {user!r}; leave approved_by out"
            )
        if not (name or user):
            raise InvalidInputError("approved_by is missing: no user launched this run; write who approves the plan")
        return user or name


class UnattendedOptions(PlannedOptions):
    """Options of an operation that may also run without approval, because no reader sees what it changes."""

    unattended: bool = Field(default=False, description="Whether to plan and apply in this run, without approval.")

    @property
    def is_plan(self) -> bool:
        """Whether a run with these options only plans."""
        return self.approval is None and not self.unattended

    @model_validator(mode="after")
    def _check_one_mode(self) -> UnattendedOptions:
        if self.unattended and self.approval is not None:
            raise InvalidInputError("unattended: the run has an approval as well; leave one of the two out")
        return self


class LimitedOptions(UnattendedOptions):
    """Options of an operation that may run without approval within limits that are set in code."""

    unattended: bool = Field(
        default=False,
        description="Whether to plan and apply in this run, without approval, by the lakehouse's own settings and"
        " within the limits that the code sets. A plan beyond the limits fails the run, and nothing is done.",
    )

    def approver(self, user: str | None = None) -> str | None:
        """Return who approved what the run does, None for a run that only plans. Raises InvalidInputError."""
        return LIMITS_APPROVE if self.unattended else super().approver(user)

    @model_validator(mode="after")
    def _check_own_rules(self) -> LimitedOptions:
        for name in ("max_age", "min_versions", "grace", "older_than", *KEEP):
            if self.unattended and getattr(self, name, None) is not None:
                raise InvalidInputError(
                    f"{name}: an unattended run follows the lakehouse's own settings; leave {name} out, or approve a"
                    " plan"
                )
        return self


KEEP = ("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")


def rules_of(what: str, aged: str, otherwise: str) -> dict[str, Any]:
    """Return the fields of rules of retention, by their names.

    Args:
        what: What is kept, such as ``version``.
        aged: What begins its age, such as ``superseded``.
        otherwise: What a rule is that is left out.
    """
    texts = {
        "min_versions": f"Keep at least this number of the newest {what}s.",
        "keep_last": f"Keep the last N {what}s.",
        "keep_hourly": f"Keep the newest {what} of each of the last N hours that have one.",
        "keep_daily": "The same for days.",
        "keep_weekly": "The same for weeks, from Monday.",
        "keep_monthly": "The same for months.",
    }
    return {
        "max_age": Field(
            default=None, description=f"Keep what was {aged} no longer ago, such as 30d. Default: {otherwise}."
        ),
        **{
            name: Field(default=None, ge=0, description=f"{text} Default: {otherwise}.") for name, text in texts.items()
        },
    }


_RULES = rules_of("version", "superseded", "as the lakehouse's settings")


class RulesOptions(Options):
    """Rules of retention that replace single settings of the lakehouse for one run."""

    max_age: DurationText | None = _RULES["max_age"]
    min_versions: int | None = _RULES["min_versions"]
    keep_last: int | None = _RULES["keep_last"]
    keep_hourly: int | None = _RULES["keep_hourly"]
    keep_daily: int | None = _RULES["keep_daily"]
    keep_weekly: int | None = _RULES["keep_weekly"]
    keep_monthly: int | None = _RULES["keep_monthly"]

    def policy(self, lake: Lakehouse) -> RetentionPolicy | None:
        """Return the lakehouse's settings with these rules in their place, None if all are its own."""
        numbers = {"minimum_versions": self.min_versions, **{name: getattr(self, name) for name in KEEP}}
        rules: dict[str, Any] = {name: number for name, number in numbers.items() if number is not None}
        if self.max_age is not None:
            rules["maximum_age_ms"] = duration_of(self.max_age) // timedelta(milliseconds=1)
        return replace(RetentionPolicy.of(lake.snapshot().definition), **rules) if rules else None


class BudgetOptions(Options):
    """The bounds on the requests of a run that deletes."""

    max_requests: int | None = Field(
        default=None,
        gt=0,
        description="Stop after this number of requests, planning included. The next run continues. Default: no limit.",
    )
    max_seconds: float | None = limit_field(
        "Stop after this number of seconds, planning included. The next run continues"
    )
    requests_per_second: float | None = limit_field("Send no more deletion requests in a second than this")

    def budget(self) -> Budget:
        """Return the limits."""
        return Budget(
            max_requests=self.max_requests,
            max_seconds=self.max_seconds,
            requests_per_second=self.requests_per_second,
        )


PlannedT = TypeVar("PlannedT", bound=PlannedOptions)
ReportT = TypeVar("ReportT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDeclaration(Generic[PlannedT, PlanT, ReportT]):
    """An operation as a plan and its execution."""

    name: str
    description: str
    options: type[PlannedT]
    #: Makes the plan from the options.
    plan: Callable[[OperationContext[PlannedT]], PlanT]
    #: Executes the plan, approved by a digest, or without one in a run without approval.
    execute: Callable[[OperationContext[PlannedT], PlanT, str | None], ReportT]
    #: Returns the metadata of a plan.
    shown: Callable[[PlanT], Mapping[str, Any]]
    #: Reports an execution in a job or a task. The plan is None after ``direct``.
    report: Callable[[ReportingContext[Any], PlanT | None, ReportT], None]
    #: Makes the plan of an unattended run within limits, of options that are LimitedOptions.
    within: Callable[[ReportingContext[PlannedT], ApplyLimits], PlanT] | None = None
    #: Does everything at once, with fewer requests than a plan and its execution. The command needs no approval then.
    direct: Callable[[OperationContext[PlannedT]], ReportT] | None = None
    #: The verb of the effect on files.
    does: str = "frees"
    is_pooled: bool = False
    changes_exports: bool = False
    #: Says what is wrong that the plan does not repair. A plan that repairs none of it is a failed run.
    left: Callable[[PlanT], str] = lambda _plan: ""
    #: Says, in the words of the command, which options are missing before the plan can be executed.
    blocked: Callable[[PlanT], str] = lambda _plan: ""
    #: Returns the steps of a plan, which a command prints with ``--dry-run``.
    steps: Callable[[PlanT], Table] | None = None
    #: Returns the options that are approved with a plan, by default those of the run that are not defaults.
    applied: Callable[[PlannedT, PlanT], Mapping[str, Any]] = lambda options, _plan: options_of_plan(options)
    #: Returns further metadata of the run that plans.
    more: Callable[[ReportingContext[PlannedT], PlanT], Mapping[str, Any]] = lambda _run, _plan: {}
    is_proved: bool = False
    command: CommandSpec = field(default_factory=CommandSpec)

    def operation(self) -> Operation[PlannedT]:
        """Return the operation that plans, and applies what was approved."""
        return Operation(
            job=self.name,
            description=f"{self.description} Plans by default, and applies the plan whose digest is approved.",
            options=self.options,
            step=self._step,
            is_pooled=self.is_pooled,
            changes_exports=self.changes_exports,
            is_proved=self.is_proved,
            command=self.command,
            plan_declaration=self,
        )

    def _step(self, run: ReportingContext[Any]) -> None:
        approval = run.options.approval
        if run.options.is_plan:
            self._show(run)
            return
        if isinstance(run.options, BudgetOptions):
            run = replace(run, spending=Spending(run.options.budget()))
        if approval is not None:
            self._apply(run, self.plan(run), approval.digest)
        elif isinstance(run.options, LimitedOptions):
            self._apply_within_limits(run)
        elif self.direct is not None:
            self.report(run, None, self.direct(run))
        else:
            self._apply(run, self.plan(run), None)

    def _apply(self, run: ReportingContext[Any], plan: PlanT, digest: str | None) -> None:
        self.report(run, plan, self.execute(run, plan, digest))

    def _show(self, run: ReportingContext[PlannedT]) -> None:
        plan = self.plan(run)
        title = str(plan.table().title)
        shown = {"base_version": plan.base_version, "is_empty": plan.is_empty, **self.shown(plan)}
        shown.update(self.more(run, plan))
        left = self.left(plan)
        if plan.is_empty:
            if left:
                raise run.failure(f"{title}; {left}", shown)
            run.report(f"{title}; {NOTHING_TO_DO}", shown)
            return
        options = self.applied(run.options, plan)
        config = {**options, "approval": {"digest": plan.digest, "approved_by": ""}}
        to_fill_in = {**options, "approval": {"digest": plan.digest, "approved_by": None}}
        link = run.link(self.name, to_fill_in, APPLY_THIS_PLAN)
        metadata = {
            **({} if link is None else {"apply": link}),
            **shown,
            "configuration": Json(config),
            "digest": plan.digest,
        }
        if left:
            run.log.warning("%s", left)
        run.report(
            title,
            metadata,
            to_do=f"to apply it, run {run.job(self.name)} with the approval of digest {plan.digest}",
            logged={**shown, "configuration": json.dumps(config, ensure_ascii=False), "digest": plan.digest},
        )

    def _apply_within_limits(self, run: ReportingContext[PlannedT]) -> None:
        """Apply what is within the limits. Raises InvalidInputError without limits, and Failure for a plan beyond."""
        assert self.within is not None
        limits = limits_of(run)
        plan = self.within(run, limits)
        shown = self.shown(plan)
        files, size_bytes = int(shown.get("files", 0)), int(shown.get("bytes", 0))
        about = {"digest": plan.digest, "base_version": plan.base_version, "limits": str(limits)}
        if not limits.allow(files, size_bytes):  # plans that count no files are within the limits
            raise replace(run, details={}).failure(
                f"this {self.name} {self.does} {files} files of {size_bytes} bytes, which is beyond what an unattended"
                f" run may do ({limits}); nothing was done: run {run.job(self.name)} for a plan, and approve it",
                {**about, **shown},
            )
        run.log.info("%s; within the limits of schedules: %s", plan.table().title, limits)
        self._apply(replace(run, details={**run.details, **about}), plan, None)


def limits_of(run: ReportingContext[Any]) -> ApplyLimits:
    """Return the limits of unattended runs. Raises InvalidInputError where the code sets none."""
    if run.limits is None:
        raise InvalidInputError(
            "unattended: the code sets no limits for runs without approval; set limits=ApplyLimits(...)"
        )
    return run.limits


def options_of_plan(options: PlannedOptions) -> dict[str, Any]:
    """Return the options of a plan that are not defaults, for the configuration that applies it."""
    return options.model_dump(exclude_defaults=True, exclude=set(MODES))


def end_deletion(run: ReportingContext[Any], operation: str, report: PurgeReport | OrphanReport) -> None:
    """Report what was deleted.

    Raises Failure for files that the storage refused to delete, and warns when a limit was reached.
    """
    failures = sorted(report.failures.items())
    metadata = {
        **report_entries(report.to_dict()),
        "failed_files": len(failures),
        "failures": listing(("path", "reason"), failures),
    }
    again = f"run {run.job(operation)} again for a plan, and approve it"
    if failures:
        path, reason = failures[0]
        raise run.failure(
            f"{len(failures)} files were not deleted; {again} once the reason is repaired, the first is {path}:"
            f" {reason}",
            metadata,
        )
    # A purge that ended early has committed its begin.
    has_committed = report.version is not None or report.stopped is not None
    run.report(str(report.table().title), metadata, committed=operation if has_committed else None)
    if report.stopped is not None:
        run.log.warning("not finished, as %s: %s", report.stopped, again)
