"""The drop of an export, compaction of the tree and reconcile, each as a plan and its execution."""

from __future__ import annotations

from typing import Any

from trinitylake_ops import maintenance
from trinitylake_ops.maintenance import CompactionPlan, DropExportPlan, ReconcilePlan
from trinitylake_ops.operations.declared.exports import ExportNameOptions, compaction_figures
from trinitylake_ops.operations.declared.purge import ReconcileOptions, reconcile_figures
from trinitylake_ops.operations.operation import Running, report_figures
from trinitylake_ops.operations.planned import Approval, Planned
from trinitylake_ops.operations.shown import listing


class DropExportApproval(ExportNameOptions, Approval):
    """The export of the plan, and its digest."""


def _drop_shown(plan: DropExportPlan) -> dict[str, Any]:
    export = plan.export
    shown = {
        "export": export.name,
        "version": export.version,
        "level": export.level,
        "state": export.state,
        "created_at": None if export.created_at is None else f"{export.created_at:%Y-%m-%d %H:%M:%S}",
        "location": export.location,
    }
    return {**shown, "what_follows": listing(("what follows",), [(one,) for one in plan.consequences])}


def _drop(run: Running[Any], plan: DropExportPlan, digest: str | None) -> None:
    report = plan.execute(digest)
    said = f"export {plan.export.name} is no more, since version {report.version}"
    metadata = {"dropped": plan.export.name, **report_figures(report.to_dict())}
    run.report(said, metadata, committed="drop-export")


DROP_EXPORT: Planned[Any, DropExportPlan] = Planned(
    name="drop_export",
    plans="Shows what follows from the drop of an export",
    applies="Forgets the export of an approved plan, so that its version can expire.",
    options=ExportNameOptions,
    approval=DropExportApproval,
    plan=lambda run: maintenance.plan_drop_export(run.lake, run.options.name),
    shown=_drop_shown,
    apply=_drop,
    changes_exports=True,
)


def _compaction_shown(plan: CompactionPlan) -> dict[str, Any]:
    before = plan.before
    return {
        "nodes_written": plan.nodes_written,
        "bytes_written": plan.bytes_written,
        **{f"{name}_before": getattr(before, name) for name in ("nodes", "leaf_fill", "messages", "file_bytes")},
    }


def _compact(run: Running[Any], plan: CompactionPlan, digest: str | None) -> None:
    report = plan.execute(digest)
    run.report(str(report), compaction_figures(report), committed="compact" if report.has_changed else None)


COMPACT: Planned[Any, CompactionPlan] = Planned(
    name="compact",
    plans="Shows how the tree is, and what a compaction of it would write",
    applies="Flushes the tree's buffers and merges thin nodes, as an approved plan shows it.",
    options=None,
    approval=Approval,
    plan=lambda run: maintenance.plan_compact(run.lake),
    shown=_compaction_shown,
    apply=_compact,
    is_pooled=False,
)


class ReconcileApproval(ReconcileOptions, Approval):
    """The options of the plan, and its digest."""


def _reconcile_shown(plan: ReconcilePlan) -> dict[str, Any]:
    return reconcile_figures(plan)


def _reconcile(run: Running[Any], plan: ReconcilePlan, digest: str | None) -> None:
    report = plan.execute(digest)
    metadata = {**report_figures(report.to_dict()), **reconcile_figures(report)}
    run.report(str(report.table().title), metadata, committed=None if report.version is None else "reconcile")


RECONCILE_PLANNED: Planned[Any, ReconcilePlan] = Planned(
    name="reconcile",
    plans="Shows what a reconcile would put right after another program went back to older settings",
    applies="Puts exports and expirations right, as an approved plan shows it.",
    options=ReconcileOptions,
    approval=ReconcileApproval,
    plan=lambda run: maintenance.plan_reconcile(run.lake, acknowledge=run.options.acknowledge),
    shown=_reconcile_shown,
    apply=_reconcile,
    is_pooled=False,
    changes_exports=True,
)
