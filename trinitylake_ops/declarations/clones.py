"""Operations on clones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from trinitylake_ops import operations, reports
from trinitylake_ops.declarations.operation import (
    CommandSpec,
    Operation,
    OperationContext,
    ReportingContext,
    direct,
    report_entries,
)
from trinitylake_ops.declarations.options import (
    BRANCH_PREFIX,
    CommandLine,
    ExportText,
    NamespaceTexts,
    NewExportText,
    Options,
    PositiveDurationText,
    TableTexts,
    TargetText,
    TimeText,
    VersionNumber,
)
from trinitylake_ops.declarations.planned import PlanDeclaration, PlannedOptions
from trinitylake_ops.declarations.rendering import listing
from trinitylake_ops.declarations.texts import duration_of, time_of
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.rendering import Table, new_table

if TYPE_CHECKING:
    from trinitylake_ops.operations import (
        CloneReport,
        Comparison,
        DropCloneReport,
        PromotionPlan,
        PromotionReport,
        RefreshPlan,
    )
    from trinitylake_ops.operations.base import CommitReport
    from trinitylake_ops.operations.clones.drop import DropClonePlan
    from trinitylake_ops.operations.clones.merge import Conflict


class CloneOptions(Options):
    """Options of clone: the version to clone, the target, and how long to keep the clone."""

    target: Annotated[TargetText, CommandLine(metavar="TARGET", is_argument=True)] = Field(
        description="The root of the clone, which must not contain a lakehouse."
    )
    name: NewExportText | None = Field(
        default=None,
        description="Name of the clone, without spaces and not digits only. The name of an interrupted clone continues"
        " it. Default: the last part of the target.",
    )
    version: VersionNumber | None = Field(
        default=None, description="The number of the version to clone. Default: the latest."
    )
    export: ExportText | None = Field(default=None, description="Clone the version of this export.")
    timestamp: TimeText | None = Field(
        default=None,
        description="Clone the newest version at that time: ISO 8601, in UTC unless it has an offset, or milliseconds"
        " since 1970.",
    )
    namespaces: NamespaceTexts = Field(default=[], description="Only these namespaces. Default: all.")
    retain_for: PositiveDurationText | None = Field(
        default=None,
        description="After this time, such as 14d, the clone is overdue, and schedules may drop it. Default: never.",
    )

    @model_validator(mode="after")
    def _check_one_version(self) -> Self:
        if [self.version, self.export, self.timestamp].count(None) < 2:
            raise InvalidInputError("version, export and timestamp exclude each other; use only one of them")
        return self


class CloneNameOptions(Options):
    """An option with the name of a clone."""

    name: Annotated[ExportText, CommandLine(metavar="CLONE", is_argument=True)] = Field(
        description="Name of the clone."
    )


class RefreshOptions(CloneNameOptions, PlannedOptions):
    """Options of refresh: the clone, and the sides chosen for conflicts."""

    ours: Annotated[list[str], CommandLine(metavar="NAMESPACE[.TABLE]", flag="--ours")] = Field(
        default=[],
        description="Conflicts to resolve by keeping the receiving side: namespaces, or namespace.table.",
    )
    theirs: Annotated[list[str], CommandLine(metavar="NAMESPACE[.TABLE]", flag="--theirs")] = Field(
        default=[], description="Conflicts to resolve by taking the other side: namespaces, or namespace.table."
    )


class PromoteOptions(RefreshOptions):
    """Options of promote: the clone, what to promote, and the sides chosen for conflicts."""

    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces with their tables. Default: everything."
    )
    tables: TableTexts = Field(
        default=[], description="Only these tables, each as namespace.table. Default: everything."
    )


class DropCloneOptions(CloneNameOptions, PlannedOptions):
    """Options of dropping a clone: the clone, and whether to delete its files."""

    delete_files: bool = Field(
        default=False, description="Also delete the clone's own files. Stop all writers of the clone first."
    )


def _execute_clone(run: OperationContext[CloneOptions]) -> CloneReport:
    options = run.options
    plan = operations.plan_clone(
        run.lake,
        options.target,
        options.name,
        options.version if options.export is None else options.export,
        timestamp=None if options.timestamp is None else time_of(options.timestamp),
        namespaces=options.namespaces,
        retain_for=None if options.retain_for is None else duration_of(options.retain_for),
        target_options=run.target_options,
    )
    return plan.execute()


def _report_clone(run: ReportingContext[CloneOptions], report: CloneReport) -> None:
    message = f"clone {report.name} is version {report.version}, at {report.target}"
    run.report(message, report_entries(report.to_dict()), committed="clone")


def _report_comparison(run: ReportingContext[CloneNameOptions], comparison: Comparison) -> None:
    table = comparison.table()
    metadata = {
        **report_entries(comparison.to_dict()),
        **{f"changed_in_{side.value}": len(comparison.on(side)) for side in operations.ChangedOn},
        "objects": listing(table.columns, table.rows),
    }
    run.report(comparison.headline, metadata)


def _conflicts(conflicts: Sequence[Conflict]) -> dict[str, Any]:
    rows = [(conflict.name, conflict.reason) for conflict in conflicts]
    return {"conflicts": len(rows), "to_choose": listing(("object", "why"), rows)}


def _merge_metadata(plan: PromotionPlan | RefreshPlan) -> dict[str, Any]:
    return {
        "clone_version": plan.clone_version,
        "shared_version": plan.shared_version,
        "objects": len(plan.changes),
        **_conflicts(plan.conflicts),
        "plan": listing(("change", "object", "why"), plan.rows()),
    }


def _undecided_conflicts(plan: PromotionPlan | RefreshPlan, prefix: str = "") -> str:
    """Return a description of undecided conflicts, or an empty string if there are none."""
    if not plan.conflicts:
        return ""
    from trinitylake_ops.operations.clones.merge import count_of

    return f"{count_of(plan.conflicts)}; choose a side for each, for example: {plan.how_to_choose(prefix)}"


def _steps(plan: PromotionPlan | RefreshPlan) -> Table:
    """Return the steps of a plan, and the conflicts that block it."""
    steps = plan.steps()
    conflicts = [("conflict", conflict.name, conflict.reason, "") for conflict in plan.conflicts]
    return new_table(steps.title, *steps.columns, rows=[*steps.rows, *conflicts])


def _plan_promotion(run: OperationContext[PromoteOptions]) -> PromotionPlan:
    options = run.options
    return operations.plan_promotion(
        run.lake,
        options.name,
        options.namespaces,
        options.tables,
        ours=options.ours,
        theirs=options.theirs,
        target_options=run.target_options,
        executor=run.executor(),
    )


def _promotion_metadata(plan: PromotionPlan) -> dict[str, Any]:
    return {"files": plan.files, "bytes": plan.bytes, **_merge_metadata(plan)}


def _report_promote(run: ReportingContext[Any], _plan: PromotionPlan | None, report: PromotionReport) -> None:
    committed = "promote" if report.version != report.base_version else None
    run.report(str(report.table().title), report_entries(report.to_dict()), committed=committed)


PROMOTE: PlanDeclaration[PromoteOptions, PromotionPlan, PromotionReport] = PlanDeclaration(
    name="promote",
    description="Commits the changes of a clone to this lakehouse, as one version. The plan shows conflicts.",
    options=PromoteOptions,
    plan=_plan_promotion,
    plan_metadata=_promotion_metadata,
    execute=lambda run, plan, digest: plan.execute(digest, progress=run.progress()),
    report=_report_promote,
    remaining_errors=_undecided_conflicts,
    blocked=partial(_undecided_conflicts, prefix="--"),
    steps=_steps,
    command=CommandSpec(uses_engine=True, has_target=True),
)


def _plan_refresh(run: OperationContext[RefreshOptions]) -> RefreshPlan:
    options = run.options
    return operations.plan_refresh(
        run.lake, options.name, ours=options.ours, theirs=options.theirs, target_options=run.target_options
    )


def _report_refresh(run: ReportingContext[Any], _plan: RefreshPlan | None, report: CommitReport) -> None:
    # The commit in this lakehouse records which version is kept for the clone.
    committed = None if report.version == report.base_version else "refresh"
    run.report(str(report.table().title), report_entries(report.to_dict()), committed=committed)


REFRESH_CLONE: PlanDeclaration[RefreshOptions, RefreshPlan, CommitReport] = PlanDeclaration(
    name="refresh_clone",
    description="Commits the changes of this lakehouse to a clone, as one version there. The plan shows conflicts.",
    options=RefreshOptions,
    plan=_plan_refresh,
    plan_metadata=_merge_metadata,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_report_refresh,
    remaining_errors=_undecided_conflicts,
    blocked=partial(_undecided_conflicts, prefix="--"),
    steps=_steps,
    command=CommandSpec(has_target=True),
)


def _plan_drop(run: OperationContext[DropCloneOptions]) -> DropClonePlan:
    return operations.plan_drop_clone(
        run.lake, run.options.name, delete_files=run.options.delete_files, target_options=run.target_options
    )


def _drop_metadata(plan: DropClonePlan) -> dict[str, Any]:
    return {
        "root": plan.root,
        "clone_version": plan.clone_version,
        "not_read": plan.reason or "",
        "files": plan.files,
        "bytes": plan.bytes,
        "files_of_others": plan.left,
    }


def end_drop(run: ReportingContext[Any], report: DropCloneReport) -> None:
    """Report a dropped clone.

    Args:
        run: The run context.
        report: The report of the drop.

    Raises:
        Exception: The failure of the run, if the storage refused to delete files. In that case, the clone is kept.
    """
    metadata = {
        **report_entries(report.to_dict()),
        "failures": listing(("path", "reason"), sorted(report.failures.items())),
    }
    if report.version is None:
        raise run.failure(
            f"{len(report.failures)} files of clone {report.name} were not deleted, so the clone is kept; fix the"
            " cause, then drop it again",
            metadata,
        )
    run.report(str(report.table().title), metadata, committed="drop-clone")


DROP_CLONE: PlanDeclaration[DropCloneOptions, DropClonePlan, DropCloneReport] = PlanDeclaration(
    name="drop_clone",
    description="Releases the versions kept for a clone, and optionally deletes the clone's own files.",
    options=DropCloneOptions,
    plan=_plan_drop,
    plan_metadata=_drop_metadata,
    execute=lambda run, plan, digest: plan.execute(digest, progress=run.progress()),
    report=lambda run, _plan, report: end_drop(run, report),
    is_pooled=True,
    command=CommandSpec(has_target=True),
)


def _drop_closed_branch(run: ReportingContext[CloneNameOptions]) -> None:
    name = run.options.name
    if not name.startswith(BRANCH_PREFIX):
        raise InvalidInputError(
            f"clone {name!r} is not a branch, because its name does not begin with {BRANCH_PREFIX!r}; drop it with"
            f" {run.job('drop_clone')}"
        )
    end_drop(run, operations.plan_drop_clone(run.lake, name, delete_files=True).execute(progress=run.progress()))


CLONE = direct(
    job="clone",
    description="Creates a separate lakehouse from a version, at another root, without copying table files.",
    options=CloneOptions,
    execute=_execute_clone,
    report=_report_clone,
    command=CommandSpec(has_target=True),
)
COMPARE_CLONE = direct(
    job="compare_clone",
    description="Shows what changed in a clone, in this lakehouse, or in both, since their shared version. Read-only.",
    options=CloneNameOptions,
    execute=lambda run: operations.compare(run.lake, run.options.name, target_options=run.target_options),
    report=_report_comparison,
    command=CommandSpec(
        has_target=True,
        page=lambda run, _plan, report: reports.comparison_page(report, run.lake.storage.now_ms()),
    ),
)
DROP_CLOSED_BRANCH = Operation(
    job="drop_closed_branch",
    description="Drops the clone of a closed branch, with its files. Rejects clones that are not branches.",
    options=CloneNameOptions,
    step=_drop_closed_branch,
    is_pooled=True,
    approved_by="the end of a branch",
)
