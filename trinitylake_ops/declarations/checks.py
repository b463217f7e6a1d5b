"""Operations that check a lakehouse and fix what they find: verify and repair."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from trinitylake_ops import operations, reports
from trinitylake_ops.declarations.operation import (
    CommandResult,
    CommandSpec,
    OperationContext,
    ReportingContext,
    direct,
    report_entries,
)
from trinitylake_ops.declarations.options import Options, limit_field
from trinitylake_ops.declarations.planned import PlanDeclaration, UnattendedOptions
from trinitylake_ops.declarations.rendering import inline_chart, listing
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.budget import Budget
from trinitylake_ops.operations.rendering import Table

if TYPE_CHECKING:
    from trinitylake_ops.operations import RepairPlan, RepairReport, VerifyReport

_COLUMNS = ("severity", "code", "path", "version", "what you can do")


class VerifyOptions(Options):
    """How much is read, and when the run ends."""

    deep: bool = Field(
        default=False,
        description="Read all again, including data files of tables, and compare it with what was recorded.",
    )
    incremental: bool = Field(
        default=False,
        description="Keep a record in the lakehouse, and do not read again what it knows to be unchanged.",
    )
    max_requests: int | None = Field(
        default=None, gt=0, description="Stop after this number of requests. Default: no limit."
    )
    max_seconds: float | None = limit_field("Stop after this number of seconds")


class RepairOptions(UnattendedOptions):
    """How far repair goes."""

    to_last_good: bool = Field(
        default=False,
        description="Where the latest version is damaged, return to what is whole: its damaged objects alone, or"
        " everything where the tree is damaged.",
    )
    deep: bool = Field(default=False, description="Read data files as well, as verify does with deep.")

    @model_validator(mode="after")
    def _check_unattended(self) -> Self:
        if self.unattended and self.to_last_good:
            raise InvalidInputError(
                "to_last_good: it changes what readers see; leave unattended out, and approve a plan"
            )
        return self


def _execute_verify(run: OperationContext[VerifyOptions]) -> VerifyReport:
    options = run.options
    return operations.verify(
        run.lake,
        partial(run.progress(), "versions"),
        deep=options.deep,
        incremental=options.incremental,
        budget=Budget(max_requests=options.max_requests, max_seconds=options.max_seconds),
        executor=run.executor(),
    )


def _verify_reported(run: ReportingContext[VerifyOptions], report: VerifyReport) -> None:
    metadata = {
        **report_entries(report.to_dict()),
        "timeline": inline_chart(reports.verification_chart(report)),
        "findings": findings_table(report),
        "checksums": report.checksums,
        "not_looked_at": "; ".join(report.unchecked),
    }
    if not report.is_clean:
        errors = [finding.message for finding in report.findings if finding.severity == "error"]
        metadata.update(run.entry("repair", {}))
        raise run.failure(f"{len(errors)} error{'s' if len(errors) > 1 else ''}, the first: {errors[0]}", metadata)
    if report.stopped is not None:
        run.log.warning("not finished, as %s; not looked at: %s", report.stopped, metadata["not_looked_at"])
    run.report(str(report.table().title), metadata)


VERIFY = direct(
    job="verify",
    description="Checks all versions, nodes, definitions, tables and their files; fails when it finds errors.",
    options=VerifyOptions,
    execute=_execute_verify,
    report=_verify_reported,
    command=CommandSpec(
        uses_engine=True,
        working="versions",
        page=lambda run, _plan, report: reports.verification_page(report, run.lake.storage.now_ms()),
        result=lambda _run, _plan, report: CommandResult(
            shown=report, is_complete=report.is_clean and report.is_complete
        ),
    ),
)


def findings_table(report: VerifyReport) -> Table:
    """Return the findings of verify, a row each."""
    rows = [
        (f.severity, f.code, f.message, "" if f.version is None else f.version, f.path or "", f.mend or "")
        for f in report.findings
    ]
    return listing(("severity", "code", "message", "version", "path", "mend"), rows)


def _plan_repair(run: OperationContext[RepairOptions]) -> RepairPlan:
    options = run.options
    report = operations.verify(run.lake, partial(run.progress(), "versions"), deep=options.deep)
    return operations.plan_repair(run.lake, report, to_last_good=options.to_last_good)


def _repair_shown(repair: RepairPlan | RepairReport) -> dict[str, Any]:
    """Return the steps and the remaining findings, as tables."""
    steps = [(step.action, step.what, "" if step.version is None else step.version) for step in repair.steps]
    left = [
        (f.severity, f.code, f.path or "", "" if f.version is None else f.version, f.advice) for f in repair.not_mended
    ]
    return {
        "n_steps": len(steps),
        "n_left": len(left),
        "steps": listing(("step", "of", "version"), steps),
        "left": listing(_COLUMNS, left),
    }


def _left(plan: RepairPlan) -> str:
    """Say how many errors a repair would leave. It is empty if there is none."""
    errors = sum(finding.severity == "error" for finding in plan.not_mended)
    if not errors:
        return ""
    shown = "1 error is" if errors == 1 else f"{errors} errors are"
    return f"{shown} left that repair cannot fix; what you can do is listed"


def _to_last_good(run: ReportingContext[RepairOptions], plan: RepairPlan) -> dict[str, Any]:
    """Return the link to the plan that goes further, where this one leaves errors."""
    if run.options.to_last_good or not _left(plan):
        return {}
    return run.entry("repair", {"to_last_good": True}, "plan to return to the last version without damage")


def _repair_reported(run: ReportingContext[Any], _plan: RepairPlan | None, report: RepairReport) -> None:
    if not report.is_complete:
        run.log.warning("errors are left, which repair cannot mend: the table 'left' says what you can do")
    metadata = {**report_entries(report.to_dict()), **_repair_shown(report)}
    committed = "repair" if report.version > report.base_version else None
    run.report(str(report.table().title), metadata, committed=committed)


REPAIR: PlanDeclaration[RepairOptions, RepairPlan, RepairReport] = PlanDeclaration(
    name="repair",
    description="Verifies the lakehouse and repairs findings by new commits and the hint; deletes nothing.",
    options=RepairOptions,
    plan=_plan_repair,
    shown=_repair_shown,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_repair_reported,
    changes_exports=True,
    left=_left,
    more=_to_last_good,
    command=CommandSpec(working="versions"),
)
