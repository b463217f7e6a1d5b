"""Operations with a plan: a job shows the plan, and applies it once the plan's digest is approved."""

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

#: The text of the link that opens the job with the approval of a plan.
APPLY_THIS_PLAN = "apply this plan"

#: The end of the report on a plan without effects.
NOTHING_TO_DO = "there is nothing to do"
#: The options that choose between planning and applying. A command has ``--apply`` and ``--yes`` instead.
MODES = ("approval", "unattended")


class ExecutablePlan(Protocol):
    """The interface of plans."""

    @property
    def base_version(self) -> int:
        """The version that the plan is based on."""

    @property
    def digest(self) -> str:
        """The digest of the effects of the plan."""

    @property
    def is_empty(self) -> bool:
        """Whether the plan has no effects."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON."""

    def table(self) -> Table:
        """Return the plan as a human-readable table."""


PlanT = TypeVar("PlanT", bound=ExecutablePlan)


class Approval(Options):
    """The approval of one plan by a person."""

    digest: DigestText = Field(
        description="Digest of the plan to apply, which the planning run shows. If the effects differ now, the run"
        " fails and nothing is done."
    )
    approved_by: PersonText = Field(
        default="",
        description="Name of the person who approves the plan, which the run and the log of the lakehouse record."
        " In Dagster+ leave it out: the user who launches the run is recorded.",
    )


class PlannedOptions(Options):
    """Options of an operation with a plan. Without an approval, a run only plans."""

    approval: Approval | None = Field(default=None, description="The plan to apply. Default: only plan.")

    @property
    def is_plan(self) -> bool:
        """Whether a run with these options only plans."""
        return self.approval is None

    def approver(self, user: str | None = None) -> str | None:
        """Return the approver of the run, or None for a run that only plans.

        Args:
            user: The user who launched the run; None if unknown.

        Raises:
            InvalidInputError: The approval names a person other than the user, or no person.
        """
        if self.approval is None:
            return None
        name = self.approval.approved_by.strip()
        if user is not None and name not in ("", user):
            raise InvalidInputError(
                f"approved_by={name!r} does not match the signed-in user {user!r}; leave approved_by out"
            )
        if not (name or user):
            raise InvalidInputError("approved_by is required: no user launched this run; name the approver")
        return user or name


class UnattendedOptions(PlannedOptions):
    """Options of an operation that may also run without approval, because its changes are invisible to readers."""

    unattended: bool = Field(default=False, description="Whether to plan and apply in one run, without approval.")

    @property
    def is_plan(self) -> bool:
        """Whether a run with these options only plans."""
        return self.approval is None and not self.unattended

    @model_validator(mode="after")
    def _check_one_mode(self) -> UnattendedOptions:
        if self.unattended and self.approval is not None:
            raise InvalidInputError("unattended: the run also has an approval; leave one of them out")
        return self


class LimitedOptions(UnattendedOptions):
    """Options of an operation that may run without approval, within limits that the code sets."""

    unattended: bool = Field(
        default=False,
        description="Whether to plan and apply in one run, without approval, by the lakehouse's own settings and within"
        " the limits that the code sets. If the plan exceeds the limits, the run fails and nothing is done.",
    )

    def approver(self, user: str | None = None) -> str | None:
        """Return the approver of the run, or None for a run that only plans. Raises InvalidInputError."""
        return LIMITS_APPROVE if self.unattended else super().approver(user)

    @model_validator(mode="after")
    def _check_own_rules(self) -> LimitedOptions:
        for name in ("max_age", "min_versions", "grace", "older_than", *KEEP):
            if self.unattended and getattr(self, name, None) is not None:
                raise InvalidInputError(
                    f"{name}: an unattended run uses the lakehouse's own settings; leave {name} out, or approve a plan"
                )
        return self


KEEP = ("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")


def rules_of(noun: str, aged: str, otherwise: str) -> dict[str, Any]:
    """Return the fields of retention rules by name.

    Args:
        noun: The name of the retained object, such as ``version``.
        aged: The event from which its age is measured, such as ``superseded``.
        otherwise: The default of a rule, in words.
    """
    texts = {
        "min_versions": f"Keep at least this number of the newest {noun}s.",
        "keep_last": f"Keep the last N {noun}s.",
        "keep_hourly": f"Keep the newest {noun} of each of the last N hours that have one.",
        "keep_daily": f"Keep the newest {noun} of each of the last N days that have one.",
        "keep_weekly": f"Keep the newest {noun} of each of the last N weeks (from Monday) that have one.",
        "keep_monthly": f"Keep the newest {noun} of each of the last N months that have one.",
    }
    return {
        "max_age": Field(
            default=None, description=f"Keep {noun}s {aged} within this duration, such as 30d. Default: {otherwise}."
        ),
        **{
            name: Field(default=None, ge=0, description=f"{text} Default: {otherwise}.") for name, text in texts.items()
        },
    }


_RULES = rules_of("version", "superseded", "the lakehouse's setting")


class RulesOptions(Options):
    """Retention rules that replace individual settings of the lakehouse for one run."""

    max_age: DurationText | None = _RULES["max_age"]
    min_versions: int | None = _RULES["min_versions"]
    keep_last: int | None = _RULES["keep_last"]
    keep_hourly: int | None = _RULES["keep_hourly"]
    keep_daily: int | None = _RULES["keep_daily"]
    keep_weekly: int | None = _RULES["keep_weekly"]
    keep_monthly: int | None = _RULES["keep_monthly"]

    def policy(self, lake: Lakehouse) -> RetentionPolicy | None:
        """Return the lakehouse's settings with these rules applied, or None if no rule is set."""
        numbers = {"minimum_versions": self.min_versions, **{name: getattr(self, name) for name in KEEP}}
        rules: dict[str, Any] = {name: number for name, number in numbers.items() if number is not None}
        if self.max_age is not None:
            rules["maximum_age_ms"] = duration_of(self.max_age) // timedelta(milliseconds=1)
        return replace(RetentionPolicy.of(lake.snapshot().definition), **rules) if rules else None


class BudgetOptions(Options):
    """Limits on the requests and the time of a run that deletes files."""

    max_requests: int | None = Field(
        default=None,
        gt=0,
        description="Stop after this number of requests, planning included. The next run continues. Default: no limit.",
    )
    max_seconds: float | None = limit_field(
        "Stop after this number of seconds, planning included. The next run continues"
    )
    requests_per_second: float | None = limit_field("Send at most this number of deletion requests per second")

    def budget(self) -> Budget:
        """Return the limits as a budget."""
        return Budget(
            max_requests=self.max_requests,
            max_seconds=self.max_seconds,
            requests_per_second=self.requests_per_second,
        )


PlannedT = TypeVar("PlannedT", bound=PlannedOptions)
ReportT = TypeVar("ReportT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDeclaration(Generic[PlannedT, PlanT, ReportT]):
    """Declares an operation by its plan and its execution."""

    name: str
    description: str
    options: type[PlannedT]
    #: Makes the plan.
    plan: Callable[[OperationContext[PlannedT]], PlanT]
    #: Executes the plan, with the approved digest, or with None in a run without approval.
    execute: Callable[[OperationContext[PlannedT], PlanT, str | None], ReportT]
    #: Returns the metadata of a plan.
    plan_metadata: Callable[[PlanT], Mapping[str, Any]]
    #: Reports an execution in a job or a task. The plan is None if ``direct`` was used.
    report: Callable[[ReportingContext[Any], PlanT | None, ReportT], None]
    #: Makes the plan for an unattended run within limits. Required for options that are LimitedOptions.
    plan_within_limits: Callable[[ReportingContext[PlannedT], ApplyLimits], PlanT] | None = None
    #: Plans and executes in one step, with fewer requests. If set, the command needs no approval.
    direct: Callable[[OperationContext[PlannedT]], ReportT] | None = None
    #: The verb for what the operation does with files, for messages.
    verb: str = "reclaims"
    is_pooled: bool = False
    changes_exports: bool = False
    #: Describes errors that the plan does not repair; empty if there are none. A plan that repairs none of them fails.
    remaining_errors: Callable[[PlanT], str] = lambda _plan: ""
    #: Describes, for a user of the command, which options the plan still needs before it can be executed.
    blocked: Callable[[PlanT], str] = lambda _plan: ""
    #: Returns the steps of a plan, which a command prints with ``--dry-run``.
    steps: Callable[[PlanT], Table] | None = None
    #: Returns the options with which a plan is approved; by default the options of the run that differ from their
    #: defaults.
    approved_options: Callable[[PlannedT, PlanT], Mapping[str, Any]] = lambda options, _plan: options_of_plan(options)
    #: Returns metadata that only the planning run shows.
    extra_metadata: Callable[[ReportingContext[PlannedT], PlanT], Mapping[str, Any]] = lambda _run, _plan: {}
    is_proved: bool = False
    command: CommandSpec = field(default_factory=CommandSpec)

    def operation(self) -> Operation[PlannedT]:
        """Return the operation, which plans by default and applies an approved plan."""
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
        details = {"base_version": plan.base_version, "is_empty": plan.is_empty, **self.plan_metadata(plan)}
        details.update(self.extra_metadata(run, plan))
        errors = self.remaining_errors(plan)
        if plan.is_empty:
            if errors:
                raise run.failure(f"{title}; {errors}", details)
            run.report(f"{title}; {NOTHING_TO_DO}", details)
            return
        options = self.approved_options(run.options, plan)
        config = {**options, "approval": {"digest": plan.digest, "approved_by": ""}}
        to_fill_in = {**options, "approval": {"digest": plan.digest, "approved_by": None}}
        link = run.link(self.name, to_fill_in, APPLY_THIS_PLAN)
        metadata = {
            **({} if link is None else {"apply": link}),
            **details,
            "configuration": Json(config),
            "digest": plan.digest,
        }
        if errors:
            run.log.warning("%s", errors)
        run.report(
            title,
            metadata,
            to_do=f"to apply it, run {run.job(self.name)} with the approval of digest {plan.digest}",
            logged={**details, "configuration": json.dumps(config, ensure_ascii=False), "digest": plan.digest},
        )

    def _apply_within_limits(self, run: ReportingContext[PlannedT]) -> None:
        """Apply the plan if it is within the limits.

        Raises InvalidInputError if the code sets no limits, and the failure of the run if the plan exceeds them.
        """
        assert self.plan_within_limits is not None
        limits = limits_of(run)
        plan = self.plan_within_limits(run, limits)
        metadata = self.plan_metadata(plan)
        files, size_bytes = int(metadata.get("files", 0)), int(metadata.get("bytes", 0))
        plan_details = {"digest": plan.digest, "base_version": plan.base_version, "limits": str(limits)}
        if not limits.allow(files, size_bytes):  # a plan that counts no files is within the limits
            raise replace(run, details={}).failure(
                f"this {self.name} {self.verb} {files} files with {size_bytes} bytes, which exceeds the limits of an"
                f" unattended run ({limits}), so nothing was done; run {run.job(self.name)} to make a plan, then"
                " approve it",
                {**plan_details, **metadata},
            )
        run.log.info("%s; within the limits of unattended runs: %s", plan.table().title, limits)
        self._apply(replace(run, details={**run.details, **plan_details}), plan, None)


def limits_of(run: ReportingContext[Any]) -> ApplyLimits:
    """Return the limits of unattended runs. Raises InvalidInputError if the code sets none."""
    if run.limits is None:
        raise InvalidInputError(
            "unattended: the code sets no limits for runs without approval; set limits=ApplyLimits(...)"
        )
    return run.limits


def options_of_plan(options: PlannedOptions) -> dict[str, Any]:
    """Return the options of a plan that are not defaults, for the configuration that applies the plan."""
    return options.model_dump(exclude_defaults=True, exclude=set(MODES))


def end_deletion(run: ReportingContext[Any], operation: str, report: PurgeReport | OrphanReport) -> None:
    """Report a deletion, and log a warning if a limit ended it early.

    Args:
        run: The run context.
        operation: The operation name.
        report: The report of the deletion.

    Raises:
        Exception: The failure of the run, if the storage refused to delete files.
    """
    failures = sorted(report.failures.items())
    metadata = {
        **report_entries(report.to_dict()),
        "failed_files": len(failures),
        "failures": listing(("path", "reason"), failures),
    }
    again = f"run {run.job(operation)} again to make a plan, then approve it"
    # An unfinished deletion has recorded its start.
    has_committed = report.version is not None or not report.is_complete
    committed = operation if has_committed else None
    run.report(str(report.table().title), metadata, committed=committed, logged={} if failures else None)
    if failures:
        path, reason = failures[0]
        raise run.failure(
            f"{len(failures)} files were not deleted, the first is {path}: {reason}; fix the cause, then {again}",
            metadata,
        )
    if report.stopped is not None:
        run.log.warning("not finished, because %s; %s", report.stopped, again)
