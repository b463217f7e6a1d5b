"""Operations on exports (export, drop), the hint, and reconcile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trinitylake_ops import operations
from trinitylake_ops.declarations.operation import (
    CommandResult,
    CommandSpec,
    Committed,
    OperationContext,
    ReportingContext,
    direct,
    report_entries,
)
from trinitylake_ops.declarations.options import (
    ARGUMENT,
    ExportText,
    NamespaceTexts,
    NewExportText,
    Options,
    PositiveDurationText,
    TableTexts,
    TargetText,
    VersionNumber,
    VersionsText,
)
from trinitylake_ops.declarations.planned import PlanDeclaration, PlannedOptions, UnattendedOptions
from trinitylake_ops.declarations.rendering import listing
from trinitylake_ops.declarations.texts import duration_of
from trinitylake_ops.errors import InvalidInputError

if TYPE_CHECKING:
    from trinitylake_ops.operations import (
        CommitReport,
        DropExportPlan,
        ExportReport,
        HintReport,
        ReconcilePlan,
        ReconcileReport,
    )

_MAX_NAMED = 10


class PartOptions(Options):
    """Options that select namespaces and tables."""

    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces with their tables. Default: everything."
    )
    tables: TableTexts = Field(
        default=[], description="Only these tables, each as namespace.table. Default: everything."
    )


class ExportOptions(Options):
    """Options of export: the version, what to copy, the target, and how long to keep the export."""

    name: Annotated[NewExportText, ARGUMENT] = Field(
        description="Name of the export, without spaces and not digits only. The name of an interrupted export"
        " continues it.",
    )
    level: Literal["minimal", "partial", "full"] | None = Field(
        default=None,
        description="How much to copy. Minimal: only the root; the files it needs are kept in this lakehouse. Partial:"
        " all nodes of its tree. Full: everything, including the files of managed tables. Default: full with a target,"
        " otherwise minimal.",
    )
    version: VersionNumber | None = Field(
        default=None, description="The number of the version to export. Default: the latest."
    )
    target: TargetText | None = Field(
        default=None,
        description="Another root, where the export becomes a separate lakehouse. Later exports with the same target"
        " copy only new files. Default: the export stays in its lakehouse.",
    )
    retain_for: PositiveDurationText | None = Field(
        default=None,
        description="How long the export keeps its version from expiring, such as 30d. Default: until it is dropped; a"
        " full export only until it is complete.",
    )
    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces, for the levels partial and full. Default: all."
    )
    definitions: bool = Field(
        default=False, description="Also copy the definitions of namespaces and tables, in a partial export."
    )

    @property
    def chosen_level(self) -> str:
        """The level; by default full with a target, otherwise minimal."""
        return self.level or ("minimal" if self.target is None else "full")

    @model_validator(mode="after")
    def _check_level(self) -> Self:
        level = self.chosen_level
        if self.namespaces and level == "minimal":
            raise InvalidInputError("namespaces: a minimal export contains all of them; use another level")
        if self.definitions and level != "partial":
            raise InvalidInputError(f"definitions: the level {level} determines them; use the level partial")
        return self


class ExportNameOptions(Options):
    """An option with the name of an export."""

    name: Annotated[ExportText, ARGUMENT] = Field(description="Name of the export.")


def named(damaged: Mapping[str, str]) -> str:
    """Return the names of the first damaged tables."""
    return ", ".join(list(damaged)[:_MAX_NAMED])


def _execute_export(run: OperationContext[ExportOptions]) -> ExportReport:
    options = run.options
    plan = operations.plan_export(
        run.lake,
        options.name,
        options.chosen_level,
        options.version,
        options.target,
        None if options.retain_for is None else duration_of(options.retain_for),
        namespaces=options.namespaces,
        definitions=options.definitions,
        target_options=run.target_options,
        executor=run.executor(),
    )
    return plan.execute(progress=run.progress())


def _report_export(run: ReportingContext[ExportOptions], report: ExportReport) -> None:
    message, metadata = f"export {report.name} contains version {report.version}", report_entries(report.to_dict())
    if not report.is_complete:
        message += f" without damaged tables: {named(report.damaged)}"
    run.report(message, metadata, committed="export", logged=None if report.is_complete else {})
    if not report.is_complete:
        raise run.failure(message, metadata)


EXPORT = direct(
    job="export",
    description="Keeps a version under a name, and copies its files as needed. Continues an interrupted export.",
    options=ExportOptions,
    execute=_execute_export,
    report=_report_export,
    changes_exports=True,
    command=CommandSpec(uses_engine=True, has_target=True),
)


class HintOptions(Options):
    """An option that selects whether to write the hint."""

    check_only: bool = Field(default=False, description="Only check the hint; write nothing.")


def _execute_hint(run: OperationContext[HintOptions]) -> HintReport:
    return operations.inspect_hint(run.lake) if run.options.check_only else operations.repair_hint(run.lake)


def _report_hint(run: ReportingContext[HintOptions], report: HintReport) -> None:
    run.report(f"the hint was {report.state}", report_entries(report.to_dict()))


REPAIR_HINT = direct(
    job="repair_hint",
    description="Writes the number of the latest version to the hint file. A wrong hint costs every reader additional"
    " requests.",
    options=HintOptions,
    execute=_execute_hint,
    report=_report_hint,
    command=CommandSpec(result=lambda _run, _plan, report: CommandResult(shown=report, is_complete=report.is_right)),
)


class DropExportOptions(ExportNameOptions, PlannedOptions):
    """Options of dropping an export."""


def _drop_metadata(plan: DropExportPlan) -> dict[str, Any]:
    export = plan.export
    metadata = {
        "export": export.name,
        "version": export.version,
        "level": export.level,
        "state": export.state,
        "created_at": None if export.created_at is None else f"{export.created_at:%Y-%m-%d %H:%M:%S}",
        "location": export.location,
    }
    consequences = [(consequence,) for consequence in plan.consequences]
    return {**metadata, "what_follows": listing(("what follows",), consequences)}


def _report_drop(run: ReportingContext[Any], _plan: DropExportPlan | None, report: CommitReport) -> None:
    name = run.options.name
    message = f"export {name} was dropped in version {report.version}"
    run.report(message, {"dropped": name, **report_entries(report.to_dict())}, committed="drop-export")


def _drop_result(run: OperationContext[Any], plan: DropExportPlan, report: CommitReport) -> CommandResult:
    name = run.options.name
    warning = (
        f"The lakehouse at {plan.export.target} reads files here that are no longer kept: the next expirations, purges"
        " and orphan removals delete them"
    )
    return CommandResult(
        shown=Committed(version=report.version, line=f"Dropped export {name}", details={"name": name}),
        notices=(warning,) if plan.loses_files else (),
    )


DROP_EXPORT: PlanDeclaration[DropExportOptions, DropExportPlan, CommitReport] = PlanDeclaration(
    name="drop_export",
    description="Drops an export, so that its version can expire. Copies at another root stay there.",
    options=DropExportOptions,
    plan=lambda run: operations.plan_drop_export(run.lake, run.options.name),
    plan_metadata=_drop_metadata,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_report_drop,
    is_pooled=True,
    changes_exports=True,
    command=CommandSpec(result=_drop_result),
)


class ReconcileOptions(UnattendedOptions):
    """An option with the versions that an operator has inspected."""

    acknowledge: VersionsText | None = Field(
        default=None,
        description="Versions such as 7 or 7,9-12 whose roots another program wrote out of order. From then on, verify"
        " reports them as known. Default: none.",
    )


def _reconcile_metadata(settled: ReconcilePlan | ReconcileReport) -> dict[str, Any]:
    return {
        "steps": ", ".join(map(str, settled.steps)),
        "restored_exports": ", ".join(settled.restored_exports),
        "dropped_exports": ", ".join(settled.dropped_exports),
        "live_again": settled.live_again,
        "acknowledged": settled.acknowledged,
    }


def _report_reconcile(run: ReportingContext[Any], _plan: ReconcilePlan | None, report: ReconcileReport) -> None:
    metadata = {**report_entries(report.to_dict()), **_reconcile_metadata(report)}
    run.report(str(report.table().title), metadata, committed=None if report.version is None else "reconcile")


RECONCILE: PlanDeclaration[ReconcileOptions, ReconcilePlan, ReconcileReport] = PlanDeclaration(
    name="reconcile",
    description="Corrects exports and expirations after another program restored older settings.",
    options=ReconcileOptions,
    plan=lambda run: operations.plan_reconcile(run.lake, acknowledge=run.options.acknowledge or ""),
    plan_metadata=_reconcile_metadata,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_report_reconcile,
    direct=lambda run: operations.reconcile(run.lake, acknowledge=run.options.acknowledge or ""),
    changes_exports=True,
    command=CommandSpec(working="reading all versions"),
)
