"""Checking a lakehouse, and putting right what is found, as Dagster ops."""

import dagster as dg
from pydantic import Field

from trinitylake_ops import maintenance
from trinitylake_ops.dagster_plugin.metadata import markdown_table, picture
from trinitylake_ops.dagster_plugin.ops import log_version, logged_progress, operating, report_metadata
from trinitylake_ops.dagster_plugin.plans import digest_field, show_plan
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.maintenance import Budget, RepairPlan, RepairReport, VerifyReport
from trinitylake_ops.maintenance.page import verification_picture

_COLUMNS = ("severity", "code", "path", "version", "what you can do")


class VerifyConfig(dg.Config):
    """How much is read, and when it ends."""

    deep: bool = Field(
        default=False,
        description="Whether to read all again, data files of tables too, and compare it with what was recorded.",
    )
    incremental: bool = Field(
        default=False,
        description="Whether to keep a record in the lakehouse, and not to read again what it knows to be unchanged.",
    )
    max_requests: int = Field(default=0, ge=0, description="Stop after so many requests; 0: no limit.")
    max_seconds: float = Field(
        default=0, ge=0, le=1_000_000, allow_inf_nan=False, description="Stop after so many seconds; 0: no limit."
    )

    def budget(self) -> Budget:
        """Return the limits."""
        return Budget(max_requests=self.max_requests or None, max_seconds=self.max_seconds or None)


class RepairConfig(dg.Config):
    """How far repair goes."""

    to_last_good: bool = Field(
        default=False,
        description="Whether to go back, where the latest version is damaged, to what is whole: its damaged objects"
        " alone, or all where the tree is damaged.",
    )


class RepairApplyConfig(RepairConfig):
    """The options of the plan, and its digest."""

    approved_digest: str = digest_field("repair_plan")


@dg.op(description="Checks all versions, nodes, definitions, tables and their files; fails when it finds errors.")
def run_verify(context: dg.OpExecutionContext, config: VerifyConfig, lakehouse: TrinityLakeResource) -> None:
    """Verify the lakehouse."""
    with operating(context, lakehouse) as lake:
        progress = logged_progress(context)
        report = maintenance.verify(
            lake,
            lambda done, total: progress("versions", done, total),
            deep=config.deep,
            incremental=config.incremental,
            budget=config.budget(),
        )
        metadata = {
            **report_metadata(report.to_dict()),
            "timeline": picture(verification_picture(report)),
            "findings": findings_table(report),
            "not_looked_at": "; ".join(report.unchecked),
        }
        if not report.is_clean:
            errors = [finding.message for finding in report.findings if finding.severity == "error"]
            raise dg.Failure(
                description=f"{len(errors)} error{'s' if len(errors) > 1 else ''}, the first: {errors[0]}",
                metadata=metadata,
                allow_retries=False,
            )
        if report.stopped is not None:
            context.log.warning("not finished, as %s; not looked at: %s", report.stopped, "; ".join(report.unchecked))
        context.add_output_metadata(metadata)


def findings_table(report: VerifyReport) -> dg.MarkdownMetadataValue:
    """Return what verify found, a row each."""
    rows = [
        (f.severity, f.code, f.message, "" if f.version is None else f.version, f.path or "", f.mend or "")
        for f in report.findings
    ]
    return markdown_table(("severity", "code", "message", "version", "path", "mend"), rows)


@dg.op(description="Verifies the lakehouse and shows what repair would do, and what it would leave; reads only.")
def run_repair_plan(context: dg.OpExecutionContext, config: RepairConfig, lakehouse: TrinityLakeResource) -> None:
    """Plan a repair."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_repair(lake, to_last_good=config.to_last_good)
        show_plan(context, plan, _shown(plan), apply_op="run_repair_apply", options=config, is_empty=plan.is_empty)


@dg.op(description="Carries out the plan of a repair: new commits and the hint, nothing is deleted.")
def run_repair_apply(context: dg.OpExecutionContext, config: RepairApplyConfig, lakehouse: TrinityLakeResource) -> None:
    """Carry out the plan of a repair."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_repair(lake, to_last_good=config.to_last_good)
        report = plan.execute(config.approved_digest)
        context.log.info("%s", report.table().title)
        metadata = {**report_metadata(report.to_dict()), **_shown(report)}
        if report.version > report.base_version:
            log_version(context, lake, "repair", metadata)
        context.add_output_metadata(metadata)


def _shown(repair: RepairPlan | RepairReport) -> dict[str, object]:
    """Return the steps and what is left, as tables."""
    steps = [(step.action, step.what, "" if step.version is None else step.version) for step in repair.steps]
    left = [
        (f.severity, f.code, f.path or "", "" if f.version is None else f.version, f.advice) for f in repair.not_mended
    ]
    return {
        "steps": markdown_table(("step", "of", "version"), steps),
        "left": markdown_table(_COLUMNS, left),
    }
