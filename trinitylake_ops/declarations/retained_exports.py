"""Operations on existing exports: list, verify and prune them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trinitylake_ops import operations
from trinitylake_ops.declarations.exports import ExportNameOptions
from trinitylake_ops.declarations.operation import (
    CommandResult,
    CommandSpec,
    Committed,
    OperationContext,
    ReportingContext,
    direct,
    report_entries,
)
from trinitylake_ops.declarations.options import ARGUMENT, CommandLine, DurationText
from trinitylake_ops.declarations.planned import KEEP, PlanDeclaration, PlannedOptions, rules_of
from trinitylake_ops.declarations.rendering import Json, listing
from trinitylake_ops.declarations.texts import duration_of
from trinitylake_ops.operations.rendering import Table, jsonable, new_table
from trinitylake_ops.operations.retention import RetentionPolicy

if TYPE_CHECKING:
    from trinitylake_ops.operations import CommitReport, ExportCheck, ExportInfo
    from trinitylake_ops.operations.exports.drop import PrunePlan


@dataclass(frozen=True)
class ExportList:
    """The exports of a lakehouse."""

    exports: Sequence[ExportInfo]

    def to_dict(self) -> Any:
        """Return the exports."""
        return self.exports

    def table(self) -> Table:
        """Return one row for each export."""
        rows = [
            (
                export.name,
                export.version,
                export.level,
                export.state,
                export.created_at,
                export.retain_until,
                export.location,
            )
            for export in self.exports
        ]
        return new_table("", "name", "version", "level", "state", "created (UTC)", "kept until", "root", rows=rows)


def _report_exports(run: ReportingContext[None], report: ExportList) -> None:
    table = report.table()
    metadata = {"list": listing(table.columns, table.rows), "details": Json(jsonable(report.exports))}
    run.report(f"{len(report.exports)} exports", {"exports": len(report.exports), **metadata})


EXPORTS = direct(
    job="exports",
    description="Lists the exports. Read-only.",
    execute=lambda run: ExportList(operations.list_exports(run.lake)),
    report=_report_exports,
)


class VerifyExportOptions(ExportNameOptions):
    """Options that select an export and how much of it to read."""

    deep: bool = Field(default=False, description="Read all copies and compare checksums, not only sizes.")


def _execute_check(run: OperationContext[VerifyExportOptions]) -> ExportCheck:
    options = run.options
    return operations.verify_export(
        run.lake, options.name, deep=options.deep, target_options=run.target_options, progress=run.progress()
    )


def _report_check(run: ReportingContext[VerifyExportOptions], report: ExportCheck) -> None:
    table = report.table()
    metadata = {**report_entries(report.to_dict()), "differences": listing(table.columns, table.rows)}
    if not report.is_clean:
        raise run.failure(str(table.title), metadata)
    run.report(str(table.title), metadata)


VERIFY_EXPORT = direct(
    job="verify_export",
    description="Compares the files of an export with its manifest; fails if files are missing or differ.",
    options=VerifyExportOptions,
    execute=_execute_check,
    report=_report_check,
    command=CommandSpec(
        has_target=True,
        result=lambda _run, _plan, report: CommandResult(shown=report, is_complete=report.is_clean),
    ),
)

_RULES = rules_of("export", "created", "no such rule")


class PruneExportsOptions(PlannedOptions):
    """Options of pruning: the name pattern of the exports, and the retention rules."""

    pattern: Annotated[str, ARGUMENT] = Field(description="The name pattern of the exports, such as nightly-*.")
    exclude: Annotated[list[str], CommandLine(metavar="PATTERN", flag="--exclude")] = Field(
        default=[], description="Leave out exports whose names match this pattern."
    )
    max_age: DurationText | None = _RULES["max_age"]
    min_versions: int | None = _RULES["min_versions"]
    keep_last: int | None = _RULES["keep_last"]
    keep_hourly: int | None = _RULES["keep_hourly"]
    keep_daily: int | None = _RULES["keep_daily"]
    keep_weekly: int | None = _RULES["keep_weekly"]
    keep_monthly: int | None = _RULES["keep_monthly"]

    def policy(self) -> RetentionPolicy:
        """Return the rules as a retention policy without further protection."""
        max_age = timedelta(0) if self.max_age is None else duration_of(self.max_age)
        periods: dict[str, Any] = {name: getattr(self, name) or 0 for name in KEEP}
        return RetentionPolicy(
            maximum_age_ms=max_age // timedelta(milliseconds=1),
            minimum_versions=self.min_versions or 0,
            protected_ms=0,
            **periods,
        )


def _prune_metadata(plan: PrunePlan) -> dict[str, Any]:
    table = plan.table()
    return {
        "exports": len(plan.verdicts),
        "exports_dropped": len(plan.names),
        "plan": listing(table.columns, table.rows),
    }


def _report_prune(run: ReportingContext[Any], plan: PrunePlan | None, report: CommitReport) -> None:
    names = () if plan is None else plan.names
    metadata = {"dropped": ", ".join(names), **report_entries(report.to_dict())}
    run.report(f"{len(names)} exports dropped", metadata, committed="prune-exports" if names else None)


def _prune_result(_run: OperationContext[Any], plan: PrunePlan, report: CommitReport) -> CommandResult:
    line = f"Dropped exports {', '.join(plan.names)}"
    return CommandResult(
        shown=Committed(version=report.version, line=line, has_changed=bool(plan.names), details={"names": plan.names})
    )


PRUNE_EXPORTS: PlanDeclaration[PruneExportsOptions, PrunePlan, CommitReport] = PlanDeclaration(
    name="prune_exports",
    description="Drops old exports by retention rules. The newest export is always kept.",
    options=PruneExportsOptions,
    plan=lambda run: operations.plan_prune_exports(
        run.lake, run.options.pattern, run.options.policy(), excluded=run.options.exclude
    ),
    plan_metadata=_prune_metadata,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_report_prune,
    is_pooled=True,
    changes_exports=True,
    command=CommandSpec(result=_prune_result),
)
