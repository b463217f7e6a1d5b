"""Checks a lakehouse, and repairs findings."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from trinitylake_ops import maintenance
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.maintenance import Budget, RepairPlan, RepairReport, VerifyReport
from trinitylake_ops.maintenance.plans.document import Table
from trinitylake_ops.operations.operation import Operation, Running, report_figures
from trinitylake_ops.operations.options import Options, limit_field
from trinitylake_ops.operations.planned import Planned, UnattendedOptions
from trinitylake_ops.operations.shown import listing, picture
from trinitylake_ops.pages import verification_picture

_COLUMNS = ("severity", "code", "path", "version", "what you can do")


class VerifyOptions(Options):
    """How much is read, and when the run ends."""

    deep: bool = Field(
        default=False,
        description="Whether to read all again, data files of tables too, and compare it with what was recorded.",
    )
    incremental: bool = Field(
        default=False,
        description="Whether to keep a record in the lakehouse, and not to read again what it knows to be unchanged.",
    )
    max_requests: int | None = Field(default=None, gt=0, description="Stop after so many requests. Null: no limit.")
    max_seconds: float | None = limit_field("Stop after so many seconds")


class RepairOptions(UnattendedOptions):
    """How far repair goes."""

    to_last_good: bool = Field(
        default=False,
        description="Whether to go back, where the latest version is damaged, to what is whole: its damaged objects"
        " alone, or all where the tree is damaged.",
    )

    @model_validator(mode="after")
    def _check_unattended(self) -> Self:
        if self.unattended and self.to_last_good:
            raise InvalidInputError(
                "to_last_good: it changes what readers see; leave unattended out, and approve a plan"
            )
        return self


def _verify(run: Running[VerifyOptions]) -> None:
    options = run.options
    progress = run.progress()
    report = maintenance.verify(
        run.lake,
        lambda done, total: progress("versions", done, total),
        deep=options.deep,
        incremental=options.incremental,
        budget=Budget(max_requests=options.max_requests, max_seconds=options.max_seconds),
        executor=run.executor(),
    )
    metadata = {
        **report_figures(report.to_dict()),
        "timeline": picture(verification_picture(report)),
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


VERIFY = Operation(
    job="verify",
    description="Checks all versions, nodes, definitions, tables and their files; fails when it finds errors.",
    options=VerifyOptions,
    step=_verify,
)


def findings_table(report: VerifyReport) -> Table:
    """Return the findings of verify, a row each."""
    rows = [
        (f.severity, f.code, f.message, "" if f.version is None else f.version, f.path or "", f.mend or "")
        for f in report.findings
    ]
    return listing(("severity", "code", "message", "version", "path", "mend"), rows)


def _plan_repair(run: Running[RepairOptions]) -> RepairPlan:
    return maintenance.plan_repair(run.lake, to_last_good=run.options.to_last_good)


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
    return f"{shown} left that repair does not mend: the table 'left' says what you can do"


def _to_last_good(run: Running[RepairOptions], plan: RepairPlan) -> dict[str, Any]:
    """Return the link to the plan that goes further, where this one leaves errors."""
    if run.options.to_last_good or not _left(plan):
        return {}
    return run.entry("repair", {"to_last_good": True}, "plan to return to the last version without damage")


def _repair(run: Running[Any], plan: RepairPlan, digest: str | None) -> None:
    report = plan.execute(digest)
    if not report.is_complete:
        run.log.warning("errors are left, which repair cannot mend: the table 'left' says what you can do")
    metadata = {**report_figures(report.to_dict()), **_repair_shown(report)}
    committed = "repair" if report.version > report.base_version else None
    run.report(str(report.table().title), metadata, committed=committed)


REPAIR: Planned[RepairOptions, RepairPlan] = Planned(
    name="repair",
    description="Verifies the lakehouse and repairs findings by new commits and the hint; deletes nothing.",
    options=RepairOptions,
    plan=_plan_repair,
    shown=_repair_shown,
    apply=_repair,
    is_pooled=False,
    changes_exports=True,
    left=_left,
    more=_to_last_good,
)
