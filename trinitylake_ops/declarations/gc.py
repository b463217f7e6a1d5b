"""Operations that reclaim space (trim, expire, undelete, purge, orphans), and relocate."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trinitylake_ops import operations, reports
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
    DurationText,
    InventoryText,
    Options,
    TableRootText,
    TableTexts,
    VersionsText,
    age_field,
)
from trinitylake_ops.declarations.planned import (
    BudgetOptions,
    LimitedOptions,
    PlanDeclaration,
    PlannedOptions,
    RulesOptions,
    end_deletion,
)
from trinitylake_ops.declarations.rendering import inline_chart, listing
from trinitylake_ops.declarations.texts import duration_of

if TYPE_CHECKING:
    from trinitylake_ops.operations import (
        ExpirationPlan,
        ExpirationReport,
        OrphanPlan,
        OrphanReport,
        PurgePlan,
        PurgeReport,
        RelocationPlan,
        RelocationReport,
        RetentionPolicy,
        TrimPlan,
        TrimReport,
    )


def _age(text: str | None) -> timedelta:
    return timedelta(0) if text is None else duration_of(text)


class PurgeOptions(BudgetOptions, LimitedOptions):
    """Options of purge: the minimum age of the versions to purge."""

    grace: DurationText | None = age_field("Only versions that expired")


class OrphansOptions(BudgetOptions, LimitedOptions):
    """Options of orphan removal: which files count as orphans."""

    older_than: DurationText | None = age_field("Only files last written")
    inventory: InventoryText | None = Field(
        default=None,
        description="The manifest.json of a storage inventory (Amazon S3 Inventory) to read instead of listing the"
        " storage. Files newer than the inventory are ignored. It may cover the root, the table root, or both. Default:"
        " list the storage.",
    )


def _plan_purge(run: OperationContext[PurgeOptions]) -> PurgePlan:
    return _purge_plan(run, _age(run.options.grace))


def _purge_plan(run: OperationContext[PurgeOptions], grace: timedelta) -> PurgePlan:
    return operations.plan_purge(run.lake, grace, budget=run.spending, progress=run.progress(), executor=run.executor())


def _purge_metadata(plan: PurgePlan) -> dict[str, Any]:
    rows = [
        (batch.versions, batch.state, "now" if batch.is_due else f"{batch.purgeable_at:%Y-%m-%d %H:%M:%S}")
        for batch in plan.batches
    ]
    return {
        "versions": plan.versions,
        "files": plan.files,
        "bytes": plan.bytes,
        "still_needed": plan.still_needed,
        "plan": listing(("versions", "state", "purge from (UTC)"), rows),
    }


PURGE: PlanDeclaration[PurgeOptions, PurgePlan, PurgeReport] = PlanDeclaration(
    name="purge",
    description="Deletes the files that only expired versions need. This cannot be undone.",
    options=PurgeOptions,
    plan=_plan_purge,
    plan_within_limits=lambda run, limits: _purge_plan(run, limits.min_age),
    verb="deletes",
    plan_metadata=_purge_metadata,
    execute=lambda run, plan, digest: plan.execute(digest, budget=run.spending, progress=run.progress()),
    report=lambda run, _plan, report: end_deletion(run, "purge", report),
    is_pooled=True,
    command=CommandSpec(uses_engine=True),
)


def _plan_orphans(run: OperationContext[OrphansOptions]) -> OrphanPlan:
    return _orphan_plan(run, _age(run.options.older_than))


def _orphan_plan(run: OperationContext[OrphansOptions], age: timedelta) -> OrphanPlan:
    return operations.plan_orphan_removal(
        run.lake,
        age,
        run.options.inventory,
        budget=run.spending,
        progress=run.progress(),
        executor=run.executor(),
    )


def _orphans_metadata(plan: OrphanPlan) -> dict[str, Any]:
    return {
        "files": len(plan.paths),
        "bytes": plan.bytes,
        "unowned_files": plan.unowned_files,
        "unowned_bytes": plan.unowned_bytes,
        "files_by_kind": listing(("kind", "files"), plan.files.items()),
        "plan": listing(("path",), [(path,) for path in plan.paths]),
    }


ORPHANS: PlanDeclaration[OrphansOptions, OrphanPlan, OrphanReport] = PlanDeclaration(
    name="orphans",
    description="Deletes the files that failed commits and aborted writes left behind.",
    options=OrphansOptions,
    plan=_plan_orphans,
    plan_within_limits=lambda run, limits: _orphan_plan(run, limits.min_age),
    verb="deletes",
    plan_metadata=_orphans_metadata,
    execute=lambda run, plan, digest: plan.execute(digest, budget=run.spending, progress=run.progress()),
    report=lambda run, _plan, report: end_deletion(run, "orphans", report),
    is_pooled=True,
    command=CommandSpec(uses_engine=True),
)


class ExpireOptions(RulesOptions, LimitedOptions):
    """Options of expire: the retention rules."""


class TrimOptions(RulesOptions, LimitedOptions):
    """Options of trim: the tables, and the retention rules for versions whose snapshots are kept."""

    tables: Annotated[TableTexts, ARGUMENT] = Field(
        default=[], description="Only these tables, each as namespace.table. Default: all managed tables."
    )


class RelocateOptions(PlannedOptions):
    """Options of relocate: the new location of the files under the table root."""

    table_root: TableRootText | None = Field(
        default=None,
        description="The current location of the files under the table root. It becomes the table root of this"
        " lakehouse, which then deletes files there that it no longer needs. No copy of the lakehouse may still use it."
        " Default: only the lakehouse itself was copied or moved.",
    )


class UndeleteOptions(Options):
    """Options of undelete: the versions to restore."""

    versions: Annotated[VersionsText, ARGUMENT] = Field(description="The expired versions to restore, such as 3-90,95.")


def _plan_expiration(run: OperationContext[ExpireOptions]) -> ExpirationPlan:
    return _expiration_plan(run, run.options.policy(run.lake))


def _expiration_plan(run: OperationContext[ExpireOptions], policy: RetentionPolicy | None) -> ExpirationPlan:
    return operations.plan_expiration(run.lake, policy, progress=run.progress(), executor=run.executor())


def _expire_metadata(plan: ExpirationPlan) -> dict[str, Any]:
    verdicts = sorted(plan.verdicts, key=lambda verdict: not verdict.expires)  # long tables are truncated
    rows = [(v.version, "expires" if v.expires else "kept", v.reason) for v in verdicts]
    return {
        "versions": plan.versions,
        "versions_expired": sum(verdict.expires for verdict in verdicts),
        "versions_kept": sum(not verdict.expires for verdict in verdicts),
        "exports_ended": ", ".join(plan.exports),
        "files": sum(plan.files.values()),
        "bytes": plan.bytes,
        "files_by_kind": listing(("kind", "files"), plan.files.items()),
        "timeline": inline_chart(reports.expiration_chart(plan)),
        "plan": listing(("version", "verdict", "why"), rows),
    }


def _report_expire(run: ReportingContext[Any], _plan: ExpirationPlan | None, report: ExpirationReport) -> None:
    committed = None if report.version is None else "expire"
    undo = {} if committed is None else run.entry("undelete", {"versions": report.versions})
    run.report(str(report.table().title), {**report_entries(report.to_dict()), **undo}, committed=committed)


EXPIRE: PlanDeclaration[ExpireOptions, ExpirationPlan, ExpirationReport] = PlanDeclaration(
    name="expire",
    description="Expires versions by the retention rules. They can be undeleted until their purge begins.",
    options=ExpireOptions,
    plan=_plan_expiration,
    plan_within_limits=lambda run, limits: _expiration_plan(run, limits.policy(run.lake)),
    verb="releases",
    plan_metadata=_expire_metadata,
    execute=lambda run, plan, digest: plan.execute(digest, progress=run.progress()),
    report=_report_expire,
    is_pooled=True,
    changes_exports=True,
    command=CommandSpec(uses_engine=True, page=lambda _run, plan, report: reports.expiration_page(plan, report)),
)


def _plan_trim(run: OperationContext[TrimOptions]) -> TrimPlan:
    return _trim_plan(run, run.options.policy(run.lake))


def _trim_plan(run: OperationContext[TrimOptions], policy: RetentionPolicy | None) -> TrimPlan:
    return operations.plan_trim_tables(run.lake, policy, tables=run.options.tables or None)


def _trim_metadata(plan: TrimPlan) -> dict[str, Any]:
    rows = [(f"{trim.namespace}.{trim.table}", len(trim.dropped), len(trim.kept)) for trim in plan.tables]
    return {
        "tables": len(plan.tables),
        "snapshots_dropped": plan.snapshots_dropped,
        "unreadable": ", ".join(plan.unreadable),
        "unwritable": ", ".join(plan.unwritable),
        "plan": listing(("table", "snapshots dropped", "snapshots kept"), rows),
    }


def _report_trim(run: ReportingContext[Any], plan: TrimPlan | None, report: TrimReport) -> None:
    unreadable = ", ".join(() if plan is None else plan.unreadable)
    if unreadable:
        run.log.warning("skipped, because their metadata cannot be read: %s; run verify for details", unreadable)
    metadata = {
        **report_entries(report.to_dict()),
        "tables": len(report.tables),
        "left": ", ".join(report.left),
        "unreadable": unreadable,
    }
    run.report(str(report.table().title), metadata, committed="trim" if report.tables else None)


def _trim_result(_run: OperationContext[Any], plan: TrimPlan, report: TrimReport) -> CommandResult:
    skipped = {
        "their metadata cannot be read": (plan.unreadable, "; run verify for details"),
        "their format version cannot be written": (plan.unwritable, ""),
    }
    notices = [f"Skipped, because {why}: {', '.join(names)}{more}" for why, (names, more) in skipped.items() if names]
    return CommandResult(shown=report, notices=tuple(notices))


# The execution plans again after each concurrent commit, and never drops more than the approved plan.
TRIM: PlanDeclaration[TrimOptions, TrimPlan, TrimReport] = PlanDeclaration(
    name="trim",
    description="Drops Iceberg snapshots of managed tables that no kept version needs (Iceberg: expire snapshots) from"
    " the latest version. Older versions keep them.",
    options=TrimOptions,
    plan=_plan_trim,
    plan_within_limits=lambda run, limits: _trim_plan(run, limits.policy(run.lake)),
    verb="drops",
    plan_metadata=_trim_metadata,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_report_trim,
    is_pooled=True,
    command=CommandSpec(working="reading the tables", result=_trim_result),
)


def _plan_relocation(run: OperationContext[RelocateOptions]) -> RelocationPlan:
    return operations.plan_relocation(run.lake, run.options.table_root)


def _relocation_metadata(plan: RelocationPlan) -> dict[str, Any]:
    rows = [*((name, "relocated") for name in plan.tables), *plan.refused.items()]
    return {
        "tables": len(plan.tables),
        "files": plan.files,
        "refused": ", ".join(plan.refused),
        "table_root": plan.table_root,
        "left_table_root": plan.left_table_root,
        "plan": listing(("table", "what happens"), rows),
    }


def _report_relocate(run: ReportingContext[Any], plan: RelocationPlan | None, report: RelocationReport) -> None:
    if report.refused:
        run.log.warning("skipped: %s; the plan shows the reasons", ", ".join(report.refused))
    metadata = {
        **report_entries(report.to_dict()),
        "tables": len(report.tables),
        "refused": ", ".join(report.refused),
    }
    # The table root can be claimed without a commit.
    is_committed = report.tables or plan is None or report.version > plan.base_version
    run.report(str(report.table().title), metadata, committed="relocate" if is_committed else None)


RELOCATE: PlanDeclaration[RelocateOptions, RelocationPlan, RelocationReport] = PlanDeclaration(
    name="relocate",
    description="Rewrites the metadata of tables that name a former location of the lakehouse or of its table root."
    " Copies no data.",
    options=RelocateOptions,
    plan=_plan_relocation,
    plan_metadata=_relocation_metadata,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_report_relocate,
    is_pooled=True,
    command=CommandSpec(working="reading the tables"),
)


def _report_undelete(run: ReportingContext[UndeleteOptions], version: int) -> None:
    versions = run.options.versions
    run.report(f"version {version} restores {versions}", {"versions": versions}, committed="undelete")


def _undelete_result(run: OperationContext[UndeleteOptions], _plan: None, version: int) -> CommandResult:
    versions = run.options.versions
    line = f"Brought back {versions}"
    return CommandResult(shown=Committed(version=version, line=line, details={"versions": versions}))


UNDELETE = direct(
    job="undelete",
    description="Restores expired versions until their purge begins.",
    options=UndeleteOptions,
    execute=lambda run: operations.undelete(run.lake, run.options.versions),
    report=_report_undelete,
    command=CommandSpec(result=_undelete_result),
)
