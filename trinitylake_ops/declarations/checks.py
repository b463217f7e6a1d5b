"""Operations that check a lakehouse and repair it: verify and repair."""

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
    """Options of verify: how much to read, and when to stop."""

    deep: bool = Field(
        default=False,
        description="Read all files, including data files of tables, and compare them with recorded checksums.",
    )
    incremental: bool = Field(
        default=False,
        description="Record in the lakehouse which files were verified, and skip unchanged files in later runs.",
    )
    max_requests: int | None = Field(
        default=None, gt=0, description="Stop after this number of requests. Default: no limit."
    )
    max_seconds: float | None = limit_field("Stop after this number of seconds")


class RepairOptions(UnattendedOptions):
    """Options of repair: how far to repair."""

    to_last_good: bool = Field(
        default=False,
        description="If the latest version is damaged, return to the last undamaged state: for damaged objects alone,"
        " or for the whole tree if the tree is damaged.",
    )
    deep: bool = Field(default=False, description="Also read data files, as verify does with deep.")

    @model_validator(mode="after")
    def _check_unattended(self) -> Self:
        if self.unattended and self.to_last_good:
            raise InvalidInputError("to_last_good changes what readers see; leave unattended out, and approve a plan")
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


def _report_verify(run: ReportingContext[VerifyOptions], report: VerifyReport) -> None:
    metadata = {
        **report_entries(report.to_dict()),
        "timeline": inline_chart(reports.verification_chart(report)),
        "findings": findings_table(report),
        "checksums": report.checksums,
        "not_checked": "; ".join(report.unchecked),
    }
    if not report.is_clean:
        errors = [finding.message for finding in report.findings if finding.severity == "error"]
        metadata.update(run.entry("repair", {}))
        raise run.failure(f"{len(errors)} error{'s' if len(errors) > 1 else ''}, the first: {errors[0]}", metadata)
    if report.stopped is not None:
        run.log.warning("not finished, because %s; not checked: %s", report.stopped, metadata["not_checked"])
    run.report(str(report.table().title), metadata)


VERIFY = direct(
    job="verify",
    description="Checks all versions, nodes, definitions, tables and their files; fails if it finds errors.",
    options=VerifyOptions,
    execute=_execute_verify,
    report=_report_verify,
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
    """Return the findings of verify, one row each."""
    rows = [
        (f.severity, f.code, f.message, "" if f.version is None else f.version, f.path or "", f.fix or "")
        for f in report.findings
    ]
    return listing(("severity", "code", "message", "version", "path", "fix"), rows)


def _plan_repair(run: OperationContext[RepairOptions]) -> RepairPlan:
    options = run.options
    report = operations.verify(run.lake, partial(run.progress(), "versions"), deep=options.deep)
    return operations.plan_repair(run.lake, report, to_last_good=options.to_last_good)


def _repair_metadata(repair: RepairPlan | RepairReport) -> dict[str, Any]:
    """Return the steps and the remaining findings as tables."""
    steps = [(step.action, step.what, "" if step.version is None else step.version) for step in repair.steps]
    remaining = [
        (f.severity, f.code, f.path or "", "" if f.version is None else f.version, f.advice) for f in repair.remaining
    ]
    return {
        "n_steps": len(steps),
        "n_left": len(remaining),
        "steps": listing(("step", "of", "version"), steps),
        "left": listing(_COLUMNS, remaining),
    }


def _remaining_errors(plan: RepairPlan) -> str:
    """Return a description of the errors that the repair would not fix, or an empty string."""
    errors = sum(finding.severity == "error" for finding in plan.remaining)
    if not errors:
        return ""
    count = "1 error remains" if errors == 1 else f"{errors} errors remain"
    return f"{count} that repair cannot fix; the remaining findings say what you can do"


def _to_last_good(run: ReportingContext[RepairOptions], plan: RepairPlan) -> dict[str, Any]:
    """Return a link to a plan that rolls back to the last undamaged state, if this plan leaves errors unrepaired."""
    if run.options.to_last_good or not _remaining_errors(plan):
        return {}
    return run.entry("repair", {"to_last_good": True}, "plan to return to the last undamaged version")


def _report_repair(run: ReportingContext[Any], _plan: RepairPlan | None, report: RepairReport) -> None:
    if not report.is_complete:
        run.log.warning("errors remain that repair cannot fix; the table 'left' lists what you can do")
    metadata = {**report_entries(report.to_dict()), **_repair_metadata(report)}
    committed = "repair" if report.version > report.base_version else None
    run.report(str(report.table().title), metadata, committed=committed)


REPAIR: PlanDeclaration[RepairOptions, RepairPlan, RepairReport] = PlanDeclaration(
    name="repair",
    description="Verifies the lakehouse, and repairs findings by new commits and by the hint; deletes nothing.",
    options=RepairOptions,
    plan=_plan_repair,
    plan_metadata=_repair_metadata,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_report_repair,
    changes_exports=True,
    remaining_errors=_remaining_errors,
    extra_metadata=_to_last_good,
    command=CommandSpec(working="versions"),
)
