"""Deletes files, and removes obstacles to that: purge, orphans, reconcile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import Field

from trinitylake_ops import maintenance
from trinitylake_ops.maintenance import OrphanPlan, PurgePlan, ReconcilePlan, ReconcileReport
from trinitylake_ops.operations.operation import Operation, Running, report_figures
from trinitylake_ops.operations.options import AnyVersionsText, InventoryText, Options, age_field
from trinitylake_ops.operations.planned import Approval, BudgetOptions, Planned, end_deletion
from trinitylake_ops.operations.shown import listing


class PurgeOptions(Options):
    """The age of the versions to purge."""

    grace_days: float = age_field("Only what expired")


class PurgeApproval(PurgeOptions, BudgetOptions, Approval):
    """The options of the plan, its digest, and limits."""


class OrphansOptions(Options):
    """The files that count as left behind."""

    older_than_days: float = age_field("Only files last written")
    inventory: InventoryText = Field(
        default="",
        description="The manifest.json of an inventory of the storage (Amazon S3 Inventory) to take what stands from,"
        " instead of listing it; what came since the inventory is not looked at. It may be of the root, of the table"
        " root, or of both. Empty: list.",
    )


class OrphansApproval(OrphansOptions, BudgetOptions, Approval):
    """The options of the plan, its digest, and limits."""


def _plan_purge(run: Running[PurgeOptions]) -> PurgePlan:
    return maintenance.plan_purge(
        run.lake,
        timedelta(days=run.options.grace_days),
        budget=run.spending,
        progress=run.progress(),
        executor=run.executor(),
    )


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


def _purge(run: Running[Any], plan: PurgePlan, digest: str | None) -> None:
    end_deletion(run, "purge", plan.execute(digest, budget=run.spending, progress=run.progress()))


PURGE = Planned(
    name="purge",
    plans="Shows which expired versions can be purged, and what that frees",
    applies="Deletes the files that only the expired versions of an approved plan need. They cannot come back.",
    options=PurgeOptions,
    approval=PurgeApproval,
    plan=_plan_purge,
    shown=_purge_shown,
    apply=_purge,
)


def _plan_orphans(run: Running[OrphansOptions]) -> OrphanPlan:
    options = run.options
    return maintenance.plan_orphan_removal(
        run.lake,
        timedelta(days=options.older_than_days),
        options.inventory or None,
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


def _remove_orphans(run: Running[Any], plan: OrphanPlan, digest: str | None) -> None:
    end_deletion(run, "orphans", plan.execute(digest, budget=run.spending, progress=run.progress()))


ORPHANS = Planned(
    name="orphans",
    plans="Shows which files failed commits and aborted writes left behind",
    applies="Deletes the orphans of an approved plan.",
    options=OrphansOptions,
    approval=OrphansApproval,
    plan=_plan_orphans,
    shown=_orphans_shown,
    apply=_remove_orphans,
)


class ReconcileOptions(Options):
    """The versions that an operator has looked into."""

    acknowledge: AnyVersionsText = Field(
        default="",
        description="Versions such as 7 or 7,9-12 whose roots another program wrote out of order: verify tells them"
        " as past from then on. Empty: none.",
    )


def reconcile_figures(settled: ReconcilePlan | ReconcileReport) -> dict[str, Any]:
    """Return what a reconcile puts right."""
    return {
        "steps": ", ".join(map(str, settled.steps)),
        "restored_exports": ", ".join(settled.restored_exports),
        "dropped_exports": ", ".join(settled.dropped_exports),
        "live_again": settled.live_again,
        "acknowledged": settled.acknowledged,
    }


def _reconcile(run: Running[ReconcileOptions]) -> None:
    report = maintenance.reconcile(run.lake, acknowledge=run.options.acknowledge)
    metadata = {**report_figures(report.to_dict()), **reconcile_figures(report)}
    run.report(str(report.table().title), metadata, committed=None if report.version is None else "reconcile")


RECONCILE = Operation(
    job="reconcile",
    description="Puts exports and expirations right after another program went back to older settings.",
    step=_reconcile,
    options=ReconcileOptions,
    changes_exports=True,
)
