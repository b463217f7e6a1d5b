"""Deleting files as Dagster ops, and settling what blocks it: purge, orphans, reconcile."""

from datetime import timedelta
from typing import Any

import dagster as dg

from trinitylake_ops import maintenance
from trinitylake_ops.dagster_plugin.metadata import markdown_table
from trinitylake_ops.dagster_plugin.ops import log_version, logged_progress, operating, report_metadata
from trinitylake_ops.dagster_plugin.plans import (
    DELETES_POOL,
    BudgetConfig,
    age_field,
    check_pool,
    digest_field,
    end_deletion,
    show_plan,
)
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.maintenance import OrphanPlan, PurgePlan


class PurgeConfig(dg.Config):
    """What is due."""

    grace_days: float = age_field("Only what expired")


class PurgeApplyConfig(PurgeConfig, BudgetConfig):
    """The options of the plan, its digest, and limits."""

    approved_digest: str = digest_field("purge_plan")


class OrphansConfig(dg.Config):
    """What counts as left behind."""

    older_than_days: float = age_field("Only files last written")


class OrphansApplyConfig(OrphansConfig, BudgetConfig):
    """The options of the plan, its digest, and limits."""

    approved_digest: str = digest_field("orphans_plan")


@dg.op(description="Shows which expired versions can be purged, and what that frees; reads only.")
def run_purge_plan(context: dg.OpExecutionContext, config: PurgeConfig, lakehouse: TrinityLakeResource) -> None:
    """Plan a purge."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_purge(lake, timedelta(days=config.grace_days), progress=logged_progress(context))
        show_plan(context, plan, purge_shown(plan), apply_op="run_purge_apply", options=config, is_empty=plan.is_empty)


def purge_shown(plan: PurgePlan) -> dict[str, Any]:
    """Return what a plan of a purge shows."""
    rows = [
        (batch.versions, batch.state, "now" if batch.is_due else f"{batch.purgeable_at:%Y-%m-%d %H:%M:%S}")
        for batch in plan.batches
    ]
    return {
        "versions": plan.versions,
        "files": plan.files,
        "bytes": plan.bytes,
        "still_needed": plan.still_needed,
        "plan": markdown_table(("versions", "state", "purge from (UTC)"), rows),
    }


@dg.op(
    pool=DELETES_POOL,
    description="Deletes the files that only the expired versions of an approved plan need. They cannot come back.",
)
def run_purge_apply(context: dg.OpExecutionContext, config: PurgeApplyConfig, lakehouse: TrinityLakeResource) -> None:
    """Carry out the plan of a purge."""
    with operating(context, lakehouse) as lake:
        check_pool(context, DELETES_POOL)
        progress = logged_progress(context)
        plan = maintenance.plan_purge(lake, timedelta(days=config.grace_days), progress=progress)
        report = plan.execute(config.approved_digest, budget=config.budget(), progress=progress)
        context.log.info("%s", report.table().title)
        end_deletion(context, lake, "purge", report)


@dg.op(description="Shows which files failed commits and aborted writes left behind; reads only.")
def run_orphans_plan(context: dg.OpExecutionContext, config: OrphansConfig, lakehouse: TrinityLakeResource) -> None:
    """Plan the removal of orphans."""
    with operating(context, lakehouse) as lake:
        older_than = timedelta(days=config.older_than_days)
        plan = maintenance.plan_orphan_removal(lake, older_than, progress=logged_progress(context))
        show_plan(
            context, plan, orphans_shown(plan), apply_op="run_orphans_apply", options=config, is_empty=plan.is_empty
        )


def orphans_shown(plan: OrphanPlan) -> dict[str, Any]:
    """Return what a plan to remove orphans shows."""
    return {
        "files": len(plan.paths),
        "bytes": plan.bytes,
        "unowned_files": plan.unowned_files,
        "unowned_bytes": plan.unowned_bytes,
        "files_by_kind": markdown_table(("kind", "files"), plan.files.items()),
        "plan": markdown_table(("path",), [(path,) for path in plan.paths]),
    }


@dg.op(pool=DELETES_POOL, description="Deletes the orphans of an approved plan.")
def run_orphans_apply(
    context: dg.OpExecutionContext, config: OrphansApplyConfig, lakehouse: TrinityLakeResource
) -> None:
    """Carry out the plan of a removal of orphans."""
    with operating(context, lakehouse) as lake:
        check_pool(context, DELETES_POOL)
        progress = logged_progress(context)
        older_than = timedelta(days=config.older_than_days)
        plan = maintenance.plan_orphan_removal(lake, older_than, progress=progress)
        report = plan.execute(config.approved_digest, budget=config.budget(), progress=progress)
        context.log.info("%s", report.table().title)
        end_deletion(context, lake, "orphans", report)


@dg.op(description="Puts exports and expirations right after another program went back to older settings.")
def run_reconcile(context: dg.OpExecutionContext, lakehouse: TrinityLakeResource) -> None:
    """Settle what another program did to the settings of the lakehouse."""
    with operating(context, lakehouse) as lake:
        report = maintenance.reconcile(lake)
        context.log.info("%s", report.table().title)
        metadata = {
            **report_metadata(report.to_dict()),
            "steps": ", ".join(map(str, report.steps)),
            "restored_exports": ", ".join(report.restored_exports),
            "dropped_exports": ", ".join(report.dropped_exports),
        }
        if report.version is not None:
            log_version(context, lake, "reconcile", metadata)
        context.add_output_metadata(metadata)
