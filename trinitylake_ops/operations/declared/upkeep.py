"""The drop of an export, compaction of the tree, and reconcile."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trinitylake_ops import maintenance
from trinitylake_ops.maintenance import CompactionPlan, CompactionReport, DropExportPlan, ReconcilePlan, ReconcileReport
from trinitylake_ops.operations.declared.exports import ExportNameOptions
from trinitylake_ops.operations.operation import Running, report_figures
from trinitylake_ops.operations.options import VersionsText
from trinitylake_ops.operations.planned import Planned, PlannedOptions, UnattendedOptions
from trinitylake_ops.operations.shown import listing


class DropExportOptions(ExportNameOptions, PlannedOptions):
    """The export to drop."""


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


DROP_EXPORT: Planned[DropExportOptions, DropExportPlan] = Planned(
    name="drop_export",
    description="Forgets an export, so that its version can expire. What it copied to another root stays there.",
    options=DropExportOptions,
    plan=lambda run: maintenance.plan_drop_export(run.lake, run.options.name),
    shown=_drop_shown,
    apply=_drop,
    changes_exports=True,
)


def _compaction_figures(report: CompactionReport) -> dict[str, Any]:
    """Return the figures of a compaction of the tree, before and after."""
    shapes = {
        f"{figure}_{when}": getattr(shape, figure)
        for when, shape in (("before", report.before), ("after", report.after))
        for figure in ("nodes", "leaf_fill", "messages", "file_bytes")
    }
    return {**report_figures(report.to_dict()), **shapes}


def _compaction_shown(plan: CompactionPlan) -> dict[str, Any]:
    before = plan.before
    return {
        "nodes_written": plan.nodes_written,
        "bytes_written": plan.bytes_written,
        **{f"{name}_before": getattr(before, name) for name in ("nodes", "leaf_fill", "messages", "file_bytes")},
    }


def _compact(run: Running[Any], plan: CompactionPlan, digest: str | None) -> None:
    report = plan.execute(digest)
    run.report(str(report), _compaction_figures(report), committed="compact" if report.has_changed else None)


COMPACT: Planned[UnattendedOptions, CompactionPlan] = Planned(
    name="compact",
    description="Flushes the tree's buffers and merges thin nodes, as a version that changes no object.",
    options=UnattendedOptions,
    plan=lambda run: maintenance.plan_compact(run.lake),
    shown=_compaction_shown,
    apply=_compact,
    is_pooled=False,
)


class ReconcileOptions(UnattendedOptions):
    """The versions that an operator has inspected."""

    acknowledge: VersionsText | None = Field(
        default=None,
        description="Versions such as 7 or 7,9-12 whose roots another program wrote out of order: verify reports them"
        " as past from then on. Null: none.",
    )


def _reconcile_shown(settled: ReconcilePlan | ReconcileReport) -> dict[str, Any]:
    return {
        "steps": ", ".join(map(str, settled.steps)),
        "restored_exports": ", ".join(settled.restored_exports),
        "dropped_exports": ", ".join(settled.dropped_exports),
        "live_again": settled.live_again,
        "acknowledged": settled.acknowledged,
    }


def _reconcile(run: Running[Any], plan: ReconcilePlan, digest: str | None) -> None:
    report = plan.execute(digest)
    metadata = {**report_figures(report.to_dict()), **_reconcile_shown(report)}
    run.report(str(report.table().title), metadata, committed=None if report.version is None else "reconcile")


RECONCILE: Planned[ReconcileOptions, ReconcilePlan] = Planned(
    name="reconcile",
    description="Corrects exports and expirations after another program returned to older settings.",
    options=ReconcileOptions,
    plan=lambda run: maintenance.plan_reconcile(run.lake, acknowledge=run.options.acknowledge or ""),
    shown=_reconcile_shown,
    apply=_reconcile,
    is_pooled=False,
    changes_exports=True,
)
