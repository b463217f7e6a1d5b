"""Operations that reclaim space: trim, expire, undelete, purge and orphans; and relocate."""

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
    """The age of the versions to purge."""

    grace: DurationText | None = age_field("Only what expired")


class OrphansOptions(BudgetOptions, LimitedOptions):
    """The files that count as left behind."""

    older_than: DurationText | None = age_field("Only files last written")
    inventory: InventoryText | None = Field(
        default=None,
        description="The manifest.json of an inventory of the storage (Amazon S3 Inventory) to read instead of listing"
        " the storage. Files that are newer than the inventory are left out. It may be of the root, of the table root,"
        " or of both. Default: list the storage.",
    )


def _plan_purge(run: OperationContext[PurgeOptions]) -> PurgePlan:
    return _purge_of(run, _age(run.options.grace))


def _purge_of(run: OperationContext[PurgeOptions], grace: timedelta) -> PurgePlan:
    return operations.plan_purge(run.lake, grace, budget=run.spending, progress=run.progress(), executor=run.executor())


def _purge_shown(plan: PurgePlan) -> dict[str, Any]:
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
    description="Deletes the files that only expired versions need. They cannot come back.",
    options=PurgeOptions,
    plan=_plan_purge,
    within=lambda run, limits: _purge_of(run, limits.min_age),
    does="deletes",
    shown=_purge_shown,
    execute=lambda run, plan, digest: plan.execute(digest, budget=run.spending, progress=run.progress()),
    report=lambda run, _plan, report: end_deletion(run, "purge", report),
    is_pooled=True,
    command=CommandSpec(uses_engine=True),
)


def _plan_orphans(run: OperationContext[OrphansOptions]) -> OrphanPlan:
    return _orphans_of(run, _age(run.options.older_than))


def _orphans_of(run: OperationContext[OrphansOptions], age: timedelta) -> OrphanPlan:
    return operations.plan_orphan_removal(
        run.lake,
        age,
        run.options.inventory,
        budget=run.spending,
        progress=run.progress(),
        executor=run.executor(),
    )


def _orphans_shown(plan: OrphanPlan) -> dict[str, Any]:
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
    within=lambda run, limits: _orphans_of(run, limits.min_age),
    does="deletes",
    shown=_orphans_shown,
    execute=lambda run, plan, digest: plan.execute(digest, budget=run.spending, progress=run.progress()),
    report=lambda run, _plan, report: end_deletion(run, "orphans", report),
    is_pooled=True,
    command=CommandSpec(uses_engine=True),
)


class ExpireOptions(RulesOptions, LimitedOptions):
    """The rules of retention."""


class TrimOptions(RulesOptions, LimitedOptions):
    """The tables to trim, and the rules for versions whose snapshots they keep."""

    tables: Annotated[TableTexts, ARGUMENT] = Field(
        default=[], description="Only these tables, each as namespace.table. Default: all managed tables."
    )


class RelocateOptions(PlannedOptions):
    """The new location of the files under the table root."""

    table_root: TableRootText | None = Field(
        default=None,
        description="The present location of the files under the table root. It becomes the table root of this"
        " lakehouse, which from then on frees what it does not need there. No copy of the lakehouse may continue to use"
        " it. Default: the lakehouse alone was copied or moved.",
    )


class UndeleteOptions(Options):
    """The versions to bring back."""

    versions: Annotated[VersionsText, ARGUMENT] = Field(
        description="The expired versions to bring back, such as 3-90,95."
    )


def _plan_expiration(run: OperationContext[ExpireOptions]) -> ExpirationPlan:
    return _expiration_by(run, run.options.policy(run.lake))


def _expiration_by(run: OperationContext[ExpireOptions], policy: RetentionPolicy | None) -> ExpirationPlan:
    return operations.plan_expiration(run.lake, policy, progress=run.progress(), executor=run.executor())


def _expire_shown(plan: ExpirationPlan) -> dict[str, Any]:
    verdicts = sorted(plan.verdicts, key=lambda verdict: not verdict.expires)  # the others are cut first
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


def _expire_reported(run: ReportingContext[Any], _plan: ExpirationPlan | None, report: ExpirationReport) -> None:
    committed = None if report.version is None else "expire"
    undo = {} if committed is None else run.entry("undelete", {"versions": report.versions})
    run.report(str(report.table().title), {**report_entries(report.to_dict()), **undo}, committed=committed)


EXPIRE: PlanDeclaration[ExpireOptions, ExpirationPlan, ExpirationReport] = PlanDeclaration(
    name="expire",
    description="Expires versions by the rules of retention. Undelete brings them back until their purge begins.",
    options=ExpireOptions,
    plan=_plan_expiration,
    within=lambda run, limits: _expiration_by(run, limits.policy(run.lake)),
    does="lets go of",
    shown=_expire_shown,
    execute=lambda run, plan, digest: plan.execute(digest, progress=run.progress()),
    report=_expire_reported,
    is_pooled=True,
    changes_exports=True,
    command=CommandSpec(uses_engine=True, page=lambda _run, plan, report: reports.expiration_page(plan, report)),
)


def _plan_trim(run: OperationContext[TrimOptions]) -> TrimPlan:
    return _trim_by(run, run.options.policy(run.lake))


def _trim_by(run: OperationContext[TrimOptions], policy: RetentionPolicy | None) -> TrimPlan:
    return operations.plan_trim_tables(run.lake, policy, tables=run.options.tables or None)


def _trim_shown(plan: TrimPlan) -> dict[str, Any]:
    rows = [(f"{trim.namespace}.{trim.table}", len(trim.dropped), len(trim.kept)) for trim in plan.tables]
    return {
        "tables": len(plan.tables),
        "snapshots_dropped": plan.snapshots_dropped,
        "unreadable": ", ".join(plan.unreadable),
        "unwritable": ", ".join(plan.unwritable),
        "plan": listing(("table", "snapshots dropped", "snapshots kept"), rows),
    }


def _trim_reported(run: ReportingContext[Any], plan: TrimPlan | None, report: TrimReport) -> None:
    unreadable = ", ".join(() if plan is None else plan.unreadable)
    if unreadable:
        run.log.warning("left as they are, since their metadata cannot be read: %s; verify says why", unreadable)
    metadata = {
        **report_entries(report.to_dict()),
        "tables": len(report.tables),
        "left": ", ".join(report.left),
        "unreadable": unreadable,
    }
    run.report(str(report.table().title), metadata, committed="trim" if report.tables else None)


def _trim_result(_run: OperationContext[Any], plan: TrimPlan, report: TrimReport) -> CommandResult:
    left = {
        "their metadata cannot be read": (plan.unreadable, "; verify says why"),
        "their format version cannot be written": (plan.unwritable, ""),
    }
    notices = [
        f"Left as they are, since {why}: {', '.join(names)}{more}" for why, (names, more) in left.items() if names
    ]
    return CommandResult(shown=report, notices=tuple(notices))


# Its execution plans again after each commit of others, and never drops more than the approved plan.
TRIM: PlanDeclaration[TrimOptions, TrimPlan, TrimReport] = PlanDeclaration(
    name="trim",
    description="Drops the snapshots of managed Iceberg tables that no kept version needs (Iceberg: expire snapshots)"
    " from the latest version. Older versions keep them.",
    options=TrimOptions,
    plan=_plan_trim,
    within=lambda run, limits: _trim_by(run, limits.policy(run.lake)),
    does="drops",
    shown=_trim_shown,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_trim_reported,
    is_pooled=True,
    command=CommandSpec(working="reading the tables", result=_trim_result),
)


def _plan_relocation(run: OperationContext[RelocateOptions]) -> RelocationPlan:
    return operations.plan_relocation(run.lake, run.options.table_root)


def _relocation_shown(plan: RelocationPlan) -> dict[str, Any]:
    rows = [*((name, "relocated") for name in plan.tables), *plan.refused.items()]
    return {
        "tables": len(plan.tables),
        "files": plan.files,
        "refused": ", ".join(plan.refused),
        "table_root": plan.table_root,
        "left_table_root": plan.left_table_root,
        "plan": listing(("table", "what happens"), rows),
    }


def _relocate_reported(run: ReportingContext[Any], plan: RelocationPlan | None, report: RelocationReport) -> None:
    if report.refused:
        run.log.warning("left as they are: %s; the plan says why", ", ".join(report.refused))
    metadata = {
        **report_entries(report.to_dict()),
        "tables": len(report.tables),
        "refused": ", ".join(report.refused),
    }
    # A table root may be taken without a commit.
    is_committed = report.tables or plan is None or report.version > plan.base_version
    run.report(str(report.table().title), metadata, committed="relocate" if is_committed else None)


RELOCATE: PlanDeclaration[RelocateOptions, RelocationPlan, RelocationReport] = PlanDeclaration(
    name="relocate",
    description="Rewrites the metadata of tables that name an earlier location of the lakehouse or of its table root;"
    " copies no data.",
    options=RelocateOptions,
    plan=_plan_relocation,
    shown=_relocation_shown,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_relocate_reported,
    is_pooled=True,
    command=CommandSpec(working="reading the tables"),
)


def _undelete_reported(run: ReportingContext[UndeleteOptions], version: int) -> None:
    versions = run.options.versions
    run.report(f"version {version} brings back {versions}", {"versions": versions}, committed="undelete")


def _undelete_result(run: OperationContext[UndeleteOptions], _plan: None, version: int) -> CommandResult:
    versions = run.options.versions
    line = f"Brought back {versions}"
    return CommandResult(shown=Committed(version=version, line=line, details={"versions": versions}))


UNDELETE = direct(
    job="undelete",
    description="Brings expired versions back, as long as their purge has not begun.",
    options=UndeleteOptions,
    execute=lambda run: operations.undelete(run.lake, run.options.versions),
    report=_undelete_reported,
    command=CommandSpec(result=_undelete_result),
)
